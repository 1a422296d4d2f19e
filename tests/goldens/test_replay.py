"""What 1b71721 gave on labels that it made: the labels still read, and replay gives the same.

`problems.jsonl` holds 24 problems of the embedded reasoner; `labels/` was made of them by
`ospruner label --base train/toy/reasoner --samples 2 --max-tokens 400 --seed 3`, and
`goldens.json` holds what replay and the rules without training made of it, a trace at a time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from ospruner.demo import REASONER
from ospruner.eval import replay as replays
from ospruner.eval.measured import Split
from ospruner.eval.table import TraceTable
from ospruner.rules import parse_rule
from ospruner.train.labels.loading import load_labels

from ..eval.evaluations import replay_rule

HERE = Path(__file__).parent
RECORDED: Any = json.loads((HERE / "goldens.json").read_text())["replay"]
FORCED_TOKENS = 4  # the closing and the box prefix, as they were counted


@pytest.fixture(scope="module")
def traces() -> Any:
    return load_labels(HERE / "labels").traces


def outcome(name: str, traces: Any) -> replays.Outcome:
    table = TraceTable.from_dataset(traces)
    rows, steps = table.mask.shape
    wave = [[np.sin(1.7 * step + 0.3 * row) for step in range(steps)] for row in range(rows)]
    probabilities = 0.5 + 0.5 * np.array(wave)
    kind, _, number = name.partition(" ")
    if kind == "sample":
        return replays.replay(table, probabilities)
    if kind == "threshold":
        return replays.replay(table, probabilities, threshold=float(number))
    if kind == "full":
        return replays.replay_full(table)
    if kind == "oracle":
        return replays.hindsight_oracle(table, float(number))
    kind, _, number = name.partition(":")
    if kind == "budget":
        return replays.replay_budget(table, int(number))
    if kind == "step":
        return replays.replay_step(table, int(number))
    tokenizer = AutoTokenizer.from_pretrained(REASONER)
    split = Split(traces, table, FORCED_TOKENS, lambda ids: str(tokenizer.decode(ids)))
    rule: Any = parse_rule(name)
    return replay_rule(split, rule)


@pytest.mark.parametrize("name", RECORDED)
def test_replay_gives_what_it_gave(name: str, traces: Any) -> None:
    found = outcome(name, traces)
    for column, values in RECORDED[name].items():
        np.testing.assert_allclose(getattr(found, column), values, atol=2e-6, err_msg=column)
