"""The methods that are compared: their names, and what a policy's name with settings means."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from modeling_ospruner import OSPrunerConfig
from modeling_ospruner.configuration_ospruner import PriceRange
from ospruner.provenance import is_hub_id
from ospruner.rules.families import nearest

from .schema import MATH_TASK, LabelSettings

FULL = "full trace"
ORACLE = "hindsight oracle"
LIMIT = "best fixed"  # budget or step
FRONTIER = "OS-Pruner"
EVERY_PRICE = "OS-Pruner, one policy"  # of every price, with the head "price"

PAPER_THRESHOLDS = (0.7, 0.75, 0.8, 0.85, 0.9)
"""The inference thresholds of the paper's baselines (section 5)."""

METHOD_NAMES = {
    "os-pruner": FRONTIER,
    "probe": "probe",
    "convergence": "convergence",
    "final-answer": "convergence (final answer)",
    "flashthink": "FlashThink",
}
"""What tables and pictures call the methods of `OSPrunerConfig`."""


@dataclass(frozen=True)
class PolicyUse:
    """A policy and how it decides, in replay and online alike."""

    path: str  # its folder, or its id on the Hub
    config: OSPrunerConfig  # its configuration
    # From which stop probability on it stops; None stops with the probability given
    threshold: float | None = None
    asked_price: float | None = None  # the price of a token that it is told; None for its own price
    by_name: bool = False  # whether only its name was given, so that more thresholds may be tried

    @property
    def price(self) -> float:
        """The price at which it stops."""
        return self.config.price if self.asked_price is None else self.asked_price

    @property
    def mode(self) -> Literal["sample", "threshold"]:
        """How it decides, as generate calls it; "sample" is the paper's."""
        return "sample" if self.threshold is None else "threshold"

    @property
    def is_ours(self) -> bool:
        """Whether it is OS-Pruner, and no baseline."""
        return self.config.method == "os-pruner"

    @property
    def method(self) -> str:
        """What tables call its method; thresholded OS-Pruner is a method of its own."""
        name = METHOD_NAMES.get(self.config.method, self.config.method)
        name = EVERY_PRICE if self.config.head == "price" else name
        if self.is_ours:
            return name if self.threshold is None else f"{name} (≥{self.threshold:g})"
        return f"{name} (sampled)" if self.threshold is None else name

    @property
    def parameter(self) -> float | None:
        """The price, or a baseline's threshold."""
        return self.price if self.is_ours else self.threshold

    @property
    def parameter_name(self) -> str:
        """What the parameter is."""
        return "price" if self.is_ours else "" if self.threshold is None else "threshold"


def parse_prices(text: str) -> tuple[float, ...] | None:
    """What `--prices` and `rewards_at` mean: numbers, () for "all", None for nothing.

    Raises:
        ValueError: it is no list of numbers from 0 on.
    """
    if not text or text == "all":
        return () if text else None
    told = "give one price of a token or several, such as 5e-5,1e-4, or 'all' for 31 of the "
    return _numbers(text, sys.float_info.max, f"prices {text!r}: {told}policy's range")


def _numbers(text: str, most: float, otherwise: str) -> tuple[float, ...]:
    """Numbers from 0 to `most` between commas; raises ValueError `otherwise`."""
    try:
        found = tuple(map(float, text.split(",")))
    except ValueError as error:
        raise ValueError(otherwise) from error
    if not all(0 <= one <= most for one in found):
        raise ValueError(otherwise)
    return found


def parse_policies(specs: Sequence[str], prices: Sequence[float] | None = None) -> list[PolicyUse]:
    """The policies that a user named.

    Args:
        specs: folders or Hub ids, each alone or with "@" and thresholds ("probe@.7,.8"), or
            "@sample". A folder of policies stands for all of them. Alone, OS-Pruner decides as its
            configuration says, and a baseline at each of the paper's thresholds. Several policies
            of one method and parameter are its training seeds.
        prices: at which policies of every price stop; None for their default. A policy of one
            price may be given its own alone. () is for 31 prices of their range, beside which
            policies of one price stand at their own.

    Raises:
        ValueError: no policy there, a bad threshold, a price that a policy does not know, the same
            use twice, or two of one method and parameter that were not built alike.
    """
    uses = [use for spec in specs for use in _parse(spec, prices)]
    if prices == () and all(use.config.prices is None for use in uses):
        raise ValueError(
            f"none of {list(specs)} is a policy of every price (ospruner train --head price), and "
            "no other has a frontier of its own: leave --price out"
        )
    kinds: dict[tuple[str, float | None], PolicyUse] = {}
    given: set[tuple[Any, ...]] = set()
    for use in uses:
        other = kinds.setdefault((use.method, use.parameter), use)
        what = f"{use.method} with parameter {use.parameter}"
        for name in ("num_policy_layers", "tuning"):
            mine, theirs = vars(use.config)[name], vars(other.config)[name]
            if mine != theirs:
                raise ValueError(
                    f"{use.path} and {other.path} are {what}, with {name} {mine!r} and {theirs!r}: "
                    "they are no training seeds of one policy; evaluate them into two folders"
                )
        if (same := (use.path, use.threshold, use.price)) in given:
            raise ValueError(
                f"{use.path} is given twice for {what}: give each policy once (training seeds have "
                "folders of their own, and are pooled)"
            )
        given.add(same)
    return uses


def _parse(spec: str, prices: Sequence[float] | None) -> list[PolicyUse]:
    path, at, how = spec.partition("@")
    place = Path(path)
    # An id without an owner would be looked for on the Hub: it is more likely a slip of the pen.
    if place.is_file() or not (place.is_dir() or ("/" in path and is_hub_id(path))):
        what = "is a file" if place.exists() else f"is no folder here{nearest(path)}"
        raise ValueError(
            f"policy {spec!r}: {path} {what} Give the folder of a policy, a folder of policies, "
            "or an id on the Hub (owner/name)"
        )
    several = place.is_dir() and not (place / "config.json").is_file()
    folders = [str(one.parent) for one in place.glob("*/config.json")] if several else [path]
    if not folders:
        raise ValueError(f"{path} holds no policy: neither it nor a folder in it has a config")
    found = [(folder, OSPrunerConfig.from_pretrained(folder)) for folder in sorted(folders)]
    return [
        PolicyUse(folder, config, threshold, price, not at)
        for folder, config in sorted(found, key=lambda one: -one[1].price)
        for price in _prices(folder, config, prices)
        for threshold in _thresholds(config, at and how, spec)
    ]


def price_grid(prices: PriceRange) -> tuple[float, ...]:
    """Prices from careful to bold: 0, and 30 from low to high in even ratios."""
    ratio = prices.high / prices.low
    between = (prices.low * ratio ** (i / 29) for i in range(1, 29))
    return (0.0, prices.low, *(float(f"{price:.2e}") for price in between), prices.high)


def _prices(
    folder: str, config: OSPrunerConfig, prices: Sequence[float] | None
) -> Sequence[float | None]:
    """The prices that a policy is told; [None] for its own."""
    if prices is None or config.method != "os-pruner":
        return [None]
    for price in prices:
        if config.prices is not None:
            config.prices.check(folder, price)
        elif price != config.price:
            raise ValueError(
                f"{folder}: price is {price:g}, but the policy was trained for {config.price:g} "
                "alone (head 'fixed'): leave it out, take the policy of that price, or train one "
                "for every price with `ospruner train --head price`"
            )
    return prices or ([None] if config.prices is None else price_grid(config.prices))


def _thresholds(config: OSPrunerConfig, how: str, spec: str) -> Sequence[float | None]:
    """What stands after "@", or what the configuration says; None draws."""
    if how == "sample":
        return [None]
    if how:
        told = "after @ stand thresholds in [0, 1], such as @.7,.8, or @sample"
        return _numbers(how, 1, f"policy {spec!r}: {told}")
    if config.method != "os-pruner":
        return PAPER_THRESHOLDS
    return [None if config.default_mode == "sample" else config.default_threshold]


def refuse_other_base(use: PolicyUse, labels: LabelSettings, *, any_task: bool = False) -> None:
    """Raises ValueError where a policy was made for another base, way of thinking, task or stride.

    How answers are forced (`wind_down`) is no part of what a policy reads. With `any_task` policies
    of any task are taken, and any shape of answers.
    """
    config, base, revision = use.config, labels.base_model, labels.base_revision
    pinned = (_place(config.base_model_name_or_path), config.base_revision)
    if pinned != (_place(base), revision):
        raise ValueError(
            f"{use.path} is a policy for {config.base_model_name_or_path} at revision "
            f"{config.base_revision}, the traces are of {base} at {revision}: a policy reads its "
            "own base's hidden states; label with its base, or train one for this base"
        )
    own = dict(config.task or MATH_TASK)
    theirs = [own, *own.pop("also", [])]  # of a mix several
    if not any_task and _pinned(labels.task) not in map(_pinned, theirs):
        named = dict.fromkeys(map(shown_task, theirs))
        raise ValueError(
            f"{use.path} was trained on the task {' and '.join(named)}, here it is "
            f"{shown_task(labels.task)}: use the policy's own task, or say --across-tasks to see "
            "how far it carries"
        )
    mine, given = config.reasoning_format or {}, labels.reasoning_format
    own_answers = not any_task and _pinned(theirs[0]) == _pinned(labels.task)
    free = ("wind_down",) if own_answers else ("wind_down", "box_prefix", "answer_end")
    for name in sorted({*mine, *given}.difference(free)):
        if mine.get(name) != given.get(name):
            raise ValueError(
                f"{use.path} was trained on traces with {name} {mine.get(name)!r}, these have "
                f"{given.get(name)!r}: label with the policy's own reasoning format"
            )
    if config.step_stride != labels.step_stride:
        raise ValueError(
            f"{use.path} decides at every {config.step_stride}. step, here every "
            f"{labels.step_stride}. step is a decision: use labels with step_stride "
            f"{config.step_stride}, or policies of one stride"
        )


def shown_task(settings: Mapping[str, Any]) -> str:
    """A task's settings in words: "choice (force=answer)"."""
    more = ", ".join(f"{key}={value}" for key, value in settings.items() if key != "name")
    return f"{settings['name']} ({more})" if more else str(settings["name"])


def _pinned(task: Mapping[str, Any]) -> dict[str, Any]:
    """What of a task must agree: all but where its file lies, brevity asked for by prompt, labels.

    How labels are read (`labels`) changes neither what is asked nor what is forced.
    """
    return {key: value for key, value in task.items() if key not in ("file", "prompt", "labels")}


def _place(base: str) -> str:
    return str(Path(base).resolve()) if Path(base).is_dir() else base
