r"""What watches a model's tokens as they come: where its steps, its thinking and its box end.

Both states read token ids alone, through tables that `TokenFormat.compile` makes of one
tokenizer. Labels, training, generate and every engine use the same two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

# What a token's text means for step ends, as bits.
BREAK = 1  # it contains a blank line
NEWLINE = 2  # it is "\n" alone
ENDS_NEWLINE = 4  # it ends with "\n"
VISIBLE = 8  # visible text (before its last blank line, where it has one)
VISIBLE_AFTER = 16  # visible text after its last blank line


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

    The thinking ends with the end marker. With channels, the end marker of a thinking message
    does it, or the header of the answer; other messages (a commentary, a call of a tool) have no
    steps and end nothing, and headers are no visible text. Text under no header is thinking.

    Attributes:
        kinds: one byte a token id, the bits of `kind_of`.
        end_id: the end marker; None to look for steps alone.
        channels: None where all that comes before the end marker is thinking.
        ended: whether the thinking has ended; from there on nothing is a boundary.
        closing_written: how many ids of the closing stand there once the thinking has ended: 1
            after the end marker, all of them after the header of the answer.
        thinking_tokens: the tokens taken before the end marker, or before that header.
    """

    __slots__ = (
        "_after_newline",
        "_headed",
        "_header",
        "_inside",
        "_role_tokens",
        "_visible",
        "channels",
        "closing_written",
        "end_id",
        "ended",
        "kinds",
        "thinking_tokens",
    )

    def __init__(
        self, kinds: bytes, end_id: int | None = None, channels: Channels | None = None
    ) -> None:
        self.kinds = kinds
        self.end_id = end_id
        self.channels = channels
        self.ended = False
        self.closing_written = 0
        self.thinking_tokens = 0
        self._visible = False
        self._after_newline = False
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
        if token_id == self.end_id:
            self._end(1, 1)
            return False
        kind = self.kinds[token_id] if token_id < len(self.kinds) else 0
        broken = bool(kind & BREAK) or bool(kind & NEWLINE and self._after_newline)
        self._after_newline = bool(kind & ENDS_NEWLINE)
        visible = self._visible or bool(kind & VISIBLE)
        boundary = broken and visible
        self._visible = bool(kind & VISIBLE_AFTER) or (visible and not boundary)
        return boundary

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
