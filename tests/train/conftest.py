"""What the training tests share: made-up traces whose tokens show the answer, and runs on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from modeling_ospruner.formats_ospruner import DEEPSEEK_R1
from ospruner.durable import read_checked_line
from ospruner.eval.schema import FEATURES, LabelSettings
from ospruner.train.loop import StageResult, train
from ospruner.train.settings import TrainSettings
from ospruner.train.traces import LabelledTraces

MakeLabels = Callable[..., Dataset]
PENALTY = 5e-3
SETTINGS = TrainSettings(
    # Started at 1e-2, this problem collapses to "never stop", as the paper describes.
    length_penalties=(3e-2, 1e-2, PENALTY),
    epochs_per_stage=5,
    batch_size=8,
    learning_rate=2e-3,
    head_learning_rate=1e-2,
    tuning="layers",
)
SHORT = dataclasses.replace(SETTINGS, length_penalties=(1e-2,), epochs_per_stage=1)


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
                "forced_answer_entropy": [0.5] * steps,
                "option_probabilities": [None] * steps,
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


@pytest.fixture
def fit(
    tiny_base: Qwen2ForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    tiny_base_dir: Path,
    make_labels: MakeLabels,
    tmp_path: Path,
) -> Callable[..., list[StageResult]]:
    """Trains on 64 made-up traces, unless told otherwise."""

    def run(
        settings: TrainSettings = SETTINGS,
        labels: Dataset | LabelledTraces | None = None,
        out: Path = tmp_path / "run",
        states: Path | None = None,
        **changes: Any,
    ) -> list[StageResult]:
        labels = make_labels(64) if labels is None else labels
        held_out = changes.pop("validation", make_labels(40, seed=1, prefix="v"))
        if states is not None:
            labels, held_out = map(LabelledTraces.from_dataset, (labels, held_out))
            for traces in (labels, held_out):
                traces.keep_states(states)
        label_settings = LabelSettings(
            base_model=str(tiny_base_dir), reasoning_format=DEEPSEEK_R1.to_dict()
        )
        return train(
            tiny_base, tiny_tokenizer, labels, held_out, settings, label_settings, out, **changes
        )

    return run


def log_of(out: Path) -> list[dict[str, Any]]:
    lines = (out / "log.jsonl").read_bytes().splitlines()
    return [read_checked_line(line, "log.jsonl", "") for line in lines]
