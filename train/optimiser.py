"""AdamW over what a policy trains, the mean of its last weights, and whether all is finite."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim.swa_utils import get_swa_multi_avg_fn

from modeling_ospruner.policy_ospruner import StoppingPolicy

from .config import StopConfig

__all__ = ["average_weights", "not_finite", "optimizer_of", "take_average"]


def optimizer_of(policy: StoppingPolicy, config: StopConfig) -> torch.optim.AdamW:
    """AdamW over what a policy trains; its head has a learning rate of its own.

    (transformers' own has one rate, and leaves biases and norms out of the weight decay.)
    """
    rate = config.learning_rate
    head = {id(p) for p in policy.head.parameters()}
    trained = [p for p in policy.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {
            "params": [p for p in trained if id(p) in head],
            "lr": config.head_learning_rate or rate,
        },
        {"params": [p for p in trained if id(p) not in head], "lr": rate},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        weight_decay=config.weight_decay,
        fused=True,
    )


def average_weights(optimizer: torch.optim.Optimizer, taken: int) -> None:
    """Takes the weights into their mean, which stands in the optimiser's state.

    So checkpoints hold it, and nothing else needs to be kept.

    Args:
        optimizer: over the weights.
        taken: how many are in the mean already.
    """
    parameters = _parameters(optimizer)
    states = [optimizer.state[p] for p in parameters]
    if not taken:
        for state, p in zip(states, parameters, strict=True):
            state["average"] = p.detach().clone()
        return
    means = [state["average"] for state in states]
    get_swa_multi_avg_fn()(means, [p.detach() for p in parameters], taken)


@torch.no_grad()
def take_average(optimizer: torch.optim.Optimizer) -> None:
    """Makes the mean, where there is one, the weights."""
    for p in _parameters(optimizer):
        mean = optimizer.state[p].pop("average", None)
        if mean is not None:
            p.copy_(mean)


def not_finite(policy: StoppingPolicy, optimizer: torch.optim.Optimizer) -> str:
    """Says what of gradients and weights is not finite after a step, "" where all is.

    One fused pass over both, and one number that is waited for.
    """
    parameters = _parameters(optimizer)
    gradients = [p.grad for p in parameters if p.grad is not None]
    if math.isfinite(float(get_total_norm([*gradients, *parameters]))):
        return ""
    largest = math.sqrt(torch.finfo(torch.float32).max)  # larger squares are infinite
    bad = [
        f"{what} of {name}"
        for name, p in policy.named_parameters()
        for what, value in (("gradient", p.grad), ("weights", p.detach()))
        if p.requires_grad and value is not None and not float(value.abs().max()) < largest
    ] or ["gradients and weights together"]
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    return f"not finite, or too large to be squared: {', '.join(bad[:3])}{more}"


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
