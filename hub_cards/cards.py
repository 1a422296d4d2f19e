"""The cards of policies and labels, made from what their folders say themselves.

A policy's base, method and price are read from `config.json`, the origin from `provenance.json`,
the results from `results.json`; labels' settings from their manifests. Only the name, the licence
and the data sets are told by the caller.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from huggingface_hub import DatasetCard, DatasetCardData, EvalResult, ModelCard, ModelCardData

from modeling_ospruner import OSPrunerConfig
from modeling_ospruner.custom_generate_ospruner import CUSTOM_GENERATE
from ospruner.eval.results import RESULTS_FILE, Estimate, Results
from ospruner.eval.schema import COLUMNS, PREFIX_COLUMNS
from ospruner.eval.text import markdown_table
from ospruner.provenance import is_hub_id, read_object, read_provenance, without_paths
from ospruner.train.labels.card import card_configs
from ospruner.train.labels.folder import Shard, data_hash, shards_of

from .staging import Base, scrubbed

__all__ = [
    "CARD_FILE",
    "PICTURE_FILE",
    "License",
    "labels_card",
    "policy_card",
    "read_policy_config",
    "results_markdown",
]

CARD_FILE = "README.md"
PICTURE_FILE = "pareto.png"
EXAMPLE = "What is 17 * 23?"  # of the snippet, and of the Hub's widget
_TAGS = ["ospruner", "reasoning", "chain-of-thought", "early-exit"]
_SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (10**6, "100K<n<1M"))
_COUNTS = ("problems", "traces", "steps", "ungraded_steps", "capped_traces")
_METHODS = {
    "os-pruner": (
        "It was trained to maximise the expected reward of stopping: the chance that the answer "
        "forced there is right, less λ for every thinking token spent."
    ),
    "probe": (
        "It is the classification-probe baseline: trained to predict whether the answer forced "
        "after a paragraph is right."
    ),
    "convergence": (
        "It is the answer-convergence baseline: trained to predict whether the answer forced "
        "after a paragraph stays the same to the end."
    ),
}


@dataclass(frozen=True)
class License:
    """A licence in the Hub's spelling.

    Attributes:
        id: Such as "mit"; "other" needs name and link.
        name: Of a licence that the Hub has no id for.
        link: Where its text is.
    """

    id: str
    name: str | None = None
    link: str | None = None


def policy_card(
    folder: Path, *, name: str, license: License | None, labels: Sequence[str] = ()
) -> ModelCard:
    """The card of a saved policy, with the metadata that the Hub reads as its `data`.

    Args:
        folder: Holds the policy's `config.json` and `provenance.json`, and perhaps `results.json`.
        name: What users load: the repository's id on the Hub, or a folder's name.
        license: Of the policy, normally the base's: copied layers are the base's own weights.
            None where it is not known, which the card then says.
        labels: Ids on the Hub of the labels that it was trained on.

    Raises:
        ValueError: The folder holds no policy or has no provenance.
    """
    config = read_policy_config(folder)
    record = read_provenance(folder)
    results = None
    if (folder / RESULTS_FILE).is_file():
        results = Results.read(folder / RESULTS_FILE)
    index = None
    if results is not None and results.chosen is not None:
        index = _eval_results(results, results.chosen)
    base = config.base_model_name_or_path
    on_hub = is_hub_id(base)
    # As in labelling: the instruction is a paragraph of its own after the problem.
    instruction = (config.reasoning_format or {})["user_instruction"]
    appended = f"\n\n{instruction}" if instruction else ""
    layers = config.num_policy_layers
    data = ModelCardData(
        license=license.id if license else None,
        license_name=license.name if license else None,
        license_link=license.link if license else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=_TAGS,
        base_model=base if on_hub else None,
        base_model_relation="adapter" if on_hub else None,
        datasets=list(labels) or None,
        model_name=name.rpartition("/")[2] if index else None,
        eval_results=index,
        widget=[{"messages": [{"role": "user", "content": f"{EXAMPLE}{appended}"}]}],
    )
    details = {key: value for key, value in record.details.items() if key != "warning"}
    return ModelCard.from_template(
        data,
        template_path=str(Path(__file__).with_name("policy_card.md")),
        name=name,
        base_name=base if on_hub else Path(base).name,  # a folder's path is nobody's business
        base_on_hub=on_hub,
        policy_parts=f"a tail of {layers} layers and a linear head" if layers else "a linear head",
        method=_METHODS.get(config.method, f"It is the baseline “{config.method}”."),
        example=EXAMPLE,
        content=f"problem + {json.dumps(appended, ensure_ascii=False)}" if appended else "problem",
        config=config,
        command=without_paths(record.command),
        provenance=record,
        warning=without_paths(record.details.get("warning", "")),
        settings=_settings(details),
        results=results_markdown(results) if results is not None and len(results.rules) else "",
        picture=PICTURE_FILE if (folder / PICTURE_FILE).is_file() else None,
        custom_generate=on_hub and (folder / CUSTOM_GENERATE).is_file(),
        license_known=license is not None,
        label_sets=list(labels),
    )


def labels_card(
    folder: Path,
    splits: Mapping[str, tuple[str, Mapping[str, Any]]],
    *,
    name: str,
    base: Base,
    license: str | None,
    problems: str | None,
    picture: str | None,
) -> DatasetCard:
    """The card of labels.

    Args:
        folder: The staged folder.
        splits: By name of the split, the prefix of its files in `folder` ("" or "test/"), and its
            manifest.
        name: The repository's id.
        base: The model that wrote the traces.
        license: Of the data set, in the Hub's spelling.
        problems: Where the problems come from and under which licence, in a sentence.
        picture: Name of a picture of their statistics in `folder`.

    Raises:
        ValueError: The shards hold a column that this version does not know.
    """
    manifests = {split: manifest for split, (_, manifest) in splits.items()}
    first_prefix, first = next(iter(splits.values()))
    settings = {**first["settings"], "base_model": base.id, "base_revision": base.revision}
    traces = sum(manifest["traces"] for manifest in manifests.values())
    data = DatasetCardData(
        license=license,
        task_categories=["text-generation"],
        tags=_TAGS,
        size_categories=next((size for most, size in _SIZES if traces < most), "n>1M"),
        pretty_name=name.rpartition("/")[2],
        configs=card_configs(
            {
                config: {
                    split: ([prefix + path_of(shard) for shard in shards_of(one)], data_hash(one))
                    for split, (prefix, one) in splits.items()
                }
                for config, path_of in _FILES.items()
            }
        ),
    )
    rows = _settings({**settings, **scrubbed(first.get("source", {}))}, nested=False)
    return DatasetCard.from_template(
        data,
        template_path=str(Path(__file__).with_name("labels_card.md")),
        name=name,
        settings=settings,
        instruction=settings["reasoning_format"].get("user_instruction", ""),
        splits=[
            {"name": split, "dropped": len(one["dropped"]), **{key: one[key] for key in _COUNTS}}
            for split, one in manifests.items()
        ],
        rows=rows,
        picture=picture,
        trace_columns=_columns(folder / first_prefix / "data", COLUMNS),
        prefix_columns=_columns(folder / first_prefix / "prefixes", PREFIX_COLUMNS),
        problems=problems or "Where the problems come from was not stated.",
        license_known=license is not None,
    )


def read_policy_config(folder: Path) -> OSPrunerConfig:
    """The configuration in a policy's folder.

    Raises:
        ValueError: There is none, or it is not that of a policy.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"folder={str(folder)!r} has no config.json: save the policy there first")
    found = read_object(path).get("model_type")
    if found != "ospruner":
        raise ValueError(
            f"{path}: model_type={found!r} must be 'ospruner': name the policy's folder, not the "
            "base's"
        )
    try:
        config: OSPrunerConfig = OSPrunerConfig.from_pretrained(folder)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return config


def results_markdown(results: Results) -> str:
    """What was measured, and every rule and limit in GitHub's markdown; the chosen one is bold."""
    first, rows = results.rules.iloc[0], []
    for number, one in results.frame.iterrows():
        name = f"{one['method']} {one['setting']}".strip()
        shown = (("accuracy", 100, 1), ("tokens", 1, 0), ("reduction", 100, 1), ("aes", 1, 2))
        rows.append(
            [
                f"**{name}**" if number == results.chosen else name,
                *(Estimate.of(one, column).text(scale, digits) for column, scale, digits in shown),
            ]
        )
    table = markdown_table(["method", "accuracy %", "thinking tokens", "saved %", "AES"], rows)
    return (
        f"{results.dataset}: {results.setting}; {first['traces']:,} traces of "
        f"{first['problems']:,} problems. Brackets are 95 % intervals by problem; AES "
        f"{first['aes_label']}.\n\n{table}"
    )


def _eval_results(results: Results, row: int) -> list[EvalResult]:
    """One rule's numbers with their intervals, for the index that the Hub reads."""
    one = results.rules.loc[row]
    metrics = (
        ("accuracy", "Pass@1, %", "accuracy", 100),
        ("thinking_tokens", "Thinking tokens", "tokens", 1),
        ("reduction", "Thinking tokens saved, %", "reduction", 100),
        ("aes", f"AES ({one['aes_label']})", "aes", 1),
    )
    found = []
    for kind, label, column, scale in metrics:
        value, low, high = (round(scale * number, 4) for number in Estimate.of(one, column))
        found.append(
            EvalResult(
                task_type="text-generation",
                task_name="Reasoning with a stopping policy",
                dataset_type=re.sub(r"[^\w./-]+", "-", results.dataset),  # all that the Hub takes
                dataset_name=results.dataset,
                metric_type=kind,
                metric_name=f"{label} ({results.setting})",
                metric_value=value,
                metric_args={
                    "interval_95_by_problem": [low, high],
                    "traces": int(one["traces"]),
                    "problems": int(one["problems"]),
                },
            )
        )
    return found


def _settings(details: Mapping[str, Any], nested: bool = True) -> dict[str, str]:
    """Settings as rows of a table; with `nested` a group's rows carry the group's name."""
    rows: dict[str, str] = {}
    for key, value in details.items():
        if isinstance(value, dict):
            inner = _settings(value) if nested else {}
            rows |= {f"{key}: {name}": text for name, text in inner.items()}
        elif isinstance(value, str):
            rows[key] = without_paths(value).replace("|", "\\|").replace("\n", " ")
        elif value is not None:
            rows[key] = json.dumps(value)
    return {key.replace("_", " "): text for key, text in rows.items()}


_FILES: dict[str, Callable[[Shard], str]] = {
    "default": lambda shard: shard.file,
    "prefixes": lambda shard: shard.view,
}


def _columns(folder: Path, known: Mapping[str, tuple[Any, str]]) -> str:
    """The schema of a folder's shards column by column, types as they are in the files."""
    shard = next(iter(sorted(folder.glob("*.parquet"))))
    schema: list[pa.Field] = list(pq.read_schema(shard))
    unknown = [field.name for field in schema if field.name not in known]
    if unknown:
        raise ValueError(
            f"{shard.name} has the columns {unknown}, which this version of ospruner does not "
            "know: were the labels made by another one?"
        )
    rows = [[f"`{one.name}`", f"`{_type(one.type)}`", known[one.name][1]] for one in schema]
    return markdown_table(["column", "type", "what it holds"], rows)


def _type(kind: pa.DataType) -> str:
    return f"list<{_type(kind.value_type)}>" if pa.types.is_list(kind) else str(kind)
