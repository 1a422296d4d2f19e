"""Fresh policies: copies of a base's last layers with an untrained head, and adapters beside them.

Of a base that is quantised or offloaded, the copies are read unquantised from the checkpoint that
it came from.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from modeling_ospruner.configuration_ospruner import VERSION, OSPrunerConfig, PriceRange
from modeling_ospruner.formats_ospruner import ReasoningFormat
from modeling_ospruner.modeling_ospruner import OSPrunerForCausalLM, fingerprint_of
from modeling_ospruner.policy_ospruner import ADAPTER_SCALE, StoppingPolicy, is_quantised
from ospruner.bases import check_decoder, check_tail, layers_of_checkpoint, plain_text_config
from ospruner.formats import check_blanks, guess, prepare

INIT_BIAS = {"fixed": -2.0, "price": -2.5}
"""The heads' first bias; that of "price" is the logit at the price 0."""
_INIT_RISE = 0.6  # of a price head's logit from one place to the next


def untrained(
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    num_policy_layers: int = 2,
    tuning: str = "queries",
    init_bias: float | None = None,
    reasoning_format: ReasoningFormat | None = None,
    price_range: Sequence[float] | None = None,
    **fields: Any,
) -> OSPrunerForCausalLM:
    """A fresh, untrained policy on a loaded base, which is shared and frozen.

    Args:
        base: the causal LM.
        tokenizer: the base's; saved with the policy.
        num_policy_layers: n of the paper; 0 trains a head alone.
        tuning: "queries", or "layers" (the paper's).
        init_bias: the head's; mild, for saturated logits have no gradient. None for `INIT_BIAS`.
        reasoning_format: None guesses it from the tokenizer.
        price_range: low and high of `PriceRange`, for the head "price"; None for the other.
        fields: others of `OSPrunerConfig`: `adapter_rank`, and the base that it pins, by
            default where `base` came from.

    Raises:
        ValueError: the tokenizer has no thinking end marker, a field is out of range, or the
            base's layers cannot be copied.
    """
    chosen, revision = reasoning_format or guess(tokenizer), fields.get("base_revision")
    check_blanks(tokenizer)
    own: dict[str, Any] = {
        "base_model_name_or_path": str(base.name_or_path),
        "base_fingerprint": fingerprint_of(base, revision),
        "num_policy_layers": num_policy_layers,
        "tuning": tuning,
        "head": "fixed" if price_range is None else "price",
        "price_range": None if price_range is None else list(price_range),
        "reasoning_format": chosen.to_dict(),
    }
    config = fresh_config(base, **own | fields)
    more = (tuning, init_bias, revision, config.adapter_rank, config.prices)
    policy = fresh_layers(base.eval(), num_policy_layers, *more)
    prepare(chosen, tokenizer)
    return OSPrunerForCausalLM(config, base, policy, tokenizer)


def fresh_config(base: PreTrainedModel, **fields: Any) -> OSPrunerConfig:
    """A policy's configuration of these fields, and of what follows from its base."""
    literals = plain_text_config(base.config)
    config = OSPrunerConfig(text_config=literals, ospruner_version=VERSION, **fields)
    config._attn_implementation = base.config._attn_implementation
    return config


def fresh_layers(
    base: PreTrainedModel,
    num_layers: int,
    tuning: str = "queries",
    init_bias: float | None = None,
    revision: str | None = None,
    adapter_rank: int = 0,
    prices: PriceRange | None = None,
) -> StoppingPolicy:
    """Copies of the base's last layers, and a head that says sigmoid(bias).

    Arguments and errors are those of `untrained`, with `revision` the commit of the checkpoint that
    a quantised or offloaded base came from.
    """
    check_decoder(base)
    policy = StoppingPolicy(base, num_layers, prices, tuning == "queries")
    source: dict[str, torch.Tensor] = {}
    if policy.tail is not None:
        own = base.get_decoder().state_dict()
        names = {name: policy.name_in_base(name) for name in policy.tail.state_dict()}
        if is_quantised(base) or any(own[name].is_meta for name in names.values()):
            own = layers_of_checkpoint(base, policy.copied, revision)
        source = {f"tail.{name}": own[in_base] for name, in_base in names.items()}
    bias = torch.full((policy.head.out_features,), math.log(math.expm1(_INIT_RISE)))
    bias[0] = INIT_BIAS["fixed" if prices is None else "price"] if init_bias is None else init_bias
    head = {"head.weight": torch.zeros(policy.head.weight.shape), "head.bias": bias}
    policy.load(base, {**source, **head})
    policy.eval()
    if policy.tail is not None and not is_quantised(base):
        check_tail(base, policy)
    if adapter_rank:
        add_adapters(policy, adapter_rank)
    set_trainable(policy)
    return policy


def set_trainable(policy: StoppingPolicy) -> None:
    """Lets gradients reach the head, and the copied layers or the adapters beside them.

    The final norm is the base's, and tells another base from it when a policy is loaded.
    """
    policy.requires_grad_(False)
    policy.head.requires_grad_(True)
    adapters = [p for name, p in policy.layers.named_parameters() if ".lora_" in name]
    for parameter in adapters or policy.layers.parameters():
        parameter.requires_grad_(True)


def add_adapters(policy: StoppingPolicy, rank: int) -> None:
    """Puts an adapter beside every linear projection of a policy's layers; at first it adds 0.

    W x becomes W x + 2 B A x with A (rank, in) drawn and B (out, rank) zero (LoRA's alpha is twice
    the rank). Adapters are in float32 whatever the base's dtype.
    """
    from peft import LoraConfig, inject_adapter_in_model  # here: it takes a second

    linear = [name for name, part in policy.layers.named_modules() if isinstance(part, nn.Linear)]
    if not linear:
        raise ValueError("the base's last layers have no linear projection: leave adapters out")
    config = LoraConfig(r=rank, lora_alpha=ADAPTER_SCALE * rank, target_modules=linear)
    inject_adapter_in_model(config, policy.layers)
    for name, parameter in policy.layers.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.float()
