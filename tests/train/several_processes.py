"""Trains in the processes that accelerate launched: a program for test_several_processes.

accelerate launch ... several_processes.py LABELS OUT HOW BREAK_AFTER

HOW is shard, copies, price, queries or queries-shard.
"""

from __future__ import annotations

import dataclasses
import sys

from ospruner.eval.table import TraceTable
from ospruner.train.from_labels import train_from_labels
from ospruner.train.processes import open_processes
from ospruner.train.settings import TrainSettings

SETTINGS = TrainSettings(
    length_penalties=(1e-3, 2e-4),
    batch_size=7,  # odd: two processes take different shares, and of the last batch one has none
    learning_rate=5e-4,
    swa_share=0.5,
    cache_limit_bytes=0,
    checkpoint_every=1,
    tuning="layers",
)


PRICED = dataclasses.replace(
    SETTINGS, head="price", price_range=(5e-5, 1e-2), length_penalties=(), entropy_bonus=0.01
)


QUERIES = dataclasses.replace(SETTINGS, tuning="queries")
OF = {"price": PRICED, "queries": QUERIES, "queries-shard": QUERIES}


class BreakOffError(Exception):
    """The run is killed here."""


def main() -> None:
    """Trains until it is done, or until so many steps are taken."""
    labels, out, how, break_after = sys.argv[1:]
    processes = open_processes(out, shard=how.endswith("shard"))
    steps = 0

    def count(phase: str, done: int, total: int, note: str = "") -> None:
        nonlocal steps
        steps += phase == "train"
        if steps > int(break_after):
            raise BreakOffError

    def settings(table: TraceTable) -> TrainSettings:
        # One process takes a batch whole and runs the trunk anew, these take it in parts.
        return dataclasses.replace(
            OF.get(how, SETTINGS),
            gradient_checkpointing=how.endswith("shard"),
            micro_batch_tokens=400,
        )

    try:
        # Copies share a file of the trunk's states.
        states = f"{out}.states" if how in ("copies", "queries") else None
        train_from_labels(labels, out, settings, states=states, progress=count, processes=processes)
    except BreakOffError:
        print(
            f"broke off in process {processes.rank} of {processes.size}, sharded: "
            f"{processes.sharded}",
            flush=True,
        )
    processes.end()


if __name__ == "__main__":
    main()
