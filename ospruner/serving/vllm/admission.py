"""What is the same in both of vLLM's model runners: how requests come, one name, records."""

from __future__ import annotations

import importlib
from dataclasses import asdict
from typing import Any, NoReturn

from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.sample.logits_processor import LogitsProcessor as ProcessorV1
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as ProcessorV2

from modeling_ospruner.configuration_ospruner import OSPrunerConfig
from modeling_ospruner.stopping_ospruner import StopRecord

from .. import admitting as serving
from ..requests import DEFAULTS, StopRequest
from .monitoring import count, count_promised
from .plugin import ARCHITECTURE, PROCESSOR

__all__ = [
    "MOST_RECORDS",
    "Admission",
    "StopProcessor",
    "StopRecords",
    "check_params",
    "count_ended",
]

MOST_RECORDS = 4096  # of requests with a `stop_id`; the oldest are forgotten
_FIRST_SEED = "ospruner_first_seed"
"""Among a request's extra arguments: the `seed` that it came with. vLLM gives its i-th text this
seed + i, and nothing else by which the texts could be told apart."""

logger = init_logger(__name__)


def check_params(params: SamplingParams) -> None:
    """Refuses wrong keys: over HTTP, a 400 with the message.

    Raises:
        ValueError: naming the key, its value and what is allowed.
    """
    request = StopRequest(params.extra_args)
    if request.on and params.structured_outputs is not None:
        _refuse("structured outputs", "their grammar does not know the forced closing")
    if request.on and params.thinking_token_budget is not None:
        _refuse("thinking_token_budget", "use max_thinking_tokens, which ends at a step")
    extra = dict(params.extra_args or {})
    extra.pop(_FIRST_SEED, None)  # of an earlier use of the same parameters
    if params.n > 1 and "seed" in request.fields:
        if params.seed is None:
            raise ValueError(
                f"stop_seed is {request.fields['seed']} and n is {params.n}, but there is no "
                "seed, by which alone vLLM tells the n texts apart: send a seed too, or leave "
                "stop_seed out"
            )
        extra[_FIRST_SEED] = params.seed
    params.extra_args = extra or None


def _refuse(what: str, why: str) -> NoReturn:
    raise ValueError(f"stop_policy and {what} exclude each other: {why}")


class Admission(serving.Admission):
    """What a vLLM server knows when requests come.

    Args:
        vllm_config: of the engine.

    Raises:
        ValueError: the model is no policy, or the server's defaults are wrong.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        model = vllm_config.model_config
        config: OSPrunerConfig = model.hf_config
        if ARCHITECTURE not in model.architectures:
            raise ValueError(
                f"{PROCESSOR} stops with a policy, but {model.model!r} is none: serve a policy's "
                "folder or Hub id, or leave --logits-processors out"
            )
        additional = vllm_config.additional_config
        defaults = StopRequest(
            additional.get(DEFAULTS) if isinstance(additional, dict) else None,
            owner=f"additional_config[{DEFAULTS!r}]",
            server=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(
            model.tokenizer, revision=model.tokenizer_revision, config=config
        )
        super().__init__(config, tokenizer, defaults, model.seed)

    def admit_params(self, params: SamplingParams) -> serving.Admitted | None:
        """How a request that comes is stopped; None for one that is not."""
        if params.structured_outputs is not None or params.thinking_token_budget is not None:
            return None
        asked = StopRequest(params.extra_args)
        end_id, text = None, 0
        if params.ignore_eos and params.stop_token_ids:  # what still ends it
            end_id = params.stop_token_ids[0]
        if params.seed is not None and params.extra_args and _FIRST_SEED in params.extra_args:
            text = params.seed - params.extra_args[_FIRST_SEED]
        try:
            return self.admit(asked, params.all_stop_token_ids, end_id, text)
        except ValueError as error:  # over HTTP it was a 400; here an error would end the engine
            logger.error("a request goes on without the policy: %s", error)
            return None


def count_ended(record: StopRecord, admitted: serving.Admitted) -> None:
    """Counts a request whose thinking has ended."""
    count(record, admitted.control)
    if admitted.promise is not None:
        count_promised(record, admitted.promise)


def _processor(vllm_config: VllmConfig) -> Any:
    """The processor of the runner that is on; the other one's runner may not even start here."""
    if vllm_config.use_v2_model_runner:
        return importlib.import_module(f"{__package__}.slot_processor").SlotProcessor
    return importlib.import_module(f"{__package__}.processor").StopProcessor


class StopProcessor(ProcessorV1, ProcessorV2):
    """What `--logits-processors` is given: makes the processor of the runner that is on."""

    def __new__(cls, vllm_config: VllmConfig, *others: Any) -> Any:
        """The one of V2 for (config, slots), the one of V1 for (config, device, pinning)."""
        return _processor(vllm_config)(vllm_config, *others)

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        """Refuses wrong keys; see `check_params`."""
        check_params(params)


class StopRecords:
    """What `--worker-extension-cls` adds to vLLM's workers: they tell what happened to requests."""

    def ospruner_record(self, name: str) -> dict[str, Any] | None:
        """The `StopRecord` of the last request with this `stop_id`, as a dict.

        Called by `collective_rpc("ospruner_record", args=(name,))`.
        """
        worker: Any = self
        own = _processor(worker.vllm_config)
        if worker.vllm_config.use_v2_model_runner:
            processors = worker.model_runner.sampler.logits_processors
        else:
            processors = worker.model_runner.input_batch.logitsprocs.all
        for processor in processors:
            if isinstance(processor, own):
                record = processor.record(name)
                return None if record is None else asdict(record)
        return None
