"""The policy inside vLLM, in process, on the embedded reasoner; run by test_plugin.py."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.inputs import tokens_input
from vllm.sampling_params import StructuredOutputsParams

from modeling_ospruner import OSPrunerForCausalLM as Policy
from ospruner.serving.requests import StopRequest
from ospruner.serving.vllm.processor import PolicyProcessor

from .plugin_replay import check_record, replay

Prompts = list[list[int]]
Texts = list[list[list[int]]]  # of each prompt

# Chunked prefill, prefix caching, and too little room for all: requests are preempted.
TIGHT = {"max_num_batched_tokens": 96, "max_num_seqs": 24, "num_gpu_blocks_override": 56}
LONGEST = 120
STRUCTURE = StructuredOutputsParams(regex="[0-9]{3}x")
AT_ONCE = {"stop_mode": "threshold", "stop_threshold": 0.0}
NEVER = {"stop_mode": "threshold", "stop_threshold": 1.0}
UNCHANGED = NEVER | {"stop_answer": "free"}


def start(model: Path | str, **further: Any) -> LLM:
    """vLLM in this process, for float32 and eager."""
    arguments: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "block_size": 32}
    arguments |= {"max_model_len": 1024, "disable_log_stats": False}
    return LLM(model=str(model), **{**arguments, **further})


def start_policy(folder: Path | str, **further: Any) -> LLM:
    """vLLM in this process on a policy, for requests that ask for it."""
    return start(folder, **{"additional_config": {"ospruner": {"stop_policy": False}}, **further})


def run(llm: LLM, prompts: Prompts, params: SamplingParams | list[SamplingParams]) -> Texts:
    """The token ids of each prompt's texts."""
    asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    outputs = llm.generate(asked, params, use_tqdm=False)
    return [[list(one.token_ids) for one in output.outputs] for output in outputs]


def greedy(extra: dict[str, Any] | None = None, **further: Any) -> SamplingParams:
    """Greedy decoding with a request's keys."""
    return SamplingParams(
        **{"temperature": 0.0, "max_tokens": LONGEST, **further}, extra_args=extra
    )


def record(llm: LLM, name: str) -> dict[str, Any]:
    """What vLLM tells of a request with a `stop_id`."""
    [told] = llm.collective_rpc("ospruner_told", args=("stop_id", name))[0]
    for numbers in (told["probabilities"], told["prices"]):  # as JSON has them
        numbers[:] = [math.nan if one is None else float(one) for one in numbers]
    return dict(told)


def check_stops(
    llm: LLM,
    model: Policy,
    prompts: Prompts,
    extras: Sequence[dict[str, Any]],
    sampled: bool = False,
    ahead: bool = False,
) -> Counter[str]:
    """Compares requests with their replays, each probability to `TOLERANCE`; why they stopped.

    Every other one is `sampled`; of `ahead` see `check_record`.
    """
    named = [extra | {"stop_id": f"s{i}"} for i, extra in enumerate(extras)]
    params = [greedy(one, temperature=float(sampled and i % 2)) for i, one in enumerate(named)]
    outputs = run(llm, prompts, params)
    reasons, seen = Counter[str](), list[float]()
    for i, ([ids], prompt) in enumerate(zip(outputs, prompts, strict=True)):
        replayed = check_record(model, prompt, ids, named[i], record(llm, f"s{i}"), ahead)
        reasons[replayed.reason] += 1
        seen += replayed.probabilities
    print(reasons, f"{len(seen)} probabilities from {min(seen)} to {max(seen)}")
    return reasons + Counter(decided=len(seen), percent=round(100 * (max(seen) - min(seen))))


def check_as_ever(
    llm: LLM, model: Policy, prompts: Prompts, texts: Texts, ahead: bool = False
) -> Counter[str]:
    """A policy that never fires leaves `plain` texts as they are; draws stop as `check_stops`."""
    never = [greedy(UNCHANGED, ignore_eos=i % 5 == 0) for i in range(len(prompts))]
    assert run(llm, prompts, never) == texts
    extras = [{"stop_policy": True, "stop_seed": 7, "stop_sample_index": i} for i in range(36)]
    return check_stops(llm, model, prompts, extras[: len(prompts)], ahead=ahead)


def counted(name: str) -> Counter[tuple[str, ...]]:
    """What a counter of ours says so far, by its labels' values."""
    samples = [sample for metric in REGISTRY.collect() for sample in metric.samples]
    told = [one for one in samples if one.name == f"ospruner_{name}_total"]
    return Counter({tuple(one.labels.values()): int(one.value) for one in told})


def test_a_policy_that_never_fires_changes_nothing(
    served: LLM, plain: Texts, mixed: Prompts
) -> None:
    extras: list[dict[str, Any] | None] = [UNCHANGED, {"stop_policy": False}, None]
    params = [greedy(extras[i % 3], ignore_eos=i % 5 == 0) for i in range(len(mixed))]
    assert run(served, mixed, params) == plain
    counts = {metric.name: metric for metric in served.get_metrics()}
    assert counts["vllm:num_preemptions"].value > 0
    assert counts["vllm:prefix_cache_hits"].value > 0


def test_stops_where_generate_would(served: LLM, model: Policy, mixed: Prompts) -> None:
    extras = [
        {"stop_policy": True, "stop_seed": 7, "stop_sample_index": i}
        | ({"stop_answer": "free"} if i % 4 == 3 else {})
        | ({"stop_mode": "threshold", "stop_threshold": 0.3} if i % 4 == 2 else {})
        | ({"max_thinking_tokens": 60, "min_thinking_tokens": 20} if i % 8 == 1 else {})
        for i in range(len(mixed))
    ]
    reasons = check_stops(served, model, mixed, extras)
    assert reasons["decided"] > 100
    assert reasons["percent"] > 30  # of one probability from another
    assert min(reasons[reason] for reason in ("policy", "budget", "natural")) > 0


def test_the_ith_text_draws_as_sample_index_i(served: LLM, model: Policy, mixed: Prompts) -> None:
    extra = {"stop_seed": 3, "stop_sample_index": 4, "stop_mode": "sample"}
    params = greedy(extra, n=2, seed=11, temperature=1.0)
    # One prompt at a time, and short ones: vLLM on CPUs cannot prefill seeded requests in chunks.
    prompts = [one for one in mixed if 2 * len(one) <= TIGHT["max_num_batched_tokens"]][:12]
    stopped = elsewhere = 0
    for prompt in prompts:
        [texts] = run(served, [prompt], params)
        for i, ids in enumerate(texts):
            replayed = replay(model, prompt, ids, {**extra, "stop_sample_index": 4 + i}).record
            stopped += replayed.reason == "policy"
            try:
                other = replay(model, prompt, ids, {**extra, "stop_sample_index": 5 + i}).record
                elsewhere += other != replayed
            except AssertionError:
                elsewhere += 1
    assert min(stopped, elsewhere) > 5
    params.n, params.seed = 1, 12  # used again: no longer one of several texts
    [[alone]] = run(served, prompts[:1], params)
    replay(model, prompts[0], alone, extra)


def test_limits_and_stop_strings_end_requests_as_ever(
    served: LLM, model: Policy, mixed: Prompts
) -> None:
    fmt = model.token_format
    budget = NEVER | {"max_thinking_tokens": 1}

    def one(**further: Any) -> list[int]:
        [[ids]] = run(served, mixed[:1], greedy(budget, **further))
        return ids

    whole = one()
    at = whole.index(fmt.think_end_id)
    for inside in range(1, len(fmt.forced_suffix()) + 2):
        assert one(max_tokens=at + inside) == whole[: at + inside]
    # Where texts do not end by themselves, what the request names as their end does it.
    assert one(ignore_eos=True, stop_token_ids=[fmt.eos_ids[0]]) == whole
    stopped = one(stop=["\\boxed"])
    assert stopped == whole[: len(stopped)] != whole
    asked = {"prompt_token_ids": mixed[0]}
    [output] = served.generate(asked, greedy(budget, logprobs=2), use_tqdm=False)
    scored = output.outputs[0]
    assert list(scored.token_ids) == whole
    assert scored.logprobs is not None
    assert all(token in scores for token, scores in zip(whole, scored.logprobs, strict=True))


def test_the_control_group_thinks_to_its_end_and_is_counted_apart(
    served: LLM, plain: Texts, model: Policy, mixed: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all others stop at once: at their first step end."""
    listed = served.collective_rpc(lambda one: one.model_runner.input_batch.logitsprocs.all)[0]
    [processor] = [one for one in listed if isinstance(one, PolicyProcessor)]
    changed = StopRequest(AT_ONCE | {"stop_control": 0.5}, server=True)
    monkeypatch.setattr(processor._core, "_defaults", changed)
    last = [greedy({"stop_policy": False})]  # in its first step the others' leaving is counted
    run(served, mixed[:1], last)
    before = counted("thinking_ended")
    params = [greedy({"stop_id": f"k{i}"}) for i in range(len(mixed))]
    outputs = run(served, mixed, params)
    run(served, mixed[:1], last)
    end = model.token_format.think_end_id
    reasons = Counter[str]()
    for i, [ids] in enumerate(outputs):
        told = record(served, f"k{i}")
        reasons[told["reason"]] += 1
        if told["reason"] == "policy":
            assert len(told["step_ends"]) == 1
        else:
            thinking = [*ids, end].index(end)
            assert ids[:thinking] == plain[i][0][:thinking]
            assert len(told["step_ends"]) > 1
    counts = counted("thinking_ended") - before
    assert counts["policy", "policy"] == reasons["policy"] > 10
    assert counts["control", "natural"] == reasons["natural"] > 3
    assert not any(counts[key] for key in (("control", "policy"), ("policy", "natural")))


def stepwise(llm: LLM, prompts: Prompts, params: list[SamplingParams]) -> Iterator[dict[int, Any]]:
    """After each step what has come of the requests, by their numbers, which are their ids."""
    engine, come = llm.llm_engine, dict[int, Any]()
    for i, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(i), tokens_input(prompt), one)
    while engine.has_unfinished_requests():
        come |= {int(output.request_id): output for output in engine.step()}
        yield come


def test_requests_that_are_aborted_leave_the_others_alone(
    served: LLM, model: Policy, mixed: Prompts
) -> None:
    extras = [{"stop_policy": True, "stop_seed": 1, "stop_sample_index": i} for i in range(30)]
    params = [greedy({**extra, "stop_id": f"a{i}"}) for i, extra in enumerate(extras)]
    for step, come in enumerate(stepwise(served, mixed[:30], params), start=1):
        if step % 5 == 0:
            served.llm_engine.abort_request([str(step // 5 * 3)])
        kept = {i: one.outputs[0].token_ids for i, one in come.items() if one.finished}
    assert 8 < len(kept) < 30
    for i, ids in kept.items():
        check_record(model, mixed[i], ids, extras[i], record(served, f"a{i}"))


def test_a_request_under_way_answers_when_it_is_told(
    served: LLM, plain: Texts, model: Policy, mixed: Prompts
) -> None:
    """Wherever it is in a step; the others go on as they were."""
    forced, told_at = model.token_format.forced_suffix(), dict[int, int]()
    extras = [(NEVER, UNCHANGED)[i % 2] | {"stop_id": f"w{i}"} for i in range(6)]
    params = [greedy(one, ignore_eos=i % 5 == 0) for i, one in enumerate(extras)]  # as `plain` asks
    for come in stepwise(served, mixed[:6], params):
        for i in {0, 2, 4} & come.keys() - told_at.keys():
            if (at := len(come[i].outputs[0].token_ids)) >= 3 + i:
                told_at[i] = at
                served.collective_rpc("ospruner_told", args=("stop_id", f"w{i}", True))
    assert len(told_at) == 3
    for i, one in come.items():
        ids, told = list(one.outputs[0].token_ids), record(served, f"w{i}")
        if i % 2:
            assert ids == plain[i][0]
            assert told["reason"] != "request"
            continue
        at = told_at[i]
        assert ids[:at] == plain[i][0][:at]
        assert ids[at : at + len(forced)] == forced
        assert (told["reason"], told["thinking_tokens"]) == ("request", at)


def test_wrong_keys_are_refused_by_name(served: LLM, mixed: Prompts) -> None:
    wrong: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"stop_price": 0.5}, {}, "stop_price is 0.5"),
        ({"max_thinking_tokens": 5}, {"min_tokens": 9}, "tokens is 5, but .* to have at least 9"),
        ({"max_answer_tokens": 5}, {"structured_outputs": STRUCTURE}, "is 5, but structured out"),
        ({"stop_seed": 3}, {"n": 2, "temperature": 1.0}, "stop_seed is 3 and n is 2"),
    ]
    for extra, further, message in wrong:
        with pytest.raises(VLLMValidationError, match=message):
            run(served, mixed[:1], greedy(extra, **further))


def test_vllms_own_budget_and_minimum_are_the_policys(
    served: LLM, plain: Texts, model: Policy, mixed: Prompts
) -> None:
    end, eos = model.token_format.think_end_id, model.token_format.eos_ids
    kept = 0
    for i in range(12):
        asked = [greedy({**NEVER, "stop_id": "b"}, thinking_token_budget=10)]
        asked += [greedy(AT_ONCE, min_tokens=40)]
        [[budgeted]], [[least]] = (run(served, mixed[i : i + 1], one) for one in asked)
        told = record(served, "b")
        assert told["reason"] == "budget"
        check_record(model, mixed[i], budgeted, NEVER | {"max_thinking_tokens": 10}, told)
        assert len(least) >= 40
        assert not set(least[:39]).intersection(eos)
        kept += least[:30] == plain[i][0][:30]
        assert end in least
    assert kept > 3


def test_a_grammar_governs_the_answer_of_a_pruned_thinking(
    served: LLM, plain: Texts, model: Policy, mixed: Prompts
) -> None:
    end, tokenizer = model.token_format.think_end_id, model.tokenizer
    for i in range(6):
        asked = greedy(AT_ONCE | {"stop_id": "g"}, structured_outputs=STRUCTURE)
        [[ids]] = run(served, mixed[i : i + 1], asked)
        at, told = ids.index(end), record(served, "g")
        assert told["reason"] == "policy"
        assert told["thinking_tokens"] == at == told["step_ends"][0]
        assert ids[:at] == plain[i][0][:at]
        answer = tokenizer.decode(ids[at + 1 :], skip_special_tokens=True)
        assert re.fullmatch("[0-9]{3}x", str(answer)), answer


def test_what_holds_in_the_thinking_puts_the_policy_off(
    served: LLM, mixed: Prompts, monkeypatch: pytest.MonkeyPatch, model: Any
) -> None:
    manager: Any = served.llm_engine.engine_core.engine_core.structured_output_manager
    monkeypatch.setattr(manager, "enable_in_reasoning", True)
    before = counted("policy_off")
    grammar = StructuredOutputsParams(regex="(1\n\n|2\n\n){5}x")
    [[ids]] = run(served, mixed[:1], greedy(AT_ONCE, structured_outputs=grammar))
    text = model.tokenizer.decode(ids, skip_special_tokens=True)
    assert re.fullmatch("([12]\n\n){5}x", text), text
    [[ids]] = run(served, mixed[:1], greedy(AT_ONCE, allowed_token_ids=[5, 6, 7], max_tokens=30))
    assert set(ids) <= {5, 6, 7}
    whys = ("a grammar, which holds in the thinking already", "allowed_token_ids")
    assert counted("policy_off") - before == {(why,): 1 for why in whys}


def test_a_prompt_that_closed_its_thinking_is_left_alone(
    served: LLM, model: Policy, mixed: Prompts
) -> None:
    closed = [*mixed[0], *model.token_format.forced_suffix("free")]
    assert run(served, [closed], greedy({"stop_policy": True})) == run(served, [closed], greedy())
