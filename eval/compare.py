"""One comparison of policies and rules on labelled traces: nothing is generated.

First each method is asked what it says at every step (`Recorded`, which is kept as a file), then
every number is computed from that alone. A method becomes `Rule`s, one for each of its settings.
Where there are traces of other problems to choose on, a method whose name alone was given is tried
at many settings there, the one of the highest AES is chosen, and intervals choose again in each
resample.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from ospruner.rules.families import Family, StopRule

from .evaluation import Report, Rule, choose
from .frontiers import frontiers
from .learnstop import LEARN_STOP, learn_stop
from .measured import COUNT, Split, family_thresholds, measure
from .methods import FULL, ORACLE, PolicyUse
from .problems.problem import shared_problems, text_key
from .recorded import Method, Recorded, key_of
from .replay import (
    Outcome,
    hindsight_oracle,
    hindsight_oracle_no_loss,
    pool,
    replay,
    replay_budget,
    replay_drop,
    replay_full,
    replay_step,
)
from .table import TraceTable, trace_hash


def compare(
    test: Split,
    methods: Sequence[Method],
    *,
    choose_on: Split | None = None,
    train: Split | None = None,
    beside: Mapping[str, Split] = MappingProxyType({}),
    settings: Mapping[str, Any] = MappingProxyType({}),
    **more: Any,
) -> Report:
    """Compares methods on labelled traces.

    Args:
        test: the traces to measure on.
        methods: training seeds of one method and parameter are pooled.
        choose_on: traces of other problems; see `ospruner.compare`.
        train: on which to fit LearnStop.
        beside: other labels of the test problems by the name of their row: their full traces.
        settings: of the comparison; see `Report`.
        more: of `Recorded`: variant, prices, about.

    Raises:
        ValueError: problems that are in both splits, others beside them, a family without traces to
            choose on, or labels that lack what a rule reads.
    """
    if choose_on is not None and (
        shared := shared_problems(test.dataset["problem"], choose_on.dataset["problem"])
    ):
        raise ValueError(
            f"{len(shared)} problems, such as {shared[0]!r:.60}, are in the labels and in those to "
            "choose on: what is chosen on a problem must not be measured on it"
        )
    full = {name: _in_full(name, one, test) for name, one in beside.items()}
    splits = [dataclasses.replace(test, policies={}, rules={}, beside=full)]
    if choose_on is not None:
        splits.append(dataclasses.replace(choose_on, policies={}, rules={}))
    kept: list[Method] = []
    left_out: dict[str, str] = {}
    for method in methods:
        try:
            _record(method, splits, train)
            kept.append(method)
        except ValueError as error:
            if not isinstance(method, Family) or choose_on is None or len(methods) == 1:
                raise
            left_out[method.method] = str(error)
    if methods and not kept:
        raise ValueError(f"no method could be replayed: {left_out}")
    named = {"model": "base", "benchmark": "labels", "answer": "forced", "mode": "replay"}
    said = {**named, "labels": trace_hash(test.table), **settings}
    more = {"prices": worth_asking(test.table), **more, "left_out": left_out, "settings": said}
    return report_of(Recorded(methods=kept, splits=splits, **more))


def worth_asking(table: TraceTable) -> tuple[float, ...]:
    """Prices of a token at which the mean full trace costs a tenth, .04 and .02 of an answer.

    With one digit: they suit the labels' lengths, whatever these are.
    """
    tokens = float(table.full_tokens.mean())
    return tuple(float(f"{share / tokens:.0e}") for share in (0.1, 0.04, 0.02))


def _in_full(name: str, other: Split, test: Split) -> Outcome:
    """The full traces of other labels of the same problems, in the order of the test's."""
    theirs, asked = (list(map(text_key, one.dataset["problem"])) for one in (other, test))
    if sorted(theirs) != sorted(asked):
        raise ValueError(
            f"{name}: these labels are not of as many traces of the same problems as those to "
            f"measure on ({len(theirs)} traces of {len(set(theirs))} problems, "
            f"{len(asked)} of {len(set(asked))}): label the same problems"
        )
    order = np.empty(len(asked), np.int64)  # a problem's first trace beside its first one
    order[np.argsort(asked, kind="stable")] = np.argsort(theirs, kind="stable")
    own = {name: column[order] for name, column in vars(replay_full(other.table)).items()}
    return Outcome.against(test.table.full_correct, **own)


def _record(method: Method, splits: Sequence[Split], train: Split | None) -> None:
    """Keeps what a method says on each split, once for all its settings."""
    if isinstance(method, PolicyUse):
        for split in (one for one in splits if method.path not in one.policies):
            said, config = split.said(method), method.config
            if said.flops is None and split.compute is not None:  # what its tail computes
                read = config.num_policy_layers, config.tuning == "queries"
                said = dataclasses.replace(said, flops=split.compute.tail(split.table, *read))
            split.policies[method.path] = said
        return
    rule, family = (method, method.family) if isinstance(method, StopRule) else (None, method)
    if len(splits) == 1 and (rule is None or family is LEARN_STOP):
        raise ValueError(
            f"{family.name!r} has no threshold, and there are no traces to choose one on: give "
            f"one, such as {family.name}:0.5, or traces to choose on (choose_on)"
        )
    if (key := key_of(method)) not in splits[0].rules:
        learnt = learn_stop(splits[0], splits[1], train) if family is LEARN_STOP else None
        for number, split in enumerate(splits):
            split.rules[key] = learnt[number] if learnt else measure(split, family, rule)


def report_of(recorded: Recorded) -> Report:
    """Every number of a comparison from what its methods say: no weights, no text."""
    (test, *others), variant = recorded.splits, recorded.variant
    table, rules = test.table, _compared(recorded)
    limits = [
        Rule(ORACLE, hindsight_oracle(table)),
        Rule(f"{ORACLE}, no loss", hindsight_oracle_no_loss(table)),
    ]
    on_frontier: set[tuple[str, float | None]] = set()
    scores: dict[tuple[str, float | None], float] = {}  # AES on validation
    more: dict[str, Any] = {}
    if others:
        there = others[0].table
        full, fixed = replay_full(there), table_rules(there, table)
        of_method: dict[str, list[Rule]] = {}
        for rule in rules:
            of_method.setdefault(rule.method, []).append(rule)
        for of in of_method.values():
            taken, found = choose(of, full, there.problem_index, variant)
            for one, score in zip(of, found.tolist(), strict=True):
                scores[one.method, one.parameter] = score
                if len(of) > 1 and one.parameter == taken.parameter:
                    rules[rules.index(one)] = taken
        for name in [one for one in fixed if one != ORACLE]:
            taken, _ = choose(fixed[name], full, there.problem_index, variant)
            limits.insert(-2, dataclasses.replace(taken, method=f"best {name}"))
        everything = {**of_method, **fixed, **of_method}  # the methods first, in their order
        more["frontiers"], places = frontiers(everything, there, table, recorded.prices, variant)
        on_frontier = {(m, everything[m][k].parameter) for m, ks in places.items() for k in ks}
    beside = [Rule(name, outcome) for name, outcome in test.beside.items()]
    rules = [Rule(FULL, replay_full(table)), *beside, *rules]
    keys = [(one.method, one.parameter) for one in (*rules, *limits)]
    marks: dict[str, list[Any]] = {"frontier": [key in on_frontier for key in keys]}
    if scores:
        marks["validation_aes"] = [scores.get(key, np.nan) for key in keys]
    return Report(
        rules,
        table.problem_index,
        limits,
        recorded.settings,
        table.natural_correct,
        variant,
        recorded.prices,
        marks=marks,
        about={"left_out": dict(recorded.left_out), **recorded.about},
        recorded=recorded,
        **more,
    )


def table_rules(validation: TraceTable, test: TraceTable) -> dict[str, list[Rule]]:
    """Methods that read a table alone, at their settings, with their outcomes on both tables.

    Those that anyone has read nothing but lengths; budgets are quantiles of those at step ends, the
    longest included. The hindsight oracle knows the grades, at prices from next to nothing to more
    than an answer is worth.
    """
    lengths = validation.lengths[validation.mask]
    budgets = np.unique(np.quantile(lengths, np.linspace(0, 1, COUNT), method="higher"))
    steps = range(1, int(validation.num_steps.max()) + 1)
    prices = np.append(0.0, np.geomspace(1e-3, 1e2, 31) / test.full_tokens.mean()).tolist()
    kinds: tuple[tuple[str, str, Any, Sequence[float]], ...] = (
        ("fixed budget", "tokens", replay_budget, budgets.tolist()),
        ("fixed step", "step", replay_step, steps),
        ("fixed drop", "at the end", replay_drop, steps),
        (ORACLE, "price", hindsight_oracle, prices),
    )
    return {
        name: [
            Rule(name, does(test, one), float(one), unit, validation=(does(validation, one),))
            for one in values
        ]
        for name, unit, does, values in kinds
    }


def _compared(recorded: Recorded) -> list[Rule]:
    """Every setting of every method as a rule, policies first.

    Policies of one method and parameter are its training seeds.
    """
    splits = recorded.splits
    uses = [method for method in recorded.methods if isinstance(method, PolicyUse)]
    settings: list[PolicyUse | StopRule] = (
        [*uses] if len(splits) == 1 else _with_thresholds(uses, splits[1])
    )
    for method in recorded.methods:
        if isinstance(method, StopRule):
            settings.append(method)
        elif isinstance(method, Family):
            signals = splits[-1].rules[key_of(method)].signals
            settings += [method(value) for value in family_thresholds(method, signals)]
    groups: dict[tuple[str, float | None], list[PolicyUse | StopRule]] = {}
    for one in settings:
        groups.setdefault((one.method, one.parameter), []).append(one)
    rules = []
    for (name, parameter), of in groups.items():
        test, *there = (tuple(outcome_of(one, split) for one in of) for split in splits)
        validation = there[0] if there else ()
        rule = Rule(name, pool(test), parameter, of[0].parameter_name, test, validation)
        if len(of) > 1 and not isinstance(of[0], PolicyUse):
            raise ValueError(
                f"two rules are called {rule.name!r}: give each once, and a name of its own "
                "(rules.Family(name, function), or dataclasses.replace(rules.Deer, method=name))"
            )
        rules.append(rule)
    return rules


def _with_thresholds(uses: Sequence[PolicyUse], choose_on: Split) -> list[PolicyUse | StopRule]:
    """Baselines whose name alone was given at thresholds of their own signal, all seeds' together.

    Each is named once for every threshold of the paper: the first stands for all. At the forced
    last step nothing is decided.
    """
    free = np.arange(choose_on.table.mask.shape[1]) < choose_on.table.last[:, None]
    found: dict[tuple[str, float | None, float | None], PolicyUse] = {}
    for use in uses:
        thresholds: Sequence[float | None] = [use.threshold]
        if use.by_name and not use.is_ours:
            seeds = {one.path for one in uses if one.by_name and one.method == use.method}
            said = [choose_on.policies[path].probabilities() for path in sorted(seeds)]
            signals = np.where(free, np.stack(said), np.nan)
            thresholds = family_thresholds(LEARN_STOP, signals)  # of probabilities, too
        for value in thresholds:
            one = dataclasses.replace(use, threshold=value)
            found.setdefault((use.path, use.asked_price, value), one)
    return list(found.values())


def outcome_of(one: PolicyUse | StopRule, split: Split) -> Outcome:
    """What a policy, charged for what it computes to decide, or a rule does on labelled traces."""
    if isinstance(one, StopRule):
        return split.rules[key_of(one)].outcome(split.table, one)
    said, table = split.policies[one.path], split.table
    if table.flops is not None and said.flops is not None:
        table = dataclasses.replace(table, flops=table.flops + said.flops)
    pi = said.probabilities(one.price if one.is_ours else None)
    return replay(table, pi, one.threshold, said.read_tokens)
