"""A frozen reasoning model with a stopping policy; both Auto classes load it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from .bases_ospruner import plain_text_config
from .configuration_ospruner import VERSION, OSPrunerConfig
from .custom_generate_ospruner import CUSTOM_GENERATE
from .generation_ospruner import LastStop, generate_pruned
from .loading_ospruner import (
    check_exchange,
    check_hub_arguments,
    load_parts,
    split_arguments,
)
from .policy_ospruner import DEFAULT_INIT_BIAS, StoppingPolicy
from .reasoning_format import ReasoningFormat, TokenFormat, guess
from .scoring_ospruner import PolicyScores
from .settings_ospruner import StopPolicyConfig, StopRecord
from .shared_base_ospruner import generate_on as generate_on  # for CUSTOM_GENERATE
from .stop_rules import StopRule

FLAT_FILES = (
    "adapters_ospruner.py",
    "bases_ospruner.py",
    "capture_ospruner.py",
    "checks_ospruner.py",
    "configuration_ospruner.py",
    "custom_generate_ospruner.py",
    "draws_ospruner.py",
    "format_description.py",
    "generation_ospruner.py",
    "hook_ospruner.py",
    "loading_ospruner.py",
    "model_turn.py",
    "modeling_ospruner.py",
    "outputs_ospruner.py",
    "policy_ospruner.py",
    "reasoning_format.py",
    "refusals_ospruner.py",
    "row_ospruner.py",
    "scoring_ospruner.py",
    "settings_ospruner.py",
    "stop_rules.py",
    "shared_base_ospruner.py",
    "token_states.py",
    "trial_answers.py",
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
        tuning: str = "layers",
        init_bias: float = DEFAULT_INIT_BIAS,
        reasoning_format: ReasoningFormat | None = None,
        base_model_name_or_path: str | None = None,
        base_revision: str | None = None,
        lora_rank: int = 16,
    ) -> OSPrunerForCausalLM:
        """A fresh, untrained policy on a loaded base, which is shared and frozen.

        Args:
            base: the causal LM.
            tokenizer: the base's; saved with the policy.
            num_policy_layers: n of the paper; 0 trains a head alone.
            tuning: what trains: "layers", "attention", "lora" or "head".
            init_bias: the head's initial bias.
            reasoning_format: None guesses it from the tokenizer.
            base_model_name_or_path: what the policy pins; None takes where base came from.
            base_revision: the commit that the policy pins; None for a base in a folder.
            lora_rank: of the adapters, with tuning "lora".

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
            num_policy_layers=num_policy_layers,
            tuning=tuning,
            lora_rank=lora_rank,
            reasoning_format=chosen.to_dict(),
            ospruner_version=VERSION,
        )
        policy = StoppingPolicy.from_base(
            base.eval(), num_policy_layers, tuning, init_bias, base_revision, lora_rank
        )
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
        **kwargs: Any,
    ) -> OSPrunerForCausalLM:
        """Loads a policy, and the base that it pins at the pinned revision.

        Only safetensors files are read, of the policy as of the base.

        Args:
            pretrained_model_name_or_path: the policy's repository or folder.
            args: none; for transformers' signature.
            config: the policy's configuration, where it is loaded already.
            kwargs: `revision`, `subfolder` and `code_revision` concern the policy;
                `base_trust_remote_code` the base (`trust_remote_code` does not); `cache_dir`,
                `token`, `local_files_only`, `force_download` and `proxies` both; all others (dtype,
                device_map, quantization_config, attn_implementation...) go to the base.

        Raises:
            ValueError: the base does not fit (both sizes are named, before weights are read), it
                needs code of its own, or the policy's tensors are not exactly those expected
                (they are named).
        """
        path = os.fspath(pretrained_model_name_or_path)
        policy_arguments, base_arguments = split_arguments(kwargs)
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
            kwargs: generate's own arguments.

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
        settings = StopPolicyConfig.of(stop_policy).with_defaults(
            self.config.default_mode, self.config.default_threshold
        )
        kwargs.setdefault("tokenizer", self.tokenizer)
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
