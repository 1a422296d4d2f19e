"""What published things are called."""

from __future__ import annotations

import pytest

from ospruner.hub_cards.names import check_repo_id, collection_title, labels_name, policy_name
from ospruner.provenance import without_paths

R1 = "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"


@pytest.mark.parametrize(
    ("base", "method", "penalty", "name"),
    [
        (R1, "os-pruner", 5e-5, "ospruner-r1-7b-lam5e-5"),
        (R1, "os-pruner", 0.0, "ospruner-r1-7b-lam0"),
        (R1, "os-pruner", None, "ospruner-r1-7b"),
        (R1, "probe", 0.0, "ospruner-r1-7b-probe"),
        (
            "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
            "os-pruner",
            2.5e-5,
            "ospruner-r1-llama-8b-lam2.5e-5",
        ),
        ("openai/gpt-oss-20b", "os-pruner", 1e-4, "ospruner-gpt-oss-20b-lam1e-4"),
        ("Qwen/Qwen3-30B-A3B", "convergence", 0.0, "ospruner-qwen3-30b-a3b-convergence"),
    ],
)
def test_scheme(base: str, method: str, penalty: float | None, name: str) -> None:
    assert policy_name(base, method, penalty) == name
    assert check_repo_id("org/", name) == f"org/{name}"
    assert check_repo_id("org/mine", name) == "org/mine"


def test_a_family_has_one_name() -> None:
    assert labels_name(R1) == "ospruner-labels-r1-7b"
    assert collection_title(R1) == "OS-Pruner r1-7b"


@pytest.mark.parametrize(
    ("text", "published"),
    [
        ("ospruner demo --out /a/b/run", "ospruner demo --out run"),
        ("--out=/a/run --seed 1", "--out=run --seed 1"),
        ("--out '/a b/c d'", "--out 'c d'"),
        ("https://example.org/a/b", "https://example.org/a/b"),
        ("runs/labels and 1/2", "runs/labels and 1/2"),
        ("/a/b/", "b"),
    ],
)
def test_paths_of_a_machine_are_cut(text: str, published: str) -> None:
    assert without_paths(text) == published
