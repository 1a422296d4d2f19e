"""Batches hold the right tokens at the right places, and the fast tail gives the same logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from modeling_ospruner import OSPrunerForCausalLM
from ospruner.scoring import stop_probabilities, trunk
from ospruner.train.batches import EpochBatches, length_batches
from ospruner.train.predicting import predict
from ospruner.train.tail import step_outputs, takes_fast_tail
from ospruner.train.traces import LabelledTraces
from ospruner.train.untrained import untrained

MakeLabels = Callable[..., Dataset]
TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}


def policy_model(
    base: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, n: int = 2
) -> OSPrunerForCausalLM:
    model = untrained(base, tokenizer, num_policy_layers=n, tuning="layers").eval()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        torch.nn.init.normal_(model.policy.head.weight)
    return model


def test_batches_hold_the_tokens_and_places_of_the_rows(make_labels: MakeLabels) -> None:
    dataset = make_labels(9)
    traces = LabelledTraces.from_dataset(dataset)
    rows = np.array([4, 0, 7])
    batch, ids = traces.batch(rows), traces.input_ids(rows)
    for b, row in enumerate(rows):
        wanted = dataset[int(row)]
        whole = [*wanted["prompt_ids"], *wanted["trace_ids"]]
        T = len(wanted["step_ends"])
        assert ids[b].tolist() == whole + [0] * (ids.shape[1] - len(whole))
        assert batch.mask[b].tolist() == [True] * T + [False] * (batch.mask.shape[1] - T)
        places = [len(wanted["prompt_ids"]) + end - 1 for end in wanted["step_ends"]]
        assert batch.positions[b, :T].tolist() == places
        assert batch.lengths[b, :T].tolist() == wanted["step_ends"]
        assert batch.correct[b, :T].tolist() == wanted["forced_correct"]
        assert batch.matches_final[b, :T].tolist() == wanted["matches_final"]


def test_an_epoch_takes_every_row_once_in_an_order_of_its_own() -> None:
    lengths = np.random.default_rng(0).integers(10, 400, 1000)
    rows = np.arange(0, 1000, 2)
    sampler = EpochBatches(lengths, rows, 16, 3)

    def batches_of(epoch: int) -> list[np.ndarray[Any, Any]]:
        sampler.set_epoch(epoch)
        return [np.array(batch) for batch in sampler]

    first, again, second = (batches_of(epoch) for epoch in (0, 0, 1))
    assert len(sampler) == len(first)
    assert sorted(np.concatenate(first).tolist()) == rows.tolist()
    assert [b.tolist() for b in first] == [b.tolist() for b in again]
    assert [b.tolist() for b in first] != [b.tolist() for b in second]
    slots = sum(len(b) * lengths[b].max() for b in first)
    assert slots < 1.15 * lengths[rows].sum()  # in random order: 1.8 times
    batches = list(length_batches(lengths, 1000))
    assert sorted(np.concatenate(batches).tolist()) == list(range(1000))
    assert all(len(b) * lengths[b].max() <= 1000 for b in batches)


def test_predictions_equal_those_of_one_trace_at_a_time(
    make_labels: MakeLabels, tiny_base: Qwen2ForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    dataset = make_labels(12)
    model = policy_model(tiny_base, tiny_tokenizer)
    traces = LabelledTraces.from_dataset(dataset)
    plain = predict(model, dataset)
    assert traces.cache_states(model, 10) == 0  # does not fit: nothing is kept
    size = traces.cache_states(model, 2**30)
    assert size == int(traces.token_lengths.sum()) * 32 * 4
    cached = predict(model, traces)
    other = LabelledTraces.from_dataset(dataset)
    np.testing.assert_array_equal(predict(model, other), cached)
    assert other.cache_states(model, 0) == size  # they are kept
    np.testing.assert_allclose(cached, plain, atol=1e-6)
    for n, row in enumerate(dataset):
        alone = stop_probabilities(
            model, [*row["prompt_ids"], *row["trace_ids"]], prompt_length=len(row["prompt_ids"])
        ).numpy()
        np.testing.assert_allclose(cached[n, : len(alone)], alone, atol=1e-5)
        assert (cached[n, len(alone) :] == 0).all()
    assert cached.std() > 0.05  # the head says something


def test_states_of_one_base_are_not_given_to_another(
    make_labels: MakeLabels, tiny_base: Qwen2ForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    traces = LabelledTraces.from_dataset(make_labels(3))
    two, one = (policy_model(tiny_base, tiny_tokenizer, n) for n in (2, 1))
    traces.cache_states(two, 2**30)
    rows = np.arange(3)
    real = torch.arange(int(traces.token_lengths.max())) < torch.from_numpy(
        traces.token_lengths[:, None]
    )  # what stands beyond a trace's end is not looked at
    wanted = trunk(one, traces.input_ids(rows))[real]
    torch.testing.assert_close(traces.states(one, rows).hidden[real], wanted)
    assert not torch.allclose(traces.states(two, rows).hidden[real], wanted)


def bases(tokenizer: PreTrainedTokenizerFast, tiny: PreTrainedModel) -> dict[str, PreTrainedModel]:
    size: dict[str, Any] = {"vocab_size": len(tokenizer), "pad_token_id": 0, **TINY}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return {
            "qwen2": tiny,
            "llama": LlamaForCausalLM(LlamaConfig(**size, attention_bias=True)),
            "qwen3": Qwen3ForCausalLM(Qwen3Config(**size, head_dim=8)),
        }


@pytest.mark.parametrize(("family", "fast"), [("qwen2", True), ("llama", True), ("qwen3", False)])
@pytest.mark.parametrize("n", [1, 2])
def test_fast_tail_gives_the_logits_and_gradients_of_the_whole_pass(
    family: str,
    fast: bool,
    n: int,
    make_labels: MakeLabels,
    tiny_base: Qwen2ForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    model = policy_model(bases(tiny_tokenizer, tiny_base)[family], tiny_tokenizer, n)
    assert takes_fast_tail(model.policy.tail) is fast
    traces = LabelledTraces.from_dataset(make_labels(6))
    rows = np.arange(6)
    batch, hidden = traces.batch(rows), traces.states(model, rows)
    found = []
    for way in (True, False):
        model.policy.zero_grad(set_to_none=True)
        logits = step_outputs(model.policy, hidden, batch.positions, fast=way)[..., 0]
        (logits[batch.mask].sigmoid() * batch.correct[batch.mask]).sum().backward()
        trained = [p for p in model.policy.parameters() if p.requires_grad]
        found.append(
            [logits.detach()[batch.mask], *(p.grad for p in trained if p.grad is not None)]
        )
    assert len(found[0]) == len(found[1]) > 8 * n
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


def test_attention_that_needs_a_mask_takes_the_whole_pass(
    tiny_base: Qwen2ForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    tiny_base.set_attn_implementation("eager")
    assert not takes_fast_tail(policy_model(tiny_base, tiny_tokenizer).policy.tail)
