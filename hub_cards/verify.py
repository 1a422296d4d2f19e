"""Is a published policy what it says? Its code is read and compared, never run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is httpx2's
    HfHubHTTPError,
    HTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from modeling_ospruner import OSPrunerForCausalLM
from modeling_ospruner.modeling_ospruner import WEIGHTS
from ospruner.provenance import PROVENANCE_FILE, check_place, file_hash, read_provenance

from .cards import CARD_FILE, read_policy_config
from .probes import largest_difference, load_policy, read_probes
from .staging import code_files, file_names, is_commit

__all__ = ["Check", "ask_hub", "fetch", "one_line", "verify", "verify_folder"]

# git's own, and the card, which its owner may edit on the Hub
_FREE = {".gitattributes", CARD_FILE, PROVENANCE_FILE}


@dataclass(frozen=True)
class Check:
    """One question about a policy, and its answer.

    Attributes:
        question: What was looked at.
        ok: Whether it is as it should be.
        detail: What was found.
    """

    question: str
    ok: bool
    detail: str


def verify(repo: str, revision: str | None = None) -> list[Check]:
    """Check a published policy without running any of its code.

    ```python
    for check in ospruner.verify("org/ospruner-qwen3-8b"):
        print(check.ok, check.question, check.detail)
    ```

    Its code is compared with the installed package's, its files with the recorded hashes; the
    base must be pinned by commit; and weights and base must still say what they said when they
    were published.

    Args:
        repo: Id of a policy on the Hub, or its folder.
        revision: Commit, branch or tag.

    Raises:
        FileNotFoundError, ValueError: There is no such policy, or it was not published by
            OS-Pruner.
        ConnectionError: The Hub cannot be reached.
    """
    return verify_folder(fetch(repo, revision, HfApi()))


def fetch(repo: str, revision: str | None, api: HfApi) -> Path:
    """The files of a policy's repository; a folder is taken as it is.

    Raises:
        FileNotFoundError, ValueError: There is no such folder, and the Hub has no such repository
            or revision.
        ConnectionError: The Hub cannot be reached.
    """
    if Path(repo).is_dir():
        return Path(repo)
    check_place("policy", repo)
    commit = ask_hub(f"{repo}, which is no folder here,", repo, revision, api).sha
    return Path(snapshot_download(repo, revision=commit, endpoint=api.endpoint))


def ask_hub(what: str, repo: str, revision: str | None, api: HfApi) -> Any:
    """What the Hub says about a model's repository; `what` names it in errors.

    Raises:
        ValueError: It has no such repository or revision.
        ConnectionError: It cannot be reached.
    """
    try:
        return api.model_info(repo, revision=revision)
    except RevisionNotFoundError as error:
        raise ValueError(f"{what} has no revision {revision!r} on the Hub") from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"{what} is not on the Hub, or not visible with your token: check the name, publish it "
            "first, or log in with `hf auth login`"
        ) from error
    except (HTTPError, OSError) as error:
        raise ConnectionError(f"the Hub cannot be asked for {what} ({one_line(error)})") from error


def one_line(error: BaseException) -> str:
    """The innermost reason of an error, without the request that led to it."""
    while error.__cause__ is not None and not isinstance(error, HfHubHTTPError):
        error = error.__cause__
    return " ".join(str(error).split()) or type(error).__name__


def verify_folder(
    folder: Path, load: Callable[[Path], OSPrunerForCausalLM] = load_policy
) -> list[Check]:
    """Checks a policy's files, as published; `load` loads the policy with its base.

    The weights are loaded by the installed package's code and checked against the base that the
    policy pins; no code of the repository is run, and no pickle is read.

    Raises:
        ValueError: The folder holds no policy, or was not published by OS-Pruner.
    """
    config = read_policy_config(folder)
    record = read_provenance(folder)
    if not record.files:
        raise ValueError(
            f"{PROVENANCE_FILE} names no files, so that there is nothing to verify: the policy was "
            "neither trained by `ospruner train` nor published by `ospruner publish`"
        )
    if not record.code:  # trained, and not published: only its weights are recorded
        return [
            Check(
                f"weights equal the hash in {PROVENANCE_FILE}; not published yet",
                file_hash(folder / WEIGHTS) == record.files[WEIGHTS],
                f"{WEIGHTS}, SHA-256 {record.files[WEIGHTS]}",
            )
        ]
    names = file_names(folder)
    code = _compare(
        {name: file_hash(path) for name, path in code_files().items()},
        {name: file_hash(folder / name) for name in names if name.endswith(".py")},
        "code equals the installed package's",
        ("is not ours", "differs"),
        f". It says that it was published by ospruner {record.code.get('version')}",
    )
    files = _compare(
        {name: hashed for name, hashed in record.files.items() if name not in _FREE},
        {name: file_hash(folder / name) for name in names if name not in _FREE},
        f"files equal the hashes in {PROVENANCE_FILE}",
        ("is not in the record", "was changed"),
    )
    base, revision = config.base_model_name_or_path, config.base_revision
    pin = Check("base is pinned by commit", is_commit(revision or ""), f"{base} at {revision}")
    return [code, files, pin, _check_probes(folder, load)]


def _compare(
    wanted: Mapping[str, str],
    found: Mapping[str, str],
    question: str,
    words: tuple[str, str],
    remark: str = "",
) -> Check:
    """Whether files, by name and hash, are those that they should be; names each that is not."""
    strange, other = words
    faults = [f"{name} is missing" for name in sorted(wanted.keys() - found.keys())]
    faults += [f"{name} {strange}" for name in sorted(found.keys() - wanted.keys())]
    both = sorted(wanted.keys() & found.keys())
    faults += [f"{name} {other}" for name in both if found[name] != wanted[name]]
    return Check(
        question, not faults, "; ".join(faults) + remark if faults else f"{len(both)} files"
    )


def _check_probes(folder: Path, load: Callable[[Path], OSPrunerForCausalLM]) -> Check:
    question = "weights load and say what they said when published"
    try:
        stored = read_probes(folder)
        difference, tolerated = largest_difference(load(folder), stored)
    # Whatever is wrong with a stranger's files, it is an answer: SafetensorError is an Exception.
    except Exception as error:  # noqa: BLE001
        return Check(question, False, f"{type(error).__name__}: {error}")
    count = sum(len(one["stop_probabilities"]) for one in stored["probes"])
    return Check(
        question,
        difference <= tolerated,
        f"{count} stop probabilities of {len(stored['probes'])} probes, log-odds within "
        f"{difference:.2g} (tolerated: {tolerated:g})",
    )
