"""A published policy in other hands: fresh processes, empty caches, our package not importable."""

import json
import socket
from pathlib import Path

import pytest
from huggingface_hub import HfApi

from modeling_ospruner.modeling_ospruner import FLAT_FILES
from ospruner.hub_cards.verify import fetch

from .conftest import Run, Stranger
from .local_hub import File, LocalHub, Repo

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
    """`org/policy`, published by the command."""
    revision = f"--base-revision {base_repo.head.oid}"
    said = run(f"ospruner publish {policy_dir} org/policy --base org/base {revision}")
    assert "model.safetensors" in said
    assert f"Published {hub.url}/org/policy at commit" in said
    return hub.repos["model", "org/policy"]


def test_a_stranger_uses_it_by_its_card(
    hub: LocalHub, published: Repo, stranger: Stranger, tmp_path: Path
) -> None:
    """Both Auto classes, generate and custom_generate, on the base's commit that is pinned."""
    later = dict(hub.repos["model", "org/base"].head.files)
    later["model.safetensors"] = File(b"the base's branch has moved on", True)
    hub.repos["model", "org/base"].commit("another base", later)
    result = tmp_path / "result.json"
    stranger(USE, "org/policy", str(result))
    found = json.loads(result.read_text())
    again = {path.name for path in (tmp_path / "result.json-again").iterdir()}
    assert again >= {*FLAT_FILES, "model.safetensors"}, "saved by the repository's own code"
    stored = json.loads(published.head.files["probes.json"].content)["probes"]
    for auto in ("AutoModel", "AutoModelForCausalLM"):
        assert found[auto] == [len(one["stop_probabilities"]) for one in stored]
    assert {found["stop"], found["base_stop"]} <= {"policy", "natural"}


def test_verify_accepts_it_and_finds_what_was_changed(
    hub: LocalHub, published: Repo, run: Run
) -> None:
    assert run("ospruner verify org/policy").count(" ok ") == 4
    evil = hub.repos["model", "org/evil"] = Repo("model", "org/evil")
    files = dict(published.head.files)
    code = files["policy_ospruner.py"].content + b"\nraise SystemExit('the code was run')\n"
    files["policy_ospruner.py"] = File(code, False)
    evil.commit("x", files)
    said = run("ospruner verify org/evil", status=1)
    assert "policy_ospruner.py differs" in said
    assert "policy_ospruner.py was changed" in said
    assert "the code was run" not in said
    with pytest.raises(ValueError, match="org/nowhere, which is no folder here, is not on the Hub"):
        run("ospruner verify org/nowhere")


def test_verify_says_when_the_hub_cannot_be_reached(api: HfApi) -> None:
    with socket.socket() as bound:  # bound, not listening: connections are refused
        bound.bind(("127.0.0.1", 0))
        gone = HfApi(f"http://127.0.0.1:{bound.getsockname()[1]}")
        with pytest.raises(ConnectionError, match="the Hub cannot be asked for org/policy, which"):
            fetch("org/policy", None, gone)
