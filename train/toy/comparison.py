"""The demo's comparison: every choice made on validation, every number measured on test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from modeling_ospruner.common.results_file import Difference, Result, Results
from ospruner.eval.frontier.grids import policy_grid
from ospruner.eval.limits import best_fixed_budget, hindsight_oracle, hindsight_oracle_no_loss
from ospruner.eval.methods import FULL, METHOD_NAMES, ORACLE, PAPER_THRESHOLDS
from ospruner.eval.replay import Outcome, pool, replay, replay_budget, replay_full
from ospruner.eval.results import Rule, compare, summarise
from ospruner.eval.selection import Criterion, best_aes, choose
from ospruner.eval.table import TraceTable

MAX_LOSS = 0.01
MIN_REDUCTION = 0.35


@dataclass(frozen=True)
class Predictions:
    """Stop probabilities of one policy, trained with several seeds.

    Attributes:
        method: "os-pruner", "probe" or "convergence".
        length_penalty: Lambda; 0 for the baselines.
        validation: For each seed, (N, T) on the validation traces.
        test: For each seed, (N, T) on the test traces.
        eligible: Whether this policy may be chosen; else it is only shown.
    """

    method: str
    length_penalty: float
    validation: list[npt.NDArray[np.float32]]
    test: list[npt.NDArray[np.float32]]
    eligible: bool = True


@dataclass(frozen=True)
class Comparison:
    """What the demo found.

    Attributes:
        results: Every rule on the test traces.
        limits: The hindsight oracle and the best fixed budget.
        chosen: OS-Pruner's policy chosen on validation: the fewest tokens within 1 point of the
            full trace, else the best AES.
        accurate: Whether a policy was within that point on validation.
        rivals: The results the chosen policy is held against; the best fixed budget is the last.
        differences: Chosen policy less each rival, paired.
    """

    results: list[Result]
    limits: list[Result]
    chosen: Result
    accurate: bool
    rivals: list[Result]
    differences: list[Difference]

    @property
    def drawn(self) -> list[Result]:
        """What the picture shows: thresholds chosen from those drawn already are left out."""
        families = self.results[: -len(self.rivals)]
        return [*families, self.rivals[-1], self.limits[0]]

    def claims(self) -> list[tuple[str, bool, str]]:
        """What the proof asks for: (claim, whether the point estimate meets it, the numbers)."""
        chosen, full = self.chosen, self.results[0]
        loss = full.accuracy.value - chosen.accuracy.value
        claims = [
            ("a policy is within 1 point of the full trace on validation", self.accurate, ""),
            (
                "loses at most 1 point of accuracy",
                loss <= MAX_LOSS,
                f"{-100 * loss:+.2f} points",
            ),
            (
                "saves at least 35 % of the thinking tokens",
                chosen.reduction.value >= MIN_REDUCTION,
                f"{100 * chosen.reduction.value:.1f} %",
            ),
        ]
        for rival in self.rivals:
            claims.append(
                (
                    f"AES above {rival.method}",
                    chosen.aes.value > rival.aes.value,
                    f"{chosen.aes.value:.3f} against {rival.aes.value:.3f}",
                )
            )
        return claims

    def to_results(self, setting: str) -> Results:
        """Every number, for the file.

        Args:
            setting: how it was measured, in a line.
        """
        return Results(
            dataset="embedded reasoner, test problems",
            setting=setting,
            results=self.results,
            limits=self.limits,
            chosen=self.results.index(self.chosen),
            differences=self.differences,
            about={
                "claims": [
                    {"claim": claim, "holds": held, "numbers": numbers}
                    for claim, held, numbers in self.claims()
                ]
            },
        )


@dataclass(frozen=True)
class _Candidate:
    """A rule with its outcome on both splits."""

    rule: Rule
    validation: Outcome


def compare_methods(
    validation: TraceTable, test: TraceTable, predictions: list[Predictions]
) -> Comparison:
    """Choose lambda, thresholds and budget on validation; measure on test.

    OS-Pruner is replayed in mode "sample" (the exact expectation), baselines with thresholds.
    Lambda and the tuned thresholds: the fewest tokens within 1 point of the full trace. Among the
    paper's thresholds and for the fixed budget: the highest AES.

    Args:
        validation: Labelled traces to choose on.
        test: Labelled traces of other problems, looked at here and nowhere else.
        predictions: Every policy's stop probabilities on both.
    """
    base = replay_full(validation)
    ours = [p for p in predictions if p.method == "os-pruner"]
    frontier = [_candidate(p, validation, test) for p in ours]
    eligible = [i for i, p in enumerate(ours) if p.eligible]
    on_validation = [frontier[i].validation for i in eligible]
    accurate = choose(on_validation, base, "reduction", max_loss=MAX_LOSS)
    if accurate is None:
        number = best_aes(
            [outcome.accuracy for outcome in on_validation],
            [outcome.mean_tokens for outcome in on_validation],
            base.accuracy,
            base.mean_tokens,
        )
    else:
        number = accurate
    number = eligible[number]
    baselines, rivals = [], []
    for p in (p for p in predictions if p.method != "os-pruner"):
        paper = [_candidate(p, validation, test, threshold) for threshold in PAPER_THRESHOLDS]
        baselines += [c.rule for c in paper]
        rivals.append(_pick(paper, base, "aes", "paper"))
        grid = reversed(policy_grid(validation, np.stack(p.validation)))
        tuned = [_candidate(p, validation, test, threshold) for threshold in grid]
        rivals.append(_pick(tuned, base, "reduction", "1 point"))
        rivals.append(_pick(tuned, base, "aes", "AES"))
    budget = best_fixed_budget(validation, "aes")
    rivals.append(Rule("best fixed budget", replay_budget(test, budget), float(budget), "tokens"))
    rules = [Rule(FULL, replay_full(test)), *(c.rule for c in frontier), *baselines, *rivals]
    limits = [
        Rule(ORACLE, hindsight_oracle(test)),
        Rule(f"{ORACLE}, no loss", hindsight_oracle_no_loss(test)),
    ]
    summaries = summarise([*rules, *limits], rules[0].outcome, test.problem_index)
    results, bounds = summaries[: len(rules)], summaries[len(rules) :]
    taken = frontier[number].rule
    against = [rules[0], *rivals]
    return Comparison(
        results=results,
        limits=bounds,
        chosen=results[1 + number],
        accurate=accurate is not None,
        rivals=results[-len(rivals) :],
        differences=[
            compare(taken, rule, rules[0].outcome, test.problem_index) for rule in against
        ],
    )


def _candidate(
    predictions: Predictions,
    validation: TraceTable,
    test: TraceTable,
    threshold: float | None = None,
) -> _Candidate:
    """Replay a policy's seeds on both splits and pool them."""
    mode: Literal["sample", "threshold"] = "sample" if threshold is None else "threshold"
    on_validation, on_test = (
        pool([replay(table, pi, mode, threshold) for pi in probabilities])
        for table, probabilities in (
            (validation, predictions.validation),
            (test, predictions.test),
        )
    )
    name = METHOD_NAMES[predictions.method]
    if threshold is None:
        return _Candidate(Rule(name, on_test, predictions.length_penalty, "λ"), on_validation)
    return _Candidate(Rule(name, on_test, threshold, "threshold"), on_validation)


def _pick(candidates: list[_Candidate], base: Outcome, criterion: Criterion, name: str) -> Rule:
    """The candidate that validation chooses (the most careful one where none qualifies)."""
    number = choose([c.validation for c in candidates], base, criterion, max_loss=MAX_LOSS)
    rule = candidates[-1 if number is None else number].rule
    return Rule(f"{rule.method} ({name})", rule.outcome, rule.parameter, rule.parameter_name)
