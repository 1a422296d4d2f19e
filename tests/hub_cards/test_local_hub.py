"""The local Hub speaks the clients' language: if it did not, no other test here would mean much."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from .local_hub import LocalHub


def test_a_folder_goes_up_and_comes_back(api: HfApi, hub: LocalHub, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Hi\n")
    (folder / "sub" / "w.safetensors").write_bytes(bytes(100_000))
    api.create_repo("org/up", private=True)
    api.upload_folder(repo_id="org/up", folder_path=folder)
    info = api.model_info("org/up")
    assert info.private
    assert info.card_data is not None
    assert info.card_data.license == "mit"
    assert api.list_repo_files("org/up") == [".gitattributes", "README.md", "sub/w.safetensors"]
    back = Path(api.snapshot_download("org/up", cache_dir=tmp_path / "cache"))
    assert (back / "sub" / "w.safetensors").read_bytes() == bytes(100_000)
    commits = len(hub.repos["model", "org/up"].commits)
    api.upload_folder(repo_id="org/up", folder_path=folder)
    assert len(hub.repos["model", "org/up"].commits) == commits
    with pytest.raises(RepositoryNotFoundError):
        HfApi(hub.url, token=False).model_info("org/up")


def test_refusals_are_those_that_the_client_knows(
    api: HfApi, hub: LocalHub, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("a")
    hub.add("model", "org/there", tmp_path)
    hub.add("model", "org/gated", tmp_path, gated=True)
    with pytest.raises(RepositoryNotFoundError):
        api.model_info("org/missing")
    with pytest.raises(RevisionNotFoundError):
        api.model_info("org/there", revision="v9")
    with pytest.raises(RemoteEntryNotFoundError):
        api.hf_hub_download("org/there", "b.txt", cache_dir=tmp_path / "cache")
    with pytest.raises(GatedRepoError):
        HfApi(hub.url, token=False).hf_hub_download(
            "org/gated", "a.txt", cache_dir=tmp_path / "cache"
        )
    stale = next(iter(hub.repos["model", "org/there"].commits))
    with pytest.raises(HfHubHTTPError, match="412"):
        api.create_commit(
            "org/there",
            [CommitOperationAdd("c.txt", b"c")],
            commit_message="late",
            parent_commit=stale,
        )


def test_cut_connections_reach_the_client(api: HfApi, hub: LocalHub, tmp_path: Path) -> None:
    """A broken download is taken up where it broke, by the client's own retries."""
    content = bytes(range(256)) * 1000
    (tmp_path / "w.safetensors").write_bytes(content)
    hub.add("model", "org/cut", tmp_path)
    hub.cut("GET", "org/cut/resolve", after_bytes=100_000)
    hub.requests.clear()
    path = api.hf_hub_download("org/cut", "w.safetensors", cache_dir=tmp_path / "cache")
    assert Path(path).read_bytes() == content
    assert sum(line.startswith("GET /org/cut/resolve") for line in hub.requests) == 2
