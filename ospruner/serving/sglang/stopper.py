"""What stops requests inside SGLang, and what SGLang calls for it.

`ospruner.serving.start` calls `register` in each of SGLang's processes, also where it serves
something else: nothing is imported here that SGLang has not imported by then, and each hook does
nothing but look where no policy is served. The model is in `tapped.py`.

SGLang keeps tokens on the device and knows requests by slots, the rows of its table of keys and
values. Before each forward it is looked who has come. Before each sampling the last tokens are
copied to the host, once; there `StopRow`s decide, and the policy runs on requests that have ended a
step. A request that SGLang puts back into its queue keeps its row, and may come into another slot.

A request's keys stand in `custom_params`: of `sampling_params` in SGLang's own dialect, else of the
body.
"""

from __future__ import annotations

import importlib
import json
import os
from pkgutil import resolve_name
from typing import Any

import torch

from modeling_ospruner.configuration_ospruner import OSPrunerConfig, shown

from ..core import RowCore, ServedRow, log_off, served_format
from ..requests import ID, StopRequest, check_places, translated
from .tapped import OSPrunerSGLang

ARCHITECTURE = "OSPrunerForCausalLM"
OWNER = "custom_params"
DEFAULTS_VARIABLE = "OSPRUNER_SERVER_DEFAULTS"  # of the environment: its defaults, as JSON
RECORD = "stop_record"  # in an answer's `meta_info`, what happened: a list of one record
_ONE_BEAM = ("beam_width", 1)
_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
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


def server_defaults(config: OSPrunerConfig) -> StopRequest:
    """The defaults of this process's server, with what its policy promises."""
    said = json.loads(os.environ.get(DEFAULTS_VARIABLE, "null"))
    defaults = StopRequest(said, DEFAULTS_VARIABLE, server=True)
    defaults.settle(config)
    return defaults


def excluded(params: Any) -> dict[str, Any]:
    """What in a request's parameters (SGLang's `SamplingParams`) excludes the policy, by name."""
    found = {name: getattr(params, name) for name in (*_GRAMMARS, "beam_width")}
    return {name: value for name, value in found.items() if value and (name, value) != _ONE_BEAM}


def check_body(request: Any) -> None:
    """Refuses a body over HTTP in which our keys, or budgets, stand where nobody reads.

    All else that is wrong in it is SGLang's to refuse. The request is FastAPI's, which keeps the
    body once it has been read; None for none.
    """
    body = None if request is None else vars(request).get("_body")
    try:
        sent = json.loads(body or "null")
    except (ValueError, RecursionError):
        return
    if isinstance(sent, dict):
        own = f"{OWNER!r} (in SGLang's own dialect that of 'sampling_params')"
        check_places(sent, (OWNER, f"sampling_params.{OWNER}"), own)


def read_chat(request: Any, config: OSPrunerConfig, parser: str | None) -> None:
    """Puts the effort of a chat (SGLang's `ChatCompletionRequest`) into its keys.

    The `parser` is the server's `--reasoning-parser`, which looks at replies alone.

    Raises:
        ValueError: tools beside a forced box, or a prefilled reply that does not think.
    """
    defaults = server_defaults(config)
    body = {OWNER: request.custom_params, "reasoning_effort": request.reasoning_effort}
    _, keys = translated(body, OWNER, "", defaults, config)
    formed = request.response_format or request.regex or request.ebnf
    if keys is not None and not formed and request.tool_choice in ("auto", "none"):
        request.custom_params = keys  # else the policy, which they would ask for, is off
    asked = StopRequest(request.custom_params, OWNER)
    asked.check_tools(request.tools, request.tool_choice, defaults)
    if parser is None or not (request.continue_final_message and request.separate_reasoning):
        return
    begun = str(request.messages[-1].content)
    if "<think>" not in begun or "</think>" in begun:
        raise ValueError(
            "continue_final_message is True, and the reply that it begins does not think: "
            f"SGLang's parser {parser!r} takes what follows for thinking. Send separate_reasoning "
            "false, or the rendered prompt to /generate"
        )


def check_params(params: Any, config: OSPrunerConfig) -> StopRequest:
    """The keys of SGLang's `SamplingParams`; refuses wrong ones by name: over HTTP, a 400."""
    request = StopRequest(params.custom_params, OWNER)
    if request.name is not None:
        raise ValueError(
            f"{OWNER}: {ID} is {shown(request.name)}; SGLang tells what happened with each answer, "
            "in meta_info: leave it out"
        )
    if request.on and (found := excluded(params)):
        raise ValueError(
            f"{OWNER}: stop_policy and {shown(found)} exclude each other: neither knows what the "
            "other one forces. Leave one of them out"
        )
    request.check_price(config)
    settings = request.settings(server_defaults(config), params.min_new_tokens)
    marked = (config.reasoning_format or {}).get("think_end", True)
    strings = [*(params.stop_strs or ()), *(params.stop_regex_strs or ())]
    if marked and strings and settings is not None:
        raise ValueError(
            f"stop is {shown(strings)}, for which SGLang looks in the thinking, too, and "
            "would cut it: send stop_token_ids, or stop_policy false in custom_params, or serve "
            "with vLLM, where strings end answers alone"
        )
    if params.n > 1 and "seed" in request.fields:
        raise ValueError(
            f"{OWNER}: stop_seed is {request.fields['seed']} and n is {params.n}, and nothing "
            "tells SGLang's n texts apart: send n requests, each with its stop_sample_index, or "
            "leave stop_seed out"
        )
    return request


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
