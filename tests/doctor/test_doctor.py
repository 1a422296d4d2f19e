"""`ospruner doctor` on sound and broken bases."""

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from ospruner.cli import app
from ospruner.demo import REASONER
from ospruner.doctor import examination
from ospruner.doctor.examination import Diagnosis, examine
from ospruner.engines.opening import load_tokenizer
from ospruner.eval.problems.task import Math
from ospruner.formats import HARMONY
from ospruner.train.labels.label import LabelConfig, read_format

from ..broken_tensors import Change, drop, edit, pickle_only, put


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A copy of the embedded reasoner, to be broken."""
    return Path(shutil.copytree(REASONER, tmp_path / "base"))


def value_of(report: Diagnosis, name: str) -> str:
    (value,) = (o.value for found in report.sections.values() for o in found if o.name == name)
    return value


def test_the_embedded_reasoner() -> None:
    report = examine(str(REASONER))
    assert report.wrong == []
    assert report.kind == "base"
    assert value_of(report, "torch").split("+")[0] == torch.__version__.split("+")[0]
    assert value_of(report, "format") == "deepseek-r1 (guessed)"
    assert value_of(report, "boundaries") == "4 tokens contain a blank line"
    assert "its tail can be built" in value_of(report, "architecture")
    assert "Example trace" in report.description


def no_thinking(folder: Path) -> None:
    template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    closed = template.replace("<think>", "<think>\n\n</think>\n\n")
    assert closed != template
    (folder / "chat_template.jinja").write_text(closed, encoding="utf-8")


def no_end(folder: Path) -> None:
    edit(eos_token_id=None)(folder)
    (folder / "generation_config.json").unlink()


@pytest.mark.parametrize(
    ("damage", "name", "said"),
    [
        (pickle_only, "weights", "no safetensors, but pytorch_model.bin"),
        (drop("model.safetensors"), "weights", "no weights"),
        (no_thinking, "fit", "already closes the thinking ('</think>')"),
        (no_end, "ends a text", "no eos_token_id"),
        (edit(vocab_size=100), "vocabulary", "the model 100"),
        (edit(model_type="nonesuch"), "architecture", "nonesuch"),
        (put("config.json", b'{"model_type": "t5"}'), "architecture", "T5"),
        (edit(model_type="ospruner"), "architecture", "a stopping policy, for the base None"),
        (put("config.json", b"{"), "repository", "config"),
        (drop("config.json"), "repository", "no config.json"),
    ],
)
def test_a_broken_base(base: Path, damage: Change, name: str, said: str) -> None:
    damage(base)
    found = {one.name: one for one in examine(str(base)).wrong}
    assert name in found
    assert said in found[name].value
    assert found[name].advice


def test_what_no_refusal_foresees_is_told_by_its_kind(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be a fault of ours: it is no verdict on the base."""

    def broken(*_: Any) -> None:
        raise AttributeError("no such part")

    monkeypatch.setattr(examination, "check_decoder", broken)
    (found,) = examine(str(base)).wrong
    assert "AttributeError: no such part" in found.value
    assert "report" in found.advice


ROPE = {"rope_theta": 1e4, "factor": 4.0}
LONGROPE = {
    **{"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [4.0] * 16},
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("changes", "level", "name", "said"),
    [
        ({"rope_parameters": ROPE | {"rope_type": "linear"}}, None, "positions", ""),
        ({"rope_parameters": ROPE | {"rope_type": "dynamic"}}, "note", "positions", "'dynamic' ch"),
        ({"rope_parameters": ROPE | LONGROPE}, "wrong", "architecture", "passes 64"),
        ({}, None, "batches", ""),
        (
            # Its roundings have no bound, so that a batch may change labels.
            {"model_type": "qwen2_moe", "num_experts": 4, "moe_intermediate_size": 24},
            "note",
            "batches",
            "(qwen2_moe) routes tokens to experts",
        ),
    ],
    ids=["linear", "dynamic", "longrope", "dense", "experts"],
)
def test_what_may_surprise_in_a_base_is_said(
    base: Path, changes: dict[str, Any], level: str | None, name: str, said: str
) -> None:
    edit(**changes)(base)
    found = [one for one in examine(str(base)).sections[f"Base {base}"] if one.name == name]
    assert [one.level for one in found] == ([level] if level else [])
    for one in found:
        assert said in one.value
        assert one.advice


def test_a_format_that_does_not_fit(base: Path) -> None:
    (found,) = examine(str(base), reasoning_format=HARMONY).wrong
    assert (found.name, found.level) == ("format", "wrong")
    assert "think_end '<|end|>'" in found.value
    assert "--format" in found.advice


def test_an_unreachable_repository_is_one_line() -> None:
    report = examine("nobody/nothing", revision="main")
    assert report.kind == "unreachable"
    (found,) = report.sections["nobody/nothing"]
    assert found.value.startswith("cannot reach nobody/nothing at revision main")
    assert "HF_ENDPOINT" in found.advice
    printed = io.StringIO()
    report.show(Console(file=printed, width=400))
    assert printed.getvalue().count("cannot reach") == 1


def test_the_command(tmp_path: Path, base: Path) -> None:
    run = CliRunner().invoke
    written = tmp_path / "doctor.json"
    result = run(app, ["doctor", str(base), "--json", str(written)])
    assert result.exit_code == 0, result.output
    assert "Nothing is wrong" in result.output
    assert "Reasoning format 'deepseek-r1'" in result.output
    saved = json.loads(written.read_text(encoding="utf-8"))
    assert saved["healthy"] is True
    assert saved["kind"] == "base"
    assert {"name", "value", "level", "advice"} == set(saved["sections"]["Environment"][0])
    pickle_only(base)
    result = run(app, ["doctor", str(base)])
    assert result.exit_code == 1
    assert "1 thing to mend" in result.output
    assert run(app, ["doctor", "nobody/nothing"]).exit_code == 1
    assert run(app, ["doctor"]).exit_code == 0


def test_a_tokenizer_that_transformers_rewrites_is_refused(base: Path, tmp_path: Path) -> None:
    """As R1-Distill-Llama's class and model type make it: blanks and blank lines vanish."""
    path = base / "tokenizer_config.json"
    given = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps(given | {"tokenizer_class": "LlamaTokenizerFast"}), "utf-8")
    edit(model_type="llama", architectures=["LlamaForCausalLM"])(base)
    words = "loaded as LlamaTokenizer, .* blanks or paragraph ends are lost.*PreTrainedTokenizerF"
    report = examine(str(base))
    assert [one.name for one in report.wrong if re.search(words, one.value)] == ["format"]
    tokenizer = load_tokenizer(str(base))
    with pytest.raises(ValueError, match=words):  # what labels, training and engines compile
        read_format(LabelConfig(format="deepseek-r1"), tokenizer, Math())
    path.write_text(json.dumps(given | {"tokenizer_class": "PreTrainedTokenizerFast"}), "utf-8")
    read_format(LabelConfig(format="deepseek-r1"), load_tokenizer(str(base)), Math())
