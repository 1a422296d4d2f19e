"""The logits processor that stops requests inside vLLM and forces what follows.

It follows the tokens of each request that the policy may stop. At a step's end it reads the stop
probability that the model left for the request's row; what then happens to the request is decided
by `StopRow`, as in generate. Forced tokens are scores with one finite entry. A row whose answer is
complete gets the end-of-text token, for a processor cannot end a request otherwise.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from functools import partial
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from modeling_ospruner.configuration_ospruner import price_logits, price_places
from modeling_ospruner.rules_ospruner import TrialAnswer
from modeling_ospruner.stopping_ospruner import Phase, StopRecord, StopRow, shape_scores

from ..admitting import NAN, Admitted
from .admission import MOST_RECORDS, Admission, check_params, count_ended
from .model import STOP_HEAD, StopHead

__all__ = ["StopProcessor"]

logger = init_logger(__name__)


class _Request:
    """A request that the policy may stop.

    Attributes:
        row: decides.
        params: as vLLM holds them, of all texts of a prompt the same object at times.
        prompt_tokens: the length of its prompt.
        output: vLLM's own list of its tokens, which grows; another one after a preemption, where
            steps are scheduled ahead.
        admitted: how it is stopped.
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
        admitted: Admitted,
    ) -> None:
        self.row = row
        self.params = params
        self.admitted = admitted
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
        self._admission = Admission(vllm_config)
        self._config = self._admission.config
        self._layers: dict[str, Any] = vllm_config.compilation_config.static_forward_context
        self._requests: dict[int, _Request] = {}
        self._left: list[_Request] = []  # the batch, the oldest first; preempted ones come back
        self._most_left = vllm_config.scheduler_config.max_num_seqs
        self._records: OrderedDict[str, StopRecord] = OrderedDict()
        self._warned = False
        self._counts = vllm_config.parallel_config.rank == 0

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        """Refuses wrong keys; see `check_params`."""
        check_params(params)

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
                if not request.output or request.output[-1] != request.admitted.end_id:
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
        if prompt_ids is None or (admitted := self._admission.admit_params(params)) is None:
            return None
        row = StopRow(admitted.plan, prompt_ids, admitted.sample_index)
        request = _Request(row, params, len(prompt_ids), output, admitted)
        if admitted.name is not None:
            self._records[admitted.name] = request.row.record
            while len(self._records) > MOST_RECORDS:
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
        said, at = head.ask(torch.tensor(deciding, device=head.weight.device))
        outputs, positions = said, at.tolist()
        logits, known = outputs[:, 0], self._config.prices
        prices: list[float | None] = [None] * len(deciding)
        if known is not None:  # each row at its own price
            asked = [known.place(self._requests[i].admitted.price) for i in deciding]
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
                logger.warning(NAN)

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
                    count_ended(request.row.record, request.admitted)
            rows.append((i, request.row))
            if request.complete:
                ended[i] = request.admitted.end_id
        if rows:
            shape_scores(logits, rows, ended)
        return logits


def _no_trial(max_tokens: int) -> TrialAnswer:
    raise AssertionError("the learned policy asks for no trial answers")


def _no_text() -> str:
    raise AssertionError("the learned policy asks for no texts")
