"""Labels are those that 1b71721 made: the same traces, steps, answers and grades."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from ospruner.demo.shipped import Reasoner
from ospruner.eval.problems.problem import Problem
from ospruner.eval.schema import LabelSettings
from ospruner.train.labels.making import Labeller, label_problems

HERE = Path(__file__).parent
RECORDED: Any = json.loads((HERE / "goldens.json").read_text())["labels"]
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
    recorded = [row for row in RECORDED[name] if row["problem_id"] in wanted]
    assert len(rows) == len(recorded) >= PROBLEMS
    for row, expected in zip(rows, recorded, strict=True):
        ids = json.dumps(list(row["trace_ids"])).encode()
        found = {
            "problem_id": row["problem_id"],
            "sample_index": row["sample_index"],
            "trace": hashlib.sha256(ids).hexdigest()[:12],
            "step_ends": row["step_ends"],
            "answers": row["forced_answers"],
            "correct": "".join(str(int(one)) for one in row["forced_correct"]),
            "natural": row["natural_answer"],
            "ended": row["ended"],
        }
        assert found == expected
