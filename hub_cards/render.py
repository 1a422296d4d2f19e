"""The model card of a policy folder, made from what the folder itself says.

The base, method and settings are read from `config.json`, the origin from `provenance.json`, the
results from `results.json`; only the name, the licence and the data sets are told by the caller.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from modeling_ospruner.custom_generate_ospruner import CUSTOM_GENERATE
from ospruner.eval.results import RESULTS_FILE, Results
from ospruner.provenance import is_hub_id, read_object, read_provenance, without_paths

from .measurements import eval_results, results_caption, results_markdown

CARD_FILE = "README.md"
PICTURE_FILE = "pareto.png"
TEMPLATE = Path(__file__).with_name("policy_card.md")
EXAMPLE = "What is 17 * 23?"  # of the snippet, and of the Hub's widget
TAGS = ("ospruner", "reasoning", "chain-of-thought", "early-exit")
NEEDED_CONFIG = (
    "base_model_name_or_path",
    "base_revision",
    "num_policy_layers",
    "tuning",
    "method",
    "head",
    "price",
    "default_mode",
    "default_threshold",
    "reasoning_format",
)
METHODS = {
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
    "final-answer": (
        "It is a variant of the answer-convergence baseline: trained to predict whether the answer "
        "forced after a paragraph is the one given at the end."
    ),
    "terminator": (
        "It is the TERMINATOR baseline: trained to predict whether the final answer has arrived, "
        "with a copy of the last layer."
    ),
    "lynx": (
        "It is the LYNX baseline: a linear probe trained to predict whether the answer forced "
        "after a paragraph is right."
    ),
    "thought-calibration": (
        "It is the Thought Calibration baseline: a linear probe trained to predict whether the "
        "answer forced after a paragraph is the one given at the end."
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
    folder: Path | str,
    *,
    name: str,
    license: License | str | None,
    results: Results | None = None,
    datasets: Sequence[str] = (),
) -> ModelCard:
    """Renders the card of a saved policy.

    Args:
        folder: Holds the policy's `config.json` and `provenance.json`.
        name: What users load: the repository's id on the Hub, or a folder's name.
        license: Licence of the policy, in the Hub's spelling. Copied layers are the base's own
            weights, so that it is normally the base's licence. None where it is not known, which
            the card then says.
        results: What was measured; None for the folder's `results.json`, if any.
        datasets: Ids of the labels it was trained on, on the Hub.

    Returns:
        The card; its `data` is the metadata that the Hub reads.

    Raises:
        ValueError: If the folder holds no policy config, lacks fields, or has no provenance.
    """
    folder = Path(folder)
    config = read_policy_config(folder)
    record = read_provenance(folder)
    if results is None and (folder / RESULTS_FILE).is_file():
        results = Results.read(folder / RESULTS_FILE)
    index = None
    if results is not None and results.chosen is not None:
        index = eval_results(results, results.chosen)
    shown = ""
    if results is not None and results.results:
        shown = f"{results_caption(results)}\n\n{results_markdown(results)}"
    license = License(license) if isinstance(license, str) else license
    base = config["base_model_name_or_path"]
    on_hub = is_hub_id(base)
    # A local base must not leak its folder's path into a public card.
    base_name = base if on_hub else Path(base).name
    layers = config["num_policy_layers"]
    # As in labelling: the instruction is a paragraph of its own after the problem.
    instruction = config["reasoning_format"]["user_instruction"]
    appended = f"\n\n{instruction}" if instruction else ""
    data = ModelCardData(
        license=license.id if license else None,
        license_name=license.name if license else None,
        license_link=license.link if license else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=list(TAGS),
        base_model=base if on_hub else None,
        base_model_relation="adapter" if on_hub else None,
        datasets=list(datasets) or None,
        model_name=name.rpartition("/")[2] if index else None,
        eval_results=index,
        widget=[{"messages": [{"role": "user", "content": f"{EXAMPLE}{appended}"}]}],
    )
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        name=name,
        base_name=base_name,
        base_on_hub=on_hub,
        policy_parts=f"a tail of {layers} layers and a linear head" if layers else "a linear head",
        method=METHODS[config["method"]],
        example=EXAMPLE,
        content=f"problem + {json.dumps(appended, ensure_ascii=False)}" if appended else "problem",
        config=config,
        command=without_paths(record.command),
        provenance=record,
        warning=without_paths(record.details.get("warning", "")),
        settings=_settings({k: v for k, v in record.details.items() if k != "warning"}),
        results=shown,
        picture=PICTURE_FILE if (folder / PICTURE_FILE).is_file() else None,
        custom_generate=on_hub and (folder / CUSTOM_GENERATE).is_file(),
        license_known=license is not None,
        label_sets=list(datasets),
    )


def write_policy_card(
    folder: Path | str,
    *,
    name: str,
    license: License | str | None,
    results: Results | None = None,
    datasets: Sequence[str] = (),
) -> Path:
    """Writes the card of `policy_card` as the folder's `README.md` and returns its path.

    Results that are given are kept beside it, as `results.json`.

    Raises:
        ValueError: As `policy_card`.
    """
    folder = Path(folder)
    card = policy_card(folder, name=name, license=license, results=results, datasets=datasets)
    path = folder / CARD_FILE
    card.save(path)
    if results is not None:
        results.save(folder / RESULTS_FILE)
    return path


def read_policy_config(folder: Path) -> dict[str, Any]:
    """The `config.json` of a policy's folder.

    Raises:
        ValueError: If there is none, or it is not that of a policy, or lacks fields.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"folder={str(folder)!r} has no config.json: save the policy there first")
    config: dict[str, Any] = read_object(path)
    if config.get("model_type") != "ospruner":
        raise ValueError(
            f"{path}: model_type={config.get('model_type')!r} must be 'ospruner': "
            "name the policy's folder, not the base's"
        )
    missing = [key for key in NEEDED_CONFIG if key not in config]
    if missing:
        raise ValueError(f"{path} lacks {missing}: save the policy again with this version")
    if config["method"] not in METHODS:
        raise ValueError(f"{path}: method={config['method']!r} must be one of {sorted(METHODS)}")
    return config


def _settings(details: dict[str, Any]) -> dict[str, str]:
    """The settings of a run as rows of a table; a group's rows carry the group's name."""
    rows: dict[str, str] = {}
    for key, value in details.items():
        if isinstance(value, dict):
            rows |= {f"{key}: {name}": text for name, text in _settings(value).items()}
        elif isinstance(value, str):
            rows[key] = without_paths(value).replace("|", "\\|").replace("\n", " ")
        elif value is not None:
            rows[key] = json.dumps(value)
    return {key.replace("_", " "): text for key, text in rows.items()}
