"""One comparison of policies and rules: settings, choices, frontiers, the frame."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from modeling_ospruner import OSPrunerConfig
from ospruner import rules
from ospruner.eval.compare import Report, compare
from ospruner.eval.learnstop import LEARN_STOP, features_of, fit, learn_stop, scores
from ospruner.eval.measured import COUNT, Predicted, Split
from ospruner.eval.methods import PolicyUse, parse_policies
from ospruner.eval.recorded import Method
from ospruner.eval.replay import replay_full, replay_step
from ospruner.eval.report.summary import write_report
from ospruner.eval.results import Results
from ospruner.eval.table import BoolArray, FloatArray, TraceTable
from ospruner.rules import Family

from .evaluations import dataset_of

WORDS = {0: " so", 1: " Wait"}


def decode(ids: list[int]) -> str:
    return "".join(WORDS[one] for one in ids)


def split(seed: int, prefix: str, count: int = 60) -> Split:
    """Traces whose answers are right, and mostly certain, from some step on."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(3, 12, count).tolist()
    rights = [(np.arange(T) >= rng.integers(1, T)) for T in counts]
    sure = [
        np.where(right ^ (rng.random(T) < 0.2), 0.1, 1.5) * rng.uniform(0.5, 1, T)
        for T, right in zip(counts, rights, strict=True)
    ]
    dataset = dataset_of(
        [[10 * (i + 1) for i in range(T)] for T in counts],
        problem_id=[f"{prefix}{n}" for n in range(count)],
        trace_ids=[[0] * (10 * T) for T in counts],
        forced_answers=[[str(7 if x else i) for i, x in enumerate(one)] for one in rights],
        forced_correct=[one.astype(float).tolist() for one in rights],
        matches_final=[one.tolist() for one in rights],
        forced_entropy=[one.tolist() for one in sure],
        forced_answer_entropy=[(2 * one).tolist() for one in sure],
        forced_logprob=[(-one).tolist() for one in sure],
    )
    return Split(dataset, TraceTable.from_dataset(dataset), 4, decode)


def saved(folder: Path, method: str = "os-pruner", price: float = 1e-3) -> str:
    OSPrunerConfig(
        method=method, price=price, default_mode="sample" if method == "os-pruner" else "threshold"
    ).save_pretrained(folder)
    return str(folder)


def predicted(pi: FloatArray, mask: BoolArray, price: float = 0.0) -> Predicted:
    """A fixed head that says these stop probabilities."""
    with np.errstate(divide="ignore"):
        logits = np.log(pi) - np.log1p(-pi)
    return Predicted(logits[..., None].astype(np.float32), mask, None, price)


def said(of: Split, use: PolicyUse) -> Predicted:
    """A policy that sees the answer's fate, but for some noise; another seed, other noise."""
    noise = np.random.default_rng(len(Path(use.path).name)).random(of.table.mask.shape)
    pi: FloatArray = np.where(of.table.mask, 0.15 + 0.5 * of.table.correct + 0.2 * noise, 0.0)
    return predicted(pi, of.table.mask)


def knowing(of: Split) -> Split:
    return dataclasses.replace(of, said=partial(said, of))


VALIDATION, TEST = knowing(split(0, "v")), knowing(split(1, "t"))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    folder = tmp_path_factory.mktemp("policies")
    seeds = [saved(folder / name) for name in ("a", "bb")]
    uses = parse_policies([*seeds, saved(folder / "probe", "probe", 0.0)])
    families = [rules.AnswerEntropy, rules.RunJump, rules.ThinkJustEnough]
    methods: list[Method] = [*uses, rules.Budget(40), *families, LEARN_STOP]
    return compare(TEST, methods, choose_on=VALIDATION, replicates=20)


def test_the_frame_has_a_row_for_each_method_and_setting(report: Report) -> None:
    frame = report.frame
    of = {name: rows for name, rows in frame.groupby("method")}
    assert list(frame.kind[:2]) == ["rule", "rule"]
    assert frame.method[0] == "full trace"
    assert len(of["OS-Pruner"]) == 1  # two seeds of one price
    assert len(of["fixed budget"]) == 1
    for name in ("probe", "answer entropy", "ES-CoT", "LearnStop"):
        assert 2 < len(of[name]) <= COUNT
        assert of[name].tokens.min() == pytest.approx(replay_step(TEST.table, 1).mean_tokens)
        assert of[name].tokens.max() == pytest.approx(replay_full(TEST.table).mean_tokens)
        # One setting is chosen, and its interval holds the choice: wider than that of a neighbour.
        (chosen,) = of[name][of[name].chosen].itertuples()
        assert chosen.aes_low <= chosen.aes <= chosen.aes_high
    assert not of["OS-Pruner"].chosen.any()  # there was nothing to choose
    assert set(frame[frame.kind == "limit"].method) == {
        "best fixed budget",
        "best fixed step",
        "best fixed drop",
        "hindsight oracle",
        "hindsight oracle, no loss",
    }
    assert report.results.about["left_out"].keys() == {"Think Just Enough"}
    assert "which labels do not keep" in report.results.about["left_out"]["Think Just Enough"]


def test_whole_methods_are_compared_on_what_validation_chose(report: Report) -> None:
    frame = report.frontiers
    assert list(frame.method) == [
        "OS-Pruner",
        "probe",
        "fixed budget",
        "answer entropy",
        "ES-CoT",
        "LearnStop",
        "fixed step",
        "fixed drop",
        "hindsight oracle",
    ]
    for name in ("lead", "fewer"):
        assert frame[name].isna().tolist() == [True] + [False] * 8
    assert frame.area.idxmax() == 8
    areas = dict(zip(frame.method, frame.area, strict=True))
    assert areas["probe"] > areas["answer entropy"] > areas["fixed budget"]
    assert areas["LearnStop"] > areas["fixed budget"]
    gaps = [column for column in frame.columns if column.startswith("gap@")]
    assert len(gaps) == 9  # three prices that suit the lengths, with their ends
    on_it = report.frame[report.frame.frontier]
    assert set(on_it.method) <= set(frame.method)
    assert 1 < len(on_it[on_it.method == "probe"]) < len(report.frame)


def test_a_report_is_drawn_written_and_read(report: Report, tmp_path: Path) -> None:
    report.save(tmp_path)
    assert (tmp_path / "pareto.png").read_bytes()[:4] == b"\x89PNG"
    assert Results.read(tmp_path / "results.json").frame.equals(report.frame)
    table = report.to_latex()
    assert "answer agreement" not in table
    # One row a method: the setting that validation chose.
    methods = [name for name in dict.fromkeys(report.frame.method) if name in table]
    assert methods == list(dict.fromkeys(report.frame.method))
    assert table.count("\\\\") == len(methods) + 1
    page = write_report(tmp_path, out=tmp_path / "page")[0].read_text()  # whose full table has all
    assert f"({len(report.frame) - len(methods)} more settings in results.json)" in page
    for row in table.splitlines()[7:9]:  # each number with its interval
        assert row.count("[") == row.count("]") == 4
    plain = compare(TEST, [rules.Budget(40)])
    plain.plot(tmp_path / "rules.png")
    assert (tmp_path / "rules.png").stat().st_size > 1000
    assert plain.frontiers.empty


def test_shuffled_test_labels_change_no_choice(report: Report) -> None:
    methods: list[Method] = [rules.AnswerEntropy, LEARN_STOP]
    chosen = []
    for table in (TEST.table, dataclasses.replace(TEST.table, correct=1 - TEST.table.correct)):
        other = dataclasses.replace(TEST, table=table)
        found = compare(other, methods, choose_on=VALIDATION, replicates=2)
        frame = found.frame
        chosen.append([frame[frame[how]].parameter.tolist() for how in ("chosen", "frontier")])
    assert chosen[0] == chosen[1]


def test_rules_of_one_s_own_are_compared_and_chosen() -> None:
    def doubt(end: rules.StepEnd) -> float:
        return -end.trial_answer(1).entropy

    found = compare(TEST, [Family.of(doubt), rules.AnswerEntropy], choose_on=VALIDATION)
    ours, theirs = (found.frame[found.frame.method == m] for m in ("doubt", "answer entropy"))
    inner = slice(1, -1)  # but for the ends of the range
    for name in ("accuracy", "tokens"):
        np.testing.assert_allclose(ours[name][inner], theirs[name][inner])
    areas = found.frontiers.area
    assert areas[0] == pytest.approx(areas[1])
    assert ours.chosen.sum() == 1
    twice: list[Method] = [rules.Deer(0.9), rules.Deer(0.9, trials=3)]
    with pytest.raises(ValueError, match="two rules are called 'DEER ≥.90': give each once, and a"):
        compare(TEST, twice)
    twice[1] = dataclasses.replace(rules.Deer, method="DEER, 3 trials")(0.9, trials=3)
    assert compare(TEST, twice).frame.method.tolist()[1:3] == ["DEER", "DEER, 3 trials"]


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="60 problems, such as '.*', are in the labels and in th"):
        compare(TEST, [rules.Deer], choose_on=TEST)
    with pytest.raises(ValueError, match="'deer' has no threshold, and there are no traces to cho"):
        compare(TEST, [rules.Deer])
    with pytest.raises(ValueError, match="ours is a policy, and these traces do not know"):
        compare(split(1, "t"), parse_policies([saved(tmp_path / "ours")]))
    with pytest.raises(ValueError, match="which labels do not keep"):
        compare(TEST, [rules.ThinkJustEnough], choose_on=VALIDATION)


def test_learnstop_learns_from_other_problems() -> None:
    known = features_of(VALIDATION)
    fitted = fit(VALIDATION.table, known)
    table = TEST.table
    found = scores(fitted, features_of(TEST))
    right = table.correct[table.mask] > 0.5
    assert found[table.mask][right].mean() > found[table.mask][~right].mean() + 0.2
    there, held = (one.signals for one in learn_stop(TEST, VALIDATION))
    free = ~np.isnan(there)
    np.testing.assert_array_equal(free.sum(axis=1), table.last)  # at a trace's end nothing is asked
    np.testing.assert_allclose(there[free], found[free])
    # Grades of a validation problem do not decide its own scores.
    flipped = VALIDATION.table.correct.copy()
    flipped[0] = VALIDATION.table.mask[0] - flipped[0]
    changed = dataclasses.replace(VALIDATION.table, correct=flipped)
    other = learn_stop(TEST, dataclasses.replace(VALIDATION, table=changed))[1].signals
    np.testing.assert_array_equal(other[0], held[0])
    assert not np.allclose(other[1:], held[1:], equal_nan=True)
    on_others = learn_stop(TEST, VALIDATION, split(2, "r"))[1].signals
    assert not np.allclose(on_others, held, equal_nan=True)
    with pytest.raises(ValueError, match="fitted in 3 folds, and there are 2 problems"):
        learn_stop(TEST, split(3, "f", 2))


def test_backtracking_is_the_share_of_steps_with_such_a_word() -> None:
    one = split(0, "v", 4)
    dataset = one.dataset.map(lambda row: {"trace_ids": [1, *row["trace_ids"][1:]]})
    found = features_of(dataclasses.replace(one, dataset=dataset))[..., -1]
    for n, steps in enumerate(one.table.num_steps):
        assert found[n, :steps].tolist() == [1 / (i + 1) for i in range(steps)]
        assert not found[n, steps:].any()
