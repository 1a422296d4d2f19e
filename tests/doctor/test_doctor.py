"""`ospruner doctor`: sound and broken bases, what it says of formats, and its plans.

Those are of three public configurations, without weights.
"""

import copy
import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from typer.testing import CliRunner

from modeling_ospruner.formats_ospruner import TokenFormat
from ospruner.cli import app
from ospruner.demo import REASONER
from ospruner.doctor import examination
from ospruner.doctor.examination import Diagnosis, examine, understood
from ospruner.doctor.plan import GIB, Plan, Workload, plan_for
from ospruner.engines.opening import load_tokenizer
from ospruner.eval.problems.task import Math
from ospruner.formats import DEEPSEEK_R1, PRESETS, named
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
    assert value_of(report, "torch").split("+")[0] == torch.__version__.split("+")[0]
    assert value_of(report, "format") == "deepseek-r1 (guessed)"
    assert value_of(report, "step ends").startswith("4 of 595 tokens hold a blank line")
    assert "its tail can be built" in value_of(report, "architecture")
    assert value_of(report, "example prompt")


@pytest.mark.parametrize(("capability", "told"), [("AVX2", ["note"]), ("AVX512", [])])
def test_a_cpu_without_bfloat16_is_told_of(
    capability: str, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert [one.level for one in examination.environment() if one.name == "cpu"] == told


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
        (no_thinking, "fit", "already closes the thinking ('</think>"),
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
    assert said in found[name].value
    assert found[name].advice


def test_what_none_foresees_is_told_by_kind(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be a fault of ours: it is no verdict on the base."""

    def broken(*_: Any) -> None:
        raise AttributeError("no such part")

    monkeypatch.setattr(examination, "check_decoder", broken)
    (found,) = examine(str(base)).wrong
    assert "AttributeError: no such part" in found.value
    assert "report" in found.advice


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 1e4, "factor": 4.0, "rope_type": kind, **more}}


LONG = {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
# Its roundings have no bound, so that a batch may change labels.
EXPERTS = {"model_type": "qwen2_moe", "num_experts": 4, "moe_intermediate_size": 24}


@pytest.mark.parametrize(
    ("changes", "level", "name", "said"),
    [
        (rope("linear"), None, "positions", ""),
        (rope("dynamic"), "note", "positions", "'dynamic' ch"),
        (
            rope("longrope", original_max_position_embeddings=64, **LONG),
            *("wrong", "architecture", "passes 64"),
        ),
        ({}, None, "batches", ""),
        (EXPERTS, "note", "batches", "(qwen2_moe) routes tokens to experts"),
    ],
)
def test_what_may_surprise_in_a_base_is_said(
    base: Path, changes: dict[str, Any], level: str | None, name: str, said: str
) -> None:
    edit(**changes)(base)
    found = [one for one in examine(str(base)).sections[f"Base {base}"] if one.name == name]
    assert [one.level for one in found] == ([level] if level else [])
    assert all(said in one.value and one.advice for one in found)


def test_a_format_that_does_not_fit(base: Path) -> None:
    (found,) = examine(str(base), format_name="harmony").wrong
    assert (found.name, found.level) == ("format", "wrong")
    assert "think_end '<|end|>'" in found.value
    assert "--format" in found.advice


def test_an_unreachable_repository_is_one_line() -> None:
    report = examine("nobody/nothing", revision="main")
    (found,) = report.sections["Base nobody/nothing"]
    assert found.value.startswith("cannot reach nobody/nothing at revision main")
    assert "HF_ENDPOINT" in found.advice
    assert run("nobody/nothing", code=1).count("cannot reach") == 1


def run(*arguments: object, code: int = 0) -> str:
    """What `ospruner doctor` prints, on one line."""
    result = CliRunner().invoke(app, ["doctor", *map(str, arguments)], env={"COLUMNS": "100"})
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def test_the_command(tmp_path: Path, base: Path) -> None:
    written = tmp_path / "doctor.json"
    output = run(base, "--json", written)
    for said in ("Nothing is wrong", "deepseek-r1 (guessed)"):
        assert said in output
    saved = json.loads(written.read_text(encoding="utf-8"))
    assert saved["healthy"] is True
    assert {"name", "value", "level", "advice"} == set(saved["sections"]["Environment"][0])
    pickle_only(base)
    assert "1 thing to mend" in run(base, code=1)
    run()


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


Compiled = tuple[PreTrainedTokenizerBase, TokenFormat]


def told(compiled: Compiled) -> list[tuple[str, str]]:
    found = list(understood(compiled[1], compiled[0]))
    assert all(one.level == "ok" for one in found)
    return [(one.name, one.value) for one in found]


def test_what_is_told_of_r1(real_r1: Compiled) -> None:
    lines = told(real_r1)
    for line in (
        ("thinking opens with", "'<think>'  151648"),
        ("thinking ends with", "'</think>'  151649"),
        ("model's turn", "'<｜Assistant｜><think>\\n'  151645 151648 198"),
        ("forced at a stop", "'</think>\\n\\n\\\\boxed{'  151649 271 59 79075 90"),
        ("... answer='free'", "'</think>\\n\\n'  151649 271"),
        ("... at its own end", "'\\n\\n\\\\boxed{'  271 59 79075 90"),
        ("masked in answers", "'<think>'  151648"),
        ("example step", "'First, 2 + 3 = 5.\\n\\n'  ends after 11 tokens"),
        ("example step", "'Let me check: 5 - 3 = 2.\\n\\n'  ends after 24 tokens"),
        ("example step", "'So it is 5.'  ends after 30 tokens"),
    ):
        assert line in lines, lines
    values = dict(lines)
    assert "565 of 151665 tokens hold a blank line: '\\n\\n'  271" in values["step ends"]
    assert "within \\\\boxed{}.<｜Assistant｜><think>\\n'" in values["example prompt"]


def test_what_is_told_of_harmony(real_harmony: Compiled) -> None:
    lines = told(real_harmony)
    closing = "<|end|><|start|>assistant<|channel|>final<|message|>"
    ids = "200007 200006 173781 200005 17196 200008"
    masked = "'<|channel|>'  200005, '<|start|>'  200006, '<|message|>'  200008"
    for line in (
        ("thinking opens with", "'<|channel|>analysis<|message|>'  200005 35644 200008"),
        ("answer opens with", "'<|channel|>final<|message|>'  200005 17196 200008"),
        ("forced at a stop", f"'{closing}\\\\boxed{{'  {ids} 59 172278 90"),
        ("... answer='free'", f"'{closing}'  {ids}"),
        ("masked in answers", masked),
        (
            "example step",
            "'<|channel|>analysis<|message|>First, 2 + 3 = 5.\\n\\n'  ends after 14 tokens",
        ),
    ):
        assert line in lines, lines


@pytest.mark.parametrize(
    ("template", "changes", "complaint"),
    [
        (None, {}, "the tokenizer has no chat template"),
        ("{{ messages[0].content }}", {}, "appends nothing that opens the model's turn"),
        ("", {"box_prefix": "The answer is "}, "does not leave one brace open"),
        ("", {"think_start": "</think>"}, "think_start '</think>' has no marker"),
        ("", {}, None),
    ],
)
def test_what_does_not_fit_is_told(
    tiny_tokenizer: PreTrainedTokenizerFast,
    template: str | None,
    changes: dict[str, Any],
    complaint: str | None,
) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    if template != "":
        tokenizer.chat_template = template
    chosen = dataclasses.replace(DEEPSEEK_R1, **changes)
    fmt = TokenFormat.compile(chosen, tokenizer)
    found = [one for one in understood(fmt, tokenizer) if one.level != "ok"]
    assert len(found) == (complaint is not None)
    for fault in found:
        assert (fault.name, fault.level) == ("fit", "wrong")
        assert complaint is not None
        assert complaint in fault.value
        assert fault.advice


def test_formats_by_name(tmp_path: Path) -> None:
    assert {name: named(name) for name in PRESETS} == PRESETS
    custom = dataclasses.replace(DEEPSEEK_R1, name="mine", box_prefix="So \\boxed{")
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(custom.to_dict()), encoding="utf-8")
    assert named(str(path)) == custom


BASES = Path(__file__).parents[1] / "bases"
R1, GPT_OSS, QWEN3 = "r1-distill-qwen-7b", "gpt-oss-20b", "qwen3-30b-a3b"


def plan_of(name: str, attention: str | None = None, **work: Any) -> Plan:
    config = AutoConfig.from_pretrained(BASES / name, attn_implementation=attention)
    return plan_for(config, Workload(**{"tuning": "layers", **work}))


@pytest.mark.parametrize(
    ("name", "billions", "tail_millions", "kv_bytes", "weights_gb"),
    [
        # Keys and values: 2 x KV heads x head size x 2 bytes x layers that see the whole text.
        (R1, 7.62, 466, 2 * 4 * 128 * 2 * 28, 15.2),
        (GPT_OSS, 20.9, 1646, 2 * 8 * 64 * 2 * 12, 13.8),
        (QWEN3, 30.5, 1246, 2 * 4 * 128 * 2 * 48, 61.1),
    ],
)
def test_sizes_are_those_of_the_public_checkpoints(
    name: str, billions: float, tail_millions: float, kv_bytes: int, weights_gb: float
) -> None:
    plan = plan_of(name)
    assert plan.parameters / 1e9 == pytest.approx(billions, rel=5e-3)
    assert plan.tail_parameters / 1e6 == pytest.approx(tail_millions, rel=5e-3)
    assert plan.kv_bytes_per_token == kv_bytes
    assert plan.weights_gib * GIB / 1e9 == pytest.approx(weights_gb, rel=0.01)


def test_the_plan_follows_the_workload() -> None:
    plan = plan_of(R1)
    assert plan.labelling_hours == pytest.approx(40_000 * 5_000 * 1.8 / 2_500 / 3600)
    assert plan_of(R1, gpus=2).training_hours == pytest.approx(plan.training_hours / 2)
    short = plan_of(R1, max_tokens=5_000, micro_batch_tokens=5_000)
    assert short.training_peak_gib < plan.training_peak_gib - 2
    # What vLLM leaves beside the weights, the policy and its graphs, over base and tail.
    left = 0.9 * 80 * GIB - 2 * (plan.parameters + plan.tail_parameters) - 2 * GIB
    assert plan.serving_kv_tokens == int(left / (57_344 * 30 / 28))
    few = plan_of(QWEN3)
    assert few.labelling_peak_gib <= 72
    assert "labelling holds 11 of the longest traces at once" in " ".join(few.notes)


def test_the_command_writes_its_numbers_and_says_whether_they_fit(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    said = run(BASES / R1, "--plan", "--set", "gpu_gib=80", "--json", file)
    found = json.loads(file.read_text())
    assert {"labelling_peak_gib", "serving_kv_tokens"} <= found.keys()
    for peak in ("training_peak_gib", "training_cached_peak_gib"):
        assert f"{found[peak]:.1f} GiB" in said
    assert found["workload"]["gpu_gib"] == 80
    assert "training does not fit" in run(BASES / R1, "--plan", "--set", "gpu_gib=16", code=1)


def test_a_base_that_fits_in_one_way_only_says_which() -> None:
    asked = (BASES / QWEN3, "--plan", "--set", "tuning=layers")
    assert "training fits with --states (63.7 GiB)" in run(*asked)
    said = run(*asked, "--set", "gpu_gib=63", code=1)
    assert ("fits with" in said, "does not fit" in said) == (False, True)


def test_sinks_cost_no_scores_and_packed_experts_stay() -> None:
    plan = plan_of(GPT_OSS)
    assert plan.training_peak_gib == plan.training_cached_peak_gib < 60
    assert "unpacks the base, and training takes 78.0 GiB, or 47.8" in " ".join(plan.notes)
    # Linear in the longest trace: nothing holds its square.
    longest = (10_000, 20_000, 30_000)
    peaks = [plan_of(GPT_OSS, max_tokens=n).training_peak_gib for n in longest]
    assert peaks[2] - peaks[1] == pytest.approx(peaks[1] - peaks[0], rel=1e-6)
    # A base that has eager attention alone, without sinks that could be a key's, holds its scores.
    held = plan_of(R1, "eager")
    scores = 2 * 2 * 28 * 15_000**2 / GIB
    assert held.training_peak_gib == pytest.approx(plan_of(R1).training_peak_gib + scores)
    assert "has no sdpa attention: eager holds 23 GiB" in " ".join(held.notes)
