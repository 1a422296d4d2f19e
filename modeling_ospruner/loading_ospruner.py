"""Loading from two repositories: the policy's own, and the base that it pins.

Also a policy put on a base that somebody else has loaded, which is what
`custom_generate/generate.py` runs.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import threading
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto import CONFIG_MAPPING
from transformers.utils.hub import cached_file

from .configuration_ospruner import OSPrunerConfig, is_quantised, saved_by, tail_device
from .formats_ospruner import ReasoningFormat, TokenFormat
from .generation_ospruner import generate_pruned
from .policy_ospruner import StoppingPolicy
from .stopping_ospruner import StopPolicyConfig

WEIGHTS = "model.safetensors"
"""The one file in which a policy's tensors lie."""
_FLOATS = ("BF16", "F16", "F32", "F64")  # in safetensors' words; none that needs scales beside it
_VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)
_RECORD = "provenance.json"
_BOTH = ("cache_dir", "force_download", "local_files_only", "proxies", "token")
_POLICY_ONLY = ("revision", "subfolder")
_AUTO_ONLY = ("adapter_kwargs", "code_revision", "trust_remote_code", "_from_auto", "_commit_hash")
_SIZES = ("hidden_size", "num_hidden_layers", "vocab_size")


def split_arguments(arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits from_pretrained's keyword arguments: the policy's, and the base's."""
    if arguments.get("base") is not None:
        raise ValueError(
            "base cannot be passed to from_pretrained (the Auto classes copy their arguments, and "
            "would copy the model): write OSPrunerForCausalLM.from_base(base, policy)"
        )
    if arguments.get("output_loading_info"):
        raise ValueError(
            "output_loading_info=True is not supported: a policy file with missing or unknown "
            "tensors is refused with their names; leave it out"
        )
    if arguments.get("use_safetensors") is False:
        raise ValueError(
            "use_safetensors is False, but only safetensors files are read. To use a base stored "
            "otherwise, load it yourself and write OSPrunerForCausalLM.from_base(base, policy)"
        )
    ignored = (*_AUTO_ONLY, "base", "output_loading_info")
    rest = {name: value for name, value in arguments.items() if name not in ignored}
    both = {name: rest.pop(name) for name in _BOTH if name in rest}
    own = {name: rest.pop(name) for name in _POLICY_ONLY if name in rest}
    trust = rest.pop("base_trust_remote_code", False)
    return {**both, **own}, {**both, **rest, "trust_remote_code": trust}


def check_hub_arguments(arguments: dict[str, Any], method: str) -> None:
    """Refuses arguments that do not say where to find a policy.

    Raises:
        TypeError: naming them.
    """
    allowed = sorted((*_BOTH, *_POLICY_ONLY))
    if unknown := sorted(set(arguments) - set(allowed)):
        raise TypeError(
            f"{method} has no {', '.join(unknown)}; besides the policy it takes "
            f"{', '.join(allowed)}. The base is loaded already: its dtype, device and quantisation "
            "stay as they are"
        )


def check_exchange(current: OSPrunerConfig, other: OSPrunerConfig, path: str) -> None:
    """Refuses a policy that cannot take another's place on the same base.

    Raises:
        ValueError: naming what differs, on both sides.
    """
    names = ("base_model_name_or_path", "base_revision", "reasoning_format")
    differing = [
        f"{name} {vars(other)[name]!r} instead of {vars(current)[name]!r}"
        for name in names
        if vars(other)[name] != vars(current)[name]
    ]
    if differing:
        raise ValueError(
            f"the policy {path!r} was made for another base or format: it has "
            f"{'; '.join(differing)}. Load it as a model of its own: "
            "OSPrunerForCausalLM.from_pretrained(...), or from_base(base, policy)"
        )


def load_parts(
    path: str,
    config: OSPrunerConfig,
    base: PreTrainedModel | None,
    policy_arguments: dict[str, Any],
    base_arguments: dict[str, Any],
) -> tuple[PreTrainedModel, StoppingPolicy, PreTrainedTokenizerBase]:
    """The base, the policy and the tokenizer of a policy repository.

    Raises:
        ValueError: the base does not fit, or the policy's tensors are not those expected.
        OSError: a repository or file is missing.
    """
    if base is None:
        base = load_base(config, policy_arguments, base_arguments)
    else:
        check_base(config, base.config, str(base.name_or_path))
    if not is_quantised(base):  # its files may be another version of the same weights
        check_fingerprint(config, str(base.name_or_path), fingerprint_of(base))
    config._attn_implementation = base.config._attn_implementation
    policy = load_policy(path, config, base, policy_arguments)
    refuse_no_tokenizer(path, policy_arguments)
    try:
        # Without the configuration, it would ask on the terminal whether to run this very code.
        tokenizer = AutoTokenizer.from_pretrained(path, config=config, **policy_arguments)
    except ValueError as error:
        raise ValueError(
            f"the tokenizer of {path!r} cannot be read ({error}): copy the policy again"
        ) from error
    return base, policy, tokenizer


def refuse_no_tokenizer(path: str, hub: Mapping[str, Any]) -> None:
    """Refuses a repository without a vocabulary, of which transformers makes an empty tokenizer.

    Args:
        path: a repository or folder.
        hub: where and how to find it; see `from_base`.

    Raises:
        ValueError: there is none.
    """
    found = (
        cached_file(path, name, _raise_exceptions_for_missing_entries=False, **hub)
        for name in _VOCABULARIES
    )
    if not any(found):
        raise ValueError(
            f"{path!r} has no tokenizer.json (nor {', '.join(_VOCABULARIES[1:])}): copy it again, "
            "or save its tokenizer there with tokenizer.save_pretrained"
        )


def load_base(
    config: OSPrunerConfig, policy_arguments: dict[str, Any], base_arguments: dict[str, Any]
) -> PreTrainedModel:
    """The base that a policy pins, at the pinned revision, from safetensors files.

    Raises:
        ValueError: it does not fit (before its weights are read), it needs code of its own and
            `base_trust_remote_code` is not given, or transformers has no such causal LM.
        OSError: it is not found, or has no safetensors files.
    """
    where, revision = config.base_model_name_or_path, config.base_revision
    arguments = dict(base_arguments)
    trust = arguments.pop("trust_remote_code")
    hub = {name: policy_arguments[name] for name in _BOTH if name in policy_arguments}
    try:
        literals, _ = PreTrainedConfig.get_config_dict(where, revision=revision, **hub)
    except OSError as error:
        raise OSError(
            f"the base {where!r} that the policy pins, at revision {revision!r}, is not found "
            f"({error}). Where it lies elsewhere, load it yourself and write "
            "OSPrunerForCausalLM.from_base(base, policy)"
        ) from error
    kind = literals.get("model_type")
    if "auto_map" in literals and kind not in CONFIG_MAPPING and not trust:
        raise ValueError(
            f"the base {where!r} (model_type {kind!r}) runs code of its own, "
            f"{sorted(set(literals['auto_map'].values()))}. Read it at revision {revision!r}, and "
            "if you trust it pass base_trust_remote_code=True"
        )
    base_config = AutoConfig.from_pretrained(
        where, revision=revision, trust_remote_code=trust, **hub
    )
    check_base(config, base_config, where)
    implementation = config._attn_implementation_internal
    if implementation is not None:
        arguments.setdefault("attn_implementation", implementation)
    base: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        where, revision=revision, use_safetensors=True, trust_remote_code=trust, **arguments
    )
    return base


def check_base(config: OSPrunerConfig, base_config: PreTrainedConfig, where: str) -> None:
    """Refuses a base of other sizes than those that the policy was made for.

    Raises:
        ValueError: naming each size that differs, on both sides.
    """
    if isinstance(base_config, OSPrunerConfig):
        raise ValueError(
            f"{where!r} is no base but a stopping policy, for the base "
            f"{base_config.base_model_name_or_path!r}: give that base"
        )
    if config.text_config is None:
        raise ValueError(
            "the policy's config.json has no text_config, its base's configuration: copy it again"
        )
    wanted, found = config.get_text_config(), base_config.get_text_config()
    differing = [
        f"{name} {getattr(found, name)} where the policy needs {getattr(wanted, name)}"
        for name in _SIZES
        if getattr(found, name) != getattr(wanted, name)
    ]
    if wanted.model_type != found.model_type:
        differing.append(f"model_type {found.model_type} where it needs {wanted.model_type}")
    if differing:
        raise ValueError(
            f"the base {where!r} does not match the policy: it has {'; '.join(differing)}. Load "
            f"the base that the policy was trained for: {config.base_model_name_or_path!r} at "
            f"revision {config.base_revision!r}"
        )


_SAMPLE = 64  # bytes, at each of the places of a tensor that a fingerprint looks at


def base_fingerprint(
    where: str, revision: str | None = None, cache_dir: str | None = None
) -> str | None:
    """Tells a base's weights from others, such as those of a fine-tune, without reading them whole.

    SHA-256 over every stored tensor's name, type, shape and a few bytes at four places of it. What
    is stored counts: the dtype and device that it is loaded in, and how many files it is spread
    over, change nothing.

    Args:
        where: the base's folder or Hub id.
        revision: of a Hub id.
        cache_dir: where its files were downloaded to; the Hub's cache by default.

    Returns:
        None where no safetensors files of it are on this machine.
    """
    here: dict[str, Any] = {"revision": revision, "cache_dir": cache_dir, "local_files_only": True}
    try:
        try:
            files = {str(cached_file(where, WEIGHTS, **here))}
        except OSError:
            index = cached_file(where, f"{WEIGHTS}.index.json", **here)
            with open(str(index), encoding="utf-8") as opened:
                names = set(json.load(opened)["weight_map"].values())
            files = {str(cached_file(where, name, **here)) for name in names}
    except (OSError, ValueError):
        return None
    digest = hashlib.sha256()
    for _, said in sorted(sample for file in files for sample in _samples(file)):
        digest.update(said)
    return digest.hexdigest()


def _samples(file: str) -> Iterator[tuple[str, bytes]]:
    """Name, and what a fingerprint takes, of each tensor in a safetensors file."""
    with open(file, "rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header: dict[str, Any] = json.loads(opened.read(size))
        header.pop("__metadata__", None)
        for name, about in header.items():
            start, end = about["data_offsets"]
            said = f"{name} {about['dtype']} {about['shape']}".encode()
            for place in range(4):
                opened.seek(8 + size + start + max(0, end - start - _SAMPLE) * place // 3)
                said += opened.read(min(_SAMPLE, end - start))
            yield name, said


def fingerprint_of(base: PreTrainedModel) -> str | None:
    """`base_fingerprint` of the files that a loaded base came from."""
    commit = vars(base.config).get("_commit_hash")  # of a base that came from the Hub
    return base_fingerprint(str(base.name_or_path), commit)


def check_fingerprint(config: OSPrunerConfig, where: str, found: str | None) -> None:
    """Refuses a base of other weights than those that a policy was trained on.

    Where either fingerprint is unknown, this says nothing.

    Args:
        config: the policy's.
        where: the base's folder or Hub id.
        found: its fingerprint.

    Raises:
        ValueError: naming both.
    """
    if config.base_fingerprint is not None and found not in (None, config.base_fingerprint):
        raise ValueError(
            f"the base {where!r} has other weights (fingerprint {found}) than "
            f"{config.base_model_name_or_path!r} at revision {config.base_revision!r} had when the "
            f"policy was trained on it (fingerprint {config.base_fingerprint}): load that one"
        )


def check_weights(path: str, policy_arguments: dict[str, Any]) -> None:
    """Compares a policy's weights with the hash that stands in its record.

    Raises:
        ValueError: they differ, or there is no such hash.
        OSError: there is no record.
    """
    with open(str(cached_file(path, _RECORD, **policy_arguments)), encoding="utf-8") as opened:
        stated = json.load(opened).get("files", {}).get(WEIGHTS)
    with open(str(cached_file(path, WEIGHTS, **policy_arguments)), "rb") as weights:
        found = hashlib.file_digest(weights, "sha256").hexdigest()
    if stated is None:
        raise ValueError(f"{path}/{_RECORD} states no hash of {WEIGHTS}: leave out verify=True")
    if found != stated:
        raise ValueError(
            f"{path}/{WEIGHTS} has the SHA-256 {found}, its record {_RECORD} states {stated}: it "
            "is damaged or was exchanged; copy it again, or load with force_download=True"
        )


def load_policy(
    path: str,
    config: OSPrunerConfig,
    base: PreTrainedModel,
    policy_arguments: dict[str, Any],
) -> StoppingPolicy:
    """Reads `policy.*` from the repository's safetensors file, and no other file.

    Raises:
        ValueError: see `read_tensors`; or what the policy did not train differs from the base's.
        OSError: the file is missing.
    """
    policy = empty_policy(config, base)
    tensors = read_tensors(path, config, policy, policy_arguments)
    policy.head.to_empty(device=tail_device(base))
    policy.head.load_state_dict(
        {name: tensors.pop(f"policy.head.{name}") for name in ("weight", "bias")}
    )
    if policy.trial is not None:
        policy.trial.to_empty(device=tail_device(base))
        policy.trial.load_state_dict({"weight": tensors.pop("policy.trial.weight")})
    policy.step_stride = config.step_stride
    policy.trial_every = config.trial_every
    policy.trial_max_tokens = config.trial_max_tokens
    tail = {name.removeprefix("policy.tail."): tensor for name, tensor in tensors.items()}
    if config.tuning == "lora" and policy.tail is not None:
        policy.tail.load_state_dict(tail, strict=False)
    else:
        policy.load_tail(base, tail)
        check_norms(policy, base, config)
    policy.set_trainable(config.tuning)
    return policy.eval()


def empty_base(config: PreTrainedConfig) -> PreTrainedModel:
    """A base without weights (on the meta device), and unquantised."""
    config = copy.deepcopy(config)
    vars(config).pop("quantization_config", None)
    with torch.device("meta"):
        base: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return base


def empty_policy(config: OSPrunerConfig, base: PreTrainedModel) -> StoppingPolicy:
    """The policy that a configuration describes, without weights of its own.

    Raises:
        ImportError: tuning "lora" without peft.
        ValueError: the base cannot carry it.
    """
    policy = StoppingPolicy.empty(
        base,
        config.num_policy_layers,
        config.prices,
        config.tuning == "queries",
        config.trial_every > 0,
    )
    if config.tuning == "lora":
        policy.adapt(base, config.lora_rank)
    return policy


def read_tensors(
    path: str,
    config: OSPrunerConfig,
    policy: StoppingPolicy,
    policy_arguments: Mapping[str, Any],
) -> dict[str, torch.Tensor]:
    """The tensors of a policy's file, by their names there.

    Args:
        path: the policy's repository or folder.
        config: the policy's.
        policy: one of `empty_policy`.
        policy_arguments: where to look (`revision`, `cache_dir`...).

    Raises:
        ValueError: the file is damaged, see `check_header`, or a value is no finite number.
        OSError: the file is missing.
    """
    try:
        file = str(cached_file(path, WEIGHTS, **policy_arguments))
    except OSError as error:
        raise OSError(
            f"{path} has no {WEIGHTS}: a policy is read from that file only, and pickled weights "
            f"(pytorch_model.bin and the like) never are ({error})"
        ) from error
    try:
        with safe_open(file, framework="pt") as opened:
            header = {}
            for name in opened.keys():  # noqa: SIM118  (it is no dict)
                part = opened.get_slice(name)
                header[name] = (tuple(part.get_shape()), part.get_dtype())
            check_header(path, config, policy, header)
            tensors = {name: opened.get_tensor(name) for name in header}
    except SafetensorError as error:
        raise ValueError(
            f"{path}/{WEIGHTS} is damaged or no safetensors file ({error}); copy it again, or "
            "load with force_download=True"
        ) from error
    if broken := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise ValueError(
            f"{path}/{WEIGHTS} holds NaN or infinite values in {broken}: the training went wrong, "
            "or the file is damaged. Copy it again, or train the policy anew with a lower "
            "learning rate"
        )
    return tensors


def check_header(
    path: str,
    config: OSPrunerConfig,
    policy: StoppingPolicy,
    found: Mapping[str, tuple[tuple[int, ...], str]],
) -> None:
    """Refuses a file that does not hold exactly a policy's tensors.

    Args:
        path: where it lies, for the message.
        config: the policy's.
        policy: one of `empty_policy`.
        found: shape and dtype, as safetensors writes it, of each tensor in the file.

    Raises:
        ValueError: naming what is missing, unknown, or of another shape or kind of number.
    """
    own = policy.own_names()
    wanted = {f"policy.{name}": t for name, t in policy.state_dict().items() if name in own}
    missing, unknown = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    misfits = []
    for name in sorted(set(wanted) & set(found)):
        (shape, dtype), tensor = found[name], wanted[name]
        floats = tensor.is_floating_point()
        if shape != tensor.shape or (dtype in _FLOATS) != floats:
            kind = "floats" if floats else "integers"
            misfits.append(f"{name} {dtype} {shape} instead of {kind} {tuple(tensor.shape)}")
    if missing or unknown or misfits:
        raise ValueError(
            f"{path}/{WEIGHTS} does not hold this policy's tensors; missing: "
            f"{missing or 'none'}, unknown: {unknown or 'none'}, of another shape or dtype: "
            f"{misfits or 'none'}. {saved_by(config.ospruner_version)}"
        )


def check_norms(policy: StoppingPolicy, base: PreTrainedModel, config: OSPrunerConfig) -> None:
    """Checks the final norm, which is copied from the base and never trained; see `check_norm`."""
    if policy.tail is None:
        return
    theirs = base.get_decoder().state_dict()
    for name, tensor in policy.tail.state_dict().items():
        if not name.startswith("layers.") and not theirs[name].is_meta:
            own, where = theirs[name].to(tensor.device), str(base.name_or_path)
            check_norm(tensor, own, name, config, where)


def check_norm(
    own: torch.Tensor, theirs: torch.Tensor, name: str, config: OSPrunerConfig, where: str
) -> None:
    """Refuses a base of the right sizes but other weights, such as another fine-tune.

    Args:
        own: what the policy has copied of the base's final norm, (H,).
        theirs: the base's.
        name: of the tensor.
        config: the policy's.
        where: the base's folder or id.

    Raises:
        ValueError: they differ.
    """
    # Either may have been rounded to another dtype: a step of bfloat16 is let pass.
    if not torch.allclose(own.float(), theirs.float(), 2**-7, 1e-4):
        raise ValueError(
            f"the base {where!r} has the sizes that the policy needs, but other weights: {name} "
            "differs. Load the base that the policy was trained for: "
            f"{config.base_model_name_or_path!r} at revision {config.base_revision!r}"
        )


@dataclass(frozen=True)
class _Loaded:
    """A policy loaded for a base, and the state of both for which it holds."""

    state: Hashable
    config: OSPrunerConfig
    policy: StoppingPolicy
    token_format: TokenFormat
    tokenizer: PreTrainedTokenizerBase


# By base, then by repository. No value refers to its base, which thus can be freed.
_POLICIES: WeakKeyDictionary[PreTrainedModel, dict[str, _Loaded]] = WeakKeyDictionary()
_LOCK = threading.Lock()


def generate_on(
    base: PreTrainedModel,
    repository: str,
    hub: Mapping[str, Any],
    stop_policy: Any = True,
    **arguments: Any,
) -> Any:
    """`base.generate` with a repository's policy, which is loaded once per base and commit.

    The base itself is left as it is: neither frozen nor put in eval mode.

    Args:
        base: the causal LM.
        repository: the policy's id on the Hub, or its folder.
        hub: `revision` (a commit) and where to look; empty for a folder.
        stop_policy: as for `OSPrunerForCausalLM.generate`; False generates plainly.
        arguments: generate's own.

    Returns:
        What generate returns; `base.last_stop` holds one `StopRecord` a row.

    Raises:
        ValueError: the policy was made for another base, or see `generate_pruned`.
    """
    model: Any = base  # with `generate`, and room for `last_stop`
    if stop_policy is False or stop_policy is None:
        return type(model).generate(model, **arguments)
    asked = StopPolicyConfig.of(stop_policy)
    loaded = _loaded(base, repository, hub)
    config = loaded.config
    settings = asked.with_defaults(config)
    inputs = arguments.pop("inputs", None)
    arguments.setdefault("tokenizer", loaded.tokenizer)
    output, records = generate_pruned(
        base, loaded.policy, loaded.token_format, settings, inputs, **arguments
    )
    model.last_stop = records
    return output


def _loaded(base: PreTrainedModel, repository: str, hub: Mapping[str, Any]) -> _Loaded:
    """The repository's policy for this base, from memory where both are as they were."""
    implementation = base.config._attn_implementation
    state = (_version(repository, hub), base.device, base.dtype, implementation)
    name = os.path.abspath(repository) if os.path.isdir(repository) else repository
    with _LOCK:
        policies = _POLICIES.setdefault(base, {})
        if name not in policies or policies[name].state != state:
            config = OSPrunerConfig.from_pretrained(repository, **hub)
            _, policy, tokenizer = load_parts(repository, config, base, dict(hub), {})
            chosen = ReasoningFormat.from_dict(config.reasoning_format or {})
            token_format = TokenFormat.compile(chosen, tokenizer)
            policies[name] = _Loaded(state, config, policy, token_format, tokenizer)
        return policies[name]


def _version(repository: str, hub: Mapping[str, Any]) -> Hashable:
    """The commit of a repository; of a folder, when its files were written."""
    if not os.path.isdir(repository):
        return hub["revision"]
    files = [os.path.join(repository, name) for name in ("config.json", "model.safetensors")]
    return tuple(os.stat(file).st_mtime_ns for file in files if os.path.exists(file))
