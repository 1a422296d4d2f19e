"""What stopping costs in floating-point operations: one yardstick for every rule.

The paper counts thinking tokens. That is fair where rules differ in nothing else, but some run a
tail, some a second model, some try answers. Here each pays for what it computes: the prompt, the
thinking, what is forced and the answer; a policy for its tail on all tokens until the stop, or at
step ends where it is queries only, a verifier for all that it reads, a rule that tries answers for
each of them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .arithmetic import ModelWork
from .table import FloatArray, IntArray, TraceTable

__all__ = ["Compute", "flops_scale"]

_PREFIXES = ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"))


@dataclass(frozen=True, eq=False)
class Compute:
    """What a base computes on N prompts.

    Attributes:
        work: of the base.
        prompt_tokens: (N,) tokens of each prompt.
        forced_tokens: tokens forced before an answer (`TokenFormat.forced_suffix`).
    """

    work: ModelWork
    prompt_tokens: IntArray
    forced_tokens: int

    @classmethod
    def of_labels(cls, dataset: Any, work: ModelWork, forced_tokens: int) -> Compute:
        """For labelled traces, row for row."""
        prompts = dataset.select_columns(["prompt_ids"])["prompt_ids"]
        return cls(work, np.array([len(ids) for ids in prompts], np.int64), forced_tokens)

    def thinking(self, tokens: npt.ArrayLike, answer_tokens: npt.ArrayLike) -> FloatArray:
        """Operations of prompt, thinking and answer, (N,) or (N, T) as the arguments are.

        The prompt is read, so many tokens are generated, the closing is read, the answer generated.
        """
        length = np.asarray(tokens, np.float64)
        end = self._positions(length) + length
        thought = self.work.read(0, end) + self.work.logits * length
        result: FloatArray = thought + self.work.answer(end, self.forced_tokens, answer_tokens)
        return result

    def tail(self, tokens: npt.ArrayLike, layers: int) -> FloatArray:
        """Operations of a policy's tail: its layers on the prompt and on so many thinking tokens.

        Adapters and the linear head, a vector at each step's end, are left out.
        """
        length = np.asarray(tokens, np.float64)
        return self.work.read(0, self._positions(length) + length, layers)

    def queries(self, step_ends: npt.ArrayLike, layers: int) -> FloatArray:
        """Operations of a tail that is queries only, at each of these step ends.

        One token goes through its layers. That it makes no keys and values is left out, and so are
        adapters and the head.
        """
        length = np.asarray(step_ends, np.float64)
        end = self._positions(length) + length
        return self.work.read(end - 1, end, layers)

    def trial(self, row: int, tokens: int, answer_tokens: float) -> float:
        """Operations of one trial answer of a row after so many thinking tokens."""
        position = int(self.prompt_tokens[row]) + tokens
        return float(self.work.answer(position, self.forced_tokens, answer_tokens))

    def charge(self, table: TraceTable) -> TraceTable:
        """The table with what stopping at each step costs in `flops`."""
        flops = self.thinking(table.lengths, table.answer_tokens)
        return dataclasses.replace(table, flops=flops)

    def charge_tail(self, table: TraceTable, layers: int, queries: bool = False) -> TraceTable:
        """The charged table with what a tail costs added; as it is where it is not charged.

        Args:
            table: N labelled traces of up to T steps.
            layers: of the tail.
            queries: whether it is queries only, which computes at each step's end but the last,
                where nothing is decided.
        """
        if table.flops is None:
            return table
        if not queries:
            return dataclasses.replace(table, flops=table.flops + self.tail(table.lengths, layers))
        due = np.arange(table.mask.shape[1]) < table.last[:, None]  # (N, T)
        flops = np.where(due, self.queries(table.lengths, layers), 0.0).cumsum(axis=1)
        return dataclasses.replace(table, flops=table.flops + flops)

    def _positions(self, like: FloatArray) -> FloatArray:
        """The prompts' tokens, shaped to go with (N,) or (N, T)."""
        prompts = self.prompt_tokens.astype(np.float64)
        return prompts[:, None] if like.ndim == 2 else prompts


def flops_scale(flops: float) -> tuple[float, str]:
    """What to divide operations by so that a number of this size is readable, and its unit."""
    for scale, unit in _PREFIXES:
        if flops >= scale:
            return scale, unit
    return 1e3, "kFLOP"
