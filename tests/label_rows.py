"""A row of labels made by hand: nothing was sampled."""

from typing import Any


def label_row(
    problem_id: Any = "p0", sample_index: Any = 0, steps: int = 3, **changes: Any
) -> dict[str, Any]:
    """A trace that is right at its last step alone; columns that are given say otherwise."""
    return {
        **{"problem_id": problem_id, "sample_index": sample_index, "family": "sums"},
        **{"problem": "1+1?", "answer": "2", "prompt_ids": [1, 2]},
        "trace_ids": list(range(4 * steps)),
        "step_ends": [4 * i + 4 for i in range(steps)],
        "forced_answers": ["3"] * (steps - 1) + ["2"],
        "forced_correct": [0.0] * (steps - 1) + [1.0],
        "matches_final": [False] * (steps - 1) + [True],
        "forced_answer_tokens": [2] * steps,
        "forced_answer_ids": [[3, 4]] * steps,
        **{"forced_logprob": [-0.5] * steps, "forced_entropy": [0.25] * steps},
        "forced_answer_entropy": [0.5] * steps,
        **{"option_probabilities": [None] * steps, "ungraded_reasons": [None] * steps},
        **{"natural_answer": "2", "natural_correct": 1.0, "ended": "natural"},
        **{"natural_answer_tokens": 6, "natural_answer_ids": [2] * 6},
        **changes,
    }
