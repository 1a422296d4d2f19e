"""The way of many requests to their stops, as tensors: `StopRow` for each slot of an engine.

An engine that keeps its tokens on the device cannot ask a Python object about each row without
waiting for them. Here everything that a `StopRow` remembers is a tensor over slots, and what it
looks up in a vocabulary is a table; `push`, `decide` and `shape` are plain torch on the device, and
none of them waits for it. `StopRow` says what is right: the two are compared in the tests, token
by token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from modeling_ospruner.formats_ospruner import TokenFormat
from modeling_ospruner.rules_ospruner import LearnedPolicy, mix64
from modeling_ospruner.states_ospruner import (
    BREAK,
    COLON,
    ENDS_NEWLINE,
    NEWLINE,
    VISIBLE,
    VISIBLE_AFTER,
    BoundaryState,
)
from modeling_ospruner.stopping_ospruner import Phase, RowPlan, StopAnswer, StopRow

__all__ = ["REASONS", "Decided", "StopSlots", "uniforms"]

REASONS: tuple[Literal["length", "policy", "budget", "natural"], ...] = (
    "length",
    "policy",
    "budget",
    "natural",
)
"""What a slot's `reason` means, by its number."""

_LENGTH, _POLICY, _BUDGET, _NATURAL = range(4)
_THINKING, _FORCING = Phase.THINKING.value, Phase.FORCING.value
_ANSWER, _DONE = Phase.ANSWER.value, Phase.DONE.value
_FORCED, _TOOLS = (get_args(StopAnswer).index(one) for one in ("forced", "tools"))
_NONE = -1  # no token has this id
_NEVER = 2**63 - 1  # as a number of tokens
_MOST_BRIDGED = 8
# What may stand at the end of a text and begin an opening or closing of a formula or of code.
_RESTS = ("", "\\", "$", "`", "``")

_Rows = dict[str, torch.Tensor]


def _signed(value: int) -> int:
    """The int64 with the bits of a number of 64 bits."""
    return value - (1 << 64) if value >> 63 else value


def _shifted(value: torch.Tensor, by: int) -> torch.Tensor:
    """A logical shift to the right; torch's own keeps the sign."""
    return (value >> by) & ((1 << (64 - by)) - 1)


def _mix64(value: torch.Tensor) -> torch.Tensor:
    """`mix64` on int64, whose products wrap around."""
    z = value + _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shifted(z, 31)


def uniforms(stream: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """`uniform(seed, sample_index, step)`, the draws of many rows.

    Args:
        stream: int64, the bits of mix64(mix64(seed) ^ sample_index).
        step: int64, from 0.

    Returns:
        float64 in [0, 1), bit for bit those of `uniform`.
    """
    return _shifted(_mix64(stream ^ step), 11).double() * 2.0**-53


@dataclass(frozen=True)
class Decided:
    """What `decide` has done, of each row (B,); on the device.

    Attributes:
        ended: whether a step had ended. All else says something of these rows only.
        thinking_tokens: L_i.
        probabilities: float64; NaN where the policy was not asked, or gave it.
        stopped: whether the thinking has been closed.
    """

    ended: torch.Tensor
    thinking_tokens: torch.Tensor
    probabilities: torch.Tensor
    stopped: torch.Tensor


_FIELDS: Mapping[str, tuple[torch.dtype, float]] = {
    # Where a row is, and its record.
    "phase": (torch.long, _DONE),
    "length": (torch.long, 0),
    "last": (torch.long, _NONE),
    "at_boundary": (torch.bool, 0),
    "steps": (torch.long, 0),
    "thinking_tokens": (torch.long, 0),
    "reason": (torch.long, _LENGTH),
    "nan_steps": (torch.long, 0),
    "complete": (torch.bool, 0),
    # Where a step ends.
    "tokens": (torch.long, 0),
    "prefilled": (torch.long, 0),
    "visible": (torch.bool, 0),
    "after_newline": (torch.bool, 0),
    "inside": (torch.bool, 1),
    "headed": (torch.bool, 0),
    "role_tokens": (torch.long, 0),
    "header": (torch.long, 0),  # tokens of it, 0 outside
    "header_thinks": (torch.bool, 0),
    "header_answers": (torch.bool, 0),
    "open": (torch.long, 0),
    "rest": (torch.long, 0),
    "colon": (torch.bool, 0),
    "bridged": (torch.long, 0),
    # The answer.
    "forced_at": (torch.long, 0),
    "forced_end": (torch.long, 0),
    "boxed": (torch.bool, 0),
    "depth": (torch.long, 1),
    "escaped": (torch.long, 0),
    "masked": (torch.bool, 0),
    "message_ends": (torch.bool, 0),
    "answer_tokens": (torch.long, 0),
    # What was asked for.
    "threshold": (torch.double, math.nan),  # NaN: draws
    "stream": (torch.long, 0),
    "stride": (torch.long, 1),
    "least": (torch.long, 0),
    "most": (torch.long, _NEVER),
    "answer": (torch.long, _FORCED),
    "most_answer": (torch.long, _NEVER),
    "samples": (torch.bool, 0),
    "masks": (torch.bool, 1),
    "end_id": (torch.long, _NONE),
}


class StopSlots:
    """The requests of an engine, one a slot.

    A slot's number is the engine's. `push`, `decide` and `shape` take the slots of a batch's rows,
    each at most once, as an int64 tensor on the device.

    Args:
        token_format: the base's way of thinking, with the server's sentence before the closing.
        num_slots: S.
        device: where the engine samples.

    Attributes:
        state: what each slot remembers, (S,) by name.

    Raises:
        ValueError: a marker of the format is several tokens.
    """

    def __init__(
        self, token_format: TokenFormat, num_slots: int, device: torch.device | str
    ) -> None:
        for marker in (token_format.end_marker, token_format.start_marker):
            if marker is not None:
                raise ValueError(
                    f"the marker {marker.literal!r} (format {token_format.format.name!r}) is "
                    "several tokens of the base's tokenizer, which tables on the device do not "
                    "follow: let vLLM's model runner V1 serve it (VLLM_USE_V2_MODEL_RUNNER=0)"
                )
        self._format = token_format
        self._device = torch.device(device)
        self.state: _Rows = {
            name: torch.full((num_slots,), first, dtype=dtype, device=device)
            for name, (dtype, first) in _FIELDS.items()
        }
        self._eos = torch.full((num_slots, 1), _NONE, device=device)  # (S, most ids of a slot)
        self._channels = token_format.channels
        self._tables()

    def _tables(self) -> None:
        """What tokens mean, by their ids; the last entry is that of ids beyond the vocabulary."""
        fmt = self._format
        self._vocabulary = len(fmt.kinds)
        self._kinds = self._placed([*fmt.kinds, 0])
        self._calls = self._marked(fmt.call_ids)
        self._answer_ends = self._placed(list(fmt.answer_end_ids))
        self._suffix = self._placed([*fmt.forced_suffix("forced"), 0])
        self._closing_at = len(fmt.wind_down_ids)
        self._closing_end = self._closing_at + len(fmt.closing_ids)
        self._boxed_end = self._closing_end + len(fmt.box_prefix_ids)
        self._reentry = self._placed(list(fmt.reentry_ids))
        if self._channels is not None:
            self._thinking = self._placed([*self._channels.thinking, _NONE])
            self._answer = self._placed([*self._channels.answer[:-1], _NONE])
        self._braces, self._brace_rows = self._box_tables()
        if fmt.displays is not None:
            self._before, self._after, self._display_rows = self._display_tables(fmt.displays)

    def _placed(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)

    def _marked(self, ids: frozenset[int]) -> torch.Tensor:
        return self._placed([int(i in ids) for i in range(self._vocabulary + 1)]).bool()

    def _numbered(self, texts: Mapping[int, str]) -> torch.Tensor:
        """For each id the number of its text, from 1; 0 for all others."""
        numbers = {token: i + 1 for i, token in enumerate(texts)}
        return self._placed([numbers.get(i, 0) for i in range(self._vocabulary + 1)])

    def _box_tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each text with braces, (N + 1, escaped, 3): lowest and last depth, escaped after."""
        known: list[list[list[int]]] = [[[_NEVER, 0, 0]] * 2]
        for text in self._format.brace_texts.values():
            known.append([])
            for first in (0, 1):
                depth, lowest, escaped = 0, _NEVER, first
                for character in text:
                    if escaped:
                        escaped = 0
                    elif character == "\\":
                        escaped = 1
                    elif character == "{":
                        depth += 1
                    elif character == "}":
                        depth -= 1
                        lowest = min(lowest, depth)
                known[-1].append([lowest, depth, escaped])
        table = torch.tensor(known, device=self._device)
        return table, self._numbered(self._format.brace_texts)

    def _display_tables(
        self, displays: Mapping[int, str]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of each text's part before and after its last blank line, (N + 1, rest, open, 3).

        Which rest and which opening follow, and whether anything opened or closed.
        """
        nothing = [[[0, is_open, 0] for is_open in (0, 1)] for _ in _RESTS]
        unchanged = [[[rest, is_open, 0] for is_open in (0, 1)] for rest in range(len(_RESTS))]
        tables: tuple[list[Any], list[Any]] = ([nothing], [unchanged])
        for text in displays.values():
            before, blank_line, after = text.rpartition("\n\n")
            if not blank_line:
                before, after = after, ""
            for table, part in zip(tables, (before, after), strict=True):
                table.append(
                    [[_followed(rest, is_open, part) for is_open in (0, 1)] for rest in _RESTS]
                )
        first, second = (torch.tensor(table, device=self._device) for table in tables)
        return first, second, self._numbered(displays)

    def enter(
        self, slot: int, plan: RowPlan, prompt_ids: list[int], sample_index: int, end_id: int
    ) -> bool:
        """Puts a request into a slot, whatever was there.

        Args:
            slot: from 0 to S - 1.
            plan: how it stops.
            prompt_ids: its prompt, without padding.
            sample_index: its index among all rows of the run.
            end_id: what ends its text, once its answer is complete.

        Returns:
            Whether it thinks; one whose prompt closes the thinking is left alone.

        Raises:
            ValueError: the rule is not the learned policy, or looks at a window of steps, or the
                format is another one than the table's.
        """
        rule = plan.rule
        if not isinstance(rule, LearnedPolicy):
            raise ValueError(
                f"rule is {type(rule).__name__}; inside an engine requests are stopped by the "
                "learned policy and by budgets: generate with transformers"
            )
        if rule.window > 1:
            raise ValueError(
                f"window is {rule.window}; inside an engine a request stops by one probability at "
                "a time: leave it out, or generate with transformers"
            )
        if plan.token_format is not self._format:
            raise ValueError(
                "the request's format is not the server's: what is forced (wind_down included) is "
                "the same for all requests of a server"
            )
        row = StopRow(plan, prompt_ids, sample_index)
        settings = plan.settings
        stream = mix64(mix64(rule.seed) ^ (sample_index & ((1 << 64) - 1)))
        values: dict[str, float] = {name: first for name, (_, first) in _FIELDS.items()}
        values |= {
            "phase": row.phase.value,
            "reason": REASONS.index(row.record.reason),
            "threshold": math.nan if rule.threshold is None else rule.threshold,
            "stream": _signed(stream),
            "stride": rule.step_stride,
            "least": min(settings.min_thinking_tokens, _NEVER),
            "most": min(settings.max_thinking_tokens or _NEVER, _NEVER),
            "answer": get_args(StopAnswer).index(settings.answer),
            "most_answer": min(settings.max_answer_tokens or _NEVER, _NEVER),
            "samples": settings.answer_do_sample,
            "masks": settings.mask_reentry,
            "end_id": end_id,
            **self._prefilled(prompt_ids),
        }
        for name, value in values.items():
            self.state[name][slot] = value
        eos = sorted(plan.eos_ids)
        if len(eos) > self._eos.shape[1]:
            more = self._eos.new_full((len(self._eos), len(eos) - self._eos.shape[1]), _NONE)
            self._eos = torch.cat([self._eos, more], dim=1)
        self._eos[slot] = _NONE
        self._eos[slot, : len(eos)] = self._placed(eos)
        return row.phase is Phase.THINKING

    def _prefilled(self, prompt_ids: list[int]) -> dict[str, float]:
        """Where a step is, after the thinking that a prompt holds already."""
        span = self._format.thinking_span(prompt_ids)
        state = self._format.boundary_state(prompt_ids[span.start :])
        header = state._header
        rest = max(
            (i for i, one in enumerate(_RESTS) if state._rest.endswith(one)),
            key=lambda i: len(_RESTS[i]),
        )
        channels = self._channels
        thinks = channels is not None and tuple(header) == channels.thinking[: len(header)]
        most = 0 if channels is None else min(len(header), len(channels.answer) - 1)
        answers = channels is not None and tuple(header[:most]) == channels.answer[:most]
        return {
            "tokens": state.thinking_tokens,
            "prefilled": state.thinking_tokens,
            "visible": state._visible,
            "after_newline": state._after_newline,
            "inside": state._inside,
            "headed": state._headed,
            "role_tokens": state._role_tokens,
            "header": len(header),
            "header_thinks": thinks,
            "header_answers": answers,
            "open": state._open,
            "rest": rest,
            "colon": state._colon,
            "bridged": state._bridged,
        }

    def leave(self, slot: int) -> None:
        """Empties a slot: nothing is done to its rows any more."""
        self.state["phase"][slot] = _DONE
        self.state["complete"][slot] = False
        self.state["at_boundary"][slot] = False

    def taken_out(self, slot: int) -> _Rows:
        """What a slot remembers, for `put_back`; on the device, by name."""
        return {
            **{name: values[slot].clone() for name, values in self.state.items()},
            "eos": self._eos[slot].clone(),
        }

    def put_back(self, slot: int, remembered: Mapping[str, torch.Tensor]) -> None:
        """Lets a request go on in a slot, with what `taken_out` gave of another one."""
        for name, values in self.state.items():
            values[slot] = remembered[name]
        eos = remembered["eos"]  # there may be room for more since
        self._eos[slot] = _NONE
        self._eos[slot, : len(eos)] = eos

    def thinks(self, slots: torch.Tensor) -> torch.Tensor:
        """Whether rows are in their thinking, (B,)."""
        return self.state["phase"][slots] == _THINKING

    def at_boundary(self, slots: torch.Tensor) -> torch.Tensor:
        """Whether rows' last tokens end steps, on which nothing is decided yet, (B,)."""
        return self.state["at_boundary"][slots]

    def push(
        self, slots: torch.Tensor, tokens: torch.Tensor, taken: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Takes in the tokens chosen next.

        Of several tokens a row, as after speculative decoding, each is a call of its own.

        Args:
            slots: (B,).
            tokens: (B,) int64.
            taken: (B,), whether there is a token for the row; None for all.

        Returns:
            (B,), whether it completes the answer.
        """
        old = self._of(slots)
        new = dict(old)
        if taken is None:
            taken = torch.ones_like(tokens, dtype=torch.bool)
        new["length"] = old["length"] + 1
        new["last"] = tokens
        is_eos = (self._eos[slots] == tokens[:, None]).any(1)
        phase = old["phase"]
        self._think(new, tokens, phase == _THINKING, is_eos)
        forcing = phase == _FORCING
        new["forced_at"] = new["forced_at"] + forcing.long()
        closed_now = forcing & (new["forced_at"] == old["forced_end"])
        new["phase"] = new["phase"].masked_fill(closed_now, _ANSWER)
        completes = self._answered(new, tokens, phase == _ANSWER, is_eos)
        self._put(slots, new, taken)
        return completes & taken

    def _think(
        self, new: _Rows, tokens: torch.Tensor, thinking: torch.Tensor, is_eos: torch.Tensor
    ) -> None:
        """The next tokens of rows that think: `StopRow._think` and `BoundaryState.push`."""
        end_id = self._format.think_end_id
        known = tokens.clamp(0, self._vocabulary)
        ended_text = thinking & is_eos & (tokens != end_id)
        active = thinking & ~ended_text
        state = dict(new)
        state["tokens"] = state["tokens"] + 1
        body = torch.ones_like(active)
        answers = torch.zeros_like(active)
        if self._channels is not None:
            body, answers = self._follow_headers(state, tokens)
        calls = body & self._calls[known] & (tokens != end_id)
        marked = body & (tokens == end_id)
        if self._channels is not None:  # the header of the answer is no thinking
            state["tokens"] = state["tokens"] - answers * state["ended_header"]
            del state["ended_header"]
        state["tokens"] = state["tokens"] - (calls | marked).long()
        boundary = self._step_ends(state, known, body & ~calls & ~marked)
        natural = answers | calls | marked
        state["at_boundary"] = boundary
        state["thinking_tokens"] = (state["tokens"] - state["prefilled"]).clamp(min=0)
        state["reason"] = state["reason"].masked_fill(natural, _NATURAL)
        written = marked.long()
        if self._channels is not None:
            all_of_it = 1 + self._channels.role_tokens + len(self._channels.answer)
            written = written.masked_fill(answers, all_of_it)
        self._close(state, natural, calls, written, natural=True)
        for name, value in state.items():
            new[name] = torch.where(active, value, new[name])
        new["reason"] = new["reason"].masked_fill(ended_text, _NATURAL)
        new["phase"] = new["phase"].masked_fill(ended_text, _DONE)

    def _follow_headers(
        self, state: _Rows, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`BoundaryState._in_thinking_message`: which tokens are thinking, and which end it."""
        channels = self._channels
        assert channels is not None
        headed, inside, roles = state["headed"], state["inside"], state["role_tokens"]
        opens = tokens == channels.thinking[0]
        addressed = ~headed & (roles != channels.role_tokens)
        within = ~opens & (state["header"] > 0)
        length = state["header"] + 1  # with this token
        place = (length - 1).clamp(max=len(self._thinking) - 1)
        thinks = state["header_thinks"] & (self._thinking[place] == tokens)
        place = (length - 1).clamp(max=len(self._answer) - 1)
        beyond = length > len(channels.answer) - 1
        answers = state["header_answers"] & (beyond | (self._answer[place] == tokens))
        closes = within & (tokens == channels.thinking[-1])
        begins = closes & thinks & (length == len(channels.thinking))
        ends = closes & ~begins & answers & (length >= len(channels.answer) - 1)
        other = ~opens & ~within
        in_body = other & headed & inside
        message_end = other & ~in_body & (tokens == self._format.think_end_id) & ~inside
        role = other & ~in_body & ~message_end
        body = in_body | (role & inside)
        state["ended_header"] = length
        one = torch.ones_like(length)
        state["header"] = torch.where(
            opens, one.masked_fill(addressed, 0), length.masked_fill(~within | closes, 0)
        )
        first_answers = len(channels.answer) == 1 or channels.answer[0] == channels.thinking[0]
        state["header_thinks"] = opens | (within & thinks)
        state["header_answers"] = (opens & first_answers) | (within & answers)
        state["headed"] = (headed | opens) & ~message_end
        state["inside"] = (inside & ~opens) | begins
        state["role_tokens"] = (roles + role.long()).masked_fill(message_end, 0)
        state["visible"] = state["visible"] & ~begins
        state["after_newline"] = state["after_newline"] & ~begins
        return body, ends

    def _step_ends(self, state: _Rows, known: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Which tokens end a step, of those that count; the others change nothing."""
        kind = self._kinds[known]
        broken = ((kind & BREAK) > 0) | (((kind & NEWLINE) > 0) & state["after_newline"])
        visible = state["visible"] | ((kind & VISIBLE) > 0)
        boundary = broken & visible
        changed = {"after_newline": (kind & ENDS_NEWLINE) > 0}
        if self._format.displays is not None:
            boundary = self._ends_prose(state, changed, known, kind, boundary)
        changed["visible"] = ((kind & VISIBLE_AFTER) > 0) | (visible & ~boundary)
        for name, value in changed.items():
            state[name] = torch.where(counts, value, state[name])
        return boundary & counts

    def _ends_prose(
        self,
        state: _Rows,
        changed: _Rows,
        known: torch.Tensor,
        kind: torch.Tensor,
        boundary: torch.Tensor,
    ) -> torch.Tensor:
        """`BoundaryState._ends_prose`."""
        row = self._display_rows[known]
        rest, is_open, moved = self._before[row, state["rest"], state["open"]].unbind(-1)
        bridged = state["bridged"].masked_fill(moved > 0, 0)
        colon = torch.where((kind & VISIBLE) > 0, (kind & COLON) > 0, state["colon"])
        bridges = boundary & (is_open > 0) & (bridged < _MOST_BRIDGED)
        boundary = boundary & ~bridges & ~colon
        rest, is_open, moved = self._after[row, rest, is_open].unbind(-1)
        changed["bridged"] = (bridged + bridges.long()).masked_fill(moved > 0, 0)
        changed["colon"] = colon & ~((kind & VISIBLE_AFTER) > 0)
        changed["rest"], changed["open"] = rest, is_open
        return boundary

    def _close(
        self,
        state: _Rows,
        closing: torch.Tensor,
        calls: torch.Tensor,
        written: torch.Tensor,
        natural: bool,
    ) -> None:
        """`StopRow._close`, of the rows of which `closing` is true."""
        forced = (state["answer"] == _FORCED) & ~calls
        tools = (state["answer"] == _TOOLS) & (self._channels is not None)
        by_us = forced | (not natural)
        start = torch.where(written > 0, self._closing_at + written, torch.zeros_like(written))
        end = torch.full_like(written, self._closing_end).masked_fill(forced, self._boxed_end)
        if self._channels is not None:
            end = end - tools.long() * len(self._channels.answer)
        end = torch.where(by_us, end, start)
        phase = torch.full_like(end, _ANSWER).masked_fill(end > start, _FORCING)
        changed = {
            "forced_at": start,
            "forced_end": end,
            "phase": phase,
            "masked": state["masks"] & by_us,
            "message_ends": by_us & ~tools,
            "boxed": forced,
        }
        for name, value in changed.items():
            state[name] = torch.where(closing, value, state[name])

    def _answered(
        self, new: _Rows, tokens: torch.Tensor, answering: torch.Tensor, is_eos: torch.Tensor
    ) -> torch.Tensor:
        """The next tokens of rows that answer; which of them complete the answer."""
        row = self._brace_rows[tokens.clamp(0, self._vocabulary)]
        lowest, change, escaped = self._braces[row, new["escaped"]].unbind(-1)
        boxing = answering & new["boxed"]
        closed = boxing & (lowest != _NEVER) & (new["depth"] <= -lowest)
        new["depth"] = torch.where(boxing, new["depth"] + change, new["depth"])
        new["escaped"] = torch.where(boxing, escaped, new["escaped"])
        new["answer_tokens"] = new["answer_tokens"] + answering.long()
        full = new["answer_tokens"] == new["most_answer"]
        message = (self._answer_ends == tokens[:, None]).any(1) & new["message_ends"]
        completes = answering & (closed | full | is_eos | message)
        new["phase"] = new["phase"].masked_fill(completes, _DONE)
        new["complete"] = new["complete"] | (completes & ~is_eos)
        return completes

    def decide(self, slots: torch.Tensor, probabilities: torch.Tensor) -> Decided:
        """Decides on the steps that have ended with the rows' last tokens.

        Args:
            slots: (B,).
            probabilities: (B,), of a stop, each at its row's own price; of rows that have ended no
                step they mean nothing. NaN means "continue".
        """
        old = self._of(slots)
        ended = old["at_boundary"]
        new = dict(old)
        asked = (old["steps"] + 1) % old["stride"] == 0
        given = probabilities.double()
        drawn = uniforms(old["stream"], old["steps"]) < given
        fires = torch.where(old["threshold"].isnan(), drawn, given >= old["threshold"])
        policy = asked & fires & (old["length"] >= old["least"])
        budget = ~policy & (old["length"] >= old["most"]) & (old["most"] != _NEVER)
        stops = ended & (policy | budget)
        new["steps"] = old["steps"] + ended.long()
        new["nan_steps"] = old["nan_steps"] + (ended & asked & given.isnan()).long()
        new["reason"] = (
            old["reason"].masked_fill(stops & policy, _POLICY).masked_fill(stops & budget, _BUDGET)
        )
        new["at_boundary"] = torch.zeros_like(ended)
        never = torch.zeros_like(stops)
        self._close(new, stops, never, torch.zeros_like(old["steps"]), natural=False)
        self._put(slots, new, ended)
        return Decided(ended, old["length"], given.masked_fill(~asked, math.nan), stops)

    def shape(self, slots: torch.Tensor, scores: torch.Tensor) -> None:
        """Masks markers in answers, then leaves one token where it is forced, or greedy; in place.

        Args:
            slots: (B,).
            scores: of the next tokens, (B, V).
        """
        now = self._of(slots)
        answering = now["phase"] == _ANSWER
        masked = answering & now["masked"]
        channels = self._channels
        if channels is not None:
            chosen = now["answer"] == _TOOLS
            again = masked & chosen & (now["last"] == channels.thinking[0])
            column = scores[:, channels.thinking[1]]
            scores[:, channels.thinking[1]] = column.masked_fill(again, -torch.inf)
            masked = masked & ~chosen
        columns = scores[:, self._reentry]
        scores[:, self._reentry] = columns.masked_fill(masked[:, None], -torch.inf)
        forcing = now["phase"] == _FORCING
        ends = now["complete"]
        greedy = answering & now["boxed"] & ~now["samples"]
        place = now["forced_at"].clamp(max=len(self._suffix) - 1)
        kept = torch.where(forcing, self._suffix[place], scores.argmax(-1))
        kept = torch.where(ends, now["end_id"], kept)
        alone = forcing | ends | greedy
        kept = kept.where(alone, torch.zeros_like(kept))[:, None]
        value = scores.gather(1, kept).masked_fill(alone[:, None], 0.0)
        scores.masked_fill_(alone[:, None], -torch.inf)
        scores.scatter_(1, kept, value)

    def _of(self, slots: torch.Tensor) -> _Rows:
        return {name: values[slots] for name, values in self.state.items()}

    def _put(self, slots: torch.Tensor, rows: _Rows, where: torch.Tensor) -> None:
        for name, values in self.state.items():
            values[slots] = torch.where(where, rows[name], values[slots])


def _followed(rest: str, is_open: int, text: str) -> list[int]:
    """What `BoundaryState` makes of a text: the next rest, whether open, whether anything moved."""
    state = BoundaryState(b"", displays={})
    state._rest, state._open, state._bridged = rest, bool(is_open), _MOST_BRIDGED
    state._follow(text)
    left = [i for i, one in enumerate(_RESTS) if state._rest.endswith(one)]
    next_rest = max(left, key=lambda i: len(_RESTS[i]))
    return [next_rest, int(state._open), int(state._bridged == 0)]
