"""lm-evaluation-harness runs a policy on a task from a local file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from modeling_ospruner import OSPrunerForCausalLM

from ...server_process import free_port, running_server
from ...vllm_plugin.test_server import ARGUMENTS, CPU, needs_vllm
from .conftest import COUNT, ChatServer

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'ospruner[eval]'")

Policy = tuple[OSPrunerForCausalLM, Path]
TASK = Path(__file__).with_name("sums.yaml")


@pytest.fixture(scope="module")
def tasks(data_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    text = TASK.read_text("utf-8").replace("{data_file}", json.dumps(str(data_file)), 2)
    (folder / "sums.yaml").write_text(text, "utf-8")
    return folder


def evaluate(folder: Path, model_args: dict[str, Any], **more: Any) -> Any:
    import lm_eval
    from lm_eval.tasks import TaskManager

    from ospruner.eval.harness import lm_harness  # noqa: F401  # registers the model

    arguments = {"apply_chat_template": True, "tasks": ["ospruner_sums"], "log_samples": True}
    done = lm_eval.simple_evaluate(
        model="ospruner",
        model_args=model_args,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
        **{**arguments, **more},
    )
    assert isinstance(done, dict)
    return done


def logged(done: dict[str, Any]) -> list[list[dict[str, Any]]]:
    return [sample["arguments"][0][1]["ospruner"] for sample in done["samples"]["ospruner_sums"]]


def test_task_is_graded_on_the_answers(
    policy: Policy, tasks: Path, rows: list[dict[str, str]]
) -> None:
    model, folder = policy
    tokenizer: Any = model.tokenizer
    done = evaluate(
        tasks,
        {"policy": str(folder), "dtype": "float32", "threshold": 0.1},
        batch_size=1,
        device="cpu",
    )
    samples = done["samples"]["ospruner_sums"]
    assert [sample["target"] for sample in samples] == [row["answer"] for row in rows]
    right = 0
    for sample, row in zip(samples, rows, strict=True):
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": row["problem"]}],
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
        model.generate(
            **inputs, stop_policy={"threshold": 0.1}, max_new_tokens=300, do_sample=False
        )
        (log,) = sample["arguments"][0][1]["ospruner"]
        assert log["thinking_tokens"] == model.last_stop[0].thinking_tokens
        assert log["reason"] == model.last_stop[0].reason
        answer = sample["resps"][0][0]
        assert log["thinking"] not in answer
        right += f"boxed{{{row['answer']}}}" in answer
    assert done["results"]["ospruner_sums"]["exact_match,boxed"] == right / COUNT
    thoughts = [log[0]["thinking"] for log in logged(done)]
    assert any("\n\n" in thought for thought in thoughts), "a stop string of the task"


def test_served_policy_gets_the_same_grades(
    policy: Policy, tasks: Path, chat_server: ChatServer
) -> None:
    here = {
        "policy": str(policy[1]),
        "dtype": "float32",
        "threshold": 0.9,
        "max_thinking_tokens": 60,
    }
    local = evaluate(tasks, here, device="cpu")
    served = evaluate(
        tasks,
        {"policy": "toy", "url": chat_server.url, "threshold": 0.9, "max_thinking_tokens": 60},
    )
    assert local["results"] == served["results"]
    assert [log[0]["thinking_tokens"] for log in logged(local)] == [
        log[0]["thinking_tokens"] for log in logged(served)
    ]
    assert {log[0]["reason"] for log in logged(served)} <= {"budget", "policy", "natural"}


@pytest.mark.slow
@needs_vllm
def test_a_server_of_vllm_gives_the_same_grades(
    policy: Policy, tasks: Path, tmp_path: Path
) -> None:
    stops = {"threshold": 0.9, "max_thinking_tokens": 60}
    here = {"policy": str(policy[1]), "dtype": "float32", **stops}
    local = evaluate(tasks, here, device="cpu")
    url = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "ospruner.cli", "serve", str(policy[1]), "--opt-in"]
    command += ["--served-model-name", "toy", "--block-size", "32", *ARGUMENTS]
    command += ["--host", "127.0.0.1", "--port", url.rpartition(":")[2]]
    with running_server(command, url, CPU, tmp_path / "server.log"):
        served = evaluate(tasks, {"policy": "toy", "url": url, **stops})
    assert local["results"] == served["results"]
    for ours, theirs in zip(logged(local), logged(served), strict=True):
        for key in ("thinking_tokens", "reason"):
            assert ours[0][key] == theirs[0][key]


def test_cache_knows_the_request_again(policy: Policy, tasks: Path, tmp_path: Path) -> None:
    arguments = {"policy": str(policy[1]), "max_thinking_tokens": 40}
    cache = {"use_cache": str(tmp_path / "cache"), "device": "cpu"}
    first = evaluate(tasks, arguments, **cache)
    again = evaluate(tasks, arguments, **cache)
    assert first["results"] == again["results"]
    assert "ospruner" not in again["samples"]["ospruner_sums"][0]["arguments"][0][1], (
        "from the cache"
    )


def test_log_likelihoods_are_refused(policy: Policy, tasks: Path, tmp_path: Path) -> None:
    text = (tasks / "sums.yaml").read_text("utf-8")
    head = text[: text.index("generation_kwargs")].replace("generate_until", "loglikelihood")
    (tmp_path / "likely.yaml").write_text(head.replace("ospruner_sums", "likely"), "utf-8")
    with pytest.raises(ValueError, match="likely asks for log-likelihoods"):
        evaluate(tmp_path, {"policy": str(policy[1])}, tasks=["likely"], device="cpu")


@pytest.mark.parametrize(
    ("more", "model_args", "complaint"),
    [
        ({"apply_chat_template": False}, {}, "say --apply_chat_template"),
        ({"batch_size": "auto"}, {}, "batch_size is 'auto'"),
        ({}, {"lenght_penalty": 1}, "lenght_penalty"),
    ],
)
def test_what_cannot_be_is_refused(
    policy: Policy, tasks: Path, more: dict[str, Any], model_args: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        evaluate(tasks, {"policy": str(policy[1]), **model_args}, **{"device": "cpu", **more})


def test_other_templates_are_refused() -> None:
    from ospruner.eval.harness.lm_harness import OSPrunerLM

    model = OSPrunerLM("toy", url="http://127.0.0.1:1")
    assert model.chat_template(True) == ""
    with pytest.raises(ValueError, match="uses its base's own"):
        model.chat_template("mine")
    with pytest.raises(ValueError, match="gen_prefix"):
        model.apply_chat_template([{"role": "user", "content": "?"}], add_generation_prompt=False)


def test_command_line_knows_the_model(policy: Policy, tasks: Path, tmp_path: Path) -> None:
    """In a process of its own, as users run it."""
    arguments = ["--model", "ospruner", "--model_args"]
    arguments += [f"policy={policy[1]},threshold=0.1", "--tasks", "ospruner_sums"]
    arguments += ["--include_path", str(tasks), "--apply_chat_template", "--log_samples"]
    arguments += ["--output_path", str(tmp_path), "--limit", "2", "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, "-m", "ospruner.cli", "lm-eval", *arguments],
        capture_output=True,
        text=True,
        env=dict(os.environ),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "ospruner_sums" in done.stdout
    (file,) = tmp_path.rglob("samples_*.jsonl")
    samples = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    assert len(samples) == 2
    for sample in samples:
        (log,) = sample["arguments"]["gen_args_0"]["arg_1"]["ospruner"]
        assert log["reason"] in ("policy", "natural", "length")
        assert log["thinking_tokens"] > 0


@pytest.fixture(scope="module")
def choices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of choices as ARC has them, and a YAML file of lm_eval that names them."""
    folder = tmp_path_factory.mktemp("choices")
    rows = [
        {"question": question, "choices": list(options), "answer": options.index(right)}
        for question, options, right in (
            ("Which is the largest?", ("3+4", "5*6", "9-1"), "5*6"),
            ("Which is the largest?", ("40-2", "6*6"), "40-2"),
        )
    ]
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    (folder / "task.yaml").write_text(
        "task: letters\n"
        "class: !function ospruner.eval.harness.lm_tasks.ProblemsTask\n"
        f"dataset_kwargs: {{dataset: {json.dumps(str(file))}, task: choice}}\n",
        "utf-8",
    )
    return folder


def test_a_task_of_ours_asks_and_grades_in_lm_eval(policy: Policy, choices: Path) -> None:
    from ospruner.eval.problems.domains import Choice

    done = evaluate(
        choices,
        {"policy": str(policy[1]), "dtype": "float32", "threshold": 0.1, "max_gen_toks": 300},
        tasks=["letters"],
        device="cpu",
    )
    samples = done["samples"]["letters"]
    assert [sample["target"] for sample in samples] == ["B", "A"]
    asked = [json.loads(sample["arguments"][0][0])[0]["content"] for sample in samples]
    assert asked[0].startswith("Which is the largest?\n\nA. 3+4\nB. 5*6\nC. 9-1\n\n")
    assert all(Choice().instruction in one for one in asked)
    right = [Choice().read_free(s["resps"][0][0]) == s["target"] for s in samples]
    assert [sample["acc"] for sample in samples] == right
    assert done["results"]["letters"]["acc,none"] == sum(right) / 2


@pytest.mark.parametrize(
    ("reply", "acc", "ungraded"),
    [
        ("So \\boxed{B}.", 1.0, 0.0),
        ("The answer is A.", 0.0, 0.0),
        ("I do not know.", 0.0, 0.0),
    ],
)
def test_replies_are_read_as_the_task_reads_them(
    choices: Path, reply: str, acc: float, ungraded: float
) -> None:
    from ospruner.eval.harness.lm_tasks import ProblemsTask

    task = ProblemsTask(
        {"dataset_kwargs": {"dataset": str(choices / "rows.jsonl"), "task": "choice"}}
    )
    row = task.dataset["test"][0]
    assert task.process_results(row, [reply]) == {"acc": acc, "ungraded": ungraded}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "it needs `dataset`"),
        ({"dataset": "gsm8k", "tasks": "choice"}, r"not \['tasks'\]"),
        ({"dataset": "gsm8k", "task": "code"}, "allow"),
        ({"dataset": "gsm8k", "task": "letters"}, "must be one of"),
    ],
)
def test_settings_that_cannot_be_are_refused(given: dict[str, str], said: str) -> None:
    from ospruner.eval.harness.lm_tasks import ProblemsTask

    with pytest.raises(ValueError, match=said):
        ProblemsTask({"dataset_kwargs": given})
