"""The training loop: transformers' Trainer on what a policy's tail reads of labelled traces.

For low prices training from scratch is stuck at "never stop"; starting moderately high and lowering
the price in stages is not (the paper's section on progressive training). With the head "price" one
stage trains all prices at once. The trunk runs without gradient, the tail with gradient in one
causal pass a trace, whose outputs are read at the step ends. The baselines go through the same loop
with another loss.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch
from datasets import DatasetDict
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim.swa_utils import get_swa_multi_avg_fn
from torch.utils.data import DataLoader
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainingArguments,
)
from transformers.trainer_utils import TrainOutput

from modeling_ospruner.policy_ospruner import StoppingPolicy, is_quantised, price_logits
from ospruner.engines.opening import load_tokenizer
from ospruner.eval.measured import Predicted
from ospruner.eval.problems.problem import text_key
from ospruner.eval.table import IntArray, trace_hash
from ospruner.progress import Progress, silent

from .config import StopConfig
from .flashthink import load_verifier_base, verifier_traces, write_own
from .label_sets import load_labelled_base, place_of, refuse_ungraded, split_labels, usable_rows
from .labels.loading import LabelSource, load_labels
from .objective import batch_loss, loss_weight
from .policies import SavedPolicy, Trainable, new_policy, replayed, save_policy
from .prices import prices_of_batch
from .run_folder import claimed, has_ended, last_checkpoint, note, record_of
from .tail import TrainedPolicy, no_denormals
from .traces import Batch, EpochBatches, LabelledTraces, head_outputs, micro_batches


class StopTrainer(Trainer, TrainerCallback):
    """Trains a stopping policy on labels; a transformers `Trainer` whose run continues by itself.

    ```python
    trainer = ospruner.StopTrainer(ospruner.StopConfig("policy"), "labels")
    trainer.train()
    ```

    The policy lies in `config.output_dir`, those of a schedule of prices in a folder each there.

    Attributes:
        policies: what was saved, in order.
        stop_model: base and policy.
        traces: those that it trains on.
        eval_traces: those that it validates on.

    Args:
        config: what is trained, and how.
        labels: a folder or Hub id of labels, several of them (a mix of tasks), or loaded ones.
        eval_labels: likewise of other problems; None to hold problems out of `labels`.
        model: the base that wrote the traces, where it is loaded already.
        processing_class: its tokenizer, likewise.
        progress: called with phases "trunk" (traces) and "train" (optimiser steps).
        callbacks: as for `Trainer`.

    Raises:
        ValueError: labels of another base or otherwise made than those to validate on, too few
            traces, labels that are all equal or ungraded, a problem in both sets, a trace beyond
            the base's positions, or `output_dir` holds something else.
    """

    args: StopConfig
    model: TrainedPolicy
    optimizer: torch.optim.Optimizer

    def __init__(
        self,
        config: StopConfig,
        labels: LabelSource,
        eval_labels: LabelSource | None = None,
        *,
        model: PreTrainedModel | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        progress: Progress = silent,
        callbacks: list[TrainerCallback] | None = None,
    ) -> None:
        self._out = Path(str(config.output_dir))
        if self._out.is_file():
            raise ValueError(f"{self._out} is a file; a training run needs a folder")
        if isinstance(labels, DatasetDict):  # what `ospruner.label` gives
            if "train" not in labels:
                raise ValueError(f"labels hold the splits {list(labels)}; there must be a train")
            eval_labels = labels.get("validation") if eval_labels is None else eval_labels
            labels = labels["train"]
        ours = load_labels(labels)
        others = None if eval_labels is None else load_labels(eval_labels)
        sets = split_labels(ours, others, config)
        for one in sets:
            refuse_ungraded(one, config.max_ungraded)
        if config.method == "flashthink":
            reads = load_tokenizer(*place_of(config.base, ours))
            model, processing_class = load_verifier_base(config.verifier, config.device)
            both = [verifier_traces(one, reads, processing_class, config.states) for one in sets]
        else:
            both = [LabelledTraces.from_dataset(one, config.states) for one in sets]
            if model is None:
                model, processing_class = load_labelled_base(config.base, ours, config.device)
        self.traces, self.eval_traces = both
        assert processing_class is not None
        rows = usable_rows(self.traces.table, config.method)
        for traces in both:
            traces.refuse_beyond_positions(model)
        if not is_quantised(model) and "hf_device_map" not in vars(model):
            nn.Module.to(model, config.device)
        width = int(model.config.get_text_config().hidden_size)
        magnitude = _magnitude(model, self.traces)
        config = config.settled(self.traces.table, len(rows), magnitude, width)
        self._facts: dict[str, Any] = {
            "settings": config.recorded(),
            "data_hash": ours.data_hash,
            "training_traces": len(rows),
            "trained_on": " ".join(sorted({text_key(one) for one in sets[0]["problem"]})),
        }
        if ours.parts:
            self._facts["domains"] = {name: one.data_hash for name, one in ours.parts.items()}
        self._identity = {
            "settings": self._facts["settings"],
            "label_settings": ours.settings.to_dict(),
            "train_labels": trace_hash(self.traces.table),
            "validation_labels": trace_hash(self.eval_traces.table),
        }
        self._stages, self._progress = list(config.stages.items()), progress
        tasks = [one.settings.task for one in ours.parts.values()]
        self.stop_model: Trainable = new_policy(
            model, processing_class, config, ours.settings, tasks
        )
        self.policies: list[SavedPolicy] = []
        self._share = config.process_index, config.world_size
        self._ended = self._next_save = 0.0
        self.batches = EpochBatches(self.traces.token_lengths, rows, config.batch_size, config.seed)
        passes = int(config.num_train_epochs or 1)
        self._stage_steps = passes * len(self.batches)
        config.num_train_epochs = passes * len(self._stages)
        trained = TrainedPolicy(
            self.stop_model.policy, bool(config.bf16), config.gradient_checkpointing
        )
        config.gradient_checkpointing = False  # done: a tail's layers are not a whole model's
        super().__init__(
            model=trained,
            args=config,
            train_dataset=range(len(rows)),
            eval_dataset=range(len(self.eval_traces)),
            callbacks=[self, *(callbacks or [])],
            optimizers=(optimizer_of(self.stop_model.policy, config), None),
        )
        if progress is not silent:
            self.remove_callback(PrinterCallback)

    # What Trainer asks for

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The whole batches' traces, the same in all processes: each takes its share itself."""
        every: Any = range(len(self.traces))
        return DataLoader(
            every, batch_sampler=self.batches, collate_fn=lambda rows: {"rows": np.array(rows)}
        )

    def train(  # type: ignore[override]
        self, resume_from_checkpoint: Any = None, **kwargs: Any
    ) -> TrainOutput:
        """Trains, or goes on where a stopped run was; one that has ended is returned as it is.

        Args:
            resume_from_checkpoint: as for `Trainer`; None for the last whole one there is.
            kwargs: as for `Trainer`.

        Raises:
            ValueError: `output_dir` holds another run or other files, or is being written.
            FloatingPointError: the loss, a gradient or a weight became NaN or infinite.
            MemoryError: memory ran out; it says what to lower.
        """
        out, result = self._out, TrainOutput(0, math.nan, {})
        ours = claimed(out, self._identity) if self.args.should_save else nullcontext()
        with no_denormals(), ours:
            self.accelerator.wait_for_everyone()
            if not has_ended(out):
                try:
                    self._keep_states()
                    last = resume_from_checkpoint or last_checkpoint(out)
                    result = super().train(last, **kwargs)
                except RuntimeError as error:
                    # On the CPU it is a plain RuntimeError.
                    known = isinstance(error, torch.OutOfMemoryError)
                    if not known and "can't allocate memory" not in str(error):
                        raise
                    longest = int(self.traces.token_lengths.max())
                    raise MemoryError(
                        f"out of memory with micro_batch_tokens {self.args.micro_batch_tokens} and "
                        f"traces of up to {longest} tokens: lower micro_batch_tokens first (a "
                        "trace is never cut), then states_gib (0 computes the trunk anew for each "
                        "batch) or layers; gradient_checkpointing and adapter_rank need less, too"
                    ) from error
                self.accelerator.wait_for_everyone()
                self.save_state()
            self.accelerator.wait_for_everyone()
            saved = record_of(out)["policies"]
            self.policies = [
                SavedPolicy(path=out / name, **saved[name]) for name, _ in self._stages
            ]
        return result

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Adds the gradient of a batch, a part at a time; as if it were all one pass.

        Args:
            model: the trained policy, wrapped where there are several processes.
            inputs: "rows" (B,) numbers of the whole batch's traces, also in other processes.
            num_items_in_batch: not used; the loss is a mean over the whole batch.

        Returns:
            The batch's loss, of this process's share times the number of processes, a scalar.
        """
        args, rows, (rank, size) = self.args, inputs["rows"], self._share
        lengths, whole = self.traces.token_lengths, self.traces.batch(rows)
        parts = micro_batches(lengths, rows, args.micro_batch_tokens, size)
        total = torch.zeros((), device=args.device)
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            with nullcontext() if last else self.accelerator.no_sync(model=model):
                # No process may sit out a part: the others would wait for its gradient. Where none
                # of it is left, a trace stands in that counts for nothing.
                counts = rank < len(part)
                batch = self.traces.batch(part[rank::size] if counts else part[:1])
                loss = self._loss_of(model, batch)
                # Gradients are averaged over the processes; their losses are parts of a sum.
                loss = size * counts * loss_weight(args.method, batch, whole) * loss
                self.accelerator.backward(loss)
            total += loss.detach().to(total.device)
        if not math.isfinite(total):
            raise FloatingPointError(self._diverged(f"the loss is {float(total)}", rows))
        self._batch_rows = rows
        return total

    def _loss_of(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss of some traces, a scalar."""
        args, policy = self.args, self.stop_model.policy
        states, device = self.traces.states(self.stop_model, batch.rows), policy.head.weight.device
        outputs = model(states, batch.positions.to(device))  # (B, T, K)
        price: float | Sequence[float] = self._price
        logits = outputs[..., 0]
        if policy.prices is not None:
            count, step = args.prices_per_batch, self.state.global_step
            price = prices_of_batch((policy.prices.low, policy.prices.high), count, args.seed, step)
            places = torch.tensor([policy.prices.place(one) for one in price], device=device)
            logits = price_logits(outputs, places[:, None, None])  # (J, B, T)
        return batch_loss(args.method, logits, batch, price, args.entropy_bonus or 0.0)

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Exact replay on the validation traces, at the stage's price or the range's middle."""
        known = self.stop_model.config.prices
        price = self._price if known is None else math.sqrt(known.low * known.high)
        outcome = replayed(self.stop_model, self.eval_traces.table, self.predicted(), price)
        found = {
            "eval_price": price,
            "eval_accuracy": outcome.accuracy,
            "eval_tokens": outcome.mean_tokens,
            "eval_reward": outcome.accuracy - price * outcome.mean_tokens,
        }
        self.log(found)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, found)
        return found

    def predicted(self) -> Predicted:
        """What the policy says now on the validation traces; all processes share the work."""
        part = head_outputs(self.model, self.stop_model, self.eval_traces, self._share)
        whole = self.accelerator.reduce(torch.from_numpy(part).to(self.args.device), "sum")
        table, config = self.eval_traces.table, self.stop_model.config
        return Predicted(whole.cpu().numpy(), table.mask, config.prices, config.price)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """What a checkpoint holds of the model: the policy's own tensors."""
        folder = Path(output_dir or self._out)
        folder.mkdir(parents=True, exist_ok=True)
        write_own(self.stop_model.policy, folder)

    def push_to_hub(self, repo: str, **settings: Any) -> Any:  # type: ignore[override]
        """Publishes the trained policy: `ospruner.publish` of its folder.

        Args:
            repo: the repository's id.
            settings: as for `ospruner.publish`.

        Raises:
            ValueError: no policy is trained yet, or several are: publish one by its folder.
        """
        if len(self.policies) != 1:
            folders = ", ".join(str(policy.path) for policy in self.policies)
            raise ValueError(
                f"{len(self.policies)} policies are trained here"
                + (f" ({folders}): publish one by ospruner.publish" if folders else ": train first")
            )
        # The Hub's room stands above this one, and is asked for by name, when it is needed.
        return import_module("ospruner").publish(self.policies[0].path, repo, **settings)

    # Stages

    @property
    def _price(self) -> float:
        """That of the stage that the next step belongs to."""
        stage = min(self.state.global_step // self._stage_steps, len(self._stages) - 1)
        return self._stages[stage][1]

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        """Before its batches are asked for."""
        self.batches.epoch = self.state.global_step // len(self.batches)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Averages weights; at a stage's end takes their mean, and saves the policy.

        All before the checkpoint of this step.
        """
        step = self.state.global_step - 1  # the one that was taken
        name, price = self._stages[step // self._stage_steps]
        done = step % self._stage_steps + 1
        self._progress("train", step + 1, self._stage_steps * len(self._stages), name)
        first = self._stage_steps - round(self.args.average * self._stage_steps) + 1
        if done >= first:
            average_weights(self.optimizer, done - first)
        if done < self._stage_steps:
            return
        take_average(self.optimizer)
        said = self.predicted()
        if self.args.should_save:
            saved = save_policy(
                self._out / name,
                self.stop_model,
                price,
                said,
                self.eval_traces.table,
                self._stage_steps,
                self._facts,
            )
            told = {name: value for name, value in vars(saved).items() if name != "path"}
            note(self._out, policies=record_of(self._out).get("policies", {}) | {name: told})

    def on_epoch_end(
        self, args: TrainingArguments, state: Any, control: TrainerControl, **_: Any
    ) -> None:
        """Leaves out a checkpoint where a tenth of the time would go to them."""
        self._ended = monotonic()
        if self._ended < self._next_save and args.world_size == 1:  # several must agree
            control.should_save = False

    def on_save(self, *_: Any, **__: Any) -> None:
        """After a checkpoint."""
        now = monotonic()
        if (took := now - self._ended) > 1:
            self._next_save = now + 9 * took

    # The trunk, and what can go wrong

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Stops a run whose gradients or weights are not finite before a checkpoint holds them."""
        weights = _parameters(self.optimizer)
        gradients = [p.grad for p in weights if p.grad is not None]
        if not math.isfinite(get_total_norm([*gradients, *weights])):  # one fused pass over both
            said = "gradients or weights are not finite, or too large to be squared,"
            raise FloatingPointError(self._diverged(said, self._batch_rows))

    def _keep_states(self) -> None:
        """Runs the trunk over all traces that are read, if its states fit in memory or a folder."""
        args, base = self.args, self.stop_model.base
        limit = int(args.states_gib * 2**30)
        for traces, rows in ((self.traces, self.batches.rows), (self.eval_traces, None)):
            limit -= traces.cache_states(self.stop_model, limit, self._progress, self._share, rows)
        self.accelerator.wait_for_everyone()
        kept = all(one.holds_states_of(self.stop_model) for one in (self.traces, self.eval_traces))
        # Packed weights stay where they are.
        if kept and args.device.type != "cpu" and not is_quantised(base):
            nn.Module.to(base, "cpu")

    def _diverged(self, failed: str, rows: IntArray) -> str:
        """Says where a run diverged, and what to do."""
        states = self.traces.states(self.stop_model, rows)
        advice = (
            f"Lower learning_rate ({self.args.learning_rate:g}) or head_learning_rate "
            f"({self.args.head_learning_rate:g})" + ", or leave bf16 out" * bool(self.args.bf16)
        )
        if not states.hidden.isfinite().all():
            advice = (
                "The base's own hidden states are not finite there: check its weights for NaN, "
                "and its dtype (float16 overflows where bfloat16 does not)"
            )
        return (
            f"{failed} at step {self.state.global_step + 1} (traces {rows.tolist()}). {advice}. "
            f"The last checkpoint in {self.args.output_dir} is from before"
        )


def optimizer_of(policy: StoppingPolicy, config: StopConfig) -> torch.optim.AdamW:
    """AdamW over what a policy trains; its head has a learning rate of its own.

    (transformers' own has one rate, and leaves biases and norms out of the weight decay.)
    """
    head = [p for p in policy.head.parameters() if p.requires_grad]
    layers = [p for p in policy.layers.parameters() if p.requires_grad]
    rate = config.learning_rate
    groups: list[dict[str, Any]] = [{"params": head, "lr": config.head_learning_rate or rate}]
    if layers:
        groups.append({"params": layers, "lr": rate})
    return torch.optim.AdamW(
        groups,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        weight_decay=config.weight_decay,
        fused=True,
    )


def average_weights(optimizer: torch.optim.Optimizer, taken: int) -> None:
    """Takes the weights into their mean, in which so many are already.

    It stands in the optimiser's state: so checkpoints hold it, and nothing else needs to be kept.
    """
    weights = [p.detach() for p in _parameters(optimizer)]
    states = [optimizer.state[p] for p in _parameters(optimizer)]
    if taken:
        get_swa_multi_avg_fn()([state["average"] for state in states], weights, taken)
    else:
        for state, weight in zip(states, weights, strict=True):
            state["average"] = weight.clone()


@torch.no_grad()
def take_average(optimizer: torch.optim.Optimizer) -> None:
    """Makes the mean, where there is one, the weights."""
    for p in _parameters(optimizer):
        if (mean := optimizer.state[p].pop("average", None)) is not None:
            p.copy_(mean)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


@torch.no_grad()
def _magnitude(base: PreTrainedModel, traces: LabelledTraces) -> float:
    """Sum of the magnitudes of the base's last hidden state, which a fresh head reads; a median."""
    ids = torch.from_numpy(traces.tokens[0][:256]).to(base.device)[None]
    hidden = base.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state  # (1, S, H)
    return float(hidden.float().abs().sum(-1).median())
