"""Captures what enters the policy while a base runs, and runs the policy on it."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .bases_ospruner import decoder_layers
from .policy_ospruner import StoppingPolicy


class TrunkDone(Exception):  # noqa: N818  (it ends a forward early; nothing went wrong)
    """Raised inside a forward once the hidden states that enter the tail are known."""


def hidden_entering(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The hidden states (B, S, H) among a decoder layer's arguments."""
    hidden: torch.Tensor = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    return hidden


class Capture:
    """A context in which the base's forwards feed the policy, lazily.

    Hidden states are kept until a probability is asked for; then the tail runs on all of them at
    once, extending its own cache. Only forwards of the thread that opened the context count.

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
        self._hidden: list[torch.Tensor] = []
        self._positions: list[torch.Tensor] = []
        self._columns = 0
        self._cache = policy.new_cache()

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
        self._hidden.clear()
        self._positions.clear()
        self._cache = None

    def left_pads(self) -> list[int]:
        """How many columns of padding each row began with."""
        last: list[int] = self._positions[-1][:, -1].tolist()
        return [self._columns - 1 - position for position in last]

    @torch.no_grad()
    def probabilities(self) -> torch.Tensor:
        """The stop probability after each row's last token, (B,)."""
        hidden = torch.cat(self._hidden, dim=1)  # (B, S, H)
        self._hidden.clear()
        if self.policy.tail is None:
            return torch.sigmoid(self.policy(hidden[:, -1:])[:, -1])
        positions = torch.cat(self._positions, dim=1).to(hidden.device)  # (B, S)
        self._positions[:] = [positions[:, -1:]]
        pads = self._columns - 1 - positions[:, -1:]  # (B, 1)
        mask = None
        if bool((pads > 0).any()):
            mask = (torch.arange(self._columns, device=hidden.device) >= pads).long()
        logits = self.policy(hidden, positions[:, -hidden.shape[1] :], mask, self._cache)
        return torch.sigmoid(logits[:, -1])

    def _keep_positions(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if threading.get_ident() != self._thread:
            return
        ids = kwargs["input_ids"] if kwargs.get("input_ids") is not None else args[0]
        B, S = ids.shape
        positions = kwargs.get("position_ids")
        if positions is None:
            positions = torch.arange(self._columns, self._columns + S, device=ids.device)[None]
        self._columns += S
        positions = positions.expand(B, S)
        if self.policy.tail is None or not self._hidden:
            self._positions.clear()
        self._positions.append(positions)

    def _keep(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() == self._thread:
            self._hidden.append(hidden_entering(args, kwargs).detach())

    def _keep_last(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if threading.get_ident() == self._thread:
            self._hidden[:] = [output.last_hidden_state[:, -1:].detach()]
