"""Replay, resamples, scores and frontiers: by hand, and against other rules."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ospruner.eval.compare import table_rules, worth_asking
from ospruner.eval.evaluation import Report, Rule, bootstrap_means, choose, intervals
from ospruner.eval.frontiers import frontiers, hull
from ospruner.eval.metrics import AES_ABSOLUTE, AES_RELATIVE, AesVariant
from ospruner.eval.replay import (
    Outcome,
    hindsight_oracle,
    hindsight_oracle_no_loss,
    pool,
    replay,
    replay_at,
    replay_budget,
    replay_drop,
    replay_full,
    replay_step,
)
from ospruner.eval.results import Estimate

from ..conftest import LoadScript
from .evaluations import graded, make_table


def summarise(rules: Sequence[Rule], base: Outcome, index: Any, **more: Any) -> list[Any]:
    """The rows of a frame of rules."""
    frame = Report([Rule("full", base), *rules], index, **more).frame
    return [row for _, row in frame.iloc[1:].iterrows()]


def test_what_was_chosen_is_chosen_again_in_each_resample() -> None:
    """Of two rules that are as often right on validation, half of them choose the other."""
    table, half = make_table(5, traces=40), np.arange(40) < 20
    first, full = replay_step(table, 1), replay_full(table)
    rules = []
    for k, (one, right) in enumerate(((first, half), (full, ~half))):
        there = replace(full, correct=right.astype(np.float64), tokens=np.full(40, k + 1.0))
        rules.append(Rule("chosen", one, k, validation=(there,)))
    base = replace(there, tokens=np.full(40, 9.0))
    accurate = AesVariant(alpha=0, beta=1, gamma=1)  # whatever the length
    even, scores = choose(rules, base, np.arange(40), accurate)
    assert scores[0] == scores[1]
    assert even.picks is not None
    assert even.parameter == even.picks[0] == 0
    assert 0.3 < even.picks.mean() < 0.5  # where both are as accurate, the first
    one, other, found = summarise([*rules, even], full, table.problem_index)
    assert found["tokens"] == one["tokens"]
    assert found["tokens_high"] == pytest.approx(other["tokens_high"], rel=0.05)
    assert found["tokens_low"] == pytest.approx(one["tokens_low"], rel=0.05)


@given(st.integers(0, 10**6), st.floats(0, 1))
@settings(deadline=None, max_examples=50)
def test_modes_agree_where_they_must(seed: int, threshold: float) -> None:
    table = make_table(seed)
    pi = np.random.default_rng(seed).random(table.mask.shape)
    by_threshold = replay(table, pi, threshold)
    hard = replay(table, (pi >= threshold).astype(np.float64))  # a certain policy samples nothing
    np.testing.assert_allclose(by_threshold.columns(), hard.columns(), atol=1e-12)
    never = replay(table, np.zeros_like(pi))
    np.testing.assert_array_equal(never.columns(), replay_full(table).columns())
    always = replay(table, np.ones_like(pi))
    np.testing.assert_array_equal(always.columns(), replay_step(table, 1).columns())
    drawn = replay(replace(table, flops=7 * table.lengths.astype(np.float64)), pi)
    np.testing.assert_allclose(drawn.flops, 7 * drawn.tokens)
    # Help less harm is the accuracy gained.
    gained = drawn.correct - never.correct
    np.testing.assert_allclose(drawn.helped - drawn.harmed, gained, atol=1e-12)
    assert (drawn.helped >= 0).all()
    assert (drawn.harmed >= -1e-15).all()


def test_unread_probabilities_may_be_anything_and_nan_continues() -> None:
    table = make_table(4)
    pi = np.random.default_rng(0).random(table.mask.shape).astype(np.float32)
    free = np.arange(8) < table.last[:, None]
    outcomes = [replay(table, np.where(free, pi, odd)).columns() for odd in (np.nan, 7.0)]
    np.testing.assert_array_equal(outcomes[0], outcomes[1])
    np.testing.assert_allclose(outcomes[0], replay(table, pi.astype(np.float64)).columns())
    for threshold in (None, 0.0):
        never = replay(table, np.full(table.mask.shape, np.nan), threshold)
        np.testing.assert_array_equal(never.columns(), replay_full(table).columns())


def test_numbers_out_of_range_are_refused() -> None:
    table = make_table(0)
    pi = np.full(table.mask.shape, 0.5)
    refused: list[tuple[str, Any, tuple[Any, ...]]] = [
        ("probabilities has shape", replay, (table, pi[:, :7])),
        ("probabilities holds 1.5", replay, (table, pi + 1)),
        ("threshold is -0.1", replay, (table, pi, -0.1)),
        ("budget_tokens is -1", replay_budget, (table, -1)),
        ("it must hold 40 steps >= 0", replay_step, (table, 0)),
        ("step_index has shape", replay_at, (table, [1])),
        ("price is -1", hindsight_oracle, (table, -1)),
        ("accuracy is 80", AES_ABSOLUTE, (80, 50, 0.8, 100)),
        ("base_tokens is 0", AES_ABSOLUTE, (1, 50, 0.8, 0)),
    ]
    for message, function, values in refused:
        with pytest.raises(ValueError, match=message):
            function(*values)


def test_summarise_and_compare() -> None:
    table = make_table(7, traces=400, per_problem=2)
    full, early = replay_full(table), replay_step(table, 2)
    rules = [Rule("full trace", full), Rule("step", early, 2, "step")]
    base, result = summarise(rules, full, table.problem_index)
    assert (base["reduction"], base["reduction_low"], base["reduction_high"]) == (0, 0, 0)
    assert base["aes"] == 0
    for name in ("accuracy", "tokens", "reduction", "aes"):  # values: test_another_s_arithmetic
        number = Estimate.of(result, name)
        assert number.low < number.value < number.high
    assert (result.traces, result.problems) == (400, 200)

    difference = Report(rules, table.problem_index).differences.loc[0]
    assert (difference.rule, difference.other) == ("step step 2", "full trace")
    assert difference["accuracy"] == pytest.approx(early.accuracy - full.accuracy)
    for name in ("aes", "aes_low", "reduction_high"):  # the same resamples
        assert difference[name] == pytest.approx(result[name])
    # A baseline that is never right gives no relative score.
    never = replace(full, correct=np.zeros(len(table)))
    (result,) = summarise(rules[1:], never, table.problem_index, variant=AES_RELATIVE)
    assert result["aes_label"] == "relative, α=1, β=3, γ=7"
    assert np.isnan([result["aes"], result["aes_low"]]).all()
    assert not np.isnan(result["accuracy_low"])


def test_thinking_is_charged_as_in_the_paper_and_answers_where_asked_for() -> None:
    """Two rules with the same stops; one of them computes as much again to decide."""
    table = make_table(9)  # a prompt of 100 operations, a token of one
    table = replace(table, flops=100 + table.lengths.astype(np.float64))
    full = replay_full(table)
    stops, probes = np.zeros(len(table), dtype=int), np.full(table.mask.shape, 7.0)
    free = Rule("free", replay_at(table, stops))
    paid = Rule("paid", replay_at(table, stops, probe_tokens=probes, probe_flops=probes + 43))
    less, more = summarise([free, paid], full, table.problem_index, prices=(1e-2,))
    for name in ("tokens", "reduction", "aes", "reward@1e-2", "total_reduction"):
        assert more[name] == less[name], name
    assert more["probe_tokens"] == 7
    first = float(table.lengths[:, 0].mean())
    assert more["flops"] == pytest.approx(150 + first)
    assert less["reward@1e-2"] == pytest.approx(less["accuracy"] - 0.01 * first)
    # Thinking and answer together, which an answer that thinks on makes longer.
    both_paid = AesVariant(charge="generated")
    (one,) = summarise([free], full, table.problem_index, variant=both_paid, prices=(1e-2,))
    outcome, whole = free.outcome, full.mean_tokens + full.answer_tokens.mean()
    spent = outcome.mean_tokens + outcome.answer_tokens.mean()
    assert one["reward@1e-2"] == pytest.approx(outcome.accuracy - 0.01 * spent)
    assert one["total_reduction"] == pytest.approx(1 - spent / whole)
    scored = AES_ABSOLUTE(outcome.accuracy, spent, full.accuracy, whole)
    assert one["aes"] == pytest.approx(float(scored))
    early = table.last > 0
    assert one["answer_after_stop"] == pytest.approx(table.answer_tokens[early, 0].mean())
    assert one["answer_after_end"] == pytest.approx(table.answer_tokens[~early, 0].mean())
    assert one["aes_label"] == "absolute, α=1, β=3, γ=5, of generated"


def test_seeds_of_one_policy_are_one_rule_with_a_wider_interval() -> None:
    """Seeds that differ more than problems do widen the interval; equal seeds do not."""
    table = make_table(5, traces=400)
    table = replace(table, flops=10 * table.lengths.astype(np.float64))
    full, one = replay_full(table), replay_step(table, 1)
    better = replace(one, correct=np.minimum(one.correct + 0.4, 1))
    both = pool([one, better])
    mean = (one.columns() + better.columns()) / 2  # each number of a trace is their mean
    np.testing.assert_array_equal(both.columns(), mean)
    apart = Rule("x", both, 1e-3, "price", (one, better))
    same, alone = replace(apart, outcome=one, seeds=(one, one)), Rule("y", one)
    two, twins, single = summarise([apart, same, alone], full, table.problem_index)
    assert two["accuracy"] == pytest.approx((one.accuracy + better.accuracy) / 2)
    # Of two seeds drawn with replacement half the draws hold one of them twice.
    assert two["accuracy_low"] < one.accuracy + 0.03
    assert two["accuracy_high"] > better.accuracy - 0.03
    assert twins["accuracy"] == single["accuracy"]
    assert twins["accuracy_low"] == pytest.approx(single["accuracy_low"])
    rules = [Rule("full", full), apart, alone]
    between = Report(rules, table.problem_index).differences.set_index("other").loc["y"]
    assert between["accuracy_low"] <= 0.01 < between["accuracy"] < between["accuracy_high"]


def test_oracles_by_hand() -> None:
    table = graded([[0, 1, 1], [0, 1, 0], [0, 0, 0]])
    oracle = hindsight_oracle(table)
    assert oracle.tokens.tolist() == [20, 20, 10]
    assert oracle.correct.tolist() == [1, 1, 0]
    assert oracle.helped.tolist() == [0, 1, 0]
    assert hindsight_oracle(table, 0.2).tokens.tolist() == [10, 10, 10]
    no_loss = hindsight_oracle_no_loss(table)
    assert no_loss.tokens.tolist() == [20, 10, 10]
    assert no_loss.accuracy == replay_full(table).accuracy


def test_best_fixed_rules_are_the_best_of_their_kind_on_validation() -> None:
    validation, test = make_table(seed=3, traces=40), make_table(seed=4)
    full = replay_full(validation)
    base = full.accuracy, full.mean_tokens

    def score(outcome: Outcome) -> float:
        return float(AES_ABSOLUTE(outcome.accuracy, outcome.mean_tokens, *base))

    found = table_rules(validation, test)
    tokens, steps = range(int(validation.lengths.max()) + 2), range(1, 10)
    rows = (replay_budget, tokens), (replay_step, steps), (replay_drop, steps)
    for name, (replayed, values) in zip(found, rows, strict=False):  # the oracle stands last
        rule, _ = choose(found[name], full, validation.problem_index)
        value = int(rule.parameter or 0)
        best = max(score(replayed(validation, one)) for one in values)
        assert score(replayed(validation, value)) == best
        assert rule.outcome.tokens.tolist() == replayed(test, value).tokens.tolist()
        assert rule.picks is not None
        assert len(set(rule.picks[:201].tolist())) > 1  # a resample chooses again


def test_interval_covers_the_truth_as_often_as_it_says() -> None:
    """Which it does where problems are resampled with all their traces."""
    rng = np.random.default_rng(1)
    hits = 0
    for trial in range(200):
        rate = rng.beta(2, 2, 80)  # problems differ in difficulty
        index = np.repeat(np.arange(80), 4)
        values = (rng.random((320, 1)) < rate[index][:, None]).astype(np.float64)
        found = intervals({"x": bootstrap_means(values, index, trial)}).loc[0]
        hits += found["x_low"] <= 0.5 <= found["x_high"]
    assert 0.90 <= hits / 200 <= 0.985


# Right from the second step on, or only at the fourth.
TABLE = graded([[0.0, 1.0, 1.0, 1.0, 1.0]] * 6 + [[0.0, 0.0, 0.0, 1.0, 1.0]] * 4)
ORACLE = hindsight_oracle(TABLE)


def at(step: int) -> Outcome:
    return replay_step(TABLE, step)


def method(*outcomes: Outcome) -> list[Rule]:
    """A method's rules with their outcomes, the same on validation."""
    numbered = enumerate(outcomes)
    return [Rule("m", one, float(k), "price", validation=(one,)) for k, one in numbered]


def gap_closed(rules: list[Rule], price: float) -> Estimate:
    frame, _ = frontiers({"m": rules}, TABLE, TABLE, [price])
    return Estimate(*frame.filter(like="gap@").iloc[0])


def test_the_hull_leaves_out_what_a_mixture_beats() -> None:
    # tokens 10, 20, 30, 40, 50 with accuracy 0, .6, .6, 1, 1
    points = np.array([(o.mean_tokens, o.accuracy) for o in map(at, (5, 3, 1, 4, 2))])
    assert points[hull(points), 0].tolist() == [10, 20, 40, 50]
    assert hull(points[[4, 4]]) == [0]


def test_areas_are_means_over_the_lengths_between_the_trivial_rules() -> None:
    methods = {"oracle": method(ORACLE), "fixed": method(at(2), at(4)), "nothing": []}
    found, chosen = frontiers(methods, TABLE, TABLE)
    # oracle: 28 tokens, accuracy 1; the line from (10, 0) to it, then flat to (50, 1)
    areas = [(18 * 0.5 + 22) / 40, (10 * 0.3 + 20 * 0.8 + 10) / 40, 0.5]
    assert found["area"].tolist() == pytest.approx(areas)
    assert found["method"].tolist() == list(methods)
    assert chosen == {"oracle": [0], "fixed": [0, 1], "nothing": []}
    assert found["lead"].isna().tolist() == [True, False, False]
    fixed = Estimate.of(found.loc[1], "lead")
    assert fixed.value == pytest.approx(areas[0] - areas[1])
    assert fixed.low <= fixed.value <= fixed.high
    assert fixed.low < fixed.high


def test_gap_closed() -> None:
    price = 0.005
    full, best = replay_full(TABLE), hindsight_oracle(TABLE, price)
    assert gap_closed(method(full, best, at(4)), price).value == pytest.approx(1)
    assert gap_closed(method(full), price).value == pytest.approx(0)
    # Step 4: reward 1 - .2, full 1 - .25, oracle 1 - .14
    fourth = gap_closed(method(at(4)), price)
    assert fourth.value == pytest.approx(0.05 / 0.11)
    assert fourth.low <= fourth.value <= fourth.high
    # Rules that are worse than never stopping are not taken: no method is below 0 by its rules.
    assert gap_closed(method(at(2)), 0.001).value == 0  # at step 2: .6 - .02, never: 1 - .05
    # Where tokens are dear, stopping at once is the best: R = -.5 at once, 1 - 2.5 in full; the
    # oracle: at once, or step 2 where it is right (1 - 1 = 0 for 6 of 10, and -.5 for the others).
    assert gap_closed([], 0.05).value == pytest.approx((-0.5 + 1.5) / (-0.2 + 1.5))
    assert worth_asking(TABLE) == (2e-3, 8e-4, 4e-4)  # of 50 tokens


# Exactly solved stopping problems, and the two pictures of them: what they claim holds.


@pytest.fixture
def exact(load_script: LoadScript) -> Any:
    return load_script("docs/examples/optimal_stopping.py")


@pytest.mark.parametrize("penalty", [1e-5, 0.1, 0.5, 0.999])
@pytest.mark.parametrize("gap", [0.1, 1.0, 1e6])
def test_theorem_1(exact: Any, penalty: float, gap: float) -> None:
    problem = exact.theorem1_problem(penalty, gap)
    epsilon = problem.correct[0]
    optimum, stop = exact.solve(problem, penalty)
    assert optimum == pytest.approx((1 - penalty + epsilon) / 2, rel=1e-12)
    assert stop.tolist() == [False, True, True, True]
    _, found = exact.best_threshold(problem, penalty)
    assert found == pytest.approx(epsilon, rel=1e-12)
    assert optimum > gap * found


def test_linear_trace_as_problem_equals_replay(exact: Any) -> None:
    """One trace is a chain of states: the solver and replay must tell the same expectation."""
    table = make_table(seed=5, traces=1, steps=30)
    steps = int(table.num_steps[0])
    assert steps > 2
    correct, lengths = table.correct[0, :steps], table.lengths[0, :steps].astype(float)
    problem = exact.StoppingProblem(correct, lengths, np.eye(steps, k=1), np.eye(steps)[0])
    pi = np.random.default_rng(0).random(table.mask.shape)
    found = exact.policy_value(problem, pi[0, :steps], 0.003), exact.solve(problem, 0.003)[0]
    for value, one in zip(found, (replay(table, pi), hindsight_oracle(table, 0.003)), strict=True):
        assert value == pytest.approx(one.accuracy - 0.003 * one.mean_tokens, abs=1e-12)


def test_theorem_1_is_drawn(load_script: LoadScript, tmp_path: Path) -> None:
    load_script("docs/examples/theorem1.py").main(file := tmp_path / "t.png")
    assert file.read_bytes().startswith(b"\x89PNG")


def test_a_trained_policy_nears_the_optimum_and_no_threshold_does(load_script: LoadScript) -> None:
    example = load_script("docs/examples/markov_stopping.py")
    values = {name: np.array(v) for name, v in example.values(example.make_problem()).items()}
    best = values["Bellman optimum"]
    assert (values["trained policy"] <= best + 1e-9).all()
    assert (best - values["trained policy"] < 0.01).all()
    lost = best - values["best threshold"]
    assert lost.max() > 0.03
    assert (best - values["trained policy"] < lost).sum() >= len(best) - 1
