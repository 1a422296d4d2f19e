"""What ships: the reasoner, whose README's numbers these are, and the policy, of nobody's machine.

`pytest -s -m slow tests/demo/test_reasoner.py` prints the numbers.
"""

import io
import json
import re
from itertools import islice
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from modeling_ospruner import OSPrunerConfig
from modeling_ospruner.formats_ospruner import TokenFormat
from ospruner.demo import POLICY, REASONER
from ospruner.demo.demo import STANDARD, run_demo
from ospruner.demo.problems import FAMILIES, SPLIT_SHARES, apply, draw_problem, iterate_problems
from ospruner.demo.shipped import FORMAT, MAX_ANSWER_TOKENS, Reasoner, draw_split
from ospruner.engines.interface import ForkRequest
from ospruner.eval.metrics import CHOSEN_BY
from ospruner.eval.problems.problem import user_message
from ospruner.eval.problems.task import Math
from ospruner.eval.results import Results
from ospruner.formats import DEEPSEEK_R1
from ospruner.provenance import read_provenance

from ..chats import chat_batch
from ..conftest import LoadScript


@pytest.fixture(scope="module")
def shipping(load_script: LoadScript) -> ModuleType:
    """The script docs/examples/reasoner/ship_policy.py."""
    return load_script("docs/examples/reasoner/ship_policy.py")


@pytest.mark.slow
def test_it_meets_every_gate(reasoner: Reasoner, load_script: LoadScript, tmp_path: Path) -> None:
    """On 1,000 problems that it never saw."""
    writer = load_script("docs/examples/reasoner/fallible_reasoner.py")
    task, fmt = Math(), reasoner.token_format
    problems = {one.id: one for one in draw_split("validation", 1000, 1)}
    rows = reasoner.label([*problems.values()], tmp_path / "labels", 1).to_list()
    unthinking, first, fixed = [], [], {(0, 1): 0, (1, 0): 0}
    asked = [ForkRequest(row["prompt_ids"], row["trace_ids"], [0]) for row in rows]
    how = (fmt.forced_suffix("forced"), MAX_ANSWER_TOKENS, fmt.box_state)
    forks = reasoner.engine.fork(asked, *how)
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
    never = np.mean([1 not in row["forced_correct"] for row in rows])
    repaired = fixed[0, 1] / max(fixed[1, 0], 1)
    paragraphs = np.mean([len(row["step_ends"]) for row in rows])
    finished = np.mean([row["ended"] == "natural" for row in rows])
    for name, value, low, high in (
        ("accuracy of the full trace (forced answer)", full, 0.60, 0.90),
        ("forced minus natural accuracy", full - natural, -0.015, 0.015),
        ("accuracy without thinking", np.mean(unthinking), 0.0, 0.15),
        ("never right at any step", never, 0.05, 0.30),
        ("wrong answers repaired per right one broken by rechecks", repaired, 1.0 + 1e-9, np.inf),
        ("first right answer, share of the length", np.mean(first), 0.30, 0.60),
        ("paragraphs a trace", paragraphs, 8.0, 30.0),
        ("traces that finish", finished, 0.99, 1.0),
    ):
        print(f"{name:60}{value:8.3f}  {low:.3g} to {high:.3g}")
        assert low <= value <= high, name


def test_it_is_small_and_of_nobodys_machine(shipping: ModuleType) -> None:
    sizes = {path.name: path.stat().st_size for path in POLICY.iterdir()}
    assert set(sizes) == {*shipping.FILES, "README.md", "provenance.json"}
    assert sum(sizes.values()) < 3_000_000
    said = json.loads((POLICY / "config.json").read_text())
    assert said["base_model_name_or_path"] == "../reasoner"
    assert "auto_map" not in said
    for name in ("config.json", "results.json", "provenance.json"):
        assert not re.search(r"\"/|/tmp/|/home/", (POLICY / name).read_text()), name
    config = OSPrunerConfig.from_pretrained(POLICY)
    assert config.base_model_name_or_path == str(REASONER)
    # Labels of `ospruner label` on the reasoner go with it.
    assert config.reasoning_format == FORMAT.to_dict()
    details = read_provenance(POLICY).details
    assert details["price_chosen_by"] == CHOSEN_BY
    assert "warning" not in details
    card = " ".join((POLICY / "README.md").read_text().split())
    assert f"default is {config.price:.3g}, of the {CHOSEN_BY}" in card


def test_it_stops_visibly_in_seconds() -> None:
    """As README's first program: transformers alone, the base comes with the policy."""
    tokenizer = AutoTokenizer.from_pretrained(POLICY, trust_remote_code=True)
    model: Any = AutoModelForCausalLM.from_pretrained(POLICY, trust_remote_code=True)
    asked = [user_message(problem, DEEPSEEK_R1) for problem in draw_split("test", 12, 5)]
    inputs, thought = chat_batch(tokenizer, asked), []
    for threshold in (1.0, 0.5):  # never, and as README has it
        settings = {"threshold": threshold}
        model.generate(**inputs, do_sample=False, max_new_tokens=800, stop_policy=settings)
        thought.append(sum(record.thinking_tokens for record in model.last_stop))
    assert thought[1] < 0.75 * thought[0]
    results = Results.read(POLICY / "results.json")
    chosen = results.rules.loc[results.chosen]
    assert chosen["parameter"] == model.config.price
    assert chosen["reduction"] > 0.25
    assert chosen["aes"] > 0.2


@pytest.mark.slow
def test_its_recipe_makes_it_again(shipping: ModuleType, tmp_path: Path) -> None:
    """Threads and processors add in other orders: it is of the same kind, not of the same bits."""
    run_demo(tmp_path, STANDARD, 0, Console(file=io.StringIO()))
    made = shipping.ship(tmp_path)
    assert {path.name for path in made.iterdir()} == {*shipping.FILES, "provenance.json"}
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"):
        assert (made / name).read_bytes() == (POLICY / name).read_bytes()

    def told(folder: Path) -> tuple[Any, ...]:
        config = json.loads((folder / "config.json").read_text()) | {"price": 0}
        tensors, record = load_file(folder / "model.safetensors"), read_provenance(folder)
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        return config, shapes, record.details["settings"], record.seed

    assert told(made) == told(POLICY)
    ours, theirs = (
        Results.read(one / "results.json").rules.groupby("chosen")["aes"].max()[True]
        for one in (made, POLICY)
    )
    assert abs(ours - theirs) < 0.1


# What the reasoner learns from, and how.


@pytest.fixture(scope="module")
def recipe(load_script: LoadScript) -> ModuleType:
    """The script docs/examples/reasoner/recipe.py, with what it imports."""
    return load_script("docs/examples/reasoner/recipe.py")


@pytest.fixture(scope="module")
def tokenizer(recipe: ModuleType) -> PreTrainedTokenizerFast:
    made: Any = recipe.build_tokenizer(seed=0)
    return made


def test_a_short_run_leaves_a_reasoner_that_fits_its_tokenizer(
    recipe: ModuleType, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


def test_tokenizer_keeps_breaks_and_digits_whole(tokenizer: Any) -> None:
    assert len(tokenizer) <= 640
    assert "</think>" in tokenizer.decode(tokenizer.encode("</think>"), skip_special_tokens=True)
    ids = tokenizer.encode("24+17=41.\n\n", add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids) == [*list("24+17=41"), ".ĊĊ"]
    fmt = TokenFormat.compile(DEEPSEEK_R1, tokenizer)
    assert fmt.step_ends(ids) == [len(ids)]


@pytest.mark.parametrize("habits", ["FIRST_CYCLE", "SECOND_CYCLE"])
def test_examples_mask_what_is_given(recipe: ModuleType, tokenizer: Any, habits: str) -> None:
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


def test_batches_hold_every_example_once(recipe: ModuleType, tokenizer: Any) -> None:
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


def test_a_slip_is_one_particular_wrong_value(load_script: LoadScript) -> None:
    writer = load_script("docs/examples/reasoner/fallible_reasoner.py")
    rng = Random(1)
    for _ in range(500):
        a, b, symbol = rng.randint(2, 99), rng.randint(2, 99), rng.choice("+-*/%")
        assert writer.slipped(a, symbol, b) != apply(a, symbol, b)
        assert 0 < writer.slip_rate(a, symbol, b) < 0.5
