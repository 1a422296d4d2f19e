"""What may be a base, and how its last layers are reached, also where it is quantised or offloaded.

Nothing here knows an architecture by name. A base qualifies if its decoder keeps L layers in a
`ModuleList`, needs token ids for its embeddings only, and if copies of its last layers, fed with
what enters them, give what it gives.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils.quantization_config import FineGrainedFP8Config, Mxfp4Config

_INSTEAD = (
    "A base is a decoder-only language model of transformers whose layers can be run on their own, "
    "such as Qwen2, Llama, Qwen3, GPT-OSS, Phi-3, Gemma 3, OLMo, GLM-4, Mistral"
)


def module_layers(decoder: nn.Module) -> nn.ModuleList:
    """The layers of a decoder that `check_decoder` has let pass."""
    layers = decoder.layers
    assert isinstance(layers, nn.ModuleList)
    return layers


def decoder_layers(base: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of a causal LM."""
    return module_layers(base.get_decoder())


def decoder_dtype(base: PreTrainedModel) -> torch.dtype:
    """The dtype in which the base's last layer computes."""
    if is_quantised(base):
        return base.dtype
    for parameter in decoder_layers(base)[-1].parameters():
        if parameter.is_floating_point():
            return parameter.dtype
    return torch.get_default_dtype()


def execution_device(base: PreTrainedModel, module: nn.Module) -> torch.device:
    """Where a module of the base computes.

    accelerate computes what is offloaded to the CPU or to disk on the first device of its map.
    """
    placed: dict[str, Any] = vars(base).get("hf_device_map", {})
    if not placed:
        return next(module.parameters()).device
    name = next(name for name, one in base.named_modules() if one is module)
    keys = [key for key in placed if not key or name == key or name.startswith(f"{key}.")]
    device = placed[max(keys, key=len)]
    if device in ("cpu", "disk"):
        device = next((one for one in placed.values() if one not in ("cpu", "disk")), "cpu")
    return torch.device(device)


def tail_device(base: PreTrainedModel) -> torch.device:
    """Where the base computes its last layer, and the policy all of its own."""
    return execution_device(base, decoder_layers(base)[-1])


def check_decoder(base: PreTrainedModel) -> None:
    """Refuses a base whose last layers cannot be run on their own, by what is seen of it.

    Raises:
        ValueError: naming the base's class, what it lacks, and what to use.
    """
    name, config = type(base).__name__, base.config
    if config.is_encoder_decoder:
        raise ValueError(f"{name} cannot be a base: it is an encoder-decoder. {_INSTEAD}")
    decoder = base.get_decoder()
    layers = dict(decoder.named_children()).get("layers")
    if not isinstance(decoder, PreTrainedModel) or not isinstance(layers, nn.ModuleList):
        raise ValueError(
            f"{name} cannot be a base: its decoder ({type(decoder).__name__}) keeps its layers in "
            f"no ModuleList named `layers`. {_INSTEAD}"
        )
    total = decoder.config.num_hidden_layers
    if len(layers) != total:
        raise ValueError(
            f"{name} cannot be a base: it has {len(layers)} layers where its configuration says "
            f"num_hidden_layers={total}. {_INSTEAD}"
        )
    own = decoder.get_input_embeddings()
    tables = [
        child_name
        for child_name, child in decoder.named_modules()
        if isinstance(child, nn.Embedding) and child is not own
    ]
    if tables:
        raise ValueError(
            f"{name} cannot be a base: beside the token embeddings its decoder looks up "
            f"{', '.join(tables)}, which the hidden states of its last layers do not carry. "
            f"{_INSTEAD}"
        )
    text = config.get_text_config()
    rope = text.rope_parameters if "rope_parameters" in vars(text) else None
    if text is not config and "mrope_section" in (rope or {}):
        raise ValueError(
            f"{name} cannot be a base: it numbers the positions of images along several axes. "
            f"Load its language model alone. {_INSTEAD}"
        )


def is_quantised(base: PreTrainedModel) -> bool:
    """Whether the base's layers hold packed weights."""
    return vars(base).get("hf_quantizer") is not None


def last_layers_of_checkpoint(
    base: PreTrainedModel, num_layers: int, revision: str | None
) -> dict[str, torch.Tensor]:
    """The tensors of the decoder's last layers and final norm, unquantised, from where base came.

    The checkpoint is opened once more with everything else left on disk.

    Args:
        base: a base that holds packed parameters, or none.
        num_layers: n.
        revision: the commit of the checkpoint; None for a folder.

    Raises:
        ValueError: the checkpoint itself is quantised in a way that cannot be undone.
    """
    where = str(base.name_or_path)
    config = AutoConfig.from_pretrained(where, revision=revision)
    arguments: dict[str, Any] = {}
    stored = vars(config).get("quantization_config")
    if stored is not None:
        arguments["quantization_config"] = _undoing(stored, type(base).__name__)
    with tempfile.TemporaryDirectory() as folder:
        opened = type(base).from_pretrained(
            where,
            revision=revision or "main",
            dtype=decoder_dtype(base),
            device_map=_only_last_layers(base, num_layers),
            offload_folder=folder,
            use_safetensors=True,
            **arguments,
        )
        tensors: dict[str, torch.Tensor] = {
            name: tensor
            for name, tensor in opened.get_decoder().state_dict().items()
            if not tensor.is_meta
        }
    return tensors


def _only_last_layers(base: PreTrainedModel, num_layers: int) -> dict[str, str]:
    """A device map with the last layers and the final norm in memory, and all else on disk."""
    decoder, layers = base.get_decoder(), decoder_layers(base)
    last, beside = set(layers[-num_layers:]), set(decoder.children()) - {layers}
    device_map: dict[str, str] = {}
    for name, module in base.named_modules():
        covered = any(name.startswith(f"{key}.") for key in device_map)
        if covered or module is layers or decoder in module.modules():
            continue
        small = module in beside and not isinstance(module, nn.Embedding)
        device_map[name] = "cpu" if small or module in last else "disk"
    return device_map


def _undoing(stored: Any, name: str) -> Any:
    """The quantisation config that dequantises a checkpoint while it is read."""
    method = stored["quant_method"] if isinstance(stored, dict) else stored.quant_method
    ways = {"mxfp4": Mxfp4Config, "fp8": FineGrainedFP8Config}
    if method not in ways:
        raise ValueError(
            f"the checkpoint of {name} is quantised ({method}) and its layers cannot be read "
            f"unquantised (only {', '.join(ways)} can): make the policy on the unquantised model; "
            "it may then be used on this one"
        )
    return ways[method](dequantize=True)


def plain_text_config(base_config: PreTrainedConfig) -> dict[str, Any]:
    """The text part of a base's configuration, without how this copy of it was loaded."""
    literals: dict[str, Any] = base_config.get_text_config().to_dict()
    for name in ("auto_map", "quantization_config"):
        literals.pop(name, None)
    return literals
