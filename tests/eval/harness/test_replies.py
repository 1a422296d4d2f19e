"""Replies of a policy: what is the answer, what is thinking, and where stop strings count."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from modeling_ospruner import OSPrunerForCausalLM
from modeling_ospruner.formats_ospruner import TokenFormat
from ospruner.demo.shipped import Reasoner
from ospruner.eval.harness.replies import AnswerStrings, Asked, _parts, cut, open_policy

from .conftest import ChatServer

Policy = tuple[OSPrunerForCausalLM, Path]
Rows = list[dict[str, str]]
HERE: dict[str, Any] = {"device": "cpu", "dtype": "float32"}  # the reasoner's own is bfloat16
STOPS = ("\n\n", "boxed{1", "Question:")


def conversations(rows: Rows) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": row["problem"]}] for row in rows]


@pytest.mark.parametrize(
    "settings", [{"threshold": 0.1}, {"threshold": 0.9, "max_thinking_tokens": 40}, None]
)
def test_replies_are_those_of_generate(
    policy: Policy, rows: Rows, settings: dict[str, Any] | None
) -> None:
    model, folder = policy
    opened = open_policy(str(folder), **HERE, stop_policy=settings is not None, **settings or {})
    replies = opened.ask(conversations(rows), Asked(300))
    tokenizer: Any = model.tokenizer
    for one, reply in zip(conversations(rows), replies, strict=True):
        inputs = tokenizer.apply_chat_template(
            one, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        output = model.generate(
            **inputs, stop_policy=settings or False, max_new_tokens=300, do_sample=False
        )
        new = output[0, inputs["input_ids"].shape[1] :].tolist()
        end = new.index(model.token_format.think_end_id) if reply.answer else len(new)
        assert reply.thinking == tokenizer.decode(new[:end], skip_special_tokens=True).strip()
        after = tokenizer.decode(new[end + 1 :], skip_special_tokens=True)
        assert reply.answer == after.lstrip()
        if settings is None:
            assert reply.reason == ("natural" if reply.answer else "length")
            assert reply.thinking_tokens == (end if reply.answer else reply.tokens)
        else:
            assert reply.reason == model.last_stop[0].reason
            assert reply.thinking_tokens == model.last_stop[0].thinking_tokens
    assert any(reply.answer for reply in replies)
    assert any("\n\n" in reply.thinking for reply in replies)


def test_batches_reply_as_one_by_one(policy: Policy, rows: Rows) -> None:
    one, four = (
        open_policy(str(policy[1]), **HERE, batch_size=size, mode="sample", seed=1)
        for size in (1, 4)
    )
    asked = Asked(200, STOPS)
    assert one.ask(conversations(rows), asked) == four.ask(conversations(rows), asked)


def test_stop_strings_end_the_answer_and_not_the_thinking(policy: Policy, rows: Rows) -> None:
    opened = open_policy(
        str(policy[1]), **HERE, threshold=0.9, max_thinking_tokens=40, answer="free"
    )
    whole = opened.ask(conversations(rows), Asked(120))
    stopped = opened.ask(conversations(rows), Asked(120, ("\\boxed{", "\n\n")))
    assert any("\\boxed{" in reply.answer for reply in whole)
    for a, b in zip(whole, stopped, strict=True):
        assert (b.thinking, b.thinking_tokens, b.reason) == (
            a.thinking,
            a.thinking_tokens,
            a.reason,
        )
        assert b.answer == cut(a.answer, ("\\boxed{", "\n\n"))
        if "\\boxed{" in a.answer:
            assert b.tokens < a.tokens, "the row ends with the stop string"
    assert any("\n\n" in reply.thinking for reply in stopped)


def test_harmony_header_is_no_answer(
    real_harmony: tuple[PreTrainedTokenizerBase, TokenFormat],
) -> None:
    tokenizer: Any = real_harmony[0]
    fmt = real_harmony[1]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+1?"}], add_generation_prompt=True, return_dict=False
    )
    texts = {
        "marker": "<|channel|>analysis<|message|>One.\n\nTwo.<|end|><|start|>assistant"
        "<|channel|>final<|message|>It is 2.\n\nSo.<|return|>",
        "header": "<|channel|>final<|message|>It is 2.\n\nSo.<|return|>",
    }
    ends = frozenset(fmt.eos_ids) - {fmt.think_end_id}
    for name, text in texts.items():
        row = tokenizer.encode(text, add_special_tokens=False)
        parts = _parts(fmt, prompt, row, ends)
        assert tokenizer.decode(parts.answer) == "It is 2.\n\nSo."
        assert ("Two." in tokenizer.decode(parts.thinking)) == (name == "marker")
        criterion = AnswerStrings(fmt, tokenizer, [prompt], ["\n\n", "final"])
        ended = [bool(criterion(torch.tensor([[token]]), None)[0]) for token in row]
        first = tokenizer.decode(row[: ended.index(True) + 1])
        assert first.endswith(".\n\n")
        assert "2." in first


def test_cut_takes_the_first_stop_string() -> None:
    assert cut("ab\n\ncd Q:", ("Q:", "\n\n")) == "ab"
    assert cut("ab", ("x",)) == "ab"


def test_served_replies_are_the_local_ones(
    policy: Policy, rows: Rows, chat_server: ChatServer
) -> None:
    settings: dict[str, Any] = {"mode": "sample", "seed": 3}
    local = open_policy(str(policy[1]), **HERE, **settings)
    served = open_policy("toy", url=chat_server.url, **settings)
    chat_server.bodies.clear()
    asked = Asked(200, STOPS)
    here, there = (one.ask(conversations(rows), asked) for one in (local, served))
    for a, b in zip(here, there, strict=True):
        assert (a.answer, a.thinking, a.thinking_tokens, a.reason, a.prompt_tokens) == (
            b.answer,
            b.thinking,
            b.thinking_tokens,
            b.reason,
            b.prompt_tokens,
        )
    assert len({reply.thinking_tokens for reply in here}) > 1
    assert all("stop" not in body for body in chat_server.bodies), "it would match in the thinking"
    plain = open_policy("toy", url=chat_server.url + "/v1", stop_policy=False)
    assert {reply.reason for reply in plain.ask(conversations(rows)[:2], asked)} <= {
        "natural",
        "length",
    }
    assert chat_server.bodies[-1]["vllm_xargs"] == {"stop_policy": False}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"policy": None}, "policy is None"),
        ({"thresold": 0.5}, r"stop_policy has no \['thresold'\]; its keys are"),
        ({"threshold": 2}, "threshold"),
        ({"stop_policy": False, "threshold": 0.5}, r"\['threshold'\] would do nothing"),
        ({"stop_policy": "no"}, "stop_policy is 'no'"),
        ({"api_key": "x"}, "give its url too"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"max_loss": 0.01}, "promises nothing"),
        ({"url": "localhost:1"}, "url is 'localhost:1'"),
        ({"url": "http://x", "device": "cpu"}, r"\['device'\] would do nothing"),
        ({"url": "http://x", "mask_reentry": False}, "cannot be sent to a server"),
        ({"url": "http://x", "max_loss": 0.1}, "stop_max_loss"),
    ],
)
def test_bad_arguments_are_refused_early(
    policy: Policy, arguments: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        open_policy(**{"policy": str(policy[1]), **arguments})


def test_server_without_stops_is_refused(rows: Rows, chat_server: ChatServer) -> None:
    nowhere = open_policy("toy", url=f"{chat_server.url}/other")
    with pytest.raises(ValueError, match="ospruner serve"):
        nowhere.ask(conversations(rows)[:1], Asked(5))


def test_of_a_model_that_thinks_in_its_reply_all_of_it_is_the_reply(
    reasoner: Reasoner, rows: Rows, tmp_path: Path
) -> None:
    """With or without words for the final answer, which end the thinking that is counted."""
    form = replace(
        reasoner.token_format.format,
        **{"name": "reply", "think_end": "", "think_start": "", "closing": "\n\nThat fits "},
        answer_phrase="That fits",
    )
    OSPrunerForCausalLM.untrained(
        reasoner.model,
        reasoner.tokenizer,
        base_model_name_or_path=str(reasoner.folder),
        reasoning_format=form,
        tuning="layers",
    ).save_pretrained(tmp_path)
    opened = open_policy(str(tmp_path), **HERE, threshold=1.0, answer="free")
    replies = opened.ask(conversations(rows), Asked(200))
    assert any("That fits" in reply.answer for reply in replies)
    tokenizer: Any = reasoner.tokenizer
    for reply in replies:
        assert reply.thinking == ""
        ids = tokenizer.encode(reply.answer, add_special_tokens=False)
        assert abs(len(ids) - reply.tokens) <= 1  # the token that ends the text, for one
        if "That fits" in reply.answer:
            before = tokenizer.encode(
                reply.answer.partition("That fits")[0], add_special_tokens=False
            )
            assert (reply.thinking_tokens, reply.reason) == (len(before), "natural")
    stopped = opened.ask(conversations(rows), Asked(200, ("That",)))
    assert [reply.answer for reply in stopped] == [cut(one.answer, ("That",)) for one in replies]
