"""The cards of policies and labels, made from what their folders say themselves.

A policy's base, method and price are read from `config.json`, the origin from `provenance.json`,
the results from `results.json`; labels' settings from their manifests. Only the name, the licence
and the data sets are told by the caller.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import DatasetCard, DatasetCardData, EvalResult, ModelCard, ModelCardData

from modeling_ospruner import OSPrunerConfig
from modeling_ospruner.custom_generate_ospruner import CUSTOM_GENERATE
from ospruner.eval.results import RESULTS_FILE, Estimate, Results, markdown_table
from ospruner.provenance import is_hub_id, read_object, read_provenance, without_paths
from ospruner.train.labels.features import COLUMNS, PREFIX_COLUMNS
from ospruner.train.labels.folder import card_configs, shards_of

from .staging import Base, scrubbed

CARD_FILE = "README.md"
PICTURE_FILE = "pareto.png"
EXAMPLE = "What is 17 * 23?"  # of the snippet, and of the Hub's widget
_TAGS = ["ospruner", "reasoning", "chain-of-thought", "early-exit"]
_SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (10**6, "100K<n<1M"))


def policy_card(
    folder: Path, *, name: str, license: Mapping[str, Any], labels: Sequence[str] = ()
) -> ModelCard:
    """The card of a saved policy, with the metadata that the Hub reads as its `data`.

    Args:
        folder: Holds the policy's `config.json` and `provenance.json`, and perhaps `results.json`.
        name: What users load: the repository's id on the Hub, or a folder's name.
        license: Of the policy, in the fields of a card (`license`, and for "other" `license_name`
            and `license_link`); normally the base's: copied layers are the base's own weights.
            Empty where it is not known, which the card then says.
        labels: Ids on the Hub of the labels that it was trained on.

    Raises:
        ValueError: The folder holds no policy or has no provenance.
    """
    config, record = read_policy_config(folder), read_provenance(folder)
    results = Results.read(folder / RESULTS_FILE) if (folder / RESULTS_FILE).is_file() else None
    index = None if results is None else _eval_results(results)
    base = config.base_model_name_or_path
    on_hub = is_hub_id(base)
    # As in labelling: the instruction is a paragraph of its own after the problem.
    instruction = (config.reasoning_format or {})["user_instruction"]
    appended = f"\n\n{instruction}" if instruction else ""
    data = ModelCardData(
        **license,
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
    apart = ("warning", "price_chosen_by", "trained_on")  # the last: thousands of problems' names
    details = {key: value for key, value in record.details.items() if key not in apart}
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return ModelCard.from_template(  # with the metadata under their own names
        data,
        template_path=str(Path(__file__).with_name("policy_card.md")),
        name=name,
        base_name=base if on_hub else Path(base).name,  # a folder's path is nobody's business
        size=f"{stored / 1e6:,.1f} MB" if stored >= 10**6 else f"{stored / 1e3:,.0f} kB",
        example=EXAMPLE,
        content=f"problem + {json.dumps(appended, ensure_ascii=False)}" if appended else "problem",
        config=config,
        command=without_paths(record.command),
        provenance=record,
        warning=without_paths(record.details.get("warning", "")),
        price_chosen_by=record.details.get("price_chosen_by", ""),
        settings=_settings(details),
        results=_results_markdown(results) if results is not None and len(results.rules) else "",
        picture=PICTURE_FILE if (folder / PICTURE_FILE).is_file() else None,
        custom_generate=on_hub and (folder / CUSTOM_GENERATE).is_file(),
    )


def labels_card(
    splits: Mapping[str, tuple[str, Mapping[str, Any]]],
    *,
    name: str,
    base: Base,
    license: str | None,
    problems: str | None,
) -> DatasetCard:
    """The card of labels.

    Args:
        splits: By name of the split, the prefix of its files in the repository ("" or "test/"), and
            its manifest.
        name: The repository's id.
        base: The model that wrote the traces.
        license: Of the data set, in the Hub's spelling.
        problems: Where the problems come from and under which licence, in a sentence.
    """
    manifests = {split: manifest for split, (_, manifest) in splits.items()}
    first = next(iter(manifests.values()))
    settings = {**first["settings"], "base_model": base.id, "base_revision": base.revision}
    traces = sum(manifest["traces"] for manifest in manifests.values())
    shards = {
        split: [replace(shard, file=prefix + shard.file) for shard in shards_of(manifest)]
        for split, (prefix, manifest) in splits.items()
    }
    data = DatasetCardData(
        license=license,
        task_categories=["text-generation"],
        tags=_TAGS,
        size_categories=next((size for most, size in _SIZES if traces < most), "n>1M"),
        pretty_name=name.rpartition("/")[2],
        configs=card_configs(shards, shards),
    )
    said = {**settings, **scrubbed(first.get("source", {}))}
    return DatasetCard.from_template(
        data,
        template_path=str(Path(__file__).with_name("labels_card.md")),
        name=name,
        settings=settings,
        instruction=settings["reasoning_format"].get("user_instruction", ""),
        splits=manifests,
        rows=_settings({key: one for key, one in said.items() if not isinstance(one, dict)}),
        trace_columns=COLUMNS,
        prefix_columns=PREFIX_COLUMNS,
        problems=problems or "Where the problems come from was not stated.",
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
        return OSPrunerConfig.from_pretrained(folder)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def told_default(folder: Path) -> str:
    """The default price of a policy of every price, and the rule that chose it; "" of others."""
    if (
        not (folder / "config.json").is_file()
        or (config := read_policy_config(folder)).prices is None
    ):
        return ""
    chosen_by = read_provenance(folder).details.get("price_chosen_by", "")
    return f"The default price is {config.price:g}: {chosen_by}."


def _results_markdown(results: Results) -> str:
    """What was measured, and every rule and limit in GitHub's markdown; the chosen one is bold."""
    shown = (("accuracy", 100, 1), ("tokens", 1, 0), ("reduction", 100, 1), ("aes", 1, 2))
    first, rows = results.rules.iloc[0], []
    for number, one in results.frame.iterrows():
        name = f"{one['method']} {one['setting']}".strip()
        numbers = [Estimate.of(one, column).text(scale, digits) for column, scale, digits in shown]
        rows.append([f"**{name}**" if number == results.chosen else name, *numbers])
    table = markdown_table(["method", "accuracy %", "thinking tokens", "saved %", "AES"], rows)
    return (
        f"{results.dataset}: {results.setting}; {first['traces']:,} traces of "
        f"{first['problems']:,} problems. Brackets are 95 % intervals by problem; AES "
        f"{first['aes_label']}.\n\n{table}"
    )


def _eval_results(results: Results) -> list[EvalResult] | None:
    """The chosen rule's numbers with their intervals, for the index that the Hub reads."""
    if results.chosen is None:
        return None
    one = results.rules.loc[results.chosen]
    measured = {"traces": int(one["traces"]), "problems": int(one["problems"])}
    found = []
    for kind, label, column, scale in (
        ("accuracy", "Pass@1, %", "accuracy", 100),
        ("thinking_tokens", "Thinking tokens", "tokens", 1),
        ("reduction", "Thinking tokens saved, %", "reduction", 100),
        ("aes", f"AES ({one['aes_label']})", "aes", 1),
    ):
        value, *ends = (round(scale * number, 4) for number in Estimate.of(one, column))
        found.append(
            EvalResult(
                task_type="text-generation",
                task_name="Reasoning with a stopping policy",
                dataset_type=re.sub(r"[^\w./-]+", "-", results.dataset),  # all that the Hub takes
                dataset_name=results.dataset,
                metric_type=kind,
                metric_name=f"{label} ({results.setting})",
                metric_value=value,
                metric_args={"interval_95_by_problem": ends, **measured},
            )
        )
    return found


def _settings(details: Mapping[str, Any]) -> dict[str, str]:
    """Settings as rows of a table; a group's rows carry the group's name."""
    rows: dict[str, str] = {}
    for key, value in details.items():
        if isinstance(value, dict):
            rows |= {f"{key}: {name}": text for name, text in _settings(value).items()}
        elif isinstance(value, str):
            rows[key] = without_paths(value).replace("|", "\\|").replace("\n", " ")
        elif value is not None:
            rows[key] = json.dumps(value)
    return {key.replace("_", " "): text for key, text in rows.items()}
