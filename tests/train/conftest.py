"""What the training tests share: made-up labelled traces whose answer can be seen in the tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from ospruner.eval.schema import FEATURES

MakeLabels = Callable[..., Dataset]


@pytest.fixture(scope="session")
def make_labels(tiny_tokenizer: PreTrainedTokenizerFast) -> MakeLabels:
    """Makes N labelled traces; from step `solved_at` on, digits and "7" show that it is solved."""
    words = tiny_tokenizer.encode(" apples buys more", add_special_tokens=False)
    solved = tiny_tokenizer.encode(" 7 7 7", add_special_tokens=False)
    boundary = tiny_tokenizer.encode(".\n\n", add_special_tokens=False)
    prompt = tiny_tokenizer.encode("Ann has 3 apples", add_special_tokens=False)
    assert len(boundary) == 1

    def make(count: int, seed: int = 0, prefix: str = "p", **changes: Any) -> Dataset:
        draws = np.random.default_rng(seed)
        rows = []
        for n in range(count):
            steps, ids, ends = int(draws.integers(3, 9)), [], []
            solved_at = int(draws.integers(1, steps))
            for step in range(steps):
                body = solved if step >= solved_at else words
                ids += [body[i] for i in draws.integers(0, len(body), 4)] + boundary
                ends.append(len(ids))
            right = [float(step >= solved_at) for step in range(steps)]
            answers = ["7" if value else "3" for value in right]
            row = {
                "problem_id": f"{prefix}{n}",
                "sample_index": 0,
                "family": "",
                "problem": "Ann has 3 apples",
                "answer": "7",
                "prompt_ids": prompt,
                "trace_ids": ids,
                "step_ends": ends,
                "forced_answers": answers,
                "forced_correct": right,
                "matches_final": [value == right[-1] for value in right],
                "forced_answer_tokens": [2] * steps,
                "forced_answer_ids": [[3, 4]] * steps,
                "forced_logprob": [-0.5] * steps,
                "forced_entropy": [0.25] * steps,
                "ungraded_reasons": [None] * steps,
                "natural_answer": "7",
                "natural_correct": 1.0,
                "natural_answer_tokens": 5,
                "natural_answer_ids": [2] * 5,
                "ended": "natural",
            }
            rows.append({name: changes.get(name, value) for name, value in row.items()})
        return Dataset.from_list(rows, features=FEATURES)

    return make
