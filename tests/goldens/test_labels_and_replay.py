"""Labels, and replay on them, are those of 1b71721: traces, steps, answers, grades, outcomes.

`problems.jsonl` holds 24 problems of the embedded reasoner; `labels/` was made of them by
`ospruner label --base train/toy/reasoner --samples 2 --max-tokens 400 --seed 3`, and
`goldens.json` holds what replay and the rules without training made of it, a trace at a time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from ospruner.demo import REASONER
from ospruner.demo.shipped import Reasoner
from ospruner.eval import replay as replays
from ospruner.eval.measured import Split
from ospruner.eval.problems.problem import Problem
from ospruner.eval.schema import LabelSettings
from ospruner.eval.table import TraceTable
from ospruner.rules import parse_rule
from ospruner.train.labels.loading import load_labels
from ospruner.train.labels.making import Labeller, label_problems

from ..eval.evaluations import replay_rule

HERE = Path(__file__).parent
RECORDED: Any = json.loads((HERE / "goldens.json").read_text())
FORCED_TOKENS = 4  # the closing and the box prefix, as they were counted


@pytest.fixture(scope="module")
def traces() -> Any:
    return load_labels(HERE / "labels").traces


def outcome(name: str, traces: Any) -> replays.Outcome:
    table = TraceTable.from_dataset(traces)
    rows, steps = table.mask.shape
    wave = [[np.sin(1.7 * step + 0.3 * row) for step in range(steps)] for row in range(rows)]
    probabilities = 0.5 + 0.5 * np.array(wave)
    kind, number = [*name.replace(":", " ").split(), "0"][:2]
    ways: dict[str, Callable[[], replays.Outcome]] = {
        "sample": lambda: replays.replay(table, probabilities),
        "threshold": lambda: replays.replay(table, probabilities, threshold=float(number)),
        "full": lambda: replays.replay_full(table),
        "oracle": lambda: replays.hindsight_oracle(table, float(number)),
        "budget": lambda: replays.replay_budget(table, int(number)),
        "step": lambda: replays.replay_step(table, int(number)),
    }
    if kind in ways:
        return ways[kind]()
    tokenizer = AutoTokenizer.from_pretrained(REASONER)
    split = Split(traces, table, FORCED_TOKENS, lambda ids: str(tokenizer.decode(ids)))
    rule: Any = parse_rule(name)
    return replay_rule(split, rule)


@pytest.mark.parametrize("name", RECORDED["replay"])
def test_replay_gives_what_it_gave(name: str, traces: Any) -> None:
    found = outcome(name, traces)
    for column, values in RECORDED["replay"][name].items():
        np.testing.assert_allclose(getattr(found, column), values, atol=2e-6, err_msg=column)


PROBLEMS = 5  # of 24: the whole record takes half a minute
HOW: dict[str, dict[str, Any]] = {
    "sampled": {"samples_per_problem": 2, "max_answer_tokens": 32, "seed": 3},
    "greedy": {"temperature": 0, "max_answer_tokens": 512, "answer": "free"},
}


@pytest.mark.parametrize("name", HOW)
def test_labels_are_what_they_were(name: str, reasoner: Reasoner, tmp_path: Path) -> None:
    lines = (HERE / "problems.jsonl").read_text().splitlines()[:PROBLEMS]
    problems = [Problem(**json.loads(line)) for line in lines]
    base = str(reasoner.folder)
    settings = LabelSettings(base_model=base, max_new_tokens=400, **HOW[name])
    labeller = Labeller(reasoner.tokenizer, reasoner.token_format, settings)
    rows = label_problems(problems, reasoner.engine, labeller, tmp_path).to_list()
    wanted = {problem.id for problem in problems}
    recorded = [row for row in RECORDED["labels"][name] if row["problem_id"] in wanted]
    assert len(rows) == len(recorded) >= PROBLEMS
    for row, expected in zip(rows, recorded, strict=True):
        ids = json.dumps(list(row["trace_ids"])).encode()
        same = {name: row[name] for name in ("problem_id", "sample_index", "step_ends", "ended")}
        assert expected == same | {
            "trace": hashlib.sha256(ids).hexdigest()[:12],
            "answers": row["forced_answers"],
            "correct": "".join(str(int(one)) for one in row["forced_correct"]),
            "natural": row["natural_answer"],
        }
