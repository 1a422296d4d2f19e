"""A frozen reasoning model with a stopping policy; both Auto classes load it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from .capture_ospruner import TrunkDone, hidden_entering
from .configuration_ospruner import OSPrunerConfig
from .generation_ospruner import StopPolicyConfig, StopRecord, generate_pruned
from .loading_ospruner import load_parts, split_arguments
from .policy_ospruner import DEFAULT_INIT_BIAS, StoppingPolicy, decoder_layers
from .reasoning_format import ReasoningFormat, TokenFormat, guess

FLAT_FILES = (
    "capture_ospruner.py",
    "configuration_ospruner.py",
    "generation_ospruner.py",
    "loading_ospruner.py",
    "modeling_ospruner.py",
    "policy_ospruner.py",
    "reasoning_format.py",
    "settings_ospruner.py",
)
_AUTO_MAP = {
    "AutoConfig": "configuration_ospruner.OSPrunerConfig",
    "AutoModel": "modeling_ospruner.OSPrunerForCausalLM",
    "AutoModelForCausalLM": "modeling_ospruner.OSPrunerForCausalLM",
}


class _NoGenerationConfig(GenerationConfig):
    """The base's generation config is used; our own configuration holds none of its settings.

    (Its `length_penalty` is lambda, not that of beam search.)
    """

    @classmethod
    def from_model_config(cls, model_config: Any) -> GenerationConfig:
        """An empty one, which the base's replaces."""
        return GenerationConfig()


class OSPrunerForCausalLM(PreTrainedModel, GenerationMixin):
    """A base that stops thinking when its policy says so: `generate(..., stop_policy=True)`.

    Attributes:
        base: the frozen causal LM.
        policy: the trainable part, and all that is saved.
        token_format: the base's way of thinking, compiled for its tokenizer.
        last_stop: one `StopRecord` a row of the last generate with a stop policy.
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
        self.last_stop: list[StopRecord] = []

    @classmethod
    def from_base(
        cls,
        base: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        num_policy_layers: int = 2,
        tuning: str = "layers",
        init_bias: float = DEFAULT_INIT_BIAS,
        reasoning_format: ReasoningFormat | None = None,
        base_model_name_or_path: str | None = None,
        base_revision: str | None = None,
    ) -> OSPrunerForCausalLM:
        """A fresh, untrained policy on a loaded base, which is shared and frozen.

        Args:
            base: the causal LM.
            tokenizer: the base's; saved with the policy.
            num_policy_layers: n of the paper; 0 trains a head alone.
            tuning: what trains: "layers", "attention" or "head".
            init_bias: the head's initial bias.
            reasoning_format: None guesses it from the tokenizer.
            base_model_name_or_path: what the policy pins; None takes where base came from.
            base_revision: the commit that the policy pins.

        Raises:
            ValueError: the tokenizer has no thinking end marker, or a field is out of range.
        """
        chosen = reasoning_format or guess(tokenizer)
        config = OSPrunerConfig(
            text_config=base.config.get_text_config().to_dict(),
            base_model_name_or_path=base_model_name_or_path or str(base.name_or_path),
            base_revision=base_revision,
            num_policy_layers=num_policy_layers,
            tuning=tuning,
            reasoning_format=chosen.to_dict(),
        )
        policy = StoppingPolicy.from_base(base, num_policy_layers, tuning, init_bias)
        config._attn_implementation = base.config._attn_implementation
        return cls(config, base, policy, TokenFormat.compile(chosen, tokenizer), tokenizer)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *args: Any,
        config: OSPrunerConfig | None = None,
        base: PreTrainedModel | None = None,
        **kwargs: Any,
    ) -> OSPrunerForCausalLM:
        """Loads a policy, and the base that it pins at the pinned revision.

        Args:
            pretrained_model_name_or_path: the policy's repository or folder.
            args: none; for transformers' signature.
            config: the policy's configuration, where it is loaded already.
            base: the base, where it is loaded already; it is shared.
            kwargs: `revision`, `subfolder` and `code_revision` concern the policy;
                `base_trust_remote_code` the base (`trust_remote_code` does not); `cache_dir`,
                `token`, `local_files_only`, `force_download` and `proxies` both; all others (dtype,
                device_map, quantization_config, attn_implementation...) go to the base.

        Raises:
            ValueError: the base does not fit (both sizes are named, before weights are read), or
                the policy's tensors are not exactly those expected (they are named).
        """
        policy_arguments, base_arguments = split_arguments(kwargs)
        if config is None:
            config = OSPrunerConfig.from_pretrained(
                pretrained_model_name_or_path, **policy_arguments
            )
        base, policy, tokenizer = load_parts(
            str(pretrained_model_name_or_path), config, base, policy_arguments, base_arguments
        )
        chosen = ReasoningFormat.from_dict(config.reasoning_format or {})
        model = cls(config, base, policy, TokenFormat.compile(chosen, tokenizer), tokenizer)
        model.config._name_or_path = str(pretrained_model_name_or_path)
        return model

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
        tensors = {name: value for name, value in given.items() if name.startswith("policy.")}
        self.config.auto_map = dict(_AUTO_MAP)
        super().save_pretrained(
            save_directory, state_dict=tensors, save_original_format=False, **kwargs
        )
        here, target = Path(__file__).parent, Path(save_directory)
        for name in FLAT_FILES:
            if not (target / name).exists() or not os.path.samefile(here / name, target / name):
                shutil.copyfile(here / name, target / name)
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

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The base's forward: logits of the next tokens; the policy plays no part in it."""
        return self.base(*args, **kwargs)

    @torch.no_grad()
    def trunk(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What the policy reads, without gradient: the trunk's layers run once, and no more.

        Args:
            input_ids: (B, S).
            attention_mask: (B, S), 1 for tokens.

        Returns:
            (B, S, H): the hidden states that enter layer L-n; for n = 0 the last hidden states
            after the final norm.
        """
        decoder = self.base.get_decoder()
        positions = _positions(input_ids, attention_mask)
        arguments = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": positions,
            "use_cache": False,
        }
        if self.policy.tail is None:
            last: torch.Tensor = decoder(**arguments).last_hidden_state
            return last
        caught: list[torch.Tensor] = []

        def catch(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            caught.append(hidden_entering(args, kwargs))
            raise TrunkDone

        layer = decoder_layers(self.base)[-self.config.num_policy_layers]
        handle = layer.register_forward_pre_hook(catch, with_kwargs=True)
        try:
            decoder(**arguments)
        except TrunkDone:
            pass
        finally:
            handle.remove()
        return caught[0]

    def stop_logits(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The policy's logits (B, S) at every position, with gradient to the policy alone."""
        hidden = self.trunk(input_ids, attention_mask)
        logits: torch.Tensor = self.policy(
            hidden, _positions(input_ids, attention_mask), attention_mask
        )
        return logits

    @torch.no_grad()
    def stop_probabilities(
        self, prompt_ids: Sequence[int], trace_ids: Sequence[int]
    ) -> torch.Tensor:
        """The stop probability pi_i at each step end of a given trace, in one pass.

        Args:
            prompt_ids: the prompt.
            trace_ids: the thinking tokens.

        Returns:
            (T,) in the order of `token_format.step_ends`; the last is what the policy says at the
            natural end, where stopping is certain anyway.
        """
        if not len(prompt_ids):
            raise ValueError("prompt_ids is empty; pass the prompt that the trace answers")
        ends = self.token_format.step_ends(trace_ids)
        ids = torch.tensor([[*prompt_ids, *trace_ids]], device=self.base.device)
        logits = self.stop_logits(ids)[0]  # (S,)
        places = torch.tensor([len(prompt_ids) + end - 1 for end in ends], dtype=torch.long)
        return torch.sigmoid(logits[places.to(logits.device)])

    @torch.no_grad()
    def generate(  # type: ignore[override]
        self,
        inputs: torch.Tensor | None = None,
        stop_policy: bool | Mapping[str, Any] | StopPolicyConfig = False,
        **kwargs: Any,
    ) -> Any:
        """As transformers' generate; with a stop policy, rows stop thinking when it says so.

        Args:
            inputs: prompt ids (B, S), left-padded; or pass `input_ids`.
            stop_policy: True, or `StopPolicyConfig` (also as a dict); False for plain generate.
            kwargs: generate's own arguments.

        Returns:
            What generate returns. `last_stop` holds one `StopRecord` a row; an output object
            (`return_dict_in_generate=True`) holds them as `stop`, too.

        Raises:
            ValueError: a setting is unknown or out of range, a prompt is empty, or the decoding
                cannot be combined with a stop policy (beams, assisted decoding, no cache).
        """
        if stop_policy is False or stop_policy is None:
            return self.base.generate(inputs, **kwargs)
        settings = self._settings(stop_policy)
        output, self.last_stop = generate_pruned(
            self.base, self.policy, self.token_format, settings, inputs, **kwargs
        )
        return output

    def _settings(
        self, stop_policy: bool | Mapping[str, Any] | StopPolicyConfig
    ) -> StopPolicyConfig:
        asked = StopPolicyConfig.of(stop_policy)
        values = dict(vars(asked))
        if asked.mode is None:
            values["mode"] = self.config.default_mode
        if asked.threshold is None:
            values["threshold"] = self.config.default_threshold
        return StopPolicyConfig(**values)


def _positions(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """Positions (B, S) that start at each row's first token."""
    if attention_mask is None:
        return torch.arange(input_ids.shape[1], device=input_ids.device).expand(input_ids.shape)
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
