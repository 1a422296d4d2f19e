"""The exact folder that is published: copied file by file from a list, and nothing else.

Only files that belong to a policy or to labels leave the run's folder; anything beside them stays
there and is named. Links are refused: what they lead to may lie outside.
"""

import dataclasses
import json
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]  # not in __all__

import modeling_ospruner
from modeling_ospruner.custom_generate_ospruner import CUSTOM_GENERATE
from modeling_ospruner.modeling_ospruner import FLAT_FILES
from ospruner.provenance import (
    PROVENANCE_FILE,
    code_state,
    file_hash,
    read_provenance,
    without_paths,
    write_provenance,
)

_CODE_FOLDER = Path(modeling_ospruner.__file__).parent
COMMIT = re.compile(r"[0-9a-f]{40}")  # its hash, which never moves
_TEXT = (".json", ".jinja", ".md", ".py", ".txt", ".model")
_ACCESS_TOKEN = re.compile(rb"\b(?:hf|api_org)_[A-Za-z0-9]{20,}")


@dataclass(frozen=True)
class Base:
    """A base on the Hub."""

    id: str  # its repository
    revision: str  # a commit's hash; "" where a dry run asked nobody
    license: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of its card

    def __post_init__(self) -> None:
        if self.revision and not COMMIT.fullmatch(self.revision):
            raise ValueError(
                f"revision={self.revision!r} must be a commit's hash, 40 hexadecimal digits: a "
                "branch or a tag may move"
            )


@dataclass(frozen=True)
class Published:
    """What is published, and what publishing did."""

    path: Path  # the exact folder; kept by a dry run alone
    kind: str  # what the repository holds: "model" or "dataset"
    message: str  # of the commit
    sizes: Mapping[str, int]  # bytes of each file, by its path in the repository, in order
    left_out: Sequence[str]  # files of the run's folder that are not published, in order
    remarks: Sequence[str]  # what its publisher should know
    commit: str | None = None  # the repository's head now; None before it is sent
    changed: bool = False  # whether a commit was made; False where everything was there already
    url: str | None = None  # where people look at it; None as with `commit`


def file_names(folder: Path) -> list[str]:
    """Every file below a folder, links included, as paths in the repository."""
    return sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_symlink() or not path.is_dir()
    )


def empty_folder(out: Path) -> None:
    """Makes an empty folder; one that holds an earlier dry run is emptied.

    Raises:
        ValueError: It holds anything else.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        dry_run = (out / PROVENANCE_FILE).is_file()
        if not dry_run or {*read_provenance(out).files, PROVENANCE_FILE} != {*file_names(out)}:
            raise ValueError(f"out={str(out)!r} is not empty: delete it, or choose another folder")
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)


def copy_files(folder: Path, out: Path, patterns: Iterable[str]) -> list[str]:
    """Copies the files that match shell patterns, and returns the names of those that do not.

    Raises:
        ValueError: A file that matches is a link or lies outside.
    """
    present = file_names(folder)
    copied = list(filter_repo_objects(present, allow_patterns=list(patterns)))
    for name in copied:
        source = folder / name
        if source.is_symlink() or not source.resolve().is_relative_to(folder.resolve()):
            raise ValueError(
                f"{source} is a link, or reached through one: nothing outside the run's folder is "
                "published; put the file itself there"
            )
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, out / name)
    return [name for name in present if name not in copied]


def code_files() -> dict[str, Path]:
    """The code of the installed package that a policy's repository holds, by its path there."""
    flat = {name: _CODE_FOLDER / name for name in FLAT_FILES}
    return flat | {CUSTOM_GENERATE: _CODE_FOLDER / "custom_generate_ospruner.py"}


def write_record(folder: Path, out: Path, base: Base, code: bool) -> None:
    """Writes the run's own record into the folder to be published, without its machine's paths.

    Raises:
        ValueError: There is no record.
    """
    record = read_provenance(folder)
    published = dataclasses.replace(
        record,
        command=without_paths(record.command),
        base_model=base.id,
        base_revision=base.revision or None,
        details=scrubbed(record.details),
        code=code_state(_CODE_FOLDER, FLAT_FILES) if code else {},
    )
    write_provenance(out, published)


def seal(out: Path) -> dict[str, int]:
    """Writes every file's hash into the record, the last step; returns each file's bytes.

    Raises:
        ValueError: A file holds what looks like an access token.
    """
    names = file_names(out)
    for name in names:
        if Path(name).suffix in _TEXT and _ACCESS_TOKEN.search((out / name).read_bytes()):
            raise ValueError(
                f"{name} holds what looks like an access token: nothing was published; remove it, "
                "and revoke it if anyone else could read it"
            )
    hashes = {name: file_hash(out / name) for name in names if name != PROVENANCE_FILE}
    write_provenance(out, dataclasses.replace(read_provenance(out), files=hashes))
    return {name: (out / name).stat().st_size for name in names}


def scrubbed(value: Any) -> Any:
    """JSON values with every absolute path in them cut to its last part."""
    if isinstance(value, str):
        return without_paths(value)
    if isinstance(value, Mapping):
        return {name: scrubbed(one) for name, one in value.items()}
    return [scrubbed(one) for one in value] if isinstance(value, list) else value


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Writes an object as indented JSON."""
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
