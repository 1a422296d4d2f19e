"""Training on folders of labels, of one task or several, and what it refuses."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from modeling_ospruner import OSPrunerConfig, OSPrunerForCausalLM
from ospruner.bases import dtype_on
from ospruner.calibrating import calibrate
from ospruner.comparing import compare
from ospruner.demo import REASONER
from ospruner.eval.schema import LabelSettings
from ospruner.provenance import read_provenance
from ospruner.train.label_sets import held_out_split, load_labelled_base
from ospruner.train.labels.folder import read_manifest
from ospruner.train.labels.label import label
from ospruner.train.labels.loading import load_labels, load_mix

from .conftest import rewrite, told_otherwise, trained_on, write_rows

CPU = torch.device("cpu")


def test_held_out_problems_are_whole_and_seeded() -> None:
    ids = [f"p{n // 3}" for n in range(300)]  # three traces a problem
    held = held_out_split(ids, None, seed=0)
    assert held.sum() == 3 * 20  # a fifth of 100 problems
    assert all(held[n] == held[n // 3 * 3] for n in range(300))
    assert (held == held_out_split(ids, None, seed=0)).all()
    assert (held != held_out_split(ids, None, seed=1)).any()
    assert held_out_split([f"p{n}" for n in range(4000)], None, 0).sum() == 500
    with pytest.raises(ValueError, match="held_out is 100, of 100 problems"):
        held_out_split(ids, 100, 0)


def test_validation_labels_made_otherwise_are_refused(labels: Path, tmp_path: Path) -> None:
    changed: dict[str, Any] = {"temperature": 1.0, "seed": 8, "prompt_date": "2026-01-01"}
    other = told_otherwise(shutil.copytree(labels, tmp_path / "other"), **changed)
    with pytest.raises(ValueError, match=r"made otherwise .*temperature: 0.6 here, 1.0 there\)"):
        trained_on(labels, tmp_path / "run", validation=other)
    assert not (tmp_path / "run").exists()


def test_ungraded_labels_are_refused(labels: Path, labelled: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(labelled / "test", tmp_path / "labels")

    def spoil(rows: list[dict[str, Any]]) -> None:
        """A third has no verdict because of the grader, the rest because of the model."""
        for row in rows:
            for step in range(len(row["step_ends"])):
                row["forced_correct"][step] = row["matches_final"][step] = None
                row["ungraded_reasons"][step] = "no answer" if step % 3 else "unreadable"

    rewrite(folder, spoil)
    refused = r"3\d\.\d% of the \d+ forced answers could not be graded \(unreadable: \d+\), .*10.0%"
    with pytest.raises(ValueError, match=refused + ".*labels regrade"):
        trained_on(folder, tmp_path / "run")
    with pytest.raises(ValueError, match=refused):
        trained_on(labels, tmp_path / "run", validation=folder)
    # What is allowed gets further: without a single verdict there is nothing to train on.
    with pytest.raises(ValueError, match=r"none of the \d+ forced answers has a grade"):
        trained_on(folder, tmp_path / "run", max_ungraded=0.5)


@pytest.fixture
def sibling(tmp_path: Path) -> Path:
    """A model of the reasoner's kind and tokenizer, with other weights in its last layer."""
    folder = shutil.copytree(REASONER, tmp_path / "sibling")
    tensors = load_file(folder / "model.safetensors")
    name = max(name for name in tensors if name.endswith("mlp.down_proj.weight"))
    tensors[name] = tensors[name].roll(1, dims=0).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_copy_of_the_base_may_lie_elsewhere_and_a_sibling_is_refused(
    labels: Path, sibling: Path, tiny_base_dir: Path, tmp_path: Path
) -> None:
    assert load_labels(labels).settings.base_fingerprint is not None
    for other, said in ((sibling, r"sibling.*fingerprint .*, theirs had"), (tiny_base_dir, "")):
        with pytest.raises(ValueError, match=f"labels were made by .*reasoner.*, not by .*{said}"):
            trained_on(labels, tmp_path / "run", base=str(other))
    assert not (tmp_path / "run").exists()
    copied = shutil.copytree(REASONER, tmp_path / "copy")
    own = trained_on(labels, tmp_path / "own", base=str(copied))
    assert read_provenance(own.path).data_hash == load_labels(labels).data_hash
    with pytest.raises(ValueError, match=r"not by .*sibling"):
        compare(labels, [str(own.path)], base=str(sibling))
    changed = AutoModelForCausalLM.from_pretrained(sibling)
    with pytest.raises(ValueError, match=r"sibling' has other weights .* than .*reasoner"):
        OSPrunerForCausalLM.from_base(changed, own.path)


def test_without_fingerprint_answers_tell(labels: Path, sibling: Path, tmp_path: Path) -> None:
    stored = load_labels(labels)
    unknown = dataclasses.replace(stored.settings, base_fingerprint=None)
    stored = dataclasses.replace(stored, settings=unknown)
    with pytest.raises(ValueError, match=r"not by .*sibling.*log-probabilities that differ by"):
        load_labelled_base(str(sibling), stored, CPU)
    copied = shutil.copytree(REASONER, tmp_path / "copy")
    model, _ = load_labelled_base(str(copied), stored, CPU)
    assert str(model.name_or_path) == str(copied)


@pytest.mark.parametrize(("units", "dtype"), [("AVX2", "float32"), ("AVX512", "bfloat16")])
def test_a_cpu_that_computes_no_bfloat16_reads_a_base_in_float32(
    units: str, dtype: str, labels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: units)
    model, _ = load_labelled_base(None, load_labels(labels), CPU)
    assert model.dtype is vars(torch)[dtype]
    assert dtype_on(torch.device("cuda"), str(REASONER)) == "auto"


# Labels of several domains.


@pytest.fixture
def folders(labelled: Path, tmp_path: Path) -> list[Path]:
    """Mathematics and short answers."""
    both = [shutil.copytree(labelled / name, tmp_path / name) for name in ("train", "test")]
    told_otherwise(both[1], task={"name": "exact"}, temperature=0.7, max_answer_tokens=8)
    return both


def test_one_policy_is_trained_on_several_domains(folders: list[Path], tmp_path: Path) -> None:
    stage = trained_on(folders, tmp_path / "run")
    record = read_provenance(stage.path).details
    assert record["training_traces"] == 2 * 48
    hashes = [load_labels(path).data_hash for path in folders]
    assert record["domains"] == dict(zip(("math", "exact"), hashes, strict=True))
    config = OSPrunerConfig.from_pretrained(stage.path)
    assert config.task == {"name": "math", "also": [{"name": "exact"}]}

    policy = str(stage.path)
    for folder in folders:
        assert len(compare(folder, [policy], limit=8).rules) == 2
    other = told_otherwise(shutil.copytree(folders[1], tmp_path / "other"), task={"name": "choice"})
    with pytest.raises(ValueError, match="on the task math and exact, here it is choice: use"):
        compare(other, [policy])
    with pytest.raises(ValueError, match="48 problems .* are among those that .* trained on"):
        calibrate(policy, folders[1], 0.1)
    # A policy is no base.
    problems = write_rows(tmp_path / "p.jsonl", [{"id": "a", "problem": "1+1?", "answer": "2"}])
    with pytest.raises(ValueError, match=r"run', which is no base but a stopping policy.*reasoner"):
        label(policy, problems, out=tmp_path / "labels")
    assert not (tmp_path / "labels").exists()


def test_validation_is_of_the_same_domains(folders: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"of the domains of one task, the training labels of"):
        trained_on(folders, tmp_path / "run", folders[0])
    with pytest.raises(ValueError, match="give labels of the same domains"):
        trained_on(folders[0], tmp_path / "run", folders)
    # Order does not matter: what is refused is that they share their problems.
    with pytest.raises(ValueError, match="120 problems are in both the training and the validat"):
        trained_on(folders, tmp_path / "run", folders[::-1])


def test_a_mix_keeps_problems_apart_and_names_domains(folders: list[Path], tmp_path: Path) -> None:
    mix = load_mix(folders)
    assert mix.traces["problem_id"][0].startswith("math/")
    assert len(set(mix.traces["problem_id"])) == 120
    assert [len(part.traces) for part in mix.parts.values()] == [60, 60]
    assert LabelSettings.from_dict(mix.settings.to_dict()) == mix.settings
    assert load_mix(folders[:1]).parts == {}
    told_otherwise(folders[1], {"dataset": "data/gsm8k.jsonl"}, task={"name": "math"})
    assert list(load_mix(folders).parts) == ["train", "gsm8k"]


def test_what_cannot_be_mixed_is_refused(folders: list[Path], tmp_path: Path) -> None:
    literals = read_manifest(folders[1])["settings"]["reasoning_format"]
    wound = literals | {"wind_down": "So:", "box_prefix": "Answer:"}
    for changed, message in (
        ({"step_stride": 2}, r"cannot be mixed \(step_stride: 1 here, 2 there\): one policy reads"),
        ({"base_model": "org/other"}, r"cannot be mixed \(base_model: .* here, 'org/other' there"),
        ({"answer": "free"}, r"cannot be mixed \(answer: 'forced' here, 'free' there"),
        ({"reasoning_format": wound}, r"reasoning_format's wind_down: None here, 'So:' there\)"),
    ):
        copy = shutil.copytree(folders[1], tmp_path / next(iter(changed)))
        told_otherwise(copy, **changed)
        with pytest.raises(ValueError, match=message):
            load_mix([folders[0], copy])
