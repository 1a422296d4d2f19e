"""Where in a prompt the model's own turn begins: earlier turns and quoted markers don't count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

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
    think_end_id: int,
    answer_ids: tuple[int, ...],
    is_blank: Callable[[int], bool],
) -> ModelTurn:
    """Reads from the chat template how the model's turn is opened.

    Args:
        tokenizer: its chat template is rendered for one user message.
        think_start_ids: what opens the thinking.
        think_end_id: the end marker.
        answer_ids: with several messages in a turn, what opens the message that ends it.
        is_blank: whether an id is neither a marker nor visible text.
    """
    prompt = tokenizer.encode(_generation_prompt(tokenizer), add_special_tokens=False)
    cut = len(prompt) if think_end_id not in prompt else prompt.index(think_end_id)
    prompt = prompt[:cut]
    start = _find(prompt, think_start_ids)
    header = prompt if start is None else prompt[:start]
    while header and is_blank(header[-1]):
        header = header[:-1]
    eos = tokenizer.eos_token_id
    return ModelTurn(
        header_ids=tuple(header),
        opening_ids=tuple(prompt[len(header) :]),
        think_start_ids=think_start_ids,
        closed_ids=answer_ids or (think_end_id,),
        answer_ids=answer_ids,
        eos_ids=() if eos is None or eos == think_end_id else (eos,),
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
