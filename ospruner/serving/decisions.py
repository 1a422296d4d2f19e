"""What is decided where steps end, by what the head says there.

What was decided stays on the device, so that no step waits for it, until it is read into records.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from modeling_ospruner.configuration_ospruner import PriceRange, price_logits, price_places
from modeling_ospruner.stopping_ospruner import StopRecord

from .slots import StopSlots

__all__ = ["Decisions"]


class Decisions:
    """Decides for slots, and notes what was decided.

    Args:
        slots: the requests' ways to their stops.
        count: how many slots there are.
        prices: of a policy of every price; None for one of a fixed lambda.
        device: of the slots.
    """

    def __init__(
        self, slots: StopSlots, count: int, prices: PriceRange | None, device: torch.device
    ) -> None:
        self._slots = slots
        self._prices = prices
        self._places = torch.zeros(count, device=device)
        self._noted: list[tuple[Sequence[StopRecord], torch.Tensor]] = []

    def __len__(self) -> int:
        """How many steps have been noted and not read."""
        return len(self._noted)

    def enter(self, slot: int, price: float | None) -> None:
        """Takes the price of the request that has come into a slot."""
        if self._prices is not None:
            assert price is not None  # a request of such a policy has been given one
            self._places[slot] = self._prices.place(price)

    def decide(self, slots: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
        """Decides for slots at a step's end.

        Args:
            slots: (K,).
            outputs: (K, 1 or 6), what the head said there.

        Returns:
            (K, 2 or 3) float64, to be noted: thinking tokens, stop probability, and the place of
            the price of indifference.
        """
        logits, told = outputs[:, 0], []
        if self._prices is not None:
            logits = price_logits(outputs, self._places[slots])
            told = [price_places(outputs).double()]
        decided = self._slots.decide(slots, torch.sigmoid(logits))
        return torch.stack([decided.thinking_tokens.double(), decided.probabilities, *told], dim=1)

    def note(self, records: Sequence[StopRecord], numbers: torch.Tensor) -> None:
        """Keeps what was decided for K requests: their records, and `decide`'s numbers."""
        self._noted.append((records, numbers))

    def read(self) -> None:
        """Writes what was noted into the records; waits for the device."""
        for records, numbers in self._noted:
            told = zip(records, numbers.tolist(), strict=True)
            for record, (length, probability, *place) in told:
                record.step_ends.append(int(length))
                record.probabilities.append(probability)
                if self._prices is not None:
                    record.prices.append(self._prices.price_at(place[0]))
        self._noted = []
