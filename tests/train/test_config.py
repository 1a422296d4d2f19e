"""What a run is: fields that are refused, prices by name, and the rule for what is left out."""

import dataclasses
import warnings
from typing import Any

import numpy as np
import pytest

from ospruner.eval.table import TraceTable
from ospruner.train.config import MOST_PASSES, STEPS, StopConfig
from ospruner.train.prices import GPT_OSS_PRICES, R1_PRICES, chosen_prices, prices_of_batch

from .conftest import RANGE, make_labels


@pytest.fixture
def table() -> TraceTable:
    return TraceTable.from_dataset(make_labels(60))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"head": "index"}, "head is 'index'; it must be one of price, fixed"),
        ({"prices_per_batch": 1}, "prices_per_batch is 1; it must be at least 2"),
        ({"batch_size": 1.5}, "batch_size is 1.5; it must be an integer"),
        ({"max_ungraded": 2}, "max_ungraded is 2; it must lie in"),
        ({"method": "probe", "entropy_bonus": 0.1}, "entropy_bonus is 0.1, but method 'probe'"),
        ({"method": "probe", "prices": [1e-3]}, r"prices is \[0.001\], but method 'probe'"),
        ({"max_steps": 10}, "max_steps is 10 .* counted in passes"),
        ({"gradient_accumulation_steps": 2}, "taken in parts by micro_batch_tokens"),
    ],
)
def test_bad_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    """Others are among the commands of tests/project/bad_inputs.txt."""
    with pytest.raises((TypeError, ValueError), match=message):
        StopConfig("run", use_cpu=True, **fields)


def test_bfloat16_may_be_asked_for_on_a_cpu() -> None:
    assert StopConfig("run", bf16=True).bf16
    assert not StopConfig("run", use_cpu=True).bf16


def test_prices_by_name_by_list_and_wrong(table: TraceTable) -> None:
    assert chosen_prices("r1", False, table) == R1_PRICES
    assert chosen_prices("drpo", False, table) == GPT_OSS_PRICES
    assert chosen_prices("1e-3, 5e-4,0", False, table) == (1e-3, 5e-4, 0.0)
    assert chosen_prices([1e-4, 1e-2], True, table) == (1e-4, 1e-2)
    with pytest.raises(ValueError, match=r"prices is \[\]; .* 'auto', one of .* fall strictly"):
        chosen_prices([], False, table)  # others: tests/project/bad_inputs.txt
    for wrong in ("r1", "1e-4", [1e-3, 1e-4], [0.0, 1e-3]):
        with pytest.raises(ValueError, match="prices is .* 'auto', or the lowest and the highest"):
            chosen_prices(wrong, True, table)


def test_automatic_prices_follow_from_the_labels(table: TraceTable) -> None:
    at = np.minimum(np.arange(table.correct.shape[1]), table.last[:, None])
    accuracy = np.take_along_axis(table.correct, at, 1).mean(0)
    mean = np.take_along_axis(table.lengths.astype(float), at, 1).mean(0)
    best = int(accuracy.argmax())
    worth = float((accuracy[best] - accuracy[0]) / (mean[best] - mean[0]))  # of a token

    low, high = chosen_prices("auto", True, table)
    assert low == pytest.approx(high / 200)
    assert 2 * worth <= high < 5 * worth + 1e-12
    longer = dataclasses.replace(table, lengths=10 * table.lengths)
    assert chosen_prices("auto", True, longer)[1] == pytest.approx(high / 10)
    first, *falling = chosen_prices("auto", False, table)
    assert first <= worth / 2 < 2.5 * first + 1e-12
    assert (len(falling), falling[-1]) == (7, 0.0)
    useless = dataclasses.replace(table, correct=np.ones_like(table.correct))
    with pytest.raises(ValueError, match="thinking gains nothing here"):
        chosen_prices("auto", True, useless)


def test_a_step_is_taken_on_0_and_one_price_of_each_part_of_the_range() -> None:
    ends = (RANGE[0], RANGE[1])
    parts, seen = np.geomspace(*ends, 16), set()
    for step in range(50):
        first, *drawn = prices_of_batch(ends, 16, 0, step)
        assert (first, len(drawn)) == (0, 15)
        for price, low, high in zip(drawn, parts[:-1], parts[1:], strict=True):
            assert low <= price <= high
        assert prices_of_batch(ends, 16, 0, step) == (first, *drawn)
        seen.add(tuple(drawn))
    assert len(seen) == 50
    assert prices_of_batch(ends, 3, 1, 0)[1:] != prices_of_batch(ends, 3, 0, 0)[1:]


def test_what_is_left_out_follows_from_labels_and_base(table: TraceTable) -> None:
    config = StopConfig("run", use_cpu=True)

    def settled(traces: int, width: int = 128, **fields: Any) -> StopConfig:
        chosen = StopConfig("run", use_cpu=True, **fields)
        return chosen.settled(table, traces, magnitude=100.0, width=width)

    passes = {n: settled(n).num_train_epochs or 0.0 for n in (40, 200, 1200, 40_000)}
    assert passes[40] == MOST_PASSES
    assert passes[1200] * -(-1200 // 32) >= STEPS
    assert list(passes.values()) == sorted(passes.values(), reverse=True)
    assert passes[40_000] == 2
    assert settled(40, num_train_epochs=3).num_train_epochs == 3
    assert settled(40, width=128).learning_rate == pytest.approx(5e-4)
    assert settled(40, width=3584).learning_rate == pytest.approx(1.8e-5)  # the paper's: 1e-5
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert settled(40).head_learning_rate == pytest.approx(4e-3)
        assert settled(40, learning_rate=1e-5).head_learning_rate == 1e-5
    with pytest.warns(UserWarning, match=r"a stop logit by 10: head_learning_rate \(0\.1\)"):
        settled(40, head_learning_rate=0.1)
    assert settled(40).prices == list(chosen_prices("auto", True, table))
    assert config.prices == "auto"  # what was given stays
