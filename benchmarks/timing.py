"""What the benchmarks share: options, steps taken in turn, ratios with intervals, the last line."""

import argparse
import json
import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import transformers

from ospruner.provenance import git_state

T = TypeVar("T")
HERE = Path(__file__).resolve().parents[1]
PROCESSES = 0.01
"""By how much (standard deviation) the ratio of two arms differs from process to process.

Five reads of `generate.py --quick` on a busy machine, CPU time: .004 at batch 1, .010 at batch 8.
"""


def options(
    doc: str | None,
    quick: str = "",
    sizes: Mapping[str, tuple[int, int, str]] = MappingProxyType({}),
) -> argparse.ArgumentParser:
    """A parser with the options that benchmarks share; the help is the doc's first line.

    `sizes` are further options by name: their default, that of `--quick`, what they are.
    """
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.set_defaults(sizes=sizes)
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the last line there")
    parser.add_argument("--seed", type=int, default=0)
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    for name, (default, few, said) in sizes.items():
        said += f" (default: {default}, quick: {few})"
        parser.add_argument(f"--{name}", type=int, help=said)
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments; sizes that are not given are those of `--quick`, or the default ones."""
    args = parser.parse_args()
    for name, of in vars(args).pop("sizes").items():
        if vars(args)[name] is None:
            setattr(args, name, of[args.quick])
    return args


class Timed(NamedTuple):
    """How long one call took; the CPU time is this process's, which others do not slow."""

    wall_seconds: float
    cpu_seconds: float


def timed(call: Callable[[], T]) -> tuple[T, Timed]:
    """What a call returns, and its time, whatever it leaves running on a GPU included."""
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    synchronize()
    wall, cpu = time.perf_counter(), time.process_time()
    found = call()
    synchronize()
    return found, Timed(time.perf_counter() - wall, time.process_time() - cpu)


def in_turn(arms: Mapping[str, Callable[[], object]], turn: int) -> dict[str, list[Timed]]:
    """The times of the arms' steps, taken in turn, so that what slows the machine slows all.

    An arm's call takes a step; it is True while another is left. Who is first changes each time.
    """
    times: dict[str, list[Timed]] = {name: [] for name in arms}
    going = list(arms)
    while going:
        order, turn = going if turn % 2 else going[::-1], turn + 1
        for name in order:
            more, taken = timed(arms[name])
            times[name].append(taken)
            if more is not True:
                going = [one for one in going if one != name]
    return times


class Ratio(NamedTuple):
    """A ratio with an interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def paired_ratio(first: npt.ArrayLike, second: npt.ArrayLike) -> Ratio:
    """The second arm's time over the first's, each (R, steps) seconds of the steps of R runs.

    What else a machine does only ever adds time: of each step the least time of an arm's runs
    counts, and these are added up. What slows the machine for a while slows both arms' steps, so
    the interval is of which steps were met, 2,000 resamples of runs of 8 steps in a row, and of
    what differs from process to process (`PROCESSES`). Steps that both arms take are resampled
    together; where one arm takes more, its further ones by themselves.
    """
    arms = [np.min(first, axis=0), np.min(second, axis=0)]  # (steps,)
    shared, longest = sorted(map(len, arms))
    both = np.array([np.pad(arm, (0, longest - len(arm))) for arm in arms])  # (2, steps)
    draws = np.random.default_rng(0)

    def total(steps: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """(2, 2,000) the sums over steps (2, n), resampled in blocks."""
        width = min(8, n := steps.shape[1])
        starts = draws.integers(0, n - width + 1, (2_000, -(-n // width)))
        picks = (starts[..., None] + np.arange(width)).reshape(2_000, -1)
        return steps[:, picks].mean(axis=-1) * n

    parts = [part for part in (both[:, :shared], both[:, shared:]) if part.size]
    sums = np.sum([total(part) for part in parts], axis=0)
    ratio = float(arms[1].sum() / arms[0].sum())
    low, high = np.quantile(sums[1] / sums[0], [0.025, 0.975])
    apart = 1.96 * PROCESSES * ratio
    below, above = (math.hypot(max(0.0, gap), apart) for gap in (ratio - low, high - ratio))
    return Ratio(ratio, ratio - below, ratio + above)


def clock_ratios(first: npt.ArrayLike, second: npt.ArrayLike) -> list[Ratio]:
    """`paired_ratio` by wall clock and by CPU time, of each run's steps' `Timed`."""
    return [paired_ratio(*(np.array(arm)[..., k] for arm in (first, second))) for k in (0, 1)]


def show(name: str, said: str, ratios: Sequence[Ratio]) -> dict[str, Any]:
    """Prints a ratio by both clocks; returns what stands of it in the last line."""
    print(f"{said:46}{ratios[0]!s:24}CPU time {ratios[1]}", flush=True)
    found: dict[str, Any] = {}
    for key, (median, *interval) in zip((name, f"{name}_cpu"), ratios, strict=True):
        found |= {key: round(median, 4), f"{key}_interval": [round(end, 4) for end in interval]}
    return found


def environment() -> dict[str, str | int | bool | None]:
    """The machine, versions and commit beside which numbers are to be read."""
    commit, modified = git_state()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    made_by = {**versions, "git_commit": commit, "git_modified": modified}
    return {"device": device, "threads": torch.get_num_threads(), **made_by}


def print_last_line(result: Mapping[str, Any], file: Path | None) -> None:
    """Prints numbers, machine and versions as one JSON object."""
    print_json({**result, **environment()}, file)


def print_json(values: Mapping[str, Any], file: Path | None) -> None:
    """Prints values in one line; writes them to a file if one is given."""
    line = json.dumps(values)
    if file is not None:
        file.write_text(line + "\n", "utf-8")
    print(line)
