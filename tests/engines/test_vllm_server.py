"""The endpoints engine against vLLM's real server: minutes to start, hence slow."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from ospruner.demo.shipped import Reasoner
from ospruner.engines.http import OpenAIEngine

from ..own_process import needs_vllm
from ..server_process import running_vllm
from .conftest import GREEDY, Traces, check_agreement, check_other_answers, fork_all

pytestmark = [pytest.mark.slow, needs_vllm]


@pytest.fixture(scope="module")
def url(reasoner: Reasoner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    command = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(reasoner.folder)]
    command += ["--served-model-name", "toy", "--enable-prompt-tokens-details"]
    with running_vllm(command, tmp_path_factory.mktemp("vllm") / "server.log") as address:
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
