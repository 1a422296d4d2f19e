"""`ospruner train` on a folder of labels, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from typer.testing import CliRunner

from modeling_ospruner import OSPrunerForCausalLM
from ospruner.cli import app
from ospruner.comparing import compare
from ospruner.demo import REASONER
from ospruner.demo.shipped import Reasoner, draw_split
from ospruner.durable import write_checked
from ospruner.engines.opening import EngineOptions
from ospruner.eval.methods import parse_policies
from ospruner.eval.schema import LabelSettings
from ospruner.provenance import read_provenance
from ospruner.train.from_labels import (
    held_out_split,
    load_labelled_base,
    load_labels,
    parse_penalties,
    settings_for,
    train_from_labels,
)
from ospruner.train.labels.command import ProblemOptions, run_label
from ospruner.train.labels.folder import read_manifest
from ospruner.train.labels.writer import LabelFolder
from ospruner.train.settings import R1_PENALTIES
from ospruner.train.traces import LabelledTraces


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("from_labels") / "labels"
    Reasoner().label(draw_split("train", 60, 7), folder, 7)
    return folder


def test_the_command_trains_a_frontier_and_a_baseline(labels: Path, tmp_path: Path) -> None:
    shared = ["--labels", str(labels), "--tuning", "head", "--batch-size", "8"]
    numbers = tmp_path / "stages.json"
    where = ["--out", str(tmp_path / "a"), "--json", str(numbers)]
    rates = ["--first-epochs", "2", "--final-learning-rate-share", "0.02", "--swa-share", "0.5"]
    rates += ["--entropy-bonus", "0.005"]
    done = CliRunner().invoke(app, ["train", *shared, "--lambdas", "1e-3,0", *rates, *where])
    assert done.exit_code == 0, done.output
    settings = json.loads((tmp_path / "a" / "run.json").read_text())["settings"]
    assert settings["first_stage_epochs"] == 2
    assert (settings["final_learning_rate_share"], settings["swa_share"]) == (0.02, 0.5)
    assert settings["entropy_bonus"] == 0.005
    stages = json.loads(numbers.read_text())
    assert [stage["price"] for stage in stages] == [1e-3, 0.0]
    for stage in stages:
        assert (tmp_path / "a" / stage["path"] / "model.safetensors").is_file()
        assert stage["path"] in done.output
    probe = ["train", *shared, "--method", "probe", "--out", str(tmp_path / "b")]
    done = CliRunner().invoke(app, probe)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "b" / "probe" / "model.safetensors").is_file()


def test_held_out_problems_are_whole_and_seeded() -> None:
    ids = [f"p{n // 3}" for n in range(300)]  # three traces a problem
    held = held_out_split(ids, None, seed=0)
    assert sum(held) == 3 * 20  # a fifth of 100 problems
    assert all(held[n] == held[n // 3 * 3] for n in range(300))
    assert held == held_out_split(ids, None, seed=0) != held_out_split(ids, None, seed=1)
    assert sum(held_out_split([f"p{n}" for n in range(4000)], None, 0)) == 500
    for wrong in (0, 100):
        with pytest.raises(ValueError, match=f"held_out is {wrong}, of 100 problems"):
            held_out_split(ids, wrong, 0)


def test_lambdas_by_name_by_list_and_wrong(labels: Path) -> None:
    table = LabelledTraces.from_dataset(load_labels(labels).traces).table
    assert parse_penalties("r1", table) == R1_PENALTIES
    assert parse_penalties("1e-3, 5e-4,0", table) == (1e-3, 5e-4, 0.0)
    assert parse_penalties("auto", table)[-1] == 0.0
    with pytest.raises(ValueError, match="lambdas is 'steep'; it must be 'auto', one of"):
        parse_penalties("steep", table)


def test_validation_labels_made_otherwise_are_refused(labels: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(labels, other)
    manifest = read_manifest(other)
    changed = LabelSettings.from_dict(manifest["settings"] | {"temperature": 1.0, "seed": 8})
    write_checked(other / "manifest.json", manifest | {"settings": changed.to_dict()})
    with pytest.raises(ValueError, match=r"made otherwise .*temperature: 0.6 here, 1.0 there\)"):
        train_from_labels(labels, tmp_path / "run", settings_for("auto"), validation=other)
    assert not (tmp_path / "run").exists()


def test_labels_that_could_not_be_graded_are_refused(labels: Path, tmp_path: Path) -> None:
    folder = tmp_path / "labels"
    shutil.copytree(labels, folder)
    settings = LabelSettings.from_dict(read_manifest(folder)["settings"])

    def spoil(rows: list[dict[str, Any]]) -> None:
        """A third has no verdict because of the grader, the rest because of the model."""
        for row in rows:
            for step in range(len(row["step_ends"])):
                row["forced_correct"][step] = row["matches_final"][step] = None
                row["ungraded_reasons"][step] = "no answer" if step % 3 else "unreadable"

    with LabelFolder(folder, settings) as writer:
        writer.rewrite(spoil)
    (folder / "provenance.json").unlink()
    refused = r"3\d\.\d% of the \d+ forced answers could not be graded \(unreadable: \d+\), .*10.0%"
    with pytest.raises(ValueError, match=refused + ".*labels regrade"):
        train_from_labels(folder, tmp_path / "run", settings_for("auto"))
    with pytest.raises(ValueError, match=refused):
        train_from_labels(labels, tmp_path / "run", settings_for("auto"), validation=folder)
    with pytest.raises(ValueError, match="max_ungraded is 2; it must lie in"):
        train_from_labels(labels, tmp_path / "run", settings_for("auto"), max_ungraded=2)
    # What is allowed gets further: without a single verdict there is nothing to train on.
    with pytest.raises(ValueError, match="null everywhere"):
        train_from_labels(folder, tmp_path / "run", settings_for("auto"), max_ungraded=0.5)


def test_another_base_than_the_labels_is_refused(
    labels: Path,
    tmp_path: Path,
    tiny_base: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    other = tmp_path / "other"
    tiny_base.save_pretrained(other)
    tiny_tokenizer.save_pretrained(other)
    with pytest.raises(ValueError, match=r"the labels were made by .*reasoner.*, not by .*other"):
        train_from_labels(labels, tmp_path / "run", settings_for("auto"), base=str(other))
    assert not (tmp_path / "run").exists()


def test_a_copy_of_the_base_may_lie_elsewhere(labels: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(REASONER, tmp_path / "copy")
    settings = settings_for("1e-3", tuning="head", batch_size=8)
    (stage,) = train_from_labels(labels, tmp_path / "run", settings, base=str(copied))
    assert stage.path.is_dir()


@pytest.fixture
def sibling(tmp_path: Path) -> Path:
    """A model of the reasoner's kind and tokenizer, with other weights in its last layer."""
    folder = shutil.copytree(REASONER, tmp_path / "sibling")
    tensors = load_file(folder / "model.safetensors")
    name = max(name for name in tensors if name.endswith("mlp.down_proj.weight"))
    tensors[name] = tensors[name].roll(1, dims=0).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_sibling_of_the_base_is_refused_and_may_be_forced(
    labels: Path, sibling: Path, tmp_path: Path
) -> None:
    assert load_labels(labels).settings.base_fingerprint is not None
    settings = settings_for("1e-3", tuning="head", batch_size=8)
    with pytest.raises(
        ValueError, match=r"made by .*reasoner.*, not by .*sibling.*fingerprint .*, theirs had"
    ):
        train_from_labels(labels, tmp_path / "run", settings, base=str(sibling))
    assert not (tmp_path / "run").exists()
    (own,) = train_from_labels(labels, tmp_path / "own", settings)
    assert read_provenance(own.path).data_hash == load_labels(labels).data_hash
    with pytest.raises(ValueError, match=r"not by .*sibling"):
        compare(labels, [str(own.path)], base=str(sibling))
    changed = AutoModelForCausalLM.from_pretrained(sibling)
    with pytest.raises(ValueError, match=r"sibling' has other weights .* than .*reasoner"):
        OSPrunerForCausalLM.from_base(changed, own.path)

    line = ["train", "--labels", str(labels), "--base", str(sibling), "--tuning", "head"]
    line += ["--batch-size", "8", "--lambdas", "1e-3", "--out", str(tmp_path / "forced")]
    done = CliRunner().invoke(app, [*line, "--force-base", "tuned on the same data"])
    assert done.exit_code == 0, done.output
    record = read_provenance(tmp_path / "forced" / "lam1e-3")
    assert record.base_model == str(sibling)
    forced = record.details["forced_base"]
    assert forced["reason"] == "tuned on the same data"
    assert forced["labels"]["base_model"] == str(REASONER)
    policy = tmp_path / "forced" / "lam1e-3"
    assert str(OSPrunerForCausalLM.from_pretrained(policy).base.name_or_path) == str(sibling)


def test_where_no_fingerprint_is_known_the_forced_answers_tell(
    labels: Path, sibling: Path, tmp_path: Path
) -> None:
    stored = load_labels(labels)
    unknown = dataclasses.replace(stored.settings, base_fingerprint=None)
    stored = dataclasses.replace(stored, settings=unknown)
    with pytest.raises(ValueError, match=r"not by .*sibling.*log-probabilities that differ by"):
        load_labelled_base(str(sibling), stored)
    copied = shutil.copytree(REASONER, tmp_path / "copy")
    model, _ = load_labelled_base(str(copied), stored)
    assert str(model.name_or_path) == str(copied)


def test_base_and_policy_go_to_the_device_that_is_asked_for(
    labels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = load_labels(labels)
    assert load_labelled_base(None, stored)[0].device.type == "cpu"
    assert load_labelled_base(None, stored, device="meta")[0].device.type == "meta"
    policy = tmp_path / "policy"
    OSPrunerForCausalLM.untrained(
        *load_labelled_base(None, stored), tuning="layers"
    ).save_pretrained(policy)
    placed: list[torch.device] = []

    def load(base: Any, ours: Any, forced: Any, device: torch.device) -> Any:
        placed.append(device)
        return load_labelled_base(base, ours, forced, "cpu")

    monkeypatch.setattr("ospruner.comparing.load_labelled_base", load)
    monkeypatch.setattr("ospruner.comparing.device_named", torch.device)
    compare(labels, [str(policy)], device="meta")
    assert placed == [torch.device("meta")]


def test_a_policy_is_no_base(labels: Path, tmp_path: Path) -> None:
    settings = settings_for("1e-3", tuning="head", batch_size=8)
    (stage,) = train_from_labels(labels, tmp_path / "run", settings)
    policy, said = str(stage.path), r"lam1e-3', which is no base but a stopping policy.*reasoner"
    with pytest.raises(ValueError, match=said):
        train_from_labels(labels, tmp_path / "again", settings, base=policy)
    with pytest.raises(ValueError, match=said):
        compare(labels, [policy], base=policy)
    problems = tmp_path / "problems.jsonl"
    problems.write_text('{"id": "a", "problem": "1+1?", "answer": "2"}\n')
    out = tmp_path / "labels"
    with pytest.raises(ValueError, match=said):
        run_label(ProblemOptions(str(problems)), "transformers", EngineOptions(policy), {}, out)
    assert not out.exists()


def test_multi_trains_every_target_on_one_trunk_pass(labels: Path, tmp_path: Path) -> None:
    numbers, out = tmp_path / "stages.json", tmp_path / "multi"
    line = ["train", "--labels", str(labels), "--out", str(out), "--tuning", "head", "--multi"]
    line += ["--batch-size", "16", "--lambdas", "1e-3,2e-4", "--validate-every", "2"]
    done = CliRunner().invoke(app, [*line, "--json", str(numbers)])
    assert done.exit_code == 0, done.output
    said = done.output.replace("\n", " ")
    assert "4 target(s) will hold" in said
    stages = json.loads(numbers.read_text())
    names = ["lam1e-3", "lam2e-4", "probe", "convergence"]
    assert [stage["name"] for stage in stages] == names
    # Each target keeps the policy that it ends with, and no other.
    kept = sorted(str(path.parent.relative_to(out)) for path in out.rglob("model.safetensors"))
    assert kept == sorted(f"{name}/{name}" for name in names)
    assert (out / "lam2e-4" / "dynamics.png").is_file()
    uses = parse_policies([str(out)])
    assert [use.parameter for use in uses if use.method == "OS-Pruner"] == [1e-3, 2e-4]
    assert {use.method for use in uses} == {"OS-Pruner", "probe", "convergence"}
    baseline = ["train", "--labels", str(labels), "--method", "probe", "--multi", "--out", str(out)]
    with pytest.raises(ValueError, match="method is 'probe', one target by itself"):
        CliRunner().invoke(app, baseline, catch_exceptions=False)
