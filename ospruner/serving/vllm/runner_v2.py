"""The processor in vLLM's model runner V2.

That runner keeps tokens on the device and knows requests by slots. What a step's rows end with is
copied to the host once; there `StopRow`s decide. The policy, one of queries only, runs after the
base's forward and outside of its graphs, on the rows that have ended a step.

With speculative decoding a request has a row of logits for each drafted token, too: what may follow
if the drafts before it are accepted. A copy of its `ServedRow` takes in the drafts; what the policy
said of it is kept, so that a draft that is accepted is decided on as it was.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState
from vllm.v1.worker.gpu.sample.logits_processor import (
    LogitsContext,
    LogitsProcessor,
    LogitsProcRequestState,
)

from ..core import ServedRow
from .model import STOP_HEAD, StopHead
from .processor import PolicyProcessor


class Arrivals(DefaultModelState):
    """vLLM's own state of a model, which also keeps who comes into which slot, and who leaves.

    Processors are told a slot and parameters, but neither who comes nor with which tokens.
    """

    def __init__(self, vllm_config: VllmConfig, model: nn.Module, *others: Any) -> None:
        super().__init__(vllm_config, model, *others)
        self.entering: dict[int, NewRequestData] = {}  # by slot: come, and not taken in
        # Called with the id of each request that leaves, finished or preempted, while its slot
        # still holds its tokens.
        self.leaving: Callable[[str], None] | None = None
        self.batch: InputBatch | None = None  # of the step that is being computed
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
        return super().prepare_attn(input_batch, *args, **kwargs)


class HybridArrivals(Arrivals, MambaHybridModelState):
    """Likewise, beside vLLM's state of a base some of whose layers keep states."""


class _Row(NamedTuple):
    """A row of logits, after the text of a slot and so many drafted tokens."""

    place: int
    drafts: int
    slot: int
    position: int  # of the last of these tokens
    token: int  # that one
    total: int  # tokens that stand in the slot
    last: list[int]  # of these, as far as a step may not have looked at them


class V2Processor(PolicyProcessor, LogitsProcessor):
    """Stops requests; see the module."""

    def __init__(self, vllm_config: VllmConfig, req_states: LogitsProcRequestState) -> None:
        super().__init__(vllm_config)
        self._runner = req_states
        self._device = req_states.device
        speculative = vllm_config.speculative_config
        drafts = 0 if speculative is None else speculative.num_speculative_tokens
        self._last = torch.arange(-1 - drafts, 0, device=self._device)  # see `_Row.last`
        self._head: StopHead = self._layers[STOP_HEAD]
        self._arrivals: Arrivals = self._head.arrivals
        self._arrivals.leaving = self._leave
        self._here: dict[int, ServedRow] = {}  # by slot
        self._ids: dict[str, int] = {}  # slots by the requests' ids
        self._left: OrderedDict[str, ServedRow] = OrderedDict()  # preempted ones come back

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Takes in who has come into a slot; whether it may be stopped."""
        come = self._arrivals.entering.pop(req_idx)
        self._here.pop(req_idx, None)
        prompt, tokens = come.prompt_token_ids, come.prefill_token_ids
        if prompt is None or tokens is None:
            return False
        served = self._left.pop(come.req_id, None) or self.admit(sampling_params, prompt)
        if served is None:
            return False
        served.come_back(prompt, tokens[len(prompt) :])
        if (most := sampling_params.max_tokens) is not None:
            served.most_tokens = len(prompt) + most
        self._here[req_idx] = served
        self._ids[come.req_id] = req_idx
        return True

    def _leave(self, req_id: str) -> None:
        slot = self._ids.pop(req_id, None)
        if slot is None:
            return
        self.take_rest([self._here[slot]])
        served = self._left[req_id] = self._here.pop(slot)
        self._core.tell_leaving(served)
        while len(self._left) > self._runner.max_num_reqs:
            self._left.popitem(last=False)

    def take_rest(self, rows: Sequence[ServedRow]) -> None:
        """Takes in the tokens sampled last, which lie on the device."""
        for slot, served in self._here.items():
            if served in rows:
                total = int(self._runner.total_len.gpu[slot])
                for token in self._runner.all_token_ids.gpu[slot, served.taken : total].tolist():
                    served.take(token)

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """One step: decides where steps of thinking have ended, and shapes the logits (B, V)."""
        if not any(slot in self._here for slot in ctx.idx_mapping_np.tolist()):
            return logits
        rows = self._copied(ctx)
        standing: dict[int, ServedRow] = {}  # by slot
        level: list[tuple[_Row, ServedRow]] = []
        for row in rows:
            served = self._here.get(row.slot)
            if served is None or row.drafts:
                continue
            for token in row.last[served.taken - (row.total - len(row.last)) :]:
                served.take(token)
            served.said.clear()
            if row.position + 1 >= row.total:  # else a part of a prefill, which is not sampled from
                standing[row.slot] = served
                level.append((row, served))
        self._step(logits, level)
        self._draft(logits, [row for row in rows if row.drafts and row.slot in standing], standing)
        return logits

    def _copied(self, ctx: LogitsContext) -> list[_Row]:
        """What a step's rows say, in one copy to the host."""
        slots = ctx.expanded_idx_mapping.long()
        totals = self._runner.total_len.gpu[slots].long()
        places = (totals[:, None] + self._last).clamp(min=0)
        tokens = self._runner.all_token_ids.gpu[slots[:, None], places]
        columns = (ctx.expanded_local_pos, slots, ctx.pos, ctx.input_ids, totals)
        table = torch.stack([one.long() for one in columns], dim=1)
        told = torch.cat([table, tokens.long()], dim=1).tolist()
        return [
            _Row(place, drafts, slot, position, token, total, last)
            for place, (drafts, slot, position, token, total, *last) in enumerate(told)
        ]

    def _step(self, logits: torch.Tensor, level: Sequence[tuple[_Row, ServedRow]]) -> None:
        """Decides on rows that have ended a step, and shapes the logits of all of them."""
        ended = [(row, served) for row, served in level if served.row.at_boundary]
        if ended:
            outputs = self._ask([row for row, _ in ended])
            self._core.decide([served for _, served in ended], outputs)
        self._core.shape(logits, ((row.place, served) for row, served in level))

    def _draft(
        self, logits: torch.Tensor, drafted: Sequence[_Row], standing: dict[int, ServedRow]
    ) -> None:
        """The rows after drafted tokens, as if these were accepted, of what stands in slots."""
        turning = {
            row.slot for row in drafted if standing[row.slot].may_turn(row.token, row.drafts)
        }
        ahead = {slot: standing[slot].ahead() for slot in turning}
        for depth in range(1, 1 + max((row.drafts for row in drafted), default=0)):
            rows = [row for row in drafted if row.drafts == depth and row.slot in ahead]
            for row in rows:
                if row.token < 0:  # in the place of a draft: it and what follows are rejected
                    del ahead[row.slot]
                else:
                    ahead[row.slot].take(row.token)
            self._step(logits, [(row, ahead[row.slot]) for row in rows if row.slot in ahead])

    def _ask(self, rows: Sequence[_Row]) -> torch.Tensor:
        """What the head says of tokens of this step, (K, 1 or 6)."""
        batch, pages = self._arrivals.batch, self._head.pages
        assert batch is not None
        # vLLM may verify a batch in parts: rows of logits are counted anew in each.
        order = {slot: i for i, slot in enumerate(batch.idx_mapping_np.tolist())}
        numbers = [[order[row.slot], row.position] for row in rows]
        here, positions = torch.tensor(numbers, device=self._device).unbind(1)
        starts = batch.query_start_loc[:-1][here].long()
        places = starts + positions - batch.positions[starts]
        if pages is None:  # it has said it of all of them
            return self._head.outputs[places]
        lengths = (positions + 1).to(torch.int32)
        return self._head(pages.hidden(here, lengths, places).float())
