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
from ospruner.formats import DEEPSEEK_R1, HARMONY, QWEN3, guess, prepare

from .test_formats_generate import ANALYSIS, TEXTUAL

Chat = list[dict[str, Any]]


def turns(*contents: str) -> Chat:
    """What the user and the model said in turn."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": said} for i, said in enumerate(contents)]


ASK = turns("What is 2 + 3?")
QUOTING = turns("<reason>2 + 3?</reason>")


@dataclasses.dataclass
class Family:
    """A tokenizer with its chat template, and the format guessed from it."""

    tokenizer: PreTrainedTokenizerBase
    fmt: TokenFormat

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def prompt(self, chat: Chat, opened: bool = True, **template: Any) -> list[int]:
        options: dict[str, Any] = {"add_generation_prompt": opened, "tokenize": False, **template}
        return self.ids(str(self.tokenizer.apply_chat_template(chat, **options)))

    def continued(self, content: str) -> list[int]:
        """The prompt of a chat whose last reply goes on (`continue_final_message`)."""
        return self.prompt(turns("2?", content), opened=False, continue_final_message=True)


Families = Callable[[str], Family]


GLM = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}"
    "{{ '<think></think>\\n' }}{% endif %}{{ m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
UNOPENED = (  # no opening of the model's turn: the thinking is found behind its `think_start`
    "{% for m in messages %}{{ '[USER]' + m.content if m.role == 'user' else "
    "'[MODEL]' + m.content + eos_token }}{% endfor %}"
)
OPENED = UNOPENED + "{% if add_generation_prompt %}[MODEL]{% endif %}"
CUSTOM = ReasoningFormat(
    "magistral-like", "Box it.", "[/THINK]", "[/THINK]Answer: ", "$\\boxed{", "[THINK]"
)


@pytest.fixture(scope="module")
def families(
    request: pytest.FixtureRequest, tiny_tokenizer: PreTrainedTokenizerBase, shared_dir: Path
) -> Families:
    """By name: a real tokenizer's, or of a small one with a known template or one of these."""

    @cache
    def make(name: str) -> Family:
        if name.startswith("real_"):
            return Family(*request.getfixturevalue(name))
        tokenizer, form = copy.deepcopy(tiny_tokenizer), None
        if name == "textual":
            form, given = TEXTUAL, str(tokenizer.chat_template).replace("<think>", "<reason>")
        elif name in ("opened", "unopened"):
            tokenizer.add_tokens(["[THINK]", "[/THINK]", "[MODEL]", "[USER]"])
            form, given = CUSTOM, OPENED if name == "opened" else UNOPENED
        else:
            tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
            tokenizer.eos_token = "<|im_end|>"
            folder = shared_dir / "data" / "tokenizers" / "templates"
            given = GLM if name == "glm" else (folder / f"{name}.jinja").read_text("utf-8")
        tokenizer.chat_template = given
        return Family(tokenizer, TokenFormat.compile(form or guess(tokenizer), tokenizer))

    return make


@pytest.fixture
def family(request: pytest.FixtureRequest, families: Families) -> Family:
    return families(request.param)


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
        turns("2 + 3?", "<think>\nhm\n\n5?\n\n</think>\n\nSo 5.", "3 + 4?"),
        turns("Hi </think>\n\nSo \\boxed{1} <|end|><|im_end|> <think>", "</think>\n\nfor?", "Yes."),
        turns("What do <think> and </think>\n\n mean?"),
        turns("It said <|channel|>final<|message|>4, and <|end|>."),
        turns("It said <|end|><|start|>assistant<|channel|>final<|message|>4"),
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
    assert fmt.thinking_span([*prompt, *trace, *fmt.eos_ids]) == closed, "it gave up"
    # The next user's turn, with no turn of the model opened after it.
    later = [*whole, *family.prompt(ASK, opened=False)]
    assert fmt.thinking_span(later) == (len(later), len(later), False)
    assert fmt.thinking_span(whole, start=len(prompt)) == closed
    # Left padding with the end-of-text token, as R1-Distill pads.
    padded = [fmt.eos_ids[0]] * 3
    assert fmt.thinking_span([*padded, *whole]) == (closed[0] + 3, closed[1] + 3, True)
    assert fmt.thinking_span([*padded, *prompt]) == (len(prompt) + 3, len(prompt) + 3, False)


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds."}}]
CALLED: Chat = [
    *ASK,
    {"role": "assistant", "thinking": "Use\n\nit.", "tool_calls": [CALL]},
    {"role": "tool", "content": "5"},
]
SAID = {"role": "assistant", "content": "5.", "thinking": "hm\n\nhm"}
EARLIER = turns("2 + 3?", "[THINK]1\n\n2[/THINK]Answer: 5", "3 + 4?")
THOUGHT, EMPTY = "[THINK]1.\n\n2.[/THINK]A", ("<think>\n\n", "</think>\n\n")
PARTIAL, OVER = "<think>\nFirst.\n\nThen", "<think>\nFirst.\n\nThen</think>\n\nSo"
END_OF_R1 = "<｜end▁of▁sentence｜>"
# Of a family's ids: what is thought, what stands behind it, whether it is closed.
SPANS: list[tuple[str, Callable[[Family], list[int]], tuple[str, str, bool]]] = [
    # Without the chat template.
    ("real_r1", lambda f: f.ids("2?\n<think>\nFirst.\n\nThen"), ("\nFirst.\n\nThen", "", False)),
    ("real_r1", lambda f: f.ids("1\n<think>a</think> 1\n2\n<think>\nOne"), ("\nOne", "", False)),
    ("real_r1", lambda f: f.ids("2? <think>\n5.</think>\n\nIt"), ("\n5.", "</think>\n\nIt", True)),
    ("real_r1", lambda f: f.ids("2?</think>\n\nIt"), ("", "</think>\n\nIt", True)),
    ("real_r1", lambda f: f.ids("What is 2 + 3?"), ("", "", False)),
    # The template's line break, and a blank line in its place.
    ("real_r1", lambda f: f.prompt(ASK)[:-1] + f.ids("\n\nOne."), ("\n\nOne.", "", False)),
    ("qwen3", lambda f: f.prompt(ASK, enable_thinking=False), (*EMPTY, True)),
    # The model writes <think> by itself, and it counts as thinking.
    ("qwen3", lambda f: f.prompt(ASK) + f.ids(PARTIAL), (PARTIAL, "", False)),
    (
        "real_harmony",
        lambda f: f.prompt(CALLED, tools=TOOLS) + f.ids(f"{ANALYSIS}So.{HARMONY.closing}"),
        (f"{ANALYSIS}So.", HARMONY.closing, True),
    ),
    (
        "real_harmony",
        lambda f: f.prompt([*ASK, SAID], opened=False),
        (f"{ANALYSIS}hm\n\nhm", f"{HARMONY.closing}5.<|return|>", True),
    ),
    # The user's message is last: the model has not begun. It spoke twice: neither is this turn's.
    ("real_harmony", lambda f: f.prompt([*ASK, SAID, *ASK], False), ("", "", False)),
    ("real_harmony", lambda f: f.prompt([*ASK, SAID, SAID]), ("", "", False)),
    # R1's template opens the thinking in each turn: a reply that begins without has none.
    ("real_r1", lambda f: f.continued("So\n\nit is"), ("", "So\n\nit is", True)),
    ("qwen3", lambda f: f.continued("So"), (EMPTY[0], f"{EMPTY[1]}So", True)),
    ("real_harmony", lambda f: f.continued("So"), ("", "<|channel|>final<|message|>So", True)),
    ("real_r1", lambda f: f.continued("So") + f.ids("</think>\n"), ("", "So</think>\n", True)),
    ("real_r1", lambda f: f.prompt(ASK)[:-2], ("", "", False)),  # nothing yet: the model opens it
    ("real_r1", lambda f: f.prompt(ASK)[:-2] + f.ids("\n\n"), ("\n\n", "", False)),
    ("real_r1", lambda f: f.prompt(ASK)[:-2] + f.ids("\n\nIt is"), ("", "\n\nIt is", True)),
    # A turn in a trained chat, whose thinking the template has dropped.
    ("real_r1", lambda f: f.continued("So") + f.ids(END_OF_R1), ("", f"So{END_OF_R1}", True)),
    # Templates write an empty thinking before a last reply; the client's own stands behind it.
    ("qwen3", lambda f: f.continued(PARTIAL), (f"\n\n{PARTIAL}", "", False)),
    ("qwen3", lambda f: f.continued("A <think>"), (EMPTY[0], f"{EMPTY[1]}A <think>", True)),
    ("glm", lambda f: f.continued(OVER), (f"\n{PARTIAL}", "</think>\n\nSo", True)),
    ("opened", lambda f: f.prompt(EARLIER), ("", "", False)),
    ("unopened", lambda f: f.prompt(EARLIER), ("", "", False)),
    ("opened", lambda f: f.prompt(ASK) + f.ids(THOUGHT), ("[THINK]1.\n\n2.", "[/THINK]A", True)),
    ("unopened", lambda f: f.prompt(ASK) + f.ids(THOUGHT), ("1.\n\n2.", "[/THINK]A", True)),
    # Markers of several tokens.
    ("textual", lambda f: f.prompt(QUOTING) + f.ids("First.\n\nSo"), ("First.\n\nSo", "", False)),
    (
        "textual",
        lambda f: f.prompt(QUOTING) + f.ids("First.</reason>\n\nIt"),
        ("First.", "</reason>\n\nIt", True),
    ),
    ("textual", lambda f: f.ids("Some text <reason>\nFirst"), ("\nFirst", "", False)),
    ("textual", lambda f: f.ids("First</reason>\n\nIt"), ("", "</reason>\n\nIt", True)),
]


@pytest.mark.parametrize(("family", "made", "wanted"), SPANS, indirect=["family"])
def test_what_is_thought_in_a_prompt(
    family: Family, made: Callable[[Family], list[int]], wanted: tuple[str, str, bool]
) -> None:
    ids = made(family)
    start, end, closed = family.fmt.thinking_span(ids)
    decode = family.tokenizer.decode
    assert (decode(ids[start:end]), decode(ids[end:]), closed) == wanted
    assert family.fmt.prompt_state(ids).ended == closed


def test_template_arguments_hold_for_all_that_is_made(families: Families) -> None:
    tokenizer = copy.deepcopy(families("qwen3").tokenizer)
    given = str(tokenizer.chat_template)
    said = "enable_thinking is defined and enable_thinking is false"
    assert said in given
    tokenizer.chat_template = given.replace(said, "not (enable_thinking | default(false))")
    closed = TokenFormat.compile(QWEN3, tokenizer)
    with pytest.raises(ValueError, match="--template-arg enable_thinking=true"):
        prompt_token_ids("p", "Hi", tokenizer, closed)
    literals = dataclasses.replace(QWEN3, template_args='{"enable_thinking": true}')
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
def test_past_reasoning_between_turns_of_tools_is_handed_on(families: Families, name: str) -> None:
    harmony = families("real_harmony")
    turn = {"role": "assistant", "content": "", "tool_calls": [CALL], name: "I must add."}
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
    tokenizer.chat_template = {"rag": one, "tool_use": one}
    with pytest.raises(ValueError, match="multiple chat templates .* no default"):
        TokenFormat.compile(DEEPSEEK_R1, tokenizer)
    tokenizer.chat_template = {"default": one, "tool_use": one}
    whole = TokenFormat.compile(DEEPSEEK_R1, reasoner.tokenizer)
    assert TokenFormat.compile(DEEPSEEK_R1, tokenizer).header_ids == whole.header_ids
