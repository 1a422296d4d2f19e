"""LoRA instead of copies: a tail of the base's own modules with small adapters of peft beside them.

The tail has layers of its own, but what they are made of (projections, norms, experts) are the
base's modules themselves. An adapter takes the place of a projection in the tail only, so that the
base computes what it always did, also in other threads at the same time.
"""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from .bases_ospruner import decoder_layers, module_layers

_PEFT_NEEDED = (
    "tuning 'lora' needs the package peft, which is not installed: pip install peft (or use a "
    "policy of another tuning)"
)


def share_modules(tail: PreTrainedModel, base: PreTrainedModel) -> None:
    """Puts the base's own modules and parameters in the place of the tail's.

    Args:
        tail: an empty tail of the base's last layers.
        base: the causal LM.
    """
    decoder, layers = base.get_decoder(), module_layers(tail)
    for own, theirs in zip(layers, decoder_layers(base)[-len(layers) :], strict=True):
        _share(own, theirs)
    for name in [name for name, _ in tail.named_children()]:
        if name != "layers":
            setattr(tail, name, decoder.get_submodule(name))


def _share(own: nn.Module, theirs: nn.Module) -> None:
    for name, parameter in theirs.named_parameters(recurse=False):
        own.register_parameter(name, parameter)
    for name, buffer in theirs.named_buffers(recurse=False):
        own.register_buffer(name, buffer, name not in theirs._non_persistent_buffers_set)
    for name, child in theirs.named_children():
        if next(child.children(), None) is None:
            setattr(own, name, child)
        else:
            _share(own.get_submodule(name), child)


def add_adapters(tail: PreTrainedModel, rank: int) -> None:
    """Puts an adapter beside every linear projection of the tail's layers; at first it adds 0.

    W x becomes W x + 2 B A x with A (rank, in) drawn and B (out, rank) zero (LoRA's alpha is twice
    the rank). Adapters are in float32 whatever the base's dtype.

    Args:
        tail: the tail; also one without weights (on the meta device).
        rank: of the adapters.

    Raises:
        ImportError: peft is not installed.
        ValueError: the tail's layers have no linear projection.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ImportError(_PEFT_NEEDED) from error
    layers = module_layers(tail)
    linear = [name for name, part in layers.named_modules() if isinstance(part, nn.Linear)]
    if not linear:
        raise ValueError(
            f"tuning is 'lora', but {type(tail).__name__}'s layers have no linear projections; use "
            "tuning='layers'"
        )
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=linear)
    inject_adapter_in_model(config, layers)
    for name, parameter in layers.named_parameters():
        if is_adapter(name):
            parameter.data = parameter.data.float()


def is_adapter(name: str) -> bool:
    """Whether a tensor of a policy belongs to an adapter."""
    return ".lora_" in name
