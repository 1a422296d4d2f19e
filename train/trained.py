"""What is trained, as one module: the policy's logits at step ends."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from modeling_ospruner.policy_ospruner import StoppingPolicy

from .fast_tail import step_logits
from .processes import Processes
from .settings import TrainSettings

__all__ = ["TrainedPolicy"]


class TrainedPolicy(nn.Module):
    """A policy that is called with the trunk's states and gives its logits at step ends.

    Args:
        policy: the policy.
        settings: how it is computed.
        processes: those that train it.
    """

    def __init__(
        self, policy: StoppingPolicy, settings: TrainSettings, processes: Processes
    ) -> None:
        super().__init__()
        self.policy = policy
        self._autocast = settings.precision == "bfloat16"
        # FSDP2 gathers a layer's weights when the layer is called, which the fast way does not.
        self._fast = not processes.sharded
        if settings.gradient_checkpointing:
            for layer in policy.layers:
                # Inside the call, after the hooks that put back its input and gather its weights.
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The tail's layers."""
        return list(self.policy.layers)

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """The logits (B, T), float32; see `step_logits`."""
        with torch.autocast(hidden.device.type, torch.bfloat16, enabled=self._autocast):
            return step_logits(self.policy, hidden, positions, self._fast)
