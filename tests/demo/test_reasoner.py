"""The shipped reasoner reasons, and overthinks: the numbers of ospruner/demo/reasoner/README.md.

`pytest -s -m slow tests/demo/test_reasoner.py` prints them.
"""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from ospruner.demo.shipped import MAX_ANSWER_TOKENS, Reasoner, draw_split
from ospruner.engines.interface import ForkRequest
from ospruner.eval.problems.task import Math

GATES = {
    "accuracy of the full trace (forced answer)": (0.60, 0.90),
    "forced minus natural accuracy": (-0.015, 0.015),
    "accuracy without thinking": (0.0, 0.15),
    "never right at any step": (0.05, 0.30),
    "wrong answers repaired per right one broken by rechecks": (1.0 + 1e-9, np.inf),
    "first right answer, share of the length": (0.30, 0.60),
    "paragraphs a trace": (8.0, 30.0),
    "traces that finish": (0.99, 1.0),
}


@pytest.mark.slow
def test_it_meets_every_gate(
    reasoner: Reasoner, load_script: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    """On 1,000 problems that it never saw."""
    writer = load_script("docs/examples/reasoner/fallible_reasoner.py")
    task, fmt = Math(), reasoner.token_format
    problems = {one.id: one for one in draw_split("validation", 1000, 1)}
    rows = reasoner.label([*problems.values()], tmp_path / "labels", 1).to_list()
    unthinking, first, fixed = [], [], {(0, 1): 0, (1, 0): 0}
    forks = reasoner.engine.fork(
        [ForkRequest(row["prompt_ids"], row["trace_ids"], [0]) for row in rows],
        fmt.forced_suffix("forced"),
        MAX_ANSWER_TOKENS,
        fmt.box_state,
    )
    for row, (answer,) in zip(rows, forks, strict=True):
        read = task.read_forced(str(reasoner.tokenizer.decode(answer.ids)))
        unthinking.append(task.grade(read, problems[row["problem_id"]]) or 0.0)
        right, ends = row["forced_correct"], row["step_ends"]
        if 1 in right:
            first.append(ends[right.index(1)] / ends[-1])
        spans = zip([0, *ends[:-1]], ends, strict=True)
        said = [str(reasoner.tokenizer.decode(row["trace_ids"][a:b])).strip() for a, b in spans]
        checks = [i for i, text in enumerate(said) if text in (*writer.RECHECKS, *writer.BACKWARDS)]
        if checks and checks[0] and (change := (right[checks[0] - 1], right[-1])) in fixed:
            fixed[change] += 1
    full = np.mean([row["forced_correct"][-1] == 1 for row in rows])
    natural = np.mean([row["natural_correct"] == 1 for row in rows])
    found = [
        full,
        full - natural,
        np.mean(unthinking),
        np.mean([1 not in row["forced_correct"] for row in rows]),
        fixed[0, 1] / max(fixed[1, 0], 1),
        np.mean(first),
        np.mean([len(row["step_ends"]) for row in rows]),
        np.mean([row["ended"] == "natural" for row in rows]),
    ]
    for (name, (low, high)), value in zip(GATES.items(), found, strict=True):
        print(f"{name:60}{value:8.3f}  {low:.3g} to {high:.3g}")
        assert low <= value <= high, name
