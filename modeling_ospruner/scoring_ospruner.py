"""What the policy says about a given text: one pass of the base, one of the policy's layers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from .bases_ospruner import decoder_layers, execution_device
from .capture_ospruner import TrunkDone, hidden_entering
from .configuration_ospruner import OSPrunerConfig
from .outputs_ospruner import OSPrunerOutput
from .policy_ospruner import StoppingPolicy
from .reasoning_format import ThinkingSpan, TokenFormat


class PolicyScores:
    """The part of `OSPrunerForCausalLM` that scores given texts; it has no state of its own."""

    base: PreTrainedModel
    policy: StoppingPolicy
    token_format: TokenFormat
    config: OSPrunerConfig

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        output_stop_probabilities: bool = False,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> OSPrunerOutput | tuple[Any, ...]:
        """One pass of the base and, where asked, of the policy's layers on what enters them.

        Args:
            input_ids: (B, S).
            attention_mask: (B, cached + S), 1 for tokens.
            position_ids: (B, S).
            past_key_values: the base's cache.
            output_stop_probabilities: also score every position with the policy.
            return_dict: False for a tuple; None for what the base's configuration says.
            kwargs: the base's own (`inputs_embeds`, `labels`, `use_cache`, `logits_to_keep`,
                `output_hidden_states`, `output_attentions`...).

        Returns:
            `OSPrunerOutput`.

        Raises:
            ValueError: stop probabilities are asked for with a cache that already holds tokens.
        """
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "past_key_values": past_key_values,
            **kwargs,
            "return_dict": True,
        }
        probabilities = None
        if output_stop_probabilities:
            if past_key_values is not None and past_key_values.get_seq_length() > 0:
                raise ValueError(
                    "past_key_values holds tokens that the policy has not seen, so "
                    "output_stop_probabilities=True needs the whole text: pass it without them"
                )
            with entering_tail(self.base, self.config.num_policy_layers) as caught:
                output = self.base(**inputs)
            hidden = caught[0]
            probabilities = torch.sigmoid(self.policy(hidden, position_ids, attention_mask))
        else:
            output = self.base(**inputs)
        names = {field.name for field in fields(OSPrunerOutput)}
        found = {name: value for name, value in output.items() if name in names}
        typed = OSPrunerOutput(**found, stop_probabilities=probabilities)
        as_dict = self.base.config.return_dict if return_dict is None else return_dict
        return typed if as_dict else typed.to_tuple()

    @torch.no_grad()
    def trunk(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What the policy reads, without gradient: the trunk's layers run once, and no more.

        Args:
            input_ids: (B, S).
            attention_mask: (B, S), 1 for tokens.
            position_ids: (B, S); None: from 0 at each row's first token.

        Returns:
            (B, S, H): the hidden states that enter layer L-n; for n = 0 the last hidden states
            after the final norm.
        """
        with (
            entering_tail(self.base, self.config.num_policy_layers, stop_there=True) as caught,
            suppress(TrunkDone),
        ):
            self.base.get_decoder()(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=(
                    positions_of(input_ids, attention_mask)
                    if position_ids is None
                    else position_ids
                ),
                use_cache=False,
            )
        return caught[0]

    def stop_logits(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The policy's logits (B, S) at every position, with gradient to the policy alone."""
        hidden = self.trunk(input_ids, attention_mask)
        logits: torch.Tensor = self.policy(
            hidden, positions_of(input_ids, attention_mask), attention_mask
        )
        return logits

    @torch.no_grad()
    def stop_probabilities(
        self,
        input_ids: torch.Tensor | Sequence[int],
        *,
        attention_mask: torch.Tensor | None = None,
        prompt_length: int | Sequence[int] | None = None,
    ) -> torch.Tensor:
        """The stop probability pi_i at each step end of given traces, in one pass.

        Args:
            input_ids: prompt and trace, (S,) or (B, S); what follows the thinking is not looked
                at.
            attention_mask: of the same shape, 1 for tokens; padding may stand on either side.
            prompt_length: the tokens before the thinking, padding not counted: one number, or
                one a row. None finds the last `ReasoningFormat.think_start` of each row.

        Returns:
            (T,) or (B, T) float32, in the order of `token_format.step_ends(trace)`; rows with
            fewer steps are filled with NaN. The last step of a row is its natural end (or the
            text's), where stopping is certain anyway.

        Raises:
            ValueError: a text is empty, or its thinking is not found.
        """
        device = execution_device(self.base, self.base.get_input_embeddings())
        ids = torch.as_tensor(input_ids, dtype=torch.long, device=device)
        rows = ids[None] if ids.dim() == 1 else ids  # (B, S)
        if rows.dim() != 2 or not rows.numel():
            raise ValueError(
                f"input_ids has the shape {tuple(ids.shape)}; it must be (S,) or (B, S), not empty"
            )
        mask = None if attention_mask is None else attention_mask.view_as(rows).to(device)
        places = _step_columns(rows, mask, self.token_format, prompt_length)
        logits = self.stop_logits(rows, mask)  # (B, S)
        steps = max(len(row) for row in places)
        result = torch.full((len(rows), steps), torch.nan, device=logits.device)
        for b, row in enumerate(places):
            result[b, : len(row)] = torch.sigmoid(logits[b, row])
        return result[0] if ids.dim() == 1 else result


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


def _step_columns(
    rows: torch.Tensor,
    mask: torch.Tensor | None,
    token_format: TokenFormat,
    prompt_length: int | Sequence[int] | None,
) -> list[list[int]]:
    """For each row of (B, S), the columns in which its steps end."""
    kept = torch.ones_like(rows) if mask is None else mask
    lengths: Sequence[int | None] = (
        [prompt_length] * len(rows)
        if prompt_length is None or isinstance(prompt_length, int)
        else prompt_length
    )
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
