"""The SGLang engine against a real server, in the environment that `make test-sglang` makes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ospruner.demo.shipped import Reasoner
from ospruner.engines.http import SGLangEngine

from ..server_process import SGLANG_PYTHON, running_sglang
from .conftest import GREEDY, Traces, check_agreement, check_other_answers, fork_all, make_traces

pytestmark = pytest.mark.skipif(
    SGLANG_PYTHON is None, reason="SGLang has an environment of its own: run `make test-sglang`"
)


@pytest.fixture(scope="module")
def url(reasoner: Reasoner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    command = ["-m", "sglang.launch_server", "--model-path", str(reasoner.folder)]
    command += ["--disable-overlap-schedule", "--max-total-tokens", "8192"]
    log: Path = tmp_path_factory.mktemp("sglang") / "server.log"
    with running_sglang(command, log) as address:
        yield address


def test_a_server_gives_the_same_labels(url: str, reasoner: Reasoner, traces: Traces) -> None:
    engine = SGLangEngine(str(reasoner.folder), reasoner.tokenizer, [url])
    sampled = engine.sample(traces.prompts, GREEDY, reasoner.token_format)
    assert sampled == traces.sampled
    # Prompts that arrive together compute the few tokens with which all of them begin anew.
    assert engine.sample_counts.computed <= 1.2 * engine.sample_counts.unique
    fork_all(engine, reasoner, traces.requests)
    assert engine.counts.computed <= engine.counts.unique  # the traces were computed by sampling
    check_other_answers(engine, reasoner, traces)


def test_forks_share_the_prefixes_of_traces_that_are_new_to_the_server(
    url: str, reasoner: Reasoner
) -> None:
    engine = SGLangEngine(str(reasoner.folder), reasoner.tokenizer, [url], concurrency=16)
    more = make_traces(reasoner, 16)
    answers = fork_all(engine, reasoner, more.requests)
    check_agreement(reasoner, more.requests, more.answers, answers)
    print(f"computed/unique {engine.counts.computed / engine.counts.unique:.3f}")
    assert engine.counts.computed <= 1.1 * engine.counts.unique
