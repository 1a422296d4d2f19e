"""The local Hub, one a test module, this process on it, and fresh processes that use it."""

import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi, constants
from typer.testing import CliRunner

from modeling_ospruner import OSPrunerForCausalLM
from ospruner.cli import app, commands
from ospruner.demo import REASONER
from ospruner.demo.shipped import Reasoner
from ospruner.eval.results import Results, frame_of
from ospruner.hub_cards.publish import Release, send, stage
from ospruner.hub_cards.staging import Published
from ospruner.provenance import provenance
from ospruner.train.untrained import untrained

from ..made_results import make_result
from ..own_process import output_of
from .local_hub import TOKEN, LocalHub, Repo

WITHOUT_PACKAGE = """
import importlib.util, sys
sys.path.append(sys.argv.pop(1))
for name in ("modeling_ospruner", "ospruner"):
    assert importlib.util.find_spec(name) is None, name
"""
Run = Callable[..., str]
Stranger = Callable[..., None]


@pytest.fixture(scope="module")
def hub() -> Iterator[LocalHub]:
    """A Hub on 127.0.0.1, empty at the module's start."""
    with LocalHub() as server:
        yield server


@pytest.fixture(scope="module")
def base_repo(hub: LocalHub) -> Repo:
    """The embedded reasoner as `org/base` on the Hub."""
    return hub.add("model", "org/base", REASONER)


@pytest.fixture(scope="module")
def api(hub: LocalHub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HfApi]:
    """The real client; all of this process takes the local Hub for the Hub, and never waits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr(constants, "HF_HUB_CACHE", str(tmp_path_factory.mktemp("hub-cache")))
        patch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
        patch.setenv("HF_TOKEN", TOKEN)
        yield HfApi(hub.url, TOKEN)


@pytest.fixture(scope="module")
def run(api: HfApi) -> Iterator[Run]:
    """Runs a command line in this process, on a wide terminal; returns what it prints."""

    def invoke(line: str, status: int = 0) -> str:
        program, *arguments = shlex.split(line, comments=True)
        assert program == "ospruner"
        done = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert done.exit_code == status, f"{line}\n{done.output}"
        assert TOKEN not in done.output
        return done.output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commands.console, "width", 200)
        yield invoke


@pytest.fixture(scope="session")
def policy_dir(reasoner: Reasoner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy as training leaves it, on a local base: weights, record, card, picture, and more."""
    folder = tmp_path_factory.mktemp("run") / "policy"
    model = untrained(reasoner.model, reasoner.tokenizer, init_bias=-1.0, tuning="layers")
    model.config.price = 5e-5
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        model.policy.head.weight.copy_(torch.randn(128, generator=generator)[None] * 0.1)
    model.save_pretrained(folder)
    details = {"labels": str(folder.parent / "labels"), "settings": {"learning_rate": 1e-5}}
    made: dict[str, Any] = {"base_model": str(REASONER), "data_hash": "00ff", "details": details}
    provenance(folder, seed=0, **made)
    RESULTS.save(folder / "results.json")
    (folder / "pareto.png").write_bytes(b"\x89PNG\r\n\x1a\n picture")
    return folder


ROWS = [
    make_result("full trace", 0.72, 205),
    make_result("OS-Pruner", 0.712, 107, 5e-5, "price", chosen=True),
]
RESULTS = Results(
    dataset="embedded reasoner, test",
    setting="made up",
    frame=frame_of(ROWS),
    about={"labels": f"{REASONER}/labels"},
)


class Publisher:
    """Stages and sends in this process, with the base that is loaded already."""

    def __init__(
        self, hub: LocalHub, api: HfApi, reasoner: Reasoner, base: Repo, tmp_path: Path
    ) -> None:
        self.hub, self.api, self.reasoner, self.base = hub, api, reasoner, base
        self.tmp_path, self.count = tmp_path, 0

    def load(self, folder: Path) -> OSPrunerForCausalLM:
        return OSPrunerForCausalLM.from_base(self.reasoner.model, folder)

    def stage(self, folder: Path, repo: str, **release: Any) -> Published:
        self.count += 1
        release = {"base": "org/base", "base_revision": self.base.head.oid, **release}
        out = self.tmp_path / f"staged-{self.count}"
        return stage(folder, out, Release(repo, **release), self.api, self.load)

    def publish(self, folder: Path, repo: str, private: bool = False, **release: Any) -> Published:
        return send(self.stage(folder, repo, **release), repo, private, self.api)


@pytest.fixture
def publisher(
    hub: LocalHub, api: HfApi, reasoner: Reasoner, base_repo: Repo, tmp_path: Path
) -> Publisher:
    return Publisher(hub, api, reasoner, base_repo, tmp_path)


@pytest.fixture
def stranger(hub: LocalHub, tmp_path: Path) -> Stranger:
    """Runs code in another user's process, with an empty cache, our package not importable.

    -S skips the .pth files that make the editable install importable, -I the current folder.
    """

    def use(code: str, *arguments: str) -> None:
        packages = sysconfig.get_paths()["purelib"]
        command = [sys.executable, "-I", "-S", "-c", WITHOUT_PACKAGE + code, packages, *arguments]
        env = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HF_ENDPOINT": hub.url}
        env |= {"HF_HOME": str(tmp_path), "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
        printed = output_of(*command, env=env, stdin=subprocess.DEVNULL, timeout=900)
        assert "Do you wish to run the custom code?" not in printed, "the code asks"

    return use
