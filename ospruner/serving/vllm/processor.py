"""What `--logits-processors` is given: the same for vLLM's two model runners.

Each runner has a processor of its own (`runner_v2.py`, `runner_v1.py`), which follows the requests
of its batches. How requests come, their records and counters are the same in both.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from modeling_ospruner.formats_ospruner import TokenFormat

from ..core import GRAMMAR, RowCore, ServedRow
from ..requests import DEFAULTS, ID, StopRequest
from .monitoring import StopRoutes, count_answer, count_ended, count_off
from .plugin import ARCHITECTURE, PROCESSOR

__all__ = ["Arriving", "StopProcessor", "StopRecords", "keep_thinking"]

_MOST_RECORDS = 4096  # of requests with a `stop_id`; the oldest are forgotten
_FIRST_SEED = "ospruner_first_seed"
"""Among a request's extra arguments: the `seed` that it came with. vLLM gives its i-th text this
seed + i, and nothing else by which the texts could be told apart."""

_INTERFACES = ("vllm.v1.worker.gpu.sample.logits_processor", "vllm.v1.sample.logits_processor")
_interfaces: Any = tuple(  # those that this vLLM has
    importlib.import_module(one).LogitsProcessor
    for one in _INTERFACES
    if importlib.util.find_spec(one) is not None
)


class Arriving:
    """What a vLLM engine does with requests that come, in either runner.

    Raises:
        ValueError: the model is no policy, or the server's defaults are wrong.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        model, additional = vllm_config.model_config, vllm_config.additional_config
        if ARCHITECTURE not in model.architectures:
            raise ValueError(
                f"{PROCESSOR} stops with a policy, but {model.model!r} is none: serve a policy's "
                "folder or Hub id, or leave --logits-processors out"
            )
        said = additional.get(DEFAULTS) if isinstance(additional, dict) else None
        self.core = RowCore.load(  # admits and decides
            model.hf_config,
            model.tokenizer,
            model.tokenizer_revision,
            StopRequest(said, f"additional_config[{DEFAULTS!r}]", server=True),
            model.seed,
            # Of tensor-parallel ranks, which all do the same, one counts.
            *(
                (count_ended, count_answer, count_off)
                if vllm_config.parallel_config.rank == 0
                else ()
            ),
        )
        self._drafts = vllm_config.speculative_config is not None
        self._records: OrderedDict[str, ServedRow] = OrderedDict()

    def admit(self, params: SamplingParams, prompt_ids: Sequence[int]) -> ServedRow | None:
        """Takes in a request that comes; None for one that is not stopped."""
        excluded = None
        if params.thinking_token_budget is not None:
            excluded = "thinking_token_budget"
        elif params.allowed_token_ids is not None:
            excluded = "allowed_token_ids"
        elif params.structured_outputs is not None:
            excluded = f"{GRAMMAR} beside speculative decoding" if self._drafts else GRAMMAR
        extra, end_id, text = params.extra_args or {}, None, 0
        if params.ignore_eos and params.stop_token_ids:  # what still ends it
            end_id = params.stop_token_ids[0]
        if params.seed is not None and _FIRST_SEED in extra:
            text = params.seed - extra[_FIRST_SEED]
        ends, least = not params.ignore_eos, params.min_tokens
        # vLLM counts its ends of text among all of them whether it ignores them or not.
        stops = params.all_stop_token_ids if ends else params.stop_token_ids or ()
        row = self.core.admit(extra, prompt_ids, stops, end_id, text, least, excluded, ends)
        if row is not None and (name := extra.get(ID)) is not None:
            self._records[name] = row
            while len(self._records) > _MOST_RECORDS:
                self._records.popitem(last=False)
        return row if row is not None and row.thinks else None

    def named(self, name: str) -> ServedRow | None:
        """The last request with the `stop_id`; None where it is not known."""
        return self._records.get(name)


_detokenizer_of = IncrementalDetokenizer.from_new_request


def keep_thinking(detokenizer: Any, fmt: TokenFormat, prompt_ids: Sequence[int]) -> None:
    """Lets a request's stop strings end its answer alone: vLLM looks for them in all of a text.

    Args:
        detokenizer: vLLM's, of the request.
        fmt: the policy's. Where no marker ends the thinking, all of a reply is its answer.
        prompt_ids: of the request.
    """
    state, least = fmt.prompt_state(prompt_ids), detokenizer.min_tokens
    if state.ended or not fmt.format.think_end:
        return
    update = detokenizer.update

    def follow(new_token_ids: list[int], stop_terminated: bool) -> str | None:
        for token in new_token_ids:
            state.push(token)
        # Before so many tokens vLLM looks for none.
        before = detokenizer.num_output_tokens() + len(new_token_ids) - state.answer_tokens
        detokenizer.min_tokens = max(least, before) if state.answer_tokens else sys.maxsize
        found: str | None = update(new_token_ids, stop_terminated)
        return found

    vars(detokenizer)["update"] = follow


def _detokenizer(tokenizer: Any, request: Any) -> IncrementalDetokenizer:
    """VLLM's own; where the policy is on, with `keep_thinking`."""
    made, params = _detokenizer_of(tokenizer, request), request.sampling_params
    if tokenizer is not None and params.stop and request.prompt_token_ids is not None:
        extra = {k: v for k, v in (params.extra_args or {}).items() if k != _FIRST_SEED}
        if StopRequest(extra).settings(StopRoutes.defaults) is not None:
            fmt = importlib.import_module(f"{__package__}.parser").format_of(tokenizer.name_or_path)
            keep_thinking(made, fmt, request.prompt_token_ids)
    return made


# Where requests come in, a server's processors are looked at first, and with them this file.
IncrementalDetokenizer.from_new_request = staticmethod(_detokenizer)


def _processor(vllm_config: VllmConfig) -> Any:
    """The processor of the runner that is on; the other one's runner may not even start here."""
    if vllm_config.use_v2_model_runner:
        return importlib.import_module(f"{__package__}.runner_v2").V2Processor
    return importlib.import_module(f"{__package__}.runner_v1").V1Processor


class StopProcessor(*_interfaces):  # type: ignore[misc]
    """Makes the processor of the runner that is on."""

    def __new__(cls, vllm_config: VllmConfig, *others: Any) -> Any:
        """The one of V2 for (config, slots), the one of V1 for (config, device, pinning)."""
        return _processor(vllm_config)(vllm_config, *others)

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        """Refuses wrong keys by name: over HTTP, a 400 with the message.

        vLLM's own budget, which is also Anthropic's `thinking.budget_tokens`, becomes the policy's
        where it is on.
        """
        extra, defaults = dict(params.extra_args or {}), StopRoutes.defaults
        extra.pop(_FIRST_SEED, None)  # of an earlier use of the same parameters
        request = StopRequest(extra)
        if params.structured_outputs is not None and "max_answer_tokens" in request.fields:
            raise ValueError(
                f"max_answer_tokens is {request.fields['max_answer_tokens']}, but structured "
                "outputs say where the answer ends: leave one of them out"
            )
        if (budget := params.thinking_token_budget) is not None:
            budgeted = request.take_budget(extra, budget, defaults)
            if budgeted is not None:
                extra, params.thinking_token_budget = budgeted, None
                request = StopRequest(extra)
        request.settings(defaults, params.min_tokens)
        if params.n > 1 and "seed" in request.fields:
            if params.seed is None:
                raise ValueError(
                    f"stop_seed is {request.fields['seed']} and n is {params.n}, but there is no "
                    "seed, by which alone vLLM tells the n texts apart: send a seed too, or leave "
                    "stop_seed out"
                )
            extra[_FIRST_SEED] = params.seed
        params.extra_args = extra or None


class StopRecords:
    """What `--worker-extension-cls` adds to vLLM's workers: they tell what happened to requests."""

    def ospruner_record(self, name: str) -> dict[str, Any] | None:
        """The `StopRecord` of the last request with this `stop_id`, as a dict.

        Called by `collective_rpc("ospruner_record", args=(name,))`.
        """
        worker: Any = self
        own = _processor(worker.vllm_config)
        [processor] = [one for one in own.all_of(worker.model_runner) if isinstance(one, own)]
        record = processor.record(name)
        return None if record is None else asdict(record)
