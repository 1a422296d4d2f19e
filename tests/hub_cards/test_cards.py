"""The policy card: its metadata, its snippet and its numbers come from the folder."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from modeling_ospruner import OSPrunerConfig
from ospruner.eval.results import Results, frame_of
from ospruner.formats import DEEPSEEK_R1
from ospruner.hub_cards.cards import EXAMPLE, policy_card
from ospruner.provenance import provenance

from ..made_results import make_result

ROWS = [
    make_result("full trace", 0.774, 3214),
    make_result("P(stop|h)", 0.77, 1900, chosen=True),
    make_result("hindsight oracle", 0.8, 1500, kind="limit"),
]
SETTING = "`ospruner compare`, one training seed"
RESULTS = Results(dataset="MATH-500", setting=SETTING, frame=frame_of(ROWS))
PROMISE = {
    **{"max_loss": 0.02, "confidence": 0.95, "mode": "threshold", "threshold": 0.7},
    **{"problems": 1500, "loss": 0.004, "tokens_saved": 0.35, "data_hash": "ab" * 32},
    **{"price": None, "traffic": None, "test": "exact"},
}


@pytest.fixture
def policy_dir(tmp_path: Path) -> Path:
    save_config(tmp_path)
    provenance(tmp_path, seed=3, base_model="org/base-7b", data_hash="00ff")
    return tmp_path


def save_config(folder: Path, instruction: str | None = None, **changes: Any) -> None:
    """A policy's configuration as saving leaves it, without weights."""
    said = {} if instruction is None else {"user_instruction": instruction}
    values: dict[str, Any] = {
        "text_config": {"model_type": "qwen2", "hidden_size": 32, "num_hidden_layers": 4},
        **{"base_model_name_or_path": "org/base-7b", "base_revision": "abc123", "price": 5e-05},
        **{"tuning": "layers", "reasoning_format": DEEPSEEK_R1.to_dict() | said},
    }
    OSPrunerConfig(**{**values, **changes}).save_pretrained(folder)


def shown(folder: Path) -> str:
    return policy_card(folder, name="org/policy", license={"license": "mit"}).text


def test_metadata_is_what_the_hub_reads(policy_dir: Path) -> None:
    data = policy_card(policy_dir, name="org/policy", license={"license": "mit"}).data.to_dict()
    asked = f"{EXAMPLE}\n\n{DEEPSEEK_R1.user_instruction}"
    assert {key: data[key] for key in data if key != "tags"} == {
        "license": "mit",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": "org/base-7b",
        "base_model_relation": "adapter",
        "widget": [{"messages": [{"role": "user", "content": asked}]}],
    }
    assert "ospruner" in data["tags"]


@pytest.mark.parametrize("instruction", ["Put it within \\boxed{}.", 'Say "it".\nBoxed.', ""])
def test_snippet_is_python_and_asks_as_labelling_did(policy_dir: Path, instruction: str) -> None:
    save_config(policy_dir, instruction)
    (snippet,) = re.findall(r"```python\n(.*?)```", shown(policy_dir), re.DOTALL)
    tree = ast.parse(snippet)
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert "org/policy" in strings
    assert (f"\n\n{instruction}" in strings) == bool(instruction)
    assert "stop_policy=True" in snippet


def test_results_stand_with_their_setting_and_intervals(policy_dir: Path) -> None:
    assert "None were recorded" in shown(policy_dir)
    RESULTS.save(policy_dir / "results.json")
    text = shown(policy_dir)
    for said in (
        f"MATH-500: {RESULTS.setting}; 1,500 traces of 1,500 problems",
        "Brackets are 95 % intervals by problem; AES absolute, α=1, β=3, γ=5.",
        "| full trace | 77.4 [75.4, 79.4] | 3,214 [3,209, 3,219] |",
        "| **P(stop\\|h)** | 77.0 [75.0, 79.0] | 1,900 [1,895, 1,905] |",
        "| hindsight oracle | 80.0",
    ):
        assert said in text
    assert "None were recorded" not in text


def test_the_stored_size_and_a_warning_are_told(policy_dir: Path) -> None:
    provenance(policy_dir, seed=0, details={"warning": "always stops at the first step"})
    for stored, told in ((4_856_504, "4.9 MB"), (37_080, "37 kB")):
        (policy_dir / "model.safetensors").write_bytes(bytes(stored))
        text = shown(policy_dir)
        assert f"a linear head, {told} in all" in text
    assert "**Warning.** This policy always stops at the first step." in text


EVERY: dict[str, Any] = {"head": "price", "price_range": [5e-5, 1e-2], "price": 2e-4}


@pytest.mark.parametrize(
    ("changes", "shown_too", "absent"),
    [
        (
            {},
            [
                *("revision `abc123`", "| price of a token | 5e-05 |", "| seed | 3 |", "`00ff`"),
                *("| policy layers | 2 (layers) |", "| decides by | sample |", "of 2 layers"),
            ],
            ["**Warning.**", "## Promise"],
        ),
        ({"method": "probe", "default_mode": "threshold"}, ["threshold at 0.5"], ["price of a"]),
        ({"method": "convergence"}, ["answer-convergence"], ["price of a"]),
        ({"num_policy_layers": 0}, ["holds a linear head"], ["a tail of"]),
        ({"adapter_rank": 16}, ["holds adapters of rank 16 for a tail of 2 layers and a"], []),
        ({"base_revision": None}, ["| base | `org/base-7b` |"], ["revision"]),
        (
            {"base_model_name_or_path": "/nowhere/secret/reasoner"},
            ["`reasoner`", "local folder", "was not known when this was published"],
            ["secret", "base_model:"],
        ),
        (
            {"calibrations": [PROMISE]},
            [
                "| accuracy lost at most | confidence | mode | threshold |",
                "| 2.0 points | 0.95 | threshold | 0.700 | 1500 | 0.40 points | 35.0 % |",
            ],
            [],
        ),
        (
            {"calibrations": [{**PROMISE, "price": 2e-4, "threshold": 0.5}], **EVERY},
            [
                *("This one policy is the whole trade-off", 'stop_policy={"price": 5e-05}'),
                "| prices of a token | 0, and 5e-05 to 0.01; default 0.0002 |",
                "| 2.0 points | 0.95 | threshold | 0.0002 | 1500 |",
            ],
            [],
        ),
        (
            {"calibrations": [{**PROMISE, "price": 0.0}], **EVERY},
            ["| threshold | 0, from probability 0.7 on | 1500 |"],
            [],
        ),
    ],
)
def test_card_follows_the_config(
    policy_dir: Path, changes: dict[str, Any], shown_too: list[str], absent: list[str]
) -> None:
    save_config(policy_dir, **changes)
    local = "base_model_name_or_path" in changes
    license = {} if local else {"license": "mit"}
    text = policy_card(policy_dir, name="org/policy", license=license).content
    assert [one for one in shown_too if one not in text] == []
    assert [one for one in absent if one in text] == []
    if not changes:
        tables = [line for line in text.splitlines() if line.startswith("|")]
        assert {line.count("|") for line in tables} == {3}, "no blank line or bar breaks the table"
