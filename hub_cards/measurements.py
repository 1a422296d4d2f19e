"""Results (`results.json`) as a table for people, a card's index, and the Hub's own results."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # a dependency of huggingface_hub
from huggingface_hub import (
    EvalResult,
    EvalResultEntry,
    HfApi,
    eval_result_entries_to_yaml,
    hf_hub_download,
)
from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.repocard_data import eval_results_to_model_index

from ospruner.eval.results import RESULTS_FILE, Results
from ospruner.eval.text import markdown_table

EVAL_RESULTS_FOLDER = ".eval_results"
"""Where the Hub looks for results that it shows and ranks by itself."""

__all__ = [
    "EVAL_RESULTS_FOLDER",
    "eval_results",
    "model_index_yaml",
    "results_caption",
    "results_markdown",
    "write_eval_results",
]


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
    index = [
        entry
        for row in rows
        for entry in eval_results_to_model_index(
            results.results[row].name, eval_results(results, row)
        )
    ]
    text: str = yaml.safe_dump({"model-index": index}, sort_keys=False, allow_unicode=True)
    return text


def write_eval_results(folder: Path, benchmark: str, repo_id: str, api: HfApi) -> Path:
    """Writes the chosen policy's accuracy as the Hub reads it: `.eval_results/NAME.yaml`.

    The Hub shows it on the model's page and on the leaderboard of the benchmark's data set
    (https://huggingface.co/docs/hub/eval-results). Only the publisher knows which data set that
    is; its own `eval.yaml` says which tasks it ranks.

    Args:
        folder: Holds `results.json`.
        benchmark: The data set on the Hub, `org/name`, or `org/name:task` where it has several.
        repo_id: The policy's repository, whose `results.json` is named as the source.
        api: The Hub.

    Returns:
        The file.

    Raises:
        ValueError: There are no results of a chosen policy, or the data set is not on the Hub, is
            no benchmark, or has no such task.
    """
    path = folder / RESULTS_FILE
    results = Results.read(path) if path.is_file() else None
    if results is None or results.chosen is None:
        raise ValueError(
            f"benchmark={benchmark!r}, but the policy's folder has no {RESULTS_FILE} that names "
            "the policy: evaluate it and put the file there, or leave --benchmark out"
        )
    dataset, _, task = benchmark.partition(":")
    tasks, revision = _benchmark_tasks(dataset, api)
    if not task and len(tasks) == 1:
        task = tasks[0]
    if task not in tasks:
        raise ValueError(
            f"benchmark={benchmark!r}: the tasks of {dataset} are {tasks}; name one of them, as "
            f"in {dataset}:{tasks[0]}"
        )
    one = results.results[results.chosen]
    entry = EvalResultEntry(
        dataset_id=dataset,
        task_id=task,
        value=round(100 * one.accuracy.value, 4),
        dataset_revision=revision,
        source_url=f"{api.endpoint}/{repo_id}/blob/main/{RESULTS_FILE}",
        source_name=RESULTS_FILE,
        notes=(
            f"Pass@1 in %, 95 % interval by problem {one.accuracy.text(100, 1)}; stopped by "
            f"{one.name} after {one.tokens.value:.0f} thinking tokens in the mean "
            f"({100 * one.reduction.value:.1f} % saved); {results.setting}; measured on "
            f"{results.dataset}"
        ),
    )
    name = re.sub(r"[^\w.-]+", "-", f"{dataset} {task}".strip())
    written = folder / EVAL_RESULTS_FOLDER / f"{name}.yaml"
    written.parent.mkdir(exist_ok=True)
    content = eval_result_entries_to_yaml([entry])
    written.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), "utf-8")
    return written


def _benchmark_tasks(dataset: str, api: HfApi) -> tuple[list[str], str]:
    """The tasks that a benchmark's `eval.yaml` defines, and the data set's commit.

    Raises:
        ValueError: the data set is not there, or is no benchmark.
    """
    try:
        revision = str(api.dataset_info(dataset).sha)
        path = hf_hub_download(
            dataset,
            "eval.yaml",
            repo_type="dataset",
            revision=revision,
            endpoint=api.endpoint,
            token=api.token,
        )
        content: Any = yaml.safe_load(Path(path).read_text("utf-8"))
        tasks = [str(task["id"]) for task in content["tasks"]]
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"benchmark={dataset!r} is no data set on the Hub, or not visible with your token"
        ) from error
    except (EntryNotFoundError, yaml.YAMLError, KeyError, TypeError) as error:
        raise ValueError(
            f"{dataset} is no benchmark: it has no eval.yaml with tasks, and the Hub would show "
            "no result for it; leave --benchmark out (the card holds the numbers all the same)"
        ) from error
    if not tasks:
        raise ValueError(f"{dataset} is no benchmark: its eval.yaml has no tasks")
    return tasks, revision
