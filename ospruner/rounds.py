"""`ospruner.make`: a policy for a base in one call, with as few labels as it takes.

Labels are made in rounds, each with twice as many problems as the one before, which it keeps. Half
of the problems are trained on, half are kept for the promise: what a policy learns saturates after
some hundred problems, a promise needs more of them. After each round a policy is trained and
calibrated, and another round is begun as long as it is worth its hours (`worth_a_round`).
"""

import hashlib
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from modeling_ospruner import OSPrunerConfig
from ospruner.calibrating import CAREFUL, Value, calibrate, tried
from ospruner.comparing import Judged, compare
from ospruner.doctor.examination import examine
from ospruner.eval.calibration import exact_rejects, forecast, losses
from ospruner.eval.evaluation import Report
from ospruner.eval.methods import parse_policies, price_grid
from ospruner.eval.problems.sources import Loaded
from ospruner.eval.replay import replay_full
from ospruner.eval.report.pictures import draw_rounds
from ospruner.eval.report.summary import write_report
from ospruner.eval.table import FloatArray
from ospruner.hub_cards.cards import CARD_FILE, PICTURE_FILE, policy_card
from ospruner.progress import Progress, silent
from ospruner.train.config import StopConfig
from ospruner.train.labels.folder import data_hash, read_labels, read_manifest
from ospruner.train.labels.label import LabelConfig, load_run_problems, run_label
from ospruner.train.labels.loading import Labels, LabelSource, load_labels, split_by_text
from ospruner.train.run_folder import claimed, note, record_of
from ospruner.train.trainer import StopTrainer
from ospruner.workers import Job, Workers

__all__ = ["Made", "Round", "Rounds", "make", "round_sizes", "train_policy", "worth_a_round"]

FIRST = 50
"""Problems of the first round."""
HOUR, LEAST = 0.01, 0.005
"""Shares of the thinking tokens: what an hour of labelling must save more, and any round at all."""
CONFIDENCE = 0.95
_SHARES = {"train": 0.5, "validation": 0.5}


@dataclass(frozen=True)
class Round:
    """What a round came to."""

    problems: int  # labelled so far
    trained_on: int  # traces that the policy was trained on
    tested_on: int  # problems that it was calibrated on
    hours: float  # spent so far
    saved: float  # share of the thinking tokens, at the promise; 0 where none is kept
    # Share saved at the boldest setting whose measured loss is small enough, which is no promise
    frontier: float
    expected: float  # what a round of twice as many problems is expected to save at the promise
    cost: float  # hours that such a round is expected to take
    promise: str  # what the calibration found, in words; "" where the round was too small for one

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
    for looks in range(len(sizes), 0, -1):
        level = (1 - CONFIDENCE) / looks / 2  # half of it goes to the second sequence
        if exact_rejects(np.zeros((1, sizes[-looks] // 2)), max_loss, level)[0]:
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
    had = None if labels is None else data_hash(read_manifest(labels))
    identity = {"base": base, "dataset": dataset, "max_loss": max_loss, "problems": problems}
    folder = Path(out)
    with claimed(folder, identity | {"labels": had, "settings": settings}):
        if labels is not None and not (folder / "labels").exists():
            shutil.copytree(labels, folder / ".labels", dirs_exist_ok=True)
            (folder / ".labels").rename(folder / "labels")
        begun = record_of(folder).get("rounds")
        if not begun and (wrong := examine(base, config.revision, config.format).wrong):
            found = "; ".join(f"{one.name}: {one.value} ({one.advice})" for one in wrong)
            raise ValueError(f"`ospruner doctor {base}` finds what is to mend: {found}")
        config = replace(config, out=str(folder / "labels"))
        loaded = load_run_problems(config)
        Random(config.seed).shuffle(loaded.problems)
        loaded.problems.sort(key=lambda one: one.id not in known)
        sizes = round_sizes(len(loaded.problems[:problems]))
        how = (max_loss, config.device, progress)
        run = _Making(folder, sizes, *how, config=config, loaded=loaded, known=len(known))
        policy = run.go_on(tell, hours)
        _, validation = run.sides(run.best.problems)
        compared = compare(validation, [str(policy)], prices=(), **run.more)
        page = run.finish(compared, name=policy.name, license={})
        promise = run.best.promise or "Too few problems for a promise."
        return Made(policy, run.rounds, promise, run.best.saved > 0, run.why, page)


@dataclass
class Rounds(ABC):
    """Labels in rounds: each trains a policy, calibrates it, and looks ahead.

    What a round labels and how it trains is a subclass's: that of `make`, or of the demo.
    """

    out: Path  # the folder, whose `run.json` holds the rounds
    sizes: Sequence[int]  # problems that each round may have
    max_loss: float  # the accuracy that may be lost, as a share
    device: str | None  # where the base computes; None for the best there is
    progress: Progress  # is told of phases
    why: str = field(default="", init=False)  # no further round is begun

    def __post_init__(self) -> None:
        self.rounds = [Round(**one) for one in record_of(self.out).get("rounds", [])]
        where = {"device": self.device, "states": str(self.out / "states")}
        self.more: dict[str, Any] = {**where, "progress": self.progress}  # as `compare` takes it
        self._looks = looks_of(self.sizes, self.max_loss)

    @abstractmethod
    def label(self, size: int) -> tuple[Labels, Labels]:
        """Labels up to so many problems: those to train on, and those for the promise."""

    @abstractmethod
    def train(self, size: int, training: Labels, validation: Labels) -> None:
        """Trains the policy of a round, in `folder(size)`; what is trained already stays."""

    def folder(self, size: int) -> Path:
        """Of the policy of a round."""
        return self.out / "rounds" / str(size)

    @property
    def best(self) -> Round:
        """The round whose promise saves most, else the last one."""
        return max(self.rounds, key=lambda one: (one.saved, one.problems))

    def go_on(self, tell: Callable[[str], None], hours: float | None = None) -> Path:
        """Begins rounds as long as they are worth their hours, and tells a line of each.

        Returns:
            The folder of the best round's policy, as it is to be used.
        """
        for one in self.rounds:
            tell(one.told(self.max_loss))
        while not (why := self._enough(hours)):
            tell(self._round(self.sizes[len(self.rounds)]).told(self.max_loss))
        self.why = why
        policy, ignored = self.out / "policy", shutil.ignore_patterns("checkpoint-*", ".*")
        shutil.rmtree(policy, ignore_errors=True)
        return Path(shutil.copytree(self.folder(self.best.problems), policy, ignore=ignored))

    def finish(self, compared: Report, *, name: str, license: Mapping[str, str]) -> Path:
        """Writes the curve, the policy's card of this name and licence, a comparison's page.

        The path of the page is returned.
        """
        policy, report = self.out / "policy", self.out / "report"
        shutil.rmtree(report, ignore_errors=True)
        compared.save(report)
        shutil.copyfile(report / PICTURE_FILE, policy / PICTURE_FILE)
        policy_card(policy, name=name, license=license).save(policy / CARD_FILE)
        title = f"Labels for a promise of {100 * self.max_loss:g} points"
        draw_rounds([vars(one) for one in self.rounds], title).savefig(self.out / "curve.png")
        return write_report(report)[0]

    def _enough(self, hours: float | None) -> str:
        """Why no further round is begun; "" where one is."""
        if not self.rounds:
            return ""
        last = self.rounds[-1]
        if len(self.rounds) == len(self.sizes):
            return f"all {last.problems:,} problems are labelled"
        if not worth_a_round(last):
            return "twice as many labels are not worth their hours"
        exceeded = hours is not None and last.hours + last.cost > hours
        return f"{hours:g} hours would be exceeded" if exceeded else ""

    def _round(self, size: int) -> Round:
        """Labels up to so many problems, trains, calibrates, and looks ahead."""
        began = time.monotonic()
        training, validation = self.label(size)
        self.train(size, training, validation)
        policy, ours = self.folder(size), Judged(validation, **self.more)
        saved, promise = 0.0, ""
        if len(self.sizes) - len(self.rounds) <= self._looks:
            asked = (self.max_loss, CONFIDENCE)
            found = calibrate(policy, ours, *asked, values=_values(policy), looks=self._looks)
            saved = 0.0 if found.value is None else found.tokens_saved
            promise = found.told(*asked)
        lost, shares = _frontier(ours, policy)
        n, level = len(lost[0]), (1 - CONFIDENCE) / self._looks
        ahead = partial(forecast, max_loss=self.max_loss, level=level)
        expected, done, before = ahead(lost, shares, 2 * n), 0, 0.0
        if self.rounds:
            done, before = self.rounds[-1].problems, self.rounds[-1].hours
            gained = ahead(lost, shares, n) - ahead(*_frontier(ours, self.folder(done)), n)
            expected += max(0.0, gained) / 2
        fits = shares[[one.mean() <= self.max_loss for one in lost]]
        took = (time.monotonic() - began) / 3600
        one = Round(
            problems=size,
            trained_on=len(training.traces),
            tested_on=n,
            hours=before + took,
            saved=saved,
            frontier=float(max(fits, default=0.0)),
            expected=float(expected),
            cost=took * size / (size - done),
            promise=promise,
        )
        self.rounds.append(one)
        note(self.out, rounds=[vars(one) for one in self.rounds])
        for checkpoint in policy.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)
        return one


@dataclass(kw_only=True)
class _Making(Rounds):
    """The rounds of `make`: the problems of one data set, of which half are for the promise."""

    config: LabelConfig
    loaded: Loaded
    known: int  # of the problems have labels already; they stand first

    def label(self, size: int) -> tuple[Labels, Labels]:
        """See `Rounds.label`."""
        kept = max(size, self.known)  # a run of labels keeps all that it has
        chosen = replace(self.loaded, problems=self.loaded.problems[:kept])
        job: Job = partial(run_label, self.config, loaded=chosen)
        if self.config.engine_name() == "vllm":  # a GPU is free again when its process has ended
            with Workers(1) as workers:
                workers.run({"label": job}, self.progress)
        else:
            job(progress=self.progress)
        return self.sides(size)

    def sides(self, size: int) -> tuple[Labels, Labels]:
        """The labels of a round of so many problems, as `label` returns them."""
        labels, chosen = load_labels(self.config.out), self.loaded.problems[:size]
        ids, known = {one.id for one in chosen}, labels.traces["problem_id"]
        rows = [row for row, name in enumerate(known) if name in ids]
        if len(rows) < len(known):
            of_round = hashlib.sha256(f"{labels.data_hash}/{size}".encode()).hexdigest()
            labels = replace(labels, traces=labels.traces.select(rows), data_hash=of_round)
        sides = split_by_text(labels, _SHARES)
        return sides["train"], sides["validation"]

    def train(self, size: int, training: Labels, validation: Labels) -> None:
        """See `Rounds.train`."""
        config = StopConfig(
            str(self.folder(size)),
            states=self.more["states"],
            disable_tqdm=True,
            seed=self.config.seed,
            use_cpu=self.config.device == "cpu",
            bf16=self.config.dtype == "bfloat16" or None,
        )
        train_policy(config, training, validation, progress=self.progress)


def train_policy(config: StopConfig, *labels: LabelSource, progress: Progress) -> None:
    """A job: trains what is configured on labels, with others to validate on."""
    StopTrainer(config, *labels, progress=progress).train()


def _values(policy: Path) -> list[Value]:
    """What a round tries: a policy may lose too much at price 0, and keep a promise before it."""
    prices = OSPrunerConfig.from_pretrained(policy).prices
    assert prices is not None  # the head that is trained by default
    return [*CAREFUL, *price_grid(prices)]


def _frontier(ours: Judged, policy: Path) -> tuple[list[FloatArray], FloatArray]:
    """Losses (P,) of the problems at each of J settings, and shares of tokens saved (J,)."""
    table, outcomes = tried(ours, parse_policies([str(policy)])[0], values=_values(policy))
    full = replay_full(table).mean_tokens
    saved = np.array([1 - one.mean_tokens / full for _, one in outcomes])
    return [losses(table, one) for _, one in outcomes], saved
