"""The benchmarks of promises and of giving up, on a policy that is far too small."""

from __future__ import annotations

import pytest

from ospruner.demo.shipped import Reasoner, draw_split
from ospruner.train.config import StopConfig
from ospruner.train.trainer import StopTrainer

from .conftest import RunScript


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A policy of every price, and the labels of other problems."""
    folder = tmp_path_factory.mktemp("promises")
    for split, count in (("train", 40), ("test", 40)):
        Reasoner().label(draw_split(split, count, 5), folder / split, 5)  # type: ignore[arg-type]
    config = StopConfig(
        str(folder / "run"), prices=[5e-5, 1e-2], batch_size=8, layers=1, num_train_epochs=1,
        use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    StopTrainer(config, folder / "train").train()
    return str(folder / "run"), str(folder / "test")


@pytest.mark.slow
def test_broken_promises_are_counted(run_script: RunScript, trained: tuple[str, str]) -> None:
    policy, labels = trained
    asked = ("--problems", "60,120", "--max-loss", ".05,.3", "--resamples", "50", "--seed", "3")
    found, printed = run_script("promises.py", "--policy", policy, "--labels", labels, *asked)
    assert len(found["rows"]) == 2 * 2 * 4
    for row in found["rows"]:
        assert 0 <= row["broken"] <= row["served"] <= 1
        assert row["saved"] >= 0
    by_choice = {
        name: sum(r["saved"] for r in found["rows"] if r["choice"] == name)
        for name in ("naive", "betting")
    }
    assert by_choice["naive"] > by_choice["betting"]
    assert (found["population"], found["seed"]) == (40, 3)
    assert "5 pt, n=60" in printed


@pytest.mark.slow
def test_giving_up_is_measured(run_script: RunScript, trained: tuple[str, str]) -> None:
    policy, labels = trained
    found, printed = run_script("giving_up.py", "--policy", policy, "--labels", labels)
    assert 0 <= found["hopeless"] <= found["hopeless_of_tokens"] <= 1
    assert len(found["rows"]) == 6
    assert "forced answer's confidence" in printed
