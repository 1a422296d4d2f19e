r"""How a model family writes its thinking, and where its steps end, as token ids.

`ReasoningFormat` holds a family's literals; `TokenFormat` is a format compiled for one tokenizer.
Step ends are a property of token ids, decided by `BoundaryState` alone: in labels, in training,
in generate and in every engine. Text is never tokenised again.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from .format_description import describe
from .model_turn import ModelTurn, ThinkingSpan, model_turn
from .token_states import VISIBLE, VISIBLE_AFTER, BoundaryState, BoxState, Channels, kind_of

__all__ = [
    "DEEPSEEK_R1",
    "HARMONY",
    "PRESETS",
    "QWEN3",
    "AnswerMode",
    "BoundaryState",
    "BoxState",
    "ReasoningFormat",
    "ThinkingSpan",
    "TokenFormat",
    "guess",
]

AnswerMode = Literal["forced", "free"]

_BOXED = "Please reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class ReasoningFormat:
    r"""The literals of a family's thinking. Labels and policies are bound to them.

    Attributes:
        name: what the format is called.
        user_instruction: appended to the user's problem; it asks for a boxed answer.
        think_end: the marker with which the model ends its thinking; one token.
        closing: what leads from the thinking to the answer; begins with `think_end`.
        box_prefix: put before a forced answer. It opens one brace, which the answer closes.
        think_start: what opens the thinking, written by the prompt or by the model; empty where
            nothing does. An answer must not write it again.
    """

    name: str
    user_instruction: str
    think_end: str
    closing: str
    box_prefix: str
    think_start: str = ""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = vars(self)[field.name]
            if not isinstance(value, str):
                raise TypeError(f"reasoning format: {field.name} is {value!r}; it must be a text")
        if not self.name or not self.think_end:
            raise ValueError("reasoning format: name and think_end must not be empty")
        if not self.closing.startswith(self.think_end):
            raise ValueError(
                f"reasoning format {self.name!r}: closing {self.closing!r} must begin with "
                f"think_end {self.think_end!r}"
            )

    def to_dict(self) -> dict[str, str]:
        """The literals by field name, as stored in configurations and manifests."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, literals: Mapping[str, Any]) -> ReasoningFormat:
        """The format of `to_dict`.

        Raises:
            ValueError: a field is unknown or missing.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(set(literals) - set(names))
        missing = [name for name in names if name not in literals and name != "think_start"]
        if unknown or missing:
            raise ValueError(
                f"reasoning_format has the fields {names}; unknown: {unknown or 'none'}, "
                f"missing: {missing or 'none'}"
            )
        return cls(**literals)

    @classmethod
    def named(cls, name: str) -> ReasoningFormat:
        """A preset by its name, or the format of a .json file with the literals of `to_dict`.

        Raises:
            ValueError: there is no such preset, or a literal is unknown or missing.
            OSError: there is no such file.
        """
        if name in PRESETS:
            return PRESETS[name]
        if not name.endswith(".json"):
            raise ValueError(
                f"format is {name!r}; it must be one of {', '.join(PRESETS)}, or a .json file "
                "with the literals of a ReasoningFormat"
            )
        return cls.from_dict(json.loads(Path(name).read_text(encoding="utf-8")))

    def describe(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """What the format means for a tokenizer, in words: print it before a long run.

        Markers, what is forced and masked, and the step ends as texts and ids; an example prompt;
        a small trace cut into its steps; and what does not fit.

        Raises:
            ValueError: the end marker is not one token of the tokenizer.
        """
        return describe(TokenFormat.compile(self, tokenizer), tokenizer)


DEEPSEEK_R1 = ReasoningFormat(
    "deepseek-r1", _BOXED, "</think>", "</think>\n\n", "\\boxed{", "<think>"
)
QWEN3 = ReasoningFormat("qwen3", _BOXED, "</think>", "</think>\n\n", "\\boxed{", "<think>")
HARMONY = ReasoningFormat(
    "harmony",
    _BOXED,
    "<|end|>",
    "<|end|><|start|>assistant<|channel|>final<|message|>",
    "\\boxed{",
    "<|channel|>analysis<|message|>",
)
PRESETS = {preset.name: preset for preset in (DEEPSEEK_R1, QWEN3, HARMONY)}


def guess(tokenizer: PreTrainedTokenizerBase) -> ReasoningFormat:
    """The format that fits the markers in the tokenizer's vocabulary.

    Raises:
        ValueError: the vocabulary has no known thinking end marker.
    """

    def has(token: str) -> bool:
        token_id = tokenizer.convert_tokens_to_ids(token)
        return isinstance(token_id, int) and tokenizer.convert_ids_to_tokens(token_id) == token

    if has("<|channel|>") and has(HARMONY.think_end):
        return HARMONY
    if has(QWEN3.think_end):
        switchable = "enable_thinking" in str(tokenizer.chat_template or "")
        return QWEN3 if has("<|im_start|>") and switchable else DEEPSEEK_R1
    raise ValueError(
        "the tokenizer has no thinking end marker: neither '</think>' nor '<|channel|>' with "
        "'<|end|>' is a token of it. Use a reasoning model, or pass a ReasoningFormat whose "
        "think_end is one token"
    )


@dataclass(frozen=True)
class TokenFormat:
    """A `ReasoningFormat` as the ids of one tokenizer; make it with `TokenFormat.compile`.

    Attributes:
        format: the literals.
        think_end_id: the id of the end marker.
        closing_ids: the closing; its first id is `think_end_id`.
        box_prefix_ids: the prefix of a forced answer.
        eos_ids: ids that end a text, as far as the tokenizer knows.
        added_ids: ids of markers and special tokens, which are never visible text.
        kinds: one byte a token id: the bits that `BoundaryState` reads.
        brace_texts: the texts of the tokens that contain a brace or a backslash.
        think_start_ids: what opens the thinking.
        turn: how the chat template opens the model's turn; None where that is not known.
    """

    format: ReasoningFormat
    think_end_id: int
    closing_ids: tuple[int, ...]
    box_prefix_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]
    added_ids: frozenset[int] = dataclasses.field(repr=False)
    kinds: bytes = dataclasses.field(repr=False)
    brace_texts: Mapping[int, str] = dataclasses.field(repr=False)
    think_start_ids: tuple[int, ...] = ()
    turn: ModelTurn | None = dataclasses.field(default=None, repr=False)

    @classmethod
    def compile(
        cls, reasoning_format: ReasoningFormat, tokenizer: PreTrainedTokenizerBase
    ) -> TokenFormat:
        """Compiles a format for a tokenizer.

        Raises:
            ValueError: the end marker is not one token of the tokenizer.
        """
        end_ids = tokenizer.encode(reasoning_format.think_end, add_special_tokens=False)
        if len(end_ids) != 1 or end_ids[0] == tokenizer.unk_token_id:
            raise ValueError(
                f"the tokenizer has no thinking end marker {reasoning_format.think_end!r} "
                f"(format {reasoning_format.name!r}): it encodes as {end_ids}, but must be one "
                "token. Use a reasoning model's tokenizer, or a ReasoningFormat that fits it"
            )
        closing = tokenizer.encode(reasoning_format.closing, add_special_tokens=False)
        forced = tokenizer.encode(
            reasoning_format.closing + reasoning_format.box_prefix, add_special_tokens=False
        )
        if forced[: len(closing)] != closing:  # a token would reach over the seam
            forced = [
                *closing,
                *tokenizer.encode(reasoning_format.box_prefix, add_special_tokens=False),
            ]
        texts = _token_texts(tokenizer)
        added = frozenset(tokenizer.added_tokens_decoder)
        compiled = cls(
            format=reasoning_format,
            think_end_id=end_ids[0],
            closing_ids=tuple(closing),
            box_prefix_ids=tuple(forced[len(closing) :]),
            eos_ids=() if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,),
            added_ids=added,
            kinds=bytes(0 if i in added else kind_of(text) for i, text in enumerate(texts)),
            brace_texts={i: text for i, text in enumerate(texts) if re.search(r"[{}\\]", text)},
            think_start_ids=tuple(
                tokenizer.encode(reasoning_format.think_start, add_special_tokens=False)
            ),
        )
        channels = compiled.channels
        turn = model_turn(
            tokenizer,
            compiled.think_start_ids,
            compiled.think_end_id,
            () if channels is None else channels.answer,
            compiled.is_blank,
        )
        return dataclasses.replace(compiled, turn=turn)

    @property
    def think_end_ids(self) -> tuple[int, ...]:
        """The end marker's ids: one."""
        return (self.think_end_id,)

    @property
    def channels(self) -> Channels | None:
        """The headers of thinking and answer, where a turn has several messages; else None.

        A format has them if the closing opens the answer with the marker that begins
        `think_start`, and `think_start` ends with a marker, too, as in Harmony.
        """
        start, closing = self.think_start_ids, self.closing_ids
        if len(start) < 2 or start[0] not in closing or start[-1] not in self.added_ids:
            return None
        at = closing.index(start[0])
        return Channels(thinking=start, answer=closing[at:], role_tokens=at - 1)

    @property
    def reentry_ids(self) -> tuple[int, ...]:
        """Ids that would open the thinking again in an answer, in ascending order.

        They are the markers of `think_start` (or its id, where it is one token); and, where the
        closing opens the answer with the same marker as the thinking (Harmony's `<|channel|>`),
        the closing's markers too. The end marker is none of them: it opens nothing. They are
        meant to be masked once the whole closing stands there, not before: after a natural end in
        Harmony the model itself writes `<|start|>assistant<|channel|>final<|message|>`.
        """
        start = self.think_start_ids
        found = set(start) if len(start) == 1 else self.added_ids.intersection(start)
        if found.intersection(self.closing_ids):
            found = found | self.added_ids.intersection(self.closing_ids)
        return tuple(sorted(found - {self.think_end_id}))

    @property
    def answer_end_ids(self) -> tuple[int, ...]:
        """Ids, beside those that end a text, that end an answer once the closing stands there.

        Harmony ends each message with the marker that ends a thinking message.
        """
        return () if self.channels is None else (self.think_end_id,)

    def boundary_state(self, taken: Iterable[int] = ()) -> BoundaryState:
        """A state at the start of a thinking part, or after its tokens `taken`."""
        state = BoundaryState(self.kinds, self.think_end_id, self.channels)
        for token_id in taken:
            state.push(token_id)
        return state

    def box_state(self) -> BoxState:
        """A state right after the box prefix."""
        return BoxState(self.brace_texts)

    def boundaries(self, trace_ids: Iterable[int]) -> list[bool]:
        """For each thinking token, whether it ends a step."""
        state = self.boundary_state()
        return [state.push(token_id) for token_id in trace_ids]

    def step_ends(self, trace_ids: Sequence[int]) -> list[int]:
        """L_i for each step: the tokens of the trace through its end.

        The natural end (or the cap) is the last step T; where the last token is itself a
        boundary, the two are one step. An empty trace has no step.

        Args:
            trace_ids: the thinking tokens: no prompt, no end marker, nothing forced.
        """
        ends = [i + 1 for i, boundary in enumerate(self.boundaries(trace_ids)) if boundary]
        if len(trace_ids) and (not ends or ends[-1] != len(trace_ids)):
            ends.append(len(trace_ids))
        return ends

    def forced_suffix(self, answer: AnswerMode = "forced", closing_written: int = 0) -> list[int]:
        """The ids forced after a stop: the closing, and for a forced answer the box prefix.

        Args:
            answer: the answer mode.
            closing_written: how much of the closing stands there already, as
                `BoundaryState.closing_written` says after a natural end.
        """
        if answer not in ("forced", "free"):
            raise ValueError(f"answer is {answer!r}; it must be 'forced' or 'free'")
        prefix = self.box_prefix_ids if answer == "forced" else ()
        return [*self.closing_ids[closing_written:], *prefix]

    def thinking_span(self, ids: Sequence[int], start: int | None = None) -> ThinkingSpan:
        """Where the thinking of the model's last turn lies in a prompt; see `ThinkingSpan`.

        The ids may also hold what the model wrote after the prompt, to its very end. Earlier
        turns, system prompts and what users quote don't count: the last turn begins where the
        chat template opens it. `boundary_state(ids[span.start:])` then goes on where a prefilled
        thinking stops. The ids alone don't tell who wrote a `<think>` that the chat template does
        not write: it is counted as thinking, as if the model had.

        Args:
            ids: without padding.
            start: where the thinking begins (the length of the prompt), where that is known.
        """
        if start is None:
            start = self.turn.thinking_begins(ids, self.is_blank) if self.turn else len(ids)
        state = self.boundary_state()
        for token_id in ids[start:]:
            if token_id in self.eos_ids and token_id != self.think_end_id:
                return ThinkingSpan(start, start + state.thinking_tokens, True)
            state.push(token_id)
            if state.ended:
                break
        return ThinkingSpan(start, start + state.thinking_tokens, state.ended)

    def in_thinking(self, prompt_ids: Sequence[int]) -> bool:
        """Whether what follows the prompt is thinking (a prompt may close it by itself)."""
        return not self.thinking_span(prompt_ids).closed

    def is_blank(self, token_id: int) -> bool:
        """Whether an id is neither a marker nor visible text."""
        known = token_id not in self.added_ids and token_id < len(self.kinds)
        return known and not self.kinds[token_id] & (VISIBLE | VISIBLE_AFTER)


def _token_texts(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text of each id by itself (bytes of a broken character become U+FFFD)."""
    return tokenizer.batch_decode(
        [[i] for i in range(len(tokenizer))],
        skip_special_tokens=False,
        clean_up_tokenization_spaces=False,
    )
