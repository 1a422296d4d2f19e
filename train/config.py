# ruff: noqa: RUF009  (`_help` gives a dataclass field)
"""What a training run is: transformers' `TrainingArguments` and a few fields of our own.

What is left out follows from the labels and the base by one rule, `StopConfig.settled`.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

import torch
from transformers import TrainingArguments

from ospruner.eval.table import TraceTable
from ospruner.eval.text import penalty_name

from .prices import chosen_prices

__all__ = ["METHODS", "TUNINGS", "Stage", "StopConfig"]

METHODS = ("os-pruner", "probe", "convergence", "final-answer", "flashthink")
TUNINGS = ("queries", "layers")
HEADS = ("price", "fixed")
VERIFIER = "Qwen/Qwen2.5-7B-Instruct"
"""FlashThink's verifier in the paper."""

STEPS = 300
"""Optimiser steps that a policy, or each price of a schedule, takes at the least."""
MOST_PASSES = 40
WIDTH, RATE = 128, 5e-4
"""The learning rate that suits a base of this width; wider ones take it in proportion less."""
LOGIT_STEP = 0.4
"""What one step of the head may add to a stop logit by the rule; above `LARGEST_LOGIT_STEP` the
head saturates before the layers learn."""


@dataclass(frozen=True)
class Stage:
    """A stretch of a run with one loss, at whose end a policy is saved.

    Attributes:
        name: the policy's folder in the run's; "" for the run's own, where there is one stage.
        price: lambda; 0 for the baselines, which have none; None for every price.
    """

    name: str
    price: float | None


def _help(text: str, default: Any) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class StopConfig(TrainingArguments):
    """A training run of a stopping policy: a transformers `TrainingArguments`.

    ```python
    trainer = ospruner.StopTrainer(ospruner.StopConfig("policy"), labels)
    trainer.train()
    ```

    Fields of `TrainingArguments` mean what they mean there, with these differences: an optimiser
    step takes `batch_size` traces, of all processes together, in parts of `micro_batch_tokens`
    (so `per_device_train_batch_size` and `gradient_accumulation_steps` are not used), and
    `num_train_epochs` counts the passes for each price of a schedule. Defaults are the paper's
    where its authors name them: a constant rate, no clipping, AdamW's.

    Attributes:
        method: "os-pruner" (expected reward), or a baseline: "probe" (is the answer forced here
            right?), "convergence" (does it stay the same to the end?), "final-answer" (is it the
            one given at the end?), "flashthink" (the probe's question to a verifier model).
        head: "price" for one policy of every price, which is told it when generating, or "fixed"
            for a policy of each price (the paper's), annealed from high to low.
        prices: of a token. With head "price" the lowest and the highest, with "fixed" a falling
            schedule; "auto" takes either from the labels, and "r1", "gpt-oss", "drpo" are the
            paper's schedules.
        prices_per_batch: how many prices a step is taken on, with head "price"; they share the
            tail's pass.
        layers: of the base that the policy copies and tunes; 0 for a head alone.
        tuning: "queries" for copies that attend to the base's own keys and values, "layers" for
            whole ones (the paper's).
        adapter_rank: of low-rank adapters beside the copies, which alone are trained and saved; 0
            for none.
        entropy_bonus: reward for a nat of the stopping time's entropy, which keeps stop
            probabilities from saturating; None for 0.01 with head "price", else 0 (the paper's).
        head_learning_rate: of the linear head; None for the rule's, or with a `learning_rate` for
            the same.
        average: share of each price's steps, the last ones, whose weights are averaged (arXiv
            1803.05407): the mean is saved and trained on. 0 keeps the last step's (the paper's).
        batch_size: traces an optimiser step; the result does not depend on the processes.
        micro_batch_tokens: tokens, padding included, that a process takes through the layers at
            once (one trace at least). The parts' gradients add up to the batch's.
        base: the model, where it now lies elsewhere than when it was labelled.
        verifier: FlashThink's model, a folder or Hub id.
        held_out: how many problems to hold out of each label set where no others are given; None
            for 500, or a fifth of few.
        limit: only the first so many traces of each label set.
        max_ungraded: labels with a greater share of forced answers that the grader could not read
            are refused; an answer that never closed is not the grader's fault.
        states: a folder in which what tails read of the traces is kept for the next command on
            these labels; None keeps it in memory, if it fits.
        states_gib: what is kept in memory at the most; if larger, it is computed for each batch.
    """

    method: str = _help("What is trained: os-pruner, or a baseline.", "os-pruner")
    head: str = _help("price: one policy for every price; fixed: one for each.", "price")
    prices: str | list[float] = _help(
        "auto; LOW,HIGH for head price; r1, gpt-oss, drpo or falling numbers for head fixed.",
        "auto",
    )
    prices_per_batch: int = _help("Prices that a step is taken on.", 16)
    layers: int = _help("Layers of the base that the policy copies; 0: a head alone.", 2)
    tuning: str = _help("queries or layers.", "queries")
    adapter_rank: int = _help("Rank of adapters that are trained instead; 0: none.", 0)
    entropy_bonus: float | None = _help("Reward per nat of the stopping time's entropy.", None)
    head_learning_rate: float | None = _help("Learning rate of the linear head.", None)
    average: float = _help("Share of the steps, the last, whose weights are averaged.", 0.75)
    batch_size: int = _help("Traces in each optimiser step.", 32)
    micro_batch_tokens: int = _help("Tokens at once; a larger batch is taken in parts.", 16_384)
    base: str | None = _help("The base, if it is no longer where the labels say.", None)
    verifier: str = _help("FlashThink's model, any causal LM.", VERIFIER)
    held_out: int | None = _help("Problems held out: 500, or a fifth of few.", None)
    limit: int | None = _help("Only the first N traces.", None)
    max_ungraded: float = _help("Share of answers that nobody could grade.", 0.1)
    states: str | None = _help("Folder in which the base's states are kept.", None)
    states_gib: float = _help("Memory for them where there is no folder, in GiB.", 2.0)

    # Of TrainingArguments, with other defaults.
    learning_rate: float | None = _help("Of the tuned layers; by the base's width.", None)  # type: ignore[assignment]
    num_train_epochs: float | None = _help("Passes over the traces; by their number.", None)  # type: ignore[assignment]
    lr_scheduler_type: str = _help("Constant, as in the paper.", "constant")
    weight_decay: float = _help("AdamW's.", 0.01)
    max_grad_norm: float = _help("Clip gradients to this 2-norm; 0: never.", 0.0)
    bf16: bool | None = _help("Layers compute in bfloat16; by default on CUDA.", None)  # type: ignore[assignment]
    save_strategy: str = _help("When checkpoints are saved.", "epoch")
    save_total_limit: int | None = _help("How many checkpoints stay.", 1)
    logging_strategy: str = _help("When the loss is logged.", "epoch")
    report_to: str | list[str] | None = _help("Trackers: tensorboard, wandb, trackio.", "none")
    seed: int = _help("Of weights, batches and held-out problems.", 0)
    ddp_find_unused_parameters: bool | None = _help("Every parameter is used.", False)

    def __post_init__(self) -> None:
        if self.bf16 is None:
            self.bf16 = torch.cuda.is_available() and not self.use_cpu
        if self.method != "os-pruner":
            self.head = "fixed"
        if self.entropy_bonus is None:
            self.entropy_bonus = 0.01 if self.head == "price" else 0.0
        self._check()
        self.per_device_train_batch_size = self.batch_size  # what transformers logs
        super().__post_init__()
        # One process computes on one device: several are for `accelerate launch`.
        self._n_gpu = min(self._n_gpu, 1)

    def _check(self) -> None:
        """Checks every field of our own by itself.

        Raises:
            TypeError, ValueError: naming the field, its value and what is allowed.
        """
        choices = {"method": METHODS, "head": HEADS, "tuning": TUNINGS}
        for name, allowed in choices.items():
            if vars(self)[name] not in allowed:
                raise ValueError(
                    f"{name} is {vars(self)[name]!r}; it must be one of {', '.join(allowed)}"
                )
        least = {
            "layers": 0, "adapter_rank": 0, "prices_per_batch": 2, "batch_size": 1,
            "micro_batch_tokens": 1, "seed": 0, "limit": 1, "held_out": 1, "num_train_epochs": 1,
        }  # fmt: skip
        for name, bound in least.items():
            value = vars(self)[name]
            if value is None and name in ("limit", "held_out", "num_train_epochs"):
                continue
            if isinstance(value, bool) or value != int(value):
                raise TypeError(f"{name} is {value!r}; it must be an integer")
            if value < bound:
                raise ValueError(f"{name} is {value}; it must be at least {bound}")
        for name in ("learning_rate", "head_learning_rate"):
            value = vars(self)[name]
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value!r}; it must be finite and > 0")
        for name in ("average", "max_ungraded"):
            if not 0 <= vars(self)[name] <= 1:
                raise ValueError(f"{name} is {vars(self)[name]!r}; it must lie in [0, 1]")
        for name in ("entropy_bonus", "states_gib"):
            if not (math.isfinite(vars(self)[name]) and vars(self)[name] >= 0):
                raise ValueError(f"{name} is {vars(self)[name]!r}; it must be finite and >= 0")
        if self.method != "os-pruner" and (self.entropy_bonus or self.prices != "auto"):
            given = "entropy_bonus" if self.entropy_bonus else "prices"
            raise ValueError(
                f"{given} is {vars(self)[given]!r}, but method {self.method!r} is a classifier, "
                "which has none: leave it out"
            )
        if self.method != "flashthink" and self.verifier != VERIFIER:
            raise ValueError(f"verifier is {self.verifier!r}, but only 'flashthink' has one")
        if self.max_steps > 0 or self.gradient_accumulation_steps != 1:
            raise ValueError(
                f"max_steps is {self.max_steps} and gradient_accumulation_steps "
                f"{self.gradient_accumulation_steps}; a run is counted in passes "
                "(num_train_epochs), and a batch is taken in parts by micro_batch_tokens: leave "
                "both out"
            )

    @property
    def every_price(self) -> bool:
        """Whether one policy is trained for all prices."""
        return self.head == "price"

    @property
    def stages(self) -> list[Stage]:
        """What a settled run goes through; a baseline and the head "price" have one stage."""
        if self.method != "os-pruner":
            return [Stage("", 0.0)]
        if self.every_price:
            return [Stage("", None)]
        assert not isinstance(self.prices, str)
        if len(self.prices) == 1:
            return [Stage("", self.prices[0])]
        return [Stage(f"lam{penalty_name(price)}", price) for price in self.prices]

    def settled(self, table: TraceTable, traces: int, magnitude: float, width: int) -> StopConfig:
        """A copy in which nothing is left to a rule.

        Passes: as many as `STEPS` steps take, 2 at the least and `MOST_PASSES` at the most; so
        200 traces are gone through 40 times and 40,000 twice. Rates: the layers' falls with the
        base's width, as AdamW moves each weight by the rate whatever the gradient's size; the
        head's lets one step move a stop logit by `LOGIT_STEP` at the most, the rate times the sum
        of the magnitudes that the head reads.

        Args:
            table: the traces to train on.
            traces: how many of them are.
            magnitude: median sum of the magnitudes that the fresh head reads.
            width: of the base's hidden states.
        """
        found = copy.copy(self)
        if self.method == "os-pruner":
            found.prices = list(chosen_prices(self.prices, self.every_price, table))
        if self.num_train_epochs is None:
            batches = -(-traces // self.batch_size)
            found.num_train_epochs = float(min(max(2, -(-STEPS // batches)), MOST_PASSES))
        if self.head_learning_rate is None:
            by_rule = float(f"{LOGIT_STEP / magnitude:.1e}")
            found.head_learning_rate = self.learning_rate or by_rule
        if self.learning_rate is None:
            found.learning_rate = float(f"{RATE * WIDTH / width:.1e}")
        return found

    def recorded(self) -> dict[str, Any]:
        """What is trained, JSON values: the fields that a run cannot be continued with others of.

        (Where things lie, and how much is computed at once, is not among them.)
        """
        ours = {entry.name for entry in fields(StopConfig)}
        ours -= {entry.name for entry in fields(TrainingArguments)}
        ours -= {"base", "states", "states_gib", "micro_batch_tokens"}
        theirs = (
            "learning_rate", "num_train_epochs", "lr_scheduler_type", "warmup_steps",
            "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "bf16",
            "seed",
        )  # fmt: skip
        values = {name: vars(self)[name] for name in (*sorted(ours), *theirs)}
        if self.method != "flashthink":
            del values["verifier"]
        return {
            name: value.value if isinstance(value, Enum) else value
            for name, value in values.items()
            if value is not None
        }
