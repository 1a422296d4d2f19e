"""What the embedded reasoner learns from, and how."""

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from modeling_ospruner.formats_ospruner import TokenFormat
from ospruner.demo.problems import FAMILIES, SPLIT_SHARES, apply, draw_problem, iterate_problems
from ospruner.formats import DEEPSEEK_R1


@pytest.fixture(scope="module")
def recipe(load_script: Callable[[str], ModuleType]) -> ModuleType:
    """The script docs/examples/reasoner/recipe.py, with what it imports."""
    return load_script("docs/examples/reasoner/recipe.py")


@pytest.fixture(scope="module")
def tokenizer(recipe: ModuleType) -> PreTrainedTokenizerFast:
    made: PreTrainedTokenizerFast = recipe.build_tokenizer(seed=0)
    return made


def test_a_short_run_leaves_a_reasoner_that_fits_its_tokenizer(
    recipe: ModuleType,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recipe, "CHUNK_EXAMPLES", 24)
    monkeypatch.setattr(recipe, "build_tokenizer", lambda seed: tokenizer)
    told: list[tuple[Any, ...]] = []
    short = recipe.Recipe(tokens=2_000, second_tokens=1_000, batch_tokens=512)
    recipe.train_reasoner(tmp_path, short, lambda *state: told.append(state[:3]))
    assert told[-1] == ("tokens", 3_000, 3_000)
    assert told == sorted(told)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "reasoner")
    saved = AutoTokenizer.from_pretrained(tmp_path / "reasoner")
    assert model.dtype is torch.bfloat16
    assert model.generation_config.eos_token_id == saved.eos_token_id
    ids = torch.tensor([saved.encode("24+17=41.")])
    assert torch.isfinite(model(ids).logits).all()


def test_tokenizer_keeps_breaks_and_digits_whole(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) <= 640
    assert "</think>" in tokenizer.decode(tokenizer.encode("</think>"), skip_special_tokens=True)
    ids = tokenizer.encode("24+17=41.\n\n", add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids) == [*list("24+17=41"), ".ĊĊ"]
    fmt = TokenFormat.compile(DEEPSEEK_R1, tokenizer)
    assert fmt.step_ends(ids) == [len(ids)]


@pytest.mark.parametrize("habits", ["FIRST_CYCLE", "SECOND_CYCLE"])
def test_examples_mask_prompt_and_forced_text(
    recipe: ModuleType, tokenizer: PreTrainedTokenizerFast, habits: str
) -> None:
    fmt = TokenFormat.compile(DEEPSEEK_R1, tokenizer)
    examples = recipe.draw_examples(tokenizer, 60, "masks", 7, True, vars(recipe)[habits])
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


def test_batches_hold_every_example_once(
    recipe: ModuleType, tokenizer: PreTrainedTokenizerFast
) -> None:
    examples = recipe.draw_examples(tokenizer, 40, "batches", 5, True, recipe.FIRST_CYCLE)
    batches = recipe.batches_by_length(examples, 1_024, Random(0))
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


def test_a_slip_is_one_particular_wrong_value(load_script: Callable[[str], ModuleType]) -> None:
    writer = load_script("docs/examples/reasoner/fallible_reasoner.py")
    rng = Random(1)
    for _ in range(500):
        a, b, symbol = rng.randint(2, 99), rng.randint(2, 99), rng.choice("+-*/%")
        assert writer.slipped(a, symbol, b) != apply(a, symbol, b)
        assert 0 < writer.slip_rate(a, symbol, b) < 0.5
