from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ospruner.eval.evaluation import bootstrap_means, intervals
from ospruner.eval.metrics import AES_ABSOLUTE, AES_RELATIVE
from ospruner.eval.results import Estimate
from ospruner.eval.table import FloatArray, IntArray


def test_aes_by_hand() -> None:
    assert float(AES_ABSOLUTE(0.8, 50, 0.8, 100)) == pytest.approx(0.5)
    assert float(AES_ABSOLUTE(0.9, 50, 0.8, 100)) == pytest.approx(0.5 + 0.3)
    assert float(AES_ABSOLUTE(0.7, 50, 0.8, 100)) == pytest.approx(0.5 - 0.5)
    assert float(AES_RELATIVE(0.7, 50, 0.8, 100)) == pytest.approx(0.5 - 7 / 8)
    assert AES_ABSOLUTE([0.8, 0.9], [100, 50], 0.8, 100).shape == (2,)
    assert AES_RELATIVE.label == "relative, α=1, β=3, γ=7"
    assert AES_ABSOLUTE.label == "absolute, α=1, β=3, γ=5"


@given(st.floats(0, 1), st.floats(0, 1), st.floats(1, 1e5), st.floats(0, 1e5), st.booleans())
def test_aes_rises_with_accuracy_and_falls_with_tokens(
    accuracy: float, base: float, base_tokens: float, tokens: float, relative: bool
) -> None:
    base = max(base, 0.01)
    aes = AES_RELATIVE if relative else AES_ABSOLUTE
    here = float(aes(accuracy, tokens, base, base_tokens))
    assert float(aes(min(1, accuracy + 0.1), tokens, base, base_tokens)) >= here
    assert float(aes(accuracy, tokens + 1, base, base_tokens)) <= here


def test_aes_errors() -> None:
    with pytest.raises(ValueError, match="accuracy is 80"):
        AES_ABSOLUTE(80, 50, 0.8, 100)
    with pytest.raises(ValueError, match="base_tokens is 0"):
        AES_ABSOLUTE(0.8, 50, 0.8, 0)


def test_bootstrap_resamples_whole_problems() -> None:
    """Each problem's traces stay together: means are those of whole problems drawn with repeats."""
    problem_index = np.array([0, 0, 0, 1])
    values = np.array([[1.0], [1.0], [1.0], [0.0]])
    means = bootstrap_means(values, problem_index, replicates=4000, seed=1)
    assert {round(float(m), 9) for m in np.unique(means)} == {0.0, 0.75, 1.0}
    assert float((means == 0.75).mean()) == pytest.approx(0.5, abs=0.04)


def test_bootstrap_is_seeded_and_blocks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    values, index = rng.random((300, 2)), rng.integers(0, 50, 300)
    a = bootstrap_means(values, index, 500, seed=3)
    assert np.array_equal(a, bootstrap_means(values, index, 500, seed=3))
    assert not np.array_equal(a, bootstrap_means(values, index, 500, seed=4))
    monkeypatch.setattr("ospruner.eval.evaluation._BLOCK_ENTRIES", 700)
    np.testing.assert_allclose(a, bootstrap_means(values, index, 500, seed=3), rtol=1e-12)


def interval(values: FloatArray, index: IntArray, replicates: int, seed: int = 0) -> Estimate:
    drawn = bootstrap_means(values[:, None], index, replicates, seed)
    found = intervals({"x": np.concatenate([[[values.mean()]], drawn])})
    return Estimate.of(found.iloc[0], "x")


def test_interval_width_is_that_of_independent_problems() -> None:
    """10 equal traces a problem: the interval is as wide as with one, sqrt(10) of the naive one."""
    rng = np.random.default_rng(0)
    one = (rng.random(400) < 0.6).astype(np.float64)
    found = interval(np.repeat(one, 10), np.repeat(np.arange(400), 10), 4000)
    assert found.value == pytest.approx(one.mean())
    width = 2 * 1.96 * np.sqrt(one.mean() * (1 - one.mean()) / 400)
    assert found.high - found.low == pytest.approx(width, rel=0.1)
    assert found.low < found.value < found.high


def test_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for trial in range(200):
        rate = rng.beta(2, 2, 80)  # problems differ in difficulty
        index = np.repeat(np.arange(80), 4)
        found = interval((rng.random(320) < rate[index]).astype(np.float64), index, 400, trial)
        hits += found.low <= 0.5 <= found.high
    assert 0.90 <= hits / 200 <= 0.985
