"""How much of what a policy saves is of traces that are never right, and can it tell them apart?

    ospruner demo
    OMP_NUM_THREADS=1 python benchmarks/giving_up.py --policy runs/demo/policy \
        --labels runs/demo/labels/test [--json FILE]

A trace is hopeless where the answer forced at no step is right. Of the traces that the policy stops
before their end, in mode "threshold" at a few of its prices, some are hopeless and some are right
where they stop. How well does a number tell them apart? .5 is chance, 1 is always (the area under
the ROC curve, with its standard error after Hanley and McNeil).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from timing import environment, print_last_line

from ospruner.calibrating import PRICE_THRESHOLD
from ospruner.comparing import Judged
from ospruner.eval.methods import parse_policies
from ospruner.eval.stopping import threshold_stop
from ospruner.eval.table import BoolArray, FloatArray, TraceTable


def told_apart(values: FloatArray, hopeless: BoolArray) -> tuple[float, float]:
    """The area under the ROC curve of "lower means hopeless", and its standard error."""
    low, high = values[hopeless], values[~hopeless]
    if not len(low) or not len(high):
        return float("nan"), float("nan")
    area = float(
        ((low[:, None] < high).sum() + 0.5 * (low[:, None] == high).sum()) / (len(low) * len(high))
    )
    q1, q2 = area / (2 - area), 2 * area**2 / (1 + area)
    spread = area * (1 - area) + (len(low) - 1) * (q1 - area**2) + (len(high) - 1) * (q2 - area**2)
    return area, float((spread / (len(low) * len(high))) ** 0.5)


def answer_history(traces: Dataset, table: TraceTable) -> tuple[FloatArray, FloatArray]:
    """(N, T) equal forced answers in a row, and the mean probability of each one's tokens."""
    runs, sure = np.zeros(table.mask.shape), np.zeros(table.mask.shape)
    for n, row in enumerate(traces.select_columns(["forced_answers", "forced_logprob"])):
        texts = ["".join(answer.split()) for answer in row["forced_answers"]]
        for step, text in enumerate(texts):
            again = step > 0 and text == texts[step - 1]
            runs[n, step] = runs[n, step - 1] + 1 if again else 1
        known = [-np.inf if one is None else one for one in row["forced_logprob"]]
        sure[n, : len(known)] = np.exp(known)
    return runs, sure


def measure(policy: str, labels: str) -> dict[str, Any]:
    """The shares, and how well each number tells the stops apart."""
    ours = Judged(labels)
    table = TraceTable.from_dataset(ours.traces)
    use = parse_policies([policy])[0]
    if use.config.prices is None:
        raise SystemExit(f"{policy} is a policy of one lambda: give one of every price")
    said = ours.predicted(use.path)
    assert said.indifference is not None
    runs, sure = answer_history(ours.traces, table)
    hopeless = table.correct.max(axis=1) < 0.5
    n = np.arange(len(table))
    rows = []
    for price in use.config.prices.grid()[5::5]:
        pi = said.probabilities(price)
        mask = torch.from_numpy(table.mask)
        stops = threshold_stop(torch.from_numpy(pi), PRICE_THRESHOLD, mask).numpy()
        saved = table.full_tokens - table.lengths[n, stops]
        early = stops < table.last
        told = early & (hopeless | (table.correct[n, stops] >= 0.5))
        signals = {
            "stop probability": -pi[n, stops],
            "price of indifference": said.indifference[n, stops],
            "thinking tokens, fewer": -table.lengths[n, stops].astype(float),
            "forced answer's confidence": sure[n, stops],
            "run of equal answers": runs[n, stops],
        }
        rows.append(
            {
                "price": price,
                "stopped_early": float(early.mean()),
                "hopeless_of_saving": float(saved[hopeless].sum() / max(saved.sum(), 1)),
                "told_apart": {
                    name: told_apart(values[told], hopeless[told])
                    for name, values in signals.items()
                },
            }
        )
    return {
        "traces": len(table),
        "hopeless": float(hopeless.mean()),
        "hopeless_of_tokens": float(table.full_tokens[hopeless].sum() / table.full_tokens.sum()),
        "rows": rows,
        "labels": ours.labels.data_hash,
        **environment(),
    }


def report(found: dict[str, Any]) -> None:
    """Prints the shares and areas."""
    print(
        f"{found['traces']} traces; hopeless: {100 * found['hopeless']:.1f} % of them, "
        f"{100 * found['hopeless_of_tokens']:.1f} % of the thinking tokens"
    )
    print(f"{'price of a token':32}" + "".join(f"{row['price']:>14.2e}" for row in found["rows"]))
    for name in ("stopped_early", "hopeless_of_saving"):
        cells = "".join(f"{100 * row[name]:13.1f}%" for row in found["rows"])
        print(f"{name.replace('_', ' '):32}{cells}")
    print("area under the ROC curve, hopeless against right")
    for name in found["rows"][0]["told_apart"]:
        pairs = [row["told_apart"][name] for row in found["rows"]]
        print(f"  {name:30}" + "".join(f"{area:8.2f} ±{error:.2f}" for area, error in pairs))


def main() -> None:
    """Measures, prints the table, and the numbers as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", default="runs/demo/policy", help="of every price")
    parser.add_argument("--labels", type=Path, default=Path("runs/demo/labels/test"))
    parser.add_argument("--json", metavar="FILE", help="also write the last line there")
    args = parser.parse_args()
    found = measure(args.policy, str(args.labels))
    report(found)
    print_last_line(found, args.json)


if __name__ == "__main__":
    main()
