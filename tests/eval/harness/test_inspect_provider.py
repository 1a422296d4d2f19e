"""Inspect runs a policy as a model provider."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from modeling_ospruner import OSPrunerForCausalLM

from .conftest import COUNT, ChatServer

pytest.importorskip(
    "inspect_ai", reason="inspect_ai is not installed: pip install 'ospruner[inspect]'"
)

Policy = tuple[OSPrunerForCausalLM, Path]


def evaluate(
    data_file: Path, log_dir: Path, model: str, tools: bool = False, **model_args: Any
) -> Any:
    from inspect_ai import Task, eval
    from inspect_ai.dataset import FieldSpec, json_dataset
    from inspect_ai.scorer import match
    from inspect_ai.solver import generate, use_tools
    from inspect_ai.tool import bash

    from ospruner.eval.harness import inspect_provider  # noqa: F401  # as by its entry point

    task = Task(
        dataset=json_dataset(str(data_file), FieldSpec(input="problem", target="answer")),
        solver=[use_tools(bash()), generate()] if tools else [generate()],
        scorer=match(location="any"),
    )
    (log,) = eval(
        task,
        model=f"ospruner/{model}",
        model_args=model_args,
        log_dir=str(log_dir),
        display="none",
        max_tokens=300,
        stop_seqs=["\n\n"],
    )
    return log


def test_samples_hold_answer_thinking_and_reason(
    policy: Policy, data_file: Path, tmp_path: Path, chat_server: ChatServer
) -> None:
    settings: dict[str, Any] = {"threshold": 0.9, "max_thinking_tokens": 60}
    local = evaluate(data_file, tmp_path, str(policy[1]), device="cpu", dtype="float32", **settings)
    served = evaluate(data_file, tmp_path, "toy", url=chat_server.url, **settings)
    thoughts: list[str] = []
    for log in (local, served):
        assert log.status == "success", log.error
        assert len(log.samples) == COUNT
        for sample in log.samples:
            output = sample.output
            assert output.metadata["ospruner_reason"] in ("policy", "budget", "natural")
            thinking, answer = output.choices[0].message.content
            thoughts.append(thinking.reasoning)
            assert answer.text == output.completion
            assert thinking.reasoning not in output.completion
            assert output.usage.reasoning_tokens == output.metadata["ospruner_thinking_tokens"] > 0
            right = f"boxed{{{sample.target}}}" in output.completion
            assert (sample.scores["match"].value == "C") >= right
    assert any("\n\n" in thought for thought in thoughts), "the stop string"
    assert [s.output.completion for s in local.samples] == [
        s.output.completion for s in served.samples
    ]


def test_tools_are_refused(policy: Policy, data_file: Path, tmp_path: Path) -> None:
    log = evaluate(data_file, tmp_path, str(policy[1]), tools=True, device="cpu", dtype="float32")
    assert log.status == "error"
    assert "the tools ['bash'] are offered" in log.error.message


def test_unknown_argument_is_refused(policy: Policy, data_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="thresold"):
        evaluate(data_file, tmp_path, str(policy[1]), thresold=0.5)


def test_entry_point_names_the_provider() -> None:
    """As inspect_ai finds it: in a process that has imported nothing of ours."""
    code = (
        "from inspect_ai.model import get_model\n"
        "model = get_model('ospruner/toy', base_url='http://127.0.0.1:1', threshold=0.5)\n"
        "print(type(model.api).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "OSPrunerAPI\n", done.stderr
