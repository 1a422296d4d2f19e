"""One evaluation: what rules do on the traces of one model and benchmark, and its numbers.

All rules see the same resamples, so that differences between them are paired.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from .intervals import REPLICATES, Rule, bootstrap_interval, estimate, resampled_means
from .methods import FRONTIER, ORACLE
from .metrics import AES_ABSOLUTE, AesVariant, charged_tokens, reduction, reward
from .replay import Outcome
from .results import NAMED, Results, best_rows, frame_of, main_rows
from .table import FloatArray, IntArray, TraceTable
from .text import price_name

_MEANS = [one.name for one in dataclasses.fields(Outcome)]

Numbers = dict[str, FloatArray]
"""Numbers of one rule by name: on all traces, then on each resample, (1 + B,)."""


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Rules on N traces of one model and benchmark; their resamples are made once.

    Attributes:
        rules: the first is the full trace, to which reductions and AES refer.
        problem_index: (N,) the problem of each trace, 0 .. P-1.
        limits: what no rule can reach, or none should need.
        settings: "model", "benchmark", "answer" ("forced" or "free"), "mode" ("replay" or
            "online"), and whatever else has to agree before two runs may be mixed. JSON-ready.
        natural_correct: (N,) grade of the answer after the trace's own end; NaN where there is
            none. It is never mixed with forced answers.
        seed: of the resamples.

    Raises:
        ValueError: an outcome of another number of traces.
    """

    rules: Sequence[Rule]
    problem_index: IntArray
    limits: Sequence[Rule] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    natural_correct: FloatArray | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for rule in self.rules:
            if len(rule.outcome) != len(self):
                raise ValueError(
                    f"{rule.method}: an outcome of {len(rule.outcome)} traces, the full traces are "
                    f"{len(self)}"
                )

    def __len__(self) -> int:
        return len(self.problem_index)

    @property
    def full(self) -> Outcome:
        """The full traces."""
        return self.rules[0].outcome

    @cached_property
    def _means(self) -> list[Numbers]:
        """Of each rule and limit; a resample chooses again what was chosen."""
        everything = [*self.rules, *self.limits]
        found = self._means_of([rule.outcomes for rule in everything])
        for number, rule in enumerate(everything):
            if rule.choice is not None:
                picks = rule.choice.picks(REPLICATES, self.seed)
                taken, place = np.unique(picks, return_inverse=True)
                blocks = [rule.choice.candidates[int(k)].outcomes for k in taken]
                means = np.stack(self._means_of(blocks))  # (U, 1 + B, K)
                found[number] = means[place, np.arange(len(picks))]
        return [dict(zip(_MEANS, means.T, strict=True)) for means in found]

    def _means_of(self, blocks: Sequence[Sequence[Outcome]]) -> list[FloatArray]:
        columns = [[one.columns() for one in block] for block in blocks]
        return resampled_means(columns, self.problem_index, REPLICATES, self.seed)

    def frame(
        self, variant: AesVariant = AES_ABSOLUTE, prices: Sequence[float] = ()
    ) -> pd.DataFrame:
        """A row for each rule and each limit, with rewards at prices of a token; see `Results`."""
        rows: list[dict[str, Any]] = []
        for rule, own in zip([*self.rules, *self.limits], self._means, strict=True):
            row: dict[str, Any] = {
                "kind": "rule" if len(rows) < len(self.rules) else "limit",
                "method": rule.method,
                "parameter": rule.parameter,
                "parameter_name": rule.parameter_name,
                "setting": rule.setting,
                "chosen": rule.choice is not None,
            }
            for name, values in _numbers(own, self._means[0], variant, prices).items():
                row |= estimate(values).spread(name)
            problems = len(np.unique(self.problem_index))
            rows.append(
                row | {"aes_label": variant.label, "traces": len(self), "problems": problems}
            )
        return frame_of(rows)

    def differences(self, variant: AesVariant = AES_ABSOLUTE) -> pd.DataFrame:
        """Paired differences of one method's best rule to every other method's, of `main_rows`.

        The one is OS-Pruner where it is there, else the first after the full trace.
        """
        best = best_rows(main_rows(self.frame(variant)))
        places = dict(zip(best["method"], best.index.tolist(), strict=True))
        methods = [method for method in places if method != self.rules[0].method]
        if not methods:
            return frame_of([], "differences")
        ours = places.pop(FRONTIER if FRONTIER in places else methods[0])
        full, rows = self._means[0], []
        left = _numbers(self._means[ours], full, variant)
        for other in places.values():
            right = _numbers(self._means[other], full, variant)
            row: dict[str, Any] = {"rule": self.rules[ours].name, "other": self.rules[other].name}
            for name in ("accuracy", "tokens", "reduction", "aes"):
                row |= estimate(left[name] - right[name]).spread(name)
            rows.append(row)
        return frame_of(rows, "differences")

    def results(self, variant: AesVariant = AES_ABSOLUTE, prices: Sequence[float] = ()) -> Results:
        """Every number with its interval.

        Raises:
            ValueError: `settings` does not name the evaluation.
        """
        said, natural = self.settings, self.natural_correct
        if missing := [name for name in NAMED if not said.get(name)]:
            raise ValueError(f"settings lacks {missing}; an evaluation is named by {list(NAMED)}")
        setting = [said["model"], f"{said['answer']} answers", said["mode"]]
        if of_probabilities(said):
            setting.append("probabilities of right answers")
        return Results(
            dataset=said["benchmark"],
            setting=", ".join(setting),
            frame=self.frame(variant, prices),
            differences=self.differences(variant),
            # One without a verdict counts as wrong.
            natural_accuracy=None
            if natural is None or np.isnan(natural).all()
            else bootstrap_interval(np.nan_to_num(natural), self.problem_index),
            about={"settings": dict(said), **self._whence()},
        )

    def _whence(self) -> dict[str, Any]:
        """How much of what rules save is of traces that are hopeless, or were cut at their cap.

        The hindsight oracle is right wherever a trace ever is.

        Returns:
            Under "never_right", where that is known, and "at_cap", where there are such traces:
            their share of the "traces", of the full traces' "tokens", and under "saved" of each
            rule's savings, None where it saves nothing.
        """
        which = {"at_cap": self.full.truncated > 0}
        oracle = next((rule.outcome for rule in self.limits if rule.method == ORACLE), None)
        if oracle is not None and not of_probabilities(self.settings):
            which["never_right"] = oracle.correct < 0.5
        full = self.full.tokens
        saved = {rule.name: full - rule.outcome.tokens for rule in self.rules[1:]}
        return {
            name: {
                "traces": float(rows.mean()),
                "tokens": float(full[rows].sum() / full.sum()),
                "saved": {
                    of: float(one[rows].sum() / one.sum()) if one.sum() > 0 else None
                    for of, one in saved.items()
                },
            }
            for name, rows in which.items()
            if name == "never_right" or rows.any()
        }


def of_probabilities(settings: Mapping[str, Any]) -> bool:
    """Whether the labels are probabilities of right answers, so that accuracy is their mean."""
    task = settings.get("label_settings", {}).get("task", {})
    return bool(task.get("labels") == "probability")


def _numbers(
    own: Numbers, full: Numbers, variant: AesVariant, prices: Sequence[float] = ()
) -> Numbers:
    """The numbers of a frame's row from a rule's means and those of the full traces."""
    generated, of_full = (one["tokens"] + one["answer_tokens"] for one in (own, full))
    paid, base = generated, of_full
    if variant.charge != "generated":
        base = full["tokens"]
        paid = charged_tokens(variant.charge, own["tokens"], own["flops"], base, full["flops"])
    with np.errstate(divide="ignore", invalid="ignore"):  # where all stop, or none: NaN
        after_stop = own["stopped_answer"] / own["stopped"]
        after_end = (own["answer_tokens"] - own["stopped_answer"]) / (1 - own["stopped"])
    return {
        "accuracy": own["correct"],
        "tokens": own["tokens"],
        "reduction": reduction(own["tokens"], full["tokens"]),
        "aes": variant(own["correct"], paid, full["correct"], base),
        **{
            name: own[name]
            for name in ("answer_tokens", "helped", "harmed", "truncated", "probe_tokens")
        },
        "answer_after_stop": np.where(own["stopped"] > 0, after_stop, np.nan),
        "answer_after_end": np.where(own["stopped"] < 1, after_end, np.nan),
        "rethought": own["rethought"],
        "generated_tokens": generated,
        "total_reduction": reduction(generated, of_full),
        "time_ratio": own["seconds"] / full["seconds"],
        "tokens_per_second": generated / own["seconds"],
        "flops": own["flops"],
        "flops_ratio": own["flops"] / full["flops"],
        **{f"reward@{price_name(price)}": reward(own["correct"], paid, price) for price in prices},
    }


def trace_hash(table: TraceTable) -> str:
    """A short hash of the labels: which traces, which steps, which grades."""
    digest = hashlib.blake2b(digest_size=8)
    digest.update("\x00".join(table.problem_ids).encode())
    for array in (table.problem_index, table.lengths, table.correct):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
