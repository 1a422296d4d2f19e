"""Publishing on the Hub: a staged folder goes up as one commit, or not at all."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    hf_hub_download,
)
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is httpx2's
    EntryNotFoundError,
    HfHubHTTPError,
    HTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile

from ospruner.provenance import PROVENANCE_FILE, file_hash, is_hub_id, read_provenance

from .render import License
from .staging import Base, Staged

Kind = Literal["model", "dataset", "space"]

__all__ = [
    "Kind",
    "Published",
    "add_to_collection",
    "base_license",
    "find_base",
    "previous_file",
    "publish_folder",
]


@dataclass(frozen=True)
class Published:
    """What publishing did.

    Attributes:
        repo_id: The repository.
        commit: Its head now.
        changed: Whether a commit was made; False where everything was there already.
        url: Where people look at it.
    """

    repo_id: str
    commit: str
    changed: bool
    url: str


def publish_folder(
    staged: Staged, repo_id: str, kind: Kind, *, private: bool, message: str, api: HfApi
) -> Published:
    """Brings a repository to the staged folder's state in one commit.

    Files that an earlier publishing put there and this one lacks are deleted in the same commit;
    files of others are left alone. huggingface_hub retries what it sends; nothing shows before
    the commit, so that a failure leaves the repository as it was (a new one: empty).

    Args:
        staged: The folder.
        repo_id: `owner/name`; made where it does not exist.
        kind: What the repository holds.
        private: Make it a private one.
        message: Of the commit.
        api: The Hub, with the user's token.

    Raises:
        ValueError: If the repository is public though a private one is wanted, or holds something
            that was not published by OS-Pruner.
        ConnectionError: If the Hub could not be reached, or refused; says what state it is in.
    """
    head: str | None = None
    try:
        sdk = "gradio" if kind == "space" else None
        url = str(
            api.create_repo(
                repo_id, repo_type=kind, private=private or None, exist_ok=True, space_sdk=sdk
            )
        )
        info = api.repo_info(repo_id, repo_type=kind)
        head = info.sha
        if private and not info.private:
            raise ValueError(
                f"repo={repo_id!r} exists and is public: leave --private out, choose another name, "
                "or make it private on the Hub first"
            )
        ours = _published_files(repo_id, kind, api)
        stale = sorted(set(ours) - set(staged.sizes()) - {PROVENANCE_FILE})
        done = api.create_commit(
            repo_id,
            [
                *(CommitOperationAdd(name, staged.path / name) for name in staged.sizes()),
                *(CommitOperationDelete(name, is_folder=False) for name in stale),
            ],
            commit_message=message,
            repo_type=kind,
            parent_commit=head,
        )
    except (HTTPError, OSError, RuntimeError) as error:
        # RuntimeError is what huggingface_hub raises for an upload that failed.
        raise ConnectionError(_what_happened(repo_id, kind, head, error, api)) from error
    return Published(repo_id, done.oid, done.oid != head, url)


def _published_files(repo_id: str, kind: Kind, api: HfApi) -> list[str]:
    """The files that an earlier publishing put into the repository, as far as they are there.

    Raises:
        ValueError: If the repository holds files but no record of a publishing.
    """
    present = set(api.list_repo_files(repo_id, repo_type=kind))
    if not present - {".gitattributes", "README.md"}:
        return []
    record = previous_file(repo_id, kind, PROVENANCE_FILE, api)
    if record is None:
        raise ValueError(
            f"repo={repo_id!r} holds files that ospruner did not publish "
            f"({', '.join(sorted(present)[:5])}): choose another name, or empty it first"
        )
    return [name for name in read_provenance(record.parent).files if name in present]


def previous_file(repo_id: str, kind: Kind, name: str, api: HfApi) -> Path | None:
    """A file of the repository as it is now; None where there is no such file or repository."""
    try:
        path = hf_hub_download(
            repo_id, name, repo_type=kind, endpoint=api.endpoint, token=api.token
        )
    except (EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError):
        return None
    return Path(path)


def _what_happened(repo_id: str, kind: Kind, head: str | None, error: Exception, api: HfApi) -> str:
    """What a user can do after a failure, from the state that the repository is in."""
    reason = _one_line(error)
    try:
        now = api.repo_info(repo_id, repo_type=kind).sha
    except (HTTPError, OSError):
        return (
            f"publishing {repo_id} failed ({reason}): run the same command again; it commits "
            "what is missing, if anything"
        )
    if head is not None and now != head:
        return f"publishing {repo_id} ended in an error ({reason}), but commit {now} is there"
    return (
        f"publishing {repo_id} failed ({reason}): nothing was committed, it is at {now} as "
        "before; run the same command again"
    )


def find_base(
    config: dict[str, Any], base: str | None, revision: str | None, api: HfApi
) -> tuple[Base, list[str]]:
    """The base of a policy on the Hub, pinned by commit, with remarks.

    Args:
        config: The policy's `config.json`.
        base: What the publisher says that it is; needed where the policy names a folder.
        revision: The commit, branch or tag that the publisher names; None for the one that the
            policy pins, or else the present head.
        api: The Hub.

    Raises:
        ValueError: If no repository is named, another one than the policy's, one or a revision
            that the Hub does not have, or one whose weights are not those of the local folder.
    """
    pinned: str = config["base_model_name_or_path"]
    local = not is_hub_id(pinned)
    if local and base is None:
        raise ValueError(
            f"the policy's base is a local folder ({Path(pinned).name}), which nobody else could "
            "load: say which repository it is, --base org/name --base-revision COMMIT"
        )
    if not local and base not in (None, pinned):
        raise ValueError(f"base={base!r}, but the policy was made for {pinned!r}: leave --base out")
    name = base or pinned
    asked = revision or (None if local else config["base_revision"])
    try:
        info = api.model_info(name, revision=asked)
    except RevisionNotFoundError as error:
        raise ValueError(f"base {name!r} has no revision {asked!r} on the Hub") from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"base {name!r} is not on the Hub, or not visible with your token: publish it first, "
            "or name another with --base"
        ) from error
    found = Base(name, str(info.sha))
    remarks = []
    if asked is None:
        remarks.append(f"base {name} is pinned at its present commit {found.revision}")
    if Path(pinned).is_dir():
        _compare_weights(Path(pinned), found, api)
    return found, remarks


def _compare_weights(folder: Path, base: Base, api: HfApi) -> None:
    """Refuses a local base whose weights are not those on the Hub.

    Raises:
        ValueError: Naming the first file that differs.
    """
    local = {path.name: path for path in sorted(folder.glob("*.safetensors"))}
    for entry in api.get_paths_info(base.id, list(local), revision=base.revision):
        path = local.pop(entry.path)
        if isinstance(entry, RepoFile) and entry.lfs and entry.lfs.sha256 != file_hash(path):
            raise ValueError(
                f"{entry.path} of {base.id} at {base.revision} is not the file of the local base "
                f"{folder.name}: name the repository and the commit that the policy was made for"
            )
    if local:
        raise ValueError(
            f"{base.id} at {base.revision} lacks {', '.join(local)} of the local base "
            f"{folder.name}: name the repository that the policy was made for"
        )


def base_license(base: Base, api: HfApi) -> tuple[License | None, list[str]]:
    """The licence that a base's card states, with a remark where it states none."""
    card = api.model_info(base.id, revision=base.revision).card_data
    stated = card.to_dict() if card is not None else {}
    license = stated.get("license")
    if not isinstance(license, str) or license == "unknown":
        return None, [
            f"the licence of {base.id} is not known (its card says {license!r}): the policy's "
            "copied layers are under it; find out, and name it with --license"
        ]
    return License(license, stated.get("license_name"), stated.get("license_link")), []


def add_to_collection(
    collection: str, repo_id: str, kind: Kind, note: str | None, api: HfApi
) -> str:
    """Puts a repository into a collection and returns the collection's address.

    Args:
        collection: A title, under which the repository's owner gets a collection where there is
            none, or the slug of an existing one (`owner/title-0123...`).
        repo_id: The repository; nothing happens where it is in the collection already.
        kind: What it is.
        note: Shown beside it.
        api: The Hub.

    Raises:
        ConnectionError: If the Hub refused.
    """
    try:
        slug = collection
        if not re.fullmatch(r"[^/]+/.*-[0-9a-f]{16,}", collection):
            owner = repo_id.partition("/")[0]
            slug = api.create_collection(collection, namespace=owner, exists_ok=True).slug
        return api.add_collection_item(slug, repo_id, kind, note=note, exists_ok=True).url
    except (HTTPError, OSError) as error:
        raise ConnectionError(
            f"{repo_id} is published, but not in collection {collection!r} ({_one_line(error)}): "
            "run the same command again"
        ) from error


def commit_message(kind: str, names: Sequence[str]) -> str:
    """What a publishing's commit is called."""
    return f"{kind}: {', '.join(names)} (published with ospruner)"


def _one_line(error: BaseException) -> str:
    """The innermost reason of an error, without the request that led to it."""
    while error.__cause__ is not None and not isinstance(error, HfHubHTTPError):
        error = error.__cause__
    text = str(error).strip() or type(error).__name__
    return " ".join(line.strip() for line in text.splitlines() if line.strip())
