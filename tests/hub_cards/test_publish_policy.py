"""Publishing a policy: exactly its files, in one commit, or nothing; what was changed is named.

In other hands, its card alone is enough: fresh processes, empty caches, our package not importable.
"""

import json
import logging
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

from modeling_ospruner import OSPrunerForCausalLM
from modeling_ospruner.modeling_ospruner import FLAT_FILES
from ospruner.demo import REASONER
from ospruner.eval.results import Results
from ospruner.hub_cards.publish import publish, send
from ospruner.hub_cards.staging import Published, code_files
from ospruner.hub_cards.verify import verify_folder
from ospruner.provenance import read_provenance

from ..conftest import Fuzzed
from .conftest import Publisher, Run, Stranger
from .local_hub import TOKEN, File, LocalHub, Repo


@pytest.fixture
def run_dir(policy_dir: Path, tmp_path: Path) -> Path:
    """A run's folder of one's own."""
    return Path(shutil.copytree(policy_dir, tmp_path / "run" / "policy"))


def raise_bias(folder: Path, tensor: str = "policy.head.bias") -> None:
    weights = load_file(folder / "model.safetensors")
    weights[tensor] += 1
    save_file(weights, folder / "model.safetensors")


def test_one_commit_holds_exactly_the_policy(publisher: Publisher, run_dir: Path) -> None:
    """A secret beside the policy, within it, and behind a link stays where it is."""
    secret = run_dir.parent / "secret.env"
    secret.write_text("PASSWORD=swordfish")
    (run_dir / "notes.txt").write_text("swordfish, too")
    (run_dir / "link.json").symlink_to(secret)
    (run_dir / "optimizer.pt").write_bytes(b"swordfish")
    staged = publisher.stage(run_dir, "org/policy")
    done = send(staged, "org/policy", False, publisher.api)
    assert list(staged.left_out) == ["link.json", "notes.txt", "optimizer.pt"]
    repo = publisher.hub.repos["model", "org/policy"]
    assert len(repo.commits) == 2, "the repository's first, and ours"
    assert done.commit == repo.head.oid
    tokenizer = {"chat_template.jinja", "tokenizer.json", "tokenizer_config.json"}
    assert set(repo.head.files) == {
        *(".gitattributes", "README.md", "config.json", "generation_config.json"),
        *("model.safetensors", "pareto.png", "probes.json", "provenance.json", "results.json"),
        *(tokenizer | set(code_files())),
    }
    for name, file in repo.head.files.items():
        for own in ("swordfish", str(run_dir.parent), str(REASONER), TOKEN):
            assert own.encode() not in file.content, name
        if name != ".gitattributes":
            assert file.content == (staged.path / name).read_bytes(), name
    config = json.loads(repo.head.files["config.json"].content)
    pinned = (config["base_model_name_or_path"], config["base_revision"])
    assert pinned == ("org/base", publisher.base.head.oid)


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
    assert (data["base_model"], data["datasets"]) == ("org/base", ["org/labels"])
    assert data["license"] == "apache-2.0", "the base's own"
    (entry,) = data["model-index"]
    (result,) = entry["results"]
    accuracy, tokens, *_ = result["metrics"]
    assert (entry["name"], result["dataset"]["type"]) == ("carded", "embedded-reasoner-test")
    assert (tokens["type"], tokens["value"]) == ("thinking_tokens", 107.0)
    assert (accuracy["type"], accuracy["value"]) == ("accuracy", 71.2)
    assert accuracy["name"] == "Pass@1, % (made up)"
    assert accuracy["args"]["interval_95_by_problem"] == [69.2, 73.2]
    for said in (
        *('"org/carded"', "](pareto.png)", "| settings: learning rate | 1e-05 |"),
        "| **OS-Pruner price=5e-5** | 71.2 [69.2, 73.2] | 107 [102, 112] |",
    ):
        assert said in card.text
    published = Results.read(staged.path / "results.json")
    assert published.about == {"labels": "labels"}, "no folder of this machine"
    assert published.frame.equals(Results.read(run_dir / "results.json").frame)


def test_a_new_version_replaces_ours_and_leaves_theirs(publisher: Publisher, run_dir: Path) -> None:
    first, again = (publisher.publish(run_dir, "org/newer") for _ in range(2))
    assert (first.changed, again.changed) == (True, False)
    assert again.commit == first.commit
    repo = publisher.hub.repos["model", "org/newer"]
    assert len(repo.commits) == 2
    repo.commit({**repo.head.files, "reviews.txt": File(b"seen", False)})
    (run_dir / "pareto.png").unlink()
    raise_bias(run_dir)
    assert publisher.publish(run_dir, "org/newer").changed
    assert len(repo.commits) == 4
    files = repo.head.files
    assert "pareto.png" not in files
    assert files["reviews.txt"].content == b"seen"
    assert files["model.safetensors"].content == (run_dir / "model.safetensors").read_bytes()


def test_a_broken_upload_is_retried_or_leaves_no_trace(publisher: Publisher, run_dir: Path) -> None:
    """And a commit whose answer was lost is told from one that was not made."""
    staged = publisher.stage(run_dir, "org/torn")

    def send_it() -> Published:
        return send(staged, "org/torn", False, publisher.api)

    publisher.hub.cut("PUT", "org/torn/lfs", times=99)
    with pytest.raises(ConnectionError, match="org/torn failed .*: it went up whole or not at all"):
        send_it()
    repo = publisher.hub.repos["model", "org/torn"]
    assert list(repo.head.files) == [".gitattributes"]
    publisher.hub.cuts.clear()
    publisher.hub.cut("PUT", "org/torn/lfs")
    publisher.hub.cut("POST", "org/torn/commit")
    with pytest.raises(ConnectionError, match="run the same command again"):
        send_it()
    assert len(repo.commits) == 1
    publisher.hub.cut("POST", "org/torn/commit", answer=True)
    with pytest.raises(ConnectionError, match="run the same command again"):
        send_it()
    assert len(repo.commits) == 2
    assert not send_it().changed


def test_private_stays_private_and_a_strangers_one_his(publisher: Publisher, run_dir: Path) -> None:
    publisher.publish(run_dir, "org/hidden", private=True)
    assert publisher.hub.repos["model", "org/hidden"].private
    publisher.publish(run_dir, "org/open")
    with pytest.raises(ValueError, match="repo='org/open' exists and is public"):
        publisher.publish(run_dir, "org/open", private=True)
    before = publisher.base.head
    with pytest.raises(ValueError, match="org/base' holds files that ospruner did not publish"):
        publisher.publish(run_dir, "org/base")
    assert publisher.base.head is before


def test_unpinned_bases_are_refused(publisher: Publisher, run_dir: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(REASONER, tmp_path / "other"))
    raise_bias(other, "model.norm.weight")
    publisher.hub.add("model", "org/other", other)
    (other / "model.safetensors").unlink()
    publisher.hub.add("model", "org/empty", other)
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
    assert ("model", "org/unpinned") not in publisher.hub.repos


def test_a_branch_is_resolved_to_its_commit(publisher: Publisher, run_dir: Path) -> None:
    staged = publisher.stage(run_dir, "org/x", base_revision="main")
    config = json.loads((staged.path / "config.json").read_text())
    assert config["base_revision"] == publisher.base.head.oid
    staged = publisher.stage(run_dir, "org/x", base_revision=None)
    assert any("pinned at its present commit" in remark for remark in staged.remarks)
    with pytest.raises(ValueError, match="made with 'org/base': leave --base out"):
        publisher.stage(staged.path, "org/x", base="org/else")


def test_an_unknown_licence_is_said(publisher: Publisher, run_dir: Path, tmp_path: Path) -> None:
    nameless = Path(shutil.copytree(REASONER, tmp_path / "nameless"))
    (nameless / "README.md").unlink()
    publisher.hub.add("model", "org/nameless", nameless)
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
    file = run_dir / "tokenizer_config.json"
    config = file.read_text()
    file.write_text(json.dumps(json.loads(config) | {"note": f"made with {TOKEN}"}))
    caplog.set_level(logging.DEBUG)
    with pytest.raises(ValueError, match="tokenizer_config.json holds what looks like an access"):
        publisher.stage(run_dir, "org/told")
    file.write_text(config)
    publisher.publish(run_dir, "org/told")
    printed = capfd.readouterr()
    for text in (caplog.text, printed.out, printed.err):
        assert TOKEN not in text


def test_staging_writes_into_empty_folders_and_over_a_dry_run(
    publisher: Publisher, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # and nobody is asked: there is no Hub in this process
    release: dict[str, Any] = {"base": "org/base", "dry_run": True}
    release["base_revision"] = publisher.base.head.oid
    for _ in range(2):
        done = publish(run_dir, "org/x", **release)
        assert (done.commit, done.changed, done.path) == (None, False, Path("runs/publish/x"))
    assert all(check.ok for check in verify_folder(done.path, publisher.load))
    assert any("licence" in remark for remark in done.remarks)
    local = publish(run_dir, "org/local", dry_run=True)  # a base that is not on the Hub yet
    assert any("to publish, name it on the Hub with --base" in one for one in local.remarks)
    config = json.loads((local.path / "config.json").read_text())
    assert (config["base_model_name_or_path"], config["base_revision"]) == ("reasoner", None)
    (done.path / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="publish/x' is not empty"):
        publish(run_dir, "org/x", **release)
    assert (done.path / "mine.txt").exists()
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
    raise_bias(folder)
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


NOT_VERIFIED = "README.md"  # the owner may edit the card on the Hub
RECORD = "provenance.json"  # holds the others' hashes: it cannot vouch for its own bytes
ADDED = ("extra.py", "modeling_extra_ospruner.py", "pytorch_model.bin", "weights/x.pkl", ".hidden")


@pytest.mark.parametrize("flips", [1, pytest.param(40, marks=pytest.mark.slow)])
def test_each_file_that_was_tampered_with_is_named(
    flips: int, publisher: Publisher, policy_dir: Path, fuzzed: Fuzzed
) -> None:
    folder = publisher.stage(policy_dir, "org/tampered").path
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    names = [str(file.relative_to(folder)) for file in files if file.name != NOT_VERIFIED]
    drawn = random.Random(0)
    missed: dict[str, list[str]] = {}

    def look(name: str, what: str) -> None:
        try:
            bad = [check.detail for check in verify_folder(folder, refuse) if not check.ok]
        except ValueError as error:
            bad = [str(error)]
        named = any(Path(name).name in detail for detail in bad)
        missed[f"{name} {what}"] = [] if named else ["not named", *bad]

    def refuse(path: Path) -> OSPrunerForCausalLM:
        """The weights are looked at by their hash here: loading takes seconds a case."""
        raise ValueError("not loaded")

    assert all(check.ok for check in verify_folder(folder, publisher.load))
    for name in names:
        file, content = folder / name, (folder / name).read_bytes()
        for _ in range(flips if name != RECORD else 0):
            at = drawn.randrange(8 * len(content))
            flipped = bytearray(content)
            flipped[at // 8] ^= 1 << at % 8
            file.write_bytes(flipped)
            look(name, f"bit {at} flipped")
        for what, other in (("emptied", b""), ("cut", content[:-1]), ("longer", content + b"\n")):
            if name != RECORD or what == "emptied":
                file.write_bytes(other)
                look(name, what)
        file.unlink()
        look(name, "removed")
        file.write_bytes(content)
    for name in ADDED:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"import os\n")
        look(name, "added")
        (folder / name).unlink()
    assert all(check.ok for check in verify_folder(folder, publisher.load))
    fuzzed("published policy tampered with", cases=len(missed))
    assert {case: found for case, found in missed.items() if found} == {}


USE = """
import json, re, sys, torch
from huggingface_hub import ModelCard, hf_hub_download
from transformers import AutoModel, AutoModelForCausalLM
repo, result = sys.argv[1:]
torch.manual_seed(0)
shown = {}
for block in re.findall(r"```python\\n(.*?)```", ModelCard.load(repo).text, re.DOTALL):
    exec(block.replace("max_new_tokens=4096", "max_new_tokens=300"), shown)
probes = json.load(open(hf_hub_download(repo, "probes.json")))["probes"]
out = {"stop": shown["model"].last_stop[0].reason, "base_stop": shown["base"].last_stop[0].reason}
for auto in (AutoModel, AutoModelForCausalLM):
    model = auto.from_pretrained(repo, trust_remote_code=True)
    assert "transformers_modules" in type(model).__module__, type(model).__module__
    ends = [model.token_format.step_ends(one["trace_ids"]) for one in probes]
    out[auto.__name__] = [len(one) for one in ends]
model.save_pretrained(f"{result}-again")
assert "modeling_ospruner" not in sys.modules
open(result, "w").write(json.dumps(out))
"""


@pytest.fixture(scope="module")
def published(hub: LocalHub, base_repo: Repo, policy_dir: Path, run: Run) -> Repo:
    """`org/shared`, published by the command."""
    revision = f"--base-revision {base_repo.head.oid}"
    said = run(f"ospruner publish {policy_dir} org/shared --base org/base {revision}")
    assert "model.safetensors" in said
    assert f"Published {hub.url}/org/shared at commit" in said
    return hub.repos["model", "org/shared"]


def test_a_stranger_uses_it_by_its_card(
    hub: LocalHub, published: Repo, stranger: Stranger, tmp_path: Path
) -> None:
    """Both Auto classes, generate and custom_generate, on the base's commit that is pinned."""
    later = dict(hub.repos["model", "org/base"].head.files)
    later["model.safetensors"] = File(b"the base's branch has moved on", True)
    hub.repos["model", "org/base"].commit(later)
    result = tmp_path / "result.json"
    stranger(USE, "org/shared", str(result))
    found = json.loads(result.read_text())
    again = {path.name for path in (tmp_path / "result.json-again").iterdir()}
    assert again >= {*FLAT_FILES, "model.safetensors"}, "saved by the repository's own code"
    stored = json.loads(published.head.files["probes.json"].content)["probes"]
    for auto in ("AutoModel", "AutoModelForCausalLM"):
        assert found[auto] == [len(one["stop_probabilities"]) for one in stored]
    assert {found["stop"], found["base_stop"]} <= {"policy", "natural"}


def test_verify_accepts_it_and_finds_changes(hub: LocalHub, published: Repo, run: Run) -> None:
    assert run("ospruner verify org/shared").count(" ok ") == 4
    evil = hub.repos["model", "org/evil"] = Repo("model", "org/evil")
    files = dict(published.head.files)
    code = files["policy_ospruner.py"].content + b"\nraise SystemExit('the code was run')\n"
    files["policy_ospruner.py"] = File(code, False)
    evil.commit(files)
    said = run("ospruner verify org/evil", status=1)
    for found in ("differs", "was changed"):
        assert f"policy_ospruner.py {found}" in said
    assert "the code was run" not in said
    with pytest.raises(ValueError, match="org/nowhere, which is no folder here, is not on the Hub"):
        run("ospruner verify org/nowhere")
