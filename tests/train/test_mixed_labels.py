"""Training on labels of several domains, and what a policy of several tasks is taken for."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from modeling_ospruner import OSPrunerConfig, OSPrunerForCausalLM
from ospruner.calibrating import calibrate
from ospruner.cli import app
from ospruner.comparing import compare
from ospruner.demo.shipped import Reasoner, draw_split
from ospruner.durable import write_checked
from ospruner.eval.replay import replay, replay_full
from ospruner.eval.schema import LabelSettings
from ospruner.eval.table import TraceTable
from ospruner.provenance import read_provenance
from ospruner.train.fresh import predict_outputs
from ospruner.train.from_labels import (
    held_out_split,
    load_labels,
    load_mix,
    settings_for,
    train_from_labels,
)
from ospruner.train.labels.folder import read_manifest
from ospruner.train.traces import LabelledTraces


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
    said: list[str] = []
    settings = settings_for("1e-3", tuning="head", batch_size=8)
    (stage,) = train_from_labels(folders, tmp_path / "run", settings, say=said.append)
    assert said[0] == "Domains (traces to train on + to validate): math 32 + 8, exact 24 + 6"
    config = OSPrunerConfig.from_pretrained(stage.path)
    assert config.task is None
    assert config.domains == {name: {"task": {"name": name}} for name in ("math", "exact")}
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

    given = ["train", "--tuning", "head", "--batch-size", "8", "--lambdas", "1e-3"]
    named = [word for folder in folders for word in ("--labels", str(folder))]
    done = CliRunner().invoke(app, [*given, *named, "--out", str(tmp_path / "same")])
    assert done.exit_code == 0, done.output
    first, again = (path / "model.safetensors" for path in
                    (stage.path, tmp_path / "same" / stage.path.name))  # fmt: skip
    assert first.read_bytes() == again.read_bytes()


def test_each_domain_has_its_price(folders: list[Path], tmp_path: Path) -> None:
    settings = settings_for(
        "1e-4,1e-2", head="price", tuning="head", batch_size=8, learning_rate=1e-2,
        head_learning_rate=1e-2, epochs_per_stage=2,
    )  # fmt: skip
    (stage,) = train_from_labels(folders, tmp_path / "run", settings)
    policy, config = str(stage.path), OSPrunerConfig.from_pretrained(stage.path)
    assert config.domains is not None
    prices = config.prices
    assert prices is not None

    # By hand: the most saved with at most a point lost, on the domain's held-out problems.
    mix = load_mix(folders)
    for name in ("math", "exact"):
        rows = [n for n, domain in enumerate(mix.traces["domain"]) if domain == name]
        ids = [mix.traces["problem_id"][n] for n in rows]
        held = [n for n, out in zip(rows, held_out_split(ids, None, 0), strict=True) if out]
        table = TraceTable.from_dataset(mix.traces.select(held))
        said = predict_outputs(
            OSPrunerForCausalLM.from_pretrained(policy),
            LabelledTraces.from_dataset(mix.traces.select(held)),
        )
        full = replay_full(table)
        fits = {0.0: full.mean_tokens}
        for price in prices.grid():
            one = replay(table, said.probabilities(price))
            if one.accuracy >= full.accuracy - 0.01 - 1e-9:
                fits[price] = one.mean_tokens
        best = min(fits.values())
        chosen = config.domains[name]["price"]
        assert fits[chosen] == pytest.approx(best, rel=1e-5)


def test_validation_is_of_the_same_domains(folders: list[Path], tmp_path: Path) -> None:
    where = [shutil.copytree(folder, tmp_path / folder.name) for folder in folders]
    settings = settings_for("1e-3", tuning="head", batch_size=8)
    with pytest.raises(ValueError, match=r"of the domains \['exact', 'math'\], the validation lab"):
        train_from_labels(folders, tmp_path / "run", settings, validation=where[0])
    with pytest.raises(ValueError, match="give labels of the same domains"):
        train_from_labels(folders[0], tmp_path / "run", settings, validation=where)
    # Order does not matter: what is refused is that they share their problems.
    with pytest.raises(ValueError, match="problem"):
        train_from_labels(folders, tmp_path / "run", settings, validation=where[::-1])


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
    with pytest.raises(ValueError, match="sums and .*sums are both of 'sums': give each folder on"):
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
