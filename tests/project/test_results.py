"""The tables of docs/results.md and README are made from the JSON files; each command exists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from ospruner.eval.methods import EVERY_PRICE
from ospruner.eval.results import Estimate, Results, frame_of

from ..made_results import make_result


def estimate(value: float) -> Estimate:
    return Estimate(value, value - 0.01, value + 0.01)


def row(
    method: str, accuracy: float, parameter: float | None = None, name: str = "", **more: Any
) -> dict[str, Any]:
    columns = make_result(method, accuracy, 100, parameter, name, **more)
    return columns | estimate(accuracy).spread("accuracy")


@pytest.fixture
def tables(load_script: Callable[[str], ModuleType]) -> Any:
    """The script docs/tables.py."""
    return load_script("docs/tables.py")


def test_every_number_is_what_its_files_give(load_script: Callable[[str], ModuleType]) -> None:
    check: Any = load_script("docs/check_numbers.py")
    assert [*check.pages(), *check.signals(check.DOCS)] == []
    assert all("<!-- table: " in page.read_text("utf-8") for page in check.PAGES)


def test_pictures_are_light_and_dark(load_script: Callable[[str], ModuleType]) -> None:
    """They differ in colours alone, and a page shows them."""
    pictures: Any = load_script("docs/pictures.py")
    stems = {path.stem.removesuffix("-dark") for path in pictures.FOLDER.glob("*.svg")}
    assert stems == set(pictures.PICTURES)
    for name in pictures.PICTURES:
        light = (pictures.FOLDER / f"{name}.svg").read_text("utf-8")
        dark = (pictures.FOLDER / f"{name}-dark.svg").read_text("utf-8")
        assert dark == pictures.darkened(light) != light
        assert f"pictures/{name}-dark.svg" in "".join(
            page.read_text("utf-8") for page in pictures.DOCS.glob("*.md")
        )


def test_readme_names_the_best_classifier_and_budget(tables: Any) -> None:
    """By AES, over all classifiers; of one policy the price that was chosen, or some."""
    rows = [
        row("full trace", 0.7),
        row(EVERY_PRICE, 0.6, 1e-3, "price"),
        row("probe", 0.5, 0.8, "threshold") | estimate(0.2).spread("aes"),
        row("convergence", 0.4, 0.7, "threshold") | estimate(0.3).spread("aes"),
        row("answer entropy", 0.4, 0.7, "nats") | estimate(0.9).spread("aes"),
        row("best fixed budget", 0.3, 110, "tokens", kind="limit"),
    ]
    results = Results(dataset="D", setting="S", frame=frame_of(rows))
    lines = tables.readme(results.to_dict()).splitlines()[2:]
    assert [line.split("|")[1].strip() for line in lines] == [
        "full trace",
        "OS-Pruner, one policy, price=1e-3",
        "best classifier: convergence, ≥.70",
        "best fixed budget, 110 tokens",
    ]
    assert "60.0 [59.0, 61.0]" in lines[1]
    assert "40.0 [39.0, 41.0]" in lines[2]


def test_one_policy_is_shown_next_to_the_prices_of_the_rewards(tables: Any) -> None:
    prices = [0.0, 1e-5, 9e-5, 1.2e-4, 9e-4, 2e-3]
    asked = estimate(0.1).spread("reward@1e-3") | estimate(0.1).spread("reward@1e-4")
    rows = [
        row("full trace", 0.7),
        row("probe", 0.45, 0.7, "threshold") | estimate(0.1).spread("aes"),
        row("probe", 0.5, 0.8, "threshold") | estimate(0.2).spread("aes"),
        *(row(EVERY_PRICE, 0.6 - price, price, "price") for price in prices),
        row("best fixed budget", 0.3, 110, "tokens", kind="limit"),
    ]
    frame = frame_of([one | asked for one in rows])
    results = Results(dataset="D", setting="S", frame=frame)
    lines = tables.at_prices(results.to_dict()).splitlines()[2:]
    assert [line.split("|")[1].strip() for line in lines] == [
        "full trace",
        "OS-Pruner, one policy, price=9e-5",
        "OS-Pruner, one policy, price=9e-4",
        "probe, ≥.70",
        "probe, ≥.80",
        "best fixed budget, 110 tokens",
    ]
    frame = frame[[name for name in frame if not name.startswith("reward@")]]
    without = replace(results, frame=frame.assign(chosen=frame.index == 7))
    lines = tables.at_prices(without.to_dict()).splitlines()[3:-3]
    assert [line.split("|")[1].strip() for line in lines] == [
        "OS-Pruner, one policy, price=0",
        "**OS-Pruner, one policy, price=9e-4** (chosen on validation)",
    ]
