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


def optimizer_of(policy: StoppingPolicy, config: StopConfig) -> torch.optim.AdamW:
    """AdamW over what a policy trains; its head has a learning rate of its own.

    (transformers' own has one rate, and leaves biases and norms out of the weight decay.)
    """
    head = [p for p in policy.head.parameters() if p.requires_grad]
    layers = [p for p in policy.layers.parameters() if p.requires_grad]
    rate = config.learning_rate
    groups: list[dict[str, Any]] = [{"params": head, "lr": config.head_learning_rate or rate}]
    if layers:
        groups.append({"params": layers, "lr": rate})
    return torch.optim.AdamW(
        groups,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        weight_decay=config.weight_decay,
        fused=True,
    )


def average_weights(optimizer: torch.optim.Optimizer, taken: int) -> None:
    """Takes the weights into their mean, in which so many are already.

    It stands in the optimiser's state: so checkpoints hold it, and nothing else needs to be kept.
    """
    parameters = _parameters(optimizer)
    if not taken:
        for p in parameters:
            optimizer.state[p]["average"] = p.detach().clone()
        return
    means = [optimizer.state[p]["average"] for p in parameters]
    get_swa_multi_avg_fn()(means, [p.detach() for p in parameters], taken)


@torch.no_grad()
def take_average(optimizer: torch.optim.Optimizer) -> None:
    """Makes the mean, where there is one, the weights."""
    for p in _parameters(optimizer):
        mean = optimizer.state[p].pop("average", None)
        if mean is not None:
            p.copy_(mean)


def all_finite(optimizer: torch.optim.Optimizer) -> bool:
    """Whether gradients and weights are finite, and their squares: one fused pass over both."""
    parameters = _parameters(optimizer)
    gradients = [p.grad for p in parameters if p.grad is not None]
    return math.isfinite(float(get_total_norm([*gradients, *parameters])))


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
