"""Rewards of policies of every price on one set of labels, and what the later differ by.

    python benchmarks/tunings.py --policies DIR DIR --labels DIR [--states DIR] [--json FILE]

Each policy's exact expected reward at seven prices and their mean, with intervals that resample
problems; differences from the first policy are paired. The seconds are of all epochs, without the
base's pass before them. On the embedded reasoner, where policies can be trained with several rates
and seeds, `benchmarks/forms.py` does the same for whole forms.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from forms import PRICES, estimates, resampled, rewards, seconds_of
from timing import environment, print_last_line

from modeling_ospruner import OSPrunerForCausalLM
from ospruner.eval.results_file import Estimate
from ospruner.eval.text import markdown_table, penalty_name
from ospruner.train.fresh import predict_outputs
from ospruner.train.from_labels import load_labelled_base, load_labels
from ospruner.train.traces import LabelledTraces


def main() -> None:
    """Prints the tables, and the numbers as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policies", nargs="+", required=True, help="folders, the bar first")
    parser.add_argument("--labels", type=Path, required=True, help="to measure on")
    parser.add_argument("--base", help="where the base lies, if elsewhere than when labelled")
    parser.add_argument("--states", type=Path, help="folder of the trunk's states")
    parser.add_argument("--json", metavar="FILE", help="also write the last line there")
    args = parser.parse_args()
    labels = load_labels(args.labels)
    base, _ = load_labelled_base(args.base, labels)
    traces = LabelledTraces.from_dataset(labels.traces)
    if args.states:
        traces.keep_states(args.states)
    found: list[dict[str, Any]] = []
    first = None
    for folder in args.policies:
        model = OSPrunerForCausalLM.from_base(base, folder)
        measured = resampled(traces.table, [rewards(traces.table, predict_outputs(model, traces))])
        first = measured if first is None else first
        one = {"policy": folder, "tuning": model.config.tuning, "seconds": seconds_of(Path(folder))}
        for name, values in (("reward_points", measured), ("less_first", measured - first)):
            one[name] = [dataclasses.asdict(estimate) for estimate in estimates(values)]
        found.append(one)
    heads = [*(f"λ={penalty_name(price)}" for price in PRICES), "mean"]
    for name, signed, shown in (("reward_points", False, found), ("less_first", True, found[1:])):
        rows = [
            [one["tuning"], *(Estimate(**e).text(1, 2, signed=signed) for e in one[name])]
            for one in shown
        ]
        head = f"less {found[0]['tuning']}" if signed else "reward, points"
        print(markdown_table([head, *heads], rows))
    result = {"policies": found, "prices": PRICES, "traces": len(labels.traces), **environment()}
    print_last_line(result, args.json)


if __name__ == "__main__":
    main()
