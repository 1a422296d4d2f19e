"""Which form of the policy is best: tuning, trial answers, distilled histories; on a demo's labels.

    ospruner demo --full
    python benchmarks/forms.py --run runs/demo-full [--forms layers queries ...]
        [--rates 2.5e-4 5e-4 1e-3] [--seeds 3] [--limit 12000] [--json FILE]

Each form is a policy of every price, trained on the run's labels with each rate and one seed; a
form's rate is the one with the best mean reward over prices on validation. With that rate it is
trained with the other seeds, too. On the test traces its reward is compared with that of the first
form: seven prices and their mean, with intervals that resample problems and training seeds. As many
policies train side by side as there are cores. A killed run continues. `--show FILE` prints the
tables again.

What of the answers' history a form's tail knows is told by linear read-outs of its states at step
ends, fitted on the training traces: R2 on test. A form of *estimated* answers has the head of trial
answers, but reads in their place what such read-outs say of a second tail, which learned the
history almost alone: what knowing it so well is worth.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from own_keys import OWN_KEYS, stream_keys
from read_outs import EstimatedTraces, ReadOuts
from rich.console import Console
from timing import environment, print_last_line

from modeling_ospruner import OSPrunerForCausalLM
from ospruner.demo.demo import claimed
from ospruner.demo.jobs import Workers
from ospruner.demo.shipped import Reasoner
from ospruner.eval.metrics import REPLICATES, bootstrap_means, seed_weights
from ospruner.eval.replay import replay, replay_full
from ospruner.eval.results_file import Estimate
from ospruner.eval.table import FloatArray, TraceTable
from ospruner.eval.text import markdown_table, penalty_name
from ospruner.progress import PhaseBars, Progress, silent
from ospruner.train.fresh import Predicted, new_policy, predict_outputs
from ospruner.train.from_labels import load_labels
from ospruner.train.loop import train
from ospruner.train.objective import AUXILIARY_TARGETS
from ospruner.train.settings import TrainSettings
from ospruner.train.tail import no_denormals
from ospruner.train.traces import LabelledTraces

TAILS = ("layers", "queries", "queries of four layers", *OWN_KEYS)
HISTORY = ", distilled at 100"  # beside which the objective hardly counts
TRIALS = ", trial answers at every step"
ESTIMATED = ", estimated answers at every step"
EXTRAS: dict[str, dict[str, Any]] = {
    "": {},
    **{f", distilled at {w:g}": {"auxiliary_weight": w} for w in (0.03, 0.1, 0.3, 1.0, 3.0, 100.0)},
    **{
        f", trial answers at every {name}step": {"trial_every": every}
        for name, every in (("", 1), ("2nd ", 2), ("4th ", 4))
    },
    ESTIMATED: {"trial_every": 1},
}
FORMS = {tail + extra: (tail, EXTRAS[extra]) for tail in TAILS for extra in EXTRAS}
PRICE_RANGE = (5e-5, 1e-2)
PRICES = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2)
CHEAP = PRICES[:2]  # where trial answers gain
RATES = (2.5e-4, 5e-4, 1e-3)


class Fit(NamedTuple):
    """A policy that is trained here."""

    form: str
    rate: float
    seed: int


def settings(fit: Fit, epochs: int) -> TrainSettings:
    """The demo's optimiser with another rate, for a form."""
    tail, extra = FORMS[fit.form]
    return TrainSettings(
        head="price",
        price_range=PRICE_RANGE,
        epochs_per_stage=epochs,
        batch_size=32,
        learning_rate=fit.rate,
        head_learning_rate=3e-3,
        swa_share=0.5,
        entropy_bonus=0.01,
        seed=fit.seed,
        tuning="layers" if tail == "layers" else "queries",
        num_policy_layers=4 if tail == "queries of four layers" else 2,
        **extra,
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


def as_dicts(found: FloatArray) -> list[dict[str, float]]:
    """`estimates`, for JSON."""
    return [dataclasses.asdict(one) for one in estimates(found)]


def as_form(form: str) -> AbstractContextManager[None]:
    """Within, policies have the form's own keys, if any."""
    own = OWN_KEYS.get(FORMS[form][0])
    return nullcontext() if own is None else own()


@dataclass(frozen=True)
class Study:
    """Where the labels of a run are, and the policies that are trained on them.

    Attributes:
        run: a demo's folder.
        out: folder of the policies, and of what the base computes on the labels.
        epochs: passes over the training traces.
        limit: only so many training traces; None for all.
    """

    run: Path
    out: Path
    epochs: int
    limit: int | None

    @cached_property
    def reasoner(self) -> Reasoner:
        """The base."""
        return Reasoner()

    @cached_property
    def labels_seed(self) -> int:
        """Of the run."""
        return claimed(self.run)[1]

    def traces(
        self, split: str, form: str, kind: type[LabelledTraces] = LabelledTraces
    ) -> LabelledTraces:
        """A split's labels, with what policies of a form read of them in the study's folder."""
        dataset = load_labels(self.run / "labels" / split).traces
        if split == "train" and self.limit is not None:
            dataset = dataset.take(min(self.limit, len(dataset)))
        traces = kind.from_dataset(dataset)
        tail, _ = FORMS[form]
        if OWN_KEYS.get(tail) is not stream_keys:  # these read something else: not kept in files
            traces.keep_states(self.out / "states")
        return traces

    def folder(self, fit: Fit) -> Path:
        """Of a policy's run."""
        name = f"{fit.form}, rate {penalty_name(fit.rate)}, seed {fit.seed}"
        return self.out / name.replace(", ", "-").replace(" ", "-")

    def train(self, fit: Fit, progress: Progress = silent) -> None:
        """Trains a policy, if it is new."""
        if fit.form.endswith(ESTIMATED):
            self.train(of_history(fit), progress)
        train_traces, validation = self.read(fit, "train"), self.read(fit, "validation")
        with as_form(fit.form):
            train(
                self.reasoner.model,
                self.reasoner.tokenizer,
                train_traces,
                validation,
                settings(fit, self.epochs),
                self.reasoner.label_settings(self.labels_seed),
                self.folder(fit),
                progress=progress,
            )

    def policy(self, fit: Fit) -> OSPrunerForCausalLM:
        """A trained policy."""
        with as_form(fit.form):
            return OSPrunerForCausalLM.from_base(self.reasoner.model, self.folder(fit) / "price")

    def read(self, fit: Fit, split: str) -> LabelledTraces:
        """A split's labels as a policy reads them: with estimated answers, if its form does."""
        if not fit.form.endswith(ESTIMATED):
            return self.traces(split, fit.form)
        model, examples = self.policy(of_history(fit)), self.traces("train", fit.form)
        max_tokens = self.reasoner.label_settings(self.labels_seed).max_answer_tokens
        numbers = examples.trial_numbers(np.arange(len(examples)), 1, max_tokens)
        assert numbers is not None
        with as_form(fit.form):
            read_outs = ReadOuts.fitted(model, examples, numbers.numpy())
            estimates = read_outs.said(self.traces(split, fit.form))
        traces = self.traces(split, fit.form, EstimatedTraces)
        assert isinstance(traces, EstimatedTraces)
        traces.estimates = estimates
        return traces

    def rewards(self, fit: Fit, split: str) -> FloatArray:
        """(N, 7) of a policy on a split."""
        model, traces = self.policy(fit), self.read(fit, split)
        with as_form(fit.form):
            return rewards(traces.table, predict_outputs(model, traces))

    def history_known(self, fit: Fit) -> FloatArray:
        """(4,) R2 on test of what a policy's tail knows of the answers' history."""
        model, examples, traces = self.policy(fit), self.read(fit, "train"), self.read(fit, "test")
        with as_form(fit.form):
            read_outs = ReadOuts.fitted(model, examples, examples.history)
            return read_outs.explained(traces, traces.history)


def of_history(fit: Fit) -> Fit:
    """The policy whose tail estimates the answers for another."""
    return fit._replace(form=fit.form.removesuffix(ESTIMATED) + HISTORY)


@no_denormals()
def train_one(study: Study, fit: Fit, *, progress: Progress) -> None:
    """A job: trains one policy."""
    study.train(fit, progress)


@no_denormals()
def keep_states(study: Study, form: str, *, progress: Progress) -> None:
    """A job: what policies of a form read of the labels is kept, for all that read the same."""
    reasoner = study.reasoner
    given = settings(Fit(form, RATES[0], 0), study.epochs)
    of_labels = reasoner.label_settings(study.labels_seed)
    model = new_policy(reasoner.model, reasoner.tokenizer, given, of_labels)
    for split in ("train", "validation", "test"):
        study.traces(split, form).cache_states(model, 0, progress)


def seconds_of(run: Path) -> float:
    """Of a policy's training: all epochs of its run."""
    log = (run / "log.jsonl").read_text().splitlines()
    return float(sum(line.get("seconds", 0.0) for line in map(json.loads, log)))


def measure(
    study: Study,
    forms: Sequence[str],
    rates: Sequence[float],
    seeds: int,
    workers: Workers,
    progress: Progress,
) -> list[dict[str, Any]]:
    """An entry for each form: its rate, its rewards on test, and those less the first form's."""
    # Forms that read the same share a file, which the first of them makes.
    asked = {form: settings(Fit(form, RATES[0], 0), study.epochs) for form in reversed(forms)}
    kinds = {(one.tuning, one.num_policy_layers): form for form, one in asked.items()}
    workers.run({f: partial(keep_states, study, f) for f in kinds.values()}, progress)

    def train_all(fits: Sequence[Fit]) -> None:
        for estimated in (False, True):  # these need the policies of others
            jobs = {
                f"{fit.form}, {fit.rate:g}, {fit.seed}": partial(train_one, study, fit)
                for fit in fits
                if fit.form.endswith(ESTIMATED) == estimated
            }
            workers.run(jobs, progress)

    train_all([Fit(form, rate, 0) for form in forms for rate in rates])
    curves = {
        form: {
            rate: float(study.rewards(Fit(form, rate, 0), "validation").mean()) for rate in rates
        }
        for form in forms
    }
    best = {form: max(curve, key=lambda rate: curve[rate]) for form, curve in curves.items()}
    fits = {form: [Fit(form, best[form], seed) for seed in range(seeds)] for form in forms}
    train_all([fit for of_form in fits.values() for fit in of_form])
    table = study.traces("test", forms[0]).table
    on_test = {
        form: resampled(table, [study.rewards(fit, "test") for fit in of_form])
        for form, of_form in fits.items()
    }
    found = []
    for form, of_form in fits.items():
        known = np.mean([study.history_known(fit) for fit in of_form], axis=0)
        entry = {
            "form": form,
            "rate": best[form],
            "validation_points": {penalty_name(r): v for r, v in curves[form].items()},
            "seconds": float(np.mean([seconds_of(study.folder(fit)) for fit in of_form])),
            "reward_points": as_dicts(on_test[form]),
            "less_first": as_dicts(on_test[form] - on_test[forms[0]]),
            "history_r2": dict(zip(AUXILIARY_TARGETS, map(float, known), strict=True)),
        }
        tail, _ = FORMS[form]
        if form not in (tail, tail + TRIALS) and {tail, tail + TRIALS} <= set(forms):
            gap = on_test[tail + TRIALS] - on_test[tail]
            closed = 100 * (on_test[form] - on_test[tail]) / gap
            entry["closed_percent"] = as_dicts(closed[:, : len(CHEAP)])
        found.append(entry)
    full = replay_full(table)
    values = np.stack([100 * (full.correct - price * full.tokens) for price in PRICES], axis=1)
    found.append(
        {
            "form": "full trace",
            "reward_points": as_dicts(resampled(table, [values])),
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
    closed = [
        [one["form"], *(Estimate(**e).text(1, 0) for e in one["closed_percent"])]
        for one in trained
        if "closed_percent" in one
    ]
    known = [  # files of before the read-outs have none
        [one["form"], *(f"{value:.3f}" for value in one["history_r2"].values())]
        for one in trained
        if "history_r2" in one
    ]
    tables = [
        (["reward, points", *heads], own),
        ([f"less {trained[0]['form']}", *heads], less),
        (["gap to trial answers closed, %", *heads[: len(CHEAP)]], closed),
        (["known of the history, R2", *AUXILIARY_TARGETS], known),
        (["", "rate", "validation, points by rate", "seconds a seed"], fits),
    ]
    return "\n\n".join(markdown_table(names, rows) for names, rows in tables if rows)


@no_denormals()
def main() -> None:
    """Trains, prints the tables, and the numbers as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, default=Path("runs/demo-full"), help="a demo's folder")
    parser.add_argument("--out", type=Path, default=Path("runs/forms"), help="folder of policies")
    parser.add_argument(
        "--forms",
        nargs="+",
        choices=list(FORMS),
        default=["layers", "queries"],
        metavar="FORM",
        help=f"one of {' | '.join(TAILS)}, alone or followed by one of {' | '.join(EXTRAS)[3:]}",
    )
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=8, help="passes over the training traces")
    parser.add_argument("--limit", type=int, help="only the first N training traces")
    parser.add_argument("--json", metavar="FILE", help="also write the last line there")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the tables of such a file")
    args = parser.parse_args()
    if args.show:
        print(markdown(json.loads(args.show.read_text())["forms"]))
        return
    study = Study(args.run, args.out, args.epochs, args.limit)
    with PhaseBars(Console()) as bars, Workers(os.cpu_count() or 1) as workers:
        found = measure(study, args.forms, args.rates, args.seeds, workers, bars)
    print(markdown(found))
    splits = ("train", "validation", "test")
    sizes = {split: len(study.traces(split, args.forms[0])) for split in splits}
    facts = {"seeds": args.seeds, "epochs": args.epochs, "traces": sizes, **environment()}
    print_last_line({"forms": found, "labels_seed": study.labels_seed, **facts}, args.json)


if __name__ == "__main__":
    main()
