"""The methods that are compared: names, colours, thresholds, and what `--policies` means."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from modeling_ospruner import OSPrunerConfig
from modeling_ospruner.rules_ospruner import LearnedPolicy
from modeling_ospruner.stopping_ospruner import asked_price
from ospruner.provenance import is_hub_id

from .schema import MATH_TASK, LabelSettings

__all__ = [
    "EVERY_PRICE",
    "FRONTIER",
    "FRONTIER_COLOUR",
    "FULL",
    "LIMIT",
    "METHOD_NAMES",
    "ORACLE",
    "PAPER_THRESHOLDS",
    "STYLES",
    "PolicyUse",
    "parse_policies",
    "parse_prices",
    "refuse_other_base",
    "refuse_other_trials",
]

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
    "terminator": "TERMINATOR",
    "lynx": "LYNX",
    "thought-calibration": "Thought Calibration",
    "flashthink": "FlashThink",
}
"""What tables and pictures call the methods of `OSPrunerConfig`."""

# Okabe and Ito's palette, told apart with every common colour vision; markers say it twice.
FRONTIER_COLOUR = "#0072B2"
STYLES = (
    ("#D55E00", "s"),
    ("#009E73", "^"),
    ("#CC79A7", "D"),
    ("#E69F00", "v"),
    ("#56B4E9", "P"),
    ("#8C6D31", "X"),
    ("#882255", "<"),
)


@dataclass(frozen=True)
class PolicyUse:
    """A policy and how it decides.

    Attributes:
        path: its folder, or its id on the Hub.
        config: its configuration.
        mode: "sample" stops with the probability given (the paper), "threshold" from a threshold.
        threshold: with mode "threshold".
        asked_price: the price of a token that it is told; None for its own lambda.
        window: how many of the last probabilities it looks at; see `LearnedPolicy`.
        by: how.
    """

    path: str
    config: OSPrunerConfig
    mode: Literal["sample", "threshold"]
    threshold: float | None = None
    asked_price: float | None = None
    window: int = 1
    by: Literal["vote", "mean"] = "vote"

    @property
    def price(self) -> float:
        """The lambda at which it stops."""
        own = self.config.price
        return own if self.asked_price is None else self.asked_price

    @property
    def method(self) -> str:
        """What tables call its method; thresholded OS-Pruner is a method of its own."""
        name = METHOD_NAMES.get(self.config.method, self.config.method)
        name = EVERY_PRICE if self.config.head == "price" else name
        if self.window > 1:
            name = f"{name} ({self.by} of {self.window})"
        if self.config.method == "os-pruner" and self.mode == "threshold":
            return f"{name} (≥{self.threshold:g})"
        if self.config.method != "os-pruner" and self.mode == "sample":
            return f"{name} (sampled)"
        return name

    @property
    def rule(self) -> LearnedPolicy:
        """The same as a rule for generate."""
        return LearnedPolicy(
            self.mode,
            self.threshold,
            step_stride=self.config.step_stride,
            trial_every=self.config.trial_every,
            trial_max_tokens=self.config.trial_max_tokens,
            window=self.window,
            by=self.by,
        )

    @property
    def parameter(self) -> float | None:
        """Lambda, or a baseline's threshold."""
        return self.price if self.config.method == "os-pruner" else self.threshold

    @property
    def parameter_name(self) -> str:
        """What the parameter is."""
        if self.config.method == "os-pruner":
            return "λ"
        return "threshold" if self.mode == "threshold" else ""


def parse_prices(text: str) -> tuple[float, ...] | None:
    """What `--price` means: numbers, () for "frontier", None for nothing.

    Raises:
        ValueError: it is no list of numbers.
    """
    if not text or text == "frontier":
        return () if text else None
    try:
        return tuple(float(number) for number in text.split(","))
    except ValueError:
        raise ValueError(
            f"price {text!r}: give one price of a token or several, such as 5e-5,1e-4, or "
            "'frontier' for 31 of the policy's range"
        ) from None


def parse_policies(
    specs: Sequence[str], prices: Sequence[float] | None = None, domain: str | None = None
) -> list[PolicyUse]:
    """The policies that a user named.

    Args:
        specs: folders or Hub ids, each alone or with "@" and thresholds ("probe@.7,.8"), or
            "@sample"; "@vote10:.7" and "@mean10:.7" look at ten steps together. A folder of
            policies stands for all of them, and so does the folder of `ospruner train --multi`.
            Alone, OS-Pruner decides as its configuration says, and a baseline at each of the
            paper's thresholds. Several policies of one method and parameter are its training seeds.
        prices: at which policies of every price stop; None for their default. A policy of one
            lambda may be given its own alone. () is for 31 prices of their range, beside which
            policies of one lambda stand at their own.
        domain: in place of prices: policies of every price take the one that they chose for it
            (`OSPrunerConfig.domains`); policies of one lambda stand at their own.

    Raises:
        ValueError: no policy there, a bad threshold, a price that a policy does not know, the same
            use twice, or two of one method and parameter that were not built alike.
    """
    if domain is not None and prices is not None:
        raise ValueError(
            f"domain is {domain!r}, and so are prices given: a domain has its own "
            "price; leave one of them out"
        )
    uses = [use for spec in specs for use in _parse(spec, prices, domain)]
    if domain is not None and all(use.config.prices is None for use in uses):
        raise ValueError(
            f"domain is {domain!r}, but none of {list(specs)} is a policy of every price (ospruner "
            "train --head price), and no other has prices by domain: leave --domain out"
        )
    if prices == () and all(use.config.prices is None for use in uses):
        raise ValueError(
            f"none of {list(specs)} is a policy of every price (ospruner train --head price), and "
            "no other has a frontier of its own: leave --price out"
        )
    seen = set()
    kinds: dict[tuple[str, float | None], PolicyUse] = {}
    for use in uses:
        other = kinds.setdefault((use.method, use.parameter), use)
        for name in ("num_policy_layers", "tuning", "lora_rank"):
            mine, theirs = vars(use.config)[name], vars(other.config)[name]
            if mine != theirs:
                raise ValueError(
                    f"{use.path} and {other.path} are {use.method} with parameter {use.parameter}, "
                    f"with {name} {mine!r} and {theirs!r}: they are no training seeds of one "
                    "policy; evaluate them into two folders"
                )
        key = (use.path, use.mode, use.threshold, use.asked_price, use.window, use.by)
        if key in seen:
            raise ValueError(
                f"{use.path} is given twice for {use.method} with parameter {use.parameter}: give "
                "each policy once (training seeds have folders of their own, and are pooled)"
            )
        seen.add(key)
    return uses


def _parse(spec: str, prices: Sequence[float] | None, domain: str | None) -> list[PolicyUse]:
    path, at, how = spec.partition("@")
    if Path(path).is_file() or not (Path(path).is_dir() or is_hub_id(path)):
        what = "is a file" if Path(path).exists() else "does not exist"
        raise ValueError(
            f"policy {spec!r}: {path} {what}; give the folder of a policy, a folder of policies, "
            "or an id on the Hub"
        )
    folders = [path]
    if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        stages, targets = Path(path).glob("*/config.json"), Path(path).glob("*/*/config.json")
        folders = [str(config.parent) for config in sorted(stages) or sorted(targets)]
        if not folders:
            raise ValueError(f"{path} holds no policy: neither it nor a folder in it has a config")
    how, window = _window(how)
    uses = []
    found = [(folder, OSPrunerConfig.from_pretrained(folder)) for folder in folders]
    for folder, config in sorted(found, key=lambda one: -one[1].price):
        uses += [
            PolicyUse(folder, config, *mode, price, *window)
            for price in _prices(folder, config, prices, domain)
            for mode in _modes(config, at and how, spec)
        ]
    return uses


def _prices(
    folder: str, config: OSPrunerConfig, prices: Sequence[float] | None, domain: str | None
) -> Sequence[float | None]:
    """The prices that a policy is told; [None] for its own."""
    if domain is not None and config.prices is not None:
        return [config.domain_price(folder, domain)]
    if prices is None or config.method != "os-pruner":
        return [None]
    if not prices:
        return [None] if config.prices is None else config.prices.grid()
    return [asked_price(folder, config, price) for price in prices]


def _window(how: str) -> tuple[str, tuple[int, Literal["vote", "mean"]]]:
    """What stands after @ without its window, and the window."""
    if match := re.match(r"(vote|mean)(\d+):(.+)", how):
        return match[3], (int(match[2]), "vote" if match[1] == "vote" else "mean")
    return how, (1, "vote")


def _modes(
    config: OSPrunerConfig, how: str, spec: str
) -> list[tuple[Literal["sample", "threshold"], float | None]]:
    if how == "sample":
        return [("sample", None)]
    if not how:
        if config.method != "os-pruner":
            return [("threshold", value) for value in PAPER_THRESHOLDS]
        if config.default_mode == "sample":
            return [("sample", None)]
        return [("threshold", config.default_threshold)]
    try:
        values = [float(number) for number in how.split(",")]
    except ValueError:
        values = [-1.0]
    if any(not 0 <= value <= 1 for value in values):
        raise ValueError(
            f"policy {spec!r}: after @ stand thresholds in [0, 1], such as @.7,.8, or of a window "
            "of steps @vote10:.7 or @mean10:.7, or @sample"
        )
    return [("threshold", value) for value in values]


def refuse_other_base(
    use: PolicyUse,
    base: str,
    revision: str | None,
    reasoning_format: Mapping[str, Any],
    step_stride: int,
    task: Mapping[str, Any] | None = None,
) -> None:
    """Raises ValueError where a policy was made for another base, way of thinking, or stride.

    How answers are forced (`wind_down`) is no part of what a policy reads.

    Args:
        use: the policy.
        base: of the traces.
        revision: of the base.
        reasoning_format: of the traces; its literals.
        step_stride: of the traces.
        task: of the traces, one of those that the policy was trained on; None takes a policy of
            any task, and any shape of answers.
    """
    config = use.config
    pinned = (_place(config.base_model_name_or_path), config.base_revision)
    if pinned != (_place(base), revision):
        raise ValueError(
            f"{use.path} is a policy for {config.base_model_name_or_path} at revision "
            f"{config.base_revision}, the traces are of {base} at {revision}: a policy reads its "
            "own base's hidden states; label with its base, or train one for this base"
        )
    theirs = [
        config.task or MATH_TASK,
        *(one["task"] for one in (config.domains or {}).values()),
    ]
    first = task is not None and _pinned(theirs[0]) == _pinned(task)
    if task is not None and _pinned(task) not in map(_pinned, theirs):
        named = dict.fromkeys(map(shown_task, theirs))
        raise ValueError(
            f"{use.path} was trained on the task {' and '.join(named)}, here it is "
            f"{shown_task(task)}: use the policy's own task, or say --across-tasks to see how far "
            "it carries"
        )
    literals = config.reasoning_format or {}
    free = ("wind_down",) if first else ("wind_down", *_OF_TASK)
    if different := sorted(
        name
        for name in {*literals, *reasoning_format}
        if literals.get(name) != reasoning_format.get(name) and name not in free
    ):
        name = different[0]
        raise ValueError(
            f"{use.path} was trained on traces with {name} {literals.get(name)!r}, these have "
            f"{reasoning_format.get(name)!r}: label with the policy's own reasoning format"
        )
    if config.step_stride != step_stride:
        raise ValueError(
            f"{use.path} decides at every {config.step_stride}. step, here every {step_stride}. "
            f"step is a decision: use labels with step_stride {config.step_stride}, or policies of "
            "one stride"
        )


def refuse_other_trials(use: PolicyUse, settings: LabelSettings) -> None:
    """Refuses labels whose answers are not those that a policy would try.

    Args:
        use: the policy; one that tries no answers takes all.
        settings: of the labels.

    Raises:
        ValueError: naming what differs.
    """
    config = use.config
    if not config.trial_every:
        return
    literals = config.reasoning_format or {}
    pairs = {
        "answer": ("forced", settings.answer),
        "max_answer_tokens": (config.trial_max_tokens, settings.max_answer_tokens),
        **{
            name: (literals.get(name), settings.reasoning_format.get(name))
            for name in ("wind_down", *_OF_TASK)
        },
    }
    different = [name for name, (own, theirs) in pairs.items() if (own or "") != (theirs or "")]
    if different:
        own, theirs = pairs[different[0]]
        raise ValueError(
            f"{use.path} tries answers (trial_every {config.trial_every}) with {different[0]} "
            f"{own!r}, the labels' have {theirs!r}: their history would be another; label with the "
            "policy's own settings"
        )


_OF_TASK = ("box_prefix", "answer_end")


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
