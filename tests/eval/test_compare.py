"""One comparison of policies and rules: settings, choices, frontiers, the frame, and its file."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from pandas.testing import assert_frame_equal

import ospruner
from modeling_ospruner import OSPrunerConfig
from ospruner import rules
from ospruner.eval.compare import compare, report_of
from ospruner.eval.compute import Compute, LayerWork, ModelWork
from ospruner.eval.evaluation import Report
from ospruner.eval.learnstop import LEARN_STOP, features_of, fit, learn_stop, scores
from ospruner.eval.measured import COUNT, Predicted, Split
from ospruner.eval.methods import PAPER_THRESHOLDS, PolicyUse, parse_policies, refuse_other_base
from ospruner.eval.recorded import SIGNALS_FILE, Method, Recorded
from ospruner.eval.replay import replay_full, replay_step
from ospruner.eval.report.summary import write_report
from ospruner.eval.schema import LabelSettings
from ospruner.eval.table import TraceTable
from ospruner.formats import DEEPSEEK_R1

from ..conftest import LoadScript
from .evaluations import dataset_of
from .recompute import recomputed

CONCISE = "full trace, prompt concise"


@pytest.fixture(scope="module", autouse=True)
def few_resamples() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ospruner.eval.evaluation.REPLICATES", 30)
        yield


def split(seed: int, prefix: str, count: int = 60) -> Split:
    """Traces whose answers are right, and mostly certain, from some step on."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(3, 12, count).tolist()
    rights = [(np.arange(T) >= rng.integers(1, T)) for T in counts]
    guessed = [one ^ (rng.random(len(one)) < 0.2) for one in rights]
    sure = [np.where(one, 0.1, 1.5) * rng.uniform(0.5, 1, len(one)) for one in guessed]
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
    words = {0: " so", 1: " Wait"}
    table = TraceTable.from_dataset(dataset)
    return Split(dataset, table, 4, lambda ids: "".join(words[one] for one in ids))


TEST, VALIDATION = split(1, "t"), split(0, "v")


def shorter(of: Split) -> Split:
    """The same problems from the last to the first, each in its first two steps."""
    by_step = [n for n in of.dataset.column_names if n.startswith(("step_", "forced_", "matches"))]
    dataset = of.dataset.select(range(len(of.dataset))[::-1])
    dataset = dataset.map(lambda row: {name: row[name][:2] for name in by_step})
    return replace(of, dataset=dataset, table=TraceTable.from_dataset(dataset))


SHORT = shorter(TEST)


def said(of: Split, use: PolicyUse) -> Predicted:
    """What sees the answer's fate, but for some noise: a head of six numbers, or a classifier."""
    name = re.split(r"/policies\d+/", use.path)[-1]  # whatever the temporary folder is called
    rng, mask = np.random.default_rng(len(name)), of.table.mask
    if use.config.prices is None:
        chance = 0.15 + 0.5 * of.table.correct + 0.2 * rng.random(mask.shape)
        outputs = np.log(chance / (1 - chance))[..., None]
    else:
        parts = 4 * of.table.correct[..., None] - 6, rng.normal(size=(*mask.shape, 5))
        outputs = np.concatenate(parts, axis=-1)
    outputs = np.where(mask[..., None], outputs, 0).astype(np.float32)
    found = Predicted(outputs, mask, use.config.prices, use.config.price)
    if use.config.method != "flashthink":
        return found
    read = 3 * of.table.lengths  # it reads the thinking three times as slowly
    return replace(found, read_tokens=read, flops=np.asarray(2.0 * read))


def asked(of: Split) -> Split:
    """The traces charged for what they compute, with policies at hand."""
    work = ModelWork((LayerWork(100, 10), LayerWork(100, 10)), logits=1000)
    compute = Compute(work, np.full(len(of.table), 7), of.suffix_tokens)
    charged = replace(of, table=compute.charge(of.table), compute=compute)
    return replace(charged, said=lambda use: said(charged, use))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    folder = tmp_path_factory.mktemp("policies")
    ours = OSPrunerConfig(head="price", price=1e-3, price_range=[1e-5, 1e-2], default_mode="sample")
    for seed in (seeds := [f"{folder}/seed0/price", f"{folder}/seed11/price"]):
        ours.save_pretrained(seed)
    for method in ("probe", "flashthink"):
        baseline = OSPrunerConfig(method=method, price=0.0, default_mode="threshold")
        baseline.save_pretrained(folder / method)
    others = parse_policies([f"{folder}/probe", f"{folder}/flashthink@.6"])
    methods: list[Method] = [*parse_policies(seeds, ()), *others]
    methods += [rules.Budget, rules.AnswerEntropy, rules.Deer, rules.RunJump, LEARN_STOP]
    methods += [replace(rules.Deer, method="DEER, 3 trials")(0.9, trials=3)]
    return compare(
        asked(TEST),
        [*methods, rules.ThinkJustEnough],
        choose_on=asked(VALIDATION),
        prices=(1e-3, 1e-4),
        beside={CONCISE: asked(SHORT)},
    )


def test_the_frame_has_a_row_for_each_method_and_setting(report: Report) -> None:
    frame, of = report.frame, dict(list(report.frame.groupby("method")))
    assert frame.method[0] == "full trace"
    assert len(of["OS-Pruner, one policy"]) == 31  # two seeds at each price
    assert len(of["DEER, 3 trials"]) == 1
    for name in ("probe", "fixed budget", "answer entropy", "ES-CoT", "LearnStop"):
        assert 2 < len(of[name]) <= COUNT
        assert of[name].tokens.min() == pytest.approx(replay_step(TEST.table, 1).mean_tokens)
        assert of[name].tokens.max() == pytest.approx(replay_full(TEST.table).mean_tokens)
        # One setting is chosen, and its interval holds the choice: wider than that of a neighbour.
        (chosen,) = of[name][of[name].chosen].itertuples()
        assert chosen.aes_low <= chosen.aes <= chosen.aes_high
    assert not of["DEER, 3 trials"].chosen.any()  # there was nothing to choose
    assert set(frame[frame.kind == "limit"].method) == {
        *("best fixed budget", "best fixed step", "best fixed drop"),
        *("hindsight oracle", "hindsight oracle, no loss"),
    }
    ((name, why),) = report.results.about["left_out"].items()
    assert name == "Think Just Enough"
    assert "is not at hand" in why


def test_whole_methods_are_compared_on_what_validation_chose(report: Report) -> None:
    frame = report.frontiers
    assert list(frame.method) == [
        *("OS-Pruner, one policy", "probe", "FlashThink", "fixed budget", "answer entropy"),
        *("DEER", "ES-CoT", "LearnStop", "DEER, 3 trials", "fixed step", "fixed drop"),
        "hindsight oracle",
    ]
    for name in ("lead", "fewer"):
        assert frame[name].isna().tolist() == [True] + [False] * 11
    assert frame.area.idxmax() == 11
    areas = dict(zip(frame.method, frame.area, strict=True))
    assert areas["probe"] > areas["answer entropy"] > areas["fixed budget"]
    assert areas["LearnStop"] > areas["fixed budget"]
    assert len(frame.filter(like="gap@").columns) == 6  # two prices, with their ends
    on_it = report.frame[report.frame.frontier]
    assert set(on_it.method) <= set(frame.method)
    assert 1 < len(on_it[on_it.method == "probe"]) < len(report.frame)


def test_a_report_is_drawn_written_and_read(report: Report, tmp_path: Path) -> None:
    report.save(tmp_path)
    assert (tmp_path / "pareto.png").read_bytes()[:4] == b"\x89PNG"
    table = report.to_latex()
    # One row a method: the setting that validation chose.
    methods = [name for name in dict.fromkeys(report.frame.method) if name in table]
    assert methods == list(dict.fromkeys(report.frame.method))
    assert table.count("\\\\") == len(methods) + 1
    page = write_report(tmp_path, out=tmp_path / "page")[0].read_text()  # whose full table has all
    assert f"({len(report.frame) - len(methods)} more settings in results.json)" in page
    for row in table.splitlines()[7:9]:  # each number with its interval
        assert row.count("[") == row.count("]") == 4
    assert compare(TEST, [rules.Budget(40)]).frontiers.empty


def test_grades_of_test_traces_change_no_choice() -> None:
    flipped = replace(TEST.table, correct=1 - TEST.table.correct)
    chosen = []
    for split in (TEST, replace(TEST, table=flipped)):
        methods: list[Method] = [rules.AnswerEntropy, LEARN_STOP]
        frame = compare(split, methods, choose_on=VALIDATION).frame
        chosen.append([frame[frame[how]].parameter.tolist() for how in ("chosen", "frontier")])
    assert chosen[0] == chosen[1]


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    OSPrunerConfig(price=1e-3).save_pretrained(tmp_path / "ours")
    refused: list[tuple[str, list[Method], Split | None]] = [
        ("two rules are called 'DEER ≥.90'", [rules.Deer(0.9), rules.Deer(0.9, trials=3)], None),
        ("'deer' has no threshold, and there are no traces to choose", [rules.Deer], None),
        ("is not at hand", [rules.ThinkJustEnough], VALIDATION),
        ("is not at hand", [*parse_policies([f"{tmp_path}/ours"])], VALIDATION),
    ]
    for message, methods, choose_on in refused:
        with pytest.raises(ValueError, match=message):
            compare(TEST, methods, choose_on=choose_on)


def test_every_number_is_computed_again_from_the_file(report: Report, tmp_path: Path) -> None:
    report.save(tmp_path)
    again = report_of(Recorded.read(tmp_path / SIGNALS_FILE))
    for name in ("frame", "differences", "frontiers"):
        assert_frame_equal(getattr(again.results, name), getattr(report.results, name))
    assert again.results.to_dict() == report.results.to_dict()
    assert again.recorded is not None
    assert again.recorded.made_by["command"]
    (reads,) = again.frame[again.frame.method == "FlashThink"].itertuples()  # at the one asked for
    assert reads.probe_tokens == pytest.approx(3 * reads.tokens)
    # The public function reads it in the place of labels, and what it saves is the same file.
    ospruner.compare(str(tmp_path / SIGNALS_FILE), []).save(tmp_path / "again")
    files = [one / SIGNALS_FILE for one in (tmp_path, tmp_path / "again")]
    assert files[0].read_bytes() == files[1].read_bytes()
    # Neither text nor paths.
    facts = json.loads(pq.read_schema(files[0]).metadata[b"ospruner"])
    assert list(facts["policies"]) == ["price#1", "price#2", "probe#3", "flashthink#4"]
    assert str(tmp_path.parent) not in json.dumps(facts["policies"]) + json.dumps(facts["methods"])
    assert files[0].stat().st_size < 200_000


def test_other_prompts_stand_beside_problem_by_problem(report: Report) -> None:
    """Their rows are paired with the full trace's, whatever the order of their labels."""
    right, there = TEST.table.full_correct, SHORT.table.full_correct[::-1]
    (row,) = report.frame[report.frame.method == CONCISE].itertuples()
    assert row.tokens == pytest.approx(SHORT.table.full_tokens.mean())
    assert row.accuracy == pytest.approx(there.mean())
    assert row.harmed == pytest.approx((right * (1 - there)).mean())
    assert row.harmed > 0
    (found,) = (x for x in report.rules if x.method == CONCISE)
    assert np.array_equal(found.outcome.correct, there)
    fewer = replace(SHORT, dataset=SHORT.dataset.take(59))
    with pytest.raises(ValueError, match="59 traces of 59 problems, 60 of 60.: label the same"):
        compare(asked(TEST), [rules.Budget(40)], beside={CONCISE: fewer})


def test_another_s_arithmetic_finds_the_same(report: Report, tmp_path: Path) -> None:
    """`recompute.py` knows the file's columns and the formulas, and imports nothing of ours."""
    report.save(tmp_path)
    rows = list(recomputed(tmp_path))
    methods = {"full trace", "OS-Pruner, one policy", "probe", "fixed budget", "hindsight oracle"}
    assert {written["method"] for written, _ in rows} == methods
    assert len(rows) > 30 + 20 + 20
    for written, found in rows:
        assert {name: written[name] for name in found} == pytest.approx(found, rel=1e-5, abs=1e-6)


def test_saved_numbers_are_checked(report: Report, tmp_path: Path, load_script: LoadScript) -> None:
    """`make check-numbers` finds a number that was changed by hand."""
    check: Any = load_script("docs/check_numbers.py")
    report.save(tmp_path / "signals")
    file = tmp_path / "signals" / SIGNALS_FILE
    file.rename(file.with_name("thinker.frontier.gsm8k.parquet"))
    stored = report.results.to_dict()
    stored["frame"][3]["accuracy"] += 0.01
    stored["frontiers"] = stored["frontiers"][:2]  # a part may stand there
    (tmp_path / "thinker.json").write_text(json.dumps({"frontier": {"gsm8k": stored}}))
    (said,) = check.signals(tmp_path)
    assert said.startswith("thinker.frontier.gsm8k.parquet, frame: accuracy of {'method': 'OS-")


def test_what_is_no_such_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "signals.parquet"
    with pytest.raises(FileNotFoundError):
        Recorded.read(file)
    file.write_text("no")
    with pytest.raises(ValueError, match="no readable Parquet file"):
        Recorded.read(file)
    pd.DataFrame({"split": ["test"]}).to_parquet(file)
    with pytest.raises(ValueError, match="has format None and version None"):
        Recorded.read(file)


def test_learnstop_learns_from_other_problems() -> None:
    fitted, table = fit(VALIDATION.table, features_of(VALIDATION)), TEST.table
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
    changed = replace(VALIDATION.table, correct=flipped)
    other = learn_stop(TEST, replace(VALIDATION, table=changed))[1].signals
    np.testing.assert_array_equal(other[0], held[0])
    assert not np.allclose(other[1:], held[1:], equal_nan=True)
    on_others = learn_stop(TEST, VALIDATION, split(2, "r"))[1].signals
    assert not np.allclose(on_others, held, equal_nan=True)
    with pytest.raises(ValueError, match="fitted in 3 folds, and there are 2 problems"):
        learn_stop(TEST, split(3, "f", 2))


def test_backtracking_is_the_share_of_steps_with_such_a_word() -> None:
    one = split(0, "v", 4)
    dataset = one.dataset.map(lambda row: {"trace_ids": [1, *row["trace_ids"][1:]]})
    found = features_of(replace(one, dataset=dataset))[..., -1]
    for n, steps in enumerate(one.table.num_steps):
        assert found[n, :steps].tolist() == [1 / (i + 1) for i in range(steps)]
        assert not found[n, steps:].any()


# Policies by name, and for which base.


def save(folder: Path, method: str = "os-pruner", penalty: float = 1e-4, **more: Any) -> Path:
    more |= {"base_model_name_or_path": "org/base", "base_revision": "abc", "price": penalty}
    more |= {"reasoning_format": DEEPSEEK_R1.to_dict(), "method": method}
    mode = "sample" if method == "os-pruner" else "threshold"
    OSPrunerConfig(default_mode=mode, **more).save_pretrained(folder)
    return folder


def test_os_pruner_draws_and_baselines_have_the_papers_thresholds(tmp_path: Path) -> None:
    ours, probe = save(tmp_path / "ours"), save(tmp_path / "probe", "probe", 0.0)
    first, *uses = parse_policies([str(ours), str(probe)])
    assert (first.method, first.mode) == ("OS-Pruner", "sample")
    assert (first.parameter, first.parameter_name) == (1e-4, "price")
    assert [use.threshold for use in uses] == list(PAPER_THRESHOLDS)
    assert {(use.method, use.mode) for use in uses} == {("probe", "threshold")}
    # Both ways of deciding can be asked for.
    uses = parse_policies([f"{ours}@.3,.5", f"{ours}@sample", f"{probe}@sample"])
    names = {"OS-Pruner (≥0.3)": 0.3, "OS-Pruner (≥0.5)": 0.5, "OS-Pruner": None}
    assert {use.method: use.threshold for use in uses} == {**names, "probe (sampled)": None}


def test_a_folder_of_policies_stands_for_all_of_them(tmp_path: Path) -> None:
    for price in (1e-4, 5e-5):
        save(tmp_path / "run" / f"price{price}", penalty=price)
    (tmp_path / "run" / "logs").mkdir()
    assert [use.parameter for use in parse_policies([str(tmp_path / "run")])] == [1e-4, 5e-5]


def test_bad_policies_are_refused(tmp_path: Path) -> None:
    """Further ones: tests/project/bad_inputs.txt."""
    ours, other = save(tmp_path / "ours"), save(tmp_path / "other", num_policy_layers=3)
    for specs, message in (
        (["dear"], "dear is no folder here; did you mean the rule 'deer'"),
        ([ours, ours], "given twice for OS-Pruner with parameter 0.0001"),
        ([ours, other], "with num_policy_layers 3 and 2: they are no training seeds"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_policies(list(map(str, specs)))


def test_a_policy_for_another_base_is_refused(tmp_path: Path) -> None:
    use = parse_policies([str(save(tmp_path / "ours"))])[0]
    form = DEEPSEEK_R1.to_dict()
    labels = LabelSettings(base_model="org/base", base_revision="abc", reasoning_format=form)
    refuse_other_base(use, labels)
    other = {**form, "box_prefix": "Answer: {"}
    refuse_other_base(use, replace(labels, reasoning_format=other), any_task=True)
    for changes, message in (
        ({"base_model": "org/other"}, "is a policy for org/base at revision abc, the traces are"),
        ({"base_revision": "def"}, "at revision abc, the traces are of org/base at def"),
        ({"reasoning_format": other}, "was trained on traces with box_prefix"),
        ({"task": {"name": "choice"}}, "was trained on the task math, here it is choice"),
        ({"step_stride": 2}, r"decides at every 1\. step, here every 2\."),
    ):
        with pytest.raises(ValueError, match=message):
            refuse_other_base(use, replace(labels, **changes))
