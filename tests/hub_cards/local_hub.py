"""A Hub for tests: the endpoints that huggingface_hub, transformers and datasets call, over HTTP.

`LocalHub` serves from a thread of this process; a test looks at `repos`, and breaks connections
with `cut`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response
from huggingface_hub import RepoCard

from ..served_app import ServedApp

LFS_SUFFIXES = (".safetensors", ".parquet", ".png", ".bin", ".gz")  # as in .gitattributes
TOKEN = "hf_" + "LocalHubTestToken" * 2
KINDS = {"models": "model", "datasets": "dataset"}
FOLDERS = {"model": "", "dataset": "datasets/"}


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
        size = len(self.content)
        entry: dict[str, object] = {"type": "file", "path": path, "size": size, "oid": self.git_oid}
        lfs = {"oid": self.sha256, "size": size, "pointerSize": 134}
        return entry | ({"lfs": lfs} if self.lfs else {})


@dataclass(frozen=True)
class Commit:
    """A state of a repository."""

    oid: str
    files: Mapping[str, File]


@dataclass
class Repo:
    """A repository: commits by their hash, the last of which is the branch main."""

    kind: str  # "model" or "dataset"
    id: str
    private: bool = False
    commits: dict[str, Commit] = field(default_factory=dict)
    lfs: dict[str, bytes] = field(default_factory=dict)  # uploaded, by sha256

    def __post_init__(self) -> None:
        self.commit({".gitattributes": File(b"*.safetensors filter=lfs\n", False)})

    def commit(self, files: Mapping[str, File]) -> Commit:
        parent = self.head.oid if self.commits else ""
        names = [f"{path} {files[path].etag}" for path in sorted(files)]
        oid = hashlib.sha1("\n".join([self.id, parent, *names]).encode()).hexdigest()
        self.commits[oid] = Commit(oid, dict(files))
        return self.head

    @property
    def head(self) -> Commit:
        return next(reversed(self.commits.values()))

    def info(self, commit: Commit) -> dict[str, object]:
        """The repository as /api/models/ID describes it."""
        card = commit.files.get("README.md")
        return {
            "id": self.id,
            "sha": commit.oid,
            "private": self.private,
            "cardData": RepoCard(card.content.decode()).data.to_dict() if card else None,
            "siblings": [{"rfilename": path} for path in sorted(commit.files)],
        }


def refusal(status: int, code: str, message: str = "", **headers: str) -> HTTPException:
    """An answer by which the clients tell what is wrong."""
    said = {"X-Error-Code": code, "X-Error-Message": message or code}
    return HTTPException(status, message or code, said | headers)


class LocalHub(ServedApp):
    """The server. All of its repositories live in memory."""

    def __init__(self) -> None:
        self.repos: dict[tuple[str, str], Repo] = {}
        self.cuts: list[tuple[str, str, bool]] = []  # as `cut` takes them
        super().__init__(_application(self))

    def add(self, kind: str, repo_id: str, folder: Path) -> Repo:
        """Puts a folder's files straight into a new repository."""
        repo = self.repos[kind, repo_id] = Repo(kind, repo_id)
        files = {
            str(path.relative_to(folder)): File(path.read_bytes(), path.suffix in LFS_SUFFIXES)
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        repo.commit({**repo.head.files, **files})
        return repo

    def cut(self, method: str, path: str, answer: bool = False, times: int = 1) -> None:
        """Breaks the next connections of a method to a path, which is a regular expression.

        The request itself is lost; or, where `answer` is said, the answer to it.
        """
        self.cuts += [(method, path, answer)] * times

    def take_cut(self, method: str, path: str) -> bool | None:
        """Whether the answer to a request is lost, or the request; None where neither is."""
        for cut in self.cuts:
            if cut[0] == method and re.search(cut[1], path):
                self.cuts.remove(cut)
                return cut[2]
        return None

    def find(self, request: Request, kind: str = "") -> Repo:
        """The repository of a path, where this client may see it."""
        path = request.path_params
        kind, repo_id = kind or KINDS[path["kinds"]], f"{path['org']}/{path['name']}"
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        repo = self.repos.get((kind, repo_id))
        if repo is None or (repo.private and token != TOKEN):
            raise refusal(404 if token == TOKEN else 401, "RepoNotFound")
        return repo

    def commit(self, request: Request, revision: str, kind: str = "") -> Commit:
        """The same, at a revision."""
        repo = self.find(request, kind)
        commit = repo.head if revision == "main" else repo.commits.get(revision)
        if commit is None:
            raise refusal(404, "RevisionNotFound")
        return commit


def _application(hub: LocalHub) -> Any:
    app = FastAPI(dependencies=[Depends(_token_only)])
    _add_commits(app, hub)
    _add_reads(app, hub)
    for kind, folder in FOLDERS.items():
        _add_files(app, hub, f"/{folder}".rstrip("/"), kind)

    async def with_cuts(scope: Any, receive: Any, send: Any) -> None:
        """Breaks the connections that a test wants broken."""
        http = scope["type"] == "http"
        cut = hub.take_cut(scope["method"], scope["path"]) if http else None
        if cut is None:
            await app(scope, receive, send)
            return
        transport = receive.__self__.transport  # uvicorn's, of this very connection

        async def lost(message: Any) -> None:
            """The answer is not sent."""

        if cut:
            await app(scope, receive, lost)
        transport.abort()

    return with_cuts


def _token_only(request: Request) -> None:
    """Whoever sends something must say who it is; where a file goes, its address says it."""
    if request.method == "POST" and request.headers.get("authorization") != f"Bearer {TOKEN}":
        raise refusal(401, "", "Invalid credentials in Authorization header")


def _add_commits(app: FastAPI, hub: LocalHub) -> None:
    @app.post("/api/repos/create")
    async def create(request: Request) -> Response:
        asked = await request.json()
        kind = asked.get("type") or "model"
        repo_id = f"{asked.get('organization') or 'tester'}/{asked['name']}"
        url = f"{hub.url}/{FOLDERS[kind]}{repo_id}"
        if (kind, repo_id) in hub.repos:
            return JSONResponse({"error": "You already created this repo", "url": url}, 409)
        private = asked.get("visibility") == "private"
        hub.repos[kind, repo_id] = Repo(kind, repo_id, private=private)
        return JSONResponse({"url": url, "name": repo_id})

    @app.post("/api/validate-yaml")
    async def validate(request: Request) -> Any:
        return {"errors": [], "warnings": []}

    @app.post("/api/{kinds}/{org}/{name}/preupload/{revision}")
    async def preupload(revision: str, request: Request) -> Any:
        commit = hub.commit(request, revision)
        answers = []
        for path in (file["path"] for file in (await request.json())["files"]):
            present = commit.files.get(path)
            mode = "lfs" if path.endswith(LFS_SUFFIXES) else "regular"
            answer = {"path": path, "uploadMode": mode, "shouldIgnore": False}
            answers.append(answer | {"oid": present.etag if present else None})
        return {"files": answers}

    @app.post("/api/{kinds}/{org}/{name}/commit/{revision}")
    async def commit(revision: str, request: Request) -> Any:
        repo, parent = hub.find(request), hub.commit(request, revision)
        files = dict(parent.files)
        for entry in map(json.loads, (await request.body()).splitlines()):
            value = entry["value"]
            if entry["key"] == "header":
                if value.get("parentCommit", parent.oid) != parent.oid:
                    raise refusal(412, "", "A commit has happened since. Please refresh")
            elif entry["key"] == "file":
                files[value["path"]] = File(base64.b64decode(value["content"]), False)
            elif entry["key"] == "lfsFile":
                if value["oid"] not in repo.lfs:
                    raise refusal(400, "", f"LFS object {value['oid']} was not uploaded")
                files[value["path"]] = File(repo.lfs[value["oid"]], True)
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
            else:
                raise refusal(400, "", f"unknown key {entry['key']!r}")
        made = repo.commit(files)
        return {"commitOid": made.oid, "commitUrl": f"{hub.url}/{repo.id}/commit/{made.oid}"}


def _add_reads(app: FastAPI, hub: LocalHub) -> None:
    @app.get("/api/{kinds}/{org}/{name}")
    @app.get("/api/{kinds}/{org}/{name}/revision/{revision:path}")
    async def info(request: Request, revision: str = "main") -> Any:
        return hub.find(request).info(hub.commit(request, revision))

    @app.get("/api/{kinds}/{org}/{name}/tree/{revision}")
    @app.get("/api/{kinds}/{org}/{name}/tree/{revision}/{folder:path}")
    async def tree(revision: str, request: Request, folder: str = "") -> Any:
        """All files below a folder: nobody asks for folders."""
        files = sorted(hub.commit(request, revision).files.items())
        entries = [file.entry(path) for path, file in files if path.startswith(folder)]
        if not entries:
            raise refusal(404, "EntryNotFound")
        return entries

    @app.post("/api/{kinds}/{org}/{name}/paths-info/{revision}")
    async def paths_info(revision: str, request: Request) -> Any:
        files = hub.commit(request, revision).files
        asked = parse_qs((await request.body()).decode())["paths"]
        return [files[path].entry(path) for path in asked if path in files]


def _add_files(app: FastAPI, hub: LocalHub, prefix: str, kind: str) -> None:
    @app.post(prefix + "/{org}/{name}.git/info/lfs/objects/batch")
    async def batch(request: Request) -> Any:
        repo = hub.find(request, kind)
        objects = (await request.json())["objects"]
        for entry in objects:
            if entry["oid"] not in repo.lfs:
                target = f"{hub.url}{prefix}/{repo.id}/lfs/{entry['oid']}"
                entry["actions"] = {"upload": {"href": target}}
        return {"transfer": "basic", "objects": objects}

    @app.put(prefix + "/{org}/{name}/lfs/{oid}")
    async def upload(org: str, name: str, oid: str, request: Request) -> Any:
        content = await request.body()
        if hashlib.sha256(content).hexdigest() != oid:
            raise refusal(400, "", "the content's SHA-256 is another")
        hub.repos[kind, f"{org}/{name}"].lfs[oid] = content
        return {}

    @app.get(prefix + "/{org}/{name}/resolve/{revision}/{path:path}")
    @app.head(prefix + "/{org}/{name}/resolve/{revision}/{path:path}")
    async def resolve(revision: str, path: str, request: Request) -> Response:
        commit = hub.commit(request, revision, kind)
        file = commit.files.get(path)
        if file is None:
            raise refusal(404, "EntryNotFound", **{"X-Repo-Commit": commit.oid})
        headers = {"ETag": f'"{file.etag}"', "X-Repo-Commit": commit.oid}
        headers["Content-Length"] = str(len(file.content))
        return Response(None if request.method == "HEAD" else file.content, headers=headers)
