"""Ends of thinking of several tokens in vLLM, and how replies are split; run by test_plugin.py."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager

from modeling_ospruner import OSPrunerForCausalLM as Policy
from modeling_ospruner.formats_ospruner import ReasoningFormat, TokenFormat
from ospruner.demo.shipped import Reasoner
from ospruner.formats import DEEPSEEK_R1, HARMONY, QWEN3
from ospruner.serving.core import format_of
from ospruner.serving.vllm import parser as parsers
from ospruner.serving.vllm.parser import HarmonyThinkingParser, ThinkingParser
from ospruner.serving.vllm.plugin import HARMONY_PARSER, PARSER, parser_of, register

from ...chats import chat_ids, prompts_of
from .plugin_checks import NEVER, UNCHANGED, greedy, record, run, start_policy
from .plugin_replay import check_record, make_policy

ANALYSIS = "<|channel|>analysis<|message|>"
THEN = "<|end|><|start|>assistant"
FINAL = f"{THEN}<|channel|>final<|message|>"
CALL = " to=functions.add<|channel|>commentary <|constrain|>json<|message|>{}<|call|>"

FORMS: dict[str, dict[str, Any]] = {
    "marker": {"name": "last", "think_end": "That fits", "closing": "That fits "},
    "phrase": {
        **{"name": "reply", "think_end": "", "think_start": "", "answer_phrase": "That fits"},
        "closing": "So.\n\nThat fits ",
    },
}


def made(reasoner: Reasoner, folder: Path, name: str) -> Policy:
    """A policy whose format takes the reasoner's own last words for the end of its thinking."""
    form = replace(reasoner.token_format.format, **FORMS[name])
    return make_policy(reasoner, folder, reasoning_format=form)


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def streamed(
    parser: Any, tokenizer: Any, request: Any, prompt: list[int], ids: list[int], width: int
) -> list[Any]:
    """The parts of a reply to a prompt that comes in pieces of so many tokens."""
    parts = []
    for at in range(0, len(ids), width):
        piece, told = ids[at : at + width], prompt if at == 0 else None
        text, end = str(tokenizer.decode(piece)), at + width >= len(ids)
        parts.append(parser.parse_delta(text, piece, request, told, finished=end))
    return [part for part in parts if part is not None]


Split = tuple[str | None, str | None, int]


def replied(name: str, tokenizer: Any, prompt: list[int], text: str | list[int]) -> Split:
    """Thinking, answer and the count of its tokens, as all routes split a reply to a prompt.

    Whole, and streamed in pieces that cut markers.
    """
    register()
    ids = text if isinstance(text, list) else ids_of(tokenizer, text)
    made_by_vllm: Any = ParserManager.get_parser(reasoning_parser_name=name, tokenizer=tokenizer)
    request: Any = SimpleNamespace(include_reasoning=True, tool_choice="none", tools=None)
    whole = made_by_vllm(tokenizer)
    whole.set_prompt_token_ids(prompt)
    text = str(tokenizer.decode(ids))
    thinking, answer, _ = whole.parse(text, request, model_output_token_ids=ids)
    counted = whole.count_reasoning_tokens(ids)
    for width in (1, 4, len(ids) or 1):
        one = made_by_vllm(tokenizer)
        parts = streamed(one, tokenizer, request, prompt, ids, width)
        assert ("".join(part.reasoning or "" for part in parts) or None) == thinking
        assert ("".join(part.content or "" for part in parts) or None) == answer
        assert one.count_reasoning_tokens(ids) == counted
    return thinking, answer, counted


@pytest.mark.parametrize("name", FORMS)
def test_requests_end_where_generate_would(
    environment: None, reasoner: Reasoner, tmp_path: Path, name: str
) -> None:
    model = made(reasoner, tmp_path, name)
    llm = start_policy(tmp_path, additional_config={"ospruner": {"stop_policy": True}})
    prompts = prompts_of(reasoner, 12)
    extras: list[dict[str, Any]] = [
        {"stop_id": f"m{i}", "stop_seed": 3, "stop_sample_index": i} | [NEVER, UNCHANGED, {}][i % 3]
        for i in range(len(prompts))
    ]
    ended = 0
    for i, [ids] in enumerate(run(llm, prompts, [greedy(extra) for extra in extras])):
        told = record(llm, f"m{i}")
        check_record(model, prompts[i], ids, extras[i], told)
        text = str(reasoner.tokenizer.decode(ids))
        if told["reason"] == "natural" and "That fits" in text:
            ended += 1
            thinking, _, answer = text.partition("That fits")
            kept = str(reasoner.tokenizer.decode(ids[: told["thinking_tokens"]]))
            assert thinking.rstrip(" ") == kept.rstrip(" ")
            if i % 3 == 0:
                assert answer.startswith(" \\boxed{")
        if name == "marker" and told["reason"] != "length":
            parser = ThinkingParser(AutoTokenizer.from_pretrained(tmp_path))
            assert parser.count_reasoning_tokens(ids) == told["thinking_tokens"]
    assert ended >= 4


def test_the_server_chooses_the_parser(reasoner: Reasoner, tmp_path: Path) -> None:
    """By what the format holds, whatever its name."""
    for form, parser in ((DEEPSEEK_R1, PARSER), (QWEN3, PARSER), (HARMONY, HARMONY_PARSER)):
        for name in (form.name, "one's own"):
            assert parser_of(replace(form, name=name).to_dict()) == parser
    literals = made(reasoner, tmp_path / "phrase", "phrase").config.reasoning_format
    assert parser_of(literals or {}) is None
    with pytest.raises(ValueError, match="no marker alone ends the thinking"):
        ThinkingParser(AutoTokenizer.from_pretrained(tmp_path / "phrase"))


def test_markers_of_one_s_own_that_are_special_tokens(reasoner: Reasoner, tmp_path: Path) -> None:
    """vLLM leaves special tokens out of a reply's text, by which it is split."""
    marks: Any = {"think_start": "[THINK]", "think_end": "[/THINK]", "closing": "[/THINK]\n\n"}
    form = replace(reasoner.token_format.format, name="mine", **marks)
    make_policy(reasoner, tmp_path, reasoning_format=form)
    plain: Any = AutoTokenizer.from_pretrained(tmp_path)
    request = SimpleNamespace(skip_special_tokens=True, tools=None)
    assert ThinkingParser(plain).adjust_request(request).skip_special_tokens
    format_of.cache_clear()
    plain.add_tokens(["[THINK]", "[/THINK]"], special_tokens=True)
    plain.save_pretrained(tmp_path)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    assert not ThinkingParser(tokenizer).adjust_request(request).skip_special_tokens
    assert replied(PARSER, tokenizer, [], "[THINK]1[/THINK] 5") == ("1", " 5", 1)


@pytest.mark.parametrize("own", [False, True])
def test_what_follows_a_closed_thinking_is_content(
    reasoner: Reasoner, tmp_path: Path, own: bool
) -> None:
    """Thinking switched off, an answer prefilled, and thinking left open, by the prompt."""
    if own:
        made(reasoner, tmp_path, "marker")
    else:
        make_policy(reasoner, tmp_path)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    end = "That fits" if own else "</think>"
    [opened] = prompts_of(reasoner, 1)
    size = len(reasoner.token_format.opening_ids)
    for prompt in (
        [*opened, *ids_of(tokenizer, f"\n\n{end}\n\n")],
        [*opened, *ids_of(tokenizer, f"3+4=7.\n\n{end}\n\nSo")],
        [*opened[:-size], *ids_of(tokenizer, "So 3+4")],
    ):
        assert replied(PARSER, tokenizer, prompt, "is 7.\n\nYes") == (None, "is 7.\n\nYes", 0)
        assert ThinkingParser(tokenizer).is_reasoning_end(prompt)
    thought = "3+4=7.\n\nSo"
    size = len(ids_of(tokenizer, thought))
    for prompt in (opened, [*opened, *ids_of(tokenizer, "3+4=7.\n\n")]):
        assert replied(PARSER, tokenizer, prompt, f"{thought}{end} 7") == (thought, " 7", size)
        assert replied(PARSER, tokenizer, prompt, thought) == (thought, None, size)


class Speaker:
    """A tokenizer of a format, whose markers a reply may also only speak of, letter by letter."""

    def __init__(self, tokenizer: Any, form: ReasoningFormat) -> None:
        self.tokenizer, self.form = tokenizer, form
        self.fmt = TokenFormat.compile(form, tokenizer)
        self.prompt = chat_ids(tokenizer, "2 + 3?")

    def spoken(self, text: str) -> list[int]:
        """Ids of a text in which what stands between two `%` is no marker."""
        found = list[int]()
        for i, piece in enumerate(text.split("%")):
            for part in piece if i % 2 else [piece]:
                found += ids_of(self.tokenizer, part)
        return found

    def replied(self, text: str, more: str = "") -> Split:
        prompt = [*self.prompt, *ids_of(self.tokenizer, more)]
        return replied(PARSER, self.tokenizer, prompt, self.spoken(text))


TEXTUAL = ReasoningFormat("mine", "Box.", "</reason>", "</reason>\n\n", "\\boxed{", "<reason>")


@pytest.fixture
def speaker(
    tiny_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Speaker:
    register()
    tokenizer = copy.deepcopy(tiny_tokenizer)
    form = TEXTUAL if request.param == "textual" else QWEN3
    template = str(tokenizer.chat_template).replace("<think>", form.think_start)
    if request.param == "textual":
        template = f"{{# <tool_call> #}}{template}"
    else:
        tokenizer.add_tokens(["<tool_call>", "</tool_call>", "[TOOL_CALLS]"])
        tokenizer.add_tokens(["<minimax:tool_call>", "</minimax:tool_call>"])
    tokenizer.chat_template = template
    made = Speaker(tokenizer, form)
    monkeypatch.setattr(parsers, "format_of", lambda policy: made.fmt)
    return made


BOTH = ("added", "textual")
SPOKEN = "It ends with %</think>%, I say %</think>%."  # `%` marks what is spoken of
SPLITS: list[tuple[tuple[str, ...], str, str, str | None, str]] = [
    # What an answer opens again is thinking; in the midst of a line the marker is spoken of.
    (BOTH, "I{end}\n\n5\n{start}\nI{end}\n\n6", "I\n\nI", "\n\n5\n\n\n\n6", "I|\nI"),
    (BOTH, "I{end} Say {start} here{end}.", "I", " Say {start} here{end}.", "I"),
    (("added",), SPOKEN, SPOKEN, None, SPOKEN),
    (("added",), SPOKEN + "{end} %{end}\n{start}%.", SPOKEN, " {end}\n{start}.", SPOKEN),
    # An end of text inside the thinking, whose own text vLLM drops.
    (BOTH, "I add.\n\nSo<|end|>", "I add.\n\nSo<|end|>", None, "I add.\n\nSo"),
    # A half of the marker: all there is, and before the one that a stop forces.
    (("textual",), "So</rea", "So</rea", None, "So</rea"),
    (("textual",), "So</rea{end}\n\n5", "So</rea", "\n\n5", "So</rea"),
]


@pytest.mark.parametrize(
    ("speaker", "text", "thinking", "answer", "counted"),
    [(kind, *row) for kinds, *row in SPLITS for kind in kinds],
    indirect=["speaker"],
)
def test_markers_that_are_meant_and_that_are_spoken_of(
    speaker: Speaker, text: str, thinking: str, answer: str | None, counted: str
) -> None:
    """Thinking and answer, and the tokens of the thinking's parts."""
    marks = {"start": speaker.form.think_start, "end": speaker.form.think_end}
    tokens = sum(len(speaker.spoken(one)) for one in counted.split("|"))
    wanted = answer if answer is None else answer.format(**marks)
    found = speaker.replied(text.format(**marks))
    assert found == (thinking.replace("%", ""), wanted, tokens)


@pytest.mark.parametrize("speaker", ["textual"], indirect=True)
def test_an_end_marker_that_begins_in_the_prompt_and_a_call_inside_the_thinking(
    speaker: Speaker,
) -> None:
    half, rest = speaker.form.think_end[:5], speaker.form.think_end[5:]
    assert speaker.replied(f"{rest}\n\n5", more=f"So{half}") == (None, "\n\n5", 0)
    call = '<tool_call>\n{"name": "add"}\n\n'
    thinking, answer, counted = speaker.replied(f"I add.\n{call}")
    assert (thinking, answer) == ("I add.\n", call)
    assert counted <= len(speaker.spoken("I add.\n"))


CALL_OF = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": "2"}}\n</tool_call>',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">2</parameter>\n'
    "</invoke>\n</minimax:tool_call>",
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": "2"}}]',
}


@pytest.mark.parametrize("speaker", ["added"], indirect=True)
@pytest.mark.parametrize("name", CALL_OF)
@pytest.mark.parametrize("between", ["\n", "</think>\n\n"], ids=["inside", "after"])
def test_vllms_parsers_find_calls_inside_and_after_the_thinking(
    speaker: Speaker, name: str, between: str
) -> None:
    tokenizer = speaker.tokenizer
    made_by_vllm: Any = ParserManager.get_parser(name, PARSER, True, tokenizer=tokenizer)
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "add", "parameters": schema}}
    turn: Any = {"role": "user", "content": "2 + 3?"}
    request = ChatCompletionRequest(messages=[turn], tools=[tool], tool_choice="auto")
    ids = speaker.spoken(f"I add.\n\nSo.{between}{CALL_OF[name]}")
    whole = made_by_vllm(tokenizer, request.tools)
    whole.set_prompt_token_ids(speaker.prompt)
    thinking, answer, [call] = whole.parse(str(tokenizer.decode(ids)), request, True, ids)
    assert (thinking.rstrip(), (answer or "").strip()) == ("I add.\n\nSo.", "")
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": "2"})
    for width in (1, 2):  # of 4 vLLM's own parser of Mistral's calls loses some
        one = made_by_vllm(tokenizer, request.tools)
        parts = streamed(one, tokenizer, request, speaker.prompt, ids, width)
        calls = [one.function for part in parts for one in part.tool_calls or ()]
        assert "".join(part.reasoning or "" for part in parts).rstrip() == "I add.\n\nSo."
        assert "".join(part.content or "" for part in parts).strip() == ""
        assert "".join(one.name or "" for one in calls) == "add"
        assert json.loads("".join(one.arguments or "" for one in calls)) == {"a": "2"}


@pytest.mark.parametrize(
    ("text", "thinking", "answer"),
    [
        (f"{ANALYSIS}So 1.\n\nThen 2.{FINAL}\\boxed{{5}}", "So 1.\n\nThen 2.", "\\boxed{5}"),
        (f"{ANALYSIS}So{HARMONY.closing}It is 5.<|end|>", "So", "It is 5."),
        ("<|channel|>final<|message|>5", None, "5"),
        (f"{ANALYSIS}1 < 2 <| 3 <", "1 < 2 <| 3 <", None),  # what could be half a marker
        (f"of an open analysis{FINAL}5", "of an open analysis", "5"),
        (f"<|channel|>commentary<|message|>I add.{THEN}{ANALYSIS}So", "So", "I add."),
        (f"{ANALYSIS}So{THEN}{CALL}", "So", None),
        (f"{ANALYSIS}So{THEN}{ANALYSIS}on", "So\non", None),
        ("<|channel|>ana", None, None),
        ("", None, None),
    ],
)
def test_harmony_is_split(
    tiny_tokenizer: PreTrainedTokenizerFast, text: str, thinking: str | None, answer: str | None
) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    names = ("start", "channel", "constrain", "message", "end", "return", "call")
    tokenizer.add_tokens([f"<|{name}|>" for name in names], special_tokens=True)
    assert replied(HARMONY_PARSER, tokenizer, [], text)[:2] == (thinking, answer)


Harmony = tuple[PreTrainedTokenizerBase, TokenFormat]


def test_harmony_tokens_are_counted(real_harmony: Harmony) -> None:
    tokenizer, parser = real_harmony[0], HarmonyThinkingParser(real_harmony[0])
    parts = (ANALYSIS, "So 1.\n\nThen 2.", FINAL, "\\boxed{5}")
    before, thought, closing, said = (ids_of(tokenizer, part) for part in parts)
    whole = [*before, *thought, *closing, *said]
    assert parser.count_reasoning_tokens(whole) == len(thought)
    # A grammar holds in the answer alone.
    opened = len(before) + len(thought) + len(closing)
    ended = [parser.is_reasoning_end(whole[:end]) for end in range(len(whole) + 1)]
    assert ended == [False] * opened + [True] * (len(said) + 1)
    assert not parser.is_reasoning_end([*whole, *tokenizer.encode("<|return|><|start|>user")])
    request = SimpleNamespace(skip_special_tokens=True)
    assert parser.adjust_request(request).skip_special_tokens is False


def test_harmony_after_its_prompt(real_harmony: Harmony) -> None:
    tokenizer, fmt = real_harmony
    for more, wanted in (
        (f"{FINAL.removeprefix(THEN)}So", (None, "It is 5.", 0)),
        (f"{ANALYSIS}2 + 3.{FINAL}", (None, "It is 5.", 0)),
        (f"{ANALYSIS}2 + 3.", ("It is 5.", None, 5)),
    ):
        prompt = chat_ids(tokenizer, "2 + 3?", more)
        assert replied(HARMONY_PARSER, tokenizer, prompt, "It is 5.") == wanted
        assert fmt.prompt_state(prompt).ended == (wanted[0] is None)
    prompt = chat_ids(tokenizer, "2 + 3?")
    assert replied(HARMONY_PARSER, tokenizer, prompt, f"{ANALYSIS}So{FINAL}5") == ("So", "5", 1)


def test_harmony_markers_that_are_only_spoken_of(real_harmony: Harmony) -> None:
    tokenizer = real_harmony[0]
    thought = [*ids_of(tokenizer, "Write <|"), *ids_of(tokenizer, "end|> last.")]
    reply = [*ids_of(tokenizer, ANALYSIS), *thought, *ids_of(tokenizer, f"{FINAL}5")]
    wanted = ("Write <|end|> last.", "5", len(thought))
    assert replied(HARMONY_PARSER, tokenizer, chat_ids(tokenizer, "2 + 3?"), reply) == wanted
