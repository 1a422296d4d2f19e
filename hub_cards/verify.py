"""Is a published policy what it says? Its code is read and compared, never run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is httpx2's
    HTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from modeling_ospruner import OSPrunerForCausalLM
from modeling_ospruner.modeling_ospruner import WEIGHTS
from ospruner.provenance import PROVENANCE_FILE, file_hash, is_hub_id, read_provenance

from .cards import CARD_FILE, read_policy_config
from .probes import largest_difference, load_policy, read_probes
from .staging import Base, code_files, file_names

__all__ = ["Check", "fetch", "verify", "verify_folder"]

# git's own, and the card, which its owner may edit on the Hub
_FREE = (".gitattributes", CARD_FILE, PROVENANCE_FILE)


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
        ValueError: There is no such policy, or it was not published by OS-Pruner.
        ConnectionError: The Hub cannot be reached.
    """
    return verify_folder(fetch(repo, revision, HfApi())[0])


def fetch(repo: str, revision: str | None, api: HfApi) -> tuple[Path, str]:
    """The files of a policy's repository, and the commit they are of; a folder is taken as it is.

    Raises:
        ValueError: If there is no such folder, and the Hub has no such repository or revision.
        ConnectionError: If the Hub cannot be reached.
    """
    if Path(repo).is_dir():
        return Path(repo), "a local folder"
    if Path(repo).exists() or not is_hub_id(repo):
        raise ValueError(
            f"{repo!r} is no folder of a policy{' but a file' if Path(repo).exists() else ''}, and "
            "no id on the Hub (owner/name) either: check the path"
        )
    try:
        commit = str(api.model_info(repo, revision=revision).sha)
    except RevisionNotFoundError as error:
        raise ValueError(f"{repo} has no revision {revision!r} on the Hub") from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"{repo} is no folder here, and not on the Hub, or not visible with your token: check "
            "the name, or log in with `hf auth login`"
        ) from error
    except (HTTPError, OSError) as error:
        raise ConnectionError(
            f"{repo} is no folder here, and the Hub cannot be asked for it ({error})"
        ) from error
    return Path(snapshot_download(repo, revision=commit, endpoint=api.endpoint)), commit


def verify_folder(
    folder: Path, load: Callable[[Path], OSPrunerForCausalLM] = load_policy
) -> list[Check]:
    """Checks a policy's files.

    The weights are loaded by the installed package's code and checked against the base that the
    policy pins; no code of the repository is run, and no pickle is read.

    Args:
        folder: The policy's files, as published.
        load: How to load the policy with its base.

    Raises:
        ValueError: If the folder holds no policy, or was not published by OS-Pruner.
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
    return [
        _check_code(folder, record.code.get("version")),
        _check_hashes(folder, record.files),
        _check_pin(config.base_model_name_or_path, config.base_revision),
        _check_probes(folder, load),
    ]


def _check_code(folder: Path, version: str | None) -> Check:
    ours = code_files()
    present = {name for name in file_names(folder) if name.endswith(".py")}
    faults = [f"{name} is missing" for name in sorted(set(ours) - present)]
    faults += [f"{name} is not ours" for name in sorted(present - set(ours))]
    faults += [
        f"{name} differs"
        for name in sorted(present & set(ours))
        if file_hash(folder / name) != file_hash(ours[name])
    ]
    if faults:
        detail = f"{'; '.join(faults)}. It says that it was published by ospruner {version}"
        return Check("code equals the installed package's", False, detail)
    return Check("code equals the installed package's", True, f"{len(ours)} files")


def _check_hashes(folder: Path, stated: dict[str, str]) -> Check:
    present = set(file_names(folder)) - set(_FREE)
    faults = [f"{name} is missing" for name in sorted(set(stated) - set(_FREE) - present)]
    faults += [f"{name} is not in the record" for name in sorted(present - set(stated))]
    faults += [
        f"{name} was changed"
        for name in sorted(present & set(stated))
        if file_hash(folder / name) != stated[name]
    ]
    question = f"files equal the hashes in {PROVENANCE_FILE}"
    return Check(question, not faults, "; ".join(faults) or f"{len(present)} files")


def _check_pin(base: str, revision: str | None) -> Check:
    question = "base is pinned by commit"
    try:
        Base(base, revision or "")
    except ValueError as error:
        return Check(question, False, f"{base}: {error}")
    return Check(question, True, f"{base} at {revision}")


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
