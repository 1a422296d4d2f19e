"""What a label folder holds, in numbers and in a few lines."""

from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd

from .folder import MANIFEST, read_labels, read_manifest
from .label import Regraded
from .store import COSTS


def stats_of(path: str | Path) -> dict[str, Any]:
    """Counts, accuracy forced at the end and token costs, JSON-ready.

    Raises:
        ValueError: there are no labels.
    """
    manifest = read_manifest(path)
    columns = ["problem_id", "ended", "natural_correct"]
    per_step = ["step_ends", "forced_correct", "ungraded_reasons"]
    frame = read_labels(path, manifest).select_columns([*columns, *per_step]).to_pandas()
    steps = frame.explode(per_step)
    grades = steps["forced_correct"].astype(float)
    ends, right = steps["step_ends"].astype(int).groupby(level=0), grades.fillna(0.0)
    reached = steps["step_ends"].astype(int) / ends.transform("last")  # as a share of the trace
    natural = frame["natural_correct"].astype(float).dropna()

    def share(grades: pd.Series) -> float:
        """Of the traces; one without such a step is wrong."""
        return float(grades.sum() / len(frame))

    return {
        "traces": len(frame),
        "problems": frame["problem_id"].nunique(),
        "steps": len(steps),
        "tokens_per_trace": share(ends.last()),
        "dropped_traces": len(manifest["dropped"]),
        "failed_traces": len(manifest["failed"]),
        "capped_traces": int((frame["ended"] == "cap").sum()),
        "ungraded_steps": int(grades.isna().sum()),
        "ungraded_reasons": dict(Counter(steps["ungraded_reasons"].dropna())),
        "full_accuracy": share(right.groupby(level=0).last()),
        "natural_accuracy": float(natural.mean()) if len(natural) else None,
        "ever_right": share(right.groupby(level=0).max() >= 0.5),
        "accuracy_at": {
            str(part): share(right[reached <= part].groupby(level=0).last())
            for part in (0.25, 0.5, 0.75)
        },
        **{name: manifest[name] for name in COSTS},
    }


def told(path: str | Path, stats: dict[str, Any]) -> str:
    """What a label run made, in a few lines."""
    manifest = read_manifest(path)
    reasons = "".join(f"; {why}: {n}" for why, n in sorted(stats["ungraded_reasons"].items()))
    at = stats["accuracy_at"].items()
    shares = ", ".join(f"{float(part):.0%} of the trace {100 * right:.1f} %" for part, right in at)
    lines = [
        f"{stats['traces']} traces of {stats['problems']} problems, {stats['steps']} labelled "
        f"steps, {stats['tokens_per_trace']:.0f} thinking tokens a trace; cut at the cap "
        f"{stats['capped_traces']}, dropped {stats['dropped_traces']}, steps without a verdict "
        f"{stats['ungraded_steps']}{reasons}",
        f"Right when forced at {shares}; at the end {100 * stats['full_accuracy']:.1f} %, at some "
        f"step {100 * stats['ever_right']:.1f} %",
    ]
    some = manifest["failed"][:3]
    lines += [f"Failed: trace {sample} of problem {name}: {why}" for name, sample, why in some]
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
    detail = "".join(f"; {name}: {count}" for name, count in result.changed.items())
    said = f"{result.steps} forced answers graded, {result.changed.total()} grades changed{detail}"
    without = [f"without a verdict, {why}: {n}" for why, n in sorted(result.ungraded.items())]
    return "\n".join([said, *without]), vars(result)
