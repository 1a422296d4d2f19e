"""Publishing labels: both configurations, splits, a card with the schema column by column."""

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import DatasetCard, HfApi

from ospruner.demo import REASONER
from ospruner.durable import read_checked, write_checked
from ospruner.eval.schema import LabelSettings
from ospruner.formats import DEEPSEEK_R1
from ospruner.hub_cards.publish import Release, send, stage
from ospruner.provenance import provenance
from ospruner.train.labels.features import COLUMNS, PREFIX_COLUMNS
from ospruner.train.labels.loading import load_labels
from ospruner.train.labels.store import Chunk, LabelStore

from ..label_rows import label_row
from .conftest import Stranger
from .local_hub import LocalHub, Repo

LOAD = """
import json, sys
from datasets import load_dataset
repo, result = sys.argv[1:]
out = {}
for config in ("default", "prefixes"):
    for streaming in (False, True):
        splits = load_dataset(repo, config, streaming=streaming)
        out[f"{config} {streaming}"] = {name: len(list(rows)) for name, rows in splits.items()}
# A stream that is left half read may abort Python at its end (apache/arrow#45214).
row = list(load_dataset(repo, "prefixes", split="test", streaming=True))[0]
out["row"] = [row["problem_id"], row["end"], row["correct"]]
open(result, "w").write(json.dumps(out))
"""


def write_labels(folder: Path, problems: list[str], **settings: Any) -> Path:
    """A finished label folder, as a run on the local embedded reasoner leaves it."""
    settings |= {"base_model": str(REASONER), "reasoning_format": DEEPSEEK_R1.to_dict()}
    source = {"dataset": str(folder / "problems.jsonl")}
    with LabelStore(folder, LabelSettings(**settings), source=source) as labels:
        labels.commit(Chunk([label_row(problem) for problem in problems]))
        labels.finish()
    provenance(folder, seed=0, base_model=str(REASONER))
    return folder


@pytest.fixture
def labels_dir(tmp_path: Path) -> Path:
    """Two splits, and what does not belong to them."""
    run = tmp_path / "run" / "labels"
    write_labels(run / "train", ["a", "b"])
    write_labels(run / "test", ["c"], seed=1, samples_per_problem=2)
    (run / "train" / "secret.env").write_text("swordfish")
    (run / "notes.txt").write_text("swordfish, too")
    return run


def release(pinned: Repo, **changes: Any) -> Release:
    values = {"repo": "org/labels", "base": "org/base", "base_revision": pinned.head.oid}
    return Release(**{**values, **changes})


def test_both_configurations_load_elsewhere(
    api: HfApi, hub: LocalHub, base_repo: Repo, labels_dir: Path, tmp_path: Path, stranger: Stranger
) -> None:
    unsaid = stage(labels_dir, tmp_path / "unsaid", release(base_repo), api)
    assert any("no licence is stated" in remark for remark in unsaid.remarks)
    assert "No licence was stated" in (unsaid.path / "README.md").read_text("utf-8")
    told = release(base_repo, license="mit", problems="Sums, MIT.")
    staged = stage(labels_dir, tmp_path / "out", told, api)
    assert send(staged, told.repo, False, api).changed
    assert not send(staged, told.repo, False, api).changed
    repo = hub.repos["dataset", "org/labels"]
    assert len(repo.commits) == 2
    own = ("manifest.json", "data/train-00000.parquet", "prefixes/train-00000.parquet")
    assert set(repo.head.files) == {
        *(".gitattributes", "README.md", "provenance.json"),
        *(f"{split}/{file}" for split in ("train", "test") for file in own),
    }
    assert set(staged.left_out) >= {"notes.txt", "train/secret.env", "train/.lock"}
    for name, file in repo.head.files.items():
        for secret in (b"swordfish", str(labels_dir).encode(), str(REASONER).encode()):
            assert secret not in file.content, name
    for split, problems in (("train", ["a", "b"]), ("test", ["c"])):
        back = load_labels(staged.path / split)  # with every hash compared
        assert [row["problem_id"] for row in back.traces] == problems
        assert back.settings.base_model == "org/base"
        assert back.settings.base_revision == base_repo.head.oid

    card = DatasetCard.load(staged.path / "README.md")
    data = card.data.to_dict()
    assert data["license"] == "mit"
    assert [config["config_name"] for config in data["configs"]] == ["default", "prefixes"]
    path = ["test/prefixes/train-00000.parquet"]
    assert data["configs"][1]["data_files"][1] == {"split": "test", "path": path}
    for name, (_, what) in [*COLUMNS.items(), *PREFIX_COLUMNS.items()]:
        assert f"| `{name}` | `" in card.text
        assert what in card.text
    for said in (
        *("| `trace_ids` | `List(Value('int32'))` |", "| train | 2 | 2 | 6 | 0 | 0 | 0 |"),
        *("Sums, MIT.", "| dataset | problems.jsonl |", "temperature 0.6"),
        DEEPSEEK_R1.user_instruction,
    ):
        assert said in card.text, said

    result = tmp_path / "result.json"
    stranger(LOAD, "org/labels", str(result))
    found = json.loads(result.read_text())
    assert found["default False"] == found["default True"] == {"train": 2, "test": 1}
    assert found["prefixes False"] == found["prefixes True"] == {"train": 6, "test": 3}
    assert found["row"] == ["c", 4, 0.0]


def test_what_cannot_be_published_is_refused(api: HfApi, base_repo: Repo, tmp_path: Path) -> None:
    def refused(folder: Path, **changes: Any) -> None:
        stage(folder, tmp_path / "out", release(base_repo, **changes), api)

    whole = write_labels(tmp_path / "run" / "train", ["a"])
    write_labels(tmp_path / "run" / "test", ["b"], temperature=0.0)
    with pytest.raises(ValueError, match="test was labelled with other settings than .*train"):
        refused(tmp_path / "run")
    for file in ("data/train-00000.parquet", "prefixes/train-00000.parquet", "manifest.json"):
        kept = (whole / file).read_bytes()
        (whole / file).write_bytes(kept[:99] + bytes([kept[99] ^ 1]) + kept[100:])
        with pytest.raises(ValueError, match=rf"{file} is damaged.*again|copy"):
            refused(whole)
        (whole / file).write_bytes(kept)
    manifest = read_checked(whole / "manifest.json", "")
    write_checked(whole / "manifest.json", {**manifest, "finished": False})
    with pytest.raises(ValueError, match="train is not finished: run its labelling again"):
        refused(whole)
    assert not (tmp_path / "out").exists()
