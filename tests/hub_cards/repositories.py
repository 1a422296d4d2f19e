"""What a Hub keeps, in memory: repositories, their commits, branches and tags."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from huggingface_hub import RepoCard

NOW = datetime(2026, 11, 21, tzinfo=UTC).isoformat().replace("+00:00", ".000Z")
LFS_SUFFIXES = (".safetensors", ".parquet", ".png", ".bin", ".gz")  # as in .gitattributes


@dataclass(frozen=True)
class File:
    """A file of a commit."""

    content: bytes
    lfs: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def git_oid(self) -> str:
        """Git's name of the blob; of an LFS file that of its pointer, in git itself."""
        content = self.content
        if self.lfs:
            content = f"oid sha256:{self.sha256}\nsize {len(content)}\n".encode()
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 if self.lfs else self.git_oid

    def entry(self, path: str) -> dict[str, object]:
        """The file as /tree and /paths-info list it."""
        entry: dict[str, object] = {
            "type": "file",
            "path": path,
            "size": len(self.content),
            "oid": self.git_oid,
        }
        if self.lfs:
            entry["lfs"] = {"oid": self.sha256, "size": len(self.content), "pointerSize": 134}
        return entry


@dataclass(frozen=True)
class Commit:
    """A state of a repository."""

    oid: str
    title: str
    files: Mapping[str, File]


@dataclass
class Repo:
    """A repository: commits by their hash, and names for some of them."""

    kind: str  # "model" or "dataset"
    id: str
    private: bool = False
    gated: bool = False
    commits: dict[str, Commit] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)  # branches and tags
    lfs: dict[str, bytes] = field(default_factory=dict)  # uploaded, by sha256

    def __post_init__(self) -> None:
        self.commit(
            "initial commit", {".gitattributes": File(b"*.safetensors filter=lfs\n", False)}
        )

    def commit(self, title: str, files: Mapping[str, File], branch: str = "main") -> Commit:
        parent = self.refs.get(branch, "")
        names = [f"{path} {files[path].etag}" for path in sorted(files)]
        oid = hashlib.sha1("\n".join([self.id, parent, title, *names]).encode()).hexdigest()
        self.commits[oid] = Commit(oid, title, dict(files))
        self.refs[branch] = oid
        return self.commits[oid]

    def at(self, revision: str) -> Commit | None:
        return self.commits.get(self.refs.get(revision, revision))

    @property
    def head(self) -> Commit:
        return self.commits[self.refs["main"]]

    def info(self, commit: Commit) -> dict[str, object]:
        """The repository as /api/models/ID describes it."""
        card = commit.files.get("README.md")
        return {
            "id": self.id,
            "sha": commit.oid,
            "private": self.private,
            "gated": "auto" if self.gated else False,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "lastModified": NOW,
            "createdAt": NOW,
            "cardData": RepoCard(card.content.decode()).data.to_dict() if card else None,
            "siblings": [{"rfilename": path} for path in sorted(commit.files)],
        }
