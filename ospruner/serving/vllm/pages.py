"""A policy of queries only inside vLLM: it reads the base's pages where steps end.

Its layers are vLLM's own of the base's class. Their attention has no pages: it shares those of the
base's layer of the same number (`kv_sharing_target_layer_name`), which vLLM has filled by the time
that a token is sampled. vLLM prepares their attention at each step, and that only notes where each
row's pages are; once rows have ended a step, the layers run on these rows, one token each, after
the base's forward and outside of its graphs. Nothing is computed for all other rows, and nothing
stays from one step to the next: chunked prefill, prefix caching and preemption are the base's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.v1.attention.backend import CommonAttentionMetadata, subclass_attention_backend


def _attention_of(layer: nn.Module) -> Attention:
    [found] = [one for one in layer.modules() if isinstance(one, Attention)]
    return found


def share_pages(layer: nn.Module, base_layer: nn.Module) -> Any:
    """Lets a layer of the tail attend to the pages of the base's of the same number.

    It gives the class of which vLLM makes what prepares the layer's attention, and which notes it.
    """
    own, theirs = _attention_of(layer), _attention_of(base_layer)
    usual: Any = own.attn_backend.get_builder_cls()

    class Builder(usual):
        """Notes the batch in place of preparing attention for all of its rows."""

        supports_update_block_table = False  # of what it did not prepare
        made: Any = None  # the one of these that vLLM has made
        batch: CommonAttentionMetadata | None = None  # of this step, with its block table

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            Builder.made = self

        def build(
            self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
        ) -> Any:
            Builder.batch = common_attn_metadata
            return common_attn_metadata

        def build_for_rows(self, rows: CommonAttentionMetadata) -> Any:
            return super().build(0, rows)

    # By its own name, so that each layer is an attention group of its own.
    name = f"OSPruner{own.layer_name.replace('.', '_')}"
    own.attn_backend = subclass_attention_backend(name, own.attn_backend, Builder)
    for one in (own, own.impl):
        one.kv_sharing_target_layer_name = theirs.layer_name
    return Builder


def most_tokens(vllm_config: VllmConfig) -> int:
    """Of a step, or of a graph, up to whose size a batch is padded."""
    return max(
        vllm_config.scheduler_config.max_num_batched_tokens,
        vllm_config.compilation_config.max_cudagraph_capture_size or 0,
    )


class Pages:
    """Asks a tail of queries only, copies of the base's last layers, about rows of the batch."""

    def __init__(
        self, vllm_config: VllmConfig, tail: Any, base_layers: Sequence[nn.Module], columns: int
    ) -> None:
        self._config = vllm_config
        self._tail = tail
        self._layers = {
            _attention_of(own).layer_name: share_pages(own, theirs)
            for own, theirs in zip(tail.layers, base_layers, strict=True)
        }
        # Filled by copying, which a graph records: what a replay computes lands here, too.
        dtype = vllm_config.model_config.dtype
        self._entering = torch.zeros(most_tokens(vllm_config), columns, dtype=dtype)  # (T, R)
        for module in tail.modules():
            if isinstance(module, QKVParallelLinear):  # of which queries alone are loaded
                for parameter in module.parameters():
                    parameter.data.zero_()

    def keep(self, entering: torch.Tensor) -> None:
        """Keeps what a tail reads (`StoppingPolicy.outputs`), (T, R), until rows are asked."""
        self._entering[: entering.shape[0]].copy_(entering)

    def ends(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where rows end, whose places in vLLM's batch are (K,) int64.

        It gives their lengths, (K,) int32, and the places of their last tokens in the step, (K,).
        """
        batch = next(iter(self._layers.values())).batch
        assert batch is not None
        return batch.seq_lens[rows], batch.query_start_loc[1:][rows] - 1

    def hidden(
        self,
        rows: torch.Tensor,  # the places of their rows in the batch, (K,) int64
        lengths: torch.Tensor,  # of the texts that end with them, (K,) int32
        places: torch.Tensor,  # theirs in the step, (K,)
    ) -> torch.Tensor:
        """What the head reads of tokens of vLLM's batch, (K, H), after the final norm."""
        attention = {}
        starts, device = torch.arange(len(rows) + 1, dtype=torch.int32), lengths.device
        for name, noted in self._layers.items():
            batch = noted.batch
            assert batch is not None
            asked = CommonAttentionMetadata(
                query_start_loc=starts.to(device),
                query_start_loc_cpu=starts,
                seq_lens=lengths,
                num_reqs=len(rows),
                num_actual_tokens=len(rows),
                max_query_len=1,
                max_seq_len=batch.max_seq_len,
                block_table_tensor=batch.block_table_tensor[rows],
                slot_mapping=torch.full((len(rows),), -1, device=device),  # nothing is written
            )
            attention[name] = noted.made.build_for_rows(asked)
        entering = self._entering[places.long()].split(self._tail.config.hidden_size, dim=1)
        with set_forward_context(
            attention, self._config, num_tokens=len(rows), slot_mapping={}, skip_compiled=True
        ):
            # Experts find themselves by counting; those of the base come first.
            context = get_forward_context()
            named = context.all_moe_layers or []
            own = [i for i, one in enumerate(named) if one.startswith("tail.")]
            context.moe_layer_index = own[0] if own else 0
            hidden: torch.Tensor = self._tail.forward(lengths.long() - 1, entering[0], entering[1:])
        return hidden
