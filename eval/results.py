"""Numbers with intervals: one frame from the resamples to every table, its file, numbers as text.

A number x stands in three columns: x, x_low and x_high, the ends of its 95 % interval by problem;
NaN where it was not measured. Nothing here is formatted text: every table is a view of a frame.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ospruner.durable import differences, refuse_strangers, replace_file
from ospruner.provenance import read_object

RESULTS_FILE = "results.json"
FORMAT, VERSION = "ospruner-results", 2
ENDS = ("", "_low", "_high")
NAMED = ("model", "benchmark", "answer", "mode")
"""The settings by which a comparison is named."""

FIRST = {
    "frame": ("kind", "method", "parameter", "parameter_name", "setting", "chosen"),
    "differences": ("rule", "other"),
    "frontiers": ("method",),
}
_NO_NUMBERS = {
    *("kind", "method", "parameter_name", "setting", "chosen", "frontier", "aes_label"),
    *("rule", "other", "traces", "problems"),
}


def number_text(value: float, digits: int, *, signed: bool = False) -> str:
    """A number of so many decimals, without minus zero, thousands apart; – for NaN."""
    sign = "+" if signed else ""
    return "–" if math.isnan(value) else f"{round(value, digits) + 0.0:{sign},.{digits}f}"


class Estimate(NamedTuple):
    """A number with the ends of its 95 % interval by problem; NaN where not measured."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, row: Mapping[str, Any] | pd.Series, name: str) -> Estimate:
        """The number of a frame's row."""
        return cls(*(float(row[name + end]) for end in ENDS))

    def text(self, scale: float, digits: int, *, signed: bool = False, half: bool = False) -> str:
        """Such as "71.2 [70.1, 72.3]" or, with `half`, "71.2 ±1.2"; – where there is none.

        ± is the wider half of the interval, so that it spans all of it. A scale of 100 gives
        percent.
        """
        value, low, high = (number_text(x * scale, digits, signed=signed) for x in self)
        if math.isnan(self.low) and math.isnan(self.high):
            return value
        wider = float(np.max([self.value - self.low, self.high - self.value]))
        if half:
            return f"{value} ±{number_text(scale * wider, digits)}"
        return f"{value} [{low}, {high}]"


def price_name(price: float) -> str:
    """A lambda as it stands in names and tables: 1e-4, 2.5e-5, 0."""
    if price == 0:
        return "0"
    return np.format_float_scientific(price, 6, trim="-", exp_digits=1).replace("e+", "e")


def parameter_text(parameter: float | None, name: str) -> str:
    """A rule's parameter as tables and pictures write it: price=5e-4, ≥.70, 110 tokens, or ""."""
    if parameter is None:
        return ""
    if name == "threshold":
        if abs(parameter) >= 2**31 - 1:  # as far as a rule's range goes
            return f"≥{'-' * (parameter < 0)}∞"
        # Of quantiles as many digits as tell them apart.
        digits = f"{parameter:.2f}" if round(parameter, 2) == parameter else f"{parameter:g}"
        return f"≥{digits}".replace("0.", ".", 1)
    written = {"step": f"step {parameter:g}", "nats": f"≤{parameter:.3g} nats"}
    written["price"] = f"price={price_name(parameter)}"
    return written.get(name, f"{parameter:g} {name}".rstrip())


# Our own: pandas' to_markdown needs one more package, tabulate.
def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in GitHub's markdown, all columns but the first aligned to the right."""
    rule = [":--", *["--:"] * (len(columns) - 1)]
    lines = (" | ".join(one.replace("|", "\\|") for one in row) for row in (columns, rule, *rows))
    return "\n".join(f"| {line} |".replace("\n", " ") for line in lines)


def frame_of(rows: Any, kind: str = "frame") -> pd.DataFrame:
    """A frame of rows of a kind in `FIRST`, its first columns in their order, numbers as floats.

    Raises:
        ValueError: a first column is missing.
    """
    frame, first = pd.DataFrame(rows), FIRST[kind]
    if missing := [name for name in first if name not in frame and len(frame)]:
        raise ValueError(f"{kind} has no {missing}")
    frame = frame.reindex(columns=[*first, *(name for name in frame if name not in first)])
    return frame.astype({name: float for name in frame if name not in _NO_NUMBERS})


def best_rows(frame: pd.DataFrame, by: Sequence[str] = ("method",)) -> pd.DataFrame:
    """Of each method the rule that validation chose, else the first of the highest AES."""
    rules = frame[frame["kind"] == "rule"]
    scores = rules["aes"].fillna(-math.inf).mask(rules["chosen"].astype(bool), math.inf)
    return rules.loc[scores.groupby([rules[name] for name in by], sort=False).idxmax()]


def main_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """Of each method the setting that validation chose, where it chose one, else all of them."""
    chosen = frame["chosen"].astype(bool)
    return frame[chosen | ~chosen.groupby(frame["method"]).transform("any")]


def prices_of(frame: pd.DataFrame, kind: str) -> dict[float, str]:
    """The columns of numbers at prices of a token, by price: of kind "reward" or "gap"."""
    names = [name for name in frame if name.startswith(f"{kind}@") and not name.endswith(ENDS[1:])]
    return {float(name.partition("@")[2]): name for name in names}


@dataclass(frozen=True, kw_only=True, eq=False)
class Results:
    """What was measured on one set of traces: what a file of results holds.

    `frame` has a row for each rule, the first of which is the full trace, and then for each limit:

        kind            "rule", or "limit": what no rule can reach, or none should need
        method          name of the method, the same for all its settings
        parameter       price, threshold, budget ...; NaN where there is none
        parameter_name  what that is: "price", "threshold", "tokens", "step", ...; "" where none
        setting         the parameter as text: "price=5e-4", "≥.70", "110 tokens", ""
        chosen          whether it was chosen on validation among its method's settings (its
                        intervals then contain the choice), or is what the file lies beside
        accuracy        share of right answers; and so for each number that follows, with its ends
        tokens          mean thinking tokens
        reduction       share of the full trace's thinking tokens saved
        aes             accuracy-efficiency score, of the variant `aes_label`
        answer_tokens   mean tokens of the forced answer
        helped, harmed  share of traces right under the rule and wrong in full, and the other way
        truncated       share of traces cut at the token cap
        answer_after_stop, answer_after_end    of these, of the answers after a stop, and after the
                        trace's own end; NaN where there are none
        rethought       share of traces whose answer thinks on after a stop; NaN where not looked at
        probe_tokens    mean tokens read or generated to decide, charged in `flops`
        generated_tokens, total_reduction    of thinking and answer together
        time_ratio, tokens_per_second        wall-clock, the first over that of the full trace
        flops, flops_ratio  mean floating-point operations of all that is computed for a trace
                        (prompt, thinking, answer, tail, verifier, trial answers); over the full's
        reward@5e-4     accuracy - price * tokens at each price asked for
        frontier        (of `compare`) whether it is on its method's frontier, which validation
                        chose
        validation_aes  (of `compare`) the AES on the traces to choose on, without an interval
        aes_label, traces, problems
    """

    dataset: str  # what it was measured on, as people say it: "MATH-500"
    setting: str  # one line on how: model, mode, kind of answers, number of seeds
    frame: pd.DataFrame = field(default_factory=lambda: frame_of([], "frame"))  # see above
    # Columns rule, other, and the paired differences of accuracy, tokens, reduction, aes
    differences: pd.DataFrame = field(default_factory=lambda: frame_of([], "differences"))
    # What each method reaches over all lengths: method; area under accuracy against length, in
    # [0, 1]; lead, the first method's area less this one, paired (NaN for itself); fewer, by
    # what share of the full trace's tokens the first method's chosen setting thinks less than
    # this one does for the same accuracy; gap@5e-4, the share of the gap in reward from the
    # full trace to the oracle; validation_area, by which a best one is named
    frontiers: pd.DataFrame = field(default_factory=lambda: frame_of([], "frontiers"))
    # Of the model's own answers, never mixed with forced ones; None where there are none
    natural_accuracy: Estimate | None = None
    # What else belongs to the numbers (settings, environment), JSON values
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rules(self) -> pd.DataFrame:
        """The frame's rules; the first is the full trace, to which reductions refer."""
        return self.frame[self.frame["kind"] == "rule"]

    @property
    def limits(self) -> pd.DataFrame:
        """The frame's limits."""
        return self.frame[self.frame["kind"] == "limit"]

    @property
    def chosen(self) -> int | None:
        """Place of the first rule that was chosen; None where none was."""
        places = self.rules.index[self.rules["chosen"].astype(bool)]
        return int(places[0]) if len(places) else None

    @property
    def settings(self) -> Mapping[str, Any]:
        """Of the comparison that made them; nothing where none did."""
        found: Mapping[str, Any] = self.about.get("settings", {})
        return found

    @property
    def name(self) -> str:
        """Model, benchmark, answer and mode of the comparison in one line."""
        return ", ".join(str(self.settings[name]) for name in NAMED)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values, if those of `about` are; NaN, which JSON lacks, is None."""
        values = {"format": FORMAT, "version": VERSION, **vars(self)}
        values |= {name: vars(self)[name].to_dict("records") for name in FIRST}
        natural = self.natural_accuracy
        values["natural_accuracy"] = natural and natural._asdict()
        ready: dict[str, Any] = json.loads(
            json.dumps(values), parse_constant=lambda name: None if name == "NaN" else float(name)
        )
        return ready

    @classmethod
    def from_dict(cls, content: Any, where: str = "this") -> Results:
        """What `to_dict` gave; errors call it `where`.

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
            for name in FIRST:
                given[name] = frame_of(given[name], name)
            if natural := given["natural_accuracy"]:
                ends = (math.nan if x is None else x for x in natural.values())
                given["natural_accuracy"] = Estimate(*ends)
            return cls(**given)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            told = f"{where} holds no whole results ({error}): make them again"
            raise ValueError(told) from error

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
        return cls.from_dict(read_object(Path(path)), str(path))


def find_results(folder: str | Path) -> dict[Path, Results]:
    """The comparisons in a folder and below, each by its own folder.

    Raises:
        ValueError: there is none, or two of the same model, benchmark, answer and mode.
    """
    found: dict[str, tuple[Path, Results]] = {}
    for path in sorted(Path(folder).rglob(RESULTS_FILE)):
        results = Results.read(path)
        if not results.settings or (path.parent / "config.json").is_file():
            continue  # a policy's own: its card's
        if results.name in found:
            raise ValueError(
                f"{path.parent} and {found[results.name][0]} both hold {results.name}: tables show "
                "each once; move one away, or name the benchmark apart (--set benchmark=...)"
            )
        found[results.name] = path.parent, results
    if not found:
        raise ValueError(f"{folder} holds no comparison: make one with `ospruner compare`")
    return dict(found.values())


def refuse_other_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Raises ValueError where a folder holds another comparison, or something else."""
    if (folder / RESULTS_FILE).is_file():
        if differ := differences(settings, Results.read(folder / RESULTS_FILE).settings):
            raise ValueError(
                f"{folder} holds a comparison of other settings ({'; '.join(differ)}): choose "
                "another --out, or delete it"
            )
    else:
        refuse_strangers(folder, (".", "online"))
