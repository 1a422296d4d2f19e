"""What enters the policy in one forward of the base, and where a text's thinking lies."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from .bases_ospruner import decoder_layers
from .capture_ospruner import TrunkDone, hidden_entering
from .reasoning_format import ThinkingSpan, TokenFormat


@contextmanager
def entering_tail(
    base: PreTrainedModel, num_layers: int, stop_there: bool = False
) -> Iterator[list[torch.Tensor]]:
    """A context that keeps what a forward of this thread hands to the policy.

    Args:
        base: the causal LM.
        num_layers: n; for 0 the last hidden states after the final norm are kept.
        stop_there: end the forward at layer L-n, by raising `TrunkDone`.

    Yields:
        A list that receives one detached tensor (B, S, H) a forward.
    """
    me = threading.get_ident()
    caught: list[torch.Tensor] = []

    def before_layer(
        module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if threading.get_ident() == me:
            caught.append(hidden_entering(args, kwargs).detach())
            if stop_there:
                raise TrunkDone

    def after_decoder(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if threading.get_ident() == me:
            caught.append(output.last_hidden_state.detach())

    if num_layers:
        layer = decoder_layers(base)[-num_layers]
        handle = layer.register_forward_pre_hook(before_layer, with_kwargs=True)
    else:
        handle = base.get_decoder().register_forward_hook(after_decoder)
    try:
        yield caught
    finally:
        handle.remove()


def positions_of(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """Positions (B, S) that start at each row's first token."""
    if attention_mask is None:
        return torch.arange(input_ids.shape[1], device=input_ids.device).expand(input_ids.shape)
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def thinking_span(
    ids: Sequence[int], token_format: TokenFormat, prompt_length: int | None = None
) -> ThinkingSpan:
    """Where the thinking of a whole text lies.

    Args:
        ids: prompt, thinking and what may follow; no padding.
        token_format: the base's way of thinking.
        prompt_length: the number of tokens before the thinking; None looks for the model's last
            turn and what opens its thinking.

    Raises:
        ValueError: prompt_length is out of range, or no thinking is found.
    """
    if prompt_length is not None and not 1 <= prompt_length <= len(ids):
        raise ValueError(
            f"prompt_length is {prompt_length}; it must lie in 1..{len(ids)}, the tokens of the "
            "text without padding (a policy needs a prompt)"
        )
    span = token_format.thinking_span(ids, prompt_length)
    if prompt_length is None and span.end == span.start:
        raise ValueError(
            f"no thinking was found in input_ids (format {token_format.format.name!r}, opened by "
            f"{token_format.format.think_start!r} in the model's last turn); pass prompt_length, "
            "the number of tokens before it"
        )
    return span
