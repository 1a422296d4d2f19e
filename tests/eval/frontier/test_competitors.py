"""Methods as families of rules."""

from __future__ import annotations

import numpy as np
import pytest
from datasets import Dataset

from ospruner.eval.frontier.causal import Known
from ospruner.eval.frontier.competitors import (
    Said,
    Split,
    Splits,
    learn_stop_family,
    rule_families,
    threshold_family,
)
from ospruner.eval.frontier.learnstop import backtracking, cross_fitted, fit_scores
from ospruner.eval.replay import replay_full, replay_step
from ospruner.eval.table import FloatArray, TraceTable, classifier_targets

WORDS = {0: " so", 1: " Wait"}


def decode(ids: list[int]) -> str:
    return "".join(WORDS[one] for one in ids)


def split(seed: int, prefix: str, count: int = 60) -> Split:
    """Traces whose answers are right, and mostly certain, from some step on."""
    rng = np.random.default_rng(seed)
    rows = []
    for n in range(count):
        steps = int(rng.integers(3, 12))
        right = np.arange(steps) >= rng.integers(1, steps)
        sure = np.where(right ^ (rng.random(steps) < 0.2), 0.1, 1.5) * rng.uniform(0.5, 1, steps)
        rows.append(
            {
                "problem_id": f"{prefix}{n}",
                "family": "",
                "trace_ids": [0] * (10 * steps),
                "step_ends": [10 * (i + 1) for i in range(steps)],
                "forced_answers": [str(7 if x else i) for i, x in enumerate(right.tolist())],
                "forced_correct": right.astype(float).tolist(),
                "forced_entropy": sure.tolist(),
                "forced_answer_entropy": (2 * sure).tolist(),
                "forced_logprob": (-sure).tolist(),
                "matches_final": right.tolist(),
                "forced_answer_tokens": [1] * steps,
                "natural_correct": 1.0,
                "natural_answer_tokens": 1,
                "ended": "natural",
            }
        )
    dataset = Dataset.from_list(rows)
    return Split(dataset, TraceTable.from_dataset(dataset))


@pytest.fixture(scope="module")
def splits() -> Splits:
    return Splits(split(0, "v"), split(1, "t"), 4, decode)


def test_a_rule_without_training_goes_from_at_once_to_never(splits: Splits) -> None:
    families, left_out = rule_families(splits, ["entropy", "es-cot", "just-enough", "no such"])
    assert [family.name for family in families] == ["answer entropy", "ES-CoT"]
    assert list(left_out) == ["Think Just Enough", "no such"]
    assert "which labels do not keep" in left_out["Think Just Enough"]
    table = splits.test.table
    for family in families:
        tokens = [outcome.mean_tokens for outcome in family.test]  # type: ignore[union-attr]
        assert min(tokens) == replay_step(table, 1).mean_tokens
        assert max(tokens) == replay_full(table).mean_tokens
        assert len(family.validation) == len(family.test) > 2


def test_classifiers_choose_thresholds_as_their_authors_do(splits: Splits) -> None:
    def clear(one: Split) -> FloatArray:
        """What a classifier says that sees the answer's fate, but for some noise."""
        table = one.table
        arrived = classifier_targets("terminator", table.correct, table.matches_final, table.mask)
        noise = np.random.default_rng(7).random(table.mask.shape)
        return np.where(table.mask, 0.15 + 0.5 * arrived + 0.2 * noise, 0.0)

    seeds = [Said(clear(splits.validation), clear(splits.test))] * 2
    plain, vote, lynx, calibrated = (
        threshold_family(method, splits, seeds)
        for method in ("probe", "terminator", "lynx", "thought-calibration")
    )
    assert [f.name for f in (plain, vote, lynx, calibrated)] == [
        "probe", "TERMINATOR", "LYNX", "Thought Calibration",
    ]  # fmt: skip
    assert len(vote.test) > 2 * len(plain.test)  # windows of 1, 3 and 10 steps
    assert len(lynx.test) == len(calibrated.test) == 64
    for family in (plain, vote, lynx, calibrated):
        assert all(len(rule) == 2 for rule in family.test)
    # The first is the most careful, the last the boldest.
    first, last = calibrated.test[0][0], calibrated.test[-1][0]  # type: ignore[index]
    assert first.mean_tokens >= last.mean_tokens


def test_learnstop_learns_from_other_problems(splits: Splits) -> None:
    known = Known.of_labels(splits.validation.dataset, splits.validation.table)
    other = Known.of_labels(splits.test.dataset, splits.test.table)
    (scores,) = fit_scores(known, other)
    table = splits.test.table
    right = table.correct[table.mask] > 0.5
    assert scores[table.mask][right].mean() > scores[table.mask][~right].mean() + 0.2
    held = cross_fitted(known)
    assert held.shape == known.table.mask.shape
    assert not np.allclose(held, fit_scores(known, known)[0], atol=1e-6)
    fitted = learn_stop_family(splits, split(2, "r"))
    assert fitted.name == learn_stop_family(splits).name == "LearnStop"
    with pytest.raises(ValueError, match="folds is 3 for 2 problems"):
        cross_fitted(known.subset(np.arange(2)))


def test_backtracking_is_the_share_of_steps_with_such_a_word() -> None:
    one = split(0, "v", 4)
    dataset = one.dataset.map(lambda row: {"trace_ids": [1, *row["trace_ids"][1:]]})
    found = backtracking(dataset, one.table, decode)
    for n, steps in enumerate(one.table.num_steps):
        assert found[n, :steps].tolist() == [1 / (i + 1) for i in range(steps)]
        assert not found[n, steps:].any()
