"""The local Hub, one a test module, and fresh processes that use it."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
import torch
from huggingface_hub import HfApi, constants

from ospruner.demo import REASONER
from ospruner.demo.shipped import Reasoner
from ospruner.eval.results import Results, frame_of
from ospruner.provenance import provenance
from ospruner.train.untrained import untrained

from ..made_results import make_result
from .local_hub import TOKEN, LocalHub
from .repositories import Repo

WITHOUT_PACKAGE = """
import importlib.util, sys
sys.path.append(sys.argv.pop(1))
for name in ("modeling_ospruner", "ospruner"):
    assert importlib.util.find_spec(name) is None, name
"""


@pytest.fixture(scope="module")
def hub() -> Iterator[LocalHub]:
    """A Hub on 127.0.0.1, empty at the module's start."""
    with LocalHub() as server:
        yield server


@pytest.fixture(scope="module")
def base_repo(hub: LocalHub) -> Repo:
    """The embedded reasoner as `org/base` on the Hub."""
    return hub.add("model", "org/base", REASONER)


@pytest.fixture
def api(hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HfApi:
    """The real client, in this process; what it retries, it retries without waiting."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    return HfApi(hub.url, TOKEN)


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
    provenance(
        folder,
        seed=0,
        base_model=str(REASONER),
        data_hash="00ff",
        details={"labels": str(folder.parent / "labels"), "settings": {"learning_rate": 1e-5}},
    )
    RESULTS.save(folder / "results.json")
    (folder / "pareto.png").write_bytes(b"\x89PNG\r\n\x1a\n picture")
    return folder


RESULTS = Results(
    dataset="embedded reasoner, test",
    setting="made up",
    frame=frame_of(
        [
            make_result("full trace", 0.72, 205),
            make_result("OS-Pruner", 0.712, 107, 5e-5, "λ", chosen=True),
        ]
    ),
    about={"labels": f"{REASONER}/labels"},
)


class Stranger(Protocol):
    """Runs Python code in another user's process; returns what it did."""

    def __call__(
        self, code: str, *arguments: str, home: Path | None = None, token: str | None = TOKEN
    ) -> subprocess.CompletedProcess[str]: ...


@pytest.fixture
def stranger(hub: LocalHub, tmp_path: Path) -> Stranger:
    """A fresh process with an empty cache, in which our package is not importable.

    -S skips the .pth files that make the editable install importable, -I the current folder.
    """

    def run(
        code: str, *arguments: str, home: Path | None = None, token: str | None = TOKEN
    ) -> subprocess.CompletedProcess[str]:
        packages = sysconfig.get_paths()["purelib"]
        return subprocess.run(
            [sys.executable, "-I", "-S", "-c", WITHOUT_PACKAGE + code, packages, *arguments],
            env={
                "PATH": "/usr/bin:/bin",
                "OMP_NUM_THREADS": "1",
                **hub.environment(home or tmp_path / "hf-home", token),
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
        )

    return run
