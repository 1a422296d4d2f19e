"""The one file of results: whole or not at all, of one version, without NaN in its JSON."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ospruner.eval.results import Difference, Estimate, Frontier, Results

from ..made_results import make_result

SOME = Estimate(0.1, 0.05, 0.2)
NONE = Estimate(math.nan, math.nan, math.nan)
WHOLE = Results(
    dataset="MATH-500",
    setting="made up",
    results=[make_result("full trace", 0.6, 200), make_result("OS-Pruner", 0.6, 90, 5e-5, "λ")],
    limits=[replace(make_result("hindsight oracle", 0.8, 50), aes=NONE)],
    chosen=1,
    differences=[Difference("OS-Pruner λ=5e-5", "full trace", SOME, SOME, SOME, NONE)],
    frontiers=[Frontier("OS-Pruner", SOME, None, ((1e-4, SOME),)), Frontier("p", SOME, SOME, ())],
    natural_accuracy=SOME,
    about={"seed": 3},
)


def test_what_is_saved_is_read(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    WHOLE.save(path)
    WHOLE.save(path)  # replaced
    assert Results.read(path) == WHOLE
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]
    content = json.loads(path.read_text("utf-8"), parse_constant=lambda name: pytest.fail(name))
    assert content["limits"][0]["aes"] == {"value": None, "low": None, "high": None}
    assert math.isnan(Results.read(path).limits[0].aes.low)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    WHOLE.save(path)
    before = path.read_bytes()
    for about in ({"folder": tmp_path}, {"loss": math.inf}):
        with pytest.raises((TypeError, ValueError)):
            replace(WHOLE, about=about).save(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ([], "has format None and version None, this version of ospruner reads 'ospruner-results'"),
        ({"about": {}, "results": []}, "has format None"),
        (WHOLE.to_dict() | {"version": 9}, "version 9, .* version 1: make the results again"),
        (WHOLE.to_dict() | {"format": "other"}, "has format 'other'"),
        (WHOLE.to_dict() | {"colour": "red"}, "no whole results .*colour"),
        ({k: v for k, v in WHOLE.to_dict().items() if k != "limits"}, "no whole results .*limits"),
        (WHOLE.to_dict() | {"results": [{"method": "x"}]}, "no whole results"),
        (WHOLE.to_dict() | {"chosen": 7}, "chosen is 7; it must be a place in results, 0 to 1"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: Any, complaint: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(content), "utf-8")
    with pytest.raises(ValueError, match=complaint):
        Results.read(path)
    path.write_text("{", "utf-8")
    with pytest.raises(ValueError, match="results.json is damaged: no JSON"):
        Results.read(path)


@pytest.mark.parametrize("name", ["demo-full", "frontier-full"])
def test_the_documented_numbers_are_results(repo_dir: Path, name: str) -> None:
    found = Results.read(repo_dir / "docs" / f"{name}.json")
    assert found.results or found.frontiers


def test_results_say_what_was_measured() -> None:
    with pytest.raises(ValueError, match="setting is empty"):
        Results(dataset="MATH-500", setting=" ")


def test_numbers_as_text() -> None:
    number = Estimate(0.7124, 0.7012, 0.7301)
    assert number.text(100, 1) == "71.2 [70.1, 73.0]"
    assert number.short_text(100, 1) == "71.2 ±1.8"  # the wider half
    assert Estimate(-0.0004, -0.004, math.nan).text(1, 2, signed=True) == "+0.00 [+0.00, –]"
    assert Estimate(12345.6, 12000, 12500).text(1, 0) == "12,346 [12,000, 12,500]"


def test_names() -> None:
    texts = [
        make_result("m", 0.5, 9, parameter, name).name
        for parameter, name in (
            *((None, ""), (5e-3, "λ"), (0.7, "threshold"), (1.0, "threshold")),
            *((110, "tokens"), (4, "step"), (0.4, "nats")),
        )
    ]
    assert texts == [
        "m",
        "m λ=5e-3",
        "m ≥.70",
        "m ≥1.00",
        "m 110 tokens",
        "m step 4",
        "m ≤0.4 nats",
    ]


def test_every_number_has_its_place_in_the_frame() -> None:
    frame = WHOLE.frame
    assert list(frame.kind) == ["rule", "rule", "limit"]
    assert list(frame.columns[:6]) == [
        "kind", "method", "parameter", "parameter_name", "setting", "chosen",
    ]  # fmt: skip
    ours = frame[frame.chosen].iloc[0]
    result = WHOLE.results[1]
    assert (ours.method, ours.setting) == ("OS-Pruner", "λ=5e-5")
    for name, value in vars(result).items():
        if isinstance(value, Estimate):
            found = [ours[name], ours[f"{name}_low"], ours[f"{name}_high"]]
            assert found == pytest.approx([value.value, value.low, value.high], nan_ok=True)
    assert math.isnan(frame.aes_low[2])
    (difference,) = WHOLE.difference_frame.itertuples()
    assert (difference.other, difference.tokens_high) == ("full trace", 0.2)
    frontiers = WHOLE.frontier_frame
    assert frontiers["gap@1e-4_low"][0] == 0.05
    assert math.isnan(frontiers.lead[0])
    assert frontiers.lead[1] == 0.1
    assert Results(dataset="d", setting="s").frame.empty
