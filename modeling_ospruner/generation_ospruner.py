"""Stopping inside `generate`: its settings, its record, its draws, and the hook.

The hook is a logits processor beside a forward pre-hook on the base's layer L-n. The decision
after a step's last token and the first forced token fall into the same decode step. Until its
stop, every row is what plain generate would have written.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Literal

import torch
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria
from transformers.generation import GenerationMode

from .capture_ospruner import Capture
from .reasoning_format import AnswerMode, BoundaryState, BoxState, TokenFormat

_MASK64 = (1 << 64) - 1


def mix64(value: int) -> int:
    """The finaliser of splitmix64 (Steele et al., 2014): a 64-bit integer from any integer."""
    z = (value + 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def uniform(seed: int, sample_index: int, step: int) -> float:
    """The draw in [0, 1) that decides one step of one sample: a row stops if it is below pi.

    It depends on nothing else, so that a row's decisions are the same in any batch and engine.

    Args:
        seed: the policy's seed.
        sample_index: the row's index among all rows of the run.
        step: the step's index, from 0.
    """
    return (
        mix64(mix64(mix64(seed) ^ (sample_index & _MASK64)) ^ (step & _MASK64)) >> 11
    ) * 2.0**-53


@dataclass(frozen=True)
class StopPolicyConfig:
    """How generate uses the policy: `stop_policy=True`, a dict of these fields, or this.

    Attributes:
        mode: "sample" stops with probability pi (the paper), "threshold" where pi reaches the
            threshold. None: the policy's default.
        threshold: in [0, 1]. None: the policy's default.
        seed: of the draws in mode "sample".
        first_sample_index: the index of the call's first row, for runs over several calls.
        min_thinking_tokens: no stop before so many.
        max_thinking_tokens: stop at the first step end with at least so many. None: no budget.
        answer: "forced" forces the closing and the box prefix, also after a natural end; "free"
            forces the closing only.
        max_answer_tokens: cap on the tokens after what is forced. None: generate's own limits.
        answer_do_sample: whether forced answers are sampled as the trace is; else greedy.
    """

    mode: Literal["sample", "threshold"] | None = None
    threshold: float | None = None
    seed: int = 0
    first_sample_index: int = 0
    min_thinking_tokens: int = 0
    max_thinking_tokens: int | None = None
    answer: AnswerMode = "forced"
    max_answer_tokens: int | None = None
    answer_do_sample: bool = False

    def __post_init__(self) -> None:
        if self.mode not in (None, "sample", "threshold"):
            raise ValueError(
                f"stop_policy: mode is {self.mode!r}; it must be 'sample' or 'threshold'"
            )
        if self.answer not in ("forced", "free"):
            raise ValueError(
                f"stop_policy: answer is {self.answer!r}; it must be 'forced' or 'free'"
            )
        threshold = self.threshold
        if threshold is not None and not (math.isfinite(threshold) and 0 <= threshold <= 1):
            raise ValueError(f"stop_policy: threshold is {threshold}; it must lie in [0, 1]")
        least = {"min_thinking_tokens": 0, "max_thinking_tokens": 1, "max_answer_tokens": 1}
        for name, low in least.items():
            value = vars(self)[name]
            if value is not None and value < low:
                raise ValueError(f"stop_policy: {name} is {value}; it must be {low} or more")

    @classmethod
    def of(cls, stop_policy: bool | Mapping[str, Any] | StopPolicyConfig) -> StopPolicyConfig:
        """What the argument `stop_policy` of generate means.

        Raises:
            TypeError, ValueError: it has another type, or unknown keys.
        """
        if isinstance(stop_policy, StopPolicyConfig):
            return stop_policy
        if isinstance(stop_policy, Mapping):
            known = [one.name for one in fields(cls)]
            if unknown := sorted(set(stop_policy) - set(known)):
                raise ValueError(f"stop_policy has no {unknown}; its keys are {known}")
            return cls(**stop_policy)
        if stop_policy is True:
            return cls()
        raise TypeError(
            f"stop_policy is {stop_policy!r}; it must be True, False, a dict or a StopPolicyConfig"
        )


@dataclass
class StopRecord:
    """What happened to one row.

    Attributes:
        step_ends: L_i of each step end that generate passed, in thinking tokens.
        probabilities: pi_i at each; NaN where the policy gave none.
        thinking_tokens: tokens before the end marker, or before what was forced.
        reason: "policy", "budget" (`max_thinking_tokens`), "natural", or "length" (generate's
            own limit came first).
        nan_steps: steps at which the policy gave NaN, which means "continue".
    """

    step_ends: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    thinking_tokens: int = 0
    reason: Literal["policy", "budget", "natural", "length"] = "length"
    nan_steps: int = 0


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

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
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
            elif row.phase is _Phase.THINKING and token in self.eos_ids:
                if token != self.token_format.think_end_id:
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
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any
    ) -> torch.BoolTensor:
        """Which rows (B,) end with their last token."""
        done = torch.tensor(self.hook.finish(input_ids), device=input_ids.device)
        return torch.BoolTensor(done) if done.device.type == "cpu" else done  # type: ignore[return-value]


def refuse_unsupported(config: GenerationConfig, arguments: Mapping[str, Any]) -> None:
    """Refuses what the hook would silently do wrong.

    Args:
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
