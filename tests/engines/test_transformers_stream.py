"""A stream of traces through the transformers engine: forks beside sampling, places refilled."""

import pytest
from transformers import PreTrainedTokenizerFast

from modeling_ospruner import TokenFormat
from ospruner.engines.interface import Engine, ForkRequest, Sampled
from ospruner.engines.transformers import memory
from ospruner.engines.transformers.engine import TransformersEngine

from .conftest import SETTINGS, Desk, cuts_of, make_base, prompts

COUNT = 23
TOKENS = 4 * 2 * 2 * 8 * 4 * (58 + 64) * 1.25  # bytes of a row, as of the test of memory and rows


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
        assert tokens_of(run(engine, Desk(prompts(COUNT), window, moody), fmt)) == expected
        for count in (engine.counts, engine.sample_counts):
            assert count.computed >= count.unique > 0
        computed.append((engine.counts.unique, engine.sample_counts.unique))
    assert len(set(computed)) == 1  # what cannot be shared does not depend on the stream


def test_finished_traces_are_forked_and_replaced_while_others_are_sampled(
    tiny_tokenizer: PreTrainedTokenizerFast, fmt: TokenFormat
) -> None:
    base = make_base("qwen2", tiny_tokenizer, fmt)
    engine = TransformersEngine(base, tiny_tokenizer, 8, fork_tokens=150)
    desk = Desk(prompts(COUNT), 11)
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
    base, desk = make_base("qwen2", tiny_tokenizer, fmt), Desk(prompts(COUNT), 12)
    monkeypatch.setattr(
        memory, "free_bytes", lambda device: 1000 if len(desk.sampling) > 1 else int(7 * TOKENS)
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
    monkeypatch.setattr(memory, "free_bytes", lambda device: int(2 * 3.5 * TOKENS))
    base.config.max_position_embeddings = 500
    desk = Desk(asked, 10)
    run(TransformersEngine(base, tiny_tokenizer, memory_share=0.5), desk, fmt)
    assert set(desk.errors) == {"row 7", "row 20"}
    assert "text of 351 tokens need" in desk.errors["row 7"]
    assert "exceed the base's 500 positions" in desk.errors["row 20"]
    assert tokens_of(desk) == {k: one for k, one in expected.items() if k not in desk.errors}
