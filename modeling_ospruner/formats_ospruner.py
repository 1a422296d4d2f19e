"""How a model family writes its thinking, and where its steps end, as token ids.

`ReasoningFormat` holds a family's literals; `TokenFormat` is a format compiled for one tokenizer.
Step ends are a property of token ids, decided by `BoundaryState` alone: in labels, in training,
in generate and in every engine. Text is never tokenised again. A literal that is one added token is
that id; any other one is a `Marker`, found in whatever tokens the model writes it. `model_turn`
finds where in a prompt the model's own turn begins: earlier turns and quoted markers do not count.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

from .states_ospruner import (
    OF_DISPLAYED,
    VISIBLE,
    VISIBLE_AFTER,
    BoundaryState,
    BoxState,
    Channels,
    EndTextState,
    Literals,
    Marker,
    kind_of,
)

__all__ = [
    "DEEPSEEK_R1",
    "HARMONY",
    "PLAIN",
    "PRESETS",
    "QWEN3",
    "AnswerMode",
    "ReasoningFormat",
    "ThinkingSpan",
    "TokenFormat",
    "guess",
]


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
        start: what opens the thinking, and
        closed: what says that it has ended, if they are several tokens; else None.
    """

    header_ids: tuple[int, ...]
    opening_ids: tuple[int, ...]
    think_start_ids: tuple[int, ...]
    closed_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]
    start: Marker | None = None
    closed: Marker | None = None

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
            return at + len(header) + self._opened(ids[at + len(header) :])
        if header and header[0] in ids[floor:]:
            return len(ids)  # someone else's message is the last one
        found = _last(ids, self.think_start_ids, self.start, floor)
        if found is not None:
            at, after = found
            if self.answer_ids:
                return at
            own = opening[(_first(opening, self.think_start_ids, self.start) or (0, 0))[0] :]
            return max(at + _common(ids[at:], own), after)
        found = _last(ids, self.closed_ids, self.closed, floor)
        return len(ids) if found is None else found[0]

    def _opened(self, body: list[int]) -> int:
        """How much of what follows a turn's header opens its thinking."""
        common = _common(body, self.opening_ids)
        if self.start is not None and common < len(self.opening_ids):
            # The marker's last token may hold what follows it, too.
            opens = _first(self.opening_ids, (), self.start)
            found = opens and _first(body[: opens[1]], (), self.start)
            return max(common, found[1] if found else 0)
        return common

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
    start: Marker | None = None,
    end: Marker | None = None,
) -> ModelTurn:
    """Reads from the chat template how the model's turn is opened.

    Args:
        tokenizer: its chat template is rendered for one user message.
        think_start_ids: what opens the thinking.
        think_end_ids: the end marker; empty where there is none.
        answer_ids: with several messages in a turn, what opens the message that ends it.
        is_blank: whether an id is neither a marker nor visible text.
        start: what opens the thinking, if it is several tokens.
        end: the end marker, if it is several tokens.
    """
    prompt = tokenizer.encode(_generation_prompt(tokenizer), add_special_tokens=False)
    if closes := _first(prompt, think_end_ids, end):
        prompt = prompt[: closes[0]]
    opens = _first(prompt, think_start_ids, start)
    header = prompt if opens is None else prompt[: opens[0]]
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
        start=start,
        closed=None if answer_ids else end,
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


Place = tuple[int, int]  # of a marker: its first token, and the one after its last


def _first(ids: Sequence[int], wanted: Sequence[int], marker: Marker | None) -> Place | None:
    """Where a marker first stands, by its ids or its literal; None where it has none or is not."""
    return next(iter(_places(ids, wanted, marker)), None)


def _last(
    ids: Sequence[int], wanted: Sequence[int], marker: Marker | None, floor: int
) -> Place | None:
    """The same for its last place from `floor` on."""
    if marker is None:
        at = _rfind(ids, wanted, floor)
        return None if at is None else (at, at + len(wanted))
    return next(((a + floor, b + floor) for a, b in reversed(marker.places(ids[floor:]))), None)


def _places(ids: Sequence[int], wanted: Sequence[int], marker: Marker | None) -> Iterable[Place]:
    if marker is not None:
        return marker.places(ids)
    size = len(wanted)
    starts = range(len(ids) - size + 1 if size else 0)
    return ((i, i + size) for i in starts if tuple(ids[i : i + size]) == tuple(wanted))


def _rfind(ids: Sequence[int], wanted: Sequence[int], floor: int) -> int | None:
    """Where `wanted` last stands in `ids` from `floor` on; None where it is empty or absent."""
    last = len(ids) - len(wanted)
    places = (
        i for i in range(last, floor - 1, -1) if tuple(ids[i : i + len(wanted)]) == tuple(wanted)
    )
    return next(places, None) if wanted else None


AnswerMode = Literal["forced", "free"]
_OPTIONAL = ("steps", "wind_down", "answer_end", "answer_phrase")  # stored where they say something

# What opens calls of tools in a thinking that has not ended: Qwen3, DeepSeek.
_CALL_OPENINGS = ("<tool_call>", "<｜tool▁calls▁begin｜>")

_BOXED = "Please reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class ReasoningFormat:
    r"""The literals of a family's thinking. Labels and policies are bound to them.

    Attributes:
        name: what the format is called.
        user_instruction: appended to the user's problem; it asks for a boxed answer.
        think_end: the marker with which the model ends its thinking. Empty where a model thinks in
            its reply, which the end of the turn ends.
        closing: what leads from the thinking to the answer; begins with `think_end`.
        box_prefix: put before a forced answer. It opens one brace, which the answer closes, unless
            `answer_end` says what else ends it.
        think_start: what opens the thinking, written by the prompt or by the model; empty where
            nothing does. An answer must not write it again.
        steps: what ends a step: "" for each blank line, "prose" for those outside of formulas and
            code that follow no colon (`BoundaryState`).
        wind_down: a sentence put before the closing where the model did not end its thinking
            itself, such as "I have what I need, so:"; empty for none.
        answer_end: the text that ends a forced answer, such as a closing fence of code; empty for
            the brace that closes the box.
        answer_phrase: of a model that thinks in its reply, the words with which it begins its final
            answer, such as "The final answer is": they end the thinking. They stand in the
            closing, too. Empty where the end of the turn alone ends it.
    """

    name: str
    user_instruction: str
    think_end: str
    closing: str
    box_prefix: str
    think_start: str = ""
    steps: str = ""
    wind_down: str = ""
    answer_end: str = ""
    answer_phrase: str = ""

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
        if self.answer_end and not self.box_prefix:
            raise ValueError(
                f"reasoning format {self.name!r}: answer_end is {self.answer_end!r}, but box_prefix"
                " is empty: what an end closes, a prefix must open"
            )
        if self.answer_phrase and self.think_end:
            raise ValueError(
                f"reasoning format {self.name!r}: answer_phrase is {self.answer_phrase!r}, but "
                f"think_end {self.think_end!r} ends the thinking: leave one of them empty"
            )
        if self.answer_phrase not in self.closing:
            raise ValueError(
                f"reasoning format {self.name!r}: answer_phrase is {self.answer_phrase!r}, which "
                f"must stand in closing {self.closing!r}: a stop lets the answer begin as the model"
                " itself would"
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
        "(ReasoningFormat.named('plain')); else pass a ReasoningFormat, whose think_end may be any "
        "text"
    )


@dataclass(frozen=True)
class TokenFormat:
    """A `ReasoningFormat` as the ids of one tokenizer; make it with `TokenFormat.compile`.

    Attributes:
        format: the literals.
        think_end_id: the id of the end marker; -1, which no token has, where there is none, or
            where it is several tokens.
        closing_ids: the closing; its first id is `think_end_id`, if there is one.
        box_prefix_ids: the prefix of a forced answer.
        eos_ids: ids that end a text, as far as the tokenizer knows.
        added_ids: ids of markers and special tokens, which are never visible text.
        kinds: one byte a token id: the bits that `BoundaryState` reads.
        brace_texts: the texts of the tokens that contain a brace or a backslash.
        answer_texts: those of the tokens with a character of `answer_end`; empty without one.
        think_start_ids: what opens the thinking.
        wind_down_ids: put before the closing.
        call_ids: ids that open a call of a tool, which ends a thinking that has no end marker.
        displays: in prose, the texts of tokens that open or close formulas and code; else None.
        turn: how the chat template opens the model's turn; None where that is not known.
        end_marker: an end marker of several tokens, or `answer_phrase`; None for none.
        start_marker: what opens the thinking, if it is several tokens, none of them added; else
            None.
        closing_rests: the ids left of the closing where an end marker of several tokens stands, by
            the symbols of the closing that stand after it already.
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
    answer_texts: Mapping[int, str] = dataclasses.field(default_factory=dict, repr=False)
    end_marker: Marker | None = None
    start_marker: Marker | None = None
    closing_rests: Mapping[str, tuple[int, ...]] = dataclasses.field(
        default_factory=dict, repr=False
    )

    @classmethod
    def compile(
        cls, reasoning_format: ReasoningFormat, tokenizer: PreTrainedTokenizerBase
    ) -> TokenFormat:
        """Compiles a format for a tokenizer.

        Raises:
            ValueError: the tokenizer's tokens do not join to a marker, or a turn has several
                messages and it has no token that ends one, or `wind_down` holds a marker.
        """
        literals = Literals(tokenizer)
        end_ids = literals.added_id(reasoning_format.think_end)
        end = None
        if not end_ids:
            end = literals.marker("thinking end marker", reasoning_format.think_end)
        end = end or literals.marker("answer_phrase", reasoning_format.answer_phrase)
        opens = re.match(r"<[^<>]+>", reasoning_format.think_start)
        rest = reasoning_format.closing.removeprefix(reasoning_format.think_end)
        if end is not None and opens is not None and opens[0] in rest:
            raise ValueError(
                f"the tokenizer has no thinking end marker {end.literal!r} "
                f"(format {reasoning_format.name!r}): it encodes as {literals.ids(end.literal)}, "
                "but in a turn of several messages it must be one token. Use a reasoning model's "
                "tokenizer, or a ReasoningFormat that fits it"
            )
        start_ids = tokenizer.encode(reasoning_format.think_start, add_special_tokens=False)
        start = None
        if literals.added.isdisjoint(start_ids):
            start = literals.marker("thinking start marker", reasoning_format.think_start)
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
        added = literals.added
        compiled = cls(
            format=reasoning_format,
            think_end_id=end_ids[0] if end_ids else -1,
            closing_ids=tuple(closing),
            box_prefix_ids=tuple(forced[len(closing) :]),
            eos_ids=() if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,),
            added_ids=added,
            kinds=bytes(0 if i in added else kind_of(text) for i, text in enumerate(texts)),
            brace_texts={i: text for i, text in enumerate(texts) if re.search(r"[{}\\]", text)},
            think_start_ids=tuple(start_ids),
            end_marker=end,
            start_marker=start,
            closing_rests={} if end is None else literals.rests(reasoning_format.closing, end),
            displays={i: text for i, text in enumerate(texts) if OF_DISPLAYED.search(text)}
            if reasoning_format.steps == "prose"
            else None,
            call_ids=frozenset(i for i in added if texts[i] in _CALL_OPENINGS),
            answer_texts={
                i: text
                for i, text in enumerate(texts)
                if not set(reasoning_format.answer_end).isdisjoint(text)
            },
        )
        compiled = compiled.winding_down(reasoning_format.wind_down, tokenizer)
        channels = compiled.channels
        turn = model_turn(
            tokenizer,
            compiled.think_start_ids,
            compiled.think_end_ids,
            () if channels is None else channels.answer,
            compiled.is_blank,
            start,
            end,
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
        """The end marker's id; none where it is several tokens, or where there is none."""
        return () if self.think_end_id < 0 else (self.think_end_id,)

    @property
    def in_reply(self) -> bool:
        """Whether a model thinks in its reply, so that its own answer stands there, too."""
        return not self.format.think_end

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
        Harmony the model itself writes `<|start|>assistant<|channel|>final<|message|>`. Of a
        `think_start` without any marker there are none: see `start_marker`.
        """
        start = self.think_start_ids
        found = self.added_ids.intersection(start)
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
            self.kinds,
            self.think_end_id,
            self.channels,
            self.call_ids,
            self.displays,
            self.end_marker,
            self.start_marker,
        )
        for token_id in taken:
            state.push(token_id)
        return state

    def end_state(self) -> BoundaryState:
        """A state that looks for the end marker and steps alone: a call of a tool ends nothing."""
        return BoundaryState(
            self.kinds,
            self.think_end_id,
            displays=self.displays,
            end=self.end_marker,
            start=self.start_marker,
        )

    def box_state(self) -> BoxState | EndTextState:
        """A state right after the box prefix, which finds the end of a forced answer."""
        if end := self.format.answer_end:
            return EndTextState(end, self.format.box_prefix, self.answer_texts)
        return BoxState(self.brace_texts)

    def answer_content(self, text: str) -> str:
        """The text of a completed forced answer without what ended it."""
        return text[: text.rfind(self.format.answer_end or "}")]

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

    def closing_left(self, state: BoundaryState) -> tuple[int, ...]:
        """The ids that the closing lacks where the model has ended its thinking itself."""
        if state.overhang is None:
            return self.closing_ids[state.closing_written :]
        whole = max(self.closing_rests, key=len)
        if whole and state.overhang.startswith(whole):
            return ()
        return self.closing_rests.get(state.overhang, self.closing_rests[""])

    def forced_suffix(
        self, answer: AnswerMode = "forced", ended: BoundaryState | None = None
    ) -> list[int]:
        """The ids forced after a stop: sentence, closing, and for a forced answer the box prefix.

        Args:
            answer: the answer mode.
            ended: after a natural end, the state that has found it: what of the closing the model
                has written is not forced.
        """
        if answer not in ("forced", "free"):
            raise ValueError(f"answer is {answer!r}; it must be 'forced' or 'free'")
        prefix = self.box_prefix_ids if answer == "forced" else ()
        if ended is not None:
            return [*self.closing_left(ended), *prefix]
        return [*self.wind_down_ids, *self.closing_ids, *prefix]

    def follow(self, prompt_ids: Sequence[int], ids: Iterable[int]) -> BoundaryState:
        """The state at the end of the thinking that goes on after a prompt, or of the ids.

        Its `thinking_tokens` count from the prompt's end, and are below 0 where the end began
        within the prompt.
        """
        state = self.boundary_state(prompt_ids[self.thinking_span(prompt_ids).start :])
        before = state.thinking_tokens
        if state.ended:
            state.end_tokens = 0  # they stand in the prompt
        for token_id in ids:
            if state.ended:
                break
            state.push(token_id)
        state.thinking_tokens -= before
        return state

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
