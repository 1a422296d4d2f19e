"""What stops requests inside SGLang, and what SGLang calls for it.

`ospruner.serving.start` calls `register` in each of SGLang's processes, also where it serves
something else: nothing is imported here that SGLang has not imported by then, and each hook does
nothing but look where no policy is served. The model is in `tapped.py`.

SGLang keeps tokens on the device and knows requests by slots, the rows of its table of keys and
values. Before each forward it is looked who has come. Before each sampling the last tokens are
copied to the host, once; there `StopRow`s decide, and the policy runs on requests that have ended a
step. A request that SGLang puts back into its queue keeps its row, and may come into another slot.
"""

from __future__ import annotations

import importlib
from pkgutil import resolve_name
from typing import Any

import torch

from ..core import RowCore, ServedRow, log_off, served_format
from .custom_params import RECORD, check_body, check_params, excluded, read_chat, server_defaults
from .tapped import OSPrunerSGLang

ARCHITECTURE = "OSPrunerForCausalLM"

_OURS = "_ospruner"  # of SGLang's own object of a request: its row, until its record is told
_OFF = "_ospruner_off"  # likewise: why the policy, which is on by default, is off for it

_stopper: Stopper | None = None  # of this process, once it holds a policy


class Stopper:
    """Stops requests of SGLang's model runner."""

    def __init__(self, runner: Any) -> None:
        arguments, config = runner.server_args, runner.model_config.hf_config
        defaults, where = server_defaults(config), arguments.tokenizer_path or arguments.model_path
        fmt = served_format(config, where, arguments.revision, defaults)
        seed = arguments.random_seed or 0
        self._core = RowCore(config, fmt, defaults, seed, on_off=self._note_off)
        self._why: str | None = None  # the policy was off for the last request
        self._runner = runner
        runner.model.hold(len(runner.req_to_token_pool.req_to_token))
        self._here: dict[int, ServedRow] = {}  # by slot

    def meet(self, requests: list[Any]) -> None:
        """Takes in who has come into a slot, of SGLang's requests that are computed next."""
        for request in requests:
            ours, slot = vars(request), request.kv.req_pool_idx
            if _OURS not in ours:
                ours[_OURS] = self._admit(request)
            row: ServedRow | None = ours[_OURS]
            if self._here.get(slot) is row:  # also where neither is anybody
                continue
            self._here.pop(slot, None)
            if row is not None:
                self._here = {place: one for place, one in self._here.items() if one is not row}
                row.come_back(list(request.origin_input_ids), list(request.output_ids))
                self._here[slot] = row

    def _admit(self, request: Any) -> ServedRow | None:
        params = request.sampling_params
        others = ", ".join(excluded(params)) or None
        ends = not params.ignore_eos
        stops = [*(params.stop_token_ids or ()), *((ends and request.eos_token_ids) or ())]
        # What still ends a request that ignores the end of text.
        end_id = min(params.stop_token_ids) if params.ignore_eos and params.stop_token_ids else None
        prompt = list(request.origin_input_ids)
        keys, least, self._why = params.custom_params, params.min_new_tokens, None
        how: dict[str, Any] = {"least_tokens": least, "excluded": others, "ends": ends}
        row = self._core.admit(keys, prompt, stops, end_id, **how)
        vars(request)[_OFF] = self._why
        return row

    def _note_off(self, why: str) -> None:
        log_off(why)
        self._why = why

    def step(self, logits: torch.Tensor, batch: Any) -> None:
        """Decides where steps of thinking have ended, and shapes the logits (B, V) of a batch."""
        if not self._here or not len(logits):
            return
        tokens = batch.input_ids
        if not batch.forward_mode.is_decode():
            tokens = tokens[batch.extend_start_loc + batch.extend_seq_lens - 1]
        columns = (batch.req_pool_indices, batch.seq_lens, tokens)
        told = torch.stack([one[: len(logits)].long() for one in columns])
        rows, ended = [], []
        for place, (slot, length, token) in enumerate(zip(*told.tolist(), strict=True)):
            row = self._here.get(slot)
            if row is None:
                continue
            rows.append((place, row))
            if length > row.taken:  # else a part of a prompt, or a token that is computed again
                row.take(token)
            if row.row.at_boundary and length == row.taken:
                ended.append((slot, length, row))
        if ended:
            slots, lengths, asked = map(list, zip(*ended, strict=True))
            outputs = self._runner.model.ask(self._runner.attn_backend, slots, lengths)
            self._core.decide(asked, outputs)
        self._core.shape(logits, rows)

    def record(self, request: Any) -> dict[str, Any] | None:
        """The `StopRecord` of a request that is done, for JSON, or why the policy was off."""
        row: ServedRow | None = vars(request).get(_OURS)
        if row is None:
            why = vars(request).pop(_OFF, None)
            return None if why is None else {"off": why}
        # The token sampled last, which no step may have looked at.
        prompt, text = len(request.origin_input_ids), list(request.output_ids_through_stop)
        for token in text[max(row.taken - prompt, 0) :]:
            row.take(token)
        vars(request)[_OURS] = None
        return row.report


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
        _stopper = Stopper(runner)


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


def register() -> None:
    """Tells this process's SGLang about policies, and what of ours it calls."""
    from sglang.srt.models.registry import ModelRegistry
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    runner, tokenizer = "model_executor.model_runner.ModelRunner", "managers.tokenizer_manager"
    streamer = "managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
    chat = "entrypoints.openai.serving_chat.OpenAIServingChat"
    for place, hook, kind in (
        ("configs.model_config.ModelConfig.__init__", _plain_text, HookType.AFTER),
        (f"{runner}.alloc_memory_pool", _prepare, HookType.AFTER),
        ("managers.tp_worker.TpModelWorker.forward_batch_generation", _meet, HookType.BEFORE),
        (f"{runner}.sample", _step, HookType.BEFORE),
        (f"{streamer}.build_additional_customized_info", _tell, HookType.AFTER),
        (f"{tokenizer}.TokenizerManager.generate_request", _look, HookType.BEFORE),
        (f"{tokenizer}.TokenizerManager._create_tokenized_object", _check, HookType.AFTER),
        (f"{chat}._validate_request", _check_chat, HookType.AFTER),
    ):
        target = f"sglang.srt.{place}"
        resolve_name(target)  # SGLang would only log that there is no such place
        HookRegistry.register(target, hook, kind)
    ModelRegistry.models[ARCHITECTURE] = OSPrunerSGLang
