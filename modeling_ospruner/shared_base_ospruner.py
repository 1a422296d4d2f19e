"""Policies on a base that somebody else has loaded: what `custom_generate/generate.py` runs."""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .configuration_ospruner import OSPrunerConfig
from .generation_ospruner import generate_pruned
from .loading_ospruner import load_parts
from .policy_ospruner import StoppingPolicy
from .reasoning_format import ReasoningFormat, TokenFormat
from .settings_ospruner import StopPolicyConfig


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
    settings = asked.with_defaults(loaded.config.default_mode, loaded.config.default_threshold)
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
