"""Formats inside generate: a model that writes what a script says, and what is forced after it."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from modeling_ospruner import OSPrunerForCausalLM
from modeling_ospruner.formats_ospruner import ReasoningFormat, TokenFormat
from ospruner.formats import DEEPSEEK_R1, HARMONY, PLAIN
from ospruner.train.untrained import untrained

from ..chats import chat_ids
from ..families import ALWAYS, NEVER

TEXTUAL = ReasoningFormat(
    "textual", "Box it.", "</reason>", "</reason>\n\n", "\\boxed{", "<reason>"
)
FORMS = {
    "harmony": HARMONY,
    # Markers of calls: Qwen3's, two more, and as text that the chat template shows.
    **dict.fromkeys(["calls", "minimax", "mistral", "hermes"], DEEPSEEK_R1),
    "softly": replace(DEEPSEEK_R1, wind_down="Enough, so:"),
    "textual": TEXTUAL,
    "plain": PLAIN,
    "phrase": replace(PLAIN, answer_phrase="The final answer is"),
}
OPENERS = {"calls": "<tool_call>", "minimax": "<minimax:tool_call>", "mistral": "[TOOL_CALLS]"}
HARMONY_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
Models = Callable[[str], OSPrunerForCausalLM]


@pytest.fixture(scope="module")
def models(tiny_base_dir: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> Models:
    """The model of each format, made once."""

    @cache
    def made(kind: str) -> OSPrunerForCausalLM:
        tokenizer = copy.deepcopy(tiny_tokenizer)
        base = Qwen2ForCausalLM.from_pretrained(tiny_base_dir)
        if kind == "harmony":
            markers = ["<|start|>", "<|channel|>", "<|message|>", "<|return|>"]
            tokenizer.add_tokens(markers, special_tokens=True)
            tokenizer.eos_token = "<|return|>"
            tokenizer.chat_template = HARMONY_TEMPLATE
        elif kind in OPENERS:
            tokenizer.add_tokens([OPENERS[kind]], special_tokens=kind == "mistral")
        elif kind == "hermes":
            tokenizer.chat_template = f"{{# <tool_call> #}}{tokenizer.chat_template}"
        elif kind == "textual":
            tokenizer.chat_template = str(tokenizer.chat_template).replace("<think>", "<reason>")
        base.resize_token_embeddings(len(tokenizer))
        base.generation_config.eos_token_id = tokenizer.eos_token_id
        return untrained(base, tokenizer, reasoning_format=FORMS[kind], tuning="layers")

    return made


def tokens(model: OSPrunerForCausalLM, text: str) -> list[int]:
    return list(model.tokenizer.encode(text, add_special_tokens=False))


def write(
    model: OSPrunerForCausalLM,
    script: str,
    prefill: str = "",
    stop_strings: list[str] | None = None,
    **settings: Any,
) -> tuple[str, Any]:
    """What is written after the prompt, and the record."""
    prompt, ids = chat_ids(model.tokenizer, "2 + 3?", prefill), tokens(model, script)

    def will(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The model writes the script, whatever has been forced in between."""
        at = input_ids.shape[1] - len(prompt)
        scores[:, ids[at : at + 1]] = 1e4
        return scores

    how: dict[str, Any] = {"max_new_tokens": len(ids) + 30, "do_sample": False}
    how |= {"stop_policy": {"max_answer_tokens": 4, **settings}, "stop_strings": stop_strings}
    output = model.generate(torch.tensor([prompt]), logits_processor=[will], **how)
    return str(model.tokenizer.decode(output[0][len(prompt) :])), model.last_stop[0]


@dataclass
class Case:
    """A script, how it is written, how the text begins that comes of it, and what is told of it."""

    kind: str
    script: str
    starts: str
    how: dict[str, Any]
    reason: str = "policy"
    thought: str | None = None  # the thinking, where its tokens are counted
    steps: int | None = None
    never: str = ""  # what does not follow the beginning


ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
BOXED = f"{HARMONY.closing}{HARMONY.box_prefix}"
ROLE = "<|end|><|start|>assistant"
HELD = f"{ANALYSIS}First.\n\n"
OTHER = f"<|channel|>commentary<|message|>I add.\n\nSo.{ROLE}"
CALLS = f"{HELD}Then.{ROLE} to=x<|channel|>commentary"
TOOL = f"{HELD}{ROLE}<|channel|>commentary to=x<|constrain|>json<|message|>{{\n\n}}<|return|>"
AGAIN = f"{HELD}{ROLE}<|channel|>analysis<|message|>Again.\n\n"
IN_THINKING = 'First.\n\nI add.\n<tool_call>\n{"name": "add"}\n\n</tool_call>\n\n'
TWICE = "First.</think>\n\nSo 5.\n<think>\nI check.\n\nIt fits.\n\n"
PHRASED = "It is.\n\nSo I check.\n\nThe final answer is 5, as.\n\nI said."
STOPPED = TWICE.removesuffix("It fits.\n\n")
CHECKED = "It is.\n\nSo I check.\n\n"
LONG, FREE, TOOLS = {"max_answer_tokens": 90}, {"answer": "free"}, {"answer": "tools"}
ROOM = {"max_thinking_tokens": 3, "max_answer_tokens": 20}
LIMITED = NEVER | FREE | LONG | {"max_thinking_tokens": 20}
HALF = {"prefill": "First.\n\nThen</rea"}
THOUGHT_ON = f"{HELD}{HARMONY.closing}5.{ROLE}{HELD}"
SPOKEN = "First.</think> Say <think>."
LATER = "First.\n\n</think>\n\n<tool_call>"
LATEST, CHANNEL = "First.\n\n</think>\n\n", "<|channel|>"
ENDED = f"{HELD}{BOXED}5<|end|>"
REPLIED, STRINGS = f"I.\n\n{ROLE}{FINAL}It.\n\n", {"stop_strings": ["\n\n"]} | LONG
BOX, AFTER = "</reason>\n\n\\boxed{", "\n\n\n\nThe final answer is \\boxed{"
CASES = [
    Case("harmony", f"{HELD}Then.\n\n", HELD + BOXED, ALWAYS),
    # The model has written <|end|> and wants to call a tool: the final channel is forced.
    Case("harmony", CALLS, f"{HELD}Then.{BOXED}", NEVER, "natural", steps=1),
    Case("harmony", CALLS, CALLS, NEVER | FREE | LONG, "natural"),
    Case("harmony", f"{OTHER}{HELD}Then.\n\n", OTHER + HELD + BOXED, ALWAYS, steps=1),
    Case("harmony", f"{FINAL}It is\n\n5.", f"{FINAL}\\boxed{{", ALWAYS, "natural", "", 0),
    Case("harmony", f"{FINAL}It is\n\n5.", f"{FINAL}It", ALWAYS | FREE, "natural", "", 0),
    # The second half of a break whose first half stands in the prompt ends a step.
    Case("harmony", "\nThen.\n\n", f"\n{BOXED}", ALWAYS | {"prefill": HELD[:-1]}, steps=1),
    Case("harmony", "5.\n\n", "5.\n\n", ALWAYS | {"prefill": HARMONY.closing}, "natural"),
    # With answer "tools" the model chooses the channel of its reply, after either end.
    Case("harmony", TOOL, TOOL, ALWAYS | TOOLS | LONG),
    Case("harmony", TOOL, TOOL, NEVER | TOOLS | LONG, "natural"),
    Case("harmony", TOOL, HELD + HARMONY.closing, ALWAYS | FREE),
    # An answer does not open the thinking again; with tools any channel but the analysis is free.
    Case("harmony", f"{HELD}{BOXED}<|channel|>", HELD + BOXED, ALWAYS, never="<|channel|>"),
    Case("harmony", AGAIN, HELD + ROLE + CHANNEL, ALWAYS | TOOLS | LONG, never="analysis"),
    Case("harmony", AGAIN, AGAIN, ALWAYS | TOOLS | LONG | {"mask_reentry": False}),
    Case("calls", f"{LATEST}\\boxed{{<think>", f"{LATEST}\\boxed{{", ALWAYS, never="<think>"),
    Case("calls", f"{LATEST}<think>", LATEST, ALWAYS | FREE, never="<think>"),
    # It ends with its message.
    Case("harmony", f"{ENDED}xxxx", ENDED, ALWAYS | LONG, never="x"),
    # A call within the thinking is the model's own end, and is let be.
    *(
        Case(kind, text, text, NEVER | how | LONG, "natural", thought, 1)
        for kind, opener in (*OPENERS.items(), ("hermes", "<tool_call>"))
        for text in [IN_THINKING.replace("<tool_call>", opener)]
        for thought in ["First.\n\nI add" if kind == "hermes" else "First.\n\nI add.\n"]
        for how in (FREE, TOOLS, {})
    ),
    Case("hermes", "Say <tool_call>.\n\n", "Say <tool_call>.\n\n</think>\n\n", ALWAYS),
    # The thinking that a natural answer opens again counts, and may be stopped.
    Case("calls", TWICE, f"{STOPPED}</think>\n\n", NEVER | FREE | ROOM, "budget", STOPPED, 1),
    Case("harmony", f"{THOUGHT_ON}Then.\n\n", THOUGHT_ON + HARMONY.closing, LIMITED, "budget"),
    # One that an answer speaks of does not.
    Case("calls", f"{SPOKEN}\n\n", SPOKEN, ALWAYS | FREE | LONG, "natural", "First.", 0),
    Case("calls", LATER, LATER, ALWAYS | TOOLS),
    Case("softly", "First.\n\n", "First.\n\nEnough, so:</think>\n\n\\boxed{", ALWAYS),
    Case("softly", "First.\n\n", "First.\n\n</think>\n\n", ALWAYS | {"wind_down": ""}),
    Case("softly", "First.</think>", "First.</think>\n\n\\boxed{", NEVER, "natural", "First."),
    Case("textual", "First.\n\nThen.\n\n", f"First.\n\n{BOX}", ALWAYS),
    *(
        Case("textual", f"One.\n\nThen{end}{said}", starts, NEVER | how, "natural", "One.\n\nThen")
        for end in ("</reason>", "</reason>\n", "</reason>\n\n")
        for said, starts, how in (
            ("", f"One.\n\nThen{BOX}", {}),
            ("It is.", f"One.\n\nThen{end}It is.", FREE | LONG),
        )
    ),
    Case("textual", "son>", "son>\n\n\\boxed{", NEVER | HALF, "natural", "", 0),
    Case("plain", "It is:\n\n5.\n\nY", f"It is:\n\n5.{AFTER}", ALWAYS),
    Case("plain", "It is.\n\n5.<|end|>", "It is.\n\n5.<|end|>", NEVER, "natural", "It is.\n\n5."),
    Case("phrase", PHRASED, f"{CHECKED}{AFTER[4:]}", NEVER, "natural", CHECKED, 2),
    # From the phrase on nothing is thinking, and no step ends.
    Case("phrase", PHRASED, PHRASED, NEVER | FREE | LONG, "natural", steps=2),
    Case("phrase", PHRASED, f"It is.{AFTER}", ALWAYS),
    # A stop string ends the answer, and cuts no thinking: what the model wrote on is "No".
    *(
        Case(kind, f"{text}No", text, how | STRINGS, reason, never="No")
        for kind, text, how, reason in (
            ("calls", "I.\n\n</think>\n\nIt.\n\n", ALWAYS | FREE, "policy"),
            ("textual", "I.\n\n</reason>\n\nIt.\n\n", NEVER | FREE, "natural"),
            ("harmony", REPLIED, NEVER | FREE | {"prefill": ANALYSIS}, "natural"),
            ("calls", "It.\n\n", NEVER | FREE | {"prefill": "</think>"}, "natural"),
            ("plain", "It.\n\n", NEVER, "length"),  # whose reply is what it thinks in
        )
    ),
    Case("calls", "I.\n\n", "I.\n\n</think>\n\n\\boxed{", ALWAYS | STRINGS),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind}-{case.reason}")
def test_what_is_written_and_what_is_told(models: Models, case: Case) -> None:
    model = models(case.kind)
    text, record = write(model, case.script, **case.how)
    assert text.startswith(case.starts)
    assert not case.never or case.never not in text.removeprefix(case.starts)
    assert record.reason == case.reason
    if case.reason == "policy":
        assert record.thinking_tokens == record.step_ends[-1]
    if case.thought is not None:
        assert record.thinking_tokens == len(tokens(model, case.thought))
    if case.steps is not None:
        assert len(record.step_ends) == case.steps


@pytest.mark.parametrize("forms", [1, 2, 3])
def test_a_full_step_waits_for_a_marker_that_is_half_written(models: Models, forms: int) -> None:
    model = models("textual")
    form = replace(TEXTUAL, step_tokens=forms)
    fmt = TokenFormat.compile(form, model.tokenizer)
    ids = tokens(model, "So I add</reason>\n\n5")
    state = fmt.boundary_state()
    ends = [i for i, token in enumerate(ids) if state.push(token)]
    assert ends
    assert all("<" not in model.tokenizer.decode(ids[: end + 1]) for end in ends)
    assert model.tokenizer.decode(ids[: state.thinking_tokens]) == "So I add"
