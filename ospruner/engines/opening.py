"""Engines by name: what the command line and scripts construct them with."""

from __future__ import annotations

import importlib.util
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file, extract_commit_hash

from ospruner.bases import refuse_no_tokenizer
from ospruner.provenance import check_place

from .interface import Engine

if TYPE_CHECKING:
    import torch

_A_BASE = "; give the folder or Hub id of a reasoning model"


@dataclass(frozen=True)
class EngineOptions:
    """Which base an engine runs, and how; which engines look at what, see `_ONLY`."""

    base: str  # its folder or Hub id; for "openai" also the model's name at the endpoints
    revision: str | None = None  # of a Hub id
    batch_size: int | None = None  # rows, or requests, at once; None for the engine's default
    # Such as "float32", "bfloat16". "auto" is the base's own, but float32 on a CPU: with "vllm" on
    # one that computes no bfloat16, with "transformers" on any, which gives the same in any batch;
    # there "bfloat16" is several times as fast where the CPU has units for it.
    dtype: str = "auto"
    device: str | None = None  # such as "cpu", "cuda"; None for the best there is
    urls: tuple[str, ...] = ()  # endpoints
    # Further keyword arguments of the engine, such as vLLM's `tensor_parallel_size`.
    arguments: Mapping[str, Any] = field(default_factory=dict)


def parse_arguments(texts: Sequence[str], what: str) -> dict[str, Any]:
    """Arguments as the command line gives them: `tensor_parallel_size=2`.

    A value that reads as JSON (a number, true, a list...) is that; any other is text. Errors call
    one `what`, such as "engine argument".

    Raises:
        ValueError: one has no name or no value, or a name comes twice.
    """
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        if not name.isidentifier() or not equals or name in found:
            raise ValueError(
                f"{what} {text!r}; each must be name=value, such as tensor_parallel_size=2 or "
                "enable_thinking=true, and given once"
            )
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return found


def load_tokenizer(base: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a base.

    Raises:
        ValueError: there is no such base, or it has no tokenizer.
        FileNotFoundError: there is no such folder.
    """
    check_place("base", base)
    with _told(f"base is {base!r}, of which no tokenizer can be loaded", _A_BASE):
        refuse_no_tokenizer(base, revision)
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(base, revision=revision)
    return tokenizer


def known_revision(base: str, revision: str | None = None) -> str | None:
    """The commit of a base on the Hub; None for a folder.

    Raises:
        ValueError: there is no such base, or it is a stopping policy.
        FileNotFoundError: there is no such folder.
    """
    check_place("base", base)
    with _told(f"base is {base!r}, which cannot be loaded", _A_BASE):
        file = cached_file(base, "config.json", revision=revision)
    config: dict[str, Any] = json.loads(Path(str(file)).read_text("utf-8"))
    if config.get("model_type") == "ospruner":
        raise ValueError(
            f"base is {base!r}, which is no base but a stopping policy, for the base "
            f"{config.get('base_model_name_or_path')!r}: give that base"
        )
    return extract_commit_hash(file, None)


def default_engine(device: str | None = None) -> tuple[str, str]:
    """The engine to label with where none is named, and why.

    Where the user wants to compute on a `device`, it is the one that can.
    """
    import torch

    if device is not None:
        return "transformers", f"the one that computes on a given device ({device})"
    if not torch.cuda.is_available():
        return "transformers", "there is no CUDA GPU"
    if importlib.util.find_spec("vllm") is None:
        return "transformers", "vLLM, which is many times faster on a GPU, is not installed"
    return "vllm", "there are a CUDA GPU and vLLM"


def open_engine(name: str, tokenizer: PreTrainedTokenizerBase, options: EngineOptions) -> Engine:
    """Opens one of `ENGINES`, with the base's tokenizer.

    Raises:
        ValueError: an unknown engine, or a base or option that it cannot take.
        MissingPackageError: its package is not installed; the message holds the pip line.
    """
    if name not in ENGINES:
        raise ValueError(f"engine is {name!r}; it must be one of {', '.join(ENGINES)}")
    for option, engines in _ONLY.items():
        value = vars(options)[option]
        if name not in engines and value != vars(EngineOptions)[option]:
            raise ValueError(
                f"{option} is {value!r}, which the engine {name!r} does not look at (only "
                f"{', '.join(engines)} do): leave it out"
            )
    return ENGINES[name](tokenizer, options)


def _open_transformers(tokenizer: PreTrainedTokenizerBase, options: EngineOptions) -> Engine:
    import torch
    from transformers import AutoModelForCausalLM

    from .transformers.engine import TransformersEngine

    ours = set(inspect.signature(TransformersEngine).parameters) - {"model", "tokenizer"}
    own = {name: value for name, value in options.arguments.items() if name in ours}
    loading = {name: value for name, value in options.arguments.items() if name not in ours}
    place = device_named(options.device)
    if options.dtype != "auto" and not isinstance(vars(torch).get(options.dtype), torch.dtype):
        raise ValueError(
            f"dtype is {options.dtype!r}; it must be auto, float32, bfloat16 or float16"
        )
    on_cpu = place.type == "cpu" and "device_map" not in loading
    dtype = "float32" if options.dtype == "auto" and on_cpu else options.dtype
    given = f" with {loading}" if loading else ""
    with _told(f"base is {options.base!r}, which cannot be loaded{given}"):
        model = AutoModelForCausalLM.from_pretrained(
            options.base, revision=options.revision, dtype=dtype, **loading
        )
    if "device_map" not in loading:
        torch.nn.Module.to(model, place)
    if options.batch_size is not None:
        own["batch_size"] = options.batch_size
    return TransformersEngine(model, tokenizer, **own)


def device_named(name: str | None) -> torch.device:
    """The device of a name, such as "cpu", "cuda"; None for the best there is.

    Raises:
        ValueError: it is not here.
    """
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    advice = "; leave it out, or give cpu, or cuda where there is a GPU"
    with _told(f"device is {name!r}, which is not here", advice):
        device = torch.device(name)
        torch.empty(0, device=device)
    return device


def _open_server(name: str, tokenizer: PreTrainedTokenizerBase, options: EngineOptions) -> Engine:
    """One that works on so many requests at once."""
    more = {"revision": options.revision, **options.arguments}
    if options.batch_size is not None:
        more["concurrency"] = options.batch_size
    if name == "vllm":
        from .vllm import VLLMEngine

        return VLLMEngine(options.base, tokenizer, **{"dtype": options.dtype, **more})
    from .http import HTTPEngine, OpenAIEngine, SGLangEngine

    kind = OpenAIEngine if name == "openai" else SGLangEngine
    known = {*inspect.signature(HTTPEngine).parameters, *inspect.signature(kind).parameters}
    known -= {"base", "tokenizer", "urls", "revision", "more"}
    if unknown := sorted(set(options.arguments) - known):
        raise ValueError(
            f"engine arguments {unknown}: the {name} engine takes {sorted(known)}; what the server "
            "itself takes is given where it starts"
        )
    return kind(options.base, tokenizer, options.urls, **more)


ENGINES: dict[str, Callable[[PreTrainedTokenizerBase, EngineOptions], Engine]] = {
    "transformers": _open_transformers,
    **{name: partial(_open_server, name) for name in ("vllm", "sglang", "openai")},
}
"""What opens each engine."""
_ONLY = {
    "dtype": ("transformers", "vllm"),
    "device": ("transformers",),
    "urls": ("openai", "sglang"),
}


@contextmanager
def _told(what: str, advice: str = "") -> Iterator[None]:
    """Says what a library's error means here."""
    try:
        yield
    except (OSError, ValueError, TypeError, RuntimeError, AssertionError) as error:
        line = str(error).strip().partition("\n")[0].rstrip(".")
        raise ValueError(f"{what} ({line}){advice}") from error
