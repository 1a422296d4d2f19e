"""Whether stopping can be right more often than thinking to the end.

    ospruner demo
    python benchmarks/above_full.py --run runs/demo [--passes 8 32] [--json FILE]
    python benchmarks/above_full.py --run runs/thinks --base runs/thinker --test gsm8k

`--run` is a folder with labels/train, labels/validation and labels/TEST. Going on spoils some
answers: they are right at a step and wrong at the end. At a price of 0 a policy is rewarded for
right answers alone; it is annealed to that price from the lowest of the range that suits the
labels, with each number of passes and each seed. Beside it stand votes (of the last steps' answers
the most frequent, at the trace's end) and the hindsight oracle, which no rule can exceed.

All is told as accuracy less the full trace's, in points, with 95 % intervals that resample problems
and training seeds. "By chance" is what a rule that changes as many answers, for good or bad alike,
exceeds in one of forty: a gain below it says nothing.
"""

from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import timing
from rich.console import Console
from tails import Forms, Study, interval, options

from ospruner.eval.replay import hindsight_oracle, replay
from ospruner.eval.table import FloatArray, TraceTable
from ospruner.progress import PhaseBars
from ospruner.train.labels.loading import load_labels
from ospruner.train.prices import automatic_range

VOTES = (3, 5, 10**6)
"""Of how many last steps the answers are counted."""


class AtNoPrice(Study):
    """Policies that were annealed to a price of 0."""

    def trained(self, form: str, rate: float, seed: int) -> Path:
        """The last stage's policy."""
        return super().trained(form, rate, seed) / "price0"

    def gained(self, policy: Path) -> FloatArray:
        """(N,) accuracy less the full trace's on the test traces, in points."""
        judged = self.judged(self.args.test)
        table, said = judged.split.table, judged.predicted(str(policy))
        found: FloatArray = replay(table, said.probabilities()).correct - table.full_correct
        return 100 * found


def voted(answers: list[str], grades: list[float], count: int) -> float:
    """The grade of the most frequent of the last answers; of equals the latest."""
    ((most, _),) = Counter(reversed(answers[-count:])).most_common(1)
    return dict(zip(answers, grades, strict=True))[most]


def told(gains: FloatArray, problems: np.ndarray) -> dict[str, float]:
    """Mean gain (S, N) with its interval, answers changed for good and bad, and what is chance."""
    low, high = interval(gains, problems)
    better, worse = (float(np.maximum(sign * gains, 0).mean()) for sign in (1, -1))
    each = np.array([np.bincount(problems, row) / np.bincount(problems) for row in np.abs(gains)])
    chance = 1.96 * float(np.sqrt((each**2).mean(0).sum()) / each.shape[1])
    gain = {"gain": float(gains.mean()), "low": low, "high": high}
    return {**gain, "better": better, "worse": worse, "by_chance": chance}


def main() -> None:
    """Trains, measures, prints a table, and the numbers as one JSON object."""
    parser = options(__doc__)
    parser.add_argument("--passes", type=int, nargs="+", default=[8, 32])
    args = timing.parse(parser)
    train = load_labels(args.run / "labels" / "train")
    low, _ = automatic_range(TraceTable.from_dataset(train.traces))
    forms: Forms = {
        f"policy, {n} passes": {"head": "fixed", "prices": [low, 0.0], "num_train_epochs": n}
        for n in args.passes
    }
    with PhaseBars(Console()) as bars:
        study = AtNoPrice(args, forms, args.run / "above-full", bars)
        split = study.judged(args.test).split
        table, problems = split.table, split.table.problem_index
        found: dict[str, dict[str, float]] = {}
        for form in forms:
            gains = [study.gained(study.trained(form, 1, seed)) for seed in study.seeds]
            found[form] = told(np.array(gains), problems)
    full = table.full_correct
    for count in VOTES:
        rows = zip(split.dataset["forced_answers"], split.dataset["forced_correct"], strict=True)
        right = [voted(answers, [g or 0.0 for g in grades], count) for answers, grades in rows]
        name = "votes of all steps" if count == VOTES[-1] else f"votes of the last {count} steps"
        found[name] = told(100 * (np.array([right]) - full), problems)
    found["hindsight oracle"] = told(100 * (hindsight_oracle(table).correct - full)[None], problems)
    print(pd.DataFrame(found).T.round(1).to_string())
    sizes = {"traces": len(table), "full_accuracy": float(full.mean()), "seed": args.seed}
    timing.print_last_line({"rules": found, **sizes, "prices": [low, 0.0]}, args.json)


if __name__ == "__main__":
    main()
