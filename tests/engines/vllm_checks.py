"""vLLM on the embedded reasoner; tests/serving/vllm/test_plugin.py runs these in a process."""

import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from modeling_ospruner import TokenFormat
from modeling_ospruner.formats_ospruner import BoxState
from ospruner.demo.shipped import Reasoner
from ospruner.engines.interface import ForkRequest, SamplingSettings
from ospruner.engines.vllm import VLLMEngine

from .conftest import GREEDY, check_agreement, check_choices, choose_all, fork_all, make_traces

Compiled = tuple[PreTrainedTokenizerBase, TokenFormat]
LONGEST = 6144  # tokens of prompt and trace in the test of costs


@pytest.fixture(scope="module")
def engine(reasoner: Reasoner) -> Iterator[VLLMEngine]:
    """One vLLM for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # GB
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        yield VLLMEngine(
            str(reasoner.folder),
            reasoner.tokenizer,
            dtype="float32",
            enforce_eager=True,
            max_model_len=LONGEST + 64,
            hf_overrides={"max_position_embeddings": LONGEST + 64},  # for the traces of others
        )


def test_gives_the_labels_of_the_transformers_engine(
    engine: VLLMEngine, reasoner: Reasoner
) -> None:
    traces = make_traces(reasoner, 24)
    answers = fork_all(engine, reasoner, traces.requests)
    check_agreement(reasoner, traces.requests, traces.answers, answers)
    sampled = engine.sample(traces.prompts, GREEDY, reasoner.token_format)
    equal = sum(ours == theirs for ours, theirs in zip(traces.sampled, sampled, strict=True))
    print(f"{equal} of {len(sampled)} greedy traces are equal")
    assert equal >= 0.8 * len(sampled)  # one near tie changes all that follows
    short = replace(GREEDY, max_new_tokens=5)
    [capped] = engine.sample(traces.prompts[:1], short, reasoner.token_format)
    assert (capped.trace_ids, capped.ended) == (traces.sampled[0].trace_ids[:5], "cap")
    assert not capped.answer_ids


def test_reads_the_letters_of_the_transformers_engine(
    engine: VLLMEngine, reasoner: Reasoner
) -> None:
    requests = make_traces(reasoner, 6).requests
    ours, theirs = (choose_all(one, reasoner, requests) for one in (reasoner.engine, engine))
    check_choices(ours, theirs)


def test_shares_the_prefixes_of_real_traces(
    engine: VLLMEngine, reasoner: Reasoner, shared_dir: Path, real_r1: Compiled
) -> None:
    """Steps as the paper's base wrote them; ids are folded into the reasoner's vocabulary."""
    tokenizer, real = real_r1
    size, prompt = len(reasoner.tokenizer), [5] * 90  # as long as a problem and its instruction
    requests: list[ForkRequest] = []
    with gzip.open(shared_dir / "data/traces/traces_mit.jsonl.gz", "rt") as lines:
        for trace in map(json.loads, lines):
            if trace["model"] != "DeepSeek-R1-Distill-Qwen-7B" or not trace["closed"]:
                continue
            ids = tokenizer.encode(trace["reasoning"], add_special_tokens=False)
            if len(ids) + len(prompt) < LONGEST and len(requests) < 6:
                # One more prompt token each, so that two traces share nothing by chance.
                own = [*prompt, len(requests) % size]
                requests.append(ForkRequest(own, [i % size for i in ids], real.step_ends(ids)))
    before = replace(engine.counts)
    fmt = reasoner.token_format
    engine.fork(requests, fmt.forced_suffix(), 8, fmt.box_state)
    computed = engine.counts.computed - before.computed
    unique = engine.counts.unique - before.unique
    whole = sum(len(r.prompt_ids) + cut for r in requests for cut in r.cuts)
    print(f"computed/unique {computed / unique:.3f}; each prefix anew {whole / unique:.1f}")
    assert 1 <= computed / unique <= 1.30
    assert computed < 0.2 * whole


def test_draws_follow_the_seed_and_the_keys(
    engine: VLLMEngine, reasoner: Reasoner, monkeypatch: pytest.MonkeyPatch
) -> None:
    fmt, prompts = reasoner.token_format, [list(range(5, 25))] * 4
    settings = SamplingSettings(temperature=1.0, max_new_tokens=24, seed=1)
    once = engine.sample(prompts, settings, fmt)
    assert len({tuple(trace.trace_ids) for trace in once}) > 1
    assert engine.sample(prompts, settings, fmt) == once
    assert engine.sample(prompts, replace(settings, seed=2), fmt) != once
    assert engine.sample(prompts, settings, fmt, list("abcd")) != once
    if engine.on_cpu:
        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        with pytest.raises(ValueError, match="cannot seed single requests.*set it to 0"):
            engine.sample(prompts, settings, fmt)


def test_goes_on_after_an_error(engine: VLLMEngine, reasoner: Reasoner) -> None:
    fmt = reasoner.token_format
    with pytest.raises(ValueError, match=r"vLLM refuses a request of \d+ prompt.*max_model_len"):
        engine.fork([ForkRequest([5] * (LONGEST + 65), [6], [1])], fmt.forced_suffix(), 8)
    requests = [ForkRequest([5 + i], [7, 8, 9], [1, 2, 3]) for i in range(4)]

    class Broken(BoxState):
        def __init__(self) -> None:
            super().__init__(())

        def push(self, token: int) -> bool:
            raise KeyError(token)

    with pytest.raises(KeyError):
        engine.fork(requests, fmt.forced_suffix(), 8, Broken)
    assert not engine.llm.has_unfinished_requests()
    ours = reasoner.engine.fork(requests, fmt.forced_suffix(), 8, fmt.box_state)
    theirs = engine.fork(requests, fmt.forced_suffix(), 8, fmt.box_state)
    check_agreement(reasoner, requests, ours, theirs)
