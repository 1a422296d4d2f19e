"""Policies of one price and of every price: compared, calibrated, and the promise kept."""

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from modeling_ospruner import OSPrunerConfig, OSPrunerForCausalLM
from modeling_ospruner.stopping_ospruner import StopPolicyConfig
from ospruner.calibrating import SHARES, calibrate
from ospruner.comparing import compare
from ospruner.demo.shipped import Reasoner, draw_split
from ospruner.eval.measured import Predicted
from ospruner.eval.methods import EVERY_PRICE, parse_policies, price_grid
from ospruner.eval.replay import replay
from ospruner.eval.results import Results
from ospruner.eval.table import TraceTable
from ospruner.hub_cards.cards import policy_card
from ospruner.rules import Budget
from ospruner.serving.requests import CALIBRATION_FIELDS, EFFORTS, StopRequest, check_measured
from ospruner.train.label_sets import load_labelled_base
from ospruner.train.labels.loading import load_labels
from ospruner.train.labels.making import Labeller, label_problems
from ospruner.train.traces import LabelledTraces, predict_outputs
from ospruner.train.untrained import untrained

from .conftest import RANGE, command, make_labels, trained_on

TWOS: dict[str, Any] = dict.fromkeys(CALIBRATION_FIELDS, 2.0)
ENOUGH = {name: TWOS[name] for name in CALIBRATION_FIELDS[:5]}  # for generate


def test_indifference_is_what_thresholds_compare(tiny_base: Any, tiny_tokenizer: Any) -> None:
    model = untrained(tiny_base, tiny_tokenizer, price_range=RANGE, tuning="layers")
    nn.init.normal_(model.policy.head.weight, generator=torch.Generator().manual_seed(0))
    model.config.price = 1e-3
    said = predict_outputs(model, LabelledTraces.from_dataset(make_labels(12)))
    assert said.indifference is not None
    for price in (0.0, 1e-3, 0.1):
        stops = said.probabilities(price) >= 0.5
        np.testing.assert_array_equal(stops, (said.indifference <= price) & said.mask)
    np.testing.assert_array_equal(said.probabilities(), said.probabilities(1e-3))
    with pytest.raises(ValueError, match="price is 0.11"):
        said.probabilities(0.11)


@pytest.fixture(scope="module")
def trained(labelled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a policy of every price, `run`, and one of a price, `fixed`."""
    folder = tmp_path_factory.mktemp("every-price")
    fields: dict[str, Any] = {"head": "price", "prices": "auto", "layers": 1, "num_train_epochs": 2}
    trained_on(labelled / "train", folder / "run", **fields, learning_rate=5e-4)
    trained_on(labelled / "train", folder / "fixed")
    return folder


@pytest.fixture
def policies(trained: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Copies of both, to be written to."""
    both = (shutil.copytree(trained / name, tmp_path / name) for name in ("run", "fixed"))
    return tuple(both)  # type: ignore[return-value]


@pytest.fixture(scope="module")
def labels(labelled: Path) -> Path:
    return labelled / "test"


def promises_of(policy: Path) -> list[dict[str, Any]]:
    promises = OSPrunerConfig.from_pretrained(policy).calibrations
    assert promises is not None
    return promises


def test_one_replay_gives_the_frontier_from_one_pass(
    trained: Path, labels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = itertools.count()

    def counted(*arguments: Any, **named: Any) -> Any:
        next(passes)
        return predict_outputs(*arguments, **named)

    monkeypatch.setattr("ospruner.comparing.predict_outputs", counted)
    command("compare", labels, trained / "run", "--out", tmp_path, "--prices", "all")
    assert next(passes) == 1
    frame = Results.read(tmp_path / "results.json").frame
    rows = frame[frame["method"] == EVERY_PRICE]
    config = OSPrunerConfig.from_pretrained(trained / "run")
    assert config.prices is not None
    assert rows["parameter"].tolist() == list(price_grid(config.prices))
    assert rows["tokens"].is_monotonic_decreasing

    report = compare(labels, [str(trained / "run")], prices=[1e-4, 2e-3])
    stored = load_labels(labels)
    base, _ = load_labelled_base(None, stored, torch.device("cpu"))
    model = OSPrunerForCausalLM.from_base(base, trained / "run")
    said = predict_outputs(model, LabelledTraces.from_dataset(stored.traces))
    table = TraceTable.from_dataset(stored.traces)
    for rule in report.rules[1:3]:
        wanted = replay(table, said.probabilities(rule.parameter))
        assert rule.outcome.accuracy == pytest.approx(wanted.accuracy, abs=1e-6)
        assert rule.outcome.mean_tokens == pytest.approx(wanted.mean_tokens, abs=1e-4)


def test_prices_that_a_policy_does_not_know_are_refused(trained: Path) -> None:
    price, fixed = str(trained / "run"), str(trained / "fixed")
    with pytest.raises(ValueError, match="price is 5.0"):
        parse_policies([price], [1e-4, 5.0])
    with pytest.raises(ValueError, match=r"trained for 0.001 alone \(head 'fixed'\): leave it out"):
        parse_policies([price, fixed], [1e-4])
    with pytest.raises(ValueError, match="is a policy of every price .* no other has a frontier"):
        parse_policies([fixed], ())
    both = parse_policies([price, fixed], ())
    assert [use.parameter for use in both if use.path == fixed] == [1e-3]
    assert len(both) == 32
    assert [use.parameter for use in parse_policies([price, fixed], [1e-3])] == [1e-3, 1e-3]
    assert len(parse_policies([f"{price}@.5,.9"], [1e-4, 1e-3])) == 4


def test_online_stops_at_given_prices(trained: Path, labels: Path, tmp_path: Path) -> None:
    asked = ("--limit", 3, "--samples", 2, "--prices", "0,1e-2")
    command("compare", labels, trained / "run", "--online", "--out", tmp_path, *asked)
    frame = Results.read(tmp_path / "results.json").frame
    rows = frame[frame["method"] == EVERY_PRICE]
    found = dict(zip(rows["parameter"], rows["tokens"], strict=True))
    assert found.keys() == {0.0, 1e-2}
    assert found[1e-2] <= found[0.0]


@pytest.mark.parametrize("kind", [0, 1], ids=["price", "fixed"])
def test_promise_and_efforts_are_stored_told_and_kept(
    kind: int, policies: tuple[Path, Path], labels: Path, tmp_path: Path
) -> None:
    policy, numbers, key = policies[kind], tmp_path / "found.json", ("price", "threshold")[kind]
    policy_card(policy, name="x", license={"license": "mit"}).save(policy / "README.md")
    words = ("calibrate", policy, "--labels", labels, "--max-loss", 0.3, "--json", numbers)
    said = command(*words, "--efforts", "low=.4,medium=0.8")
    assert "keeps the promise of at most 30 points lost at 0.95 confidence" in said
    assert "reasoning_effort" in said
    found, efforts = json.loads(numbers.read_text()), OSPrunerConfig.from_pretrained(policy).efforts
    assert (found["problems"], found["test"], found["threshold"]) == (60, "exact", None)
    (stored,) = promises_of(policy)
    more = {"full_accuracy", "natural_accuracy"}
    assert set(stored) == {*CALIBRATION_FIELDS, *more}
    assert f"right in {stored['full_accuracy']:.1%}; the natural answer there is right in" in said
    wanted = (None, found["value"]) if kind else (found["value"], 0.5)
    assert (stored["price"], stored["threshold"]) == wanted
    data = load_labels(labels)
    assert (stored["max_loss"], stored["data_hash"]) == (0.3, data.data_hash)
    assert efforts is not None
    assert found["efforts"] == efforts
    assert [*efforts] == sorted(EFFORTS)  # as JSON keeps them
    rows = [efforts[name] for name in EFFORTS]
    assert [one["tokens"] for one in rows] == sorted(one["tokens"] for one in rows)
    card = (policy / "README.md").read_text("utf-8")  # states it, and keeps its licence
    assert "| 30.0 points | 0.95 | threshold |" in card
    assert "license: mit" in card
    assert f"| low | {rows[1][key]:{'.3f' if kind else 'g'}}" in card

    # What was promised and measured is what replay finds there, and what generate does.
    values = sorted({one[key] for one in (stored, *rows)})
    use = f"{policy}@{','.join(map(str, values)) if kind else 0.5}"
    full, *used = compare(labels, [use], prices=None if kind else values).rules
    at = {value: one.outcome for value, one in zip(values, used, strict=False)}
    assert full.outcome.accuracy - at[stored[key]].accuracy == pytest.approx(stored["loss"])
    shares = {**SHARES, "low": 0.4, "medium": 0.8}
    for name, one in efforts.items():
        assert one["share"] <= shares[name] or one["tokens"] == rows[0]["tokens"]
        outcome = at[one[key]]
        assert one["tokens"] == pytest.approx(outcome.mean_tokens, abs=1e-3)
        assert one["loss"] == pytest.approx(full.outcome.accuracy - outcome.accuracy, abs=1e-3)
        share = outcome.mean_tokens / full.outcome.mean_tokens
        assert one["share"] == pytest.approx(share, abs=1e-3)
    model = OSPrunerForCausalLM.from_pretrained(policy)
    ids = torch.tensor([data.traces[0]["prompt_ids"]])
    same = {name: stored[name] for name in ("mode", "threshold", "price") if stored[name]}
    promised, by_hand = (
        model.generate(ids, stop_policy=asked, max_new_tokens=60, do_sample=False)
        for asked in ({"max_loss": 0.3}, same)
    )
    assert torch.equal(promised, by_hand)
    for wrong, message in (({"lots": 0.5}, "an effort is 'lots'"), ({"low": 2}, "effort low is 2")):
        with pytest.raises(ValueError, match=message):
            calibrate(policy, labels, 0.3, efforts=wrong)


def test_draws_at_a_price_are_promised_too(policies: tuple[Path, Path], labels: Path) -> None:
    policy, fixed = policies
    words = ("calibrate", policy, "--labels", labels, "--max-loss", 0.4, "--mode", "sample")
    assert "(betting test)" in command(*words)
    (stored,) = promises_of(policy)
    assert (stored["mode"], stored["threshold"], stored["test"]) == ("sample", None, "betting")
    # What was tested is replay's expectation over the draws.
    price = stored["price"]
    full, drawn = compare(labels, [str(policy)], prices=[price]).rules[:2]
    assert full.outcome.accuracy - drawn.outcome.accuracy == pytest.approx(stored["loss"])
    # Of the thinking tokens' histogram the bins' shares are those of the stops that are expected.
    tokens = stored["traffic"]["thinking_tokens"]
    assert sum(tokens["shares"]) == pytest.approx(1, abs=1e-4)
    assert max(tokens["shares"]) < 0.2
    assert tokens["edges"][0] < drawn.outcome.mean_tokens < tokens["edges"][-1]
    # Answers of other grades differ; what is stored is a bound on how many answers do.
    graded = float((drawn.outcome.helped + drawn.outcome.harmed).mean())
    assert 0 < graded < stored["disagreement"] < 1
    config = OSPrunerConfig.from_pretrained(policy)
    kept = StopPolicyConfig(max_loss=0.4).with_defaults(config)
    assert (kept.mode, kept.threshold, kept.price) == ("sample", None, price)
    with pytest.raises(ValueError, match="mode is 'sample', but .* is a policy of one price"):
        calibrate(fixed, labels, 0.4, mode="sample")


def test_a_second_promise_replaces_its_equal(policies: tuple[Path, Path], labels: Path) -> None:
    for max_loss in (0.4, 0.3, 0.4):
        assert calibrate(policies[1], labels, max_loss).value is not None
    promises = promises_of(policies[1])
    assert [one["max_loss"] for one in promises] == [0.3, 0.4]
    # The surer one goes before the bolder one.
    surer = OSPrunerConfig(calibrations=[promises[0] | {"confidence": 0.99}, promises[1]])
    kept = StopPolicyConfig(max_loss=0.45).with_defaults(surer)
    assert kept.threshold == promises[0]["threshold"]


def test_a_server_promises_by_its_defaults_alone() -> None:
    one: dict[str, Any] = {**dict.fromkeys(CALIBRATION_FIELDS, 0.02), "threshold": 0.7}
    config = OSPrunerConfig()
    config.calibrations = [one | {"price": None, "mode": "threshold"}]
    defaults = StopRequest({"stop_policy": True, "stop_max_loss": 0.02}, server=True)
    defaults.settle(config)
    settings = StopRequest(None).settings(defaults)
    assert settings is not None
    assert (settings.mode, settings.threshold, settings.max_loss) == ("threshold", 0.7, None)
    drawn = StopRequest({"stop_mode": "sample"}).settings(defaults)
    assert drawn is not None
    assert drawn.mode == "sample"


def test_what_the_promise_does_not_cover_is_refused_beside_it() -> None:
    chosen = {"threshold": 0.5, "mode": "sample", "rule": Budget(9)}
    limits = {"min_thinking_tokens": 4, "max_thinking_tokens": 9}
    answers = {"answer": "free", "answer_do_sample": True}
    for name, value in (chosen | limits | answers).items():
        with pytest.raises(ValueError, match=f"max_loss is 0.02, and so is .*{name}.* g"):
            StopPolicyConfig(max_loss=0.02, **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "wrong", "said"),
    [
        ("calibrations", [{"max_loss": 0.1}], ".'confidence', 'mode', .* lack in calibrations"),
        ("calibrations", [ENOUGH], "must have the fields max_loss, confidence, mode, t"),
        ("calibrations", [TWOS], "mode is 2.0"),
        ("calibrations", [TWOS | {"mode": "sample"}], "max_loss is 2.0"),
        ("efforts", {"tiny": {}}, "efforts: a name is 'tiny'"),
        ("efforts", {"low": {"price": 0.1}}, "efforts holds .* must have the fields mode, thresh"),
    ],
)
def test_an_edited_promise_or_effort_is_refused(field: str, wrong: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_measured(OSPrunerConfig(**{field: wrong}))


def test_thresholds_at_price_0_are_more_careful_than_every_price(
    policies: tuple[Path, Path], labels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy that stops at once at price 0 keeps a promise where it must be surer."""

    def hasty(said: Predicted, price: float | None = None) -> Any:
        return np.where(said.mask, np.float32(0.85), np.float32(0))

    monkeypatch.setattr(Predicted, "probabilities", hasty)
    (price, fixed), numbers = policies, tmp_path / "found.json"
    refused = calibrate(price, labels, 0.3)
    assert refused.value is None
    assert "0@.95 is price 0 from probability .95 on" in refused.told(0.3, 0.95)
    words = ("calibrate", price, "--labels", labels, "--max-loss", 0.3, "--json", numbers)
    assert "0@0.9 keeps the promise" in command(*words, "--values", "0@.95,0@.9,0@.8,0,1e-3")
    found = json.loads(numbers.read_text())
    assert [found[name] for name in ("value", "threshold", "loss")] == [0.0, 0.9, 0.0]
    (stored,) = promises_of(price)
    assert [stored[name] for name in ("mode", "threshold", "price")] == ["threshold", 0.9, 0.0]
    kept = StopPolicyConfig(max_loss=0.3).with_defaults(OSPrunerConfig.from_pretrained(price))
    assert (kept.mode, kept.threshold, kept.price) == ("threshold", 0.9, 0.0)
    card = (price / "README.md").read_text("utf-8")
    assert "| threshold | 0, from probability 0.9 on | 60 |" in card
    for policy, mode, values in (
        (price, "threshold", [(0.0, 0.9), (0.0, 0.95)]),
        (price, "threshold", [0.0, (0.0, 0.9)]),
        (price, "threshold", [(0.0, 1.1), 0.0]),
        (price, "sample", [(0.0, 0.9), 0.0]),
        (fixed, "threshold", [(0.0, 0.9), 0.5]),
    ):
        with pytest.raises(ValueError, match="values is .* each once"):
            calibrate(policy, labels, 0.3, mode=mode, values=values)  # type: ignore[arg-type]


def test_a_rule_without_training_is_calibrated_too(labels: Path) -> None:
    words = ("calibrate", "budget", "--labels", labels, "--max-loss", 0.3)
    values = ("--values", "900,400,200,100,20")
    assert "00 keeps the promise of at most 30 points" in command(*words, *values)
    with pytest.raises(ValueError, match="budget is a rule: give values to try"):
        calibrate(Budget, labels, 0.3)
    with pytest.raises(ValueError, match="a rule such as budget does not draw"):
        calibrate("budget", labels, 0.3, mode="sample", values=[90, 20])


def test_what_promises_nothing(policies: tuple[Path, Path], labelled: Path, labels: Path) -> None:
    price, fixed = policies
    with pytest.raises(ValueError, match="are among those that .* was trained on"):
        calibrate(fixed, labelled / "train", 0.1)
    known = load_labels(labelled / "train")
    again = known.traces.map(lambda row: {"problem_id": f"new/{row['problem_id']}"})
    with pytest.raises(ValueError, match=r"\d+ problems .* under whatever id"):
        calibrate(fixed, replace(known, traces=again, data_hash="0" * 64), 0.1)
    with pytest.raises(ValueError, match=r"from careful \(high\) to bold"):
        calibrate(fixed, labels, 0.1, values=[0.5, 0.9])
    for wrong, said in (([1e-3, 1e-4], r"from careful \(low\) to bold"), ([1e-3, 7], "price is 7")):
        with pytest.raises(ValueError, match=said):
            calibrate(price, labels, 0.3, values=wrong)
    found = calibrate(fixed, labels, 0.001)
    assert found.value is None
    assert "No setting keeps the promise" in found.told(0.001, 0.95)
    kept = OSPrunerConfig.from_pretrained(fixed)
    assert kept.calibrations is None
    assert kept.efforts == found.efforts  # are no promise
    assert "## Promise" not in (fixed / "README.md").read_text("utf-8")


def test_answers_after_a_sentence(trained: Path, reasoner: Reasoner, tmp_path: Path) -> None:
    """How answers are forced is no part of what a policy reads, but of what is promised."""
    plain = reasoner.token_format
    wound = plain.winding_down("So I have it:", reasoner.tokenizer)
    folders, policy = [], str(trained / "fixed")
    for name, fmt in (("soft", wound), ("plain", plain)):
        described = fmt.format.to_dict()
        settings = replace(reasoner.label_settings(8), reasoning_format=described)
        labeller = Labeller(reasoner.tokenizer, fmt, settings)
        label_problems(draw_split("test", 12, 8), reasoner.engine, labeller, tmp_path / name)
        folders.append(tmp_path / name)
    soft, hard = (load_labels(folder).traces for folder in folders)
    assert soft["trace_ids"] == hard["trace_ids"]
    assert soft["forced_answer_ids"] != hard["forced_answer_ids"]
    replayed = [compare(folder, [policy]).rules for folder in folders]
    tokens = [[rule.outcome.mean_tokens for rule in rules] for rules in replayed]
    assert tokens[0] == tokens[1]
    with pytest.raises(ValueError, match="stops with wind_down '', the answers of .* 'So I have"):
        calibrate(policy, folders[0], 0.3)
