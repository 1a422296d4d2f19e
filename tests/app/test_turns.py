"""Two generates that take turns: each writes what it writes alone."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from modeling_ospruner import OSPrunerForCausalLM
from ospruner.app.columns import Column, Question
from ospruner.app.turns import LocalSource, answer_ids
from ospruner.demo import REASONER
from ospruner.demo.shipped import Reasoner

TEXT = "Tom has 45 cards. Tom buys 17. The total grows 3 times. How many cards does Tom have?"


@pytest.fixture(scope="module")
def model(reasoner: Reasoner) -> OSPrunerForCausalLM:
    """A policy that stops at about every second paragraph."""
    return OSPrunerForCausalLM.untrained(
        reasoner.model,
        reasoner.tokenizer,
        init_bias=0.0,
        base_model_name_or_path=str(REASONER),
        tuning="layers",
    )


@pytest.fixture(scope="module")
def source(model: OSPrunerForCausalLM) -> LocalSource:
    return LocalSource(model, "policy")


def asked(stop_policy: dict[str, Any] | None = None, **fields: Any) -> Question:
    given: dict[str, Any] = {"temperature": 0.6, "seed": 3, "max_tokens": 300} | fields
    return Question(given.pop("text", TEXT), stop_policy or {"mode": "sample"}, **given)


def alone(model: OSPrunerForCausalLM, question: Question, stop_policy: Any) -> list[int]:
    """What one generate writes by itself."""
    content = f"{question.text}\n\n{model.token_format.format.user_instruction}"
    tokenizer: Any = model.tokenizer
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, return_dict=True,
        return_tensors="pt",
    )  # fmt: skip
    torch.manual_seed(question.seed or 0)
    sampling: dict[str, Any] = {"do_sample": False}
    if question.temperature:
        sampling = {"do_sample": True, "temperature": question.temperature, "top_p": 0.95}
        sampling["top_k"] = 0
    output = model.generate(
        **inputs, **sampling, stop_policy=stop_policy, max_new_tokens=question.max_tokens
    )
    ids: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
    return ids


def text_of(column: Column) -> str:
    return "".join(one.text for one in column.thinking)


@pytest.mark.parametrize("temperature", [0.6, 0.0])
def test_each_column_is_what_it_is_alone(
    source: LocalSource, model: OSPrunerForCausalLM, temperature: float
) -> None:
    question = asked(temperature=temperature)
    frames = list(source.ask(question))
    plain, pruned = frames[-1]
    assert plain.done
    assert pruned.done
    tokenizer: Any = model.tokenizer
    whole = tokenizer.decode(alone(model, question, False))
    assert whole.startswith(text_of(plain))
    assert whole[len(text_of(plain)) :].startswith("</think>")
    stopped = tokenizer.decode(alone(model, question, {"mode": "sample", "seed": 3}))
    assert stopped.startswith(text_of(pruned))
    assert stopped[len(text_of(pruned)) :] == f"</think>\n\n{pruned.answer}"
    record = model.last_stop[0]
    assert [one.probability for one in pruned.thinking][: len(record.probabilities)] == (
        record.probabilities
    )
    assert pruned.tokens == record.thinking_tokens
    assert pruned.reason == record.reason == "policy"
    assert text_of(plain).startswith(text_of(pruned))
    assert plain.tokens > pruned.tokens
    assert plain.seconds > 0 < pruned.seconds
    assert "boxed" in plain.answer


def test_a_budget_stops_the_pruned_column_alone(source: LocalSource) -> None:
    budget = {"mode": "threshold", "threshold": 1.0, "max_thinking_tokens": 20}
    plain, pruned = list(source.ask(asked(budget)))[-1]
    assert pruned.reason == "budget"
    assert 20 <= pruned.tokens < plain.tokens


def test_columns_grow_side_by_side(source: LocalSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ospruner.app.turns._FRAME_SECONDS", 0.0)
    never = {"mode": "threshold", "threshold": 1.0}
    frames = list(source.ask(asked(never, max_tokens=60)))
    between = [one for one in frames if not one[0].done and not one[1].done]
    assert len({one[0].tokens for one in between}) > 3
    assert max(abs(a.tokens - b.tokens) for a, b in between) <= 2


def test_closing_ends_both(
    source: LocalSource, model: OSPrunerForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ospruner.app.turns._FRAME_SECONDS", 0.0)
    forwards: list[None] = []
    handle = model.base.register_forward_hook(lambda *_: forwards.append(None))
    before = threading.active_count()
    never = asked({"mode": "threshold", "threshold": 1.0}, max_tokens=900)
    frames = source.ask(never)
    next(frames)
    assert threading.active_count() == before + 2
    frames.close()  # type: ignore[attr-defined]  # a generator's
    assert threading.active_count() == before
    closed = len(forwards)
    list(source.ask(never))
    handle.remove()
    assert closed < (len(forwards) - closed) / 2, "they did not run to their ends"


def test_a_question_that_does_not_fit_says_what_to_do(source: LocalSource) -> None:
    with pytest.raises(ValueError, match=r"takes 1024 in all. Shorten the question, or lower"):
        next(source.ask(asked(max_tokens=1000)))


def test_a_setting_that_generate_refuses_reaches_the_page(source: LocalSource) -> None:
    before = threading.active_count()
    with pytest.raises(ValueError, match="threshold is 2"):
        list(source.ask(asked({"mode": "threshold", "threshold": 2})))
    assert threading.active_count() == before


def test_a_policy_folder_opens_with_its_base(model: OSPrunerForCausalLM, tmp_path: Path) -> None:
    from ospruner.app.page import open_source

    model.save_pretrained(tmp_path / "policy")
    opened = open_source(str(tmp_path / "policy"), base="the embedded reasoner")
    assert (opened.policy, opened.base) == ("policy", "the embedded reasoner")
    assert opened.positions == 1024
    assert opened.prices is None
    with pytest.raises(ValueError, match="name a policy, or a server"):
        open_source(None)
    with pytest.raises(ValueError, match="name a policy, or a server"):
        open_source("p", "http://localhost:8000")


def test_the_closing_is_no_part_of_the_answer(model: OSPrunerForCausalLM) -> None:
    token_format = model.token_format
    closing = list(token_format.closing_ids)
    assert answer_ids([50, 51, *closing, 60], 2, token_format) == [60]
    assert answer_ids([50, 51, *closing[:1], 60], 2, token_format) == [60]
    assert answer_ids([50, 51], 2, token_format) == []


def test_a_policy_of_every_price_says_its_range_and_takes_one(reasoner: Reasoner) -> None:
    model = OSPrunerForCausalLM.untrained(
        reasoner.model, reasoner.tokenizer, price_range=(1e-5, 1e-3),
        base_model_name_or_path=str(REASONER), tuning="layers",
    )  # fmt: skip
    priced = LocalSource(model, "policy")
    assert priced.prices == (0.0, 1e-3)
    _, pruned = list(priced.ask(asked({"mode": "sample", "price": 5e-4})))[-1]
    assert pruned.done
    with pytest.raises(ValueError, match="price"):
        list(priced.ask(asked({"mode": "sample", "price": 1.0})))
