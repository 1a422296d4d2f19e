"""A format in words: what was understood of a tokenizer, with an example."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from transformers import PreTrainedTokenizerBase

from modeling_ospruner.formats_ospruner import BREAK, TokenFormat

_PROBLEM = "What is 2 + 3?"
_TRACE = "First, 2 + 3 = 5.\n\nLet me check: 5 - 3 = 2.\n\nSo it is 5."
_SHOWN = 4


def boundary_ids(fmt: TokenFormat) -> list[int]:
    """The ids that end a step by themselves: those whose text contains a blank line."""
    return [i for i, kind in enumerate(fmt.kinds) if kind & BREAK]


def faults(fmt: TokenFormat, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What of the format does not fit the tokenizer, each with what to do; [] where all fits."""
    found = []
    if tokenizer.chat_template is None:
        found.append(
            "the tokenizer has no chat template: set tokenizer.chat_template, or write prompts raw "
            "and end them with think_start"
        )
    elif fmt.thinking_span(_prompt(fmt, tokenizer)).closed:
        found.append(
            f"the chat template's prompt already closes the thinking ({fmt.format.think_end!r}): "
            "choose its thinking mode, such as ospruner label --template-arg enable_thinking=true"
        )
    elif not fmt.header_ids:
        found.append(
            "the chat template appends nothing that opens the model's turn: in a chat of several "
            "turns, its thinking is looked for behind the last end of a text"
        )
    if fmt.format.think_start and not fmt.reentry_ids:
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

    def shown(ids: Iterable[int], otherwise: str = "nothing") -> str:
        ids = list(ids)
        text = tokenizer.decode(ids, skip_special_tokens=False)
        return f"{text!r}  {' '.join(map(str, ids))}" if ids else otherwise

    def each(ids: Iterable[int], otherwise: str = "nothing") -> str:
        return ", ".join(shown([i]) for i in ids) or otherwise

    alone, prompt = boundary_ids(fmt), _prompt(fmt, tokenizer)
    marker = fmt.end_marker
    end, cut = list(fmt.think_end_ids), ""
    if marker is not None:
        end = end or tokenizer.encode(marker.literal, add_special_tokens=False)
        cut = ", or as other tokens" + ", or the turn" * (not fmt.format.think_end)
    ended = fmt.boundary_state(end)
    rows = {
        "thinking opens with": shown(fmt.think_start_ids),
        "thinking ends with": shown(end) + cut if end else "the turn",
        "answer opens with": "" if fmt.channels is None else shown(fmt.channels.answer),
        "model's turn": shown((*fmt.header_ids, *fmt.opening_ids)),
        "forced at a stop": shown(fmt.forced_suffix("forced")),
        "... answer='free'": shown(fmt.forced_suffix("free")),
        "... at its own end": shown(fmt.forced_suffix("forced", ended) if end else ()),
        "masked in answers": each(fmt.reentry_ids),
        "ends a text": each(fmt.eos_ids),
        "step ends": f"{len(alone)} of {len(fmt.kinds)} tokens hold a blank line: "
        f"{each(alone[:_SHOWN], '')} ...",
    }
    lines = [f"Reasoning format {fmt.format.name!r}"]
    lines += [f"  {name:<20} {value}" for name, value in rows.items() if value]
    lines += ["Example prompt", f"  {tokenizer.decode(prompt, skip_special_tokens=False)!r}"]
    lines += ["Example trace, a line a step, with L, its tokens through the step's end"]
    trace, begin = _trace(fmt, tokenizer, prompt), 0
    for stop in fmt.step_ends(trace):
        lines.append(f"  L = {stop:<4} {tokenizer.decode(trace[begin:stop])!r}")
        begin = stop
    found = faults(fmt, tokenizer)
    return "\n".join(
        [*lines, *(["What is wrong", *(f"  {one}" for one in found)] if found else [])]
    )


def _prompt(fmt: TokenFormat, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids of a small problem, asked as labelling asks it; without a chat template, raw."""
    asked = f"{_PROBLEM}\n\n{fmt.format.user_instruction}"
    text = f"{asked}\n{fmt.format.think_start}"
    if tokenizer.chat_template is not None:
        message = [{"role": "user", "content": asked}]
        text = str(
            tokenizer.apply_chat_template(
                message,
                add_generation_prompt=True,
                tokenize=False,
                **fmt.format.template_arguments,
            )
        )
    return list(tokenizer.encode(text, add_special_tokens=False))


def _trace(
    fmt: TokenFormat, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]
) -> list[int]:
    """The ids of a small trace after the prompt, opened as a model would if the prompt does not."""
    opening = fmt.think_start_ids
    opened = not opening or any(
        tuple(prompt_ids[i : i + len(opening)]) == opening
        for i in range(max(0, len(prompt_ids) - len(opening) - 2), len(prompt_ids))
    )
    return [*(() if opened else opening), *tokenizer.encode(_TRACE, add_special_tokens=False)]
