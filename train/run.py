"""One training run: a policy, its optimiser, and how far it is through its stages."""

from __future__ import annotations

import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim.swa_utils import get_swa_multi_avg_fn

from modeling_ospruner.configuration_ospruner import price_logits
from ospruner.eval.replay import Outcome, replay, replay_full
from ospruner.eval.selection import choose
from ospruner.eval.table import IntArray, TraceTable
from ospruner.progress import Progress
from ospruner.provenance import file_hash

from .fresh import (
    Predicted,
    StageResult,
    Trainable,
    batch_loss,
    loss_weight,
    predict_with,
    save_policy_folder,
    warning_about,
)
from .objective import AUXILIARY_TARGETS, auxiliary_loss
from .processes import Processes, load_whole, split_as, whole
from .run_folder import RunFolder, labels_hash
from .settings import Stage, TrainSettings
from .tail import TrainedPolicy, computes_in_bfloat16
from .traces import Batch, LabelledTraces, States
from .trunk.batches import epoch_batches, micro_batches

__all__ = ["Run", "TrainingDivergedError", "new_optimizer"]


SATURATED = 0.05
"""A stop probability outside [.05, .95] counts as saturated: little gradient gets through it."""


LARGEST_LOGIT_STEP = 0.5
"""What one optimiser step may add to a stop logit at the most; the head's rate is high above it."""


LARGEST = math.sqrt(torch.finfo(torch.float32).max)
"""Of gradients and weights: AdamW squares the former, and larger squares are infinite."""


class TrainingDivergedError(FloatingPointError):
    """The loss, a gradient or a weight is no longer a finite number."""


@dataclass
class Tally:
    """Sums over an epoch's batches, for the log."""

    traces: int = 0
    loss: float = 0.0
    choices: int = 0
    logit: float = 0.0
    saturated: int = 0

    def add(self, traces: int, loss: float, choices: int, logit: float, saturated: int) -> None:
        """Takes one batch: its traces, its mean loss, and what `choices_of` counted."""
        self.traces += traces
        self.loss += loss * traces
        self.choices += choices
        self.logit += logit
        self.saturated += saturated

    def entry(self) -> dict[str, float]:
        """Means over the epoch."""
        return {
            "loss": self.loss / self.traces,
            "mean_stop_logit": self.logit / max(self.choices, 1),
            "saturated_share": self.saturated / max(self.choices, 1),
        }


PartStates = Callable[[int], States]
"""The trunk's states (B, S, H) of a batch's parts, by their numbers."""


@dataclass(frozen=True)
class Part:
    """What this process did with its share of a batch's part.

    Attributes:
        number: of the part.
        rows: (B,) this process's traces.
        batch: their labels.
        logits: (B, T) stop logits, or (J, B, T) at each of J lambdas.
        loss: what they count in the whole batch's loss, a scalar.
        counts: whether the share is no stand-in.
    """

    number: int
    rows: IntArray
    batch: Batch
    logits: Tensor
    loss: Tensor
    counts: bool

    def sums(self) -> npt.NDArray[np.float64]:
        """The loss, and what `choices_of` counts."""
        seen = choices_of(self.logits.cpu(), self.batch.mask)
        return np.array([self.loss.item(), *(self.counts * n for n in seen)])


def choices_of(logits: Tensor, mask: Tensor) -> tuple[int, float, int]:
    """How many choices there are, the sum of their logits, and how many are saturated.

    The last step of a trace is no choice.
    """
    x = logits[..., :-1][mask[:, 1:].expand(*logits.shape[:-1], -1)]
    pi = torch.sigmoid(x)
    return x.numel(), float(x.sum()), int(((pi < SATURATED) | (pi > 1 - SATURATED)).sum())


class Run:
    """One run: what is trained, and how far it is."""

    def __init__(
        self,
        model: Trainable,
        traces: LabelledTraces,
        rows: IntArray,
        validation: LabelledTraces,
        settings: TrainSettings,
        folder: RunFolder,
        progress: Progress,
        processes: Processes,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.processes = processes
        self.traces = traces
        self.rows = rows
        self.validation = validation
        self.settings = settings
        self.folder = folder
        self.progress = progress
        self.facts = {"labels": labels_hash(traces.table), "training_traces": len(rows)}
        self.facts |= facts or {}
        trainable = [p.numel() for p in model.policy.parameters() if p.requires_grad]
        self.trainable_parameters = sum(trainable)
        trained = TrainedPolicy(model.policy, settings, processes)
        self.auxiliary = trained.auxiliary
        self.trained = processes.place_tail(trained, trained.layers)
        self.optimizer = new_optimizer(model, settings, self.auxiliary)
        self.results: list[StageResult] = []
        self.stage = 0
        self.epoch = 0  # of the stage
        self.batch = 0  # of the epoch
        self.steps = 0  # of the run
        self.tally = Tally()

    def states_of(self, shares: Sequence[IntArray]) -> PartStates:
        """Computes the trunk's states of a batch's parts, each when it is asked for."""
        return lambda number: self.traces.states(self.model, shares[number])

    def work(self) -> Generator[list[IntArray], PartStates, None]:
        """Trains what is left of the run.

        Yields this process's traces of each of a batch's parts, and wants the trunk's states.
        """
        self._restore()
        stages = self.settings.stages
        if self.stage < len(stages):
            limit = self.settings.cache_limit_bytes
            held = 0
            for traces in (self.traces, self.validation):
                held += traces.cache_states(self.model, limit - held, self.progress, self.processes)
            if all(one.holds_states_of(self.model) for one in (self.traces, self.validation)):
                self.processes.release(self.model.base, [self.model.policy])
            if self.steps == 0:
                self.folder.log(self._header(held))
        for stage in stages[self.stage :]:
            while self.epoch < stage.epochs:
                yield from self._run_epoch(stage)
            self._finish_stage(stage)

    def _run_epoch(self, stage: Stage) -> Generator[list[IntArray], PartStates, None]:
        started = time.monotonic()
        number = sum(s.epochs for s in self.settings.stages[: self.stage]) + self.epoch
        batches = epoch_batches(
            self.traces.token_lengths,
            self.rows,
            self.settings.batch_size,
            self.settings.seed,
            number,
        )
        total = self.settings.total_epochs * len(batches)
        while self.batch < len(batches):
            self._set_learning_rates(stage, self.epoch + self.batch / len(batches))
            parts = micro_batches(
                self.traces.token_lengths,
                batches[self.batch],
                self.settings.micro_batch_tokens,
                self.processes.size,
            )
            states = yield [self.processes.share(part) for part in parts]
            loss = self._step(stage, parts, states)
            self.batch += 1
            self.steps += 1
            self._average(self.epoch * len(batches) + self.batch, stage.epochs * len(batches))
            self.progress(
                "train", number * len(batches) + self.batch, total, f"{stage.name} loss {loss:.3f}"
            )
            if self._due(self.settings.validate_every):
                price = self._shown_price(stage)
                outcome = self._replay(self._predict(), price)
                place = {"steps": self.steps, "price": price}
                found = {"accuracy": outcome.accuracy, "tokens": outcome.mean_tokens}
                self.folder.log({"dynamics": place | found})
                self._track(found)
            if self._due(self.settings.checkpoint_every):
                self._checkpoint()
        entry = {"stage": stage.name, "price": stage.price, "epoch": self.epoch}
        seconds = round(time.monotonic() - started, 3)
        self.folder.log(entry | self.tally.entry() | {"steps": self.steps, "seconds": seconds})
        priced = {} if stage.price is None else {"price": stage.price}
        self._track({**priced, **self.tally.entry()})
        self.tally = Tally()
        self.epoch += 1
        self.batch = 0
        self._checkpoint()

    def _due(self, every: int) -> bool:
        return bool(every) and self.steps % every == 0

    def _set_learning_rates(self, stage: Stage, epochs_done: float) -> None:
        """Linear fall within the stage; a function of the position alone, so resuming is exact."""
        left = 1.0 - epochs_done / stage.epochs
        end = self.settings.final_learning_rate_share
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * (end + (1.0 - end) * left)

    def _step(self, stage: Stage, parts: Sequence[IntArray], states: PartStates) -> float:
        """One optimiser step on a batch, a part at a time."""
        rows = np.concatenate(parts)
        batch = self.traces.batch(rows)
        last = len(parts) - 1
        done = []
        for number, part in enumerate(parts):
            first = self.steps == number == 0
            with (
                self.processes.adding(self.trained, last=number == last),
                self._noting_first_step() if first else nullcontext(),
            ):
                done.append(self._add_gradients(stage, number, part, batch, states(number)))
        value, *found = self.processes.sum(np.sum([part.sums() for part in done], axis=0))
        if not math.isfinite(value):
            failed = f"the loss is {value}"
        else:
            if self.settings.max_gradient_norm:
                clip_grad_norm_(self._parameters(), self.settings.max_gradient_norm)
            self.optimizer.step()
            failed = self._exploded()
        if failed:
            # Where the loss is finite and only the gradients are not, any part may be at fault.
            bad = next((part for part in done if not part.loss.isfinite()), done[-1])
            kept = self.folder.save_batch(bad.rows, bad.batch, bad.logits)
            raise TrainingDivergedError(
                f"{failed} at step {self.steps + 1}: stage {stage.name}, epoch {self.epoch}, batch "
                f"{self.batch} (traces {bad.rows.tolist()}, kept with their logits in {kept}). "
                f"{self._advice(states(bad.number))} The last checkpoint in {self.folder.path} is "
                "from before"
            )
        self.optimizer.zero_grad(set_to_none=True)
        self.tally.add(len(rows), float(value), int(found[0]), float(found[1]), int(found[2]))
        return float(value)

    @contextmanager
    def _noting_first_step(self) -> Iterator[None]:
        """Logs how far one optimiser step may move a stop logit; warns where that is too far.

        AdamW's first steps move each weight by the learning rate, whatever the gradient's size: a
        logit by the head's rate times the sum of its inputs' magnitudes. That sum grows with the
        base's width and the size of its states (about 130 in the embedded reasoner, 3,400 in
        Qwen2.5-1.5B), so that a rate that suits one base is too high for another.
        """
        inputs: list[Tensor] = []
        with self.model.policy.head.register_forward_pre_hook(
            lambda _, args: inputs.append(args[0].detach())
        ):
            yield
        magnitude = float(inputs[0].float().abs().sum(-1).median())  # of (B, T, H) or (B, S, H)
        rate = self.optimizer.param_groups[0]["initial_lr"]
        step = rate * magnitude
        self.folder.log({"largest_logit_step": step})
        if step > LARGEST_LOGIT_STEP:
            warnings.warn(
                f"one optimiser step may move a stop logit by {step:.2g}: the head's learning rate "
                f"({rate:g}) times the sum of its inputs' magnitudes ({magnitude:.0f}). Above "
                f"{LARGEST_LOGIT_STEP:g} the head saturates before the layers learn: take "
                f"--head-learning-rate {0.1 / magnitude:.0e}",
                stacklevel=2,
            )

    def _add_gradients(
        self, stage: Stage, number: int, rows: IntArray, whole_batch: Batch, states: States
    ) -> Part:
        """Adds the gradient of this process's share of a batch's part; as if it were all one pass.

        The loss is a mean over the whole batch, so that each part's counts as much as its share.

        Args:
            stage: whose loss.
            number: of the part.
            rows: the part's traces, of all processes.
            whole_batch: labels of the batch.
            states: of the trunk, of this process's share.
        """
        mine, settings = self.processes.share(rows), self.settings
        batch = self.traces.batch(mine)
        counts = self.processes.rank < len(rows)  # else a stand-in
        config = self.model.config
        numbers = self.traces.trial_numbers(mine, config.trial_every, config.trial_max_tokens)
        positions = batch.positions.to(states.device)
        outputs = self.trained(states, positions, numbers)  # (B, T, K [+ A])
        width = self.model.policy.head.out_features
        logits, penalty = self._at_prices(stage, outputs[..., :width])
        loss = batch_loss(settings.method, logits, batch, penalty, settings.entropy_bonus)
        if self.auxiliary is not None:
            loss = loss + settings.auxiliary_weight * self._auxiliary(outputs[..., width:], batch)
        loss = counts * loss_weight(settings.method, batch, whole_batch) * loss
        # Gradients are averaged over the processes; their losses are parts of a sum.
        (loss * self.processes.size).backward()
        return Part(number, mine, batch, logits.detach(), loss.detach(), counts)

    def _auxiliary(self, said: Tensor, batch: Batch) -> Tensor:
        """The auxiliary loss of what the read-outs say, (B, T, A)."""
        chosen = [AUXILIARY_TARGETS.index(name) for name in self.settings.auxiliary_targets]
        targets = self.traces.history[batch.rows, : said.shape[1]][..., chosen]
        return auxiliary_loss(
            said, torch.from_numpy(targets).to(said.device), batch.mask.to(said.device)
        )

    def _at_prices(
        self, stage: Stage, outputs: Tensor
    ) -> tuple[Tensor, float | tuple[float, ...] | None]:
        """Logits (B, T) and the stage's lambda, or logits (J, B, T) and the J of this step."""
        known = self.model.policy.prices
        if known is None:
            return outputs[..., 0], stage.price
        drawn = self.settings.prices_of_batch(self.steps)
        places = torch.tensor([known.place(price) for price in drawn], device=outputs.device)
        return price_logits(outputs, places[:, None, None]), drawn

    def _average(self, done: int, total: int) -> None:
        """Takes the weights after `done` of a stage's `total` steps into their mean."""
        before = total - round(self.settings.swa_share * total)
        if done <= before:
            return
        # The means stand in the optimiser's state, so that checkpoints gather and split them.
        parameters = self._parameters()
        states = [self.optimizer.state[p] for p in parameters]
        if done == before + 1:
            for state, p in zip(states, parameters, strict=True):
                state["swa"] = p.detach().clone()
        else:
            means = [state["swa"] for state in states]
            get_swa_multi_avg_fn()(means, [p.detach() for p in parameters], done - before - 1)

    @torch.no_grad()
    def _take_average(self) -> None:
        """Makes the mean of the stage's last weights, where there is one, the weights."""
        for p in self._parameters():
            mean = self.optimizer.state[p].pop("swa", None)
            if mean is not None:
                p.copy_(mean)

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _exploded(self) -> str:
        """Says what is not finite after an optimiser step, "" where all is.

        One fused pass over gradients and weights, and one number that is waited for.
        """
        parameters = self._parameters()
        gradients = [p.grad for p in parameters if p.grad is not None]
        # The 2-norm: a process's shard may be empty, and of nothing there is no largest entry.
        if math.isfinite(float(whole(get_total_norm([*gradients, *parameters])))):
            return ""
        names = {id(p): name for name, p in self.model.policy.named_parameters()}
        bad = [
            f"{what} of {names.get(id(p), 'the policy')}"
            for what, values in (
                ("gradient", [p.grad for p in parameters]),
                ("weights", parameters),
            )
            for p, value in zip(parameters, values, strict=True)
            if value is not None and not float(whole(value.detach()).abs().max()) < LARGEST
        ] or ["gradients and weights together"]
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        return f"not finite, or too large to be squared: {', '.join(bad[:3])}{more}"

    def _advice(self, states: States) -> str:
        """What to do about a run that diverged on these states of the trunk."""
        if not states.hidden.isfinite().all():
            return (
                "The base's own hidden states are not finite there: check its weights for NaN, "
                "and its dtype (float16 overflows where bfloat16 does not)."
            )
        rate = max(group["initial_lr"] for group in self.optimizer.param_groups)
        reduced = computes_in_bfloat16(self.settings.precision, states.device)
        return f"Lower learning_rate ({rate:g} at most)" + (
            ", or train with precision float32." if reduced else "."
        )

    def _finish_stage(self, stage: Stage) -> None:
        self._take_average()
        self.stage += 1
        if self.stage == len(self.settings.stages) or not self.settings.only_last_policy:
            self._save_policy(stage)
        self.epoch = 0
        self._checkpoint()

    def _save_policy(self, stage: Stage) -> None:
        table, config = self.validation.table, self.model.config
        started = time.monotonic()
        predicted = self._predict()
        steps = int(table.num_steps.sum())
        facts: dict[str, Any] = self.facts | {
            "seconds_per_step": round((time.monotonic() - started) / steps, 6)
        }
        frontier: dict[float, Outcome] = {}
        if config.prices is None:
            assert stage.price is not None
            config.price = stage.price
            outcomes = {stage.price: self._replay(predicted, stage.price)}
        else:
            frontier = {one: self._replay(predicted, one) for one in config.prices.grid()}
            config.price = default_price(frontier, table)
            shown = [*list(frontier)[::_SHOWN_EVERY], config.price]
            outcomes = {one: frontier[one] for one in sorted(set(shown))}
            facts["price_chosen_by"] = CHOSEN_BY
            self._choose_by_domain(frontier)
        outcome = outcomes[config.price]
        probabilities = predicted.probabilities(config.price)
        warning = warning_about(table, outcome)
        facts |= {"warning": warning} if warning else {}
        tensors = self._tensors()
        path = self.folder.save_policy(
            stage.name,
            lambda to: save_policy_folder(
                to,
                self.model,
                tensors,
                self.settings,
                stage,
                facts,
                self.validation,
                outcomes,
            ),
        )
        saved = self.folder.save_array(f"{stage.name}.validation", probabilities)
        result = StageResult(
            name=stage.name,
            method=self.settings.method,
            price=config.price,
            path=path,
            probabilities_path=saved,
            probabilities_sha256=file_hash(saved) if self.folder.writes else "",
            accuracy=outcome.accuracy,
            tokens=outcome.mean_tokens,
            full_accuracy=float(table.full_correct.mean()),
            full_tokens=float(table.full_tokens.mean()),
            warning=warning,
        )
        self.results.append(result)
        if config.prices is not None:
            found = [
                {"price": price, "accuracy": one.accuracy, "tokens": one.mean_tokens}
                for price, one in frontier.items()
            ]
            self.folder.log({"frontier": found})
        self.folder.log({"validation": result.to_dict()})
        self._track({"accuracy": outcome.accuracy, "tokens": outcome.mean_tokens})

    def _choose_by_domain(self, frontier: Mapping[float, Outcome]) -> None:
        """Gives each domain the price that its own validation traces choose."""
        table = self.validation.table
        for name, domain in (self.model.config.domains or {}).items():
            rows = np.flatnonzero(np.array(table.domains or []) == name)
            if len(rows):
                own = {price: one.of_rows(rows) for price, one in frontier.items()}
                domain["price"] = default_price(own, table.subset(rows))

    def _track(self, values: dict[str, float]) -> None:
        self.processes.track(self.folder.path.name, values, self.steps)

    def _predict(self) -> Predicted:
        """What the policy says on the validation traces."""
        return predict_with(self.trained, self.model, self.validation, self.processes)

    def _replay(self, predicted: Predicted, price: float) -> Outcome:
        """What the policy comes to on the validation traces."""
        config, table = self.model.config, self.validation.table
        probabilities = predicted.probabilities(price)
        if config.default_mode == "sample":
            return replay(table, probabilities)
        return replay(table, probabilities, "threshold", config.default_threshold)

    def _shown_price(self, stage: Stage) -> float:
        """The lambda at which the course of the training is shown: of all, the middle one."""
        if stage.price is not None:
            return stage.price
        low, high = self.settings.price_range
        return math.sqrt(low * high)

    def _header(self, cached_bytes: int) -> dict[str, Any]:
        return {
            "traces": len(self.rows),
            "capped_traces_dropped": len(self.traces) - len(self.rows),
            "ungraded_steps": int(self.traces.table.ungraded[self.rows].sum()),
            "trunk_states_bytes": cached_bytes,
            "trainable_parameters": self.trainable_parameters,
        }

    def _checkpoint(self) -> None:
        # No draw is made while training: batches follow from seed and epoch, dropout is off.
        self.folder.save_checkpoint(
            {
                "policy": self._tensors(),
                "auxiliary": {} if self.auxiliary is None else whole(self.auxiliary.state_dict()),
                "optimizer": whole(self.optimizer.state_dict()),
                "results": [result.to_dict() for result in self.results],
                "stage": self.stage,
                "epoch": self.epoch,
                "batch": self.batch,
                "steps": self.steps,
                "tally": dataclasses.asdict(self.tally),
            }
        )

    def _tensors(self) -> dict[str, Tensor]:
        """The policy's own tensors, gathered from all processes."""
        own = self.model.policy.own_names()
        state = self.model.policy.state_dict()
        gathered: dict[str, Tensor] = whole({n: t for n, t in state.items() if n in own})
        return gathered

    def _restore(self) -> None:
        state = self.folder.load_checkpoint()
        if state is None:
            return
        load_whole(self.model.policy, self.optimizer, state)
        if self.auxiliary is not None:
            own = self.auxiliary.state_dict()
            stored = {name: split_as(x, own[name]) for name, x in state["auxiliary"].items()}
            self.auxiliary.load_state_dict(stored)
        self.results = [
            StageResult.from_dict(result, self.folder.path) for result in state["results"]
        ]
        self.stage, self.epoch = state["stage"], state["epoch"]
        self.batch, self.steps = state["batch"], state["steps"]
        self.tally = Tally(**state["tally"])


_SHOWN_EVERY = 5  # of a frontier's prices, on the card
CHOSEN_LOSS = 0.01
CHOSEN_BY = (
    f"fewest tokens among prices that lose at most {CHOSEN_LOSS} accuracy on the validation traces"
)


def default_price(outcomes: Mapping[float, Outcome], table: TraceTable) -> float:
    """The price that a policy takes where none is said, chosen on validation (`CHOSEN_BY`).

    Args:
        outcomes: by price, from careful to bold.
        table: the traces.

    Returns:
        One of the prices; 0 where all of them lose more.
    """
    number = choose(list(outcomes.values()), replay_full(table), max_loss=CHOSEN_LOSS)
    return list(outcomes)[number or 0]


def new_optimizer(
    model: Trainable, settings: TrainSettings, auxiliary: nn.Linear | None = None
) -> torch.optim.AdamW:
    """AdamW over what the policy trains; its heads may have a learning rate of their own.

    Args:
        model: base and policy.
        settings: rates and the rest.
        auxiliary: read-outs of auxiliary losses, which learn at the head's rate.
    """
    heads = [one for one in (model.policy.head, model.policy.trial) if one is not None]
    head = {id(p) for one in heads for p in one.parameters()}
    trained = [p for p in model.policy.parameters() if p.requires_grad]
    layers = [p for p in trained if id(p) not in head]
    groups: list[dict[str, Any]] = [
        {
            "params": [
                *(p for p in trained if id(p) in head),
                *([] if auxiliary is None else auxiliary.parameters()),
            ],
            "initial_lr": settings.head_learning_rate or settings.learning_rate,
        }
    ]
    if layers:
        groups.append({"params": layers, "initial_lr": settings.learning_rate})
    return torch.optim.AdamW(
        [group | {"lr": group["initial_lr"]} for group in groups],
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )
