"""One policy for every price of a token: trained, replayed, calibrated, evaluated."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM
from typer.testing import CliRunner

from modeling_ospruner import OSPrunerConfig, OSPrunerForCausalLM
from modeling_ospruner.stopping_ospruner import StopPolicyConfig
from ospruner.calibrating import calibrate
from ospruner.cli import app
from ospruner.comparing import compare
from ospruner.demo.shipped import Reasoner, draw_split
from ospruner.eval.methods import EVERY_PRICE, parse_policies
from ospruner.eval.replay import replay
from ospruner.eval.results import Results
from ospruner.eval.table import TraceTable
from ospruner.train.bases import load_labelled_base
from ospruner.train.label_sets import load_labels
from ospruner.train.predicting import predict, predict_outputs
from ospruner.train.untrained import untrained

from .conftest import RANGE, MakeLabels, trained_on


def test_the_price_of_indifference_is_what_thresholds_compare(
    tiny_base: Qwen2ForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    make_labels: MakeLabels,
) -> None:
    model = untrained(tiny_base, tiny_tokenizer, price_range=RANGE, tuning="layers")
    nn.init.normal_(model.policy.head.weight, generator=torch.Generator().manual_seed(0))
    labels = make_labels(12)
    said = predict_outputs(model, labels)
    assert said.indifference is not None
    for price in (0.0, 1e-3, 0.1):
        stops = said.probabilities(price) >= 0.5
        np.testing.assert_array_equal(stops, (said.indifference <= price) & said.mask)
        np.testing.assert_array_equal(
            said.probabilities(price), predict(model, labels, price=price)
        )
    model.config.price = 1e-3
    np.testing.assert_array_equal(predict(model, labels), said.probabilities(1e-3))
    with pytest.raises(ValueError, match="trained for prices of a token from 0 to 0.1"):
        said.probabilities(0.11)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with labels of two splits, a policy of every price and one of a lambda."""
    folder = tmp_path_factory.mktemp("every-price")
    for split, count, seed in (("train", 60, 7), ("test", 60, 8)):
        Reasoner().label(draw_split(split, count, seed), folder / split, seed)  # type: ignore[arg-type]
    fields: dict[str, Any] = {"head": "price", "prices": "auto", "layers": 1, "num_train_epochs": 2}
    trained_on(folder / "train", folder / "run", **fields, learning_rate=5e-4)
    trained_on(folder / "train", folder / "fixed")
    return folder


def test_one_replay_gives_the_frontier_from_one_pass(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = itertools.count()
    outputs = predict_outputs

    def counted(*arguments: Any, **named: Any) -> Any:
        next(passes)
        return outputs(*arguments, **named)

    monkeypatch.setattr("ospruner.comparing.predict_outputs", counted)
    command = ["compare", str(trained / "test"), str(trained / "run"), "--out", str(tmp_path)]
    done = CliRunner().invoke(app, [*command, "--prices", "all"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert next(passes) == 1
    rows = Results.read(tmp_path / "results.json").frame
    rows = rows[rows["method"] == EVERY_PRICE]
    config = OSPrunerConfig.from_pretrained(trained / "run")
    assert config.prices is not None
    assert rows["parameter"].tolist() == list(config.prices.grid())
    tokens = rows["tokens"].tolist()
    assert tokens == sorted(tokens, reverse=True)

    evaluation = compare(trained / "test", [str(trained / "run")], prices=[1e-4, 2e-3]).evaluation
    stored = load_labels(trained / "test")
    base, _ = load_labelled_base(None, stored)
    model, labels = OSPrunerForCausalLM.from_base(base, trained / "run"), stored.traces
    table = TraceTable.from_dataset(labels)
    for rule in evaluation.rules[1:3]:
        wanted = replay(table, predict(model, labels, price=rule.parameter))
        assert rule.outcome.accuracy == pytest.approx(wanted.accuracy, abs=1e-6)
        assert rule.outcome.mean_tokens == pytest.approx(wanted.mean_tokens, abs=1e-4)
    shown = evaluation.traces[0]["methods"]
    assert "price" not in shown[0]
    assert shown[1]["price"] == 1e-4
    assert len(shown[1]["prices"]) == len(shown[1]["pi"])


def test_prices_that_a_policy_does_not_know_are_refused(trained: Path) -> None:
    price, (fixed,) = str(trained / "run"), [trained / "fixed"]
    with pytest.raises(ValueError, match="price is 5.0, but the policy was trained for pr"):
        parse_policies([price], [1e-4, 5.0])
    with pytest.raises(ValueError, match=r"trained for 0.001 alone \(head 'fixed'\): leave it out"):
        parse_policies([price, str(fixed)], [1e-4])
    with pytest.raises(ValueError, match="is a policy of every price .* no other has a frontier"):
        parse_policies([str(fixed)], ())
    both = parse_policies([price, str(fixed)], ())
    assert [use.parameter for use in both if use.path == str(fixed)] == [1e-3]
    assert len(both) == 32
    assert [use.parameter for use in parse_policies([price, str(fixed)], [1e-3])] == [1e-3, 1e-3]
    assert len(parse_policies([f"{price}@.5,.9"], [1e-4, 1e-3])) == 4
    with pytest.raises(ValueError, match="is given twice for OS-Pruner, one policy with"):
        parse_policies([price], [1e-4, 1e-4])


def test_online_stops_at_the_prices_that_are_asked_for(trained: Path, tmp_path: Path) -> None:
    command = ["compare", str(trained / "test"), str(trained / "run"), "--online", "--out"]
    command += [str(tmp_path / "out"), "--limit", "3", "--prices", "0,1e-2"]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    rows = Results.read(tmp_path / "out" / "results.json").frame
    rows = rows[rows["method"] == EVERY_PRICE]
    found = dict(zip(rows["parameter"], rows["tokens"], strict=True))
    assert found.keys() == {0.0, 1e-2}
    assert found[1e-2] <= found[0.0]


def test_a_price_is_promised_and_kept(trained: Path, tmp_path: Path) -> None:
    policy = shutil.copytree(trained / "run", tmp_path / "policy")
    found = calibrate(policy, trained / "test", 0.3)
    config = OSPrunerConfig.from_pretrained(policy)
    assert config.prices is not None
    assert found.value in config.prices.grid()
    assert found.test == "exact"
    assert config.calibrations is not None
    (stored,) = config.calibrations
    assert (stored["threshold"], stored["price"]) == (0.5, found.value)
    (rule,) = compare(
        trained / "test", [f"{policy}@.5"], prices=[stored["price"]]
    ).evaluation.rules[1:2]
    full = TraceTable.from_dataset(load_labels(trained / "test").traces).full_correct.mean()
    assert full - rule.outcome.accuracy == pytest.approx(stored["loss"])
    model = OSPrunerForCausalLM.from_pretrained(policy)
    ids = torch.tensor([load_labels(trained / "test").traces[0]["prompt_ids"]])
    how: dict[str, Any] = {"max_new_tokens": 60, "do_sample": False}
    promised = model.generate(ids, stop_policy={"max_loss": 0.3}, **how)
    same = {"threshold": 0.5, "price": found.value}
    assert torch.equal(promised, model.generate(ids, stop_policy=same, **how))
    with pytest.raises(ValueError, match=r"prices of a token from careful \(low\) to bold"):
        calibrate(policy, trained / "test", 0.3, values=[1e-3, 1e-4])
    with pytest.raises(ValueError, match="price is 7, but the policy was trained for"):
        calibrate(policy, trained / "test", 0.3, values=[1e-3, 7])


def test_a_price_at_which_the_policy_draws_is_promised_too(trained: Path, tmp_path: Path) -> None:
    policy = shutil.copytree(trained / "run", tmp_path / "policy")
    command = ["calibrate", str(policy), "--labels", str(trained / "test"), "--max-loss", "0.4"]
    done = CliRunner().invoke(app, [*command, "--mode", "sample"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "(betting test)" in " ".join(done.output.split())
    config = OSPrunerConfig.from_pretrained(policy)
    assert config.calibrations is not None
    (stored,) = config.calibrations
    assert (stored["mode"], stored["threshold"], stored["test"]) == ("sample", None, "betting")
    # What was tested is replay's expectation over the draws.
    price = stored["price"]
    full, drawn = compare(trained / "test", [str(policy)], prices=[price]).evaluation.rules[:2]
    assert full.outcome.accuracy - drawn.outcome.accuracy == pytest.approx(stored["loss"])
    # Of the thinking tokens' histogram the bins' shares are those of the stops that are expected.
    tokens = stored["traffic"]["thinking_tokens"]
    assert sum(tokens["shares"]) == pytest.approx(1, abs=1e-4)
    assert max(tokens["shares"]) < 0.2
    assert tokens["edges"][0] < drawn.outcome.mean_tokens < tokens["edges"][-1]
    kept = StopPolicyConfig(max_loss=0.4).with_defaults(config)
    assert (kept.mode, kept.threshold, kept.price) == ("sample", None, price)

    fixed = trained / "fixed"
    with pytest.raises(ValueError, match="mode is 'sample', but .* is a policy of one lambda"):
        calibrate(fixed, trained / "test", 0.4, mode="sample")
    with pytest.raises(ValueError, match="mode is 'draw'; it must be 'sample' or"):
        calibrate(fixed, trained / "test", 0.4, mode="draw")  # type: ignore[arg-type]
    rule = ["calibrate", "budget", "--labels", str(trained / "test"), "--max-loss", "0.4"]
    refused = CliRunner().invoke(app, [*rule, "--values", "90,20", "--mode", "sample"])
    assert refused.exit_code == 2
    assert "a rule such as budget does not draw" in " ".join(refused.output.split())


@pytest.mark.slow
def test_for_nothing_the_reasoner_thinks_on_unless_stopping_costs_nothing(tmp_path: Path) -> None:
    for split, count in (("train", 600), ("validation", 200)):
        Reasoner().label(draw_split(split, count, 11), tmp_path / split, 11)  # type: ignore[arg-type]
    fields: dict[str, Any] = {"head": "price", "prices": "auto", "layers": 1, "num_train_epochs": 8}
    trained_on(
        tmp_path / "train", tmp_path / "run", tmp_path / "validation", batch_size=32,
        learning_rate=5e-4, head_learning_rate=3e-3, **fields,
    )  # fmt: skip
    labels = tmp_path / "validation"
    replayed = compare(labels, [str(tmp_path / "run")], prices=[0.0, 1e-3]).evaluation
    full, nothing, priced = (rule.outcome for rule in replayed.rules[:3])
    assert nothing.accuracy > full.accuracy - 0.01
    assert nothing.mean_tokens > 1.3 * priced.mean_tokens
