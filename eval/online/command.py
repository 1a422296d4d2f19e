"""A whole online evaluation, as `ospruner eval online` starts it: everything by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from modeling_ospruner.formats_ospruner import ReasoningFormat, TokenFormat
from ospruner.bases import max_positions
from ospruner.engines.opening import (
    EngineOptions,
    known_revision,
    load_tokenizer,
    open_engine,
)
from ospruner.engines.transformers.engine import TransformersEngine
from ospruner.formats import guess
from ospruner.rules import Family, StopRule, parse_rule

from ..arithmetic import ModelWork
from ..methods import PolicyUse, parse_policies, refuse_other_base
from ..problems.registry import open_task, parse_task
from ..problems.sources import load_source
from ..problems.task import ProblemSet, Task, prompt_token_ids
from ..schema import MATH_TASK
from .batches import Method, Runner, evaluate_online
from .evaluation import Evaluation
from .runners import EngineRunner, HookRunner, Setup
from .settings import OnlineSettings

__all__ = ["OnlineRequest", "run_online"]


@dataclass(frozen=True, kw_only=True)
class OnlineRequest:
    """What to evaluate.

    Attributes:
        dataset: problems: a benchmark's name, a file, or a dataset of the Hub (`load_source`).
        policies: see `methods.parse_policies`.
        prices: prices of a token, see `methods.parse_policies`.
        rules: see `ospruner.rules.parse_rule`.
        base: the model; None for the one that the policies pin.
        engine: one of `opening.ENGINES`.
        engine_options: of `EngineOptions`, such as `urls` or `arguments`.
        task: see `problems.registry.parse_task`; None for the policies' own, or mathematics.
        allow_code: whether programs that the model wrote may be run.
        across_tasks: take policies that were trained on another task.
        prompt: one of `task.PROMPT_PRESETS`.
        wind_down: a sentence forced before the closing; None: as the policies have it.
        model: what tables call the base; None for the last part of its name.
        benchmark: what tables call the problems; None for the dataset's name.
        files: a benchmark's rows from files.
        limit: only the first so many problems.
        settings: how to sample.
        answer_cap_given: whether the cap of `settings` on forced answers was chosen; else it is the
            task's.
    """

    dataset: str
    policies: Sequence[str] = ()
    prices: Sequence[float] | None = None
    rules: Sequence[str] = ()
    base: str | None = None
    engine: str = "transformers"
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    task: str | None = None
    allow_code: bool = False
    across_tasks: bool = False
    prompt: str = "default"
    wind_down: str | None = None
    model: str | None = None
    benchmark: str | None = None
    files: Sequence[str] = ()
    limit: int | None = None
    settings: OnlineSettings = field(default_factory=OnlineSettings)
    answer_cap_given: bool = True


def run_online(
    request: OnlineRequest,
    out_dir: str | Path,
    progress: Callable[[str, int, int], None] = lambda phase, done, total: None,
) -> Evaluation:
    """Evaluates by generating; whatever can be refused is refused before an engine starts.

    Args:
        request: what.
        out_dir: an empty folder, or that of an interrupted run of the same request.
        progress: called with phase "generate", in batches of one method.

    Raises:
        FileNotFoundError, ValueError, MissingPackageError: naming what is wrong.
    """
    uses = parse_policies(request.policies, request.prices)
    task = _task(request, uses)
    base, revision, literals = _base(request.base, uses, task, request.across_tasks)
    task.check()
    settings = request.settings
    if settings.answer == "forced" and not request.answer_cap_given:
        settings = replace(settings, max_answer_tokens=task.max_answer_tokens)
    named = [_rule(text, task) for text in request.rules]
    loaded = load_source(
        request.dataset, files=request.files, limit=request.limit, read=task.read_row
    )
    problem_set = ProblemSet(
        request.benchmark or Path(request.dataset).name.partition(".")[0], loaded.problems, task
    )
    known_revision(base, revision)  # refuses a policy
    tokenizer = load_tokenizer(base, revision)
    chosen = guess(tokenizer) if literals is None else ReasoningFormat.from_dict(literals)
    if request.wind_down is not None:
        chosen = replace(chosen, wind_down=request.wind_down)
    chosen = task.shape(chosen)
    fmt = TokenFormat.compile(chosen, tokenizer)
    config = AutoConfig.from_pretrained(base, revision=revision)
    _refuse_beyond_positions(config, problem_set, tokenizer, fmt)
    options = EngineOptions(base, revision, **request.engine_options)
    setup = Setup(tokenizer, fmt, task, settings, ModelWork.of_config(config))

    def load_base(of_engine: EngineOptions) -> PreTrainedModel:
        local = open_engine("transformers", tokenizer, of_engine)
        assert isinstance(local, TransformersEngine)
        return local.model

    runner: Runner
    if request.engine == "transformers":
        runner = HookRunner(setup, load_base(options))
    else:
        # vLLM in this process holds the GPU: beside it a policy runs on the CPU unless told.
        device = options.device or ("cpu" if request.engine == "vllm" else None)
        beside = EngineOptions(base, revision, dtype=options.dtype, device=device)
        engine = open_engine(request.engine, tokenizer, replace(options, device=None))
        runner = EngineRunner(setup, engine, lambda: load_base(beside))
    methods = [Method(use.method, use.parameter, use.parameter_name, use) for use in uses]
    methods += [Method(r.method, r.threshold, r.family.parameter_name, r) for r in named]
    about = {
        "model": request.model or Path(base).name,
        "base": base,
        "revision": revision,
        "reasoning_format": chosen.to_dict(),
        "engine": request.engine,
        "task": task.settings,
    }
    return evaluate_online(problem_set, methods, runner, settings, about, out_dir, progress)


def _refuse_beyond_positions(
    config: PreTrainedConfig,
    problem_set: ProblemSet,
    tokenizer: PreTrainedTokenizerBase,
    fmt: TokenFormat,
) -> None:
    """Refuses problems whose prompts alone are longer than the base's positions."""
    limit = max_positions(config)
    if limit is None:
        return
    for problem in problem_set.problems:
        message = problem_set.task.message(problem, fmt.format)
        tokens = len(prompt_token_ids(problem.id, message, tokenizer, fmt))
        if tokens >= limit:
            raise ValueError(
                f"the prompt of problem {problem.id!r} has {tokens} tokens, the base {limit} "
                "positions (max_position_embeddings): drop the problem"
            )


def _rule(text: str, task: Task) -> StopRule:
    rule = parse_rule(text, task.same)
    if isinstance(rule, Family):
        raise ValueError(f"rule {text!r} has no threshold: give one, such as {text}:{rule.never:g}")
    return rule


def _task(request: OnlineRequest, uses: Sequence[PolicyUse]) -> Task:
    """The task that was named, else that of the policies."""
    if request.task is not None:
        return parse_task(request.task, request.prompt, request.allow_code)
    settings = dict((uses[0].config.task if uses else None) or MATH_TASK)
    if request.prompt != "default":
        settings["prompt"] = request.prompt
    return open_task(settings, request.allow_code)


def _base(
    asked: str | None, uses: Sequence[PolicyUse], task: Task, across_tasks: bool
) -> tuple[str, str | None, dict[str, str] | None]:
    """The base, its revision and its format: what was asked for, and what all policies pin."""
    if not uses:
        if asked is None:
            raise ValueError("no base: give --base, or policies that pin one")
        return asked, None, None
    first = uses[0].config
    literals = first.reasoning_format or {}
    if any(use.config.method == "flashthink" for use in uses):
        raise ValueError(
            "FlashThink is a baseline for replay: its verifier is a second model, which generate "
            "does not run. Evaluate it with `ospruner eval replay`"
        )
    shaped = task.shape(ReasoningFormat.from_dict(literals)).to_dict() if literals else literals
    for use in uses:
        refuse_other_base(
            use,
            first.base_model_name_or_path,
            first.base_revision,
            shaped,
            first.step_stride,
            None if across_tasks else task.settings,
        )
    if asked is None:
        return first.base_model_name_or_path, first.base_revision, literals
    # A base named by hand is taken to be the pinned one, lying elsewhere: loading a policy
    # compares its sizes and refuses another.
    same = asked == first.base_model_name_or_path
    return asked, first.base_revision if same else None, literals
