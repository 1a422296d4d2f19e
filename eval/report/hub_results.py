"""Results as the Hub's eval-results metadata, for a policy's card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult
from huggingface_hub.repocard_data import eval_results_to_model_index

from ..metrics import Estimate
from ..results import Result

__all__ = ["eval_results", "eval_results_yaml"]


def eval_results(
    result: Result, settings: Mapping[str, Any], *, dataset: str | None = None
) -> list[EvalResult]:
    """What the card of one policy says about one evaluation: accuracy, tokens, reduction, AES.

    Args:
        result: the policy's numbers.
        settings: of the evaluation they are from (`Evaluation.settings`).
        dataset: the benchmark's id on the Hub; its name where None.

    Returns:
        One entry a metric, each with its interval in its arguments.
    """
    name = str(settings["benchmark"])
    return [
        EvalResult(
            task_type="text-generation",
            task_name="Reasoning with a stopping policy",
            dataset_type=dataset or name,
            dataset_name=name,
            metric_type=kind,
            metric_name=f"{label} ({settings['answer']} answers, {settings['mode']})",
            metric_value=round(scale * value.value, 4),
            metric_args={
                "interval_95_by_problem": [
                    round(scale * value.low, 4),
                    round(scale * value.high, 4),
                ],
                "traces": result.traces,
                "problems": result.problems,
            },
        )
        for kind, label, value, scale in _metrics(result)
    ]


def eval_results_yaml(by_name: Mapping[str, Sequence[EvalResult]], path: str | Path) -> None:
    """Writes results as the YAML that stands in a card's metadata (`model-index`).

    Args:
        by_name: a policy's name -> its entries, of any number of evaluations.
        path: the file.
    """
    import yaml  # type: ignore[import-untyped]  # a dependency of huggingface_hub

    index = [
        entry
        for name, results in by_name.items()
        for entry in eval_results_to_model_index(name, list(results))
    ]
    content = {"model-index": index}
    Path(path).write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), "utf-8")


def _metrics(result: Result) -> list[tuple[str, str, Estimate, float]]:
    return [
        ("accuracy", "Pass@1, %", result.accuracy, 100),
        ("thinking_tokens", "Thinking tokens", result.tokens, 1),
        ("reduction", "Thinking tokens saved, %", result.reduction, 100),
        ("aes", f"AES ({result.aes_label})", result.aes, 1),
    ]
