"""What a training run is: transformers' `TrainingArguments` and a few fields of our own.

What is left out follows from the labels and the base by one rule, `StopConfig.settled`.
"""

from __future__ import annotations

import copy
import math
import warnings
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

import torch
from transformers import TrainingArguments

from ospruner.eval.methods import METHOD_NAMES
from ospruner.eval.results import price_name
from ospruner.eval.table import TraceTable

from .prices import chosen_prices

VERIFIER = "Qwen/Qwen2.5-7B-Instruct"
"""FlashThink's verifier in the paper."""

STEPS = 300
"""Optimiser steps that a policy, or each price of a schedule, takes at the least."""
MOST_PASSES = 40
WIDTH, RATE = 128, 5e-4
"""The learning rate that suits a base of this width; wider ones take it in proportion less."""
LOGIT_STEP, LARGEST_LOGIT_STEP = 0.4, 0.5
"""What one step of the head may add to a stop logit by the rule, and at the most: above, the head
saturates before the layers learn."""

_CHOICES = {"method": METHOD_NAMES, "head": ("price", "fixed"), "tuning": ("queries", "layers")}
_LEAST = {
    0: ("layers", "adapter_rank", "seed"),
    1: ("batch_size", "limit", "micro_batch_tokens", "held_out", "num_train_epochs"),
    2: ("prices_per_batch",),
}
_THEIRS = {
    *("learning_rate", "num_train_epochs", "lr_scheduler_type", "warmup_steps", "weight_decay"),
    *("adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "bf16", "seed"),
}
"""Fields of `TrainingArguments` that a run cannot be continued with others of."""


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
        method: os-pruner (expected reward), or a baseline: probe (is the answer forced here
            right?), convergence (does it stay the same to the end?), final-answer (is it the one
            given at the end?), flashthink (the probe's question to a verifier model).
        head: price trains one policy for all prices of a token, and you say the price when you
            use it; fixed trains a policy for each price, from high to low (the paper's).
        prices: prices of a token. With head price the lowest and the highest, with fixed a falling
            list; auto takes them from the labels; r1, gpt-oss and drpo are the paper's lists.
        prices_per_batch: how many prices each optimiser step trains on, with head price.
        layers: how many of the base's last layers the policy copies and tunes; 0 for a head alone.
        tuning: queries tunes copies that attend to the base's own keys and values; layers tunes
            whole copies (the paper's).
        adapter_rank: rank of low-rank adapters beside the copies, which alone are trained and
            saved; 0 for none.
        entropy_bonus: reward for a nat of the stopping time's entropy, which keeps stop
            probabilities from saturating; None for 0.01 with head price, else 0 (the paper's).
        head_learning_rate: rate of the linear head; left out, by docs/training.md's rule, or the
            `learning_rate` if you give one.
        average: share of each price's steps, the last ones, whose weights are averaged (arXiv
            1803.05407): the mean is saved and trained on. 0 keeps the last step's (the paper's).
        batch_size: traces in an optimiser step, of all processes together.
        micro_batch_tokens: tokens, padding included, that a process takes through the layers at
            once (one trace at least). The parts' gradients add up to the batch's.
        base: the base, if it is no longer where the labels say.
        verifier: FlashThink's model, a folder or Hub id of any causal LM.
        held_out: how many problems to hold out of each label set where no others are given; None
            for 500, or a fifth of few.
        limit: take only the first N traces of each label set.
        max_ungraded: labels with a greater share of forced answers that the grader could not read
            are refused; an answer that never closed is not the grader's fault.
        states: folder that keeps what the base computed of the traces, for the next command on
            these labels; left out, memory keeps it, if it fits.
        states_gib: how much memory keeps at most; what is larger is computed for each batch.
        learning_rate: rate of the tuned layers; left out, it follows from the base's width.
        num_train_epochs: passes over the traces; left out, it follows from their number.
        bf16: whether layers compute in bfloat16; None for on CUDA. It is faster on a CPU with units
            for it, too (avx512_bf16 or amx_bf16 in /proc/cpuinfo).
        seed: seed of weights, batches and held-out problems.
    """

    method: str = "os-pruner"
    head: str = "price"
    prices: str | list[float] = "auto"
    prices_per_batch: int = 16
    layers: int = 2
    tuning: str = "queries"
    adapter_rank: int = 0
    entropy_bonus: float | None = None
    head_learning_rate: float | None = None
    average: float = 0.75
    batch_size: int = 32
    micro_batch_tokens: int = 16_384
    base: str | None = None
    verifier: str = VERIFIER
    held_out: int | None = None
    limit: int | None = None
    max_ungraded: float = 0.1
    states: str | None = None
    states_gib: float = 2.0

    # Of TrainingArguments, with other defaults.
    learning_rate: float | None = None  # type: ignore[assignment]
    num_train_epochs: float | None = None  # type: ignore[assignment]
    lr_scheduler_type: str = "constant"
    weight_decay: float = 0.01
    max_grad_norm: float = 0.0  # never
    bf16: bool | None = None  # type: ignore[assignment]
    save_strategy: str = "epoch"
    save_total_limit: int | None = 1
    logging_strategy: str = "epoch"
    report_to: str | list[str] | None = "none"
    seed: int = 0
    ddp_find_unused_parameters: bool | None = False  # every parameter is used

    def __post_init__(self) -> None:
        if self.bf16 is None:
            self.bf16 = torch.cuda.is_available() and not self.use_cpu
        if self.bf16 and not torch.accelerator.is_available():
            self.use_cpu = True  # transformers wants to be told
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
        """Refuses a field of our own, by its name, its value and what is allowed."""

        def refuse(name: str, allowed: str, kind: type[Exception] = ValueError) -> None:
            raise kind(f"{name} is {vars(self)[name]!r}; it must {allowed}")

        for name, among in _CHOICES.items():
            if vars(self)[name] not in among:
                refuse(name, f"be one of {', '.join(among)}")
        values = {key: value for key, value in vars(self).items() if value is not None}
        for least, names in _LEAST.items():
            for name in values.keys() & names:
                if isinstance(values[name], bool) or values[name] != int(values[name]):
                    refuse(name, "be an integer", TypeError)
                if values[name] < least:
                    refuse(name, f"be at least {least}")
        for name in values.keys() & {"learning_rate", "head_learning_rate"}:
            if not 0 < values[name] < math.inf:
                refuse(name, "be finite and > 0")
        for name in ("average", "max_ungraded"):
            if not 0 <= values[name] <= 1:
                refuse(name, "lie in [0, 1]")
        for name in ("entropy_bonus", "states_gib"):
            if not 0 <= values[name] < math.inf:
                refuse(name, "be finite and >= 0")
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
    def stages(self) -> dict[str, float]:
        """Stretches of a settled run, at whose ends a policy is saved: its folder in the run's.

        Each with the price of a token, 0 where there is none (a baseline, or every price); a single
        one has the run's own folder, "".
        """
        prices = [0.0] if self.every_price or isinstance(self.prices, str) else self.prices
        if len(prices) == 1:
            return {"": prices[0]}
        return {f"price{price_name(price)}": price for price in prices}

    def settled(self, table: TraceTable, traces: int, magnitude: float, width: int) -> StopConfig:
        """A copy in which nothing is left to a rule.

        Passes: as many as `STEPS` steps take, 2 at the least and `MOST_PASSES` at the most; so
        200 traces are gone through 40 times and 40,000 twice. Rates: AdamW's first steps move each
        weight by the rate, whatever the gradient's size. So the layers' falls with the base's
        width, and the head's lets one step move a stop logit by `LOGIT_STEP` at the most, the rate
        times the sum of the magnitudes that the head reads; where a given one is too high for that,
        a warning says so.

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
        rate = found.head_learning_rate or 0.0
        if (step := rate * magnitude) > LARGEST_LOGIT_STEP:
            warnings.warn(
                f"one optimiser step may move a stop logit by {step:.2g}: head_learning_rate "
                f"({rate:g}) times the sum of its inputs' magnitudes ({magnitude:.0f}). Above "
                f"{LARGEST_LOGIT_STEP:g} the head saturates before the layers learn: take "
                f"{0.1 / magnitude:.0e}",
                stacklevel=3,
            )
        return found

    def recorded(self) -> dict[str, Any]:
        """What is trained, JSON values: the fields that a run cannot be continued with others of.

        (Where things lie, and how much is computed at once, is not among them.)
        """
        theirs = {entry.name for entry in fields(TrainingArguments)}
        names = {entry.name for entry in fields(StopConfig)} - theirs | _THEIRS
        names -= {"base", "states", "states_gib", "micro_batch_tokens"}
        if self.method != "flashthink":
            names.remove("verifier")
        return {
            name: value.value if isinstance(value, Enum) else value
            for name in sorted(names)
            if (value := vars(self)[name]) is not None
        }
