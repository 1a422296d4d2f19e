"""What the tests of engines share: the embedded reasoner and greedy traces of it."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from modeling_ospruner import TokenFormat
from ospruner.demo.shipped import Reasoner
from ospruner.engines.interface import (
    Engine,
    ForkedAnswer,
    ForkRequest,
    Sampled,
    SamplingSettings,
    TraceDesk,
    TraceRequest,
)
from ospruner.engines.transformers.engine import TransformersEngine
from ospruner.formats import DEEPSEEK_R1

from .. import families
from ..chats import prompts_of

GREEDY = SamplingSettings(temperature=0, max_new_tokens=800, max_answer_tokens=16)
SETTINGS = SamplingSettings(
    temperature=0.9, top_p=0.95, max_new_tokens=40, max_answer_tokens=10, seed=3
)
ARCHITECTURES = ("qwen2", "gemma2", "lfm2")  # packed; sequential, with windows; recurrent


@dataclass(frozen=True)
class Tiny:
    """The tiny tokenizer with its format; tiny bases and engines on them."""

    tokenizer: PreTrainedTokenizerFast
    fmt: TokenFormat

    def base(self, name: str, ends: bool = False) -> Any:
        """A tiny base, or one that ends its thinking after few or many tokens."""
        base = families.make_base(name, self.tokenizer)
        if ends:
            output = base.get_output_embeddings()
            assert isinstance(output, torch.nn.Linear)
            output.weight = torch.nn.Parameter(output.weight.detach().clone())
            output.weight.data[self.fmt.think_end_id] *= 2
            output.weight.data[self.tokenizer.eos_token_id] *= 1.5
        return base

    def engine(self, base: Any, *sizes: int, **options: Any) -> TransformersEngine:
        return TransformersEngine(base, self.tokenizer, *sizes, **options)

    def fork(
        self, engine: Engine, asked: Sequence[ForkRequest], most: int
    ) -> list[list[ForkedAnswer]]:
        """Forced answers of at most so many tokens."""
        return engine.fork(asked, self.fmt.forced_suffix(), most, self.fmt.box_state)


@pytest.fixture
def tiny(tiny_tokenizer: PreTrainedTokenizerFast) -> Tiny:
    return Tiny(tiny_tokenizer, TokenFormat.compile(DEEPSEEK_R1, tiny_tokenizer))


def prompts(count: int) -> list[list[int]]:
    return [[5 + (7 * i + 3 * j) % 300 for j in range(3 + i % 5)] for i in range(count)]


def requests(count: int = 7) -> list[ForkRequest]:
    """Traces of different lengths; some without a cut, one with a cut at 0, one cut twice."""
    made = []
    for i, prompt in enumerate(prompts(count)):
        trace = [9 + (11 * i + 5 * j * j) % 300 for j in range(4 + 6 * i)]
        cuts = [c for c in (0, 3, 4, 8, 8, 20, len(trace)) if c <= len(trace)]
        made.append(ForkRequest(prompt, trace, cuts if i != 2 else []))
    return made


def cuts_of(trace: Sampled) -> list[int]:
    """Every fifth token, where the thinking is not too short for a step."""
    length = len(trace.trace_ids)
    return [*range(5, length, 5), length] if length > 2 else []


class Desk(TraceDesk):
    """Gives traces, so many in flight, and keeps what becomes of them.

    A moody one has sometimes nothing to begin, for no reason.
    """

    def __init__(
        self, asked: Sequence[TraceRequest], window: int = 10**6, moody: bool = False
    ) -> None:
        self.window, self.draws = window, random.Random(1) if moody else None
        self.todo = [*reversed(asked)]
        self.in_flight: set[str] = set()
        self.sampling: set[str] = set()
        self.log: list[tuple[str, str, int]] = []  # what, of which trace, how many were sampled
        self.traces: dict[str, tuple[Sampled, Sequence[ForkedAnswer]]] = {}
        self.errors: dict[str, str] = {}

    def begin(self) -> TraceRequest | None:
        if not self.todo or len(self.in_flight) >= self.window:
            return None
        if self.in_flight and self.draws is not None and self.draws.random() < 0.5:
            return None
        request = self.todo.pop()
        self._note("begun", request)
        self.in_flight.add(request.key)
        self.sampling.add(request.key)
        return request

    def sampled(self, request: TraceRequest, trace: Sampled) -> list[int]:
        self._note("sampled", request)
        self.sampling.remove(request.key)
        return cuts_of(trace)

    def done(self, request: TraceRequest, trace: Sampled, answers: Sequence[ForkedAnswer]) -> None:
        self._note("done", request)
        self.in_flight.remove(request.key)
        self.traces[request.key] = trace, answers

    def failed(self, request: TraceRequest, error: Exception) -> None:
        self.in_flight.remove(request.key)
        self.sampling.discard(request.key)
        self.errors[request.key] = f"{type(error).__name__}: {error}"

    def _note(self, what: str, request: TraceRequest) -> None:
        self.log.append((what, request.key, len(self.sampling)))


def rows(asked: Sequence[Sequence[int]]) -> list[TraceRequest]:
    """Traces of prompts, to be sampled."""
    return [TraceRequest(one, f"row {n}") for n, one in enumerate(asked)]


@dataclass(frozen=True)
class Traces:
    """Greedy traces of the embedded reasoner with their answers, by the transformers engine."""

    prompts: list[list[int]]
    sampled: list[Sampled]
    requests: list[ForkRequest]
    answers: list[list[ForkedAnswer]]


def make_traces(reasoner: Reasoner, count: int, shortest: int | None = None) -> Traces:
    """Greedy traces of so many test problems, or the shortest few of them."""
    fmt, prompts = reasoner.token_format, prompts_of(reasoner, count)
    sampled = reasoner.engine.sample(prompts, GREEDY, fmt)
    kept = sorted(range(count), key=lambda i: len(sampled[i].trace_ids))[:shortest]
    prompts, sampled = [prompts[i] for i in kept], [sampled[i] for i in kept]
    requests = [
        ForkRequest(prompt, trace.trace_ids, fmt.step_ends(trace.trace_ids))
        for prompt, trace in zip(prompts, sampled, strict=True)
    ]
    return Traces(prompts, sampled, requests, fork_all(reasoner.engine, reasoner, requests))


@pytest.fixture(scope="session")
def traces(reasoner: Reasoner) -> Traces:
    """Few and short traces, for slow servers."""
    return make_traces(reasoner, 12, shortest=4)


def fork_all(
    engine: Engine, reasoner: Reasoner, requests: Sequence[ForkRequest]
) -> list[list[ForkedAnswer]]:
    """Forced answers at every cut, as labels take them."""
    fmt = reasoner.token_format
    return engine.fork(requests, fmt.forced_suffix(), GREEDY.max_answer_tokens, fmt.box_state)


def choose_all(
    engine: Engine, reasoner: Reasoner, requests: Sequence[ForkRequest], letters: str = "ABCDE"
) -> list[list[ForkedAnswer]]:
    """The likeliest of letters at every cut; the reasoner knows of none, and finds all unlikely."""
    options = [reasoner.tokenizer.encode(letter, add_special_tokens=False)[0] for letter in letters]
    asked = [replace(request, options=options) for request in requests]
    return fork_all(engine, reasoner, asked)


def check_choices(
    ours: Sequence[Sequence[ForkedAnswer]], theirs: Sequence[Sequence[ForkedAnswer]]
) -> None:
    """Equal letters with equal probabilities; a near tie may fall either way."""
    told = set()
    for left, right in zip(ours, theirs, strict=True):
        for one, other in zip(left, right, strict=True):
            assert one.option_logprobs is not None
            assert one.option_logprobs == pytest.approx(other.option_logprobs, abs=1e-3)
            best, second = sorted(one.option_logprobs)[:-3:-1]
            assert one.ids == other.ids or best - second < 1e-3
            told.add(tuple(one.ids))
    assert len(told) > 1


def check_other_answers(engine: Engine, reasoner: Reasoner, traces: Traces) -> None:
    """Letters and free answers are those of the transformers engine."""
    some, own = traces.requests[:2], reasoner.engine
    check_choices(choose_all(own, reasoner, some), choose_all(engine, reasoner, some))
    suffix = reasoner.token_format.forced_suffix("free")
    free = own.fork(some[:1], suffix, 4)
    check_agreement(reasoner, some[:1], free, engine.fork(some[:1], suffix, 4))


def check_agreement(
    reasoner: Reasoner,
    requests: Sequence[ForkRequest],
    ours: Sequence[Sequence[ForkedAnswer]],
    theirs: Sequence[Sequence[ForkedAnswer]],
    tolerance: float = 1e-3,
) -> None:
    """At least 95 % equal answers; every other one must be a near tie, whose gap is printed.

    Equal answers must agree in how they ended, in their log-probabilities and in the entropy.
    """
    fmt, equal = reasoner.token_format, list[bool]()
    for request, left, right in zip(requests, ours, theirs, strict=True):
        assert len(left) == len(right) == len(request.cuts)
        for cut, one, other in zip(request.cuts, left, right, strict=True):
            equal.append(one.ids == other.ids)
            if equal[-1]:
                assert one.ended == other.ended
                assert one.logprobs == pytest.approx(other.logprobs, abs=tolerance)
                assert one.entropy == pytest.approx(other.entropy, abs=tolerance)
                continue
            pairs = enumerate(zip_longest(one.ids, other.ids))
            same = next(i for i, (a, b) in pairs if a != b)
            kept = [*request.prompt_ids, *request.trace_ids[:cut], *fmt.forced_suffix()]
            text = [*kept, *one.ids[:same]]
            with torch.inference_mode():
                top = reasoner.model(torch.tensor([text])).logits[0, -1].topk(2).values
            gap = float(top[0] - top[1])
            print(f"differs after {cut} thinking tokens: the two best logits are {gap:.2e} apart")
            assert gap < tolerance, (cut, one, other)
    print(f"{sum(equal)} of {len(equal)} answers are equal")
    assert sum(equal) >= 0.95 * len(equal)
