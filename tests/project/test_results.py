"""docs/results.md and README's table: each number is in the JSON files, each command exists."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ospruner.train import from_labels, loop
from ospruner.train.settings import TrainSettings
from ospruner.train.toy.demo import FULL, train_settings
from ospruner_cli import app

NAMES = {  # of a row: the method's in the file, and its parameter where a method has several
    "full trace": ("full trace", None),
    "OS-Pruner, λ=5e-3": ("OS-Pruner", 5e-3),
    "OS-Pruner, λ=1e-3": ("OS-Pruner", 1e-3),
    "OS-Pruner, λ=5e-4": ("OS-Pruner", 5e-4),
    "OS-Pruner, λ=2e-4": ("OS-Pruner", 2e-4),
    "probe, ≥0.80": ("probe", 0.8),
    "110 tokens": ("best fixed budget", 110),
    "best fixed budget (110 tokens)": ("best fixed budget", 110),
    "hindsight oracle": ("hindsight oracle", None),
}
CHOSEN = {  # how the page says it: how the demo's table says it
    "best of the paper's thresholds": "paper",
    "tuned threshold": "1 point",
    "threshold tuned for AES": "AES",
}
THRESHOLD = re.compile(r"(?:answer )?(.*), (.*) \(≥(.*)\)")
SPREAD = (
    "accuracy_points",
    "accuracy_standard_error",
    "tokens_percent",
    "reward_points",
    "indifferent_tokens_percent",
    "equal_tokens_accuracy_points",
)


def tables(page: Path) -> list[list[list[str]]]:
    """The tables of a page: rows of cells, without the header."""
    found = re.findall(r"((?:^\|.*\n)+)", page.read_text("utf-8"), re.MULTILINE)
    return [
        [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
        for table in found
    ]


def dicts(value: Any) -> Iterator[dict[str, Any]]:
    """Every object in a JSON value, itself included."""
    if isinstance(value, dict):
        yield value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for one in inner:
        yield from dicts(one)


def numbers_of(name: str, results: Any) -> dict[str, Any]:
    """What the file says of a table's row."""
    name = re.sub(r"\*\*|best [a-z ]+: | \(chosen.*\)", "", name)
    method, parameter = NAMES.get(name, (name, None))
    if tuned := THRESHOLD.fullmatch(name):
        method, parameter = f"{tuned[1]} ({CHOSEN[tuned[2]]})", float(tuned[3])
    fits = [
        one
        for one in dicts(results)
        if one.get("method") == method and parameter in (None, one["parameter"])
    ]
    assert fits, name
    assert all(one["accuracy"] == fits[0]["accuracy"] for one in fits), name
    return fits[0]


def cell(numbers: dict[str, float], scale: float, digits: int, sign: str = "") -> str:
    low, value, high = (
        format(scale * numbers[key], f"{sign}.{digits}f") for key in ("low", "value", "high")
    )
    return f"{value} [{low}, {high}]"


def points(name: str, results: Any) -> list[str]:
    found = numbers_of(name, results)
    layout = (("accuracy", 100, 1), ("tokens", 1, 0), ("reduction", 100, 1), ("aes", 1, 2))
    return [cell(found[key], scale, digits) for key, scale, digits in layout]


@pytest.fixture
def demo(repo_dir: Path) -> Any:
    return json.loads((repo_dir / "docs" / "demo-full.json").read_text("utf-8"))


@pytest.fixture
def frontier(repo_dir: Path) -> Any:
    """The file's frontiers by method, as the pages name them."""
    file = json.loads((repo_dir / "docs" / "frontier-full.json").read_text("utf-8"))
    by_name = {
        {"convergence": "answer convergence"}.get(one["method"], one["method"]): one
        for one in file["frontiers"]
    }
    return {
        "areas": {name: one["area"] for name, one in by_name.items()},
        "leads": {name: one["lead"] for name, one in by_name.items()},
        "gap_closed": {name: dict(one["gap_closed"]) for name, one in by_name.items()},
        "seed_spread": file["about"]["seed_spread"],
    }


def test_the_five_rows_of_readme(repo_dir: Path, demo: Any, frontier: Any) -> None:
    (rows,) = tables(repo_dir / "README.md")
    full, ours, classifier, rule, budget = rows
    assert full[1:] == [*points(full[0], demo)[:2], "0.0", "0.00", ""]
    areas = frontier["areas"]
    for row, method in ((ours, "OS-Pruner"), (classifier, "probe"), (budget, "fixed budget")):
        assert row[1:] == [*points(row[0], demo), cell(areas[method], 100, 1)]
    name = rule[0].rpartition(": ")[2]
    assert rule[1:] == ["–"] * 4 + [cell(areas[name], 100, 1)]
    classifiers, without = ({"probe", "answer convergence"}, areas.keys() - {"OS-Pruner"})
    assert max(classifiers, key=lambda one: areas[one]["value"]) == "probe"
    assert name == max(without - classifiers, key=lambda one: areas[one]["value"])


def test_the_rows_of_the_results_page(repo_dir: Path, demo: Any, frontier: Any) -> None:
    of_points, areas, gaps, _, _, spread, _ = tables(repo_dir / "docs" / "results.md")
    assert len(of_points) == 13
    for name, *cells in of_points:
        assert cells == points(name, demo)
    assert [row[0] for row in areas] == [row[0] for row in gaps] == list(frontier["areas"])
    for name, area, difference in areas:
        assert area == cell(frontier["areas"][name], 100, 1)
        less = frontier["leads"][name]
        assert difference == ("" if less is None else cell(less, 100, 1, "+"))
    for name, *cells in gaps:
        assert cells == [
            cell(frontier["gap_closed"][name][penalty], 100, 1) for penalty in (5e-4, 2e-4, 1e-4)
        ]
    assert len(spread) == len(frontier["seed_spread"])
    for penalty, *cells in spread:
        found = frontier["seed_spread"][f"lam{penalty}"]
        digits = (2, 2, 1, 2, 1, 2)
        assert cells == [f"{found[key]:.{n}f}" for key, n in zip(SPREAD, digits, strict=True)]


def test_the_bonus_is_trained_as_the_demo_trains(
    repo_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page's `ospruner train` has the settings of the full demo, whose numbers it prints."""
    lines = re.findall(
        r"^ospruner train (.*--entropy-bonus.*)", (repo_dir / "docs/results.md").read_text(), re.M
    )
    asked: list[TrainSettings] = []

    def train_from_labels(labels: str, out: Path, settings: Any, **others: Any) -> list[Any]:
        asked.append(settings(None))
        return []

    monkeypatch.setattr(from_labels, "train_from_labels", train_from_labels)
    monkeypatch.setattr(loop, "print_stages", lambda *arguments: None)
    for line in lines:
        done = CliRunner().invoke(app, ["train", *shlex.split(line)], catch_exceptions=False)
        assert done.exit_code == 0
    assert asked == [train_settings(FULL, 5, FULL.length_penalties)]
