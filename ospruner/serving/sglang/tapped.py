"""A base of SGLang's own with a policy of queries only beside it.

The base is SGLang's own model. Its EAGLE-3 tap gives what enters layer L-n, which is kept for each
request's last token, by the request's slot: so a recorded graph that is replayed keeps it, too. The
policy's layers are SGLang's own of the base's class, with the numbers of those that they copy: so
their attention reads the base's keys and values, and it is not let to write any. Once requests have
ended a step, they run on these requests, one token each, after the base's forward. Nothing is
computed for all others, and nothing stays from one step to the next: the radix cache, chunked
prefill and retraction are the base's.
"""

import copy
import inspect
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from modeling_ospruner.configuration_ospruner import PRICE_RAMPS, OSPrunerConfig
from modeling_ospruner.modeling_ospruner import check_norm, empty_policy
from ospruner.bases import empty_base

from ..checks import (
    Weights,
    Works,
    base_weights,
    check_policy,
    check_settings,
    quantisation,
    stored_tail,
)

_TAPS = ("set_eagle3_layers_to_capture", "set_dflash_layers_to_capture")  # both count alike
_GIVEN = ("self", "positions", "hidden_states", "forward_batch")  # to a layer


def class_of_base(text: Any) -> Any:
    """SGLang's own model of a base of this configuration, by transformers' name; None for none."""
    from sglang.srt.models.registry import ModelRegistry

    return ModelRegistry.models.get(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[text.model_type])


def why_not(config: OSPrunerConfig, found: Any) -> str | None:
    """Why SGLang's model of a base (None for none) can have no policy beside it; None if it can.

    What its layers are given is seen once it is made (`check_made`).
    """
    text = config.get_text_config()
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[text.model_type]
    if vars(text).get("kv_lora_rank"):
        return f"{name} has compressed (latent) keys and values, which are not read"
    if found is not None and not any(tap in dir(found) for tap in _TAPS):
        return f"{name} has no tap (EAGLE-3's), by which its hidden states would be read"
    policy = empty_policy(config, empty_base(text))
    if policy.points != [text.num_hidden_layers - len(policy.copied)]:
        return f"{name} keeps states in place of keys in some layers, beside which nothing was run"
    if found is None:
        return f"there is no {name}"
    return None


def check_tuning(config: OSPrunerConfig) -> None:
    """Refuses a policy of another kind than SGLang runs."""
    if config.tuning != "queries" or not config.num_policy_layers:
        raise ValueError(
            f"the policy has tuning {config.tuning!r} and {config.num_policy_layers} layers; "
            "inside SGLang policies of tuning 'queries' work, with one layer or more: serve this "
            "one with vLLM (ospruner serve --engine vllm), or train one with --tuning queries"
        )


def check_made(base: nn.Module, layers: Iterable[nn.Module], text: Any) -> None:
    """Refuses what shows once SGLang has made the base.

    Raises:
        ValueError: it sees other tokens than in transformers, as Mistral's with a window, or its
            `layers` are given more than hidden states and the batch, as Gemma 3's are.
    """
    wanted = [vars(one).get("sliding_window") for one in DynamicCache(config=text).layers]
    found: list[Any] = [one for one in base.modules() if type(one).__name__ == "RadixAttention"]
    for part in found:
        before, own = part.sliding_window_size, wanted[part.layer_id]
        seen = None if before < 0 else before + 1  # it counts without the token itself
        if seen != own:
            raise ValueError(
                f"SGLang's {type(base).__name__} looks back over {seen or 'all'} tokens in layer "
                f"{part.layer_id}, transformers' over {own or 'all'}: serve it with vLLM "
                "(ospruner serve --engine vllm)"
            )
    for layer in layers:
        asked = inspect.signature(type(layer).forward).parameters.values()
        needed = {one.name for one in asked if one.default is one.empty and one.name != "kwargs"}
        if beside := sorted(needed.difference(_GIVEN)):
            raise ValueError(
                f"SGLang's {type(layer).__name__} is given {', '.join(beside)}, which a policy's "
                "layers cannot be: serve it with vLLM (ospruner serve --engine vllm)"
            )


class OSPrunerSGLang(nn.Module):
    """What SGLang runs for a policy repository: the base that it pins, its layers and its head."""

    allow_patterns_overrides = ("model.safetensors",)  # of the policy's own repository
    fall_back_to_pt_during_load = False

    def __init__(self, config: OSPrunerConfig, quant_config: Any = None, prefix: str = "") -> None:
        # Imported here, for SGLang loads this file before it knows where it will run.
        from sglang.srt.model_loader.loader import DefaultModelLoader
        from sglang.srt.runtime_context import get_server_args
        from sglang.srt.utils import make_layers

        super().__init__()
        arguments, text = get_server_args(), config.get_text_config()
        found = class_of_base(text)
        check_start(config, arguments, found)
        self._config = config
        self.secondary_weights = [
            DefaultModelLoader.Source(
                config.base_model_name_or_path,
                config.base_revision,
                prefix="base.",
                fall_back_to_pt=False,
            )
        ]
        self.base: Any = found(text)
        first = text.num_hidden_layers - config.num_policy_layers
        layers = self.base.model.layers[first:]
        check_made(self.base, layers, text)
        tap = next(tap for tap in _TAPS if tap in dir(self.base))
        getattr(self.base, tap)([first - 1])
        self.base.capture_aux_hidden_states = False  # they end here, and not in its logits' output
        self.base.model.register_forward_hook(self._tap)
        self.layers = make_layers(
            len(layers),
            lambda idx, prefix: type(layers[idx])(text, layer_id=first + idx, prefix=prefix),
            prefix="layers",
        )
        self.norm = copy.deepcopy(self.base.model.norm)
        for part in self.layers.modules():
            if type(part).__name__ == "RadixAttention":  # the base has written the keys and values
                vars(part)["forward"] = partial(part.forward, save_kv_cache=False)
        outputs = 1 if config.prices is None else 1 + PRICE_RAMPS
        self.head = nn.Linear(text.hidden_size, outputs, dtype=torch.float32)  # H to 1 or 6
        self._tapped = torch.empty(0)  # what enters layer L-n in a forward, (T, H)
        self._entering: torch.Tensor | None = None  # (slots, H)

    def hold(self, num_slots: int) -> None:
        """Makes room for what enters layer L-n, of each slot's last token."""
        weight = self.norm.weight
        self._entering = torch.zeros(
            num_slots, self.head.in_features, dtype=weight.dtype, device=weight.device
        )

    def get_input_embeddings(self) -> nn.Module:
        """The base's."""
        return self.base.get_input_embeddings()

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: Any,
        input_embeds: torch.Tensor | None = None,
    ) -> Any:
        """The base's logits; what entered layer L-n is kept."""
        logits = self.base(input_ids, positions, forward_batch, input_embeds)
        if self._entering is not None:
            entering = self._tapped
            if not forward_batch.forward_mode.is_decode_or_idle():
                starts = forward_batch.extend_start_loc
                entering = entering[starts + forward_batch.extend_seq_lens - 1]
            self._entering[forward_batch.req_pool_indices] = entering
        return logits

    def _tap(self, decoder: nn.Module, given: Any, output: Any) -> Any:
        hidden, entering = output
        [self._tapped] = entering if isinstance(entering, list) else [entering]
        return hidden

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
        return self.head(hidden.float())

    def load_weights(self, weights: Weights) -> None:
        """Takes the policy's tensors, and the base's with the prefix `base.`."""
        own: dict[str, torch.Tensor] = {}
        self.base.load_weights(base_weights(weights, self._config, own))
        theirs = self.base.model.norm.weight
        for place, module in (("head", self.head), ("tail.norm", self.norm)):
            for name, parameter in module.named_parameters():
                parameter.data.copy_(own.pop(f"{place}.{name}"))
        for part in self.layers.modules():  # of which queries alone are loaded
            if type(part).__name__ == "QKVParallelLinear":
                for unread in part.parameters():
                    unread.data.zero_()
        # The copies are filled as the base is: they take the places of its layers meanwhile.
        policy, stored = stored_tail(self._config, own)
        places = self.base.model.layers
        usual = {number: places[number] for number in policy.copied}
        for number, layer in zip(policy.copied, self.layers, strict=True):
            places[number] = layer
        self.base.load_weights(
            (f"model.{policy.name_in_base(name)}", one) for name, one in stored.items()
        )
        for number, layer in usual.items():
            places[number] = layer
        # Never trained: it shows which base the policy was made for.
        where = self._config.base_model_name_or_path
        check_norm(self.norm.weight, theirs, "norm.weight", self._config, where)


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


def check_start(config: OSPrunerConfig, arguments: Any, found: Any) -> None:
    """Refuses a server (SGLang's `ServerArgs`) or a policy that would be wrong.

    `found` is SGLang's model of the base; None for none.

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
    unfit, where = why_not(config, found), arguments.model_path
    check_policy(config, where, "SGLang", unfit, arguments.revision, arguments.download_dir)
    if (stored := quantisation(config)) is not None:
        raise ValueError(
            f"the base {config.base_model_name_or_path!r} is quantised "
            f"({stored.get('quant_method')}); inside SGLang the policy works beside unquantised "
            "weights: serve it with vLLM (ospruner serve --engine vllm)"
        )
