"""One labelled trace in the terminal, each step coloured by the grade of its forced answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from modeling_ospruner.serving.open_engine import load_tokenizer

from .label_folder import read_labels, read_manifest

__all__ = ["show_trace", "trace_text"]

_STYLES = {True: "green", False: "red", None: "yellow"}


def show_trace(path: str | Path, row: int, tokenizer: str | None, console: Console) -> None:
    """Prints a trace: problem, each labelled step with its forced answer, and a summary.

    Args:
        path: the label folder.
        row: number of the trace, from 0.
        tokenizer: folder or Hub id of the tokenizer; the base's where None.
        console: where to print.

    Raises:
        ValueError: no such folder, row or tokenizer.
    """
    traces = read_labels(path)
    if not 0 <= row < len(traces):
        raise ValueError(f"row is {row}; {path} holds the traces 0 .. {len(traces) - 1}")
    settings = read_manifest(path)["settings"]
    loaded = load_tokenizer(
        tokenizer or settings["base_model"], None if tokenizer else settings["base_revision"]
    )
    console.print(trace_text(traces[row], loaded), soft_wrap=True)


def trace_text(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Text:
    """A labelled trace as coloured text.

    A step is green where the answer forced at its end is right, red where it is wrong, and yellow
    where there is no verdict.

    Args:
        row: a labelled trace.
        tokenizer: the one its ids belong to.
    """
    steps = len(row["step_ends"])
    text = Text()
    text.append(f"{row['problem_id']}, sample {row['sample_index']}", "bold")
    text.append(f"\n{row['problem']}\n\n")
    start = 0
    for step, end in enumerate(row["step_ends"]):
        grade = row["forced_correct"][step]
        style = _STYLES[None if grade is None else grade >= 0.5]
        body = tokenizer.decode(row["trace_ids"][start:end], clean_up_tokenization_spaces=False)
        text.append(str(body).rstrip() + "\n", style)
        answer = row["forced_answers"][step] or "no answer"
        notes = [f"step {step + 1} of {steps}", f"{end} tokens", f"forced answer: {answer}"]
        logprob, reason = row["forced_logprob"][step], row["ungraded_reasons"][step]
        if logprob is not None:
            notes.append(f"log-probability {logprob:.2f}")
        if reason is not None:
            notes.append(f"not graded: {reason}")
        text.append("  [" + ", ".join(notes) + "]\n\n", f"dim {style}")
        start = end
    right = sum(grade is not None and grade >= 0.5 for grade in row["forced_correct"])
    text.append(
        f"reference {row['answer']}; {right} of {steps} forced answers right; natural answer "
        f"{row['natural_answer'] or 'none'}; ended: {row['ended']}",
        "bold",
    )
    return text
