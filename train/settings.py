"""What a training run is: method, schedule of length penalties, and optimiser.

Annealing starts "moderately high" (paper, section on progressive training). Too high a first lambda
collapses the other way: where lambda times the tokens of thinking outweighs what thinking gains,
stopping at once is optimal, and the policy's stop probabilities saturate there.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from modeling_ospruner.configuration_ospruner import HEADS, TUNINGS, PriceRange
from ospruner.eval.table import TraceTable
from ospruner.eval.text import penalty_name

from .objective import AUXILIARY_TARGETS

__all__ = [
    "GPT_OSS_PENALTIES",
    "POLICY_LAYERS",
    "R1_PENALTIES",
    "SCHEDULES",
    "Baseline",
    "Method",
    "Stage",
    "TrainSettings",
    "automatic_penalties",
    "automatic_range",
]


R1_PENALTIES = (1e-4, 5e-5, 2e-5, 1e-5, 5e-6, 2e-6, 1e-6, 0.0)
"""The paper's lambdas for DeepSeek-R1-Distill-Qwen-7B, in reward a thinking token."""
GPT_OSS_PENALTIES = (2e-4, 1e-4, 5e-5, 2e-5, 1e-5, 0.0)
"""The paper's lambdas for GPT-OSS-20B and DRPO-7B."""
SCHEDULES = {"r1": R1_PENALTIES, "gpt-oss": GPT_OSS_PENALTIES, "drpo": GPT_OSS_PENALTIES}

_MANTISSAS = (1.0, 2.0, 5.0)


def automatic_penalties(table: TraceTable, stages: int = 7) -> tuple[float, ...]:
    """A falling schedule for these labels, ending with 0.

    The first lambda is the highest of the series 1, 2, 5, 10... at which thinking to the best fixed
    step still earns at least half of its gain in accuracy:
    `lambda (E[L_k] - E[L_1]) <= (acc_k - acc_1) / 2` for the step k that maximises accuracy.

    Args:
        table: labelled traces to train on.
        stages: lambdas above 0, each the next lower of the series.

    Raises:
        ValueError: thinking gains nothing on these traces, so that no lambda is low enough.
    """
    if stages < 1:
        raise ValueError(f"stages is {stages}; it must be 1 or more")
    highest = _worth_of_thinking(table) / 2
    exponent = math.floor(math.log10(highest))
    series = [m * 10.0**e for e in range(exponent, exponent - stages, -1) for m in _MANTISSAS[::-1]]
    fitting = [float(f"{value:.0e}") for value in series if value <= highest]
    return (*fitting[:stages], 0.0)


def automatic_range(table: TraceTable) -> tuple[float, float]:
    """Low and high of the prices of a token to train one policy for, on these labels.

    The high end is the next of the series 1, 2, 5, 10... above twice the worth of thinking,
    `(acc_k - acc_1) / (E[L_k] - E[L_1])` with the step k that maximises accuracy: from that worth
    on, no fixed step but the first pays. The low end is a two-hundredth of it, where all thinking
    together costs a few hundredths of what it gains, so that next to everything that helps pays.

    Args:
        table: labelled traces to train on.

    Raises:
        ValueError: thinking gains nothing on these traces.
    """
    worth = 2 * _worth_of_thinking(table)
    exponent = math.floor(math.log10(worth))
    series = [m * 10.0**e for e in (exponent, exponent + 1) for m in _MANTISSAS]
    high = float(f"{next(value for value in series if value >= worth):.0e}")
    return float(f"{high / RANGE_RATIO:.1e}"), high


RANGE_RATIO = 200


def _worth_of_thinking(table: TraceTable) -> float:
    """What a token gains in accuracy, from the first step to the best fixed one.

    Raises:
        ValueError: nothing.
    """
    steps = table.correct.shape[1]
    at = np.minimum(np.arange(steps), table.last[:, None])  # (N, T), a short trace's end
    accuracy = np.take_along_axis(table.correct, at, axis=1).mean(0)  # (T,)
    tokens = np.take_along_axis(table.lengths, at, axis=1).mean(0)
    best = int(accuracy.argmax())
    gain, cost = float(accuracy[best] - accuracy[0]), float(tokens[best] - tokens[0])
    if gain <= 0:
        raise ValueError(
            "no fixed step is more accurate than the first one on these traces: thinking gains "
            "nothing here, so there is no lambda to start from. Check the labels "
            "(ospruner labels stats), or give length_penalties yourself"
        )
    return gain / cost


Baseline = Literal["probe", "convergence", "final-answer"]
Method = Literal["os-pruner", Baseline, "flashthink"]
Precision = Literal["auto", "float32", "bfloat16"]

POLICY_LAYERS: dict[str, int] = {}
"""How many layers of the base these methods copy: one, or none under a linear probe."""

VERIFIER = "Qwen/Qwen2.5-7B-Instruct"
"""FlashThink's verifier in the paper."""


@dataclass(frozen=True)
class Stage:
    """A stretch of a run with one loss, at whose end a policy is saved.

    Attributes:
        name: the policy's folder.
        price: lambda; 0 for the baselines, which have none; None for every price.
        epochs: passes over the training traces.
    """

    name: str
    price: float | None
    epochs: int


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Settings of one run; the optimiser's defaults are the paper's for 7B models.

    Attributes:
        method: "os-pruner" (expected reward), "probe" (is the answer forced here right?),
            "convergence" (does it stay the same to the end?), "final-answer" (is it the one given
            at the end?), or
            "flashthink" (the probe's question to a verifier model of its own).
        verifier: that model, a folder or Hub id; "" for the other methods.
        head: "fixed" for a policy of each lambda (the paper's), or "price" for one policy of every
            lambda, which is told it when generating: one stage, no annealing.
        price_range: low and high of these lambdas, for the head "price"; () for the other.
        prices_per_batch: how many of them a batch is trained on, 0 and one of each of so many
            equal parts of the (logarithmic) range less one; they share the tail's pass.
        length_penalties: lambdas in falling order, one stage each; () for the baselines and for the
            head "price".
        epochs_per_stage: passes over the training traces in each stage.
        first_stage_epochs: passes in the first stage, which begins with an untrained head; None for
            as many as in the others.
        last_stage_epochs: passes in the last stage; None for as many as in the others.
        batch_size: traces an optimiser step.
        micro_batch_tokens: tokens, padding included, that a process takes through the layers at
            once (one trace at least). A larger batch is taken in parts, whose gradients add up.
        max_gradient_norm: an optimiser step's gradient is scaled down to this 2-norm; 0 for never,
            as in the paper.
        learning_rate: AdamW's, of the tail's layers.
        head_learning_rate: that of the linear head; None for the same.
        final_learning_rate_share: share of the learning rates left at each stage's end, to which
            they fall linearly; 1 keeps them constant, as the paper does.
        swa_share: share of each stage's steps, the last ones, whose weights are averaged
            (stochastic weight averaging, arXiv 1803.05407): the mean is saved and trained on.
            0 keeps the last step's weights, as the paper does.
        entropy_bonus: reward for a nat of the stopping time's entropy, which keeps stop
            probabilities from saturating (docs/training.md); 0 is the paper's objective. In
            the reward's unit: 0.01 is a point of accuracy. The baselines have none.
        auxiliary_weight: of auxiliary losses on the tail's states, in reward a nat: linear
            read-outs, which are dropped after training, say how the answers forced so far have
            gone (docs/training.md). 0 is the paper's objective. The baselines have none.
        auxiliary_targets: what they say, of `AUXILIARY_TARGETS`; without a meaning at weight 0.
        trial_every: at every k-th step an answer is forced on trial, when generating as in the
            labels, and the head reads how these answers have gone (docs/training.md); 0 for none.
        betas: AdamW's.
        eps: AdamW's.
        weight_decay: AdamW's.
        num_policy_layers: layers of the base that the policy copies and tunes.
        tuning: what of the copies trains; "head" for the linear head alone, "queries" for copies
            that attend to the base's own keys and values, "lora" for adapters beside the base's own
            layers, of which nothing is copied.
        lora_rank: of these adapters.
        init_bias: the head's first bias; None for -2, which stops at one step in eight, and with
            the head "price" -2.5, at the price 0. Saturated logits have no gradient, so keep it
            mild.
        seed: of the head's first weights and the order of batches.
        checkpoint_every: optimiser steps between checkpoints; 0 for one an epoch.
        validate_every: optimiser steps between the validations that the log keeps for a picture
            of the training's dynamics; 0 for none but those at the stages' ends.
        cache_limit_bytes: the trunk's states are kept in memory up to this size, else computed
            again for every batch, unless a folder keeps them (`LabelledTraces.keep_states`).
        gradient_checkpointing: the tail's layers keep their inputs alone and compute the rest again
            in the backward pass; the last one computes little where it is read at step ends only.
        precision: of the tail's layers; "bfloat16" leaves weights, head and loss in float32. "auto"
            is bfloat16 on CUDA, whose fast attention takes nothing longer, and float32 elsewhere.
        only_last_policy: save the last stage's policy alone, where the stages before it only lead
            there (`targets`).
    """

    method: Method = "os-pruner"
    verifier: str = ""
    head: Literal["fixed", "price"] = "fixed"
    price_range: Sequence[float] = ()
    prices_per_batch: int = 16
    length_penalties: Sequence[float] = ()
    epochs_per_stage: int = 1
    first_stage_epochs: int | None = None
    last_stage_epochs: int | None = None
    batch_size: int = 32
    micro_batch_tokens: int = 16_384
    max_gradient_norm: float = 0.0
    learning_rate: float = 1e-5
    head_learning_rate: float | None = None
    final_learning_rate_share: float = 1.0
    swa_share: float = 0.0
    entropy_bonus: float = 0.0
    auxiliary_weight: float = 0.0
    auxiliary_targets: Sequence[str] = AUXILIARY_TARGETS
    trial_every: int = 0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    num_policy_layers: int = 2
    tuning: Literal["layers", "queries", "attention", "lora", "head"] = "queries"
    lora_rank: int = 16
    init_bias: float | None = None
    seed: int = 0
    checkpoint_every: int = 0
    validate_every: int = 0
    cache_limit_bytes: int = 2**31
    gradient_checkpointing: bool = False
    precision: Precision = "auto"
    only_last_policy: bool = False

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            raise ValueError(f"method is {self.method!r}; it must be one of {get_args(Method)}")
        if self.tuning not in TUNINGS:
            raise ValueError(f"tuning is {self.tuning!r}; it must be one of {', '.join(TUNINGS)}")
        own = POLICY_LAYERS.get(self.method, self.num_policy_layers)
        if self.num_policy_layers != own:
            raise ValueError(
                f"num_policy_layers is {self.num_policy_layers}, but method {self.method!r} has "
                f"{own}: give {own} (TrainSettings.baseline and `ospruner train` do)"
            )
        if self.method == "flashthink" and not self.verifier:
            object.__setattr__(self, "verifier", VERIFIER)
        if self.method != "flashthink" and self.verifier:
            raise ValueError(f"verifier is {self.verifier!r}, but only 'flashthink' has one")
        object.__setattr__(self, "length_penalties", tuple(map(float, self.length_penalties)))
        object.__setattr__(self, "betas", tuple(self.betas))
        object.__setattr__(self, "auxiliary_targets", tuple(self.auxiliary_targets))
        object.__setattr__(self, "price_range", tuple(map(float, self.price_range)))
        if self.head not in HEADS:
            raise ValueError(f"head is {self.head!r}; it must be one of {', '.join(HEADS)}")
        if self.head == "price":
            self._check_prices()
        else:
            if self.price_range:
                raise ValueError(
                    f"price_range is {list(self.price_range)}, but head is 'fixed', which is "
                    "trained for length_penalties: leave it out, or use head='price'"
                )
            _check_penalties(self.method, self.length_penalties)
        for name, least in (
            ("epochs_per_stage", 1),
            ("first_stage_epochs", 1),
            ("last_stage_epochs", 1),
            ("batch_size", 1),
            ("micro_batch_tokens", 1),
            ("num_policy_layers", 0),
            ("lora_rank", 1),
            ("prices_per_batch", 2),
            ("seed", 0),
            ("trial_every", 0),
            ("checkpoint_every", 0),
            ("validate_every", 0),
            ("cache_limit_bytes", 0),
        ):
            value = vars(self)[name]
            if name in ("first_stage_epochs", "last_stage_epochs") and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} is {value!r}; it must be an integer")
            if value < least:
                raise ValueError(f"{name} is {value}; it must be at least {least}")
        for name in ("learning_rate", "head_learning_rate", "eps"):
            value = vars(self)[name]
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value!r}; it must be finite and > 0")
        if self.precision not in get_args(Precision):
            raise ValueError(
                f"precision is {self.precision!r}; it must be auto, float32 or bfloat16"
            )
        for name in ("final_learning_rate_share", "swa_share"):
            if not 0 <= vars(self)[name] <= 1:
                raise ValueError(f"{name} is {vars(self)[name]!r}; it must lie in [0, 1]")
        for name in ("weight_decay", "entropy_bonus", "auxiliary_weight", "max_gradient_norm"):
            if not (math.isfinite(vars(self)[name]) and vars(self)[name] >= 0):
                raise ValueError(f"{name} is {vars(self)[name]!r}; it must be finite and >= 0")
        if self.entropy_bonus and self.method != "os-pruner":
            raise ValueError(
                f"entropy_bonus is {self.entropy_bonus:g}, but method {self.method!r} is a "
                "classifier and has none: leave it out (TrainSettings.baseline does)"
            )

        self._check_auxiliary()
        if self.trial_every and (self.method != "os-pruner" or self.auxiliary_weight):
            other = (
                f"method {self.method!r} reads no trial answers"
                if self.method != "os-pruner"
                else "auxiliary_weight teaches the tail what trial answers say already"
            )
            raise ValueError(
                f"trial_every is {self.trial_every}, but {other}: leave one of them out"
            )

    def _check_auxiliary(self) -> None:
        given = self.auxiliary_targets
        if not given or len(set(given)) < len(given) or not set(given) <= set(AUXILIARY_TARGETS):
            raise ValueError(
                f"auxiliary_targets is {list(given)}; it must hold some of "
                f"{', '.join(AUXILIARY_TARGETS)}, each once"
            )
        if self.auxiliary_weight and (self.method != "os-pruner" or self.tuning == "head"):
            owner = f"method {self.method!r}" if self.method != "os-pruner" else "tuning 'head'"
            raise ValueError(
                f"auxiliary_weight is {self.auxiliary_weight:g}, but {owner} has no tail that "
                "learns OS-Pruner's objective, which auxiliary losses could help: leave it out"
            )

    def _check_prices(self) -> None:
        """Refuses what does not go with the head "price"."""
        unfit = {
            f"method is {self.method!r}, a classifier without a length penalty": (
                self.method != "os-pruner"
            ),
            f"length_penalties is {list(self.length_penalties)}, a schedule to anneal": (
                bool(self.length_penalties)
            ),
            f"first_stage_epochs is {self.first_stage_epochs}": self.first_stage_epochs is not None,
            f"last_stage_epochs is {self.last_stage_epochs}": self.last_stage_epochs is not None,
            "only_last_policy is True": self.only_last_policy,
        }
        if given := [what for what, is_given in unfit.items() if is_given]:
            raise ValueError(
                f"{' and '.join(given)}, but head 'price' is one policy of every lambda, trained "
                "in one stage on price_range: leave it out, or use head='fixed'"
            )
        if len(self.price_range) != 2:
            raise ValueError(
                f"price_range is {list(self.price_range)}; head 'price' needs the lowest and the "
                "highest lambda, such as (5e-5, 1e-2)"
            )
        PriceRange(*self.price_range)

    def prices_of_batch(self, step: int) -> tuple[float, ...]:
        """The lambdas that an optimiser step is taken on, a function of seed and step alone.

        0, and one of each part of the range, drawn from it log-uniformly.

        Args:
            step: the number of the run's step, from 0.
        """
        low, high = self.price_range
        parts = self.prices_per_batch - 1
        shares = (np.arange(parts) + np.random.default_rng([self.seed, step]).random(parts)) / parts
        return (0.0, *(float(low * (high / low) ** share) for share in shares))

    @property
    def stages(self) -> list[Stage]:
        """What the run goes through; a baseline and the head "price" have one stage."""
        if self.head == "price":
            return [Stage("price", None, self.epochs_per_stage)]
        names: list[tuple[str, float]] = [
            (f"lam{penalty_name(penalty)}", penalty) for penalty in self.length_penalties
        ]
        if self.method != "os-pruner":
            names = [(self.method, 0.0)]
        epochs = [self.epochs_per_stage] * len(names)
        epochs[0] = self.first_stage_epochs or epochs[0]
        epochs[-1] = self.last_stage_epochs or epochs[-1]
        return [Stage(name, penalty, n) for (name, penalty), n in zip(names, epochs, strict=True)]

    @property
    def total_epochs(self) -> int:
        """Epochs over all stages."""
        return sum(stage.epochs for stage in self.stages)

    def baseline(self, method: Baseline) -> TrainSettings:
        """The same run for a baseline: same optimiser, as many epochs in all.

        Also the same architecture, but for methods with one of their own (`POLICY_LAYERS`).
        """
        return dataclasses.replace(
            self,
            method=method,
            head="fixed",
            price_range=(),
            length_penalties=(),
            entropy_bonus=0.0,
            auxiliary_weight=0.0,
            trial_every=0,
            epochs_per_stage=self.total_epochs,
            first_stage_epochs=None,
            last_stage_epochs=None,
            num_policy_layers=POLICY_LAYERS.get(method, self.num_policy_layers),
        )

    def targets(self) -> dict[str, TrainSettings]:
        """Each lambda, probe and convergence as a target of its own, for `train_together`.

        A lambda's target owns the whole descending schedule that ends at it, and spends there the
        epochs that the lower lambdas would have taken: all targets have as many.

        Raises:
            ValueError: the method is a baseline, which is one target already.
        """
        if self.method != "os-pruner" or self.head != "fixed":
            what = f"method is {self.method!r}" if self.head == "fixed" else "head is 'price'"
            raise ValueError(
                f"{what}, one target by itself: several (--multi) are made of 'os-pruner' with the "
                "head 'fixed'"
            )
        found = {}
        for k, penalty in enumerate(self.length_penalties):
            left = sum(stage.epochs for stage in self.stages[k:])
            found[f"lam{penalty_name(penalty)}"] = dataclasses.replace(
                self,
                length_penalties=self.length_penalties[: k + 1],
                last_stage_epochs=left,
                only_last_policy=True,
            )
        return found | {
            "probe": self.baseline("probe"),
            "convergence": self.baseline("convergence"),
        }

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON-ready values."""
        values = dataclasses.asdict(self)
        return values | {
            "length_penalties": list(self.length_penalties),
            "price_range": list(self.price_range),
            "betas": list(self.betas),
            "auxiliary_targets": list(self.auxiliary_targets),
        }


def _check_penalties(method: str, penalties: Sequence[float]) -> None:
    if method != "os-pruner":
        if penalties:
            raise ValueError(
                f"length_penalties is {list(penalties)}, but method {method!r} has no length "
                "penalty: leave it empty (TrainSettings.baseline does)"
            )
        return
    if not penalties:
        raise ValueError(
            "length_penalties is empty: give at least one lambda, such as (3e-3, 1e-3, 3e-4)"
        )
    if bad := [p for p in penalties if not (math.isfinite(p) and p >= 0)]:
        raise ValueError(f"length_penalties holds {bad}; each lambda must be finite and >= 0")
    if any(b >= a for a, b in itertools.pairwise(penalties)):
        raise ValueError(
            f"length_penalties is {list(penalties)}; it must fall strictly: training anneals from "
            "a high lambda to low ones (a low one from scratch collapses to 'never stop')"
        )
    names = [penalty_name(p) for p in penalties]
    if len(set(names)) < len(names):
        raise ValueError(f"length_penalties holds lambdas too close to tell apart: {names}")
