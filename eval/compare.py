"""One comparison of policies and rules on labelled traces: nothing is generated.

Every method becomes `Rule`s, one for each of its settings, with their outcomes. Where there are
traces of other problems to choose on, a method whose name alone was given is tried at many settings
there, the one of the highest AES is chosen, and intervals choose again in each resample.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from datasets import Dataset

from ospruner.rules.families import Family, StopRule

from .evaluation import Evaluation, trace_hash
from .frontiers import frontiers, worth_asking
from .intervals import REPLICATES, Chosen, Rule, pool_seeds
from .learnstop import LEARN_STOP, learn_stop
from .limits import best_fixed, hindsight_oracle, hindsight_oracle_no_loss
from .measured import (
    COUNT,
    PolicyOutputs,
    Split,
    family_thresholds,
    measure,
    replay_rule,
    spread_values,
)
from .methods import FULL, ORACLE, PolicyUse
from .metrics import AES_ABSOLUTE, AesVariant
from .problems.problem import shared_problems
from .replay import Outcome, replay, replay_full
from .report.tables import MAIN, Table
from .results import RESULTS_FILE, Results, frame_of, main_rows, refuse_other_settings
from .table import TraceTable

Method = PolicyUse | StopRule | Family | str
"""A policy with its setting, a rule, a rule whose threshold is open, or "learnstop"."""


@dataclass(frozen=True, eq=False)
class Report:
    """What a comparison found.

    Attributes:
        evaluation: the outcomes, trace by trace.
        results: every number with its interval, as the file holds it.

    """

    evaluation: Evaluation
    results: Results

    @property
    def frame(self) -> pd.DataFrame:
        """A row for each rule and limit; see `Results`."""
        return self.results.frame

    @property
    def frontiers(self) -> pd.DataFrame:
        """A row for each method; empty without traces to choose on; see `Results`."""
        return self.results.frontiers

    def plot(self, path: str | Path) -> None:
        """Draws accuracy over thinking tokens; see `pictures.draw_pareto`.

        Args:
            path: the picture to write, PNG or what its suffix says.
        """
        from .report.pictures import draw_pareto  # matplotlib is slow to import

        title = f"{self.results.dataset}: {self.results.setting}"
        draw_pareto({"": self.frame}, title).savefig(path)

    def to_latex(self) -> str:
        """The main numbers as a LaTeX table, each with its interval; rows as `main_rows`."""
        return Table.of(main_rows(self.frame), MAIN, corner="method").latex()

    def save(self, folder: str | Path) -> None:
        """Writes numbers and picture into a folder; those of the same settings go.

        Raises:
            ValueError: the folder holds a comparison of other settings, or other files.
        """
        folder = Path(folder)
        refuse_other_settings(folder, self.evaluation.settings)
        folder.mkdir(parents=True, exist_ok=True)

        self.results.save(folder / RESULTS_FILE)
        self.plot(folder / "pareto.png")


def compare(
    test: Split,
    methods: Sequence[Method],
    *,
    choose_on: Split | None = None,
    train: Split | None = None,
    variant: AesVariant = AES_ABSOLUTE,
    prices: Sequence[float] | None = None,
    settings: dict[str, Any] | None = None,
    replicates: int = REPLICATES,
) -> Report:
    """Compares methods on labelled traces.

    Args:
        test: the traces to measure on.
        methods: training seeds of one method and parameter are pooled.
        choose_on: traces of other problems; see `ospruner.compare` for this and what follows.
        train: on which to fit LearnStop.
        variant: which AES chooses and is shown.
        prices: of a token, for rewards and gaps.
        settings: of the evaluation; see `Evaluation`.
        replicates: resamples of the frontiers' intervals.

    Raises:
        ValueError: problems that are in both splits, a family without traces to
            choose on, or labels that lack what a rule reads.
    """
    table = test.table
    if choose_on is not None:
        refuse_shared(test.dataset, choose_on.dataset)
    prices = worth_asking(table) if prices is None else tuple(prices)
    rules, left_out = _rules_of(methods, test, choose_on, train)
    if methods and not rules:
        raise ValueError(f"no method could be replayed: {left_out}")
    rules = pool_seeds(rules)
    of_method: dict[str, list[Rule]] = {}
    for rule in rules:
        of_method.setdefault(rule.method, []).append(rule)
    limits = [
        Rule(ORACLE, hindsight_oracle(table)),
        Rule(f"{ORACLE}, no loss", hindsight_oracle_no_loss(table)),
    ]
    areas, on_frontier = frame_of([], "frontiers"), set()
    if choose_on is not None:
        there = choose_on.table
        limits = [best_fixed(unit, there, table) for unit in ("tokens", "step")] + limits
        full = replay_full(there)
        for of in of_method.values():
            if len(of) > 1:
                taken = Chosen(of, full, there.problem_index, variant).taken()
                same = (taken.method, taken.parameter)
                rules = [taken if (one.method, one.parameter) == same else one for one in rules]
        areas, places = frontiers(of_method, there, table, prices, replicates)
        on_frontier = {(m, of_method[m][k].parameter) for m, ks in places.items() for k in ks}
    named = {"model": "base", "benchmark": "labels", "answer": "forced", "mode": "replay"}
    evaluation = Evaluation(
        settings={**named, "labels": trace_hash(table), **(settings or {})},
        rules=[Rule(FULL, replay_full(table)), *rules],
        limits=limits,
        problem_index=table.problem_index,
        natural_correct=table.natural_correct,
    )
    found = evaluation.results(variant, prices)
    about = {**found.about, "left_out": left_out}
    marked = found.frame.assign(
        frontier=[
            (one.method, one.parameter) in on_frontier
            for one in (*evaluation.rules, *evaluation.limits)
        ]
    )
    return Report(
        evaluation, dataclasses.replace(found, frame=marked, frontiers=areas, about=about)
    )


def refuse_shared(test: Dataset, choose_on: Dataset) -> None:
    """Raises ValueError where a problem's text is in both."""
    if shared := shared_problems(test["problem"], choose_on["problem"]):
        raise ValueError(
            f"{len(shared)} problems, such as {shared[0]!r:.60}, are in the labels and in those to "
            "choose on: what is chosen on a problem must not be measured on it"
        )


def _rules_of(
    methods: Sequence[Method],
    test: Split,
    choose_on: Split | None,
    train: Split | None,
) -> tuple[list[Rule], dict[str, str]]:
    """Every setting as a rule, policies first, and why a method is left out."""
    splits = [test] if choose_on is None else [test, choose_on]
    left_out: dict[str, str] = {}
    uses = [method for method in methods if isinstance(method, PolicyUse)]
    said = {use.path: [split.said(use) for split in splits] for use in uses}
    rules = []
    for use in uses if choose_on is None else _with_thresholds(uses, said, choose_on.table):
        found = [replay_use(use, *both) for both in zip(splits, said[use.path], strict=True)]
        rules.append(_rule(use.method, use.parameter, use.parameter_name, found))
    for method in methods:
        if isinstance(method, PolicyUse):
            continue
        if isinstance(method, StopRule):
            found = [replay_rule(split, method) for split in splits]
            name = method.family.parameter_name
            rules.append(_rule(method.method, method.threshold, name, found))
            continue
        name = method.name if isinstance(method, Family) else method
        if choose_on is None:
            raise ValueError(
                f"{name!r} has no threshold, and there are no traces to choose one on: give one, "
                f"such as {name}:0.5, or traces to choose on (choose_on)"
            )
        if isinstance(method, str):
            rules += _learn_stop_rules(test, choose_on, train)
            continue
        try:
            rules += _family_rules(method, test, choose_on)
        except ValueError as error:
            if len(methods) == 1:
                raise
            left_out[method.method or method.name] = str(error)
    trained = {use.method for use in uses}  # whose rules of one name are training seeds
    named: set[tuple[str, float | None]] = set()
    for rule in rules:
        if (one := (rule.method, rule.parameter)) in named and rule.method not in trained:
            raise ValueError(
                f"two rules are called {rule.name!r}: give each once, and a name of its own "
                "(rules.Family(name, function), or dataclasses.replace(rules.Deer, method=name))"
            )
        named.add(one)
    return rules, left_out


def _rule(method: str, parameter: float | None, name: str, found: Sequence[Outcome]) -> Rule:
    """A rule from its outcomes on the test traces and, where there are, on those to choose on."""
    return Rule(method, found[0], parameter, name, validation=tuple(found[1:]))


def _with_thresholds(
    uses: Sequence[PolicyUse], said: dict[str, list[PolicyOutputs]], choose_on: TraceTable
) -> list[PolicyUse]:
    """Baselines whose name alone was given at thresholds of their own signal, all seeds' together.

    Each is named once for every threshold of the paper: the first stands for all.
    """
    found: dict[tuple[str, float | None, float | None], PolicyUse] = {}
    grids: dict[str, tuple[float, ...]] = {}
    for use in uses:
        thresholds: Sequence[float | None] = [use.threshold]
        if use.by_name and not use.is_ours:
            if use.method not in grids:
                seeds = {one.path for one in uses if one.by_name and one.method == use.method}
                signals = np.stack([said[path][1].at(None) for path in sorted(seeds)])
                grids[use.method] = policy_thresholds(choose_on, signals)
            thresholds = grids[use.method]
        for value in thresholds:
            key = use.path, use.asked_price, value
            found.setdefault(key, dataclasses.replace(use, threshold=value))
    return list(found.values())


def policy_thresholds(
    table: TraceTable, probabilities: npt.ArrayLike, count: int = COUNT
) -> tuple[float, ...]:
    """Thresholds for a policy that stops from a stop probability: from 1 (never) down to 0.

    Args:
        table: the traces to choose on.
        probabilities: (N, T) on these, or (S, N, T) of several training seeds.
        count: thresholds, the two ends included.
    """
    free = np.arange(table.mask.shape[1]) < table.last[:, None]
    values = spread_values(np.where(free, np.asarray(probabilities), np.nan), count - 2)
    return tuple(sorted({0.0, 1.0, *values}, reverse=True))


def replay_use(use: PolicyUse, split: Split, said: PolicyOutputs) -> Outcome:
    """What a policy does on labelled traces, charged for what it computes to decide."""
    table, config = split.table, use.config
    if table.flops is not None and said.read_flops is not None:
        table = dataclasses.replace(table, flops=table.flops + said.read_flops)
    elif split.compute is not None:
        queries = config.tuning == "queries"
        table = split.compute.charge_tail(table, config.num_policy_layers, queries)
    pi = said.at(use.price if use.is_ours else None)
    return replay(table, pi, use.threshold, said.read_tokens)


def _family_rules(family: Family, test: Split, choose_on: Split) -> list[Rule]:
    """A rule without training at thresholds from "at once" to "never"."""
    there, here = (measure(split, family) for split in (choose_on, test))
    both = ((here, test.table), (there, choose_on.table))
    return [
        _rule(
            family.method or family.name,
            value,
            family.parameter_name,
            [measured.outcome(table, family, value) for measured, table in both],
        )
        for value in family_thresholds(family, there)
    ]


def _learn_stop_rules(test: Split, choose_on: Split, train: Split | None) -> list[Rule]:
    there, here = learn_stop(choose_on, test, train)
    both = ((test.table, here), (choose_on.table, there))
    return [
        _rule(
            LEARN_STOP,
            value,
            "threshold",
            [replay(table, scores, value) for table, scores in both],
        )
        for value in policy_thresholds(choose_on.table, there)
    ]
