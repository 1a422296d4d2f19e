"""Captures what enters the policy while a base runs, and runs the policy on it."""

from __future__ import annotations

import threading
from collections.abc import Collection
from types import TracebackType
from typing import Any

import torch
from torch import nn
from transformers import Cache, PreTrainedModel

from .bases_ospruner import decoder_layers
from .policy_ospruner import StoppingPolicy

_MOST_WAITING = 1024  # columns; a row that lags more is taken in unasked, to free their memory


class TrunkDone(Exception):  # noqa: N818  (it ends a forward early; nothing went wrong)
    """Raised inside a forward once the hidden states that enter the tail are known."""


def hidden_entering(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The hidden states (B, S, H) among a decoder layer's arguments."""
    hidden: torch.Tensor = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    return hidden


class _Row:
    """What the policy has seen of one row.

    Attributes:
        start: the column of the row's first token; padding stands before it.
        seen: the columns, padding included, that are in `cache`.
        cache: the policy's.
        probability: after the last column seen.
    """

    def __init__(self, start: int, cache: Cache | None) -> None:
        self.start = start
        self.seen = start
        self.cache = cache
        self.probability = float("nan")


class Capture:
    """A context in which the base's forwards feed the policy, lazily.

    Hidden states are kept until a row's probability is asked for. Then the tail runs on all that
    is new in that row at once, extending the row's own cache, so that a row costs what it costs
    alone, whatever stands beside it. In the tail's last layer all tokens leave keys and values,
    but only the last one goes on through the MLP: no other is looked at, then or later. Only
    forwards of the thread that opened the context count.

    Args:
        base: the causal LM.
        policy: its policy.
    """

    def __init__(self, base: PreTrainedModel, policy: StoppingPolicy) -> None:
        self.policy = policy
        self._base = base
        self._decoder = base.get_decoder()
        self._thread = threading.get_ident()
        self._handles: list[Any] = []
        # Hidden states (B, S, H) by their first column, in order; for n = 0 the last column only.
        self._chunks: list[tuple[int, torch.Tensor]] = []
        self._columns = 0  # of the batch so far, padding included
        self._last_positions = torch.empty(0, 1)  # (B, 1)
        self._rows: dict[int, _Row] = {}
        self._wanted: Collection[int] | None = None
        self._running = False

    def __enter__(self) -> Capture:
        decoder = self._decoder
        self._handles.append(
            decoder.register_forward_pre_hook(self._keep_positions, with_kwargs=True)
        )
        if self.policy.tail is None:
            self._handles.append(decoder.register_forward_hook(self._keep_last))
        else:
            layer = decoder_layers(self._base)[-len(self.policy.layers)]
            self._handles.append(layer.register_forward_pre_hook(self._keep, with_kwargs=True))
            mlp = dict(self.policy.layers[-1].named_children()).get("mlp")
            if mlp is not None:
                self._handles.append(
                    mlp.register_forward_pre_hook(self._last_only, with_kwargs=True)
                )
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stops capturing and forgets everything."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._chunks.clear()
        self._rows.clear()

    def only(self, rows: Collection[int]) -> None:
        """Says which rows may still be asked for: what no other needs is forgotten."""
        self._wanted = rows
        for row in self._rows.keys() - set(rows):
            del self._rows[row]

    @torch.no_grad()
    def probability(self, row: int) -> float:
        """The stop probability after a row's last token."""
        if self.policy.tail is None:
            logits = self.policy(self._chunks[-1][1][row : row + 1])  # (1, 1)
            return float(torch.sigmoid(logits[0, -1]))
        if not self._rows:
            starts = (self._columns - 1 - self._last_positions[:, 0]).tolist()
            wanted = range(len(starts)) if self._wanted is None else self._wanted
            self._rows = {i: _Row(starts[i], self.policy.new_cache()) for i in wanted}
        for i, state in self._rows.items():
            waiting = self._columns - state.seen
            if waiting > (0 if i == row else _MOST_WAITING):
                self._take_in(i, state)
        needed = min(state.seen for state in self._rows.values())
        while self._chunks and self._chunks[0][0] + self._chunks[0][1].shape[1] <= needed:
            del self._chunks[0]
        return self._rows[row].probability

    def _take_in(self, row: int, state: _Row) -> None:
        """Runs the tail on the columns of a row that it has not seen."""
        parts = [
            chunk[row, max(0, state.seen - first) :]
            for first, chunk in self._chunks
            if first + chunk.shape[1] > state.seen
        ]
        hidden = torch.cat(parts)[None]  # (1, S, H)
        begin, end = state.seen - state.start, self._columns - state.start
        positions = torch.arange(begin, end, device=hidden.device)[None]
        self._running = True
        try:
            logits = self.policy(hidden, positions, None, state.cache)  # (1, S)
        finally:
            self._running = False
        state.seen = self._columns
        state.probability = float(torch.sigmoid(logits[0, -1]))

    def _keep_positions(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if threading.get_ident() != self._thread:
            return
        ids = kwargs["input_ids"] if kwargs.get("input_ids") is not None else args[0]
        B, S = ids.shape
        self._columns += S
        positions = kwargs.get("position_ids")
        if positions is None:
            self._last_positions = torch.full((B, 1), self._columns - 1, device=ids.device)
        else:
            self._last_positions = positions[:, -1:].expand(B, 1)

    def _keep(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() == self._thread:
            hidden = hidden_entering(args, kwargs).detach()
            self._chunks.append((self._columns - hidden.shape[1], hidden))

    def _keep_last(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if threading.get_ident() == self._thread:
            hidden = output.last_hidden_state[:, -1:].detach()
            self._chunks[:] = [(self._columns - 1, hidden)]

    def _last_only(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Leaves an MLP (1, 1, H) of (1, S, H); its output is then added to every position."""
        if not self._running or threading.get_ident() != self._thread:
            return None
        last = hidden_entering(args, kwargs)[:, -1:]
        if "hidden_states" in kwargs:
            return args, {**kwargs, "hidden_states": last}
        return (last, *args[1:]), kwargs
