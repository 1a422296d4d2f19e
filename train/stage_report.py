"""What a training run tells at its end: each stage's policy on the validation traces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ospruner.eval.panels import save_dynamics

from .policies import StageResult
from .settings import penalty_name

__all__ = ["print_stages"]


def print_stages(
    stages: Sequence[StageResult], console: Console, json_file: Path | None = None
) -> None:
    """Prints a table of the stages, draws each run's dynamics, and writes JSON where asked.

    Args:
        stages: results of one run.
        console: where to print.
        json_file: a list of `StageResult.to_dict`.
    """
    full = stages[0]
    table = Table(title="On the validation traces")
    for heading in ("policy", "λ", "accuracy %", "thinking tokens", "reduction %"):
        table.add_column(heading)
    table.add_row(
        "full trace", "", f"{100 * full.full_accuracy:.1f}", f"{full.full_tokens:.0f}", "0.0"
    )
    for stage in stages:
        penalty = penalty_name(stage.length_penalty) if stage.method == "os-pruner" else ""
        reduction = 1 - stage.tokens / stage.full_tokens
        table.add_row(
            stage.name,
            penalty,
            f"{100 * stage.accuracy:.1f}",
            f"{stage.tokens:.0f}",
            f"{100 * reduction:.1f}",
        )
    console.print(table)
    for folder in dict.fromkeys(stage.path.parent for stage in stages):
        console.print(f"Policies: {folder}", soft_wrap=True)
    for folder in dict.fromkeys(s.path.parent for s in stages if s.method == "os-pruner"):
        save_dynamics(folder, [folder / "dynamics.png"], title="On the validation traces")
        console.print(f"Dynamics: {folder / 'dynamics.png'}", soft_wrap=True)
    if json_file is not None:
        json_file.write_text(json.dumps([s.to_dict() for s in stages], indent=2) + "\n", "utf-8")
