"""Cost of a training step: one pass per prefix, one pass a trace, many prices.

    OMP_NUM_THREADS=1 python benchmarks/train.py [--quick] [--json FILE] [--limit N] [--seed N]
        [--before DIR --before-python FILE]

The base is a random Qwen2 of 28 layers with R1-Distill-7B's proportions at a smaller width, its
policy two layers as in the paper; traces have 20 steps and the spread of lengths that reasoning
has. Every arm takes whole optimiser steps on the same batches; all but `every_price` must find the
same loss:

naive        one pass for each prefix, unpadded, its last token's logit
trainer      as `ospruner train`: one pass a trace, the last layer at step ends only
kept         the same from the trunk's states in memory, as in all epochs but the first
queries      kept, for a policy that is queries only
every_price  kept, for a policy of every price on six of them (another loss)

Arms are timed in turn; operations are counted floating-point ones.
"""

from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import timing
import torch
from bases import Shape, random_base, random_traces
from torch.utils.flop_counter import FlopCounterMode

from modeling_ospruner.policy_ospruner import price_logits
from ospruner.demo.shipped import Reasoner
from ospruner.scoring import reading
from ospruner.train.config import StopConfig
from ospruner.train.objective import batch_loss
from ospruner.train.policies import new_policy
from ospruner.train.prices import prices_of_batch
from ospruner.train.tail import step_outputs
from ospruner.train.traces import Batch, LabelledTraces
from ospruner.train.trainer import optimizer_of

PENALTY = 1e-4
RATIOS = {
    "trainer_over_naive": ("naive", "trainer"),
    "kept_over_naive": ("naive", "kept"),
    "queries_cost_ratio": ("queries", "kept"),
    "six_prices_cost_ratio": ("every_price", "kept"),
}
"""Seconds of one arm over another's."""


class Target:
    """A policy with its optimiser; of every price in the range `prices`, if one is given."""

    def __init__(self, base: Any, seed: int, tuning: Any = "layers", prices: Any = None) -> None:
        own: dict[str, Any] = {"head": "price" if prices else "fixed", "tuning": tuning}
        own |= {"prices": list(prices or (PENALTY,)), "seed": seed}
        config, reasoner = StopConfig("run", learning_rate=1e-12, **own), Reasoner()
        labels = reasoner.label_settings(seed)
        self.model: Any = new_policy(base, reasoner.tokenizer, config, labels)
        torch.nn.init.normal_(self.model.policy.head.weight, std=0.02)  # zero would hide the states
        self.optimizer = optimizer_of(self.model.policy, config)
        self.prices = prices_of_batch(prices, config.prices_per_batch, seed, 0) if prices else ()

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

    def naive(self, traces: LabelledTraces) -> float:
        """A step with one pass of base and tail for each prefix."""
        batch, values = traces.batch(np.arange(len(traces))), []
        for b, tokens in enumerate(traces.tokens):
            ids = torch.from_numpy(tokens).to(self.model.base.device)[None]
            for end in batch.positions[b, batch.mask[b]].tolist():
                values.append(self.model.policy(reading(self.model, ids[:, : end + 1])[0])[0, -1])
        stacked = torch.stack(values)
        logits = torch.zeros(batch.mask.shape).to(stacked)
        filled = logits.masked_scatter(batch.mask.to(stacked.device), stacked)
        return self.step(filled[..., None], batch)

    def trainer(self, traces: LabelledTraces) -> float:
        """A step as `ospruner train` computes the outputs."""
        rows = np.arange(len(traces))
        batch, states = traces.batch(rows), traces.states(self.model, rows)
        positions = batch.positions.to(states.hidden.device)
        outputs = step_outputs(self.model.policy, states, positions)
        return self.step(outputs, batch)


def measure(args: Namespace) -> dict[str, Any]:
    """Times all arms in turn; the numbers by name."""
    tokenizer = Reasoner().tokenizer
    # R1-Distill-Qwen-7B's proportions: an MLP 5.3 times as wide, 7 heads a key head.
    wide, words = round(args.width * 18944 / 3584), len(tokenizer)
    shape = Shape(args.layers, args.width, wide, 7, 1, words)
    base = random_base(shape, tokenizer, 32_768, args.seed)
    dataset = random_traces(args.limit, args.steps, args.tokens, words, args.seed)
    traces, kept, keys = (LabelledTraces.from_dataset(dataset) for _ in range(3))
    target, queries = Target(base, args.seed), Target(base, args.seed, "queries")
    priced = Target(base, args.seed, prices=(1e-6, 1e-3))
    queries.model.policy.head.load_state_dict(target.model.policy.head.state_dict())
    states_bytes = {"kept": kept.cache_states(target.model, 2**40)}
    states_bytes["queries"] = keys.cache_states(queries.model, 2**40)
    calls: dict[str, Callable[[], float]] = {
        "naive": partial(target.naive, traces),
        "trainer": partial(target.trainer, traces),
        "kept": partial(target.trainer, kept),
        "queries": partial(queries.trainer, keys),
        "every_price": partial(priced.trainer, kept),
    }
    losses, operations = {}, {}
    for name, call in calls.items():  # untimed: also the warm-up
        # Counting is too slow for the many passes of "naive".
        with FlopCounterMode(display=False) if name != "naive" else nullcontext() as counter:
            losses[name] = call()
        operations[name] = None if counter is None else counter.get_total_flops()
    runs = [timing.in_turn(calls, number) for number in range(args.rounds)]
    clocks = np.array([[steps[0] for steps in run.values()] for run in runs])  # (rounds, arms, 2)
    seconds = pd.DataFrame(clocks[..., 0], columns=list(calls))
    ratios = pd.DataFrame({name: seconds[a] / seconds[b] for name, (a, b) in RATIOS.items()})
    arms = pd.DataFrame(np.median(clocks, axis=0), [*calls], ["seconds", "cpu_seconds"])
    tokens = int(traces.token_lengths.sum())
    arms["tokens_per_second"] = tokens / arms["seconds"]
    arms["states_bytes"] = [states_bytes.get(name, 0) for name in calls]
    told = arms.astype(object).assign(operations=pd.Series(operations, dtype=object))
    # Untrained, a policy that is queries only says what any other says.
    same = [loss for name, loss in losses.items() if name != "every_price"]
    size = f"{args.layers} layers of width {args.width}, {args.limit} traces of {args.steps} steps"
    return {
        **ratios.median().to_dict(),
        "intervals": ratios.agg(["min", "max"]).to_dict("list"),
        "arms": told.to_dict("index"),
        "loss_difference": max(same) - min(same),
        "base": f"{size}, {tokens} tokens",
    }


def main() -> None:
    """Measures, prints a table, and the numbers as one JSON object."""
    sizes = {
        "rounds": (5, 3, "timed steps of each arm"),
        "limit": (8, 3, "traces a step"),
        "width": (224, 112, "hidden size"),
        "layers": (28, 28, "layers of the base"),
        "steps": (20, 20, "steps a trace"),
        "tokens": (400, 120, "median tokens a trace"),
    }
    quick = "narrower and shorter: a minute"
    args = timing.parse(timing.options(__doc__, quick, before=True, sizes=sizes))
    result = measure(args)
    print(f"{result['base']}; {timing.environment()}")
    print(pd.DataFrame(result["arms"]).T.to_string(float_format="{:.4g}".format))
    for name, (low, high) in result["intervals"].items():
        print(f"{name:24}{result[name]:8.2f} [{low:.2f}, {high:.2f}]")
    print(f"{'losses differ by at most':24}{result['loss_difference']:8.1e}")
    timing.print_last_line(result, args.json)


if __name__ == "__main__":
    main()
