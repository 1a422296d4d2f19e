"""Label, train, replay, generate and serve on a small pretrained model without markers.

`OSPRUNER_SMOLLM2` names a folder of SmolLM2-135M-Instruct; the model is no part of this project.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from transformers import AutoTokenizer
from typer.testing import CliRunner

from modeling_ospruner import OSPrunerForCausalLM
from ospruner.cli import app
from ospruner.eval.grading.boxed import extract_boxed
from ospruner.formats import PLAIN
from ospruner.train.label_sets import load_labels

from ..own_process import needs_vllm
from ..server_process import free_port, running_server
from ..serving.vllm.test_server import ARGUMENTS, CPU

FOLDER = os.environ.get("OSPRUNER_SMOLLM2")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        FOLDER is None, reason="OSPRUNER_SMOLLM2 names no folder of SmolLM2-135M-Instruct"
    ),
]
FORCED = f"{PLAIN.closing}{PLAIN.box_prefix}"
SUMS = [(a, b) for a in (3, 5, 12, 20) for b in (2, 4, 9, 11, 30)]


def run(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(one) for one in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Problems, and labels of them."""
    out = tmp_path_factory.mktemp("smollm2")
    ask = "Tom has {} apples and buys {} more. How many apples does he have?"
    rows = [{"problem": ask.format(a, b), "answer": str(a + b)} for a, b in SUMS]
    (out / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run(
        "label",
        "--base",
        FOLDER,
        "--dataset",
        out / "sums.jsonl",
        "--out",
        out / "labels",
        "--format",
        "plain",
        "--max-thinking-tokens",
        400,
        "--engine",
        "transformers",
        "--set",
        "dtype=float32",
    )
    return out


@pytest.fixture(scope="module")
def policy(folder: Path) -> Path:
    run(
        "train",
        "--labels",
        folder / "labels",
        "--out",
        folder / "run",
        "--head",
        "fixed",
        "--prices",
        "1e-3",
        "--layers",
        0,
        "--num-train-epochs",
        1,
        "--batch-size",
        4,
        "--set",
        "held_out=2",
    )
    return folder / "run"


def test_the_labels_are_of_the_reply(folder: Path) -> None:
    traces = load_labels(folder / "labels").traces
    tokenizer = AutoTokenizer.from_pretrained(str(FOLDER))
    assert len(traces) == len(SUMS)
    natural = [row for row in traces if row["ended"] == "natural"]
    assert natural
    for row in traces:
        prompt = tokenizer.decode(row["prompt_ids"])
        assert PLAIN.user_instruction in prompt
        assert tokenizer.eos_token_id not in row["trace_ids"]
        assert all(answer.strip() for answer in row["forced_answers"])
    # What the model boxed by itself is its natural answer.
    for row in natural:
        boxed = extract_boxed(str(tokenizer.decode(row["trace_ids"])))
        assert row["natural_answer"] == (boxed or "")


def test_replay_and_online_say_the_same_of_lengths(folder: Path, policy: Path) -> None:
    how = ("compare", folder / "labels", f"{policy}@0.0", "--out")
    assert "OS-Pruner" in run(*how, folder / "replay", "--json", folder / "replay.json")
    online = run(*how, folder / "online", "--online", "--samples", 1, "--limit", 3)
    assert "OS-Pruner" in online


def test_generate_stops_with_the_continuation(folder: Path, policy: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(FOLDER))
    model = OSPrunerForCausalLM.from_pretrained(policy, dtype="float32")
    row = load_labels(folder / "labels").traces[0]
    inputs = tokenizer.decode(row["prompt_ids"])
    output = model.generate(
        **tokenizer(inputs, return_tensors="pt", add_special_tokens=False),
        stop_policy={"threshold": 0.0, "max_answer_tokens": 8},
        max_new_tokens=160,
        do_sample=False,
    )
    reply = tokenizer.decode(output[0][len(row["prompt_ids"]) :])
    record = model.last_stop[0]
    if record.reason == "policy":
        assert reply.count(FORCED) == 1
        assert len(record.step_ends) == 1
    else:  # a reply of one step
        assert (record.reason, record.step_ends) == ("natural", [])


@pytest.fixture(scope="module")
def client(policy: Path) -> Iterator[OpenAI]:
    url = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "ospruner.cli", "serve", str(policy), "--threshold", "0"]
    command += ["--served-model-name", "toy", *ARGUMENTS]
    command += ["--host", "127.0.0.1", "--port", url.rpartition(":")[2]]
    with running_server(command, url, CPU, policy / "server.log"):
        yield OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@needs_vllm
def test_a_served_reply_is_content(client: OpenAI) -> None:
    problem = "Explain, in three short paragraphs, why 2 + 3 is 5."
    asked: dict[str, Any] = {"model": "toy", "temperature": 0, "max_tokens": 200}
    asked |= {"messages": [{"role": "user", "content": problem}]}
    asked |= {"extra_body": {"vllm_xargs": {"stop_id": "plain", "max_answer_tokens": 8}}}
    message: Any = client.chat.completions.create(**asked).choices[0].message
    told = client._client.get(f"{str(client.base_url).removesuffix('v1/')}ospruner/stops/plain")
    assert told.json()["reason"] == "policy"
    assert getattr(message, "reasoning", None) is None
    assert FORCED in message.content
