"""`ospruner publish space`: staged, sent, idempotent, and its code runs without this package."""

from __future__ import annotations

import ast
import io
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from huggingface_hub import HfApi, SpaceCard
from rich.console import Console

from ospruner.hub_cards import commands
from ospruner.hub_cards.spaces import SPACE_CODE, SpaceRelease, send_space, stage_space

from .conftest import Stranger
from .local_hub import LocalHub
from .repositories import Repo


@pytest.fixture(scope="module")
def policy_repo(hub: LocalHub, base_repo: Repo, policy_dir: Path) -> Repo:
    """The policy of `policy_dir` as `org/policy` on the Hub, on `org/base`."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "policy"
        shutil.copytree(policy_dir, copy)
        config = json.loads((copy / "config.json").read_text())
        config |= {"base_model_name_or_path": base_repo.id, "base_revision": base_repo.head.oid}
        (copy / "config.json").write_text(json.dumps(config))
        return hub.add("model", "org/policy", copy)


def test_a_space_is_published_in_one_commit(
    hub: LocalHub, policy_repo: Repo, api: HfApi, tmp_path: Path
) -> None:
    release = SpaceRelease("org/", "org/policy", hardware="a10g-small")
    repo_id, staged = stage_space(tmp_path / "space", release, api)
    assert repo_id == "org/policy"
    done, _ = send_space(staged, repo_id, private=False, collection=None, api=api)
    space = hub.repos["space", "org/policy"]
    assert set(space.head.files) - {".gitattributes"} == {
        "app.py", "requirements.txt", "README.md", "provenance.json",
        *(f"modeling_ospruner/{name}" for name in SPACE_CODE),
    }  # fmt: skip
    assert "POST /api/validate-yaml" in hub.requests  # huggingface_hub asks before it commits
    assert done.changed
    again, _ = send_space(staged, repo_id, private=False, collection=None, api=api)
    assert not again.changed
    assert "/spaces/org/policy" in done.url
    assert policy_repo.head.oid in space.head.files["app.py"].content.decode()
    card = SpaceCard(space.head.files["README.md"].content.decode())
    data = card.data.to_dict()
    assert (data["sdk"], data["app_file"]) == ("gradio", "app.py")
    assert data["models"] == ["org/policy", "org/base"]
    assert data["suggested_hardware"] == "a10g-small"
    assert len(data["short_description"]) <= 60  # the Hub's limit
    requirements = space.head.files["requirements.txt"].content.decode()
    assert all("==" in line and "+" not in line for line in requirements.split())
    assert "gradio" not in requirements  # the card's sdk_version says which


def test_a_dry_run_writes_the_folder_and_sends_nothing(
    hub: LocalHub, policy_repo: Repo, api: HfApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "HfApi", lambda: api)
    printed = io.StringIO()
    sending = commands.Sending(dry_run=True, out=tmp_path / "dry")
    before = list(hub.repos)
    release = SpaceRelease("org/elsewhere", "org/policy")
    commands.publish_space(release, sending, Console(file=printed, width=200))
    assert list(hub.repos) == before
    assert (tmp_path / "dry" / "app.py").is_file()
    assert "Nothing was sent" in printed.getvalue()
    assert "two CPU cores" in printed.getvalue()


@pytest.mark.parametrize(
    ("policy", "revision", "complaint"),
    [
        ("org/nothing", None, r"no policy on the Hub.*publish it first"),
        ("org/base", None, "must be 'ospruner'"),
        ("org/policy", "v9", "has no revision 'v9'"),
        ("policy", None, "must name the owner"),
    ],
)
def test_what_is_no_published_policy_is_refused(
    policy_repo: Repo, api: HfApi, tmp_path: Path, policy: str, revision: str | None,
    complaint: str,
) -> None:  # fmt: skip
    with pytest.raises(ValueError, match=complaint):
        stage_space(tmp_path / "space", SpaceRelease("org/x", policy, revision), api)


def test_a_folder_is_refused(api: HfApi, policy_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a folder of this machine.*publish it first"):
        stage_space(tmp_path / "space", SpaceRelease("org/x", str(policy_dir)), api)


def test_the_staged_code_imports_nothing_that_stays_behind(repo_dir: Path) -> None:
    """Every import of our own in the Space's files, outside of functions, is one of its files."""
    known = {f"modeling_ospruner/{name}" for name in SPACE_CODE}
    for name in known:
        if not name.endswith(".py"):
            continue
        package = name.removesuffix(".py").split("/")[:-1]
        for node in ast.parse((repo_dir / name).read_text()).body:
            if not isinstance(node, ast.ImportFrom):
                continue
            module = (node.module or "").split(".")
            if node.level:
                module = package[: len(package) - node.level + 1] + module
            if module[0] == "modeling_ospruner":
                path = "/".join(module)
                assert {f"{path}.py", f"{path}/__init__.py"} & known, (name, path)


ASKS = """
sys.path.insert(0, sys.argv[1])
from ospruner.app.page import open_source, question_of
import modeling_ospruner
assert modeling_ospruner.__file__.startswith(sys.argv[1])
said = open(sys.argv[1] + "/app.py").read()
import re
policy, revision = re.search(r"open_source\\('([^']*)', revision='([^']*)'\\)", said).groups()
source = open_source(policy, revision=revision)
question = question_of("Solve 3x+54=102 for x.", "sample", 0.5, "", "", 0.6, "0", 200)
plain, pruned = list(source.ask(question))[-1]
print(source.policy, source.base, plain.tokens, pruned.tokens, pruned.answer)
"""


def test_the_space_answers_where_this_package_is_not_installed(
    hub: LocalHub, policy_repo: Repo, api: HfApi, tmp_path: Path, stranger: Stranger
) -> None:
    _, staged = stage_space(tmp_path / "space", SpaceRelease("org/", "org/policy"), api)
    done: subprocess.CompletedProcess[str] = stranger(ASKS, str(staged.path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("org/policy org/base ")
    assert "\\boxed{" in done.stdout
