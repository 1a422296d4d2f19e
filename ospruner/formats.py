"""The formats of known families, and what is asked of one beside stopping."""

import dataclasses
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from modeling_ospruner.formats_ospruner import BoundaryState, ReasoningFormat, TokenFormat
from ospruner.provenance import read_object

_SPACED = "a  b\n\nc\n \n   d"
_BOXED = "Please reason step by step, and put your final answer within \\boxed{}."

DEEPSEEK_R1 = ReasoningFormat(
    "deepseek-r1", _BOXED, "</think>", "</think>\n\n", "\\boxed{", "<think>"
)
QWEN3 = dataclasses.replace(DEEPSEEK_R1, name="qwen3")
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
# Past reasoning reaches templates (GPT-OSS's) that look for it under another name than clients.
_HAND_ON = """{%- set ospruner = namespace(turns=[]) %}{%- for turn in messages %}
{%- set said = turn.reasoning or turn.reasoning_content %}
{%- set taken = said and not turn.thinking and not (turn.tool_calls and turn.content) %}
{%- set ospruner.turns = ospruner.turns + [dict(turn, thinking=said) if taken else turn] %}
{%- endfor %}{%- set messages = ospruner.turns %}"""
PRESETS = {preset.name: preset for preset in (DEEPSEEK_R1, QWEN3, HARMONY, PLAIN)}


def named(name: str) -> ReasoningFormat:
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
        literals = read_object(Path(name))
    except ValueError as error:
        raise ValueError(
            f"format is {name!r}, a file that cannot be read ({error}): it must be UTF-8 JSON, "
            "the literals of a ReasoningFormat"
        ) from error
    return ReasoningFormat.from_dict(literals)


def guess(tokenizer: PreTrainedTokenizerBase) -> ReasoningFormat:
    """The format that fits the markers in the tokenizer's vocabulary.

    Raises:
        ValueError: there is none.
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
        "(formats_ospruner.PLAIN); else pass a ReasoningFormat, whose think_end may be any text"
    )


def follow(fmt: TokenFormat, prompt_ids: Sequence[int], ids: Iterable[int]) -> BoundaryState:
    """The state at the end of the thinking that goes on after a prompt, or of the ids.

    Its `thinking_tokens` count from the prompt's end, and are below 0 where the end began
    within the prompt.
    """
    state = fmt.prompt_state(prompt_ids)
    before = state.thinking_tokens
    if state.ended:
        state.end_tokens = 0  # they stand in the prompt
    for token in ids:
        if state.ended:
            break
        state.push(token)
    state.thinking_tokens -= before
    return state


def prepare(literals: ReasoningFormat, tokenizer: PreTrainedTokenizerBase) -> None:
    """Makes `template_args` the defaults of a tokenizer's chat template, saved with it."""
    given = tokenizer.chat_template
    if isinstance(given, dict):  # of several templates by name
        tokenizer.chat_template = {name: _prepared(literals, one) for name, one in given.items()}
    elif given is not None:
        tokenizer.chat_template = _prepared(literals, given)


def _prepared(literals: ReasoningFormat, template: str) -> str:
    head = "".join(
        f"{{%- if {name} is not defined %}}{{%- set {name} = {json.dumps(value)} %}}{{%- endif %}}"
        for name, value in literals.template_arguments.items()
    )
    if re.search(r"(\.|\[['\"])thinking\b", template) and _HAND_ON not in template:
        head += _HAND_ON
    return template if not head or template.startswith(head) else head + "{{- '' }}" + template


def check_blanks(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuses a tokenizer that loses blanks or line ends (ValueError), and with them all steps."""
    ids = tokenizer.encode(_SPACED, add_special_tokens=False)
    back = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    if re.findall(r"\s+", str(back)) != re.findall(r"\s+", _SPACED):
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path!r}, loaded as {type(tokenizer).__name__}, "
            f"gives {_SPACED!r} back as {back!r}: blanks or paragraph ends are lost. Where "
            "transformers has rewritten it at loading, copy the model's folder and set "
            '"tokenizer_class": "PreTrainedTokenizerFast" in its tokenizer_config.json'
        )


def ends_alone(fmt: TokenFormat) -> TokenFormat:
    """A format of which only steps and the end marker are looked for.

    No call, no header and no second opening: what samples a trace ends where it ends first.
    """
    literals = dataclasses.replace(fmt.format, think_start="")
    bare = {"think_start_ids": (), "call_ids": frozenset[int](), "call_marker": None}
    return dataclasses.replace(fmt, format=literals, **bare)  # type: ignore[arg-type]
