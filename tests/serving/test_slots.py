"""The stopping rows as tensors, against `StopRow`, token by token."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from modeling_ospruner import StopPolicyConfig
from modeling_ospruner.formats_ospruner import (
    DEEPSEEK_R1,
    HARMONY,
    PLAIN,
    ReasoningFormat,
    TokenFormat,
)
from modeling_ospruner.rules_ospruner import AnswerEntropy, LearnedPolicy, mix64, uniform
from modeling_ospruner.states_ospruner import kind_of
from modeling_ospruner.stopping_ospruner import Phase, RowPlan, StopRow, shape_scores
from ospruner.serving.slots import REASONS, StopSlots, uniforms

MARKERS = (
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>"),
    *("<think>", "</think>", "<tool_call>", "<eos>", "<eos2>"),
)
TEXTS = (
    *("assistant", "analysis", "final", "commentary", " to=x", "a", " ", "\n", ".\n\n", "}\n\nb"),
    *("\n\n", ":", "so:\n\n", "\\", "[", "\\[", "\\]", "$", "$$", "`", "``", "```", "```\n\n$$"),
    *("x[\n\n\\", "$\n\n$", "{", "}", "}{", "\\}", "\\\\", "{}}", "}\\", "box", "So", "the answer"),
)
PIECES = (*MARKERS, *TEXTS)
IDS = {piece: i for i, piece in enumerate(PIECES)}
BEYOND = len(PIECES) + 3  # logits have more columns than the vocabulary has tokens
VOCABULARY = len(PIECES) + 5


def ids_of(*pieces: str) -> tuple[int, ...]:
    return tuple(IDS[piece] for piece in pieces)


def compiled(form: ReasoningFormat, wind_down: Sequence[str] = (), calls: bool = True) -> Any:
    """A format compiled for the pieces above."""
    closing, start, prose = {
        "deepseek-r1": (("</think>", "\n\n"), ("<think>",), False),
        "harmony": (
            ("<|end|>", "<|start|>", "assistant", "<|channel|>", "final", "<|message|>"),
            ("<|channel|>", "analysis", "<|message|>"),
            False,
        ),
        "plain": (("\n\n", "the answer"), (), True),
    }[form.name]
    return TokenFormat(
        format=form,
        think_end_id=IDS[form.think_end] if form.think_end else -1,
        closing_ids=ids_of(*closing),
        box_prefix_ids=ids_of("box", "{"),
        eos_ids=ids_of("<eos>"),
        added_ids=frozenset(range(len(MARKERS))),
        kinds=bytes(0 if piece in MARKERS else kind_of(piece) for piece in PIECES),
        brace_texts={i: text for i, text in enumerate(PIECES) if re.search(r"[{}\\]", text)},
        think_start_ids=ids_of(*start),
        wind_down_ids=ids_of(*wind_down),
        call_ids=frozenset(ids_of("<tool_call>")) if calls else frozenset(),
        displays={i: t for i, t in enumerate(PIECES) if re.search(r"[\\\[\]$`]", t)}
        if prose
        else None,
    )


FORMATS = [
    compiled(form, wind_down, calls)
    for form in (DEEPSEEK_R1, HARMONY, PLAIN)
    for wind_down, calls in (((), True), (("So", ":"), False))
]


def some_settings(draw: random.Random) -> StopPolicyConfig:
    """Any that an engine may be given."""
    sampled = draw.random() < 0.5
    least = draw.choice([0, 0, 3, 12])
    return StopPolicyConfig(
        mode="sample" if sampled else "threshold",
        threshold=None if sampled else draw.choice([0.0, 0.5, 0.9, 1.0]),
        seed=draw.choice([0, 7, -3, 2**70]),
        min_thinking_tokens=least,
        max_thinking_tokens=draw.choice([None, None, least + 20]),
        answer=draw.choice(["forced", "free", "tools"]),
        max_answer_tokens=draw.choice([None, None, 1, 9]),
        answer_do_sample=draw.random() < 0.3,
        mask_reentry=draw.random() < 0.8,
    )


COMPARED = (
    *("phase", "reason", "at_boundary", "thinking_tokens", "nan_steps", "steps"),
    *("forced_at", "forced_end"),
)


def compare(slots: StopSlots, rows: Sequence[StopRow]) -> None:
    """Everything that an engine may ask of a slot."""
    state = {name: slots.state[name].tolist() for name in COMPARED}
    for i, row in enumerate(rows):
        record = row.record
        assert state["phase"][i] == row.phase.value, i
        assert REASONS[state["reason"][i]] == record.reason, i
        assert state["at_boundary"][i] == row.at_boundary, i
        assert state["thinking_tokens"][i] == record.thinking_tokens, i
        assert state["nan_steps"][i] == record.nan_steps, i
        assert state["steps"][i] == len(record.step_ends), i
        assert state["forced_end"][i] - state["forced_at"][i] == len(row.forced), i


@pytest.mark.parametrize("form", FORMATS, ids=lambda one: one.format.name)
@given(st.integers(0, 2**32))
@examples(max_examples=15, deadline=None)
def test_every_slot_goes_the_way_of_its_row(form: TokenFormat, number: int) -> None:
    draw = random.Random(number)
    count, generator = 12, torch.Generator().manual_seed(number)
    slots, rows, ends = StopSlots(form, count, "cpu"), [], []
    common = draw.sample(range(len(PIECES)), 6)  # a small vocabulary, so that tokens meet
    frequent = [*common, *ids_of("a", ".\n\n"), *form.think_start_ids]
    for i in range(count):
        asked = some_settings(draw)
        eos = frozenset({*form.eos_ids, *draw.choice([(), ids_of("<eos2>", "a")])})
        if form.think_end_id >= 0 and draw.random() < 0.1:
            eos |= {form.think_end_id}
        stride = draw.choice([1, 1, 3])
        plan = RowPlan(asked, asked.chosen_rule(stride), form, eos)
        prompt = draw.choices(range(len(PIECES)), k=draw.randrange(4)) + list(form.think_start_ids)
        prompt += draw.choices(frequent, k=draw.randrange(6))
        index = draw.choice([i, 2**63 + i, 5])
        rows.append(StopRow(plan, prompt, index))
        ends.append(draw.choice(ids_of("<eos>", "<eos2>")))
        assert slots.enter(i, plan, prompt, index, ends[-1]) is (rows[-1].phase is Phase.THINKING)
    compare(slots, rows)
    complete: dict[int, int] = {}
    steps: list[list[int]] = [[] for _ in rows]
    said: list[list[float]] = [[] for _ in rows]
    for _ in range(60):
        order = draw.sample(range(count), draw.randint(1, count))
        places = torch.tensor(order)
        probabilities = torch.rand(len(order), generator=generator).float()
        probabilities[torch.rand(len(order), generator=generator) < 0.1] = torch.nan
        decided = slots.decide(places, probabilities)
        for k, i in enumerate(order):
            row = rows[i]
            assert decided.ended[k] == row.at_boundary
            if row.at_boundary:
                row.decide(partial(float, probabilities[k].item()), _none, _none)
                steps[i].append(int(decided.thinking_tokens[k]))
                said[i].append(float(decided.probabilities[k]))
                assert decided.stopped[k] == (row.phase is not Phase.THINKING)
        compare(slots, rows)
        scores = torch.randn(len(order), VOCABULARY, generator=generator)
        favoured = draw.choices(frequent, k=len(order))
        scores[torch.arange(len(order)), torch.tensor(favoured)] += 3
        ours = scores.clone()
        slots.shape(places, ours)
        known = {k: complete[i] for k, i in enumerate(order) if i in complete}
        shape_scores(
            scores,
            [(k, rows[i]) for k, i in enumerate(order) if rows[i].phase is not Phase.THINKING],
            known,
        )
        assert torch.equal(ours, scores)
        tokens = scores.argmax(-1)
        beyond = torch.rand(len(order), generator=generator) < 0.02
        tokens[beyond] = BEYOND
        taken = torch.rand(len(order), generator=generator) < 0.9
        completes = slots.push(places, tokens, taken)
        for k, i in enumerate(order):
            if not taken[k]:
                assert not completes[k]
                continue
            if rows[i].phase is Phase.FORCING and beyond[k]:
                rows[i].forced[0] = BEYOND  # an engine that disobeys; taken as it is
            ended = rows[i].push(int(tokens[k]))
            assert completes[k] == ended
            if ended and int(tokens[k]) not in rows[i].eos_ids:
                complete[i] = ends[i]
        compare(slots, rows)
    for row, ours_ends, ours_said in zip(rows, steps, said, strict=True):
        assert row.record.step_ends == ours_ends
        assert [repr(one) for one in row.record.probabilities] == [repr(one) for one in ours_said]


@given(st.integers(), st.integers(), st.integers(0, 2**40))
@examples(max_examples=300, deadline=None)
def test_draws_are_those_of_every_engine(seed: int, index: int, step: int) -> None:
    stream = mix64(mix64(seed) ^ (index & (2**64 - 1)))
    bits = torch.tensor([stream - 2**64 if stream >> 63 else stream])
    assert uniforms(bits, torch.tensor([step])).item() == uniform(seed, index, step)


def test_a_slot_that_is_left_is_left_alone() -> None:
    form = FORMATS[0]
    asked = StopPolicyConfig(mode="threshold", threshold=0.0)
    plan = RowPlan(asked, asked.chosen_rule(), form, frozenset(form.eos_ids))
    slots, both = StopSlots(form, 2, "cpu"), torch.tensor([0, 1])
    for i in (0, 1):
        slots.enter(i, plan, [*form.think_start_ids], 0, form.eos_ids[0])
    slots.push(both, torch.tensor(ids_of("a", "a")))
    slots.push(both, torch.tensor(ids_of(".\n\n", ".\n\n")))
    slots.leave(0)
    assert slots.at_boundary(both).tolist() == [False, True]
    slots.decide(both, torch.tensor([1.0, 1.0]))
    scores = torch.zeros(2, VOCABULARY)
    slots.shape(both, scores)
    assert scores[0].eq(0).all()
    assert scores[1].argmax() == form.think_end_id
    assert scores[1].isfinite().sum() == 1


def test_what_has_no_place_in_tensors_is_refused_by_name() -> None:
    form = FORMATS[0]
    slots = StopSlots(form, 1, "cpu")
    ruled = StopPolicyConfig(rule=AnswerEntropy())
    plan = RowPlan(ruled, ruled.chosen_rule(), form, frozenset())
    with pytest.raises(ValueError, match="rule is AnswerEntropy; inside an engine"):
        slots.enter(0, plan, [], 0, 0)
    windowed = LearnedPolicy("threshold", 0.5, window=3)
    with pytest.raises(ValueError, match="window is 3; inside an engine"):
        slots.enter(0, RowPlan(StopPolicyConfig(), windowed, form, frozenset()), [], 0, 0)
    asked = StopPolicyConfig(mode="sample")
    with pytest.raises(ValueError, match="format is not the server's"):
        slots.enter(0, RowPlan(asked, asked.chosen_rule(), FORMATS[1], frozenset()), [], 0, 0)
    assert math.isnan(slots.state["threshold"][0])


def _none(*_: Any) -> Any:
    raise AssertionError("the learned policy asks for nothing else")
