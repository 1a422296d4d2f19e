"""Publishing labels: one data set with a split a label folder, its card, its record."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from huggingface_hub import DatasetCard, DatasetCardData, HfApi

from ospruner.durable import read_checked, write_checked
from ospruner.eval.text import markdown_table
from ospruner.provenance import PROVENANCE_FILE, file_hash, hash_of, read_provenance

from .names import check_repo_id, collection_title, labels_name
from .publish import Published, add_to_collection, commit_message, find_base, publish_folder
from .render import CARD_FILE
from .staging import Base, Staged, copy_files, scrubbed, seal, write_record

TEMPLATE = Path(__file__).with_name("labels_card.md")
MANIFEST = "manifest.json"
PICTURE = "statistics.png"
LABEL_FILES = ("data/*.parquet", "prefixes/*.parquet", MANIFEST, PICTURE)
SPLITS = ("train", "validation", "test")
_COUNTS = ("problems", "traces", "steps", "ungraded_steps", "capped_traces")
_SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (10**6, "100K<n<1M"))

__all__ = ["LabelsRelease", "send_labels", "stage_labels"]


@dataclass(frozen=True)
class LabelsRelease:
    """What a publisher says about labels.

    Attributes:
        repo: `owner/name`; `owner/` alone is completed by the naming scheme.
        base: The base's repository, where the labels were made on a local folder.
        base_revision: Its commit, branch or tag; resolved to a commit.
        license: Of the data set, in the Hub's spelling.
        problems: Where the problems come from and under which licence, in a sentence.
    """

    repo: str
    base: str | None = None
    base_revision: str | None = None
    license: str | None = None
    problems: str | None = None


def stage_labels(
    folder: Path,
    out: Path,
    release: LabelsRelease,
    columns: Mapping[str, Mapping[str, str]],
    api: HfApi,
) -> tuple[str, Staged]:
    """Writes the exact folder that is published; nothing is sent.

    Args:
        folder: A finished label folder, the split `train`; or one that holds several, named
            `train`, `validation`, `test`. Not changed.
        out: Where to write; an empty or missing folder.
        release: What its publisher says.
        columns: What each column holds, by name: of the configurations "default" and "prefixes".
        api: The Hub, to pin the base.

    Returns:
        The repository's id, and the staged folder.

    Raises:
        ValueError: If there are no labels, unfinished ones, or splits made by different settings;
            or as `stage_policy`.
    """
    parts = _parts(folder)
    manifests = {split: _manifest(path) for split, path in parts.items()}
    first = next(iter(manifests.values()))["settings"]
    for split, manifest in manifests.items():
        if _shared(manifest["settings"]) != _shared(first):
            raise ValueError(
                f"{parts[split]} was labelled with other settings than {next(iter(parts.values()))}"
                ": publish it as a data set of its own"
            )
    named = {
        "base_model_name_or_path": first["base_model"],
        "base_revision": first["base_revision"],
    }
    base, remarks = find_base(named, release.base, release.base_revision, api)
    repo_id = check_repo_id(release.repo, labels_name(base.id))
    if release.license is None:
        remarks.append("no licence is stated: name the data set's with --license")
    left_out: list[str] = []
    for split, part in parts.items():
        left_out += _copy_split(part, out, split, manifests[split], base, part != folder)
    if (folder / PICTURE).is_file() and not (out / PICTURE).exists():
        shutil.copyfile(folder / PICTURE, out / PICTURE)
    if not list(out.glob(f"*{PICTURE}")):
        first_part = next(iter(parts.values()))
        remarks.append(f"no {PICTURE} to show: `ospruner labels stats {first_part}` draws it")
    write_record(next(iter(parts.values())), out, base, code=False)
    card = _card(out, repo_id, manifests, base, release, columns)
    card.save(out / CARD_FILE)
    seal(out)
    rewritten = (CARD_FILE, "provenance.json")
    return repo_id, Staged(out, [n for n in left_out if n not in rewritten], remarks)


def send_labels(
    staged: Staged, repo_id: str, *, private: bool, collection: str | None, api: HfApi
) -> tuple[Published, str | None]:
    """Publishes staged labels, and puts them into a collection where one is named.

    Args and returns are those of `send_policy`.
    """
    manifest = json.loads((staged.path / MANIFEST).read_text(encoding="utf-8"))
    base = manifest["settings"]["base_model"]
    message = commit_message("labels", [base, f"{manifest['traces']} traces"])
    done = publish_folder(staged, repo_id, "dataset", private=private, message=message, api=api)
    if collection is None:
        return done, None
    title = collection_title(base) if collection == "auto" else collection
    return done, add_to_collection(title, repo_id, "dataset", "labelled traces", api)


def _parts(folder: Path) -> dict[str, Path]:
    """The label folders by split."""
    if (folder / MANIFEST).is_file():
        return {"train": folder}
    parts = {name: folder / name for name in SPLITS if (folder / name / MANIFEST).is_file()}
    if not parts:
        raise ValueError(
            f"folder={str(folder)!r} holds no labels: neither a {MANIFEST} nor label folders "
            f"named {', '.join(SPLITS)} are in it"
        )
    return parts


def _manifest(folder: Path) -> dict[str, Any]:
    way_out = f"`ospruner labels check {folder}` says what can be made good"
    manifest = read_checked(folder / MANIFEST, way_out)
    if not manifest.get("finished"):
        raise ValueError(f"{folder} is not finished: run its labelling again, it goes on there")
    if not list((folder / "prefixes").glob("*.parquet")):
        raise ValueError(f"{folder} has no prefixes/: run its labelling again to have it written")
    shards = [*manifest["chunks"], *({**v, "file": n} for n, v in manifest["prefixes"].items())]
    for shard in shards:
        if shard["file"] and file_hash(folder / shard["file"]) != shard["sha256"]:
            raise ValueError(f"{folder / shard['file']} is damaged: {way_out}")
    found = hash_of([chunk["sha256"] for chunk in manifest["chunks"] if chunk["file"]])
    if read_provenance(folder).data_hash not in (None, found):
        raise ValueError(f"{folder / PROVENANCE_FILE} is of other data: {way_out}")
    return manifest


def _shared(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What the splits of one data set have in common."""
    free = ("seed", "samples_per_problem")
    return {name: value for name, value in settings.items() if name not in free}


def _copy_split(
    part: Path, out: Path, split: str, manifest: dict[str, Any], base: Base, nested: bool
) -> list[str]:
    """Copies a label folder as a split, and returns what of it is not published."""
    copied = out / f".{split}"
    left_out = copy_files(part, copied, LABEL_FILES)
    names = {"": ""}
    for kind in ("data", "prefixes"):
        (out / kind).mkdir(exist_ok=True)
        for number, shard in enumerate(sorted((copied / kind).glob("*.parquet"))):
            names[f"{kind}/{shard.name}"] = f"{kind}/{split}-{number:05d}.parquet"
            shard.replace(out / names[f"{kind}/{shard.name}"])
    pinned = {**manifest["settings"], "base_model": base.id, "base_revision": base.revision}
    name = MANIFEST if not (out / MANIFEST).exists() else f"manifest-{split}.json"
    listed = {
        "settings": pinned,
        "chunks": [{**chunk, "file": names[chunk["file"]]} for chunk in manifest["chunks"]],
        "prefixes": {names[old]: view for old, view in manifest["prefixes"].items()},
    }
    write_checked(out / name, {**scrubbed(manifest), **listed})
    if (copied / PICTURE).exists():
        (copied / PICTURE).replace(out / (f"{split}-{PICTURE}" if nested else PICTURE))
    shutil.rmtree(copied)
    return [f"{part.name}/{name}" if nested else name for name in left_out]


def _card(
    out: Path,
    repo_id: str,
    manifests: Mapping[str, dict[str, Any]],
    base: Base,
    release: LabelsRelease,
    columns: Mapping[str, Mapping[str, str]],
) -> DatasetCard:
    settings = {
        **next(iter(manifests.values()))["settings"],
        "base_model": base.id,
        "base_revision": base.revision,
    }
    splits = [
        {"name": split, "dropped": len(m["dropped"]), **{key: m[key] for key in _COUNTS}}
        for split, m in manifests.items()
    ]
    traces = sum(m["traces"] for m in manifests.values())
    data = DatasetCardData(
        license=release.license,
        task_categories=["text-generation"],
        tags=["ospruner", "reasoning", "chain-of-thought", "early-exit"],
        size_categories=next((name for most, name in _SIZES if traces < most), "n>1M"),
        pretty_name=repo_id.rpartition("/")[2],
        configs=[
            {
                "config_name": config,
                **({"default": True} if config == "default" else {}),
                "data_files": [
                    {"split": split, "path": f"{folder}/{split}-*.parquet"} for split in manifests
                ],
            }
            for config, folder in (("default", "data"), ("prefixes", "prefixes"))
        ],
    )
    source = scrubbed(next(iter(manifests.values())).get("source", {}))
    shown = {
        key: value for key, value in (settings | source).items() if not isinstance(value, dict)
    }
    first = next(iter(manifests))
    picture = next((p.name for p in sorted(out.glob(f"*{PICTURE}"))), None)
    return DatasetCard.from_template(
        data,
        template_path=str(TEMPLATE),
        name=repo_id,
        settings=settings,
        instruction=settings["reasoning_format"].get("user_instruction", ""),
        splits=splits,
        rows={key.replace("_", " "): json.dumps(value) for key, value in shown.items()},
        picture=picture,
        trace_columns=_columns(out / "data" / f"{first}-00000.parquet", columns["default"]),
        prefix_columns=_columns(out / "prefixes" / f"{first}-00000.parquet", columns["prefixes"]),
        problems=release.problems or "Where the problems come from was not stated.",
        license_known=release.license is not None,
    )


def _columns(shard: Path, meanings: Mapping[str, str]) -> str:
    """The schema column by column, types as they are in the file.

    Raises:
        ValueError: If a column has no meaning.
    """
    schema: Sequence[pa.Field] = list(pq.read_schema(shard))
    unknown = [field.name for field in schema if field.name not in meanings]
    if unknown:
        raise ValueError(
            f"{shard.name} has the columns {unknown}, which this version of ospruner does not "
            "know: were the labels made by another one?"
        )
    rows = [[f"`{f.name}`", f"`{_type(f.type)}`", meanings[f.name]] for f in schema]
    return markdown_table(["column", "type", "what it holds"], rows)


def _type(kind: pa.DataType) -> str:
    return f"list<{_type(kind.value_type)}>" if pa.types.is_list(kind) else str(kind)
