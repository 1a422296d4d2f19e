"""A published policy in other hands: fresh processes, empty caches, our package not importable."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import HfApi

from ospruner.hub_cards.verify import fetch

from .conftest import Stranger
from .local_hub import TOKEN, LocalHub
from .repositories import File, Repo

Command = Callable[..., subprocess.CompletedProcess[str]]

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
assert "modeling_ospruner" not in sys.modules
open(result, "w").write(json.dumps(out))
"""

FAIL = """
import json, sys
from transformers import AutoModelForCausalLM
attempts, result = json.loads(sys.argv[1]), sys.argv[2]
said = {}
for name, (repo, revision) in attempts.items():
    try:
        AutoModelForCausalLM.from_pretrained(repo, revision=revision, trust_remote_code=True)
        said[name] = "it loaded"
    except Exception as error:
        said[name] = f"{type(error).__name__}: {error}"
open(result, "w").write(json.dumps(said))
"""


@pytest.fixture(scope="module")
def command(hub: LocalHub, tmp_path_factory: pytest.TempPathFactory) -> Command:
    """The command `ospruner`, in a process that takes the local Hub for the Hub."""
    home = tmp_path_factory.mktemp("publisher")

    def run(*arguments: str | Path, token: bool = True) -> subprocess.CompletedProcess[str]:
        offline = {"HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN"}
        inherited = {name: value for name, value in os.environ.items() if name not in offline}
        variables = hub.environment(home, **({} if token else {"token": None}))
        done = subprocess.run(
            [sys.executable, "-m", "ospruner.cli", *map(str, arguments)],
            env={**inherited, **variables, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
            cwd=home,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
        )
        assert TOKEN not in done.stdout + done.stderr
        return done

    return run


@pytest.fixture(scope="module")
def published(hub: LocalHub, base_repo: Repo, policy_dir: Path, command: Command) -> Repo:
    """`org/policy`, published by the command."""
    done = command(
        *("publish", policy_dir, "org/policy", "--base", "org/base"),
        *("--base-revision", base_repo.head.oid),
    )
    assert done.returncode == 0, done.stderr
    assert "model.safetensors" in done.stdout
    assert f"Published {hub.url}/org/policy at commit" in done.stdout
    return hub.repos["model", "org/policy"]


def test_a_stranger_uses_it_by_its_card(
    hub: LocalHub, published: Repo, stranger: Stranger, tmp_path: Path
) -> None:
    """Both Auto classes, generate and custom_generate, though the download breaks off once."""
    later = dict(hub.repos["model", "org/base"].head.files)
    later["model.safetensors"] = File(b"the base's branch has moved on", True)
    hub.repos["model", "org/base"].commit("another base", later)
    hub.cut("GET", "org/policy/resolve/.*/model.safetensors", after_bytes=300_000)
    hub.requests.clear()
    result = tmp_path / "result.json"
    done = stranger(USE, "org/policy", str(result))
    assert done.returncode == 0, done.stderr
    assert "Do you wish to run the custom code?" not in done.stdout, "the card's code asks"
    found = json.loads(result.read_text())
    stored = json.loads(published.head.files["probes.json"].content)["probes"]
    for auto in ("AutoModel", "AutoModelForCausalLM"):
        for one, said in zip(stored, found[auto], strict=True):
            assert said == len(one["stop_probabilities"])
    assert {found["stop"], found["base_stop"]} <= {"policy", "natural"}
    asked = [line for line in hub.requests if "policy/resolve" in line and "GET" in line]
    assert sum(line.endswith("model.safetensors") for line in asked) == 2, "taken up again"


def test_what_cannot_be_loaded_is_said(
    hub: LocalHub, published: Repo, stranger: Stranger, tmp_path: Path
) -> None:
    whole = published.head.files["model.safetensors"].content
    for name, content in {"torn": whole[:-100_000], "scrambled": b"\xff" * 8 + whole[8:]}.items():
        copy = hub.repos["model", f"org/{name}"] = Repo("model", f"org/{name}")
        copy.commit("x", {**published.head.files, "model.safetensors": File(content, True)})
    closed = hub.repos["model", "org/closed"] = Repo("model", "org/closed", gated=True)
    closed.commit("x", published.head.files)
    result = tmp_path / "said.json"
    attempts = {
        "missing": ("org/nowhere", "main"),
        "gated": ("org/closed", "main"),
        "revision": ("org/policy", "v9"),
        "torn": ("org/torn", "main"),
        "scrambled": ("org/scrambled", "main"),
    }
    done = stranger(FAIL, json.dumps(attempts), str(result), token=None)
    assert done.returncode == 0, done.stderr
    said = json.loads(result.read_text())
    assert (
        "org/nowhere is not a local folder and is not a valid model identifier" in said["missing"]
    )
    assert "gated repo" in said["gated"]
    assert "v9 is not a valid git identifier" in said["revision"]
    for name in ("torn", "scrambled"):
        assert "safetensor" in said[name].lower(), said[name]


def test_verify_accepts_it_and_finds_what_was_changed(
    hub: LocalHub, published: Repo, command: Command, tmp_path: Path
) -> None:
    done = command("verify", "org/policy")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" ok ") == 4

    evil = hub.repos["model", "org/evil"] = Repo("model", "org/evil")
    files = dict(published.head.files)
    code = files["policy_ospruner.py"].content + b"\nprint('PWNED')\n"
    files["policy_ospruner.py"] = File(code, False)
    evil.commit("x", files)
    done = command("verify", "org/evil")
    assert done.returncode == 1
    assert "policy_ospruner.py differs" in done.stdout
    assert "policy_ospruner.py was changed" in done.stdout
    assert "PWNED" not in done.stdout + done.stderr, "the repository's code was run"

    done = command("verify", "org/nowhere")
    assert done.returncode == 1
    assert "Error: org/nowhere is no folder here, and not on the Hub" in " ".join(
        done.stderr.split()
    )


def test_dry_run_sends_nothing(
    hub: LocalHub, base_repo: Repo, policy_dir: Path, command: Command, tmp_path: Path
) -> None:
    hub.requests.clear()
    pinned = list(base_repo.commits)[1]
    arguments = ("org/dry", "--base", "org/base", "--base-revision", pinned, "--dry-run")
    out = tmp_path / "out"
    done = command("publish", policy_dir, *arguments, "--out", out, token=False)
    assert done.returncode == 0, done.stderr
    assert f"Nothing was sent. The folder: {out}" in done.stdout
    sizes = {path.name: path.stat().st_size for path in out.iterdir()}
    assert sizes["model.safetensors"] > 1_000_000
    assert "1.6 MB" in done.stdout
    assert hub.requests == []


def test_verify_says_when_the_hub_cannot_be_reached(api: HfApi) -> None:
    with socket.socket() as bound:  # bound, not listening: connections are refused
        bound.bind(("127.0.0.1", 0))
        api.endpoint = f"http://127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(ConnectionError, match="org/policy is no folder here, and the Hub"):
            fetch("org/policy", None, api)
