"""Prometheus counters of stops, beside vLLM's own at `/metrics`.

They are counted where the engine runs. A server's endpoint sees them where vLLM and they share a
folder, `PROMETHEUS_MULTIPROC_DIR` (`ospruner serve` makes one).
"""

from __future__ import annotations

from prometheus_client import Counter

from modeling_ospruner.stopping_ospruner import StopRecord

__all__ = ["count"]

_LABELS = ("group", "reason")
_ENDED = Counter(
    "ospruner_thinking_ended_total",
    "Requests whose thinking has ended: group is policy or control, reason policy, budget, natural",
    _LABELS,
)
_TOKENS = Counter(
    "ospruner_thinking_tokens_total", "Thinking tokens of the requests that have ended it", _LABELS
)


def count(record: StopRecord, control: bool) -> None:
    """Counts a request whose thinking has ended."""
    labels = ("control" if control else "policy", record.reason)
    _ENDED.labels(*labels).inc()
    _TOKENS.labels(*labels).inc(record.thinking_tokens)
