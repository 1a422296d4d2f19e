"""Training on a folder of labels, and what it refuses."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from modeling_ospruner import OSPrunerForCausalLM
from ospruner.comparing import compare
from ospruner.demo import REASONER
from ospruner.demo.shipped import Reasoner, draw_split
from ospruner.durable import write_checked
from ospruner.eval.schema import LabelSettings
from ospruner.provenance import read_provenance
from ospruner.train.bases import load_labelled_base
from ospruner.train.label_sets import held_out_split, load_labels
from ospruner.train.labels.folder import read_manifest
from ospruner.train.labels.label import label
from ospruner.train.labels.store import LabelStore

from .conftest import trained_on


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("from_labels") / "labels"
    Reasoner().label(draw_split("train", 60, 7), folder, 7)
    return folder


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


def test_validation_labels_made_otherwise_are_refused(labels: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(labels, other)
    manifest = read_manifest(other)
    changed = LabelSettings.from_dict(manifest["settings"] | {"temperature": 1.0, "seed": 8})
    write_checked(other / "manifest.json", manifest | {"settings": changed.to_dict()})
    with pytest.raises(ValueError, match=r"made otherwise .*temperature: 0.6 here, 1.0 there\)"):
        trained_on(labels, tmp_path / "run", validation=other)
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

    with LabelStore(folder, settings) as writer:
        writer.rewrite(spoil)
    (folder / "provenance.json").unlink()
    refused = r"3\d\.\d% of the \d+ forced answers could not be graded \(unreadable: \d+\), .*10.0%"
    with pytest.raises(ValueError, match=refused + ".*labels regrade"):
        trained_on(folder, tmp_path / "run")
    with pytest.raises(ValueError, match=refused):
        trained_on(labels, tmp_path / "run", validation=folder)
    with pytest.raises(ValueError, match="max_ungraded is 2; it must lie in"):
        trained_on(labels, tmp_path / "run", max_ungraded=2)
    # What is allowed gets further: without a single verdict there is nothing to train on.
    with pytest.raises(ValueError, match="null everywhere"):
        trained_on(folder, tmp_path / "run", max_ungraded=0.5)


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
        trained_on(labels, tmp_path / "run", base=str(other))
    assert not (tmp_path / "run").exists()


def test_a_copy_of_the_base_may_lie_elsewhere(labels: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(REASONER, tmp_path / "copy")
    stage = trained_on(labels, tmp_path / "run", base=str(copied))
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


def test_a_sibling_of_the_base_is_refused(labels: Path, sibling: Path, tmp_path: Path) -> None:
    assert load_labels(labels).settings.base_fingerprint is not None
    with pytest.raises(
        ValueError, match=r"made by .*reasoner.*, not by .*sibling.*fingerprint .*, theirs had"
    ):
        trained_on(labels, tmp_path / "run", base=str(sibling))
    assert not (tmp_path / "run").exists()
    own = trained_on(labels, tmp_path / "own")
    assert read_provenance(own.path).data_hash == load_labels(labels).data_hash
    with pytest.raises(ValueError, match=r"not by .*sibling"):
        compare(labels, [str(own.path)], base=str(sibling))
    changed = AutoModelForCausalLM.from_pretrained(sibling)
    with pytest.raises(ValueError, match=r"sibling' has other weights .* than .*reasoner"):
        OSPrunerForCausalLM.from_base(changed, own.path)


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


def test_a_policy_is_no_base(labels: Path, tmp_path: Path) -> None:
    stage = trained_on(labels, tmp_path / "run")
    policy, said = str(stage.path), r"run', which is no base but a stopping policy.*reasoner"
    with pytest.raises(ValueError, match=said):
        trained_on(labels, tmp_path / "again", base=policy)
    with pytest.raises(ValueError, match=said):
        compare(labels, [policy], base=policy)
    problems = tmp_path / "problems.jsonl"
    problems.write_text('{"id": "a", "problem": "1+1?", "answer": "2"}\n')
    out = tmp_path / "labels"
    with pytest.raises(ValueError, match=said):
        label(policy, str(problems), out=out)
    assert not out.exists()
