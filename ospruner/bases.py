"""What may be a base, and how its last layers are reached, also where it is quantised or offloaded.

A base qualifies if its decoder keeps L layers in a `ModuleList` and needs token ids for its
embeddings only: `check_decoder` looks at it, `check_tail` tries copies of its last layers.
"""

import copy
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file
from transformers.utils.quantization_config import FineGrainedFP8Config, Mxfp4Config

from modeling_ospruner.configuration_ospruner import position_switch, rotary_settings
from modeling_ospruner.policy_ospruner import (
    LayerKeys,
    Reader,
    StoppingPolicy,
    decoder_layers,
    execution_device,
    is_quantised,
)

_VOCABULARIES = (
    *("tokenizer.json", "tokenizer.model", "spiece.model"),
    *("vocab.json", "vocab.txt", "tekken.json"),
)
_INSTEAD = (
    "A base is a decoder-only language model of transformers whose layers can be run on their own, "
    "such as Qwen2, Llama, Qwen3, GPT-OSS, Phi-3, Gemma 3, OLMo, GLM-4, Mistral"
)


def dtype_on(device: torch.device, where: str, revision: str | None = None) -> str:
    """In what a base is to be loaded that is read on a device: "auto", its own.

    A CPU that computes no bfloat16 takes float32, many times as fast and in twice the memory; a
    quantised base stays as it is.
    """
    if device.type != "cpu" or torch.backends.cpu.get_cpu_capability() != "AVX2":
        return "auto"
    config = AutoConfig.from_pretrained(where, revision=revision)
    return "float32" if vars(config).get("quantization_config") is None else "auto"


def check_decoder(base: PreTrainedModel) -> None:
    """Refuses a base whose last layers, by what is seen of it, cannot be run on their own.

    Raises:
        ValueError: naming the base's class, what it lacks, and what to use.
    """
    if why := _unfit(base):
        raise ValueError(f"{type(base).__name__} cannot be a base: {why}. {_INSTEAD}")


def _unfit(base: PreTrainedModel) -> str | None:
    """Why the last layers of a base cannot be run on their own; None where nothing is seen."""
    config = base.config
    if config.is_encoder_decoder:
        return "it is an encoder-decoder"
    decoder = base.get_decoder()
    layers = dict(decoder.named_children()).get("layers")
    if not isinstance(decoder, PreTrainedModel) or not isinstance(layers, nn.ModuleList):
        return (
            f"its decoder ({type(decoder).__name__}) keeps its layers in no ModuleList named "
            "`layers`"
        )
    total = decoder.config.num_hidden_layers
    if len(layers) != total:
        return f"it has {len(layers)} layers where its configuration says num_hidden_layers={total}"
    own = decoder.get_input_embeddings()
    tables = [
        name
        for name, child in decoder.named_modules()
        if isinstance(child, nn.Embedding) and child is not own
    ]
    if tables:
        return (
            f"beside the token embeddings its decoder looks up {', '.join(tables)}, which the "
            "hidden states of its last layers do not carry"
        )
    if config.get_text_config() is not config:
        return (
            "it wraps a language model, beside parts for other inputs than text. Load that model "
            "alone, from a checkpoint of its own"
        )
    kind, length = position_switch(config) or ("", 0)
    if kind == "longrope" and length < config.max_position_embeddings:
        return (
            f"with rope_type {kind!r} the frequencies of all positions change when a text passes "
            f"{length} tokens (original_max_position_embeddings), and it writes on from other "
            "hidden states than one pass over the whole text gives, from which a policy learns"
        )
    return None


def plain_text_config(base_config: PreTrainedConfig) -> dict[str, Any]:
    """The text part of a base's configuration, without how this copy of it was loaded."""
    literals: dict[str, Any] = base_config.get_text_config().to_dict()
    for name in ("auto_map", "quantization_config"):
        literals.pop(name, None)
    return literals


def input_device(base: PreTrainedModel) -> torch.device:
    """Where the base takes its token ids and masks, and gives its logits."""
    return execution_device(base, base.get_input_embeddings())


def empty_base(config: PreTrainedConfig) -> PreTrainedModel:
    """A base without weights (on the meta device), and unquantised."""
    config = copy.deepcopy(config)
    vars(config).pop("quantization_config", None)
    with torch.device("meta"):
        base: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return base


def refuse_no_tokenizer(base: str, revision: str | None) -> None:
    """Refuses a base without a vocabulary, of which transformers makes an empty tokenizer.

    Raises:
        ValueError: there is none.
    """
    hub: dict[str, Any] = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
    if not any(cached_file(base, name, **hub) for name in _VOCABULARIES):
        raise ValueError(
            f"{base!r} has no tokenizer.json (nor {', '.join(_VOCABULARIES[1:])}): copy it again, "
            "or save its tokenizer there with tokenizer.save_pretrained"
        )


def layers_of_checkpoint(
    base: PreTrainedModel, numbers: Sequence[int], revision: str | None
) -> dict[str, torch.Tensor]:
    """The tensors of the decoder's layers of these numbers and its final norm, unquantised.

    The checkpoint that the base, packed or not, came from is opened once more with everything else
    left on disk; `revision` is its commit, None for a folder.

    Raises:
        ValueError: the checkpoint itself is quantised in a way that cannot be undone.
    """
    where, ways = str(base.name_or_path), {"mxfp4": Mxfp4Config, "fp8": FineGrainedFP8Config}
    config = AutoConfig.from_pretrained(where, revision=revision)
    undoing: dict[str, Any] = {}
    stored = vars(config).get("quantization_config")
    if stored is not None:
        method = stored["quant_method"] if isinstance(stored, dict) else stored.quant_method
        if method not in ways:
            raise ValueError(
                f"the checkpoint of {type(base).__name__} is quantised ({method}) and its layers "
                f"cannot be read unquantised (only {', '.join(ways)} can): make the policy on the "
                "unquantised model; it may then be used on this one"
            )
        undoing["quantization_config"] = ways[method](dequantize=True)
    floats = (p.dtype for p in decoder_layers(base)[-1].parameters() if p.is_floating_point())
    dtype = base.dtype if is_quantised(base) else next(floats, torch.get_default_dtype())
    with tempfile.TemporaryDirectory() as folder:
        opened = type(base).from_pretrained(
            where,
            revision=revision or "main",
            dtype=dtype,
            device_map=_only_layers(base, numbers),
            offload_folder=folder,
            use_safetensors=True,
            **undoing,
        )
        tensors: dict[str, torch.Tensor] = opened.get_decoder().state_dict()
        return {name: tensor for name, tensor in tensors.items() if not tensor.is_meta}


def _only_layers(base: PreTrainedModel, numbers: Sequence[int]) -> dict[str, str]:
    """A device map with some layers and the final norm in memory, and all else on disk."""
    decoder, layers = base.get_decoder(), decoder_layers(base)
    wanted, beside = {layers[i] for i in numbers}, set(decoder.children()) - {layers}
    device_map: dict[str, str] = {}
    for name, module in base.named_modules():
        covered = any(name.startswith(f"{key}.") for key in device_map)
        if covered or module is layers or decoder in module.modules():
            continue
        small = module in beside and not isinstance(module, nn.Embedding)
        device_map[name] = "cpu" if small or module in wanted else "disk"
    return device_map


@torch.no_grad()
def check_tail(base: PreTrainedModel, policy: StoppingPolicy) -> None:
    """Runs tokens through a base in eval mode, and from layer L-n on through its fresh copies.

    At the beginning of a text, across each length that the base's rotary settings name, and at the
    end of its positions.

    Raises:
        ValueError: the two differ, or the copies cannot be run at once, in pieces and padded.
    """
    most = vars(base.config.get_text_config()).get("max_position_embeddings") or _PROBE
    named = [one.get("original_max_position_embeddings") for one in rotary_settings(base.config)]
    starts = {0, most - _PROBE, *(length - _PROBE // 2 for length in named if length)}
    for start in sorted(starts):
        if 0 <= start <= most - _PROBE:
            _check_tail_from(start, base, policy)


def _check_tail_from(start: int, base: PreTrainedModel, policy: StoppingPolicy) -> None:
    """What `check_tail` does, with positions that begin at `start`."""
    assert policy.tail is not None
    decoder, tail, n = base.get_decoder(), policy.tail, len(policy.layers)
    device = input_device(base)
    ids = torch.arange(2 * _PROBE, device=device).view(2, -1) % tail.config.vocab_size
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    positions = start + (mask.cumsum(-1) - 1).clamp(min=0)
    outputs: list[torch.Tensor] = []
    handle = tail.register_forward_hook(lambda _, __, out: outputs.append(out.last_hidden_state))
    try:
        with Reader(base, policy) as reader:
            wanted = decoder(
                input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
            ).last_hidden_state
            hidden, keys = reader.hidden, reader.keys
        policy.outputs(hidden, positions, mask, None, keys)
        cache = policy.new_cache()
        columns = torch.arange(_PROBE, device=device)[None]
        for i, j in ((0, 5), (5, 6), (6, _PROBE)):
            known = [LayerKeys(one.keys[:, :, :j], one.values[:, :, :j]) for one in keys]
            policy.outputs(
                hidden[:, i:j], positions[:, i:j], mask[:, :j], cache, known, columns[:, i:j]
            )
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{type(base).__name__} cannot be a base: its last {n} layers do not run on their own "
            f"({type(error).__name__}: {error})"
        ) from error
    finally:
        handle.remove()
    real = mask.bool()
    wanted = wanted.to(outputs[0].device)[real]
    if not wanted.isfinite().all():
        return  # broken weights tell nothing of the architecture
    for how, found in (("at once", outputs[0]), ("in pieces", torch.cat(outputs[1:], dim=1))):
        share = float((found[real] - wanted).abs().mean() / wanted.abs().mean())
        if not share < _TOLERATED_SHARE.get(wanted.dtype, 0.05):
            raise ValueError(
                f"{type(base).__name__} cannot be a base: its last {n} layers, run on their own "
                f"{how}, give other hidden states than within it (from position {start} on they "
                f"differ by {share:.0%} on average). Its layers need more than the hidden states "
                "that enter them"
            )


_PROBE = 12  # tokens a row
# Rounding in another order stays below (0.05 is for half precision), a missing input lies above.
_TOLERATED_SHARE = {torch.float32: 0.01}
