"""Trains in the processes that torchrun launched: a program for test_several_processes.

torchrun ... several_processes.py LABELS OUT HOW BREAK_AFTER

HOW is a name of RUNS.
"""

from __future__ import annotations

import sys
from typing import Any

from ospruner.train.config import StopConfig
from ospruner.train.trainer import StopTrainer

STAGES: dict[str, Any] = {
    "head": "fixed",
    "prices": [1e-3, 2e-4],
    "tuning": "layers",
    "num_train_epochs": 1,
    "batch_size": 7,  # odd: two processes take different shares, and of the last batch one has none
    "learning_rate": 5e-4,
    "average": 0.5,
    "states_gib": 0.0,
    "save_strategy": "steps",
    "save_steps": 1,
    "limit": 45,
    "disable_tqdm": True,
    "use_cpu": True,
}
RUNS: dict[str, dict[str, Any]] = {
    "layers": STAGES,
    "price": STAGES | {"head": "price", "prices": [5e-5, 1e-2]},
    "queries": STAGES | {"tuning": "queries"},
    "probe": {k: v for k, v in STAGES.items() if k not in ("head", "prices")} | {"method": "probe"},
    "lora": STAGES | {"adapter_rank": 4},
}


class BreakOffError(Exception):
    """The run is killed here."""


def main() -> None:
    """Trains until it is done, or until so many steps are taken."""
    labels, out, how, break_after = sys.argv[1:]

    def count(phase: str, done: int, total: int, note: str = "") -> None:
        if phase == "train" and done > int(break_after):
            raise BreakOffError

    # One process takes a batch whole and runs the trunk anew; these take it in parts, and share a
    # folder of the trunk's states.
    parts = {"micro_batch_tokens": 400, "states": f"{out}.states"}
    config = StopConfig(out, **RUNS[how] | parts)
    trainer = StopTrainer(config, labels, progress=count)
    try:
        trainer.train()
    except BreakOffError:
        print(f"broke off in process {config.process_index} of {config.world_size}", flush=True)
    else:
        print(f"process {config.process_index}: {len(trainer.policies)} policies", flush=True)


if __name__ == "__main__":
    main()
