"""Training on labels of several domains, and what a policy of several tasks is taken for."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from modeling_ospruner import OSPrunerConfig
from ospruner.calibrating import calibrate
from ospruner.comparing import compare
from ospruner.demo.shipped import Reasoner, draw_split
from ospruner.durable import write_checked
from ospruner.eval.schema import LabelSettings
from ospruner.provenance import read_provenance
from ospruner.train.label_sets import load_labels, load_mix
from ospruner.train.labels.folder import read_manifest

from .conftest import trained_on


def told_otherwise(folder: Path, source: dict[str, Any] | None = None, **changed: Any) -> Path:
    """A folder of labels whose manifest states other settings."""
    manifest = read_manifest(folder)
    settings = LabelSettings.from_dict(manifest["settings"] | changed)
    about = {"settings": settings.to_dict(), "source": source or manifest["source"]}
    write_checked(folder / "manifest.json", manifest | about)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Mathematics and short answers: the same problem ids, other problems."""
    where = tmp_path_factory.mktemp("mixed")
    for name, seed, count in (("sums", 7, 40), ("names", 8, 30)):
        Reasoner().label(draw_split("train", count, seed), where / name, seed)
    told_otherwise(where / "names", task={"name": "exact"}, temperature=0.7, max_answer_tokens=8)
    return [where / "sums", where / "names"]


def test_one_policy_is_trained_on_several_domains(folders: list[Path], tmp_path: Path) -> None:
    stage = trained_on(folders, tmp_path / "run")
    assert read_provenance(stage.path).details["training_traces"] == 32 + 24
    config = OSPrunerConfig.from_pretrained(stage.path)
    assert config.task == {"name": "math", "also": [{"name": "exact"}]}
    hashes = {name: load_labels(path).data_hash for name, path in
              zip(("math", "exact"), folders, strict=True)}  # fmt: skip
    assert read_provenance(stage.path).details["domains"] == hashes

    policy = str(stage.path)
    for folder in folders:
        evaluation = compare(folder, [policy], benchmark="b", device="cpu").evaluation
        assert len(evaluation.rules) == 2
    other = told_otherwise(shutil.copytree(folders[1], tmp_path / "other"), task={"name": "choice"})
    with pytest.raises(ValueError, match="on the task math and exact, here it is choice: use"):
        compare(other, [policy], benchmark="b", device="cpu")
    with pytest.raises(ValueError, match="are the labels that .* was trained on"):
        calibrate(policy, folders[1], 0.1, device="cpu")


def test_validation_is_of_the_same_domains(folders: list[Path], tmp_path: Path) -> None:
    where = [shutil.copytree(folder, tmp_path / folder.name) for folder in folders]
    with pytest.raises(ValueError, match=r"of the domains of one task, the training labels of"):
        trained_on(folders, tmp_path / "run", where[0])
    with pytest.raises(ValueError, match="give labels of the same domains"):
        trained_on(folders[0], tmp_path / "run", where)
    # Order does not matter: what is refused is that they share their problems.
    with pytest.raises(ValueError, match="problem"):
        trained_on(folders, tmp_path / "run", where[::-1])


def test_a_mix_keeps_problems_apart_and_names_domains(folders: list[Path], tmp_path: Path) -> None:
    mix = load_mix(folders)
    assert mix.traces["problem_id"][0].startswith("math/")
    assert len(set(mix.traces["problem_id"])) == 70
    assert mix.traces["domain"] == ["math"] * 40 + ["exact"] * 30
    assert LabelSettings.from_dict(mix.settings.to_dict()) == mix.settings
    assert load_mix(folders[:1]).parts == {}
    more = told_otherwise(
        shutil.copytree(folders[1], tmp_path / "more"), {"dataset": "data/gsm8k.jsonl"},
        task={"name": "math"},
    )  # fmt: skip
    assert list(load_mix([folders[0], more]).parts) == ["sums", "gsm8k"]


def test_what_cannot_be_mixed_is_refused(folders: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="are both of 'sums': give each folder once"):
        load_mix([folders[0], folders[0]])
    for changed, message in (
        ({"step_stride": 2}, r"cannot be mixed \(step_stride: 1 here, 2 there\): one policy reads"),
        ({"base_model": "org/other"}, r"cannot be mixed \(base_model: .* here, 'org/other' there"),
        ({"answer": "free"}, r"cannot be mixed \(answer: 'forced' here, 'free' there"),
    ):
        copy = tmp_path / next(iter(changed))
        told_otherwise(shutil.copytree(folders[1], copy), **changed)
        with pytest.raises(ValueError, match=message):
            load_mix([folders[0], copy])
    literals = read_manifest(folders[1])["settings"]["reasoning_format"]
    wound = told_otherwise(
        shutil.copytree(folders[1], tmp_path / "wound"),
        reasoning_format=literals | {"wind_down": "So:", "box_prefix": "Answer:"},
    )
    with pytest.raises(
        ValueError, match=r"\(reasoning_format's wind_down: None here, 'So:' there\)"
    ):
        load_mix([folders[0], wound])
