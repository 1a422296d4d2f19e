"""What generate's options and surroundings do to a stop policy, on the embedded reasoner."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LogitsProcessor, StoppingCriteria, TextStreamer

from modeling_ospruner import OSPrunerForCausalLM, uniform
from ospruner.demo import REASONER
from ospruner.demo.shipped import Reasoner, draw_split
from ospruner.eval.problems.problem import user_message
from ospruner.rules import AnswerEntropy
from ospruner.rules.live import generate_with_rule
from ospruner.train.untrained import untrained

SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 0}
GREEDY: dict[str, Any] = {"do_sample": False}
NEVER = {"mode": "threshold", "threshold": 1.0, "answer": "free"}
ALWAYS = {"mode": "threshold", "threshold": 0.0}


@pytest.fixture(scope="module")
def model(reasoner: Reasoner) -> OSPrunerForCausalLM:
    """The reasoner with a random policy, whose probabilities spread over (0, 1)."""
    return with_policy(reasoner.model, reasoner)


def with_policy(base: Any, reasoner: Reasoner) -> OSPrunerForCausalLM:
    model = untrained(base, reasoner.tokenizer, num_policy_layers=1, tuning="layers")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        torch.nn.init.normal_(model.policy.head.weight, std=0.2)
    return model


def inputs_for(model: OSPrunerForCausalLM, batch: int, more: str = "") -> dict[str, torch.Tensor]:
    """Left-padded prompts, each going on with `more`."""
    tokenizer = model.tokenizer
    assert tokenizer is not None
    texts = [
        str(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": user_message(problem, model.token_format.format)}],
                add_generation_prompt=True,
                tokenize=False,
            )
        )
        + more
        for problem in draw_split("test", batch, 0)
    ]
    encoded = tokenizer(
        texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False
    )
    return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}


def run(model: Any, inputs: dict[str, Any], new: int = 60, **kwargs: Any) -> torch.Tensor:
    """What is generated after the prompts, (B, S)."""
    torch.manual_seed(5)
    output: torch.Tensor = model.generate(**inputs, max_new_tokens=new, **{**GREEDY, **kwargs})
    return output[:, inputs["input_ids"].shape[1] :]


class Prefer(LogitsProcessor):
    """Makes one token by far the likeliest, where `when` says so."""

    def __init__(self, token: int, when: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.token = token
        self.when = when

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[self.when(input_ids), self.token] += 100.0
        return scores


def test_rows_are_numbered_in_the_outputs_order(model: OSPrunerForCausalLM) -> None:
    """The j-th text of prompt i is row i * k + j, and draws as that sample."""
    inputs = inputs_for(model, 2)
    asked = {"seed": 7, "first_sample_index": 100}
    run(model, inputs, stop_policy=asked, num_return_sequences=3, **SAMPLED)
    assert len(model.last_stop) == 6
    for row, record in enumerate(model.last_stop):
        assert record.probabilities
        drawn = [uniform(7, 100 + row, i) < p for i, p in enumerate(record.probabilities)]
        stopped = record.reason == "policy"
        assert drawn == [False] * (len(drawn) - stopped) + [True] * stopped


def test_a_policy_decides_at_the_stride_of_its_labels(
    model: OSPrunerForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = inputs_for(model, 2)
    run(model, inputs, stop_policy={"mode": "threshold", "threshold": 1.0})
    every = model.last_stop
    monkeypatch.setattr(model.config, "step_stride", 2)
    run(model, inputs, stop_policy={"mode": "threshold", "threshold": 1.0})
    for one, strided in zip(every, model.last_stop, strict=True):
        assert len(one.step_ends) > 2
        assert strided.step_ends == one.step_ends
        asked = [(i + 1) % 2 == 0 for i in range(len(one.step_ends))]
        assert [not math.isnan(p) for p in strided.probabilities] == asked
        assert strided.probabilities[1::2] == pytest.approx(one.probabilities[1::2])
        assert strided.nan_steps == 0
    run(model, inputs, stop_policy=ALWAYS)
    for one, strided in zip(every, model.last_stop, strict=True):
        assert strided.step_ends == one.step_ends[:2]


@pytest.mark.parametrize("answer", ["forced", "free"])
def test_an_answer_does_not_open_the_thinking_again(
    model: OSPrunerForCausalLM, answer: str
) -> None:
    fmt = model.token_format
    (start,) = fmt.reentry_ids
    after = Prefer(start, lambda ids: (ids == fmt.think_end_id).any(-1))
    inputs = inputs_for(model, 2)
    how: dict[str, Any] = {"logits_processor": [after]}
    settings = {**ALWAYS, "answer": answer}
    masked = run(model, inputs, stop_policy=settings, **how)
    assert [record.reason for record in model.last_stop] == ["policy"] * 2
    assert not (masked == start).any()
    free = run(model, inputs, stop_policy={**settings, "mask_reentry": False}, **how)
    assert (free == start).any(-1).all()


def test_a_natural_end_with_a_free_answer_is_plain_generate(model: OSPrunerForCausalLM) -> None:
    """Nothing was forced: even an answer that thinks again is the model's own."""
    fmt = model.token_format
    end = Prefer(fmt.think_end_id, lambda ids: torch.full((len(ids),), ids.shape[1] % 7 == 0))
    again = Prefer(fmt.reentry_ids[0], lambda ids: (ids == fmt.think_end_id).any(-1))
    inputs = inputs_for(model, 2)
    how: dict[str, Any] = {"logits_processor": [end, again]}
    assert torch.equal(run(model, inputs, stop_policy=NEVER, **how), run(model, inputs, **how))
    assert [record.reason for record in model.last_stop] == ["natural"] * 2


def _at_width(width: int, ids: torch.Tensor) -> torch.Tensor:
    return torch.full((len(ids),), ids.shape[1] == width)


def test_a_prefilled_thinking_goes_on(model: OSPrunerForCausalLM) -> None:
    """Its text counts for where steps end, its tokens do not count."""
    assert model.tokenizer is not None
    (newline,) = model.tokenizer.encode("\n", add_special_tokens=False)
    for more, is_step in (("3+4=7.\n", True), ("3+4=7.\n\n", False), ("", False)):
        inputs = inputs_for(model, 1, more)
        width = inputs["input_ids"].shape[1]
        first = Prefer(newline, partial(_at_width, width))
        run(model, inputs, stop_policy=NEVER, logits_processor=[first], new=30)
        record = model.last_stop[0]
        assert (record.step_ends[:1] == [1]) == is_step
        assert record.thinking_tokens <= 30


def test_a_cut_row_counts_all_its_tokens(model: OSPrunerForCausalLM) -> None:
    inputs = inputs_for(model, 2)
    for new in (1, 7):
        run(model, inputs, stop_policy=NEVER, new=new)
        assert [(r.thinking_tokens, r.reason) for r in model.last_stop] == [(new, "length")] * 2


class EndRow(StoppingCriteria):
    """Ends one row after so many columns."""

    def __init__(self, row: int, columns: int) -> None:
        self.row = row
        self.columns = columns

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        done = torch.zeros(len(input_ids), dtype=torch.bool)
        done[self.row] = input_ids.shape[1] >= self.columns
        return done


def test_rows_that_something_else_ends_are_let_go(model: OSPrunerForCausalLM) -> None:
    """The padding that follows is no thinking, and no natural end."""
    inputs = inputs_for(model, 3)
    columns = inputs["input_ids"].shape[1] + 9
    how: dict[str, Any] = {"stopping_criteria": [EndRow(1, columns)]}
    assert torch.equal(run(model, inputs, stop_policy=NEVER, **how), run(model, inputs, **how))
    ended = model.last_stop[1]
    assert (ended.thinking_tokens, ended.reason) == (9, "length")
    assert all(end <= 9 for end in ended.step_ends)
    assert all(record.thinking_tokens > 9 for record in model.last_stop[::2])


def test_stop_strings(model: OSPrunerForCausalLM) -> None:
    inputs = inputs_for(model, 3)
    plain = run(model, inputs, stop_strings=["=9"], tokenizer=model.tokenizer)
    pruned = run(model, inputs, stop_strings=["=9"], stop_policy=NEVER)
    assert torch.equal(plain, pruned)
    assert plain.shape[1] < 60 or (plain == model.base.generation_config.pad_token_id).any()
    assert model.tokenizer is not None
    for record, ids in zip(model.last_stop, pruned.tolist(), strict=True):
        text = model.tokenizer.decode(ids[: record.thinking_tokens])
        assert "=9" not in text[:-3]
        assert record.reason in ("length", "natural")


def test_text_is_streamed_as_it_is_returned(model: OSPrunerForCausalLM) -> None:
    said: list[str] = []

    class Keep(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            said.append(text)

    output = run(
        model,
        inputs_for(model, 1),
        stop_policy=ALWAYS,
        streamer=Keep(model.tokenizer, skip_prompt=True),
    )
    assert model.tokenizer is not None
    assert "".join(said) == model.tokenizer.decode(output[0])
    assert "</think>\n\n\\boxed{" in "".join(said)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(reasoner: Reasoner, dtype: torch.dtype) -> None:
    base = torch.nn.Module.to(copy.deepcopy(reasoner.model), dtype)
    half = with_policy(base, reasoner)
    inputs = inputs_for(half, 3)
    plain = run(half, inputs)
    for policy in ({"seed": 1}, AnswerEntropy(0.3)):
        pruned = run(half, inputs, stop_policy=policy)
        assert "policy" in [record.reason for record in half.last_stop]
        for row, record in enumerate(half.last_stop):
            kept = record.thinking_tokens
            assert torch.equal(pruned[row, :kept], plain[row, :kept])


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_dispatched_bases(reasoner: Reasoner, tmp_path: Path, where: str) -> None:
    """A device map, and one with a layer that is read from disk at each forward."""
    spread: dict[str, Any] = {"": "cpu"}
    if where == "disk":
        names = [name for name, _ in reasoner.model.model.layers.named_children()]
        spread = {"model": "cpu", "lm_head": "cpu", "model.embed_tokens": "cpu"}
        spread = {
            **{f"model.layers.{name}": "disk" if name == "1" else "cpu" for name in names},
            "model.embed_tokens": "cpu",
            "model.norm": "cpu",
            "model.rotary_emb": "cpu",
            "lm_head": "cpu",
        }
    base = AutoModelForCausalLM.from_pretrained(
        REASONER, dtype=torch.float32, device_map=spread, offload_folder=str(tmp_path)
    )
    assert (where == "disk") == any(p.device.type == "meta" for p in base.parameters())
    outputs = []
    for one in (base, reasoner.model):
        inputs = inputs_for(with_policy(reasoner.model, reasoner), 2)
        ids, records = generate_with_rule(
            one,
            reasoner.tokenizer,
            AnswerEntropy(0.3),
            token_format=reasoner.token_format,
            max_new_tokens=60,
            **inputs,
            **GREEDY,
        )
        outputs.append((ids.tolist(), [(r.step_ends, r.reason, r.probe_tokens) for r in records]))
    assert outputs[0] == outputs[1]
    assert "policy" in [reason for _, reason, _ in outputs[0][1]]


def test_three_threads_try_answers_as_they_would_alone(model: OSPrunerForCausalLM) -> None:
    batches = [inputs_for(model, size) for size in (1, 2, 3)]

    def solve(inputs: dict[str, torch.Tensor]) -> tuple[list[int], Any]:
        output = model.generate(
            **inputs, max_new_tokens=50, stop_policy=AnswerEntropy(0.05), **GREEDY,
            return_dict_in_generate=True,
        )  # fmt: skip
        told = [(r.step_ends, r.signals, r.probe_tokens) for r in output.stop]
        return output.sequences.tolist(), told

    alone = [solve(inputs) for inputs in batches]
    together: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda i=i, b=b: together.update({i: solve(b)}))
        for i, b in enumerate(batches)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[i] for i in range(3)] == alone
