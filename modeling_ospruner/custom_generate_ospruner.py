"""`base.generate(..., custom_generate="org/policy", trust_remote_code=True)` stops with a policy.

`save_pretrained` puts a copy of this file where transformers looks for it. transformers then runs
its `generate` in place of the base's own; the flat code of the same repository does the work.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from transformers.dynamic_module_utils import get_class_from_dynamic_module

CUSTOM_GENERATE = "custom_generate/generate.py"
"""Where the copy stands in a policy's repository."""

_HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "token")


def generate(model: Any, **arguments: Any) -> Any:
    """As `model.generate`, with this repository's stopping policy.

    Args:
        model: the base, a causal LM, which the policy was made for.
        arguments: generate's own, and `stop_policy` as in `OSPrunerForCausalLM.generate`
            (default: True). `revision` chooses the policy's commit, branch or tag.

    Returns:
        What generate returns; `model.last_stop` holds one record a row, an output object
        (`return_dict_in_generate=True`) as `stop`, too.

    Raises:
        RuntimeError: it was not called through `model.generate(custom_generate=...)`.
        ValueError: the policy was made for another base; or see `OSPrunerForCausalLM.generate`.
    """
    # transformers passes neither the repository nor, for a local folder, anything that leads back
    # to it (this file runs from a copy): they are known to the caller alone.
    repository = sys._getframe(1).f_locals.get("custom_generate")
    if not isinstance(repository, str):
        raise RuntimeError(
            "the policy's generate was not called by transformers; write "
            "base.generate(..., custom_generate='<policy>', trust_remote_code=True)"
        )
    hub = {name: arguments.pop(name) for name in _HUB_ARGUMENTS if name in arguments}
    asked_revision = arguments.pop("revision", None)
    if not os.path.isdir(repository):
        # This copy's module is ...<commit>.custom_generate.generate: the flat code and the
        # weights are taken from the same commit, though the branch may have moved on.
        hub["revision"] = __name__.split(".")[-3]
    elif asked_revision is not None:
        raise ValueError(
            f"revision is {asked_revision!r}, but {repository!r} is a folder, which has none: "
            "leave revision out"
        )
    run = get_class_from_dynamic_module("modeling_ospruner.generate_on", repository, **hub)
    return run(model, repository, hub, **arguments)
