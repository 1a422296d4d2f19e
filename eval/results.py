"""The one file of results: whatever measures writes it, whatever shows numbers reads it.

It holds numbers, never formatted text. `Results.frame` gives them as a pandas frame, one row a rule
and three columns a number; every table is a view of it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ospruner.durable import replace_file

from .text import number_text, parameter_text, penalty_name

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "RESULTS_FILE",
    "Difference",
    "Estimate",
    "Frontier",
    "Named",
    "Result",
    "Results",
    "best_rows",
]

RESULTS_FILE = "results.json"
FORMAT, VERSION = "ospruner-results", 1


@dataclass(frozen=True)
class Estimate:
    """A number with the ends of its 95 % interval by problem; NaN where not measured."""

    value: float
    low: float
    high: float

    def texts(self, scale: float, digits: int, *, signed: bool = False) -> tuple[str, str, str]:
        """The number and the ends of its interval as text; – where there is none.

        Args:
            scale: what to multiply by, such as 100 for percent.
            digits: decimals.
            signed: with a + where positive.
        """
        value, low, high = (
            number_text(x * scale, digits, signed=signed) for x in (self.value, self.low, self.high)
        )
        return value, low, high

    def text(self, scale: float, digits: int, *, signed: bool = False) -> str:
        """Such as "71.2 [70.1, 72.3]"."""
        return "{} [{}, {}]".format(*self.texts(scale, digits, signed=signed))

    def short_text(self, scale: float, digits: int, *, signed: bool = False) -> str:
        """Such as "71.2 ±1.1": the wider half of the interval, so that ± spans all of it."""
        sides = self.value - self.low, self.high - self.value
        half = scale * (math.nan if any(map(math.isnan, sides)) else max(sides))
        value = number_text(self.value * scale, digits, signed=signed)
        return f"{value} ±{number_text(half, digits)}"


NOT_MEASURED = Estimate(math.nan, math.nan, math.nan)


class Named:
    """What is told apart by a method and its parameter."""

    method: str
    parameter: float | None
    parameter_name: str

    @property
    def parameter_text(self) -> str:
        """Such as "λ=5e-4", "≥.70", "110 tokens", or ""."""
        return parameter_text(self.parameter, self.parameter_name)

    @property
    def name(self) -> str:
        """Method and parameter: "OS-Pruner λ=5e-4"."""
        return f"{self.method} {self.parameter_text}".strip()


@dataclass(frozen=True)
class Result(Named):
    """A rule's numbers, each with its 95 % interval by problem.

    Attributes:
        method: name of the method.
        parameter: length penalty, threshold, budget...; None where there is none.
        parameter_name: "λ", "threshold", "tokens", "step"; "" where there is none.
        accuracy: share of right answers.
        tokens: mean thinking tokens.
        reduction: share of the full trace's thinking tokens saved.
        aes: accuracy-efficiency score, of the variant `aes_label`.
        answer_tokens: mean tokens of the forced answer.
        helped: share of traces right under the rule and wrong in full.
        harmed: share of traces wrong under the rule and right in full.
        truncated: share of traces cut at the token cap.
        probe_tokens: mean tokens that the rule read or generated to decide, charged in `flops`.
        generated_tokens: mean tokens of thinking and answer together.
        total_reduction: share of all generated tokens (thinking, answer) of the full trace saved.
        time_ratio: wall-clock time over that of the full trace; NaN where not measured.
        tokens_per_second: generated tokens (thinking, answer) a second; NaN where not measured.
        rewards: (lambda, accuracy - lambda * tokens) for some lambdas, charged as `aes_label` says.
        aes_label: which AES, and what its length counts.
        traces: how many traces.
        problems: how many problems.
        flops: compute: mean floating-point operations of all that is computed for a trace (prompt,
            thinking, answer, tail, verifier, trial answers); NaN where not counted.
        flops_ratio: the same over that of the full trace.
        chosen: whether it was chosen on validation among its method's settings; its intervals then
            contain the choice.
    """

    method: str
    parameter: float | None
    parameter_name: str
    accuracy: Estimate
    tokens: Estimate
    reduction: Estimate
    aes: Estimate
    answer_tokens: Estimate
    helped: Estimate
    harmed: Estimate
    truncated: Estimate
    probe_tokens: Estimate
    generated_tokens: Estimate
    total_reduction: Estimate
    time_ratio: Estimate
    tokens_per_second: Estimate
    rewards: tuple[tuple[float, Estimate], ...]
    aes_label: str
    traces: int
    problems: int
    flops: Estimate = NOT_MEASURED
    flops_ratio: Estimate = NOT_MEASURED
    chosen: bool = False


@dataclass(frozen=True)
class Difference:
    """One rule less another on the same traces, resampled together.

    Attributes:
        rule: name and parameter of the one.
        other: name and parameter of the other.
        accuracy: difference of the shares of right answers.
        tokens: of mean thinking tokens.
        reduction: of the shares of thinking tokens saved.
        aes: of the accuracy-efficiency scores.
    """

    rule: str
    other: str
    accuracy: Estimate
    tokens: Estimate
    reduction: Estimate
    aes: Estimate


@dataclass(frozen=True)
class Frontier:
    """What a method reaches over all lengths; its rules are chosen on validation.

    Attributes:
        method: name of the method.
        area: under accuracy against length, between stopping at once and never, in [0, 1].
        lead: OS-Pruner's area less this one, paired; None for OS-Pruner itself, and for an estimate
            of what rules without hindsight can reach.
        gap_closed: (lambda, share of the gap in reward from the full trace to the oracle). A
            method's choice includes never stopping and stopping at once.
    """

    method: str
    area: Estimate
    lead: Estimate | None
    gap_closed: tuple[tuple[float, Estimate], ...]


@dataclass(frozen=True, kw_only=True)
class Results:
    """What was measured on one set of traces.

    Attributes:
        dataset: what it was measured on, as people say it: "MATH-500".
        setting: one line on how: model, mode, kind of answers, number of seeds.
        results: the rules; the first is the full trace, to which reductions refer.
        limits: what no rule can reach, or none should need.
        chosen: place in `results` of the policy that the file lies beside, or that was chosen on
            validation; None where there is none.
        differences: paired.
        frontiers: of whole methods.
        natural_accuracy: of the model's own answers, never mixed with forced ones; None where
            there are none.
        about: what else belongs to the numbers (settings, environment), JSON values.

    Raises:
        ValueError: `dataset` or `setting` is empty, or `chosen` names no row.
    """

    dataset: str
    setting: str
    results: list[Result] = field(default_factory=list)
    limits: list[Result] = field(default_factory=list)
    chosen: int | None = None
    differences: list[Difference] = field(default_factory=list)
    frontiers: list[Frontier] = field(default_factory=list)
    natural_accuracy: Estimate | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("dataset", "setting"):
            if not getattr(self, name).strip():
                raise ValueError(f"{name} is empty: say what was measured, and how")
        if self.chosen is not None and not 0 <= self.chosen < len(self.results):
            raise ValueError(
                f"chosen is {self.chosen}; it must be a place in results, 0 to "
                f"{len(self.results) - 1}, or None"
            )

    @property
    def frame(self) -> pd.DataFrame:
        """A row for each rule, then one for each limit; see `_row` for how numbers are spread.

        kind            "rule" or "limit"
        method          name of the method, the same for all its settings
        parameter       price, threshold, budget ...; NaN where there is none
        parameter_name  what that is: "λ", "threshold", "tokens", "step", ...
        setting         the parameter as text: "λ=5e-4", "≥.70", "110 tokens", ""
        chosen          whether it was chosen on validation among its method's settings, or is what
                        the file stands beside (`Results.chosen`)
        accuracy, accuracy_low, accuracy_high    and so for every number of `Result`: shares in
                        [0, 1], tokens, operations; NaN where not measured
        reward@5e-4, reward@5e-4_low, ...        for each price at which rewards were asked for
        aes_label, traces, problems
        """
        rows = []
        for kind, of_kind in (("rule", self.results), ("limit", self.limits)):
            for number, one in enumerate(of_kind):
                own = kind == "rule" and number == self.chosen
                row = {**_row(one), "kind": kind, "setting": one.parameter_text}
                rows.append({**row, "chosen": one.chosen or own})
        first = ["kind", "method", "parameter", "parameter_name", "setting", "chosen"]
        return _frame(rows, first)

    @property
    def difference_frame(self) -> pd.DataFrame:
        """A row for each paired difference: rule, other, accuracy, accuracy_low, ..."""
        return _frame([_row(one) for one in self.differences], ["rule", "other"])

    @property
    def frontier_frame(self) -> pd.DataFrame:
        """A row for each method: method, area, area_low, ..., lead, ..., gap@5e-4, ...

        `lead` is the first method's area less this one's, paired; NaN for itself.
        """
        return _frame([_row(one) for one in self.frontiers], ["method"])

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values; NaN, which JSON lacks, is None.

        Raises:
            TypeError, ValueError: `about` holds something JSON cannot.
        """
        content = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        ready: dict[str, Any] = _without_nan(content)
        json.dumps(ready, allow_nan=False)
        return ready

    @classmethod
    def from_dict(cls, content: Any, where: str = "this") -> Results:
        """What `to_dict` gave.

        Args:
            content: the values.
            where: what errors call them: the file.

        Raises:
            ValueError: they are no results, of another version, or lack something.
        """
        given = dict(content) if isinstance(content, Mapping) else {}
        found = given.pop("format", None), given.pop("version", None)
        if found != (FORMAT, VERSION):
            raise ValueError(
                f"{where} has format {found[0]!r} and version {found[1]!r}, this version of "
                f"ospruner reads {FORMAT!r} version {VERSION}: make the results again"
            )
        try:
            natural = given.pop("natural_accuracy")
            return cls(
                results=[_result(one) for one in given.pop("results")],
                limits=[_result(one) for one in given.pop("limits")],
                differences=[Difference(**_estimates(one)) for one in given.pop("differences")],
                frontiers=[_frontier(one) for one in given.pop("frontiers")],
                natural_accuracy=None if natural is None else _estimate(natural),
                **given,
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{where} holds no whole results ({error}): make them again"
            ) from error

    def save(self, path: str | Path) -> None:
        """Writes the file, whole or not at all; its folder must exist.

        Raises:
            TypeError, ValueError: `about` holds something JSON cannot.
        """
        text = json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False)
        replace_file(Path(path), (text + "\n").encode())

    @classmethod
    def read(cls, path: str | Path) -> Results:
        """Reads what `save` wrote.

        Raises:
            ValueError: it holds something else, or was written by another version.
        """
        try:
            content = json.loads(Path(path).read_text("utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is damaged: no JSON ({error}); make it again") from error
        return cls.from_dict(content, str(path))


def best_rows(results: Sequence[Result]) -> dict[str, int]:
    """For each method the number of its row of the highest AES; of equals the first."""
    best: dict[str, int] = {}
    for number, result in enumerate(results):
        there = best.get(result.method)
        if there is None or result.aes.value > results[there].aes.value:
            best[result.method] = number
    return best


_PAIRS = {"rewards": "reward", "gap_closed": "gap"}  # fields of (price, number) pairs


def _row(one: Result | Difference | Frontier) -> dict[str, Any]:
    """Values by column: a number x with its interval as x, x_low and x_high."""
    row: dict[str, Any] = {}
    for name, value in vars(one).items():
        if name in _PAIRS:
            for price, number in value:
                row |= _spread(f"{_PAIRS[name]}@{penalty_name(price)}", number)
        elif isinstance(value, Estimate) or name == "lead":
            row |= _spread(name, NOT_MEASURED if value is None else value)
        else:
            row[name] = value
    return row


def _spread(name: str, number: Estimate) -> dict[str, float]:
    return {name: number.value, f"{name}_low": number.low, f"{name}_high": number.high}


def _frame(rows: Iterable[Mapping[str, Any]], first: Sequence[str]) -> pd.DataFrame:
    import pandas as pd  # here: it takes half a second, and most readers of results need none

    found = pd.DataFrame(list(rows))
    columns = [*first, *(name for name in found.columns if name not in first)]
    return found.reindex(columns=columns)


def _without_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nan(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(entry) for entry in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _estimate(values: Mapping[str, float | None]) -> Estimate:
    return Estimate(**{name: math.nan if x is None else x for name, x in values.items()})


def _estimates(values: Mapping[str, Any]) -> dict[str, Any]:
    """A row's values with every number that has an interval as an `Estimate`."""
    return {
        name: _estimate(value) if isinstance(value, Mapping) else value
        for name, value in values.items()
    }


def _by_penalty(pairs: Sequence[Any]) -> tuple[tuple[float, Estimate], ...]:
    return tuple((penalty, _estimate(values)) for penalty, values in pairs)


def _result(values: Mapping[str, Any]) -> Result:
    return Result(**{**_estimates(values), "rewards": _by_penalty(values["rewards"])})


def _frontier(values: Mapping[str, Any]) -> Frontier:
    return Frontier(**{**_estimates(values), "gap_closed": _by_penalty(values["gap_closed"])})
