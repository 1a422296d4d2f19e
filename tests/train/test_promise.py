"""`ospruner calibrate`: a promise found on labels, stored in the policy, and kept by generate."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from modeling_ospruner import OSPrunerForCausalLM
from modeling_ospruner.configuration_ospruner import CALIBRATION_FIELDS, OSPrunerConfig
from modeling_ospruner.stopping_ospruner import StopPolicyConfig
from ospruner.calibrating import calibrate
from ospruner.cli import app
from ospruner.comparing import compare
from ospruner.demo.shipped import Reasoner, draw_split
from ospruner.eval.table import TraceTable
from ospruner.rules import Budget
from ospruner.serving.requests import StopRequest
from ospruner.train.label_sets import load_labels
from ospruner.train.labels.making import Labeller, label_problems

from .conftest import trained_on


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """The labels of training, others, and a policy."""
    folder = tmp_path_factory.mktemp("promise")
    for split, count, seed in (("train", 60, 7), ("test", 60, 8)):
        Reasoner().label(draw_split(split, count, seed), folder / split, seed)  # type: ignore[arg-type]
    saved = trained_on(folder / "train", folder / "run")
    return folder / "train", folder / "test", saved.path


def promises_of(policy: Path) -> list[dict[str, Any]]:
    promises = OSPrunerConfig.from_pretrained(policy).calibrations
    assert promises is not None
    return promises


def promising(promises: list[dict[str, Any]]) -> OSPrunerConfig:
    config = OSPrunerConfig()
    config.calibrations = promises
    return config


def test_the_promise_is_stored_and_kept(trained: tuple[Path, Path, Path], tmp_path: Path) -> None:
    _, labels, path = trained
    policy = shutil.copytree(path, tmp_path / "policy")
    numbers = tmp_path / "found.json"
    command = ["calibrate", str(policy), "--labels", str(labels), "--max-loss", "0.3"]
    done = CliRunner().invoke(app, [*command, "--json", str(numbers)])
    assert done.exit_code == 0, done.output
    found = json.loads(numbers.read_text())
    assert "keeps the promise of at most 30 points lost at 0.95 confidence" in done.output
    assert found["problems"] == 60

    model = OSPrunerForCausalLM.from_pretrained(policy)
    (stored,) = promises_of(policy)
    assert set(stored) == set(CALIBRATION_FIELDS)
    assert (stored["threshold"], stored["max_loss"]) == (found["value"], 0.3)
    assert stored["data_hash"] == load_labels(labels).data_hash

    # What was promised is what replay finds at that threshold.
    (rule,) = compare(labels, [f"{policy}@{stored['threshold']}"]).evaluation.rules[1:2]
    full = TraceTable.from_dataset(load_labels(labels).traces).full_correct.mean()
    assert full - rule.outcome.accuracy == pytest.approx(stored["loss"])

    ids = torch.tensor([load_labels(labels).traces[0]["prompt_ids"]])
    how: dict[str, Any] = {"max_new_tokens": 60, "do_sample": False}
    promised = model.generate(ids, stop_policy={"max_loss": 0.3}, **how)
    settings = {"mode": "threshold", "threshold": stored["threshold"]}
    assert torch.equal(promised, model.generate(ids, stop_policy=settings, **how))
    with pytest.raises(ValueError, match=r"promises \[0.3\]: make the promise with"):
        model.generate(ids, stop_policy={"max_loss": 0.01}, max_new_tokens=60)


def test_a_second_promise_stands_beside_the_first_and_replaces_its_equal(
    trained: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    _, labels, path = trained
    policy = shutil.copytree(path, tmp_path / "policy")
    for max_loss in (0.4, 0.3, 0.4):
        assert calibrate(policy, labels, max_loss).value is not None
    promises = promises_of(policy)
    assert [one["max_loss"] for one in promises] == [0.3, 0.4]
    bold, careful = (
        StopPolicyConfig(max_loss=loss).with_defaults(promising(promises)) for loss in (0.45, 0.35)
    )
    assert (bold.threshold, careful.threshold) == (
        promises[1]["threshold"],
        promises[0]["threshold"],
    )


def test_a_server_promises_by_its_defaults_alone() -> None:
    promises: list[dict[str, Any]] = [
        {**dict.fromkeys(CALIBRATION_FIELDS, 0.02), "threshold": 0.7, "price": None}
        | {"mode": "threshold"}
    ]
    defaults = StopRequest({"stop_policy": True, "stop_max_loss": 0.02}, server=True)
    defaults.settle(promising(promises))
    settings = StopRequest(None).settings(defaults)
    assert settings is not None
    assert (settings.mode, settings.threshold, settings.max_loss) == ("threshold", 0.7, None)
    drawn = StopRequest({"stop_mode": "sample"}).settings(defaults)
    assert drawn is not None
    assert drawn.mode == "sample"
    unkept = StopRequest({"stop_max_loss": 0.01}, server=True)
    with pytest.raises(ValueError, match="promises \\[0.02\\]"):
        unkept.settle(promising(promises))
    with pytest.raises(ValueError, match="no \\['stop_max_loss'\\]; the policy's keys are"):
        StopRequest({"stop_max_loss": 0.02})


@pytest.mark.parametrize(
    "beside",
    [
        {"threshold": 0.5},
        {"mode": "sample"},
        {"rule": Budget(9)},
        {"min_thinking_tokens": 4},
        {"max_thinking_tokens": 9},
        {"answer": "free"},
        {"answer_do_sample": True},
    ],
)
def test_what_the_promise_does_not_cover_is_refused_beside_it(beside: dict[str, Any]) -> None:
    name = next(iter(beside))
    with pytest.raises(ValueError, match=f"max_loss is 0.02, and so is .*{name}.* given"):
        StopPolicyConfig(max_loss=0.02, **beside)
    with pytest.raises(ValueError, match="max_loss is 0.02, but the policy promises"):
        StopPolicyConfig(max_loss=0.02).with_defaults(OSPrunerConfig())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("none", "calibrations is 'none'; it must be list"),
        ([{"max_loss": 0.1}], "each must have the fields max_loss, confidence, mode, threshold"),
        (
            [dict.fromkeys(CALIBRATION_FIELDS, 2.0)],
            "mode is 2.0; it must be 'sample' or 'threshold'",
        ),
        (
            [dict.fromkeys(CALIBRATION_FIELDS, 2.0) | {"mode": "sample"}],
            "max_loss is 2.0; it must lie in",
        ),
    ],
)
def test_an_edited_promise_is_refused(wrong: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        OSPrunerConfig(calibrations=wrong)


def test_a_rule_without_training_is_calibrated_too(
    trained: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    _, labels, _ = trained
    command = ["calibrate", "budget", "--labels", str(labels), "--max-loss", "0.3"]
    done = CliRunner().invoke(app, [*command, "--values", "900,400,200,100,20"])
    assert done.exit_code == 0, done.output
    assert "00 keeps the promise of at most 30 points" in done.output
    assert CliRunner().invoke(app, command).exit_code == 2  # its values are not known beforehand


def test_what_is_no_promise_is_refused(trained: tuple[Path, Path, Path]) -> None:
    train, labels, path = trained
    with pytest.raises(ValueError, match="are the labels that .* was trained on"):
        calibrate(path, train, 0.1)
    with pytest.raises(ValueError, match=r"from careful \(high\) to bold"):
        calibrate(path, labels, 0.1, values=[0.5, 0.9])
    found = calibrate(path, labels, 0.001)
    assert found.value is None
    assert "No setting keeps the promise" in found.told(0.001, 0.95)
    assert OSPrunerForCausalLM.from_pretrained(path).config.calibrations is None


def test_answers_after_a_sentence_are_replayed_and_not_promised(
    trained: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    """How answers are forced is no part of what a policy reads, but of what is promised."""
    _, labels, path = trained
    reasoner = Reasoner()
    fmt = reasoner.token_format.winding_down("So I have it:", reasoner.tokenizer)
    settings = replace(reasoner.label_settings(8), reasoning_format=fmt.format.to_dict())
    problems = draw_split("test", 60, 8)
    labeller = Labeller(reasoner.tokenizer, fmt, settings)
    label_problems(problems, reasoner.engine, labeller, tmp_path / "soft")
    soft, plain = load_labels(tmp_path / "soft").traces, load_labels(labels).traces
    assert soft["trace_ids"] == plain["trace_ids"]
    assert soft["forced_answer_ids"] != plain["forced_answer_ids"]
    replayed = [
        compare(str(folder), [str(path)]).evaluation.rules for folder in (tmp_path / "soft", labels)
    ]
    tokens = [[rule.outcome.mean_tokens for rule in rules] for rules in replayed]
    assert tokens[0] == tokens[1]
    with pytest.raises(
        ValueError, match="stops with wind_down '', the answers of .* 'So I have it"
    ):
        calibrate(path, tmp_path / "soft", 0.3)
