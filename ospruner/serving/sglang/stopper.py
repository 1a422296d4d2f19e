"""What stops requests inside SGLang.

SGLang keeps tokens on the device and knows requests by slots, the rows of its table of keys and
values. So does `StopSlots`: what each request is about to do is decided by tensors over slots.
Before each forward it is looked who has come, before each sampling what the last tokens have ended;
the policy runs on requests that have ended a step. Which these are is the one thing for which a
step waits. What is told of requests is noted on the device, and read when one of them is done.
"""

from __future__ import annotations

import logging
import math
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from transformers import AutoTokenizer

from modeling_ospruner.stopping_ospruner import StopRecord

from ..admitting import NAN, Admission, Admitted
from ..decisions import Decisions
from ..requests import StopRequest, in_json
from ..slots import REASONS, StopSlots
from .custom_params import OWNER, excluded, server_defaults

__all__ = ["Stopper"]

_READ = ("reason", "thinking_tokens", "nan_steps")
_OURS = "_ospruner"  # of SGLang's own object of a request
_NOBODY = torch.iinfo(torch.long).max

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Asked:
    """A request that the policy may stop.

    Attributes:
        admitted: how.
        slot: where it is; None where it is in none.
        record: what has been read so far.
        left: of a request that was put back into the queue, what its slot held, on the device.
        done: whether its record has been told.
    """

    admitted: Admitted
    slot: int | None = None
    record: StopRecord = field(default_factory=StopRecord)
    left: dict[str, torch.Tensor] = field(default_factory=dict)
    done: bool = False


class Stopper:
    """Stops requests; see the module.

    Args:
        runner: SGLang's model runner, with a policy as its model.

    Raises:
        ValueError: the server's defaults are wrong.
    """

    def __init__(self, runner: Any) -> None:
        arguments, config = runner.server_args, runner.model_config.hf_config
        tokenizer = AutoTokenizer.from_pretrained(
            arguments.tokenizer_path or arguments.model_path,
            revision=arguments.revision,
            config=config,
        )
        self._admission = Admission(
            config, tokenizer, server_defaults(), arguments.random_seed or 0
        )
        self._runner = runner
        self._device = torch.device(runner.device)
        count = len(runner.req_to_token_pool.req_to_token)
        runner.model.hold(count)
        self._slots = StopSlots(self._admission.token_format, count, self._device)
        # Tokens of prompt and text that have been taken in, by slot.
        self._taken = torch.full((count,), _NOBODY, device=self._device)
        self._decisions = Decisions(self._slots, count, config.prices, self._device)
        self._here: dict[int, _Asked] = {}  # by slot
        self._computed: Any = None  # an event after the last step
        self._warned = False

    def meet(self, requests: list[Any]) -> None:
        """Takes in who has come into a slot.

        Args:
            requests: SGLang's own, of the batch that is computed next.
        """
        for request in requests:
            ours, slot = vars(request), request.kv.req_pool_idx
            if _OURS not in ours:
                ours[_OURS] = self._admit(request)
            asked = ours[_OURS]
            if self._here.get(slot) is asked:  # also where neither is anybody
                continue
            self._empty(slot)
            if asked is not None:
                if asked.slot is not None:
                    self._empty(asked.slot)
                self._enter(asked, slot, request)

    def _admit(self, request: Any) -> _Asked | None:
        params = request.sampling_params
        if excluded(params):
            return None
        stops = [*(params.stop_token_ids or ()), *(request.eos_token_ids or ())]
        # What still ends a request that ignores the end of text.
        end_id = min(params.stop_token_ids) if params.ignore_eos and params.stop_token_ids else None
        try:
            asked = StopRequest(params.custom_params, OWNER)
            admitted = self._admission.admit(asked, stops, end_id)
        except ValueError as error:  # over HTTP it was a 400; here an error would end the engine
            logger.error("a request goes on without the policy: %s", error)
            return None
        return None if admitted is None else _Asked(admitted)

    def _empty(self, slot: int) -> None:
        """Forgets a slot; who is in it may come back, into another one."""
        asked = self._here.pop(slot, None)
        if asked is None:
            return
        if not asked.done:
            asked.left = {**self._slots.taken_out(slot), "taken": self._taken[slot].clone()}
        asked.slot = None
        self._slots.leave(slot)
        self._taken[slot] = _NOBODY

    def _enter(self, asked: _Asked, slot: int, request: Any) -> None:
        prompt, text = list(request.origin_input_ids), list(request.output_ids)
        length = len(prompt) + len(text)
        asked.slot, self._here[slot] = slot, asked
        self._decisions.enter(slot, asked.admitted.price)
        left, asked.left = asked.left, {}
        if left and length - 1 <= int(left["taken"]) <= length:
            self._slots.put_back(slot, left)
            self._taken[slot] = left["taken"]
            return
        admitted = asked.admitted
        index, end_id = admitted.sample_index, admitted.end_id
        if not self._slots.enter(slot, admitted.plan, prompt, index, end_id):
            self._slots.leave(slot)
            return
        slots = torch.tensor([slot], device=self._device)
        unknown = torch.full((1,), math.nan, device=self._device)
        for token in text:  # decided on long ago, by a slot that was forgotten since
            self._slots.push(slots, torch.tensor([token], device=self._device))
            self._slots.decide(slots, unknown)
        self._taken[slot] = length

    def step(self, logits: torch.Tensor, batch: Any) -> None:
        """Decides where steps of thinking have ended, and shapes the logits.

        Args:
            logits: of the next tokens, (B, V); in place.
            batch: SGLang's, that gave them.
        """
        if not self._here or not len(logits):
            return
        slots = batch.req_pool_indices[: len(logits)].long()
        lengths = batch.seq_lens[: len(logits)].long()
        tokens = batch.input_ids
        if not batch.forward_mode.is_decode():
            tokens = tokens[batch.extend_start_loc + batch.extend_seq_lens - 1]
        fresh = lengths > self._taken[slots]
        self._taken[slots] = torch.where(fresh, lengths, self._taken[slots])
        self._slots.push(slots, tokens[: len(logits)].long(), fresh)
        ended = self._slots.at_boundary(slots).nonzero()[:, 0]
        if len(ended):
            self._decide(slots[ended], lengths[ended])
        self._slots.shape(slots, logits)
        if self._device.type != "cpu":
            self._computed = torch.Event(device=self._device)
            self._computed.record()

    def _decide(self, slots: torch.Tensor, lengths: torch.Tensor) -> None:
        outputs = self._runner.model.ask(self._runner.attn_backend, slots, lengths)
        records = [self._here[slot].record for slot in slots.tolist()]
        self._decisions.note(records, self._decisions.decide(slots, outputs))

    def record(self, request: Any) -> dict[str, Any] | None:
        """The `StopRecord` of a request that is done, for JSON; None for one not admitted.

        Args:
            request: SGLang's own.
        """
        asked: _Asked | None = vars(request).get(_OURS)
        if asked is None or asked.done:
            return None
        if self._computed is not None:  # of the stream on which steps are computed
            self._computed.synchronize()
        self._decisions.read()
        asked.done = True
        state = asked.left
        if asked.slot is not None:
            self._take_in_the_rest(asked.slot, request)
            state = {name: self._slots.state[name][asked.slot] for name in _READ}
        if state:
            numbers = torch.stack([state[name].long() for name in _READ]).tolist()
            reason, asked.record.thinking_tokens, asked.record.nan_steps = numbers
            asked.record.reason = REASONS[reason]
        if asked.record.nan_steps and not self._warned:
            self._warned = True
            logger.warning(NAN)
        return in_json(asdict(asked.record))

    def _take_in_the_rest(self, slot: int, request: Any) -> None:
        """Takes in the token sampled last, which no step may have looked at."""
        prompt, text = len(request.origin_input_ids), list(request.output_ids_through_stop)
        slots = torch.tensor([slot], device=self._device)
        for token in text[max(int(self._taken[slot]) - prompt, 0) :]:
            self._slots.push(slots, torch.tensor([token], device=self._device))
        self._taken[slot] = _NOBODY
