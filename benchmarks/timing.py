"""What the benchmarks share: options, steps taken in turn, ratios with intervals, the last line."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import transformers
from datasets import Dataset

from ospruner.demo.shipped import Reasoner, draw_split
from ospruner.eval.problems.problem import user_message
from ospruner.eval.problems.task import prompt_token_ids
from ospruner.provenance import git_state
from ospruner.train.labels.features import FEATURES

T = TypeVar("T")
HERE = Path(__file__).resolve().parents[1]
NEVER = {"mode": "threshold", "threshold": 1.0, "answer": "free"}
"""A policy that is on and never stops: generate's `stop_policy`, and what requests tell vLLM."""
VLLM_NEVER = {f"stop_{key}": value for key, value in NEVER.items()}
PROCESSES = 0.01
"""By how much (standard deviation) the ratio of two arms differs from process to process.

Five reads of `generate.py --quick` on a busy machine, CPU time: .004 at batch 1, .010 at batch 8.
"""


def options(doc: str | None, quick: str = "", before: bool = False) -> argparse.ArgumentParser:
    """A parser with the options that benchmarks share.

    Args:
        doc: of the benchmark; its first line is the help's.
        quick: what `--quick` does; "" where there is none.
        before: whether two checkouts can be compared.
    """
    shared = [_own_options(before)]
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0], parents=shared)
    parser.add_argument("--seed", type=int, default=0)
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    return parser


def _own_options(before: bool) -> argparse.ArgumentParser:
    """Those that a benchmark of another checkout is not given."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the last line there")
    if before:
        parser.add_argument("--before", metavar="DIR", type=Path, help="compare with a checkout")
        parser.add_argument("--before-python", metavar="FILE", default=sys.executable, help="its")
        parser.add_argument("--turns", type=int, default=2, help="with --before: runs of each")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments; with `--before` both checkouts run, and the process ends."""
    args = parser.parse_args()
    if vars(args).get("before"):
        compare_checkouts()
        raise SystemExit
    return args


def compare_checkouts() -> None:
    """Runs this benchmark here and in another checkout, in turn; prints the numbers of both.

    Each measures beside what does not change (plain generate, plain vLLM, encoding anew), so that
    ratios compare well, also where a machine's speed drifts; seconds compare less well.
    """
    args, passed = _own_options(before=True).parse_known_args()
    script = Path(sys.argv[0]).name
    sides = {"before": (args.before_python, args.before.resolve()), "after": (sys.executable, HERE)}
    found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for turn in range(args.turns):
        for side in list(sides)[:: -1 if turn % 2 else 1]:
            python, checkout = sides[side]
            command = [python, str(checkout / "benchmarks" / script), *passed]
            print(f"{side}, turn {turn + 1} of {args.turns}", file=sys.stderr, flush=True)
            paths = {**os.environ, "PYTHONPATH": str(checkout)}
            done = subprocess.run(
                command, env=paths, cwd=checkout, stdout=subprocess.PIPE, text=True, check=True
            )
            found[side].append(dict(numbers_in(json.loads(done.stdout.splitlines()[-1]))))
    result: dict[str, Any] = {}
    print(f"{'':48}{'before':>12}{'after':>12}  after / before [range]")
    for name in found["after"][0]:
        if not all(one.get(name) for side in found.values() for one in side):
            continue
        pairs = zip(found["after"], found["before"], strict=True)
        ratio = median_ratio([after[name] / before[name] for after, before in pairs])
        medians = [statistics.median(one[name] for one in found[side]) for side in sides]
        print(f"{name:48}{medians[0]:12.4g}{medians[1]:12.4g}  {ratio}")
        result[name] = {"before": medians[0], "after": medians[1], "ratio": ratio}
    print_last_line({"before": str(args.before), "numbers": result}, args.json)


def numbers_in(result: Mapping[str, Any], of: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a last line by name, such as "arms.packed.seconds"; no ends of intervals."""
    for name, value in result.items():
        if isinstance(value, Mapping):
            yield from numbers_in(value, f"{of}{name}.")
        elif isinstance(value, float):
            yield f"{of}{name}", value


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


def median_ratio(ratios: Sequence[float]) -> Ratio:
    """The median of a few ratios, and their range."""
    return Ratio(statistics.median(ratios), min(ratios), max(ratios))


def paired_ratio(first: npt.ArrayLike, second: npt.ArrayLike, seed: int = 0) -> Ratio:
    """The second arm's time over the first's, from steps that were taken in turn, one by one.

    What else a machine does only ever adds time: of each step the least time of an arm's runs
    counts, and these are added up. What slows the machine for a while slows both arms' steps, so
    the interval is of which steps were met, 2,000 resamples of runs of 8 steps in a row, and of
    what differs from process to process (`PROCESSES`). Steps that both arms take are resampled
    together; where one arm takes more, its further ones by themselves.

    Args:
        first: (R, steps) seconds of each step, of each of R runs: the same steps in each.
        second: the same of the other arm.
        seed: of the resamples.
    """
    arms = [np.min(first, axis=0), np.min(second, axis=0)]  # (steps,)
    shared = min(map(len, arms))
    draws = np.random.default_rng(seed)

    def blocks(count: int) -> npt.NDArray[Any]:
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
    low, high = np.quantile(sums[1] / sums[0], [0.025, 0.975])
    apart = 1.96 * PROCESSES * ratio
    return Ratio(
        ratio,
        ratio - math.hypot(max(0.0, ratio - low), apart),
        ratio + math.hypot(max(0.0, high - ratio), apart),
    )


def clock_ratios(
    first: Sequence[Sequence[Timed]], second: Sequence[Sequence[Timed]]
) -> tuple[Ratio, Ratio]:
    """`paired_ratio` by wall clock and by CPU time, of the steps of each run."""
    wall, cpu = (
        paired_ratio(np.array(first)[..., clock], np.array(second)[..., clock]) for clock in (0, 1)
    )
    return wall, cpu


def show(name: str, said: str, wall: Ratio, cpu: Ratio) -> dict[str, Any]:
    """Prints a ratio by both clocks; returns what stands of it in the last line."""
    print(f"{said:46}{wall!s:24}CPU time {cpu}", flush=True)
    found: dict[str, Any] = {}
    for key, ratio in ((name, wall), (f"{name}_cpu", cpu)):
        found |= {key: round(ratio.median, 4)}
        found |= {f"{key}_interval": [round(ratio.low, 4), round(ratio.high, 4)]}
    return found


def matrix_limit(device: str, dtype: str = "float32", size: int = 2048) -> float:
    """Floating-point operations a second that one large matrix product reaches."""
    a = torch.randn(size, size, device=device, dtype=getattr(torch, dtype))
    a @ a
    best = min(timed(lambda: a @ a)[1].wall_seconds for _ in range(5))
    return 2 * size**3 / best


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


def reasoner_prompts(reasoner: Reasoner, count: int, seed: int) -> dict[str, list[int]]:
    """The embedded reasoner's first test problems, as its tokens, by their ids."""
    fmt, tokenizer = reasoner.token_format, reasoner.tokenizer
    return {
        one.id: prompt_token_ids(one.id, user_message(one, fmt.format), tokenizer, fmt)
        for one in draw_split("test", count, seed)
    }


def vllm_on_a_cpu() -> None:
    """What vLLM is told by its environment; call it before vLLM is imported."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if not torch.cuda.is_available():
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GB
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


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
            dict.fromkeys(FEATURES)
            | {
                "problem_id": f"p{seed}-{n}",
                "prompt_ids": draws.integers(0, vocabulary, 60).tolist(),
                "trace_ids": draws.integers(0, vocabulary, length).tolist(),
                "step_ends": [int(end) for end in ends],
                "forced_correct": right,
                "matches_final": [value == 1.0 for value in right],
                "forced_answer_tokens": [2] * steps,
                "natural_answer_tokens": 2,
                "ungraded_reasons": [None] * steps,
                "ended": "natural",
                "family": "",
            }
        )
    return Dataset.from_list(rows, features=FEATURES)
