"""What enters the policy in one forward of the base, and where a text's thinking lies."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from .capture_ospruner import TrunkDone, hidden_entering
from .policy_ospruner import decoder_layers
from .reasoning_format import TokenFormat


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
) -> tuple[int, int]:
    """Where the thinking of a whole text begins, and where it ends.

    Args:
        ids: prompt, thinking and what may follow; no padding.
        token_format: the base's way of thinking.
        prompt_length: the number of tokens before the thinking; None looks for what opens it and
            takes the last one, for earlier turns may have thought, too.

    Returns:
        Two indices: of the first thinking token, and of the end marker (or the text's end).

    Raises:
        ValueError: prompt_length is out of range, or nothing opens the thinking.
    """
    start = prompt_length
    if start is None:
        opening = token_format.think_start_ids
        n = len(opening)
        places = [i + n for i in range(len(ids) - n + 1) if n and tuple(ids[i : i + n]) == opening]
        if not places:
            raise ValueError(
                f"nothing in input_ids opens the thinking (format {token_format.format.name!r}: "
                f"{token_format.format.think_start!r}); pass prompt_length, the number of tokens "
                "before it"
            )
        start = places[-1]
    elif not 1 <= start <= len(ids):
        raise ValueError(
            f"prompt_length is {start}; it must lie in 1..{len(ids)}, the tokens of the text "
            "without padding (a policy needs a prompt)"
        )
    for i in range(start, len(ids)):
        if ids[i] == token_format.think_end_id:
            return start, i
    return start, len(ids)
