"""The accuracy-efficiency score, by which rules are chosen and compared."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from modeling_ospruner.configuration_ospruner import check_choice

from .table import FloatArray


@dataclass(frozen=True)
class AesVariant:
    """An accuracy-efficiency score: reports print which, a call computes it.

    AES = alpha dLength + beta |dAcc| where dAcc >= 0, else alpha dLength - gamma |dAcc|, with
    dLength = 1 - tokens / base_tokens and dAcc = accuracy - base_accuracy, divided by base_accuracy
    where `relative`.
    """

    alpha: float = 1.0  # weight of the length reduction
    beta: float = 3.0  # weight of a gain in accuracy
    gamma: float = 5.0  # weight of a loss in accuracy
    relative: bool = False  # the accuracy difference is divided by the baseline's accuracy
    # What the length counts, here and in rewards: "thinking" tokens, as in the paper, or those
    # of thinking and answer ("generated")
    charge: Literal["thinking", "generated"] = "thinking"

    def __post_init__(self) -> None:
        check_choice("AesVariant", "charge", self.charge, ("thinking", "generated"))

    @property
    def label(self) -> str:
        """Such as "absolute, α=1, β=3, γ=5"."""
        kind = "relative" if self.relative else "absolute"
        length = "" if self.charge == "thinking" else f", of {self.charge}"
        return f"{kind}, α={self.alpha:g}, β={self.beta:g}, γ={self.gamma:g}{length}"

    def __call__(
        self,
        accuracy: npt.ArrayLike,
        tokens: npt.ArrayLike,
        base_accuracy: npt.ArrayLike,
        base_tokens: npt.ArrayLike,
    ) -> FloatArray:
        """The score; arrays broadcast. Accuracies are in [0, 1], tokens means over traces.

        Raises:
            ValueError: an accuracy outside [0, 1], or a baseline without tokens.
        """
        acc, base = np.asarray(accuracy, np.float64), np.asarray(base_accuracy, np.float64)
        for name, values in (("accuracy", acc), ("base_accuracy", base)):
            if ((values < -1e-9) | (values > 1 + 1e-9)).any():
                allowed = "it must lie in [0, 1] (divide percent by 100)"
                raise ValueError(f"{name} is {values}; {allowed}")
        if (np.asarray(base_tokens) <= 0).any():
            raise ValueError(f"base_tokens is {base_tokens!r}; the baseline must spend tokens")
        gain = acc - base
        if self.relative:
            # A baseline that is never right has no relative difference: NaN, not an exception, as a
            # bootstrap of few problems can draw one.
            gain = np.divide(gain, base, out=np.full(np.shape(gain), np.nan), where=base > 0)
        changed = np.where(gain >= 0, self.beta * gain, self.gamma * gain)
        return np.asarray(self.alpha * reduction(tokens, base_tokens) + changed)


AES_ABSOLUTE = AesVariant()
"""The variant that the numbers of the paper's Table 1 follow, and our default."""

CHOSEN_BY = "highest AES on the validation traces"
"""The one rule by which a price or threshold is chosen where nobody names one."""

AES_RELATIVE = AesVariant(gamma=7.0, relative=True)
"""The variant that the paper's text (section 5) prints."""


def reduction(tokens: npt.ArrayLike, base_tokens: npt.ArrayLike) -> FloatArray:
    """Share of the baseline's mean thinking tokens that is saved, 1 - tokens / base_tokens."""
    return 1.0 - np.asarray(tokens, np.float64) / np.asarray(base_tokens, np.float64)
