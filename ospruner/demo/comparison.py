"""The demo's comparison: every choice made on validation, every number measured on test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ospruner.eval.compare import choice_of, policy_thresholds, same_setting
from ospruner.eval.compute import Compute
from ospruner.eval.intervals import Resampled, Rule, summarise
from ospruner.eval.limits import best_fixed, hindsight_oracle, hindsight_oracle_no_loss
from ospruner.eval.methods import EVERY_PRICE, FULL, METHOD_NAMES, ORACLE, PAPER_THRESHOLDS
from ospruner.eval.metrics import largest_reduction
from ospruner.eval.replay import pool, replay, replay_full
from ospruner.eval.results import Difference, Result, Results
from ospruner.eval.table import FloatArray, TraceTable

MAX_LOSS = 0.01
MIN_PROMISED = 0.25
MIN_PROBLEMS = 300
"""With fewer test problems chance decides on more than the policies do."""


@dataclass(frozen=True)
class Predictions:
    """Stop probabilities of one policy, trained with several seeds.

    Attributes:
        method: "os-pruner", "probe" or "convergence".
        price: The price that OS-Pruner's is told; 0 for the baselines.
        validation: For each seed, (N, T) on the validation traces.
        test: For each seed, (N, T) on the test traces.
        layers: Of its tail, which is queries only.
    """

    method: str
    price: float
    validation: list[npt.NDArray[np.float32]]
    test: list[npt.NDArray[np.float32]]
    layers: int = 2


@dataclass(frozen=True)
class Promised:
    """A promise that was made on the validation traces, and what became of it on test.

    Attributes:
        max_loss: Accuracy that may be lost, as a share.
        told: What `ospruner calibrate` said.
        rule: The policy as promised on the test traces; None where no price passed.
    """

    max_loss: float
    told: str
    rule: Result | None


@dataclass(frozen=True)
class Comparison:
    """What the demo found.

    Attributes:
        results: Every rule on the test traces.
        limits: The hindsight oracle and the best fixed budget.
        chosen: OS-Pruner at the price with the best AES on validation.
        rivals: The results the chosen policy is held against; the best fixed budget is the last.
        differences: Chosen policy less each rival, paired.
        promised: What was promised; None where nothing was asked for.
    """

    results: list[Result]
    limits: list[Result]
    chosen: Result
    rivals: list[Result]
    differences: list[Difference]
    promised: Promised | None = None

    @property
    def frontier(self) -> list[Result]:
        """OS-Pruner's results, by rising price."""
        return [result for result in self.results if result.method == self.chosen.method]

    @property
    def drawn(self) -> list[Result]:
        """What the picture shows: thresholds chosen from those drawn already are left out."""
        families = self.results[: -len(self.rivals)]
        return [*families, self.rivals[-1], self.limits[0]]

    def claims(self) -> list[tuple[str, bool, str]]:
        """What the proof asks for: (claim, whether the point estimate meets it, the numbers)."""
        tokens = [result.tokens.value for result in self.frontier]
        falls = f"{tokens[0]:.0f} to {tokens[-1]:.0f} over {len(tokens)} prices"
        claims = [
            ("thinking tokens fall as their price rises", tokens == sorted(tokens)[::-1], falls)
        ]
        if self.results[0].problems < MIN_PROBLEMS:
            return claims
        if self.promised is not None and self.promised.rule is not None:
            kept = self.promised.rule
            loss = self.results[0].accuracy.value - kept.accuracy.value
            points = 100 * self.promised.max_loss
            claims += [
                (
                    f"the promise of at most {points:g} points lost is kept",
                    loss <= self.promised.max_loss,
                    f"{-100 * loss:+.2f} points",
                ),
                (
                    f"and saves at least {100 * MIN_PROMISED:.0f} % of the thinking tokens",
                    kept.reduction.value >= MIN_PROMISED,
                    f"{100 * kept.reduction.value:.1f} %",
                ),
            ]
        return claims + self._above(self.rivals)

    def _above(self, rivals: list[Result]) -> list[tuple[str, bool, str]]:
        ours = self.chosen.aes.value
        return [
            (
                f"AES above {rival.method}",
                ours > rival.aes.value,
                f"{ours:.3f} against {rival.aes.value:.3f}",
            )
            for rival in rivals
        ]

    def to_results(self, setting: str, run: Mapping[str, Any]) -> Results:
        """Every number, for the file.

        Args:
            setting: how it was measured, in a line.
            run: by which command, code and settings; JSON values.
        """
        return Results(
            dataset="embedded reasoner, test problems",
            setting=setting,
            results=self.results,
            limits=self.limits,
            chosen=self.results.index(self.chosen),
            differences=self.differences,
            about={
                "run": run,
                **({} if self.promised is None else {"promise": self.promised.told}),
                "claims": [
                    {"claim": claim, "holds": held, "numbers": numbers}
                    for claim, held, numbers in self.claims()
                ],
            },
        )


def compare_methods(
    validation: TraceTable,
    test: TraceTable,
    predictions: list[Predictions],
    compute: Compute | None = None,
) -> Comparison:
    """Choose price, thresholds and budget on validation; measure on test.

    OS-Pruner is replayed in mode "sample" (the exact expectation), baselines with thresholds. The
    price, the best of the paper's thresholds and the fixed budget are chosen by the highest AES;
    a baseline's own thresholds by that, and by the fewest tokens within 1 point of the full trace.

    Args:
        validation: Labelled traces to choose on.
        test: Labelled traces of other problems, looked at here and nowhere else.
        predictions: Every policy's stop probabilities on both.
        compute: What the test traces cost; None counts no operations.
    """
    if compute is not None:
        test = compute.charge(test)
    ours = [p for p in predictions if p.method == "os-pruner"]
    others = [p for p in predictions if p.method != "os-pruner"]
    frontier = [_rule(p, validation, test, compute) for p in ours]
    taken = choice_of(frontier, validation).taken()
    frontier = [taken if same_setting(rule, taken) else rule for rule in frontier]
    baselines, rivals = [], []
    for p in others:
        paper = [_rule(p, validation, test, compute, t) for t in PAPER_THRESHOLDS]
        baselines += paper
        grid = policy_thresholds(validation, np.stack(p.validation))
        tuned = [_rule(p, validation, test, compute, t) for t in reversed(grid)]
        for name, of, pick in (
            ("paper", paper, None),
            ("1 point", tuned, _accurate_else_careful),
            ("AES", tuned, None),
        ):
            rule = choice_of(of, validation, pick=pick).taken()
            rivals.append(replace(rule, method=f"{rule.method} ({name})"))
    rivals.append(best_fixed("tokens", validation, test))
    rules = [Rule(FULL, replay_full(test)), *frontier, *baselines, *rivals]
    limits = [
        Rule(ORACLE, hindsight_oracle(test)),
        Rule(f"{ORACLE}, no loss", hindsight_oracle_no_loss(test)),
    ]
    resampled = Resampled([*rules, *limits], rules[0].outcome, test.problem_index)
    summaries = resampled.results()
    number = rules.index(taken)
    against = [0, *range(len(rules) - len(rivals), len(rules))]
    return Comparison(
        results=summaries[: len(rules)],
        limits=summaries[len(rules) :],
        chosen=summaries[number],
        rivals=summaries[len(rules) - len(rivals) : len(rules)],
        differences=[resampled.difference(number, k) for k in against],
    )


def promised_result(
    test: TraceTable, probabilities: npt.NDArray[np.float32], threshold: float, price: float
) -> Result:
    """What a policy of every price does on the test traces as a calibration promised.

    Args:
        test: N labelled traces.
        probabilities: (N, T) of a stop, at the price.
        threshold: from which on it stops.
        price: of a token.
    """
    outcome, full = replay(test, probabilities, "threshold", threshold), replay_full(test)
    rule = Rule(f"{EVERY_PRICE} (promise)", outcome, price, "λ")
    return summarise([Rule(FULL, full), rule], full, test.problem_index)[1]


def _rule(
    predictions: Predictions,
    validation: TraceTable,
    test: TraceTable,
    compute: Compute | None,
    threshold: float | None = None,
) -> Rule:
    """Replay a policy's seeds on both splits."""
    mode: Literal["sample", "threshold"] = "sample" if threshold is None else "threshold"
    paid = test if compute is None else compute.charge_tail(test, predictions.layers, queries=True)
    on_validation, on_test = (
        tuple(replay(table, pi, mode, threshold) for pi in probabilities)
        for table, probabilities in (
            (validation, predictions.validation),
            (paid, predictions.test),
        )
    )
    ours = threshold is None
    return Rule(
        EVERY_PRICE if ours else METHOD_NAMES[predictions.method],
        pool(on_test),
        predictions.price if ours else threshold,
        "λ" if ours else "threshold",
        on_test if len(on_test) > 1 else (),
        on_validation,
    )


def _accurate_else_careful(
    accuracy: FloatArray, tokens: FloatArray, base_accuracy: float, base_tokens: float
) -> int:
    """The fewest tokens within 1 point of the full trace, else the last, most careful one."""
    number = largest_reduction(accuracy, tokens, base_accuracy, MAX_LOSS)
    return len(accuracy) - 1 if number is None else number
