"""`ospruner doctor BASE --plan` on three public configurations: no weights are there."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig
from typer.testing import CliRunner

from ospruner.cli import app
from ospruner.doctor.plan import GIB, Plan, Workload, plan_for

BASES = Path(__file__).parents[1] / "bases"
R1, GPT_OSS, QWEN3 = "r1-distill-qwen-7b", "gpt-oss-20b", "qwen3-30b-a3b"

LAYERS = Workload(tuning="layers")


def plan_of(name: str, work: Workload = LAYERS) -> Plan:
    return plan_for(AutoConfig.from_pretrained(BASES / name), work)


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", *map(str, arguments)], env={"COLUMNS": "100"})
    return result.exit_code, result.output


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
    plan, work = plan_of(R1), LAYERS
    assert plan.labelling_hours == pytest.approx(40_000 * 5_000 * 1.8 / 2_500 / 3600)
    twice = plan_of(R1, dataclasses.replace(work, gpus=2))
    assert twice.training_hours == pytest.approx(plan.training_hours / 2)
    short = plan_of(R1, dataclasses.replace(work, max_tokens=5_000, micro_batch_tokens=5_000))
    assert short.training_peak_gib < plan.training_peak_gib - 2
    # What vLLM leaves beside the weights, the policy and its graphs, over base and tail.
    left = 0.9 * 80 * GIB - 2 * (plan.parameters + plan.tail_parameters) - 2 * GIB
    assert plan.serving_kv_tokens == int(left / (57_344 * 30 / 28))
    few = plan_of(QWEN3)
    assert few.labelling_peak_gib <= 72
    assert "labelling holds 11 of the longest traces at once" in " ".join(few.notes)


def test_what_a_policy_adds_to_the_weights_of_a_step() -> None:
    def share(name: str, **given: Any) -> float:
        return plan_of(name, dataclasses.replace(LAYERS, **given)).serving_weights_share

    # R1's layers: queries and outputs 2 x 3584^2, keys and values 2 x 3584 x 512, MLP 3 x 3584 x
    # 18,944; the vocabulary's logits 152,064 x 3584. Vectors are not counted here.
    queries = 2 * 3584**2 + 3 * 3584 * 18_944
    layer = queries + 2 * 3584 * 512
    step = 28 * layer + 152_064 * 3584
    assert share(R1) == pytest.approx(2 * layer / step, rel=1e-3)
    assert share(R1, streams=1, tuning="queries") == pytest.approx(
        2 * queries / step / 40, rel=1e-3
    )
    some_end = 1 - (39 / 40) ** 64
    found = share(R1, streams=64, tuning="queries", num_policy_layers=1)
    assert found == pytest.approx(some_end * queries / step, rel=1e-3)
    # Of a mixture few experts are read for few rows; the copies are not packed as the base is.
    few, many = (share(GPT_OSS, streams=n, tuning="queries") for n in (1, 64))
    assert 0.003 < few < 0.004
    assert 0.05 < many < 0.06
    assert share(GPT_OSS, streams=64) > 0.2


def test_the_command_writes_its_numbers_and_says_whether_they_fit(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    code, said = run(BASES / R1, "--plan", "--set", "gpu_gib=80", "--json", file)
    assert code == 0, said
    found = json.loads(file.read_text())
    assert {"training_peak_gib", "labelling_peak_gib", "serving_kv_tokens"} <= found.keys()
    assert f"{found['training_peak_gib']:.1f} GiB" in said
    assert f"{found['training_cached_peak_gib']:.1f} GiB" in said
    assert "adds 3.6% to the weights that a step reads" in " ".join(said.split())
    assert found["workload"]["gpu_gib"] == 80
    code, said = run(BASES / R1, "--plan", "--set", "gpu_gib=16")
    assert (code, "training does not fit" in said) == (1, True)


def test_a_base_that_fits_in_one_way_only_says_which() -> None:
    code, said = run(BASES / QWEN3, "--plan", "--set", "tuning=layers")
    assert (code, "training fits with --states (63.7 GiB)" in said) == (0, True)
    code, said = run(BASES / QWEN3, "--plan", "--set", "tuning=layers", "--set", "gpu_gib=63")
    assert (code, "fits with" in said, "does not fit" in said) == (1, False, True)


def test_sinks_cost_no_scores_and_packed_experts_stay() -> None:
    plan = plan_of(GPT_OSS)
    assert plan.training_peak_gib == plan.training_cached_peak_gib < 60
    assert "unpacks the base, and training takes 78.0 GiB, or 47.8" in " ".join(plan.notes)
    # Linear in the longest trace: nothing holds its square.
    work = LAYERS
    peaks = [
        plan_of(GPT_OSS, dataclasses.replace(work, max_tokens=n)).training_peak_gib
        for n in (10_000, 20_000, 30_000)
    ]
    assert peaks[2] - peaks[1] == pytest.approx(peaks[1] - peaks[0], rel=1e-6)
    # A base that has eager attention alone, without sinks that could be a key's, holds its scores.
    config = AutoConfig.from_pretrained(BASES / R1, attn_implementation="eager")
    held = plan_for(config, work)
    scores = 2 * 2 * 28 * 15_000**2 / GIB
    assert held.training_peak_gib == pytest.approx(plan_of(R1).training_peak_gib + scores)
    assert "has no sdpa attention: eager holds 23 GiB" in " ".join(held.notes)


def test_a_longest_trace_below_the_mean_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_tokens is 10, below mean_tokens \(5000\)"):
        Workload(max_tokens=10)
