"""Policies that try answers: their history from labels, in training, in replay and in generate."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM
from typer.testing import CliRunner

from modeling_ospruner import OSPrunerConfig, OSPrunerForCausalLM
from modeling_ospruner.formats_ospruner import DEEPSEEK_R1
from modeling_ospruner.rules_ospruner import TRIAL_NUMBERS, TrialAnswer, TrialHistory
from ospruner.cli import app
from ospruner.demo.shipped import Reasoner, draw_split
from ospruner.eval.arithmetic import ModelWork
from ospruner.eval.compute import Compute
from ospruner.eval.methods import PolicyUse, refuse_other_trials
from ospruner.eval.replay import replay
from ospruner.eval.schema import LabelSettings
from ospruner.eval.table import TraceTable
from ospruner.serving.requests import StopRequest
from ospruner.train.fresh import new_policy, predict_outputs
from ospruner.train.labels.making import label
from ospruner.train.loop import StageResult
from ospruner.train.traces import LabelledTraces

from .conftest import SETTINGS, SHORT, MakeLabels

PRICES = (5e-5, 1e-2)
PRICE = 0.03  # at which the traces of `make_labels` are worth stopping where they are solved
KINDS: dict[str, dict[str, Any]] = {
    "copies": {"num_policy_layers": 1, "trial_every": 1},
    "queries": {"num_policy_layers": 2, "tuning": "queries", "trial_every": 2},
    "head": {"num_policy_layers": 0, "trial_every": 3},
    "price": {"num_policy_layers": 1, "price_range": PRICES, "trial_every": 2},
    "priced queries": {
        "num_policy_layers": 1,
        "tuning": "queries",
        "price_range": PRICES,
        "trial_every": 1,
    },
}


def stir(model: OSPrunerForCausalLM) -> OSPrunerForCausalLM:
    """Random weights, of which probabilities depend on the thinking and on trial answers."""
    trial = model.policy.trial
    assert trial is not None
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(3)
        model.policy.head.weight.normal_(0, 0.1)
        trial.weight.normal_(0, 0.5)
    return model


@pytest.fixture(scope="module")
def greedy(reasoner: Reasoner, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Labels of greedy traces, which generate writes again."""
    settings = dataclasses.replace(reasoner.label_settings(0), temperature=0.0)
    return label(
        draw_split("test", 6, 4),
        reasoner.engine,
        reasoner.tokenizer,
        reasoner.token_format,
        settings,
        tmp_path_factory.mktemp("greedy") / "labels",
    )


def model_of(kind: str, reasoner: Reasoner) -> OSPrunerForCausalLM:
    cap = reasoner.label_settings(0).max_answer_tokens
    made = OSPrunerForCausalLM.untrained(
        reasoner.model,
        reasoner.tokenizer,
        trial_max_tokens=cap,
        reasoning_format=DEEPSEEK_R1,
        **{"tuning": "layers", **KINDS[kind]},
    )
    return stir(made)


def written(model: OSPrunerForCausalLM, labels: Dataset, stop_policy: Any) -> list[list[int]]:
    """What generate writes after each prompt, all in one padded batch."""
    prompts = labels["prompt_ids"]
    assert model.tokenizer is not None
    width, pad = max(map(len, prompts)), model.tokenizer.pad_token_id
    ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    out = model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=700, stop_policy=stop_policy
    )
    found: list[list[int]] = out[:, width:].tolist()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_generate_says_what_replay_says(
    kind: str, reasoner: Reasoner, greedy: Dataset, tmp_path: Path
) -> None:
    """The same trace, the same numbers, the same probabilities; and the same stops and costs."""
    model = model_of(kind, reasoner)
    model.save_pretrained(tmp_path / "policy")
    model = OSPrunerForCausalLM.from_base(reasoner.model, tmp_path / "policy")
    traces = LabelledTraces.from_dataset(greedy)
    table, price = traces.table, 1e-3 if "price" in kind else None
    said = predict_outputs(model, traces)
    pi = said.probabilities(price)
    never = {"mode": "threshold", "threshold": 1.0, "price": price}
    ids = written(model, greedy, never)
    assert np.ptp(pi[table.mask]) > 0.1
    for n, record in enumerate(model.last_stop):
        trace = greedy[n]["trace_ids"]
        assert ids[n][: len(trace)] == trace  # else nothing is compared
        last = int(table.last[n])
        assert record.step_ends[:last] == table.lengths[n, :last].tolist()
        assert record.probabilities[:last] == pytest.approx(pi[n, :last].tolist(), abs=1e-4)
        if said.indifference is not None:
            known = np.array(record.prices[:last])
            np.testing.assert_allclose(known, said.indifference[n, :last], rtol=1e-2, atol=1e-9)

    free = np.arange(pi.shape[1]) < table.last[:, None]
    ranked = np.sort(pi[free])
    gaps = np.diff(ranked)[len(ranked) // 3 :]
    at = len(ranked) // 3 + int(gaps.argmax())
    threshold = float(ranked[at] + ranked[at + 1]) / 2  # far from all of them
    outcome = replay(table, pi, "threshold", threshold)
    suffix = len(reasoner.token_format.forced_suffix("forced"))
    compute = Compute.of_labels(greedy, ModelWork.of_config(reasoner.model.config), suffix)
    _, costs = compute.charge_trials(table, model.config.trial_every)
    written(model, greedy, never | {"threshold": threshold})
    records = model.last_stop
    assert [record.thinking_tokens for record in records] == outcome.tokens.tolist()
    assert {record.reason for record in records} >= {"policy"}
    tried = replay(costs, pi, "threshold", threshold).answer_tokens
    assert [record.probe_tokens for record in records] == tried.tolist()
    assert sum(tried) > 0


def test_trials_are_no_part_of_the_row(reasoner: Reasoner, greedy: Dataset) -> None:
    model = model_of("copies", reasoner)
    labels = greedy.select(range(3))
    plain = written(model, labels, False)
    watched = written(model, labels, {"mode": "threshold", "threshold": 1.0, "answer": "free"})
    for n, row in enumerate(labels):
        length = len(row["trace_ids"])
        assert plain[n][:length] == watched[n][:length] == row["trace_ids"]


def test_a_sentence_before_the_closing_is_no_part_of_trials(
    reasoner: Reasoner, greedy: Dataset
) -> None:
    """Nor is what else a caller asks of the answer, or a least length: the labels had none."""
    model, labels = model_of("copies", reasoner), greedy.select(range(3))
    never = {"mode": "threshold", "threshold": 1.0}
    written(model, labels, never)
    wanted = [record.probabilities for record in model.last_stop]
    other = {"wind_down": "So:", "mask_reentry": False, "min_thinking_tokens": 30}
    written(model, labels, never | other)
    assert [record.probabilities for record in model.last_stop] == wanted


def answer(*ids: int, logprobs: tuple[float, ...] = (-0.5, -0.5)) -> TrialAnswer:
    return TrialAnswer(ids, "closed", logprobs, math.log(20) / 2)


def test_the_numbers_of_a_history_by_hand() -> None:
    history = TrialHistory(every=2, max_tokens=8)
    answers = [answer(7, 9), answer(7, 9, logprobs=(-1.0, -1.0)), answer(8, 9), answer(7, 9)]
    asked: list[int] = []

    def trial(max_tokens: int) -> TrialAnswer:
        asked.append(max_tokens)
        return answers[len(asked) - 1]

    found = [dict(zip(TRIAL_NUMBERS, history.at_step(trial), strict=True)) for _ in range(9)]
    assert asked == [8] * 4
    assert set(found[0].values()) == {0.0}  # before the first
    high, low = math.exp(-0.5), math.exp(-1.0)
    first = {
        "tried": 1,
        "repeats": 0,
        "run": 0,
        "log_run": 0,
        "distinct": 0,
        "log_trials": 0,
        "length": 0.25,
        "confidence": high,
        "least_confidence": high,
        "entropy": 0.5,
        "since": 0,
    }
    assert found[1] == pytest.approx(first)
    assert found[2] == pytest.approx(first | {"since": 0.5})
    second = {"repeats": 1, "run": 0.5, "log_run": math.log(2), "log_trials": math.log(2)}
    second |= {"confidence": low, "least_confidence": low}
    assert found[3] == pytest.approx(first | second)
    third = {"distinct": 0.5, "log_trials": math.log(3)}
    assert found[5] == pytest.approx(first | third)
    assert found[7] == pytest.approx(first | third | {"log_trials": math.log(4)})
    empty = TrialHistory(1, 8).at_step(lambda _: answer(logprobs=()))
    assert empty[TRIAL_NUMBERS.index("confidence")] == 0.0


def with_answers(labels: Dataset) -> Dataset:
    """Labels whose forced answers' ids tell them apart, with confidences of their own."""

    def changed(row: dict[str, Any]) -> dict[str, Any]:
        texts = row["forced_answers"]
        return {
            "forced_answer_ids": [[3 + int(text == "7"), 4] for text in texts],
            "forced_logprob": [-0.1 * (1 + step % 4) for step in range(len(texts))],
        }

    return labels.map(changed, features=labels.features)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_numbers_depend_on_what_has_been_tried_alone(make_labels: MakeLabels, every: int) -> None:
    labels = with_answers(make_labels(20))
    rows = np.arange(20)
    whole = LabelledTraces.from_dataset(labels).trial_numbers(rows, every, 8)
    assert whole is not None
    table = TraceTable.from_dataset(labels)
    assert not whole[torch.from_numpy(~table.mask)].any()
    draws = np.random.default_rng(0)
    for cut in range(1, 6):

        def shuffled(row: dict[str, Any], cut: int = cut) -> dict[str, Any]:
            count = len(row["step_ends"])
            order = [*range(min(cut, count)), *draws.permutation(np.arange(min(cut, count), count))]
            names = ("forced_answer_ids", "forced_logprob", "forced_entropy")
            return {name: [row[name][i] for i in order] for name in names}

        other = labels.map(shuffled, features=labels.features)
        found = LabelledTraces.from_dataset(other).trial_numbers(rows, every, 8)
        assert found is not None
        torch.testing.assert_close(found[:, :cut], whole[:, :cut], rtol=0, atol=0)
    assert LabelledTraces.from_dataset(labels).trial_numbers(rows, 0, 8) is None


@pytest.mark.parametrize("head", ["fixed", "price"])
def test_untrained_it_is_the_policy_without(
    head: str,
    tiny_base: Qwen2ForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    make_labels: Any,
) -> None:
    labels = with_answers(make_labels(8))
    prices = PRICES if head == "price" else None
    models = [
        OSPrunerForCausalLM.untrained(
            tiny_base,
            tiny_tokenizer,
            1,
            price_range=prices,
            reasoning_format=DEEPSEEK_R1,
            trial_every=every,
            tuning="layers",
        )
        for every in (0, 2)
    ]
    for model in models:
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(0)
            model.policy.head.weight.normal_(0, 0.3)
    plain, tried = (predict_outputs(model, labels).outputs for model in models)
    assert (plain == tried).all()
    stir(models[1])
    if head == "price":
        said = predict_outputs(models[1], labels)
        pi = [said.probabilities(price) for price in (0.0, 1e-5, 1e-4, 1e-3, 1e-2)]
        assert all((low <= high).all() for low, high in itertools.pairwise(pi))


def test_it_learns_from_the_answers(
    fit: Callable[..., list[StageResult]],
    make_labels: MakeLabels,
    tiny_base: Qwen2ForCausalLM,
    tmp_path: Path,
) -> None:
    """Where the thinking says nothing of when it is solved, the history does; resumed alike."""

    class BrokenOffError(Exception):
        pass

    def break_off(phase: str, done: int, total: int, note: str = "") -> None:
        if phase == "train" and done == 10:
            raise BrokenOffError

    def blind(labels: Dataset) -> Dataset:
        same = labels.map(
            lambda row: {
                "trace_ids": [row["trace_ids"][i % 5] for i in range(len(row["trace_ids"]))]
            },
            features=labels.features,
        )
        return with_answers(same)

    train, held = blind(make_labels(64)), blind(make_labels(40, seed=1, prefix="v"))
    plain = dataclasses.replace(
        SETTINGS,
        num_policy_layers=0,
        tuning="head",
        length_penalties=(PRICE,),
        epochs_per_stage=12,
        checkpoint_every=4,
        head_learning_rate=1e-1,
        entropy_bonus=0.1,
    )
    tries = dataclasses.replace(plain, trial_every=1)
    with pytest.raises(BrokenOffError):
        fit(tries, train, tmp_path / "broken", validation=held, progress=break_off)
    broken = fit(tries, train, tmp_path / "broken", validation=held)[-1]
    found = fit(tries, train, tmp_path / "tries", validation=held)[-1]
    without = fit(plain, train, tmp_path / "plain", validation=held)[-1]
    table = TraceTable.from_dataset(held)
    reward = [
        float((one.correct - PRICE * one.tokens).mean())
        for one in (replay(table, at.validation_probabilities()) for at in (found, without))
    ]
    assert reward[0] > reward[1] + 0.1
    config = OSPrunerConfig.from_pretrained(found.path)
    assert (config.trial_every, config.trial_max_tokens) == (1, 32)
    said = found.validation_probabilities()
    assert (said == broken.validation_probabilities()).all()
    loaded = OSPrunerForCausalLM.from_base(tiny_base, found.path)
    np.testing.assert_allclose(predict_outputs(loaded, held).probabilities(), said, atol=1e-6)
    card = (found.path / "README.md").read_text()
    assert "| trial answers | at every 1. step, at most 32 tokens each |" in card
    assert "vLLM and SGLang cannot serve such a policy" in card
    assert "trial answers" not in (without.path / "README.md").read_text()
    doctor = CliRunner().invoke(app, ["doctor", str(found.path)])
    assert "at every 1. step, at most 32 tokens each" in " ".join(doctor.output.split())


def test_what_trials_cost_by_hand(make_labels: MakeLabels, tiny_base: Qwen2ForCausalLM) -> None:
    labels = make_labels(4)
    table = TraceTable.from_dataset(labels)
    work = ModelWork.of_config(tiny_base.config)
    compute = Compute.of_labels(labels, work, 5)
    paid, costs = compute.charge_trials(compute.charge(table), 2)
    bare, again = compute.charge_trials(table, 2)
    assert bare.flops is None
    assert (again.answer_tokens == costs.answer_tokens).all()
    base = compute.charge(table).flops
    assert base is not None
    assert paid.flops is not None
    for n in range(4):
        flops, tokens = 0.0, 0
        for step in range(int(table.num_steps[n])):
            if (step + 1) % 2 == 0 and step < table.last[n]:
                flops += compute.trial(n, int(table.lengths[n, step]), 2)
                tokens += 5 + 2
            assert paid.flops[n, step] - base[n, step] == pytest.approx(flops)
            assert costs.answer_tokens[n, step] == tokens
    free, none = compute.charge_trials(compute.charge(table), 0)
    assert free.flops is not None
    assert (free.flops == base).all()
    assert not none.answer_tokens.any()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"trial_every": -1}, "trial_every is -1; it must be at least 0"),
        ({"trial_every": 2, "auxiliary_weight": 0.1}, "trial_every is 2, but auxiliary_weight"),
        (
            {"trial_every": 2, "method": "probe", "length_penalties": ()},
            "trial_every is 2, but method 'probe' reads no trial answers",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(SHORT, **fields)


def test_baselines_of_several_targets_try_nothing() -> None:
    targets = dataclasses.replace(SHORT, trial_every=2).targets()
    assert {name: one.trial_every for name, one in targets.items()} == {
        "lam1e-2": 2,
        "probe": 0,
        "convergence": 0,
    }


def test_labels_without_such_answers_are_refused(
    make_labels: MakeLabels, tiny_base: Qwen2ForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = np.arange(2)
    settings = dataclasses.replace(SHORT, trial_every=1)
    known = LabelSettings(base_model="base", reasoning_format=DEEPSEEK_R1.to_dict())
    for changes, said in (
        ({"answer": "free"}, "the labels hold free answers; trial answers are forced"),
        ({"domains": {"a": {"name": "math"}, "b": {"name": "code"}}}, "hold the domains a, b"),
    ):
        with pytest.raises(ValueError, match=said):
            new_policy(
                tiny_base,
                tiny_tokenizer,
                settings,
                dataclasses.replace(known, **changes),
            )
    labels = make_labels(2)
    without = LabelledTraces.from_dataset(labels.remove_columns(["forced_entropy"]))
    with pytest.raises(ValueError, match="the labels hold no forced_entropy, of which the history"):
        without.trial_numbers(rows, 1, 8)
    for name, value in (
        ("option_probabilities", [0.5, 0.5]),
        ("forced_answer_ids", None),
        ("forced_entropy", None),
        ("forced_logprob", None),
    ):
        other = labels.map(
            lambda row, name=name, value=value: {name: [value] * len(row["step_ends"])},
            features=labels.features,
        )
        with pytest.raises(ValueError, match="trace 0 has at step 1 no decoded answer with its"):
            LabelledTraces.from_dataset(other).trial_numbers(rows, 1, 8)


def test_what_cannot_try_answers_refuses_the_policy(
    tiny_base: Qwen2ForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    model = OSPrunerForCausalLM.untrained(
        tiny_base, tiny_tokenizer, 1, reasoning_format=DEEPSEEK_R1, trial_every=2, tuning="layers"
    )
    ids = torch.tensor([tiny_tokenizer.encode("Ann has 3 apples.\n\nSo 7.\n\n")])
    with pytest.raises(ValueError, match=r"the policy tries an answer at every 2. step"):
        model.stop_probabilities(ids, prompt_length=2)
    numbers = torch.full((len(TRIAL_NUMBERS),), 0.5)
    assert model.stop_probabilities(ids, prompt_length=2, trial_numbers=numbers).isfinite().all()
    with pytest.raises(ValueError, match=r"the policy tries an answer at every 2. step"):
        model(input_ids=ids, output_stop_probabilities=True)
    asked = StopRequest({}, "the server's defaults", server=True)
    with pytest.raises(ValueError, match=r"at every 2. step \(trial_every\), which servers cannot"):
        asked.settle(model.config)
    with pytest.raises(ValueError, match="trial_every is 2, but method 'probe' reads no trial"):
        OSPrunerConfig(trial_every=2, method="probe")
    with pytest.raises(ValueError, match="trial_every is -1; it must be 0 or more"):
        OSPrunerConfig(trial_every=-1)
    use = PolicyUse("policy", model.config, "sample")
    fits = LabelSettings(base_model="base", reasoning_format=DEEPSEEK_R1.to_dict())
    refuse_other_trials(use, fits)
    wound = {**fits.reasoning_format, "wind_down": "So:"}
    for changes, said in (
        ({"max_answer_tokens": 16}, "with max_answer_tokens 32, the labels' have 16"),
        ({"answer": "free"}, "with answer 'forced', the labels' have 'free'"),
        ({"reasoning_format": wound}, "wind_down"),
    ):
        with pytest.raises(ValueError, match=said):
            refuse_other_trials(use, dataclasses.replace(fits, **changes))


def test_the_command_trains_and_replay_charges(tmp_path: Path) -> None:
    for split, seed in (("train", 7), ("test", 8)):
        Reasoner().label(draw_split(split, 24, seed), tmp_path / split, seed)  # type: ignore[arg-type]
    command = ["train", "--labels", str(tmp_path / "train"), "--layers", "0", "--tuning", "head"]
    command += ["--lambdas", "1e-3", "--batch-size", "8", "--learning-rate", "1e-3"]
    replayed = ["eval", "replay", "--labels", str(tmp_path / "test")]
    for name, more in (("plain", []), ("tries", ["--trial-every", "2"])):
        done = CliRunner().invoke(
            app, [*command, "--out", str(tmp_path / name), *more], catch_exceptions=False
        )
        assert done.exit_code == 0, done.output
        replayed += ["--policies", f"{tmp_path / name / 'lam1e-3'}@.02"]
    done = CliRunner().invoke(
        app, [*replayed, "--out", str(tmp_path / "eval")], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
