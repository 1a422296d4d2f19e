"""Loading from two repositories: the policy's own, and the base that it pins."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_utils import load_state_dict
from transformers.utils.hub import cached_file

from .configuration_ospruner import OSPrunerConfig
from .policy_ospruner import StoppingPolicy, decoder_dtype

_WEIGHTS = "model.safetensors"
_BOTH = ("cache_dir", "force_download", "local_files_only", "proxies", "token")
_POLICY_ONLY = ("revision", "subfolder")
_AUTO_ONLY = ("adapter_kwargs", "code_revision", "trust_remote_code", "_from_auto", "_commit_hash")
_SIZES = ("hidden_size", "num_hidden_layers", "vocab_size")


def split_arguments(arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits from_pretrained's keyword arguments: the policy's, and the base's."""
    if arguments.get("base") is not None:
        raise ValueError(
            "base cannot be passed to from_pretrained (the Auto classes copy their arguments, and "
            "would copy the model): write OSPrunerForCausalLM.from_base(base, policy)"
        )
    if arguments.get("output_loading_info"):
        raise ValueError(
            "output_loading_info=True is not supported: a policy file with missing or unknown "
            "tensors is refused with their names; leave it out"
        )
    if arguments.get("use_safetensors") is False:
        raise ValueError(
            "use_safetensors is False, but only safetensors files are read. To use a base stored "
            "otherwise, load it yourself and write OSPrunerForCausalLM.from_base(base, policy)"
        )
    ignored = (*_AUTO_ONLY, "base", "output_loading_info")
    rest = {name: value for name, value in arguments.items() if name not in ignored}
    both = {name: rest.pop(name) for name in _BOTH if name in rest}
    own = {name: rest.pop(name) for name in _POLICY_ONLY if name in rest}
    trust = rest.pop("base_trust_remote_code", False)
    return {**both, **own}, {**both, **rest, "trust_remote_code": trust}


def check_hub_arguments(arguments: dict[str, Any], method: str) -> None:
    """Refuses arguments that do not say where to find a policy.

    Raises:
        TypeError: naming them.
    """
    allowed = sorted((*_BOTH, *_POLICY_ONLY))
    if unknown := sorted(set(arguments) - set(allowed)):
        raise TypeError(
            f"{method} has no {', '.join(unknown)}; besides the policy it takes "
            f"{', '.join(allowed)}. The base is loaded already: its dtype, device and quantisation "
            "stay as they are"
        )


def plain_text_config(base_config: PreTrainedConfig) -> dict[str, Any]:
    """The text part of a base's configuration, without how this copy of it was loaded."""
    literals: dict[str, Any] = base_config.get_text_config().to_dict()
    for name in ("auto_map", "quantization_config"):
        literals.pop(name, None)
    return literals


def check_exchange(current: OSPrunerConfig, other: OSPrunerConfig, path: str) -> None:
    """Refuses a policy that cannot take another's place on the same base.

    Raises:
        ValueError: naming what differs, on both sides.
    """
    names = ("base_model_name_or_path", "base_revision", "reasoning_format")
    differing = [
        f"{name} {vars(other)[name]!r} instead of {vars(current)[name]!r}"
        for name in names
        if vars(other)[name] != vars(current)[name]
    ]
    if differing:
        raise ValueError(
            f"the policy {path!r} was made for another base or format: it has "
            f"{'; '.join(differing)}. Load it as a model of its own: "
            "OSPrunerForCausalLM.from_pretrained(...), or from_base(base, policy)"
        )


def load_parts(
    path: str,
    config: OSPrunerConfig,
    base: PreTrainedModel | None,
    policy_arguments: dict[str, Any],
    base_arguments: dict[str, Any],
) -> tuple[PreTrainedModel, StoppingPolicy, PreTrainedTokenizerBase]:
    """The base, the policy and the tokenizer of a policy repository.

    Raises:
        ValueError: the base does not fit, or the policy's tensors are not those expected.
        OSError: a repository or file is missing.
    """
    hub = {name: policy_arguments[name] for name in _BOTH if name in policy_arguments}
    if base is None:
        where = config.base_model_name_or_path
        pinned = {**hub, "revision": config.base_revision}
        trust = {"trust_remote_code": base_arguments["trust_remote_code"]}
        check_base(config, AutoConfig.from_pretrained(where, **pinned, **trust), where)
        implementation = config._attn_implementation_internal
        if implementation is not None:
            base_arguments.setdefault("attn_implementation", implementation)
        base = AutoModelForCausalLM.from_pretrained(
            where, revision=config.base_revision, **base_arguments
        )
    else:
        check_base(config, base.config, str(base.name_or_path))
    config._attn_implementation = base.config._attn_implementation
    policy = load_policy(path, config, base, policy_arguments)
    # Without the configuration, it would ask on the terminal whether to run the code that runs here.
    tokenizer = AutoTokenizer.from_pretrained(path, config=config, **policy_arguments)
    return base, policy, tokenizer


def check_base(config: OSPrunerConfig, base_config: PreTrainedConfig, where: str) -> None:
    """Refuses a base of other sizes than those that the policy was made for.

    Raises:
        ValueError: naming each size that differs, on both sides.
    """
    wanted, found = config.get_text_config(), base_config.get_text_config()
    differing = [
        f"{name} {getattr(found, name)} where the policy needs {getattr(wanted, name)}"
        for name in _SIZES
        if getattr(found, name) != getattr(wanted, name)
    ]
    if wanted.model_type != found.model_type:
        differing.append(f"model_type {found.model_type} where it needs {wanted.model_type}")
    if differing:
        raise ValueError(
            f"the base {where!r} does not match the policy: it has {'; '.join(differing)}. Load "
            f"the base that the policy was trained for: {config.base_model_name_or_path!r} at "
            f"revision {config.base_revision!r}"
        )


def load_policy(
    path: str,
    config: OSPrunerConfig,
    base: PreTrainedModel,
    policy_arguments: dict[str, Any],
) -> StoppingPolicy:
    """Reads `policy.*` from the repository's safetensors file, and no other file.

    Raises:
        ValueError: tensors are missing, unknown, or of another shape.
        OSError: the file is missing.
    """
    decoder = base.get_decoder()
    policy = StoppingPolicy.empty(decoder.config, type(decoder), config.num_policy_layers)
    tensors = load_state_dict(str(cached_file(path, _WEIGHTS, **policy_arguments)))
    expected = {f"policy.{name}": tensor.shape for name, tensor in policy.state_dict().items()}
    missing = sorted(set(expected) - set(tensors))
    unknown = sorted(set(tensors) - set(expected))
    misshapen = [
        f"{name} {tuple(tensors[name].shape)} instead of {tuple(shape)}"
        for name, shape in expected.items()
        if name in tensors and tensors[name].shape != shape
    ]
    if missing or unknown or misshapen:
        raise ValueError(
            f"{path}/{_WEIGHTS} does not hold this policy's tensors; missing: "
            f"{missing or 'none'}, unknown: {unknown or 'none'}, of another shape: "
            f"{misshapen or 'none'}. Was it saved by a newer version? pip install -U ospruner"
        )
    policy.to_empty(device=base.device)
    if policy.tail is not None:
        torch.nn.Module.to(policy.tail, dtype=decoder_dtype(base))
    policy.load_state_dict({name.removeprefix("policy."): t for name, t in tensors.items()})
    policy.adopt_buffers(base)
    policy.set_trainable(config.tuning)
    return policy.eval()
