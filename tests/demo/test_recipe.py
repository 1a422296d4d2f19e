"""What the embedded reasoner learns from, and how."""

from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from modeling_ospruner.formats_ospruner import TokenFormat
from ospruner.demo import recipe as recipe_module
from ospruner.demo.examples import batches_by_length, draw_examples
from ospruner.demo.fallible_reasoner import FIRST_CYCLE, SECOND_CYCLE, Habits, slip_rate, slipped
from ospruner.demo.problems import FAMILIES, SPLIT_SHARES, apply, draw_problem, iterate_problems
from ospruner.demo.recipe import Recipe, build_tokenizer, train_reasoner
from ospruner.formats import DEEPSEEK_R1

SHORT = Recipe(tokens=6_000, second_tokens=3_000, batch_tokens=1_024)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(seed=0)


@pytest.fixture(autouse=True)
def small_chunks(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe_module, "CHUNK_EXAMPLES", 24)
    monkeypatch.setattr(recipe_module, "build_tokenizer", lambda seed: tokenizer)


def test_a_short_run_leaves_a_reasoner_that_fits_its_tokenizer(tmp_path: Path) -> None:
    told: list[tuple[Any, ...]] = []
    train_reasoner(tmp_path, SHORT, lambda *state: told.append(state[:3]))
    assert told[-1] == ("tokens", 9_000, 9_000)
    assert told == sorted(told)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "reasoner")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "reasoner")
    assert model.dtype is torch.bfloat16
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    ids = torch.tensor([tokenizer.encode("24+17=41.")])
    assert torch.isfinite(model(ids).logits).all()


def test_tokenizer_keeps_breaks_and_digits_whole(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) <= 640
    assert "</think>" in tokenizer.decode(tokenizer.encode("</think>"), skip_special_tokens=True)
    ids = tokenizer.encode("24+17=41.\n\n", add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids) == [*list("24+17=41"), ".ĊĊ"]
    fmt = TokenFormat.compile(DEEPSEEK_R1, tokenizer)
    assert fmt.step_ends(ids) == [len(ids)]


@pytest.mark.parametrize("habits", [FIRST_CYCLE, SECOND_CYCLE])
def test_examples_mask_prompt_and_forced_text(
    tokenizer: PreTrainedTokenizerFast, habits: Habits
) -> None:
    fmt = TokenFormat.compile(DEEPSEEK_R1, tokenizer)
    examples = draw_examples(tokenizer, 60, "masks", 7, True, habits)
    forced = 0
    for example in examples:
        ids = example.ids.tolist()
        assert (example.weights[0], example.weights[-1]) == (0, 3)
        end = ids.index(fmt.think_end_id)
        suffix = slice(end, end + len(fmt.forced_suffix()))
        if ids[suffix] == fmt.forced_suffix() and not example.weights[suffix].any():
            forced += 1
        else:
            assert example.weights[end] == 1.0
    assert 10 < forced < 50


def test_batches_hold_every_example_once(tokenizer: PreTrainedTokenizerFast) -> None:
    examples = draw_examples(tokenizer, 40, "batches", 5, True, FIRST_CYCLE)
    batches = batches_by_length(examples, 1_024, Random(0))
    assert all(ids.shape[1] % 32 == 0 for ids, _ in batches)
    rows = [row[row != 0].tolist() for ids, _ in batches for row in ids if row.any()]
    wanted = [example.ids[example.ids != 0].tolist() for example in examples]
    assert sorted(rows) == sorted(wanted)
    total = sum(weights.sum() for _, weights in batches)
    assert total == pytest.approx(np.sum([example.weights.sum() for example in examples]))


def test_generator_is_seeded_and_splits_are_disjoint() -> None:
    def drawn(split: Any, seed: int) -> list[str]:
        return [one.problem for one in islice(iterate_problems(split, seed), 400)]

    splits = {name: drawn(name, 3) for name in SPLIT_SHARES}
    assert drawn("test", 3) == splits["test"] != drawn("test", 4)
    seen = [text for texts in splits.values() for text in texts]
    assert len(seen) == len(set(seen)), "a problem stands in two splits, or twice in one"
    with pytest.raises(ValueError, match="split='dev' is unknown"):
        drawn("dev", 0)


def test_answers_follow_from_the_plan() -> None:
    rng = Random(0)
    families = set()
    for _ in range(2000):
        problem = draw_problem(rng)
        families.add(problem.family)
        if problem.family in ("single", "chain", "equation", "remainder", "product"):
            value = problem.start
            for step in problem.plan:
                value = apply(value, step.symbol, step.right)
            assert value == problem.answer
        elif problem.family == "pair":
            total, product = problem.start, problem.plan[0].right
            assert problem.answer * (total - problem.answer) == product
            assert problem.answer >= total - problem.answer
        else:
            values = [apply(s.left or 0, s.symbol, s.right) for s in problem.plan]
            assert max(values) == problem.answer
    assert families == set(FAMILIES)


def test_a_slip_is_one_particular_wrong_value() -> None:
    rng = Random(1)
    for _ in range(500):
        a, b, symbol = rng.randint(2, 99), rng.randint(2, 99), rng.choice("+-*/%")
        assert slipped(a, symbol, b) != apply(a, symbol, b)
        assert 0 < slip_rate(a, symbol, b) < 0.5
