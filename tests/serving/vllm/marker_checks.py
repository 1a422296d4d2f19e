"""Ends of thinking of several tokens in vLLM, and how replies are split; run by test_plugin.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from vllm.parser import ParserManager
from vllm.reasoning import ReasoningParserManager

from modeling_ospruner import OSPrunerForCausalLM
from modeling_ospruner.formats_ospruner import TokenFormat
from ospruner.demo.shipped import Reasoner
from ospruner.formats import DEEPSEEK_R1, HARMONY, QWEN3, follow
from ospruner.serving.vllm.parser import HarmonyThinkingParser, ThinkingParser, _format_of
from ospruner.serving.vllm.plugin import HARMONY_PARSER, PARSER, parser_of, register
from ospruner.serving.vllm.vllm_server import vllm_command

from .plugin_checks import NEVER, greedy, record, run, start_policy
from .plugin_checks import environment as environment
from .plugin_replay import check_record, make_policy, make_prompts

ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|end|><|start|>assistant<|channel|>final<|message|>"
CALL = " to=functions.add<|channel|>commentary <|constrain|>json<|message|>{}<|call|>"

FORMS: dict[str, dict[str, str]] = {
    "marker": {"name": "last", "think_end": "That fits", "closing": "That fits "},
    "phrase": {
        **{"name": "reply", "think_end": "", "think_start": "", "answer_phrase": "That fits"},
        "closing": "So.\n\nThat fits ",
    },
}


def made(reasoner: Reasoner, folder: Path, name: str) -> OSPrunerForCausalLM:
    """A policy whose format takes the reasoner's own last words for the end of its thinking."""
    form = replace(reasoner.token_format.format, **FORMS[name])
    return make_policy(reasoner, folder, reasoning_format=form)


def check_split(parser: type[Any], tokenizer: Any, text: str, *wanted: str | None) -> None:
    """The thinking and the answer of a whole reply, and of one streamed in pieces."""
    assert parser(tokenizer).extract_reasoning(text, None) == wanted
    for width in (1, 3, len(text)):  # which cut markers
        one, parts = parser(tokenizer), []
        for at in range(0, len(text), max(width, 1)):
            piece = text[at : at + width]
            parts.append(one.extract_reasoning_streaming("", piece, piece, [], [], []))
        told = [part for part in (*parts, one.finish_streaming()) if part is not None]
        assert ("".join(part.reasoning or "" for part in told) or None) == wanted[0]
        assert ("".join(part.content or "" for part in told) or None) == wanted[1]


@pytest.mark.parametrize("name", FORMS)
def test_requests_end_where_generate_would(reasoner: Reasoner, tmp_path: Path, name: str) -> None:
    model = made(reasoner, tmp_path, name)
    fmt = model.token_format
    llm = start_policy(tmp_path, additional_config={"ospruner": {"stop_policy": True}})
    prompts = make_prompts(reasoner, 12)
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
            state = follow(fmt, prompts[i], ids)
            after = state.thinking_tokens + state.end_tokens
            assert parser.extract_content_ids(ids) == (ids[after:] if state.ended else [])
    assert ended >= 4


@pytest.mark.parametrize(
    ("text", "thinking", "answer"),
    [
        ("So 1.\n\nThen 2. That fits 5", "So 1.\n\nThen 2. ", " 5"),
        ("<think>\nSo 1. That fits", "\nSo 1. ", None),
        ("So That fit", "So That fit", None),  # what could have become the marker
        ("That fits That fits 5", None, " That fits 5"),
        ("<thi", "<thi", None),
        ("", None, None),
    ],
)
def test_replies_are_split(
    reasoner: Reasoner, tmp_path: Path, text: str, thinking: str | None, answer: str | None
) -> None:
    made(reasoner, tmp_path, "marker")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    check_split(ThinkingParser, tokenizer, text, thinking, answer)


def test_the_server_chooses_the_parser(reasoner: Reasoner, tmp_path: Path) -> None:
    """By what the format holds, whatever its name."""
    for name, parser in (("marker", PARSER), ("phrase", None)):
        made(reasoner, tmp_path / name, name)
        command, _ = vllm_command(str(tmp_path / name), {}, [])
        assert (parser in command) == (parser is not None)
        assert ("--reasoning-parser" in command) == (parser is not None)
    for form, parser in ((DEEPSEEK_R1, PARSER), (QWEN3, PARSER), (HARMONY, HARMONY_PARSER)):
        for name in (form.name, "one's own"):
            literals = replace(form, name=name).to_dict()
            assert parser_of(literals) == parser
    with pytest.raises(ValueError, match="no marker alone ends the thinking"):
        ThinkingParser(AutoTokenizer.from_pretrained(tmp_path / "phrase"))


def test_markers_of_one_s_own_that_are_special_tokens(reasoner: Reasoner, tmp_path: Path) -> None:
    """vLLM leaves special tokens out of a reply's text, by which it is split."""
    ends = {"think_start": "[THINK]", "think_end": "[/THINK]", "closing": "[/THINK]\n\n"}
    form = replace(reasoner.token_format.format, name="mine", **ends)
    make_policy(reasoner, tmp_path, reasoning_format=form)
    plain: Any = AutoTokenizer.from_pretrained(tmp_path)
    request = SimpleNamespace(skip_special_tokens=True)
    assert ThinkingParser(plain).adjust_request(request).skip_special_tokens
    _format_of.cache_clear()
    plain.add_tokens(["[THINK]", "[/THINK]"], special_tokens=True)
    plain.save_pretrained(tmp_path)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    assert not ThinkingParser(tokenizer).adjust_request(request).skip_special_tokens
    check_split(ThinkingParser, tokenizer, "[THINK]So 1.[/THINK] 5", "So 1.", " 5")
    ids = tokenizer.encode("[THINK]1[/THINK]5", add_special_tokens=False)
    assert ThinkingParser(tokenizer).count_reasoning_tokens(ids) == 1


Split = tuple[str | None, str | None, int]


def replied(name: str, tokenizer: Any, prompt: list[int], text: str) -> Split:
    """Thinking, answer and the count of its tokens, as all routes split a reply to a prompt."""
    made_by_vllm: Any = ParserManager.get_parser(reasoning_parser_name=name, tokenizer=tokenizer)
    request: Any = SimpleNamespace(include_reasoning=True, tool_choice="none", tools=None)
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    whole = made_by_vllm(tokenizer)
    whole.set_prompt_token_ids(prompt)
    thinking, answer, _ = whole.parse(text, request, model_output_token_ids=ids)
    counted = whole.count_reasoning_tokens(ids)
    for width in (1, 4, len(ids)):
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


@pytest.mark.parametrize("own", [False, True])
def test_what_follows_a_closed_thinking_is_content(
    reasoner: Reasoner, tmp_path: Path, own: bool
) -> None:
    """Thinking switched off, an answer prefilled, and thinking left open, by the prompt."""
    register()
    if own:
        made(reasoner, tmp_path, "marker")
    else:
        make_policy(reasoner, tmp_path)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    end = "That fits" if own else "</think>"
    [opened] = make_prompts(reasoner, 1)
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


@pytest.fixture(scope="module")
def tokenizer(shared_dir: Path) -> PreTrainedTokenizerBase:
    folder = shared_dir / "data" / "tokenizers" / "gpt-oss-o200k-harmony"
    if not folder.is_dir():
        pytest.skip(f"{folder} does not exist")
    return AutoTokenizer.from_pretrained(folder)


def test_it_is_registered() -> None:
    register()
    assert ReasoningParserManager.get_reasoning_parser(HARMONY_PARSER) is HarmonyThinkingParser


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
def test_harmony_is_split(text: str, thinking: str | None, answer: str | None) -> None:
    tokenizer = SimpleNamespace(get_vocab=dict)  # by its text alone
    check_split(HarmonyThinkingParser, tokenizer, text, thinking, answer)


def test_harmony_tokens_are_counted(tokenizer: PreTrainedTokenizerBase) -> None:
    parser = HarmonyThinkingParser(tokenizer)
    thought = tokenizer.encode("So 1.\n\nThen 2.", add_special_tokens=False)
    said = tokenizer.encode("\\boxed{5}", add_special_tokens=False)
    before = tokenizer.encode(ANALYSIS, add_special_tokens=False)
    closing = tokenizer.encode(FINAL, add_special_tokens=False)
    whole = [*before, *thought, *closing, *said]
    assert parser.count_reasoning_tokens(whole) == len(thought)
    assert parser.extract_content_ids(whole) == said
    # A grammar holds in the answer alone.
    opened = len(before) + len(thought) + len(closing)
    ended = [parser.is_reasoning_end(whole[:end]) for end in range(len(whole) + 1)]
    assert ended == [False] * opened + [True] * (len(said) + 1)
    assert not parser.is_reasoning_end([*whole, *tokenizer.encode("<|return|><|start|>user")])


def test_harmony_after_its_prompt(tokenizer: PreTrainedTokenizerBase) -> None:
    chat = [{"role": "user", "content": "2 + 3?"}]
    template: Any = {"add_generation_prompt": True, "tokenize": False}
    fmt = TokenFormat.compile(HARMONY, tokenizer)
    text = str(tokenizer.apply_chat_template(chat, **template))
    for more, wanted in (
        (f"{FINAL.removeprefix('<|end|><|start|>assistant')}So", (None, "It is 5.", 0)),
        (f"{ANALYSIS}2 + 3.{FINAL}", (None, "It is 5.", 0)),
        (f"{ANALYSIS}2 + 3.", ("It is 5.", None, 5)),
    ):
        prompt = list(tokenizer.encode(text + more, add_special_tokens=False))
        assert replied(HARMONY_PARSER, tokenizer, prompt, "It is 5.") == wanted
        assert fmt.prompt_state(prompt).ended == (wanted[0] is None)
    prompt = list(tokenizer.encode(text, add_special_tokens=False))
    assert replied(HARMONY_PARSER, tokenizer, prompt, f"{ANALYSIS}So{FINAL}5") == ("So", "5", 1)


def test_harmony_keeps_markers_in_the_text(tokenizer: PreTrainedTokenizerBase) -> None:
    request = SimpleNamespace(skip_special_tokens=True)
    assert HarmonyThinkingParser(tokenizer).adjust_request(request).skip_special_tokens is False
