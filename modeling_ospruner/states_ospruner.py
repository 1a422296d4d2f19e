"""What is followed token by token: where steps, the thinking and forced answers end.

Tokens have texts of their own; what these states find in a stream of ids depends on nothing else.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

from transformers import PreTrainedTokenizerBase

__all__ = [
    "BoundaryState",
    "BoxState",
    "Channels",
    "EndTextState",
    "Literals",
    "Marker",
    "MarkerState",
    "kind_of",
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
OF_DISPLAYED = re.compile(r"[\\\[\]$`]")
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


@dataclass(frozen=True)
class Marker:
    """A literal of several tokens, found in token ids however they cut it.

    Each token stands for a fixed row of symbols: one for each byte of its text, so that a
    character may be cut, too, or a single one that nothing else has, if it is a marker itself. The
    literal is complete with the first token after which the symbols of all tokens, joined, contain
    the literal's. Its tokens are those that hold any of these symbols: the first may begin with
    other text, and the last end with some.

    Attributes:
        literal: its text.
        symbols: its symbols.
        pieces: those of each id.
    """

    literal: str
    symbols: str
    pieces: Sequence[str] = field(repr=False)

    def state(self) -> MarkerState:
        """A state before any token."""
        return MarkerState(self)

    def places(self, ids: Sequence[int]) -> list[tuple[int, int]]:
        """Where it stands in `ids`, as (first token, after its last token), in order."""
        state, found = self.state(), []
        for i, token_id in enumerate(ids):
            if state.push(token_id):
                found.append((i + 1 - state.tokens, i + 1))
                state = self.state()
        return found

    @cached_property
    def _completing(self) -> tuple[tuple[int, ...], ...]:
        """The ids that complete it after its first j symbols; for j = 0 those that hold it all."""
        held = tuple(i for i, piece in enumerate(self.pieces) if self.symbols in piece)
        later = (
            tuple(i for i, piece in enumerate(self.pieces) if piece.startswith(self.symbols[j:]))
            for j in range(1, len(self.symbols))
        )
        return (held, *later)

    def completing(self, rest: str) -> tuple[int, ...]:
        """The ids that would complete it after text that ends with these symbols."""
        found = set(self._completing[0])
        for j in range(1, len(self.symbols)):
            if rest.endswith(self.symbols[:j]):
                found.update(self._completing[j])
        return tuple(sorted(found))


class MarkerState:
    """Looks for a `Marker` in a stream of ids; for its first place, after which it is to be left.

    Attributes:
        tokens: once it is complete, how many tokens are the marker's.
        overhang: then, the symbols after it in its last token.
    """

    __slots__ = ("_lengths", "_marker", "_rest", "overhang", "tokens")

    def __init__(self, marker: Marker) -> None:
        self._marker = marker
        self._rest = ""  # the last symbols, one fewer than the marker's
        self._lengths: deque[int] = deque()  # of the tokens that they come from
        self.tokens = 0
        self.overhang = ""

    def push(self, token_id: int) -> bool:
        """Takes the next token; whether the marker is complete."""
        pieces, symbols = self._marker.pieces, self._marker.symbols
        piece = pieces[token_id] if token_id < len(pieces) else "\U0010ffff"
        text = self._rest + piece
        at = text.find(symbols)
        if at >= 0:
            before, self.tokens = len(self._rest) - at, 1
            while before > 0:
                before -= self._lengths.pop()
                self.tokens += 1
            self.overhang = text[at + len(symbols) :]
            return True
        self._rest = text[max(0, len(text) - len(symbols) + 1) :]
        self._lengths.append(len(piece))
        kept = sum(self._lengths) - len(self._rest)
        while self._lengths and kept >= self._lengths[0]:
            kept -= self._lengths.popleft()
        return False

    def completing(self) -> tuple[int, ...]:
        """The ids that would complete the marker next."""
        return self._marker.completing(self._rest)


class Literals:
    """The literals of a format in one tokenizer.

    Attributes:
        added: ids of markers and special tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.added = frozenset(tokenizer.added_tokens_decoder)

    def ids(self, text: str) -> list[int]:
        """The ids of a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def added_id(self, literal: str) -> list[int]:
        """The id of a literal that is an added token; else none."""
        ids = self.ids(literal)
        alone = len(ids) == 1 and ids[0] in self.added and ids[0] != self._tokenizer.unk_token_id
        return ids if alone else []

    def marker(self, what: str, literal: str) -> Marker | None:
        """A literal of several tokens; None for an empty one.

        Args:
            what: the literal's name, for errors.
            literal: the literal.

        Raises:
            ValueError: the tokens that the tokenizer writes it with cannot be joined to it.
        """
        if not literal:
            return None
        found = Marker(literal, self._symbols(literal), self._pieces)
        for text in (literal, f"a\n{literal}\nb"):
            ids = self.ids(text)
            if self._tokenizer.unk_token_id in ids or not found.places(ids):
                raise ValueError(
                    f"the tokenizer has no {what} {literal!r}, nor tokens whose texts join to it: "
                    f"it writes {text!r} as {self._tokenizer.convert_ids_to_tokens(ids)}. Use a "
                    "reasoning model's tokenizer, or a ReasoningFormat that fits it"
                )
        return found

    def rests(self, closing: str, end: Marker) -> dict[str, tuple[int, ...]]:
        """For each part of the closing that may stand after the end marker, the ids still to come.

        By the part's symbols.
        """
        rest = closing[closing.index(end.literal) + len(end.literal) :]
        return {
            self._symbols(rest[:size]): tuple(self.ids(rest[size:]))
            for size in range(len(rest) + 1)
        }

    def _symbols(self, text: str) -> str:
        """The symbols of a text, in which added tokens stand for themselves."""
        symbols = {
            str(token): _own_symbol(i)
            for i, token in self._tokenizer.added_tokens_decoder.items()
            if str(token).strip()
        }
        if not symbols:
            return _bytes_of(text)
        longest = sorted(symbols, key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, longest))})", text)
        return "".join(symbols.get(part) or _bytes_of(part) for part in parts)

    @cached_property
    def _pieces(self) -> list[str]:
        """The symbols of each id; see `Marker`."""
        tokenizer = self._tokenizer
        # After another token: some tokenizers drop the blank that begins a text.
        anchor = self.ids("a")[-1:]
        before = str(tokenizer.decode(anchor, clean_up_tokenization_spaces=False))
        texts = tokenizer.batch_decode(
            [[*anchor, i] for i in range(len(tokenizer))],
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
        bytes_by_name = _byte_names()
        pieces = []
        for i, text in enumerate(texts):
            text = text.removeprefix(before)
            if i in self.added and text.strip():
                pieces.append(_own_symbol(i))
            elif "\ufffd" not in text:
                pieces.append(_bytes_of(text))
            else:  # a part of a character
                name = str(tokenizer.convert_ids_to_tokens(i))
                if re.fullmatch(r"<0x[0-9A-F]{2}>", name):
                    pieces.append(chr(int(name[3:5], 16)))
                elif set(name) <= set(bytes_by_name):
                    pieces.append("".join(bytes_by_name[character] for character in name))
                else:
                    pieces.append(_own_symbol(i))
        return pieces


def _own_symbol(token_id: int) -> str:
    return chr(0x10000 + token_id)


def _bytes_of(text: str) -> str:
    """A symbol for each byte."""
    return text.encode().decode("latin-1")


def _byte_names() -> dict[str, str]:
    """The bytes that the characters of a byte-level vocabulary stand for, as symbols."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    names = {chr(byte): chr(byte) for byte in shown}
    return names | {chr(256 + i): chr(byte) for i, byte in enumerate(others)}


class BoundaryState:
    r"""Finds step ends, and the end of the thinking, in a stream of tokens after a prompt.

    A token is a boundary if its text contains "\n\n", or is "\n" after a token that ends with
    "\n", with visible text since the last boundary (its own text up to the break included). The
    state starts where the thinking starts; added tokens such as `<think>` are no visible text.

    The thinking ends with the end marker, or where a call of a tool opens. An end marker of several
    tokens (`Marker`) ends it before the first of these, but never before the end of a step: a token
    that has ended one stays thinking. What opens the thinking, if it is several tokens, is no
    visible text either: once it is complete, a step begins. With channels, the end
    marker of a thinking message does it, or the header of the answer; other messages (a commentary,
    a call) have no steps and end nothing, and headers are no visible text. Text under no header is
    thinking.

    In prose, a blank line ends no step after a colon, or within a displayed formula or a block of
    code (`\\[`, `$$`, three backticks), of up to 8 blank lines.

    Attributes:
        kinds: one byte a token id, the bits of `kind_of`.
        end_id: the end marker; None where there is none, or to look for steps alone.
        end: an end marker of several tokens; None for none.
        start: what opens the thinking, if it is several tokens; None for none.
        channels: None where all that comes before the end marker is thinking.
        call_ids: ids that open a call of a tool.
        displays: in prose, the texts of the tokens that open or close formulas and code, or may be
            a part of what does; None elsewhere.
        ended: whether the thinking has ended; from there on nothing is a boundary.
        closing_written: how many ids of the closing stand there once the thinking has ended: 1
            after the end marker, all of them after the header of the answer.
        calls: whether it has ended with the opening of a call.
        overhang: once a marker of several tokens has ended it, the symbols after it in its last
            token; else None.
        thinking_tokens: the tokens taken before what ended it.
        end_tokens: once it has ended, those of the end marker or of the header of the answer; 0
            with a call.
    """

    __slots__ = (
        "_after_newline",
        "_bridged",
        "_colon",
        "_ending",
        "_headed",
        "_header",
        "_inside",
        "_last_step",
        "_open",
        "_rest",
        "_role_tokens",
        "_starting",
        "_visible",
        "call_ids",
        "calls",
        "channels",
        "closing_written",
        "displays",
        "end_id",
        "end_tokens",
        "ended",
        "kinds",
        "overhang",
        "thinking_tokens",
    )

    def __init__(
        self,
        kinds: bytes,
        end_id: int | None = None,
        channels: Channels | None = None,
        call_ids: frozenset[int] = frozenset(),
        displays: Mapping[int, str] | None = None,
        end: Marker | None = None,
        start: Marker | None = None,
    ) -> None:
        self.kinds = kinds
        self.displays = displays
        self.end_id = end_id
        self.channels = channels
        self.call_ids = call_ids
        self.calls = False
        self.ended = False
        self.closing_written = 0
        self.overhang: str | None = None
        self.thinking_tokens = 0
        self.end_tokens = 0
        self._ending = None if end is None else end.state()
        self._starting = None if start is None else start.state()
        self._last_step = 0
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
        if self._ending is not None and self._ending.push(token_id):
            self.overhang = self._ending.overhang
            self._end(0, min(self._ending.tokens, self.thinking_tokens - self._last_step))
            return False
        kind = self.kinds[token_id] if token_id < len(self.kinds) else 0
        broken = bool(kind & BREAK) or bool(kind & NEWLINE and self._after_newline)
        self._after_newline = bool(kind & ENDS_NEWLINE)
        visible = self._visible or bool(kind & VISIBLE)
        boundary = broken and visible
        if self.displays is not None:
            boundary = self._ends_prose(kind, self.displays.get(token_id), boundary)
        self._visible = bool(kind & VISIBLE_AFTER) or (visible and not boundary)
        if self._starting is not None and self._starting.push(token_id):
            self._visible = bool(self._starting.overhang.strip())
            return False
        if boundary:
            self._last_step = self.thinking_tokens
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
        self.end_tokens = 0 if self.calls else tokens

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


class EndTextState:
    r"""Finds the end of a forced answer that a text ends, such as a closing fence of code.

    The text may begin in the prefix, and tokens may cut it.

    Args:
        end: the text.
        prefix: the text before the answer.
        texts: of the tokens that hold any of the end's characters.
    """

    __slots__ = ("_end", "_rest", "_texts", "final_text")

    def __init__(self, end: str, prefix: str, texts: Mapping[int, str]) -> None:
        self.final_text = end[-1]  # stands in every token that completes the end
        self._end = end
        self._texts = texts
        self._rest = prefix[-len(end) + 1 :] if len(end) > 1 else ""

    def push(self, token_id: int) -> bool:
        """Takes the next answer token; whether the end stands there."""
        text = self._texts.get(token_id)
        if text is None:
            self._rest = ""
            return False
        text = self._rest + text
        self._rest = text[-len(self._end) + 1 :] if len(self._end) > 1 else ""
        return self._end in text
