"""The model card of a policy folder, made from what the folder itself says.

The base, method and settings are read from `config.json`, the origin from `provenance.json`; only
the results and the licence are told by the caller.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # not in __all__

from .facts import read_provenance

TEMPLATE = Path(__file__).with_name("policy_card.md")
TAGS = ("ospruner", "reasoning", "chain-of-thought", "early-exit")
NEEDED_CONFIG = (
    "base_model_name_or_path",
    "base_revision",
    "num_policy_layers",
    "tuning",
    "method",
    "length_penalty",
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
        "after a paragraph is already the one given at the end."
    ),
}


@dataclass(frozen=True)
class ResultsTable:
    """Results as they shall stand in a card: text that its maker has formatted.

    Attributes:
        caption: What was measured, on what, how the intervals were made, and by which command.
        columns: Headings, the first for the method.
        rows: One sequence of cells a row, as many as there are columns.

    Raises:
        ValueError: If the caption or the columns are empty, or a row has another length.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __post_init__(self) -> None:
        if not self.caption.strip():
            raise ValueError("caption is empty: say setting, intervals and command of the results")
        if not self.columns:
            raise ValueError("columns is empty: name at least one")
        for number, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise ValueError(
                    f"rows[{number}] has {len(row)} cells, expected {len(self.columns)}: "
                    f"one for each of {list(self.columns)}"
                )

    def markdown(self) -> str:
        """The table in GitHub's markdown, numbers aligned to the right."""
        rule = [":--", *["--:"] * (len(self.columns) - 1)]
        lines = [self.columns, rule, *self.rows]
        return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def policy_card(
    folder: Path | str, *, name: str, license: str, results: ResultsTable | None = None
) -> ModelCard:
    """Renders the card of a saved policy.

    Args:
        folder: Holds the policy's `config.json` and `provenance.json`.
        name: What users load: the repository's id on the Hub, or a folder's name.
        license: Licence of the policy in the Hub's spelling, such as "mit". Copied layers are the
            base's own weights, so that it is normally the base's licence.
        results: Shown as given.

    Returns:
        The card; its `data` is the metadata that the Hub reads.

    Raises:
        ValueError: If the folder holds no policy config, lacks fields, or has no provenance.
    """
    folder = Path(folder)
    config = _policy_config(folder)
    base = config["base_model_name_or_path"]
    on_hub = _is_hub_id(base)
    # A local base must not leak its folder's path into a public card.
    base_name = base if on_hub else Path(base).name
    layers = config["num_policy_layers"]
    # As in labelling: the instruction is a paragraph of its own after the problem.
    instruction = config["reasoning_format"]["user_instruction"]
    appended = json.dumps(f"\n\n{instruction}", ensure_ascii=False)
    data = ModelCardData(
        license=license,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=list(TAGS),
        base_model=base if on_hub else None,
        base_model_relation="adapter" if on_hub else None,
    )
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        name=name,
        base_name=base_name,
        base_on_hub=on_hub,
        policy_parts=f"a tail of {layers} layers and a linear head" if layers else "a linear head",
        method=METHODS[config["method"]],
        content=f"problem + {appended}" if instruction else "problem",
        config=config,
        provenance=read_provenance(folder),
        results=results,
    )


def write_policy_card(
    folder: Path | str, *, name: str, license: str, results: ResultsTable | None = None
) -> Path:
    """Writes the card of `policy_card` as the folder's `README.md` and returns its path.

    Raises:
        ValueError: As `policy_card`.
    """
    path = Path(folder) / "README.md"
    policy_card(folder, name=name, license=license, results=results).save(path)
    return path


def _policy_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"folder={str(folder)!r} has no config.json: save the policy there first")
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
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


def _is_hub_id(base: str) -> bool:
    try:
        validate_repo_id(base)
    except HFValidationError:
        return False
    return not Path(base).exists()


def _cell(text: str) -> str:
    """A table cell: a bar or a line break in the text must not end it."""
    return text.replace("|", "\\|").replace("\n", " ")
