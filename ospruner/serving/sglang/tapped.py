"""A base of SGLang's own with a policy of queries only beside it.

The base is SGLang's own model. Its EAGLE-3 tap gives what enters layer L-n, which is kept for each
request's last token, by the request's slot: so a recorded graph that is replayed keeps it, too. The
policy's layers are SGLang's own of the base's class, with the numbers of those that they copy: so
their attention reads the base's keys and values, and it is not let to write any. Once requests have
ended a step, they run on these requests, one token each, after the base's forward. Nothing is
computed for all others, and nothing stays from one step to the next: the radix cache, chunked
prefill and retraction are the base's.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch
from torch import nn

from modeling_ospruner.configuration_ospruner import PRICE_RAMPS, OSPrunerConfig
from modeling_ospruner.modeling_ospruner import check_norm

from ..checks import (
    Weights,
    Works,
    check_policy,
    check_settings,
    merge_adapters,
    quantisation,
)
from .custom_params import check_tuning

BASES = {  # by model_type: the module of SGLang, and the class in it
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
}
_FUSED = {  # what transformers keeps apart and SGLang together, and as which part of it
    "q_proj": ("qkv_proj", "q"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}

_OF_KEYS = ("k_proj", "v_proj", "k_norm")  # of merged adapters; the base writes the keys


class OSPrunerSGLang(nn.Module):
    """What SGLang runs for a policy repository: the base that it pins, its layers and its head."""

    allow_patterns_overrides = ("model.safetensors",)  # of the policy's own repository
    fall_back_to_pt_during_load = False

    def __init__(self, config: OSPrunerConfig, quant_config: Any = None, prefix: str = "") -> None:
        # Imported here, for SGLang loads this file before it knows where it will run.
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.model_loader.loader import DefaultModelLoader
        from sglang.srt.runtime_context import get_server_args
        from sglang.srt.utils import make_layers

        super().__init__()
        arguments = get_server_args()
        check_start(config, arguments)
        self._config = config
        self.secondary_weights = [
            DefaultModelLoader.Source(
                config.base_model_name_or_path,
                config.base_revision,
                prefix="base.",
                fall_back_to_pt=False,
            )
        ]
        text: Any = config.get_text_config()
        module, name = BASES[text.model_type]
        found = importlib.import_module(f"sglang.srt.models.{module}")
        self.base: Any = getattr(found, name)(text)
        total, n = text.num_hidden_layers, config.num_policy_layers
        self.base.set_eagle3_layers_to_capture([total - n - 1])
        layer = type(self.base.model.layers[-1])
        self.layers = make_layers(
            n,
            lambda idx, prefix: layer(text, layer_id=total - n + idx, prefix=prefix),
            prefix="layers",
        )
        self.norm = type(self.base.model.norm)(text.hidden_size, eps=text.rms_norm_eps)
        for part in self.layers.modules():
            if isinstance(part, RadixAttention):  # the base has written the keys and values
                vars(part)["forward"] = partial(part.forward, save_kv_cache=False)
        outputs = 1 if config.prices is None else 1 + PRICE_RAMPS
        self.head = nn.Linear(text.hidden_size, outputs, dtype=torch.float32)  # H to 1 or 6
        self._entering: torch.Tensor | None = None  # (slots, H)

    def hold(self, num_slots: int) -> None:
        """Makes room for what enters layer L-n, of each slot's last token."""
        weight = self.norm.weight
        self._entering = torch.zeros(
            num_slots, self.head.in_features, dtype=weight.dtype, device=weight.device
        )

    def get_input_embeddings(self) -> nn.Module:
        """The base's."""
        found: nn.Module = self.base.get_input_embeddings()
        return found

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: Any,
        input_embeds: torch.Tensor | None = None,
    ) -> Any:
        """The base's logits; what entered layer L-n is kept."""
        hidden, [entering] = self.base.model(input_ids, positions, forward_batch, input_embeds)
        if self._entering is not None:
            if not forward_batch.forward_mode.is_decode_or_idle():
                starts = forward_batch.extend_start_loc
                entering = entering[starts + forward_batch.extend_seq_lens - 1]
            self._entering[forward_batch.req_pool_indices] = entering
        return self.base.logits_processor(input_ids, hidden, self.base.lm_head, forward_batch)

    @torch.no_grad()
    def ask(self, backend: Any, slots: list[int], lengths: list[int]) -> torch.Tensor:
        """What the head says of the last tokens of requests, (K, 1 or 6) float32.

        The backend is SGLang's attention, whose tables know the K slots' keys and values; the
        lengths of texts count these tokens.
        """
        from sglang.srt.layers.layer_boundary.residual import batch as residual_batch
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        assert self._entering is not None
        known = torch.tensor([slots, lengths])
        here, ends = known.to(self._entering.device)
        nowhere = torch.zeros_like(here)
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=len(slots),
            input_ids=nowhere,
            req_pool_indices=here,
            seq_lens=ends,
            out_cache_loc=nowhere,
            seq_lens_sum=sum(lengths),
            seq_lens_cpu=known[1],
            positions=ends - 1,
        )
        with forward_context(ForwardContext(attn_backend=backend), forward_batch=batch):
            backend.init_forward_metadata(batch)
            residual_batch.start(batch)
            hidden = self._entering[here]
            for layer in self.layers:
                hidden = layer(batch.positions, hidden, batch)
            hidden = residual_batch.final_norm(hidden, batch, self.norm)
        said: torch.Tensor = self.head(hidden.float())
        return said

    def load_weights(self, weights: Weights) -> None:
        """Takes the policy's tensors, and the base's with the prefix `base.`."""
        self.base.load_weights(self._own(merge_adapters(weights, self._config)))
        own, theirs = self.norm.weight, self.base.model.norm.weight
        # Never trained: it shows which base the policy was made for.
        where = self._config.base_model_name_or_path
        check_norm(own, theirs, "norm.weight", self._config, where)

    def _own(self, weights: Weights) -> Weights:
        """Takes the policy's tensors, and gives the base's."""
        from sglang.srt.model_loader.weight_utils import default_weight_loader

        parameters = dict(self.named_parameters())
        for part in self.layers.modules():  # of which queries alone are loaded
            if type(part).__name__ == "QKVParallelLinear":
                for unread in part.parameters():
                    unread.data.zero_()
        for name, tensor in weights:
            if name.startswith("base."):
                yield name.removeprefix("base."), tensor
                continue
            name = name.removeprefix("policy.").removeprefix("tail.")
            *path, module, kind = name.split(".")
            if module in _OF_KEYS:
                continue
            fused, *shard = _FUSED.get(module, (module,))
            parameter: Any = parameters[".".join([*path, fused, kind])]
            getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor, *shard)


_WORKS: Works = {
    "speculative_algorithm": ((None,), "leave --speculative-algorithm out"),
    "pp_size": ((1,), "use --tp-size"),
    "enable_dp_attention": ((False,), "leave --enable-dp-attention out"),
    "attn_dp_size": ((1,), "use --tp-size, or --dp-size for replicas"),
    "attn_cp_size": ((1,), "use --tp-size"),
    "dcp_size": ((1,), "use --tp-size"),
    "kv_cache_dtype": (("auto", "float32", "bfloat16", "float16"), "leave --kv-cache-dtype out"),
    "quantization": ((None,), "leave --quantization out"),
    "enable_lora": ((None, False), "leave --enable-lora out"),
    "lora_paths": ((None, []), "leave --lora-paths out"),
    "disaggregation_mode": (("null",), "leave --disaggregation-mode out"),
    "enable_pdmux": ((False,), "leave --enable-pdmux out"),
    "enable_two_batch_overlap": ((False,), "leave --enable-two-batch-overlap out"),
    "enable_hisparse": ((False,), "leave --enable-hisparse out"),
    "dllm_algorithm": ((None,), "leave --dllm-algorithm out"),
}


def check_start(config: OSPrunerConfig, arguments: Any) -> None:
    """Refuses a server (SGLang's `ServerArgs`) or a policy that would be wrong, or is untried.

    Raises:
        ValueError: naming what was asked for and what to do; or see `check_policy`.
        OSError: the base or the policy's file is not found.
    """
    check_settings(arguments, _WORKS, "SGLang")
    if arguments.device != "cpu" and not arguments.disable_prefill_cuda_graph:
        raise ValueError(
            "disable_prefill_cuda_graph is False, and in a recorded prefill the policy cannot tell "
            "where requests end: start with --disable-prefill-cuda-graph (`ospruner serve` does)"
        )
    check_tuning(config)
    fits = config.get_text_config().model_type in BASES
    unfit = None if fits else f"the policy works with {', '.join(BASES)}"
    check_policy(
        config, arguments.model_path, "SGLang", unfit, arguments.revision, arguments.download_dir
    )
    if (stored := quantisation(config)) is not None:
        raise ValueError(
            f"the base {config.base_model_name_or_path!r} is quantised "
            f"({stored.get('quant_method')}); inside SGLang the policy works beside unquantised "
            "weights: serve it with vLLM (ospruner serve --engine vllm)"
        )
