"""How often a choice on calibration problems breaks its word: the naive one, and what is promised.

    ospruner demo
    OMP_NUM_THREADS=1 python benchmarks/promises.py --policy runs/demo/policy \
        --labels runs/demo/labels/test [--json FILE]

Calibrations of n of the labelled problems are drawn, with replacement, and each chooses the boldest
of the policy's 31 prices. "Naive" takes the boldest whose measured loss is small enough; "betting"
and "exact" are those of `ospruner calibrate`, in mode "sample" and in mode "threshold"; "one end"
tests from price 0 alone. A choice is broken where the price loses more on all labelled problems.
`--lost-at-zero 0.01` takes away every hundredth right answer at price 0, and there alone.

    python benchmarks/promises.py --drift 0.12

asks instead how soon a server could see that its traffic has drifted, without references: of its
control requests, which never stop, the answer forced where the policy would have stopped is held
against the answer at the end, and up to this share may disagree. Streams drift half-way.
"""

import itertools
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import timing

from ospruner.calibrating import tried
from ospruner.comparing import Judged
from ospruner.eval.calibration import Test, boldest_kept, exact_rejects, losses
from ospruner.eval.methods import parse_policies
from ospruner.eval.replay import replay_full
from ospruner.eval.table import BoolArray, FloatArray, IntArray
from ospruner.serving.drift import Drift

LEVEL = 0.05
DRIFTS, CONTROLS, REQUESTS = (0.0, 0.02, 0.05, 0.10), (0.02, 0.05, 0.2, 1.0), 20_000


def two_ends(test: Test, lost: FloatArray, picks: IntArray, max_loss: float) -> IntArray:
    """(C,) what `boldest_kept` finds in C calibrations on the problems `picks` (C, n)."""
    return boldest_kept([of_price[picks] for of_price in lost], max_loss, LEVEL, test)


def one_end(lost: FloatArray, picks: IntArray, max_loss: float) -> IntArray:
    """(C,) the last price before the first that the exact test does not reject; -1 for none."""
    rejected = np.stack([exact_rejects(of_price[picks], max_loss, LEVEL) for of_price in lost])
    found: IntArray = np.logical_and.accumulate(rejected).sum(axis=0) - 1
    return found


def naive(lost: FloatArray, picks: IntArray, max_loss: float) -> IntArray:
    """(C,) the boldest price whose measured loss is at most `max_loss`; -1 where none is."""
    allowed = np.stack([of_price[picks].mean(axis=1) <= max_loss for of_price in lost])  # (J, C)
    boldest = len(lost) - 1 - allowed[::-1].argmax(axis=0)
    return np.where(allowed.any(axis=0), boldest, -1)


CHOICES: dict[str, tuple[str, Callable[[FloatArray, IntArray, float], IntArray]]] = {
    "naive": ("sample", naive),
    "betting": ("sample", partial(two_ends, "betting")),
    "naive, threshold": ("threshold", naive),
    "exact, one end": ("threshold", one_end),
    "exact": ("threshold", partial(two_ends, "exact")),
}
"""By name: the mode in which the policy decides, and how a price is chosen."""


def alarms(differs: BoolArray, allowed: float, level: float = LEVEL / 2) -> IntArray:
    """(C,) how many answers a server's `Drift` has seen when it alarms; n + 1 where it does not.

    `differs` (C, n) says whether the two answers of each control request of C streams differ,
    `allowed` is the share of the null; of `LEVEL` the calibration has the other half.
    """
    streams, n = differs.shape
    drift, found = Drift(allowed, level, streams), np.full(streams, n + 1)
    for now in differs.T:
        before = drift.alarmed
        drift.see(now)
        found[drift.alarmed & ~before] = drift.seen
    return found


def measure_drifts(allowed: float, streams: int, seed: int) -> pd.DataFrame:
    """False alarms where just so many disagree, and alarms after drifts half-way, by control."""
    table = pd.DataFrame(dtype=object)
    for control, drift in itertools.product(CONTROLS, DRIFTS):
        n = round(control * REQUESTS)
        shares = allowed + drift * (np.arange(n) >= n // 2)
        draws = np.random.default_rng([seed, n, round(1e3 * drift)]).random((streams, n))
        late = (alarms(draws < shares, allowed) - n // 2) / control
        name, told = "false alarms", f"{100 * (late <= REQUESTS / 2).mean():.1f} %"
        if drift:
            seen = late[(late > 0) & (late <= REQUESTS / 2)]
            median = f", after {np.median(seen):,.0f}" if len(seen) else ""
            name = f"drift of {100 * drift:g} points"
            told = f"{100 * len(seen) / streams:.0f} %{median}"
        table.loc[f"control {control:g}", name] = told
    return table


def measure(args: Namespace) -> dict[str, Any]:
    """What each choice saves, and how often it is broken."""
    ours, use = Judged(args.labels), parse_policies([args.policy])[0]
    if use.config.prices is None:
        raise SystemExit(f"{args.policy} is a policy of one price: give one of every price")
    lost, saved = dict[str, FloatArray](), dict[str, FloatArray]()
    for mode in ("sample", "threshold"):
        table, outcomes = tried(ours, use, mode)
        lost[mode] = np.stack([losses(table, outcome) for _, outcome in outcomes])  # (J, P)
        full = replay_full(table).mean_tokens
        saved[mode] = np.array([1 - one.mean_tokens / full for _, one in outcomes])
        harmed = np.flatnonzero(lost[mode][0] == 0)
        lost[mode][0, harmed[: round(args.lost_at_zero * len(table.problem_ids))]] = 1
    rows, population = [], len(table.problem_ids)
    for max_loss, n in itertools.product(args.max_loss, args.problems):
        draws = np.random.default_rng([args.seed, n, round(1e4 * max_loss)])
        picks = draws.integers(0, population, (args.resamples, n))
        for name, (mode, choose) in CHOICES.items():
            prices = choose(lost[mode], picks, max_loss)
            served, truth = prices >= 0, lost[mode].mean(axis=1)
            row = {"choice": name, "mode": mode, "max_loss": max_loss, "problems": n}
            row["saved"] = float(np.where(served, saved[mode][prices], 0.0).mean())
            row["broken"] = float((served & (truth[prices] > max_loss)).mean())
            rows.append(row | {"served": float(served.mean())})
    sizes = {"population": population, "resamples": args.resamples, "seed": args.seed}
    return {"rows": rows, **sizes, "labels": ours.labels.data_hash}


def main() -> None:
    """Measures, prints the table, and the numbers as one JSON object."""
    parser = timing.options(__doc__)
    parser.add_argument("--policy", default="runs/demo/policy", help="of every price")
    parser.add_argument("--labels", default="runs/demo/labels/test")
    parser.add_argument("--problems", type=int, nargs="+", default=[200, 500, 1500])
    parser.add_argument("--max-loss", type=float, nargs="+", default=[0.01, 0.02, 0.03])
    parser.add_argument("--resamples", type=int, default=1000, help="calibrations each")
    parser.add_argument("--lost-at-zero", type=float, default=0.0, help="share of problems")
    parser.add_argument("--drift", type=float, help="share of answers that may disagree")
    args = timing.parse(parser)
    if args.drift is not None:
        told = {"streams": args.resamples, "seed": args.seed, "allowed": args.drift}
        print(f"{args.resamples} streams: alarms, and requests from the drift on (median)")
        table = measure_drifts(args.drift, args.resamples, args.seed)
        found = table.to_dict("index") | told
    else:
        found = measure(args)
        print(f"{found['population']} problems; tokens saved % (word broken %)")
        table = pd.DataFrame(dtype=object)
        for row in found["rows"]:
            head = f"{100 * row['max_loss']:g} pt, n={row['problems']}"
            table.loc[row["choice"], head] = f"{100 * row['saved']:.0f} ({100 * row['broken']:.0f})"
    print(table.to_string())
    timing.print_last_line(found, args.json)


if __name__ == "__main__":
    main()
