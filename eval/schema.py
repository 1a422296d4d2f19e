"""The settings of a label run: what labels share that are mixed, compared, or read by a policy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from modeling_ospruner.configuration_ospruner import check_choice, check_integer, check_number
from ospruner.durable import differences

OF_SAMPLING = ("seed", "samples_per_problem", "prompt_date")  # in which splits may differ
MATH_TASK: dict[str, Any] = {"name": "math"}
"""The settings of mathematics: the task of labels and policies that name none."""
FREE_ANSWER_TOKENS = 512
"""The cap on an answer that the model writes freely, unless another is said."""


@dataclass(frozen=True, kw_only=True)
class LabelSettings:
    """What a label run must share with another to be mixed with it: the manifest's `settings`."""

    base_model: str  # name or path of the base that wrote the traces and the forced answers
    base_revision: str | None = None  # its revision; None where it has none (a folder)
    # Of its weights (`base_fingerprint` of the model files); None where they were not at hand
    base_fingerprint: str | None = None
    # The format's literals (`ReasoningFormat` as a dict)
    reasoning_format: dict[str, Any] = field(default_factory=dict)
    # "forced" (closing and box prefix are forced, also after a natural end) or "free" (only
    # the closing)
    answer: Literal["forced", "free"] = "forced"
    temperature: float = 0.6  # of the trace's sampling; forced answers are greedy
    top_p: float = 0.95  # nucleus of the trace's sampling, in (0, 1]
    top_k: int = 0  # of the trace's sampling; 0 for none
    seed: int = 0  # of the trace's sampling
    samples_per_problem: int = 1  # traces sampled for each problem
    max_new_tokens: int = 15_000  # the token cap of a trace
    max_answer_tokens: int = 32  # the token cap of a forced answer
    step_stride: int = 1  # label every k-th step, and always the last
    # Name of the file whose traces these are; "" where the base sampled them
    imported_from: str = ""
    # How problems were asked, answered and graded (`problems.task.Task.settings`); labels
    # without it are of mathematics
    task: dict[str, Any] = field(default_factory=lambda: dict(MATH_TASK))
    # The day (YYYY-MM-DD) that prompts name as today; "" where the chat template names none
    prompt_date: str = ""

    def __post_init__(self) -> None:
        owner = "labels"
        if not self.base_model:
            raise ValueError(f"{owner}: base_model is ''; it must be the base's name or path")
        if not (isinstance(self.task, dict) and isinstance(self.task.get("name"), str)):
            raise ValueError(f"{owner}: task is {self.task!r}; it must be settings with a name")
        check_choice(owner, "answer", self.answer, ("forced", "free"))
        check_number(owner, "temperature", self.temperature, 0, math.inf)
        check_number(owner, "top_p", self.top_p, 0, 1, open_low=True)
        counts = ("samples_per_problem", "max_new_tokens", "max_answer_tokens", "step_stride")
        for name, least in {"top_k": 0, "seed": 0, **dict.fromkeys(counts, 1)}.items():
            check_integer(owner, name, vars(self)[name], least)

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON-ready values; mathematics, and no date, are not named."""
        usual = {"task": MATH_TASK, "prompt_date": ""}
        told = dataclasses.asdict(self).items()
        return {name: value for name, value in told if (name, value) not in usual.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LabelSettings:
        """The settings that `to_dict` wrote.

        Raises:
            ValueError: an unknown key (labels of a newer version, perhaps), or a missing one.
        """
        names = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(values) - names)
        missing = sorted(names - set(values) - {"task", "prompt_date"})
        if unknown or missing:
            raise ValueError(
                f"label settings with unknown keys {unknown} and missing keys {missing}: "
                "were these labels written by another version of ospruner?"
            )
        return cls(**values)

    def differences(self, other: LabelSettings, but: Sequence[str] = ()) -> list[str]:
        """One line for each setting that differs, naming it and both values; [] where none does.

        An unknown fingerprint is no difference.

        Args:
            other: the other settings.
            but: settings that may differ.
        """
        free = {*but}
        if None in (self.base_fingerprint, other.base_fingerprint):
            free.add("base_fingerprint")
        sides = ({k: v for k, v in vars(one).items() if k not in free} for one in (self, other))
        return differences(*sides)
