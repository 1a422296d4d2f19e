"""A format in words: what was understood of a tokenizer, with an example."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from modeling_ospruner.formats_ospruner import BREAK

if TYPE_CHECKING:
    from modeling_ospruner.formats_ospruner import TokenFormat

_PROBLEM = "What is 2 + 3?"
_TRACE = "First, 2 + 3 = 5.\n\nLet me check: 5 - 3 = 2.\n\nSo it is 5."
_SHOWN = 4


def boundary_ids(fmt: TokenFormat) -> list[int]:
    """The ids that end a step by themselves: those whose text contains a blank line."""
    return [i for i, kind in enumerate(fmt.kinds) if kind & BREAK]


def example_prompt(fmt: TokenFormat, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids of a small problem, asked as labelling asks it; without a chat template, raw."""
    asked = f"{_PROBLEM}\n\n{fmt.format.user_instruction}"
    if tokenizer.chat_template is None:
        text = f"{asked}\n{fmt.format.think_start}"
    else:
        message = [{"role": "user", "content": asked}]
        text = str(
            tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        )
    return list(tokenizer.encode(text, add_special_tokens=False))


def example_trace(
    fmt: TokenFormat, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]
) -> list[int]:
    """The ids of a small trace after the prompt, opened as a model would if the prompt does not."""
    opening = fmt.think_start_ids
    opened = not opening or any(
        tuple(prompt_ids[i : i + len(opening)]) == opening
        for i in range(max(0, len(prompt_ids) - len(opening) - 2), len(prompt_ids))
    )
    body = tokenizer.encode(_TRACE, add_special_tokens=False)
    return [*(() if opened else opening), *body]


def faults(fmt: TokenFormat, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What of the format does not fit the tokenizer, each with what to do; [] where all fits."""
    found = []
    prompt = example_prompt(fmt, tokenizer)
    if tokenizer.chat_template is None:
        found.append(
            "the tokenizer has no chat template: set tokenizer.chat_template, or write prompts raw "
            "and end them with think_start"
        )
    elif fmt.thinking_span(prompt).closed:
        found.append(
            f"the chat template's prompt already closes the thinking ({fmt.format.think_end!r}): "
            "choose its thinking mode, such as enable_thinking=True"
        )
    elif not fmt.header_ids:
        found.append(
            "the chat template appends nothing that opens the model's turn: in a chat of several "
            "turns, its thinking is looked for behind the last end of a text"
        )
    if fmt.format.think_start and not fmt.reentry_ids and fmt.start_marker is None:
        found.append(
            f"think_start {fmt.format.think_start!r} has no marker of its own here: an answer "
            "cannot be kept from opening the thinking again"
        )
    left_open = fmt.format.box_prefix.count("{") - fmt.format.box_prefix.count("}")
    if left_open != 1 and not fmt.format.answer_end:
        found.append(
            f"box_prefix {fmt.format.box_prefix!r} does not leave one brace open: forced answers "
            "would not end where their box closes. Use a prefix such as '\\\\boxed{'"
        )
    if not boundary_ids(fmt):
        found.append(
            "no token contains a blank line: steps end only at '\\n' after a token that ends with "
            "'\\n'"
        )
    return found


def describe(fmt: TokenFormat, tokenizer: PreTrainedTokenizerBase) -> str:
    """A format in words: how it was understood, with an example and what is wrong with it."""

    def shown(ids: Iterable[int]) -> str:
        ids = list(ids)
        if not ids:
            return "nothing"
        text = tokenizer.decode(ids, skip_special_tokens=False)
        return f"{text!r}  {' '.join(map(str, ids))}"

    alone = boundary_ids(fmt)
    some = ", ".join(shown([i]) for i in alone[:_SHOWN])
    prompt = example_prompt(fmt, tokenizer)
    trace = example_trace(fmt, tokenizer, prompt)
    marker, start = fmt.end_marker, fmt.start_marker
    literal = "" if marker is None else marker.literal
    end = fmt.think_end_ids or tokenizer.encode(literal, add_special_tokens=False)
    cut = "" if marker is None else ", or as other tokens"
    cut += ", or the turn" if marker is not None and not fmt.format.think_end else ""
    ended = fmt.boundary_state(end)
    reopening = "nothing" if start is None else f"what would complete {start.literal!r}"
    rows = [
        ("thinking opens with", shown(fmt.think_start_ids)),
        ("thinking ends with", shown(end) + cut if end else "the turn"),
        ("model's turn", shown((*fmt.header_ids, *fmt.opening_ids))),
        ("forced at a stop", shown(fmt.forced_suffix("forced"))),
        ("... answer='free'", shown(fmt.forced_suffix("free"))),
        ("... at its own end", shown(fmt.forced_suffix("forced", ended) if end else ())),
        ("masked in answers", ", ".join(shown([i]) for i in fmt.reentry_ids) or reopening),
        ("ends a text", ", ".join(shown([i]) for i in fmt.eos_ids) or "nothing"),
        ("step ends", f"{len(alone)} of {len(fmt.kinds)} tokens hold a blank line: {some} ..."),
    ]
    if fmt.channels is not None:
        rows.insert(2, ("answer opens with", shown(fmt.channels.answer)))
    lines = [f"Reasoning format {fmt.format.name!r}"]
    lines += [f"  {name:<20} {value}" for name, value in rows]
    lines += ["Example prompt", f"  {tokenizer.decode(prompt, skip_special_tokens=False)!r}"]
    lines += ["Example trace, a line a step, with L, its tokens through the step's end"]
    begin = 0
    for end in fmt.step_ends(trace):
        lines.append(f"  L = {end:<4} {tokenizer.decode(trace[begin:end])!r}")
        begin = end
    found = faults(fmt, tokenizer)
    lines += ["What is wrong", *(f"  {fault}" for fault in found)] if found else []
    return "\n".join(lines)
