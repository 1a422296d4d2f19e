"""The commands on the embedded reasoner; online evaluation, and that it agrees with replay."""

import copy
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from modeling_ospruner import OSPrunerConfig
from modeling_ospruner.formats_ospruner import TokenFormat
from modeling_ospruner.stopping_ospruner import StopRecord, uniform
from ospruner import comparing, rules
from ospruner.cli import app
from ospruner.comparing import Judged, compare
from ospruner.demo.shipped import FORMAT, MAX_ANSWER_TOKENS, Reasoner, draw_split
from ospruner.eval.evaluation import Report
from ospruner.eval.methods import PolicyUse, parse_policies
from ospruner.eval.online import (
    NEVER,
    Generator,
    OnlineProblem,
    SampleRow,
    evaluate_online,
    labelled_problems,
)
from ospruner.eval.problems.problem import Problem
from ospruner.eval.problems.task import Math
from ospruner.eval.report.summary import told
from ospruner.eval.results import Results
from ospruner.eval.schema import LabelSettings
from ospruner.eval.table import TraceTable
from ospruner.formats import PLAIN
from ospruner.train.labels.making import Labeller, label_problems
from ospruner.train.untrained import untrained

from ..chats import prompts_of

Tuning = Literal["layers", "queries"]
Labelled = tuple[Path, Any]
SETTINGS = LabelSettings(base_model="toy", samples_per_problem=2)
ABOUT = {"model": "toy", "benchmark": "toy"}
PROBLEMS = [OnlineProblem(problem, [5]) for problem in draw_split("test", 5, 0)]


class Counting:
    """Generates rows that it knows; it counts, and may break off."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.runs: list[tuple[str, int]] = []
        self.fail_at = fail_at

    def __call__(self, how: Any, batch: Sequence[OnlineProblem], first: int) -> list[SampleRow]:
        if len(self.runs) == self.fail_at:
            raise KeyboardInterrupt
        self.runs.append(("full" if how is NEVER else f"{how.threshold:g}", first))
        tokens = 100 if how is NEVER else 40
        own = [SampleRow(tokens + k, 4, "1", k, "natural", seconds=tokens / 10) for k in (0, 1)]
        return own * len(batch)


def evaluate(out: Path, generate: Counting, *methods: Any, batch: int = 2, **more: Any) -> Report:
    settings, asked = dataclasses.replace(SETTINGS, **more), methods or (rules.Budget(40),)
    return evaluate_online(PROBLEMS, asked, generate, settings, ABOUT, out, batch_problems=batch)


def test_an_interrupted_run_continues_where_it_was(tmp_path: Path) -> None:
    broken = Counting(fail_at=3)
    with pytest.raises(KeyboardInterrupt):
        evaluate(tmp_path / "run", broken)
    assert len(list((tmp_path / "run" / "online").iterdir())) == 3  # each written whole
    again = Counting()
    evaluation = evaluate(tmp_path / "run", again)
    wanted = [(name, start) for name in ("full", "40") for start in (0, 2, 4)]
    assert sorted(broken.runs + again.runs) == sorted(wanted)
    undisturbed = evaluate(tmp_path / "other", Counting())
    for one, other in zip(evaluation.rules, undisturbed.rules, strict=True):
        np.testing.assert_array_equal(one.outcome.columns(), other.outcome.columns())
    # What rows say is what results say.
    full, budget = (row for _, row in evaluation.frame.iterrows())
    assert (full["traces"], full["problems"]) == (2 * len(PROBLEMS), len(PROBLEMS))
    assert (budget["method"], budget["parameter"]) == ("fixed budget", 40)
    assert (full["accuracy"], full["tokens"], budget["tokens"]) == (0.5, 100.5, 40.5)
    assert budget["time_ratio"] == pytest.approx(0.4)
    assert budget["tokens_per_second"] == pytest.approx((40.5 + 4) / 4)
    more = Counting()
    evaluate(tmp_path / "run", more, rules.Budget(40), rules.Budget(9))
    assert {name for name, _ in more.runs} == {"9"}  # the others are there


def test_other_settings_damage_and_bad_numbers_are_refused(tmp_path: Path) -> None:
    evaluation = evaluate(tmp_path, Counting())
    kept = min((tmp_path / "online").iterdir())
    other = Counting()
    evaluate(tmp_path, other, seed=1)  # a run of its own, as long as none is saved
    assert len(other.runs) == 6
    evaluation.save(tmp_path)
    with pytest.raises(ValueError, match="other settings .*'seed': 1.* here.*'seed': 0"):
        evaluate(tmp_path, Counting(), seed=1)
    kept.write_text(kept.read_text().replace('"tokens": ', '"tokens": 1'))
    with pytest.raises(ValueError, match="is damaged, .*: delete it, and its batch is generated"):
        evaluate(tmp_path, Counting())
    refused: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("two methods are 'fixed budget", (rules.Budget(40), rules.Budget(40)), {}),
        ("samples is 2 at temperature 0: greedy samples are all", (), {"temperature": 0.0}),
        ("batch_problems is 0; it must be at least 1", (), {"batch": 0}),
    ]
    for message, methods, changes in refused:
        with pytest.raises(ValueError, match=message):
            evaluate(tmp_path / "b", Counting(), *methods, **changes)


def mild(reasoner: Reasoner, folder: Path, tuning: Tuning, weight: float = 0.0) -> PolicyUse:
    """A policy that stops now and then: with a mild bias, and weights of this size."""
    model = untrained(reasoner.model, reasoner.tokenizer, 1, tuning, -2.0, FORMAT)
    model.config.price = 1e-3
    torch.manual_seed(0)
    torch.nn.init.normal_(model.policy.head.weight, std=weight)
    model.save_pretrained(folder)
    return parse_policies([str(folder)])[0]


@pytest.fixture(scope="module")
def use(reasoner: Reasoner, tmp_path_factory: pytest.TempPathFactory) -> PolicyUse:
    return mild(reasoner, tmp_path_factory.mktemp("policy") / "policy", "layers")


def greedy_labels(reasoner: Reasoner, folder: Path, count: int, **changes: Any) -> Any:
    changes |= {"temperature": 0.0, "top_p": 1.0}
    settings = dataclasses.replace(reasoner.label_settings(0), **changes)
    labeller = Labeller(reasoner.tokenizer, reasoner.token_format, settings)
    return label_problems(draw_split("test", count, 0), reasoner.engine, labeller, folder)


def generator(reasoner: Reasoner, **changes: Any) -> Generator:
    """Greedy, and in float32, in which the reasoner labels."""
    settings = dataclasses.replace(reasoner.label_settings(0), temperature=0.0, **changes)
    return Generator(reasoner.model, reasoner.tokenizer, reasoner.token_format, Math(), settings)


def generated(reasoner: Reasoner, labels: Any, methods: Sequence[Any], **changes: Any) -> Report:
    """Online on labels' problems."""
    made, problems = generator(reasoner, **changes), labelled_problems(labels)
    return evaluate_online(problems, methods, made.run, made.settings, ABOUT, batch_problems=4)


@pytest.fixture(scope="module")
def labelled(reasoner: Reasoner, tmp_path_factory: pytest.TempPathFactory) -> Labelled:
    """Greedy labels of five problems, and their folder."""
    folder = tmp_path_factory.mktemp("labels") / "labels"
    return folder, greedy_labels(reasoner, folder, 5)


@pytest.mark.parametrize("tuning", ["layers", "queries"])
def test_online_and_replay_agree_trace_by_trace(
    reasoner: Reasoner, labelled: Labelled, repo_dir: Path, tmp_path: Path, tuning: Tuning
) -> None:
    """Greedy traces are those that were labelled; so must be stops, answers, grades, compute."""
    use = mild(reasoner, tmp_path / "policy", tuning)
    folder, labels = labelled

    def decided(end: rules.StepEnd) -> float:
        return end.trial_answer(16).confidence - 0.01 * end.step_text().count("=")

    own = rules.Family("decided", decided)(0.9)
    words: Any = {"transition_words": ("Let", "That")}
    same = Math().same
    file = f"{repo_dir / 'docs/examples/own_rule.py'}:SURE_TWICE:0.9"
    asking = [rules.TrialConfidence(0.97, **words), rules.Agreement(2, same=same), own]
    given: list[Any] = ["budget:100", "entropy:0.4", *asking, file]
    methods: list[Any] = [rules.Budget(100), rules.AnswerEntropy(0.4), *asking]
    methods.append(rules.parse_rule(file, same))
    some = slice(0, 2 if tuning == "queries" else None)  # rules know no tuning
    replayed = compare(folder, [f"{use.path}@.05", use.path, *given[some]])
    careful, _, *others = replayed.rules[1:]
    (early,) = parse_policies([f"{use.path}@.05"])
    online = generated(reasoner, labels, [early, *methods[some]])
    wanted = [replayed.rules[0], careful, *others]
    assert [rule.name for rule in online.rules] == [rule.name for rule in wanted]
    for one, other in zip(online.rules, wanted, strict=True):
        for name in ("tokens", "correct", "answer_tokens", "probe_tokens", "truncated"):
            np.testing.assert_array_equal(vars(one.outcome)[name], vars(other.outcome)[name])
        assert (one.outcome.seconds > 0).all()
    full, *each = (rule.outcome.mean_tokens for rule in online.rules)
    assert max(each) < full
    if tuning == "queries":
        return
    # What draws its stops draws for each sample by its number.
    table, pi = TraceTable.from_dataset(labels), Judged(folder).predicted(use.path).probabilities()
    drawn = generated(reasoner, labels, [use], seed=4)
    for n, tokens in enumerate(drawn.rules[1].outcome.tokens):
        steps = range(int(table.num_steps[n]))
        stops = (i for i in steps if i == steps[-1] or uniform(4, n, i) < pi[n, i])
        assert tokens == table.lengths[n, next(stops)]


def test_replay_says_how_far_it_is_from_generate(
    reasoner: Reasoner, labelled: Labelled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 they are the same; in half precision the report has the difference."""
    monkeypatch.setattr(comparing, "ROUNDED_TOKENS", 200)
    folder, use = labelled[0], mild(reasoner, tmp_path / "policy", "queries", 0.1)
    exact = Judged(folder, model=reasoner.model).rounding(use)
    assert exact["dtype"] == "float32"
    assert exact["steps"] > 10
    assert exact["largest"] < 1e-5
    results = []
    for base in (reasoner.model, copy.deepcopy(reasoner.model).bfloat16()):
        monkeypatch.setattr(comparing, "load_labelled_base", lambda *_, of=base, **__: (of, None))
        results.append(compare(folder, [use.path]).results)
    assert "rounding" not in results[0].about
    found = results[1].about["rounding"]
    assert (found["dtype"], found["steps"]) == ("bfloat16", exact["steps"])
    assert 1e-5 < found["mean"] <= found["largest"] < 0.2
    (line,) = (one for one in told(results[1]) if "not exact" in one)
    assert f"{found['largest']:.1e} at most, at {found['steps']} step ends" in line


def test_a_sentence_before_closing_changes_no_length(reasoner: Reasoner, use: PolicyUse) -> None:
    pairs = zip(draw_split("test", 8, 0), prompts_of(reasoner, 8), strict=True)
    asked, found = [OnlineProblem(*one) for one in pairs], []
    plain, soft = generator(reasoner), generator(reasoner)
    soft.fmt = soft.fmt.winding_down("So I have it:", reasoner.tokenizer)
    for made in (plain, soft):
        rows = [row for how in (use, rules.Budget(100)) for row in made.run(how, asked, 0)]
        found.append([row.tokens for row in rows])
        # No sentence was put before the model's own end.
        assert all(row.answer.isdigit() for row in rows if row.reason == "natural")
    assert found[0] == found[1]


def test_free_answers_have_the_labels_room(reasoner: Reasoner, tmp_path: Path) -> None:
    """A free answer is the model's own; it is cut where the labels' are, not at 32 tokens."""
    free = {"answer": "free", "max_answer_tokens": 60}
    labels = greedy_labels(reasoner, tmp_path, 4, **free)
    online = generated(reasoner, labels, [rules.Budget(40)], **free)
    full, budget = (rule.outcome for rule in online.rules)
    natural = TraceTable.from_dataset(labels).natural_correct
    ended = (full.truncated == 0) & ~np.isnan(natural)
    assert ended.any()
    np.testing.assert_array_equal(full.correct[ended], natural[ended])
    replayed = compare(tmp_path, ["budget:40"]).rules[1].outcome
    early = budget.tokens < full.tokens  # after its own end the model writes the closing's rest
    assert early.any()
    np.testing.assert_array_equal(budget.answer_tokens[early], replayed.answer_tokens[early])


def test_a_plain_reply_holds_an_answer(reasoner: Reasoner, monkeypatch: pytest.MonkeyPatch) -> None:
    """As labels read it: nothing tells its thinking from its answer."""
    made, tokenizer = generator(reasoner, answer="free"), reasoner.tokenizer
    made.fmt = TokenFormat.compile(PLAIN, tokenizer)
    ids = tokenizer.encode("So it is \\boxed{5}", add_special_tokens=False)
    written = torch.tensor([[5, *ids, tokenizer.eos_token_id]])
    record = StopRecord(thinking_tokens=len(ids), reason="natural")
    monkeypatch.setattr(
        "ospruner.eval.online.generate_pruned", lambda *_, **__: (written, [record])
    )
    (row,) = made.run(NEVER, [OnlineProblem(Problem("one", "", "5"), [5])], 0)
    assert (row.answer, row.correct, row.answer_tokens) == ("5", 1, 0)


def test_free_answers_on_labels_of_forced_ones(labelled: Labelled) -> None:
    """Who thinks on after the cut is seen in free answers alone; labels mostly hold forced ones."""

    def answers(how: str | None) -> tuple[str, int, int]:
        """The answers' kind, their cap, and how many tokens were written after a cut."""
        asked: dict[str, Any] = {"online": True, "samples": 1, "batch_problems": 5}
        report = compare(labelled[0], ["budget:40"], answer=how, **asked)
        settings = report.settings["label_settings"]
        written = report.rules[1].outcome.answer_tokens.sum()
        return settings["answer"], settings["max_answer_tokens"], int(written)

    forced, free = answers(None), answers("free")
    assert (forced[:2], free[:2]) == (("forced", MAX_ANSWER_TOKENS), ("free", 512))
    assert free[2] > forced[2]


def test_what_is_refused_at_once(reasoner: Reasoner, use: PolicyUse, tmp_path: Path) -> None:
    labels = tmp_path / "labels"
    reasoner.label(draw_split("test", 2, 0), labels, seed=0)
    out, other = tmp_path / "out", OSPrunerConfig.from_pretrained(use.path)
    other.method = "flashthink"
    other.save_pretrained(tmp_path / "verifier")
    other.base_model_name_or_path = "org/other"
    other.save_pretrained(tmp_path / "other")
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (rules.Deer, {}, "'deer' has no threshold; online needs one"),
        (use.path, {"choose_on": labels}, "online chooses nothing: leave out choose_on"),
        (use.path, {"online": False, "answer": "free"}, "answer is 'free': labels hold theirs"),
        (use.path, {"answer": "short"}, "answer is 'short'; it must be 'forced' or 'free'"),
        (tmp_path / "other", {}, "is a policy for org/other at revision None, the traces"),
        (tmp_path / "verifier", {}, "FlashThink's verifier is a second model"),
    ]
    for method, more, message in refused:
        with pytest.raises(ValueError, match=message):
            compare(labels, [method], **{"online": True, "out": out, **more})
    assert not out.exists()


def test_replay_report_and_compare(reasoner: Reasoner, use: PolicyUse, tmp_path: Path) -> None:
    reasoner.label(draw_split("test", 6, 0), tmp_path / "labels", seed=11)

    def run(*arguments: str) -> str:
        return CliRunner().invoke(app, ["compare", *arguments], catch_exceptions=False).output

    labels, out = str(tmp_path / "labels"), tmp_path / "out" / "toy"
    common = ["--set", "benchmark=toy", labels, use.path]
    rules = ["budget:100", "entropy:0.4", "--set", "rewards_at=1e-3"]
    numbers = str(tmp_path / "numbers.json")
    text = run(*common, *rules, "--out", str(out), "--json", numbers)
    assert all(said in text for said in ("OS-Pruner", "FLOP"))
    assert "less each other" not in text
    found = Results.read(numbers)
    frame = found.rules.set_index("method")
    assert frame.index.tolist() == ["full trace", "OS-Pruner", "fixed budget", "answer entropy"]
    assert frame["probe_tokens"]["answer entropy"] > 0
    assert found.natural_accuracy is not None
    assert Results.read(out / "results.json").to_dict() == found.to_dict()
    # From what every method said, without labels and weights.
    anew = tmp_path / "anew"
    assert "OS-Pruner" in run(str(out / "signals.parquet"), "--out", str(anew))
    assert Results.read(anew / "results.json").to_dict() == found.to_dict()
    assert 0 < frame["flops"]["fixed budget"] < frame["flops"]["full trace"]
    assert "report.md" in run(str(tmp_path / "out"), "--json", numbers)
    (again,) = (Results.from_dict(one) for one in json.loads(Path(numbers).read_text()))
    assert (again.dataset, again.setting) == ("toy", found.setting)
    assert again.rules["setting"].tolist() == found.rules["setting"].tolist()
    with pytest.raises(ValueError, match="charge is 'money'"):
        run(*common, "--set", "charge=money", "--out", str(out))
