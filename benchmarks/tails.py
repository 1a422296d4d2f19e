"""How small a policy may be: adapters and the head alone, against copies.

    ospruner demo
    python benchmarks/tails.py --run runs/demo [--ranks 4 16 64] [--seeds 3] [--json FILE]
    python benchmarks/tails.py --run runs/thinks --base runs/thinker --test gsm8k

`--run` is a folder with labels/train, labels/validation and labels/TEST. Each form takes the
learning rate, of the given multiples of the default, with which its first seed earns the most on
validation. On the test traces its reward is the mean over seven prices of accuracy less price times
thinking tokens; the difference from the copies' is paired, and its interval resamples problems and
seeds. A killed run goes on.
"""

import argparse
import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import timing
from rich.console import Console

from ospruner.comparing import Judged
from ospruner.demo import REASONER
from ospruner.eval.evaluation import bootstrap_means, seed_weights
from ospruner.eval.methods import price_grid
from ospruner.eval.replay import replay
from ospruner.eval.results import markdown_table
from ospruner.eval.table import FloatArray, IntArray
from ospruner.progress import PhaseBars, Progress
from ospruner.train.config import StopConfig
from ospruner.train.labels.loading import Labels, load_labels
from ospruner.train.run_folder import has_ended, record_of
from ospruner.train.trainer import StopTrainer

Forms = dict[str, dict[str, Any]]
COPIES = "copies"
PRICES = 7  # geometric, over the policy's range
BAR = -0.3  # points of reward: how far behind the copies the interval's lower end may lie


class Study:
    """Trains policies into a folder, by forms' settings of training, and says what each earns."""

    def __init__(
        self, args: argparse.Namespace, forms: Forms, out: Path, progress: Progress
    ) -> None:
        self.args, self.labels, self.out, self.forms = args, args.run / "labels", out, forms
        self.progress, self.states = progress, args.run / "states"
        self.seeds = range(args.seed, args.seed + args.seeds)
        self.judged = cache(self._judged)

    def _judged(self, split: str) -> Judged:
        more: dict[str, Any] = {"states": self.states, "progress": self.progress}
        more["limit"] = self.args.limit
        model = None if split == "validation" else self.judged("validation").model
        return Judged(str(self.labels / split), str(self.args.base), model=model, **more)

    def trained(self, form: str, rate: float, seed: int) -> Path:
        """The folder of a policy of a form, at a multiple of the layers' default learning rate."""
        out = self.out / f"{form.replace(' ', '-')}-{rate:g}x-seed{seed}"
        if not has_ended(out):
            own = dict(self.forms[form])
            if rate != 1:  # of the layers alone: the head keeps the rate of the rule
                first = record_of(self.trained(form, 1, self.seeds[0]))["settings"]
                own["learning_rate"] = rate * first["learning_rate"]
                own["head_learning_rate"] = first["head_learning_rate"]
            own |= {"base": str(self.args.base), "states": str(self.states), "seed": seed}
            config = StopConfig(str(out), bf16=self.args.bf16 or None, disable_tqdm=True, **own)
            splits = (self._first(self.labels / split) for split in ("train", "validation"))
            StopTrainer(config, *splits, progress=self.progress).train()
        return out

    def _first(self, folder: Path) -> Labels:
        """The labels that `limit` leaves."""
        labels = load_labels(folder)
        count = min(self.args.limit or len(labels.traces), len(labels.traces))
        return dataclasses.replace(labels, traces=labels.traces.take(count))

    def rewards(self, policy: Path, split: str) -> FloatArray:
        """(N,) what each trace earns, in points: the mean over the prices."""
        judged = self.judged(split)
        said, each = judged.predicted(str(policy)), []
        assert said.prices is not None
        grid = price_grid(said.prices)
        for price in (grid[round(place)] for place in np.linspace(0, len(grid) - 1, PRICES)):
            outcome = replay(judged.split.table, said.probabilities(price))
            each.append(outcome.correct - price * outcome.tokens)
        rewards: FloatArray = 100 * np.mean(each, axis=0)
        return rewards

    def chosen_rate(self, form: str) -> float:
        """The multiple of the default rate with which the first seed earns most on validation."""
        rates = self.args.rates if form != "head alone" else [1.0]
        first = {rate: self.trained(form, rate, self.seeds[0]) for rate in rates}
        earned = {rate: self.rewards(out, "validation").mean() for rate, out in first.items()}
        return max(earned, key=lambda rate: float(earned[rate]))

    def measured(self) -> Forms:
        """Of each form: rate, size, reward, and its difference from the copies'."""
        test = self.args.test
        problems = self.judged(test).split.table.problem_index
        found: Forms = {}
        earned: dict[str, FloatArray] = {}
        for form in self.forms:
            rate = self.chosen_rate(form)
            folders = [self.trained(form, rate, seed) for seed in self.seeds]
            earned[form] = np.array([self.rewards(one, test) for one in folders])  # (S, N)
            ahead = earned[form] - earned[COPIES]
            low, high = interval(ahead, problems)
            found[form] = {
                "rate": rate,
                "stored_bytes": (folders[0] / "model.safetensors").stat().st_size,
                **{"reward": float(earned[form].mean()), "ahead": float(ahead.mean())},
                **{"ahead_low": low, "ahead_high": high},
                "each_seed": earned[form].mean(1).tolist(),
            }
        return found


def interval(ahead: FloatArray, problems: IntArray) -> tuple[float, float]:
    """95 % interval of the mean of (S, N) differences: problems and seeds are resampled."""
    means = bootstrap_means(ahead.T, problems)[1:]  # (B, S)
    low, high = np.quantile((means * seed_weights(len(ahead))[1:]).sum(axis=1), (0.025, 0.975))
    return float(low), float(high)


def report(found: Forms) -> str:
    """The forms as a Markdown table."""
    rows = []
    for form, one in found.items():
        size, rate, reward = (one[name] for name in ("stored_bytes", "rate", "reward"))
        ahead = "{ahead:+.2f} [{ahead_low:+.2f}, {ahead_high:+.2f}]".format(**one)
        above = "yes" if one["ahead_low"] > BAR else "no"
        rows.append([form, f"{size / 1e6:.2f}", f"{rate:g}", f"{reward:.2f}", ahead, above])
    heads = ["form", "MB", "rate, x default", "reward", "less the copies'", f"above {BAR:g}"]
    return markdown_table(heads, rows)


def options(doc: str | None) -> argparse.ArgumentParser:
    """Where the labels are, and how many seeds are trained."""
    parser = timing.options(doc)
    parser.add_argument("--run", type=Path, default=Path("runs/demo"), help="folder of the labels")
    parser.add_argument("--base", type=Path, default=REASONER, help="the labels' base")
    parser.add_argument("--test", default="test", help="the labels to measure on")
    parser.add_argument("--seeds", type=int, default=3, help="how many, from --seed on")
    parser.add_argument("--bf16", action="store_true", help="train in bfloat16")
    parser.add_argument("--limit", type=int, help="the first so many traces of each split")
    return parser


def main() -> None:
    """Trains and measures, prints a table, and the numbers as one JSON object."""
    parser = options(__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[4, 16, 64])
    parser.add_argument("--rates", type=float, nargs="+", default=[1, 4], help="x the default's")
    args = timing.parse(parser)
    ranks: Forms = {f"rank {rank}": {"adapter_rank": rank} for rank in args.ranks}
    forms: Forms = {COPIES: {}, **ranks, "head alone": {"layers": 0}}
    with PhaseBars(Console()) as bars:
        found = Study(args, forms, args.run / "tails", bars).measured()
    print(report(found))
    settings = {name: getattr(args, name) for name in ("seed", "bf16", "limit", "test")}
    timing.print_last_line({"forms": found, "bar": BAR, **settings}, args.json)


if __name__ == "__main__":
    main()
