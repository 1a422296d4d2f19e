"""The logits processor that stops requests inside vLLM and forces what follows.

It follows the tokens of each request that the policy may stop. At a step's end it reads the stop
probability that the model left for the request's row; what then happens to the request is decided
by `StopRow`, as in generate. Forced tokens are scores with one finite entry. A row whose answer is
complete gets the end-of-text token, for a processor cannot end a request otherwise.
"""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NoReturn

import torch
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from modeling_ospruner.configuration_ospruner import OSPrunerConfig, price_logits, price_places
from modeling_ospruner.formats_ospruner import ReasoningFormat, TokenFormat, guess
from modeling_ospruner.rules_ospruner import TrialAnswer, mix64, uniform
from modeling_ospruner.stopping_ospruner import Phase, RowPlan, StopRecord, StopRow, shape_scores

from .model import STOP_HEAD, StopHead
from .monitoring import count
from .plugin import ARCHITECTURE, PROCESSOR
from .requests import DEFAULTS, StopRequest

__all__ = ["StopProcessor", "StopRecords"]

_MOST_RECORDS = 4096  # of requests with a `stop_id`; the oldest are forgotten
_FIRST_SEED = "ospruner_first_seed"
"""Among a request's extra arguments: the `seed` that it came with. vLLM gives its i-th text this
seed + i, and nothing else by which the texts could be told apart."""

logger = init_logger(__name__)


class _Request:
    """A request that the policy may stop.

    Attributes:
        row: decides.
        params: as vLLM holds them, of all texts of a prompt the same object at times.
        prompt_tokens: the length of its prompt.
        output: vLLM's own list of its tokens, which grows; another one after a preemption, where
            steps are scheduled ahead.
        end_id: the token that ends it, once its answer is complete.
        control: whether it belongs to those that never stop.
        length_penalty: the price of a token, for a policy of every price.
        taken: tokens of `output` that `row` has taken in.
        complete: whether its answer is, by a token that does not end a text.
        counted: whether the end of its thinking has been counted.
    """

    def __init__(
        self,
        row: StopRow,
        params: SamplingParams,
        prompt_tokens: int,
        output: list[int],
        end_id: int,
        control: bool,
        length_penalty: float,
    ) -> None:
        self.row = row
        self.length_penalty = length_penalty
        self.params = params
        self.end_id = end_id
        self.control = control
        self.complete = False
        self.counted = False
        self.output = output
        self.prompt_tokens = prompt_tokens
        self.taken = 0

    def comes_back(self, params: SamplingParams, output: list[int]) -> bool:
        """Whether a request that enters the batch with these is this one.

        Texts of one prompt that share their parameters are told apart by their tokens. Where these
        are the same, too, either may go on as the other: they differ in draws to come alone.
        """
        same = params is self.params and output[: self.taken] == self.output[: self.taken]
        return same and len(output) >= self.taken

    def take_in(self) -> None:
        """Takes in what is new in `output`, as far as vLLM knows it (-1 stands for the rest)."""
        for token in self.output[self.taken :]:
            if token < 0:
                break
            if self.row.at_boundary:  # decided long ago, by a row that was forgotten meanwhile
                self.decide(math.nan, math.nan)
            if self.row.push(token):
                self.complete = token not in self.row.eos_ids
            self.taken += 1

    def decide(self, probability: float, price: float | None) -> None:
        """Decides on the step that has ended with the last token.

        Args:
            probability: of a stop.
            price: of indifference; None for a policy of one lambda.
        """
        indifference = None if price is None else partial(float, price)
        self.row.decide(partial(float, probability), _no_trial, _no_text, indifference)


class StopProcessor(LogitsProcessor):
    """Stops requests; see the module.

    Args:
        vllm_config: of the engine.
        device: of the logits.
        is_pin_memory: not used.

    Raises:
        ValueError: the model is no policy, or the server's defaults are wrong.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        model = vllm_config.model_config
        config: OSPrunerConfig = model.hf_config
        if ARCHITECTURE not in model.architectures:
            raise ValueError(
                f"{PROCESSOR} stops with a policy, but {model.model!r} is none: serve a policy's "
                "folder or Hub id, or leave --logits-processors out"
            )
        additional = vllm_config.additional_config
        self._defaults = StopRequest(
            additional.get(DEFAULTS) if isinstance(additional, dict) else None,
            owner=f"additional_config[{DEFAULTS!r}]",
            server=True,
        )
        self._defaults.settle(config)
        tokenizer = AutoTokenizer.from_pretrained(
            model.tokenizer, revision=model.tokenizer_revision, config=config
        )
        literals = config.reasoning_format
        self._format = TokenFormat.compile(
            guess(tokenizer) if literals is None else ReasoningFormat.from_dict(literals), tokenizer
        )
        if sentence := self._defaults.fields.get("wind_down"):
            self._format = self._format.winding_down(sentence, tokenizer)
        self._eos_id: int = tokenizer.eos_token_id
        self._config = config
        self._step_stride = config.step_stride
        self._layers: dict[str, Any] = vllm_config.compilation_config.static_forward_context
        self._requests: dict[int, _Request] = {}
        self._left: list[_Request] = []  # the batch, the oldest first; preempted ones come back
        self._most_left = vllm_config.scheduler_config.max_num_seqs
        self._records: OrderedDict[str, StopRecord] = OrderedDict()
        self._seed = mix64(model.seed)
        self._seen = 0
        self._warned = False
        self._counts = vllm_config.parallel_config.rank == 0

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
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

    def is_argmax_invariant(self) -> bool:
        """No: a forced token need not be the most likely one."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follows the requests in vLLM's batch."""
        if batch_update is None:
            return
        slots: dict[int, Any] = dict(self._requests)
        process_dict_updates(slots, batch_update, lambda *entering: entering)
        staying = {id(request) for request in slots.values()}
        for request in self._requests.values():
            if id(request) not in staying:
                request.take_in()
                if not request.output or request.output[-1] != request.end_id:
                    self._left.append(request)
        # Only now, for one that leaves may come back in the same step.
        for i, one in slots.items():
            slots[i] = one if isinstance(one, _Request) else self._enter(*one)
        self._requests = {i: one for i, one in slots.items() if one is not None}
        del self._left[: -self._most_left]

    def _enter(
        self, params: SamplingParams, prompt_ids: list[int] | None, output: list[int]
    ) -> _Request | None:
        known = [one for one in self._left if one.comes_back(params, output)]
        if known:
            request = max(known, key=lambda one: (one.output is output, one.taken))
            self._left.remove(request)
            request.output = output
            return request
        asked = StopRequest(params.extra_args)
        settings = asked.settings(self._defaults)
        structured = params.structured_outputs is not None
        budget = params.thinking_token_budget is not None
        if settings is None or prompt_ids is None or structured or budget:
            return None
        self._seen += 1
        control = uniform(self._seed, self._seen, -1) < self._defaults.control
        if control:
            settings = replace(settings, min_thinking_tokens=sys.maxsize, max_thinking_tokens=None)
        if "seed" not in asked.fields:
            # As if each request were another sample; on all tensor-parallel ranks the same.
            settings = replace(settings, first_sample_index=self._seen, seed=self._seed)
        elif params.seed is not None and params.extra_args and _FIRST_SEED in params.extra_args:
            text = params.seed - params.extra_args[_FIRST_SEED]
            settings = replace(settings, first_sample_index=settings.first_sample_index + text)
        settings = settings.with_defaults(self._config)
        eos = frozenset({self._eos_id, *params.all_stop_token_ids})
        plan = RowPlan(settings, settings.chosen_rule(self._step_stride), self._format, eos)
        row = StopRow(plan, prompt_ids, settings.first_sample_index)
        end_id = self._eos_id
        if params.ignore_eos and params.stop_token_ids:  # what still ends it
            end_id = params.stop_token_ids[0]
        price = self._config.length_penalty
        if settings.length_penalty is not None:
            price = settings.length_penalty
        request = _Request(row, params, len(prompt_ids), output, end_id, control, price)
        if asked.name is not None:
            self._records[asked.name] = request.row.record
            while len(self._records) > _MOST_RECORDS:
                self._records.popitem(last=False)
        return request if row.phase is Phase.THINKING else None

    def record(self, name: str) -> StopRecord | None:
        """What happened so far to the request with the `stop_id`; None where it is not known."""
        for request in self._requests.values():
            request.take_in()  # its last tokens may not have been looked at yet
        return self._records.get(name)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """One decode step: decides where steps have ended, and shapes the logits (B, V)."""
        deciding: list[int] = []
        for i, request in self._requests.items():
            request.take_in()
            if request.row.at_boundary:
                deciding.append(i)
        if deciding:
            self._decide(deciding)
        return self._shape(logits)

    def _decide(self, deciding: list[int]) -> None:
        head: StopHead = self._layers[STOP_HEAD]
        rows = torch.tensor(deciding, device=head.outputs.device)
        outputs, positions = head.outputs[rows], head.positions[rows].tolist()
        logits, known = outputs[:, 0], self._config.prices
        prices: list[float | None] = [None] * len(deciding)
        if known is not None:  # each row at its own price
            asked = [known.place(self._requests[i].length_penalty) for i in deciding]
            logits = price_logits(outputs, torch.tensor(asked, device=outputs.device))
            prices = [known.price_at(place) for place in price_places(outputs).tolist()]
        probabilities = torch.sigmoid(logits).tolist()
        decided = zip(deciding, probabilities, prices, positions, strict=True)
        for i, probability, price, position in decided:
            request = self._requests[i]
            if position != request.prompt_tokens + request.taken - 1:
                continue  # a part of a prefill: its row is not sampled from
            request.decide(probability, price)
            if math.isnan(probability) and not self._warned:
                self._warned = True
                logger.warning(
                    "the stopping policy gave NaN: requests continue. Its weights, or the base's "
                    "hidden states, are broken"
                )

    def _shape(self, logits: torch.Tensor) -> torch.Tensor:
        """Shapes the logits of requests whose thinking has ended, which it counts once."""
        rows: list[tuple[int, StopRow]] = []
        ended: dict[int, int] = {}
        for i, request in self._requests.items():
            if request.row.phase is Phase.THINKING:
                continue
            if not request.counted:
                request.counted = True
                if self._counts:
                    count(request.row.record, request.control)
            rows.append((i, request.row))
            if request.complete:
                ended[i] = request.end_id
        if rows:
            shape_scores(logits, rows, ended)
        return logits


class StopRecords:
    """What `--worker-extension-cls` adds to vLLM's workers: they tell what happened to requests."""

    def ospruner_record(self, name: str) -> dict[str, Any] | None:
        """The `StopRecord` of the last request with this `stop_id`, as a dict.

        Called by `collective_rpc("ospruner_record", args=(name,))`.
        """
        worker: Any = self
        for processor in worker.model_runner.input_batch.logitsprocs.all:
            if isinstance(processor, StopProcessor):
                record = processor.record(name)
                return None if record is None else asdict(record)
        return None


def _refuse(what: str, why: str) -> NoReturn:
    raise ValueError(f"stop_policy and {what} exclude each other: {why}")


def _no_trial(max_tokens: int) -> TrialAnswer:
    raise AssertionError("the learned policy asks for no trial answers")


def _no_text() -> str:
    raise AssertionError("the learned policy asks for no texts")
