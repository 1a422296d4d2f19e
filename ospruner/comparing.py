"""`ospruner.compare`: labels, their base, policies and rules are brought together."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from modeling_ospruner import OSPrunerForCausalLM, StopPolicyConfig
from modeling_ospruner.formats_ospruner import ReasoningFormat, TokenFormat
from ospruner.engines.opening import device_named, known_revision, load_tokenizer
from ospruner.eval import compare as comparison
from ospruner.eval.compute import Compute, ModelWork
from ospruner.eval.evaluation import Report
from ospruner.eval.learnstop import LEARN_STOP
from ospruner.eval.measured import Predicted, Split, thinking_entropies
from ospruner.eval.methods import FULL, PolicyUse, parse_policies, refuse_other_base
from ospruner.eval.metrics import AES_ABSOLUTE, AesVariant
from ospruner.eval.online import Generator, evaluate_online, labelled_problems
from ospruner.eval.problems.domains import open_task
from ospruner.eval.recorded import Method, Recorded
from ospruner.eval.schema import FREE_ANSWER_TOKENS, OF_SAMPLING, LabelSettings
from ospruner.eval.table import FloatArray, TraceTable
from ospruner.progress import Progress, silent
from ospruner.rules.families import FAMILIES, Family, Step, StopRule, is_rule, parse_rule
from ospruner.rules.signals import Same
from ospruner.train.flashthink import Verifier, tokens_read, verifier_traces
from ospruner.train.label_sets import load_labelled_base
from ospruner.train.labels.loading import Labels, load_labels
from ospruner.train.traces import LabelledTraces, predict_outputs

__all__ = ["Judged", "compare"]

ROUNDED_TRACES, ROUNDED_TOKENS = 2, 200  # on which replay's rounding is compared with generate's


class Judged:
    """Labels with their base, which is loaded where a policy or a rule needs it.

    Arguments are those of `compare`; `model` is the base as other labels of it have loaded it.
    """

    def __init__(
        self,
        labels: Any,
        base: str | None = None,
        *,
        limit: int | None = None,
        device: str | None = None,
        states: str | Path | None = None,
        progress: Progress = silent,
        model: PreTrainedModel | None = None,
    ) -> None:
        self.labels: Labels = load_labels(labels)
        self.settings: LabelSettings = self.labels.settings
        self.traces = self.labels.traces
        named = isinstance(labels, str | Path)
        self.name = str(labels) if named else self.labels.source or "these labels"
        if limit is not None:
            self.traces = self.traces.take(min(limit, len(self.traces)))
        self.device, self.progress = device_named(device), progress
        self._base, self._states = base, states
        self._said: dict[str, Predicted] = {}
        pinned = (self.settings.base_model, self.settings.base_revision)
        self.where = (base, None) if base else pinned
        known_revision(*self.where)  # refuses a policy
        self.tokenizer = load_tokenizer(*self.where)
        if model is not None:
            self.model = model

    @cached_property
    def model(self) -> PreTrainedModel:
        """The base."""
        return load_labelled_base(self._base, self.labels, device=self.device)[0]

    @property
    def token_format(self) -> TokenFormat:
        """The labels'."""
        literals = ReasoningFormat.from_dict(self.settings.reasoning_format)
        return TokenFormat.compile(literals, self.tokenizer)

    @cached_property
    def split(self) -> Split:
        """The traces, charged for what they compute, as `eval.compare` reads them."""
        suffix_tokens = len(self.token_format.forced_suffix(self.settings.answer))
        config = AutoConfig.from_pretrained(self.where[0], revision=self.where[1])
        prompts = np.array([len(ids) for ids in self.traces["prompt_ids"]], np.int64)
        compute = Compute(ModelWork.of_config(config), prompts, suffix_tokens)
        table = compute.charge(TraceTable.from_dataset(self.traces))

        @cache
        def entropies() -> FloatArray:
            return thinking_entropies(self.model, self.traces, table, self.progress)

        return Split(
            self.traces,
            table,
            suffix_tokens,
            lambda ids: str(self.tokenizer.decode(ids)),
            compute,
            open_task(self.settings.task).same,
            entropies,
            self.said,
        )

    @cached_property
    def _kept(self) -> LabelledTraces:
        return LabelledTraces.from_dataset(self.traces, self._states)

    def predicted(self, path: str) -> Predicted:
        """What a policy's head says; it runs once for all thresholds and prices."""
        if path not in self._said:
            self.progress("policies", len(self._said), len(self._said) + 1)
            policy = OSPrunerForCausalLM.from_base(self.model, path)
            self._said[path] = predict_outputs(policy, self._kept, progress=self.progress)
        return self._said[path]

    def said(self, use: PolicyUse) -> Predicted:
        """What a policy, or a verifier, says at each step.

        All that FlashThink's verifier reads until a stop is charged.
        """
        if use.config.method != "flashthink":
            return self.predicted(use.path)
        verifier = Verifier.load(use.path, self.settings, self.device)
        tokenizer = AutoTokenizer.from_pretrained(verifier.config.base_model_name_or_path)
        judged = verifier_traces(self.traces, self.tokenizer, tokenizer)
        said = predict_outputs(verifier, judged)
        read, rows, last = tokens_read(judged), np.arange(len(judged)), judged.table.last
        # At its natural end a trace needs no verdict: the verifier has read to the step before.
        read[rows, last] = np.where(last > 0, read[rows, last - 1], 0)
        flops = ModelWork.of_config(verifier.base.config).read(0, read)
        return dataclasses.replace(said, flops=flops, read_tokens=read)

    def rounding(self, use: PolicyUse) -> dict[str, Any]:
        """How far replay's stop probabilities lie from generate's, which rounds otherwise.

        Replay reads a whole trace in one pass, generate a token at a time: in float32 the two agree
        to some 1e-6, in half precision they do not. Generate is made to write some of the traces.

        Returns:
            "dtype" of the base, "steps" compared, "mean" and "largest" absolute difference.
        """
        policy = OSPrunerForCausalLM.from_base(self.model, use.path)
        settings = StopPolicyConfig(mode="threshold", threshold=1.0, price=use.asked_price)
        replayed = self.predicted(use.path).probabilities(use.price if use.is_ours else None)
        differences: list[float] = []
        for n, row in enumerate(self.traces.take(min(ROUNDED_TRACES, len(self.traces)))):
            trace = row["trace_ids"][:ROUNDED_TOKENS]
            policy.generate(
                torch.tensor([row["prompt_ids"]], device=self.model.device),
                stop_policy=settings,
                max_new_tokens=len(trace),
                do_sample=False,
                logits_processor=[partial(_writing, [*row["prompt_ids"], *trace])],
            )
            said = [one for one in policy.last_stop[0].probabilities if not math.isnan(one)]
            differences += np.abs(np.array(said) - replayed[n, : len(said)]).tolist()
        return {
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "steps": len(differences),
            "mean": float(np.mean(differences)),
            "largest": max(differences),
        }


def _writing(text: Sequence[int], ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A logits processor that makes generate write a text, whose beginning `ids` (1, S) are.

    The next token is the likeliest; none is forbidden, which a policy would refuse.
    """
    written = scores.clone()
    written[:, text[ids.shape[1]]] = scores.max() + 1
    return written


def compare(
    labels: Any,
    methods: Sequence[str | Path | StopRule | Family | Callable[..., Any]],
    *,
    choose_on: Any = None,
    prices: Sequence[float] | None = None,
    train: Any = None,
    beside: Sequence[Any] = (),
    base: str | None = None,
    across_tasks: bool = False,
    variant: AesVariant = AES_ABSOLUTE,
    rewards_at: Sequence[float] | None = None,
    model: str | None = None,
    benchmark: str | None = None,
    limit: int | None = None,
    device: str | None = None,
    states: str | Path | None = None,
    progress: Progress = silent,
    online: bool = False,
    samples: int = 16,
    seed: int = 0,
    batch_problems: int = 1,
    answer: str | None = None,
    out: str | Path | None = None,
) -> Report:
    """Compares policies and rules on labels: exactly, without generating, or online.

        report = ospruner.compare(
            labels["test"], ["policy", ospruner.rules.Budget(400), "deer"],
            choose_on=labels["validation"],
        )
        report.frame; report.plot("pareto.png"); report.to_latex()

    Args:
        labels: what `ospruner.label` gave, a folder or a Hub id, to measure on; or, without
            methods, the `signals.parquet` of an earlier comparison, whose numbers are computed
            anew.
        methods: policies (a folder or Hub id; "policy@.7,.8" for thresholds), rules ("budget:400",
            `rules.Budget(400)`), and, with labels to choose on, rules whose threshold is open
            ("deer", `rules.Deer`, any function of a step's end: `rules.Family`), "learnstop", or
            "rules" for all of these but your own.
        choose_on: labels of other problems, made with the same settings, on which every choice is
            made: of each method's setting, of frontiers, and of the best fixed rules.
        prices: of a token, at which policies of every price stop; () for 31 of their range; None
            for their own or, where there are labels to choose on, for 31.
        train: labels on which to fit LearnStop; None for those to choose on.
        beside: labels of the same problems by the same base, asked by another prompt: their full
            traces are rows, since a prompt is what one tries first.
        base: the base, where it lies elsewhere than when it was labelled.
        across_tasks: take policies that were trained on another task, to see how far they carry.
        variant: which AES.
        rewards_at: prices of a token for rewards and gaps to the oracle; None for some that suit
            the traces' lengths.
        model: what tables call the base; None for the last part of its name.
        benchmark: what tables call the problems; None for the labels' own name.
        limit: only the first so many traces to measure on.
        device: where policies and verifiers compute; None for the best there is.
        states: folder in which the trunk's states are kept; None for in memory.
        progress: called with phases "trunk", "policies" and "thinking", or "generate".
        online: generate anew on the labels' problems, with the labels' settings, in transformers:
            Pass@1 and wall-clock. Nothing is chosen then, so that each rule needs its threshold;
            `limit` counts problems.
        samples: traces generated for each problem.
        seed: of their sampling and of the policies' draws.
        batch_problems: problems generated in one batch; with 1 times are exact.
        answer: "forced", or "free", of at most 512 tokens, where the report counts who thinks on
            after the cut; online alone. None for the labels' own.
        out: folder in which finished batches are kept; a stopped run goes on from there.

    Raises:
        ValueError: a policy of another base, format or task, labels of other
            settings or of shared problems, or a rule that cannot be had.
    """
    if not methods and str(labels).endswith(".parquet"):
        return comparison.report_of(Recorded.read(labels))
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}; it must be at least 1")
    if online and choose_on is not None:
        raise ValueError("online chooses nothing: leave out choose_on, or compare by replay")
    if answer is not None and not online:
        raise ValueError(f"answer is {answer!r}: labels hold theirs; it goes with online")
    more: dict[str, Any] = {"device": device, "states": states, "progress": progress}
    ours = Judged(labels, base, limit=None if online else limit, **more)
    wanted = _methods(methods, prices, choose_on is not None, ours.split.same)
    uses = {one.path: one for one in wanted if isinstance(one, PolicyUse)}
    # A verifier's base is its own; it knows whose traces it read.
    own = [use for use in uses.values() if online or use.config.method != "flashthink"]
    for use in own:
        refuse_other_base(use, ours.settings, any_task=across_tasks)
    named = {
        "model": model or Path(ours.settings.base_model).name,
        "benchmark": benchmark or Path(ours.name).name,
    }
    if rewards_at is None:
        rewards_at = comparison.worth_asking(ours.split.table)
    if online:
        settings = dataclasses.replace(ours.settings, samples_per_problem=samples, seed=seed)
        taken = [_generated(one) for one in wanted]
        task = open_task(settings.task)
        task.check()
        if answer not in (None, settings.answer):
            cap = FREE_ANSWER_TOKENS if answer == "free" else task.max_answer_tokens
            kind: Any = answer  # checked there
            settings = dataclasses.replace(settings, answer=kind, max_answer_tokens=cap)
        generator = Generator(ours.model, ours.tokenizer, ours.token_format, task, settings)
        report = evaluate_online(
            labelled_problems(ours.traces, limit),
            taken,
            generator.run,
            settings,
            named,
            out,
            batch_problems=batch_problems,
            progress=progress,
        )
        return dataclasses.replace(report, variant=variant, prices=tuple(rewards_at))
    theirs = None
    if choose_on is not None:
        theirs = Judged(choose_on, base, model=ours.model if uses else None, **more)
        if differences := ours.settings.differences(theirs.settings, OF_SAMPLING):
            raise ValueError(
                f"the labels to choose on were made otherwise ({'; '.join(differences)}): "
                "label both with the same settings"
            )
    others = {
        f"{FULL}, prompt {one.settings.task.get('prompt', 'default')}": one.split
        for one in (Judged(each, base, **more) for each in beside)
    }
    made = {"answer": ours.settings.answer, "label_settings": ours.settings.to_dict()}
    rounds = bool(own) and ours.model.dtype != torch.float32
    return comparison.compare(
        ours.split,
        wanted,
        choose_on=None if theirs is None else theirs.split,
        train=None if train is None else Judged(train, base, **more).split,
        beside=others,
        variant=variant,
        prices=tuple(rewards_at),
        settings=named | made,
        about={"rounding": ours.rounding(own[0])} if rounds else {},
    )


def _generated(method: Method) -> PolicyUse | StopRule:
    """The method; raises ValueError for what generate cannot run."""
    if isinstance(method, PolicyUse) and method.config.method == "flashthink":
        raise ValueError(
            "FlashThink's verifier is a second model, which generate does not run: compare it "
            "by replay"
        )
    if isinstance(method, Family):
        raise ValueError(
            f"{method.name!r} has no threshold; online needs one, such as {method.name}:0.5"
        )
    return method


def _methods(
    methods: Sequence[str | Path | StopRule | Family | Callable[..., Any]],
    prices: Sequence[float] | None,
    chooses: bool,
    same: Same,
) -> list[Method]:
    """Policies first, as a user named them, then rules."""
    policies: list[str] = []
    rules: list[Method] = []
    for one in (str(one) if isinstance(one, Path) else one for one in methods):
        if one in ("rules", "learnstop"):
            known = [family for family in FAMILIES.values() if family is not Step]
            rules += [*(known if one == "rules" else ()), LEARN_STOP]
        elif isinstance(one, StopRule):
            rules.append(one)
        elif not isinstance(one, str):
            rules.append(Family.of(one))
        elif is_rule(one) or (":" in one and not Path(one.partition("@")[0]).exists()):
            rules.append(parse_rule(one, same))
        else:
            policies.append(one)
    uses = parse_policies(policies, prices)
    if prices is None and chooses and any(use.config.prices is not None for use in uses):
        uses = parse_policies(policies, ())
    return [*sorted(uses, key=lambda use: not use.is_ours), *rules]
