"""What a policy says of given texts, in one pass: training, replay and checks use it.

A model here is whatever has a `base`, a `policy`, a `token_format` and a `config`.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from modeling_ospruner.configuration_ospruner import check_length
from modeling_ospruner.generation_ospruner import refuse_prompts
from modeling_ospruner.policy_ospruner import LayerKeys, Reader
from modeling_ospruner.stopping_ospruner import StopPolicyConfig
from ospruner.bases import input_device


class TrunkDone(Exception):  # noqa: N818  (it ends a forward early; nothing went wrong)
    """Raised inside a forward of the base once all that the policy reads is known."""


class TrunkReader(Reader):
    """One that ends each forward, by raising `TrunkDone`, when all is known."""

    def told(self) -> None:
        """Ends the forward once all is there."""
        wanted = len(self._policy.copied) if self._policy.queries else 0
        if len(self._seen) == len(self._policy.points) and len(self.keys) == wanted:
            raise TrunkDone


@torch.no_grad()
def reading(model: Any, input_ids: torch.Tensor) -> tuple[torch.Tensor, list[LayerKeys]]:
    """What the policy reads, without gradient: the base runs once, and no further than needed.

    Returns:
        (B, S, H): the hidden states that enter layer L-n; for n = 0 the last hidden states
        after the final norm. And with tuning "queries" keys and values of the last n layers,
        else none.
    """
    check_length(model.base.config, input_ids.shape[1], "the text")
    with TrunkReader(model.base, model.policy) as reader:
        with suppress(TrunkDone):
            model.base.get_decoder()(input_ids=input_ids, use_cache=False)
        return reader.hidden, reader.keys


def stop_logits(model: Any, input_ids: torch.Tensor, price: float | None = None) -> torch.Tensor:
    """The policy's logits (B, S) in float32, with gradient to the policy alone.

    A policy of every price takes the default price, or the given one.
    """
    hidden, keys = reading(model, input_ids)
    price = StopPolicyConfig(price=price).with_defaults(model.config).price
    positions = torch.arange(input_ids.shape[1], device=hidden.device).expand(input_ids.shape)
    return model.policy(hidden, positions, keys=keys, price=price)


@torch.no_grad()
def stop_probabilities(
    model: Any,
    input_ids: torch.Tensor | Sequence[int],
    *,
    prompt_length: int | None = None,
    price: float | None = None,
) -> torch.Tensor:
    """The stop probability pi_i at each step end of given traces, one pass each.

    Args:
        model: a base with its policy.
        input_ids: prompt and trace, (S,) or (B, S), without padding before them; what follows the
            thinking is not looked at.
        prompt_length: the tokens before the thinking. None looks for the model's last turn and what
            opens its thinking (`ReasoningFormat.think_start`).
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
    ids = torch.as_tensor(input_ids, device=input_device(model.base))
    if ids.dtype not in (torch.int64, torch.int32) and ids.numel():
        raise TypeError(f"input_ids holds {ids.dtype}; token ids are integers")
    rows = ids[None] if ids.dim() == 1 else ids  # (B, S)
    if rows.dim() != 2 or not rows.numel():
        raise ValueError(
            f"input_ids has the shape {tuple(ids.shape)}; it must be (S,) or (B, S), not empty"
        )
    if prompt_length is not None and not 1 <= prompt_length <= rows.shape[1]:
        raise ValueError(
            f"prompt_length is {prompt_length}; it must lie in 1..{rows.shape[1]}, the tokens of "
            "the text (a policy needs a prompt)"
        )
    refuse_prompts(rows, None, model.base.config)
    fmt, found = model.token_format, []
    for row in rows:
        span = fmt.thinking_span(row.tolist(), prompt_length)
        if prompt_length is None and span.end == span.start:
            raise ValueError(
                f"no thinking was found in input_ids (format {fmt.format.name!r}, opened by "
                f"{fmt.format.think_start!r} in the model's last turn); pass prompt_length, the "
                "number of tokens before it"
            )
        ends = fmt.step_ends(row[span.start : span.end].tolist())
        logits = stop_logits(model, row[None], price=price)[0, span.start :]
        found.append(torch.sigmoid(logits[[end - 1 for end in ends]]))
    result = pad_sequence(found, batch_first=True, padding_value=torch.nan)
    return result[0] if ids.dim() == 1 else result
