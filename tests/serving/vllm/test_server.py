"""`ospruner serve` for real, over HTTP: minutes to start, hence slow."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from openai import OpenAI

from modeling_ospruner import OSPrunerForCausalLM as Policy
from modeling_ospruner.formats_ospruner import TokenFormat
from ospruner.demo.shipped import Reasoner
from ospruner.serving.requests import CALIBRATION_FIELDS
from ospruner.serving.saved import saved_by

from ...chats import asked_of, prompts_of
from ...goldens import served
from ...own_process import needs_vllm
from ...server_process import running_vllm
from .plugin_replay import check_record, make_policy

pytestmark = [pytest.mark.slow, needs_vllm]


@pytest.fixture(scope="module")
def policy(reasoner: Reasoner, tmp_path_factory: pytest.TempPathFactory) -> tuple[Policy, Path]:
    folder = tmp_path_factory.mktemp("policy")
    model, template = make_policy(reasoner, folder), folder / "chat_template.jinja"
    opening = "<|im_start|>assistant\n<think>\n"
    off = "{% if enable_thinking is defined and not enable_thinking %}\n</think>\n\n{% endif %}"
    text = template.read_text("utf-8")
    assert opening in text
    template.write_text(text.replace(opening, opening + off), "utf-8")
    return model, folder


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[str]:
    """`ospruner serve` on a policy, as the model "toy", until the context ends; its address."""
    command = ["-m", "ospruner.cli", "serve", str(folder), *options]
    command += ["--served-model-name", "toy"]
    with running_vllm(command, folder.with_suffix(".log")) as url:
        yield url


@pytest.fixture(scope="module")
def client(policy: tuple[Policy, Path]) -> Iterator[OpenAI]:
    compact = json.dumps({"backend": "xgrammar", "disable_any_whitespace": True})
    options = ("--efforts", "low=0,high=1", "--structured-outputs-config", compact)
    with serving(policy[1], "--opt-in", *options) as url:
        yield OpenAI(base_url=f"{url}/v1", api_key="none")


ASK: Any = {"role": "user", "content": "Solve 3x+54=102 for x."}
STREAMED = pytest.mark.parametrize("stream", [False, True])


class Reply(NamedTuple):
    """What a route replied, whole or streamed, and how long its thinking was by its own count."""

    thinking: str
    content: str
    counted: int
    told: dict[str, Any]  # how the thinking ended, where the policy is on
    ended: str  # why the text ended, of a chat
    called: str  # the name of the tool and its arguments, likewise


def ask(client: OpenAI, route: str, more: dict[str, Any], stream: bool = False) -> Reply:
    """Asks one question on a route, in its own dialect."""
    words = {"/responses": "input", "/completions": "prompt"}.get(route, "messages")
    limit = "max_output_tokens" if route == "/responses" else "max_tokens"
    said = f"{ASK['content']}\n<think>\n" if words == "prompt" else [ASK]
    body = {"model": "toy", "temperature": 0, limit: 400, words: said, "stream": stream, **more}
    if stream and route.startswith("/chat"):
        body["stream_options"] = {"include_usage": True}
    reply = httpx.post(f"{client.base_url}{route.removeprefix('/')}", json=body, timeout=300)
    assert reply.status_code == 200, reply.text
    lines = [one for one in reply.text.splitlines() if one.startswith("data: {")]
    parts = [json.loads(one.removeprefix("data: ")) for one in lines] if stream else [reply.json()]
    [told] = [one["ospruner"] for one in parts if one.get("ospruner")] or [[{}]]
    if stream and route == "/responses":
        parts = [one["response"] for one in parts if one["type"] == "response.completed"]
    usage: Any = next((one["usage"] for one in reversed(parts) if one.get("usage")), {})
    counted = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
    thinking = content = ended = called = ""
    for part in parts:
        for choice in part.get("choices", []):
            message = choice.get("message", choice.get("delta", {"content": choice.get("text")}))
            thinking += message.get("reasoning") or ""
            content += message.get("content") or ""
            ended = choice.get("finish_reason") or ended
            for call in message.get("tool_calls") or ():
                called += call["function"].get("name") or ""
                called += call["function"].get("arguments") or ""
        for item in part.get("output", []):  # of responses
            texts = "".join(one["text"] for one in item["content"])
            thinking += texts if item["type"] == "reasoning" else ""
            content += texts if item["type"] == "message" else ""
        delta = part.get("delta", {})
        for block in part.get("content", [delta] if isinstance(delta, dict) else []):  # Anthropic's
            thinking += block.get("thinking", "")
            content += block.get("text", "")
    return Reply(thinking, content, counted.get("reasoning_tokens") or 0, told[0], ended, called)


SAID = [ASK, {"role": "assistant", "content": "So 3x="}]
GOES_ON = {"messages": SAID, "continue_final_message": True, "add_generation_prompt": False}
OFF: dict[str, tuple[str, dict[str, Any]]] = {
    "template": ("/chat/completions", {"chat_template_kwargs": {"enable_thinking": False}}),
    "effort": ("/chat/completions", {"reasoning_effort": "none"}),
    "prefilled": ("/chat/completions", GOES_ON),
    "responses": ("/responses", {"reasoning": {"effort": "none"}}),
    "messages": ("/messages", {"thinking": {"type": "disabled"}}),
    "batch": ("/chat/completions/batch", {"reasoning_effort": "none", "messages": [[ASK]] * 2}),
}


@pytest.mark.parametrize("how", OFF)
def test_thinking_switched_off_is_content_on_every_route(client: OpenAI, how: str) -> None:
    route, more = OFF[how]
    whole = ask(client, route, more)
    assert (whole.thinking, whole.counted) == ("", 0)
    assert whole.content.strip()
    if how != "batch":  # which vLLM does not stream
        assert ask(client, route, more, stream=True) == whole


DIALECTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "low": ("/chat/completions", {"reasoning_effort": "low"}, "policy"),
    "high": ("/chat/completions", {"reasoning_effort": "high"}, "natural"),
    "responses": ("/responses", {"reasoning": {"effort": "low"}}, "policy"),
    "anthropic": ("/messages", {"output_config": {"effort": "low"}}, "policy"),
    "completions": ("/completions", {"reasoning_effort": "low"}, "policy"),
    "vllm": ("/chat/completions", {"thinking_token_budget": 5}, "budget"),
    "qwen": ("/chat/completions", {"thinking_budget": 5}, "budget"),
    "responses, budget": ("/responses", {"thinking_budget": 5}, "budget"),
}


@STREAMED
@pytest.mark.parametrize("how", DIALECTS)
def test_effort_and_budgets_are_read_on_every_route(client: OpenAI, how: str, stream: bool) -> None:
    """Each reply says itself how its thinking ended; thinking and a box stand apart."""
    route, more, reason = DIALECTS[how]
    never = {"stop_threshold": 1.0} if reason == "budget" else {}
    keys = {"vllm_xargs": {"stop_policy": True, **never}}
    found = ask(client, route, more | keys, stream)
    assert found.told["reason"] == reason
    assert found.told["thinking_tokens"] > 0
    if route == "/completions":
        assert "</think>" in found.content
    else:
        assert found.thinking.strip()
        assert found.content.strip().startswith("\\boxed{")
        assert found.counted > 0 or route == "/messages"  # whose usage has no such count


ANSWER = {"type": "object", "properties": {"x": {"enum": [16, 34]}}, "required": ["x"]}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": ANSWER}}
TEXT = {"format": {"type": "json_schema", "name": "x", "schema": ANSWER}}  # of responses
FORMATS: dict[str, tuple[dict[str, Any], str]] = {
    "schema": ({"response_format": SCHEMA, "text": TEXT}, r'\{"x": ?(16|34)\}'),
    "regex": ({"structured_outputs": {"regex": "[0-9]{3}x"}}, "[0-9]{3}x"),
    "choice": ({"structured_outputs": {"choice": ["sixteen", "34"]}}, "sixteen|34"),
    "grammar": ({"structured_outputs": {"grammar": 'root ::= "x=" [0-9] [0-9]'}}, "x=[0-9]{2}"),
}
ENDS = {
    "policy": {"stop_mode": "threshold", "stop_threshold": 0.0},
    "budget": {"stop_mode": "threshold", "stop_threshold": 1.0, "max_thinking_tokens": 5},
    "natural": {"stop_mode": "threshold", "stop_threshold": 1.0},
}


@STREAMED
@pytest.mark.parametrize("route", ["/chat/completions", "/responses"])
@pytest.mark.parametrize("how", FORMATS)
def test_the_answer_is_the_grammars_and_the_thinking_is_pruned(
    client: OpenAI, how: str, route: str, stream: bool
) -> None:
    form, pattern = FORMATS[how]
    other = "text" if "chat" in route else "response_format"
    body = {k: v for k, v in form.items() if k != other}
    for reason, keys in ENDS.items():
        found = ask(client, route, body | {"vllm_xargs": keys}, stream)
        assert re.fullmatch(pattern, found.content.strip()), found.content
        assert found.thinking.strip()
        assert found.told["reason"] == reason


def test_stop_strings_end_the_answer_alone(client: OpenAI) -> None:
    for on in (True, False):
        keys = {"stop_policy": on, "stop_threshold": 1.0, "max_thinking_tokens": 30}
        found = ask(client, "/chat/completions", {"stop": ["\n\n"], "vllm_xargs": keys})
        assert found.thinking
        assert ("\n\n" in found.thinking) is on  # else vLLM has cut it
        assert ("\\boxed{" in found.content) is on


def test_replies_are_those_of_the_first_house(client: OpenAI) -> None:
    assert served.replies(client) == served.recorded()


def test_the_example_of_a_client_runs(client: OpenAI, repo_dir: Path) -> None:
    url = str(client.base_url).removesuffix("/v1/")
    example = repo_dir / "docs" / "examples" / "serving_client.py"
    told = subprocess.check_output([sys.executable, str(example), url], text=True)
    for said in ("stopped by: ", "streamed: ", "ospruner_thinking_ended_total{"):
        assert said in told


def spoiled(draw: random.Random, prompt: list[int], fmt: TokenFormat) -> list[int]:
    """A third of the prompts, with markers of thinking and answers where none belong."""
    ids = list(prompt)
    marks = [*fmt.forced_suffix(), *fmt.think_start_ids, *fmt.closing_ids]
    for _ in range(draw.randrange(1, 6) if draw.random() < 0.33 else 0):
        ids.insert(draw.randrange(1, len(ids) + 1), draw.choice(marks))
    return ids


def random_keys(draw: random.Random) -> dict[str, Any]:
    extra: dict[str, Any] = {"stop_policy": True, "stop_answer": draw.choice(["forced", "free"])}
    extra |= {"stop_seed": draw.randrange(99), "stop_sample_index": draw.randrange(9)}
    if draw.random() < 0.5:
        extra |= {"stop_mode": "threshold", "stop_threshold": draw.random()}
    if draw.random() < 0.5:
        key = draw.choice(["max_thinking_tokens", "min_thinking_tokens"])
        extra[key] = draw.randrange(1, 150)
    return extra


def test_soak(client: OpenAI, policy: tuple[Policy, Path], reasoner: Reasoner) -> None:
    """64 streams with random keys, aborts and hostile prompts: no wrong row, no leak."""
    model, prompts, memory = policy[0], prompts_of(reasoner, 200), list[int]()
    find = ["pgrep", "-f", "--", f"--port {client.base_url.port}"]
    server = int(subprocess.check_output(find).split()[0])
    family = ["ps", "-s", str(os.getsid(server)), "-o", "rss="]  # kB of each of its processes

    def one(number: int) -> str:
        draw, ids = random.Random(number), list[int]()
        prompt = spoiled(draw, draw.choice(prompts), model.token_format)
        extra = random_keys(draw) | {"stop_id": f"soak{number}"}
        patience = draw.randrange(1, 60) if draw.random() < 0.15 else 999
        asked: Any = client.completions.create(
            model="toy",
            prompt=prompt,
            temperature=draw.choice([0.0, 1.0]),
            max_tokens=draw.randrange(1, 300),
            stream=True,
            extra_body={"return_token_ids": True, "vllm_xargs": extra},
        )
        with asked as parts:
            for part in parts:
                ids += part.choices[0].token_ids
                if len(ids) >= patience:
                    return "aborted"
        told = httpx.get(f"{client.base_url}../ospruner/stops/soak{number}", timeout=60).json()
        check_record(model, prompt, ids, extra, told, ahead=True)
        if number % 20 == 0:
            memory.append(sum(map(int, subprocess.check_output(family).split())))
        return str(told["reason"])

    with ThreadPoolExecutor(64) as pool:
        counts = Counter(pool.map(one, range(600)))
    print(counts, f"memory of the server, kB: {memory}")
    assert min(counts[reason] for reason in ("aborted", "policy", "budget", "natural")) > 5
    # What grows with every request shows between the second quarter and the end.
    quarter = len(memory) // 4
    assert memory[-1] < 1.1 * max(memory[quarter : 2 * quarter])


@pytest.mark.parametrize("stops", [True, False])
def test_vllms_own_command_serves_a_policy_and_any_other_model(
    policy: tuple[Policy, Path], reasoner: Reasoner, tmp_path: Path, stops: bool
) -> None:
    """Without an option of ours, nor a variable."""
    folder = policy[1] if stops else reasoner.folder
    command = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    with running_vllm(command, tmp_path / "log") as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="none")
        lengths = []
        for extra in ({}, {"stop_policy": False, "stop_answer": "free"}):
            asked: dict[str, Any] = {"model": str(folder), "messages": [ASK], "max_tokens": 300}
            asked |= {"temperature": 0, "extra_body": {"vllm_xargs": extra}}
            reply: Any = client.chat.completions.create(**asked)
            lengths.append(reply.usage.completion_tokens)
        assert (lengths[0] < lengths[1]) is stops
        assert bool(reply.choices[0].message.reasoning) is stops  # the parser is a policy's


def test_answers_of_the_control_group_are_compared(reasoner: Reasoner, tmp_path: Path) -> None:
    """A policy that stops at the first step: where it would have, the answer mostly differs."""
    folder, count = tmp_path / "policy", 20
    make_policy(reasoner, folder)
    file = folder / "config.json"
    promise: dict[str, Any] = dict.fromkeys(CALIBRATION_FIELDS, 0) | {"mode": "threshold"}
    bins = {"edges": [1.0], "shares": [0.5, 0.5]}
    promise |= {"threshold": 0.0, "price": None, "max_loss": 0.02, "confidence": 0.95}
    promise |= {"disagreement": 0.01, "traffic": {"thinking_tokens": bins, "first_step": bins}}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"calibrations": [promise]}))
    with serving(folder, "--max-loss", "0.02", "--control", "0.7") as url:
        for number, question in enumerate(asked_of(reasoner, count)):
            turn = {"role": "user", "content": question}
            body = {"model": "toy", "messages": [turn], "max_tokens": 500, "temperature": 0}
            body["stream"] = number % 2 == 0
            reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300)
            assert '"ospruner":' in reply.text, reply.text
        pattern = r'^ospruner_control_answers_total\{.*differs="(\w+)".*\} (\S+)$'
        for _ in range(60):
            told = httpx.get(f"{url}/metrics").text
            found = {name: float(n) for name, n in re.findall(pattern, told, re.M)}
            if sum(found.values()) >= count / 2:
                break
            time.sleep(1)
        assert found["yes"] > sum(found.values()) / 2
        said = saved_by(url)
    for part in ("promise of 2 points: of ", "3.0% are allowed", "DRIFTED"):
        assert part in said
    assert "may no longer hold" in folder.with_suffix(".log").read_text("utf-8")
