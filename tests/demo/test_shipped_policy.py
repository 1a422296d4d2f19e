"""The policy that ships: small, whole, of nobody's machine, and what its recipe makes."""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from modeling_ospruner import OSPrunerConfig
from ospruner.demo import POLICY, REASONER
from ospruner.demo.demo import STANDARD, run_demo
from ospruner.demo.shipped import FORMAT, draw_split
from ospruner.eval.metrics import CHOSEN_BY
from ospruner.eval.problems.problem import user_message
from ospruner.eval.results import Results
from ospruner.formats import DEEPSEEK_R1
from ospruner.provenance import read_provenance

from ..chats import chat_batch


@pytest.fixture(scope="module")
def recipe(load_script: Callable[[str], ModuleType]) -> ModuleType:
    """The script docs/examples/reasoner/ship_policy.py."""
    return load_script("docs/examples/reasoner/ship_policy.py")


def test_it_is_small_and_of_nobodys_machine(recipe: ModuleType) -> None:
    sizes = {path.name: path.stat().st_size for path in POLICY.iterdir()}
    assert set(sizes) == {*recipe.FILES, "README.md", "provenance.json"}
    assert sum(sizes.values()) < 3_000_000
    config = json.loads((POLICY / "config.json").read_text())
    assert config["base_model_name_or_path"] == "../reasoner"
    assert "auto_map" not in config
    for name in ("config.json", "results.json", "provenance.json"):
        assert not re.search(r"\"/|/tmp/|/home/", (POLICY / name).read_text()), name
    assert OSPrunerConfig.from_pretrained(POLICY).base_model_name_or_path == str(REASONER)
    # Labels of `ospruner label` on the reasoner go with it.
    assert OSPrunerConfig.from_pretrained(POLICY).reasoning_format == FORMAT.to_dict()
    details = read_provenance(POLICY).details
    assert details["price_chosen_by"] == CHOSEN_BY
    assert "warning" not in details
    assert f"default is {config['price']:.3g}, of the {CHOSEN_BY}" in " ".join(
        (POLICY / "README.md").read_text().split()
    )


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
    rules = Results.read(POLICY / "results.json").rules
    chosen = rules[rules["chosen"].astype(bool)].iloc[0]
    assert chosen["parameter"] == model.config.price
    assert chosen["reduction"] > 0.25
    assert chosen["aes"] > 0.2


@pytest.mark.slow
def test_its_recipe_makes_it_again(recipe: ModuleType, tmp_path: Path) -> None:
    """Threads and processors add in other orders: it is of the same kind, not of the same bits."""
    run_demo(tmp_path, STANDARD, 0, Console(file=io.StringIO()))
    made = recipe.ship(tmp_path)
    assert {path.name for path in made.iterdir()} == {*recipe.FILES, "provenance.json"}
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"):
        assert (made / name).read_bytes() == (POLICY / name).read_bytes()
    both = [json.loads((one / "config.json").read_text()) for one in (made, POLICY)]
    assert both[0] | {"price": 0} == both[1] | {"price": 0}
    shapes = [
        {name: tensor.shape for name, tensor in load_file(one / "model.safetensors").items()}
        for one in (made, POLICY)
    ]
    assert shapes[0] == shapes[1]
    ours, theirs = (
        read_provenance(one).details["settings"] | {"seed": read_provenance(one).seed}
        for one in (made, POLICY)
    )
    assert ours == theirs
    scores = [
        Results.read(one / "results.json").rules.groupby("chosen")["aes"].max()[True]
        for one in (made, POLICY)
    ]
    assert abs(scores[0] - scores[1]) < 0.1
