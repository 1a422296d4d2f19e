"""What published things are called: one repository a policy, one collection a family.

A policy of every price is one repository for its whole frontier. vLLM knows no subfolders, so that
of policies of one lambda each is a repository of its own; a collection holds those of one base
together.
"""

from __future__ import annotations

import re

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # not in __all__

from ospruner.eval.text import penalty_name

__all__ = ["check_repo_id", "collection_title", "labels_name", "policy_name"]

# The distilled DeepSeek-R1 models, the paper's first family, have long names.
_SHORT = ((r"^deepseek-r1-distill-qwen-", "r1-"), (r"^deepseek-r1-distill-", "r1-"))


def base_name(base: str) -> str:
    """A base as it stands in names: r1-7b, r1-llama-8b, gpt-oss-20b.

    Args:
        base: its Hub id, or its folder.
    """
    name = base.rstrip("/").rpartition("/")[2].lower()
    for pattern, short in _SHORT:
        name = re.sub(pattern, short, name)
    return re.sub(r"[^a-z0-9.]+", "-", name).strip("-.")


def policy_name(base: str, method: str, price: float | None) -> str:
    """The name of a policy's repository: ospruner-r1-7b-lam5e-5, ospruner-r1-7b-probe.

    Args:
        base: its Hub id, or its folder.
        method: of the policy.
        price: lambda; None for a policy of every price, which is ospruner-r1-7b.
    """
    if price is None:
        return f"ospruner-{base_name(base)}"
    kind = f"lam{penalty_name(price)}" if method == "os-pruner" else method
    return f"ospruner-{base_name(base)}-{kind}"


def labels_name(base: str) -> str:
    """The name of a data set of labels: ospruner-labels-r1-7b."""
    return f"ospruner-labels-{base_name(base)}"


def collection_title(base: str) -> str:
    """The title of the collection of a base's policies and labels."""
    return f"OS-Pruner {base_name(base)}"


def check_repo_id(asked: str, name: str) -> str:
    """The repository that a user named; where only `org/` was given, with the name by the scheme.

    Raises:
        ValueError: it is no repository's id on the Hub.
    """
    repo_id = asked + name if asked.endswith("/") else asked
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(f"repo={asked!r} cannot be an id on the Hub: {error}") from error
    if repo_id.count("/") != 1:
        raise ValueError(
            f"repo={asked!r} must name the owner too, as in org/{name}; org/ alone is named so"
        )
    return repo_id
