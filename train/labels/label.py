"""Label runs by names: `ospruner.label`, traces that others made, and grading again."""

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import date
from itertools import chain
from pathlib import Path
from typing import Any

from datasets import DatasetDict
from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto import CONFIG_MAPPING

from modeling_ospruner.configuration_ospruner import max_positions
from modeling_ospruner.formats_ospruner import TokenFormat
from ospruner.engines.opening import (
    ENGINES,
    EngineOptions,
    default_engine,
    known_revision,
    load_tokenizer,
    open_engine,
    parse_arguments,
)
from ospruner.eval.problems.domains import open_task, parse_task
from ospruner.eval.problems.problem import Columns, Problem
from ospruner.eval.problems.sources import Loaded, drop_overlaps, load_source, task_of
from ospruner.eval.problems.task import Task
from ospruner.eval.schema import FREE_ANSWER_TOKENS, LabelSettings
from ospruner.formats import check_blanks, guess, named
from ospruner.progress import Progress, silent
from ospruner.provenance import PROVENANCE_FILE, read_provenance, write_provenance

from .folder import MANIFEST, check_folder, data_hash, read_labels, read_manifest
from .importing import read_traces
from .labelling import Labeller, TraceKey, grade_rows
from .loading import load_splits
from .making import Worker, label_stored, work_here
from .on_ray import ray_work
from .store import LabelStore

_NOT_OF_IMPORTS = {
    *("samples", "temperature", "top_p", "top_k", "seed"),  # they are sampled already
    *("split", "files", "exclude", "actors", "gpus_per_actor"),
}


def _help(text: str, default: Any = None) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class LabelConfig:
    """What a label run is asked for; the `help` of each field is its meaning."""

    base: str = _help("The reasoning model: a folder or a Hub id.", "")
    dataset: str = _help(
        "gsm8k, math500, aime, deepscaler, arc-easy, arc-challenge, mmlu, a .jsonl[.gz] "
        "or .parquet file, or a Hub id.",
        "",
    )
    out: str = _help("Folder of the labels; a stopped run continues.", "")
    engine: str = _help("transformers, vllm, sglang or openai; auto: the fastest here.", "auto")
    limit: int | None = _help("Only the first N problems (or traces).")
    split: str | None = _help("Split of the data set; deepscaler has train and holdout.")
    task: str | None = _help(
        "math, choice, exact, or a .py file with a Task; default: the data set's."
    )
    samples: int = _help("Traces sampled for each problem.", 1)
    max_thinking_tokens: int = _help("Cap on a trace.", 15_000)
    max_answer_tokens: int | None = _help("Cap on an answer; the task's (math: 32), 512 if free.")
    answer: str = _help("forced: closing and box prefix; free: closing only.", "forced")
    seed: int = _help("Seed of the sampling.", 0)
    temperature: float = _help("Temperature of the traces; 0 is greedy.", 0.6)
    top_p: float = _help("Nucleus (top-p) of the traces.", 0.95)
    top_k: int = _help("Top-k of the traces; 0 for none.", 0)
    step_stride: int = _help("Label every k-th step, and always the last.", 1)
    prompt: str = _help("default, concise, chain-of-draft or check.", "default")
    files: tuple[str, ...] = _help("Read a benchmark's rows from these files, not the Hub.", ())
    columns: str = _help("Names of the columns: problem=question,answer=final.", "")
    exclude: tuple[str, ...] = _help("Drop what is also in these benchmarks or files.", ())
    format: str | None = _help("A format's name, or a JSON file with its literals.")
    wind_down: str | None = _help("A sentence forced before the closing.")
    step_tokens: int = _help(
        "A step also ends after so many tokens without a paragraph's end; 0: never, as the paper.",
        256,
    )
    template_arg: tuple[str, ...] = _help(
        "The chat template's own: enable_thinking=true. Repeatable.", ()
    )
    revision: str | None = _help("The base's commit, branch or tag on the Hub.")
    batch_size: int | None = _help("Rows, or requests, that the engine works on at once.")
    dtype: str = _help("Such as bfloat16; auto: the base's own.", "auto")
    device: str | None = _help("Such as cpu, cuda.")
    urls: tuple[str, ...] = _help("Servers of the engines openai and sglang. Repeatable.", ())
    engine_args: tuple[str, ...] = _help("Such as tensor_parallel_size=2.", ())
    chunk: int = _help("Traces begun and not saved, at most: what a kill may lose.", 128)
    retry_failed: bool = _help("Try traces again that failed in an earlier run.", False)
    actors: int = _help("Spread over so many engines on a Ray cluster.", 0)
    gpus_per_actor: float = _help("GPUs of each of these engines.", 1.0)

    def __post_init__(self) -> None:
        for name, least in (("limit", 1), ("chunk", 1), ("actors", 0), ("gpus_per_actor", 0)):
            value = vars(self)[name]
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}; it must be at least {least}")
        if (name := self.engine) not in ("auto", *ENGINES):
            raise ValueError(f"engine is {name!r}; it must be auto or one of {', '.join(ENGINES)}")

    def open_task(self) -> Task:
        """The task by name; see `parse_task`."""
        return parse_task(self.task or task_of(self.dataset), self.prompt)

    def engine_name(self) -> str:
        """The engine's name; for "auto" that of the fastest here."""
        return default_engine(self.device)[0] if self.engine == "auto" else self.engine


def label(
    base: str | Path,
    dataset: str | Path,
    *,
    out: str | Path,
    split: str | None = None,
    engine: str = "auto",
    limit: int | None = None,
    progress: Progress = silent,
    **settings: Any,
) -> DatasetDict:
    """Samples a base's traces, forces the answer at the end of each step, and grades it.

        labels = ospruner.label("Qwen/Qwen3-8B", "deepscaler", out="labels", limit=2000)
        labels["train"], labels["validation"], labels["test"]

    The same call again continues a stopped run, or gives the finished labels.

    Args:
        base: the reasoning model, a folder or a Hub id.
        dataset: the problems: a benchmark's name, a file, or a data set on the Hub.
        out: the folder of the labels.
        split: of the data set.
        engine: "transformers", "vllm", "sglang" or "openai"; "auto": vLLM where it and a GPU are.
        limit: only the first so many problems.
        progress: is told of phases, in traces.
        settings: other fields of `LabelConfig`.

    Returns:
        Labelled traces by split (`load_splits` says which), columns `features.FEATURES`. Each split
        knows how it was made.

    Raises:
        TypeError: a setting that is none.
        FileNotFoundError, ValueError, MissingPackageError: naming what is wrong.
    """
    settings |= {"split": split, "engine": engine, "limit": limit}
    return run_label(_config(settings, base=base, dataset=dataset, out=out), progress)


def _config(
    settings: Mapping[str, Any], but: Collection[str] = (), **places: str | Path
) -> LabelConfig:
    known = [one.name for one in fields(LabelConfig) if one.name not in {*places, *but}]
    if unknown := sorted(set(settings) - set(known)):
        raise TypeError(f"settings are {unknown}; they must be among {', '.join(known)}")
    return LabelConfig(**{**settings, **{name: str(place) for name, place in places.items()}})


def run_label(
    config: LabelConfig, progress: Progress = silent, loaded: Loaded | None = None
) -> DatasetDict:
    """What `label` does, with all settings in one object; of these problems where they are read."""
    loaded = loaded or load_run_problems(config)
    traces = [TraceKey(problem, k) for problem in loaded.problems for k in range(config.samples)]
    return _run(config, config.open_task(), traces, loaded.source, progress)


def import_traces(
    base: str, file: str, *, out: str | Path, progress: Progress = silent, **settings: Any
) -> DatasetDict:
    """Labels traces that others made: their answers are forced by a base of yours.

    Args are those of `label`, with the traces in place of the problems (`importing.read_traces`)
    and without the settings of sampling, data sets and Ray.

    Raises:
        TypeError, FileNotFoundError, ValueError, MissingPackageError: naming what is wrong.
    """
    config = _config(settings, _NOT_OF_IMPORTS, base=base, dataset=file, out=out)
    task = config.open_task()
    fmt = read_format(config, load_tokenizer(base, config.revision), task).format
    traces = read_traces(file, columns=parse_columns(config.columns), limit=config.limit, fmt=fmt)
    config = replace(config, samples=1 + max(trace.sample_index for trace in traces))
    return _run(config, task, traces, {"traces": Path(file).name}, progress)


def _run(
    config: LabelConfig,
    task: Task,
    traces: Sequence[TraceKey],
    source: Mapping[str, Any],
    progress: Progress,
) -> DatasetDict:
    """Labels traces. Whatever can be refused is refused before the engine starts."""
    task.check()
    said, name = vars(config), config.engine_name()
    options = EngineOptions(
        **{key: said[key] for key in ("base", "revision", "batch_size", "dtype", "device")},
        urls=tuple(config.urls),
        arguments=parse_arguments(config.engine_args, "engine argument"),
    )
    tokenizer = load_tokenizer(config.base, config.revision)
    fmt = read_format(config, tokenizer, task)
    cap = task.max_answer_tokens if config.answer == "forced" else FREE_ANSWER_TOKENS
    shared = ("answer", "temperature", "top_p", "top_k", "seed", "step_stride")
    settings = LabelSettings(
        base_model=config.base,
        base_revision=known_revision(config.base, config.revision),
        reasoning_format=fmt.format.to_dict(),
        samples_per_problem=config.samples,
        max_new_tokens=config.max_thinking_tokens,
        max_answer_tokens=cap if config.max_answer_tokens is None else config.max_answer_tokens,
        imported_from=Path(config.dataset).name if any(trace.given for trace in traces) else "",
        task=task.settings,
        prompt_date=_prompt_date(tokenizer, config.out),
        **{key: said[key] for key in shared},
    )
    check_folder(config.out, settings)
    labeller = Labeller(tokenizer, fmt, settings, task)
    problems = list({trace.problem.id: trace.problem for trace in traces}.values())
    for problem in problems:
        labeller.options(problem)  # refuses what cannot be read
    _refuse_beyond_positions(problems, labeller)

    def worker() -> Worker:  # with actors in another process, perhaps on another machine
        own = load_tokenizer(config.base, config.revision)
        return open_engine(name, own, options), Labeller.of(own, settings)

    how: dict[str, Any] = {"chunk_traces": config.chunk, "progress": progress}
    source = {**source, "engine": name}
    if config.actors:
        work = ray_work(worker, config.actors, gpus_per_actor=config.gpus_per_actor, **how)
        source["scale"] = "ray"
    else:
        work = work_here(lambda: (open_engine(name, tokenizer, options), labeller), **how)
    label_stored(settings, traces, config.out, work, config.retry_failed, source)
    return load_splits(config.out)


def load_run_problems(config: LabelConfig) -> Loaded:
    """The problems of a run (`load_source`), without those of `exclude`; `source` counts these.

    Raises:
        ValueError: nothing is left.
    """
    read, columns = config.open_task().read_row, parse_columns(config.columns)
    how: dict[str, Any] = {"files": config.files, "split": config.split, "columns": columns}
    limit = None if config.exclude else config.limit
    loaded = load_source(config.dataset, limit=limit, read=read, **how)
    if not config.exclude:
        return loaded
    others = [one for name in config.exclude for one in load_source(name, read=read).problems]
    problems, dropped = drop_overlaps(loaded.problems, others)
    if not problems:
        raise ValueError(f"all {len(dropped)} problems are also in {', '.join(config.exclude)}")
    excluded = {"by": list(config.exclude), "overlaps": len(dropped), "ids": dropped}
    return Loaded(problems[: config.limit], loaded.source | {"excluded": excluded})


def read_format(config: LabelConfig, tokenizer: PreTrainedTokenizerBase, task: Task) -> TokenFormat:
    """The reasoning format of a run, in its task's shape.

    Raises:
        ValueError: no such preset, a format that does not fit the tokenizer, or arguments that its
            chat template does not read.
    """
    given = parse_arguments(config.template_arg, "template argument")
    if unread := [name for name in given if name not in str(tokenizer.chat_template)]:
        raise ValueError(
            f"template arguments {unread} do not occur in the chat template of {config.base!r}: "
            "leave them out, or write them as the template does"
        )
    chosen = guess(tokenizer) if config.format is None else named(config.format)
    changes: dict[str, Any] = {"step_tokens": chosen.step_tokens or config.step_tokens}
    if config.wind_down is not None:
        changes["wind_down"] = config.wind_down
    if given:
        changes["template_args"] = json.dumps(given, sort_keys=True)
    compiled = TokenFormat.compile(task.shape(replace(chosen, **changes)), tokenizer)
    check_blanks(tokenizer)
    return compiled


def _prompt_date(tokenizer: PreTrainedTokenizerBase, out: str) -> str:
    """The day that the prompts of a run name as today: that on which it began."""
    if "strftime_now" not in str(tokenizer.chat_template):
        return ""
    known = read_manifest(out)["settings"] if (Path(out) / MANIFEST).is_file() else {}
    return str(known.get("prompt_date") or date.today().isoformat())


def parse_columns(text: str) -> Columns:
    """Reads `problem=question,answer=final` as the command line gives it.

    Raises:
        ValueError: a part without "=".
    """
    parts = [part.partition("=") for part in text.split(",") if part.strip()]
    if bad := [name for name, sign, column in parts if not sign or not column.strip()]:
        raise ValueError(f"columns holds {bad}; write field=column, such as problem=question")
    return {name.strip(): (column.strip(),) for name, _, column in parts}


def _refuse_beyond_positions(problems: Sequence[Problem], labeller: Labeller) -> None:
    """Refuses a run whose longest text would not fit into the base's positions."""
    settings = labeller.settings
    base, revision = settings.base_model, settings.base_revision
    config, _ = PreTrainedConfig.get_config_dict(base, revision=revision)
    if config.get("model_type") not in CONFIG_MAPPING:  # code of its own: asked for by its engine
        return
    limit = max_positions(AutoConfig.from_pretrained(base, revision=revision))
    if limit is None:
        return
    prompt, longest = max((len(labeller.prompt(problem)), problem.id) for problem in problems)
    answer = len(labeller.fmt.forced_suffix(settings.answer)) + settings.max_answer_tokens
    room = max(0, limit - prompt - answer)
    if settings.max_new_tokens > room:
        raise ValueError(
            f"max_thinking_tokens is {settings.max_new_tokens}, but beside the longest prompt "
            f"(problem {longest!r}, {prompt} tokens) and an answer ({answer}) the base "
            f"{base!r} has room for {room} thinking tokens in its {limit} positions "
            "(max_position_embeddings): give so many or fewer, or drop the problem"
        )


@dataclass(frozen=True)
class Regraded:
    """What grading again changed."""

    steps: int  # forced answers graded
    changed: Counter[str]  # of these, how many went from one grade to another: "0.0 -> 1.0"
    ungraded: Counter[str]  # forced answers without a verdict now, by reason


def regrade(path: str | Path, progress: Progress = silent) -> Regraded:
    """Grades every stored answer of a label folder again, without generating anything.

    The new grades take the old ones' places at once: a run that was killed before has changed
    nothing, and is simply started again. Its progress is a phase "grade", in traces.

    Raises:
        ValueError: it is no label folder, holds no traces, or is being written; or the grader
            is broken.
    """
    path = Path(path)
    settings = LabelSettings.from_dict(read_manifest(path)["settings"])
    task = open_task(settings.task)
    task.check()
    # Refuses a damaged shard: opening to write would set it aside.
    before, done = list(read_labels(path)["forced_correct"]), 0

    def change(rows: list[dict[str, Any]]) -> None:
        nonlocal done
        grade_rows(rows, task)
        done += len(rows)
        progress("grade", done, len(before))

    with LabelStore(path, settings) as store:
        store.rewrite(change)
        after = store.finish()
        if (path / PROVENANCE_FILE).is_file():
            found = data_hash(store.manifest)
            write_provenance(path, replace(read_provenance(path), data_hash=found))
    columns = (before, after["forced_correct"], after["ungraded_reasons"])
    old, new, reasons = (list(chain.from_iterable(column)) for column in columns)
    pairs = zip(old, new, strict=True)
    changed = Counter(sorted(f"{was} -> {now}" for was, now in pairs if was != now))
    return Regraded(len(new), changed, Counter(filter(None, reasons)))
