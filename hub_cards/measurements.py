"""Results (`results.json`) as a card shows them: a table for people, an index for the Hub."""

from __future__ import annotations

import re
from collections.abc import Iterable

from huggingface_hub import EvalResult
from huggingface_hub.repocard_data import eval_results_to_model_index

from modeling_ospruner.common.results_file import Results
from modeling_ospruner.common.text import markdown_table

__all__ = ["eval_results", "model_index_yaml", "results_caption", "results_markdown"]


def results_caption(results: Results) -> str:
    """What was measured, on how many traces, and what the brackets are."""
    first = results.results[0]
    return (
        f"{results.dataset}: {results.setting}; {first.traces:,} traces of {first.problems:,} "
        f"problems. Brackets are 95 % intervals by problem; AES {first.aes_label}."
    )


def results_markdown(results: Results) -> str:
    """Rules and limits as a table in GitHub's markdown; the chosen policy is bold."""
    rows = []
    for number, one in enumerate([*results.results, *results.limits]):
        name = f"**{one.name}**" if number == results.chosen else one.name
        numbers = (
            (one.accuracy, 100, 1),
            (one.tokens, 1, 0),
            (one.reduction, 100, 1),
            (one.aes, 1, 2),
        )
        rows.append([name, *(value.text(scale, digits) for value, scale, digits in numbers)])
    return markdown_table(["method", "accuracy %", "thinking tokens", "saved %", "AES"], rows)


def eval_results(results: Results, row: int) -> list[EvalResult]:
    """One rule's accuracy, tokens, reduction and AES, each with its interval, for the Hub's index.

    Args:
        results: where the numbers are.
        row: the place of the rule in them.
    """
    one = results.results[row]
    metrics = (
        ("accuracy", "Pass@1, %", one.accuracy, 100),
        ("thinking_tokens", "Thinking tokens", one.tokens, 1),
        ("reduction", "Thinking tokens saved, %", one.reduction, 100),
        ("aes", f"AES ({one.aes_label})", one.aes, 1),
    )
    return [
        EvalResult(
            task_type="text-generation",
            task_name="Reasoning with a stopping policy",
            dataset_type=re.sub(r"[^\w./-]+", "-", results.dataset),  # all that the Hub takes
            dataset_name=results.dataset,
            metric_type=kind,
            metric_name=f"{label} ({results.setting})",
            metric_value=round(scale * number.value, 4),
            metric_args={
                "interval_95_by_problem": [
                    round(scale * number.low, 4),
                    round(scale * number.high, 4),
                ],
                "traces": one.traces,
                "problems": one.problems,
            },
        )
        for kind, label, number, scale in metrics
    ]


def model_index_yaml(results: Results, rows: Iterable[int]) -> str:
    """Some rules' results as the YAML that stands in a card's metadata (`model-index`).

    Args:
        results: where the numbers are.
        rows: the places of the rules.
    """
    import yaml  # type: ignore[import-untyped]  # a dependency of huggingface_hub

    index = [
        entry
        for row in rows
        for entry in eval_results_to_model_index(
            results.results[row].name, eval_results(results, row)
        )
    ]
    text: str = yaml.safe_dump({"model-index": index}, sort_keys=False, allow_unicode=True)
    return text
