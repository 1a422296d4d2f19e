"""One evaluation: rules on the traces of one model and benchmark, kept in a folder.

    evaluation.json    what was evaluated: settings, rules, problems
    outcomes.npz       each rule's outcome, trace by trace
    traces.json        some traces step by step, for the report's viewer (may be absent)

Results, tables and pictures are computed from these whenever they are asked for, so that AES
variant, lambdas and the choice of operating points can change without evaluating again.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ospruner.durable import replace_file

from .intervals import Resampled, Rule
from .methods import FRONTIER
from .metrics import AES_ABSOLUTE, AesVariant
from .replay import Outcome
from .results import best_rows, frame_of
from .table import FloatArray, IntArray, TraceTable

FILE, OUTCOMES, TRACES = "evaluation.json", "outcomes.npz", "traces.json"
_VERSION = 2
_NAMED = ("model", "benchmark", "answer", "mode")
_SETTING = ("method", "parameter", "parameter_name")


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Rules on N traces of one model and benchmark.

    Attributes:
        settings: "model", "benchmark", "answer" ("forced" or "free"), "mode" ("replay" or
            "online"), and whatever else has to agree before two runs may be mixed. JSON-ready.
        rules: the first is the full trace, to which reductions refer.
        limits: what no rule can reach, or none should need.
        problem_ids: the P problems.
        problem_index: (N,) the problem of each trace.
        families: (N,) family of each trace's problem.
        natural_correct: (N,) grade of the answer after the trace's own end; NaN where there is
            none. It is never mixed with forced answers.
        traces: some traces for the viewer; see `viewer.trace_views`.
    """

    settings: dict[str, Any]
    rules: list[Rule]
    limits: list[Rule]
    problem_ids: list[str]
    problem_index: IntArray
    families: list[str]
    natural_correct: FloatArray
    traces: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if missing := [name for name in _NAMED if not self.settings.get(name)]:
            raise ValueError(f"settings lacks {missing}; an evaluation is named by {list(_NAMED)}")
        if not self.rules:
            raise ValueError("rules is empty; the first must be the full trace")

    def __len__(self) -> int:
        return len(self.problem_index)

    @property
    def name(self) -> str:
        """Model, benchmark, answer and mode in one line."""
        return ", ".join(str(self.settings[name]) for name in _NAMED)

    @property
    def full(self) -> Outcome:
        """The full traces."""
        return self.rules[0].outcome

    @cached_property
    def resampled(self) -> Resampled:
        """Rules and limits on the same resamples of the problems: made once, however often read."""
        return Resampled(self.rules, self.full, self.problem_index, self.limits)

    def frame(
        self, variant: AesVariant = AES_ABSOLUTE, prices: Sequence[float] = ()
    ) -> pd.DataFrame:
        """Rules and limits with their numbers and intervals; see `Results`."""
        return self.resampled.frame(variant, prices)

    def differences(self, variant: AesVariant = AES_ABSOLUTE) -> pd.DataFrame:
        """Paired differences of one method's best rule to every other method's.

        The one is OS-Pruner where it is there, else the first after the full trace.
        """
        best = best_rows(self.frame(variant))
        places = dict(zip(best["method"], best.index.tolist(), strict=True))
        methods = [method for method in places if method != self.rules[0].method]
        if not methods:
            return frame_of([], "differences")
        ours = places.pop(FRONTIER if FRONTIER in places else methods[0])
        return self.resampled.differences(ours, list(places.values()), variant)

    def save(self, folder: str | Path) -> None:
        """Writes the evaluation into a folder; one of the same settings there is replaced.

        Raises:
            ValueError: the folder holds an evaluation of other settings, or other files.
        """
        folder = Path(folder)
        refuse_other_settings(folder, self.settings)
        folder.mkdir(parents=True, exist_ok=True)
        everything = [*self.rules, *self.limits]
        arrays = io.BytesIO()
        np.savez_compressed(
            arrays,
            outcomes=np.stack([rule.outcome.columns() for rule in everything]),  # (R, N, K)
            seeds=np.array([seed.columns() for rule in everything for seed in rule.seeds]),
            problem_index=self.problem_index,
            natural_correct=self.natural_correct,
        )
        replace_file(folder / OUTCOMES, arrays.getvalue())
        _write_json(folder / TRACES, self.traces)
        named = [
            {name: vars(rule)[name] for name in _SETTING} | {"seeds": len(rule.seeds)}
            for rule in everything
        ]
        about = {
            "format_version": _VERSION,
            "settings": self.settings,
            "rules": named[: len(self.rules)],
            "limits": named[len(self.rules) :],
            "problem_ids": self.problem_ids,
            "families": self.families,
        }
        _write_json(folder / FILE, about)  # last: its presence says that the others are whole

    @classmethod
    def load(cls, folder: str | Path) -> Evaluation:
        """Reads what `save` wrote.

        Raises:
            ValueError: the folder holds no evaluation, or one of another version.
        """
        folder = Path(folder)
        about = _read(folder)
        with np.load(folder / OUTCOMES, allow_pickle=False) as arrays:
            outcomes = [Outcome(*values.T) for values in arrays["outcomes"]]
            seeds = iter([Outcome(*values.T) for values in arrays["seeds"]])
            index, natural = arrays["problem_index"], arrays["natural_correct"]
        rules = []
        for one, outcome in zip([*about["rules"], *about["limits"]], outcomes, strict=True):
            count = one.pop("seeds")
            rules.append(Rule(**one, outcome=outcome, seeds=tuple(itertools.islice(seeds, count))))
        traces = folder / TRACES
        return cls(
            settings=about["settings"],
            rules=rules[: len(about["rules"])],
            limits=rules[len(about["rules"]) :],
            problem_ids=about["problem_ids"],
            problem_index=index,
            families=about["families"],
            natural_correct=natural,
            traces=json.loads(traces.read_text("utf-8")) if traces.is_file() else [],
        )


def refuse_other_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Raises ValueError where a folder holds another evaluation, or something else."""
    if not folder.exists():
        return
    if (folder / FILE).is_file():
        there = _read(folder)["settings"]
        if differences := differing(there, settings):
            raise ValueError(
                f"{folder} holds an evaluation of other settings ({differences}): choose another "
                "--out, or delete it"
            )
    elif strangers := sorted(
        path.name for path in folder.iterdir() if not path.name.startswith((".", "online"))
    ):
        raise ValueError(
            f"{folder} holds other files ({', '.join(strangers[:5])}) and no evaluation: "
            "choose an empty folder"
        )


def differing(there: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """The settings in which two runs differ, with both values; "" where in none."""
    return "; ".join(
        f"{name}: {there.get(name)!r} there, {wanted.get(name)!r} asked for"
        for name in sorted({*there, *wanted})
        if there.get(name) != wanted.get(name)
    )


def find_evaluations(folder: str | Path) -> list[Evaluation]:
    """The evaluations in a folder and below, in the order of their paths.

    Raises:
        ValueError: there is none, or two of the same model, benchmark, answer and mode.
    """
    found: dict[str, tuple[Path, Evaluation]] = {}
    for path in sorted(Path(folder).rglob(FILE)):
        evaluation = Evaluation.load(path.parent)
        if evaluation.name in found:
            raise ValueError(
                f"{path.parent} and {found[evaluation.name][0]} both hold {evaluation.name}: "
                "tables show each once; move one away, or name the benchmark apart (--name)"
            )
        found[evaluation.name] = path.parent, evaluation
    if not found:
        raise ValueError(f"{folder} holds no evaluation: make one with `ospruner compare`")
    return [evaluation for _, evaluation in found.values()]


def trace_hash(table: TraceTable) -> str:
    """A short hash of the labels: which traces, which steps, which grades."""
    digest = hashlib.blake2b(digest_size=8)
    digest.update("\x00".join(table.problem_ids).encode())
    for array in (table.problem_index, table.lengths, table.correct):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _read(folder: Path) -> dict[str, Any]:
    path = folder / FILE
    if not path.is_file():
        raise ValueError(f"{folder} holds no evaluation ({FILE} is missing)")
    about: dict[str, Any] = json.loads(path.read_text("utf-8"))
    if about.get("format_version") != _VERSION:
        raise ValueError(
            f"{path} has format_version {about.get('format_version')!r}; this version of ospruner "
            f"reads {_VERSION}: evaluate again"
        )
    return about


def _write_json(path: Path, content: Any) -> None:
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, indent=1)
    replace_file(path, (text + "\n").encode())
