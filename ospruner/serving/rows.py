"""The way of an engine's requests to their stops: one `StopRow` each, as in generate.

An adapter takes in the tokens of each request, asks the policy about those that have ended a step,
and lets `RowCore` decide and shape the logits. All of it runs on the host, so that an engine that
keeps its tokens on the device copies those of a step once.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from modeling_ospruner.configuration_ospruner import PriceRange
from modeling_ospruner.formats_ospruner import BREAK, NEWLINE
from modeling_ospruner.policy_ospruner import price_logits, price_places
from modeling_ospruner.stopping_ospruner import Phase, Said, StopRecord, StopRow, shape_scores

from .admission import Admitted

__all__ = ["RowCore", "ServedRow", "in_json"]

logger = logging.getLogger(__name__)


class ServedRow:
    """A request that the policy may stop.

    Args:
        admitted: how.
        prompt_ids: its prompt, without padding.

    Attributes:
        admitted: how it is stopped.
        row: decides.
        taken: tokens of prompt and text that `row` has taken in.
        complete: whether its answer is, by a token that does not end a text.
        counted: whether the end of its thinking has been told.
        said: what the policy has said of step ends that are decided once they stand, by `taken`.
    """

    def __init__(self, admitted: Admitted, prompt_ids: Sequence[int]) -> None:
        self.admitted = admitted
        self.counted = False
        self.said: dict[int, Said] = {}
        self._begin(prompt_ids)

    def _begin(self, prompt_ids: Sequence[int]) -> None:
        self.row = StopRow(self.admitted.plan, prompt_ids, self.admitted.sample_index)
        self.taken = len(prompt_ids)
        self.complete = False

    @property
    def record(self) -> StopRecord:
        """What has happened to it."""
        return self.row.record

    @property
    def thinks(self) -> bool:
        """Whether it may still be stopped."""
        return self.row.phase is Phase.THINKING

    def take(self, token: int) -> None:
        """Takes in the next token, after the step that the last one may have ended."""
        if self.row.at_boundary:
            self.row.decide(self.said.get(self.taken, self.admitted.plan.unasked))
        if self.row.push(token):
            self.complete = token not in self.admitted.plan.eos_ids
        self.taken += 1

    def may_turn(self, token: int) -> bool:
        """Whether a next token may end a step or the thinking, or find neither going on."""
        if not self.thinks or token in self.admitted.plan.eos_ids:
            return True
        fmt = self.admitted.plan.token_format
        if fmt.end_marker is not None or token in fmt.added_ids:
            return True
        return token < len(fmt.kinds) and bool(fmt.kinds[token] & (BREAK | NEWLINE))

    def come_back(self, prompt_ids: Sequence[int], text_ids: Sequence[int]) -> None:
        """Goes on after an engine has put it back, perhaps with fewer tokens than were taken in.

        Args:
            prompt_ids: its prompt.
            text_ids: its tokens as far as the engine knows them now.
        """
        length = len(prompt_ids) + len(text_ids)
        if length - 1 <= self.taken <= length:
            return
        old = self.record
        prices: Sequence[float | None] = old.prices or [None] * len(old.step_ends)
        self._begin(prompt_ids)
        told = zip(old.step_ends, old.probabilities, prices, strict=True)
        self.said = {len(prompt_ids) + end: Said(signal, price) for end, signal, price in told}
        for token in text_ids:
            self.take(token)

    def ahead(self) -> ServedRow:
        """A copy that takes in drafted tokens, while this one waits for those that are accepted."""
        plan, record = self.admitted.plan, self.record
        told = replace(
            record,
            step_ends=[*record.step_ends],
            probabilities=[*record.probabilities],
            prices=[*record.prices],
        )
        fmt = plan.token_format
        kept = (plan, fmt, *vars(fmt).values())  # what never changes
        memo: dict[int, Any] = {id(one): one for one in kept}
        twin = copy.copy(self)
        twin.row = copy.deepcopy(self.row, memo | {id(record): told})
        twin.counted = True
        return twin


class RowCore:
    """Decides for rows and shapes their logits.

    Args:
        prices: of a policy of every price; None for one of a fixed lambda.
        on_end: called once for each row whose thinking has ended.
    """

    def __init__(
        self, prices: PriceRange | None, on_end: Callable[[ServedRow], None] | None = None
    ) -> None:
        self._prices = prices
        self._on_end = on_end
        self._warned = False

    def hear(self, rows: Sequence[ServedRow], outputs: torch.Tensor) -> list[Said]:
        """What the head says to rows, each at its own price.

        Args:
            rows: K of them.
            outputs: (K, 1 or 6), of the head at their last tokens.
        """
        outputs = outputs.float().cpu()  # the one wait for the device
        logits = outputs[:, 0]
        prices: list[float | None] = [None] * len(rows)
        if self._prices is not None:
            places = torch.tensor([one.admitted.place for one in rows])
            logits = price_logits(outputs, places)
            prices = [self._prices.price_at(place) for place in price_places(outputs).tolist()]
        told = zip(rows, torch.sigmoid(logits).tolist(), prices, strict=True)
        return [
            Said(signal, price) if one.row.asks else one.admitted.plan.unasked
            for one, signal, price in told
        ]

    def decide(self, rows: Sequence[ServedRow], said: Sequence[Said]) -> None:
        """Decides on the steps that have ended with the rows' last tokens."""
        for row, one in zip(rows, said, strict=True):
            row.row.decide(one)
            if one.signal is not None and math.isnan(one.signal) and not self._warned:
                self._warned = True
                logger.warning(
                    "the stopping policy gave NaN: requests continue. Its weights, or the base's "
                    "hidden states, are broken"
                )

    def tell_end(self, row: ServedRow) -> None:
        """Tells that a row's thinking has ended, unless it has been told."""
        if not row.counted and not row.thinks:
            row.counted = True
            if self._on_end is not None:
                self._on_end(row)

    def shape(self, logits: torch.Tensor, rows: Iterable[tuple[int, ServedRow]]) -> None:
        """Shapes the logits of rows whose thinking has ended; in place.

        A row whose answer is complete gets the token that ends its text, for an engine ends a
        request by nothing else.

        Args:
            logits: of the next tokens, (B, V).
            rows: with their places in the batch.
        """
        shaped: list[tuple[int, StopRow]] = []
        ended: dict[int, int] = {}
        for place, one in rows:
            if one.row.phase is Phase.THINKING:
                continue
            self.tell_end(one)
            shaped.append((place, one.row))
            if one.complete:
                ended[place] = one.admitted.end_id
        if shaped:
            shape_scores(logits, shaped, ended)


def in_json(record: Mapping[str, Any]) -> dict[str, Any]:
    """A `StopRecord`, as a dict, for JSON, which has no NaN and no inf.

    NaN, a step at which the policy gave no probability, becomes None; inf, a price above all that
    it knows, "inf".
    """
    told = dict(record)
    for name in ("probabilities", "prices"):
        told[name] = [None if math.isnan(x) else x for x in told[name]]
    told["prices"] = ["inf" if x == math.inf else x for x in told["prices"]]
    return told
