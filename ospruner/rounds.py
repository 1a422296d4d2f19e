"""`ospruner.make`: a policy for a base in one call, with as few labels as it takes.

Labels are made in rounds, each with twice as many problems as the one before, which it keeps. Half
of the problems are trained on, half are kept for the promise: what a policy learns saturates after
some hundred problems, a promise needs more of them. After each round a policy is trained and
calibrated, and another round is begun as long as it is worth its hours (`worth_a_round`).
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from ospruner.calibrating import calibrate, tried
from ospruner.comparing import Judged, compare
from ospruner.demo.jobs import Job, Workers
from ospruner.doctor.examination import examine
from ospruner.durable import write_checked
from ospruner.eval.calibration import exact_rejects, forecast, losses
from ospruner.eval.methods import parse_policies
from ospruner.eval.replay import replay_full
from ospruner.eval.report.pictures import draw_rounds
from ospruner.eval.report.summary import write_report
from ospruner.eval.table import FloatArray
from ospruner.formats import named
from ospruner.hub_cards.cards import CARD_FILE, PICTURE_FILE, policy_card
from ospruner.progress import Progress, silent
from ospruner.train.config import StopConfig
from ospruner.train.labels.folder import data_hash, read_labels, read_manifest
from ospruner.train.labels.label import LabelConfig, load_run_problems, run_label
from ospruner.train.labels.loading import Labels, load_labels, split_by_text
from ospruner.train.run_folder import RUN, claimed, record_of
from ospruner.train.trainer import StopTrainer

__all__ = ["Made", "Round", "make", "round_sizes", "worth_a_round"]

FIRST = 50
"""Problems of the first round."""
HOUR, LEAST = 0.01, 0.005
"""Shares of the thinking tokens: what an hour of labelling must save more, and any round at all."""
CONFIDENCE = 0.95
_SHARES = {"train": 0.5, "validation": 0.5}
_NOTED_EVERY = 20.0  # seconds


@dataclass(frozen=True)
class Round:
    """What a round came to.

    Attributes:
        problems: labelled so far.
        trained_on: traces that the policy was trained on.
        tested_on: problems that it was calibrated on.
        hours: spent so far.
        saved: share of the thinking tokens, at the promise; 0 where none is kept.
        frontier: share saved at the boldest setting whose measured loss is small enough, which is
            no promise.
        expected: what a round of twice as many problems is expected to save at the promise.
        cost: hours that such a round is expected to take.
        promise: what the calibration found, in words; "" where the round was too small for one.
    """

    problems: int
    trained_on: int
    tested_on: int
    hours: float
    saved: float
    frontier: float
    expected: float
    cost: float
    promise: str

    def told(self, max_loss: float) -> str:
        """The round in a line."""
        return (
            f"{self.problems:,} problems, {self.hours:.2f} h: saves {self.saved:.1%} of the "
            f"thinking tokens at the promise of {100 * max_loss:g} points ({self.frontier:.1%} "
            f"measured, without a promise); twice as many would save about {self.expected:.1%} and "
            f"take {self.cost:.2f} h more"
        )


@dataclass(frozen=True)
class Made:
    """What `make` made.

    Attributes:
        policy: its folder: the policy of the round whose promise saves most, or of the last.
        rounds: of labels.
        promise: what its calibration found, in words.
        promised: whether that is a promise.
        why: no further round was begun.
        report: the page.
    """

    policy: Path
    rounds: list[Round]
    promise: str
    promised: bool
    why: str
    report: Path


def worth_a_round(last: Round) -> bool:
    """Whether twice as many labels are worth their hours.

    As long as there is no promise they are. Then the saving that is expected of them beyond today's
    must be `LEAST`, and `HOUR` for each hour that they take: labelling stops as thinking does, when
    going on brings less than it costs.
    """
    gain = last.expected - last.saved
    return last.saved == 0 or gain >= max(LEAST, HOUR * last.cost)


def round_sizes(problems: int) -> list[int]:
    """How many problems each round may have: twice as many as the one before, up to all."""
    sizes = [min(FIRST, problems)]
    while sizes[-1] < problems:
        sizes.append(min(2 * sizes[-1], problems))
    return sizes


def looks_of(sizes: Sequence[int], max_loss: float) -> int:
    """In how many rounds a promise may be looked for.

    Each look spends an equal part of 1 - confidence, so that no promise taken at any of them breaks
    its word more often. Rounds too small for a promise, if nothing were lost, are not looked at.
    """
    for first, size in enumerate(sizes):
        looks = len(sizes) - first
        level = (1 - CONFIDENCE) / looks / 2  # half of it goes to the second sequence
        if exact_rejects(np.zeros((1, size // 2)), max_loss, level)[0]:
            return looks
    return 1


def make(
    base: str,
    dataset: str,
    *,
    out: str | Path,
    max_loss: float = 0.02,
    hours: float | None = None,
    problems: int | None = None,
    labels: str | Path | None = None,
    progress: Progress = silent,
    tell: Callable[[str], None] = lambda line: None,
    **settings: Any,
) -> Made:
    """Makes a policy for a base: examines it, labels in rounds, trains, promises, writes a report.

        made = ospruner.make("Qwen/Qwen3-8B", "deepscaler", out="made", hours=24)

    The same call goes on where a stopped one was. The promise is that of `calibrate`, looked for in
    each round that is large enough; all looks together break their word in one of twenty.

    Args:
        base: the reasoning model, a folder or a Hub id.
        dataset: the problems: a benchmark's name, a file, or a data set on the Hub; taken in an
            order drawn with `seed`.
        out: the folder of everything: `policy`, `report`, `curve.png`, `labels`, `rounds`.
        max_loss: the accuracy that may be lost, as a share; see `calibrate`.
        hours: no round is begun that would take longer in all, by what the last one took.
        problems: label so many at the most; None for all.
        labels: a folder of labels that you have, of the same base and settings: its problems come
            first, and what they took does not count. It stays as it is.
        progress: is told of phases.
        tell: is told a line after each round.
        settings: other fields of `LabelConfig`.

    Raises:
        ValueError: the base has something to mend, by `ospruner doctor`; `out` holds another run;
            or as `label`, `StopTrainer` and `calibrate` raise.
    """
    for name, number in (("hours", hours), ("problems", problems)):
        if number is not None and number <= 0:
            raise ValueError(f"{name} is {number}; it must be above 0")
    config = LabelConfig(base=base, dataset=dataset, **settings)
    known = frozenset(() if labels is None else read_labels(labels)["problem_id"])
    identity = {"base": base, "dataset": dataset, "max_loss": max_loss, "problems": problems}
    had = None if labels is None else data_hash(read_manifest(labels))
    identity |= {"labels": had, "settings": settings}
    folder = Path(out)
    with claimed(folder, identity):
        if labels is not None and not (folder / "labels").exists():
            shutil.copytree(labels, folder / ".labels", dirs_exist_ok=True)
            (folder / ".labels").rename(folder / "labels")
        run = _Run(folder, config, max_loss, problems, known, progress)
        for one in run.rounds:
            tell(one.told(max_loss))
        while (size := run.next_size(hours)) is not None:
            tell(run.round(size).told(max_loss))
        return run.finished()


class _Run:
    """A run of `make` in its folder, where `run.json` holds its rounds and its seconds."""

    def __init__(
        self,
        out: Path,
        config: LabelConfig,
        max_loss: float,
        limit: int | None,
        known: Collection[str],
        progress: Progress,
    ) -> None:
        record = record_of(out)
        self.rounds = [Round(**one) for one in record.get("rounds", [])]
        self._seconds = float(record.get("seconds", 0.0))
        self._since = self._noted = time.monotonic()
        self.out, self.max_loss, self._told = out, max_loss, progress
        self.known = len(known)
        self.config = replace(config, out=str(out / "labels"))
        if not self.rounds:
            fmt = None if config.format is None else named(config.format)
            wrong = examine(config.base, config.revision, fmt).wrong
            if wrong:
                found = "; ".join(f"{one.name}: {one.value} ({one.advice})" for one in wrong)
                raise ValueError(f"`ospruner doctor {config.base}` finds what is to mend: {found}")
        self.loaded = load_run_problems(self.config)
        Random(config.seed).shuffle(self.loaded.problems)
        self.loaded.problems.sort(key=lambda one: one.id not in known)
        self.sizes = round_sizes(min(len(self.loaded.problems), limit or len(self.loaded.problems)))
        self.looks = looks_of(self.sizes, max_loss)
        self.why = ""

    def next_size(self, hours: float | None) -> int | None:
        """How many problems the next round has; None for no further one, and `why`."""
        if not self.rounds:
            return self.sizes[0]
        last = self.rounds[-1]
        if len(self.rounds) == len(self.sizes):
            self.why = f"all {last.problems:,} problems are labelled"
        elif not worth_a_round(last):
            self.why = "twice as many labels are not worth their hours"
        elif hours is not None and last.hours + last.cost > hours:
            self.why = f"{hours:g} hours would be exceeded"
        else:
            return self.sizes[len(self.rounds)]
        return None

    def round(self, size: int) -> Round:
        """Labels up to so many problems, trains, calibrates, and looks ahead."""
        kept = max(size, self.known)  # a run of labels keeps all that it has
        chosen = replace(self.loaded, problems=self.loaded.problems[:kept])
        job: Job[Any] = partial(run_label, self.config, loaded=chosen)
        if self.config.engine_name() == "vllm":  # a GPU is free again when its process has ended
            with Workers(1) as workers:
                workers.run({"label": job}, self._progress)
        else:
            job(progress=self._progress)
        training, validation = self._sides(size)
        policy = self._policy(size)
        config = StopConfig(
            str(policy),
            states=self._more["states"],
            disable_tqdm=True,
            seed=self.config.seed,
            use_cpu=self.config.device == "cpu",
            bf16=self.config.dtype == "bfloat16" or None,
        )
        StopTrainer(config, training, validation, progress=self._progress).train()
        saved, promise = 0.0, ""
        if len(self.sizes) - len(self.rounds) <= self.looks:
            asked = (self.max_loss, CONFIDENCE)
            found = calibrate(policy, validation, *asked, looks=self.looks, **self._more)
            saved = 0.0 if found.value is None else found.tokens_saved
            promise = found.told(*asked)
        ours = Judged(validation, **self._more)
        lost, shares = _frontier(ours, policy)
        n, level = len(lost[0]), (1 - CONFIDENCE) / self.looks
        ahead = partial(forecast, max_loss=self.max_loss, level=level)
        expected, done, before = ahead(lost, shares, 2 * n), 0, 0.0
        if self.rounds:
            done, before = self.rounds[-1].problems, self.rounds[-1].hours
            gained = ahead(lost, shares, n) - ahead(*_frontier(ours, self._policy(done)), n)
            expected += max(0.0, gained) / 2
        fits = [
            saves for one, saves in zip(lost, shares, strict=True) if one.mean() <= self.max_loss
        ]
        hours = self._hours()
        self.rounds.append(
            Round(
                problems=size,
                trained_on=len(training.traces),
                tested_on=n,
                hours=hours,
                saved=saved,
                frontier=float(max(fits, default=0.0)),
                expected=float(expected),
                cost=(hours - before) * size / (size - done),
                promise=promise,
            )
        )
        self._note()
        for checkpoint in policy.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)
        return self.rounds[-1]

    def finished(self) -> Made:
        """The policy whose promise saves most, else the last one, with its card and a report."""
        best = max(self.rounds, key=lambda one: (one.saved, one.problems))
        policy, report = self.out / "policy", self.out / "report"
        ignored = shutil.ignore_patterns("checkpoint-*", ".*")
        shutil.rmtree(policy, ignore_errors=True)
        shutil.copytree(self._policy(best.problems), policy, ignore=ignored)
        _, validation = self._sides(best.problems)
        compared = compare(validation, [str(policy)], prices=(), **self._more)
        shutil.rmtree(report, ignore_errors=True)
        compared.save(report)
        compared.plot(policy / PICTURE_FILE)
        policy_card(policy, name=policy.name, license={}).save(policy / CARD_FILE)
        title = f"Labels for a promise of {100 * self.max_loss:g} points"
        draw_rounds([vars(one) for one in self.rounds], title).savefig(self.out / "curve.png")
        page = write_report(report)[0]
        promise = best.promise or "Too few problems for a promise."
        return Made(policy, self.rounds, promise, best.saved > 0, self.why, page)

    @property
    def _more(self) -> dict[str, Any]:
        """Where the base computes, and where its states are kept for the next round."""
        named_by = {"device": self.config.device, "states": str(self.out / "states")}
        return {**named_by, "progress": self._progress}

    def _policy(self, size: int) -> Path:
        return self.out / "rounds" / str(size)

    def _sides(self, size: int) -> tuple[Labels, Labels]:
        """The labels to train on, and those for the promise, of a round of so many problems."""
        labels, chosen = load_labels(self.config.out), self.loaded.problems[:size]
        ids, known = {one.id for one in chosen}, labels.traces["problem_id"]
        rows = [row for row, name in enumerate(known) if name in ids]
        if len(rows) < len(known):
            of_round = hashlib.sha256(f"{labels.data_hash}/{size}".encode()).hexdigest()
            labels = replace(labels, traces=labels.traces.select(rows), data_hash=of_round)
        sides = split_by_text(labels, _SHARES)
        return sides["train"], sides["validation"]

    def _hours(self) -> float:
        now = time.monotonic()
        self._seconds, self._since = self._seconds + now - self._since, now
        return self._seconds / 3600

    def _note(self) -> None:
        self._noted = time.monotonic()
        rounds = [vars(one) for one in self.rounds]
        record = {**record_of(self.out), "rounds": rounds, "seconds": self._seconds}
        write_checked(self.out / RUN, record)

    def _progress(self, phase: str, done: int, total: int, note: str = "") -> None:
        """Tells it, and keeps the hours of a round that may be killed."""
        if time.monotonic() > self._noted + _NOTED_EVERY:
            self._hours()
            self._note()
        self._told(phase, done, total, note)


def _frontier(ours: Judged, policy: Path) -> tuple[list[FloatArray], FloatArray]:
    """Losses (P,) of the problems at each of J settings, and shares of tokens saved (J,)."""
    table, outcomes = tried(ours, parse_policies([str(policy)])[0])
    full = replay_full(table).mean_tokens
    saved = np.array([1 - one.mean_tokens / full for _, one in outcomes])
    return [losses(table, one) for _, one in outcomes], saved
