"""The policy card: its metadata, its snippet and its numbers come from the folder."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from ospruner.eval.results import Results
from ospruner.hub_cards.render import EXAMPLE, policy_card, write_policy_card
from ospruner.provenance import provenance

from ..made_results import make_result

CONFIG: dict[str, Any] = {
    "model_type": "ospruner",
    "base_model_name_or_path": "org/base-7b",
    "base_revision": "abc123",
    "num_policy_layers": 2,
    "tuning": "layers",
    "method": "os-pruner",
    "head": "fixed",
    "price": 5e-05,
    "default_mode": "sample",
    "default_threshold": 0.5,
    "reasoning_format": {"user_instruction": "Put it within \\boxed{}."},
}
RESULTS = Results(
    dataset="MATH-500",
    setting="`ospruner eval replay`, one training seed",
    results=[make_result("full trace", 0.774, 3214), make_result("P(stop|h)", 0.77, 1900)],
    limits=[make_result("hindsight oracle", 0.8, 1500)],
)


@pytest.fixture
def policy_dir(tmp_path: Path) -> Path:
    save_config(tmp_path)
    provenance(tmp_path, seed=3, base_model="org/base-7b", data_hash="00ff")
    return tmp_path


def save_config(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))


ASKED = "\n\nPut it within \\boxed{}."  # the configuration's instruction


def test_metadata_is_what_the_hub_reads(policy_dir: Path) -> None:
    path = write_policy_card(policy_dir, name="org/policy", license="mit", results=RESULTS)
    assert path == policy_dir / "README.md"
    data = ModelCard.load(path).data.to_dict()
    assert {key: data[key] for key in data if key != "tags"} == {
        "license": "mit",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": "org/base-7b",
        "base_model_relation": "adapter",
        "widget": [{"messages": [{"role": "user", "content": EXAMPLE + ASKED}]}],
    }
    assert "ospruner" in data["tags"]


@pytest.mark.parametrize("instruction", ["Put it within \\boxed{}.", 'Say "it".\nBoxed.', ""])
def test_snippet_is_python_and_asks_as_labelling_did(policy_dir: Path, instruction: str) -> None:
    save_config(policy_dir, reasoning_format={"user_instruction": instruction})
    text = policy_card(policy_dir, name="org/policy", license="mit").text
    (snippet,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    tree = ast.parse(snippet)
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert "org/policy" in strings
    assert (f"\n\n{instruction}" in strings) == bool(instruction)
    assert "stop_policy=True" in snippet


def test_results_stand_with_their_setting_and_intervals(policy_dir: Path) -> None:
    text = policy_card(policy_dir, name="org/policy", license="mit", results=RESULTS).text
    assert f"MATH-500: {RESULTS.setting}; 1,500 traces of 1,500 problems" in text
    assert "Brackets are 95 % intervals by problem; AES absolute, α=1, β=3, γ=5." in text
    assert "| full trace | 77.4 [75.4, 79.4] | 3,214 [3,209, 3,219] |" in text
    assert "| P(stop\\|h) | 77.0 [75.0, 79.0] | 1,900 [1,895, 1,905] |" in text
    assert "| hindsight oracle | 80.0" in text
    assert "None were recorded" not in text


def test_results_of_the_folder_are_read_again(policy_dir: Path) -> None:
    """As when a policy is published under another name."""
    chosen = replace(RESULTS, chosen=1)
    first = write_policy_card(policy_dir, name="a", license="mit", results=chosen)
    shown = ModelCard.load(first)
    again = policy_card(policy_dir, name="org/b", license="mit")
    table = next(line for line in shown.text.splitlines() if "**P(stop\\|h)**" in line)
    assert table in again.text
    (entry,) = again.data.to_dict()["model-index"]
    assert entry["name"] == "b"
    assert [m["type"] for one in entry["results"] for m in one["metrics"]] == [
        *("accuracy", "thinking_tokens", "reduction", "aes")
    ]
    (policy_dir / "results.json").write_text('{"caption": "old"}')
    with pytest.raises(ValueError, match="results.json has format None and version None"):
        policy_card(policy_dir, name="org/b", license="mit")


def test_card_without_results_says_so(policy_dir: Path) -> None:
    assert "None were recorded" in policy_card(policy_dir, name="org/policy", license="mit").text


def test_facts_of_the_making_are_shown(policy_dir: Path) -> None:
    text = policy_card(policy_dir, name="org/policy", license="mit").text
    assert "revision `abc123`" in text
    assert "| price λ | 5e-05 per token |" in text
    assert "| policy layers | 2 (layers) |" in text
    assert "| decides by | sample |" in text
    assert "| seed | 3 |" in text
    assert "`00ff`" in text
    assert "a tail of 2 layers" in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in tables} == {3}, "no blank line or bar breaks the table"


@pytest.mark.parametrize(
    ("changes", "shown", "absent"),
    [
        ({"method": "probe", "default_mode": "threshold"}, "threshold at 0.5", "λ"),
        ({"method": "convergence"}, "answer-convergence", "price λ"),
        ({"num_policy_layers": 0}, "holds a linear head", "a tail of"),
        ({"base_revision": None}, "| base | `org/base-7b` |", "revision"),
    ],
)
def test_card_follows_the_config(
    policy_dir: Path, changes: dict[str, Any], shown: str, absent: str
) -> None:
    save_config(policy_dir, **changes)
    text = policy_card(policy_dir, name="org/policy", license="mit").text
    assert shown in text
    assert absent not in text


def test_local_base_is_named_without_its_path(policy_dir: Path) -> None:
    base = policy_dir / "secret" / "reasoner"
    base.mkdir(parents=True)
    save_config(policy_dir, base_model_name_or_path=str(base))
    card = policy_card(policy_dir, name="org/policy", license="mit")
    assert "secret" not in card.content
    assert "`reasoner`" in card.text
    assert "local folder" in card.text
    assert "base_model" not in card.data.to_dict()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model_type": "qwen2"}, "model_type='qwen2' must be 'ospruner'"),
        ({"method": "magic"}, "method='magic' must be one of"),
    ],
)
def test_wrong_config_is_refused(policy_dir: Path, changes: dict[str, Any], complaint: str) -> None:
    save_config(policy_dir, **changes)
    with pytest.raises(ValueError, match=complaint):
        policy_card(policy_dir, name="org/policy", license="mit")


def test_incomplete_folders_are_refused(policy_dir: Path) -> None:
    (policy_dir / "config.json").write_text(json.dumps({"model_type": "ospruner"}))
    with pytest.raises(ValueError, match="lacks .*reasoning_format"):
        policy_card(policy_dir, name="org/policy", license="mit")
    save_config(policy_dir)
    (policy_dir / "provenance.json").unlink()
    with pytest.raises(ValueError, match="no provenance"):
        policy_card(policy_dir, name="org/policy", license="mit")
    (policy_dir / "config.json").unlink()
    with pytest.raises(ValueError, match=r"no config\.json"):
        write_policy_card(policy_dir, name="org/policy", license="mit")
    assert not (policy_dir / "README.md").exists()
