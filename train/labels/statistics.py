"""What a label folder holds, in numbers and in a few lines."""

from __future__ import annotations

import bisect
from collections import Counter
from pathlib import Path
from typing import Any

from .folder import MANIFEST, read_labels, read_manifest
from .label import Regraded
from .store import COSTS

__all__ = ["stats_of", "told", "told_regraded", "told_stopped"]

_SHOWN_ERRORS = 3


def stats_of(path: str | Path) -> dict[str, Any]:
    """Counts, accuracy forced at the end and token costs, JSON-ready.

    Raises:
        ValueError: there are no labels.
    """
    dataset, manifest = read_labels(path), read_manifest(path)
    grades = dataset["forced_correct"]
    rows = list(zip(dataset["step_ends"], grades, strict=True))
    reasons = Counter(why for row in dataset["ungraded_reasons"] for why in row if why is not None)
    natural = [grade for grade in dataset["natural_correct"] if grade is not None]
    return {
        "traces": len(dataset),
        "problems": len(set(dataset["problem_id"])),
        "steps": sum(map(len, grades)),
        "tokens_per_trace": sum(map(len, dataset["trace_ids"])) / len(dataset),
        "dropped_traces": len(manifest["dropped"]),
        "failed_traces": len(manifest["failed"]),
        "capped_traces": list(dataset["ended"]).count("cap"),
        "ungraded_steps": sum(row.count(None) for row in grades),
        "ungraded_reasons": dict(reasons),
        "full_accuracy": sum(row[-1] or 0.0 for row in grades) / len(dataset),
        "natural_accuracy": sum(natural) / len(natural) if natural else None,
        "ever_right": sum(any((g or 0) >= 0.5 for g in row) for row in grades) / len(dataset),
        "accuracy_at": {
            str(share): sum(_grade_at(*row, share) for row in rows) / len(dataset)
            for share in (0.25, 0.5, 0.75)
        },
        **{name: manifest[name] for name in COSTS},
    }


def _grade_at(ends: list[int], grades: list[float | None], share: float) -> float:
    """The grade of the last step within that share of a trace's tokens; 0 where there is none."""
    step = bisect.bisect_right(ends, share * ends[-1])
    return grades[step - 1] or 0.0 if step else 0.0


def told(path: str | Path, stats: dict[str, Any]) -> str:
    """What a label run made, in a few lines."""
    manifest = read_manifest(path)
    reasons = "".join(f"; {why}: {n}" for why, n in sorted(stats["ungraded_reasons"].items()))
    shares = ", ".join(
        f"{float(share):.0%} of the trace {100 * right:.1f} %"
        for share, right in stats["accuracy_at"].items()
    )
    lines = [
        f"{stats['traces']} traces of {stats['problems']} problems, {stats['steps']} labelled "
        f"steps, {stats['tokens_per_trace']:.0f} thinking tokens a trace; cut at the cap "
        f"{stats['capped_traces']}, dropped {stats['dropped_traces']}, steps without a verdict "
        f"{stats['ungraded_steps']}{reasons}",
        f"Right when forced at {shares}; at the end {100 * stats['full_accuracy']:.1f} %, at some "
        f"step {100 * stats['ever_right']:.1f} %",
    ]
    for problem, sample, error in manifest["failed"][:_SHOWN_ERRORS]:
        lines.append(f"Failed: trace {sample} of problem {problem}: {error}")
    if failed := stats["failed_traces"]:
        lines.append(
            f"{failed} of {failed + stats['traces']} traces failed. If they are the long ones, the "
            "labels are biased: the same command with --set retry_failed=true does them again."
        )
    ratio = stats["computed_tokens"] / max(1, stats["unique_tokens"])
    lines.append(
        f"Tokens of the forks: {stats['computed_tokens']:,} computed, {stats['unique_tokens']:,} "
        f"unique ({ratio:.3f}). In {path}"
    )
    if excluded := manifest.get("source", {}).get("excluded"):
        lines.append(f"{excluded['overlaps']} problems were dropped as overlaps.")
    return "\n".join(lines)


def told_stopped(path: str | Path) -> str:
    """What an interrupted run has left."""
    traces = read_manifest(path)["traces"] if (Path(path) / MANIFEST).is_file() else 0
    return f"Stopped: {traces} labelled traces in {path}; the same command goes on."


def told_regraded(result: Regraded) -> tuple[str, dict[str, Any]]:
    """What grading again changed: lines, and numbers."""
    changed = {f"{was} -> {now}": count for (was, now), count in sorted(result.changed.items())}
    detail = "".join(f"; {name}: {count}" for name, count in changed.items())
    said = f"{result.steps} forced answers graded, {sum(changed.values())} grades changed{detail}"
    without = [f"without a verdict, {why}: {n}" for why, n in sorted(result.ungraded.items())]
    return "\n".join([said, *without]), vars(result) | {"changed": changed}
