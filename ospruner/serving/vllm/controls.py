"""Watches a server's promises: of control requests the pruned answer is made, too, and compared.

The requests of the control group think to their end. Where the policy would have stopped one, a
short request of its own forces the answer there, after the reply was sent.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import Counter, Gauge
from vllm import SamplingParams, TokensPrompt
from vllm.logger import init_logger

from ..core import format_of
from ..drift import Drift, answers_differ
from ..requests import ON

logger = init_logger("vllm.ospruner")  # vLLM's own are the ones that its servers write
_LABELS = ("max_loss", "confidence", "allowed")
_COMPARED = Counter(
    "ospruner_control_answers_total",
    "Control requests whose pruned answer was compared with the one at the end",
    (*_LABELS, "differs"),
)
_EVIDENCE = Gauge(
    "ospruner_drift_evidence",
    "The highest so far that more answers differ than allowed; alarms at 2 / (1 - confidence)",
    _LABELS,
    multiprocess_mode="livemax",
)
_UNLIMITED = 64  # tokens of a pruned answer, where the policy's settings limit none


class ControlWatch:
    """Takes what is told of control requests, and follows each promise."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine  # vLLM's client
        self._drifts: dict[tuple[str, ...], Drift] = {}
        self._running: set[asyncio.Task[None]] = set()

    def take(self, forks: Iterable[Mapping[str, Any] | None]) -> None:
        """Begins to compare; see `ServedRow.fork`."""
        for fork in forks:
            if fork is not None:
                task = asyncio.create_task(self._compare(fork))
                self._running.add(task)  # a loop holds its tasks weakly
                task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("a control request's answers could not be compared: %s", error)

    async def _compare(self, fork: Mapping[str, Any]) -> None:
        whole = pruned = self._answer(fork["answer_ids"])
        if fork["ids"] is not None:
            pruned = self._answer(await self._forced(fork["ids"], fork["max_tokens"] or _UNLIMITED))
        promise = fork["promise"]
        allowed = min(promise["disagreement"] + promise["max_loss"], 0.99)
        labels = tuple(
            str(x) for x in (promise["max_loss"], promise["confidence"], f"{allowed:.4f}")
        )
        drift = self._drifts.get(labels)
        if drift is None:
            # The other half of the chance is that the calibration saw too few differ.
            drift = self._drifts[labels] = Drift(allowed, (1 - promise["confidence"]) / 2)
        known = bool(drift.alarmed[0])
        drift.see(differs := answers_differ(whole, pruned))
        _COMPARED.labels(*labels, "yes" if differs else "no").inc()
        _EVIDENCE.labels(*labels).set(float(drift.highest[0]))
        if drift.alarmed[0] and not known:
            logger.warning(
                "the promise of max_loss %s may no longer hold: of %d control requests %d have "
                "another answer where the policy stops than at the end, %.1f %% are allowed; "
                "calibrate on today's problems, or ask for a more careful price",
                promise["max_loss"],
                drift.seen,
                drift.differed[0],
                100 * allowed,
            )

    async def _forced(self, ids: Sequence[int], most: int) -> Sequence[int]:
        """The tokens of a greedy answer to a prompt, without the policy."""
        params = SamplingParams(temperature=0.0, max_tokens=most, extra_args={ON: False})
        prompt, name = TokensPrompt(prompt_token_ids=list(ids)), f"ospruner-{uuid.uuid4().hex}"
        found: Sequence[int] = ()
        async for output in self._engine.generate(prompt, params, name):
            found = output.outputs[0].token_ids
        return found

    def _answer(self, ids: Sequence[int]) -> str:
        """What stands in the box; all of it where it does not close."""
        fmt = format_of(self._engine.model_config.tokenizer)
        box, read = fmt.box_state(), list[int]()
        for token in ids:
            read.append(token)
            if box.push(token):
                break
        return str(fmt.text(read))
