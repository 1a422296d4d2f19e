from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM
from transformers.generation.streamers import BaseStreamer

from modeling_ospruner import OSPrunerForCausalLM, uniform
from ospruner.demo.shipped import Reasoner
from ospruner.scoring import stop_probabilities
from ospruner.train.untrained import untrained

NEW_TOKENS = 90
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "top_p": 0.95, "top_k": 0}


@pytest.fixture
def model(
    tiny_base: Qwen2ForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> OSPrunerForCausalLM:
    """An untrained policy whose probabilities spread over (0, 1)."""
    return make_model(tiny_base, tiny_tokenizer)


def make_model(
    base: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    layers: int = 2,
    dtype: torch.dtype = torch.float32,
) -> OSPrunerForCausalLM:
    torch.nn.Module.to(base, dtype=dtype)
    model = untrained(base, tokenizer, num_policy_layers=layers, tuning="layers")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        torch.nn.init.normal_(model.policy.head.weight, std=0.2)
    # Breaks are what the tests are about, and ends what they rarely want.
    model.base.generation_config.sequence_bias = {
        **{(i,): 6.0 for i in break_ids(model)},
        (tokenizer.eos_token_id,): -30.0,
        (model.token_format.think_end_id,): -30.0,
    }
    return model


def break_ids(model: OSPrunerForCausalLM) -> list[int]:
    texts = enumerate(model.token_format.kinds)
    return [i for i, kind in texts if kind & 1 and kind & 8]


def prompts(model: OSPrunerForCausalLM, batch: int) -> dict[str, torch.Tensor]:
    """Left-padded prompts of different lengths."""
    questions = ["Ann has 3 apples" + " and buys 4 more" * (i % 3) for i in range(batch)]
    tokenizer = model.tokenizer
    assert tokenizer is not None
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        for text in questions
    ]
    encoded = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}


def run(model: OSPrunerForCausalLM, inputs: dict[str, Any], **kwargs: Any) -> torch.Tensor:
    torch.manual_seed(5)
    output: torch.Tensor = model.generate(**inputs, max_new_tokens=NEW_TOKENS, **kwargs)
    return output


def greedy_answer(model: OSPrunerForCausalLM, text: list[int], most: int) -> list[int]:
    """The greedy continuation by plain forwards, to the closing brace or the end of text."""
    box = model.token_format.box_state()
    out: list[int] = []
    while len(out) < most:
        logits = model.base(input_ids=torch.tensor([text + out])).logits[0, -1]
        for (token,), bias in model.base.generation_config.sequence_bias.items():
            logits[token] += bias
        out.append(int(logits.argmax()))
        if box.push(out[-1]) or out[-1] == model.base.generation_config.eos_token_id:
            break
    return out


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_rows_equal_plain_generate_until_they_stop(
    model: OSPrunerForCausalLM, batch: int, sampling: dict[str, Any], cache: str
) -> None:
    inputs = prompts(model, batch)
    if batch > 1:
        assert (inputs["attention_mask"] == 0).any()
    extra = {**sampling, **({"cache_implementation": "static"} if cache == "static" else {})}
    plain = run(model, inputs, **extra)
    pruned = run(model, inputs, stop_policy={"seed": 3}, **extra)
    width = inputs["input_ids"].shape[1]
    forced = model.token_format.forced_suffix("forced")
    reasons = [record.reason for record in model.last_stop]
    assert "policy" in reasons
    for row, record in enumerate(model.last_stop):
        kept = record.thinking_tokens
        assert torch.equal(pruned[row, width : width + kept], plain[row, width : width + kept])
        if record.reason == "policy":
            assert record.step_ends[-1] == kept
            after = pruned[row, width + kept :].tolist()
            assert after[: len(forced)] == forced[: len(after)]


def test_forced_answers_are_the_greedy_ones(model: OSPrunerForCausalLM) -> None:
    """Sampled traces, greedy answers: what plain forwards give after the forced tokens."""
    inputs = prompts(model, 8)
    pruned = run(model, inputs, stop_policy={"mode": "threshold", "threshold": 0.0}, **SAMPLED)
    width = inputs["input_ids"].shape[1]
    compared = 0
    for row, record in enumerate(model.last_stop):
        start = width + record.thinking_tokens + len(model.token_format.forced_suffix())
        if record.reason != "policy" or start >= pruned.shape[1]:
            continue
        mask = inputs["attention_mask"][row].bool()
        text = [*inputs["input_ids"][row][mask].tolist(), *pruned[row, width:start].tolist()]
        answer = greedy_answer(model, text, pruned.shape[1] - start)
        assert pruned[row, start : start + len(answer)].tolist() == answer
        compared += len(answer)
    assert compared > 20


@pytest.mark.parametrize("layers", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_online_probabilities_equal_one_offline_pass(
    tiny_base: Qwen2ForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    layers: int,
    dtype: torch.dtype,
) -> None:
    model = make_model(tiny_base, tiny_tokenizer, layers, dtype)
    inputs = prompts(model, 8)
    never = {"mode": "threshold", "threshold": 1.0, "answer": "free"}
    output = run(model, inputs, stop_policy=never, **SAMPLED)
    width = inputs["input_ids"].shape[1]
    online, offline = [], []
    for row, record in enumerate(model.last_stop):
        prompt = inputs["input_ids"][row][inputs["attention_mask"][row].bool()].tolist()
        trace = output[row, width : width + record.thinking_tokens].tolist()
        steps = len(record.step_ends)
        assert model.token_format.step_ends(trace)[:steps] == record.step_ends
        online += record.probabilities
        text = [*prompt, *trace]
        scores = stop_probabilities(model, text, prompt_length=len(prompt))
        offline += scores[:steps].tolist()
    assert len(online) > 40
    spread = max(online) - min(online)
    assert spread > 0.2
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(torch.tensor(online), torch.tensor(offline), rtol=0, atol=tolerance)
    changed = sum(
        (uniform(0, 0, i) < a) != (uniform(0, 0, i) < b)
        for i, (a, b) in enumerate(zip(online, offline, strict=True))
    )
    assert changed <= (0 if dtype == torch.float32 else 0.05 * len(online))


def test_sampled_decisions_follow_the_counter_based_draws(model: OSPrunerForCausalLM) -> None:
    inputs = prompts(model, 8)
    run(model, inputs, stop_policy={"seed": 7, "first_sample_index": 100}, **SAMPLED)
    for row, record in enumerate(model.last_stop):
        stops = [
            uniform(7, 100 + row, step) < probability
            for step, probability in enumerate(record.probabilities)
        ]
        assert stops == [False] * (len(stops) - 1) + [record.reason == "policy"]


def test_a_policy_that_never_stops_changes_nothing(model: OSPrunerForCausalLM) -> None:
    torch.nn.init.zeros_(model.policy.head.weight)
    inputs = prompts(model, 4)
    never = {"mode": "threshold", "threshold": 0.9, "answer": "free"}
    assert torch.equal(run(model, inputs, stop_policy=never), run(model, inputs))
    assert {record.reason for record in model.last_stop} == {"length"}


def test_natural_ends_are_forced_too(model: OSPrunerForCausalLM) -> None:
    model.base.generation_config.sequence_bias = {
        (model.token_format.think_end_id,): 14.0,
        (model.base.generation_config.eos_token_id,): -30.0,
    }
    inputs = prompts(model, 8)
    plain = run(model, inputs, **SAMPLED)
    settings = {"mode": "threshold", "threshold": 1.0}
    pruned = run(model, inputs, stop_policy=settings, **SAMPLED)
    width, forced = inputs["input_ids"].shape[1], model.token_format.forced_suffix()
    natural = [i for i, record in enumerate(model.last_stop) if record.reason == "natural"]
    assert natural
    for row in natural:
        kept = model.last_stop[row].thinking_tokens + 1  # the marker is the model's own
        assert torch.equal(pruned[row, width : width + kept], plain[row, width : width + kept])
        after = pruned[row, width + kept - 1 :].tolist()
        assert after[: len(forced)] == forced[: len(after)]
    free = run(model, inputs, stop_policy={**settings, "answer": "free"}, **SAMPLED)
    assert torch.equal(free, plain)


def test_budget_and_minimum(model: OSPrunerForCausalLM) -> None:
    inputs = prompts(model, 8)
    budget = {"mode": "threshold", "threshold": 1.0, "max_thinking_tokens": 12}
    run(model, inputs, stop_policy=budget, **SAMPLED)
    stopped = [record for record in model.last_stop if record.reason == "budget"]
    assert stopped
    for record in stopped:
        assert record.thinking_tokens >= 12
        assert all(end < 12 for end in record.step_ends[:-1])
    at_once = {"mode": "threshold", "threshold": 0.0, "min_thinking_tokens": 12}
    run(model, inputs, stop_policy=at_once, **SAMPLED)
    assert all(r.thinking_tokens >= 12 for r in model.last_stop if r.reason == "policy")
    assert any(len(record.step_ends) > 1 for record in model.last_stop)


@pytest.mark.parametrize("limit", [1, 3])
def test_answers_end_at_their_cap(model: OSPrunerForCausalLM, limit: int) -> None:
    inputs = prompts(model, 1)
    settings = {"mode": "threshold", "threshold": 0.0, "max_answer_tokens": limit}
    output = run(model, inputs, stop_policy=settings)
    record = model.last_stop[0]
    assert record.reason == "policy"
    forced = model.token_format.forced_suffix()
    answer = output.shape[1] - inputs["input_ids"].shape[1] - record.thinking_tokens - len(forced)
    assert 1 <= answer <= limit


class Recorder(BaseStreamer):
    """Keeps what is streamed."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.ids += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


def test_streaming(model: OSPrunerForCausalLM) -> None:
    inputs, streamer = prompts(model, 1), Recorder()
    output = run(model, inputs, stop_policy=True, streamer=streamer)
    assert model.last_stop[0].reason == "policy"
    assert streamer.ids == output[0].tolist()
    assert streamer.ended


def test_several_return_sequences_and_the_output_object(model: OSPrunerForCausalLM) -> None:
    inputs = prompts(model, 2)
    extra: dict[str, Any] = {"num_return_sequences": 3, **SAMPLED}
    plain = run(model, inputs, **extra)
    output: Any = run(model, inputs, stop_policy=True, return_dict_in_generate=True, **extra)
    assert output.stop == model.last_stop
    assert len(output.stop) == 6
    width = inputs["input_ids"].shape[1]
    for row, record in enumerate(output.stop):
        end = width + record.thinking_tokens
        assert torch.equal(output.sequences[row, width:end], plain[row, width:end])


def test_prefill_in_chunks(model: OSPrunerForCausalLM) -> None:
    inputs = prompts(model, 3)
    whole = run(model, inputs, stop_policy=True)
    records = model.last_stop
    chunked = run(model, inputs, stop_policy=True, prefill_chunk_size=4)
    assert torch.equal(whole, chunked)
    for one, other in zip(records, model.last_stop, strict=True):
        assert one.probabilities == pytest.approx(other.probabilities, abs=1e-5)


def test_a_prompt_that_closed_its_thinking_is_left_alone(model: OSPrunerForCausalLM) -> None:
    inputs = prompts(model, 1)
    closing = torch.tensor([model.token_format.closing_ids])
    ids = torch.cat([inputs["input_ids"], closing], dim=1)
    always = {"mode": "threshold", "threshold": 0.0}
    assert torch.equal(
        run(model, {"input_ids": ids}, stop_policy=always), run(model, {"input_ids": ids})
    )
    assert model.last_stop[0].thinking_tokens == 0
    assert model.last_stop[0].reason == "natural"


@pytest.mark.parametrize("where", ["head", "layers"])
def test_nan_never_stops_or_crashes(model: OSPrunerForCausalLM, where: str) -> None:
    # Of queries that are NaN torch's attention kernel for the CPU makes zeros.
    inputs = prompts(model, 4)
    settings = {"mode": "threshold", "threshold": 0.0, "answer": "free"}
    run(model, inputs, stop_policy=settings)
    assert model.last_stop[0].reason == "policy"
    with torch.no_grad():
        for name, parameter in model.policy.named_parameters():
            if where in name:
                parameter.fill_(torch.nan)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        output = run(model, inputs, stop_policy=settings)
    assert torch.equal(output, run(model, inputs))
    assert len([w for w in caught if "gave NaN" in str(w.message)]) == 1
    for record in model.last_stop:
        assert record.nan_steps == len(record.step_ends) > 0
        assert record.reason == "length"


def test_concurrent_calls_do_not_mix(model: OSPrunerForCausalLM) -> None:
    batches = [prompts(model, size) for size in (1, 2, 3)]

    def greedy(inputs: dict[str, torch.Tensor]) -> Any:
        return model.generate(
            **inputs, max_new_tokens=40, stop_policy={"seed": 2}, return_dict_in_generate=True
        )

    alone = [greedy(inputs) for inputs in batches]
    together: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda i=i, b=b: together.update({i: greedy(b)}))
        for i, b in enumerate(batches)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, one in enumerate(alone):
        assert torch.equal(one.sequences, together[i].sequences)
        assert [r.step_ends for r in one.stop] == [r.step_ends for r in together[i].stop]


def test_draws_are_pinned() -> None:
    """Every engine draws these numbers: they are part of the format."""
    draws = [uniform(0, 0, 0), uniform(0, 0, 1), uniform(0, 1, 0), uniform(1, 0, 0)]
    assert all(0 <= draw < 1 for draw in draws)
    assert len(set(draws)) == 4
    assert draws[0] == PINNED
    many = torch.tensor([uniform(3, i, j) for i in range(100) for j in range(100)])
    assert abs(float(many.mean()) - 0.5) < 0.02
    assert abs(float(many.var()) - 1 / 12) < 0.005


PINNED = 0.13870941014555427


def test_on_step_is_told_of_each_decision(reasoner: Reasoner) -> None:
    model = untrained(reasoner.model, reasoner.tokenizer, init_bias=-1.0, tuning="layers")
    inputs = reasoner.tokenizer("Solve 3x+54=102 for x.", return_tensors="pt")
    told: list[tuple[int, int, float]] = []
    model.generate(
        **inputs, stop_policy=True, max_new_tokens=200, num_return_sequences=2, do_sample=True,
        on_step=lambda i, record: told.append((i, record.step_ends[-1], record.probabilities[-1])),
    )  # fmt: skip
    for i, record in enumerate(model.last_stop):
        steps = list(zip(record.step_ends, record.probabilities, strict=True))
        assert [(end, p) for row, end, p in told if row == i] == steps
        assert steps
