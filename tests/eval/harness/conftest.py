"""A policy of the embedded reasoner, and a task's data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modeling_ospruner import OSPrunerForCausalLM
from ospruner.demo.shipped import Reasoner, draw_split
from ospruner.eval.problems.problem import user_message

from ...serving.vllm.plugin_replay import make_policy

COUNT = 4


@pytest.fixture(scope="session")
def policy(
    reasoner: Reasoner, tmp_path_factory: pytest.TempPathFactory
) -> tuple[OSPrunerForCausalLM, Path]:
    folder = tmp_path_factory.mktemp("policy")
    return make_policy(reasoner, folder), folder


@pytest.fixture(scope="session")
def rows(reasoner: Reasoner) -> list[dict[str, str]]:
    """Test problems as their users would ask them, with the answers."""
    fmt = reasoner.token_format.format
    return [
        {"problem": user_message(one, fmt), "answer": str(one.answer)}
        for one in draw_split("test", COUNT, 0)
    ]


@pytest.fixture(scope="session")
def tasks(rows: list[dict[str, str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a task of lm_eval on these problems."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    text = Path(__file__).with_name("sums.yaml").read_text("utf-8")
    (folder / "sums.yaml").write_text(text.replace("{data_file}", json.dumps(str(data))), "utf-8")
    return folder
