"""Which form of the policy is best: tuning, trial answers, distilled histories; on a demo's labels.

    ospruner demo --full
    OMP_NUM_THREADS=1 python benchmarks/forms.py --run runs/demo-full [--forms layers queries ...]
        [--rates 2.5e-4 5e-4 1e-3] [--seeds 3] [--limit 12000] [--json FILE]

Each form is a policy of every price, trained with each rate and seed on the run's labels. A form's
rate is the one with the best mean reward over prices and seeds on validation. On the test traces
its reward is compared with that of the first form: seven prices and their mean, with intervals that
resample problems and training seeds. A killed run continues. `--show FILE` prints the tables again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from own_keys import OWN_KEYS, stream_keys
from rich.console import Console
from timing import environment, print_last_line

from modeling_ospruner import OSPrunerForCausalLM
from modeling_ospruner.common.progress import PhaseBars
from modeling_ospruner.common.results_file import Estimate
from modeling_ospruner.common.text import markdown_table, penalty_name
from ospruner.eval.metrics import REPLICATES, bootstrap_means, seed_weights
from ospruner.eval.replay import replay, replay_full
from ospruner.eval.table import FloatArray, TraceTable
from ospruner.train.fresh import Predicted, predict_outputs
from ospruner.train.from_labels import load_labels
from ospruner.train.loop import train
from ospruner.train.settings import TrainSettings
from ospruner.train.tail import no_denormals
from ospruner.train.toy.shipped import Reasoner
from ospruner.train.traces import LabelledTraces

FORMS: dict[str, dict[str, Any]] = {
    "layers": {},
    "queries": {"tuning": "queries"},
    **{name: {"tuning": "queries"} for name in OWN_KEYS},
    "layers, distilled": {"auxiliary_weight": 0.3},
    "layers, trial answers at every 4th step": {"trial_every": 4},
    "layers, trial answers at every 2nd step": {"trial_every": 2},
    "layers, trial answers at every step": {"trial_every": 1},
}
PRICE_RANGE = (5e-5, 1e-2)
PRICES = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2)
RATES = (2.5e-4, 5e-4, 1e-3)


def settings(form: str, rate: float, seed: int, epochs: int) -> TrainSettings:
    """The demo's optimiser with another rate, for a form."""
    return TrainSettings(
        head="price",
        price_range=PRICE_RANGE,
        epochs_per_stage=epochs,
        batch_size=32,
        learning_rate=rate,
        head_learning_rate=3e-3,
        swa_share=0.5,
        entropy_bonus=0.01,
        seed=seed,
        **FORMS[form],
    )


def rewards(table: TraceTable, said: Predicted) -> FloatArray:
    """(N, 7) reward of each trace at each price, in points."""
    columns = []
    for price in PRICES:
        outcome = replay(table, said.probabilities(price))
        columns.append(100 * (outcome.correct - price * outcome.tokens))
    return np.stack(columns, axis=1)


def resampled(table: TraceTable, seeds: Sequence[FloatArray]) -> FloatArray:
    """(1 + B, 8) rewards of S seeds at each price, and their mean: on all traces, and resampled."""
    with_mean = [np.column_stack([one, one.mean(axis=1)]) for one in seeds]
    values = np.concatenate(with_mean, axis=1)  # (N, S * 8)
    means = np.concatenate(
        [values.mean(axis=0)[None], bootstrap_means(values, table.problem_index)]
    ).reshape(1 + REPLICATES, len(seeds), -1)
    weighted: FloatArray = np.einsum("bs,bsk->bk", seed_weights(len(seeds)), means)
    return weighted


def estimates(found: FloatArray) -> list[Estimate]:
    """Value and 95 % interval of each column of (1 + B, K)."""
    low, high = np.quantile(found[1:], [0.025, 0.975], axis=0)
    return [Estimate(*map(float, one)) for one in zip(found[0], low, high, strict=True)]


class Study:
    """The labels of a run, its base, and the policies that are trained on them."""

    def __init__(self, run: Path, out: Path, epochs: int, limit: int | None) -> None:
        self.out, self.epochs, self._run, self._limit = out, epochs, run, limit
        self.reasoner = Reasoner()
        self.labels_seed = json.loads((run / "demo.json").read_text())["demo"]["seed"]

    @cache  # noqa: B019  (the study lives as long as the process)
    def traces(self, split: str, streams: bool) -> LabelledTraces:
        """A split's labels, that keep what policies read; apart for those that read streams."""
        dataset = load_labels(self._run / "labels" / split).traces
        if split == "train" and self._limit is not None:
            dataset = dataset.take(min(self._limit, len(dataset)))
        return LabelledTraces.from_dataset(dataset)

    def said(self, form: str, rate: float, seed: int, split: str) -> tuple[Predicted, float]:
        """What a policy says on a split, and the seconds of its training, done if it is new."""
        with OWN_KEYS.get(form, nullcontext)():
            return self._said(form, rate, seed, split)

    def _said(self, form: str, rate: float, seed: int, split: str) -> tuple[Predicted, float]:
        streams = OWN_KEYS.get(form) is stream_keys
        name = f"{form}, rate {penalty_name(rate)}, seed {seed}"
        folder = self.out / name.replace(", ", "-").replace(" ", "-")
        with PhaseBars(Console(), name) as bars:
            (stage,) = train(
                self.reasoner.model,
                self.reasoner.tokenizer,
                self.traces("train", streams),
                self.traces("validation", streams),
                settings(form, rate, seed, self.epochs),
                self.reasoner.label_settings(self.labels_seed),
                folder,
                progress=bars,
            )
        model = OSPrunerForCausalLM.from_base(self.reasoner.model, stage.path)
        lines = (json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines())
        seconds = sum(line["seconds"] for line in lines if "seconds" in line)
        return predict_outputs(model, self.traces(split, streams)), seconds

    def on(self, form: str, rate: float, seeds: int, split: str) -> tuple[list[FloatArray], float]:
        """(N, 7) rewards of each seed, and the mean seconds of training."""
        table = self.traces(split, False).table
        found = [self.said(form, rate, seed, split) for seed in range(seeds)]
        return [rewards(table, said) for said, _ in found], float(np.mean([s for _, s in found]))


def measure(
    study: Study, forms: Sequence[str], rates: Sequence[float], seeds: int
) -> list[dict[str, Any]]:
    """An entry for each form: its rate, its rewards on test, and those less the first form's."""
    table = study.traces("test", False).table
    first: FloatArray | None = None
    found = []
    for form in forms:
        tried = {rate: study.on(form, rate, seeds, "validation") for rate in rates}
        curve = {rate: float(np.mean(of)) for rate, (of, _) in tried.items()}
        rate = max(curve, key=lambda one: curve[one])
        of_test, _ = study.on(form, rate, seeds, "test")
        on_test = resampled(table, of_test)
        first = on_test if first is None else first
        found.append(
            {
                "form": form,
                "rate": rate,
                "validation_points": {penalty_name(r): value for r, value in curve.items()},
                "seconds": tried[rate][1],
                "reward_points": [dataclasses.asdict(one) for one in estimates(on_test)],
                "less_first": [dataclasses.asdict(one) for one in estimates(on_test - first)],
            }
        )
    full = replay_full(table)
    values = np.stack([100 * (full.correct - price * full.tokens) for price in PRICES], axis=1)
    found.append(
        {
            "form": "full trace",
            "reward_points": [dataclasses.asdict(e) for e in estimates(resampled(table, [values]))],
        }
    )
    return found


def markdown(found: Sequence[Mapping[str, Any]]) -> str:
    """Rewards by price, and differences from the first form."""
    heads = [*(f"λ={penalty_name(price)}" for price in PRICES), "mean"]
    own = [
        [one["form"], *(Estimate(**e).text(1, 2) for e in one["reward_points"])] for one in found
    ]
    trained = [one for one in found if "rate" in one]
    less = [
        [one["form"], *(Estimate(**e).text(1, 2, signed=True) for e in one["less_first"])]
        for one in trained[1:]
    ]
    fits = [
        [
            one["form"],
            penalty_name(one["rate"]),
            ", ".join(f"{rate}: {value:.2f}" for rate, value in one["validation_points"].items()),
            f"{one['seconds']:.0f}",
        ]
        for one in trained
    ]
    tables = [
        markdown_table(["reward, points", *heads], own),
        markdown_table([f"less {trained[0]['form']}", *heads], less),
        markdown_table(["", "rate", "validation, points by rate", "seconds a seed"], fits),
    ]
    return "\n\n".join(tables)


@no_denormals()
def main() -> None:
    """Trains, prints the tables, and the numbers as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--run", type=Path, default=Path("runs/demo-full"), help="a demo's folder")
    parser.add_argument("--out", type=Path, default=Path("runs/forms"), help="folder of policies")
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS)[:2])
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=16, help="passes over the training traces")
    parser.add_argument("--limit", type=int, help="only the first N training traces")
    parser.add_argument("--json", metavar="FILE", help="also write the last line there")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the tables of such a file")
    args = parser.parse_args()
    if args.show:
        print(markdown(json.loads(args.show.read_text())["forms"]))
        return
    study = Study(args.run, args.out, args.epochs, args.limit)
    found = measure(study, args.forms, args.rates, args.seeds)
    print(markdown(found))
    sizes = {split: len(study.traces(split, False)) for split in ("train", "validation", "test")}
    facts = {"seeds": args.seeds, "epochs": args.epochs, "traces": sizes, **environment()}
    print_last_line({"forms": found, "labels_seed": study.labels_seed, **facts}, args.json)


if __name__ == "__main__":
    main()
