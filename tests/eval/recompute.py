"""A table of results from a file of signals, by numpy and pyarrow alone.

    python tests/eval/recompute.py FOLDER [...]

Each folder holds the `signals.parquet` and the `results.json` of a comparison. Accuracy, thinking
tokens, tokens saved, AES and operations of the full trace, of policies of every price, of
classifiers at thresholds, of fixed budgets and of the hindsight oracle are computed anew, by
formulas that are written down here once more, and compared with what `results.json` says.
Nothing of OS-Pruner is imported: who doubts its arithmetic can read this file instead.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq  # type: ignore[import-untyped]

RAMPS = 5  # of a price head: its six numbers are b and d_1 .. d_5
GRID = 31
NAMES = {"probe": "probe", "convergence": "convergence"}
NAMES |= {"final-answer": "convergence (final answer)"}
ROUNDING = 6e-8  # of float32, in which thresholds were taken from such probabilities
NUMBERS = ("accuracy", "tokens", "reduction", "aes", "flops")


def recomputed(path: Path) -> list[dict[str, Any]]:
    """Method, parameter and numbers of each row that can be recomputed."""
    whole = pq.read_table(path)
    facts = json.loads(whole.schema.metadata[b"ospruner"])
    rows = [row for row in whole.to_pylist() if row["split"] == "test"]
    full = measured(rows, [ends(row) for row in rows])
    found: list[dict[str, Any]] = [{"method": "full trace", "parameter": None, **full}]
    ours = [name for name, one in facts["policies"].items() if one["head"] == "price"]
    asked = [one for one in facts["methods"] if one.get("policy") in ours]
    for price in sorted({one["asked_price"] for one in asked} - {None}):
        seeds = []
        for name in ours:
            low, high = facts["policies"][name]["price_range"]
            said = [stop_probabilities(row[f"{name}: outputs"], price, low, high) for row in rows]
            stops = [drawn(one) for one in said]
            seeds.append(measured(rows, stops, f"{name}: flops"))
        mean = {name: float(np.mean([one[name] for one in seeds])) for name in NUMBERS[:2]}
        mean["flops"] = float(np.mean([one["flops"] for one in seeds]))
        found.append({"method": "OS-Pruner, one policy", "parameter": price, **mean})
    written = json.loads(path.with_name("results.json").read_text("utf-8"))["frame"]
    classifiers: dict[str, list[str]] = {}
    for name, one in facts["policies"].items():
        classifiers.setdefault(NAMES.get(one["method"], ""), []).append(name)
    for row_written in written:
        method, value = row_written["method"], row_written["parameter"]
        if method in classifiers and method:
            seeds = []
            for name in classifiers[method]:
                stops = []
                for row in rows:
                    chance = 1 / (1 + np.exp(-np.array(row[f"{name}: outputs"], np.float64)))
                    stops.append(first(chance >= value - ROUNDING))
                seeds.append(measured(rows, stops, f"{name}: flops"))
            one = {name: float(np.mean([one[name] for one in seeds])) for name in full}
        elif method == "fixed budget":
            stops = [first(np.array(row["step_ends"]) >= value) for row in rows]
            one = measured(rows, stops)
        elif method == "hindsight oracle":
            stops = [
                at(len(row["step_ends"]), int(np.argmax(row["forced_correct"]))) for row in rows
            ]
            one = measured(rows, stops)
        else:
            continue
        found.append({"method": method, "parameter": value, **one})
    for one in found:
        one["reduction"] = 1 - one["tokens"] / full["tokens"]
        gain = one["accuracy"] - full["accuracy"]
        one["aes"] = one["reduction"] + (3 if gain >= 0 else 5) * gain
    return found


def stop_probabilities(flat: list[float], price: float, low: float, high: float) -> Any:
    """A step's logit is b + sum_j softplus(d_j) clamp(p - j, 0, 1); p is the price's place."""
    outputs = np.array(flat, np.float64).reshape(-1, 1 + RAMPS)
    unit = low / 5
    place = RAMPS * math.log1p(price / unit) / math.log1p(high / unit)
    ramps = np.clip(place - np.arange(RAMPS), 0, 1)
    logits = outputs[:, 0] + np.logaddexp(0, outputs[:, 1:]) @ ramps
    return 1 / (1 + np.exp(-logits))


def drawn(probabilities: Any) -> Any:
    """The chance to stop at each step; at the last one, that of not having stopped before."""
    going = np.cumprod(np.append(1.0, 1 - probabilities[:-1]))
    stop = np.append(probabilities[:-1], 1.0)
    return going * stop


def first(stops: Any) -> Any:
    """The first step that stops; at the last one nothing is decided."""
    stops = np.append(stops[:-1], True)
    return at(len(stops), int(stops.argmax()))


def ends(row: dict[str, Any]) -> Any:
    """Never stopping."""
    return at(len(row["step_ends"]), len(row["step_ends"]) - 1)


def at(steps: int, place: int) -> Any:
    """All weight on one step."""
    return np.eye(steps)[place]


def measured(rows: list[dict[str, Any]], stops: list[Any], more: str = "") -> dict[str, float]:
    """Means over traces, whose steps have these weights."""

    def mean(values: Any) -> float:
        pairs = zip(rows, stops, strict=True)
        return float(np.mean([weights @ values(row) for row, weights in pairs]))

    def flops(row: dict[str, Any]) -> Any:
        base = np.array(row.get("flops", np.nan))
        return base + np.array(row.get(more, 0.0)) + np.zeros(len(row["step_ends"]))

    return {
        "accuracy": mean(lambda row: np.array(row["forced_correct"])),
        "tokens": mean(lambda row: np.array(row["step_ends"])),
        "flops": mean(flops),
    }


def main() -> None:
    """Compares each folder's numbers; raises SystemExit where one differs."""
    for folder in map(Path, sys.argv[1:]):
        written = json.loads((folder / "results.json").read_text("utf-8"))["frame"]
        found = recomputed(folder / "signals.parquet")
        for one in found:
            near = [
                row
                for row in written
                if row["method"] == one["method"]
                and (one["parameter"] is None or math.isclose(row["parameter"], one["parameter"]))
            ]
            if len(near) != 1:
                raise SystemExit(f"{folder}: {len(near)} rows of {one['method']}")
            for name in NUMBERS:
                if near[0][name] is None or math.isnan(one[name]):
                    continue
                if not math.isclose(near[0][name], one[name], rel_tol=1e-5, abs_tol=1e-6):
                    raise SystemExit(
                        f"{folder}: {name} of {one['method']} {one['parameter']} is "
                        f"{one[name]}, the results say {near[0][name]}"
                    )
        print(f"{folder}: {len(found)} rows agree")


if __name__ == "__main__":
    main()
