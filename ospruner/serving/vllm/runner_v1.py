"""The processor in vLLM's model runner V1, which vLLM gives up: nothing else imports this file.

V1 keeps each request's tokens in a list of its own on the host, and tells its processors which
requests stand where in the batch. Preempted requests leave the batch and come back into it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from ..core import ServedRow
from .model import STOP_HEAD, StopHead
from .processor import PolicyProcessor


@dataclass(eq=False)
class _Request:
    """A request in V1's batch."""

    served: ServedRow
    params: SamplingParams  # as vLLM holds them, of all texts of a prompt the same object at times
    # vLLM's own list of its tokens, which grows; another one after a preemption, where steps are
    # scheduled ahead.
    output: list[int]

    def __post_init__(self) -> None:
        self.prompt_tokens = self.served.taken

    def comes_back(self, params: SamplingParams, output: list[int]) -> bool:
        """Whether a request that enters the batch with these is this one.

        Texts of one prompt that share their parameters are told apart by their tokens. Where these
        are the same, too, either may go on as the other: they differ in draws to come alone.
        """
        taken = self.served.taken - self.prompt_tokens
        same = params is self.params and output[:taken] == self.output[:taken]
        return same and len(output) >= taken

    def take_in(self) -> None:
        """Takes in what is new in `output`, as far as vLLM knows it (-1 stands for the rest)."""
        for token in self.output[self.served.taken - self.prompt_tokens :]:
            if token < 0:
                break
            self.served.take(token)


class V1Processor(PolicyProcessor, LogitsProcessor):
    """Stops requests; see the module."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(vllm_config)
        self._requests: dict[int, _Request] = {}  # by place in the batch
        self._left: list[_Request] = []  # the batch, the oldest first; preempted ones come back
        self._most_left = vllm_config.scheduler_config.max_num_seqs

    def is_argmax_invariant(self) -> bool:
        """No: a forced token need not be the most likely one."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follows the requests in vLLM's batch."""
        if batch_update is None:
            return
        places: dict[int, Any] = dict(self._requests)
        process_dict_updates(places, batch_update, lambda *entering: entering)
        staying = {id(request) for request in places.values()}
        for request in self._requests.values():
            if id(request) not in staying:
                request.take_in()
                self._core.tell_leaving(request.served)
                if not request.output or request.output[-1] != request.served.end_id:
                    self._left.append(request)
        # Only now, for one that leaves may come back in the same step.
        for i, one in places.items():
            places[i] = one if isinstance(one, _Request) else self._enter(*one)
        self._requests = {i: one for i, one in places.items() if one is not None}
        del self._left[: -self._most_left]

    def _enter(
        self, params: SamplingParams, prompt_ids: list[int] | None, output: list[int]
    ) -> _Request | None:
        known = [one for one in self._left if one.comes_back(params, output)]
        if known:
            request = max(known, key=lambda one: (one.output is output, one.served.taken))
            self._left.remove(request)
            request.output = output
            return request
        served = None if prompt_ids is None else self.admit(params, prompt_ids)
        return None if served is None else _Request(served, params, output)

    def take_rest(self, rows: Sequence[ServedRow]) -> None:
        """Takes in what vLLM's lists hold by now."""
        for request in self._requests.values():
            if request.served in rows:
                request.take_in()

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """One decode step: decides where steps have ended, and shapes the logits (B, V)."""
        for request in self._requests.values():
            request.take_in()
        rows = {i: request.served for i, request in self._requests.items()}
        if deciding := [i for i, served in rows.items() if served.row.at_boundary]:
            head: StopHead = self._layers[STOP_HEAD]
            outputs, positions = head.ask(torch.tensor(deciding, device=head.weight.device))
            # The rows of a prefill's parts are not sampled from.
            lengths = [rows[i].taken for i in deciding]
            pairs = enumerate(zip(lengths, positions.tolist(), strict=True))
            ended = [k for k, (length, position) in pairs if position == length - 1]
            self._core.decide([rows[deciding[k]] for k in ended], outputs[ended])
        self._core.shape(logits, rows.items())
        return logits
