"""Columns of a policy in this process: each is what `generate` writes."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from modeling_ospruner import OSPrunerForCausalLM
from ospruner.app import columns
from ospruner.app.columns import AppColumn, LocalSource, Question
from ospruner.app.web import open_source, shown
from ospruner.demo.shipped import Reasoner
from ospruner.train.untrained import untrained

from ..chats import chat_batch

TEXT = "Tom has 45 cards. Tom buys 17. The total grows 3 times. How many cards does Tom have?"
NEVER = {"mode": "threshold", "threshold": 1.0}


@pytest.fixture(scope="module")
def model(reasoner: Reasoner) -> OSPrunerForCausalLM:
    """A policy of every price that stops at about every second paragraph."""
    return untrained(reasoner.model, reasoner.tokenizer, init_bias=0.0, tuning="layers")


@pytest.fixture(scope="module")
def source(model: OSPrunerForCausalLM) -> LocalSource:
    return LocalSource(model, "policy")


def asked(stop_policy: dict[str, Any] | None = None, **fields: Any) -> Question:
    given: dict[str, Any] = {"temperature": 0.6, "seed": 3, "max_tokens": 300} | fields
    return Question(TEXT, stop_policy or {"mode": "sample"}, **given)


def alone(model: OSPrunerForCausalLM, question: Question, stop_policy: Any) -> str:
    """What one generate writes by itself."""
    content = f"{question.text}\n\n{model.token_format.format.user_instruction}"
    inputs = chat_batch(model.tokenizer, [content])
    torch.manual_seed(question.seed)
    how: dict[str, Any] = {"stop_policy": stop_policy, "max_new_tokens": question.max_tokens}
    if question.temperature:
        how |= {"temperature": question.temperature, "top_p": 0.95, "top_k": 0}
    output = model.generate(**inputs, **how, do_sample=question.temperature > 0)
    return str(model.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))


def text_of(column: AppColumn) -> str:
    return "".join(one.text for one in column.thinking)


@pytest.mark.parametrize("temperature", [0.6, 0.0])
def test_each_column_is_what_generate_writes(
    source: LocalSource, model: OSPrunerForCausalLM, temperature: float
) -> None:
    question = asked(temperature=temperature)
    plain, pruned = (list(source.ask(question, on))[-1] for on in (False, True))
    assert plain.done
    assert pruned.done
    whole = alone(model, question, False)
    assert whole.startswith(text_of(plain))
    assert whole[len(text_of(plain)) :].startswith("</think>")
    stopped = alone(model, question, {"mode": "sample", "seed": 3})
    assert stopped.startswith(text_of(pruned))
    assert stopped[len(text_of(pruned)) :] == f"</think>\n\n{pruned.answer}"
    record = model.last_stop[0]
    found = [one.probability for one in pruned.thinking]
    assert found[: len(record.probabilities)] == record.probabilities
    assert (pruned.tokens, pruned.reason) == (record.thinking_tokens, "policy")
    assert text_of(plain).startswith(text_of(pruned))
    assert plain.tokens > pruned.tokens
    assert plain.seconds > 0 < pruned.seconds
    assert "\\boxed{" in plain.answer
    assert "</think>" not in plain.answer


def test_a_budget_stops_the_pruned_column_and_the_page_shows_both(source: LocalSource) -> None:
    *_, page = shown(source, asked(NEVER | {"max_thinking_tokens": 20}))
    assert "saved" in page
    assert "stopped by the budget" in page


def test_columns_grow_and_closing_ends_them(
    source: LocalSource, model: OSPrunerForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "FRAME_SECONDS", 0.0)
    never, forwards = asked(NEVER, max_tokens=90), list[None]()
    handle = model.base.register_forward_hook(lambda *_: forwards.append(None))
    before = threading.active_count()
    frames = source.ask(never, True)
    next(frames)
    assert threading.active_count() == before + 1
    frames.close()
    assert threading.active_count() == before
    closed = len(forwards)
    assert len({one.tokens for one in source.ask(never, True)}) > 3
    handle.remove()
    assert closed < (len(forwards) - closed) / 2, "it did not run to its end"


def test_what_cannot_be_asked_says_what_to_do(source: LocalSource) -> None:
    before = threading.active_count()
    with pytest.raises(ValueError, match=r"takes 1024 in all. Shorten the question, or lower"):
        next(source.ask(asked(max_tokens=1000), True))
    with pytest.raises(ValueError, match="threshold is 2"):
        list(source.ask(asked({"mode": "threshold", "threshold": 2}), True))
    assert threading.active_count() == before
    for text, said in (("  \n", "empty: write one"), ("x" * 30_000, "30,000 characters")):
        with pytest.raises(ValueError, match=said):
            Question(text, {}, 0.6, 0, 100)


def test_a_policy_folder_opens_with_its_base(reasoner: Reasoner, tmp_path: Path) -> None:
    own: dict[str, Any] = {"price_range": (1e-5, 1e-3), "tuning": "layers"}
    untrained(reasoner.model, reasoner.tokenizer, **own).save_pretrained(tmp_path / "policy")
    opened = open_source(str(tmp_path / "policy"))
    assert (opened.policy, opened.positions, opened.prices) == ("policy", 1024, (0.0, 1e-3))
    assert list(opened.ask(asked({"price": 5e-4}), True))[-1].done
    with pytest.raises(ValueError, match="price"):
        list(opened.ask(asked({"price": 1.0}), True))
    for named in ((None,), ("p", "http://localhost:8000")):
        with pytest.raises(ValueError, match="name a policy, or a server"):
            open_source(*named)
