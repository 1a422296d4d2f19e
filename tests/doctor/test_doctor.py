"""`ospruner doctor` on sound and broken bases and policies."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from rich.console import Console
from rich.filesize import decimal
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from ospruner.cli import app
from ospruner.demo import REASONER
from ospruner.doctor.examination import examine, unmet
from ospruner.doctor.findings import Finding, Report, print_report
from ospruner.formats import HARMONY
from ospruner.train.untrained import fresh_layers, untrained

from ..broken_tensors import BROKEN, break_tensors


@pytest.fixture(scope="module")
def sound_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy on the embedded reasoner, as save_pretrained leaves it."""
    base = AutoModelForCausalLM.from_pretrained(REASONER)
    tokenizer = AutoTokenizer.from_pretrained(REASONER)
    folder = tmp_path_factory.mktemp("policy")
    untrained(base, tokenizer, tuning="layers").save_pretrained(folder)
    return folder


@pytest.fixture
def policy(sound_policy: Path, tmp_path: Path) -> Path:
    """A copy of it, to be broken."""
    return Path(shutil.copytree(sound_policy, tmp_path / "policy"))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A copy of the embedded reasoner, to be broken."""
    return Path(shutil.copytree(REASONER, tmp_path / "base"))


def wrong(report: Report) -> list[Finding]:
    return [one for found in report.sections.values() for one in found if one.level == "wrong"]


def value_of(report: Report, name: str) -> str:
    (value,) = (o.value for found in report.sections.values() for o in found if o.name == name)
    return value


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    literals = json.loads(path.read_text(encoding="utf-8"))
    change(literals)
    path.write_text(json.dumps(literals), encoding="utf-8")


def test_environment_alone() -> None:
    report = examine()
    assert report.healthy, wrong(report)
    assert list(report.sections) == ["Environment"]
    assert value_of(report, "torch").split("+")[0] == torch.__version__.split("+")[0]


def test_requirements_that_are_not_met() -> None:
    asked = [
        Requirement(text)
        for text in ("torch>=2", "torch>=99", "no-such-thing>=1.5", "also-not; extra == 'dev'")
    ]
    found = list(unmet(asked))
    assert [(one.name, one.level, one.advice) for one in found] == [
        ("torch", "wrong", "pip install 'torch>=99'"),
        ("no-such-thing", "wrong", "pip install 'no-such-thing>=1.5'"),
    ]
    assert "needs >=99" in found[0].value
    assert found[1].value.startswith("not installed")


def test_the_embedded_reasoner() -> None:
    report = examine(str(REASONER))
    assert report.healthy, wrong(report)
    assert report.kind == "base"
    assert value_of(report, "format") == "deepseek-r1 (guessed)"
    assert value_of(report, "boundaries") == "4 tokens contain a blank line"
    assert "its tail can be built" in value_of(report, "architecture")
    assert "Example trace" in report.description
    # What is said of sizes is what a real tail has.
    model = AutoModelForCausalLM.from_pretrained(REASONER)
    tail = fresh_layers(model, 2, tuning="layers")
    count = sum(parameter.numel() for parameter in tail.parameters())
    assert f"{decimal(2 * count)} in bfloat16" in value_of(report, "tail, n=2")
    assert f"{decimal(4 * count)} in float32" in value_of(report, "tail, n=2")
    few = sum(p.numel() for p in fresh_layers(model, 2, "queries").parameters())
    assert few < count
    assert f"{decimal(2 * few)} in bfloat16, no cache" in value_of(report, "queries, n=2")


def test_a_sound_policy(sound_policy: Path) -> None:
    report = examine(str(sound_policy))
    assert report.healthy, wrong(report)
    assert report.kind == "policy"
    assert value_of(report, "method") == "os-pruner, tuning layers"
    assert value_of(report, "lambda") == "0 reward per thinking token"
    assert value_of(report, "decides by") == "a draw with the stop probability"
    assert value_of(report, "format") == "deepseek-r1 (as given)"
    assert value_of(report, "base pinned") == f"the folder {REASONER}"
    assert "none missing" in value_of(report, "tensors")
    assert "those of the installed package" in value_of(report, "code")


@pytest.mark.parametrize("how", BROKEN)
def test_broken_tensors(policy: Path, how: str) -> None:
    said = break_tensors(policy, how)
    (found,) = wrong(examine(str(policy)))
    assert (found.name, bool(found.advice)) == ("tensors", True)
    assert re.search(said, found.value)


def test_a_sound_policy_of_adapters(tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(REASONER)
    tokenizer = AutoTokenizer.from_pretrained(REASONER)
    model = untrained(base, tokenizer, tuning="layers", adapter_rank=4)
    model.save_pretrained(tmp_path)
    report = examine(str(tmp_path))
    assert report.healthy, wrong(report)
    count = len(load_file(tmp_path / "model.safetensors"))
    assert value_of(report, "tensors") == f"{count}, n=2: none missing, finite"
    edit_json(tmp_path / "config.json", lambda c: c.update(adapter_rank=5))
    (found,) = wrong(examine(str(tmp_path)))
    assert "lora_A.default.weight torch.float32 (4, 128) instead of (5, 128)" in found.value


def truncate_tensors(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])


def other_base(folder: Path) -> None:
    edit_json(folder / "config.json", lambda c: c["text_config"].update(hidden_size=48))


def foreign_base(folder: Path) -> None:
    edit_json(folder / "config.json", lambda c: c.update(base_model_name_or_path="nobody/base"))


def unknown_key(folder: Path) -> None:
    edit_json(folder / "config.json", lambda c: c.update(colour="red", ospruner_version="99.0"))


def no_format(folder: Path) -> None:
    edit_json(folder / "config.json", lambda c: c["reasoning_format"].pop("closing"))


def other_code(folder: Path) -> None:
    (folder / "policy_ospruner.py").write_text("# changed\n", encoding="utf-8")
    (folder / "formats_ospruner.py").unlink()


@pytest.mark.parametrize(
    ("damage", "names", "said"),
    [
        (truncate_tensors, ["tensors"], "header"),
        (lambda folder: (folder / "model.safetensors").unlink(), ["tensors"], "has no model.safe"),
        (other_base, ["fits the policy"], "hidden_size 128 where the policy needs 48"),
        (foreign_base, ["base pinned", "repository"], "nobody/base at no revision"),
        (unknown_key, ["configuration"], "has no colour. Its fields are"),
        (unknown_key, ["configuration"], "pip install -U 'ospruner>=99.0'"),
        (no_format, ["reasoning format"], "missing: ['closing']"),
        (
            other_code,
            ["code"],
            "missing: formats_ospruner.py; not those of the installed package: policy_ospruner.py",
        ),
        (
            lambda folder: (folder / "tokenizer.json").unlink(),
            ["format"],
            "no thinking end marker '</think>'",
        ),
    ],
)
def test_a_broken_policy(
    policy: Path, damage: Callable[[Path], Any], names: list[str], said: str
) -> None:
    damage(policy)
    report = examine(str(policy))
    found = wrong(report)
    assert [one.name for one in found] == names
    assert said in found[0].value
    assert all(one.advice for one in found)


def only_pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def no_thinking(folder: Path) -> None:
    template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    closed = template.replace("<think>", "<think>\n\n</think>\n\n")
    assert closed != template
    (folder / "chat_template.jinja").write_text(closed, encoding="utf-8")


def no_end(folder: Path) -> None:
    edit_json(folder / "config.json", lambda c: c.update(eos_token_id=None))
    (folder / "generation_config.json").unlink()


@pytest.mark.parametrize(
    ("damage", "name", "said"),
    [
        (only_pickled, "weights", "no safetensors, but pytorch_model.bin"),
        (lambda f: (f / "model.safetensors").unlink(), "weights", "no weights"),
        (no_thinking, "fit", "already closes the thinking ('</think>')"),
        (no_end, "ends a text", "no eos_token_id"),
        (
            lambda f: edit_json(f / "config.json", lambda c: c.update(vocab_size=100)),
            "vocabulary",
            "the model 100",
        ),
        (
            lambda f: edit_json(f / "config.json", lambda c: c.update(model_type="nonesuch")),
            "architecture",
            "nonesuch",
        ),
        (
            lambda f: (f / "config.json").write_text('{"model_type": "t5"}', encoding="utf-8"),
            "architecture",
            "T5",
        ),
        (lambda f: (f / "config.json").write_text("{", encoding="utf-8"), "repository", "config"),
        (lambda f: (f / "config.json").unlink(), "repository", "no config.json"),
    ],
)
def test_a_broken_base(base: Path, damage: Callable[[Path], Any], name: str, said: str) -> None:
    damage(base)
    report = examine(str(base))
    found = {one.name: one for one in wrong(report)}
    assert name in found, report.sections
    assert said in found[name].value
    assert found[name].advice


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [4.0] * 16}


@pytest.mark.parametrize(
    ("rope", "level", "name", "said"),
    [
        ({"rope_type": "dynamic", "factor": 4.0}, "note", "positions", "'dynamic' changes them"),
        (
            {**LONGROPE, "original_max_position_embeddings": 64},
            "wrong",
            "architecture",
            "passes 64",
        ),
        ({"rope_type": "linear", "factor": 4.0}, None, "positions", ""),
    ],
    ids=["dynamic", "longrope", "linear"],
)
def test_positions_that_change_with_the_length_are_said(
    base: Path, rope: dict[str, Any], level: str | None, name: str, said: str
) -> None:
    edit_json(base / "config.json", lambda c: c.update(rope_parameters={"rope_theta": 1e4, **rope}))
    found = [one for one in examine(str(base)).sections[f"Base {base}"] if one.name == name]
    assert [one.level for one in found] == ([level] if level else [])
    for one in found:
        assert said in one.value
        assert one.advice


def test_experts_and_recurrent_states_are_said(base: Path) -> None:
    """Their roundings have no bound, so that a batch may change labels."""
    names = [one.name for one in examine(str(base)).sections[f"Base {base}"]]
    assert "batches" not in names
    more = {"model_type": "qwen2_moe", "num_experts": 4, "moe_intermediate_size": 24}
    edit_json(base / "config.json", lambda c: c.update(more))
    report = examine(str(base))
    assert "(qwen2_moe) routes tokens to experts" in value_of(report, "batches")


def test_a_format_that_does_not_fit(base: Path) -> None:
    (found,) = wrong(examine(str(base), reasoning_format=HARMONY))
    assert (found.name, found.level) == ("format", "wrong")
    assert "no thinking end marker '<|end|>'" in found.value
    assert "--format" in found.advice


def test_an_unreachable_repository_is_one_line() -> None:
    report = examine("nobody/nothing", revision="main")
    assert report.kind == "unreachable"
    (found,) = report.sections["nobody/nothing"]
    assert found.value.startswith("cannot reach nobody/nothing at revision main")
    assert "HF_ENDPOINT" in found.advice
    printed = io.StringIO()
    print_report(report, Console(file=printed, width=400))
    lines = [line for line in printed.getvalue().splitlines() if "cannot reach" in line]
    assert len(lines) == 1


def test_the_command(tmp_path: Path, policy: Path) -> None:
    run = CliRunner().invoke
    written = tmp_path / "doctor.json"
    result = run(app, ["doctor", str(policy), "--json", str(written)])
    assert result.exit_code == 0, result.output
    assert "Nothing is wrong" in result.output
    assert "Reasoning format 'deepseek-r1'" in result.output
    saved = json.loads(written.read_text(encoding="utf-8"))
    assert saved["healthy"] is True
    assert saved["kind"] == "policy"
    assert {"name", "value", "level", "advice"} == set(saved["sections"]["Environment"][0])
    other_code(policy)
    result = run(app, ["doctor", str(policy)])
    assert result.exit_code == 1
    assert "1 thing to mend" in result.output
    assert run(app, ["doctor", "nobody/nothing"]).exit_code == 1
    assert run(app, ["doctor"]).exit_code == 0
    refused = run(app, ["doctor", str(REASONER), "--format", "loud"])
    assert isinstance(refused.exception, ValueError)
    assert "format is 'loud'; it must be one of deepseek-r1, qwen3, harmony, plain" in str(
        refused.exception
    )
