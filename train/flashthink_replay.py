"""FlashThink in replay: a verifier's verdicts on stored traces, and what reading them costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ospruner.eval.policies import PolicyUse
from ospruner.eval.replay import replay
from ospruner.eval.results import Rule
from ospruner.eval.schema import LabelSettings
from ospruner.eval.table import TraceTable

from .flashthink import Verifier, tokens_read, verifier_traces
from .packing import LabelledTraces
from .policies import predict
from .progress import Progress

__all__ = ["replay_verifiers"]


def replay_verifiers(
    uses: Sequence[PolicyUse],
    traces: Dataset,
    table: TraceTable,
    base_tokenizer: PreTrainedTokenizerBase,
    settings: LabelSettings,
    progress: Progress,
) -> tuple[list[Rule], list[npt.NDArray[np.float32]]]:
    """Each use of a verifier as a rule; all that it read until it stopped is charged.

    Args:
        uses: verifiers with their thresholds; one used at several runs once.
        traces: the labelled traces.
        table: the same as arrays.
        base_tokenizer: of the model that wrote them.
        settings: how they were labelled.
        progress: called with phase "verifiers".

    Returns:
        The rules, and the probabilities (N, T) that each goes by.
    """
    rules: list[Rule] = []
    probabilities = []
    for number, path in enumerate(paths := list(dict.fromkeys(use.path for use in uses))):
        progress("verifiers", number, len(paths))
        verifier = Verifier.load(path, settings)
        tokenizer = AutoTokenizer.from_pretrained(verifier.config.base_model_name_or_path)
        limit = verifier.base.config.get_text_config().max_position_embeddings
        judged = verifier_traces(traces, base_tokenizer, tokenizer, limit)
        pi, charged = predict(verifier, judged), _charged(judged)  # (N, T)
        for use in (use for use in uses if use.path == path):
            outcome = replay(table, pi, use.mode, use.threshold)
            # What replay expects of a column of costs is what the stops come to in it.
            costs = replay(charged, pi, use.mode, use.threshold).answer_tokens
            outcome = dataclasses.replace(outcome, probe_tokens=costs)
            rules.append(Rule(use.method, outcome, use.parameter, use.parameter_name))
            probabilities.append(pi)
        progress("verifiers", number + 1, len(paths))
    return rules, probabilities


def _charged(judged: LabelledTraces) -> TraceTable:
    """The labels with the tokens read by each step in the place of the answers' tokens.

    At its natural end a trace needs no verdict: the verifier has read to the step before.
    """
    table, read = judged.table, tokens_read(judged)
    rows = np.arange(len(table))
    read[rows, table.last] = np.where(table.last > 0, read[rows, table.last - 1], 0)
    return dataclasses.replace(table, answer_tokens=read)
