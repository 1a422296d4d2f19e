from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

from modeling_ospruner.formats_ospruner import TokenFormat
from ospruner.demo import recipe as recipe_module
from ospruner.demo.examples import batches_by_length, draw_examples
from ospruner.demo.fallible_reasoner import FIRST_CYCLE, SECOND_CYCLE, Habits
from ospruner.demo.recipe import Recipe, build_tokenizer, learning_rate_factor, train_reasoner
from ospruner.formats import DEEPSEEK_R1
from ospruner.progress import silent

SHORT = Recipe(tokens=6_000, second_tokens=3_000, batch_tokens=1_024)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(seed=0)


@pytest.fixture(autouse=True)
def small_chunks(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe_module, "CHUNK_EXAMPLES", 24)
    monkeypatch.setattr(recipe_module, "build_tokenizer", lambda seed: tokenizer)


def test_a_stopped_run_ends_with_the_weights_of_an_undisturbed_one(tmp_path: Path) -> None:
    train_reasoner(tmp_path / "whole", SHORT, silent)

    calls = 0

    def interrupt(phase: str, done: int, total: int, note: str = "") -> None:
        nonlocal calls
        calls += 1
        if calls == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_reasoner(tmp_path / "parts", SHORT, interrupt)
    assert not (tmp_path / "parts" / "reasoner").exists()
    train_reasoner(tmp_path / "parts", SHORT, silent)
    whole, parts = (
        load_file(tmp_path / name / "reasoner" / "model.safetensors") for name in ("whole", "parts")
    )
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert {tensor.dtype for tensor in whole.values()} == {torch.bfloat16}
    with pytest.raises(ValueError, match="other settings.*'seed': \\(0, 1\\)"):
        train_reasoner(tmp_path / "parts", replace(SHORT, seed=1), silent)


def test_learning_rate_rises_stays_falls_and_starts_again_lower() -> None:
    recipe = Recipe()
    first = [learning_rate_factor(n, recipe, False) for n in range(0, recipe.tokens, 10_000)]
    assert max(first) == 1.0
    assert first[0] < 0.05
    assert first[-1] < 0.05
    assert first[len(first) // 2] == 1.0
    second = [learning_rate_factor(n, recipe, True) for n in (0, recipe.second_tokens)]
    assert second == pytest.approx([0.3, 0.006])


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
    forced = natural = 0
    for example in examples:
        ids = example.ids.tolist()
        assert example.weights[0] == 0
        assert example.weights[-1] == 3.0
        end = ids.index(fmt.think_end_id)
        suffix = slice(end, end + len(fmt.forced_suffix()))
        if ids[suffix] == fmt.forced_suffix() and not example.weights[suffix].any():
            forced += 1
        else:
            natural += 1
            assert example.weights[end] == 1.0
    assert forced > 10
    assert natural > 10


def test_batches_hold_every_example_once(tokenizer: PreTrainedTokenizerFast) -> None:
    examples = draw_examples(tokenizer, 40, "batches", 5, True, FIRST_CYCLE)
    batches = batches_by_length(examples, 1_024, Random(0))
    assert all(ids.shape[1] % 32 == 0 for ids, _ in batches)
    rows = [row[row != 0].tolist() for ids, _ in batches for row in ids if row.any()]
    wanted = [example.ids[example.ids != 0].tolist() for example in examples]
    assert sorted(rows) == sorted(wanted)
    total = sum(weights.sum() for _, weights in batches)
    assert total == pytest.approx(np.sum([example.weights.sum() for example in examples]))
