"""What a policy's head says at the step ends of labelled traces: one causal pass a trace."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from datasets import Dataset
from torch import Tensor

from ospruner.eval.measured import Predicted as Predicted
from ospruner.progress import Progress, silent

from .batches import length_batches
from .states import States
from .tail import step_outputs
from .traces import LabelledTraces


def predict_outputs(
    model: Any,
    dataset: Dataset | LabelledTraces,
    progress: Progress = silent,
) -> Predicted:
    """What a policy says at the step ends of labelled traces.

    Args:
        model: base and policy: `OSPrunerForCausalLM`, or a `Verifier`.
        dataset: N labelled traces of up to T steps, of this base. `LabelledTraces` keep the
            trunk's states, of 2 GiB at most, for the next policy on the same base.
        progress: called with phase "trunk" while they are computed.

    Raises:
        ValueError: a trace is longer than the base's positions.
    """
    traces = LabelledTraces.from_dataset(dataset)
    traces.refuse_beyond_positions(model.base)
    if isinstance(dataset, LabelledTraces):
        traces.cache_states(model, 2**31, progress)
    outputs = head_outputs(partial(step_outputs, model.policy), model, traces)
    return Predicted(outputs, traces.table.mask, model.config.prices, model.config.price)


@torch.no_grad()
def head_outputs(
    outputs_of: Callable[[States, Tensor], Tensor],
    model: Any,
    traces: LabelledTraces,
    rank: int = 0,
    processes: int = 1,
) -> npt.NDArray[np.float32]:
    """(N, T, K) of the head, 0 on padding and on the traces of other processes.

    Args:
        outputs_of: (B, T, K) from the trunk's states and positions (B, T).
        model: whose trunk.
        traces: N labelled traces.
        rank: of this process among those that share the work.
        processes: how many there are.
    """
    width = model.policy.head.out_features
    out = np.zeros((*traces.table.mask.shape, width), dtype=np.float32)
    for rows in length_batches(traces.token_lengths)[rank::processes]:
        batch, states = traces.batch(rows), traces.states(model, rows)
        said = outputs_of(states, batch.positions.to(states.device)).float().cpu()  # (B, T, K)
        out[rows, : said.shape[1]] = said.masked_fill(~batch.mask[..., None], 0.0).numpy()
    return out
