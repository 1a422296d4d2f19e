r"""How a model family writes its thinking, and where its steps end, as token ids.

`ReasoningFormat` holds a family's literals; `TokenFormat` is a format compiled for one tokenizer.
Step ends are a property of token ids, decided by `BoundaryState` alone: in labels, in training,
in generate and in every engine. Text is never tokenised again.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

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
    vocabulary = tokenizer.get_vocab()
    if "<|channel|>" in vocabulary and HARMONY.think_end in vocabulary:
        return HARMONY
    if QWEN3.think_end in vocabulary:
        switchable = "enable_thinking" in str(tokenizer.chat_template or "")
        return QWEN3 if "<|im_start|>" in vocabulary and switchable else DEEPSEEK_R1
    raise ValueError(
        "the tokenizer has no thinking end marker: neither '</think>' nor '<|channel|>' with "
        "'<|end|>' is a token of it. Use a reasoning model, or pass a ReasoningFormat whose "
        "think_end is one token"
    )


# What a token's text means for step ends, as bits.
_BREAK = 1  # it contains a blank line
_NEWLINE = 2  # it is "\n" alone
_ENDS_NEWLINE = 4  # it ends with "\n"
_VISIBLE = 8  # visible text (before its last blank line, where it has one)
_VISIBLE_AFTER = 16  # visible text after its last blank line


def _kind(text: str) -> int:
    before, blank_line, after = text.rpartition("\n\n")
    if not blank_line:
        before, after = after, ""
    return (
        (_BREAK if blank_line else 0)
        | (_NEWLINE if text == "\n" else 0)
        | (_ENDS_NEWLINE if text.endswith("\n") else 0)
        | (_VISIBLE if before.strip() else 0)
        | (_VISIBLE_AFTER if after.strip() else 0)
    )


class BoundaryState:
    r"""Finds step ends in a stream of thinking tokens.

    A token is a boundary if its text contains "\n\n", or is "\n" after a token that ends with
    "\n", with visible text since the last boundary (its own text up to the break included). The
    state starts where the thinking starts; added tokens such as `<think>` are no visible text.

    Attributes:
        kinds: one byte a token id, the bits of `TokenFormat.kinds`.
    """

    __slots__ = ("_after_newline", "_visible", "kinds")

    def __init__(self, kinds: bytes) -> None:
        self.kinds = kinds
        self._visible = False
        self._after_newline = False

    def push(self, token_id: int) -> bool:
        """Takes the next thinking token; whether it ends a step."""
        kind = self.kinds[token_id] if token_id < len(self.kinds) else 0
        broken = bool(kind & _BREAK) or bool(kind & _NEWLINE and self._after_newline)
        self._after_newline = bool(kind & _ENDS_NEWLINE)
        visible = self._visible or bool(kind & _VISIBLE)
        boundary = broken and visible
        self._visible = bool(kind & _VISIBLE_AFTER) or (visible and not boundary)
        return boundary


class BoxState:
    r"""Finds the end of a forced answer: the brace that closes the box opened by the prefix.

    Escaped braces (`\{`) do not count, as in LaTeX.
    """

    __slots__ = ("_brace_texts", "_depth", "_escaped")

    def __init__(self, brace_texts: Mapping[int, str]) -> None:
        self._brace_texts = brace_texts
        self._depth = 1
        self._escaped = False

    def push(self, token_id: int) -> bool:
        """Takes the next answer token; whether the box is closed."""
        text = self._brace_texts.get(token_id)
        if text is None:
            self._escaped = False
            return self._depth <= 0
        for character in text:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == "{":
                self._depth += 1
            elif character == "}":
                self._depth -= 1
                if self._depth <= 0:
                    return True
        return False


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
        after_end = reasoning_format.closing[len(reasoning_format.think_end) :]
        texts = _token_texts(tokenizer)
        added = frozenset(tokenizer.added_tokens_decoder)
        return cls(
            format=reasoning_format,
            think_end_id=end_ids[0],
            closing_ids=(end_ids[0], *tokenizer.encode(after_end, add_special_tokens=False)),
            box_prefix_ids=tuple(
                tokenizer.encode(reasoning_format.box_prefix, add_special_tokens=False)
            ),
            eos_ids=() if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,),
            added_ids=added,
            kinds=bytes(0 if i in added else _kind(text) for i, text in enumerate(texts)),
            brace_texts={i: text for i, text in enumerate(texts) if re.search(r"[{}\\]", text)},
            think_start_ids=tuple(
                tokenizer.encode(reasoning_format.think_start, add_special_tokens=False)
            ),
        )

    @property
    def think_end_ids(self) -> tuple[int, ...]:
        """The end marker's ids: one."""
        return (self.think_end_id,)

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

    def boundary_state(self) -> BoundaryState:
        """A state at the start of a thinking part."""
        return BoundaryState(self.kinds)

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

    def forced_suffix(self, answer: AnswerMode = "forced") -> list[int]:
        """The ids forced after a stop: the closing, and for a forced answer the box prefix."""
        if answer not in ("forced", "free"):
            raise ValueError(f"answer is {answer!r}; it must be 'forced' or 'free'")
        return [*self.closing_ids, *(self.box_prefix_ids if answer == "forced" else ())]

    def in_thinking(self, prompt_ids: Sequence[int]) -> bool:
        """Whether what follows the prompt is thinking (a prompt may close it by itself).

        The thinking is closed if the closing (its trailing white space apart) stands in the last
        turn, that is, with no marker or special token after it. Earlier turns don't count.
        """
        closing = list(self.closing_ids)
        while len(closing) > 1 and not self._is_marker_or_visible(closing[-1]):
            closing.pop()
        n = len(closing)
        for i in range(len(prompt_ids) - 1, -1, -1):
            if i >= n - 1 and list(prompt_ids[i - n + 1 : i + 1]) == closing:
                return False
            if prompt_ids[i] in self.added_ids:
                return True
        return True

    def _is_marker_or_visible(self, token_id: int) -> bool:
        return token_id in self.added_ids or bool(
            self.kinds[token_id] & (_VISIBLE | _VISIBLE_AFTER)
        )


def _token_texts(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text of each id by itself (bytes of a broken character become U+FFFD)."""
    return tokenizer.batch_decode(
        [[i] for i in range(len(tokenizer))],
        skip_special_tokens=False,
        clean_up_tokenization_spaces=False,
    )
