"""Stopping inside `generate`: the hook.

It is a logits processor beside a forward pre-hook on the base's layer L-n. The decision after a
step's last token and the first forced token fall into the same decode step. Until its stop, every
row is what plain generate would have written.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.configuration_utils import GenerationMode

from .capture_ospruner import Capture
from .draws_ospruner import mix64, uniform
from .policy_ospruner import StoppingPolicy
from .reasoning_format import BoundaryState, BoxState, TokenFormat
from .settings_ospruner import StopPolicyConfig, StopRecord

__all__ = [
    "AnswerEnd",
    "StopHook",
    "StopPolicyConfig",
    "StopRecord",
    "generate_pruned",
    "mix64",
    "refuse_unsupported",
    "uniform",
]


class _Phase(Enum):
    THINKING = 1
    FORCING = 2
    ANSWER = 3
    DONE = 4


class _Row:
    """One row of the batch while it is generated."""

    def __init__(self, boundary: BoundaryState, thinking: bool) -> None:
        self.phase = _Phase.THINKING if thinking else _Phase.DONE
        self.record = StopRecord(reason="length" if thinking else "natural")
        self.boundary = boundary
        self.forced: deque[int] = deque()
        self.box: BoxState | None = None
        self.answer_tokens = 0


class StopHook(LogitsProcessor):
    """Decides at step ends and forces what follows; see the module.

    Args:
        settings: with mode and threshold filled in.
        token_format: the base's way of thinking.
        capture: gives the stop probabilities of the last token.
        eos_ids: ids that end a text.
    """

    def __init__(
        self,
        settings: StopPolicyConfig,
        token_format: TokenFormat,
        capture: Capture,
        eos_ids: Sequence[int],
    ) -> None:
        self.settings = settings
        self.token_format = token_format
        self.capture = capture
        self.eos_ids = frozenset(eos_ids)
        self.rows: list[_Row] = []
        self.prompt_columns = 0
        self._warned = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """One decode step: looks at each row's last token (B, S), and shapes its scores (B, V)."""
        if not self.rows:
            self._start(input_ids)
        else:
            self._advance(input_ids)
        forced = {
            i: row.forced[0] for i, row in enumerate(self.rows) if row.phase is _Phase.FORCING
        }
        greedy = (
            []
            if self.settings.answer_do_sample
            else [i for i, row in enumerate(self.rows) if row.phase is _Phase.ANSWER and row.box]
        )
        if not forced and not greedy:
            return scores
        chosen = {**forced, **{i: int(scores[i].argmax()) for i in greedy}}
        rows = torch.tensor(list(chosen), device=scores.device)
        scores = scores.clone()
        scores[rows] = -torch.inf
        scores[rows, torch.tensor(list(chosen.values()), device=scores.device)] = 0.0
        return scores

    def _start(self, input_ids: torch.Tensor) -> None:
        pads = self.capture.left_pads()
        self.prompt_columns = input_ids.shape[1]
        for ids, pad in zip(input_ids.tolist(), pads, strict=True):
            thinking = self.token_format.in_thinking(ids[pad:])
            self.rows.append(_Row(self.token_format.boundary_state(), thinking))
        self._release()

    def _advance(self, input_ids: torch.Tensor) -> None:
        length = input_ids.shape[1] - self.prompt_columns  # tokens generated so far
        at_boundary = []
        for i, token in enumerate(input_ids[:, -1].tolist()):
            row = self.rows[i]
            if row.phase is not _Phase.THINKING:
                continue
            if token == self.token_format.think_end_id:
                row.record.reason = "natural"
                self._close(row, natural=True)
                continue
            row.record.thinking_tokens = length
            if row.boundary.push(token):
                at_boundary.append(i)
        if at_boundary:
            probabilities = self.capture.probabilities().tolist()  # (B,)
            for i in at_boundary:
                self._decide(i, length, probabilities[i])
        self._release()

    def _decide(self, i: int, length: int, probability: float) -> None:
        settings, row = self.settings, self.rows[i]
        step = len(row.record.step_ends)
        row.record.step_ends.append(length)
        row.record.probabilities.append(probability)
        if math.isnan(probability):
            row.record.nan_steps += 1
            if not self._warned:
                warnings.warn(
                    "the stopping policy gave NaN: rows continue. Its weights, or the base's "
                    "hidden states, are broken; StopRecord.nan_steps counts the steps",
                    stacklevel=2,
                )
                self._warned = True
            stop = False
        elif settings.mode == "threshold":
            stop = settings.threshold is not None and probability >= settings.threshold
        else:
            stop = uniform(settings.seed, settings.first_sample_index + i, step) < probability
        budget = settings.max_thinking_tokens
        if stop and length >= settings.min_thinking_tokens:
            row.record.reason = "policy"
        elif budget is not None and length >= budget:
            row.record.reason = "budget"
        else:
            return
        self._close(row, natural=False)

    def _close(self, row: _Row, natural: bool) -> None:
        """Turns a row to its answer; after a natural end, the model has written the marker."""
        suffix = self.token_format.forced_suffix(self.settings.answer)
        if natural:
            suffix = suffix[1:] if self.settings.answer == "forced" else []
        row.forced.extend(suffix)
        row.phase = _Phase.FORCING if suffix else _Phase.ANSWER
        if self.settings.answer == "forced":
            row.box = self.token_format.box_state()

    def finish(self, input_ids: torch.Tensor) -> list[bool]:
        """After a token was chosen: which rows have completed their answer."""
        done = []
        for row, token in zip(self.rows, input_ids[:, -1].tolist(), strict=True):
            if row.phase is _Phase.FORCING:
                row.forced.popleft()
                if not row.forced:
                    row.phase = _Phase.ANSWER
            elif row.phase is _Phase.ANSWER:
                row.answer_tokens += 1
                closed = row.box is not None and row.box.push(token)
                if (
                    closed
                    or token in self.eos_ids
                    or (row.answer_tokens == self.settings.max_answer_tokens)
                ):
                    row.phase = _Phase.DONE
                    done.append(True)
                    continue
            elif row.phase is _Phase.THINKING and token in self.eos_ids - {
                self.token_format.think_end_id
            }:
                row.record.reason = "natural"
                row.phase = _Phase.DONE
            done.append(False)
        return done

    def records(self) -> list[StopRecord]:
        """One record a row, after generate has ended."""
        return [row.record for row in self.rows]

    def _release(self) -> None:
        if not any(row.phase is _Phase.THINKING for row in self.rows):
            self.capture.close()


class AnswerEnd(StoppingCriteria):
    """Ends a row as soon as its answer is complete."""

    def __init__(self, hook: StopHook) -> None:
        self.hook = hook

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        """Which rows (B,) end with their last token."""
        return torch.tensor(self.hook.finish(input_ids), device=input_ids.device)


def generate_pruned(
    base: Any,
    policy: StoppingPolicy,
    token_format: TokenFormat,
    settings: StopPolicyConfig,
    inputs: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[Any, list[StopRecord]]:
    """`base.generate` with the hook in it.

    Args:
        base: the causal LM that generates (a `PreTrainedModel` with `generate`).
        policy: its policy.
        token_format: the base's way of thinking.
        settings: with mode and threshold filled in.
        inputs: prompt ids (B, S), left-padded; or pass `input_ids`.
        kwargs: generate's own arguments.

    Returns:
        What generate returns (an output object holds the records as `stop`, too), and one
        record a row.

    Raises:
        ValueError: the decoding cannot be combined with a stop policy, or a prompt is empty.
    """
    given = kwargs.pop("generation_config", None)
    config = GenerationMixin._prepare_generation_config(base, given, **kwargs)[0]
    refuse_unsupported(inputs, config, kwargs)
    eos = config.eos_token_id
    processors = LogitsProcessorList(kwargs.pop("logits_processor", None) or [])
    criteria = StoppingCriteriaList(kwargs.pop("stopping_criteria", None) or [])
    with Capture(base, policy) as capture:
        eos_ids = [eos] if isinstance(eos, int) else list(eos)
        hook = StopHook(settings, token_format, capture, eos_ids)
        output = base.generate(
            inputs,
            generation_config=given,
            logits_processor=LogitsProcessorList([*processors, hook]),
            stopping_criteria=StoppingCriteriaList([*criteria, AnswerEnd(hook)]),
            # A hook added after compilation would be skipped in silence.
            disable_compile=True,
            **kwargs,
        )
    records = hook.records()
    if not isinstance(output, torch.Tensor):
        output["stop"] = records
    return output, records


def refuse_unsupported(
    inputs: torch.Tensor | None, config: GenerationConfig, arguments: Mapping[str, Any]
) -> None:
    """Refuses what the hook would silently do wrong.

    Args:
        inputs: generate's first argument.
        config: the generation config with generate's keyword arguments applied.
        arguments: all keyword arguments of generate.

    Raises:
        ValueError: naming the option and what to do.
    """
    mode = config.get_generation_mode(arguments.get("assistant_model"))
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(
            f"stop_policy works with greedy decoding and sampling, not with {mode.value}: leave "
            "out num_beams, assistant_model, prompt_lookup_num_tokens and the like, or pass "
            "stop_policy=False"
        )
    if config.use_cache is False:
        raise ValueError("use_cache is False; stop_policy needs the cache: leave use_cache out")
    if arguments.get("custom_generate") is not None:
        raise ValueError("custom_generate and stop_policy exclude each other; leave one out")
    for name in ("inputs_embeds", "position_ids"):
        if arguments.get(name) is not None:
            raise ValueError(f"{name} and stop_policy exclude each other: pass input_ids alone")
    input_ids = arguments.get("input_ids") if inputs is None else inputs
    if input_ids is None or input_ids.numel() == 0:
        raise ValueError("the prompt is empty: stop_policy needs input_ids with a prompt")
    mask = arguments.get("attention_mask")
    if mask is not None and (empty := (mask.sum(-1) == 0).nonzero().flatten().tolist()):
        raise ValueError(f"the prompts of rows {empty} are empty: their attention_mask is all 0")
    cache = arguments.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError(
            "past_key_values holds tokens that the stopping policy has not seen; pass the whole "
            "text as input_ids without them"
        )
    if config.eos_token_id is None:
        raise ValueError(
            "the generation config has no eos_token_id, so rows cannot end by themselves; set it "
            "in base.generation_config"
        )
