"""Rules without training by name, such as "budget:200": a signal, compared with a threshold.

A `Family` is a rule whose threshold is open: `rules.Deer`. With a threshold it is a `StopRule`,
which generate takes and labels replay: `rules.Deer(0.95)`.
"""

from __future__ import annotations

import inspect
import math
import operator
import runpy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from .signals import (
    Same,
    StepEnd,
    agreement,
    answers_tried,
    confidence,
    confirmed,
    entropy,
    repeats,
    repetition,
    run_jump,
    steps,
    thinking_entropy,
    tokens,
    whole_entropy,
)

__all__ = ["FAMILIES", "Family", "StopRule", "parse_rule"]
__all__ += ["Agreement", "AnswerEntropy", "Budget", "Deer", "Dynasor", "HaltCot", "Loops", "Puma"]
__all__ += ["Refrain", "RunJump", "Step", "ThinkJustEnough", "TrialConfidence"]

Ask = Literal["trial_answer", "text", "thinking_entropy"]
"""What a signal may ask a step end for; generate prepares it, or refuses what it cannot give."""

ASKS: frozenset[Ask] = frozenset(get_args(Ask))

_NEEDS: dict[Callable[..., Any], tuple[frozenset[Ask], str]] = {
    tokens: (frozenset(), ""),
    steps: (frozenset(), ""),
    entropy: (frozenset({"trial_answer"}), "forced_entropy"),
    confidence: (frozenset({"trial_answer"}), "forced_logprob"),
    agreement: (frozenset({"trial_answer", "text"}), ""),
    run_jump: (frozenset({"trial_answer", "text"}), ""),
    whole_entropy: (frozenset({"trial_answer"}), "forced_answer_entropy"),
    thinking_entropy: (frozenset({"thinking_entropy"}), ""),
    repetition: (frozenset({"text"}), ""),
    repeats: (frozenset({"text"}), ""),
    confirmed: (frozenset({"trial_answer", "text"}), "forced_logprob"),
}
"""What our own signals ask step ends for, and the column of labels that they need."""

MANY = 2.0**31 - 1
_COMPARE = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}


@dataclass(frozen=True)
class Family:
    """A rule whose threshold is open.

        def length(end: StepEnd) -> float:
            return len(end.trial_answer(32).ids)

        short = Family("short", length, stops="<=", high=32)

    Attributes:
        name: as in "deer:0.95".
        signal: a function of a step's end that gives a number; or a generator over a row's step
            ends and `same`, as in `signals`. Further arguments, with defaults, are the rule's
            settings. It never looks ahead, and NaN measures nothing.
        method: what tables call it; by default the name.
        parameter_name: what the threshold is: "tokens", "nats", "answers", ...
        stops: how the signal compares with the threshold where a row stops: ">=", ">", "<=", "<".
            NaN never stops a row.
        low: the lowest threshold allowed.
        high: the highest.
        whole: whether thresholds are whole numbers.
        asks: what the signal asks step ends for; all of it, unless less is said.
        reads: the column of labels without which it cannot be replayed; "" for none.
        settings: of the signal, where they differ from its defaults.
    """

    name: str
    signal: Callable[..., Any]
    method: str = ""
    parameter_name: str = "threshold"
    stops: Literal[">=", ">", "<=", "<"] = ">="
    low: float = 0.0
    high: float = 1.0
    whole: bool = False
    asks: frozenset[Ask] = ASKS
    reads: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "method", self.method or self.name)
        if self.signal in _NEEDS and self.asks is ASKS:  # unless another is said
            asks, reads = _NEEDS[self.signal]
            object.__setattr__(self, "asks", asks)
            object.__setattr__(self, "reads", reads)

    def __call__(self, threshold: float, *, same: Same = operator.eq, **settings: Any) -> StopRule:
        """The rule of a threshold, with settings of the signal, such as `every_tokens`.

        Raises:
            TypeError, ValueError: see `StopRule`.
        """
        return StopRule(self, float(threshold), same, {**self.settings, **settings})

    @classmethod
    def of(cls, rule: Any) -> Family:
        """A family as it is, or that of a function by its name, of any thresholds.

        Raises:
            TypeError: it is none of these.
        """
        if isinstance(rule, Family):
            return rule
        if not inspect.isroutine(rule):
            raise TypeError(
                f"{rule!r} is no rule: give a function of a step's end that gives a number, or an "
                "ospruner.rules.Family"
            )
        return cls(rule.__name__, rule, low=-MANY, high=MANY)

    @property
    def never(self) -> float:
        """The threshold that stops nothing, or next to nothing."""
        return self.high if self.stops.startswith(">") else self.low

    @property
    def at_once(self) -> float:
        """The threshold that stops wherever the rule may."""
        return self.low if self.stops.startswith(">") else self.high

    def reached(self, signal: Any, threshold: float) -> Any:
        """Whether a signal stops a row; arrays give arrays."""
        return _COMPARE[self.stops](signal, threshold)


@dataclass(frozen=True)
class StopRule:
    """A rule without training, ready to stop rows.

    Attributes:
        family: what it measures.
        threshold: what stops, between the family's `low` and `high`.
        same: whether two answers mean the same; by default they are the same text.
        settings: of the signal.

    Raises:
        TypeError: a setting that the signal does not have or of another type.
        ValueError: the threshold or a setting is out of range.
    """

    family: Family
    threshold: float
    same: Same = operator.eq
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        family, value, name = self.family, self.threshold, self.family.name
        if not family.low <= value <= family.high:  # also refuses NaN
            raise ValueError(
                f"rule {name!r}: {family.parameter_name or 'threshold'} is {value:g}; it must lie "
                f"in [{family.low:g}, {family.high:g}]"
            )
        if family.whole and not value.is_integer():
            raise ValueError(f"rule {name!r} takes a whole number, not {value:g}")
        defaults = _settings(family.signal)
        for key, given in self.settings.items():
            if key not in defaults:
                raise TypeError(f"rule {name!r} has no setting {key!r}; it has {sorted(defaults)}")
            if isinstance(defaults[key], tuple):
                if not (isinstance(given, tuple) and all(isinstance(word, str) for word in given)):
                    raise TypeError(
                        f"rule {name!r}: {key} is {given!r}; it must be a tuple of words, such as "
                        "('Wait', 'Alternatively')"
                    )
                continue
            least = 0 if defaults[key] < 1 else 1  # shares, and counts
            if not (isinstance(given, int | float) and given >= least):
                raise ValueError(f"rule {name!r}: {key} is {given!r}; it must be at least {least}")

    @property
    def method(self) -> str:
        """What tables call it."""
        return self.family.method

    @property
    def parameter(self) -> float:
        """The threshold, as a policy has its price."""
        return self.threshold

    @property
    def parameter_name(self) -> str:
        """What that is."""
        return self.family.parameter_name

    def __repr__(self) -> str:
        return f"{self.family.name}:{self.threshold:g}"

    @property
    def reason(self) -> Literal["policy", "budget"]:
        """What `StopRecord.reason` says of the rows that it stopped."""
        return "budget" if self.family.name in ("budget", "step") else "policy"

    @property
    def asks(self) -> frozenset[Ask]:
        """What its signal asks step ends for."""
        words: frozenset[Ask] = frozenset({"text"} if self.settings.get("transition_words") else ())
        return self.family.asks | words

    def measure(self, ends: Iterable[StepEnd]) -> Iterator[float]:
        """Its signal at the step ends of one row, one by one; NaN where it measures nothing.

        Raises:
            TypeError: it is no number.
        """
        signal_of: Callable[..., Any] = self.family.signal
        if inspect.isgeneratorfunction(signal_of):
            measured: Iterable[Any] = signal_of(ends, self.same, **self.settings)
        else:
            measured = map(partial(signal_of, **self.settings), ends)
        for signal in measured:
            try:
                yield float(signal)
            except (TypeError, ValueError):
                raise TypeError(
                    f"rule {self.family.name!r} gave {signal!r} at a step's end; it must give a "
                    "number, NaN where it measures nothing"
                ) from None

    def for_row(self) -> Callable[[StepEnd], tuple[bool, float | None]]:
        """For a row that starts thinking, to be called at each step end in turn.

        It gives whether the row stops there, and what was measured; None where nothing was.
        """
        here: list[StepEnd] = []
        measured = self.measure(iter(here.pop, None))

        def at_step_end(end: StepEnd) -> tuple[bool, float | None]:
            here.append(end)
            signal = next(measured, math.nan)  # a generator that has ended measures nothing more
            stops = bool(self.family.reached(signal, self.threshold))
            return stops, None if math.isnan(signal) else signal

        return at_step_end

    def asker(self, base: Any, plan: Any, tokenizer: Any) -> Any:
        """The rule at work on one call of generate."""
        from .live import LiveRule  # which imports torch

        return LiveRule(self, base, plan, tokenizer)


def _settings(signal: Callable[..., Any]) -> dict[str, Any]:
    """The settings of a signal with their defaults; `**trials` stands for `answers_tried`'s."""
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(signal).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            found |= _settings(answers_tried)
        elif parameter.default is not parameter.empty:
            found[name] = parameter.default
    return found


_COUNT: dict[str, Any] = {"whole": True, "high": MANY}
_SURE = 1e-9  # a threshold of 0 would stop at answers without any confidence
_EVERY_64 = {
    "max_tokens": 20,
    "every_tokens": 64,
    "hesitation": ("wait", "hold", "but", "okay", "no", "hmm"),
}
_BEFORE_WAIT = {"max_tokens": 20, "transition_words": ("Wait",), "trials": 10}

Budget = Family("budget", tokens, "fixed budget", "tokens", low=1, **_COUNT)
Step = Family("step", steps, "fixed step", "step", low=1, **_COUNT)
AnswerEntropy = Family("entropy", entropy, "answer entropy", "nats", "<=", high=math.log(20))
TrialConfidence = Family("confidence", confidence, "trial confidence", low=_SURE)
Agreement = Family("agreement", agreement, "answer agreement", "answers", low=2, **_COUNT)
Dynasor = replace(Agreement, name="dynasor", method="Dynasor", settings=_EVERY_64)
RunJump = Family("es-cot", run_jump, "ES-CoT", "jump", low=1, **_COUNT)
HaltCot = Family("halt-cot", whole_entropy, "HALT-CoT", "bits", "<", high=1e3)
Deer = Family("deer", confidence, "DEER", stops=">", low=_SURE, settings=_BEFORE_WAIT)
ThinkJustEnough = Family("just-enough", thinking_entropy, "Think Just Enough", "bits", "<=", high=5)
Refrain = Family("refrain", repetition, "REFRAIN")
Loops = Family("loops", repeats, "loops", "repeats", low=1, **_COUNT)
Puma = Family("puma", confirmed, "PUMA-like")

FAMILIES = {one.name: one for one in list(vars().values()) if isinstance(one, Family)}
"""The families by name. NEAT (arXiv 2602.02010) is not among them: it reads the activations of
neurons in every layer at every token, which labels do not keep and generate's hook does not see."""

EXAMPLES = (
    "budget:200, step:5, entropy:0.4, confidence:0.95, agreement:3, dynasor:3, es-cot:10, "
    "halt-cot:0.6, deer:0.95, just-enough:0.5, refrain:0.7, loops:1, puma:0.98"
)


def is_rule(text: str) -> bool:
    """Whether a text names a rule or a family, known or of one's own, and no policy."""
    name = text.partition(":")[0]
    return name in FAMILIES or name.endswith(".py")


def nearest(name: str) -> str:
    """Such as "; did you mean the rule 'deer'?"; "." where no rule's name is near."""
    found = get_close_matches(name.partition(":")[0], [*FAMILIES, "learnstop", "rules"], n=1)
    return f"; did you mean the rule {found[0]!r}?" if found else "."


def parse_rule(text: str, same: Same = operator.eq) -> StopRule | Family:
    """The rule, or without a number the family, that a user named.

    Args:
        text: a name of `FAMILIES`, alone or with its number, such as "budget:200" (tokens),
            "entropy:0.4" (nats of the answer's first token) or "agreement:3" (trial answers).
            "my_rules.py:MINE" is a family or a function of one's own file.
        same: whether two answers mean the same (`Task.same`).

    Raises:
        FileNotFoundError: the file of a rule of one's own is missing.
        ValueError: another name, no number, or one out of range; or the file cannot be run, or has
            no such family.
    """
    name, _, number = text.partition(":")
    known: Mapping[str, Any] = FAMILIES
    if name.endswith(".py"):
        file, (name, _, number) = name, number.partition(":")
        known = run_file(Path(file), "rule", f"a family {name}")
        if name not in known:
            own = [key for key, value in known.items() if isinstance(value, Family)]
            raise ValueError(
                f"{file} defines no {name!r}; its families are {', '.join(own) or 'none'}; a "
                "function of a step's end does, too"
            )
    elif name not in known:
        raise ValueError(
            f"rule {text!r} is not known{nearest(name)} Rules are written as {EXAMPLES}, or "
            "my_rules.py:MINE:0.5 for one of your own"
        )
    family = Family.of(known[name])
    if not number:
        return family
    try:
        value = float(number)
    except ValueError:
        raise ValueError(
            f"rule {text!r}: {number!r} is no number; write it as {EXAMPLES}"
        ) from None
    return family(value, same=same)


def run_file(path: Path, what: str, holds: str, name: str | None = None) -> dict[str, Any]:
    """What a user's own Python file, which is run, defines; errors say what it should hold.

    Raises:
        FileNotFoundError: it is missing.
        ValueError: it cannot be run.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no {what} at {path}: give a .py file with {holds}")
    try:
        return runpy.run_path(str(path), run_name=name)
    except Exception as error:  # whatever a user's file may raise
        raise ValueError(
            f"the {what} {path} cannot be run ({type(error).__name__}: {error}): mend the file"
        ) from error
