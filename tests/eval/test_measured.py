"""What models compute, against torch's counter and by hand; what rules measure and cost."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch.utils.flop_counter import FlopCounterMode
from transformers import GemmaConfig, MistralConfig, Qwen2ForCausalLM

from modeling_ospruner.policy_ospruner import decoder_layers
from ospruner.demo.shipped import Reasoner
from ospruner.eval.compute import Compute, LayerWork, ModelWork
from ospruner.eval.measured import Split, family_thresholds, measure, step_ends
from ospruner.eval.replay import replay_at
from ospruner.eval.table import TraceTable
from ospruner.rules import FAMILIES, Agreement, AnswerEntropy, ThinkJustEnough, TrialConfidence

from ..families import ORDINARY, OTHERS, make_base
from .evaluations import dataset_of, replay_rule
from .test_compare import split


def counted(base: Qwen2ForCausalLM, ids: torch.Tensor, **arguments: Any) -> tuple[int, Any]:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        output = base(ids, use_cache=True, logits_to_keep=1, **arguments)
    return counter.get_total_flops(), output.past_key_values


def test_a_decoded_token_costs_what_torch_counts(tiny_base: Qwen2ForCausalLM) -> None:
    tiny_base.set_attn_implementation("eager")
    work = ModelWork.of_config(tiny_base.config)
    assert len(work.layers) == 4
    _, cache = counted(tiny_base, torch.arange(10)[None])
    flops, _ = counted(tiny_base, torch.tensor([[3]]), past_key_values=cache)
    assert flops == float(work.read(10, 11)) + work.logits
    assert float(work.read(10, 11, 2)) == pytest.approx(float(work.read(10, 11)) / 2)
    assert float(work.read(0, 11, 0)) == 0


def test_a_layer_by_hand() -> None:
    work = ModelWork((LayerWork(token=100, attended=10),), logits=0)
    assert work.read(0, 4) == 400 + 10 * (1 + 2 + 3 + 4)
    assert work.read(2, 4) == 200 + 10 * (3 + 4)
    windowed = ModelWork((LayerWork(token=100, attended=10, window=3),), logits=0)
    assert windowed.read(0, 6) == 600 + 10 * (1 + 2 + 3 + 3 + 3 + 3)
    np.testing.assert_array_equal(windowed.read([0, 4], [6, 6]), [750, 260])


def test_windows_are_read_from_the_configuration() -> None:
    small: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 50}
    small |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    work = ModelWork.of_config(MistralConfig(**small, sliding_window=8))
    assert [layer.window for layer in work.layers] == [8, 8]
    # A head's width of its own: 2 heads of 32 numbers on a width of 16.
    wide = ModelWork.of_config(GemmaConfig(**small, head_dim=32))
    assert wide.layers[0].attended == 4 * 2 * 32


@pytest.mark.parametrize("family", [*ORDINARY, *OTHERS])
def test_the_work_of_every_family_is_that_of_its_matrices(family: str, reasoner: Reasoner) -> None:
    """A token meets every number of a layer but those of experts, and of vectors."""
    base = make_base(family, reasoner.tokenizer)
    work = ModelWork.of_config(base.config)
    for layer, one in zip(decoder_layers(base), work.layers, strict=True):
        matrices = [(name, p) for name, p in layer.named_parameters() if p.ndim > 1]
        met = sum(p.numel() for _, p in matrices)
        experts = sum(p.numel() for name, p in matrices if p.ndim == 3 and "experts" in name)
        assert one.token == 2 * met or 2 * (met - experts) < one.token < 2 * met
        assert bool(experts) == (one.token < 2 * met)


STEPS = ("forced_answers", "forced_answer_tokens", "forced_logprob", "forced_entropy")
ROWS: list[list[tuple[Any, ...]]] = [
    [("7", 3, -2.0, 1.5), ("8", 2, -0.2, 0.3), ("8", 2, -0.01, 0.1), ("8", 2, -0.01, 0.1)],
    [("", 8, -0.01, 0.9), ("5", 3, -0.5, 0.5), ("6", 3, -0.4, 0.6)],
]


def labelled() -> tuple[Dataset, TraceTable]:
    columns = {name: [[step[k] for step in one] for one in ROWS] for k, name in enumerate(STEPS)}
    columns["forced_correct"] = [[float(step[0] == "8") for step in one] for one in ROWS]
    dataset = dataset_of([[10, 20, 30, 40], [10, 20, 30]], **columns)
    return dataset, TraceTable.from_dataset(dataset)


SUFFIX = 4  # tokens forced before every trial answer


def test_the_compute_of_trial_answers_by_hand() -> None:
    """One layer: 100 operations a token and 10 for each token attended to, 1,000 for logits."""
    dataset, table = labelled()
    work = ModelWork((LayerWork(100, 10),), logits=1000)
    compute = Compute(work, np.array([5, 0]), SUFFIX)
    charged = compute.charge(table)

    def read(start: int, end: int) -> int:
        return sum(100 + 10 * (position + 1) for position in range(start, end))

    # Stopped after 20 tokens of thinking, and an answer of 2 of which the last is not read again.
    stopped = read(0, 5 + 20 + SUFFIX + 1) + 1000 * (20 + 2)
    assert charged.flops is not None
    assert charged.flops[0, 1] == stopped
    outcome = replay_rule(Split(dataset, charged, SUFFIX, compute=compute), AnswerEntropy(0.4))
    # Tried after 10 and 20 tokens, one token each: the closing is read, the logits are taken.
    trials = read(15, 15 + SUFFIX) + read(25, 25 + SUFFIX) + 2 * 1000
    assert outcome.flops[0] == stopped + trials
    free = replay_rule(Split(dataset, table, SUFFIX), AnswerEntropy(0.4))
    np.testing.assert_array_equal(outcome.tokens, free.tokens)
    # What never closed its box, or would have beyond the cap, is no answer.
    for rule, tokens in ((TrialConfidence(0.95), [30, 30]), (Agreement(2, max_tokens=1), [40, 30])):
        assert replay_rule(Split(dataset, table, SUFFIX), rule).tokens.tolist() == tokens
    assert compute.tail(charged, 1)[0, 1] == read(0, 25)
    queries, last = compute.tail(charged, 1, queries=True), int(table.last[0])
    assert queries[0, 1] == read(14, 15) + read(24, 25)
    assert queries[0, last] == queries[0, last - 1]


def test_what_labels_do_not_tell_is_refused() -> None:
    dataset, table = labelled()
    with pytest.raises(ValueError, match="base of these traces is not at hand, and its tokenizer"):
        replay_rule(Split(dataset, table, SUFFIX), ThinkJustEnough(0.5))
    entropies = [[None, *(step[3] for step in steps[1:])] for steps in ROWS]
    nulls = [[None] * len(steps) for steps in ROWS]
    bare = dataset.remove_columns("forced_entropy")
    partly, old = (bare.add_column("forced_entropy", one) for one in (entropies, nulls))
    assert replay_rule(Split(partly, table, SUFFIX), AnswerEntropy(0.4)).tokens.tolist() == [20, 30]
    with pytest.raises(ValueError, match="forced_entropy is null.*label again"):
        replay_rule(Split(old, table, SUFFIX), AnswerEntropy(0.4))


def random_split(seed: int) -> Split:
    """Labels of `test_compare` whose answers and words are drawn."""
    plain, rng = split(seed, "m", 12), np.random.default_rng(seed)
    steps = plain.table.num_steps
    answers = [rng.choice(["1", "2", "2.0", "", "no"], T).tolist() for T in steps]
    traces = [rng.integers(0, 6, T).tolist() for T in plain.table.full_tokens]
    dataset = plain.dataset.remove_columns(["forced_answers", "trace_ids"])
    dataset = dataset.add_column("forced_answers", answers).add_column("trace_ids", traces)
    words = ["wait two", "the answer is 4", "hmm two", "Wait", "now two and two", "\\boxed{4}"]
    entropy = rng.random(plain.table.mask.shape)
    return replace(
        plain,
        dataset=dataset,
        decode=lambda ids: " ".join(words[i] for i in ids[:4]),
        same=lambda a, b: a.rstrip(".0") == b.rstrip(".0"),
        thinking_entropy=lambda: entropy,
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_thresholds_of_the_matrix_stop_where_the_rule_of_a_row_does(name: str) -> None:
    """What generate runs step by step, and what replay reads off arrays, are one rule."""
    split, family = random_split(3), FAMILIES[name]
    measured, table = measure(split, family), split.table
    grid = family_thresholds(family, measured.signals, 9)
    assert (grid[0], grid[-1]) == (family.at_once, family.never)
    outcomes = [measured.outcome(table, family(value)) for value in grid]
    short = [outcome.mean_tokens for outcome in outcomes]
    assert short == sorted(short)
    for value, outcome in zip(grid, outcomes, strict=True):
        stops, rule = [], family(value, same=split.same)  # whose rows share nothing
        for n in range(len(table)):
            decide = rule.for_row()
            ends = step_ends(split, n, split.dataset[:], np.zeros(2))
            stops.append(next((end.step for end in ends if decide(end)[0]), int(table.last[n])))
        np.testing.assert_array_equal(outcome.tokens, replay_at(table, stops).tokens)


def test_thresholds_are_spread_by_rank_and_counted_once() -> None:
    budget = FAMILIES["budget"]  # from 1
    asked = ([3.0, 2.5, 2.5, 2.5, 2.0, np.nan], np.arange(2.0, 103.0), [np.nan])
    found = (family_thresholds(budget, np.array(one), 5)[1:-1] for one in asked)
    assert list(found) == [(2.0, 2.5, 3.0), (2.0, 52.0, 102.0), ()]
