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
from .plugin_checks import NEVER, greedy, record, run, start_policy
from .plugin_checks import environment as environment
from .plugin_replay import check_record, make_policy

ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|end|><|start|>assistant<|channel|>final<|message|>"
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


Split = tuple[str | None, str | None, int]


def replied(name: str, tokenizer: Any, prompt: list[int], text: str | list[int]) -> Split:
    """Thinking, answer and the count of its tokens, as all routes split a reply to a prompt.

    Whole, and streamed in pieces that cut markers.
    """
    register()
    ids = text if isinstance(text, list) else tokenizer.encode(text, add_special_tokens=False)
    text = str(tokenizer.decode(ids))
    made_by_vllm: Any = ParserManager.get_parser(reasoning_parser_name=name, tokenizer=tokenizer)
    request: Any = SimpleNamespace(include_reasoning=True, tool_choice="none", tools=None)
    whole = made_by_vllm(tokenizer)
    whole.set_prompt_token_ids(prompt)
    thinking, answer, _ = whole.parse(text, request, model_output_token_ids=ids)
    counted = whole.count_reasoning_tokens(ids)
    for width in (1, 4, len(ids) or 1):
        one, parts = made_by_vllm(tokenizer), []
        for at in range(0, len(ids), width):
            delta, told = ids[at : at + width], prompt if at == 0 else None
            end = at + width >= len(ids)
            parts.append(
                one.parse_delta(str(tokenizer.decode(delta)), delta, request, told, finished=end)
            )
        shown = [part for part in parts if part is not None]
        assert ("".join(part.reasoning or "" for part in shown) or None) == thinking
        assert ("".join(part.content or "" for part in shown) or None) == answer
        assert one.count_reasoning_tokens(ids) == counted
    return thinking, answer, counted


@pytest.mark.parametrize("name", FORMS)
def test_requests_end_where_generate_would(reasoner: Reasoner, tmp_path: Path, name: str) -> None:
    model = made(reasoner, tmp_path, name)
    llm = start_policy(tmp_path, additional_config={"ospruner": {"stop_policy": True}})
    prompts = prompts_of(reasoner, 12)
    extras: list[dict[str, Any]] = [
        {"stop_id": f"m{i}", "stop_seed": 3, "stop_sample_index": i}
        | ([NEVER, {**NEVER, "stop_answer": "free"}, {}][i % 3])
        for i in range(len(prompts))
    ]
    outputs = run(llm, prompts, [greedy(extra) for extra in extras])
    ended = 0
    for i, [ids] in enumerate(outputs):
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
        if name == "marker":
            parser = ThinkingParser(AutoTokenizer.from_pretrained(tmp_path))
            if told["reason"] != "length":
                assert parser.count_reasoning_tokens(ids) == told["thinking_tokens"]
    assert ended >= 4


def test_the_server_chooses_the_parser(reasoner: Reasoner, tmp_path: Path) -> None:
    """By what the format holds, whatever its name."""
    for name, parser in (("marker", PARSER), ("phrase", None)):
        assert (
            parser_of(made(reasoner, tmp_path / name, name).config.reasoning_format or {}) == parser
        )
    for form, parser in ((DEEPSEEK_R1, PARSER), (QWEN3, PARSER), (HARMONY, HARMONY_PARSER)):
        for name in (form.name, "one's own"):
            literals = replace(form, name=name).to_dict()
            assert parser_of(literals) == parser
    with pytest.raises(ValueError, match="no marker alone ends the thinking"):
        ThinkingParser(AutoTokenizer.from_pretrained(tmp_path / "phrase"))


def test_markers_of_one_s_own_that_are_special_tokens(reasoner: Reasoner, tmp_path: Path) -> None:
    """vLLM leaves special tokens out of a reply's text, by which it is split."""
    ends: dict[str, Any] = {
        "think_start": "[THINK]",
        "think_end": "[/THINK]",
        "closing": "[/THINK]\n\n",
    }
    form = replace(reasoner.token_format.format, name="mine", **ends)
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

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    for prompt in (
        [*opened, *ids(f"\n\n{end}\n\n")],
        [*opened, *ids(f"3+4=7.\n\n{end}\n\nSo")],
        [*opened[:-size], *ids("So 3+4")],
    ):
        assert replied(PARSER, tokenizer, prompt, "is 7.\n\nYes") == (None, "is 7.\n\nYes", 0)
        assert ThinkingParser(tokenizer).is_reasoning_end(prompt)
    thought = "3+4=7.\n\nSo"
    for prompt in (opened, [*opened, *ids("3+4=7.\n\n")]):
        split = (thought, " 7", len(ids(thought)))
        assert replied(PARSER, tokenizer, prompt, f"{thought}{end} 7") == split
        assert replied(PARSER, tokenizer, prompt, thought) == (thought, None, len(ids(thought)))


class Speaker:
    """A tokenizer of a format, whose markers a reply may also only speak of, letter by letter."""

    def __init__(self, tokenizer: Any, form: ReasoningFormat) -> None:
        self.tokenizer, self.form = tokenizer, form
        self.fmt = TokenFormat.compile(form, tokenizer)
        self.prompt = chat_ids(tokenizer, "2 + 3?")

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def spoken(self, text: str) -> list[int]:
        """Ids of a text in which what stands between two `%` is no marker."""
        plain, found = text.split("%"), list[int]()
        for i, piece in enumerate(plain):
            for part in piece if i % 2 else [piece]:
                found += self.ids(part)
        return found

    def replied(self, text: str, more: str = "") -> Split:
        return replied(PARSER, self.tokenizer, [*self.prompt, *self.ids(more)], self.spoken(text))


TEXTUAL = ReasoningFormat("mine", "Box.", "</reason>", "</reason>\n\n", "\\boxed{", "<reason>")
OPENERS = {"hermes": "<tool_call>", "minimax": "<minimax:tool_call>", "mistral": "[TOOL_CALLS]"}


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
        tokenizer.add_tokens([*OPENERS.values(), "</tool_call>", "</minimax:tool_call>"])
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
def test_an_end_marker_that_begins_in_the_prompt(speaker: Speaker) -> None:
    half, rest = speaker.form.think_end[:5], speaker.form.think_end[5:]
    assert speaker.replied(f"{rest}\n\n5", more=f"So{half}") == (None, "\n\n5", 0)


@pytest.mark.parametrize("speaker", BOTH, indirect=True)
def test_a_call_inside_the_thinking_is_not_lost(speaker: Speaker) -> None:
    for opener in OPENERS.values() if speaker.form is QWEN3 else ["<tool_call>"]:
        call = f'{opener}\n{{"name": "add"}}\n\n'
        thinking, answer, counted = speaker.replied(f"I add.\n{call}")
        assert (thinking, answer) == ("I add.\n", call)
        assert counted <= len(speaker.ids("I add.\n"))


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
    made_by_vllm: Any = ParserManager.get_parser(name, PARSER, True, tokenizer=speaker.tokenizer)
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "add", "parameters": schema}}
    turn: Any = {"role": "user", "content": "2 + 3?"}
    request = ChatCompletionRequest(messages=[turn], tools=[tool], tool_choice="auto")
    ids = speaker.ids(f"I add.\n\nSo.{between}{CALL_OF[name]}")
    whole = made_by_vllm(speaker.tokenizer, request.tools)
    whole.set_prompt_token_ids(speaker.prompt)
    text = str(speaker.tokenizer.decode(ids))
    thinking, answer, [call] = whole.parse(text, request, True, ids)
    assert (thinking.rstrip(), (answer or "").strip()) == ("I add.\n\nSo.", "")
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": "2"})
    for width in (1, 2):  # of 4 vLLM's own parser of Mistral's calls loses some
        one, told = made_by_vllm(speaker.tokenizer, request.tools), ["", "", "", ""]
        for at in range(0, len(ids), width):
            piece = ids[at : at + width]
            part = one.parse_delta(
                str(speaker.tokenizer.decode(piece)),
                *(piece, request, speaker.prompt),
                finished=at + width >= len(ids),
            )
            calls = [] if part is None else [one.function for one in part.tool_calls or ()]
            told[0] += (part and part.reasoning) or ""
            told[1] += (part and part.content) or ""
            told[2] += "".join(one.name or "" for one in calls)
            told[3] += "".join(one.arguments or "" for one in calls)
        assert (told[0].rstrip(), told[1].strip(), told[2]) == ("I add.\n\nSo.", "", "add")
        assert json.loads(told[3]) == {"a": "2"}


@pytest.fixture(scope="module")
def tokenizer(shared_dir: Path) -> PreTrainedTokenizerBase:
    folder = shared_dir / "data" / "tokenizers" / "gpt-oss-o200k-harmony"
    if not folder.is_dir():
        pytest.skip(f"{folder} does not exist")
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    ("text", "thinking", "answer"),
    [
        (f"{ANALYSIS}So 1.\n\nThen 2.{FINAL}\\boxed{{5}}", "So 1.\n\nThen 2.", "\\boxed{5}"),
        (f"{ANALYSIS}So{HARMONY.closing}It is 5.<|end|>", "So", "It is 5."),
        ("<|channel|>final<|message|>5", None, "5"),
        (f"{ANALYSIS}1 < 2 <| 3 <", "1 < 2 <| 3 <", None),  # what could be half a marker
        (f"of an open analysis{FINAL}5", "of an open analysis", "5"),
        (
            f"<|channel|>commentary<|message|>I add.<|end|><|start|>assistant{ANALYSIS}So",
            "So",
            "I add.",
        ),
        (f"{ANALYSIS}So<|end|><|start|>assistant{CALL}", "So", None),
        (f"{ANALYSIS}So<|end|><|start|>assistant{ANALYSIS}on", "So\non", None),
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


def test_harmony_tokens_are_counted(tokenizer: PreTrainedTokenizerBase) -> None:
    parser = HarmonyThinkingParser(tokenizer)
    thought = tokenizer.encode("So 1.\n\nThen 2.", add_special_tokens=False)
    said = tokenizer.encode("\\boxed{5}", add_special_tokens=False)
    before = tokenizer.encode(ANALYSIS, add_special_tokens=False)
    closing = tokenizer.encode(FINAL, add_special_tokens=False)
    whole = [*before, *thought, *closing, *said]
    assert parser.count_reasoning_tokens(whole) == len(thought)
    # A grammar holds in the answer alone.
    opened = len(before) + len(thought) + len(closing)
    ended = [parser.is_reasoning_end(whole[:end]) for end in range(len(whole) + 1)]
    assert ended == [False] * opened + [True] * (len(said) + 1)
    assert not parser.is_reasoning_end([*whole, *tokenizer.encode("<|return|><|start|>user")])


def test_harmony_after_its_prompt(tokenizer: PreTrainedTokenizerBase) -> None:
    fmt = TokenFormat.compile(HARMONY, tokenizer)
    for more, wanted in (
        (f"{FINAL.removeprefix('<|end|><|start|>assistant')}So", (None, "It is 5.", 0)),
        (f"{ANALYSIS}2 + 3.{FINAL}", (None, "It is 5.", 0)),
        (f"{ANALYSIS}2 + 3.", ("It is 5.", None, 5)),
    ):
        prompt = chat_ids(tokenizer, "2 + 3?", more)
        assert replied(HARMONY_PARSER, tokenizer, prompt, "It is 5.") == wanted
        assert fmt.prompt_state(prompt).ended == (wanted[0] is None)
    prompt = chat_ids(tokenizer, "2 + 3?")
    assert replied(HARMONY_PARSER, tokenizer, prompt, f"{ANALYSIS}So{FINAL}5") == ("So", "5", 1)


def test_harmony_markers_that_are_only_spoken_of(tokenizer: Any) -> None:
    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    thought = [*ids("Write <|"), *ids("end|> last.")]
    assert "<|end|>" in tokenizer.decode(thought)
    reply = [*ids(ANALYSIS), *thought, *ids(FINAL), *ids("5")]
    wanted = ("Write <|end|> last.", "5", len(thought))
    assert replied(HARMONY_PARSER, tokenizer, ids("<|start|>assistant"), reply) == wanted


def test_harmony_keeps_markers_in_the_text(tokenizer: PreTrainedTokenizerBase) -> None:
    request = SimpleNamespace(skip_special_tokens=True)
    assert HarmonyThinkingParser(tokenizer).adjust_request(request).skip_special_tokens is False
