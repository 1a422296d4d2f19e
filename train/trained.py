"""How the policy is computed while it trains: its logits at step ends, as one module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from modeling_ospruner.policy_ospruner import StoppingPolicy

from .fast_tail import step_logits
from .processes import Processes
from .settings import TrainSettings

__all__ = ["TrainedPolicy", "no_denormals"]


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


@contextmanager
def no_denormals() -> Iterator[None]:
    """Counts numbers too small for a float's full precision as 0, on CPUs.

    The gradients of saturated stop probabilities fade through them, and computing on them made a
    training step twice as slow. Threads inherit this from the one that starts them, so begin early.
    """
    for dtype in (np.float32, np.float64):
        np.finfo(dtype)  # NumPy looks at a type when first asked, and would warn
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
