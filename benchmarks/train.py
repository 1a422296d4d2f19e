"""Cost of a training step: one pass per prefix, one padded pass, one packed pass, many prices.

    OMP_NUM_THREADS=1 python benchmarks/train.py [--quick] [--json FILE] [--limit N] [--seed N]

The base is a random Qwen2 of 28 layers with R1-Distill-7B's proportions at a smaller width, its
policy two layers as in the paper; traces have 20 steps and the spread of lengths that reasoning
has. Every arm takes whole optimiser steps on the same batches; all but `every_price` must find the
same loss:

naive        one pass for each prefix, unpadded, its last token's logit
padded       one pass a trace, in padded rows
packed       as `ospruner train`: the trunk on packed traces, the last layer at step ends only
kept         the same from the trunk's states in memory, as in all epochs but the first
every_price  kept, for a policy of every price on six of them (another loss)

Arms are timed in turn. `graph` is the memory that is kept for the backward pass, weights left out;
`of limit` is counted floating-point operations a second over what one large matrix product reaches
here.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from timing import Timed, environment, median_ratio, print_last_line, random_traces, timed
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from modeling_ospruner import OSPrunerForCausalLM
from modeling_ospruner.policy_ospruner import price_logits
from ospruner.demo.shipped import Reasoner
from ospruner.eval.table import IntArray
from ospruner.scoring import trunk
from ospruner.train.config import StopConfig
from ospruner.train.objective import batch_loss
from ospruner.train.optimiser import optimizer_of
from ospruner.train.policies import new_policy
from ospruner.train.prices import prices_of_batch
from ospruner.train.states import States
from ospruner.train.tail import step_outputs
from ospruner.train.traces import Batch, LabelledTraces

PENALTY = 1e-4


class Target:
    """A policy with its optimiser."""

    def __init__(self, base: PreTrainedModel, reasoner: Reasoner, seed: int, **chosen: Any) -> None:
        ends = chosen.get("prices")
        config = StopConfig(
            "run", head="price" if ends else "fixed", **chosen, seed=seed, learning_rate=1e-12
        )
        labels = reasoner.label_settings(seed)
        model = new_policy(base, reasoner.tokenizer, config, labels, ends and tuple(ends))
        assert isinstance(model, OSPrunerForCausalLM)
        self.model = model
        torch.nn.init.normal_(self.model.policy.head.weight, std=0.02)  # zero would hide the states
        self.optimizer = optimizer_of(self.model.policy, config)
        count = config.prices_per_batch
        self.prices = prices_of_batch(tuple(ends), count, seed, 0) if ends else ()

    def step(self, outputs: torch.Tensor, batch: Batch) -> float:
        """One optimiser step on the head's outputs (N, T, 1 or 6); returns the loss before it.

        Its learning rate is next to nothing, so that all arms see the same weights.
        """
        known = self.model.config.prices
        if known is None:
            loss = batch_loss("os-pruner", outputs[..., 0], batch, PENALTY)
        else:
            places = torch.tensor([known.place(price) for price in self.prices])
            logits = price_logits(outputs, places.to(outputs.device)[:, None, None])
            loss = batch_loss("os-pruner", logits, batch, self.prices, 0.01)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()


class Arms:
    """Each arm takes one optimiser step on the traces of `rows` and returns the loss.

    Args:
        target: a policy; all arms but `every_price` and `queries` train it.
        priced: a policy of every price on the same base.
        queries: one that is queries only on the same base.
        traces: the labelled traces; `kept` are the same, with the trunk's states in memory, and so
            are `keys` with what a policy reads that is queries only.
    """

    def __init__(
        self,
        target: Target,
        priced: Target,
        queries: Target,
        traces: LabelledTraces,
        kept: LabelledTraces,
        keys: LabelledTraces,
    ) -> None:
        self.target = target
        self.priced = priced
        self.queries_only = queries
        self.keys = keys
        self.traces = traces
        self.in_memory = kept

    def naive(self, rows: IntArray) -> float:
        """One pass of base and tail for each prefix."""
        target, batch = self.target, self.traces.batch(rows)
        logits = torch.zeros(batch.mask.shape)
        values = []
        for b, row in enumerate(rows):
            ids = self.traces.input_ids(np.array([row])).to(target.model.base.device)
            for t in range(int(batch.mask[b].sum())):
                hidden = trunk(target.model, ids[:, : int(batch.positions[b, t]) + 1])
                values.append(target.model.policy(hidden)[0, -1])
        stacked = torch.stack(values)
        return target.step(
            logits.to(stacked).masked_scatter(batch.mask.to(stacked.device), stacked)[..., None],
            batch,
        )

    def padded(self, rows: IntArray) -> float:
        """One pass a trace, in rows as long as the longest."""
        target, batch = self.target, self.traces.batch(rows)
        hidden = trunk(target.model, self.traces.input_ids(rows).to(target.model.base.device))
        positions = batch.positions.to(hidden.device)
        outputs = step_outputs(target.model.policy, States(hidden), positions, fast=False)
        return target.step(outputs, batch)

    def packed(self, rows: IntArray) -> float:
        """The trunk on packed traces."""
        return self._step(self.target, self.traces, rows)

    def kept(self, rows: IntArray) -> float:
        """The trunk's states from memory."""
        return self._step(self.target, self.in_memory, rows)

    def every_price(self, rows: IntArray) -> float:
        """A policy of every price, on six of them; states from memory."""
        return self._step(self.priced, self.in_memory, rows)

    def queries(self, rows: IntArray) -> float:
        """A policy that is queries only; states at step ends, and keys and values, from memory."""
        return self._step(self.queries_only, self.keys, rows)

    def _step(self, target: Target, traces: LabelledTraces, rows: IntArray) -> float:
        batch, states = traces.batch(rows), traces.states(target.model, rows)
        positions = batch.positions.to(states.device)
        return target.step(step_outputs(target.model.policy, states, positions), batch)


def random_base(width: int, layers: int, vocabulary: int, seed: int) -> Qwen2ForCausalLM:
    """A Qwen2 with R1-Distill-Qwen-7B's proportions: MLP 5.3 times as wide, 7 heads a key head."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=round(width * 18944 / 3584),
        num_hidden_layers=layers,
        num_attention_heads=7,
        num_key_value_heads=1,
        tie_word_embeddings=False,
        head_dim=32,  # type: ignore[call-arg]  # an attribute more, which its attention reads
    )
    return Qwen2ForCausalLM(config).eval()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Times all arms in turn; the numbers by name."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    reasoner = Reasoner()
    vocabulary = len(reasoner.tokenizer)
    base = random_base(args.width, args.layers, vocabulary, args.seed)
    torch.nn.Module.to(base, device)
    dataset = random_traces(args.limit, args.steps, args.tokens, vocabulary, args.seed)
    traces, kept, keys = (LabelledTraces.from_dataset(dataset) for _ in range(3))
    target = Target(base, reasoner, args.seed, tuning="layers")
    priced = Target(base, reasoner, args.seed, tuning="layers", prices=[1e-6, 1e-3])
    queries = Target(base, reasoner, args.seed, tuning="queries")
    queries.model.policy.head.load_state_dict(target.model.policy.head.state_dict())
    states_bytes = {
        "kept": kept.cache_states(target.model, 2**40),
        "queries": keys.cache_states(queries.model, 2**40),
    }
    arms = Arms(target, priced, queries, traces, kept, keys)
    rows = np.arange(args.limit)
    calls: dict[str, Callable[[], float]] = {
        name: partial(getattr(arms, name), rows)
        for name in ("naive", "padded", "packed", "kept", "queries", "every_price")
    }
    losses, kept_bytes = {}, {}
    operations: dict[str, int | None] = {}  # counting is too slow for the many passes of "naive"
    for name, call in calls.items():  # untimed: also the warm-up
        with FlopCounterMode(display=False) if name != "naive" else nullcontext() as counter:
            losses[name] = call()
        operations[name] = counter.get_total_flops() if counter is not None else None
        kept_bytes[name] = bytes_for_backward(call, [target, priced, queries])
    times: dict[str, list[Timed]] = {name: [] for name in calls}
    for number in range(args.rounds):
        order = list(calls) if number % 2 == 0 else list(calls)[::-1]
        for name in order:
            times[name].append(timed(calls[name]))
    return _numbers(
        args,
        times,
        losses,
        operations,
        kept_bytes,
        int(traces.token_lengths.sum()),
        device,
        states_bytes,
    )


def _numbers(
    args: argparse.Namespace,
    times: dict[str, list[Timed]],
    losses: dict[str, float],
    operations: dict[str, int | None],
    kept_bytes: dict[str, int],
    tokens: int,
    device: str,
    states_bytes: dict[str, int],
) -> dict[str, Any]:
    limit = matrix_limit(device)
    # Untrained, a policy that is queries only says what any other says.
    same = [loss for name, loss in losses.items() if name != "every_price"]

    def ratio(over: str, under: str) -> list[float]:
        pairs = zip(times[over], times[under], strict=True)
        return [a.wall_seconds / b.wall_seconds for a, b in pairs]

    arms = {}
    for name, measured in times.items():
        seconds = statistics.median(t.wall_seconds for t in measured)
        counted = operations[name]
        arms[name] = {
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "operations": counted,
            "share_of_limit": None if counted is None else counted / seconds / limit,
            "bytes_for_backward": kept_bytes[name],
            "states_bytes": states_bytes.get(name, 0),
        }
    ratios = {
        "packed_over_naive": ratio("naive", "packed"),
        "packed_over_padded": ratio("padded", "packed"),
        "kept_over_naive": ratio("naive", "kept"),
        "queries_cost_ratio": ratio("queries", "kept"),
        "six_prices_cost_ratio": ratio("every_price", "kept"),
    }
    intervals = {name: median_ratio(values) for name, values in ratios.items()}
    return {
        **{name: interval.median for name, interval in intervals.items()},
        "intervals": {name: [i.low, i.high] for name, i in intervals.items()},
        "arms": arms,
        "loss_difference": max(same) - min(same),
        "matrix_limit": limit,
        "base": f"{args.layers} layers of width {args.width}, {args.limit} traces of "
        f"{args.steps} steps, {tokens} tokens",
        **environment(),
    }


def bytes_for_backward(call: Callable[[], object], targets: list[Target]) -> int:
    """Bytes of activations that a call keeps for its backward passes, shared ones counted once."""
    weights = {
        parameter.untyped_storage().data_ptr()
        for target in targets
        for parameter in target.model.parameters()
    }
    found: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        call()
    return sum(found.values())


def matrix_limit(device: str, size: int = 2048) -> float:
    """Floating-point operations a second that one large matrix product reaches."""
    a = torch.randn(size, size, device=device)
    a @ a
    best = min(timed(lambda: a @ a).wall_seconds for _ in range(5))
    return 2 * size**3 / best


def main() -> None:
    """Measures, prints a table, and the numbers as one JSON object."""
    args = _arguments()
    result = measure(args)
    print(f"{result['base']}; {result['device']}, {result['threads']} thread(s)")
    heads = ("s a step", "tokens/s", "of limit", "graph MiB", "states MiB")
    print(f"{'arm':12}" + "".join(f"{head:>11}" for head in heads))
    for name, arm in result["arms"].items():
        share = "-" if arm["share_of_limit"] is None else f"{arm['share_of_limit']:.2f}"
        print(
            f"{name:12}{arm['seconds']:11.3f}{arm['tokens_per_second']:11.0f}{share:>11}"
            f"{arm['bytes_for_backward'] / 2**20:11.1f}{arm['states_bytes'] / 2**20:11.1f}"
        )
    for name, (low, high) in result["intervals"].items():
        print(f"{name:24}{result[name]:8.2f} [{low:.2f}, {high:.2f}]")
    print(f"{'losses differ by at most':24}{result['loss_difference']:8.1e}")
    print_last_line(result, args.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="narrower and shorter: a minute")
    parser.add_argument("--limit", type=int, help="traces a step (default: 8)")
    parser.add_argument("--width", type=int, help="hidden size (default: 224)")
    parser.add_argument("--layers", type=int, default=28, help="layers of the base")
    parser.add_argument("--steps", type=int, default=20, help="steps a trace")
    parser.add_argument("--tokens", type=int, help="median tokens a trace (default: 400)")
    parser.add_argument("--rounds", type=int, help="timed steps of each arm (default: 5)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="also write the last line there")
    args = parser.parse_args()
    args.rounds = args.rounds or (2 if args.quick else 5)
    args.limit = args.limit or (3 if args.quick else 8)
    args.width = args.width or (112 if args.quick else 224)
    args.tokens = args.tokens or (120 if args.quick else 400)
    return args


if __name__ == "__main__":
    main()
