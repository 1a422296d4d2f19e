"""The transformers engine: forks and traces against texts that are run anew for every token."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2ForCausalLM

from modeling_ospruner import TokenFormat
from modeling_ospruner.stopping_ospruner import mix64
from ospruner.engines.interface import (
    ForkedAnswer,
    ForkRequest,
    Sampled,
    SamplingSettings,
    row_state,
)
from ospruner.engines.transformers import choosing, memory
from ospruner.engines.transformers.batch import SlotLayer
from ospruner.engines.transformers.choosing import choose
from ospruner.engines.transformers.engine import TransformersEngine

from .conftest import ARCHITECTURES, SETTINGS, make_base, prompts, requests


def from_scratch(
    base: PreTrainedModel,
    prefix: Sequence[int],
    fmt: TokenFormat,
    limit: int,
    suffix: Sequence[int],
) -> ForkedAnswer:
    """Encodes prefix and answer anew for every token, without any cache."""
    box = fmt.box_state()
    ids: list[int] = []
    logprobs: list[float] = []
    entropies: list[float] = []
    while True:
        text = torch.tensor([[*prefix, *suffix, *ids]])
        probabilities = base(input_ids=text, use_cache=False).logits[0, -1].double().softmax(-1)
        token = int(probabilities.argmax())
        top = probabilities.sort(descending=True).values[:20]
        entropies.append(sum(-float(p / top.sum()) * math.log(float(p / top.sum())) for p in top))
        entropy, whole = entropies[0], math.fsum(entropies)
        if token in fmt.eos_ids:
            return ForkedAnswer(ids, "eos", logprobs, entropy, whole)
        ids.append(token)
        logprobs.append(math.log(float(probabilities[token])))
        if box.push(token):
            return ForkedAnswer(ids, "closed", logprobs, entropy, whole)
        if len(ids) == limit:
            return ForkedAnswer(ids, "length", logprobs, entropy, whole)


def assert_same(got: ForkedAnswer, expected: ForkedAnswer) -> None:
    assert (got.ids, got.ended) == (expected.ids, expected.ended)
    assert got.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert got.entropy == pytest.approx(expected.entropy, abs=1e-4)
    assert got.whole_entropy == pytest.approx(expected.whole_entropy, abs=1e-3)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_forks_equal_encoding_each_prefix_from_scratch(
    name: str, tiny_tokenizer: PreTrainedTokenizerFast, fmt: TokenFormat
) -> None:
    base: Any = make_base(name, tiny_tokenizer, fmt)
    [brace] = tiny_tokenizer.encode("}", add_special_tokens=False)
    for token in (brace, tiny_tokenizer.eos_token_id):  # lest all answers reach their cap
        base.get_output_embeddings().weight.data[token] *= 2
    engine = TransformersEngine(base, tiny_tokenizer, batch_size=3)
    assert engine.packed == (name == "qwen2")
    asked, suffix = requests(fmt, 12), fmt.forced_suffix()
    answers = engine.fork(asked, suffix, 12, fmt.box_state)
    ends = set()
    with torch.no_grad():
        for request, row in zip(asked, answers, strict=True):
            assert len(row) == len(request.cuts)
            for cut, answer in zip(request.cuts, row, strict=True):
                prefix = [*request.prompt_ids, *request.trace_ids[:cut]]
                assert_same(answer, from_scratch(base, prefix, fmt, 12, suffix))
                ends.add(answer.ended)
    assert ends == {"closed", "eos", "length"}
    without_a_rule = engine.fork(asked, suffix, 4)
    assert {answer.ended for row in without_a_rule for answer in row} == {"eos", "length"}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_options_are_read_in_the_suffix_s_forward(
    name: str, tiny_tokenizer: PreTrainedTokenizerFast, fmt: TokenFormat
) -> None:
    base = make_base(name, tiny_tokenizer)
    engine = TransformersEngine(base, tiny_tokenizer, batch_size=3)
    options = tiny_tokenizer.encode("ABCD", add_special_tokens=False)
    suffix = fmt.forced_suffix()
    asked = [
        dataclasses.replace(request, options=(options[i % 4 :] + options)[: 2 + i % 3])
        for i, request in enumerate(requests(fmt))
    ]
    asked.append(dataclasses.replace(asked[0], options=()))  # its like is decoded beside it
    answers = engine.fork(asked, suffix, 12, fmt.box_state)
    spent = engine.counts.computed
    assert {answer.option_logprobs is None for answer in answers[-1]} == {True}
    told = set()
    for request, row in zip(asked[:-1], answers[:-1], strict=True):
        for cut, answer in zip(request.cuts, row, strict=True):
            text = [*request.prompt_ids, *request.trace_ids[:cut], *suffix]
            with torch.no_grad():
                logits = base(torch.tensor([text]), use_cache=False).logits[0, -1].double()
            shares = (logits[list(request.options)] - logits.max()).exp()
            shares = shares / shares.sum()
            assert answer.option_logprobs == pytest.approx(shares.log().tolist(), abs=1e-4)
            best = int(shares.argmax())
            assert (answer.ids, answer.ended) == ([request.options[best]], "closed")
            assert answer.logprobs == [max(answer.option_logprobs or [])]
            entropy = -float((shares * shares.log()).sum())
            assert (answer.entropy, answer.whole_entropy) == pytest.approx((entropy,) * 2, abs=1e-4)
            told.add(best)
    assert len(told) > 1
    engine.fork(asked[:-1], suffix, 12, fmt.box_state)
    forwards = sum(len(one.prompt_ids) + len(one.trace_ids) for one in asked[:-1] if one.cuts)
    forks = sum(len(one.cuts) * len(suffix) for one in asked[:-1])
    assert engine.counts.computed - spent <= forwards + forks  # nothing was decoded
    with pytest.raises(ValueError, match="options is .5, 5.; it must hold two or more different"):
        dataclasses.replace(asked[0], options=[5, 5])


def test_shared_tokens_are_computed_once(
    tiny_base: Qwen2ForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast, fmt: TokenFormat
) -> None:
    """Counted where they enter the model, by a hook that the engine knows nothing of."""
    entered = 0

    def count(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal entered
        entered += kwargs["input_ids"].numel()

    engine = TransformersEngine(tiny_base, tiny_tokenizer, batch_size=4)
    tiny_base.register_forward_pre_hook(count, with_kwargs=True)
    request = requests(fmt)[5]
    request = ForkRequest(request.prompt_ids, request.trace_ids, sorted(set(request.cuts)))
    answers = engine.fork([request], fmt.forced_suffix(), 8, fmt.box_state)[0]
    assert entered == engine.counts.computed + engine.counts.padding
    fed = [len(a.ids) - (a.ended != "eos") for a in answers]
    forked = sum(len(fmt.forced_suffix()) + n for n in fed)
    tree = len(request.prompt_ids) + len(request.trace_ids) + forked
    assert engine.counts.computed == engine.counts.unique == tree
    # A trace without forks does not run; two of one prompt run each for itself.
    idle = ForkRequest(request.prompt_ids, request.trace_ids, [])
    other = ForkRequest(request.prompt_ids, request.trace_ids[::-1], request.cuts)
    again = [idle, request, other]
    found = engine.fork(again, fmt.forced_suffix(), 8, fmt.box_state)
    assert [[a.ids for a in row] for row in found[:2]] == [[], [a.ids for a in answers]]
    fed = [len(a.ids) - (a.ended != "eos") for a in found[2]]
    more = len(request.trace_ids) + sum(len(fmt.forced_suffix()) + n for n in fed)
    assert engine.counts.computed == 2 * tree + more + len(request.prompt_ids)
    assert engine.counts.unique == 2 * tree + more  # of two traces of one prompt, that once
    assert entered == engine.counts.computed + engine.counts.padding


def naive_sample(
    base: PreTrainedModel, prompt: list[int], key: str, settings: SamplingSettings, fmt: TokenFormat
) -> Sampled:
    """One row alone, encoding everything anew for every token."""
    state, ids = row_state(settings.seed, key), list(prompt)
    trace: list[int] = []
    answer: list[int] = []
    thinking, step = True, 0
    eos = base.generation_config.eos_token_id
    while True:
        logits = base(input_ids=torch.tensor([ids]), use_cache=False).logits[:, -1]
        draw = torch.tensor([(mix64(state ^ step) >> 11) * 2.0**-53], dtype=torch.float64)
        token, step = int(choose(logits, draw, settings)[0]), step + 1
        ids.append(token)
        if token == eos:
            return Sampled(trace, answer, "natural")
        if thinking and token == fmt.think_end_id:
            thinking = False
        elif thinking:
            trace.append(token)
            if len(trace) == settings.max_new_tokens:
                return Sampled(trace, answer, "cap")
        else:
            answer.append(token)
            if len(answer) == settings.max_answer_tokens:
                return Sampled(trace, answer, "natural")


@pytest.mark.parametrize(
    ("name", "temperature", "roundings"),
    [("qwen2", 0.9, 2048), ("qwen2", 0, 131_072), ("lfm2", 0, 131_072)],
)
def test_tokens_do_not_depend_on_the_roundings_of_a_batch(
    name: str,
    temperature: float,
    roundings: int,
    tiny_tokenizer: PreTrainedTokenizerFast,
    fmt: TokenFormat,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows in a batch get logits that are off, as if by other kernels; rows run alone do not."""
    base = make_base(name, tiny_tokenizer)
    settings = dataclasses.replace(SETTINGS, temperature=temperature, max_new_tokens=25)
    noise = roundings * torch.finfo(torch.float32).eps

    def disturb(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if kwargs.get("past_key_values") is not None:
            largest = output.logits.abs().amax(-1, keepdim=True)
            output.logits += (torch.rand_like(output.logits) * 2 - 1) * noise * largest

    def tokens(seed: int) -> list[Any]:
        engine = TransformersEngine(base, tiny_tokenizer, batch_size=3)
        torch.manual_seed(seed)
        traces = engine.sample(prompts(7), settings, fmt)
        asked = [
            ForkRequest(prompt, trace.trace_ids, range(0, len(trace.trace_ids), 6))
            for prompt, trace in zip(prompts(7), traces, strict=True)
        ]
        forks = engine.fork(asked, fmt.forced_suffix(), 6, fmt.box_state)
        return [traces, [[answer.ids for answer in row] for row in forks]]

    undisturbed = tokens(0)
    handle = base.register_forward_hook(disturb, with_kwargs=True)
    assert tokens(0) != undisturbed  # more than the roundings that are expected
    monkeypatch.setattr(choosing, "_ROUNDINGS", roundings)
    disturbed = tokens(1)
    handle.remove()
    assert disturbed == tokens(1)


@pytest.mark.parametrize("name", ["qwen2", "lfm2"])
def test_rows_that_run_alone_depend_on_nothing_else_in_half_precision(
    name: str, tiny_tokenizer: PreTrainedTokenizerFast, fmt: TokenFormat
) -> None:
    base = make_base(name, tiny_tokenizer).bfloat16()
    engine = TransformersEngine(base, tiny_tokenizer, batch_size=1)
    assert engine.batch_effects is None
    asked, keys = prompts(3), [f"row {i}" for i in range(3)]
    settings = dataclasses.replace(SETTINGS, max_new_tokens=12)
    together = engine.sample(asked, settings, fmt, keys)
    assert together == [
        engine.sample([prompt], settings, fmt, [key])[0]
        for prompt, key in zip(asked, keys, strict=True)
    ]
    # Traces that begin alike: the first one's forks are the others', too.
    trace = [9 + (5 * j * j) % 300 for j in range(30)]
    several = [
        ForkRequest(asked[0], [*trace[: 12 + i], *trace[::-1]], [*range(0, 12, 4), 12 + i, 20])
        for i in range(2)
    ]
    forks = engine.fork(several, fmt.forced_suffix(), 3, fmt.box_state)
    alone = [engine.fork([one], fmt.forced_suffix(), 3, fmt.box_state)[0] for one in several]
    assert forks == alone  # log-probabilities and entropies to the last bit


@pytest.mark.parametrize("name", ["qwen2", "lfm2"])
def test_offloaded_bases(
    name: str, tiny_tokenizer: PreTrainedTokenizerFast, fmt: TokenFormat, tmp_path: Path
) -> None:
    """A layer and the embedding are read from disk at each forward: their device is meta."""
    asked, suffix = requests(fmt, 4)[1:], fmt.forced_suffix()
    settings = dataclasses.replace(SETTINGS, max_new_tokens=8)
    found = []
    for offloaded in (False, True):
        base = make_base(name, tiny_tokenizer)
        if offloaded:
            leaves = [key for key, module in base.named_modules() if not list(module.children())]
            spread = {
                key: "disk" if "embed_tokens" in key or ".layers.1." in key else "cpu"
                for key in leaves
            }
            dispatch_model(base, spread, offload_dir=tmp_path)
            meta = {key for key, one in base.named_parameters() if one.device.type == "meta"}
            assert any(".layers.1." in key for key in meta)
            # A tied embedding stays in memory.
            assert ("model.embed_tokens.weight" in meta) == (name == "qwen2")
        engine = TransformersEngine(base, tiny_tokenizer, batch_size=2)
        traces = engine.sample(prompts(3), settings, fmt)
        found.append([engine.packed, traces, engine.fork(asked, suffix, 3, fmt.box_state)])
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
def test_rows_are_admitted_by_free_memory(
    name: str,
    tiny_tokenizer: PreTrainedTokenizerFast,
    fmt: TokenFormat,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = make_base(name, tiny_tokenizer)
    token = 4 * 2 * 2 * 8 * 4  # bytes: layers, keys and values, heads, head size, float32
    free, seen, most = 10**15, [0], [0]
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)

    def look(module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if (cache := kwargs.get("past_key_values")) is None:
            return
        held = 0
        for layer in cache.layers:
            own = layer.buffers if type(layer) is SlotLayer else [layer.keys, layer.values]
            held += sum(one.nbytes for one in own)
        seen.append(held)
        most.append(len(kwargs["input_ids"]))

    def everything() -> tuple[Any, ...]:
        engine = TransformersEngine(base, tiny_tokenizer, memory_share=0.5)
        handle = base.register_forward_hook(look, with_kwargs=True)
        del seen[1:], most[1:]
        sampled = engine.sample(prompts(9), SETTINGS, fmt)
        together = max(most)
        forks = engine.fork(requests(fmt, 5), fmt.forced_suffix(), 6, fmt.box_state)
        handle.remove()
        ids = [[(answer.ids, answer.ended) for answer in row] for row in forks]
        return together, max(seen), sampled, ids

    together, held, *plain = everything()
    assert together == 9
    assert held > 9 * 47 * token // 2  # half of gemma2's layers keep a window only
    # 7 + 40 + 1 + 10 tokens at most, 64 spare ones and a layer's copy: three rows and a half fit.
    free = int(2 * 3.5 * (58 + 64) * token * 1.25)
    if name == "gemma2":
        free = int(2 * 3.5 * ((58 + 64) * (0.5 + 2 * 0.25) + 8 * 0.5) * token)
    together, held, *tight = everything()
    assert together == 3
    assert held <= free // 2
    assert tight == plain
    free = 1000
    with pytest.raises(ValueError, match="54 tokens need 0.00 GB of 0.00 GB free on cpu"):
        everything()


def test_bad_requests_are_refused(
    tiny_base: Qwen2ForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast, fmt: TokenFormat
) -> None:
    engine = TransformersEngine(tiny_base, tiny_tokenizer)
    with pytest.raises(ValueError, match=r"cuts holds \[3\]; each must lie in 0..2"):
        ForkRequest([5], [6, 7], [1, 3])
    assert engine.sample([], SETTINGS, fmt) == []
    assert engine.fork([], [5], 4) == []
