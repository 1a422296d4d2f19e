"""A table of results from a file of signals, by numpy and pyarrow alone.

    python tests/eval/recompute.py FOLDER [...]

Each folder holds the `signals.parquet` and the `results.json` of a comparison. Accuracy, thinking
tokens, tokens saved, AES and operations of the full trace, of policies of every price, of
classifiers at thresholds, of fixed budgets and of the hindsight oracle are computed anew, by
formulas that are written down here once more, and compared with what `results.json` says.
Nothing of OS-Pruner is imported: who doubts its arithmetic can read this file instead.
"""

import json
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq  # type: ignore[import-untyped]

RAMPS = 5  # of a price head: its six numbers are b and d_1 .. d_5
ROUNDING = 6e-8  # of float32, in which thresholds were taken from such probabilities


def recomputed(folder: Path) -> Iterator[tuple[dict[str, Any], dict[str, float]]]:
    """Each row of `results.json` that can be recomputed, and its numbers."""
    whole = pq.read_table(folder / "signals.parquet")
    policies = json.loads(whole.schema.metadata[b"ospruner"])["policies"]
    rows = [row for row in whole.to_pylist() if row["split"] == "test"]
    full = measured(rows, at)
    for written in json.loads((folder / "results.json").read_text("utf-8"))["frame"]:
        method, value = written["method"], written["parameter"]
        stops = {
            "full trace": at,
            "fixed budget": lambda row: first(np.array(row["step_ends"]) >= value),  # noqa: B023
            "hindsight oracle": lambda row: at(row, int(np.argmax(row["forced_correct"]))),
        }
        each = [
            measured(rows, partial(asked, name, one, value), name)
            for name, one in policies.items()
            if called(one) == method
        ] or [measured(rows, stops[method]) for _ in [0] if method in stops]
        if not each:
            continue
        found = {name: float(np.mean([one[name] for one in each])) for name in full}
        found["reduction"] = 1 - found["tokens"] / full["tokens"]
        gain = found["accuracy"] - full["accuracy"]
        yield written, found | {"aes": found["reduction"] + (3 if gain >= 0 else 5) * gain}


def called(policy: dict[str, Any]) -> str:
    """The method of a policy, as tables have it; "" of one that is not recomputed."""
    if policy["head"] == "price":
        return "OS-Pruner, one policy"
    names = {"final-answer": "convergence (final answer)", "flashthink": "", "os-pruner": ""}
    return names.get(policy["method"], policy["method"])


def asked(name: str, policy: dict[str, Any], value: float, row: dict[str, Any]) -> Any:
    """Where a policy stops: drawn at a price, or a classifier at its threshold."""
    outputs = np.array(row[f"{name}: outputs"], np.float64)
    if policy["head"] == "price":
        return drawn(stop_probabilities(outputs, value, *policy["price_range"]))
    return first(1 / (1 + np.exp(-outputs)) >= value - ROUNDING)


def stop_probabilities(flat: Any, price: float, low: float, high: float) -> Any:
    """A step's logit is b + sum_j softplus(d_j) clamp(p - j, 0, 1); p is the price's place."""
    outputs = flat.reshape(-1, 1 + RAMPS)
    unit = low / 5
    place = RAMPS * math.log1p(price / unit) / math.log1p(high / unit)
    ramps = np.clip(place - np.arange(RAMPS), 0, 1)
    return 1 / (1 + np.exp(-outputs[:, 0] - np.logaddexp(0, outputs[:, 1:]) @ ramps))


def drawn(probabilities: Any) -> Any:
    """The chance to stop at each step; at the last one, that of not having stopped before."""
    going = np.cumprod(np.append(1.0, 1 - probabilities[:-1]))
    return going * np.append(probabilities[:-1], 1.0)


def first(stops: Any) -> Any:
    """The first step that stops; at the last one nothing is decided."""
    return np.eye(len(stops))[np.append(stops[:-1], True).argmax()]


def at(row: dict[str, Any], place: int = -1) -> Any:
    """All weight on one step; never stopping, on the last."""
    return np.eye(len(row["step_ends"]))[place]


def measured(
    rows: list[dict[str, Any]], stops: Callable[[dict[str, Any]], Any], more: str = ""
) -> dict[str, float]:
    """Means over traces, whose steps have these weights; a policy's operations are in `more`."""
    numbers = []
    for row in rows:
        flops = np.array(row.get("flops", np.nan)) + np.array(row.get(f"{more}: flops", 0.0))
        columns = row["forced_correct"], row["step_ends"], flops + 0.0 * np.array(row["step_ends"])
        numbers.append([stops(row) @ np.array(column) for column in columns])
    means = map(float, np.mean(numbers, axis=0))
    return dict(zip(("accuracy", "tokens", "flops"), means, strict=True))


def main() -> None:
    """Compares each folder's numbers; raises SystemExit where one differs."""
    for folder in map(Path, sys.argv[1:]):
        rows = list(recomputed(folder))
        for written, found in rows:
            for name, value in found.items():
                stored = value if written[name] is None else written[name]
                if not np.isclose(stored, value, 1e-5, 1e-6, equal_nan=True):
                    method, parameter = written["method"], written["parameter"]
                    raise SystemExit(f"{folder}: {name} of {method} {parameter} is {value}")
        print(f"{folder}: {len(rows)} rows agree")


if __name__ == "__main__":
    main()
