"""The transformers engine: forks, traces and streams of them against texts that are run anew."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from transformers import PreTrainedModel, Qwen2ForCausalLM

from modeling_ospruner import TokenFormat
from modeling_ospruner.stopping_ospruner import mix64
from ospruner.engines.interface import (
    Engine,
    ForkedAnswer,
    ForkRequest,
    Sampled,
    SamplingSettings,
    row_state,
)
from ospruner.engines.transformers import batch, choosing, forks, memory
from ospruner.engines.transformers.batch import SlotLayer
from ospruner.engines.transformers.choosing import choose

from .conftest import ARCHITECTURES, SETTINGS, Desk, Tiny, cuts_of, prompts, requests, rows


def from_scratch(
    base: PreTrainedModel, prefix: Sequence[int], fmt: TokenFormat, limit: int
) -> ForkedAnswer:
    """Encodes prefix and answer anew for every token, without any cache."""
    box, ids = fmt.box_state(), list[int]()
    logprobs, entropies = list[float](), list[float]()
    while True:
        text = torch.tensor([[*prefix, *fmt.forced_suffix(), *ids]])
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


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_forks_equal_prefixes_anew(name: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny.base(name, ends=True)
    [brace] = tiny.tokenizer.encode("}", add_special_tokens=False)
    for token in (brace, tiny.tokenizer.eos_token_id):  # lest all answers reach their cap
        base.get_output_embeddings().weight.data[token] *= 2
    engine, asked, ends = tiny.engine(base, 3), requests(12), set()
    assert engine.packed == (name == "qwen2")
    answers = tiny.fork(engine, asked, 12)
    with torch.no_grad():
        for request, row in zip(asked, answers, strict=True):
            assert len(row) == len(request.cuts)
            for cut, answer in zip(request.cuts, row, strict=True):
                prefix = [*request.prompt_ids, *request.trace_ids[:cut]]
                anew = from_scratch(base, prefix, tiny.fmt, 12)
                assert (answer.ids, answer.ended) == (anew.ids, anew.ended)
                assert answer.logprobs == pytest.approx(anew.logprobs, abs=1e-4)
                assert answer.entropy == pytest.approx(anew.entropy, abs=1e-4)
                assert answer.whole_entropy == pytest.approx(anew.whole_entropy, abs=1e-3)
                ends.add(answer.ended)
    assert ends == {"closed", "eos", "length"}
    monkeypatch.setattr("ospruner.engines.transformers.engine.TOGETHER", 5)  # a few at a time
    for row, others in zip(tiny.fork(engine, asked, 12), answers, strict=True):
        assert [answer.ids for answer in row] == [answer.ids for answer in others]
    without_a_rule = engine.fork(asked, tiny.fmt.forced_suffix(), 4)
    assert {answer.ended for row in without_a_rule for answer in row} == {"eos", "length"}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_options_are_read_in_the_suffix_s_forward(name: str, tiny: Tiny) -> None:
    base, suffix = tiny.base(name), tiny.fmt.forced_suffix()
    engine = tiny.engine(base, 3)
    options = tiny.tokenizer.encode("ABCD", add_special_tokens=False)
    asked = [
        dataclasses.replace(request, options=(options[i % 4 :] + options)[: 2 + i % 3])
        for i, request in enumerate(requests())
    ]
    asked.append(dataclasses.replace(asked[0], options=()))  # its like is decoded beside it
    answers = tiny.fork(engine, asked, 12)
    spent = engine.counts.computed
    assert {answer.option_logprobs is None for answer in answers[-1]} == {True}
    told = set()
    for request, row in zip(asked[:-1], answers[:-1], strict=True):
        for cut, answer in zip(request.cuts, row, strict=True):
            text = [*request.prompt_ids, *request.trace_ids[:cut], *suffix]
            with torch.no_grad():
                logits = base(torch.tensor([text]), use_cache=False).logits[0, -1].double()
            logs = logits[list(request.options)].log_softmax(-1)
            assert answer.option_logprobs == pytest.approx(logs.tolist(), abs=1e-4)
            best, entropy = int(logs.argmax()), -float((logs.exp() * logs).sum())
            assert (answer.ids, answer.ended) == ([request.options[best]], "closed")
            assert answer.logprobs == [max(answer.option_logprobs or [])]
            assert (answer.entropy, answer.whole_entropy) == pytest.approx((entropy,) * 2, abs=1e-4)
            told.add(best)
    assert len(told) > 1
    tiny.fork(engine, asked[:-1], 12)
    forwards = sum(len(one.prompt_ids) + len(one.trace_ids) for one in asked[:-1] if one.cuts)
    forks = sum(len(one.cuts) * len(suffix) for one in asked[:-1])
    assert engine.counts.computed - spent <= forwards + forks  # nothing was decoded
    with pytest.raises(ValueError, match="options is .5, 5.; it must hold two or more different"):
        dataclasses.replace(asked[0], options=[5, 5])


def test_shared_tokens_are_computed_once(tiny_base: Qwen2ForCausalLM, tiny: Tiny) -> None:
    """Counted where they enter the model, by a hook that the engine knows nothing of."""
    entered = 0

    def count(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal entered
        entered += kwargs["input_ids"].numel()

    def forked(row: Sequence[ForkedAnswer]) -> int:
        """The tokens that forks feed: of an answer all but the last one, which may be its end."""
        return sum(len(suffix) + len(one.ids) - (one.ended != "eos") for one in row)

    engine, suffix = tiny.engine(tiny_base, 4), tiny.fmt.forced_suffix()
    tiny_base.register_forward_pre_hook(count, with_kwargs=True)
    request = requests()[5]
    request = ForkRequest(request.prompt_ids, request.trace_ids, sorted(set(request.cuts)))
    [answers] = tiny.fork(engine, [request], 8)
    assert entered == engine.counts.computed + engine.counts.padding
    tree = len(request.prompt_ids) + len(request.trace_ids) + forked(answers)
    assert engine.counts.computed == engine.counts.unique == tree
    # A trace without forks does not run; two of one prompt run each for itself.
    idle = ForkRequest(request.prompt_ids, request.trace_ids, [])
    other = ForkRequest(request.prompt_ids, request.trace_ids[::-1], request.cuts)
    found = tiny.fork(engine, [idle, request, other], 8)
    assert [[a.ids for a in row] for row in found[:2]] == [[], [a.ids for a in answers]]
    more = len(request.trace_ids) + forked(found[2])
    assert engine.counts.computed == 2 * tree + more + len(request.prompt_ids)
    assert engine.counts.unique == 2 * tree + more  # of two traces of one prompt, that once
    assert entered == engine.counts.computed + engine.counts.padding


def naive_sample(
    base: PreTrainedModel, prompt: list[int], key: str, settings: SamplingSettings, fmt: TokenFormat
) -> Sampled:
    """One row alone, encoding everything anew for every token."""
    state, ids = row_state(settings.seed, key), list(prompt)
    trace, answer = list[int](), list[int]()
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
    name: str, temperature: float, roundings: int, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows in a batch get logits that are off, as if by other kernels; rows run alone do not."""
    base = tiny.base(name)
    settings = dataclasses.replace(SETTINGS, temperature=temperature, max_new_tokens=25)
    noise = roundings * torch.finfo(torch.float32).eps

    def disturb(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if kwargs.get("past_key_values") is not None:
            largest = output.logits.abs().amax(-1, keepdim=True)
            output.logits += (torch.rand_like(output.logits) * 2 - 1) * noise * largest

    def tokens(seed: int) -> list[Any]:
        engine = tiny.engine(base, 3)
        torch.manual_seed(seed)
        traces = engine.sample(prompts(7), settings, tiny.fmt)
        asked = [
            ForkRequest(prompt, trace.trace_ids, range(0, len(trace.trace_ids), 6))
            for prompt, trace in zip(prompts(7), traces, strict=True)
        ]
        forks = tiny.fork(engine, asked, 6)
        return [traces, [[answer.ids for answer in row] for row in forks]]

    undisturbed = tokens(0)
    handle = base.register_forward_hook(disturb, with_kwargs=True)
    assert tokens(0) != undisturbed  # more than the roundings that are expected
    monkeypatch.setattr(choosing, "_ROUNDINGS", roundings)
    disturbed = tokens(1)
    handle.remove()
    assert disturbed == tokens(1)


@pytest.mark.parametrize("name", ["qwen2", "lfm2"])
def test_rows_that_run_alone_depend_on_nothing_else(name: str, tiny: Tiny) -> None:
    engine = tiny.engine(tiny.base(name).bfloat16(), 1)
    assert engine.batch_effects is None
    asked, keys = prompts(3), [f"row {i}" for i in range(3)]
    settings = dataclasses.replace(SETTINGS, max_new_tokens=12)
    together = engine.sample(asked, settings, tiny.fmt, keys)
    for prompt, key, trace in zip(asked, keys, together, strict=True):
        assert engine.sample([prompt], settings, tiny.fmt, [key]) == [trace]
    # Traces that begin alike: the first one's forks are the others', too.
    ids = [9 + (5 * j * j) % 300 for j in range(30)]
    several = [
        ForkRequest(asked[0], [*ids[: 12 + i], *ids[::-1]], [*range(0, 12, 4), 12 + i, 20])
        for i in range(2)
    ]
    alone = [tiny.fork(engine, [one], 3)[0] for one in several]
    assert tiny.fork(engine, several, 3) == alone  # log-probabilities and entropies to the last bit


@pytest.mark.parametrize("name", ["qwen2", "lfm2"])
def test_offloaded_bases(name: str, tiny: Tiny, tmp_path: Path) -> None:
    """A layer and the embedding are read from disk at each forward: their device is meta."""
    settings = dataclasses.replace(SETTINGS, max_new_tokens=8)
    found = []
    for offloaded in (False, True):
        base = tiny.base(name)
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
        engine = tiny.engine(base, 2)
        traces = engine.sample(prompts(3), settings, tiny.fmt)
        found.append([engine.packed, traces, tiny.fork(engine, requests(4)[1:], 3)])
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
def test_free_memory_admits_rows(name: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny.base(name)
    token = 4 * 2 * 2 * 8 * 4  # bytes: layers, keys and values, heads, head size, float32
    free, seen = 10**15, list[tuple[int, int]]()  # rows, and bytes that they hold
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)

    def look(module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        held = 0
        for layer in getattr(kwargs.get("past_key_values"), "layers", ()):
            own = layer.buffers if type(layer) is SlotLayer else [layer.keys, layer.values]
            held += sum(one.nbytes for one in own)
        seen.append((len(kwargs["input_ids"]) if held else 0, held))

    def everything() -> tuple[Any, ...]:
        engine = tiny.engine(base, memory_share=0.5)
        handle = base.register_forward_hook(look, with_kwargs=True)
        seen.clear()
        sampled = engine.sample(prompts(9), SETTINGS, tiny.fmt)
        together = max(rows for rows, _ in seen)
        forks = tiny.fork(engine, requests(5), 6)
        handle.remove()
        ids = [[(answer.ids, answer.ended) for answer in row] for row in forks]
        return together, max(held for _, held in seen), sampled, ids

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


def test_bad_and_no_requests(tiny_base: Qwen2ForCausalLM, tiny: Tiny) -> None:
    engine = tiny.engine(tiny_base)
    with pytest.raises(ValueError, match=r"cuts holds \[3\]; each must lie in 0..2"):
        ForkRequest([5], [6, 7], [1, 3])
    assert engine.sample([], SETTINGS, tiny.fmt) == []
    assert engine.fork([], [5], 4) == []


COUNT = 23
TOKENS = 4 * 2 * 2 * 8 * 4 * (58 + 64) * 1.25  # bytes of a row, as of the test of memory and rows
Tokens = dict[str, tuple[Sampled, list[tuple[list[int], str]]]]


def run(tiny: Tiny, engine: Engine, desk: Desk) -> Tokens:
    """What becomes of a desk's traces: the tokens of each, and of its answers."""
    fmt = tiny.fmt
    engine.sample_and_fork(desk, SETTINGS, fmt, fmt.forced_suffix(), 6, fmt.box_state)
    assert not desk.in_flight
    return {
        key: (trace, [(one.ids, str(one.ended)) for one in answers])
        for key, (trace, answers) in desk.traces.items()
    }


@torch.no_grad()
def anew(base: Any, tiny: Tiny) -> Tokens:
    """Each trace alone, and each fork, encoding everything anew for every token."""
    found = {}
    for n, prompt in enumerate(prompts(COUNT)):
        trace = naive_sample(base, prompt, f"row {n}", SETTINGS, tiny.fmt)
        texts = [[*prompt, *trace.trace_ids[:cut]] for cut in cuts_of(trace)]
        forks = [from_scratch(base, text, tiny.fmt, 6) for text in texts]
        found[f"row {n}"] = trace, [(one.ids, str(one.ended)) for one in forks]
    return found


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tokens_are_those_run_anew(name: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows replaced, compacted, realigned: none depends on its neighbours or on its batch."""
    base = tiny.base(name, ends=True)
    expected = anew(base, tiny)
    assert {trace.ended for trace, _ in expected.values()} == {"natural", "cap"}
    assert any(trace.answer_ids for trace, _ in expected.values())
    assert any(not answers for _, answers in expected.values())  # nothing to fork
    computed = set()
    ways = [(4, 6, True), (8, COUNT, False), (1, 1, False), (40, 9, True)]
    for batch_size, window, moody in ways[: 4 if name == "qwen2" else 2]:
        for module in (batch, forks):
            monkeypatch.setattr(module, "MASK_NUMBERS", 64 if batch_size == 4 else 2**24)
        engine = tiny.engine(base, batch_size, fork_tokens=60)
        assert run(tiny, engine, Desk(rows(prompts(COUNT)), window, moody)) == expected
        for count in (engine.counts, engine.sample_counts):
            assert count.computed >= count.unique > 0
        computed.add((engine.counts.unique, engine.sample_counts.unique))
    assert len(computed) == 1  # what cannot be shared does not depend on the stream
    numbered = engine.sample(prompts(3), SETTINGS, tiny.fmt)
    assert numbered == engine.sample(prompts(3), SETTINGS, tiny.fmt, ["0", "1", "2"])
    assert numbered != [trace for trace, _ in expected.values()][:3]


def test_finished_traces_are_forked_and_replaced_while_others_are_sampled(tiny: Tiny) -> None:
    engine = tiny.engine(tiny.base("qwen2", ends=True), 8, fork_tokens=150)
    desk = Desk(rows(prompts(COUNT)), 11)
    run(tiny, engine, desk)
    assert max(n for _, _, n in desk.log) == 8
    beside = [n for what, _, n in desk.log if what == "done" and n]
    assert len(beside) > COUNT / 2
    # While there are traces to begin: how many others are sampled as one is finished.
    last = max(i for i, (what, _, _) in enumerate(desk.log) if what == "begun")
    busy = [n for what, _, n in desk.log[:last] if what == "sampled"]
    assert sum(busy) / len(busy) > 0.75 * 8


def test_forks_wait_for_memory_beside_the_rows(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    base, desk = tiny.base("qwen2", ends=True), Desk(rows(prompts(COUNT)), 12)
    monkeypatch.setattr(
        memory, "free_bytes", lambda device: 1000 if len(desk.sampling) > 1 else int(7 * TOKENS)
    )
    found = run(tiny, tiny.engine(base, fork_tokens=60, memory_share=0.5), desk)
    # The fourth one begun waits for memory, and so do the forks while more than one is sampled.
    assert max(n for _, _, n in desk.log) == 4
    assert max(n for what, key, n in desk.log if what == "done" and desk.traces[key][1]) <= 1
    monkeypatch.undo()
    assert found == run(tiny, tiny.engine(base), Desk(rows(prompts(COUNT))))


def test_what_cannot_be_done_fails_alone(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    base, asked = tiny.base("qwen2", ends=True), prompts(COUNT)
    expected = run(tiny, tiny.engine(base), Desk(rows(asked)))
    asked[7], asked[20] = [9] * 300, [9] * 900
    monkeypatch.setattr(memory, "free_bytes", lambda device: int(2 * 3.5 * TOKENS))
    base.config.max_position_embeddings = 500
    desk = Desk(rows(asked), 10)
    found = run(tiny, tiny.engine(base, memory_share=0.5), desk)
    assert set(desk.errors) == {"row 7", "row 20"}
    assert "text of 351 tokens need" in desk.errors["row 7"]
    assert "exceed the base's 500 positions" in desk.errors["row 20"]
    assert found == {k: one for k, one in expected.items() if k not in desk.errors}
