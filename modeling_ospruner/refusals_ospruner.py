"""Refuses, before anything runs, what stopping inside generate would silently do wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig
from transformers.generation.configuration_utils import GenerationMode

from .reasoning_format import TokenFormat

_HINT = "or pass stop_policy=False"

# Arguments of generate, and why they cannot be combined with a stop policy.
_ARGUMENTS = {
    "custom_generate": "it replaces the decoding that the policy works in",
    "inputs_embeds": "steps are found in token ids: pass input_ids alone",
    "position_ids": "the policy derives them from the attention mask: pass input_ids alone",
    "negative_prompt_ids": "a second pass of the base would reach the policy",
    "pixel_values": "the policy reads text alone",
    "input_features": "the policy reads text alone",
}


def refuse_unsupported(
    inputs: torch.Tensor | None, config: GenerationConfig, arguments: Mapping[str, Any]
) -> None:
    """Refuses decoding options and inputs that don't go together with a stop policy.

    Args:
        inputs: generate's first argument.
        config: the generation config with generate's keyword arguments applied.
        arguments: all keyword arguments of generate.

    Raises:
        TypeError: the prompt is not a tensor.
        ValueError: naming the option and what to do.
    """
    _refuse_decoding(config, arguments)
    for name, why in _ARGUMENTS.items():
        if arguments.get(name) is not None:
            raise ValueError(f"{name} and stop_policy exclude each other; {why}")
    _refuse_inputs(inputs, arguments)
    cache = arguments.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError(
            "past_key_values holds tokens that the stopping policy has not seen; pass the whole "
            "text as input_ids without them"
        )
    if config.eos_token_id is None:
        raise ValueError(
            "the generation config has no eos_token_id, so rows cannot end by themselves; set it "
            "in base.generation_config"
        )


def _refuse_decoding(config: GenerationConfig, arguments: Mapping[str, Any]) -> None:
    mode = config.get_generation_mode(arguments.get("assistant_model"))
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(
            f"stop_policy works with greedy decoding and sampling, not with {mode.value}: leave "
            "out num_beams, assistant_model, prompt_lookup_num_tokens, penalty_alpha, dola_layers "
            f"and the like, {_HINT}"
        )
    if config.use_cache is False:
        raise ValueError("use_cache is False; stop_policy needs the cache: leave use_cache out")
    if "paged" in (config.cache_implementation, arguments.get("cache_implementation")):
        raise ValueError(
            "cache_implementation is 'paged', that is, continuous batching, in which stop_policy "
            f"cannot work: leave it out, use the vLLM or SGLang engine, {_HINT}"
        )
    if config.guidance_scale not in (None, 1, 1.0):
        raise ValueError(
            f"guidance_scale is {config.guidance_scale}; its second pass of the base would reach "
            f"the policy: leave it out, {_HINT}"
        )
    if config.token_healing:
        raise ValueError(
            f"token_healing rewrites the prompt by a generate of its own: leave it out, {_HINT}"
        )


def _refuse_inputs(inputs: torch.Tensor | None, arguments: Mapping[str, Any]) -> None:
    input_ids = arguments.get("input_ids") if inputs is None else inputs
    if input_ids is not None and not isinstance(input_ids, torch.Tensor):
        raise TypeError(
            f"the prompt is a {type(input_ids).__name__}; it must be a tensor of token ids (B, S): "
            "tokenize with return_tensors='pt', and pass what a tokenizer gives as **inputs"
        )
    if input_ids is None or input_ids.numel() == 0:
        raise ValueError("the prompt is empty: stop_policy needs input_ids with a prompt")
    if input_ids.dim() != 2:
        raise ValueError(
            f"input_ids has the shape {tuple(input_ids.shape)}; it must be (B, S): one row a prompt"
        )
    mask = arguments.get("attention_mask")
    if mask is None:
        return
    if mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask has the shape {tuple(mask.shape)}, input_ids "
            f"{tuple(input_ids.shape)}; they must be the same"
        )
    if empty := (mask.sum(-1) == 0).nonzero().flatten().tolist():
        raise ValueError(f"the prompts of rows {empty} are empty: their attention_mask is all 0")
    if holes := (mask[:, 1:] < mask[:, :-1]).any(-1).nonzero().flatten().tolist():
        raise ValueError(
            f"the attention_mask of rows {holes} has zeros after tokens; padding must stand on the "
            "left: set tokenizer.padding_side = 'left'"
        )


def refuse_base(base: Any) -> None:
    """Refuses bases in which hooks do not do their work.

    Args:
        base: the model whose generate is called.

    Raises:
        ValueError: it is compiled, or an encoder-decoder.
    """
    if "_orig_mod" in dict(base.named_children()):
        raise ValueError(
            "the base is what torch.compile(base) returned, whose generate runs the model behind "
            f"it uncompiled anyway: pass that model itself (base._orig_mod), {_HINT}"
        )
    for name, module in base.named_modules():
        if module._compiled_call_impl is not None or _has_compiled_forward(module):
            where = f"its module {name!r} is" if name else "it is"
            raise ValueError(
                "the base is compiled by torch.compile, which skips hooks placed later in silence "
                f"({where}): stop_policy needs it as it was loaded, {_HINT}"
            )
    if base.config.is_encoder_decoder:
        raise ValueError(
            f"{type(base).__name__} is an encoder-decoder; stop_policy works with decoder-only "
            "language models"
        )


def _has_compiled_forward(module: nn.Module) -> bool:
    """Whether its forward was replaced by `torch.compile(module.forward)`."""
    replaced: Callable[..., Any] | None = vars(module).get("forward")
    return replaced is not None and "_torchdynamo_orig_callable" in vars(replaced)


def refuse_closing(token_format: TokenFormat, eos_ids: frozenset[int]) -> None:
    """Refuses a closing that generate would take for the end of the text.

    Args:
        token_format: the base's way of thinking.
        eos_ids: ids that end a text.

    Raises:
        ValueError: naming the tokens that are both.
    """
    if both := sorted(set(token_format.forced_suffix("forced")) & eos_ids):
        raise ValueError(
            f"the tokens {both} close the thinking (format {token_format.format.name!r}) and are "
            "eos_token_id, too, so that a row would end before its answer: take them out of "
            "base.generation_config.eos_token_id"
        )
