"""The benchmarks do what they say, on little; their numbers are not looked at."""

import gzip
import importlib.util
import io
import json
import math
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from ospruner.demo import POLICY, REASONER, demo
from ospruner.eval.learnstop import LEARN_STOP
from ospruner.eval.results import Results, prices_of
from ospruner.rules import FAMILIES

from ..conftest import LoadScript
from ..own_process import needs_vllm

RunScript = Callable[..., tuple[dict[str, Any], str]]


@pytest.fixture
def run_script(
    repo_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> RunScript:
    """Runs a benchmark: the numbers of its last line, and all it printed."""

    def run(name: str, *arguments: str, here: bool = True) -> tuple[dict[str, Any], str]:
        script, file = repo_dir / "benchmarks" / name, tmp_path / "result.json"
        command = [str(script), *arguments, "--json", str(file)]
        if here:
            monkeypatch.syspath_prepend(script.parent)
            monkeypatch.setattr(sys, "argv", command)
            runpy.run_path(str(script), run_name="__main__")
            printed = capsys.readouterr().out
        else:
            done = subprocess.run(
                [sys.executable, *command],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr[-4000:]
            printed = done.stdout
        found: dict[str, Any] = json.loads(printed.splitlines()[-1])
        assert found == json.loads(file.read_text("utf-8"))
        return found, printed

    return run


def test_generate(run_script: RunScript) -> None:
    found, printed = run_script("generate.py", "--shape", "tiny", "--runs", "1", "--seed", "3")
    keys = ("never_stop_ratio_batch1", "never_stop_ratio_batch8", "half_stop_time_ratio")
    for key in (*keys, *(f"queries_{key}" for key in keys)):
        assert 0 < found[key] < math.inf
        low, high = found[f"{key}_interval"]
        assert low <= found[key] <= high
    assert "time, stopping at half, queries, batch 1" in printed


def test_labels(run_script: RunScript, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's part of it is tested in tests/engines."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name, package=None: None if name == "vllm" else find_spec(name, package),
    )
    found, printed = run_script("labels.py", "--limit", "1", "--problems", "2")
    assert (found["traces"], found["trace_tokens"], found["forks"]) == (1, 202, 11)
    assert 1 <= found["computed_over_unique_transformers"] <= 1.02
    assert found["computed_over_unique_vllm"] is None
    assert found["reencoded_over_unique"] > 2
    assert found["same_answers"] >= 0.95
    assert math.isfinite(found["speedup_over_reencode"])
    assert "computed_over_unique_vllm           not installed" in printed


def test_lengths_and_steps_are_of_real_traces(
    repo_dir: Path, shared_dir: Path, real_r1: Any
) -> None:
    file = repo_dir / "benchmarks" / "trace_shapes.json"
    shapes = json.loads(file.read_text("utf-8"))["traces"]
    tokenizer, fmt = real_r1
    with gzip.open(shared_dir / "data/traces/traces_mit.jsonl.gz", "rt", encoding="utf-8") as lines:
        reasoning = {row["id"]: row["reasoning"] for row in map(json.loads, lines)}
    assert len(shapes) == 10
    for shape in shapes:
        ids = tokenizer.encode(reasoning[shape["id"]], add_special_tokens=False)
        assert (len(ids), fmt.step_ends(ids)) == (shape["tokens"], shape["step_ends"])


def test_train(run_script: RunScript) -> None:
    small = ("--limit", "2", "--width", "56", "--layers", "4", "--tokens", "30", "--steps", "5")
    found, _ = run_script("train.py", *small, "--rounds", "1")
    assert found["loss_difference"] < 1e-5
    arms = {"naive", "trainer", "kept", "queries", "every_price"}
    assert set(found["arms"]) == arms
    for name in ("trainer_over_naive", "queries_cost_ratio", "six_prices_cost_ratio"):
        assert math.isfinite(found[name])
    operations = {name: arm["operations"] for name, arm in found["arms"].items()}
    # States in memory need no pass of the trunk.
    assert operations["kept"] < operations["trainer"]
    # Five outputs more of the head, forward and backward: all prices share the tail's pass.
    assert operations["kept"] < operations["every_price"] < 1.01 * operations["kept"]
    # Five step ends of thirty tokens, of which no keys are made.
    assert operations["queries"] < 0.5 * operations["kept"]


def test_a_drift_is_seen_and_seldom_where_there_is_none(load_script: LoadScript) -> None:
    script = load_script("benchmarks/promises.py")
    draws = np.random.default_rng(0).random((400, 600))
    found = script.alarms(draws < 0.1, 0.1)
    assert (found <= 600).mean() <= script.LEVEL + 3.7 * math.sqrt(0.05 * 0.95 / 400)
    late = script.alarms(draws < np.where(np.arange(600) < 300, 0.1, 0.3), 0.1)
    assert (late <= 600).mean() > 0.95
    assert 300 < np.median(late) < 400


@pytest.fixture(scope="module")
def study(load_script: LoadScript) -> Any:
    """Of stops that are right more often than the full trace."""
    return load_script("benchmarks/above_full.py")


def test_votes_take_the_most_frequent_of_the_last_answers(study: Any) -> None:
    answers, grades = ["4", "5", "5", "7", "7"], [0.0, 1.0, 1.0, 0.0, 0.0]
    assert study.voted(answers, grades, 1) == 0.0
    assert study.voted(answers, grades, 3) == 0.0
    assert study.voted(answers, grades, 4) == 0.0, "of equals the latest"
    assert study.voted(["5", "5", "7"], [1.0, 1.0, 0.0], 10**6) == 1.0
    assert study.voted(["5"], [1.0], 3) == 1.0


def test_gains_are_told_beside_what_chance_gives(study: Any) -> None:
    """Rules without skill exceed what is called chance in one of forty."""
    draw, problems = np.random.default_rng(0), np.arange(400)
    changed = draw.random((500, 1, 400)) < 0.2
    gains = 100.0 * changed * draw.choice([-1, 1], changed.shape)
    found = [study.told(one, problems) for one in gains[:2]]
    means = gains.mean(axis=(1, 2))
    for one, own in zip(found, gains, strict=False):
        assert one["gain"] == pytest.approx(own.mean())
        assert one["better"] - one["worse"] == pytest.approx(one["gain"])
        assert one["low"] < one["gain"] < one["high"]
        assert 0.01 < (means > one["by_chance"]).mean() < 0.045


@pytest.mark.slow
def test_frontier_reads_a_demo(run_script: RunScript, tmp_path: Path) -> None:
    run = tmp_path / "demo"
    size = demo.DemoSize("tiny", train=34, validation=10, test=10, seeds=2, epochs=2, max_loss=0.5)
    demo.run_demo(run, size, 0, Console(file=io.StringIO()))
    found, printed = run_script("frontier.py", "--run", str(run), "--anneal")
    about = found["about"]
    assert (about["seeds"], about["test_traces"], about["left_out"]) == (2, 10, {})
    trained = {"OS-Pruner, one policy", "OS-Pruner, annealed", "probe", "convergence"}
    free = {family.method for family in (*FAMILIES.values(), LEARN_STOP)}
    free |= {"fixed drop", "hindsight oracle"}
    frontiers = Results.from_dict(found).frontiers
    assert set(frontiers["method"]) == trained | free
    assert frontiers["method"][frontiers["lead"].isna()].tolist() == ["OS-Pruner, one policy"]
    assert list(prices_of(frontiers, "gap")) == [5e-4, 2e-4, 1e-4]
    assert frontiers["area"].between(0, 1).all()
    spreads = about["seed_spread"]
    first, *_, last = list(spreads)[:7]
    assert (first, last) == ("price 0", "price 1e-2")
    of_one_price = ["price5e-3", "price1e-3", "price5e-4", "price2e-4"]
    assert list(spreads)[7:] == of_one_price
    for spread in (spreads[name] for name in of_one_price):
        assert spread["accuracy_points"] > 0
        assert spread["accuracy_standard_error"] > 0
    assert "DO NOT HOLD" in printed
    (run / "policies" / "seed1").rename(tmp_path / "seed1")
    _, printed = run_script("frontier.py", "--run", str(run))
    assert "one training seed: nothing is known" in printed
    assert "DO NOT HOLD" not in printed


@pytest.mark.slow
@needs_vllm
def test_serve(run_script: RunScript) -> None:
    small = ("--rounds", "1", "--requests", "4", "--tokens", "96", "--shape", "256")
    for quick in ([], ["--quick"]):
        result, _ = run_script("serve.py", *quick, *small, "--seed", "3", here=False)
        assert result["never_stop_ratio"] > 0
        assert 0 < result.get("tokens_saved", 0.5) < 1
        assert ("time_saved_over_tokens_saved" in result) == (not quick)
    result, printed = run_script("serve.py", "--host-time", "--quick", here=False)
    assert all(result[f"host_ms_{streams}"] > 0 for streams in (1, 16, 64, 256))
    assert "64 streams: " in printed


@pytest.mark.slow
@needs_vllm
def test_serve_over_http(run_script: RunScript) -> None:
    small = ("--shape", "128", "--requests", "4", "--tokens", "96", "--streams", "4")
    result, printed = run_script("serve_http.py", *small, "--seed", "3", here=False)
    for base in ("reasoner", "random"):
        off, never, on = (result[base]["4"][arm] for arm in ("off", "never", "on"))
        assert off.keys() == never.keys() == on.keys()
        for measure in ("ttft", "tpot", "e2el"):
            assert 0 < off[f"{measure}_p50_ms"] <= off[f"{measure}_p99_ms"] < math.inf
            assert f"{measure}_p99_ms" in printed
        assert 0 < on["thinking_tokens"] < on["generated_tokens"] < off["generated_tokens"]
        assert never["generated_tokens"] > on["generated_tokens"]


@pytest.mark.slow
@needs_vllm
def test_a_policy_is_served_over_http(run_script: RunScript, repo_dir: Path) -> None:
    labels, asked = repo_dir / "tests/goldens/labels", ("--streams", "2", "--requests", "5")
    own = ("--policy", str(POLICY), "--labels", str(labels), "--price", "1e-3")
    result, _ = run_script("serve_http.py", *own, *asked, here=False)
    off, never, on = (result["reasoner"]["2"][arm] for arm in ("off", "never", "on"))
    assert off["generated_tokens"] == never["generated_tokens"] > on["generated_tokens"] > 0


@pytest.mark.slow
@needs_vllm
def test_after_cut(run_script: RunScript, repo_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    labels = str(repo_dir / "tests" / "goldens" / "labels")
    asked = ("--base", str(REASONER), "--limit", "4", "--model", "reasoner")
    found, _ = run_script("after_cut.py", labels, "40", *asked, here=False)
    full, cut = Results.from_dict(found).rules.to_dict("records")
    assert 0 < cut["tokens"] < full["tokens"]
    assert cut["answer_after_stop"] > 0
    assert full["answer_after_end"] > 0


@pytest.mark.slow
@needs_vllm
def test_each_check_of_the_gpu_runs_on_a_cpu(run_script: RunScript) -> None:
    trained, _ = run_script("gpu.py", "train", "--tiny", here=False)
    assert trained["seconds_a_step"] > 0
    found, printed = run_script("gpu.py", "parity", "--tiny", "--seed", "3", here=False)
    assert found["held"], printed
    assert found["steps"] > 0


# What they share: steps in turn, and ratios with intervals.


@pytest.fixture
def timing(load_script: LoadScript) -> ModuleType:
    return load_script("benchmarks/timing.py")


def test_arms_take_turns_and_keep_their_own_draws(
    load_script: LoadScript, timing: ModuleType
) -> None:
    bench, order = load_script("benchmarks/generate.py"), []

    def arm_of(name: str, steps: int) -> Any:
        def call(pause: Callable[[], None]) -> list[float]:
            draws = []
            for _ in range(steps):
                pause()
                order.append(name)
                draws.append(torch.rand(()).item())
            return draws

        return bench.Stepwise(7, call)

    a, b = arm_of("a", 4), arm_of("b", 2)
    times = timing.in_turn({"a": a.step, "b": b.step}, turn=1)
    assert b.result == a.result[:2], "of one seed, whoever drew in between"
    assert len(set(a.result)) == 4
    assert order == ["b", "a", "a", "b", "a", "a"]
    assert {name: len(steps) for name, steps in times.items()} == {"a": 5, "b": 3}
    broken = bench.Stepwise(7, lambda pause: 1 / 0)
    assert not broken.step()
    with pytest.raises(ZeroDivisionError):
        _ = broken.result


def test_what_slows_both_arms_is_no_difference(timing: ModuleType) -> None:
    draws, steps = np.random.default_rng(0), np.arange(400)
    slow = 1 + 3 * (steps // 50 % 2)  # the machine is busy for 50 steps at a time
    plain = [slow * draws.uniform(1, 1.2, 400) for _ in range(2)]
    found = timing.paired_ratio(plain, [1.05 * run for run in plain])
    apart = 1.05 * 1.96 * timing.PROCESSES  # what processes differ by is all that is left
    assert found == pytest.approx((1.05, 1.05 - apart, 1.05 + apart))
    half = [np.where(steps < 200, run, 0.5 * run) for run in plain]
    unlike = timing.paired_ratio(plain, half)
    assert 0.5 < unlike.low < unlike.median < unlike.high < 1
    assert unlike.median == pytest.approx(0.75, abs=0.01)
    assert timing.paired_ratio([[1.0, 2.0]], [[2.0, 4.0]]).median == pytest.approx(2)  # few steps
    shorter = timing.paired_ratio([[1.0, 2.0, 5.0], [1.5, 1.0, 9.0]], [[2.0, 2.0], [3.0, 1.0]])
    assert shorter.median == pytest.approx((2 + 1) / (1 + 1 + 5)), "each step's least time"
    apart = 1.96 * shorter.median * math.hypot(timing.PROCESSES, timing.ALONE * 5 / 7)
    assert shorter.high >= shorter.median + apart - 1e-9


def test_the_one_for_a_gpu_starts(repo_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it imports by name is there; tests/project/test_pages.py starts the others."""
    monkeypatch.syspath_prepend(repo_dir / "benchmarks")
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(repo_dir / "benchmarks" / "gpu.py"), run_name="__main__")
