"""Markers of several tokens: found in ids however tokens cut them, in states, prompts, generate."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2ForCausalLM,
)

from modeling_ospruner import OSPrunerForCausalLM
from modeling_ospruner.formats_ospruner import Marker, MarkerState, ReasoningFormat, TokenFormat
from ospruner import logits
from ospruner.formats import HARMONY, follow
from ospruner.rules import Family, live
from ospruner.rules.signals import TrialAnswer
from ospruner.train.untrained import untrained

from .made_formats import made_marker
from .test_formats_generate import ALWAYS, NEVER, Script, write

TEXTUAL = ReasoningFormat(
    "textual", "Box it.", "</reason>", "</reason>\n\n", "\\boxed{", "<reason>"
)
PIECES = ["<", "/", ">", "a", "</", "ab", "a>", "/ab>", "b", "\n\n", "", "<</ab>\n"]


def ids_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def naive(pieces: list[str], literal: str) -> tuple[int, int, str] | None:
    """The marker's first token, the one after its last, and the text after it, by a search."""
    for end in range(1, len(pieces) + 1):
        text = "".join(pieces[:end])
        at = text.find(literal)
        if at >= 0:
            first = max(i for i in range(end) if len("".join(pieces[:i])) <= at and pieces[i])
            return first, end, text[at + len(literal) :]
    return None


@given(
    st.lists(st.sampled_from(range(len(PIECES))), max_size=14), st.sampled_from(["</ab>", "aba"])
)
@settings(max_examples=1500, deadline=None)
def test_the_matcher_against_a_naive_search(ids: list[int], literal: str) -> None:
    state = MarkerState(made_marker(literal, PIECES))
    found = None
    for i, token in enumerate(ids):
        completing = state.completing()
        if state.push(token):
            found = i + 1 - state.tokens, i + 1, state.overhang
            assert token in completing
            break
        assert token not in completing
    assert found == naive([PIECES[i] for i in ids], literal)


@given(st.text(alphabet="</reason>ab.\n é🙂", max_size=30), st.data())
@settings(max_examples=150, deadline=None)
def test_real_tokens_against_decoded_text(
    real_r1: tuple[PreTrainedTokenizerBase, TokenFormat], text: str, data: st.DataObject
) -> None:
    """However a text is cut into tokens, the marker is complete where the decoded text says so."""
    tokenizer, marker = real_r1[0], real_end(real_r1[0])
    parts = [text, "</reason>", "</", "reason", ">\n\n", ".</", "é"]
    pieces = data.draw(st.lists(st.sampled_from(parts), max_size=6))
    ids = [i for piece in pieces for i in ids_of(tokenizer, piece)]
    state, found = MarkerState(marker), None
    for end, token in enumerate(ids, 1):
        if state.push(token):
            found = end
            break
    texts = [str(tokenizer.decode(ids[:end])) for end in range(1, len(ids) + 1)]
    wanted = next((end for end, one in enumerate(texts, 1) if "</reason>" in one), None)
    assert found == wanted
    if found is not None:
        first = found - state.tokens
        assert "</reason>" in str(tokenizer.decode(ids[first:found]))
        assert "</reason>" not in str(tokenizer.decode(ids[first + 1 : found]))


_ends: dict[int, Marker] = {}


def real_end(tokenizer: PreTrainedTokenizerBase) -> Marker:
    if id(tokenizer) not in _ends:
        end = TokenFormat.compile(TEXTUAL, tokenizer).end_marker
        assert end is not None
        _ends[id(tokenizer)] = end
    return _ends[id(tokenizer)]


def check_real(tokenizer: PreTrainedTokenizerBase) -> None:
    """What a real tokenizer makes of markers that it has no tokens for."""
    fmt = TokenFormat.compile(TEXTUAL, tokenizer)
    assert (fmt.think_end_id, fmt.think_end_ids, fmt.reentry_ids) == (-1, (), ())
    for text, thinking in [
        ("One.\n\nTwo</reason>\n\nIt", "One.\n\nTwo"),
        ("One.\n\nTwo</reason>\nIt", "One.\n\nTwo"),
        ("One.\n\nTwo</reason>It", "One.\n\nTwo"),
        ("One.\n\n</reason>", "One.\n\n"),
        ("One </reason>:", "One"),
        ("One < </reason </reason>", "One < </reason"),
    ]:
        ids = ids_of(tokenizer, text)
        state = follow(fmt, [], ids)
        assert state.ended, text
        assert tokenizer.decode(ids[: state.thinking_tokens]) == thinking
        after = str(tokenizer.decode(ids[state.thinking_tokens :]))
        assert after.lstrip(" ").startswith("</reason>")
        # What the marker's last token holds beyond it, is written already.
        written = str(state.overhang)
        left = "\n\n".removeprefix(written) if written.strip("\n") == "" else "\n\n"
        assert tokenizer.decode(list(fmt.closing_left(state))) == left
        assert tokenizer.decode(fmt.forced_suffix("forced", state)) == left + "\\boxed{"
        assert fmt.step_ends(ids[: state.thinking_tokens])[-1] == state.thinking_tokens
        whole = ids_of(tokenizer, text)
        assert fmt.thinking_span(whole, 0) == (0, state.thinking_tokens, True)
    # What opens the thinking is no visible text, so that no step ends with it.
    opened = ids_of(tokenizer, "<reason>\n\nOne.\n\nTwo")
    assert [tokenizer.decode(opened[:end]) for end in fmt.step_ends(opened)] == [
        "<reason>\n\nOne.\n\n",
        "<reason>\n\nOne.\n\nTwo",
    ]
    chinese = ReasoningFormat("zh", "", "最终答案：", "最终答案：\n", "\\boxed{")
    fmt = TokenFormat.compile(chinese, tokenizer)
    ids = ids_of(tokenizer, "好🙂。\n\n最终答案：5")
    spelled = [i for one in "好最终答案：" for i in ids_of(tokenizer, one)]
    for row, kept in ((ids, "好🙂。\n\n"), (spelled, "好")):
        state = follow(fmt, [], row)
        assert state.ended
        assert tokenizer.decode(row[: state.thinking_tokens]) == kept


def test_with_r1_s_tokenizer(real_r1: tuple[PreTrainedTokenizerBase, TokenFormat]) -> None:
    check_real(real_r1[0])
    with pytest.raises(ValueError, match="turn of several messages it must be one token"):
        TokenFormat.compile(HARMONY, real_r1[0])


def test_with_gpt_oss_s_tokenizer(
    real_harmony: tuple[PreTrainedTokenizerBase, TokenFormat],
) -> None:
    check_real(real_harmony[0])


@pytest.mark.parametrize("variable", ["OSPRUNER_SMOLLM2", "OSPRUNER_QWEN_CODER"])
def test_with_an_instruct_model_s_tokenizer(variable: str) -> None:
    folder = os.environ.get(variable)
    if folder is None:
        pytest.skip(f"{variable} names no folder of the model")
    tokenizer = AutoTokenizer.from_pretrained(Path(folder))
    check_real(tokenizer)
    end = ReasoningFormat("r1", "", "</think>", "</think>\n\n", "\\boxed{", "<think>")
    fmt = TokenFormat.compile(end, tokenizer)
    assert fmt.end_marker is not None  # the vocabulary lacks it
    ids = ids_of(tokenizer, "<think>\nOne.\n\nTwo.\n</think>\n\n5")
    kept = str(tokenizer.decode(ids[: follow(fmt, [], ids).thinking_tokens]))
    assert kept.startswith("<think>\nOne.\n\nTwo")
    assert "</" not in kept


@pytest.fixture
def tokenizer(tiny_tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    changed = copy.deepcopy(tiny_tokenizer)
    changed.chat_template = str(changed.chat_template).replace("<think>", "<reason>")
    return changed


@pytest.fixture
def model(tiny_base: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> OSPrunerForCausalLM:
    return untrained(tiny_base, tokenizer, reasoning_format=TEXTUAL, tuning="layers")


def prompt_of(tokenizer: PreTrainedTokenizerBase, more: str = "") -> list[int]:
    chat = [{"role": "user", "content": "<reason>2 + 3?</reason>"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return ids_of(tokenizer, f"{text}{more}")


def test_where_a_prompt_s_thinking_begins(tokenizer: PreTrainedTokenizerFast) -> None:
    fmt = TokenFormat.compile(TEXTUAL, tokenizer)
    prompt = prompt_of(tokenizer)
    assert fmt.thinking_span(prompt) == (len(prompt), len(prompt), False)
    more = prompt_of(tokenizer, "First.\n\nSo")
    assert fmt.thinking_span(more) == (len(prompt), len(more), False)
    over = prompt_of(tokenizer, "First.</reason>\n\nIt is")
    span = fmt.thinking_span(over)
    assert span.closed
    assert tokenizer.decode(over[span.start : span.end]) == "First."
    raw = ids_of(tokenizer, "Some text <reason>\nFirst")
    assert str(tokenizer.decode(raw[fmt.thinking_span(raw).start :])).strip() == "First"
    assert fmt.thinking_span(ids_of(tokenizer, "First</reason>\n\nIt")).closed


def test_a_stop_forces_the_closing(model: OSPrunerForCausalLM) -> None:
    text, record = write(model, "First.\n\nThen.\n\n", **ALWAYS)
    assert text.startswith("First.\n\n</reason>\n\n\\boxed{")
    assert (record.reason, record.thinking_tokens) == ("policy", record.step_ends[-1])


@pytest.mark.parametrize("written", ["</reason>", "</reason>\n", "</reason>\n\n"])
def test_a_natural_end_is_completed(model: OSPrunerForCausalLM, written: str) -> None:
    assert model.tokenizer is not None
    text, record = write(model, f"First.\n\nThen{written}", **NEVER)
    assert text.startswith("First.\n\nThen</reason>\n\n\\boxed{")
    assert text.count("\n\n\\boxed{") == 1
    thinking = ids_of(model.tokenizer, "First.\n\nThen")
    assert (record.reason, record.thinking_tokens) == ("natural", len(thinking))
    free, record = write(
        model, f"First.\n\nThen{written}It is.", answer="free", max_answer_tokens=9, **NEVER
    )
    assert free.startswith(f"First.\n\nThen{written}It is.")
    assert (record.reason, record.thinking_tokens) == ("natural", len(thinking))


def test_a_prefilled_thinking_may_hold_half_the_marker(model: OSPrunerForCausalLM) -> None:
    text, record = write(model, "son>", prefill="First.\n\nThen</rea", **NEVER)
    assert text.startswith("son>\n\n\\boxed{")
    assert (record.reason, record.thinking_tokens) == ("natural", 0)


def test_an_answer_does_not_open_the_thinking_again(model: OSPrunerForCausalLM) -> None:
    script = "First.\n\nThen</reason>\n\n\\boxed{<reason>"
    text, _ = write(model, script, max_answer_tokens=12, **NEVER)
    assert "</reason>\n\n\\boxed{<reason" in text
    assert "<reason>" not in text
    again, _ = write(model, script, max_answer_tokens=12, mask_reentry=False, **NEVER)
    assert again.startswith(script)


@pytest.mark.parametrize("mask", [True, False])
def test_trial_answers_do_not_either(
    model: OSPrunerForCausalLM, mask: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = model.tokenizer
    assert tokenizer is not None
    wanted = ids_of(tokenizer, "<reason>")
    computed = logits.last_logits
    calls: list[int] = []

    def keen(*args: Any, **kwargs: Any) -> torch.Tensor:
        logits = computed(*args, **kwargs).clone()
        logits[0, wanted[len(calls) % len(wanted)]] = 1e4
        calls.append(1)
        return logits

    monkeypatch.setattr(live, "last_logits", keen)
    answers: list[TrialAnswer] = []

    def asks(ends: Any, same: Any) -> Any:
        for end in ends:
            answers.append(end.trial_answer(len(wanted)))
            yield 0.0

    rule = Family("asks", asks, low=1.0, asks=frozenset({"trial_answer"}))(1.0)
    prompt = prompt_of(tokenizer)
    model.generate(
        torch.tensor([prompt]),
        stop_policy={"rule": rule, "mask_reentry": mask},
        logits_processor=[Script(ids_of(tokenizer, "First.\n\n"), len(prompt))],
        max_new_tokens=4,
        do_sample=False,
    )
    text = str(tokenizer.decode(list(answers[0].ids)))
    assert text.startswith("<reason")
    assert ("<reason>" in text) != mask


def test_what_cannot_be_followed_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="no thinking end marker '</reason>'.*texts join to it"):
        TokenFormat.compile(
            TEXTUAL,
            PreTrainedTokenizerFast(
                tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, "[UNK]")),
                unk_token="[UNK]",
            ),
        )
