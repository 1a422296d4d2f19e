"""Several targets on one pass of the trunk: each as if trained alone, killed or not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from modeling_ospruner.formats_ospruner import DEEPSEEK_R1
from ospruner.eval.schema import LabelSettings
from ospruner.train.loop import StageResult, train, train_together
from ospruner.train.settings import TrainSettings
from ospruner.train.traces import LabelledTraces

from .conftest import MakeLabels

Ingredients = tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast, Dataset, Dataset]
SETTINGS = TrainSettings(
    length_penalties=(3e-2, 1e-2, 0.0),
    batch_size=8,
    learning_rate=1e-3,
    epochs_per_stage=2,
    tuning="layers",
)


@pytest.fixture
def ingredients(
    tiny_base: Qwen2ForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    tiny_base_dir: Path,
    make_labels: MakeLabels,
) -> Ingredients:
    return tiny_base, tiny_tokenizer, make_labels(40), make_labels(20, seed=1, prefix="v")


@pytest.fixture
def label_settings(tiny_base_dir: Path) -> LabelSettings:
    return LabelSettings(base_model=str(tiny_base_dir), reasoning_format=DEEPSEEK_R1.to_dict())


def same(ours: list[StageResult], theirs: list[StageResult]) -> None:
    assert [result.name for result in ours] == [result.name for result in theirs]
    for one, other in zip(ours, theirs, strict=True):
        mine, yours = (load_file(r.path / "model.safetensors") for r in (one, other))
        assert mine.keys() == yours.keys()
        assert all(torch.equal(mine[name], yours[name]) for name in mine)
        assert (one.accuracy, one.tokens) == (other.accuracy, other.tokens)


def test_targets_own_whole_schedules_of_the_same_length() -> None:
    targets = SETTINGS.targets()
    assert list(targets) == ["lam3e-2", "lam1e-2", "lam0", "probe", "convergence"]
    assert {name: [s.epochs for s in one.stages] for name, one in targets.items()} == {
        "lam3e-2": [6],
        "lam1e-2": [2, 4],
        "lam0": [2, 2, 2],
        "probe": [6],
        "convergence": [6],
    }
    assert targets["lam1e-2"].length_penalties == (3e-2, 1e-2)
    with pytest.raises(ValueError, match="method is 'probe', one target by itself"):
        targets["probe"].targets()


@pytest.mark.parametrize(("cache_limit_bytes", "micro_batch_tokens"), [(0, 90), (2**31, 16_384)])
def test_each_target_is_as_if_trained_alone(
    ingredients: Ingredients,
    label_settings: LabelSettings,
    tmp_path: Path,
    cache_limit_bytes: int,
    micro_batch_tokens: int,
) -> None:
    settings = dataclasses.replace(
        SETTINGS, cache_limit_bytes=cache_limit_bytes, micro_batch_tokens=micro_batch_tokens
    )
    targets = settings.targets()
    together = train_together(
        *ingredients,
        list(targets.values()),
        label_settings,
        [tmp_path / "together" / name for name in targets],
    )
    for (name, target), ours in zip(targets.items(), together, strict=True):
        same(ours, train(*ingredients, target, label_settings, tmp_path / "alone" / name))


def test_the_trunk_runs_once_a_batch_for_all(
    ingredients: Ingredients,
    label_settings: LabelSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    computed = LabelledTraces.states

    def counting(self: LabelledTraces, model: Any, rows: Any) -> Any:
        calls.append(len(self))
        return computed(self, model, rows)

    monkeypatch.setattr(LabelledTraces, "states", counting)
    targets = dataclasses.replace(SETTINGS, cache_limit_bytes=0).targets()
    train_together(
        *ingredients, list(targets.values()), label_settings, [tmp_path / n for n in targets]
    )
    assert calls.count(40) == SETTINGS.total_epochs * 5  # 40 traces in batches of 8


class PowerCutError(Exception):
    """The power fails."""


@pytest.mark.parametrize("after", [3, 14, 31])
def test_targets_that_broke_off_apart_catch_up(
    ingredients: Ingredients,
    label_settings: LabelSettings,
    tmp_path: Path,
    after: int,
) -> None:
    targets = dataclasses.replace(SETTINGS, checkpoint_every=2).targets()
    calls = 0

    def cut(phase: str, done: int, total: int, note: str = "") -> None:
        nonlocal calls
        calls += phase == "train"
        if phase == "train" and calls == after:
            raise PowerCutError  # in the middle of a batch: some targets have taken it, others not

    def go(folder: str, **more: Any) -> list[list[StageResult]]:
        out = [tmp_path / folder / name for name in targets]
        return train_together(
            *ingredients,
            list(targets.values()),
            label_settings,
            out,
            **more,
        )

    with pytest.raises(PowerCutError):
        go("cut", progress=cut)
    for ours, theirs in zip(go("cut"), go("whole"), strict=True):
        same(ours, theirs)


def test_targets_that_cannot_share_batches_are_refused(
    ingredients: Ingredients, label_settings: LabelSettings, tmp_path: Path
) -> None:
    other = dataclasses.replace(SETTINGS, batch_size=4)
    with pytest.raises(ValueError, match=r"must share batch_size; they have \[4, 8\]"):
        train_together(
            *ingredients, [SETTINGS, other], label_settings, [tmp_path / "a", tmp_path / "b"]
        )
    with pytest.raises(ValueError, match="2 targets for the folders .* a folder of its own"):
        train_together(*ingredients, [SETTINGS, other], label_settings, [tmp_path, tmp_path])
    assert not list(tmp_path.iterdir())
