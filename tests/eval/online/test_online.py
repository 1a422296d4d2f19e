"""Online evaluation on the embedded reasoner, and its agreement with replay."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from datasets import Dataset
from typer.testing import CliRunner

from modeling_ospruner import OSPrunerForCausalLM
from ospruner.cli import app
from ospruner.comparing import compare
from ospruner.demo.shipped import MAX_ANSWER_TOKENS, MAX_THINKING_TOKENS, Reasoner, draw_split
from ospruner.engines import TransformersEngine
from ospruner.eval.arithmetic import ModelWork
from ospruner.eval.intervals import bootstrap_interval
from ospruner.eval.methods import parse_policies
from ospruner.eval.online.batches import Batch, Journal, Method, SampleRow, evaluate_online
from ospruner.eval.online.command import OnlineRequest, run_online
from ospruner.eval.online.evaluation import Evaluation
from ospruner.eval.online.runners import EngineRunner, HookRunner, Setup
from ospruner.eval.online.settings import OnlineSettings, preset
from ospruner.eval.problems.task import Math, ProblemSet, Task
from ospruner.eval.replay import replay, replay_budget, replay_full
from ospruner.eval.results import Results
from ospruner.eval.table import TraceTable
from ospruner.rules import AnswerEntropy, Budget
from ospruner.train.config import StopConfig
from ospruner.train.label_sets import load_labels
from ospruner.train.policies import new_policy
from ospruner.train.predicting import predict

SAMPLES = 2
SETTINGS = OnlineSettings(
    samples=SAMPLES,
    max_thinking_tokens=MAX_THINKING_TOKENS,
    max_answer_tokens=MAX_ANSWER_TOKENS,
    batch_problems=12,
)


class Counting:
    """A runner that knows its answers; it counts, and may break off."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.runs: list[tuple[str, int]] = []
        self.fail_at = fail_at

    def run(
        self, methods: Sequence[Method], batch: Batch
    ) -> Iterator[tuple[Method, list[SampleRow]]]:
        for method in methods:
            if len(self.runs) == self.fail_at:
                raise KeyboardInterrupt
            self.runs.append((method.key, batch.first_problem))
            tokens = 100 if method.how is None else 40
            yield (
                method,
                [
                    SampleRow(tokens + k, 4, "1", float(k % 2), "natural", seconds=tokens / 10)
                    for _, k in batch.rows
                ],
            )


METHODS = [Method("fixed budget", 40.0, "tokens", Budget(40))]
PROBLEMS = draw_split("test", 5, 0)


def evaluate(
    out: Path, runner: Counting, methods: Sequence[Method] = METHODS, **changes: Any
) -> Evaluation:
    settings = dataclasses.replace(SETTINGS, batch_problems=2, **changes)
    toy = ProblemSet("toy", PROBLEMS, Task())
    return evaluate_online(toy, methods, runner, settings, {"model": "toy"}, out)


def test_an_interrupted_run_continues_where_it_was(tmp_path: Path) -> None:
    broken = Counting(fail_at=3)
    with pytest.raises(KeyboardInterrupt):
        evaluate(tmp_path / "run", broken)
    with (tmp_path / "run" / "online.jsonl").open("ab") as journal:
        journal.write(b'{"method": "torn')  # as a kill in mid-line leaves it
    again = Counting()
    evaluation = evaluate(tmp_path / "run", again)
    assert sorted(broken.runs + again.runs) == sorted(
        (key, start)
        for key in ("full trace =None", "fixed budget tokens=40.0")
        for start in (0, 2, 4)
    )
    undisturbed = evaluate(tmp_path / "other", Counting())
    for one, other in zip(evaluation.rules, undisturbed.rules, strict=True):
        np.testing.assert_array_equal(one.outcome.columns(), other.outcome.columns())
    more = Counting()
    evaluate(tmp_path / "run", more, [*METHODS, Method("fixed budget", 9.0, "tokens", Budget(9))])
    assert {key for key, _ in more.runs} == {"fixed budget tokens=9.0"}  # the others are there


def test_what_rows_say_is_what_results_say(tmp_path: Path) -> None:
    evaluation = evaluate(tmp_path, Counting())
    full, budget = evaluation.results()[0]
    assert (full.traces, full.problems) == (SAMPLES * len(PROBLEMS), len(PROBLEMS))
    assert full.accuracy.value == 0.5
    assert (full.tokens.value, budget.tokens.value) == (100.5, 40.5)
    assert budget.time_ratio.value == pytest.approx(0.4)
    assert budget.tokens_per_second.value == pytest.approx((40.5 + 4) / 4)


def test_other_settings_and_damage_are_refused(tmp_path: Path) -> None:
    evaluate(tmp_path, Counting())
    with pytest.raises(ValueError, match="other settings .*'seed': 0.* there.*'seed': 1"):
        evaluate(tmp_path, Counting(), seed=1)
    journal = tmp_path / "online.jsonl"
    lines = journal.read_text().splitlines()
    journal.write_text("\n".join([lines[0], "{}", *lines[1:]]) + "\n")
    with pytest.raises(ValueError, match="is damaged .KeyError.*delete it to begin anew"):
        Journal(journal, json.loads(lines[0])["settings"])
    with pytest.raises(ValueError, match="two methods have one name"):
        evaluate(tmp_path / "b", Counting(), [*METHODS, *METHODS])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 0}, "samples is 0; it must be at least 1"),
        ({"temperature": -1.0}, "temperature is -1.0; it must be finite and >= 0"),
        ({"temperature": 0.0}, "samples is 16 at temperature 0: greedy samples are all alike"),
        ({"top_p": 0.0}, "top_p is 0.0; it must lie in"),
        ({"answer": "both"}, "answer is 'both'; it must be 'forced' or 'free'"),
        ({"batch_problems": 0}, "batch_problems is 0; it must be at least 1"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        preset("deepseek-r1", **changes)


def test_the_papers_settings_are_presets() -> None:
    for name, temperature, top_p in (("deepseek-r1", 0.6, 0.95), ("gpt-oss", 1.0, 1.0)):
        settings = preset(name, seed=None)
        assert (settings.temperature, settings.top_p) == (temperature, top_p)
        assert (settings.samples, settings.max_thinking_tokens) == (16, 15_000)
    with pytest.raises(ValueError, match="preset is 'llama'; it must be one of deepseek-r1, drpo"):
        preset("llama")


@pytest.fixture(scope="module")
def policy(reasoner: Reasoner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that stops now and then: untrained, with a mild bias."""
    return untrained(reasoner, tmp_path_factory.mktemp("policy") / "policy", "layers")


def untrained(reasoner: Reasoner, folder: Path, tuning: Literal["layers", "queries"]) -> Path:
    config = StopConfig("run", head="fixed", layers=1, tuning=tuning, use_cpu=True)
    model = new_policy(reasoner.model, reasoner.tokenizer, config, reasoner.label_settings(0))
    model.config.price = 1e-3
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def labelled(reasoner: Reasoner, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Traces of other draws: replay's side of the comparison."""
    return reasoner.label(draw_split("test", 48, 0), tmp_path_factory.mktemp("labels"), seed=11)


def methods_of(policy: Path) -> list[Method]:
    use = parse_policies([str(policy)])[0]
    rule = Budget(100)
    return [
        Method(use.method, use.parameter, use.parameter_name, use),
        Method(rule.method, rule.threshold, "tokens", rule),
    ]


def check_agreement(
    online: Evaluation, labelled: Dataset, reasoner: Reasoner, policy: Path
) -> None:
    """Replay of independent traces lies within the intervals of the difference."""
    table = TraceTable.from_dataset(labelled)
    pi = predict(OSPrunerForCausalLM.from_base(reasoner.model, policy), labelled)
    replayed = [replay_full(table), replay(table, pi), replay_budget(table, 100)]
    ids = {problem: n for n, problem in enumerate(table.problem_ids)}
    rows = np.array([ids[p] for p in online.problem_ids])  # labels have one trace a problem
    for rule, outcome in zip(online.rules, replayed, strict=True):
        for name in ("correct", "tokens"):
            by_problem = np.bincount(online.problem_index, getattr(rule.outcome, name)) / SAMPLES
            less = by_problem - getattr(outcome, name)[rows]
            difference = bootstrap_interval(less, np.arange(len(rows)), level=0.999)
            assert difference.low <= 0 <= difference.high, (rule.method, name, difference)
        assert 0 < rule.outcome.tokens.mean() <= MAX_THINKING_TOKENS
    assert online.rules[1].outcome.tokens.mean() < 0.8 * online.rules[0].outcome.tokens.mean()


def setup_of(reasoner: Reasoner, settings: OnlineSettings) -> Setup:
    work = ModelWork.of_config(reasoner.model.config)
    return Setup(reasoner.tokenizer, reasoner.token_format, Math(), settings, work)


def test_an_engine_and_replay_agree(
    reasoner: Reasoner, policy: Path, labelled: Dataset, tmp_path: Path
) -> None:
    setup = setup_of(reasoner, dataclasses.replace(SETTINGS, batch_problems=48))
    runner = EngineRunner(setup, reasoner.engine, lambda: reasoner.model)
    about = {"model": "toy"}
    online = evaluate_online(
        ProblemSet("toy", draw_split("test", 48, 0), setup.task),
        methods_of(policy),
        runner,
        setup.settings,
        about,
        tmp_path,
    )
    check_agreement(online, labelled, reasoner, policy)
    assert np.isnan(online.full.seconds).all()  # not measured, and said so
    with pytest.raises(ValueError, match="answer entropy asks at each step for what"):
        next(runner.run([_entropy()], Batch(0, draw_split("test", 48, 0)[:1], 1)))


def by_key(
    batches: Iterator[tuple[Method, list[SampleRow]]],
) -> dict[str, list[SampleRow]]:
    return {method.key: rows for method, rows in batches}


def _entropy() -> Method:
    rule = AnswerEntropy(0.4)
    return Method(rule.method, rule.threshold, "nats", rule)


@pytest.mark.parametrize("tuning", ["layers", "queries"])
def test_generate_and_the_engine_agree_on_the_same_trace(
    reasoner: Reasoner, tmp_path: Path, tuning: Literal["layers", "queries"]
) -> None:
    """Greedy traces are the same in both; so must be stops, answers, grades and compute."""
    policy = untrained(reasoner, tmp_path / "policy", tuning)
    settings = dataclasses.replace(SETTINGS, samples=1, temperature=0.0)
    setup = setup_of(reasoner, settings)
    batch = Batch(0, draw_split("test", 6, 0), 1)
    methods = [Method("full trace", None, "", None), *methods_of(policy)]
    ours = by_key(HookRunner(setup, reasoner.model).run(methods, batch))
    theirs = by_key(
        EngineRunner(setup, reasoner.engine, lambda: reasoner.model).run(methods, batch)
    )
    for method in methods:
        for one, other in zip(ours[method.key], theirs[method.key], strict=True):
            assert (one.tokens, one.answer, one.correct, one.answer_tokens) == (
                other.tokens, other.answer, other.correct, other.answer_tokens,
            )  # fmt: skip
            assert one.seconds > 0
            assert one.flops == pytest.approx(other.flops)
            if method.how is None:
                assert one.natural_correct == pytest.approx(other.natural_correct, nan_ok=True)


def test_the_yardstick_of_time_does_the_work_of_a_policy_that_never_stops(
    reasoner: Reasoner, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted, not timed: the tokens that the base passes within the time that is taken."""
    settings = dataclasses.replace(SETTINGS, samples=2)
    setup = setup_of(reasoner, settings)
    never = parse_policies([f"{policy}@1"])[0]
    methods = [
        Method("full trace", None, "", None),
        Method(never.method, never.parameter, never.parameter_name, never),
        methods_of(policy)[1],
    ]
    runner, passed = HookRunner(setup, reasoner.model), dict.fromkeys((m.key for m in methods), 0)
    call = HookRunner._call

    def counting(self: HookRunner, method: Method, batch: Batch) -> Any:
        generate = call(self, method, batch)

        def counted(ids: torch.Tensor, arguments: dict[str, Any]) -> Any:
            def count(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
                passed[method.key] += kwargs["input_ids"].numel()

            hook = reasoner.model.register_forward_pre_hook(count, with_kwargs=True)
            try:
                return generate(ids, arguments)
            finally:
                hook.remove()

        return counted

    monkeypatch.setattr(HookRunner, "_call", counting)
    rows = by_key(runner.run(methods, Batch(0, draw_split("test", 4, 0), 2)))
    full, policys, budgets = (passed[method.key] for method in methods)
    assert full == policys > budgets > 0
    one, other = (rows[method.key] for method in methods[:2])
    assert [row.tokens for row in one] == [row.tokens for row in other]
    assert [row.answer for row in one] == [row.answer for row in other]
    # The model's own answers are there, and were written outside the time.
    ended = [row for row in one if row.reason == "natural"]
    assert ended
    assert not np.isnan([row.natural_correct for row in ended]).any()


def test_a_sentence_before_the_closing_is_generated(reasoner: Reasoner, policy: Path) -> None:
    """Forked and generated answers agree where the policy or a budget stops; so do lengths."""
    settings = dataclasses.replace(SETTINGS, samples=1, temperature=0.0)
    setup = setup_of(reasoner, settings)
    soft = setup.fmt.winding_down("So I have it:", setup.tokenizer)
    batch = Batch(0, draw_split("test", 8, 0), 1)
    methods = methods_of(policy)
    found = []
    for fmt in (setup.fmt, soft):
        changed = dataclasses.replace(setup, fmt=fmt)
        ours = by_key(HookRunner(changed, reasoner.model).run(methods, batch))
        engine = EngineRunner(changed, reasoner.engine, lambda: reasoner.model)
        theirs = by_key(engine.run(methods, batch))
        for key in ours:
            for one, other in zip(ours[key], theirs[key], strict=True):
                assert one.tokens == other.tokens
                if one.reason != "natural":
                    assert one.answer == other.answer
                else:  # no sentence was put before the model's own end
                    assert (one.answer or "").isdigit()
        found.append([row.tokens for rows in ours.values() for row in rows])
    assert found[0] == found[1]


def test_an_engine_of_other_weights_than_the_policy_s_base_is_refused(
    reasoner: Reasoner, policy: Path
) -> None:
    """A server's files are out of sight: how likely it finds its answers tells."""
    settings = dataclasses.replace(SETTINGS, samples=1, temperature=0.0)
    setup = setup_of(reasoner, settings)
    other, generator = copy.deepcopy(reasoner.model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
    batch = Batch(0, draw_split("test", 2, 0), 1)
    engine = TransformersEngine(other, reasoner.tokenizer)
    runner = EngineRunner(setup, engine, lambda: reasoner.model)
    full = Method("full trace", None, "", None)
    assert len(by_key(runner.run([full], batch))) == 1  # it pins no base
    with pytest.raises(ValueError, match=r"serves other weights than .* differ by .* nats a token"):
        by_key(runner.run(methods_of(policy), batch))


def test_the_base_is_loaded_once_after_the_engine_and_for_policies_alone(
    reasoner: Reasoner, policy: Path
) -> None:
    settings = dataclasses.replace(SETTINGS, samples=1, temperature=0.0)
    setup = setup_of(reasoner, settings)
    loaded = []

    def load_base() -> Any:
        loaded.append("base")
        return reasoner.model

    runner = EngineRunner(setup, reasoner.engine, load_base)
    batch = Batch(0, draw_split("test", 2, 0), 1)
    full = Method("full trace", None, "", None)
    by_key(runner.run([full, methods_of(policy)[1]], batch))
    assert loaded == []
    for _ in range(2):
        by_key(runner.run([full, *methods_of(policy)], batch))
    assert loaded == ["base"]


def test_free_answers_and_trial_rules_are_generated(reasoner: Reasoner, policy: Path) -> None:
    settings = dataclasses.replace(
        SETTINGS, samples=1, temperature=0.0, answer="free", max_answer_tokens=60
    )
    setup = setup_of(reasoner, settings)
    batch = Batch(0, draw_split("test", 3, 0), 1)
    full = Method("full trace", None, "", None)
    rows = by_key(HookRunner(setup, reasoner.model).run([full, _entropy()], batch))
    ended = [row for row in rows[full.key] if row.reason == "natural"]
    assert ended
    for row in ended:
        assert row.correct == row.natural_correct  # a free answer is the model's own
    for row in rows[_entropy().key]:
        assert row.probe_tokens > 0
        without = dataclasses.replace(row, probe_tokens=0)
        prompt = setup.prompts(batch)[rows[_entropy().key].index(row)]
        assert row.flops > setup.flops(prompt, None, without, [])


@pytest.mark.slow
def test_generate_and_replay_agree(
    reasoner: Reasoner, policy: Path, labelled: Dataset, tmp_path: Path
) -> None:
    setup = setup_of(reasoner, SETTINGS)
    online = evaluate_online(
        ProblemSet("toy", draw_split("test", 48, 0), setup.task),
        methods_of(policy),
        HookRunner(setup, reasoner.model),
        SETTINGS,
        {"model": "toy"},
        tmp_path,
    )
    check_agreement(online, labelled, reasoner, policy)
    results = online.results()[0]
    assert 0 < results[1].time_ratio.value < 5
    assert results[1].tokens_per_second.low > 0


def test_labels_and_engine_share_their_traces(
    reasoner: Reasoner, policy: Path, tmp_path: Path
) -> None:
    """Same seed, same keys: replay of the labels is the expectation of the engine's draws."""
    problems = draw_split("test", 8, 3)
    labels = reasoner.label(problems, tmp_path / "labels", seed=5)
    settings = dataclasses.replace(SETTINGS, samples=1, seed=5, batch_problems=8)
    work = ModelWork.of_config(reasoner.model.config)
    setup = Setup(reasoner.tokenizer, reasoner.token_format, Math(), settings, work)
    methods = methods_of(policy)
    batch = Batch(0, problems, 1)
    rows = by_key(EngineRunner(setup, reasoner.engine, lambda: reasoner.model).run(methods, batch))
    table = TraceTable.from_dataset(labels)
    for n, row in enumerate(rows[methods[0].key]):
        assert row.tokens in table.lengths[n]
        step = int(np.flatnonzero(table.lengths[n] == row.tokens)[0])
        assert row.correct == table.correct[n, step]
        assert row.answer_tokens == table.answer_tokens[n, step]
    budget = replay_budget(table, 100)
    ours = [row.tokens for row in rows[methods[1].key]]
    assert ours == budget.tokens.tolist()


def test_the_commands_replay_report_and_compare(
    reasoner: Reasoner, policy: Path, tmp_path: Path
) -> None:
    reasoner.label(draw_split("test", 6, 0), tmp_path / "labels", seed=11)
    command = CliRunner()

    def run(*arguments: str) -> str:
        result = command.invoke(app, ["compare", *arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.output

    labels, out = str(tmp_path / "labels"), str(tmp_path / "out" / "toy")
    common = ["--set", "benchmark=toy", labels, str(policy)]
    rules = ["budget:100", "entropy:0.4", "--set", "rewards_at=1e-3"]
    numbers = str(tmp_path / "numbers.json")
    text = run(*common, *rules, "--out", out, "--json", numbers)
    assert "OS-Pruner" in text
    assert "less each other" not in text
    found = Results.read(numbers)
    assert [r.method for r in found.results] == [
        "full trace", "OS-Pruner", "fixed budget", "answer entropy",
    ]  # fmt: skip
    assert found.results[3].probe_tokens.value > 0
    assert found.natural_accuracy is not None
    assert found.natural_accuracy.value >= 0
    assert Results.read(Path(out) / "results.json").to_dict() == found.to_dict()
    for result in found.results[1:]:
        # The tail and trial answers cost more compute than they are charged in tokens.
        assert result.flops_ratio.value > 0
        assert "of compute" not in result.aes_label
    full, budget, entropy = (found.results[k] for k in (0, 2, 3))
    assert full.flops_ratio.value == 1
    assert entropy.flops.value > 0 < budget.flops.value < full.flops.value
    assert "FLOP" in text
    run(*common, *rules, "--out", out, "--json", numbers, "--set", "charge=compute")
    paid = Results.read(numbers).results
    assert paid[3].aes.value < found.results[3].aes.value
    assert paid[3].rewards[0][1].value < found.results[3].rewards[0][1].value
    assert paid[3].tokens == found.results[3].tokens
    twin = shutil.copytree(policy, tmp_path / "twin")
    seeds = [*common, str(twin), "--out", str(tmp_path / "seeds")]
    run(*seeds, "entropy:0.4", "--json", numbers)
    pooled = Results.read(numbers).results
    assert [r.method for r in pooled] == ["full trace", "OS-Pruner", "answer entropy"]
    assert pooled[1].tokens == found.results[1].tokens  # the same policy twice
    stored = Evaluation.load(tmp_path / "seeds")
    assert [len(rule.seeds) for rule in stored.rules] == [0, 2, 0]
    assert stored.results()[0][1].aes == pooled[1].aes
    with pytest.raises(ValueError, match="charge is 'money'"):
        run(*common, "--out", out, "--set", "charge=money")
    run(*common, *rules, "--out", out)
    assert "report.html" in run(str(tmp_path / "out"))
    page = (tmp_path / "out" / "report.html").read_text()
    assert "stop probability" in page
    assert "less each other" not in page
    run(out, "--json", numbers)
    (again,) = (Results.from_dict(one) for one in json.loads(Path(numbers).read_text()))
    assert (again.dataset, again.setting) == ("toy", found.setting)
    assert [r.name for r in again.results] == [r.name for r in found.results]
    with pytest.raises(ValueError, match="other settings.*'benchmark': 'toy'|benchmark: 'toy'"):
        run("--set", "benchmark=other", *common[2:], "--out", out)
    with pytest.raises(ValueError, match="limit is 0; it must be at least 1"):
        run(*common, "--limit", "0", "--out", str(tmp_path / "x"))


def test_ungraded_labels_and_shared_problems_are_refused(
    reasoner: Reasoner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = tmp_path / "labels"
    rows = reasoner.label(draw_split("test", 4, 0), labels, seed=11)
    with pytest.raises(ValueError, match="4 problems, such as .* what is chosen on a problem must"):
        compare(labels, [], choose_on=labels)
    ungraded = rows.map(
        lambda row: {"forced_correct": [None] * len(row["step_ends"])}, features=rows.features
    )
    stored = load_labels(labels)
    monkeypatch.setattr(
        "ospruner.comparing.load_labels",
        lambda source: dataclasses.replace(stored, traces=ungraded),
    )
    with pytest.raises(ValueError, match="the labels are not graded"):
        compare(labels, [])


def test_an_online_request_that_cannot_work_is_refused_at_once(
    policy: Path, tmp_path: Path
) -> None:
    problems = tmp_path / "problems.jsonl"
    problems.write_text('{"id": "a", "problem": "1+1?", "answer": "2"}\n')
    request = OnlineRequest(dataset=str(problems))
    with pytest.raises(ValueError, match="no base: give --base, or policies that pin one"):
        run_online(request, tmp_path / "out")
    config = json.loads((policy / "config.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    changed = config | {"base_model_name_or_path": "org/other", "price": 5e-4}
    (other / "config.json").write_text(json.dumps(changed))
    with pytest.raises(ValueError, match="is a policy for org/other at revision None, the traces"):
        run_online(
            dataclasses.replace(request, policies=[str(policy), str(other)]), tmp_path / "out"
        )
    with pytest.raises(ValueError, match="prompt is 'shout'"):
        run_online(
            dataclasses.replace(request, policies=[str(policy)], prompt="shout"), tmp_path / "out"
        )
    assert not (tmp_path / "out").exists()
