"""`ospruner doctor drift`: does a server's traffic still look like the calibration's?

A promise (`ospruner calibrate`) is about problems drawn as the calibration's were. Two signals show
that others come: how many tokens requests think, and what the policy says at their first step. Each
is compared as a histogram over the bins that the calibration fixed: by how much the shares differ
(total variation distance), and whether chance could do that (the chi-square test of two samples, in
which a calibration counts as many requests as it had problems).

Signals that agree are no proof: problems may change where these two do not.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console

from modeling_ospruner.configuration_ospruner import OSPrunerConfig
from ospruner.durable import replace_file
from ospruner.serving.traffic import SIGNALS, bin_of, observed

from .findings import Finding, Report, print_report

__all__ = ["compare", "counts_of_metrics", "counts_of_records", "run_drift"]

Counts = npt.NDArray[np.float64]

MOST_DISTANCE = 0.1
"""Of the shares: a tenth of the requests would have to fall elsewhere."""

LEAST_P = 0.01
"""Differences that chance makes more often than this are none."""

LEAST_REQUESTS = 100

_METRIC = re.compile(r"^ospruner_promised_total\{(?P<labels>[^}]*)\} (?P<value>\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def counts_of_metrics(text: str, promise: Mapping[str, Any]) -> dict[str, Counts]:
    """Requests in each bin, as a server's `/metrics` counts them.

    Args:
        text: Prometheus' text format.
        promise: the calibration that the server stops by.
    """
    counts = _none(promise)
    for found in _METRIC.finditer(text):
        labels = dict(_LABEL.findall(found["labels"]))
        asked = [str(promise[name]) for name in ("max_loss", "confidence")]
        if [labels["max_loss"], labels["confidence"]] == asked:
            counts[labels["signal"]][int(labels["bin"])] += float(found["value"])
    return counts


def counts_of_records(lines: Sequence[str], promise: Mapping[str, Any]) -> dict[str, Counts]:
    """Requests in each bin, from `StopRecord`s, one JSON object a line.

    Args:
        lines: records of rows that stopped by the calibration.
        promise: the calibration.

    Raises:
        ValueError: a line is no record.
    """
    counts = _none(promise)
    for number, line in enumerate(lines, start=1):
        try:
            found = observed(json.loads(line))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"line {number} is no StopRecord ({error!r}): write "
                "json.dumps(dataclasses.asdict(record)) of each, a line for each"
            ) from None
        for signal, value in found.items():
            counts[signal][bin_of(promise["traffic"][signal]["edges"], value)] += 1
    return counts


def _none(promise: Mapping[str, Any]) -> dict[str, Counts]:
    return {one: np.zeros(len(promise["traffic"][one]["shares"])) for one in SIGNALS}


def compare(shares: Sequence[float], problems: int, counts: Counts) -> tuple[float, float]:
    """The distance of two histograms, and how often chance makes one as great.

    Args:
        shares: of the calibration's bins.
        problems: that it had.
        counts: requests in each.

    Returns:
        The total variation distance in [0, 1], and the p-value.
    """
    ours, theirs = np.array(shares) * problems, counts
    total = theirs.sum()
    distance = float(np.abs(np.array(shares) - theirs / total).sum() / 2)
    seen = ours + theirs > 0
    ratio = (total / problems) ** 0.5
    terms = (ratio * ours - theirs / ratio)[seen] ** 2 / (ours + theirs)[seen]
    freedom = max(int(seen.sum()) - 1, 1)
    half = torch.tensor([freedom / 2, float(terms.sum()) / 2], dtype=torch.float64)
    return distance, float(torch.special.gammaincc(half[0], half[1]))  # chi-square's upper tail


def run_drift(
    policy: str,
    served: str,
    max_loss: float | None,
    console: Console,
    revision: str | None = None,
    json_file: Path | None = None,
) -> bool:
    """Compares what was served with the calibration, prints, and says whether they agree.

    Args:
        policy: folder or Hub id.
        served: address of a server's `/metrics`, a file of what it says, or a .jsonl file of
            `StopRecord`s.
        max_loss: which promise; None for the only one.
        console: to print on.
        revision: of the policy on the Hub.
        json_file: where to write `Report.to_dict`, too.

    Raises:
        ValueError: no such promise, or nothing that could be compared.
        OSError: `served` cannot be read.
    """
    config = OSPrunerConfig.from_pretrained(policy, revision=revision or "main")
    promise = _promise(policy, config, max_loss)
    if served.endswith(".jsonl"):
        counts = counts_of_records(Path(served).read_text("utf-8").splitlines(), promise)
    elif served.startswith(("http://", "https://")):
        with urllib.request.urlopen(served, timeout=30) as answer:
            counts = counts_of_metrics(answer.read().decode(), promise)
    else:
        counts = counts_of_metrics(Path(served).read_text("utf-8"), promise)
    if not counts["thinking_tokens"].sum():
        raise ValueError(
            f"{served} counts no request that stopped by the promise of max_loss "
            f"{promise['max_loss']:g}: serve with --max-loss {promise['max_loss']:g}, or give "
            "another --max-loss"
        )
    report = Report(policy, "policy")
    title = f"Traffic against the calibration of max_loss {promise['max_loss']:g}"
    report.sections[title] = [
        _finding(signal, promise["traffic"], counts[signal]) for signal in SIGNALS
    ]
    print_report(report, console)
    if json_file is not None:
        found = report.to_dict() | {"counts": {name: one.tolist() for name, one in counts.items()}}
        replace_file(json_file, (json.dumps(found, indent=2) + "\n").encode())
    return report.healthy


def _promise(policy: str, config: OSPrunerConfig, max_loss: float | None) -> dict[str, Any]:
    promises = config.calibrations or []
    fitting = [one for one in promises if max_loss in (None, one["max_loss"])]
    if len(fitting) == 1:
        return fitting[0]
    known = sorted(one["max_loss"] for one in promises)
    if not known:
        raise ValueError(
            f"{policy} promises nothing, so there is no calibration to compare with: ospruner "
            "calibrate POLICY --labels DIR --max-loss 0.02"
        )
    raise ValueError(f"--max-loss is {max_loss}; {policy} has the promises {known}: name one")


def _finding(signal: str, traffic: Mapping[str, Any], counts: Counts) -> Finding:
    name, requests = SIGNALS[signal], int(counts.sum())
    if requests < LEAST_REQUESTS:
        value = f"{requests:,} requests are too few to tell; {LEAST_REQUESTS} are needed"
        return Finding(name, value, "note", "ask again later")
    shares, problems = traffic[signal]["shares"], traffic["problems"]
    distance, p = compare(shares, problems, counts)
    value = f"distance {distance:.3f}, p = {p:.2g} ({requests:,} requests, {problems:,} problems)"
    if distance <= MOST_DISTANCE or p >= LEAST_P:
        return Finding(name, value)
    lower = np.cumsum(counts / requests - np.array(shares))[:-1].sum() > 0
    return Finding(
        name,
        f"{value}: {'lower' if lower else 'higher'} than the calibration's",
        "wrong",
        "other problems come than the calibration's, and the promise says nothing about them: "
        "label some of these, and calibrate again",
    )
