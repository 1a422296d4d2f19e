from collections.abc import Callable
from pathlib import Path
from random import Random
from types import ModuleType

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from modeling_ospruner.formats_ospruner import TokenFormat
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
    told: list[tuple[str, int, int]] = []
    short = recipe.Recipe(tokens=6_000, second_tokens=3_000, batch_tokens=1_024)
    recipe.train_reasoner(
        tmp_path, short, lambda phase, done, total, note="": told.append((phase, done, total))
    )
    assert told[-1] == ("tokens", 9_000, 9_000)
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
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
