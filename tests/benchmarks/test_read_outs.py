"""What a tail knows of the history of answers: linear read-outs of its states at step ends."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from modeling_ospruner import OSPrunerForCausalLM
from ospruner.eval.schema import FEATURES
from ospruner.train.traces import LabelledTraces


@pytest.fixture
def read_outs(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("benchmarks/read_outs.py")


@pytest.fixture
def policy(
    tiny_base: Qwen2ForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> OSPrunerForCausalLM:
    return OSPrunerForCausalLM.untrained(tiny_base, tiny_tokenizer, 2, tuning="queries")


def made_up(seed: int) -> Dataset:
    """60 traces of 2 to 7 steps of drawn tokens."""
    draws = np.random.default_rng(seed)
    rows = []
    for n in range(60):
        steps = int(draws.integers(2, 8))
        row = {name: None for name in FEATURES} | {
            "problem_id": str(n),
            "sample_index": 0,
            "prompt_ids": [5, 6],
            "trace_ids": draws.integers(10, 60, 3 * steps).tolist(),
            "step_ends": [3 * (step + 1) for step in range(steps)],
            "forced_answers": ["7"] * steps,
            "forced_correct": [1.0] * steps,
            "matches_final": [True] * steps,
            "forced_answer_tokens": [1] * steps,
            "natural_correct": 1.0,
            "natural_answer_tokens": 1,
            "ended": "natural",
        }
        rows.append(row)
    return Dataset.from_list(rows, features=FEATURES)


def test_what_is_linear_in_the_states_is_known_and_noise_is_not(
    read_outs: ModuleType, policy: OSPrunerForCausalLM
) -> None:
    traces, others = (LabelledTraces.from_dataset(made_up(seed)) for seed in (0, 1))
    draws = np.random.default_rng(2)
    way = draws.normal(size=(policy.policy.head.in_features, 1))

    def targets(of: LabelledTraces) -> np.ndarray:
        known = read_outs.at_step_ends(policy, of) @ way + 3
        noise = draws.normal(size=known.shape)
        return np.concatenate([known, noise], axis=2).astype(np.float32)

    fitted = read_outs.ReadOuts.fitted(policy, traces, targets(traces))
    known, noise = fitted.explained(others, targets(others))
    assert known > 0.999
    assert noise < 0.1
    assert not fitted.said(others)[~others.table.mask].any()


def test_states_are_those_that_the_head_reads_at_step_ends(
    read_outs: ModuleType, policy: OSPrunerForCausalLM
) -> None:
    """An untrained policy's are the base's own last states."""
    traces = LabelledTraces.from_dataset(made_up(0))
    found = read_outs.at_step_ends(policy, traces)
    ids = traces.input_ids(np.array([7]))
    with torch.no_grad():
        last = policy.base.model(ids).last_hidden_state[0]
    steps = int(traces.table.num_steps[7])
    ends = [2 + 3 * (step + 1) - 1 for step in range(steps)]
    np.testing.assert_allclose(found[7, :steps], last[ends].numpy(), atol=1e-5)


def test_estimates_stand_in_the_place_of_trials(read_outs: ModuleType) -> None:
    traces = read_outs.EstimatedTraces.from_dataset(made_up(0))
    traces.estimates = np.random.default_rng(0).normal(size=(60, 7, 11)).astype(np.float32)
    rows = np.flatnonzero(traces.table.num_steps <= 4)[:5]
    numbers = traces.trial_numbers(rows, 1, 16)
    assert numbers is not None
    steps = int(traces.table.num_steps[rows].max())
    np.testing.assert_array_equal(numbers.numpy(), traces.estimates[rows, :steps])
