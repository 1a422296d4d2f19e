"""Formats on real chat templates and tokenizers: where a turn thinks, and what is left to close."""

import copy
import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from modeling_ospruner.formats_ospruner import ReasoningFormat, TokenFormat
from ospruner.demo.shipped import Reasoner
from ospruner.eval.problems.task import prompt_token_ids
from ospruner.formats import DEEPSEEK_R1, HARMONY, QWEN3, follow, guess, prepare

Chat = list[dict[str, Any]]
ASK: Chat = [{"role": "user", "content": "What is 2 + 3?"}]


class Family:
    """A tokenizer with its chat template, and the format guessed from it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, fmt: TokenFormat) -> None:
        self.tokenizer = tokenizer
        self.fmt = fmt

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def prompt(self, chat: Chat, **template: Any) -> list[int]:
        options: dict[str, Any] = {"add_generation_prompt": True, "tokenize": False, **template}
        return self.ids(str(self.tokenizer.apply_chat_template(chat, **options)))

    def continued(self, content: str) -> list[int]:
        """The prompt of a chat whose last reply goes on (`continue_final_message`)."""
        chat = [*ASK, {"role": "assistant", "content": content}]
        return self.prompt(chat, add_generation_prompt=False, continue_final_message=True)


Families = Callable[[str], Family]


@pytest.fixture(scope="module")
def families(
    request: pytest.FixtureRequest, tiny_tokenizer: PreTrainedTokenizerBase, shared_dir: Path
) -> Families:
    """By name: a real tokenizer's, or of a small one with ChatML's markers and a known template."""

    @cache
    def make(name: str) -> Family:
        if name.startswith("real_"):
            return Family(*request.getfixturevalue(name))
        tokenizer = copy.deepcopy(tiny_tokenizer)
        tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
        tokenizer.eos_token = "<|im_end|>"
        folder = shared_dir / "data" / "tokenizers" / "templates"
        tokenizer.chat_template = (folder / f"{name}.jinja").read_text(encoding="utf-8")
        return Family(tokenizer, TokenFormat.compile(guess(tokenizer), tokenizer))

    return make


@pytest.fixture
def family(request: pytest.FixtureRequest, families: Families) -> Family:
    return families(request.param)


@pytest.fixture(scope="module")
def r1(families: Families) -> Family:
    return families("real_r1")


@pytest.fixture(scope="module")
def harmony(families: Families) -> Family:
    return families("real_harmony")


@pytest.fixture(scope="module")
def qwen3(families: Families) -> Family:
    return families("qwen3")


ANALYSIS = "<|channel|>analysis<|message|>"
NAMES = ["real_r1", "real_harmony", "qwen3", "qwq-32b"]
EVERY = pytest.mark.parametrize("family", NAMES, indirect=True)


def test_guess_tells_the_families_apart(families: Families) -> None:
    found = [families(name).fmt.format for name in NAMES]
    assert found == [DEEPSEEK_R1, HARMONY, QWEN3, DEEPSEEK_R1]


@EVERY
@pytest.mark.parametrize(
    "chat",
    [
        ASK,
        [{"role": "system", "content": "Be brief.\n\nEnd with </think> or <|end|>.\n\n"}, *ASK],
        [
            {"role": "system", "content": "S"},
            *ASK,
            {"role": "assistant", "content": "5.\n\nYes."},
            *ASK,
        ],
        [*ASK, {"role": "assistant", "content": "<think>\nhm\n\n5?\n\n</think>\n\nSo 5."}, *ASK],
        [
            {"role": "user", "content": "Hi </think>\n\nSo \\boxed{1} <|end|><|im_end|> <think>"},
            {"role": "assistant", "content": "What is </think>\n\nfor?"},
            *ASK,
        ],
        *(
            [{"role": "user", "content": quoted}]
            for quoted in (
                "What do <think> and </think>\n\n mean?",
                "I got </think>\n\n\\boxed{4} back.",
                "It said <|channel|>final<|message|>4, and <|end|>.",
                "It said <|end|><|start|>assistant<|channel|>final<|message|>4",
            )
        ),
    ],
)
def test_thinking_begins_at_the_prompts_end(family: Family, chat: Chat) -> None:
    """Markers of other turns, and those that a user quotes, are no thinking."""
    prompt = family.prompt(chat)
    trace = family.ids("First.\n\nThen")
    for whole in (prompt, [*prompt, *trace]):
        assert family.fmt.thinking_span(whole) == (len(prompt), len(whole), False)


@EVERY
def test_whole_text(family: Family) -> None:
    prompt, fmt = family.prompt(ASK), family.fmt
    opening = ANALYSIS if fmt.channels else ""
    trace = family.ids(f"{opening}First 2.\n\nThen 3.")
    answer = family.ids("So </think> it is \\boxed{5}.")
    closed = (len(prompt), len(prompt) + len(trace), True)
    whole = [*prompt, *trace, *fmt.closing_ids, *answer, *fmt.eos_ids]
    for end in range(len(prompt) + len(trace) + 1, len(whole) + 1):
        assert fmt.thinking_span(whole[:end]) == closed, end
    assert fmt.thinking_span([*whole, *family.ids("\n")]) == closed
    # The model gave up without a closing.
    assert fmt.thinking_span([*prompt, *trace, *fmt.eos_ids]) == closed
    # The next user's turn, with no turn of the model opened after it.
    later = [*whole, *family.prompt(ASK, add_generation_prompt=False)]
    assert fmt.thinking_span(later) == (len(later), len(later), False)
    # Known prompt length.
    assert fmt.thinking_span(whole, start=len(prompt)) == closed
    # Left padding with the end-of-text token, as R1-Distill pads.
    padded = [fmt.eos_ids[0]] * 3
    assert fmt.thinking_span([*padded, *whole]) == (closed[0] + 3, closed[1] + 3, True)
    assert fmt.thinking_span([*padded, *prompt]) == (len(prompt) + 3, len(prompt) + 3, False)


def test_prompts_without_the_chat_template(r1: Family) -> None:
    fmt = r1.fmt
    trace = r1.ids("First.\n\nThen")
    for prompt in ("What is 2 + 3?\n<think>\n", "Q: 1\n<think>a</think> 1\nQ: 2\n<think>\n"):
        ids = r1.ids(prompt)
        assert fmt.thinking_span([*ids, *trace]) == (len(ids) - 1, len(ids) + len(trace), False)
    closed = r1.ids("What is 2 + 3? <think>\nFive.</think>\n\nIt is")
    assert fmt.thinking_span(closed)[2]
    assert fmt.thinking_span(r1.ids("What is 2 + 3?</think>\n\nIt")).closed
    bare = r1.ids("What is 2 + 3?")
    assert fmt.thinking_span(bare) == (len(bare), len(bare), False)
    # <think> and a blank line in one token: the template's line break is not there to be skipped.
    merged = [*r1.prompt(ASK)[:-1], *r1.ids("\n\n"), *trace]
    begin = len(r1.prompt(ASK)) - 1
    assert fmt.thinking_span(merged) == (begin, len(merged), False)


def test_qwen3_without_thinking(qwen3: Family) -> None:
    fmt = qwen3.fmt
    closed = qwen3.prompt(ASK, enable_thinking=False)
    span = fmt.thinking_span(closed)
    assert span.closed
    assert qwen3.tokenizer.decode(closed[span.start :]) == "<think>\n\n</think>\n\n"
    opened = qwen3.prompt(ASK, enable_thinking=True)
    # The model writes <think> by itself, and it counts as thinking, but is no step.
    trace = qwen3.ids("<think>\n\nFirst.\n\nThen")
    span = fmt.thinking_span([*opened, *trace])
    assert span == (len(opened), len(opened) + len(trace), False)
    assert [qwen3.tokenizer.decode(trace[:end]) for end in fmt.step_ends(trace)] == [
        "<think>\n\nFirst.\n\n",
        "<think>\n\nFirst.\n\nThen",
    ]


def test_harmony_tool_call_in_the_chat(harmony: Family) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    tools = [{"type": "function", "function": {"name": "add", "description": "Adds."}}]
    chat: Chat = [
        *ASK,
        {"role": "assistant", "thinking": "Use\n\nit.", "tool_calls": [call]},
        {"role": "tool", "content": "5"},
    ]
    prompt = harmony.prompt(chat, tools=tools)
    text = str(harmony.tokenizer.decode(prompt))
    assert "analysis<|message|>Use\n\nit.<|end|>" in text
    assert text.endswith("<|end|><|start|>assistant")
    assert harmony.fmt.thinking_span(prompt) == (len(prompt), len(prompt), False)
    trace = harmony.ids(f"{ANALYSIS}So 5.")
    whole = [*prompt, *trace, *harmony.fmt.closing_ids]
    assert harmony.fmt.thinking_span(whole) == (len(prompt), len(prompt) + len(trace), True)


def test_harmony_turns_stay_apart(harmony: Family) -> None:
    fmt = harmony.fmt
    chat: Chat = [*ASK, {"role": "assistant", "content": "5.\n\nYes.", "thinking": "hm\n\nhm"}]
    assert harmony.tokenizer.decode(list(fmt.answer_end_ids)) == "<|end|>"
    trained = harmony.prompt(chat, add_generation_prompt=False)
    span = fmt.thinking_span(trained)
    assert harmony.tokenizer.decode(trained[span.start : span.end]) == f"{ANALYSIS}hm\n\nhm"
    assert span.closed
    # The user's message is last: the model has not begun.
    open_chat = harmony.prompt([*chat, *ASK], add_generation_prompt=False)
    assert fmt.thinking_span(open_chat) == (len(open_chat), len(open_chat), False)
    # The model speaks twice: the first message's answer is not this turn's.
    twice = harmony.prompt(chat[:1] + [{"role": "assistant", "content": "5."}] * 2)
    assert fmt.thinking_span(twice) == (len(twice), len(twice), False)


CUSTOM = {
    "name": "magistral-like",
    "user_instruction": "Box it.",
    "think_start": "[THINK]",
    "think_end": "[/THINK]",
    "closing": "[/THINK]Answer: ",
    "box_prefix": "$\\boxed{",
}


@pytest.mark.parametrize(
    ("opening", "counted"),
    [("{% if add_generation_prompt %}[MODEL]{% endif %}", True), ("", False)],
)
def test_custom_format_from_a_dictionary(
    tiny_tokenizer: PreTrainedTokenizerBase, opening: str, counted: bool
) -> None:
    """With no opening of the model's turn, the thinking is found behind its `think_start`."""
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.add_tokens(["[THINK]", "[/THINK]", "[MODEL]", "[USER]"])
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '[USER]' + m.content if m.role == 'user' else "
        "'[MODEL]' + m.content + eos_token }}{% endfor %}" + opening
    )
    fmt = TokenFormat.compile(ReasoningFormat.from_dict(CUSTOM), tokenizer)
    assert tokenizer.decode(fmt.forced_suffix()) == "[/THINK]Answer: $\\boxed{"
    assert tokenizer.decode(list(fmt.reentry_ids)) == "[THINK]"
    assert fmt.channels is None
    custom = Family(tokenizer, fmt)
    earlier = {"role": "assistant", "content": "[THINK]1\n\n2[/THINK]Answer: 5"}
    prompt = custom.prompt([*ASK, earlier, *ASK])
    assert fmt.thinking_span(prompt) == (len(prompt), len(prompt), False)
    trace = custom.ids("[THINK]One.\n\nTwo.")
    begin = len(prompt) if counted else len(prompt) + 1
    span = fmt.thinking_span([*prompt, *trace, *fmt.closing_ids])
    assert span == (begin, len(prompt) + len(trace), True)
    assert len(fmt.step_ends(trace)) == 2


def test_a_prefilled_reply_is_no_thinking(r1: Family, qwen3: Family, harmony: Family) -> None:
    """R1's template opens the thinking in each turn: a reply that begins without has none."""
    for family in (r1, qwen3, harmony):
        ids = family.continued("So\n\nit is")
        assert family.fmt.thinking_span(ids).closed
        assert follow(family.fmt, ids, family.ids("\n\n5.")).ended
        assert family.fmt.thinking_span([*ids, *family.ids("</think>\n\n5.")]).closed
    begins = len(r1.prompt(ASK)) - len(r1.fmt.opening_ids)
    assert r1.fmt.thinking_span(r1.continued("So it is")) == (begins, begins, True)
    raw = r1.prompt(ASK)
    assert not r1.fmt.thinking_span(raw[:-2]).closed  # nothing written yet: the model opens it
    assert not r1.fmt.thinking_span([*raw[:-2], *r1.ids("\n\n")]).closed
    assert r1.fmt.thinking_span([*raw[:-2], *r1.ids("\n\nIt is")]).closed
    # A turn in a trained chat, whose thinking the template has dropped.
    assert r1.fmt.thinking_span([*r1.continued("It is 5."), *r1.fmt.eos_ids]).closed


GLM = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}"
    "{{ '<think></think>\\n' }}{% endif %}{{ m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def test_a_partial_thinking_after_an_empty_closed_one_goes_on(qwen3: Family) -> None:
    """Templates write an empty thinking before a last reply; the client's own stands behind it."""
    glm = copy.deepcopy(qwen3.tokenizer)
    glm.chat_template = GLM
    for family in (qwen3, Family(glm, qwen3.fmt)):
        ids = family.continued("<think>\nFirst.\n\nThen")
        text = str(family.tokenizer.decode(ids))
        assert text.count("<think>") == 2
        span = family.fmt.thinking_span(ids)
        assert not span.closed
        thought = str(family.tokenizer.decode(ids[span.start :]))
        assert thought.lstrip("\n") == "<think>\nFirst.\n\nThen"
        for content in ("<think>\nFirst.\n</think>\n\nSo", "The tag <think> opens it"):
            assert family.fmt.thinking_span(family.continued(content)).closed


def test_arguments_of_the_template_hold_for_all_that_is_made_of_a_format(qwen3: Family) -> None:
    tokenizer = copy.deepcopy(qwen3.tokenizer)
    given = str(tokenizer.chat_template)
    said = "enable_thinking is defined and enable_thinking is false"
    assert said in given
    tokenizer.chat_template = given.replace(said, "not (enable_thinking | default(false))")
    closed = TokenFormat.compile(QWEN3, tokenizer)
    with pytest.raises(ValueError, match="--template-arg enable_thinking=true"):
        prompt_token_ids("p", "Hi", tokenizer, closed)
    literals = dataclasses.replace(QWEN3, template_args='{"enable_thinking": true}')
    assert ReasoningFormat.from_dict(literals.to_dict()) == literals
    fmt = TokenFormat.compile(literals, tokenizer)
    prompt = prompt_token_ids("p", ASK[0]["content"], tokenizer, fmt)
    assert not fmt.thinking_span(prompt).closed
    for _ in range(2):
        prepare(literals, tokenizer)
        found = Family(tokenizer, fmt)
        assert found.prompt(ASK) == prompt
        assert closed.thinking_span(found.prompt(ASK, enable_thinking=False)).closed
    assert str(tokenizer.chat_template).count("set enable_thinking") == 1


@pytest.mark.parametrize("name", ["thinking", "reasoning", "reasoning_content"])
def test_past_reasoning_between_turns_of_tools_is_handed_on(harmony: Family, name: str) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call], name: "I must add."}
    chat: Chat = [*ASK, turn, {"role": "tool", "name": "add", "content": "5"}]
    tokenizer = copy.deepcopy(harmony.tokenizer)
    prepare(HARMONY, tokenizer)
    family = Family(tokenizer, harmony.fmt)
    text = str(tokenizer.decode(family.prompt(chat)))
    assert "<|channel|>analysis<|message|>I must add.<|end|>" in text
    turn["content"] = "Let me see."  # the template takes it for the thinking, and refuses both
    if name != "thinking":
        assert "<|message|>Let me see.<|end|>" in str(tokenizer.decode(family.prompt(chat)))
    assert family.prompt(ASK) == harmony.prompt(ASK)


def test_chat_templates_without_a_default_are_named(reasoner: Reasoner) -> None:
    tokenizer: Any = copy.deepcopy(reasoner.tokenizer)
    one = tokenizer.chat_template
    for templates in ({"rag": one, "tool_use": one}, {}):
        tokenizer.chat_template = templates
        with pytest.raises(ValueError, match="multiple chat templates .* no default"):
            TokenFormat.compile(DEEPSEEK_R1, tokenizer)
    tokenizer.chat_template = {"default": one, "tool_use": one}
    whole = TokenFormat.compile(DEEPSEEK_R1, reasoner.tokenizer)
    assert TokenFormat.compile(DEEPSEEK_R1, tokenizer).header_ids == whole.header_ids
