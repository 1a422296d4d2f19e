"""What stops requests inside SGLang.

SGLang keeps tokens on the device and knows requests by slots, the rows of its table of keys and
values. Before each forward it is looked who has come. Before each sampling the last tokens are
copied to the host, once; there `StopRow`s decide, and the policy runs on requests that have ended a
step. A request that SGLang puts back into its queue keeps its row, and may come into another slot.
"""

from __future__ import annotations

from typing import Any

import torch

from ..core import RowCore, ServedRow, log_off, served_format
from .custom_params import excluded, server_defaults

_OURS = "_ospruner"  # of SGLang's own object of a request: its row, until its record is told
_OFF = "_ospruner_off"  # likewise: why the policy, which is on by default, is off for it


class Stopper:
    """Stops requests of SGLang's model runner; see the module."""

    def __init__(self, runner: Any) -> None:
        arguments, config = runner.server_args, runner.model_config.hf_config
        defaults, where = server_defaults(config), arguments.tokenizer_path or arguments.model_path
        fmt = served_format(config, where, arguments.revision, defaults)
        seed = arguments.random_seed or 0
        self._core = RowCore(config, fmt, defaults, seed, on_off=self._note_off)
        self._why: str | None = None  # the policy was off for the last request
        self._runner = runner
        runner.model.hold(len(runner.req_to_token_pool.req_to_token))
        self._here: dict[int, ServedRow] = {}  # by slot

    def meet(self, requests: list[Any]) -> None:
        """Takes in who has come into a slot, of SGLang's requests that are computed next."""
        for request in requests:
            ours, slot = vars(request), request.kv.req_pool_idx
            if _OURS not in ours:
                ours[_OURS] = self._admit(request)
            row: ServedRow | None = ours[_OURS]
            if self._here.get(slot) is row:  # also where neither is anybody
                continue
            self._here.pop(slot, None)
            if row is not None:
                self._here = {place: one for place, one in self._here.items() if one is not row}
                row.come_back(list(request.origin_input_ids), list(request.output_ids))
                self._here[slot] = row

    def _admit(self, request: Any) -> ServedRow | None:
        params = request.sampling_params
        others = ", ".join(excluded(params)) or None
        ends = not params.ignore_eos
        stops = [*(params.stop_token_ids or ()), *((ends and request.eos_token_ids) or ())]
        # What still ends a request that ignores the end of text.
        end_id = min(params.stop_token_ids) if params.ignore_eos and params.stop_token_ids else None
        prompt = list(request.origin_input_ids)
        keys, least, self._why = params.custom_params, params.min_new_tokens, None
        how: dict[str, Any] = {"least_tokens": least, "excluded": others, "ends": ends}
        row = self._core.admit(keys, prompt, stops, end_id, **how)
        vars(request)[_OFF] = self._why
        return row

    def _note_off(self, why: str) -> None:
        log_off(why)
        self._why = why

    def step(self, logits: torch.Tensor, batch: Any) -> None:
        """Decides where steps of thinking have ended, and shapes the logits (B, V) of a batch."""
        if not self._here or not len(logits):
            return
        tokens = batch.input_ids
        if not batch.forward_mode.is_decode():
            tokens = tokens[batch.extend_start_loc + batch.extend_seq_lens - 1]
        columns = (batch.req_pool_indices, batch.seq_lens, tokens)
        told = torch.stack([one[: len(logits)].long() for one in columns])
        rows, ended = [], []
        for place, (slot, length, token) in enumerate(zip(*told.tolist(), strict=True)):
            row = self._here.get(slot)
            if row is None:
                continue
            rows.append((place, row))
            if length > row.taken:  # else a part of a prompt, or a token that is computed again
                row.take(token)
            if row.row.at_boundary and length == row.taken:
                ended.append((slot, length, row))
        if ended:
            slots, lengths, asked = map(list, zip(*ended, strict=True))
            outputs = self._runner.model.ask(self._runner.attn_backend, slots, lengths)
            self._core.decide(asked, outputs)
        self._core.shape(logits, rows)

    def record(self, request: Any) -> dict[str, Any] | None:
        """The `StopRecord` of a request that is done, for JSON, or why the policy was off."""
        row: ServedRow | None = vars(request).get(_OURS)
        if row is None:
            why = vars(request).pop(_OFF, None)
            return None if why is None else {"off": why}
        # The token sampled last, which no step may have looked at.
        prompt, text = len(request.origin_input_ids), list(request.output_ids_through_stop)
        for token in text[max(row.taken - prompt, 0) :]:
            row.take(token)
        vars(request)[_OURS] = None
        return row.report
