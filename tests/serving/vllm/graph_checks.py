"""What CUDA graphs ask of the model, on a CPU; run by test_plugin.py.

A graph is recorded once for a padded number of tokens and replayed for other batches, on the same
storage, without Python. Here `make_fx` records it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention

from modeling_ospruner import OSPrunerForCausalLM as Policy

from .plugin_checks import TIGHT, Prompts, Texts, check_as_ever, start_policy


class Recorded:
    """A model's forward, recorded for each padded size, then replayed."""

    def __init__(self, forward: Any) -> None:
        self.replays = Counter[int]()  # by size
        self._forward = lambda ids, places: forward(ids, places)  # of no further arguments
        self._graphs: dict[int, tuple[Any, torch.Tensor, torch.Tensor]] = {}
        self._outputs: dict[int, torch.Tensor] = {}

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, *_: Any, **__: Any) -> Any:
        tokens = len(input_ids)
        size = max(8, 1 << (tokens - 1).bit_length())
        context = get_forward_context()
        assert isinstance(context.slot_mapping, dict)
        for name, slots in context.slot_mapping.items():  # as vLLM pads them: nothing is written
            context.slot_mapping[name] = F.pad(slots, (0, size - tokens), value=-1)
        if size not in self._graphs:
            ids, places = (torch.zeros_like(one[:1]).repeat(size) for one in (input_ids, positions))
            self._graphs[size] = (make_fx(self._forward)(ids, places), ids, places)
        graph, ids, places = self._graphs[size]
        for output in self._outputs.values():
            output.fill_(torch.nan)  # what an earlier step gave is gone
        for own, given in ((ids, input_ids), (places, positions)):
            own.zero_()
            own[:tokens] = given
        found = graph(ids, places)
        self._outputs.setdefault(size, torch.empty_like(found)).copy_(found)
        self.replays[size] += 1
        return self._outputs[size][:tokens]


def _record(worker: Any) -> Recorded:
    """Puts a recorded forward in the place of the model's."""
    for layer in worker.model_runner.compilation_config.static_forward_context.values():
        if isinstance(layer, Attention):
            layer.use_direct_call = False  # an operator that reads the batch, as on GPUs
    served: Any = worker.model_runner.model
    recorded = vars(served)["forward"] = Recorded(served.forward)
    return recorded


def test_the_forward_is_recorded_once_and_replayed(
    plain: Texts, model: Policy, mixed: Prompts
) -> None:
    served = start_policy(model.config._name_or_path, **TIGHT)
    recorded: Recorded = served.collective_rpc(_record)[0]
    assert check_as_ever(served, model, mixed, plain)["policy"] > 0
    print(f"replays by padded size: {recorded.replays}")
    assert 1 < len(recorded.replays) <= 5
    assert sum(recorded.replays.values()) > 100
