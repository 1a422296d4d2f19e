"""Requests on their way to a stop: ahead of themselves, put back, and told to the engine."""

import copy
import math
import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from modeling_ospruner import OSPrunerConfig
from modeling_ospruner.formats_ospruner import ReasoningFormat, TokenFormat, kind_of
from modeling_ospruner.stopping_ospruner import Phase, RowPlan, Said, StopPolicyConfig, StopRecord
from ospruner.formats import DEEPSEEK_R1, HARMONY, PLAIN
from ospruner.serving.core import RowCore, ServedRow, promise_of
from ospruner.serving.requests import CALIBRATION_FIELDS, StopRequest

PIECES = (
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>"),
    *("<think>", "</think>", "<tool_call>", "<eos>", "<eos2>"),
    *("assistant", "analysis", "final", "commentary", " to=x", "a", " ", "\n", ".\n\n", "}\n\nb"),
    *("\n\n", ":", "so:\n\n", "\\[", "\\]", "$$", "```", "{", "}", "\\}"),
    *("box", "the answer", "Wait"),
)
MARKERS = 9
IDS = {piece: i for i, piece in enumerate(PIECES)}


def ids_of(*pieces: str) -> tuple[int, ...]:
    return tuple(IDS[piece] for piece in pieces)


def compiled(form: ReasoningFormat) -> TokenFormat:
    """A format compiled for the pieces above."""
    closing = {
        "deepseek-r1": ("</think>", "\n\n"),
        "harmony": ("<|end|>", "<|start|>", "assistant", "<|channel|>", "final", "<|message|>"),
        "plain": ("\n\n", "the answer"),
    }[form.name]
    starts = {"deepseek-r1": ("<think>",), "harmony": ("<|channel|>", "analysis", "<|message|>")}
    return TokenFormat(
        format=form,
        think_end_id=IDS[form.think_end] if form.think_end else -1,
        closing_ids=ids_of(*closing),
        box_prefix_ids=ids_of("box", "{"),
        eos_ids=ids_of("<eos>"),
        added_ids=frozenset(range(MARKERS)),
        kinds=bytes(0 if i < MARKERS else kind_of(piece) for i, piece in enumerate(PIECES)),
        texts=PIECES,
        think_start_ids=ids_of(*starts.get(form.name, ())),
        call_ids=frozenset(ids_of("<tool_call>")),
    )


SHORT = replace(DEEPSEEK_R1, step_tokens=5)
FORMATS = [compiled(form) for form in (DEEPSEEK_R1, HARMONY, PLAIN, SHORT)]


def served(fmt: TokenFormat, prompt: list[int], **said: Any) -> Any:
    """A request that is stopped so."""
    config = OSPrunerConfig()
    settings = StopPolicyConfig(**said, first_sample_index=3).with_defaults(config)
    eos = frozenset({*fmt.eos_ids, *ids_of("<eos2>")})
    return ServedRow(RowPlan(settings, fmt, eos), prompt, IDS["<eos>"])


def follow(tokens: Iterable[int], *rows: ServedRow) -> None:
    for token in tokens:
        for row in rows:
            row.take(token)


def seen(row: ServedRow) -> tuple[Any, ...]:
    """All that an engine may see of it."""
    inner = row.row
    return (
        *(row.taken, row.complete, inner.phase, repr(inner.record), inner.at_boundary),
        *(list(inner.forced), inner.greedy, inner.masked_ids),
    )


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda one: one.format.name)
@given(st.integers(0, 2**32))
@examples(max_examples=15, deadline=None)
def test_ahead_put_back_and_as_it_was(fmt: TokenFormat, number: int) -> None:
    """Drafts change nothing of a row, go its way, and what was lost is decided as before."""
    draw = random.Random(number)
    frequent = [*draw.sample(range(len(PIECES)), 6), *ids_of("a", ".\n\n"), *fmt.think_start_ids]
    said: dict[str, Any] = {"threshold": draw.choice([0.5, 1.0])}
    said |= {"answer": draw.choice(["forced", "free", "tools"])}
    said |= {"max_thinking_tokens": draw.choice([None, 20])}
    said |= {"max_answer_tokens": draw.choice([None, 4])}
    prompt = draw.choices(frequent, k=2) + list(fmt.think_start_ids)
    row, text = served(fmt, prompt, **said), []
    for _ in range(30):
        before = seen(row)
        tokens = [row.row.forced[0]] if row.row.forced else draw.choices(frequent, k=3)
        quiet = not any(row.may_turn(token, place + 1) for place, token in enumerate(tokens))
        ahead, plain = row.ahead(), copy.deepcopy(row)
        for token in tokens:
            ahead.take(token)
            plain.take(token)
            assert seen(ahead) == seen(plain)
            if quiet:
                assert ahead.row.phase is Phase.THINKING
                assert not ahead.row.at_boundary
        assert seen(row) == before
        text.append(tokens[0])
        row.take(tokens[0])
        if row.row.at_boundary:
            row.row.decide(Said(draw.random()))
    kept = copy.deepcopy(row)
    row.come_back(prompt, text)
    assert seen(row) == seen(kept)  # nothing is lost
    row.taken += 5  # as if tokens had been computed that are not known any more
    row.come_back(prompt, text)
    if row.row.at_boundary:  # an engine asks again
        row.row.decide(row.said[row.taken])
    assert seen(row) == seen(kept)


def test_a_row_is_decided_shaped_and_told_when_it_leaves() -> None:
    fmt, told = FORMATS[0], list[ServedRow]()
    core = RowCore(OSPrunerConfig(), fmt, StopRequest(None, server=True), 0, told.append)
    one, two = (served(fmt, [*fmt.think_start_ids], threshold=0.5) for _ in range(2))
    follow(ids_of("a", ".\n\n"), one, two)
    core.decide([one, two], torch.tensor([[2.0], [torch.nan]]))
    assert one.record.probabilities == pytest.approx([1 / (1 + math.exp(-2.0))])
    assert one.record.prices == []
    logits = torch.zeros(3, len(PIECES))
    core.shape(logits, [(2, one), (0, two)])
    assert logits[2].isfinite().nonzero().flatten().tolist() == [fmt.think_end_id]
    assert not logits[:2].any()
    for row in (one, two):
        core.tell_leaving(row)
    assert told == [one]  # the other one thinks yet
    assert (one.record.reason, one.record.step_ends) == ("policy", [2])
    assert (two.record.nan_steps, two.thinks) == (1, True)
    follow((*fmt.forced_suffix("forced"), *ids_of("a", "}")), one)
    assert one.complete
    core.shape(logits, [(1, one)])
    assert logits[1].isfinite().nonzero().flatten().tolist() == [one.end_id]


def test_what_is_said_of_drafts_holds_once_they_are_accepted() -> None:
    fmt = FORMATS[0]
    core = RowCore(OSPrunerConfig(), fmt, StopRequest(None, server=True), 0)
    row = served(fmt, [*fmt.think_start_ids], threshold=0.5)
    ahead = row.ahead()
    follow(ids_of("a", ".\n\n"), ahead)
    core.decide([ahead], torch.tensor([[-2.0]]))
    follow(ids_of("a", ".\n\n", "a"), row)
    assert row.record.probabilities == pytest.approx([1 / (1 + math.exp(2.0))])


def test_an_ignored_end_of_text_ends_no_thinking() -> None:
    """Under `ignore_eos` an engine goes on, and so does the policy, within the budget."""
    asked = {"stop_mode": "threshold", "stop_threshold": 1.0, "max_thinking_tokens": 4}
    core = RowCore(OSPrunerConfig(), FORMATS[0], StopRequest(None), 0)
    for ends, phase, tokens in ((True, Phase.DONE, 1), (False, Phase.FORCING, 4)):
        row = core.admit(asked, ids_of("<think>"), (), ends=ends)
        assert row is not None
        follow(ids_of("a", "<eos>", "a", ".\n\n"), row)
        if row.row.at_boundary:
            row.row.decide(Said(0.0))
        assert (row.row.phase, row.record.thinking_tokens) == (phase, tokens)
        assert row.record.reason == ("natural" if ends else "budget")


def test_answers_that_think_on_are_counted_with_each_leaving() -> None:
    """By their tokens, markers and words of doubt; after a preemption nothing twice."""
    fmt, told = FORMATS[0], list[tuple[int, int, str]]()

    def note(row: ServedRow) -> None:
        told.append((row.record.answer_tokens, row.record.rethinks, row.record.reason))

    core = RowCore(OSPrunerConfig(), fmt, StopRequest(None, server=True), 0, on_leave=note)
    assert fmt.rethinking_ids == set(ids_of("<think>", "</think>", "Wait"))
    assert FORMATS[1].rethinking_ids == set(ids_of("Wait"))  # its markers end an answer
    natural, stopped, thinking = (
        served(fmt, [*fmt.think_start_ids], threshold=0.5, answer="free") for _ in range(3)
    )
    follow(ids_of("a", ".\n\n"), natural, stopped, thinking)
    stopped.row.decide(Said(0.9))
    follow(ids_of("</think>", " ", "a", "<eos>"), natural)
    answer = ids_of("a", "Wait", " ", "a", "</think>", "a", "<eos>")
    text = [*ids_of("a", ".\n\n"), *fmt.forced_suffix("free"), *answer]
    follow(text[2:5], stopped)
    for row in (natural, stopped, thinking):
        core.tell_leaving(row)
    assert told == [(3, 0, "natural"), (1, 0, "policy")]  # one thinks yet
    stopped.come_back([*fmt.think_start_ids], text)
    core.tell_leaving(stopped)
    assert told[2:] == [(len(answer), 2, "policy")]


def test_a_report_is_json_where_numbers_are_not() -> None:
    row = served(FORMATS[0], [])
    row.row.record = StopRecord(probabilities=[math.nan, 0.5], prices=[math.inf, 1.0])
    told = row.report
    assert (told["probabilities"], told["prices"]) == ([None, 0.5], ["inf", 1.0])


def test_requests_are_admitted_as_they_and_the_server_say() -> None:
    config = OSPrunerConfig(head="price", price_range=[1e-4, 1e-2], price=1e-3)

    def core(**defaults: Any) -> RowCore:
        return RowCore(config, FORMATS[0], StopRequest(defaults, server=True), 5)

    server = core(stop_policy=True, stop_price=2e-4)
    rows = [server.admit(extra, [], []) for extra in (None, {"stop_price": 1e-2}, {"stop_seed": 7})]
    one, dear, seeded = [row for row in rows if row is not None]
    assert [row.plan.settings.price for row in (one, dear)] == [2e-4, 1e-2]
    assert one.plan.settings.seed == dear.plan.settings.seed != 5  # the server's, mixed
    indices = [one.plan.settings.first_sample_index for one in (one, dear, seeded)]
    assert indices == [1, 2, 0]
    assert (seeded.plan.settings.seed, seeded.end_id) == (7, IDS["<eos>"])
    third = server.admit({"stop_seed": 7, "stop_sample_index": 4}, [], [9], end_id=9, text=2)
    assert third is not None
    assert (third.plan.settings.first_sample_index, third.end_id) == (6, 9)
    assert third.plan.eos_ids == {IDS["<eos>"], 9}
    # Over HTTP these are refused; an error in the engine would end all requests.
    for wrong in ({"stop_price": 0.5}, {"stop_treshold": 1}, {"stop_policy": False}):
        assert server.admit(wrong, [], []) is None
    with pytest.raises(ValueError, match="stop_price is 0.5"):
        core(stop_price=0.5)
    split = core(stop_policy=True, stop_control=0.3)
    groups = [row.control for _ in range(500) if (row := split.admit({}, [], [])) is not None]
    assert 0.2 < sum(groups) / len(groups) < 0.4


def test_a_promise_is_kept_by_its_own_settings_alone() -> None:
    promise: dict[str, Any] = {"max_loss": 0.02, "confidence": 0.95, "mode": "threshold"}
    promise |= {"threshold": 0.7, "price": None}
    config = OSPrunerConfig()
    config.calibrations = [promise]
    kept = StopPolicyConfig(max_loss=0.02, seed=4).with_defaults(config)
    assert promise_of(kept, config) == promise
    for other in ({"threshold": 0.6}, {"threshold": 0.7, "answer": "free"}, {"mode": "sample"}):
        assert promise_of(StopPolicyConfig(**other).with_defaults(config), config) is None


def control_row(signals: list[float], promise: dict[str, Any], **defaults: Any) -> ServedRow:
    """A control request that has thought to its end and answered, with a signal at each step."""
    config = OSPrunerConfig()
    config.calibrations = [promise]
    asked = {"stop_policy": True, "stop_max_loss": 0.02, "stop_control": 1.0, **defaults}
    server = RowCore(config, FORMATS[0], StopRequest(asked, server=True), 5)
    row = server.admit({}, ids_of("<think>"), [])
    assert row is not None
    assert row.control
    for signal in signals:
        follow(ids_of("a", ".\n\n"), row)
        server.decide([row], torch.logit(torch.tensor([[signal]])))
    row.take(IDS["</think>"])
    while row.row.forced:
        row.take(row.row.forced[0])
    follow(ids_of("a", "}"), row)
    assert row.complete
    return row


def test_a_control_request_tells_where_the_policy_would_have_stopped() -> None:
    promise: dict[str, Any] = dict.fromkeys(CALIBRATION_FIELDS) | {"disagreement": 0.03}
    promise |= {"max_loss": 0.02, "confidence": 0.95, "mode": "threshold", "threshold": 0.7}
    told = control_row([0.2, 0.8, 0.9], promise).fork
    assert told is not None
    two_steps = ids_of("<think>", "a", ".\n\n", "a", ".\n\n")
    assert told["ids"] == [*two_steps, *FORMATS[0].forced_suffix("forced")]
    assert told["answer_ids"] == list(ids_of("a", "}"))
    assert told["promise"] == {"max_loss": 0.02, "confidence": 0.95, "disagreement": 0.03}
    never = control_row([0.2, 0.3], promise).fork
    assert never is not None
    assert never["ids"] is None
    assert control_row([0.8], promise, stop_max_loss=None, stop_threshold=0.5).fork is None
