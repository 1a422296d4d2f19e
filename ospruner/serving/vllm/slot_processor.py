"""The processor that stops requests inside vLLM's model runner V2.

That runner keeps tokens on the device and knows requests by slots. So does `StopSlots`: what each
request is about to do is decided by tensors over slots. The policy, one of queries only, runs after
the base's forward and outside of its graphs, on the rows that have ended a step; which these are is
the one thing for which a step waits. What is told of requests (records, counters) is noted on
the device and read some steps later.
"""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample.logits_processor import (
    LogitsContext,
    LogitsProcessor,
    LogitsProcRequestState,
)

from modeling_ospruner.configuration_ospruner import PRICE_RAMPS
from modeling_ospruner.stopping_ospruner import Phase, StopRecord

from ..admitting import NAN, Admitted
from ..decisions import Decisions
from ..slots import REASONS, StopSlots
from .admission import MOST_RECORDS, Admission, count_ended
from .model import STOP_HEAD, StopHead

__all__ = ["Arrivals", "SlotProcessor"]

_READ_EVERY = 16  # steps at which something was decided
_READ = ("phase", "reason", "thinking_tokens", "nan_steps")

logger = init_logger(__name__)


class Arrivals(DefaultModelState):
    """vLLM's own state of a model, which also keeps who comes into which slot, and who leaves.

    Processors are told a slot and parameters, but neither who comes nor with which tokens.

    Attributes:
        entering: by slot, who has come and has not been taken in.
        leaving: called with the id of each request that leaves, finished or preempted, while its
            slot still holds its tokens.
        batch: of the step that is being computed.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        model: nn.Module,
        encoder_cache: Any,
        device: torch.device,
    ) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        self.entering: dict[int, NewRequestData] = {}
        self.leaving: Callable[[str], None] | None = None
        self.batch: InputBatch | None = None
        head: Any = model.head
        head.arrivals = self

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        """Called before the processor's `add_request`."""
        super().add_request(req_index, new_req_data)
        self.entering[req_index] = new_req_data

    def remove_request(self, req_id: str) -> None:
        """Called before the slot is free."""
        if self.leaving is not None:
            self.leaving(req_id)
        super().remove_request(req_id)

    def prepare_attn(self, input_batch: InputBatch, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Called before each forward."""
        self.batch = input_batch
        prepared: dict[str, Any] = super().prepare_attn(input_batch, *args, **kwargs)
        return prepared


@dataclass(eq=False)
class _Asked:
    """A request that the policy may stop.

    Attributes:
        admitted: how.
        slot: where it is; None once it has left.
        record: what has been read so far.
        left: of a request that has left, what its slot held, on the device.
        counted: whether the end of its thinking has been counted.
    """

    admitted: Admitted
    slot: int | None
    record: StopRecord = field(default_factory=StopRecord)
    left: dict[str, torch.Tensor] = field(default_factory=dict)
    counted: bool = False


class SlotProcessor(LogitsProcessor):
    """Stops requests; see the module.

    Args:
        vllm_config: of the engine.
        req_states: the runner's slots.

    Raises:
        ValueError: the model is no policy, or the server's defaults are wrong.
    """

    def __init__(self, vllm_config: VllmConfig, req_states: LogitsProcRequestState) -> None:
        self._admission = Admission(vllm_config)
        prices = self._admission.config.prices
        count = req_states.max_num_reqs
        self._slots = StopSlots(self._admission.token_format, count, req_states.device)
        self._runner = req_states
        self._taken = torch.zeros(count, dtype=torch.long, device=req_states.device)
        self._most = torch.zeros_like(self._taken)  # tokens of prompt and text
        self._decisions = Decisions(self._slots, count, prices, req_states.device)
        speculative = vllm_config.speculative_config
        self._most_drafts = 0 if speculative is None else speculative.num_speculative_tokens
        outputs = 1 if prices is None else 1 + PRICE_RAMPS
        # What the head said of drafted tokens, and the position before the first of them.
        self._drafted = torch.zeros(count, self._most_drafts, outputs, device=req_states.device)
        self._first = torch.zeros(count, dtype=torch.long, device=req_states.device)
        layers: dict[str, Any] = vllm_config.compilation_config.static_forward_context
        self._head: StopHead = layers[STOP_HEAD]
        self._arrivals = self._head.arrivals
        self._arrivals.leaving = self._leave
        self._here: dict[int, _Asked] = {}  # by slot
        self._ids: dict[str, int] = {}  # slots by the requests' ids
        self._left: OrderedDict[str, _Asked] = OrderedDict()  # preempted ones come back
        self._records: OrderedDict[str, _Asked] = OrderedDict()
        self._warned = False
        self._counts = vllm_config.parallel_config.rank == 0

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Takes in who has come into a slot; whether it may be stopped."""
        come = self._arrivals.entering.pop(req_idx)
        self._slots.leave(req_idx)
        self._taken[req_idx] = torch.iinfo(torch.long).max  # nothing of it is looked at
        prompt, tokens = come.prompt_token_ids, come.prefill_token_ids
        if prompt is None or tokens is None:
            return False
        asked = self._left.pop(come.req_id, None)
        if asked is None:
            admitted = self._admission.admit_params(sampling_params)
            if admitted is None:
                return False
            asked = _Asked(admitted, req_idx)
            if admitted.name is not None:
                self._records[admitted.name] = asked
                while len(self._records) > MOST_RECORDS:
                    self._records.popitem(last=False)
        if not self._comes_back(asked, req_idx, len(tokens)):
            plan, end_id = asked.admitted.plan, asked.admitted.end_id
            index = asked.admitted.sample_index
            if not self._slots.enter(req_idx, plan, list(prompt), index, end_id):
                self._slots.leave(req_idx)
                return False
            self._replay(req_idx, tokens[len(prompt) :])
            self._taken[req_idx] = len(tokens)
        most = sampling_params.max_tokens
        self._most[req_idx] = sys.maxsize if most is None else len(prompt) + most
        asked.slot, asked.left = req_idx, {}
        self._here[req_idx], self._ids[come.req_id] = asked, req_idx
        self._decisions.enter(req_idx, asked.admitted.price)
        return True

    def _comes_back(self, asked: _Asked, slot: int, tokens: int) -> bool:
        """Lets a preempted request go on where it was, unless tokens of it were lost since."""
        if not asked.left or not tokens - 1 <= (taken := int(asked.left["taken"])) <= tokens:
            return False
        self._slots.put_back(slot, asked.left)
        self._taken[slot] = taken
        return True

    def _replay(self, slot: int, tokens: list[int]) -> None:
        """Takes in tokens that were decided on long ago, by a slot that was forgotten since."""
        slots = torch.tensor([slot], device=self._taken.device)
        unknown = torch.full((1,), math.nan, device=slots.device)
        for token in tokens:
            self._slots.push(slots, torch.tensor([token], device=slots.device))
            self._slots.decide(slots, unknown)

    def _leave(self, req_id: str) -> None:
        slot = self._ids.pop(req_id, None)
        if slot is None:
            return
        self._catch_up(torch.tensor([slot], device=self._taken.device), last=True)
        asked = self._here.pop(slot)
        asked.left = {**self._slots.taken_out(slot), "taken": self._taken[slot].clone()}
        asked.slot = None
        self._slots.leave(slot)
        self._left[req_id] = asked
        while len(self._left) > self._runner.max_num_reqs:
            self._left.popitem(last=False)
        if not self._here:
            self._read()

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """One step: decides where steps of thinking have ended, and shapes the logits (B, V)."""
        self._catch_up(ctx.idx_mapping.long())
        drafts = len(logits) > len(ctx.idx_mapping)
        self._step(logits, ctx, (ctx.expanded_local_pos == 0).nonzero()[:, 0] if drafts else None)
        if drafts:  # as if they were accepted; what is, is taken in by the next step
            remembered = {name: values.clone() for name, values in self._slots.state.items()}
            for draft in range(1, self._most_drafts + 1):
                rows = (ctx.expanded_local_pos == draft).nonzero()[:, 0]
                if len(rows):
                    self._step(logits, ctx, rows, draft)
            for name, values in self._slots.state.items():
                values.copy_(remembered[name])
        return logits

    def _step(
        self, logits: torch.Tensor, ctx: LogitsContext, rows: torch.Tensor | None, draft: int = 0
    ) -> None:
        """The next token of each row: what it ends, and what may follow it.

        Args:
            logits: (B, V), of the tokens to come.
            ctx: of the step.
            rows: whose, one a request; None for all.
            draft: which of the drafted tokens these are, from 1; 0 for tokens that stand.
        """
        whole = slice(None) if rows is None else rows
        slots, positions = ctx.expanded_idx_mapping[whole].long(), ctx.pos[whole].long()
        tokens = ctx.input_ids[whole].long()
        if draft:
            fresh = sampled = torch.ones_like(tokens, dtype=torch.bool)
        else:
            # The rows of a prefill's parts are not sampled from.
            sampled = positions + 1 >= self._runner.total_len.gpu[slots]
            fresh = sampled & (positions >= self._taken[slots])
            self._taken[slots] = torch.where(fresh, positions + 1, self._taken[slots])
            self._first[slots] = positions
        self._slots.push(slots, tokens, fresh)
        ended = (self._slots.at_boundary(slots) & sampled).nonzero()[:, 0]
        if len(ended):
            outputs = self._ask(slots[ended], positions[ended])
            if draft:
                self._drafted[slots[ended], draft - 1] = outputs
                self._decisions.decide(slots[ended], outputs)
            else:
                self._note(slots[ended], self._decisions.decide(slots[ended], outputs))
        shaped = logits[whole]
        self._slots.shape(slots, shaped)
        if rows is not None:
            logits[rows] = shaped

    def _catch_up(self, slots: torch.Tensor, last: bool = False) -> None:
        """Takes in drafted tokens that have been accepted, as it was decided on them.

        Args:
            slots: (B,).
            last: whether the token sampled last is taken in, too, which no step has looked at.
        """
        ids = self._runner.all_token_ids.gpu
        total = torch.minimum(self._runner.total_len.gpu[slots].long(), self._most[slots])
        for _ in range(self._most_drafts + last):
            at = self._taken[slots]
            fresh = at < (total if last else total - 1)
            self._slots.push(slots, ids[slots, at.clamp(max=ids.shape[1] - 1)].long(), fresh)
            self._taken[slots] = at + fresh.long()
            looked_at = fresh & (at < total - 1)
            ended = (self._slots.at_boundary(slots) & looked_at).nonzero()[:, 0]
            if len(ended):
                found, drafts = slots[ended], (at - self._first[slots])[ended] - 1
                outputs = self._drafted[found, drafts]
                self._note(found, self._decisions.decide(found, outputs))

    def _ask(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """What the head says of tokens of this step, (K, 1 or 6)."""
        batch = self._arrivals.batch
        rows = torch.empty_like(self._taken)  # of the batch, by slot
        rows[batch.idx_mapping.long()] = torch.arange(len(batch.idx_mapping), device=rows.device)
        here = rows[slots]
        starts = batch.query_start_loc[:-1][here].long()
        places = starts + positions - batch.positions[starts]
        lengths = (positions + 1).to(torch.int32)
        pages = self._head.pages
        assert pages is not None  # of a policy of queries; others are refused at start
        said: torch.Tensor = self._head(pages.hidden(here, lengths, places).float())
        return said

    def _note(self, slots: torch.Tensor, numbers: torch.Tensor) -> None:
        self._decisions.note([self._here[slot].record for slot in slots.tolist()], numbers)
        if len(self._decisions) >= _READ_EVERY:
            self._read()

    def record(self, name: str) -> StopRecord | None:
        """What happened so far to the request with the `stop_id`; None where it is not known."""
        asked = self._records.get(name)
        if asked is None:
            return None
        if asked.slot is not None:
            self._catch_up(torch.tensor([asked.slot], device=self._taken.device), last=True)
        self._read()
        self._read_state([asked])
        return asked.record

    def _read(self) -> None:
        """Reads what was noted, and counts the requests whose thinking has ended."""
        self._decisions.read()
        self._read_state([*self._here.values(), *self._left.values()])

    def _read_state(self, some: list[_Asked]) -> None:
        waiting = [asked for asked in some if not asked.counted]
        if not waiting:
            return
        state = self._slots.state
        rows = torch.stack(
            [
                torch.stack(
                    [
                        (asked.left[name] if asked.slot is None else state[name][asked.slot]).long()
                        for name in _READ
                    ]
                )
                for asked in waiting
            ]
        ).tolist()
        for asked, (phase, reason, tokens, nan_steps) in zip(waiting, rows, strict=True):
            record = asked.record
            record.reason, record.thinking_tokens = REASONS[reason], tokens
            record.nan_steps = nan_steps
            if nan_steps and not self._warned:
                self._warned = True
                logger.warning(NAN)
            if phase != Phase.THINKING.value and not asked.counted:
                asked.counted = True
                if self._counts:
                    count_ended(record, asked.admitted)
