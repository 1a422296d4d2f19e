"""Engines by name: what the command line and scripts construct them with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file, extract_commit_hash

from modeling_ospruner.loading_ospruner import refuse_no_tokenizer

from .interface import Engine

__all__ = ["ENGINES", "EngineOptions", "known_revision", "load_tokenizer", "open_engine"]


@dataclass(frozen=True)
class EngineOptions:
    """Which base an engine runs, and how.

    Attributes:
        base: the base's folder or Hub id; for "openai" also the model's name at the endpoints.
        revision: of a Hub id.
        batch_size: rows, or requests, that are worked on at once; None for the engine's default.
        dtype: such as "auto", "float32", "bfloat16".
        device: such as "cpu", "cuda"; None for the best there is. Only of "transformers".
        urls: endpoints, of "openai" and "sglang".
        arguments: further keyword arguments of the engine, such as vLLM's `tensor_parallel_size`.
    """

    base: str
    revision: str | None = None
    batch_size: int | None = None
    dtype: str = "auto"
    device: str | None = None
    urls: tuple[str, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)


def load_tokenizer(base: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a base.

    Raises:
        ValueError: there is no such base, or it has no tokenizer.
    """
    try:
        refuse_no_tokenizer(base, {"revision": revision})
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(base, revision=revision)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"base is {base!r}, of which no tokenizer can be loaded ({_first_line(error)}); give "
            "the folder or Hub id of a reasoning model"
        ) from error
    return tokenizer


def known_revision(base: str, revision: str | None = None) -> str | None:
    """The commit of a base on the Hub; None for a folder.

    Raises:
        ValueError: there is no such base.
    """
    try:
        file = cached_file(base, "config.json", revision=revision)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"base is {base!r}, which cannot be loaded ({_first_line(error)}); give the folder or "
            "Hub id of a reasoning model"
        ) from error
    return extract_commit_hash(file, None)


def open_engine(name: str, tokenizer: PreTrainedTokenizerBase, options: EngineOptions) -> Engine:
    """Opens an engine.

    Args:
        name: one of `ENGINES`.
        tokenizer: the base's.
        options: which base, and how it is run.

    Raises:
        ValueError: an unknown engine, or a base or option that it cannot take.
        MissingPackageError: its package is not installed; the message holds the pip line.
    """
    if name not in ENGINES:
        raise ValueError(f"engine is {name!r}; it must be one of {', '.join(ENGINES)}")
    return ENGINES[name](tokenizer, options)


def _open_transformers(tokenizer: PreTrainedTokenizerBase, options: EngineOptions) -> Engine:
    import torch
    from transformers import AutoModelForCausalLM

    from modeling_ospruner.engines.transformers.engine import TransformersEngine

    if options.urls:
        raise ValueError(f"urls is {options.urls}; the transformers engine runs in this process")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            options.base, revision=options.revision, dtype=options.dtype
        )
    except (OSError, ValueError) as error:
        raise ValueError(
            f"base is {options.base!r}, which cannot be loaded ({_first_line(error)})"
        ) from error
    torch.nn.Module.to(model, options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    size: dict[str, Any] = {} if options.batch_size is None else {"batch_size": options.batch_size}
    return TransformersEngine(model, tokenizer, **size, **options.arguments)


def _open_vllm(tokenizer: PreTrainedTokenizerBase, options: EngineOptions) -> Engine:
    from .vllm import VLLMEngine

    size: dict[str, Any] = {} if options.batch_size is None else {"concurrency": options.batch_size}
    return VLLMEngine(
        options.base,
        tokenizer,
        revision=options.revision,
        dtype=options.dtype,
        **size,
        **options.arguments,
    )


def _open_openai(tokenizer: PreTrainedTokenizerBase, options: EngineOptions) -> Engine:
    from .openai import OpenAIEngine

    size: dict[str, Any] = {} if options.batch_size is None else {"concurrency": options.batch_size}
    return OpenAIEngine(
        options.base,
        tokenizer,
        options.urls,
        revision=options.revision,
        **size,
        **options.arguments,
    )


def _open_sglang(tokenizer: PreTrainedTokenizerBase, options: EngineOptions) -> Engine:
    from .sglang import SGLangEngine

    size: dict[str, Any] = {} if options.batch_size is None else {"concurrency": options.batch_size}
    return SGLangEngine(
        options.base,
        tokenizer,
        options.urls,
        revision=options.revision,
        **size,
        **options.arguments,
    )


ENGINES: dict[str, Callable[[PreTrainedTokenizerBase, EngineOptions], Engine]] = {
    "transformers": _open_transformers,
    "vllm": _open_vllm,
    "sglang": _open_sglang,
    "openai": _open_openai,
}
"""What opens each engine."""


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
