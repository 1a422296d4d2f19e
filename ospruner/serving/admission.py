"""Which requests a server stops, and how: what its defaults, its policy and their keys say."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from modeling_ospruner.configuration_ospruner import OSPrunerConfig
from modeling_ospruner.formats_ospruner import ReasoningFormat, TokenFormat
from modeling_ospruner.stopping_ospruner import RowPlan, StopPolicyConfig, mix64, uniform
from ospruner.formats import guess

from .requests import StopRequest

__all__ = ["Admission", "Admitted", "promise_of"]

_OF_A_PROMISE = ("mode", "threshold", "price")


@dataclass(frozen=True)
class Admitted:
    """How a request is stopped.

    Attributes:
        plan: as in generate.
        sample_index: its index among all rows of the run, for the draws.
        end_id: the token that ends it, once its answer is complete.
        control: whether it belongs to those that never stop.
        place: of its price, in the range that the policy knows; None with a policy of one lambda.
        promise: the calibration that it stops by; None where it stops otherwise.
        name: under which its record can be read; None for no record.
    """

    plan: RowPlan
    sample_index: int
    end_id: int
    control: bool
    place: float | None
    promise: Mapping[str, Any] | None
    name: str | None


class Admission:
    """What a server knows when requests come: its defaults, its policy, how many have come.

    Args:
        config: the policy's.
        tokenizer: the base's.
        defaults: the server's.
        seed: the server's, for the draws of requests without one.

    Attributes:
        config: the policy's.
        token_format: of the base, with the server's sentence before the closing.

    Raises:
        ValueError: the defaults are wrong for this policy.
    """

    def __init__(
        self,
        config: OSPrunerConfig,
        tokenizer: PreTrainedTokenizerBase,
        defaults: StopRequest,
        seed: int,
    ) -> None:
        defaults.settle(config)
        literals = config.reasoning_format
        token_format = TokenFormat.compile(
            guess(tokenizer) if literals is None else ReasoningFormat.from_dict(literals), tokenizer
        )
        if sentence := defaults.fields.get("wind_down"):
            token_format = token_format.winding_down(sentence, tokenizer)
        self.token_format = token_format
        self.config = config
        self._defaults = defaults
        self._eos_id: int = tokenizer.eos_token_id
        self._seed = mix64(seed)
        self._seen = 0

    def admit(
        self, asked: StopRequest, stop_ids: Iterable[int], end_id: int | None = None, text: int = 0
    ) -> Admitted | None:
        """How a request that comes is stopped; None for one that is not.

        Args:
            asked: its keys.
            stop_ids: tokens that end it, beside the tokenizer's own.
            end_id: the one that ends it once its answer is complete; None for the tokenizer's.
            text: which one it is of several texts of one prompt, from 0; with a seed only.

        Raises:
            ValueError: the policy does not know the price that it asks for.
        """
        settings = asked.settings(self._defaults)
        if settings is None:
            return None
        settings = settings.with_defaults(self.config)
        self._seen += 1
        control = uniform(self._seed, self._seen, -1) < self._defaults.control
        if control:
            settings = replace(settings, min_thinking_tokens=sys.maxsize, max_thinking_tokens=None)
        if "seed" not in asked.fields:
            # As if each request were another sample; on all tensor-parallel ranks the same.
            settings = replace(settings, first_sample_index=self._seen, seed=self._seed)
        elif text:
            settings = replace(settings, first_sample_index=settings.first_sample_index + text)
        prices, price = self.config.prices, settings.price
        stride = self.config.step_stride
        return Admitted(
            RowPlan(
                settings,
                self.token_format,
                frozenset({self._eos_id, *stop_ids}),
                stride,
                prices is not None,
            ),
            settings.first_sample_index,
            self._eos_id if end_id is None else end_id,
            control,
            None if prices is None or price is None else prices.place(price),
            None if control else promise_of(settings, self.config),
            asked.name,
        )


def promise_of(settings: StopPolicyConfig, config: OSPrunerConfig) -> dict[str, Any] | None:
    """The calibration by which settings stop, None where they stop otherwise.

    Args:
        settings: with the policy's defaults.
        config: the policy's.
    """
    free = (*_OF_A_PROMISE, "seed", "first_sample_index")
    others = {one.name: one.default for one in fields(settings) if one.name not in free}
    if any(vars(settings)[name] != default for name, default in others.items()):
        return None
    for one in config.calibrations or []:
        priced = [name for name in _OF_A_PROMISE if name != "price" or one["price"] is not None]
        if all(vars(settings)[name] == one[name] for name in priced):
            return one
    return None
