"""A stream of traces through the transformers engine: forks beside sampling, places refilled."""

import random
from collections.abc import Sequence

import pytest
from transformers import PreTrainedTokenizerFast

from modeling_ospruner import TokenFormat
from ospruner.engines.interface import (
    Engine,
    ForkedAnswer,
    ForkRequest,
    Sampled,
    TraceDesk,
    TraceRequest,
)
from ospruner.engines.transformers import memory
from ospruner.engines.transformers.engine import TransformersEngine

from .conftest import SETTINGS, make_base, prompts

COUNT = 23


class Desk(TraceDesk):
    """Gives traces within a window, and keeps what becomes of them.

    Args:
        window: the most traces in flight.
        moody: whether there is sometimes nothing to begin, for no reason.
        asked: the prompts.
    """

    def __init__(
        self, window: int, moody: bool = False, asked: Sequence[Sequence[int]] | None = None
    ) -> None:
        self.window = window
        self.draws = random.Random(1) if moody else None
        self.todo = list(enumerate(prompts(COUNT) if asked is None else asked))[::-1]
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
        number, prompt = self.todo.pop()
        request = TraceRequest(prompt, f"row {number}")
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


def cuts_of(trace: Sampled) -> list[int]:
    """Every fifth token, where the thinking is not too short for a step."""
    length = len(trace.trace_ids)
    return [*range(5, length, 5), length] if length > 2 else []


def run(engine: Engine, desk: Desk, fmt: TokenFormat) -> Desk:
    engine.sample_and_fork(desk, SETTINGS, fmt, fmt.forced_suffix(), 6, fmt.box_state)
    assert not desk.in_flight
    return desk


def apart(
    engine: Engine, fmt: TokenFormat
) -> dict[str, tuple[Sampled, list[tuple[list[int], str]]]]:
    """All traces sampled, then all forked."""
    asked = prompts(COUNT)
    keys = [f"row {n}" for n in range(COUNT)]
    traces = engine.sample(asked, SETTINGS, fmt, keys)
    requests = [
        ForkRequest(prompt, trace.trace_ids, cuts_of(trace))
        for prompt, trace in zip(asked, traces, strict=True)
    ]
    forks = engine.fork(requests, fmt.forced_suffix(), 6, fmt.box_state)
    tokens = [[(one.ids, str(one.ended)) for one in row] for row in forks]
    return dict(zip(keys, zip(traces, tokens, strict=True), strict=True))


def tokens_of(desk: Desk) -> dict[str, tuple[Sampled, list[tuple[list[int], str]]]]:
    return {
        key: (trace, [(one.ids, one.ended) for one in answers])
        for key, (trace, answers) in desk.traces.items()
    }


@pytest.mark.parametrize("name", ["qwen2", "lfm2"])
def test_tokens_are_those_of_sampling_and_forking_apart(
    name: str, tiny_tokenizer: PreTrainedTokenizerFast, fmt: TokenFormat
) -> None:
    base = make_base(name, tiny_tokenizer, fmt)
    expected = apart(TransformersEngine(base, tiny_tokenizer), fmt)
    assert len({len(trace.trace_ids) for trace, _ in expected.values()}) > 8
    assert any(not answers for _, answers in expected.values())  # nothing to fork
    computed = []
    ways = [(4, 6, True), (8, COUNT, False), (1, 1, False), (40, 9, True)]
    for batch_size, window, moody in ways[: 4 if name == "qwen2" else 2]:
        engine = TransformersEngine(base, tiny_tokenizer, batch_size, fork_tokens=60)
        assert tokens_of(run(engine, Desk(window, moody), fmt)) == expected
        for count in (engine.counts, engine.sample_counts):
            assert count.computed >= count.unique > 0
        computed.append((engine.counts.unique, engine.sample_counts.unique))
    assert len(set(computed)) == 1  # what cannot be shared does not depend on the stream


def test_finished_traces_are_forked_and_replaced_while_others_are_sampled(
    tiny_tokenizer: PreTrainedTokenizerFast, fmt: TokenFormat
) -> None:
    base = make_base("qwen2", tiny_tokenizer, fmt)
    engine, desk = TransformersEngine(base, tiny_tokenizer, 8, fork_tokens=150), Desk(11)
    run(engine, desk, fmt)
    assert max(n for _, _, n in desk.log) == 8
    beside = [n for what, _, n in desk.log if what == "done" and n]
    assert len(beside) > COUNT / 2
    # While there are traces to begin: how many others are sampled as one is finished.
    last = max(i for i, (what, _, _) in enumerate(desk.log) if what == "begun")
    busy = [n for what, _, n in desk.log[:last] if what == "sampled"]
    assert sum(busy) / len(busy) > 0.75 * 8


def test_forks_wait_where_memory_does_not_take_them_beside_the_rows(
    tiny_tokenizer: PreTrainedTokenizerFast, fmt: TokenFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, desk = make_base("qwen2", tiny_tokenizer, fmt), Desk(12)
    row = 4 * 2 * 2 * 8 * 4 * (58 + 64) * 1.25  # bytes, as of the test of memory and rows
    monkeypatch.setattr(
        memory, "free_bytes", lambda device: 1000 if len(desk.sampling) > 1 else int(7 * row)
    )
    engine = TransformersEngine(base, tiny_tokenizer, fork_tokens=60, memory_share=0.5)
    run(engine, desk, fmt)
    # The fourth one begun waits for memory, and so do the forks while more than one is sampled.
    assert max(n for _, _, n in desk.log) == 4
    assert max(n for what, key, n in desk.log if what == "done" and desk.traces[key][1]) <= 1
    monkeypatch.undo()
    assert tokens_of(desk) == apart(TransformersEngine(base, tiny_tokenizer), fmt)


def test_what_cannot_be_sampled_or_forked_fails_alone(
    tiny_tokenizer: PreTrainedTokenizerFast, fmt: TokenFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_base("qwen2", tiny_tokenizer, fmt)
    expected = apart(TransformersEngine(base, tiny_tokenizer), fmt)
    asked: list[list[int]] = prompts(COUNT)
    asked[7] = [9] * 300
    asked[20] = [9] * 900
    row = 4 * 2 * 2 * 8 * 4 * (58 + 64) * 1.25
    monkeypatch.setattr(memory, "free_bytes", lambda device: int(2 * 3.5 * row))
    base.config.max_position_embeddings = 500
    desk = Desk(10, asked=asked)
    run(TransformersEngine(base, tiny_tokenizer, memory_share=0.5), desk, fmt)
    assert set(desk.errors) == {"row 7", "row 20"}
    assert "text of 351 tokens need" in desk.errors["row 7"]
    assert "exceed the base's 500 positions" in desk.errors["row 20"]
    assert tokens_of(desk) == {k: one for k, one in expected.items() if k not in desk.errors}
