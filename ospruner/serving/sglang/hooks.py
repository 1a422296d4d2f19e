"""The policy inside SGLang: what SGLang calls when it starts.

`ospruner.serving.start` calls `register` in each of SGLang's processes, also where it
serves something else: nothing is imported here that SGLang has not imported by then, and each
hook does nothing but look where no policy is served. The model is in `tapped.py`, what stops
requests in `stopper.py`.
"""

from __future__ import annotations

import importlib
from pkgutil import resolve_name
from typing import Any

from sglang.srt.models.registry import ModelRegistry
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from .custom_params import RECORD, check_body, check_params, read_chat
from .tapped import OSPrunerSGLang

ARCHITECTURE = "OSPrunerForCausalLM"

_stopper: Any = None  # of this process, once it holds a policy


def register() -> None:
    """Tells this process's SGLang, and its transformers, about policies."""
    importlib.import_module("modeling_ospruner")  # registers the configuration
    for target, hook, kind in _HOOKS:
        resolve_name(f"sglang.srt.{target}")  # SGLang would only log that there is no such place
        HookRegistry.register(f"sglang.srt.{target}", hook, kind)
    ModelRegistry.models[ARCHITECTURE] = OSPrunerSGLang


def _plain_text(_: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    """SGLang takes each model whose configuration holds another one for one that sees pictures."""
    if _is_policy(config):
        config.is_multimodal = False


def _is_policy(config: Any) -> bool:
    return ARCHITECTURE in (config.hf_config.architectures or ())


def _prepare(_: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
    """Once SGLang knows how many requests it will hold, and before graphs are recorded."""
    global _stopper
    if _is_policy(runner.model_config):
        output = importlib.import_module("sglang.srt.managers.scheduler_components.output_streamer")
        output.SchedulerOutputStreamer.has_additional_customized_info = True
        _stopper = importlib.import_module(f"{__package__}.stopper").Stopper(runner)


def _meet(worker: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    """Before each forward: who is in the batch."""
    if _stopper is not None and batch is not None:
        _stopper.meet(batch.reqs)


def _step(runner: Any, output: Any, batch: Any) -> None:
    """Before each sampling."""
    if _stopper is not None:
        _stopper.step(output.next_token_logits, batch)


def _tell(info: dict[str, Any], streamer: Any, requests: list[Any]) -> dict[str, Any] | None:
    """With each answer: the records of requests that are done."""
    if _stopper is None:
        return None
    records = [_stopper.record(one) if one.finished() else None for one in requests]
    if not any(records):
        return None
    return {**info, RECORD: [[] if one is None else [one] for one in records]}


def _check(tokenized: Any, manager: Any, *args: Any, **kwargs: Any) -> None:
    """Each request, where it comes in."""
    if _is_policy(manager.model_config) and hasattr(tokenized, "sampling_params"):
        check_params(tokenized.sampling_params, manager.model_config.hf_config)


def _look(manager: Any, obj: Any, request: Any = None) -> None:
    """Each request, over HTTP with FastAPI's own."""
    if _is_policy(manager.model_config):
        check_body(request)


def _check_chat(error: str | None, serving: Any, request: Any) -> str | None:
    """Each chat request, which may offer tools."""
    manager = serving.tokenizer_manager
    if error is None and _is_policy(manager.model_config):
        try:
            parser = manager.server_args.reasoning_parser
            read_chat(request, manager.model_config.hf_config, parser)
        except ValueError as found:
            return str(found)
    return None


_RUNNER = "model_executor.model_runner.ModelRunner"
_TOKENIZER = "managers.tokenizer_manager.TokenizerManager"
_STREAMER = "managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
_HOOKS = (
    ("configs.model_config.ModelConfig.__init__", _plain_text, HookType.AFTER),
    (f"{_RUNNER}.alloc_memory_pool", _prepare, HookType.AFTER),
    ("managers.tp_worker.TpModelWorker.forward_batch_generation", _meet, HookType.BEFORE),
    (f"{_RUNNER}.sample", _step, HookType.BEFORE),
    (f"{_STREAMER}.build_additional_customized_info", _tell, HookType.AFTER),
    (f"{_TOKENIZER}.generate_request", _look, HookType.BEFORE),
    (f"{_TOKENIZER}._create_tokenized_object", _check, HookType.AFTER),
    (
        "entrypoints.openai.serving_chat.OpenAIServingChat._validate_request",
        _check_chat,
        HookType.AFTER,
    ),
)
