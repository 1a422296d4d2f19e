"""What tails read of traces, as it is kept: one file a trace, which is there or not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from modeling_ospruner import OSPrunerForCausalLM
from ospruner.train import states as states_of
from ospruner.train.states import run_trunk
from ospruner.train.traces import LabelledTraces
from ospruner.train.untrained import untrained

from .conftest import MakeLabels

Kept = Callable[..., LabelledTraces]
ROWS = np.arange(12)


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
        traces = LabelledTraces.from_dataset(labels)
        traces.keep_states(tmp_path)
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


def equal(one: Any, other: Any) -> bool:
    pairs = [(one.hidden, other.hidden)]
    for a, b in zip(one.keys, other.keys, strict=True):
        pairs += [(a.keys, b.keys), (a.values, b.values)]
    return all(torch.equal(a, b) for a, b in pairs)


def test_files_hold_what_memory_holds(
    model: OSPrunerForCausalLM, kept: Kept, make_labels: MakeLabels, tmp_path: Path
) -> None:
    held = LabelledTraces.from_dataset(make_labels(12))
    size = held.cache_states(model, 2**30)
    disk = kept(make_labels(12))
    assert disk.cache_states(model, 0) == 0  # nothing of it is in memory
    assert equal(held.states(model, ROWS), disk.states(model, ROWS))
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(files) == 12
    assert size < sum(file.stat().st_size for file in files) < size + 12 * 1000
    small = LabelledTraces.from_dataset(make_labels(12))
    assert small.cache_states(model, size // 2) == 0
    assert not small.holds_states_of(model)


def test_a_pass_that_was_cut_goes_on_and_new_labels_cost_their_own(
    model: OSPrunerForCausalLM,
    kept: Kept,
    make_labels: MakeLabels,
    asked: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In another order, too: a file is its trace's."""
    monkeypatch.setattr(
        "ospruner.train.traces.length_batches", lambda lengths: np.split(np.arange(len(lengths)), 3)
    )
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
        row = np.array([here])
        assert equal(other.states(model, row), again.states(model, np.array([there])))
    kept(make_labels(15))
    assert sum(asked) == 15


def test_other_weights_other_tails_and_other_steps_have_files_of_their_own(
    kept: Kept,
    make_labels: MakeLabels,
    asked: list[int],
    tiny_base: Qwen2ForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    labels = make_labels(12)
    first = kept(labels)
    deeper = untrained(tiny_base, tiny_tokenizer, 3, tuning="layers")
    assert not first.holds_states_of(deeper)
    first.cache_states(deeper, 0)
    assert sum(asked) == 24
    # Fewer steps of the same tokens: states at step ends are others.
    names = ("step_ends", "forced_correct", "matches_final", "forced_answer_tokens")
    kept(labels.map(lambda row: {name: row[name][1:] for name in names}))
    assert sum(asked) == 36
    monkeypatch.setattr(states_of, "fingerprint_of", lambda base: None)  # no files are known
    with torch.no_grad():
        tiny_base.model.layers[0].mlp.up_proj.weight[0, 0] += 1.0
    kept(labels)
    assert sum(asked) == 48
    assert len(list(tmp_path.iterdir())) == 3


def test_processes_fill_the_folder_together(
    kept: Kept, make_labels: MakeLabels, asked: list[int], model: OSPrunerForCausalLM
) -> None:
    for rank in (0, 1):
        traces = kept(make_labels(12), rank=rank, processes=2)
    assert sum(asked) == 12
    whole = LabelledTraces.from_dataset(make_labels(12))
    found, wanted = traces.states(model, ROWS), whole.states(model, ROWS)
    torch.testing.assert_close(found.hidden[:, :3], wanted.hidden[:, :3], rtol=1e-4, atol=1e-5)


def test_a_full_disk_is_named(
    kept: Kept, make_labels: MakeLabels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ValueError, match="no room left to write in .*No space left"):
        kept(make_labels(12))
