"""Publishing a policy: exactly its files, in one commit, or nothing."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

from ospruner.demo import REASONER
from ospruner.eval.results import Results
from ospruner.hub_cards.publish import Release, publish, send
from ospruner.hub_cards.staging import Published, code_files
from ospruner.hub_cards.verify import verify_folder
from ospruner.provenance import read_provenance

from .conftest import Publisher
from .local_hub import TOKEN, LocalHub


@pytest.fixture
def run_dir(policy_dir: Path, tmp_path: Path) -> Path:
    """A run's folder of one's own."""
    return Path(shutil.copytree(policy_dir, tmp_path / "run" / "policy"))


def test_one_commit_holds_exactly_the_policy(
    publisher: Publisher, hub: LocalHub, run_dir: Path
) -> None:
    """A secret beside the policy, within it, and behind a link stays where it is."""
    secret = run_dir.parent / "secret.env"
    secret.write_text("PASSWORD=swordfish")
    (run_dir / "notes.txt").write_text("swordfish, too")
    (run_dir / "link.json").symlink_to(secret)
    (run_dir / "optimizer.pt").write_bytes(b"swordfish")
    staged = publisher.stage(run_dir, "org/policy")
    done = send(staged, "org/policy", False, publisher.api)
    assert list(staged.left_out) == ["link.json", "notes.txt", "optimizer.pt"]
    repo = hub.repos["model", "org/policy"]
    assert len(repo.commits) == 2, "the repository's first, and ours"
    assert done.commit == repo.head.oid
    tokenizer = {"chat_template.jinja", "tokenizer.json", "tokenizer_config.json"}
    assert set(repo.head.files) == {
        *(".gitattributes", "README.md", "config.json", "generation_config.json"),
        *("model.safetensors", "pareto.png", "probes.json", "provenance.json", "results.json"),
        *(tokenizer | set(code_files())),
    }
    for name, file in repo.head.files.items():
        assert b"swordfish" not in file.content, name
        assert str(run_dir.parent).encode() not in file.content, name
        assert str(REASONER).encode() not in file.content, name
        assert TOKEN.encode() not in file.content, name
        if name != ".gitattributes":
            assert file.content == (staged.path / name).read_bytes(), name
    config = json.loads(repo.head.files["config.json"].content)
    assert config["base_model_name_or_path"] == "org/base"
    assert config["base_revision"] == publisher.base.head.oid


def test_record_and_card_are_those_of_the_repository(publisher: Publisher, run_dir: Path) -> None:
    staged = publisher.stage(run_dir, "org/carded", labels=["org/labels"])
    record = read_provenance(staged.path)
    assert set(record.files) == set(staged.sizes) - {"provenance.json"}
    assert record.code["version"] == "0.1.0"
    assert record.code["commit"] is None or len(record.code["commit"]) == 40
    assert (record.base_model, record.base_revision) == ("org/base", publisher.base.head.oid)
    assert record.details["labels"] == "labels", "no folder of this machine"
    assert record.created_utc == read_provenance(run_dir).created_utc, "made when it was trained"
    card = ModelCard.load(staged.path / "README.md")
    data = card.data.to_dict()
    assert (data["base_model"], data["base_model_relation"]) == ("org/base", "adapter")
    assert data["license"] == "apache-2.0", "the base's own"
    assert data["datasets"] == ["org/labels"]
    (entry,) = data["model-index"]
    assert entry["name"] == "carded"
    (metrics,) = [one["metrics"] for one in entry["results"]]
    assert [(m["type"], m["value"]) for m in metrics[:2]] == [
        ("accuracy", 71.2),
        ("thinking_tokens", 107.0),
    ]
    assert metrics[0]["name"] == "Pass@1, % (made up)"
    assert metrics[0]["args"]["interval_95_by_problem"] == [69.2, 73.2]
    assert entry["results"][0]["dataset"]["type"] == "embedded-reasoner-test"
    assert '"org/carded"' in card.text
    assert "| **OS-Pruner price=5e-5** | 71.2 [69.2, 73.2] | 107 [102, 112] |" in card.text
    published = Results.read(staged.path / "results.json")
    assert published.about == {"labels": "labels"}, "no folder of this machine"
    assert published.frame.equals(Results.read(run_dir / "results.json").frame)
    assert "](pareto.png)" in card.text
    assert "| settings: learning rate | 1e-05 |" in card.text


def test_a_new_version_replaces_ours_and_leaves_theirs(
    publisher: Publisher, hub: LocalHub, run_dir: Path
) -> None:
    first, again = (publisher.publish(run_dir, "org/newer") for _ in range(2))
    assert (first.changed, again.changed) == (True, False)
    assert again.commit == first.commit
    assert len(hub.repos["model", "org/newer"].commits) == 2
    publisher.api.upload_file(
        path_or_fileobj=b"seen", path_in_repo="reviews.txt", repo_id="org/newer"
    )
    (run_dir / "pareto.png").unlink()
    weights = load_file(run_dir / "model.safetensors")
    weights["policy.head.bias"] += 1
    save_file(weights, run_dir / "model.safetensors")
    before = len(hub.repos["model", "org/newer"].commits)
    assert publisher.publish(run_dir, "org/newer").changed
    repo = hub.repos["model", "org/newer"]
    assert len(repo.commits) == before + 1
    assert "pareto.png" not in repo.head.files
    assert repo.head.files["reviews.txt"].content == b"seen"
    assert (
        repo.head.files["model.safetensors"].content == (run_dir / "model.safetensors").read_bytes()
    )


def test_a_broken_upload_is_retried_or_leaves_no_trace(
    publisher: Publisher, hub: LocalHub, run_dir: Path
) -> None:
    """And a commit whose answer was lost is told from one that was not made."""
    staged = publisher.stage(run_dir, "org/torn")

    def send_it() -> Published:
        return send(staged, "org/torn", False, publisher.api)

    hub.cut("PUT", "org/torn/lfs", times=99)
    with pytest.raises(ConnectionError, match="org/torn failed .*: it went up whole or not at all"):
        send_it()
    repo = hub.repos["model", "org/torn"]
    assert list(repo.head.files) == [".gitattributes"]
    hub.stop_cutting()
    hub.cut("PUT", "org/torn/lfs")
    hub.cut("POST", "org/torn/commit")
    with pytest.raises(ConnectionError, match="it went up whole or not at all; run the same"):
        send_it()
    assert len(repo.commits) == 1
    hub.cut("POST", "org/torn/commit", answer=True)
    with pytest.raises(ConnectionError, match="run the same command again"):
        send_it()
    assert len(repo.commits) == 2
    assert not send_it().changed


def test_private_stays_private(publisher: Publisher, hub: LocalHub, run_dir: Path) -> None:
    publisher.publish(run_dir, "org/hidden", private=True)
    assert hub.repos["model", "org/hidden"].private
    publisher.publish(run_dir, "org/open")
    with pytest.raises(ValueError, match="repo='org/open' exists and is public"):
        publisher.publish(run_dir, "org/open", private=True)


def test_a_strangers_repository_is_not_overwritten(
    publisher: Publisher, hub: LocalHub, run_dir: Path
) -> None:
    before = len(hub.repos["model", "org/base"].commits)
    with pytest.raises(ValueError, match="org/base' holds files that ospruner did not publish"):
        publisher.publish(run_dir, "org/base")
    assert len(hub.repos["model", "org/base"].commits) == before


def test_a_base_that_is_not_pinned_is_refused(
    publisher: Publisher, hub: LocalHub, run_dir: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(REASONER, tmp_path / "other"))
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, other / "model.safetensors")
    hub.add("model", "org/other", other)
    (other / "model.safetensors").unlink()
    hub.add("model", "org/empty", other)
    cases: dict[str, dict[str, Any]] = {
        "base is a local folder .reasoner., which nobody else could load": {"base": None},
        "base org/missing is not on the Hub": {"base": "org/missing"},
        "base org/base has no revision 'v9'": {"base_revision": "v9"},
        "model.safetensors of org/other at .* is": {"base": "org/other", "base_revision": None},
        "lacks model.safetensors of the local": {"base": "org/empty", "base_revision": None},
    }
    for message, release in cases.items():
        with pytest.raises(ValueError, match=message):
            publisher.stage(run_dir, "org/unpinned", **release)
    assert ("model", "org/unpinned") not in hub.repos


def test_a_branch_is_resolved_to_its_commit(
    publisher: Publisher, hub: LocalHub, run_dir: Path
) -> None:
    staged = publisher.stage(run_dir, "org/x", base_revision="main")
    config = json.loads((staged.path / "config.json").read_text())
    assert config["base_revision"] == publisher.base.head.oid
    staged = publisher.stage(run_dir, "org/x", base_revision=None)
    assert any("pinned at its present commit" in remark for remark in staged.remarks)
    with pytest.raises(ValueError, match="made with 'org/base': leave --base out"):
        publisher.stage(staged.path, "org/x", base="org/else")


def test_an_unknown_licence_is_said_aloud(
    publisher: Publisher, hub: LocalHub, run_dir: Path, tmp_path: Path
) -> None:
    nameless = Path(shutil.copytree(REASONER, tmp_path / "nameless"))
    (nameless / "README.md").unlink()
    hub.add("model", "org/nameless", nameless)
    settings = {"base": "org/nameless", "base_revision": None}
    staged = publisher.stage(run_dir, "org/x", **settings)
    assert any("licence of org/nameless is not known" in remark for remark in staged.remarks)
    card = ModelCard.load(staged.path / "README.md")
    assert "license" not in card.data.to_dict()
    assert "was not known when this was published" in card.text
    staged = publisher.stage(run_dir, "org/x", license="mit", **settings)
    assert ModelCard.load(staged.path / "README.md").data.to_dict()["license"] == "mit"
    assert not any("licence" in remark for remark in staged.remarks)


def test_links_are_refused_and_not_entered(publisher: Publisher, run_dir: Path) -> None:
    outside = run_dir.parent / "outside"
    outside.mkdir()
    (outside / "secret.jinja").write_text("secret")
    (run_dir / "additional_chat_templates").symlink_to(outside)
    staged = publisher.stage(run_dir, "org/linked")
    assert "additional_chat_templates/secret.jinja" not in staged.sizes
    (run_dir / "vocab.json").symlink_to(outside / "secret.jinja")
    with pytest.raises(ValueError, match="vocab.json is a link.*nothing outside the run's folder"):
        publisher.stage(run_dir, "org/linked")


def test_an_access_token_is_never_told(
    publisher: Publisher,
    run_dir: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    config = json.loads((run_dir / "tokenizer_config.json").read_text())
    config["note"] = f"made with {TOKEN}"
    (run_dir / "tokenizer_config.json").write_text(json.dumps(config))
    with (
        caplog.at_level(logging.DEBUG),
        pytest.raises(ValueError, match="tokenizer_config.json holds what looks like an access"),
    ):
        publisher.stage(run_dir, "org/told")
    del config["note"]
    (run_dir / "tokenizer_config.json").write_text(json.dumps(config))
    with caplog.at_level(logging.DEBUG):
        publisher.publish(run_dir, "org/told")
    printed = capfd.readouterr()
    for text in (caplog.text, printed.out, printed.err):
        assert TOKEN not in text


@pytest.mark.parametrize("repo", ["name-alone", "a/b/c", "org/bad name", "org/..bad"])
def test_bad_names_are_refused(repo: str) -> None:
    with pytest.raises(ValueError, match=f"repo='{repo}' (cannot be|must name)"):
        Release(repo)


def test_staging_writes_into_empty_folders_and_over_a_dry_run(
    publisher: Publisher, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "staged-1").mkdir()
    (tmp_path / "staged-1" / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="staged-1' is not empty"):
        publisher.stage(run_dir, "org/x")
    assert (tmp_path / "staged-1" / "mine.txt").exists()

    monkeypatch.chdir(tmp_path)  # and nobody is asked: there is no Hub in this process
    release: dict[str, Any] = {
        "base": "org/base",
        "base_revision": publisher.base.head.oid,
        "dry_run": True,
    }
    for _ in range(2):
        done = publish(run_dir, "org/x", **release)
        assert (done.commit, done.changed) == (None, False)
        assert done.path == Path("runs/publish/x")
    assert all(check.ok for check in verify_folder(done.path, publisher.load))
    assert any("licence" in remark for remark in done.remarks)
    local = publish(run_dir, "org/local", dry_run=True)  # a base that is not on the Hub yet
    assert any("to publish, name it on the Hub with --base" in one for one in local.remarks)
    config = json.loads((local.path / "config.json").read_text())
    assert (config["base_model_name_or_path"], config["base_revision"]) == ("reasoner", None)
    (done.path / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="publish/x' is not empty"):
        publish(run_dir, "org/x", **release)
    with pytest.raises(ValueError, match="must be a commit's hash"):
        publish(run_dir, "org/y", **release | {"base_revision": "main"})


def test_verification_finds_each_change(publisher: Publisher, run_dir: Path) -> None:
    folder = publisher.stage(run_dir, "org/verified").path

    def failing() -> dict[str, str]:
        checks = verify_folder(folder, publisher.load)
        return {check.question.split()[0]: check.detail for check in checks if not check.ok}

    assert failing() == {}
    (folder / "extra.py").write_text("print('extra')")
    assert set(failing()) == {"code", "files"}
    (folder / "extra.py").unlink()

    whole = (folder / "model.safetensors").read_bytes()
    weights = load_file(folder / "model.safetensors")
    weights["policy.head.bias"] += 1
    save_file(weights, folder / "model.safetensors")
    found = failing()
    assert set(found) == {"files", "weights"}
    assert found["files"] == "model.safetensors was changed"
    assert "log-odds within 1 (tolerated: 0.01)" in found["weights"]
    (folder / "model.safetensors").write_bytes(whole[:-1000])
    assert "model.safetensors is damaged" in failing()["weights"]
    (folder / "model.safetensors").write_bytes(whole)

    config = json.loads((folder / "config.json").read_text())
    for moves in ("main", None):
        (folder / "config.json").write_text(json.dumps(config | {"base_revision": moves}))
        assert set(failing()) >= {"files", "base"}
    with pytest.raises(ValueError, match="provenance.json names no files, so that"):
        verify_folder(run_dir, publisher.load)
