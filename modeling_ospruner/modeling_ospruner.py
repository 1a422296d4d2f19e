"""A frozen reasoning model with a stopping policy; both Auto classes load it.

A policy's repository holds the policy alone; the base is loaded from where the policy pins it, or
is one that somebody else has loaded already.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.hub import cached_file

from .configuration_ospruner import VERSION, OSPrunerConfig, saved_by
from .custom_generate_ospruner import CUSTOM_GENERATE, HUB_ARGUMENTS
from .formats_ospruner import ReasoningFormat, TokenFormat
from .generation_ospruner import generate_pruned
from .policy_ospruner import StoppingPolicy, is_quantised
from .stopping_ospruner import RuleLike, StopPolicyConfig, StopRecord

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # none that needs scales
WEIGHTS = "model.safetensors"
"""The one file in which a policy's tensors lie; pickled weights are never read."""
FLAT_FILES = tuple(sorted(file.name for file in Path(__file__).parent.glob("*_ospruner.py")))
"""What is uploaded beside the weights."""
_AUTO_MAP = {
    "AutoConfig": "configuration_ospruner.OSPrunerConfig",
    "AutoModel": "modeling_ospruner.OSPrunerForCausalLM",
    "AutoModelForCausalLM": "modeling_ospruner.OSPrunerForCausalLM",
}
_POLICY_ONLY = ("revision", "subfolder")
_AUTO_ONLY = ("adapter_kwargs", "code_revision", "trust_remote_code", "_from_auto", "_commit_hash")
_SIZES = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")


def load_base(
    config: OSPrunerConfig, hub: Mapping[str, Any], arguments: Mapping[str, Any]
) -> PreTrainedModel:
    """The base that a policy pins, at the pinned revision, from safetensors files alone.

    One that does not fit is refused before its weights are read. One that needs code of its own is,
    too: load it yourself, and write `OSPrunerForCausalLM.from_base(base, policy)`.
    """
    where = config.base_model_name_or_path
    own = {"revision": config.base_revision, "trust_remote_code": False, **hub}
    check_base(config, AutoConfig.from_pretrained(where, **own), where)
    own |= {"attn_implementation": config._attn_implementation_internal, **arguments}
    own["use_safetensors"] = True
    base: PreTrainedModel = AutoModelForCausalLM.from_pretrained(where, **own)
    return base


def check_base(config: OSPrunerConfig, base_config: PreTrainedConfig, where: str) -> None:
    """Refuses a base of other sizes than those that the policy was made for, naming each."""
    wanted, found = config.get_text_config(), base_config.get_text_config()
    differing = [
        f"{name} {getattr(found, name, None)} where the policy needs {getattr(wanted, name, None)}"
        for name in _SIZES
        if getattr(found, name, None) != getattr(wanted, name, None)
    ]
    if differing:
        raise ValueError(
            f"the base {where!r} does not match the policy: it has {'; '.join(differing)}. Load "
            f"{_pinned(config)}"
        )


def _pinned(config: OSPrunerConfig) -> str:
    where, revision = config.base_model_name_or_path, config.base_revision
    return f"the base that the policy was trained for: {where!r} at revision {revision!r}"


def base_fingerprint(where: str, revision: str | None = None, **hub: Any) -> str | None:
    """Tells a base's weights from others, such as those of a fine-tune, without reading them whole.

    SHA-256 over every stored tensor's name, type, shape and a few bytes at four places of it, in
    however many files; None where no safetensors files of it are on this machine.
    """
    here = {"revision": revision, **hub, "local_files_only": True}
    try:
        try:
            files = {str(cached_file(where, WEIGHTS, **here))}
        except OSError:
            index = cached_file(where, f"{WEIGHTS}.index.json", **here)
            names = json.loads(Path(str(index)).read_text("utf-8"))["weight_map"].values()
            files = {str(cached_file(where, name, **here)) for name in set(names)}
    except (OSError, ValueError):
        return None
    samples = []
    for file in files:
        with open(file, "rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header: dict[str, Any] = json.loads(opened.read(size))
            header.pop("__metadata__", None)
            for name, about in header.items():
                start, end = about["data_offsets"]
                said = f"{name} {about['dtype']} {about['shape']}".encode()
                for place in range(4):
                    opened.seek(8 + size + start + max(0, end - start - 64) * place // 3)
                    said += opened.read(min(64, end - start))
                samples.append((name, said))
    return hashlib.sha256(b"".join(said for _, said in sorted(samples))).hexdigest()


def fingerprint_of(
    base: PreTrainedModel, revision: str | None, cache_dir: Any = None
) -> str | None:
    """`base_fingerprint` of the files that a loaded base came from, in a cache or the usual one."""
    place = str(base.name_or_path), revision  # transformers keeps no revision with a model
    return base_fingerprint(*place, cache_dir=cache_dir) or base_fingerprint(*place)


def check_fingerprint(config: OSPrunerConfig, where: str, found: str | None) -> None:
    """Refuses a base of other weights than the policy was trained on, where both are known."""
    if config.base_fingerprint is not None and found not in (None, config.base_fingerprint):
        raise ValueError(
            f"the base {where!r} has other weights (fingerprint {found}, not "
            f"{config.base_fingerprint}) than {_pinned(config)}"
        )


def load_policy(
    path: str, config: OSPrunerConfig, base: PreTrainedModel, hub: Mapping[str, Any]
) -> StoppingPolicy:
    """A repository's policy on a base of the sizes and weights that it was trained on."""
    where = str(base.name_or_path)
    check_base(config, base.config, where)
    if not is_quantised(base):  # its files may be another version of the same weights
        pinned = config.base_revision if where == config.base_model_name_or_path else None
        check_fingerprint(config, where, fingerprint_of(base, pinned, hub.get("cache_dir")))
    config._attn_implementation = base.config._attn_implementation
    policy, theirs = empty_policy(config, base), base.get_decoder().state_dict()
    policy.load(base, read_tensors(path, config, policy, hub))
    config.adapter_rank = 0  # they are merged
    for name, own in [] if policy.tail is None else policy.tail.state_dict().items():
        if not name.startswith("layers.") and not theirs[name].is_meta:
            check_norm(own, theirs[name].to(own.device), name, config, where)
    return policy.requires_grad_(False).eval()


def empty_policy(config: OSPrunerConfig, base: PreTrainedModel) -> StoppingPolicy:
    """The policy that a configuration describes, without weights."""
    return StoppingPolicy(base, config.num_policy_layers, config.prices, config.tuning == "queries")


def read_tensors(
    path: str, config: OSPrunerConfig, policy: StoppingPolicy, hub: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """The tensors of a policy's file, exactly the policy's and finite, by their names there."""
    try:
        file = str(cached_file(path, WEIGHTS, **hub))
        tensors = {k.removeprefix("policy."): v for k, v in load_file(file).items()}
    except OSError as error:
        said = f"{path} has no {WEIGHTS}, and pickled weights are not read: {error}"
        raise OSError(said) from error
    except SafetensorError as error:
        raise ValueError(
            f"{path}/{WEIGHTS} is damaged or no safetensors file ({error}); copy it again, or "
            "load with force_download=True"
        ) from error
    wanted = policy.stored_shapes(config.adapter_rank)
    floats = {name: one for name, one in tensors.items() if one.dtype in _FLOATS}
    told = {
        "missing": sorted(set(wanted) - set(tensors)),
        "unknown": sorted(set(tensors) - set(wanted)),
        "of another shape or dtype": [
            f"{name} {one.dtype} {tuple(one.shape)} instead of {wanted[name]}"
            for name, one in tensors.items()
            if name in wanted and (tuple(one.shape) != wanted[name] or name not in floats)
        ],
        "not finite": [name for name, one in floats.items() if not one.isfinite().all()],
    }
    if wrong := [f"{what}: {names}" for what, names in told.items() if names]:
        raise ValueError(
            f"{path}/{WEIGHTS} does not hold this policy's tensors; {', '.join(wrong)}. Copy it "
            f"again, or train it anew. {saved_by(config.ospruner_version)}"
        )
    return tensors


def check_norm(
    own: torch.Tensor, theirs: torch.Tensor, name: str, config: OSPrunerConfig, where: str
) -> None:
    """Refuses a base of other weights by its final norm, which never trains.

    The one guard of quantised bases, whose files have other fingerprints.
    """
    # Either may have been rounded to another dtype: a step of bfloat16 is let pass.
    if not torch.allclose(own.float(), theirs.float(), 2**-7, 1e-4):
        raise ValueError(
            f"the base {where!r} has the sizes that the policy needs, but other weights: {name} "
            f"differs. Load {_pinned(config)}"
        )


# What reading takes a second each: the tokenizers by what their files hold, and their formats.
_TOKENIZERS: WeakValueDictionary[object, PreTrainedTokenizerBase] = WeakValueDictionary()
_FORMATS: WeakKeyDictionary[PreTrainedTokenizerBase, dict[Any, TokenFormat]] = WeakKeyDictionary()
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def load_tokenizer(path: str, config: OSPrunerConfig, hub: Mapping[str, Any]) -> Any:
    """The tokenizer of a policy's repository; policies that hold the same files share one."""
    absent: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False}
    files = [cached_file(path, name, **hub, **absent) for name in _TOKENIZER_FILES]
    read = b"\0".join(Path(file).read_bytes() for file in files if file is not None)
    # Without a tokenizer.json, files of other names hold the vocabulary.
    key: object = object() if files[0] is None else hashlib.sha256(read).digest()
    tokenizer = _TOKENIZERS.get(key)
    if tokenizer is None:
        try:
            # Without the configuration, it would ask on the terminal whether to run this very code.
            tokenizer = AutoTokenizer.from_pretrained(path, config=config, **hub)
        except ValueError as error:
            said = f"the tokenizer of {path!r} cannot be read ({error}): copy it again"
            raise ValueError(said) from error
        _TOKENIZERS[key] = tokenizer
    return tokenizer


def compiled_format(config: OSPrunerConfig, tokenizer: PreTrainedTokenizerBase) -> TokenFormat:
    """The base's way of thinking, for a policy's tokenizer."""
    literals = ReasoningFormat.from_dict(config.reasoning_format or {})
    known = _FORMATS.setdefault(tokenizer, {})
    key = literals, len(tokenizer), str(tokenizer.chat_template)
    if key not in known:
        known[key] = TokenFormat.compile(literals, tokenizer)
    return known[key]


class OSPrunerForCausalLM(PreTrainedModel, GenerationMixin):
    """A base that stops thinking when its policy says so: `generate(..., stop_policy=True)`.

    Attributes:
        base: the frozen causal LM.
        policy: the trainable part, and all that is saved.
        token_format: the base's way of thinking, compiled for its tokenizer.
        last_stop: the `StopRecord` of each row of the generate with a stop policy that began last;
            of several threads each finds its own in its output (`stop`).
    """

    config_class = OSPrunerConfig
    config: OSPrunerConfig
    base_model_prefix = ""
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(
        self,
        config: OSPrunerConfig,
        base: PreTrainedModel,
        policy: StoppingPolicy,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        super().__init__(config)
        self.base = base.requires_grad_(False).eval()
        self.policy = policy
        self.tokenizer = tokenizer
        self.token_format = compiled_format(config, tokenizer)
        self.generation_config = base.generation_config
        self.last_stop: list[StopRecord] = []
        if "hf_device_map" in vars(base):  # tells pipelines and trainers not to move the model
            self.hf_device_map = base.hf_device_map

    @classmethod
    def from_base(
        cls, base: PreTrainedModel, policy: str | os.PathLike[str], **hub: Any
    ) -> OSPrunerForCausalLM:
        """A saved policy on a base that is loaded already, which is shared and frozen.

        Args:
            base: the causal LM that the policy was made for; another is refused (`load_policy`).
            policy: the policy's repository or folder.
            hub: `revision`, `subfolder`, `cache_dir`, `token`...: where to find the policy.
        """
        path, known = os.fspath(policy), (*HUB_ARGUMENTS, *_POLICY_ONLY)
        if unknown := sorted(set(hub).difference(known)):
            raise TypeError(f"from_base has no {unknown}; it takes {known}")
        return cls._load(path, OSPrunerConfig.from_pretrained(path, **hub), base, hub)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *args: Any,
        config: OSPrunerConfig | None = None,
        **kwargs: Any,
    ) -> OSPrunerForCausalLM:
        """Loads a policy, and the base that it pins at the pinned revision.

        Args:
            pretrained_model_name_or_path: the policy's repository or folder.
            args: none; for transformers' signature.
            config: the policy's configuration, where it is loaded already.
            kwargs: `revision`, `subfolder`, `code_revision` and `trust_remote_code` concern the
                policy alone, what says where to look (`HUB_ARGUMENTS`) both; all others (dtype,
                device_map, quantization_config...) go to the base.
        """
        path = os.fspath(pretrained_model_name_or_path)
        rest = {name: value for name, value in kwargs.items() if name not in _AUTO_ONLY}
        both = {name: rest.pop(name) for name in HUB_ARGUMENTS if name in rest}
        own = {**both, **{name: rest.pop(name) for name in _POLICY_ONLY if name in rest}}
        if config is None:
            config = OSPrunerConfig.from_pretrained(path, **own)
        return cls._load(path, config, load_base(config, both, rest), own)

    @classmethod
    def _load(
        cls, path: str, config: OSPrunerConfig, base: PreTrainedModel, hub: Mapping[str, Any]
    ) -> OSPrunerForCausalLM:
        policy = load_policy(path, config, base, hub)
        model = cls(config, base, policy, load_tokenizer(path, config, hub))
        model.config._name_or_path = path
        return model

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | os.PathLike[str],
        state_dict: Mapping[str, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> None:
        """Saves the policy alone: `policy.*` tensors, configuration, tokenizer, and this code."""
        given = self.state_dict() if state_dict is None else state_dict
        own = {f"policy.{name}" for name in self.policy.own_names()}
        self.config.auto_map = dict(_AUTO_MAP)
        self.config.ospruner_version = VERSION
        super().save_pretrained(
            save_directory,
            state_dict={name: value for name, value in given.items() if name in own},
            save_original_format=False,
            **kwargs | {"max_shard_size": 2**60},  # one file
        )
        here, target = Path(__file__).parent, Path(save_directory)
        for file in target.glob(WEIGHTS):  # safetensors leaves it to its owner alone
            shutil.copymode(target / "config.json", file)
        for name in FLAT_FILES:
            shutil.copyfile(here / name, target / name)
        (target / CUSTOM_GENERATE).parent.mkdir(exist_ok=True)
        shutil.copyfile(here / "custom_generate_ospruner.py", target / CUSTOM_GENERATE)
        self.tokenizer.save_pretrained(save_directory)

    def train(self, mode: bool = True) -> OSPrunerForCausalLM:
        """Puts the policy in training mode; the frozen base never leaves eval mode."""
        super().train(mode)
        self.base.eval()
        return self

    def get_input_embeddings(self) -> torch.nn.Module:
        """The base's token embeddings."""
        return self.base.get_input_embeddings()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The base's forward."""
        return self.base(*args, **kwargs)

    @torch.no_grad()
    def generate(  # type: ignore[override]
        self,
        inputs: torch.Tensor | None = None,
        stop_policy: bool | Mapping[str, Any] | RuleLike | StopPolicyConfig | None = None,
        **kwargs: Any,
    ) -> Any:
        """As transformers' generate; with a stop policy, rows stop thinking when it says so.

        Args:
            inputs: prompt ids (B, S), left-padded; or pass `input_ids`.
            stop_policy: True for the policy as it was saved, or settings (`StopPolicyConfig`, also
                as a dict); False for plain generate. None takes what the generation config (the one
                given, else the model's) holds as `stop_policy`; False without.
            kwargs: generate's own, and `on_step`, called with a row and its live `StopRecord` after
                each decision: where it returns True, the thinking ends.

        Returns:
            What generate returns. `last_stop` holds one `StopRecord` a row; an output object
            (`return_dict_in_generate=True`) holds them as `stop`, too.
        """
        base: Any = self.base
        if stop_policy is None:
            config = kwargs.get("generation_config") or self.generation_config
            stop_policy = vars(config).get("stop_policy")
        if stop_policy is None or stop_policy is False:
            return base.generate(inputs, **kwargs)
        settings = StopPolicyConfig.of(stop_policy).with_defaults(self.config)
        kwargs.setdefault("tokenizer", self.tokenizer)
        self.last_stop = kwargs["records"] = []
        args = (base, self.policy, self.token_format, settings, self.config.step_stride, inputs)
        return generate_pruned(*args, **kwargs)[0]

    def generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Refuses continuous batching, in which no stop policy can work."""
        raise ValueError("generate_batch cannot stop: use generate, model.base, or vLLM")


# A policy with the state that it holds for, by base, then by repository. No value refers to its
# base, which can be freed.
_POLICIES: WeakKeyDictionary[PreTrainedModel, dict[Any, tuple[Any, ...]]] = WeakKeyDictionary()
_LOCK = threading.Lock()


def generate_on(
    base: Any, repository: str, hub: Mapping[str, Any], stop_policy: Any = True, **arguments: Any
) -> Any:
    """What `custom_generate_ospruner.generate` does with a repository's policy, found by `hub`.

    It is loaded once per base and commit; the base is left as it is, not frozen nor in eval mode.
    """
    inputs = arguments.pop("inputs", None)
    if stop_policy is False or stop_policy is None:
        return type(base).generate(base, inputs, **arguments)
    name = os.path.abspath(repository) if os.path.isdir(repository) else repository
    files = [Path(repository, file) for file in ("config.json", WEIGHTS)]
    written = tuple(file.stat().st_mtime_ns for file in files if file.exists())
    kind = base.device, base.dtype, base.config._attn_implementation
    state = hub.get("revision"), written, kind
    with _LOCK:
        known = _POLICIES.setdefault(base, {})
        if name not in known or known[name][0] != state:
            config = OSPrunerConfig.from_pretrained(repository, **hub)
            policy = load_policy(repository, config, base, hub)
            known[name] = state, config, policy, load_tokenizer(repository, config, hub)
        _, config, policy, tokenizer = known[name]
    arguments.setdefault("tokenizer", tokenizer)
    settings = StopPolicyConfig.of(stop_policy).with_defaults(config)
    base.last_stop = arguments["records"] = []
    token_format = compiled_format(config, tokenizer)
    args = (base, policy, token_format, settings, config.step_stride, inputs)
    return generate_pruned(*args, **arguments)[0]
