"""What a policy says of given texts, in one pass: training, replay and checks use it.

A model here is whatever has a `base`, a `policy`, a `token_format` and a `config`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from modeling_ospruner.configuration_ospruner import check_length
from modeling_ospruner.formats_ospruner import ThinkingSpan, TokenFormat
from modeling_ospruner.generation_ospruner import refuse_prompts
from modeling_ospruner.policy_ospruner import LayerKeys, Reader, execution_device
from modeling_ospruner.stopping_ospruner import StopPolicyConfig


class TrunkDone(Exception):  # noqa: N818  (it ends a forward early; nothing went wrong)
    """Raised inside a forward of the base once all that the policy reads is known."""


class TrunkReader(Reader):
    """One that ends each forward, by raising `TrunkDone`, when all is known."""

    def told(self) -> None:
        """Ends the forward once all is there."""
        wanted = len(self._policy.copied) if self._policy.queries else 0
        if len(self._seen) == len(self._policy.points) and len(self.keys) == wanted:
            raise TrunkDone


def trunk(
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """What enters the policy's layers, (B, S, H); see `reading`."""
    return reading(model, input_ids, attention_mask, position_ids)[0]


@torch.no_grad()
def reading(
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, list[LayerKeys]]:
    """What the policy reads, without gradient: the base runs once, and no further than needed.

    Args:
        model: a base with its policy.
        input_ids: (B, S).
        attention_mask: (B, S), 1 for tokens.
        position_ids: (B, S); None: from 0 at each row's first token.

    Returns:
        (B, S, H): the hidden states that enter layer L-n; for n = 0 the last hidden states
        after the final norm. And with tuning "queries" keys and values of the last n layers,
        else none.
    """
    if position_ids is None:
        position_ids = positions_of(input_ids, attention_mask)
    check_length(model.base.config, position_ids.max() + 1, "the text")
    with TrunkReader(model.base, model.policy) as reader:
        with suppress(TrunkDone):
            model.base.get_decoder()(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                use_cache=False,
            )
        return reader.hidden, reader.keys


def stop_logits(
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    price: float | None = None,
    columns: torch.Tensor | None = None,
) -> torch.Tensor:
    """The policy's logits (B, S), with gradient to the policy alone.

    A policy of every price takes the default price, or the given one.

    Args:
        model: a base with its policy.
        input_ids: (B, S).
        attention_mask: (B, S), 1 for tokens.
        price: the price of a token; None for the configuration's.
        columns: (B, T) to be looked at; None for all. With tuning "queries" no others are
            computed.

    Returns:
        (B, S) or (B, T) float32.
    """
    hidden, keys = reading(model, input_ids, attention_mask)
    positions = positions_of(input_ids, attention_mask).to(hidden.device)
    price = StopPolicyConfig(price=price).with_defaults(model.config).price
    if columns is not None:
        columns = columns.to(hidden.device)
    if columns is not None and model.policy.queries:
        hidden = hidden.gather(1, columns[..., None].expand(-1, -1, hidden.shape[-1]))
        positions = positions.gather(1, columns)
        return model.policy(hidden, positions, attention_mask, None, keys, columns, price=price)
    outputs = model.policy.outputs(hidden, positions, attention_mask, None, keys)
    if columns is not None:
        index = columns.to(outputs.device)[..., None].expand(-1, -1, outputs.shape[-1])
        outputs = outputs.gather(1, index)
    return model.policy.logits(outputs, price)


@torch.no_grad()
def stop_probabilities(
    model: Any,
    input_ids: torch.Tensor | Sequence[int],
    *,
    attention_mask: torch.Tensor | None = None,
    prompt_length: int | Sequence[int] | None = None,
    price: float | None = None,
) -> torch.Tensor:
    """The stop probability pi_i at each step end of given traces, in one pass.

    Args:
        model: a base with its policy.
        input_ids: prompt and trace, (S,) or (B, S); what follows the thinking is not looked
            at.
        attention_mask: of the same shape, 1 for tokens; padding may stand on either side.
        prompt_length: the tokens before the thinking, padding not counted: one number, or
            one a row. None finds the last `ReasoningFormat.think_start` of each row.
        price: the price of a token; None for the configuration's.

    Returns:
        (T,) or (B, T) float32, in the order of `token_format.step_ends(trace)`; rows with
        fewer steps are filled with NaN. The last step of a row is its natural end (or the
        text's), where stopping is certain anyway.

    Raises:
        TypeError: the ids are no integers.
        ValueError: a text is empty, or its thinking is not found, or a price that the policy does
            not know; or see `refuse_prompts`.
    """
    device = execution_device(model.base, model.base.get_input_embeddings())
    ids = torch.as_tensor(input_ids, device=device)
    if ids.dtype not in (torch.int64, torch.int32) and ids.numel():
        raise TypeError(f"input_ids holds {ids.dtype}; token ids are integers")
    rows = ids[None] if ids.dim() == 1 else ids  # (B, S)
    if rows.dim() != 2 or not rows.numel():
        raise ValueError(
            f"input_ids has the shape {tuple(ids.shape)}; it must be (S,) or (B, S), not empty"
        )
    mask = None if attention_mask is None else attention_mask.view_as(rows).to(device)
    refuse_prompts(rows, None, model.base.config)
    places = _step_columns(rows, mask, model.token_format, prompt_length)
    steps = max(len(row) for row in places)
    columns = torch.tensor([[*row, *[0] * (steps - len(row))] for row in places])  # (B, T)
    logits = stop_logits(model, rows, mask, price, columns)  # (B, T)
    result = torch.sigmoid(logits)
    for b, row in enumerate(places):
        result[b, len(row) :] = torch.nan
    return result[0] if ids.dim() == 1 else result


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


def _step_columns(
    rows: torch.Tensor,
    mask: torch.Tensor | None,
    token_format: TokenFormat,
    prompt_length: int | Sequence[int] | None,
) -> list[list[int]]:
    """For each row of (B, S), the columns in which its steps end."""
    kept = torch.ones_like(rows) if mask is None else mask
    one = prompt_length is None or isinstance(prompt_length, int)
    lengths: Any = [prompt_length] * len(rows) if one else prompt_length
    if len(lengths) != len(rows):
        raise ValueError(
            f"prompt_length has {len(lengths)} entries for {len(rows)} rows; pass one a row"
        )
    places = []
    for ids, real, length in zip(rows.tolist(), kept.tolist(), lengths, strict=True):
        columns = [i for i, one in enumerate(real) if one]
        text = [ids[i] for i in columns]
        span = thinking_span(text, token_format, length)
        ends = token_format.step_ends(text[span.start : span.end])
        places.append([columns[span.start + end - 1] for end in ends])
    return places
