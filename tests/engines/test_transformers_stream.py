"""A stream of traces through the transformers engine: forks beside sampling, places refilled."""

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from modeling_ospruner import TokenFormat
from ospruner.engines.interface import Engine, Sampled
from ospruner.engines.transformers import batch, memory
from ospruner.engines.transformers.engine import TransformersEngine

from .conftest import ARCHITECTURES, SETTINGS, Desk, cuts_of, make_base, prompts
from .test_transformers_engine import from_scratch, naive_sample

COUNT = 23
TOKENS = 4 * 2 * 2 * 8 * 4 * (58 + 64) * 1.25  # bytes of a row, as of the test of memory and rows


def run(engine: Engine, desk: Desk, fmt: TokenFormat) -> Desk:
    engine.sample_and_fork(desk, SETTINGS, fmt, fmt.forced_suffix(), 6, fmt.box_state)
    assert not desk.in_flight
    return desk


def tokens_of(desk: Desk) -> dict[str, tuple[Sampled, list[tuple[list[int], str]]]]:
    return {
        key: (trace, [(one.ids, one.ended) for one in answers])
        for key, (trace, answers) in desk.traces.items()
    }


@torch.no_grad()
def anew(
    base: PreTrainedModel, fmt: TokenFormat
) -> dict[str, tuple[Sampled, list[tuple[list[int], str]]]]:
    """Each trace alone, and each fork, encoding everything anew for every token."""
    found = {}
    for n, prompt in enumerate(prompts(COUNT)):
        trace = naive_sample(base, prompt, f"row {n}", SETTINGS, fmt)
        texts = [[*prompt, *trace.trace_ids[:cut]] for cut in cuts_of(trace)]
        forks = [from_scratch(base, text, fmt, 6, fmt.forced_suffix()) for text in texts]
        found[f"row {n}"] = trace, [(one.ids, str(one.ended)) for one in forks]
    return found


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tokens_are_those_of_texts_that_are_run_anew(
    name: str,
    tiny_tokenizer: PreTrainedTokenizerFast,
    fmt: TokenFormat,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows replaced, compacted, realigned: none depends on its neighbours or on its batch."""
    base = make_base(name, tiny_tokenizer, fmt)
    expected = anew(base, fmt)
    assert {trace.ended for trace, _ in expected.values()} == {"natural", "cap"}
    assert any(trace.answer_ids for trace, _ in expected.values())
    assert any(not answers for _, answers in expected.values())  # nothing to fork
    computed = set()
    ways = [(4, 6, True), (8, COUNT, False), (1, 1, False), (40, 9, True)]
    for batch_size, window, moody in ways[: 4 if name == "qwen2" else 2]:
        # Of a pass.
        monkeypatch.setattr(batch, "_MASK_NUMBERS", 64 if batch_size == 4 else 2**24)
        engine = TransformersEngine(base, tiny_tokenizer, batch_size, fork_tokens=60)
        assert tokens_of(run(engine, Desk(prompts(COUNT), window, moody), fmt)) == expected
        for count in (engine.counts, engine.sample_counts):
            assert count.computed >= count.unique > 0
        computed.add((engine.counts.unique, engine.sample_counts.unique))
    assert len(computed) == 1  # what cannot be shared does not depend on the stream
    numbered = engine.sample(prompts(3), SETTINGS, fmt)
    assert numbered == engine.sample(prompts(3), SETTINGS, fmt, ["0", "1", "2"])
    assert numbered != [trace for trace, _ in expected.values()][:3]


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
    plain = run(TransformersEngine(base, tiny_tokenizer), Desk(prompts(COUNT)), fmt)
    assert tokens_of(desk) == tokens_of(plain)


def test_what_cannot_be_sampled_or_forked_fails_alone(
    tiny_tokenizer: PreTrainedTokenizerFast, fmt: TokenFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_base("qwen2", tiny_tokenizer, fmt)
    expected = tokens_of(run(TransformersEngine(base, tiny_tokenizer), Desk(prompts(COUNT)), fmt))
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
