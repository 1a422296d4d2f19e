"""What the benchmarks share: options, steps taken in turn, ratios with intervals, the last line."""

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
import transformers

from ospruner.provenance import git_state

T = TypeVar("T")
Sizes = Mapping[str, tuple[int, int, str]]
HERE = Path(__file__).resolve().parents[1]
PROCESSES = 0.01
"""By how much (standard deviation) two arms' ratio differs from process to process: of five reads
of `generate.py --quick` on a busy machine, CPU time, .004 at batch 1 and .010 at batch 8."""
ALONE = 0.04  # the same of steps that one arm takes alone, from ten reads that stop at half


def options(
    doc: str | None, quick: str = "", before: bool = False, sizes: Sizes = MappingProxyType({})
) -> argparse.ArgumentParser:
    """A parser with the options that benchmarks share.

    Args:
        doc: of the benchmark; its first line is the help's.
        quick: what `--quick` does; "" where there is none.
        before: whether two checkouts can be compared.
        sizes: further options by name: their default, that of `--quick`, and what they are.
    """
    own = argparse.ArgumentParser(add_help=False)  # these a benchmark elsewhere is not given
    own.add_argument("--json", metavar="FILE", type=Path, help="also write the last line there")
    if before:
        own.add_argument("--before", metavar="DIR", type=Path, help="compare with a checkout")
        own.add_argument("--before-python", metavar="FILE", default=sys.executable, help="its")
        own.add_argument("--turns", type=int, default=2, help="with --before: runs of each")
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0], parents=[own])
    parser.set_defaults(own=own, sizes=sizes)
    parser.add_argument("--seed", type=int, default=0)
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    for name, (usual, few, said) in sizes.items():
        parser.add_argument(f"--{name}", type=int, help=f"{said} (default: {usual}, quick: {few})")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments; with `--before` both checkouts run, and the process ends."""
    args = parser.parse_args()
    own, sizes = (vars(args).pop(name) for name in ("own", "sizes"))
    if vars(args).get("before"):
        compare_checkouts(*own.parse_known_args())
        raise SystemExit
    for name, of in sizes.items():
        if vars(args)[name] is None:
            setattr(args, name, of[args.quick])
    return args


def compare_checkouts(args: argparse.Namespace, passed: Sequence[str]) -> None:
    """Runs this benchmark here and in another checkout, in turn; prints the numbers of both.

    Each measures beside what does not change (plain generate, plain vLLM, encoding anew), so that
    ratios compare well, also where a machine's speed drifts; seconds compare less well.
    """
    sides = {"before": (args.before_python, args.before.resolve()), "after": (sys.executable, HERE)}
    found: dict[str, list[Any]] = {side: [] for side in sides}
    for turn in range(args.turns):
        for side in list(sides)[:: -1 if turn % 2 else 1]:
            python, checkout = sides[side]
            command = [python, str(checkout / "benchmarks" / Path(sys.argv[0]).name), *passed]
            print(f"{side}, turn {turn + 1} of {args.turns}", file=sys.stderr, flush=True)
            env = {**os.environ, "PYTHONPATH": str(checkout)}
            told = subprocess.check_output(command, cwd=checkout, env=env, text=True)
            found[side].append(json.loads(told.splitlines()[-1]))
    # A column a number, such as "arms.packed.seconds"; the ends of intervals are lists.
    before, after = (pd.json_normalize(runs).select_dtypes("float") for runs in found.values())
    ratios = after / before
    table = pd.DataFrame({"before": before.median(), "after": after.median()})
    table = table.assign(ratio=ratios.median(), low=ratios.min(), high=ratios.max())
    table = table.loc[after.columns].dropna()
    print(table.to_string(float_format="{:.4g}".format))
    print_last_line({"before": str(args.before), "numbers": table.T.to_dict()}, args.json)


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
    """Takes the arms' steps in turn, so that what slows the machine slows all; their times.

    Each arm's call takes one step and says whether another is left: True. Who takes the first
    step changes from step to step, and with the turn of the runs.
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
    """The second arm's time over the first's, from steps that were taken in turn, one by one.

    What else a machine does only ever adds time: of each step the least time of an arm's runs
    counts, and these are added up. What slows the machine for a while slows both arms' steps, so
    the interval is of which steps were met, 2,000 resamples of runs of 8 steps in a row, and of
    what differs from process to process (`PROCESSES`). Steps that both arms take are resampled
    together; where one arm takes more, its further ones by themselves (`ALONE`).

    Args:
        first: (R, steps) seconds of each step, of each of R runs: the same steps in each.
        second: the same of the other arm.
    """
    arms = [np.min(first, axis=0), np.min(second, axis=0)]  # (steps,)
    shared, longest = sorted(map(len, arms))
    both = np.array([np.pad(arm, (0, longest - len(arm))) for arm in arms])  # (2, steps)
    draws = np.random.default_rng(0)

    def total(steps: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """(2, 2,000) the sums over steps (2, n), resampled in blocks."""
        n = steps.shape[1]
        width = min(8, n)
        starts = draws.integers(0, n - width + 1, (2_000, -(-n // width)))
        picks = (starts[..., None] + np.arange(width)).reshape(2_000, -1)
        return steps[:, picks].mean(axis=-1) * n

    parts = [part for part in (both[:, :shared], both[:, shared:]) if part.size]
    sums = np.sum([total(part) for part in parts], axis=0)
    ratio = float(arms[1].sum() / arms[0].sum())
    low, high = np.quantile(sums[1] / sums[0], [0.025, 0.975])
    alone = both[:, shared:].sum() / both.sum(axis=1).max()
    apart = 1.96 * ratio * math.hypot(PROCESSES, ALONE * alone)
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
    made_by = {"git_commit": commit, "git_modified": modified}
    return {"device": device, "threads": torch.get_num_threads(), **versions, **made_by}


def print_last_line(result: Mapping[str, Any], file: Path | None) -> None:
    """Prints numbers, machine and versions as one JSON object."""
    print_json({**result, **environment()}, file)


def print_json(values: Mapping[str, Any], file: Path | None) -> None:
    """Prints values in one line; writes them to a file if one is given."""
    line = json.dumps(values)
    if file is not None:
        file.write_text(line + "\n", "utf-8")
    print(line)
