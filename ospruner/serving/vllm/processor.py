"""What vLLM's two model runners have in common: how requests come, what is told of them.

Each runner has a processor of its own (`runner_v2.py`, `runner_v1.py`), which follows the requests
of its batches; `plugin.py` chooses.
"""

import sys
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from ..core import GRAMMAR, RowCore, ServedRow, format_of, served_format
from ..requests import ID, StopRequest
from .monitoring import count_leaving, count_off
from .plugin import REPLY, Defaults

_MOST_RECORDS = 8192  # of requests and replies with a name; the oldest are forgotten
# Among a request's extra arguments: the `seed` that it came with. vLLM gives its i-th text this
# seed + i, and nothing else by which the texts could be told apart.
_FIRST_SEED = "ospruner_first_seed"


class PolicyProcessor:
    """A logits processor that stops with a policy.

    Raises:
        ValueError: the server's defaults are wrong.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        model, told = vllm_config.model_config, dict[str, Any]()
        if vllm_config.parallel_config.rank == 0:  # of ranks that all do the same, one counts
            told = {"on_leave": count_leaving, "on_off": count_off}
        config, defaults = model.hf_config, Defaults.of(vllm_config)
        fmt = served_format(config, model.tokenizer, model.tokenizer_revision, defaults)
        self._core = RowCore(config, fmt, defaults, model.seed, **told)
        self._layers: dict[str, Any] = vllm_config.compilation_config.static_forward_context
        self._drafts = vllm_config.speculative_config is not None
        self._named: OrderedDict[tuple[str, str], list[ServedRow]] = OrderedDict()

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        """Refuses wrong keys by name: over HTTP, a 400 with the message.

        vLLM's own budget, which is also Anthropic's `thinking.budget_tokens`, becomes the policy's
        where it is on.
        """
        extra, defaults = dict(params.extra_args or {}), Defaults.here
        extra.pop(_FIRST_SEED, None)  # of an earlier use of the same parameters
        request = StopRequest(extra)
        if Defaults.config is not None:  # else this process has made no engine of a policy
            request.check_price(Defaults.config)
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

    def admit(self, params: SamplingParams, prompt_ids: Sequence[int]) -> ServedRow | None:
        """Takes in a request that comes; None for one that is not stopped."""
        excluded, extra, ends = None, params.extra_args or {}, not params.ignore_eos
        if params.thinking_token_budget is not None:
            excluded = "thinking_token_budget"
        elif params.allowed_token_ids is not None:
            excluded = "allowed_token_ids"
        elif params.structured_outputs is not None:
            excluded = f"{GRAMMAR} beside speculative decoding" if self._drafts else GRAMMAR
        named = params.stop_token_ids or []  # vLLM counts its ends of text among all in any case
        row = self._core.admit(
            extra,
            prompt_ids,
            params.all_stop_token_ids if ends else named,
            named[0] if named and not ends else None,  # what still ends it
            (params.seed or 0) - extra.get(_FIRST_SEED, params.seed or 0),
            params.min_tokens,
            excluded,
            ends,
        )
        if row is None:
            return None
        if ID in extra:
            self._named[ID, extra[ID]] = [row]
        if REPLY in extra:
            self._named.setdefault((REPLY, extra[REPLY]), []).append(row)
        while len(self._named) > _MOST_RECORDS:
            self._named.popitem(last=False)
        return row if row.thinks else None

    @abstractmethod
    def take_rest(self, rows: Sequence[ServedRow]) -> None:
        """Takes in tokens of rows that no step has looked at yet."""

    def named(self, key: str, name: str) -> list[ServedRow]:
        """The last request with a `stop_id`, or all texts of a reply, up to date."""
        rows = self._named.get((key, name), [])
        self.take_rest(rows)
        return rows


_detokenizer_of: Any = IncrementalDetokenizer.from_new_request


def _detokenizer(tokenizer: Any, request: Any) -> IncrementalDetokenizer:
    """VLLM's own, which looks for stop strings in all of a text; under the policy in answers alone.

    Where no marker ends the thinking, all of a reply is its answer.
    """
    made, params = _detokenizer_of(tokenizer, request), request.sampling_params
    looks = tokenizer is not None and params.stop and request.prompt_token_ids is not None
    if not looks or StopRequest(params.extra_args).settings(Defaults.here) is None:
        return made
    fmt = format_of(tokenizer.name_or_path)
    state, least, update = fmt.prompt_state(request.prompt_token_ids), made.min_tokens, made.update
    if state.ended or not fmt.format.think_end:
        return made

    def follow(new_token_ids: list[int], stop_terminated: bool) -> str | None:
        for token in new_token_ids:
            state.push(token)
        # Before so many tokens vLLM looks for none.
        before = made.num_output_tokens() + len(new_token_ids) - state.answer_tokens
        made.min_tokens = max(least, before) if state.answer_tokens else sys.maxsize
        return update(new_token_ids, stop_terminated)

    vars(made)["update"] = follow
    return made


# Where requests come in, a server's processors are looked at first, and with them this file.
IncrementalDetokenizer.from_new_request = staticmethod(_detokenizer)


class StopRecords:
    """What `--worker-extension-cls` adds to vLLM's workers: they tell what happened to requests."""

    def ospruner_told(self, key: str, name: str, answer: bool = False) -> list[dict[str, Any]]:
        """The `StopRecord` of the last request with a `stop_id`, or those of a reply's texts.

        Called by `collective_rpc("ospruner_told", args=(key, name))`, with the key `stop_id` or a
        reply's. With `answer` those that think close their thinking now.
        Those of a reply have "fork", too: see `ServedRow.fork`.
        """
        worker: Any = self
        runner, v2 = worker.model_runner, worker.vllm_config.use_v2_model_runner
        listed = runner.sampler.logits_processors if v2 else runner.input_batch.logitsprocs.all
        [own] = [one for one in listed if isinstance(one, PolicyProcessor)]
        rows = own.named(key, name)
        for row in rows:
            row.asked |= answer
        return [row.report | ({"fork": row.fork} if key == REPLY else {}) for row in rows]
