"""What a comparison computes from, as one file: `ospruner compare FILE` makes its numbers again.

A Parquet file has a row for each trace of the test and of the validation split: where its steps
end, their grades, and what each method says there: a policy's head (six numbers stand for every
price), a rule's signal and what its trial answers cost. It holds no text and no weights. Its
metadata, under "ospruner", are JSON: methods, settings, and the command and commit that made it.
"""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from datasets import Dataset

from modeling_ospruner import OSPrunerConfig
from ospruner.durable import replace_file
from ospruner.provenance import provenance
from ospruner.rules.families import Family, StopRule

from .evaluation import REPLICATES
from .measured import Measured, Predicted, Split, not_at_hand
from .methods import PolicyUse
from .metrics import AES_ABSOLUTE, AesVariant
from .problems.problem import text_key
from .replay import Outcome
from .table import TraceTable

SIGNALS_FILE = "signals.parquet"
_SPLITS = ("test", "validation")
FORMAT, VERSION = "ospruner-signals", 1

Method = PolicyUse | StopRule | Family
"""A policy with its setting, a rule, or a rule whose threshold is open."""

_CONFIG = ("method", "head", "price", "price_range", "num_policy_layers", "tuning")
_KEPT = ("settings", "prices", "left_out", "about")
_MADE_BY = ("command", "created_utc", "git_commit", "git_modified", "packages", "python")
_FAMILY = ("method", "parameter_name", "stops", "low", "high", "whole")


@dataclass(frozen=True, kw_only=True, eq=False)
class Recorded:
    """A comparison before anything is computed."""

    methods: Sequence[Method]  # what is compared; those `left_out` are not among them
    # What they say on the traces to measure on and, where something is chosen, on those to
    # choose on
    splits: Sequence[Split]
    settings: Mapping[str, Any]  # of the comparison; see `Report`
    prices: Sequence[float]  # of a token, for rewards and gaps
    variant: AesVariant = AES_ABSOLUTE  # which AES chooses and is shown
    # Why a method could not be measured, by name
    left_out: Mapping[str, str] = field(default_factory=dict)
    # What else the results say about themselves, JSON values
    about: Mapping[str, Any] = field(default_factory=dict)
    # Command, commit, packages; empty before it is saved
    made_by: Mapping[str, Any] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Writes the file into a folder, whole or not at all; it says how it was made."""
        made_by = self.made_by or vars(provenance(folder, seed=0))
        uses = {use.path: use for use in self.methods if isinstance(use, PolicyUse)}
        # Two seeds' folders may have one name, and their paths are of one machine.
        names = {one: f"{Path(one).name.partition('#')[0]}#{n}" for n, one in enumerate(uses, 1)}
        facts = {
            "format": FORMAT,
            "version": VERSION,
            "methods": [_told(one, names) for one in self.methods],
            "policies": {
                names[path]: {name: getattr(use.config, name) for name in _CONFIG}
                for path, use in uses.items()
            },
            "variant": dataclasses.asdict(self.variant),
            "beside": list(self.splits[0].beside),
            **{name: vars(self)[name] for name in _KEPT},
            "replicates": REPLICATES,
            "made_by": {name: made_by[name] for name in _MADE_BY if name in made_by},
        }
        tables = [_columns(*one, names) for one in zip(_SPLITS, self.splits, strict=False)]
        whole = pa.concat_tables(tables, promote_options="default")
        whole = whole.replace_schema_metadata({"ospruner": json.dumps(facts, allow_nan=False)})
        pq.write_table(whole, file := io.BytesIO(), compression="zstd", compression_level=19)
        replace_file(folder / SIGNALS_FILE, file.getvalue())

    @classmethod
    def read(cls, path: str | Path) -> Recorded:
        """Reads what `save` wrote.

        Raises:
            FileNotFoundError: no such file.
            ValueError: it is none, or of another version.
        """
        try:
            whole = pq.read_table(path)
            facts = json.loads((whole.schema.metadata or {}).get(b"ospruner", b"{}"))
        except FileNotFoundError:
            raise
        except (pa.ArrowInvalid, OSError, ValueError) as error:
            raise ValueError(f"{path} is no readable Parquet file ({error})") from error
        if (found := (facts.get("format"), facts.get("version"))) != (FORMAT, VERSION):
            raise ValueError(
                f"{path} has format {found[0]!r} and version {found[1]!r}, this version of "
                f"ospruner reads {FORMAT!r} version {VERSION}: give the {SIGNALS_FILE} that "
                "`ospruner compare` has left beside its results"
            )
        configs = {name: OSPrunerConfig(**one) for name, one in facts["policies"].items()}
        return cls(
            methods=[_method(one, configs) for one in facts["methods"]],
            splits=[
                _split(rows, configs, beside)
                for name, beside in zip(_SPLITS, (facts["beside"], ()), strict=True)
                if len(rows := whole.filter(pa.compute.equal(whole["split"], name)))
            ],
            variant=AesVariant(**facts["variant"]),
            made_by=facts["made_by"],
            **{name: facts[name] for name in _KEPT},
        )


def key_of(rule: StopRule | Family) -> str:
    """What a rule's signals are called: its name, and the settings of its signal."""
    family = rule.family if isinstance(rule, StopRule) else rule
    return f"{family.name} {dict(rule.settings)}" if rule.settings else family.name


def _told(method: Method, names: Mapping[str, str]) -> dict[str, Any]:
    """A method as JSON values."""
    if isinstance(method, PolicyUse):
        own = {name: vars(method)[name] for name in ("threshold", "asked_price", "by_name")}
        return {"policy": names[method.path], **own}
    family = method.family if isinstance(method, StopRule) else method
    threshold = method.threshold if isinstance(method, StopRule) else None
    own = {name: vars(family)[name] for name in _FAMILY}
    return {"rule": key_of(method), "threshold": threshold, **own}


def _method(told: Mapping[str, Any], configs: Mapping[str, OSPrunerConfig]) -> Method:
    """The method that `_told` has written; a rule's signals are in the file alone."""
    own = dict(told)
    if path := own.pop("policy", None):
        return PolicyUse(path, configs[path], **own)
    threshold = own.pop("threshold")
    family = Family(own.pop("rule"), not_at_hand, **own)
    return family if threshold is None else family(threshold)


def _columns(name: str, split: Split, names: Mapping[str, str]) -> pa.Table:
    """The rows of a split."""
    table = split.table

    def ragged(values: npt.NDArray[Any]) -> pa.Array:
        """The real steps' numbers of each trace: of (N, T), or of (N, T, K) flat."""
        return pa.array([row[real].ravel() for row, real in zip(values, table.mask, strict=True)])

    columns: dict[str, Any] = {
        "split": [name] * len(table),
        "problem": list(split.problems or map(text_key, split.dataset["problem"])),
        "problem_id": [table.problem_ids[place] for place in table.problem_index],
        "family": table.families,
        "step_ends": ragged(table.lengths),
        "forced_correct": ragged(table.correct),
        "matches_final": ragged(table.matches_final),
        "forced_answer_tokens": ragged(table.answer_tokens),
        "natural_correct": pa.array(table.natural_correct, from_pandas=True),
        "ended": ["cap" if one else "natural" for one in table.capped],
    }
    if table.flops is not None:
        columns["flops"] = ragged(table.flops)
    for key, said in {**split.policies, **split.rules}.items():
        own = {k: v for k, v in vars(said).items() if isinstance(v, np.ndarray) and k != "mask"}
        columns |= {f"{names.get(key, key)}: {k}": ragged(v) for k, v in own.items()}
    for key, outcome in split.beside.items():
        columns |= {f"{key}: {k}": v for k, v in vars(outcome).items()}
    return pa.table(columns)


def _split(rows: pa.Table, configs: Mapping[str, OSPrunerConfig], beside: Sequence[str]) -> Split:
    """The split that these rows are."""
    table = TraceTable.from_dataset(Dataset(rows))
    mask = table.mask

    def of(owner: str) -> dict[str, npt.NDArray[Any]]:
        """What the columns of a method, or of other labels, hold."""
        names = [name for name in rows.column_names if name.rpartition(": ")[0] == owner]
        return {name.rpartition(": ")[2]: array(name) for name in names}

    def array(column: str) -> npt.NDArray[Any]:
        """(N,), or of lists (N, T) and of a head's outputs (N, T, K)."""
        whole = rows[column].combine_chunks()
        if not pa.types.is_list(whole.type):
            return np.asarray(whole.to_numpy())
        flat = whole.flatten().to_numpy(zero_copy_only=False).reshape(mask.sum(), -1)
        out = np.zeros((*mask.shape, flat.shape[1]), flat.dtype)
        out[mask] = flat
        return out if column.endswith(": outputs") else out[..., 0]

    owners = [name.rpartition(": ")[0] for name in rows.column_names if name.endswith(": signals")]
    return Split(
        None,
        dataclasses.replace(table, flops=array("flops") if "flops" in rows.column_names else None),
        problems=rows["problem"].to_pylist(),
        policies={
            name: Predicted(mask=mask, prices=config.prices, price=config.price, **of(name))
            for name, config in configs.items()
        },
        rules={key: Measured(**of(key)) for key in owners},
        beside={key: Outcome(**of(key)) for key in beside},
    )
