"""What a server's counters say that it has saved: its `/metrics`, as anybody may read them."""

import math
import re
import urllib.request
from collections import defaultdict

_SERIES = re.compile(
    r'^ospruner_thinking_(ended|tokens|squares)_total{group="(\w+)",reason="(\w+)"} (\S+)$', re.M
)
_PROMISES = re.compile(r"^ospruner_(control_answers_total|drift_evidence){(.*)} (\S+)$", re.M)
_LABEL = re.compile(r'(\w+)="(.*?)"')
_QUANTILE = 1.96  # of a 95 % interval
_FEWEST = 2  # requests of a group that has a variance


def saved_by(url: str) -> str:
    """What a server of `ospruner serve` has saved so far, in a few lines.

    Raises:
        ValueError: there are no such counters.
        ConnectionError: nobody answers there.
    """
    address = f"{url.rstrip('/').removesuffix('/v1')}/metrics"
    try:
        with urllib.request.urlopen(address, timeout=30) as answer:
            text = answer.read().decode()
    except (OSError, ValueError) as error:
        raise ConnectionError(f"{address} does not answer: {error}") from error
    return "\n".join([_saved(text), *_drifts(text)])


def _drifts(metrics: str) -> list[str]:
    """What is said of each promise's control answers; see `drift.Drift`."""
    found: dict[tuple[float, ...], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for kind, text, value in _PROMISES.findall(metrics):
        labels = dict(_LABEL.findall(text))
        promise = tuple(float(labels[name]) for name in ("max_loss", "confidence", "allowed"))
        found[promise][labels.get("differs", kind)] += float(value)
    lines = []
    for (max_loss, confidence, allowed), of in sorted(found.items()):
        seen, evidence, needed = of["yes"] + of["no"], of["drift_evidence"], 2 / (1 - confidence)
        drifted = "DRIFTED: calibrate on today's problems"
        lines.append(
            f"promise of {100 * max_loss:g} points: of {seen:,.0f} control answers "
            f"{of['yes'] / max(seen, 1):.1%} differ where the policy stops, {allowed:.1%} are "
            f"allowed; evidence {evidence:.3g} of {needed:.3g}: "
            + (drifted if evidence >= needed else "no sign of drift")
        )
    return lines


def _saved(metrics: str) -> str:
    """The same of Prometheus' text.

    Means m of P requests with the policy and of the control group: the share 1 - m_P / m_C is
    saved, with the delta method's interval for the logarithm of the ratio, whose variance is the
    sum of s^2 / (n m^2) of both groups.
    """
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    reasons: dict[str, float] = defaultdict(float)
    for kind, group, reason, value in _SERIES.findall(metrics):
        sums[group][kind] += float(value)
        if (group, kind) == ("policy", "ended"):
            reasons[reason] += float(value)
    policy, control = sums["policy"], sums["control"]
    if not policy["ended"]:
        raise ValueError(
            "no thinking has ended there with a policy so far, or its /metrics has no counters of "
            "ours: start it with `ospruner serve`"
        )
    told = ", ".join(f"{reason} {count:,.0f}" for reason, count in sorted(reasons.items()))
    lines = [
        f"{policy['ended']:,.0f} requests with the policy, {policy['tokens']:,.0f} thinking "
        f"tokens; ended by: {told}"
    ]
    if min(policy["ended"], control["ended"]) < _FEWEST:
        return "\n".join([*lines, "no control group to compare with: start with --control 0.05"])
    means, variance = [], 0.0
    for group in (policy, control):
        count, mean = group["ended"], group["tokens"] / group["ended"]
        means.append(mean)
        spread = (group["squares"] - count * mean**2) / (count - 1)
        variance += spread / (count * mean**2)
    ratio, wide = means[0] / means[1], math.exp(_QUANTILE * math.sqrt(max(variance, 0.0)))
    shares = [1 - one for one in (ratio, ratio * wide, ratio / wide)]
    tokens = [policy["ended"] * means[1] * one for one in shares]
    return "\n".join(
        [
            *lines,
            f"{control['ended']:,.0f} requests of the control group: {means[1]:,.0f} tokens each, "
            f"with the policy {means[0]:,.0f}",
            f"saved {shares[0]:.1%} [{shares[1]:.1%}, {shares[2]:.1%}]: {tokens[0]:,.0f} thinking "
            f"tokens [{tokens[1]:,.0f}, {tokens[2]:,.0f}]",
        ]
    )
