"""What the benchmarks share: pairs timed in turn, medians, the last line, made-up traces."""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from datasets import Dataset

from ospruner.eval.schema import FEATURES
from ospruner.provenance import git_state


@dataclass(frozen=True)
class Timed:
    """How long one call took."""

    wall_seconds: float
    cpu_seconds: float


def timed(call: Callable[[], object]) -> Timed:
    """Times a call, whatever it leaves running on a GPU included."""
    _synchronize()
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    _synchronize()
    return Timed(time.perf_counter() - wall, time.process_time() - cpu)


@dataclass(frozen=True)
class Ratio:
    """A median with the order statistics that enclose the true one (sign test).

    Attributes:
        median: of the pairs' ratios.
        low: its lower bound.
        high: its upper bound.
        confidence: how surely they enclose it; at most 0.95 is asked for.
    """

    median: float
    low: float
    high: float
    confidence: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def median_ratio(ratios: Sequence[float], confidence: float = 0.95) -> Ratio:
    """The median of ratios and the narrowest order-statistic interval of that confidence.

    With fewer than 6 ratios none is: then it is their range, and what that is worth.
    """
    values = sorted(ratios)
    n = len(values)
    median = (values[(n - 1) // 2] + values[n // 2]) / 2

    def coverage(k: int) -> float:
        """Of the interval from the k-th smallest to the k-th largest, k from 0."""
        return 1 - 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n

    k = max((k for k in range(n // 2) if coverage(k) >= confidence), default=0)
    return Ratio(median, values[k], values[n - 1 - k], max(0.0, coverage(k)))


def paired_ratio(
    first: Sequence[Sequence[float]], second: Sequence[Sequence[float]], seed: int = 0
) -> Ratio:
    """The second arm's time over the first's, from steps that were taken in turn, one by one.

    What else a machine does only ever adds time: of each step the least time of an arm's runs
    counts, and these are added up. What slows the machine for a while slows both arms' steps, so
    the interval is of which steps were met: that of 2,000 resamples of runs of 8 steps in a row.
    Steps that both arms take are resampled together; where one arm takes more, its further ones by
    themselves.

    Args:
        first: seconds of each step, of each of R runs: the same steps in each.
        second: the same of the other arm.
        seed: of the resamples.
    """
    arms = [np.min(first, axis=0), np.min(second, axis=0)]  # (steps,)
    shared = min(map(len, arms))
    draws = np.random.default_rng(seed)

    def blocks(count: int) -> np.ndarray[Any, Any]:
        """(2,000, about count) numbers of steps."""
        width = min(8, count)
        starts = draws.integers(0, count - width + 1, (2_000, -(-count // width)))
        return (starts[..., None] + np.arange(width)).reshape(2_000, -1)

    together = blocks(shared)
    sums = []
    for arm in arms:
        total = arm[:shared][together].mean(axis=1) * shared
        if further := len(arm) - shared:
            total = total + arm[shared:][blocks(further)].mean(axis=1) * further
        sums.append(total)
    ratio = float(arms[1].sum() / arms[0].sum())
    low, high = np.quantile(sums[1] / sums[0], [0.025, 0.975]).tolist()
    return Ratio(ratio, min(low, ratio), max(high, ratio), 0.95)


def environment() -> dict[str, str | int | bool | None]:
    """The machine, versions and commit beside which numbers are to be read."""
    commit, modified = git_state()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {
        "device": device,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "git_commit": commit,
        "git_modified": modified,
    }


def print_last_line(result: Mapping[str, Any], file: str | Path | None) -> None:
    """Prints a benchmark's numbers as one JSON object; writes them to a file if one is given."""
    line = json.dumps(result)
    if file is not None:
        Path(file).write_text(line + "\n", "utf-8")
    print(line)


def random_traces(
    count: int, steps: int, mean_tokens: int, vocabulary: int, seed: int, spread: float = 0.5
) -> Dataset:
    """Labelled traces of random tokens; the logarithm of their lengths spreads by `spread`."""
    draws = np.random.default_rng(seed)
    lengths = np.exp(draws.normal(np.log(mean_tokens), spread, count)).round().astype(int)
    rows = []
    for n, length in enumerate(np.maximum(lengths, steps)):
        ends = [*sorted(draws.choice(np.arange(1, length), steps - 1, replace=False)), length]
        right = (np.arange(steps) >= draws.integers(1, steps)).astype(float).tolist()
        rows.append(
            {
                "problem_id": f"p{n}",
                "prompt_ids": draws.integers(0, vocabulary, 60).tolist(),
                "trace_ids": draws.integers(0, vocabulary, length).tolist(),
                "step_ends": [int(end) for end in ends],
                "forced_correct": right,
                "matches_final": [value == 1.0 for value in right],
                "forced_answer_tokens": [2] * steps,
                "natural_answer_tokens": 2,
                "ended": "natural",
                "family": "",
            }
        )
    blank = {name: None for name in FEATURES}
    return Dataset.from_list([blank | row for row in rows], features=FEATURES)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
