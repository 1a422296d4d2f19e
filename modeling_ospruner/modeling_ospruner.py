"""A frozen reasoning model with a stopping policy; both Auto classes load it.

`forward`, `stop_logits` and `stop_probabilities` score given texts: one pass of the base, one of
the policy's layers. `generate` stops rows while they are written.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Cache,
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.generic import ModelOutput

from .configuration_ospruner import (
    VERSION,
    OSPrunerConfig,
    check_length,
    execution_device,
    plain_text_config,
)
from .custom_generate_ospruner import CUSTOM_GENERATE
from .formats_ospruner import ReasoningFormat, ThinkingSpan, TokenFormat, guess
from .generation_ospruner import LastStop, generate_pruned, refuse_prompts
from .loading_ospruner import (
    check_exchange,
    check_hub_arguments,
    check_weights,
    fingerprint_of,
    load_parts,
    split_arguments,
)
from .loading_ospruner import generate_on as generate_on  # for CUSTOM_GENERATE
from .policy_ospruner import LayerKeys, Reader, StoppingPolicy, TrunkDone
from .rules_ospruner import DEFAULT_TRIAL_TOKENS, StopRule
from .stopping_ospruner import StopPolicyConfig, StopRecord, asked_price


@dataclass
class OSPrunerOutput(ModelOutput):
    """The base's output, and what the policy says about each position.

    Attributes:
        loss: the base's language modelling loss; with `labels` only.
        logits: of the next tokens, (B, S, V) or fewer positions with `logits_to_keep`.
        past_key_values: the base's cache.
        hidden_states: L+1 tensors (B, S, H), from the embeddings to what follows the final norm;
            with `output_hidden_states=True` only.
        attentions: L tensors (B, heads, S, S); with `output_attentions=True` only.
        router_logits: of a mixture of experts; with `output_router_logits=True` only.
        aux_loss: the load balancing loss of a mixture of experts, likewise.
        stop_probabilities: (B, S) float32, the probability of stopping after each token, had a
            step ended there. With `output_stop_probabilities=True` only. Gradients reach the
            policy. At padding they mean nothing.
    """

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    past_key_values: Cache | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None
    router_logits: tuple[torch.Tensor, ...] | None = None
    aux_loss: torch.Tensor | None = None
    stop_probabilities: torch.Tensor | None = None


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
            ValueError: stop probabilities are asked for with a cache that already holds tokens, or
                of a text that is too long (see `check_length`).
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
            with Reader(self.base, self.config.num_policy_layers, self.policy.queries) as reader:
                output = self.base(**inputs)
                hidden, keys = reader.hidden, reader.keys
            check_length(self.base.config, hidden.shape[1], "the text")
            price = self.config.price
            logits = self.policy(hidden, position_ids, attention_mask, None, price, keys)
            probabilities = torch.sigmoid(logits)
        else:
            output = self.base(**inputs)
        names = {field.name for field in fields(OSPrunerOutput)}
        found = {name: value for name, value in output.items() if name in names}
        typed = OSPrunerOutput(**found, stop_probabilities=probabilities)
        as_dict = self.base.config.return_dict if return_dict is None else return_dict
        return typed if as_dict else typed.to_tuple()

    def trunk(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What enters the policy's layers, (B, S, H); see `reading`."""
        return self.reading(input_ids, attention_mask, position_ids)[0]

    @torch.no_grad()
    def reading(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, list[LayerKeys]]:
        """What the policy reads, without gradient: the base runs once, and no further than needed.

        Args:
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
        check_length(self.base.config, position_ids.max() + 1, "the text")
        n = self.config.num_policy_layers
        with Reader(self.base, n, self.policy.queries, stop_there=True) as reader:
            with suppress(TrunkDone):
                self.base.get_decoder()(
                    input_ids=input_ids,
                    attention_mask=attention_mask,
                    position_ids=position_ids,
                    use_cache=False,
                )
            return reader.hidden, reader.keys

    def stop_logits(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        price: float | None = None,
        columns: torch.Tensor | None = None,
        trial_numbers: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The policy's logits (B, S), with gradient to the policy alone.

        A policy of every price takes the default price, or the given one.

        Args:
            input_ids: (B, S).
            attention_mask: (B, S), 1 for tokens.
            price: the price of a token; None for the configuration's.
            columns: (B, T) to be looked at; None for all. With tuning "queries" no others are
                computed.
            trial_numbers: `TRIAL_NUMBERS` (11,), or of each of these columns (B, S or T, 11), for a
                policy that tries answers.

        Returns:
            (B, S) or (B, T) float32.

        Raises:
            ValueError: the policy tries answers, and `trial_numbers` is not given.
        """
        hidden, keys = self.reading(input_ids, attention_mask)
        positions = positions_of(input_ids, attention_mask).to(hidden.device)
        price = asked_price("stop_logits", self.config, price)
        if columns is not None:
            columns = columns.to(hidden.device)
        if columns is not None and self.policy.queries:
            hidden = hidden.gather(1, columns[..., None].expand(-1, -1, hidden.shape[-1]))
            positions = positions.gather(1, columns)
            return self.policy.forward(
                hidden, positions, attention_mask, None, price, keys, columns, trial_numbers
            )
        outputs = self.policy.outputs(hidden, positions, attention_mask, None, keys)
        if columns is not None:
            index = columns.to(outputs.device)[..., None].expand(-1, -1, outputs.shape[-1])
            outputs = outputs.gather(1, index)
        return self.policy.logits(self.policy.with_history(outputs, trial_numbers), price)

    @torch.no_grad()
    def stop_probabilities(
        self,
        input_ids: torch.Tensor | Sequence[int],
        *,
        attention_mask: torch.Tensor | None = None,
        prompt_length: int | Sequence[int] | None = None,
        price: float | None = None,
        trial_numbers: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The stop probability pi_i at each step end of given traces, in one pass.

        Args:
            input_ids: prompt and trace, (S,) or (B, S); what follows the thinking is not looked
                at.
            attention_mask: of the same shape, 1 for tokens; padding may stand on either side.
            prompt_length: the tokens before the thinking, padding not counted: one number, or
                one a row. None finds the last `ReasoningFormat.think_start` of each row.
            price: the price of a token; None for the configuration's.
            trial_numbers: as for `stop_logits`, (11,) or (B, T, 11).

        Returns:
            (T,) or (B, T) float32, in the order of `token_format.step_ends(trace)`; rows with
            fewer steps are filled with NaN. The last step of a row is its natural end (or the
            text's), where stopping is certain anyway.

        Raises:
            TypeError: the ids are no integers.
            ValueError: a text is empty, or its thinking is not found, a price that the policy does
                not know, a policy that tries answers without `trial_numbers`; or see
                `refuse_prompts`.
        """
        device = execution_device(self.base, self.base.get_input_embeddings())
        ids = torch.as_tensor(input_ids, device=device)
        if ids.dtype not in (torch.int64, torch.int32) and ids.numel():
            raise TypeError(f"input_ids holds {ids.dtype}; token ids are integers")
        rows = ids[None] if ids.dim() == 1 else ids  # (B, S)
        if rows.dim() != 2 or not rows.numel():
            raise ValueError(
                f"input_ids has the shape {tuple(ids.shape)}; it must be (S,) or (B, S), not empty"
            )
        mask = None if attention_mask is None else attention_mask.view_as(rows).to(device)
        refuse_prompts(self.base, rows, mask)
        places = _step_columns(rows, mask, self.token_format, prompt_length)
        steps = max(len(row) for row in places)
        columns = torch.tensor([[*row, *[0] * (steps - len(row))] for row in places])  # (B, T)
        logits = self.stop_logits(rows, mask, price, columns, trial_numbers)  # (B, T)
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


FLAT_FILES = tuple(sorted(file.name for file in Path(__file__).parent.glob("*_ospruner.py")))
"""What is uploaded beside the weights."""
_AUTO_MAP = {
    "AutoConfig": "configuration_ospruner.OSPrunerConfig",
    "AutoModel": "modeling_ospruner.OSPrunerForCausalLM",
    "AutoModelForCausalLM": "modeling_ospruner.OSPrunerForCausalLM",
}


class _NoGenerationConfig(GenerationConfig):
    """The base's generation config is used; our own configuration holds none of its settings.

    (Its `price` is lambda, not that of beam search.)
    """

    @classmethod
    def from_model_config(cls, model_config: Any) -> GenerationConfig:
        """An empty one, which the base's replaces."""
        return GenerationConfig()


class OSPrunerForCausalLM(PolicyScores, PreTrainedModel, GenerationMixin):
    """A base that stops thinking when its policy says so: `generate(..., stop_policy=True)`.

    Attributes:
        base: the frozen causal LM.
        policy: the trainable part, and all that is saved.
        token_format: the base's way of thinking, compiled for its tokenizer.
    """

    config_class = OSPrunerConfig
    config: OSPrunerConfig
    base_model_prefix = ""
    generation_config_class = _NoGenerationConfig
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(
        self,
        config: OSPrunerConfig,
        base: PreTrainedModel,
        policy: StoppingPolicy,
        token_format: TokenFormat,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        super().__init__(config)
        self.base = base.requires_grad_(False).eval()
        self.policy = policy
        self.generation_config = base.generation_config
        self.token_format = token_format
        self.tokenizer = tokenizer
        self._last_stop = LastStop([[]])
        if "hf_device_map" in vars(base):  # tells pipelines and trainers not to move the model
            self.hf_device_map = base.hf_device_map

    @classmethod
    def untrained(
        cls,
        base: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        num_policy_layers: int = 2,
        tuning: str = "queries",
        init_bias: float | None = None,
        reasoning_format: ReasoningFormat | None = None,
        base_model_name_or_path: str | None = None,
        base_revision: str | None = None,
        lora_rank: int = 16,
        price_range: Sequence[float] | None = None,
        trial_every: int = 0,
        trial_max_tokens: int = DEFAULT_TRIAL_TOKENS,
    ) -> OSPrunerForCausalLM:
        """A fresh, untrained policy on a loaded base, which is shared and frozen.

        Args:
            base: the causal LM.
            tokenizer: the base's; saved with the policy.
            num_policy_layers: n of the paper; 0 trains a head alone.
            tuning: what trains: "layers", "queries", "attention", "lora" or "head".
            init_bias: the head's initial bias; None for the head's usual one.
            reasoning_format: None guesses it from the tokenizer.
            base_model_name_or_path: what the policy pins; None takes where base came from.
            base_revision: the commit that the policy pins; None for a base in a folder.
            lora_rank: of the adapters, with tuning "lora".
            price_range: low and high of `PriceRange`, for the head "price"; None for the other.
            trial_every: of `OSPrunerConfig`; 0 for a policy without trial answers.
            trial_max_tokens: of `OSPrunerConfig`.

        Raises:
            ImportError: tuning "lora" without peft.
            ValueError: the tokenizer has no thinking end marker, a field is out of range, or the
                base's layers cannot be copied.
        """
        chosen = reasoning_format or guess(tokenizer)
        token_format = TokenFormat.compile(chosen, tokenizer)
        config = OSPrunerConfig(
            text_config=plain_text_config(base.config),
            base_model_name_or_path=base_model_name_or_path or str(base.name_or_path),
            base_revision=base_revision,
            base_fingerprint=fingerprint_of(base),
            num_policy_layers=num_policy_layers,
            tuning=tuning,
            lora_rank=lora_rank,
            head="fixed" if price_range is None else "price",
            price_range=None if price_range is None else list(price_range),
            trial_every=trial_every,
            trial_max_tokens=trial_max_tokens,
            reasoning_format=chosen.to_dict(),
            ospruner_version=VERSION,
        )
        policy = StoppingPolicy.from_base(
            base.eval(),
            num_policy_layers,
            tuning,
            init_bias,
            base_revision,
            lora_rank,
            config.prices,
            trial_every > 0,
        )
        policy.trial_every, policy.trial_max_tokens = trial_every, trial_max_tokens
        config._attn_implementation = base.config._attn_implementation
        return cls(config, base, policy, token_format, tokenizer)

    @classmethod
    def from_base(
        cls, base: PreTrainedModel, policy: str | os.PathLike[str], **hub: Any
    ) -> OSPrunerForCausalLM:
        """A saved policy on a base that is loaded already; the base is shared and frozen.

        Several models may share one base, and generate in turn or in threads.

        Args:
            base: the causal LM that the policy was made for.
            policy: the policy's repository or folder.
            hub: `revision`, `subfolder`, `cache_dir`, `token`, `local_files_only`,
                `force_download`, `proxies`: where and how to find the policy.

        Raises:
            TypeError: policy is no name or path.
            ValueError: the base does not fit, or the policy's tensors are not those expected.
        """
        if not isinstance(policy, str | os.PathLike):
            raise TypeError(
                f"from_base loads a saved policy and was given a {type(policy).__name__}; pass "
                "its repository or folder. For a fresh policy: OSPrunerForCausalLM.untrained("
                "base, tokenizer)"
            )
        path = os.fspath(policy)
        check_hub_arguments(hub, "from_base")
        config = OSPrunerConfig.from_pretrained(path, **hub)
        return cls._from_parts(path, config, *load_parts(path, config, base, hub, {}))

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *args: Any,
        config: OSPrunerConfig | None = None,
        verify: bool = False,
        **kwargs: Any,
    ) -> OSPrunerForCausalLM:
        """Loads a policy, and the base that it pins at the pinned revision.

        Only safetensors files are read, of the policy as of the base.

        Args:
            pretrained_model_name_or_path: the policy's repository or folder.
            args: none; for transformers' signature.
            config: the policy's configuration, where it is loaded already.
            verify: compare the policy's weights with the hash in its `provenance.json` first.
            kwargs: `revision`, `subfolder` and `code_revision` concern the policy;
                `base_trust_remote_code` the base (`trust_remote_code` does not); `cache_dir`,
                `token`, `local_files_only`, `force_download` and `proxies` both; all others (dtype,
                device_map, quantization_config, attn_implementation...) go to the base.

        Raises:
            ValueError: the base does not fit (both sizes are named, before weights are read) or
                has other weights, it needs code of its own, or the policy's tensors are not exactly
                those expected (they are named), or not those of its record.
        """
        path = os.fspath(pretrained_model_name_or_path)
        policy_arguments, base_arguments = split_arguments(kwargs)
        if verify:
            check_weights(path, policy_arguments)
        if config is None:
            config = OSPrunerConfig.from_pretrained(path, **policy_arguments)
        parts = load_parts(path, config, None, policy_arguments, base_arguments)
        return cls._from_parts(path, config, *parts)

    @classmethod
    def _from_parts(
        cls,
        path: str,
        config: OSPrunerConfig,
        base: PreTrainedModel,
        policy: StoppingPolicy,
        tokenizer: PreTrainedTokenizerBase,
    ) -> OSPrunerForCausalLM:
        chosen = ReasoningFormat.from_dict(config.reasoning_format or {})
        model = cls(config, base, policy, TokenFormat.compile(chosen, tokenizer), tokenizer)
        model.config._name_or_path = path
        return model

    def set_policy(self, policy: str | os.PathLike[str], **hub: Any) -> None:
        """Switches to another saved policy of the same base, such as one of another lambda.

        The base stays loaded. A generate call that is under way keeps the policy it began with.

        Args:
            policy: the policy's repository or folder.
            hub: as for `from_base`.

        Raises:
            ValueError: it pins another base or revision, or has another reasoning format, or see
                `from_base`. The model keeps its policy then.
        """
        path = os.fspath(policy)
        check_hub_arguments(hub, "set_policy")
        config = OSPrunerConfig.from_pretrained(path, **hub)
        check_exchange(self.config, config, path)
        _, loaded, _ = load_parts(path, config, self.base, hub, {})
        config._name_or_path = path
        self.policy, self.config = loaded.train(self.policy.training), config

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | os.PathLike[str],
        state_dict: Mapping[str, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> None:
        """Saves the policy alone: `policy.*` tensors, configuration, tokenizer, and the flat code.

        Args:
            save_directory: the folder.
            state_dict: tensors to save instead of the model's; only `policy.*` is used.
            kwargs: for transformers' save_pretrained.
        """
        given = self.state_dict() if state_dict is None else state_dict
        own = {f"policy.{name}" for name in self.policy.own_names()}
        tensors = {name: value for name, value in given.items() if name in own}
        if "max_shard_size" in kwargs:
            raise ValueError(
                f"max_shard_size is {kwargs['max_shard_size']!r}, but a policy is saved as one "
                "file: leave it out"
            )
        self.config.auto_map = dict(_AUTO_MAP)
        self.config.ospruner_version = VERSION
        super().save_pretrained(
            save_directory,
            state_dict=tensors,
            save_original_format=False,
            max_shard_size=2**60,  # one file, also of gathered tensors, whose storage is padded
            **kwargs,
        )
        here, target = Path(__file__).parent, Path(save_directory)
        for name in FLAT_FILES:
            if not (target / name).exists() or not os.path.samefile(here / name, target / name):
                shutil.copyfile(here / name, target / name)
        (target / CUSTOM_GENERATE).parent.mkdir(exist_ok=True)
        shutil.copyfile(here / "custom_generate_ospruner.py", target / CUSTOM_GENERATE)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(save_directory)

    def train(self, mode: bool = True) -> OSPrunerForCausalLM:
        """Puts the policy in training mode; the frozen base never leaves eval mode."""
        super().train(mode)
        self.base.eval()
        return self

    def get_decoder(self) -> PreTrainedModel:
        """The base's decoder."""
        return self.base.get_decoder()

    def get_input_embeddings(self) -> torch.nn.Module:
        """The base's token embeddings."""
        return self.base.get_input_embeddings()

    def get_output_embeddings(self) -> torch.nn.Module:
        """The base's language modelling head."""
        return self.base.get_output_embeddings()

    @property
    def last_stop(self) -> list[StopRecord]:
        """One `StopRecord` a row of the last generate with a stop policy that has ended.

        Of this thread's, if it had any, else of any thread's.
        """
        return self._last_stop.get()

    @torch.no_grad()
    def generate(  # type: ignore[override]
        self,
        inputs: torch.Tensor | None = None,
        stop_policy: bool | Mapping[str, Any] | StopRule | StopPolicyConfig | None = None,
        **kwargs: Any,
    ) -> Any:
        """As transformers' generate; with a stop policy, rows stop thinking when it says so.

        Args:
            inputs: prompt ids (B, S), left-padded; or pass `input_ids`.
            stop_policy: True for the learned policy, `StopPolicyConfig` (also as a dict), or
                another `StopRule`; False for plain generate. None takes what the generation
                config (the one given, else the model's) holds as `stop_policy`; False without.
            kwargs: generate's own arguments; and, with a stop policy, `on_step`, a function that is
                called with a row and its live `StopRecord` after each decision.

        Returns:
            What generate returns. `last_stop` holds one `StopRecord` a row; an output object
            (`return_dict_in_generate=True`) holds them as `stop`, too.

        Raises:
            TypeError: stop_policy, one of its settings, or the prompt is of a wrong type.
            ValueError: a setting is unknown or out of range, a prompt is empty, or the decoding
                cannot be combined with a stop policy (beams, assisted decoding, no cache).
        """
        if stop_policy is None:
            config = kwargs.get("generation_config") or self.generation_config
            stop_policy = vars(config).get("stop_policy")
        if stop_policy is None or stop_policy is False:
            base: Any = self.base
            return base.generate(inputs, **kwargs)
        settings = StopPolicyConfig.of(stop_policy).with_defaults(self.config)
        kwargs.setdefault("tokenizer", self.tokenizer)
        self.policy.step_stride = self.config.step_stride
        output, records = generate_pruned(
            self.base, self.policy, self.token_format, settings, inputs, **kwargs
        )
        self._last_stop.set(records)
        return output

    def generate_batch(self, *args: Any, stop_policy: bool = False, **kwargs: Any) -> Any:
        """The base's continuous batching, in which no stop policy can work.

        Args:
            args: as for transformers' `generate_batch`.
            stop_policy: must be False.
            kwargs: as for transformers' `generate_batch`.

        Raises:
            ValueError: stop_policy is anything else.
        """
        if stop_policy is not False:
            raise ValueError(
                "generate_batch is continuous batching, in which stop_policy cannot work: use "
                "generate on a padded batch, or the vLLM or SGLang engine"
            )
        base: Any = self.base
        return base.generate_batch(*args, **kwargs)
