"""Traces as batches: the right tokens at the right places, and what is kept of them."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from modeling_ospruner import OSPrunerForCausalLM
from ospruner.scoring import reading
from ospruner.train import states as states_of
from ospruner.train.states import run_trunk
from ospruner.train.traces import EpochBatches, LabelledTraces, length_batches
from ospruner.train.untrained import untrained

from ..families import make_base
from .conftest import make_labels

Kept = Callable[..., LabelledTraces]
OTHER = {"layers": "queries", "queries": "layers"}
ROWS = np.arange(12)


def test_batches_hold_the_tokens_and_places_of_the_rows() -> None:
    dataset = make_labels(9)
    traces, rows = LabelledTraces.from_dataset(dataset), np.array([4, 0, 7])
    batch = traces.batch(rows)
    for b, row in enumerate(rows):
        wanted = dataset[int(row)]
        T, prompt = len(wanted["step_ends"]), wanted["prompt_ids"]
        assert traces.tokens[row].tolist() == [*prompt, *wanted["trace_ids"]]
        assert batch.mask[b].tolist() == [True] * T + [False] * (batch.mask.shape[1] - T)
        places = [len(prompt) + end - 1 for end in wanted["step_ends"]]
        assert batch.positions[b, :T].tolist() == places
        assert batch.lengths[b, :T].tolist() == wanted["step_ends"]
        assert batch.correct[b, :T].tolist() == wanted["forced_correct"]
        assert batch.matches_final[b, :T].tolist() == wanted["matches_final"]


def test_an_epoch_takes_every_row_once_in_an_order_of_its_own() -> None:
    lengths = np.random.default_rng(0).integers(10, 400, 1000)
    rows = np.arange(0, 1000, 2)
    sampler = EpochBatches(lengths, rows, 16, 3)

    def batches_of(epoch: int) -> list[list[int]]:
        sampler.epoch = epoch
        return list(sampler)

    first, again, second = (batches_of(epoch) for epoch in (0, 0, 1))
    assert len(sampler) == len(first)
    assert sorted(itertools.chain(*first)) == rows.tolist()
    assert first == again != second
    slots = sum(len(b) * lengths[b].max() for b in first)
    assert slots < 1.15 * lengths[rows].sum()  # in random order: 1.8 times
    batches = list(length_batches(lengths, 1000))
    assert sorted(np.concatenate(batches).tolist()) == list(range(1000))
    assert all(len(b) * lengths[b].max() <= 1000 for b in batches)


@pytest.mark.parametrize(
    ("kind", "implementation"),
    [
        *(("qwen2", "sdpa"), ("qwen2", "eager"), ("gemma3_text", "sdpa"), ("gpt_oss", "eager")),
        ("qwen3_next", "sdpa"),
    ],
)
def test_states_are_those_of_each_trace_alone(
    kind: str, implementation: str, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    base = make_base(kind, tiny_tokenizer)
    base.set_attn_implementation(implementation)
    model = untrained(base, tiny_tokenizer, num_policy_layers=1, tuning="layers")
    traces = LabelledTraces.from_dataset(make_labels(12))
    rows = np.random.default_rng(0).permutation(12)
    together = traces.states(model, rows).hidden
    for b, row in enumerate(rows):
        alone = reading(model, torch.from_numpy(traces.tokens[row])[None])[0][0]
        # Of the largest state, in float32; of linear attention other batches round otherwise.
        close = (1e-4 if kind == "qwen3_next" else 1e-5) * float(alone.abs().max())
        torch.testing.assert_close(together[b, : len(alone)], alone, atol=close, rtol=0)


# Kept states: one file a trace, which is there or not.


@pytest.fixture(params=["layers", "queries"])
def model(
    request: pytest.FixtureRequest,
    tiny_base: Qwen2ForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> OSPrunerForCausalLM:
    return untrained(tiny_base, tiny_tokenizer, tuning=request.param)


@pytest.fixture
def kept(model: OSPrunerForCausalLM, tmp_path: Path) -> Kept:
    """Keeps the states of labels in the folder."""

    def keep(labels: Dataset, **named: Any) -> LabelledTraces:
        traces = LabelledTraces.from_dataset(labels, tmp_path)
        traces.cache_states(model, 0, **named)
        return traces

    return keep


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many traces each pass of the base is asked for."""
    counts: list[int] = []

    def counted(model: Any, texts: Any, positions: Any) -> Any:
        counts.append(len(texts))
        return run_trunk(model, texts, positions)

    monkeypatch.setattr("ospruner.train.traces.run_trunk", counted)
    return counts


def test_files_hold_what_memory_holds_and_processes_fill_them_together(
    model: OSPrunerForCausalLM, kept: Kept, tmp_path: Path, asked: list[int]
) -> None:
    held = LabelledTraces.from_dataset(make_labels(12))
    size = held.cache_states(model, 2**30)
    if model.config.tuning == "queries":  # 32 numbers a step; of 2 layers with 2 heads of 8
        steps, tokens = held.table.mask.sum(), held.token_lengths.sum()
        assert size == 4 * (32 * steps + 2 * 2 * 2 * 8 * tokens)
    for rank in (0, 1):
        disk = kept(make_labels(12), share=(rank, 2))
    assert sum(asked) == 12 + 12
    assert disk.cache_states(model, 0) == 0  # nothing of it is in memory
    ours, theirs = held.states(model, ROWS), disk.states(model, ROWS)
    torch.testing.assert_close(ours.hidden, theirs.hidden, rtol=1e-4, atol=1e-5)
    assert len(ours.keys) == len(theirs.keys)
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(files) == 12
    assert size < sum(file.stat().st_size for file in files) < size + 12 * 1000
    small = LabelledTraces.from_dataset(make_labels(12))
    assert small.cache_states(model, size // 2) == 0
    assert not small.holds_states_of(model)


def test_only_what_is_read_is_computed(model: OSPrunerForCausalLM, asked: list[int]) -> None:
    traces = LabelledTraces.from_dataset(make_labels(12))
    some = traces.cache_states(model, 2**30, rows=np.array([1, 4, 7]))
    traces.states(model, np.array([7, 1]))
    assert asked == [3]
    traces.states(model, np.array([7, 2]))  # the second is not kept
    assert asked == [3, 2]
    assert traces.cache_states(model, 2**30) > some
    assert sum(asked[2:]) == 9


def test_a_pass_that_was_cut_goes_on_and_new_labels_cost_their_own(
    model: OSPrunerForCausalLM, kept: Kept, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another order, too: a file is its trace's."""
    thirds = "ospruner.train.traces.length_batches"
    monkeypatch.setattr(thirds, lambda lengths: np.split(np.arange(len(lengths)), 3))
    grown = make_labels(12)

    def cut(phase: str, done: int, total: int, note: str = "") -> None:
        if done == 8:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        kept(grown, progress=cut)
    assert sum(asked) == 8
    again = kept(grown)
    assert sum(asked) == 12
    other = kept(grown.select([7, 2, 5]))
    assert sum(asked) == 12
    for here, there in enumerate([7, 2, 5]):
        ours, theirs = other.states(model, np.array([here])), again.states(model, np.array([there]))
        assert torch.equal(ours.hidden, theirs.hidden)
        for one, same in zip(ours.keys, theirs.keys, strict=True):
            assert torch.equal(one.keys, same.keys)
            assert torch.equal(one.values, same.values)
    kept(make_labels(15))
    assert sum(asked) == 15


def test_other_weights_other_tails_and_other_steps_have_states_of_their_own(
    model: Any, kept: Kept, asked: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = make_labels(12)
    first = kept(labels)
    for n, tuning in ((3, model.config.tuning), (2, OTHER[model.config.tuning])):
        other = untrained(model.base, model.tokenizer, n, tuning=tuning)
        assert not first.holds_states_of(other)
        first.cache_states(other, 0)
        assert first.holds_states_of(other)
    assert sum(asked) == 36
    # Fewer steps of the same tokens: states at step ends are others.
    names = ("step_ends", "forced_correct", "matches_final", "forced_answer_tokens")
    kept(labels.map(lambda row: {name: row[name][1:] for name in names}))
    assert sum(asked) == 48
    monkeypatch.setattr(states_of, "fingerprint_of", lambda *_: None)  # no files are known
    with torch.no_grad():
        model.base.model.layers[0].mlp.up_proj.weight[0, 0] += 1.0
    kept(labels)
    assert sum(asked) == 60
    assert len(list(tmp_path.iterdir())) == 4


def test_a_full_disk_is_named(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ValueError, match="no room left to write in .*No space left"):
        kept(make_labels(12))
