"""How small a policy may be, and how few its labels: adapters and the head alone, against copies.

    ospruner demo
    python benchmarks/tails.py --run runs/demo [--ranks 4 16 64] [--seeds 3] [--json FILE]
    python benchmarks/tails.py --run runs/thinks --base runs/thinker --test gsm8k
        [--further "4 layers" "whole layers" "100 traces"]

`--run` is a folder with labels/train, labels/validation and labels/TEST. For each form and seed a
policy of every price is trained on the same labels. Each form takes the learning rate, of the given
multiples of the default, with which its first seed earns the most on validation. On the test
traces a form's reward is the mean over seven prices of accuracy less price times thinking tokens;
its difference from the copies' is paired, and its interval resamples problems and seeds. A killed
run goes on.
"""

from argparse import ArgumentParser, Namespace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import timing
from rich.console import Console

from ospruner.comparing import Judged
from ospruner.demo import REASONER
from ospruner.eval.evaluation import bootstrap_means, seed_weights
from ospruner.eval.methods import price_grid
from ospruner.eval.replay import replay
from ospruner.eval.table import FloatArray, IntArray
from ospruner.progress import PhaseBars, Progress
from ospruner.train.config import StopConfig
from ospruner.train.labels.loading import load_labels
from ospruner.train.run_folder import has_ended, record_of
from ospruner.train.trainer import StopTrainer

Forms = dict[str, dict[str, Any]]
COPIES = "copies"
PRICES = 7  # geometric, over the policy's range
FURTHER: Forms = {
    "1 layer": {"layers": 1},
    "4 layers": {"layers": 4},
    "whole layers": {"tuning": "layers"},
    **{f"{n} traces": {"limit": n} for n in (50, 100, 200, 400)},
}
BAR = -0.3
"""Points of reward that a form may lie behind the copies, at the interval's lower end."""


class Study:
    """Trains the policies, and says what each earns.

    Args:
        args: of this benchmark.
        forms: settings of training, by the form's name.
        out: folder of the policies.
        progress: is told of phases.
    """

    def __init__(self, args: Namespace, forms: Forms, out: Path, progress: Progress) -> None:
        self.args, self.labels, self.out, self.forms = args, args.run / "labels", out, forms
        self.progress, self.states = progress, args.run / "states"
        self.seeds = range(args.seed, args.seed + args.seeds)

    @cache  # noqa: B019 - a study is the whole process
    def judged(self, split: str) -> Judged:
        """The traces of a split; all share the base."""
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
            own.setdefault("limit", self.args.limit)
            config = StopConfig(str(out), bf16=self.args.bf16 or None, disable_tqdm=True, **own)
            splits = (load_labels(self.labels / split) for split in ("train", "validation"))
            StopTrainer(config, *splits, progress=self.progress).train()
        return out

    def rewards(self, policy: Path, split: str) -> FloatArray:
        """(N,) what each trace earns, in points: the mean over the prices."""
        judged = self.judged(split)
        said = judged.predicted(str(policy))
        assert said.prices is not None
        grid = price_grid(said.prices)
        prices = [grid[round(place)] for place in np.linspace(0, len(grid) - 1, PRICES)]
        outcomes = [replay(judged.split.table, said.probabilities(price)) for price in prices]
        each = [one.correct - p * one.tokens for p, one in zip(prices, outcomes, strict=True)]
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
            size = (folders[0] / "model.safetensors").stat().st_size
            row = {"rate": rate, "stored_bytes": size, "reward": float(earned[form].mean())}
            row |= {"ahead": float(ahead.mean()), "ahead_low": low, "ahead_high": high}
            found[form] = row | {"each_seed": earned[form].mean(1).tolist()}
        return found


def interval(ahead: FloatArray, problems: IntArray) -> tuple[float, float]:
    """95 % interval of the mean of (S, N) differences: problems and seeds are resampled."""
    means = bootstrap_means(ahead.T, problems)[1:]  # (B, S)
    low, high = np.quantile((means * seed_weights(len(ahead))[1:]).sum(axis=1), (0.025, 0.975))
    return float(low), float(high)


def options(doc: str | None) -> ArgumentParser:
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
    parser.add_argument("--further", nargs="+", choices=FURTHER, default=[], help="forms")
    args = timing.parse(parser)
    ranks: Forms = {f"rank {rank}": {"adapter_rank": rank} for rank in args.ranks}
    forms: Forms = {COPIES: {}, **ranks, "head alone": {"layers": 0}}
    forms |= {form: FURTHER[form] for form in args.further}
    with PhaseBars(Console()) as bars:
        found = Study(args, forms, args.run / "tails", bars).measured()
    table = pd.DataFrame(found).T.drop(columns="each_seed")
    print(table.assign(**{f"above {BAR:g}": table["ahead_low"] > BAR}).to_string())
    settings = {name: getattr(args, name) for name in ("seed", "bf16", "limit", "test")}
    timing.print_last_line({"forms": found, "bar": BAR, **settings}, args.json)


if __name__ == "__main__":
    main()
