"""`ospruner serve` for real, over HTTP: minutes to start, hence slow."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from openai import NotFoundError, OpenAI

from modeling_ospruner import OSPrunerForCausalLM as Policy
from modeling_ospruner.formats_ospruner import TokenFormat
from ospruner.demo.shipped import Reasoner

from ...chats import prompts_of
from ...goldens import served
from ...own_process import needs_vllm
from ...server_process import running_vllm
from .plugin_replay import check_record, make_policy

pytestmark = [pytest.mark.slow, needs_vllm]

SOAK_REQUESTS = 600


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
    compact = (
        "--structured-outputs-config",
        '{"backend": "xgrammar", "disable_any_whitespace": true}',
    )
    with serving(policy[1], "--opt-in", "--efforts", "low=0,high=1", *compact) as url:
        yield OpenAI(base_url=f"{url}/v1", api_key="none")


def text(client: OpenAI, path: str) -> str:
    root = str(client.base_url).removesuffix("/v1/")
    with urllib.request.urlopen(f"{root}{path}", timeout=60) as answer:
        body: bytes = answer.read()
    return body.decode()


def test_completions_stop_per_request(
    client: OpenAI, policy: tuple[Policy, Path], reasoner: Reasoner
) -> None:
    model, fmt = policy[0], policy[0].token_format
    for i, prompt in enumerate(prompts_of(reasoner, 6)):
        extra = {"stop_policy": True, "stop_seed": 5, "stop_sample_index": i, "stop_id": f"c{i}"}
        asked: dict[str, Any] = {"model": "toy", "prompt": prompt, "temperature": 0}
        asked |= {"max_tokens": 400}
        body = {"return_token_ids": True, "vllm_xargs": extra}
        whole = client.completions.create(**asked, extra_body=body).choices[0]
        ids: list[int] = whole.token_ids
        told = json.loads(text(client, f"/ospruner/stops/c{i}"))
        check_record(model, prompt, ids, extra, told)
        streamed = [
            token
            for part in client.completions.create(**asked, extra_body=body, stream=True)
            for token in part.choices[0].token_ids
        ]
        assert streamed == ids
    plain = client.completions.create(**asked, extra_body={"return_token_ids": True}).choices[0]
    assert len(plain.token_ids) > len(ids) - len(fmt.forced_suffix())
    with pytest.raises(NotFoundError):
        client.get("/../ospruner/stops/nobody", cast_to=object)


ASK: Any = {"role": "user", "content": "Solve 3x+54=102 for x."}
STREAMED = pytest.mark.parametrize("stream", [False, True])


class Reply(NamedTuple):
    """What a route replied, whole or streamed, and how long its thinking was by its own count."""

    thinking: str
    content: str
    counted: int
    told: dict[str, Any]  # how the thinking ended, where the policy is on
    ended: str  # why the text ended, of a chat


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
    thinking = content = ended = ""
    for part in parts:
        for choice in part.get("choices", []):
            message = choice.get("message", choice.get("delta", {"content": choice.get("text")}))
            thinking += message.get("reasoning") or ""
            content += message.get("content") or ""
            ended = choice.get("finish_reason") or ended
        for item in part.get("output", []):  # of responses
            texts = "".join(one["text"] for one in item["content"])
            thinking += texts if item["type"] == "reasoning" else ""
            content += texts if item["type"] == "message" else ""
        delta = part.get("delta", {})
        for block in part.get("content", [delta] if isinstance(delta, dict) else []):  # Anthropic's
            thinking += block.get("thinking", "")
            content += block.get("text", "")
    return Reply(thinking, content, counted.get("reasoning_tokens") or 0, told[0], ended)


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
    "llama.cpp": ("/chat/completions", {"thinking_budget_tokens": 5}, "budget"),
    "responses, budget": ("/responses", {"thinking_budget": 5}, "budget"),
    "both": ("/chat/completions", {"thinking_budget": 900, "reasoning_effort": "low"}, "policy"),
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
    body = {
        k: v for k, v in form.items() if k != ("text" if "chat" in route else "response_format")
    }
    for reason, keys in ENDS.items():
        found = ask(client, route, body | {"vllm_xargs": keys}, stream)
        assert re.fullmatch(pattern, found.content.strip()), found.content
        assert found.thinking.strip()
        assert found.told["reason"] == reason


@pytest.mark.parametrize("route", ["/chat/completions", "/messages"])
def test_stop_strings_end_the_answer_alone(client: OpenAI, route: str) -> None:
    body: dict[str, Any] = {"stop_sequences" if route == "/messages" else "stop": ["\n\n"]}
    on = {"stop_mode": "threshold", "stop_threshold": 1.0, "max_thinking_tokens": 30}
    found = ask(client, route, body | {"vllm_xargs": on})
    assert "\n\n" in found.thinking
    assert "\\boxed{" in found.content
    cut = ask(client, route, body | {"vllm_xargs": {"stop_policy": False}})
    assert cut.thinking
    assert "\n\n" not in cut.thinking  # which vLLM has cut
    assert cut.content == ""


def test_replies_are_those_of_the_first_house(client: OpenAI) -> None:
    assert served.replies(client) == served.recorded()


def test_the_example_of_a_client_runs(client: OpenAI, repo_dir: Path) -> None:
    url = str(client.base_url).removesuffix("/v1/")
    example = repo_dir / "docs" / "examples" / "serving_client.py"
    done = subprocess.run(
        [sys.executable, str(example), url], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    assert "stopped by: " in done.stdout
    assert "streamed: " in done.stdout
    assert "ospruner_thinking_ended_total{" in done.stdout


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
        told = json.loads(text(client, f"/ospruner/stops/soak{number}"))
        check_record(model, prompt, ids, extra, told, ahead=True)
        if number % 20 == 0:
            memory.append(sum(map(int, subprocess.check_output(family).split())))
        return str(told["reason"])

    with ThreadPoolExecutor(64) as pool:
        counts = Counter(pool.map(one, range(SOAK_REQUESTS)))
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
            reply = client.chat.completions.create(
                model=str(folder),
                messages=[{"role": "user", "content": ASK["content"]}],
                temperature=0,
                max_tokens=300,
                extra_body={"vllm_xargs": extra},
            )
            assert reply.usage is not None
            lengths.append(reply.usage.completion_tokens)
        message: Any = reply.choices[0].message
        assert (lengths[0] < lengths[1]) is stops
        assert bool(message.reasoning) is stops  # the parser is a policy's
