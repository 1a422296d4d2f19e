"""Rules on the traces of one model and benchmark, and every number of them with its interval.

Problems are resampled with all their traces, and with them the training seeds of a rule that has
several; what was chosen on validation is chosen again in each resample. All rules see the same
resamples, so that differences between them are paired.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from .methods import FRONTIER, ORACLE
from .metrics import AES_ABSOLUTE, AesVariant, reduction
from .replay import Outcome
from .report.tables import MAIN, Table
from .results import (
    ENDS,
    FIRST,
    RESULTS_FILE,
    Estimate,
    Results,
    best_rows,
    frame_of,
    main_rows,
    parameter_text,
    price_name,
    refuse_other_settings,
)
from .table import BoolArray, FloatArray, IntArray

if TYPE_CHECKING:
    from .recorded import Recorded

REPLICATES = 2_000  # B, the resamples
_POINT = ("tokens", "correct")  # of a frontier
_MEANS = tuple(one.name for one in dataclasses.fields(Outcome))

Numbers = dict[str, FloatArray]
"""Numbers of R rules by name: on all traces, then on each resample, (1 + B, R)."""


@dataclass(frozen=True, eq=False)
class Rule:
    """One setting of a method, and what it does."""

    method: str  # name of the method
    outcome: Outcome  # of its training seeds the mean
    parameter: float | None = None  # what picks it from its method: a price, a threshold
    parameter_name: str = ""  # "price", "threshold", "tokens", "step"; "" where there is none
    seeds: tuple[Outcome, ...] = ()  # each training seed's outcome, where there are several
    # Each training seed's outcome on the traces to choose on; empty where there are none
    validation: tuple[Outcome, ...] = ()
    # The rules from which validation chose it (`choose`); its intervals then contain the choice
    among: Sequence[Rule] = ()
    # (1 + B,) which of these is chosen on all validation traces, and in each resample
    picks: IntArray | None = None

    @property
    def setting(self) -> str:
        """Such as "price=5e-4", "≥.70", "110 tokens", or ""."""
        return parameter_text(self.parameter, self.parameter_name)

    @property
    def name(self) -> str:
        """Method and setting: "OS-Pruner price=5e-4"."""
        return f"{self.method} {self.setting}".strip()

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """Each training seed's."""
        return self.seeds or (self.outcome,)


def choose(
    rules: Sequence[Rule],
    full: Outcome,
    problem_index: IntArray,
    variant: AesVariant = AES_ABSOLUTE,
) -> tuple[Rule, FloatArray]:
    """The rule of the highest AES on validation, the first of equals; and the AES of all.

    It remembers the choice, here and in each resample. Resamples of problems differ from the
    test's, those of training seeds are the same.
    """
    blocks = [(full,), *(rule.validation for rule in rules)]
    means = resampled(blocks, problem_index, names=(*_POINT, "answer_tokens"), validation=True)
    tokens, accuracy, answer_tokens = means.transpose(2, 0, 1)  # each (1 + B, 1 + R)
    if variant.charge == "generated":
        tokens = tokens + answer_tokens
    scores = variant(accuracy[:, 1:], tokens[:, 1:], accuracy[:, :1], tokens[:, :1])
    picks = np.nanargmax(scores, axis=1)
    return dataclasses.replace(rules[int(picks[0])], among=rules, picks=picks), scores[0]


def resampled(
    blocks: Sequence[Sequence[Outcome]],
    problem_index: IntArray,
    *,
    names: Sequence[str] = _POINT,
    validation: bool = False,
) -> FloatArray:
    """(1 + B, R, K) each rule's means of K numbers: on all traces, and on each resample.

    Args:
        blocks: for each rule its seeds' outcomes on the same N traces.
        problem_index: (N,) the problem of each trace.
        names: the numbers.
        validation: the traces are those to choose on: their problems are drawn anew, training
            seeds are not, for a policy is the same on all traces.
    """
    columns = [vars(one)[name] for block in blocks for one in block for name in names]
    seed = 0xFFFF if validation else 0
    means = bootstrap_means(np.column_stack(columns), problem_index, seed)
    parts = np.split(means, len(names) * np.cumsum([len(block) for block in blocks]), axis=1)
    found = []
    for block, part in zip(blocks, parts, strict=False):
        weights = seed_weights(len(block))  # (1 + B, S)
        found.append(np.einsum("bs,bsk->bk", weights, part.reshape(*weights.shape, -1)))
    return np.stack(found, axis=1)


def bootstrap_means(values: FloatArray, problem_index: IntArray, seed: int = 0) -> FloatArray:
    """(1 + B, K) means over all traces, then over those of each of B resamples of the problems.

    Values are (N, K), K quantities of each trace. The resamples depend on the seed and on the
    number of problems only.
    """
    problems = int(problem_index.max()) + 1
    sums = np.zeros((problems, values.shape[1] + 1))  # (P, K+1), the last counts traces
    np.add.at(sums, problem_index, np.column_stack([values, np.ones(len(values))]))
    uniform = np.full(problems, 1.0 / problems)
    drawn = np.random.default_rng(seed).multinomial(problems, uniform, REPLICATES)  # (B, P)
    totals = drawn @ sums  # (B, K+1)
    return np.concatenate([values.mean(axis=0)[None], totals[:, :-1] / totals[:, -1:]])


def seed_weights(seeds: int) -> FloatArray:
    """(1 + B, S) how much each training seed counts: alike, then in each resample of the seeds.

    Methods of as many seeds get the same weights, so that differences stay paired.
    """
    rng = np.random.default_rng([0, 1 + seeds])
    drawn = rng.multinomial(seeds, np.full(seeds, 1.0 / seeds), REPLICATES)
    return np.concatenate([np.ones((1, seeds)), drawn]) / seeds


def intervals(numbers: Numbers) -> pd.DataFrame:
    """The numbers on all traces, each beside the ends of the 95 % interval of its resamples.

    Where one has no value, it is left out. Of one problem alone, or values that never vary, there
    is no width: it is an interval of this sample, not of all that may happen.
    """
    columns: Numbers = {}
    for name, values in numbers.items():
        ends = pd.DataFrame(values[1:]).quantile([0.025, 0.975]).to_numpy()
        columns |= {name + end: one for end, one in zip(ENDS, (values[0], *ends), strict=True)}
    return pd.DataFrame(columns)


@dataclass(frozen=True, eq=False)
class Report:
    """Rules on N traces of one model and benchmark; their resamples are made once.

    Attributes:
        rules: the first is the full trace, to which reductions and AES refer.
        problem_index: (N,) the problem of each trace, 0 .. P-1.
        limits: what no rule can reach, or none should need.
        settings: "model", "benchmark", "answer" ("forced" or "free"), "mode" ("replay" or
            "online"), and whatever else has to agree before two runs may be mixed. JSON-ready.
        natural_correct: (N,) grade of the answer after the trace's own end; NaN where there is
            none. It is never mixed with forced answers.
        variant: which AES.
        prices: of a token, for rewards.
        frontiers: a row for each method; empty without traces to choose on; see `Results`.
        marks: further columns of the frame, by name.
        about: what else the results say about themselves, JSON values.
        recorded: what all was computed from; None of what was generated.
    """

    rules: Sequence[Rule]
    problem_index: IntArray
    limits: Sequence[Rule] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    natural_correct: FloatArray | None = None
    variant: AesVariant = AES_ABSOLUTE
    prices: Sequence[float] = ()
    frontiers: pd.DataFrame = field(default_factory=partial(frame_of, [], "frontiers"))
    marks: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    recorded: Recorded | None = None

    def __len__(self) -> int:
        return len(self.problem_index)

    @property
    def full(self) -> Outcome:
        """The full traces."""
        return self.rules[0].outcome

    @cached_property
    def _numbers(self) -> Numbers:
        """The numbers of the frame, from the means of all rules and limits.

        A resample chooses again what was chosen.
        """

        def means_of(rules: Sequence[Rule]) -> FloatArray:
            blocks = [rule.outcomes for rule in rules]
            return resampled(blocks, self.problem_index, names=_MEANS)

        means = means_of(everything := [*self.rules, *self.limits])
        for number, rule in enumerate(everything):
            if rule.picks is not None:
                taken, place = np.unique(rule.picks, return_inverse=True)
                of_taken = means_of([rule.among[k] for k in taken])
                means[:, number] = of_taken[np.arange(len(place)), place]
        own = dict(zip(_MEANS, means.transpose(2, 0, 1), strict=True))
        full = {name: values[:, :1] for name, values in own.items()}
        generated, of_full = (one["tokens"] + one["answer_tokens"] for one in (own, full))
        paid, base = own["tokens"], full["tokens"]
        if self.variant.charge == "generated":
            paid, base = generated, of_full
        with np.errstate(divide="ignore", invalid="ignore"):  # where all stop, or none: NaN
            after_stop = own["stopped_answer"] / own["stopped"]
            after_end = (own["answer_tokens"] - own["stopped_answer"]) / (1 - own["stopped"])
        same = ("answer_tokens", "helped", "harmed", "truncated", "probe_tokens", "rethought")
        rewards = {f"reward@{price_name(one)}": own["correct"] - one * paid for one in self.prices}
        return {
            "accuracy": own["correct"],
            "tokens": own["tokens"],
            "reduction": reduction(own["tokens"], full["tokens"]),
            "aes": self.variant(own["correct"], paid, full["correct"], base),
            **{name: own[name] for name in same},
            "answer_after_stop": np.where(own["stopped"] > 0, after_stop, np.nan),
            "answer_after_end": np.where(own["stopped"] < 1, after_end, np.nan),
            "generated_tokens": generated,
            "total_reduction": reduction(generated, of_full),
            "time_ratio": own["seconds"] / full["seconds"],
            "tokens_per_second": generated / own["seconds"],
            "flops": own["flops"],
            "flops_ratio": own["flops"] / full["flops"],
            **rewards,
        }

    @cached_property
    def frame(self) -> pd.DataFrame:
        """A row for each rule and each limit; see `Results`."""
        everything, own = [*self.rules, *self.limits], FIRST["frame"][1:-1]
        frame = pd.DataFrame({n: [getattr(rule, n) for rule in everything] for n in own})
        frame["kind"] = ["rule"] * len(self.rules) + ["limit"] * len(self.limits)
        frame["chosen"] = [bool(rule.among) for rule in everything]
        frame = frame.join(intervals(self._numbers))
        counts = {"traces": len(self), "problems": len(np.unique(self.problem_index))}
        return frame_of(frame.assign(aes_label=self.variant.label, **counts, **self.marks))

    @cached_property
    def differences(self) -> pd.DataFrame:
        """Paired differences of one method's best rule to every other method's (`best_rows`).

        The one is OS-Pruner where it is there, else the first after the full trace.
        """
        best = best_rows(self.frame)
        places = dict(zip(best["method"], best.index.tolist(), strict=True))
        methods = [method for method in places if method != self.rules[0].method]
        if not methods:
            return frame_of([], "differences")
        ours = places.pop(FRONTIER if FRONTIER in places else methods[0])
        others, names = list(places.values()), ("accuracy", "tokens", "reduction", "aes")
        numbers = {name: self._numbers[name] for name in names}
        apart = {name: one[:, [ours]] - one[:, others] for name, one in numbers.items()}
        rows = [{"rule": self.rules[ours].name, "other": self.rules[one].name} for one in others]
        return frame_of(pd.DataFrame(rows).join(intervals(apart)), "differences")

    @cached_property
    def results(self) -> Results:
        """Every number with its interval, as the file holds it."""
        said, natural = self.settings, None
        setting = f"{said['model']}, {said['answer']} answers, {said['mode']}"
        if of_probabilities(said):
            setting += ", probabilities of right answers"
        if self.natural_correct is not None and not np.isnan(self.natural_correct).all():
            right = np.nan_to_num(self.natural_correct)  # one without a verdict counts as wrong
            found = intervals({"right": bootstrap_means(right[:, None], self.problem_index)})
            natural = Estimate.of(found.iloc[0], "right")
        return Results(
            dataset=said["benchmark"],
            setting=setting,
            frame=self.frame,
            differences=self.differences,
            frontiers=self.frontiers,
            natural_accuracy=natural,
            about={"settings": dict(said), **self._whence(), **self.about},
        )

    def plot(self, path: str | Path) -> None:
        """Draws accuracy over thinking tokens (`draw_pareto`) as PNG, or what the suffix says."""
        from .report.pictures import draw_pareto  # matplotlib is slow to import

        title = f"{self.results.dataset}: {self.results.setting}"
        draw_pareto({"": self.frame}, title).savefig(path)

    def to_latex(self) -> str:
        """The main numbers as a LaTeX table, each with its interval; rows as `main_rows`."""
        return Table.of(main_rows(self.frame), MAIN, corner="method").latex()

    def save(self, folder: str | Path) -> None:
        """Writes numbers, picture and signals into a folder; those of the same settings go.

        Raises:
            ValueError: the folder holds a comparison of other settings, or other files.
        """
        refuse_other_settings(folder := Path(folder), self.settings)
        folder.mkdir(parents=True, exist_ok=True)
        self.results.save(folder / RESULTS_FILE)
        self.plot(folder / "pareto.png")
        if self.recorded is not None:
            self.recorded.save(folder)

    def _whence(self) -> dict[str, Any]:
        """The shares of hopeless traces ("never_right") and of those cut at their cap ("at_cap").

        Of the traces, of the full traces' tokens, and of each rule's savings, None where it saves
        nothing. The hindsight oracle is right wherever a trace ever is.
        """
        full, which = self.full, {}
        if (cut := full.truncated > 0).any():
            which["at_cap"] = cut
        for rule in self.limits:
            if rule.method == ORACLE and not of_probabilities(self.settings):
                which["never_right"] = rule.outcome.correct < 0.5
        saved = {rule.name: full.tokens - rule.outcome.tokens for rule in self.rules[1:]}

        def share(tokens: FloatArray, rows: BoolArray) -> float | None:
            return float(tokens[rows].sum() / tokens.sum()) if tokens.sum() > 0 else None

        return {
            name: {
                "traces": float(rows.mean()),
                "tokens": share(full.tokens, rows),
                "saved": {of: share(tokens, rows) for of, tokens in saved.items()},
            }
            for name, rows in which.items()
        }


def of_probabilities(settings: Mapping[str, Any]) -> bool:
    """Whether the labels are probabilities of right answers, so that accuracy is their mean."""
    task = settings.get("label_settings", {}).get("task", {})
    return bool(task.get("labels") == "probability")
