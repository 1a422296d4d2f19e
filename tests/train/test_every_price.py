"""One policy for every price of a token: trained, replayed, calibrated, evaluated."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
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
from ospruner.eval.replay import replay, replay_full
from ospruner.eval.results import Results
from ospruner.eval.table import TraceTable
from ospruner.provenance import read_provenance
from ospruner.train.fresh import predict, predict_outputs
from ospruner.train.from_labels import (
    load_labelled_base,
    load_labels,
    parse_range,
    settings_for,
    train_from_labels,
)
from ospruner.train.loop import StageResult
from ospruner.train.objective import every_price_loss, objective_loss
from ospruner.train.settings import automatic_range

from .conftest import SETTINGS, MakeLabels, log_of

RANGE = (5e-4, 0.1)  # of `automatic_range`; up to 5e-2 it collapses to "never stop"
PRICED = dataclasses.replace(
    SETTINGS,
    length_penalties=(),
    head="price",
    price_range=RANGE,
    epochs_per_stage=10,
    entropy_bonus=0.01,
)
SHORT = dataclasses.replace(PRICED, epochs_per_stage=2)


def test_a_step_is_taken_on_0_and_one_price_of_each_part_of_the_range() -> None:
    parts = np.geomspace(*RANGE, SHORT.prices_per_batch)
    seen = set()
    for step in range(50):
        first, *drawn = SHORT.prices_of_batch(step)
        assert first == 0
        assert len(drawn) == 15
        for price, low, high in zip(drawn, parts[:-1], parts[1:], strict=True):
            assert low <= price <= high
        assert SHORT.prices_of_batch(step) == (first, *drawn)
        seen.add(tuple(drawn))
    assert len(seen) == 50
    other = dataclasses.replace(SHORT, seed=1, prices_per_batch=3)
    assert len(other.prices_of_batch(0)) == 3
    assert other.prices_of_batch(0)[1:] != SHORT.prices_of_batch(0)[1:3]


def test_the_loss_is_the_mean_over_prices_and_at_0_accuracy_alone() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 4, 5)
    correct, lengths = torch.rand(4, 5), torch.arange(20.0).view(4, 5)
    mask = torch.ones(4, 5, dtype=torch.bool)
    prices = (0.0, 1e-3, 2e-2)
    alone = [
        objective_loss(logits[j], correct, lengths, price, mask, 0.01 if j else 0.0)
        for j, price in enumerate(prices)
    ]
    found = every_price_loss(logits, correct, lengths, prices, mask, 0.01)
    torch.testing.assert_close(found, sum(alone) / 3)
    with pytest.raises(ValueError, match="zip"):
        every_price_loss(logits, correct, lengths, prices[:2], mask)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"method": "probe"}, "method is 'probe', a classifier without a length penalty, but head"),
        ({"method": "flashthink"}, "method is 'flashthink', a classifier"),
        ({"length_penalties": (1e-3,)}, r"length_penalties is \[0.001\], a schedule to anneal"),
        ({"first_stage_epochs": 2}, "first_stage_epochs is 2, but head 'price' is one policy of"),
        ({"last_stage_epochs": 2}, "last_stage_epochs is 2, but head 'price'"),
        ({"only_last_policy": True}, "only_last_policy is True, but head 'price'"),
        ({"price_range": (1e-3,)}, r"price_range is \[0.001\]; head 'price' needs the lowest"),
        ({"price_range": (1e-2, 1e-3)}, "high is 0.001; it must lie in"),
        ({"head": "fixed"}, r"price_range is \[0.0005, 0.1\], but head is 'fixed'"),
        ({"head": "index"}, "head is 'index'; it must be one of fixed, price"),
        ({"prices_per_batch": 1}, "prices_per_batch is 1; it must be at least 2"),
    ],
)
def test_what_does_not_fit_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(SHORT, **fields)


def test_targets_are_of_the_fixed_head() -> None:
    with pytest.raises(
        ValueError, match=r"head is 'price', one target by itself: several \(--multi"
    ):
        SHORT.targets()
    probe = SHORT.baseline("probe")
    assert (probe.head, probe.price_range, probe.stages[0].name) == ("fixed", (), "probe")


def test_the_range_follows_from_the_labels(make_labels: MakeLabels) -> None:
    table = TraceTable.from_dataset(make_labels(200))
    low, high = automatic_range(table)
    assert low == pytest.approx(high / 200)
    # Above it, one step of the series and less is below twice what a token gains.
    tokens, right = table.lengths.astype(float), table.correct
    at = np.minimum(np.arange(right.shape[1]), table.last[:, None])
    accuracy = np.take_along_axis(right, at, 1).mean(0)
    mean = np.take_along_axis(tokens, at, 1).mean(0)
    best = int(accuracy.argmax())
    worth = 2 * (accuracy[best] - accuracy[0]) / (mean[best] - mean[0])
    assert worth <= high < 2.5 * worth + 1e-12
    longer = dataclasses.replace(table, lengths=10 * table.lengths)
    assert automatic_range(longer)[1] == pytest.approx(high / 10)
    assert parse_range("auto", table) == (low, high)
    assert parse_range("1e-4,1e-2", table) == (1e-4, 1e-2)
    for wrong in ("r1", "1e-4", "1e-4,1e-3,1e-2"):
        with pytest.raises(ValueError, match="it must be 'auto', or the lowest and the highest"):
            parse_range(wrong, table)
    made = settings_for("auto", head="price")(table)
    assert (made.price_range, made.entropy_bonus) == ((low, high), 0.01)
    assert settings_for("1e-3", entropy_bonus=None)(table).entropy_bonus == 0


def test_training_beats_never_stopping_at_every_price(
    fit: Callable[..., list[StageResult]],
    tiny_base: Qwen2ForCausalLM,
    make_labels: MakeLabels,
    tmp_path: Path,
) -> None:
    (stage,) = fit(PRICED)
    assert stage.name == "price"
    held_out = make_labels(40, seed=1, prefix="v")
    table = TraceTable.from_dataset(held_out)
    full = replay_full(table)
    model = OSPrunerForCausalLM.from_base(tiny_base, stage.path)
    said = predict_outputs(model, held_out)
    for price in (2e-3, 5e-3, 2e-2):
        found = replay(table, said.probabilities(price))
        gained = found.accuracy - full.accuracy - price * (found.mean_tokens - full.mean_tokens)
        assert gained > 0.2 * price * full.mean_tokens, price
    # For nothing, what helps is thought to the end; and tokens never rise with the price.
    careful = replay(table, said.probabilities(0.0))
    assert careful.accuracy > full.accuracy - 0.01
    tokens = [
        replay(table, said.probabilities(p)).mean_tokens for p in (0.0, *np.geomspace(*RANGE))
    ]
    assert tokens == sorted(tokens, reverse=True)
    assert tokens[0] > 1.3 * tokens[-1]

    # The default is the boldest price of 31 that loses a point at most, and the record says so.
    prices = model.config.prices
    assert prices is not None
    outcomes = {p: replay(table, said.probabilities(p)) for p in prices.grid()}
    kept = [p for p, one in outcomes.items() if one.accuracy >= full.accuracy - 0.01]
    assert model.config.price == stage.price == max(kept)
    assert "at most 0.01 accuracy" in read_provenance(stage.path).details["price_chosen_by"]
    assert stage.accuracy == outcomes[max(kept)].accuracy
    np.testing.assert_array_equal(stage.validation_probabilities(), said.probabilities())
    (logged,) = (entry["frontier"] for entry in log_of(tmp_path / "run") if "frontier" in entry)
    assert [one["tokens"] for one in logged] == [one.mean_tokens for one in outcomes.values()]


def test_the_price_of_indifference_is_what_thresholds_compare(
    tiny_base: Qwen2ForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    make_labels: MakeLabels,
) -> None:
    model = OSPrunerForCausalLM.untrained(
        tiny_base, tiny_tokenizer, price_range=RANGE, tuning="layers"
    )
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


def test_a_broken_off_run_ends_with_the_same_bits(
    fit: Callable[..., list[StageResult]], make_labels: MakeLabels, tmp_path: Path
) -> None:
    class BrokenOffError(Exception):
        pass

    def break_off(phase: str, done: int, total: int, note: str = "") -> None:
        if phase == "train" and done == 8:
            raise BrokenOffError

    labels = make_labels(40)
    settings = dataclasses.replace(SHORT, checkpoint_every=3, swa_share=0.5, validate_every=4)
    with pytest.raises(BrokenOffError):
        fit(settings, labels, tmp_path / "broken", progress=break_off)
    (again,) = fit(settings, labels, tmp_path / "broken")
    (whole,) = fit(settings, labels, tmp_path / "whole")
    ours, theirs = (
        OSPrunerConfig.from_pretrained(stage.path).to_dict() for stage in (again, whole)
    )
    assert ours == theirs
    name = "model.safetensors"
    assert (again.path / name).read_bytes() == (whole.path / name).read_bytes()
    logs = [
        [
            {k: v for k, v in entry.items() if k not in ("seconds", "checksum")}
            for entry in log_of(f)
        ]
        for f in (tmp_path / "broken", tmp_path / "whole")
    ]
    assert logs[0] == logs[1]
    assert any("dynamics" in entry for entry in logs[0])
    with pytest.raises(ValueError, match="holds another training run"):
        fit(dataclasses.replace(settings, prices_per_batch=4), labels, tmp_path / "broken")


def test_auxiliary_losses_teach_the_tail_and_leave_with_the_training(
    fit: Callable[..., list[StageResult]], make_labels: MakeLabels, tmp_path: Path
) -> None:
    """Resumed bit for bit, in parts as in one; the policy that is saved has no trace of them."""

    class BrokenOffError(Exception):
        pass

    def break_off(phase: str, done: int, total: int, note: str = "") -> None:
        if phase == "train" and done == 8:
            raise BrokenOffError

    labels = make_labels(40)
    plain = dataclasses.replace(SHORT, checkpoint_every=3)
    settings = dataclasses.replace(plain, auxiliary_weight=0.5, auxiliary_targets=("repeats",))
    with pytest.raises(BrokenOffError):
        fit(settings, labels, tmp_path / "broken", progress=break_off)
    stages = {
        "broken": fit(settings, labels, tmp_path / "broken"),
        "whole": fit(settings, labels, tmp_path / "whole"),
        "parts": fit(
            dataclasses.replace(settings, micro_batch_tokens=60), labels, tmp_path / "parts"
        ),
        "plain": fit(plain, labels, tmp_path / "plain"),
    }
    weights = {name: load_file(one[0].path / "model.safetensors") for name, one in stages.items()}
    assert len({tuple(sorted(of.keys())) for of in weights.values()}) == 1
    for name, tensor in weights["whole"].items():
        assert torch.equal(tensor, weights["broken"][name]), name
        torch.testing.assert_close(tensor, weights["parts"][name], atol=2e-4, rtol=1e-3)
    assert not all(torch.equal(weights["whole"][name], x) for name, x in weights["plain"].items())
    losses = [
        [entry["loss"] for entry in log_of(tmp_path / name) if "loss" in entry]
        for name in ("whole", "plain")
    ]
    # ln 2 a nat of a read-out that knows nothing; at the end it knows more.
    assert losses[0][0] - losses[1][0] < 0.5 * math.log(2) + 0.05
    assert losses[0][-1] - losses[1][-1] < 0.95 * (losses[0][0] - losses[1][0])
    without = labels.remove_columns(["forced_logprob"])
    with pytest.raises(ValueError, match="the labels hold no forced_answers and forced_logprob"):
        fit(settings, without, tmp_path / "without")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with labels of two splits, a policy of every price and one of a lambda."""
    folder = tmp_path_factory.mktemp("every-price")
    for split, count, seed in (("train", 60, 7), ("test", 60, 8)):
        Reasoner().label(draw_split(split, count, seed), folder / split, seed)  # type: ignore[arg-type]
    common = ["train", "--labels", str(folder / "train"), "--batch-size", "8", "--layers", "1"]
    common += ["--learning-rate", "5e-4", "--head-learning-rate", "3e-3", "--validate-every", "4"]
    priced = ["--head", "price", "--out", str(folder / "run"), "--epochs", "2"]
    done = CliRunner().invoke(app, [*common, *priced], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert (folder / "run" / "dynamics.png").is_file()
    settings = settings_for("1e-3", tuning="head", batch_size=8)
    train_from_labels(folder / "train", folder / "fixed", settings)
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
    command = ["eval", "replay", "--labels", str(trained / "test"), "--out", str(tmp_path)]
    command += ["--policies", str(trained / "run" / "price")]
    done = CliRunner().invoke(app, [*command, "--price", "frontier"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert next(passes) == 1
    rows = [r for r in Results.read(tmp_path / "results.json").results if r.method == EVERY_PRICE]
    config = OSPrunerConfig.from_pretrained(trained / "run" / "price")
    assert config.prices is not None
    assert [row.parameter for row in rows] == list(config.prices.grid())
    tokens = [row.tokens.value for row in rows]
    assert tokens == sorted(tokens, reverse=True)

    evaluation = compare(
        trained / "test", [str(trained / "run" / "price")], prices=[1e-4, 2e-3]
    ).evaluation
    stored = load_labels(trained / "test")
    base, _ = load_labelled_base(None, stored)
    model, labels = OSPrunerForCausalLM.from_base(base, trained / "run" / "price"), stored.traces
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
    price, (fixed,) = str(trained / "run" / "price"), (trained / "fixed").glob("lam*/")
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
    with pytest.raises(ValueError, match="price is given twice for OS-Pruner, one policy with"):
        parse_policies([price], [1e-4, 1e-4])


def test_online_stops_at_the_prices_that_are_asked_for(trained: Path, tmp_path: Path) -> None:
    problems = [
        {"id": p.id, "problem": p.problem, "answer": p.answer} for p in draw_split("test", 3, 9)
    ]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, problems)) + "\n", "utf-8")
    command = ["eval", "online", "--dataset", str(tmp_path / "p.jsonl"), "--out"]
    command += [str(tmp_path / "out"), "--policies", str(trained / "run" / "price"), "--samples"]
    command += ["1", "--max-thinking-tokens", "300", "--price", "0,1e-2"]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    rows = Results.read(tmp_path / "out" / "results.json").results
    found = {row.parameter: row.tokens.value for row in rows if row.method == EVERY_PRICE}
    assert found.keys() == {0.0, 1e-2}
    assert found[1e-2] <= found[0.0]


def test_a_price_is_promised_and_kept(trained: Path, tmp_path: Path) -> None:
    policy = shutil.copytree(trained / "run" / "price", tmp_path / "policy")
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
    policy = shutil.copytree(trained / "run" / "price", tmp_path / "policy")
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

    fixed = next((trained / "fixed").glob("lam*/"))
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
    settings = settings_for(
        "auto", head="price", epochs_per_stage=8, learning_rate=5e-4, head_learning_rate=3e-3,
        swa_share=0.5, num_policy_layers=1,
    )  # fmt: skip
    train_from_labels(
        tmp_path / "train", tmp_path / "run", settings, validation=tmp_path / "validation"
    )
    labels = tmp_path / "validation"
    replayed = compare(labels, [str(tmp_path / "run" / "price")], prices=[0.0, 1e-3]).evaluation
    full, nothing, priced = (rule.outcome for rule in replayed.rules[:3])
    assert nothing.accuracy > full.accuracy - 0.01
    assert nothing.mean_tokens > 1.3 * priced.mean_tokens
