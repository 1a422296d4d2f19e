"""Training from labels that lie in a folder or on the Hub: what `ospruner train` does."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa  # type: ignore[import-untyped]
import torch
from datasets import Dataset, concatenate_datasets
from huggingface_hub import snapshot_download
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from modeling_ospruner.configuration_ospruner import is_quantised
from modeling_ospruner.formats_ospruner import ReasoningFormat, TokenFormat
from modeling_ospruner.loading_ospruner import fingerprint_of
from ospruner.engines.opening import device_named, known_revision, load_tokenizer
from ospruner.engines.transformers.engine import LIKELIHOOD_TOLERANCE, mean_logprob
from ospruner.eval.problems.problem import Problem
from ospruner.eval.problems.registry import open_task
from ospruner.eval.problems.task import prompt_token_ids
from ospruner.eval.schema import LabelSettings
from ospruner.eval.table import TraceTable
from ospruner.progress import Progress, silent
from ospruner.provenance import PROVENANCE_FILE, hash_of, is_hub_id

from .flashthink import load_verifier_base, verifier_traces
from .labels.folder import (
    MANIFEST,
    chunks_of,
    data_hash,
    read_labels,
    read_manifest,
    refuse_other_data,
)
from .labels.rows import OptionIds
from .loop import StageResult, memory_need, train_together
from .processes import Processes
from .settings import SCHEDULES, TrainSettings, automatic_penalties, automatic_range
from .traces import LabelledTraces

__all__ = [
    "Labels",
    "forced_base",
    "held_out_split",
    "load_labelled_base",
    "load_labels",
    "load_mix",
    "parse_penalties",
    "parse_range",
    "settings_for",
    "train_from_labels",
]

MAX_UNGRADED = 0.1
"""Share of ungraded answers above which labels are refused: those are trained on as wrong."""
_BY_THE_MODEL = ("no answer", "too long")  # why an answer has no verdict, whatever grades it
HELD_OUT_PROBLEMS = 500
"""Problems that the paper keeps out of training, to choose lambda on."""


@dataclass(frozen=True)
class Labels:
    """Labelled traces and how they were made.

    Attributes:
        traces: columns `schema.FEATURES`.
        settings: of their run; of a mix the first run's, with `LabelSettings.domains`.
        data_hash: of their shards.
        source: what the problems were, in a word; the folder's name where it is not known.
        parts: of a mix, each run's labels by the domain's name; else empty.
    """

    traces: Dataset
    settings: LabelSettings
    data_hash: str
    source: str = ""
    parts: Mapping[str, Labels] = field(default_factory=dict)


def load_labels(source: str | Path) -> Labels:
    """The labels of a folder, or of a data set on the Hub.

    Args:
        source: a folder of `ospruner label`, or a data set's id.

    Raises:
        ValueError: the folder holds no labels, damaged ones, labels of another version, or a
            record of other data.
        OSError: the Hub has no such data set.
    """
    folder = Path(source)
    if not folder.is_dir():
        if folder.exists() or not is_hub_id(str(source)):
            what = "a file" if folder.exists() else "nothing"
            raise ValueError(
                f"labels is {str(source)!r}, where {what} is: give a folder of `ospruner label`, "
                "or a data set's id on the Hub"
            )
        wanted = [MANIFEST, PROVENANCE_FILE, "data/*.parquet"]
        found = snapshot_download(str(source), repo_type="dataset", allow_patterns=wanted)
        folder = Path(found)
    manifest = read_manifest(folder)
    if (folder / PROVENANCE_FILE).is_file():
        refuse_other_data(folder, manifest)
    settings = LabelSettings.from_dict(manifest["settings"])
    of = Path(str(manifest.get("source", {}).get("dataset") or source)).name
    source_name = of.partition(".")[0]
    return Labels(read_labels(folder), settings, data_hash(chunks_of(manifest)), source_name)


_OF_A_DOMAIN = {
    "task",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "samples_per_problem",
    "max_new_tokens",
    "max_answer_tokens",
    "imported_from",
    "reasoning_format",
}
"""What of the settings may differ between the runs of a mix; of the format, what a task shapes."""


def load_mix(sources: Sequence[str | Path]) -> Labels:
    """The labels of several folders as one: of different tasks or problems, by one base.

    Traces get the column `domain`, and problems their domain's name before their id. A domain is
    named by its task or, where runs share one, by what the problems were.

    Args:
        sources: as `load_labels` takes them; one stands for itself.

    Raises:
        ValueError: none, one that is given twice, labels of different bases, formats or strides,
            or two of one task and one data set; or see `load_labels`.
    """
    if not sources:
        raise ValueError("no labels: give at least one folder of `ospruner label`")
    loaded = [load_labels(source) for source in sources]
    if len(loaded) == 1:
        return loaded[0]
    names = _domain_names(sources, loaded)
    first = loaded[0]
    for source, other in zip(sources[1:], loaded[1:], strict=True):
        lines = first.settings.differences(other.settings)
        lines = [line for line in lines if line.partition(":")[0] not in _OF_A_DOMAIN]
        ours, theirs = (one.settings.reasoning_format for one in (first, other))
        lines += [
            f"reasoning_format's {name}: {ours.get(name)!r} here, {theirs.get(name)!r} there"
            for name in sorted({*ours, *theirs} - {"box_prefix", "answer_end"})
            if ours.get(name) != theirs.get(name)
        ]
        if lines:
            raise ValueError(
                f"{sources[0]} and {source} cannot be mixed ({'; '.join(lines)}): one policy reads "
                "one base's thinking in one format, and decides at one stride; label all of them "
                "alike"
            )
    parts = dict(zip(names, loaded, strict=True))
    settings = dataclasses.replace(
        first.settings, domains={name: dict(one.settings.task) for name, one in parts.items()}
    )
    traces = concatenate_datasets([_of_domain(one.traces, name) for name, one in parts.items()])
    return Labels(traces, settings, hash_of(one.data_hash for one in loaded), "mix", parts)


def _domain_names(sources: Sequence[str | Path], loaded: Sequence[Labels]) -> list[str]:
    tasks = [str(one.settings.task["name"]) for one in loaded]
    names = [
        task if tasks.count(task) == 1 else one.source
        for task, one in zip(tasks, loaded, strict=True)
    ]
    hashes = [one.data_hash for one in loaded]
    for place, name in enumerate(names):
        before = next((k for k in range(place) if names[k] == name), None)
        if hashes.index(hashes[place]) < place or before is not None:
            twice = hashes.index(hashes[place]) if before is None else before
            raise ValueError(
                f"labels: {sources[twice]} and {sources[place]} are both of {name!r}: give each "
                "folder once, and one folder for each data set (more problems go into the same "
                "folder, by the same command)"
            )
    return names


def _of_domain(traces: Dataset, name: str) -> Dataset:
    """Traces with their domain, and ids that no other domain has."""
    table = traces.with_format("arrow")[:]
    ids = pa.array([f"{name}/{one}" for one in table.column("problem_id").to_pylist()])
    table = table.set_column(table.column_names.index("problem_id"), "problem_id", ids)
    return Dataset(table.append_column("domain", pa.array([name] * len(table), pa.string())))


def held_out_split(problem_ids: Sequence[str], held_out: int | None, seed: int) -> list[bool]:
    """Which traces are held out: all those of some problems, drawn with the seed.

    Args:
        problem_ids: of each trace.
        held_out: how many problems; None for 500 as in the paper, or a fifth of fewer than 2,500.
        seed: another seed chooses other problems.

    Raises:
        ValueError: no problem would be left on one side.
    """
    problems = sorted(set(problem_ids))
    count = min(HELD_OUT_PROBLEMS, len(problems) // 5) if held_out is None else held_out
    if not 1 <= count < len(problems):
        raise ValueError(
            f"held_out is {count}, of {len(problems)} problems: at least one must be held out and "
            "one left to train on. Label more problems, or give a validation set"
        )
    chosen = set(random.Random(seed).sample(problems, count))
    return [problem in chosen for problem in problem_ids]


def parse_penalties(text: str, table: TraceTable) -> tuple[float, ...]:
    """The lambdas that a user named.

    Args:
        text: "auto", the name of a schedule of the paper, or numbers separated by commas.
        table: the training traces, for "auto".

    Raises:
        ValueError: it is none of these.
    """
    if text == "auto":
        return automatic_penalties(table)
    if text in SCHEDULES:
        return SCHEDULES[text]
    try:
        return tuple(float(number) for number in text.split(","))
    except ValueError:
        raise ValueError(
            f"lambdas is {text!r}; it must be 'auto', one of {sorted(SCHEDULES)}, or falling "
            "numbers such as 1e-4,5e-5,0"
        ) from None


def parse_range(text: str, table: TraceTable) -> tuple[float, ...]:
    """The range of lambdas for one policy of every price.

    Args:
        text: "auto", or the lowest above 0 and the highest, separated by a comma.
        table: the training traces, for "auto".

    Raises:
        ValueError: it is neither.
    """
    if text == "auto":
        return automatic_range(table)
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        raise ValueError(
            f"lambdas is {text!r}; with head 'price' it must be 'auto', or the lowest and the "
            "highest lambda of the range, such as 5e-5,1e-2 (0 is always trained on)"
        ) from None
    return low, high


PRICE_ENTROPY_BONUS = 0.01


def settings_for(
    lambdas: str, *, entropy_bonus: float | None = None, **settings: Any
) -> Callable[[TraceTable], TrainSettings]:
    """A run's settings but for the lambdas, which may depend on the traces.

    Args:
        lambdas: as `parse_penalties` takes them, or with head "price" as `parse_range` does;
            baselines have none.
        entropy_bonus: None for 0, the paper's, and with head "price" 0.01.
        settings: fields of `TrainSettings`.
    """
    priced = settings.get("head") == "price"
    settings["entropy_bonus"] = (
        PRICE_ENTROPY_BONUS * priced if entropy_bonus is None else entropy_bonus
    )
    if priced:
        return lambda table: TrainSettings(**settings, price_range=parse_range(lambdas, table))
    if settings.get("method", "os-pruner") != "os-pruner":
        return lambda table: TrainSettings(**settings)
    return lambda table: TrainSettings(**settings, length_penalties=parse_penalties(lambdas, table))


def train_from_labels(
    labels: str | Path | Sequence[str | Path],
    out_dir: str | Path,
    settings: Callable[[TraceTable], TrainSettings],
    *,
    multi: bool = False,
    base: str | None = None,
    validation: str | Path | Sequence[str | Path] | None = None,
    held_out: int | None = None,
    split_seed: int = 0,
    limit: int | None = None,
    force_base: str | None = None,
    max_ungraded: float = MAX_UNGRADED,
    states: str | Path | None = None,
    progress: Progress = silent,
    say: Callable[[str], None] = lambda text: None,
    processes: Processes | None = None,
) -> list[StageResult]:
    """Trains policies on stored labels; a killed run continues where it was.

    Args:
        labels: folder or Hub id of the labelled traces, or several, of different domains.
        out_dir: an empty folder, or that of an earlier run of the same settings and labels.
        settings: gives the run's settings for the training traces; see `settings_for`.
        multi: train each lambda and both baselines as targets of their own on one pass of the
            trunk (`TrainSettings.targets`), each in a folder of `out_dir`.
        base: the model, where it now lies elsewhere than when it was labelled.
        validation: labels of other problems, of the same domains; None to hold problems out of
            `labels`.
        held_out: how many problems of each domain; see `held_out_split`.
        split_seed: which problems.
        limit: only the first so many traces of each domain.
        force_base: why another base than the labels' is right; kept in each policy's record.
        max_ungraded: labels with a greater share of forced answers that the grader could not read
            or decide are refused; an answer that never closed is not the grader's fault.
        states: folder in which the trunk's states are kept, for the next command on these labels;
            None keeps them in memory, if they fit.
        progress: as for `train`.
        say: told in a line, before the first step, what the run will hold in memory.
        processes: those that train together; see `open_processes`. None for this one alone, on the
            best device.

    Returns:
        A policy and its validation result for each stage; with `multi`, for each target.

    Raises:
        ValueError: the labels were made by another base, the validation labels otherwise than the
            training labels, too many of their answers are ungraded, or any of `train`'s refusals.
    """
    if not 0 <= max_ungraded <= 1:
        raise ValueError(f"max_ungraded is {max_ungraded}; it must lie in [0, 1]")
    ours = load_mix(_listed(labels))
    training, validating = _split(ours, validation, held_out, split_seed, limit)
    for traces in (training, validating):
        _refuse_ungraded(traces, max_ungraded)
    train_set = LabelledTraces.from_dataset(training)
    chosen = settings(train_set.table)
    facts: dict[str, Any] = {"data_hash": ours.data_hash}
    if ours.parts:
        facts["domains"] = {name: part.data_hash for name, part in ours.parts.items()}
        say(_told_domains(training, validating))
    label_settings = ours.settings
    targets = chosen.targets() if multi else {"": chosen}
    if chosen.method == "flashthink":
        reads = _tokenizer(base, ours)
        model, tokenizer = load_verifier_base(chosen.verifier)
        limit = model.config.get_text_config().max_position_embeddings
        train_set, validation_set = (
            verifier_traces(rows, reads, tokenizer, limit) for rows in (training, validating)
        )
    else:
        # Processes place the base themselves, each on its own device or split.
        device = device_named(None) if processes is None else "cpu"
        first = next(iter(ours.parts.values()), ours)
        model, tokenizer = load_labelled_base(base, first, force_base, device)
        if force_base is not None:
            label_settings = settings_of_base(base, ours, model)
            facts["forced_base"] = forced_base(force_base, ours.settings)
        validation_set = LabelledTraces.from_dataset(validating)
    if states is not None:
        for labelled in (train_set, validation_set):
            labelled.keep_states(states)
    say(str(memory_need(model, list(targets.values()), train_set, validation_set)))
    results = train_together(
        model,
        tokenizer,
        train_set,
        validation_set,
        list(targets.values()),
        label_settings,
        [Path(out_dir) / name for name in targets],
        facts=facts,
        progress=progress,
        processes=processes,
    )
    return [stage for stages in results for stage in stages]


def _split(
    labels: Labels,
    validation: str | Path | Sequence[str | Path] | None,
    held_out: int | None,
    split_seed: int,
    limit: int | None,
) -> tuple[Dataset, Dataset]:
    """Training and validation traces."""
    traces = labels.traces
    of = np.array(traces["domain"] if labels.parts else [""] * len(traces))
    places = {name: np.flatnonzero(of == name) for name in dict.fromkeys(of.tolist())}
    if limit is not None:
        if limit < 1:
            raise ValueError(f"limit is {limit}; it must be at least 1")
        places = {name: rows[:limit] for name, rows in places.items()}
    if validation is not None and held_out is not None:
        raise ValueError(
            f"held_out is {held_out}, but with validation labels ({validation}) no problem is held "
            "out: leave one of them out"
        )
    if validation is not None:
        theirs = load_mix(_listed(validation))
        if list(theirs.parts) and set(theirs.parts) != set(labels.parts):
            raise ValueError(
                f"the validation labels are of the domains {sorted(theirs.parts)}, the training "
                f"labels of {sorted(labels.parts)}: give labels of the same domains"
            )
        if labels.parts and not theirs.parts:
            raise ValueError(
                f"the training labels are of the domains {sorted(labels.parts)}, the validation "
                "labels of one: give labels of each"
            )
        for name, part in (labels.parts or {"": labels}).items():
            _refuse_other_labels(part.settings, theirs.parts.get(name, theirs).settings)
        return traces.select(np.concatenate(list(places.values()))), theirs.traces
    ids = np.array(traces["problem_id"])
    split: dict[bool, list[npt.NDArray[np.int64]]] = {True: [], False: []}
    for rows in places.values():
        held = np.array(held_out_split(ids[rows].tolist(), held_out, split_seed))
        for side, found in split.items():
            found.append(rows[held == side])
    training, validating = (traces.select(np.concatenate(split[side])) for side in (False, True))
    return training, validating


def _listed(sources: str | Path | Sequence[str | Path]) -> Sequence[str | Path]:
    return [sources] if isinstance(sources, str | Path) else sources


def _told_domains(training: Dataset, validating: Dataset) -> str:
    """How many traces of each domain there are."""
    counts = [Counter(traces["domain"]) for traces in (training, validating)]
    told = [f"{name} {counts[0][name]:,} + {counts[1][name]:,}" for name in counts[0]]
    return f"Domains (traces to train on + to validate): {', '.join(told)}"


def _refuse_ungraded(traces: Dataset, bound: float) -> None:
    """Refuses labels of a grader that was broken, or cannot read these answers."""
    reasons = Counter(why for row in traces["ungraded_reasons"] for why in row)
    steps = reasons.total()
    failed = {why: n for why, n in reasons.items() if why is not None and why not in _BY_THE_MODEL}
    share = sum(failed.values()) / steps
    if share > bound:
        counts = ", ".join(f"{why}: {n}" for why, n in sorted(failed.items()))
        raise ValueError(
            f"{share:.1%} of the {steps} forced answers could not be graded ({counts}), and at most"
            f" {bound:.1%} may be: they would be trained on as wrong. Grade them again (`ospruner "
            "labels regrade FOLDER`, which tests the grader first), or raise --max-ungraded"
        )


def load_labelled_base(
    base: str | None, labels: Labels, force: str | None = None, device: str | torch.device = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model that made labels, and its tokenizer.

    Args:
        base: where it lies now; None for where it lay then.
        labels: the labels.
        force: a reason to take another base nonetheless.
        device: where to put it; a quantised one stays where it was loaded to.

    Raises:
        ValueError: it is a policy, or another base (both are named): it asks in other tokens, its
            weights have another fingerprint or, where that is unknown, it finds the labels' forced
            answers more or less likely than their base did.
    """
    where, revision = _place(base, labels)
    known_revision(where, revision)  # refuses a policy
    tokenizer = _tokenizer(base, labels)
    if force is None:
        _refuse_other_base(where, tokenizer, labels)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        where, revision=revision, dtype="auto"
    )
    found, theirs = fingerprint_of(model), labels.settings.base_fingerprint
    if not is_quantised(model):
        torch.nn.Module.to(model, device)
    if force is not None or found == theirs is not None:
        return model, tokenizer
    if found is not None and theirs is not None:
        raise ValueError(
            f"{_not_by(where, labels)}: its weights have the fingerprint {found}, theirs had "
            f"{theirs}. {_INSTEAD}"
        )
    pinned = labels.settings.base_revision is not None and where == labels.settings.base_model
    difference = 0.0 if pinned else _answers_difference(model, tokenizer, labels)
    if difference > LIKELIHOOD_TOLERANCE:
        raise ValueError(
            f"{_not_by(where, labels)}: it gives their forced answers log-probabilities that differ"
            f" by {difference:.2g} nats a token (tolerated: {LIKELIHOOD_TOLERANCE}). {_INSTEAD}"
        )
    return model, tokenizer


_COMPARED_TRACES = 4
_INSTEAD = (
    "Leave out --base, give a local copy of that base, label with this one, or say why it may be "
    "taken with --force-base REASON"
)


def _not_by(where: str, labels: Labels) -> str:
    made_by = labels.settings
    return (
        f"the labels were made by {made_by.base_model!r} at revision {made_by.base_revision!r}, "
        f"not by {where!r}, and a policy is trained on the base that wrote its traces"
    )


def _answers_difference(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, labels: Labels
) -> float:
    """Median difference, in nats a token, from the stored likelihood of forced answers.

    Of all steps of the shortest traces; 0 where the labels store none.
    """
    fmt = TokenFormat.compile(
        ReasoningFormat.from_dict(labels.settings.reasoning_format), tokenizer
    )
    suffix = fmt.forced_suffix(labels.settings.answer)
    shortest = np.argsort([len(ids) for ids in labels.traces["trace_ids"]])[:_COMPARED_TRACES]
    differences = []
    for row in labels.traces.select(shortest):
        names = ("step_ends", "forced_answer_ids", "forced_logprob", "option_probabilities")
        problem = Problem(row["problem_id"], row["problem"], row["answer"], row["family"])
        for end, answer, stored, shares in zip(*(row[name] for name in names), strict=True):
            if not answer or stored is None:
                continue
            ids = [*row["prompt_ids"], *row["trace_ids"][:end], *suffix]
            among = None
            if shares is not None:
                task = open_task(labels.settings.task)
                among = OptionIds(task, tokenizer, fmt, labels.settings.answer).of(problem)
            differences.append(abs(mean_logprob(model, ids, answer, among) - stored))
    return float(np.median(differences)) if differences else 0.0


def settings_of_base(base: str | None, labels: Labels, model: PreTrainedModel) -> LabelSettings:
    """The labels' settings with the base that is taken by force, which the policy then pins."""
    where, revision = _place(base, labels)
    return dataclasses.replace(
        labels.settings,
        base_model=where,
        base_revision=known_revision(where, revision),
        base_fingerprint=fingerprint_of(model),
    )


def forced_base(reason: str, labelled: LabelSettings) -> dict[str, Any]:
    """What a record says of a base that was taken by force."""
    names = ("base_model", "base_revision", "base_fingerprint")
    return {"reason": reason, "labels": {name: vars(labelled)[name] for name in names}}


def _tokenizer(base: str | None, labels: Labels) -> PreTrainedTokenizerBase:
    where, revision = _place(base, labels)
    return load_tokenizer(where, revision)


def _place(base: str | None, labels: Labels) -> tuple[str, str | None]:
    """Where the base lies now, and at which revision."""
    moved = base is not None and Path(base).is_dir()
    return base or labels.settings.base_model, None if moved else labels.settings.base_revision


def _refuse_other_base(where: str, tokenizer: PreTrainedTokenizerBase, labels: Labels) -> None:
    """A copy of the base may lie elsewhere; it must ask the first problem in the same tokens."""
    made_by = labels.settings.base_model
    if where == made_by:
        return
    row = labels.traces[0]
    problem = Problem(row["problem_id"], row["problem"], row["answer"], row["family"])
    reasoning_format = ReasoningFormat.from_dict(labels.settings.reasoning_format)
    fmt = TokenFormat.compile(reasoning_format, tokenizer)
    message = open_task(labels.settings.task).message(problem, reasoning_format)
    asked = prompt_token_ids(problem.id, message, tokenizer, fmt)
    if not Path(where).is_dir() or asked != row["prompt_ids"]:
        raise ValueError(f"{_not_by(where, labels)}. {_INSTEAD}")


def _refuse_other_labels(ours: LabelSettings, theirs: LabelSettings) -> None:
    """Validation may be sampled with another seed and more often; all else must agree."""
    free = {"seed", "samples_per_problem"}
    differences = [line for line in ours.differences(theirs) if line.partition(":")[0] not in free]
    if differences:
        raise ValueError(
            f"the validation labels were made otherwise than the training labels "
            f"({'; '.join(differences)}): label both with the same settings"
        )
