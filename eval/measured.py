"""What policies and rules say at every step of labelled traces, and what comes of it.

Labels say what the trial answers of generate would have been, so that a rule is measured once, as
if it never stopped, and every threshold is then a comparison of arrays.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from modeling_ospruner.configuration_ospruner import PriceRange
from modeling_ospruner.policy_ospruner import price_logits, price_places
from ospruner.bases import input_device
from ospruner.engines.interface import top_entropy
from ospruner.progress import Progress, silent
from ospruner.rules.families import Family, StopRule
from ospruner.rules.signals import Same, StepEnd, TrialAnswer

from .compute import Compute
from .methods import PolicyUse
from .replay import Outcome, replay_at
from .table import BoolArray, FloatArray, TraceTable

PIECE = 1024
"""Tokens that a pass of the base takes at once: all logits of a long trace would fill gigabytes."""

COUNT = 64
"""Thresholds of each method, the two ends included, where its signal takes as many values."""

_ANSWER_COLUMNS = [
    *("forced_answers", "forced_answer_tokens"),
    *("forced_logprob", "forced_entropy", "forced_answer_entropy"),
]


@dataclass(frozen=True, eq=False)
class Predicted:
    """What a policy says at the step ends of N labelled traces of up to T steps."""

    outputs: npt.NDArray[np.float32]  # (N, T, K) float32 of its head; 0 on padding
    mask: BoolArray  # (N, T) true on real steps
    prices: PriceRange | None  # that the policy knows; None with the head "fixed"
    price: float  # its own, of a token
    # (N, T) operations that deciding takes up to each step; None where not counted
    flops: FloatArray | None = None
    # (N, T) tokens that it has read where a trace stops at each step, for a policy that is a
    # model of its own (FlashThink); None for a tail on the base
    read_tokens: npt.NDArray[Any] | None = None

    def probabilities(self, price: float | None = None) -> npt.NDArray[np.float32]:
        """(N, T) stop probabilities, 0 on padding. Replay does not read the last step's.

        They are those at a price of a token, None for the policy's own; raises ValueError for one
        that it does not know.
        """
        outputs = torch.from_numpy(self.outputs)
        logits = outputs[..., 0]
        if self.prices is not None:
            price = self.price if price is None else price
            self.prices.check("predict", price)
            logits = price_logits(outputs, torch.tensor(self.prices.place(price)))
        found: npt.NDArray[np.float32] = torch.sigmoid(logits).numpy()
        return np.where(self.mask, found, np.float32(0.0))

    @cached_property
    def indifference(self) -> FloatArray | None:
        """(N, T) prices of indifference, `StopRecord.prices`; None with the head "fixed"."""
        if self.prices is None:
            return None
        places = price_places(torch.from_numpy(self.outputs)).numpy()
        return np.vectorize(self.prices.price_at, otypes=[np.float64])(places)


def not_at_hand(*_: Any) -> Any:
    """What traces without their base answer; raises ValueError."""
    raise ValueError("the base of these traces is not at hand, and its tokenizer: ask nothing anew")


@dataclass(frozen=True, eq=False)
class Split:
    """Labelled traces, what policies and rules need to read them, and what these have said.

    Of a file of signals there is no dataset, and no base: nothing can be asked anew.
    """

    dataset: Any  # the traces
    table: TraceTable  # the same as arrays; charged where `compute` is given (`Compute.charge`)
    suffix_tokens: int = 0  # tokens forced before an answer (`TokenFormat.forced_suffix`)
    # Text of token ids, for rules that read the thinking
    decode: Callable[[list[int]], str] = not_at_hand
    compute: Compute | None = None  # what is computed; None counts no operations
    same: Same = operator.eq  # whether two answers mean the same (`Task.same`)
    # Gives the (N, T) mean entropies of the thinking up to each step, which labels do not keep
    # (`thinking_entropies`)
    thinking_entropy: Callable[[], FloatArray] = not_at_hand
    said: Callable[[PolicyUse], Predicted] = not_at_hand  # what a policy says at each step
    # (N,) `text_key` of each trace's problem, where there is no dataset
    problems: Sequence[str] = ()
    # What each policy's head has said, by its path
    policies: dict[str, Predicted] = field(default_factory=dict)
    # What each rule has measured, by `recorded.key_of`
    rules: dict[str, Measured] = field(default_factory=dict)
    # What the full traces of other labels of these problems come to, by their name
    beside: dict[str, Outcome] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Measured:
    """What a rule measures on N traces of up to T steps, as if it never stopped."""

    signals: FloatArray  # (N, T); NaN where it measures nothing, at each trace's end and on padding
    # (N, T) tokens of all trial answers up to each step, those forced before them included:
    # also of the one at which it stops, as generate decodes the answer anew
    probe_tokens: FloatArray
    probe_flops: FloatArray  # (N, T) operations of the same; 0 where they are not counted

    def outcome(self, table: TraceTable, rule: StopRule) -> Outcome:
        """What the rule of a threshold does."""
        reached = rule.family.reached(self.signals, rule.threshold)
        stops = np.where(reached.any(axis=1), reached.argmax(axis=1), table.last)
        return replay_at(table, stops, self.probe_tokens, self.probe_flops)


def step_ends(
    split: Split, row: int, answers: dict[str, list[Any]], spent: FloatArray
) -> Iterator[StepEnd]:
    """The step ends of a labelled trace, but for the natural end, which needs no decision.

    A transition word is one that the trace itself went on with. Generate looks at the most likely
    next token instead, before it is sampled: under greedy decoding the two are the same.

    Args:
        split: the traces.
        row: the trace's number.
        answers: the columns of trial answers, of all traces.
        spent: (2,) tokens and operations, to which those of its trial answers are added.
    """
    trace = cache(lambda: list(split.dataset[row]["trace_ids"]))

    def text(start: int, end: int) -> str:
        return split.decode(trace()[start:end])

    def trial_answer(step: int, end: int, max_tokens: int) -> TrialAnswer:
        """The answer that was forced here when labelling, cut to so many tokens."""
        text, whole_tokens, *numbers = (answers[name][row][step] for name in _ANSWER_COLUMNS)
        spent[0] += split.suffix_tokens + (tokens := min(whole_tokens, max_tokens))
        if split.compute is not None:
            spent[1] += split.compute.trial(row, end, tokens)
        complete = bool(text) and tokens == whole_tokens
        logprob, entropy, whole = (math.nan if x is None else x for x in numbers)
        return TrialAnswer(
            ids=(0,) * tokens,  # no rule reads which tokens they are
            ended="closed" if complete else "length",
            logprobs=() if math.isnan(logprob) else (logprob,) * tokens,
            entropy=entropy,
            text=text if complete else "",
            whole_entropy=whole,
        )

    lengths, before = split.table.lengths[row].tolist(), 0
    for step, end in enumerate(lengths[: split.table.last[row]]):
        yield StepEnd(
            row=row,
            step=step,
            thinking_tokens=end,
            may_stop=True,
            trial_answer=partial(trial_answer, step, end),
            next_text=partial(text, end, end + 1),
            step_text=partial(text, before, end),
            thinking_entropy=partial(lambda at: float(split.thinking_entropy()[row, at]), step),
        )
        before = end


def measure(split: Split, family: Family, rule: StopRule | None = None) -> Measured:
    """What a family, or a rule of it with settings of its own, measures at every step of traces.

    Raises:
        ValueError: the labels, or what stands beside them, lack what it reads.
    """
    table, rule = split.table, rule or family(family.never, same=split.same)
    asks = "trial_answer" in family.asks
    answers = split.dataset.select_columns(_ANSWER_COLUMNS)[:] if asks else {}
    if family.reads and all(x is None for row in answers[family.reads] for x in row):
        raise ValueError(
            f"{family.reads} is null: these labels are of a version that did not keep it; label "
            f"again to replay {family.method}"
        )
    signals = np.full(table.mask.shape, np.nan)
    tokens, flops = np.zeros(table.mask.shape), np.zeros(table.mask.shape)
    for n in range(len(table)):
        spent = np.zeros(2)
        for step, signal in enumerate(rule.measure(step_ends(split, n, answers, spent))):
            signals[n, step] = signal
            tokens[n, step:], flops[n, step:] = spent
    return Measured(signals, tokens, flops)


def family_thresholds(family: Family, signals: FloatArray, count: int = COUNT) -> tuple[float, ...]:
    """Thresholds from "at once" to "never", through values that the signal takes on these traces.

    They are evenly spread by rank, since a grid written down by hand suits the scale of one signal
    and misses that of another. Equal values count once, so that a signal that is mostly saturated
    is still resolved; there are fewer thresholds where it takes fewer values. NaN is no signal.
    """
    different = np.unique(signals[(signals > family.low) & (signals < family.high)])
    places = np.linspace(0, len(different) - 1, min(count - 2, len(different))).round().astype(int)
    values = {*different[places].tolist(), family.at_once, family.never}
    return tuple(sorted(values, reverse=family.never < family.at_once))


@torch.no_grad()
def thinking_entropies(
    base: PreTrainedModel, dataset: Any, table: TraceTable, progress: Progress = silent
) -> FloatArray:
    """(N, T) the mean entropy at which each trace's tokens were drawn, up to each step.

    How sure the base was of its thinking is not in the labels; it takes a pass over each trace.
    In nats, each over the ENTROPY_TOKENS most likely tokens at temperature 1, as `StepEnd` gives it
    in generate. NaN on padding. `progress` is called with phase "thinking".
    """
    found = np.full(table.mask.shape, np.nan)
    device = input_device(base)
    for n, row in enumerate(dataset.select_columns(["prompt_ids", "trace_ids"])):
        prompt, trace = row["prompt_ids"], row["trace_ids"]
        ids = torch.tensor([*prompt, *trace[:-1]], device=device)[None]
        cache = DynamicCache(config=base.config.get_text_config())
        recurrent = any(isinstance(layer, LinearAttentionLayer) for layer in cache.layers)
        entropies: list[float] = []
        for piece in ids.split(ids.shape[1] if recurrent else PIECE, dim=1):
            logits = base(input_ids=piece, past_key_values=cache, use_cache=True).logits[0]
            entropies += top_entropy(logits).tolist()
        # The logits after the prompt's last token drew the first one of the thinking.
        sums = np.cumsum(entropies[len(prompt) - 1 :])
        ends = table.lengths[n, : table.num_steps[n]]
        found[n, : len(ends)] = sums[ends - 1] / ends
        progress("thinking", n + 1, len(table))
    return found
