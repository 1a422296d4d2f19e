"""What a tail's states tell of the history of answers, for the study `forms.py` alone.

Linear read-outs of the states at step ends, by least squares on training traces. They say how much
of the history a tail knows (R2 on other traces), and can stand in the place of answers that are
tried: then a policy reads what another tail knows of the history, at no trial.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from modeling_ospruner import OSPrunerForCausalLM
from modeling_ospruner.policy_ospruner import StoppingPolicy
from ospruner.eval.table import FloatArray, IntArray
from ospruner.train.tail import step_outputs
from ospruner.train.traces import LabelledTraces
from ospruner.train.trunk.batches import length_batches

__all__ = ["EstimatedTraces", "ReadOuts"]


class EstimatedTraces(LabelledTraces):
    """Labelled traces whose trial answers are not tried: another tail estimates their numbers."""

    estimates: npt.NDArray[np.float32]
    """(N, T, 11)."""

    def trial_numbers(self, rows: IntArray, every: int, max_tokens: int) -> Tensor | None:
        """(B, T, 11), whatever `every` is."""
        steps = int(self.table.num_steps[rows].max())
        return torch.from_numpy(self.estimates[rows, :steps])


@dataclass(frozen=True)
class ReadOuts:
    """Linear read-outs of a policy's states at step ends.

    Attributes:
        model: the policy.
        weights: (H + 1, K), the last row added.
    """

    model: OSPrunerForCausalLM
    weights: FloatArray

    @classmethod
    def fitted(
        cls, model: OSPrunerForCausalLM, traces: LabelledTraces, targets: npt.NDArray[np.float32]
    ) -> ReadOuts:
        """By least squares to targets (N, T, K) at the step ends of N traces."""
        mask = traces.table.mask
        states = at_step_ends(model, traces)[mask]
        weights, *_ = np.linalg.lstsq(with_one(states), targets[mask].astype(np.float64))
        return cls(model, weights.astype(np.float64))

    def said(self, traces: LabelledTraces) -> npt.NDArray[np.float32]:
        """(N, T, K) of the step ends of N traces; 0 on padding."""
        mask = traces.table.mask
        found = np.zeros((*mask.shape, self.weights.shape[1]), dtype=np.float32)
        found[mask] = with_one(at_step_ends(self.model, traces)[mask]) @ self.weights
        return found

    def explained(self, traces: LabelledTraces, targets: npt.NDArray[np.float32]) -> FloatArray:
        """(K,) R2: the share of the targets' variance over step ends that is said."""
        mask = traces.table.mask
        wrong = (self.said(traces)[mask] - targets[mask]).astype(np.float64)
        explained: FloatArray = 1 - np.square(wrong).mean(axis=0) / targets[mask].var(axis=0)
        return explained


def with_one(states: npt.NDArray[np.float32]) -> FloatArray:
    """(M, H + 1) with a column of ones."""
    return np.column_stack([states, np.ones(len(states))]).astype(np.float64)


@torch.no_grad()
def at_step_ends(model: OSPrunerForCausalLM, traces: LabelledTraces) -> npt.NDArray[np.float32]:
    """(N, T, H) what a policy's head reads at the step ends of N traces; 0 on padding."""
    traces.cache_states(model, 0)
    policy: StoppingPolicy = model.policy
    every, max_tokens = model.config.trial_every, model.config.trial_max_tokens
    found = np.zeros((*traces.table.mask.shape, policy.head.in_features), dtype=np.float32)
    read: list[Tensor] = []
    with policy.head.register_forward_pre_hook(lambda _, given: read.append(given[0])):
        for rows in length_batches(traces.token_lengths):
            positions = traces.batch(rows).positions
            numbers = traces.trial_numbers(rows, every, max_tokens)
            step_outputs(policy, traces.states(model, rows), positions, trial_numbers=numbers)
            found[rows, : positions.shape[1]] = read.pop().numpy()
    return found
