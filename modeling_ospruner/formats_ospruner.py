"""How a model family writes its thinking, and where its steps end, as token ids.

`ReasoningFormat` holds a family's literals; `TokenFormat` is a format compiled for one tokenizer.
Step ends are a property of token ids, decided by `BoundaryState` alone: in labels, in training,
in generate and in every engine. Text is never tokenised again. `model_turn` finds where in a
prompt the model's own turn begins: earlier turns and quoted markers do not count.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

__all__ = [
    "DEEPSEEK_R1",
    "HARMONY",
    "PLAIN",
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


# What a token's text means for step ends, as bits.
BREAK = 1  # it contains a blank line
NEWLINE = 2  # it is "\n" alone
ENDS_NEWLINE = 4  # it ends with "\n"
VISIBLE = 8  # visible text (before its last blank line, where it has one)
VISIBLE_AFTER = 16  # visible text after its last blank line
COLON = 32  # its visible text (before its last blank line) ends with a colon

# What a displayed formula or a block of code opens or closes with; tokens may cut it.
_DISPLAYED = re.compile(r"\\\[|\\\]|\$\$|```")
_OF_DISPLAYED = re.compile(r"[\\\[\]$`]")
_MOST_BRIDGED = 8  # blank lines, so that a formula that never closes does not hide all steps


def kind_of(text: str) -> int:
    """The bits of one token's text, for `BoundaryState`."""
    before, blank_line, after = text.rpartition("\n\n")
    if not blank_line:
        before, after = after, ""
    return (
        (BREAK if blank_line else 0)
        | (NEWLINE if text == "\n" else 0)
        | (ENDS_NEWLINE if text.endswith("\n") else 0)
        | (VISIBLE if before.strip() else 0)
        | (VISIBLE_AFTER if after.strip() else 0)
        | (COLON if before.rstrip().endswith(":") else 0)
    )


@dataclass(frozen=True)
class Channels:
    """How a turn of several messages says which of them think (Harmony's channels).

    Each message is a role, a header from `thinking[0]` to `thinking[-1]`, a body, the end marker.

    Attributes:
        thinking: the header of a thinking message: `<|channel|>analysis<|message|>`.
        answer: the header of the answer: `<|channel|>final<|message|>`.
        role_tokens: the tokens between an end marker and the next header: `<|start|>assistant`.
    """

    thinking: tuple[int, ...]
    answer: tuple[int, ...]
    role_tokens: int


class BoundaryState:
    r"""Finds step ends, and the end of the thinking, in a stream of tokens after a prompt.

    A token is a boundary if its text contains "\n\n", or is "\n" after a token that ends with
    "\n", with visible text since the last boundary (its own text up to the break included). The
    state starts where the thinking starts; added tokens such as `<think>` are no visible text.

    The thinking ends with the end marker, or where a call of a tool opens. With channels, the end
    marker of a thinking message does it, or the header of the answer; other messages (a commentary,
    a call) have no steps and end nothing, and headers are no visible text. Text under no header is
    thinking.

    In prose, a blank line ends no step after a colon, or within a displayed formula or a block of
    code (`\\[`, `$$`, three backticks), of up to 8 blank lines.

    Attributes:
        kinds: one byte a token id, the bits of `kind_of`.
        end_id: the end marker; None where there is none, or to look for steps alone.
        channels: None where all that comes before the end marker is thinking.
        call_ids: ids that open a call of a tool.
        displays: in prose, the texts of the tokens that open or close formulas and code, or may be
            a part of what does; None elsewhere.
        ended: whether the thinking has ended; from there on nothing is a boundary.
        closing_written: how many ids of the closing stand there once the thinking has ended: 1
            after the end marker, all of them after the header of the answer.
        calls: whether it has ended with the opening of a call.
        thinking_tokens: the tokens taken before what ended it.
    """

    __slots__ = (
        "_after_newline",
        "_bridged",
        "_colon",
        "_headed",
        "_header",
        "_inside",
        "_open",
        "_rest",
        "_role_tokens",
        "_visible",
        "call_ids",
        "calls",
        "channels",
        "closing_written",
        "displays",
        "end_id",
        "ended",
        "kinds",
        "thinking_tokens",
    )

    def __init__(
        self,
        kinds: bytes,
        end_id: int | None = None,
        channels: Channels | None = None,
        call_ids: frozenset[int] = frozenset(),
        displays: Mapping[int, str] | None = None,
    ) -> None:
        self.kinds = kinds
        self.displays = displays
        self.end_id = end_id
        self.channels = channels
        self.call_ids = call_ids
        self.calls = False
        self.ended = False
        self.closing_written = 0
        self.thinking_tokens = 0
        self._visible = False
        self._after_newline = False
        self._open = False
        self._colon = False
        self._bridged = 0
        self._rest = ""
        self._inside = True
        self._header: list[int] = []
        self._headed = False
        self._role_tokens = 0 if channels is None else channels.role_tokens

    def push(self, token_id: int) -> bool:
        """Takes the next token; whether it ends a step."""
        if self.ended:
            return False
        self.thinking_tokens += 1
        if self.channels is not None and not self._in_thinking_message(token_id, self.channels):
            return False
        if token_id == self.end_id or token_id in self.call_ids:
            self.calls = token_id != self.end_id
            self._end(1 - self.calls, 1)
            return False
        kind = self.kinds[token_id] if token_id < len(self.kinds) else 0
        broken = bool(kind & BREAK) or bool(kind & NEWLINE and self._after_newline)
        self._after_newline = bool(kind & ENDS_NEWLINE)
        visible = self._visible or bool(kind & VISIBLE)
        boundary = broken and visible
        if self.displays is not None:
            boundary = self._ends_prose(kind, self.displays.get(token_id), boundary)
        self._visible = bool(kind & VISIBLE_AFTER) or (visible and not boundary)
        return boundary

    def _ends_prose(self, kind: int, text: str | None, boundary: bool) -> bool:
        """The same in prose, where a formula, code, or what follows a colon goes on."""
        before, blank_line, after = (text or "").rpartition("\n\n")
        if not blank_line:
            before, after = after, ""
        if text is None:
            self._rest = ""
        self._follow(before)
        if kind & VISIBLE:
            self._colon = bool(kind & COLON)
        if boundary and self._open and self._bridged < _MOST_BRIDGED:
            self._bridged += 1
            boundary = False
        elif self._colon:
            boundary = False
        self._follow(after)
        if kind & VISIBLE_AFTER:
            self._colon = False
        return boundary

    def _follow(self, text: str) -> None:
        """Looks for what opens or closes a formula or code, also across tokens."""
        end = 0
        text = self._rest + text
        for found in _DISPLAYED.finditer(text):
            self._open = found[0] == r"\[" or (found[0] != r"\]" and not self._open)
            self._bridged, end = 0, found.end()
        self._rest = text[end:][-2:]

    def _end(self, closing_written: int, tokens: int) -> None:
        self.ended = True
        self.closing_written = closing_written
        self.thinking_tokens -= tokens

    def _in_thinking_message(self, token_id: int, channels: Channels) -> bool:
        """Follows the headers; whether the token belongs to the body of a thinking message."""
        if token_id == channels.thinking[0]:
            # A role longer than usual addresses someone: a tool is called, nothing is thought.
            addressed = not self._headed and self._role_tokens != channels.role_tokens
            self._header = [] if addressed else [token_id]
            self._headed, self._inside = True, False
        elif self._header:
            self._header.append(token_id)
            if token_id == channels.thinking[-1]:
                header, self._header = tuple(self._header), []
                if header == channels.thinking:
                    self._inside, self._visible, self._after_newline = True, False, False
                elif header[: len(channels.answer) - 1] == channels.answer[:-1]:
                    self._end(1 + channels.role_tokens + len(channels.answer), len(header))
        elif self._headed and self._inside:
            return True
        elif token_id == self.end_id and not self._inside:
            self._headed, self._role_tokens = False, 0
        else:
            self._role_tokens += 1
            return self._inside
        return False


class BoxState:
    r"""Finds the end of a forced answer: the brace that closes the box opened by the prefix.

    Escaped braces (`\{`) do not count, as in LaTeX.
    """

    __slots__ = ("_brace_texts", "_depth", "_escaped")

    final_text: ClassVar[str] = "}"  # stands in every token that closes a box

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


try:
    from jinja2.exceptions import TemplateError
except ImportError:  # then no chat template can be rendered at all
    TemplateError = RuntimeError  # type: ignore[assignment, misc]


class ThinkingSpan(NamedTuple):
    r"""Where the thinking of the model's last turn lies: `ids[start:end]`.

    Attributes:
        start: the first id after the generation prompt (after `<think>\n`, where the chat
            template writes it), so that a prefilled thinking begins here. The length of the ids
            where the thinking has not begun, or where nothing tells where it began.
        end: after the last thinking id: the place of the end marker, if it stands there.
        closed: whether the thinking has ended, by its end marker, by the answer's opening, or by
            the end of the text. What follows is no thinking then.
    """

    start: int
    end: int
    closed: bool


@dataclass(frozen=True)
class ModelTurn:
    r"""How a chat template opens the model's turn, and what opens its thinking.

    Attributes:
        header_ids: what opens the turn (`<｜Assistant｜>`, `<|im_start|>assistant`), up to the
            thinking's own markers; empty where the tokenizer's chat template shows none.
        opening_ids: what the template writes after it, up to an end marker: `<think>\n`, or the
            line break after `assistant`.
        think_start_ids: what opens the thinking.
        closed_ids: what, with no sign of a beginning, says that the thinking has ended.
        answer_ids: with several messages in a turn, what opens the message that ends it; else
            empty.
        eos_ids: ids that end a text.
    """

    header_ids: tuple[int, ...]
    opening_ids: tuple[int, ...]
    think_start_ids: tuple[int, ...]
    closed_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]

    def thinking_begins(self, ids: Sequence[int], is_blank: Callable[[int], bool]) -> int:
        """The index in a prompt, or in a prompt with what follows it, where its thinking begins.

        The model's last turn begins at the chat template's own opening of it. Without that (a
        raw prompt), the last `think_start` of the last text counts, else its last end marker.

        Args:
            ids: without padding.
            is_blank: whether an id is neither a marker nor visible text.

        Returns:
            See `ThinkingSpan.start`; at the end marker where that is all that is found.
        """
        ids = list(ids)
        floor = self._last_text(ids, is_blank)
        header, opening = self.header_ids, self.opening_ids
        at = self._last_turn(ids, floor)
        if at is not None:
            return at + len(header) + _common(ids[at + len(header) :], opening)
        if header and header[0] in ids[floor:]:
            return len(ids)  # someone else's message is the last one
        at = _rfind(ids, self.think_start_ids, floor)
        if at is not None:
            if self.answer_ids:
                return at
            own = opening[_find(opening, self.think_start_ids) or 0 :]
            return at + max(_common(ids[at:], own), len(self.think_start_ids))
        at = _rfind(ids, self.closed_ids, floor)
        return len(ids) if at is None else at

    def _last_text(self, ids: list[int], is_blank: Callable[[int], bool]) -> int:
        """The index after the last end of a text that something follows."""
        blank = True
        for i in range(len(ids) - 1, -1, -1):
            if ids[i] not in self.eos_ids:
                blank = blank and is_blank(ids[i])
            elif not blank:
                return i + 1
        return 0

    def _last_turn(self, ids: list[int], floor: int) -> int | None:
        """Where the model's last turn begins, if the last message is the model's."""
        header = self.header_ids
        begin = None
        end = len(ids)
        while header:
            at = _rfind(ids[:end], header[:1], floor)
            if at is not None and 0 < len(ids) - at < len(header) and end == len(ids):
                end = at  # cut off within a header
                continue
            if at is None or tuple(ids[at : at + len(header)]) != header:
                break
            body = ids[at + len(header) :]
            answers = _common(body, self.answer_ids) >= len(self.answer_ids) - 1
            if begin is not None and answers:
                break  # an earlier turn's
            begin, end = at, at
            if not self.answer_ids:
                break  # one message a turn
        return begin


def model_turn(
    tokenizer: PreTrainedTokenizerBase,
    think_start_ids: tuple[int, ...],
    think_end_ids: tuple[int, ...],
    answer_ids: tuple[int, ...],
    is_blank: Callable[[int], bool],
) -> ModelTurn:
    """Reads from the chat template how the model's turn is opened.

    Args:
        tokenizer: its chat template is rendered for one user message.
        think_start_ids: what opens the thinking.
        think_end_ids: the end marker; empty where there is none.
        answer_ids: with several messages in a turn, what opens the message that ends it.
        is_blank: whether an id is neither a marker nor visible text.
    """
    prompt = tokenizer.encode(_generation_prompt(tokenizer), add_special_tokens=False)
    closed = _find(prompt, think_end_ids)
    prompt = prompt[:closed]
    start = _find(prompt, think_start_ids)
    header = prompt if start is None else prompt[:start]
    while header and is_blank(header[-1]):
        header = header[:-1]
    eos = tokenizer.eos_token_id
    return ModelTurn(
        header_ids=tuple(header),
        opening_ids=tuple(prompt[len(header) :]),
        think_start_ids=think_start_ids,
        closed_ids=answer_ids or think_end_ids,
        answer_ids=answer_ids,
        eos_ids=() if eos is None or eos in think_end_ids else (eos,),
    )


def _generation_prompt(tokenizer: PreTrainedTokenizerBase) -> str:
    """What the chat template appends to open the model's turn; "" where it has no such thing."""
    if tokenizer.chat_template is None:
        return ""
    message = [{"role": "user", "content": "x"}]
    try:
        without, with_prompt = (
            str(tokenizer.apply_chat_template(message, add_generation_prompt=add, tokenize=False))
            for add in (False, True)
        )
    except (ImportError, TemplateError):
        return ""
    return with_prompt.removeprefix(without) if with_prompt.startswith(without) else ""


def _common(ids: Sequence[int], other: Sequence[int]) -> int:
    """How many ids the two share from their beginning."""
    count = 0
    for one, two in zip(ids, other, strict=False):
        if one != two:
            break
        count += 1
    return count


def _find(ids: Sequence[int], wanted: Sequence[int]) -> int | None:
    """Where `wanted` first stands in `ids`; None where it is empty or absent."""
    last = len(ids) - len(wanted)
    places = (i for i in range(last + 1) if tuple(ids[i : i + len(wanted)]) == tuple(wanted))
    return next(places, None) if wanted else None


def _rfind(ids: Sequence[int], wanted: Sequence[int], floor: int) -> int | None:
    """Where `wanted` last stands in `ids` from `floor` on; None where it is empty or absent."""
    last = len(ids) - len(wanted)
    places = (
        i for i in range(last, floor - 1, -1) if tuple(ids[i : i + len(wanted)]) == tuple(wanted)
    )
    return next(places, None) if wanted else None


AnswerMode = Literal["forced", "free"]
_OPTIONAL = ("steps", "wind_down")  # stored where they say something

# What opens calls of tools in a thinking that has not ended: Qwen3, DeepSeek.
_CALL_OPENINGS = ("<tool_call>", "<｜tool▁calls▁begin｜>")

_BOXED = "Please reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class ReasoningFormat:
    r"""The literals of a family's thinking. Labels and policies are bound to them.

    Attributes:
        name: what the format is called.
        user_instruction: appended to the user's problem; it asks for a boxed answer.
        think_end: the marker with which the model ends its thinking; one token. Empty where a model
            thinks in its reply, which the end of the turn ends.
        closing: what leads from the thinking to the answer; begins with `think_end`.
        box_prefix: put before a forced answer. It opens one brace, which the answer closes.
        think_start: what opens the thinking, written by the prompt or by the model; empty where
            nothing does. An answer must not write it again.
        steps: what ends a step: "" for each blank line, "prose" for those outside of formulas and
            code that follow no colon (`BoundaryState`).
        wind_down: a sentence put before the closing where the model did not end its thinking
            itself, such as "I have what I need, so:"; empty for none.
    """

    name: str
    user_instruction: str
    think_end: str
    closing: str
    box_prefix: str
    think_start: str = ""
    steps: str = ""
    wind_down: str = ""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = vars(self)[field.name]
            if not isinstance(value, str):
                raise TypeError(f"reasoning format: {field.name} is {value!r}; it must be a text")
        if not self.name or not self.closing:
            raise ValueError("reasoning format: name and closing must not be empty")
        if self.think_start and not self.think_end:
            raise ValueError(
                f"reasoning format {self.name!r}: think_start is {self.think_start!r}, but "
                "think_end is empty: what a marker opens, another must close"
            )
        if self.steps not in ("", "prose"):
            raise ValueError(
                f"reasoning format {self.name!r}: steps is {self.steps!r}; it must be '' or 'prose'"
            )
        if not self.closing.startswith(self.think_end):
            raise ValueError(
                f"reasoning format {self.name!r}: closing {self.closing!r} must begin with "
                f"think_end {self.think_end!r}"
            )

    def to_dict(self) -> dict[str, str]:
        """The literals by field name, as stored in configurations and manifests."""
        return {k: v for k, v in dataclasses.asdict(self).items() if v or k not in _OPTIONAL}

    @classmethod
    def from_dict(cls, literals: Mapping[str, Any]) -> ReasoningFormat:
        """The format of `to_dict`.

        Raises:
            ValueError: a field is unknown or missing.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(set(literals) - set(names))
        missing = [n for n in names if n not in literals and n not in ("think_start", *_OPTIONAL)]
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
            ValueError: there is no such preset, the file is no JSON object, or a literal is unknown
                or missing.
            OSError: there is no such file.
        """
        if name in PRESETS:
            return PRESETS[name]
        if not name.endswith(".json"):
            raise ValueError(
                f"format is {name!r}; it must be one of {', '.join(PRESETS)}, or a .json file "
                "with the literals of a ReasoningFormat"
            )
        try:
            literals = json.loads(Path(name).read_text(encoding="utf-8"))
            if not isinstance(literals, dict):
                raise ValueError(f"it holds a {type(literals).__name__}, and no object")
        except ValueError as error:
            raise ValueError(
                f"format is {name!r}, a file that cannot be read ({error}): it must be UTF-8 JSON, "
                "the literals of a ReasoningFormat"
            ) from error
        return cls.from_dict(literals)


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
PLAIN = ReasoningFormat(
    "plain",
    "Please reason step by step, check your result, and put your final answer within \\boxed{}.",
    "",
    "\n\nThe final answer is ",
    "\\boxed{",
    steps="prose",
)
PRESETS = {preset.name: preset for preset in (DEEPSEEK_R1, QWEN3, HARMONY, PLAIN)}


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
        "'<|end|>' is a token of it. If the model reasons in its reply, say so: `--format plain` "
        "(ReasoningFormat.named('plain')); else pass a ReasoningFormat whose think_end is one token"
    )


@dataclass(frozen=True)
class TokenFormat:
    """A `ReasoningFormat` as the ids of one tokenizer; make it with `TokenFormat.compile`.

    Attributes:
        format: the literals.
        think_end_id: the id of the end marker; -1, which no token has, where there is none.
        closing_ids: the closing; its first id is `think_end_id`, if there is one.
        box_prefix_ids: the prefix of a forced answer.
        eos_ids: ids that end a text, as far as the tokenizer knows.
        added_ids: ids of markers and special tokens, which are never visible text.
        kinds: one byte a token id: the bits that `BoundaryState` reads.
        brace_texts: the texts of the tokens that contain a brace or a backslash.
        think_start_ids: what opens the thinking.
        wind_down_ids: put before the closing.
        call_ids: ids that open a call of a tool, which ends a thinking that has no end marker.
        displays: in prose, the texts of tokens that open or close formulas and code; else None.
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
    wind_down_ids: tuple[int, ...] = ()
    call_ids: frozenset[int] = frozenset()
    displays: Mapping[int, str] | None = dataclasses.field(default=None, repr=False)
    turn: ModelTurn | None = dataclasses.field(default=None, repr=False)

    @classmethod
    def compile(
        cls, reasoning_format: ReasoningFormat, tokenizer: PreTrainedTokenizerBase
    ) -> TokenFormat:
        """Compiles a format for a tokenizer.

        Raises:
            ValueError: the end marker is not one token of the tokenizer, or `wind_down` holds a
                marker.
        """
        end_ids = tokenizer.encode(reasoning_format.think_end, add_special_tokens=False)
        marked = bool(reasoning_format.think_end)
        if marked and (len(end_ids) != 1 or end_ids[0] == tokenizer.unk_token_id):
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
            think_end_id=end_ids[0] if marked else -1,
            closing_ids=tuple(closing),
            box_prefix_ids=tuple(forced[len(closing) :]),
            eos_ids=() if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,),
            added_ids=added,
            kinds=bytes(0 if i in added else kind_of(text) for i, text in enumerate(texts)),
            brace_texts={i: text for i, text in enumerate(texts) if re.search(r"[{}\\]", text)},
            think_start_ids=tuple(
                tokenizer.encode(reasoning_format.think_start, add_special_tokens=False)
            ),
            displays={i: text for i, text in enumerate(texts) if _OF_DISPLAYED.search(text)}
            if reasoning_format.steps == "prose"
            else None,
            call_ids=frozenset(i for i in added if texts[i] in _CALL_OPENINGS),
        )
        compiled = compiled.winding_down(reasoning_format.wind_down, tokenizer)
        channels = compiled.channels
        turn = model_turn(
            tokenizer,
            compiled.think_start_ids,
            compiled.think_end_ids,
            () if channels is None else channels.answer,
            compiled.is_blank,
        )
        return dataclasses.replace(compiled, turn=turn)

    def winding_down(self, sentence: str, tokenizer: PreTrainedTokenizerBase) -> TokenFormat:
        """This format with a sentence before the closing; "" for none.

        Raises:
            ValueError: the sentence holds a marker or a special token.
        """
        ids = tuple(tokenizer.encode(sentence, add_special_tokens=False))
        if markers := sorted(self.added_ids.intersection(ids)):
            raise ValueError(
                f"wind_down is {sentence!r}, with the markers {tokenizer.decode(markers)!r}: it "
                "stands in the thinking, whose end marker follows it; write plain text"
            )
        changed = dataclasses.replace(self.format, wind_down=sentence)
        return dataclasses.replace(self, format=changed, wind_down_ids=ids)

    @property
    def think_end_ids(self) -> tuple[int, ...]:
        """The end marker's ids: one, or none."""
        return () if self.think_end_id < 0 else (self.think_end_id,)

    @cached_property
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

    @cached_property
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
        return tuple(sorted(found.difference(self.think_end_ids)))

    @property
    def answer_end_ids(self) -> tuple[int, ...]:
        """Ids, beside those that end a text, that end an answer once the closing stands there.

        Harmony ends each message with the marker that ends a thinking message.
        """
        return () if self.channels is None else self.think_end_ids

    def boundary_state(self, taken: Iterable[int] = ()) -> BoundaryState:
        """A state at the start of a thinking part, or after its tokens `taken`."""
        state = BoundaryState(
            self.kinds, self.think_end_id, self.channels, self.call_ids, self.displays
        )
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
        """The ids forced after a stop: sentence, closing, and for a forced answer the box prefix.

        Args:
            answer: the answer mode.
            closing_written: how much of the closing stands there already, as
                `BoundaryState.closing_written` says after a natural end.
        """
        if answer not in ("forced", "free"):
            raise ValueError(f"answer is {answer!r}; it must be 'forced' or 'free'")
        prefix = self.box_prefix_ids if answer == "forced" else ()
        sentence = () if closing_written else self.wind_down_ids
        return [*sentence, *self.closing_ids[closing_written:], *prefix]

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
