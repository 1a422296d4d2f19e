"""Columns: as HTML, of a policy in this process, and from a server.

A stand-in speaks vLLM's part; the real one is slow.
"""

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from modeling_ospruner import OSPrunerForCausalLM
from ospruner.app import columns
from ospruner.app.columns import (
    AppColumn,
    LocalSource,
    Paragraph,
    Question,
    ServedSource,
    columns_html,
)
from ospruner.app.web import open_source, shown
from ospruner.demo.shipped import Reasoner
from ospruner.train.untrained import untrained

from ..chats import chat_batch
from ..own_process import needs_vllm
from ..served_app import ServedApp
from ..serving.vllm.test_server import serving

THINKING = [Paragraph("a\n\n", 10), Paragraph("b\n\n", 20), Paragraph("c\n\n", 40)]
PLAIN = AppColumn(THINKING, "3", 40, 8.0, "natural", True)
LIT = [Paragraph("a\n\n", 10, 0.1), Paragraph("b\n\n", 20, 0.75)]
PRUNED = AppColumn(LIT, "3", 20, 5.0, "policy", True)


def steps(html: str, kind: str) -> list[str]:
    """The paragraphs of a column."""
    column = html.partition(f"osp-{kind}")[2].partition("</section>")[0]
    return re.findall(r"<p .*?</p>", column, re.DOTALL)


def test_what_the_policy_spared_is_marked_and_counted() -> None:
    html = columns_html(PLAIN, PRUNED)
    assert ["osp-spared" in one for one in steps(html, "plain")] == [False, False, True]
    first, second = steps(html, "pruned")
    assert [re.findall(r"--p:([\d.]+)", one) for one in (first, second)] == [["0.100"], ["0.750"]]
    for said in ("75%", "stopped by the policy"):
        assert said in second
    for said in ("50% saved", "40 → 20 thinking tok", "38% saved", "8.0 → 5.0 seconds"):
        assert said in html
    assert "100% more" in columns_html(PRUNED, PLAIN)


def test_nothing_is_claimed_before_both_are_complete() -> None:
    html = columns_html(AppColumn([Paragraph("a", 10)], tokens=10, seconds=1.0), PRUNED)
    assert "saved" not in html
    assert "thinking…" in html
    assert "osp-spared" not in columns_html(PLAIN, AppColumn(LIT[:1], tokens=10, seconds=1.0))


@pytest.mark.parametrize("hostile", ["<script>x()</script>", '"><img src=x onerror=y()>', "a & b"])
def test_texts_are_escaped(hostile: str) -> None:
    column = AppColumn([Paragraph(hostile, 3, 0.5)], hostile, 3, 1.0, "natural", True)
    html = columns_html(column, column)
    for raw in (hostile, "<script", "<img"):
        assert raw not in html


def test_a_policy_that_gave_nan_shows_no_number() -> None:
    html = columns_html(PLAIN, AppColumn([Paragraph("a", 3, float("nan"))], tokens=3))
    assert "no probability" in html
    assert "nan" not in html


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


WORDS = ("one. ", "two.\n\n", "three.\n\n", "four. ", "five.\n\n")
RECORD = {"step_ends": [2, 3], "probabilities": [0.25, None], "reason": "policy"}


class StandIn(ServedApp):
    """Streams five thinking tokens, three with the policy, and keeps what it was asked."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.refuses = False
        app = FastAPI()

        @app.get("/v1/models")
        async def models() -> Any:
            return {"data": [{"id": "org/policy", "max_model_len": 512}]}

        @app.get("/ospruner/format")
        async def said() -> Any:
            return {"user_instruction": "Reason, check, box."}

        @app.get("/ospruner/stops/{name}")
        async def stops(name: str) -> Any:
            known = [body["vllm_xargs"].get("stop_id") for body in self.bodies]
            return RECORD if name in known else JSONResponse({"detail": "unknown"}, 404)

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Any:
            self.bodies.append(body := await request.json())
            if self.refuses:
                return JSONResponse({"error": {"message": "the prompt is too long"}}, 400)
            return StreamingResponse(parts(body), media_type="text/event-stream")

        super().__init__(app)


def parts(body: dict[str, Any]) -> Iterator[str]:
    """The events of an answer."""
    words = WORDS[:3] if body["vllm_xargs"]["stop_policy"] else WORDS
    names = ("reasoning", "reasoning_content")  # servers differ in it
    deltas = [*({names[n % 2]: word} for n, word in enumerate(words)), {"content": "\\boxed{5}"}]
    events: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": delta, "token_ids": [7], "finish_reason": None}]}
        for delta in deltas
    ]
    usage = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), 9)
    details = {"completion_tokens_details": {"reasoning_tokens": len(words)}}
    known = {"id": "1", "created": 0, "model": "m", "object": "chat.completion.chunk"}
    for event in [*events, {"choices": [], "usage": usage | details}]:
        yield f"data: {json.dumps(known | event)}\n\n"
    yield "data: [DONE]\n\n"


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    pytest.importorskip("openai")
    with StandIn() as server:
        yield server


QUESTION = Question("1+4?", {"mode": "threshold", "threshold": 0.5}, 0.6, 7, 100)


def test_both_columns_come_from_the_server(stand_in: StandIn) -> None:
    source = ServedSource(f"{stand_in.url}/v1")
    assert (source.policy, source.positions, source.prices) == ("org/policy", 512, None)
    plain, pruned = (list(source.ask(QUESTION, on))[-1] for on in (False, True))
    assert (plain.tokens, plain.reason, plain.done) == (5, "natural", True)
    texts = ["one. two.\n\n", "three.\n\n", "four. five.\n\n"]
    assert [one.text for one in plain.thinking] == texts
    assert (pruned.tokens, pruned.reason, pruned.answer) == (3, "policy", "\\boxed{5}")
    first, second = pruned.thinking
    assert (first.text, first.tokens, first.probability) == (texts[0], 2, 0.25)
    assert second.text == texts[1]
    assert second.probability != second.probability  # NaN: JSON has none
    off, on = sorted((b["vllm_xargs"] for b in stand_in.bodies), key=lambda x: x["stop_policy"])
    assert off == {"stop_policy": False}
    assert on.pop("stop_id").startswith("app-")
    said = {"stop_mode": "threshold", "stop_threshold": 0.5}
    assert on == {"stop_policy": True, "stop_seed": 7, **said}
    assert all(body["seed"] == 7 for body in stand_in.bodies)
    asked = {body["messages"][0]["content"] for body in stand_in.bodies}
    assert asked == {f"{QUESTION.text}\n\nReason, check, box."}


def test_a_refusal_and_a_server_that_is_gone_say_what_to_do(stand_in: StandIn) -> None:
    source = ServedSource(stand_in.url)
    stand_in.refuses = True
    with pytest.raises(ValueError, match=r"too long.*or shorten the question"):
        list(source.ask(QUESTION, True))
    stand_in.stop()
    with pytest.raises(ConnectionError, match=r"does not answer.*start one with `ospruner serve"):
        list(source.ask(QUESTION, True))
    with pytest.raises(ConnectionError, match=stand_in.url):
        ServedSource(stand_in.url)
    with pytest.raises(ValueError, match="like http://localhost:8000"):
        ServedSource("localhost:8000")


@needs_vllm
@pytest.mark.slow
def test_a_server_of_ospruner_serve_answers_both(reasoner: Reasoner, tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    made = untrained(reasoner.model, reasoner.tokenizer, init_bias=0.0, tuning="layers")
    made.save_pretrained(folder)
    with serving(folder) as url:
        source = ServedSource(url)
        assert source.positions == 1024
        assert source._instruction == reasoner.token_format.format.user_instruction
        greedy, short = asked(temperature=0.0), NEVER | {"max_thinking_tokens": 20}
        plain, pruned = (list(source.ask(greedy, on))[-1] for on in (False, True))
        budget = list(source.ask(asked(short, temperature=0.0), True))[-1]
        with pytest.raises(ValueError, match="shorten the question"):
            list(source.ask(asked(max_tokens=5000), True))
    assert (plain.reason, pruned.reason, budget.reason) == ("natural", "policy", "budget")
    assert plain.tokens > pruned.tokens > 0
    assert pruned.thinking[-1].tokens == pruned.tokens
    assert all(one.probability == pytest.approx(0.5) for one in pruned.thinking)
    assert "boxed" in pruned.answer
    assert text_of(plain).startswith(text_of(pruned).rstrip())
