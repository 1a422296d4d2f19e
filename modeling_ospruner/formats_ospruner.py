"""How a model family writes its thinking, and where its steps end, as token ids.

`ReasoningFormat` holds a family's literals; `TokenFormat` is a format compiled for one tokenizer.
Step ends are a property of token ids, decided by `BoundaryState` alone, wherever they are needed;
text is never tokenised again. A literal that is one added token is that id; any other one is a
`Marker`, found in whatever tokens the model writes it.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, takewhile
from typing import Any, ClassVar, Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

from .configuration_ospruner import check_integer

try:
    from jinja2.exceptions import TemplateError
except ImportError:  # then no chat template can be rendered at all
    TemplateError = RuntimeError  # type: ignore[assignment, misc]

Place = tuple[int, int]  # of a literal: its first token, and the one after its last
# What opens a call of a tool in the families' templates, such as Mistral's [TOOL_CALLS].
_CALL_OPENING = re.compile(
    r"(?i:<(?:[^/<>\s'\"]*[^a-z0-9/])?(?:tool|function)[\W_]?calls?"
    r"(?:[\W_](?:section_)?(?:begin|start))?[^\w\s<>/]*>)|\[TOOL_CALLS\]|<\|python_tag\|>"
)
_DOUBTS = ("Wait", "Hmm", "Hm", "Alternatively", "Actually")  # that begin a sentence
# Stored where they say something.
_OPTIONAL = ("steps", "wind_down", "answer_end", "answer_phrase", "template_args", "step_tokens")
_NO_ARGUMENTS = ("messages", "tools", "documents", "add_generation_prompt", "tokenize")


@dataclass(frozen=True)
class ReasoningFormat:
    """The literals of a family's thinking. Labels and policies are bound to them."""

    name: str
    user_instruction: str  # appended to the user's problem; it asks for a boxed answer
    think_end: str  # the marker that ends the thinking; "" for models that think in their reply
    closing: str  # what leads from the thinking to the answer; begins with `think_end`
    # Put before a forced answer. It opens one brace, which the answer closes, unless `answer_end`
    # says what else ends it.
    box_prefix: str
    # What opens the thinking, written by the prompt or by the model, and by no answer; or "".
    think_start: str = ""
    # What ends a step: "" for each blank line, "prose" for those outside of formulas and code that
    # follow no colon (`BoundaryState`).
    steps: str = ""
    # A sentence put before the closing where the model did not end its thinking itself, such as
    # "I have what I need, so:"; "" for none.
    wind_down: str = ""
    answer_end: str = ""  # the text that ends a forced answer, such as a closing fence of code
    # Of a model that thinks in its reply, the words with which it begins its final answer, such as
    # "The final answer is": they end the thinking, and stand in the closing.
    answer_phrase: str = ""
    template_args: str = ""  # of the chat template: a JSON object such as {"enable_thinking": true}
    # A step also ends after so many tokens, so that a loop can be stopped; 0: never (the paper).
    step_tokens: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "step_tokens" and not isinstance(value, str):
                raise TypeError(f"reasoning format: {name} is {value!r}; it must be a text")
        check_integer("reasoning format", "step_tokens", self.step_tokens, 0)
        wrong = {
            "name and closing must not be empty": not (self.name and self.closing),
            "steps must be '' or 'prose'": self.steps not in ("", "prose"),
            "think_start needs a think_end": self.think_start and not self.think_end,
            "answer_end needs a box_prefix": self.answer_end and not self.box_prefix,
            "answer_phrase and think_end exclude each other": self.answer_phrase and self.think_end,
            "closing must begin with think_end": not self.closing.startswith(self.think_end),
            "answer_phrase must stand in closing": self.answer_phrase not in self.closing,
            "template_args must be a JSON object of the chat template's own arguments (not "
            f"{', '.join(_NO_ARGUMENTS)}): texts, numbers and booleans": self._odd_arguments(),
        }
        if found := [what for what, is_wrong in wrong.items() if is_wrong]:
            raise ValueError(f"{'; '.join(found)}: {self}")

    def _odd_arguments(self) -> bool:
        try:
            given = self.template_arguments
        except (ValueError, TypeError):
            return True
        plain = all(isinstance(value, str | int | float) for value in given.values())
        named = all(name.isidentifier() and name not in _NO_ARGUMENTS for name in given)
        return not (plain and named)

    @property
    def template_arguments(self) -> dict[str, Any]:
        """What `template_args` says, by name."""
        return dict(json.loads(self.template_args or "{}"))

    def to_dict(self) -> dict[str, str | int]:
        """The literals by field name, as stored in configurations and manifests."""
        return {k: v for k, v in vars(self).items() if v or k not in _OPTIONAL}

    @classmethod
    def from_dict(cls, literals: Mapping[str, Any]) -> ReasoningFormat:
        """The format of `to_dict`; ValueError where a field is unknown, missing, or no text."""
        try:
            return cls(**literals)
        except TypeError as error:
            names = ", ".join(one.name for one in dataclasses.fields(cls))
            raise ValueError(f"reasoning_format: {error}; its fields are {names}") from error


# What a token's text means for step ends, as bits.
BREAK = 1  # it contains a blank line
NEWLINE = 2  # it is "\n" alone
ENDS_NEWLINE = 4  # it ends with "\n"
VISIBLE = 8  # visible text (before its last blank line, where it has one)
VISIBLE_AFTER = 16  # visible text after its last blank line
COLON = 32  # its visible text (before its last blank line) ends with a colon

# What a displayed formula or a block of code opens or closes with; tokens may cut it.
_DISPLAYED = re.compile(r"\\\[|\\\]|\$\$|```")
_MOST_BRIDGED = 8  # blank lines, so that a formula that never closes does not hide all steps


def _around_break(text: str) -> tuple[str, str]:
    before, blank_line, after = text.rpartition("\n\n")  # the last one
    return (before, after) if blank_line else (after, "")


def kind_of(text: str) -> int:
    """The bits of one token's text, for `BoundaryState`."""
    before, after = _around_break(text)
    return (
        (BREAK if "\n\n" in text else 0)
        | (NEWLINE if text == "\n" else 0)
        | (ENDS_NEWLINE if text.endswith("\n") else 0)
        | (VISIBLE if before.strip() else 0)
        | (VISIBLE_AFTER if after.strip() else 0)
        | (COLON if before.rstrip().endswith(":") else 0)
    )


class Channels(NamedTuple):
    """Harmony's channels: each message is a role, a header, a body, and the end marker."""

    thinking: tuple[int, ...]  # <|channel|>analysis<|message|>
    answer: tuple[int, ...]  # <|channel|>final<|message|>
    role_tokens: int  # between an end marker and the next header: <|start|>assistant


@dataclass(frozen=True)
class Marker:
    """A literal, complete with the first token after which the joined texts contain it."""

    literal: str
    texts: Sequence[str] = field(repr=False)  # of each id

    def check(self, tokenizer: PreTrainedTokenizerBase, what: str) -> None:
        """Refuses a literal whose characters themselves are cut by the tokenizer."""
        for text in (self.literal, f"a\n{self.literal}\nb"):
            ids = list(tokenizer.encode(text, add_special_tokens=False))
            if tokenizer.unk_token_id in ids or not self.places(ids):
                raise ValueError(
                    f"the tokenizer has no {what} {self.literal!r}, nor tokens whose texts join to "
                    f"it: it writes {text!r} as {tokenizer.convert_ids_to_tokens(ids)}. Use a "
                    "reasoning model's tokenizer, or a ReasoningFormat that fits it"
                )

    def places(self, ids: Sequence[int]) -> list[Place]:
        """Where it stands in `ids`, in order."""
        state, found = MarkerState(self), []
        for end, token in enumerate(ids, 1):
            if state.push(token):
                found.append((end - state.tokens, end))
                state = MarkerState(self)
        return found


class MarkerState:
    """Looks for the first place of a `Marker` in ids, or in the text `before` and these.

    Attributes:
        final_text: stands in every token that completes it.
        tokens: once it is complete, how many tokens hold any of it.
        overhang: then, the text after it in its last token.
    """

    def __init__(self, marker: Marker, before: str = "") -> None:
        self.final_text, self.tokens, self.overhang = marker.literal[-1], 0, ""
        self._marker = marker
        self._recent = [before]  # texts, as far back as the marker may have begun

    @property
    def half(self) -> bool:
        """Whether the tokens end with a part of it."""
        text, literal = "".join(self._recent), self._marker.literal
        return any(text.endswith(literal[:size]) for size in range(1, len(literal)))

    def push(self, token: int) -> bool:
        """Takes the next token; whether the marker is complete."""
        literal, texts = self._marker.literal, self._marker.texts
        self._recent.append(texts[token] if token < len(texts) else "\ufffd")
        text = "".join(self._recent)
        before, found, self.overhang = text.partition(literal)
        if found:
            self.tokens = sum(end > len(before) for end in accumulate(map(len, self._recent)))
            self._recent = []
            return True
        while self._recent and len(text) - len(self._recent[0]) >= len(literal) - 1:
            text = text[len(self._recent.pop(0)) :]
        return False


class BoundaryState:
    r"""Finds step ends, and the end of the thinking, in a stream of tokens after a prompt.

    A token is a boundary if its text contains "\n\n", or is "\n" after a token that ends with
    "\n", with visible text since the last boundary (its own text up to the break included). Added
    tokens such as `<think>`, and a start marker of several tokens, are no visible text. In prose, a
    blank line ends no step after a colon, or within a displayed formula or a block of code (`\\[`,
    `$$`, three backticks), of up to 8 blank lines. `step_tokens` without an end are a step, too.

    The thinking ends with the end marker, or where a call of a tool opens; `think_start` opens it
    again at the beginning of a line, or of a message. A marker of several tokens ends it before the
    first of these, but never before the end of a step. With channels, the end marker of a thinking
    message does it, or the header of the answer; other messages (a commentary, a call) have no
    steps and end nothing, and text under no header is thinking.

    Attributes:
        ended: whether the thinking has ended; where nothing opens it again, no step follows.
        calls: whether it has ended with the opening of a call.
        closing_written: how many ids of the closing stand there once the thinking has ended.
        overhang: the symbols after an end marker of several tokens, in its last token; else None.
        thinking_tokens: the tokens taken before what (last) ended it.
        end_tokens: those of the end marker, or of the header of the answer; 0 with a call.
        answer_tokens: those taken since, from the first visible one on.
    """

    def __init__(self, token_format: TokenFormat) -> None:
        self._format, self._channels = token_format, token_format.channels
        self.thinking_tokens = 0
        self._open_thinking()

    def _open_thinking(self) -> None:
        fmt = self._format
        self.ended = self.calls = False
        self.closing_written = self.end_tokens = self._since = self.answer_tokens = 0
        self.overhang: str | None = None
        end, start, call = fmt.end_marker, fmt.start_marker, fmt.call_marker
        self._ending = None if end is None else MarkerState(end)
        self._starting = None if start is None else MarkerState(start)
        self._calling = None if call is None else MarkerState(call, "\n")
        self._reopening: MarkerState | None = None
        self._last_step, self._visible, self._after_newline = self.thinking_tokens, False, False
        # In prose: within a formula or code, for how many blank lines, after a colon, cut markers.
        self._open, self._bridged, self._colon, self._rest = False, 0, False, ""
        self._inside, self._headed, self._header = True, False, list[int]()
        self._role_tokens = 0 if self._channels is None else self._channels.role_tokens

    @property
    def step_tokens(self) -> int:
        """The tokens taken since the last step end."""
        return self.thinking_tokens - self._last_step

    def push(self, token: int) -> bool:
        """Takes the next token; whether it ends a step."""
        fmt = self._format
        if self.ended:
            self._since += 1
            self.answer_tokens += bool(self.answer_tokens or not fmt.is_blank(token))
            meant = fmt.start_marker is not None or token in fmt.added_ids
            if self._reopening is not None and self._reopening.push(token) and meant:
                self.thinking_tokens += self._since
                self._open_thinking()
            return False
        self.thinking_tokens += 1
        if self._channels is not None and not self._in_thinking_message(token, self._channels):
            return False
        if token == fmt.think_end_id or token in fmt.call_ids:
            self.calls = token != fmt.think_end_id
            self._end(1 - self.calls, 1)
            return False
        for marker in (self._ending, self._calling):
            if marker is not None and marker.push(token):
                self.calls = marker is self._calling
                self.overhang = None if self.calls else marker.overhang
                self._end(0, min(marker.tokens, self.step_tokens))
                return False
        kind = fmt.kinds[token] if token < len(fmt.kinds) else 0
        broken = bool(kind & BREAK) or bool(kind & NEWLINE and self._after_newline)
        self._after_newline = bool(kind & ENDS_NEWLINE)
        visible = self._visible or bool(kind & VISIBLE)
        boundary = broken and visible
        if fmt.format.steps == "prose":
            text = fmt.texts[token] if token < len(fmt.texts) else ""
            boundary = self._ends_prose(kind, text, boundary)
        full = 0 < fmt.format.step_tokens <= self.step_tokens
        boundary = boundary or (full and not (self._ending is not None and self._ending.half))
        self._visible = bool(kind & VISIBLE_AFTER) or (visible and not boundary)
        if self._starting is not None and self._starting.push(token):
            self._visible = bool(self._starting.overhang.strip())
            return False
        if boundary:
            self._last_step = self.thinking_tokens
        return boundary

    def _ends_prose(self, kind: int, text: str, boundary: bool) -> bool:
        """The same in prose, where a formula, code, or what follows a colon goes on."""
        before, after = _around_break(text)
        self._follow(before)
        if kind & VISIBLE:
            self._colon = bool(kind & COLON)
        bridged = boundary and self._open and self._bridged < _MOST_BRIDGED
        self._bridged += bridged
        boundary = boundary and not (bridged or self._colon)
        self._follow(after)
        if kind & VISIBLE_AFTER:
            self._colon = False
        return boundary

    def _follow(self, text: str) -> None:
        """Looks for what opens or closes a formula or code, also across tokens."""
        text, end = self._rest + text, 0
        for found in _DISPLAYED.finditer(text):
            self._open = found[0] == r"\[" or (found[0] != r"\]" and not self._open)
            self._bridged, end = 0, found.end()
        self._rest = text[end:][-2:]

    def _end(self, closing_written: int, tokens: int) -> None:
        self.ended = True
        self.closing_written = closing_written
        self.thinking_tokens -= tokens
        self._since, self.end_tokens, fmt = tokens, 0 if self.calls else tokens, self._format
        if start := fmt.format.think_start:
            role = fmt.closing_ids[1 : 1 + self._channels.role_tokens] if self._channels else ()
            again = Marker((fmt.text(role) or "\n") + start, fmt.texts)
            self._reopening = MarkerState(again, self.overhang or "\n")

    def _in_thinking_message(self, token: int, channels: Channels) -> bool:
        """Follows the headers; whether the token belongs to the body of a thinking message."""
        if token == channels.thinking[0]:
            # A role longer than usual addresses someone: a tool is called, nothing is thought.
            addressed = not self._headed and self._role_tokens != channels.role_tokens
            self._header = [] if addressed else [token]
            self._headed, self._inside = True, False
        elif self._header:
            self._header.append(token)
            if token == channels.thinking[-1]:
                header, self._header = tuple(self._header), []
                if header == channels.thinking:
                    self._inside, self._visible, self._after_newline = True, False, False
                elif header[: len(channels.answer) - 1] == channels.answer[:-1]:
                    self._end(1 + channels.role_tokens + len(channels.answer), len(header))
        elif self._headed and self._inside:
            return True
        elif token == self._format.think_end_id and not self._inside:
            self._headed, self._role_tokens = False, 0
        else:
            self._role_tokens += 1
            return self._inside
        return False


class BoxState:
    r"""Finds the end of a forced answer: the brace that closes the box opened by the prefix.

    Escaped braces (`\{`) do not count, as in LaTeX.
    """

    final_text: ClassVar[str] = "}"  # stands in every token that closes a box

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts  # of each token id
        self._depth, self._escaped = 1, False

    def push(self, token: int) -> bool:
        """Takes the next answer token; whether the box is closed."""
        for character in self._texts[token] if token < len(self._texts) else "":
            if self._escaped or character == "\\":
                self._escaped = not self._escaped
            elif character in "{}":
                self._depth += 1 if character == "{" else -1
                if self._depth <= 0:
                    return True
        return False


class ThinkingSpan(NamedTuple):
    """Where the thinking of the model's last turn lies in a prompt."""

    start: int  # the first id after the generation prompt
    end: int  # the place of the end marker
    closed: bool  # whether it has ended, so that what follows is no thinking


@dataclass(frozen=True)
class TokenFormat:
    """A `ReasoningFormat` as the ids of one tokenizer; make it with `TokenFormat.compile`."""

    format: ReasoningFormat
    think_end_id: int  # -1, which no token has, where there is none, or where it is several tokens
    closing_ids: tuple[int, ...]  # the first is `think_end_id`, if there is one
    box_prefix_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]
    added_ids: frozenset[int] = field(repr=False)  # markers, which are never visible text
    kinds: bytes = field(repr=False)  # one byte a token id: the bits that `BoundaryState` reads
    texts: Sequence[str] = field(repr=False)  # of each token id
    think_start_ids: tuple[int, ...] = ()
    wind_down_ids: tuple[int, ...] = ()
    header_ids: tuple[int, ...] = ()  # what opens the model's turn, up to the thinking's markers
    opening_ids: tuple[int, ...] = ()  # what the chat template writes then, up to an end marker
    call_ids: frozenset[int] = frozenset()  # that open a call of a tool: it ends a thinking
    call_marker: Marker | None = None  # the same of several tokens, where it begins a line
    end_marker: Marker | None = None  # of several tokens, or `answer_phrase`
    start_marker: Marker | None = None  # of several tokens, none of them added
    # The ids left of the closing after an end marker of several tokens, by what stands there of it.
    closing_rests: Mapping[str, tuple[int, ...]] = field(default_factory=dict, repr=False)

    @classmethod
    def compile(cls, literals: ReasoningFormat, tokenizer: PreTrainedTokenizerBase) -> TokenFormat:
        """Compiles a format for a tokenizer.

        Raises:
            ValueError: the tokenizer's tokens do not join to a marker, a turn has several messages
                and no token ends one, or `wind_down` holds a marker.
        """

        def ids(text: str) -> list[int]:
            return list(tokenizer.encode(text, add_special_tokens=False))

        added = frozenset(tokenizer.added_tokens_decoder)
        texts = _texts(tokenizer)
        end_ids = [i for i in ids(literals.think_end) if i != tokenizer.unk_token_id]
        end = start = None
        if len(end_ids) != 1 or end_ids[0] not in added:
            end_ids = []
            if ending := literals.think_end or literals.answer_phrase:
                end = Marker(ending, texts)
                end.check(tokenizer, "thinking end marker")
        rest = literals.closing.partition(end.literal)[2] if end is not None else ""
        opens = re.match(r"<[^<>]+>", literals.think_start)
        if end is not None and opens is not None and opens[0] in rest:
            raise ValueError(
                f"think_end {end.literal!r} (format {literals.name!r}) encodes as "
                f"{ids(end.literal)}; in a turn of several messages it must be one token"
            )
        if literals.think_start and added.isdisjoint(ids(literals.think_start)):
            start = Marker(literals.think_start, texts)
            start.check(tokenizer, "thinking start marker")
        shown = {*_CALL_OPENING.findall(str(tokenizer.chat_template or ""))}
        shown -= {texts[i].strip() for i in added}  # those of which there is no token
        closing, forced = ids(literals.closing), ids(literals.closing + literals.box_prefix)
        if forced[: len(closing)] != closing:  # a token would reach over the seam
            forced = [*closing, *ids(literals.box_prefix)]
        eos = tokenizer.eos_token_id
        compiled = cls(
            format=literals,
            think_end_id=end_ids[0] if end_ids else -1,
            closing_ids=tuple(closing),
            box_prefix_ids=tuple(forced[len(closing) :]),
            think_start_ids=tuple(ids(literals.think_start)),
            eos_ids=() if eos is None else (eos,),
            added_ids=added,
            call_ids=frozenset(i for i in added if _CALL_OPENING.fullmatch(texts[i].strip())),
            call_marker=Marker(f"\n{min(shown)}", texts) if shown else None,
            kinds=bytes(0 if i in added else kind_of(text) for i, text in enumerate(texts)),
            texts=texts,
            end_marker=end,
            start_marker=start,
            closing_rests={rest[:size]: tuple(ids(rest[size:])) for size in range(len(rest) + 1)},
        )
        prompt = ids(_generation_prompt(tokenizer, literals.template_arguments))
        if closed := _places(prompt, compiled.think_end_ids, end):
            prompt = prompt[: closed[0][0]]
        opened = _places(prompt, compiled.think_start_ids, start)
        size = opened[0][0] if opened else len(prompt)
        while size and compiled.is_blank(prompt[size - 1]):
            size -= 1
        header, opening = tuple(prompt[:size]), tuple(prompt[size:])
        compiled = dataclasses.replace(compiled, header_ids=header, opening_ids=opening)
        return compiled.winding_down(literals.wind_down, tokenizer)

    def winding_down(self, sentence: str, tokenizer: PreTrainedTokenizerBase) -> TokenFormat:
        """This format with a sentence before the closing ("" for none), which holds no marker."""
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

    @cached_property
    def channels(self) -> Channels | None:
        """The headers of thinking and answer, where a turn has several messages; else None."""
        start, closing = self.think_start_ids, self.closing_ids
        if len(start) < 2 or start[0] not in closing or start[-1] not in self.added_ids:
            return None
        at = closing.index(start[0])
        return Channels(thinking=start, answer=closing[at:], role_tokens=at - 1)

    @cached_property
    def reentry_ids(self) -> tuple[int, ...]:
        """Added tokens that would open the thinking, or with channels a message, in an answer."""
        found = self.added_ids.intersection(self.think_start_ids)
        if found.intersection(self.closing_ids):
            found = found | self.added_ids.intersection(self.closing_ids)
        return tuple(sorted(found.difference(self.think_end_ids)))

    @cached_property
    def rethinking_ids(self) -> frozenset[int]:
        """Ids with which an answer thinks on: words of doubt, and markers that end no message."""
        markers = () if self.channels is not None else (*self.reentry_ids, *self.think_end_ids)
        doubts = (i for i, text in enumerate(self.texts) if text.strip() in _DOUBTS)
        return frozenset((*markers, *doubts))

    @property
    def answer_end_ids(self) -> tuple[int, ...]:
        """Ids, beside those that end a text, that end an answer: Harmony's end of a message."""
        return () if self.channels is None else self.think_end_ids

    def boundary_state(self, taken: Iterable[int] = ()) -> BoundaryState:
        """A state at the start of a thinking part, or after its tokens `taken`."""
        state = BoundaryState(self)
        for token in taken:
            state.push(token)
        return state

    def box_state(self) -> BoxState | MarkerState:
        """A state right after the box prefix, which finds the end of a forced answer."""
        prefix, end = self.format.box_prefix, self.format.answer_end
        if not end:
            return BoxState(self.texts)
        return MarkerState(Marker(end, self.texts), prefix[max(0, len(prefix) + 1 - len(end)) :])

    def step_ends(self, trace_ids: Sequence[int]) -> list[int]:
        """L_i for each step of a trace: the tokens through its end; the trace's end is the last.

        A trace is thinking tokens alone: no prompt, no end marker, nothing forced.
        """
        state = self.boundary_state()
        ends = [i + 1 for i, token in enumerate(trace_ids) if state.push(token)]
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
        self,
        answer: Literal["forced", "free", "tools"] = "forced",
        ended: BoundaryState | None = None,
    ) -> list[int]:
        """The ids forced after a stop: sentence, closing, and for a forced answer the box prefix.

        With "tools" the model chooses the channel. After a natural end, which the state `ended` has
        found, only what the model has not written of the closing is forced.
        """
        left = [*self.wind_down_ids, *self.closing_ids]
        if ended is not None:
            left = list(self.closing_left(ended))
        elif answer == "tools" and self.channels is not None:
            del left[-len(self.channels.answer) :]
        return [*left, *(self.box_prefix_ids if answer == "forced" else ())]

    def thinking_span(self, ids: Sequence[int], start: int | None = None) -> ThinkingSpan:
        """Where the thinking of the model's last turn lies in ids without padding.

        They may also hold what the model wrote after the prompt. Earlier turns, system prompts and
        what users quote don't count: the last turn begins where the chat template opens it, or at
        `start`, where the prompt's length is known.
        """
        ids, prompt = list(ids), start is None
        start, replies = self._begins(ids) if start is None else (start, False)
        state, end = self.boundary_state(), start
        while not (state.ended or replies) and end < len(ids):
            replies = ids[end] in self.eos_ids and ids[end] != self.think_end_id
            if not replies:
                state.push(ids[end])
                end += 1
        span = ThinkingSpan(start, start + state.thinking_tokens, state.ended or replies)
        literal, thought = self.format.think_start, self.text(ids[start : span.end]).strip()
        empty = prompt and state.ended and bool(literal) and not thought.removeprefix(literal)
        if empty and self._beginning(ids[end:]) == literal and not (state.overhang or "").strip():
            # A template closes an empty thinking before a partial one that the client has given.
            return self.thinking_span(ids, end)
        return span

    def prompt_state(self, prompt_ids: Sequence[int]) -> BoundaryState:
        """The state in which the model goes on after a prompt; `ended` where it thinks no more."""
        span = self.thinking_span(prompt_ids)
        state = self.boundary_state(prompt_ids[span.start :])
        state.ended = span.closed
        return state

    def is_blank(self, token: int) -> bool:
        """Whether an id is neither a marker nor visible text."""
        known = token not in self.added_ids and token < len(self.kinds)
        return known and not self.kinds[token] & (VISIBLE | VISIBLE_AFTER)

    def _begins(self, ids: list[int]) -> tuple[int, bool]:
        """Where the thinking of the last turn begins, and whether a reply stands there instead.

        In a raw prompt, the last `think_start` of the last text counts, else its last end marker.
        Under a template that opens the thinking, a turn that begins with other text has none.
        """
        floor, literal = self._last_text(ids), self.format.think_start
        at = self._last_turn(ids, floor)
        if at is not None:
            at += len(self.header_ids)
            opens = literal and self._beginning(self.opening_ids) == literal
            replies = opens and not literal.startswith(self._beginning(ids[at:]))
            pairs = zip(ids[at:], self.opening_ids, strict=False)
            return at + len([*takewhile(lambda pair: pair[0] == pair[1], pairs)]), bool(replies)
        if self.header_ids and self.header_ids[0] in ids[floor:]:
            return len(ids), False  # someone else's message is the last one
        if opened := _places(ids[floor:], self.think_start_ids, self.start_marker):
            # With channels, at the header.
            return floor + opened[-1][self.channels is None], False
        wanted = self.think_end_ids if self.channels is None else self.channels.answer
        closed = _places(ids[floor:], wanted, None if self.channels else self.end_marker)
        return (floor + closed[-1][0] if closed else len(ids)), False

    def text(self, ids: Iterable[int]) -> str:
        """The joined texts of ids, special tokens among them."""
        return "".join(self.texts[i] if i < len(self.texts) else "\ufffd" for i in ids)

    def _beginning(self, ids: Sequence[int]) -> str:
        """The text of ids after leading blanks, as far as `think_start` would reach."""
        size = len(self.format.think_start)
        first = next((i for i, one in enumerate(ids) if not self.is_blank(one)), len(ids))
        return self.text(ids[first : first + size]).lstrip()[:size]

    def _last_text(self, ids: list[int]) -> int:
        """Where the last text begins: after the last end of one that something visible follows."""
        followed = False
        for i in range(len(ids) - 1, -1, -1):
            if followed and ids[i] in self.eos_ids and self.think_end_id not in self.eos_ids:
                return i + 1
            followed = followed or not self.is_blank(ids[i])
        return 0

    def _last_turn(self, ids: list[int], floor: int) -> int | None:
        """Where the model's last turn begins, if the last message is the model's."""
        header, begin = self.header_ids, None
        answer = () if self.channels is None else self.channels.answer[:-1]
        for at in range(len(ids) - 1, floor - 1, -1):
            after = at + len(header)
            if not header or ids[at] != header[0] or (begin is None and after > len(ids)):
                continue  # which may be cut off
            answers = tuple(ids[after : after + len(answer)]) == answer
            if tuple(ids[at:after]) != header or (begin is not None and answers):
                break  # someone else's, or an earlier turn's
            begin = at
            if not answer:
                break  # one message a turn
        return begin


def _generation_prompt(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]) -> str:
    """What the chat template appends to open the model's turn; "" where it has no such thing."""
    if tokenizer.chat_template is None:
        return ""
    message, how = [{"role": "user", "content": "x"}], {"tokenize": False, **arguments}
    try:
        without, whole = (
            str(tokenizer.apply_chat_template(message, add_generation_prompt=add, **how))
            for add in (False, True)
        )
    except (ImportError, TemplateError):
        return ""
    return whole.removeprefix(without) if whole.startswith(without) else ""


def _places(ids: Sequence[int], wanted: Sequence[int], marker: Marker | None) -> list[Place]:
    """Where a literal stands, by its ids or as a marker; nowhere if it is empty."""
    if marker is not None:
        return marker.places(ids)
    size, wanted = len(wanted), tuple(wanted)
    starts = range(len(ids) - size + 1 if size else 0)
    return [(i, i + size) for i in starts if tuple(ids[i : i + size]) == wanted]


def _texts(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text of each id (bytes of a broken character become U+FFFD)."""
    # After another token: some tokenizers drop the blank that begins a text.
    anchor = list(tokenizer.encode("a", add_special_tokens=False))[-1:]
    first, *texts = tokenizer.batch_decode(
        [anchor, *([*anchor, i] for i in range(len(tokenizer)))],
        skip_special_tokens=False,
        clean_up_tokenization_spaces=False,
    )
    return [text.removeprefix(first) for text in texts]
