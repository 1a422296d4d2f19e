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


def areas_of(areas: dict[str, float]) -> Results:
    rows = [{"method": name, **estimate(area).spread("area")} for name, area in areas.items()]
    return Results(dataset="D", setting="S", frontiers=frame_of(rows, "frontiers"))


@pytest.fixture
def tables(load_script: Callable[[str], ModuleType]) -> Any:
    """The script docs/tables.py."""
    return load_script("docs/tables.py")


def test_the_pages_show_what_the_files_hold(tables: Any) -> None:
    for page in tables.PAGES:
        text = page.read_text("utf-8")
        assert tables.BLOCK.search(text), page
        assert tables.filled(text) == text, f"{page.name} is not what `make docs` writes"


def test_readme_names_the_best_of_each_kind(tables: Any) -> None:
    """By area: convergence before the probe, entropy before agreement; our chosen price."""
    rows = [
        row("full trace", 0.7),
        row("OS-Pruner", 0.6, 1e-3, "price"),
        row("OS-Pruner", 0.65, 1e-4, "price", chosen=True),
        row("probe (AES)", 0.5, 0.8, "threshold"),
        row("convergence (AES)", 0.4, 0.7, "threshold"),
        row("best fixed budget", 0.3, 110, "tokens"),
    ]
    results = Results(dataset="D", setting="S", frame=frame_of(rows))
    areas = {
        "OS-Pruner": 0.6,
        "probe": 0.4,
        "convergence": 0.5,
        "answer agreement": 0.2,
        "answer entropy": 0.3,
        "fixed budget": 0.55,
    }
    frontiers = areas_of(areas)
    lines = tables.readme(results.to_dict(), frontiers.to_dict()).splitlines()[2:]
    assert [line.split("|")[1].strip() for line in lines] == [
        "full trace",
        "**OS-Pruner, price=1e-4**",
        "best classifier: convergence, ≥.70",
        "best rule without training: answer entropy",
        "best budget: 110 tokens",
    ]
    assert "65.0 [64.0, 66.0]" in lines[1]
    assert lines[1].endswith("60.0 [59.0, 61.0] |")
    assert "40.0 [39.0, 41.0]" in lines[2]
    assert lines[2].endswith("50.0 [49.0, 51.0] |")


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
    frontiers = areas_of(
        dict.fromkeys((EVERY_PRICE, "probe", "answer entropy", "fixed budget"), 0.5)
    )
    lines = tables.readme(results.to_dict(), frontiers.to_dict()).splitlines()[3:6]
    assert [line.split("|")[1].strip() for line in lines] == [
        "**OS-Pruner, one policy, price=9e-5**",
        "**OS-Pruner, one policy, price=9e-4**",
        "best classifier: probe, ≥.80",
    ]
