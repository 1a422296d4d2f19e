"""The file of signals: what a comparison computed from, from which anyone computes it again."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from datasets import Dataset
from pandas.testing import assert_frame_equal

import ospruner
from modeling_ospruner import OSPrunerConfig
from ospruner import rules
from ospruner.eval.compare import Report, compare, report_of
from ospruner.eval.compute import Compute, LayerWork, ModelWork
from ospruner.eval.learnstop import LEARN_STOP
from ospruner.eval.measured import Predicted, Split
from ospruner.eval.methods import PolicyUse, parse_policies
from ospruner.eval.recorded import SIGNALS_FILE, Method, Recorded
from ospruner.eval.table import TraceTable

from .recompute import recomputed
from .test_compare import TEST, VALIDATION, said, saved

PRICES = (1e-5, 1e-2)
CONCISE = "full trace, prompt concise"


def shorter(of: Split) -> Split:
    """The same problems from the last to the first, each in its first two steps."""
    rows = [
        {
            k: v[:2] if k.startswith(("step_ends", "forced_", "matches")) else v
            for k, v in row.items()
        }
        for row in reversed(of.dataset.to_list())
    ]
    dataset = Dataset.from_list(rows, features=of.dataset.features)
    return dataclasses.replace(of, dataset=dataset, table=TraceTable.from_dataset(dataset))


SHORT = shorter(TEST)


def every_price(of: Split, use: PolicyUse) -> Predicted:
    """A head of six numbers that sees the answer's fate, or a classifier of `test_compare`."""
    if use.config.method == "flashthink":  # reads the thinking three times as slowly
        read = 3 * of.table.lengths
        return dataclasses.replace(said(of, use), read_tokens=read, flops=np.asarray(2.0 * read))
    if use.config.prices is None:
        return said(of, use)
    rng = np.random.default_rng(len(Path(use.path).name))
    shape = of.table.mask.shape
    outputs = np.concatenate(
        [4 * of.table.correct[..., None] - 6, rng.normal(size=(*shape, 5))], axis=-1
    ).astype(np.float32)
    outputs[~of.table.mask] = 0
    return Predicted(outputs, of.table.mask, use.config.prices, use.config.price)


def asked(of: Split) -> Split:
    """The traces charged for what they compute, with policies at hand."""
    work = ModelWork((LayerWork(100, 10), LayerWork(100, 10)), logits=1000)
    compute = Compute(work, np.full(len(of.table), 7), of.suffix_tokens)
    charged = dataclasses.replace(of, table=compute.charge(of.table), compute=compute)
    return dataclasses.replace(charged, said=lambda use: every_price(charged, use))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    folder = tmp_path_factory.mktemp("policies")
    for name in ("seed0", "seed11"):
        OSPrunerConfig(
            head="price", price=1e-3, price_range=list(PRICES), default_mode="sample"
        ).save_pretrained(folder / name / "price")
    ours = [str(folder / name / "price") for name in ("seed0", "seed11")]
    uses = [
        *parse_policies(ours, ()),
        *parse_policies([saved(folder / "probe", "probe", 0.0)]),
        *parse_policies([f"{saved(folder / 'verifier', 'flashthink', 0.0)}@.6"]),
    ]
    methods: list[Method] = [*uses, rules.Budget, rules.Deer, rules.Deer(0.9, trials=3)]
    methods[-1] = dataclasses.replace(rules.Deer, method="DEER, 3 trials")(0.9, trials=3)
    methods += [rules.RunJump, LEARN_STOP, rules.ThinkJustEnough]
    more: dict[str, Any] = {
        "prices": (1e-3, 1e-4),
        "replicates": 30,
        "beside": {CONCISE: asked(SHORT)},
    }
    return compare(asked(TEST), methods, choose_on=asked(VALIDATION), **more)


def test_every_number_is_computed_again_from_the_file(report: Report, tmp_path: Path) -> None:
    report.save(tmp_path)
    again = report_of(Recorded.read(tmp_path / SIGNALS_FILE))
    for name in ("frame", "differences", "frontiers"):
        assert_frame_equal(getattr(again.results, name), getattr(report.results, name))
    assert again.results.to_dict() == report.results.to_dict()
    assert list(again.results.about["left_out"]) == ["Think Just Enough"]
    assert again.recorded is not None
    assert again.recorded.made_by["command"]
    (reads,) = again.frame[again.frame.method == "FlashThink"].itertuples()  # at the one asked for
    assert reads.probe_tokens == pytest.approx(3 * reads.tokens)
    # The public function reads it in the place of labels, and what it saves is the same file.
    ospruner.compare(str(tmp_path / SIGNALS_FILE), []).save(tmp_path / "again")
    files = [one / SIGNALS_FILE for one in (tmp_path, tmp_path / "again")]
    assert files[0].read_bytes() == files[1].read_bytes()
    # No text, and no path of this machine.
    facts = json.loads(pq.read_schema(files[0]).metadata[b"ospruner"])
    assert list(facts["policies"]) == ["price#1", "price#2", "probe#3", "verifier#4"]
    assert str(tmp_path.parent) not in json.dumps(facts["policies"]) + json.dumps(facts["methods"])
    assert files[0].stat().st_size < 200_000


def test_other_prompts_stand_beside_problem_by_problem(report: Report) -> None:
    """Their rows are paired with the full trace's, whatever the order of their labels."""
    right, there = TEST.table.full_correct, SHORT.table.full_correct[::-1]
    row = report.frame[report.frame.method == CONCISE].iloc[0]
    assert row.tokens == pytest.approx(SHORT.table.full_tokens.mean())
    assert row.accuracy == pytest.approx(there.mean())
    assert row.harmed == pytest.approx((right * (1 - there)).mean())
    assert row.harmed > 0
    (found,) = (x for x in report.evaluation.rules if x.method == CONCISE)
    assert np.array_equal(found.outcome.correct, there)
    fewer = dataclasses.replace(SHORT, dataset=SHORT.dataset.take(59))
    with pytest.raises(ValueError, match="59 traces of 59 problems, 60 of 60.: label the same"):
        compare(asked(TEST), [rules.Budget(40)], beside={CONCISE: fewer})


def test_another_s_arithmetic_finds_the_same(report: Report, tmp_path: Path) -> None:
    """`recompute.py` knows the file's columns and the formulas, and imports nothing of ours."""
    report.save(tmp_path)
    rows = list(recomputed(tmp_path))
    assert {written["method"] for written, _ in rows} == {
        "full trace",
        "OS-Pruner, one policy",
        "probe",
        "fixed budget",
        "hindsight oracle",
    }
    assert len(rows) > 30 + 20 + 20
    for written, found in rows:
        for name, value in found.items():
            assert written[name] == pytest.approx(value, rel=1e-5, abs=1e-6), (written, name)


def test_stored_numbers_are_checked(
    report: Report, tmp_path: Path, load_script: Callable[[str], ModuleType]
) -> None:
    """`make check-numbers` finds a number that was changed by hand; README's table reads such."""
    check: Any = load_script("docs/check_numbers.py")
    report.save(tmp_path / "run")
    (tmp_path / "signals").mkdir()
    file = tmp_path / "signals" / "thinker.frontier.gsm8k.parquet"
    (tmp_path / "run" / SIGNALS_FILE).rename(file)
    stored = report.results.to_dict()
    whole = tmp_path / "thinker.json"
    stored["frame"][3]["accuracy"] += 0.01
    stored["frontiers"] = stored["frontiers"][:2]  # a part may stand there
    whole.write_text(json.dumps({"frontier": {"gsm8k": stored}}))
    (said,) = check.signals(tmp_path)
    assert said.startswith("thinker.frontier.gsm8k.parquet, frame: accuracy of {'method': 'OS-")

    text = load_script("docs/tables.py").readme(report.results.to_dict())
    first = [line.split("|")[1].strip("* ") for line in text.splitlines()[2:] if "|" in line]
    assert CONCISE in text
    assert list(dict.fromkeys(one.split(",")[0].partition(":")[0] for one in first)) == [
        "full trace",
        "OS-Pruner",
        "best classifier",
        "best rule",
        "best fixed budget",
        "best fixed step",
        "best fixed drop",
        "hindsight oracle",
    ]
    assert re.search(r"largest area there is (probe|LearnStop): for the accuracy of our", text)


def test_what_is_no_such_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Recorded.read(tmp_path / "none.parquet")
    (tmp_path / "text.parquet").write_text("no")
    with pytest.raises(ValueError, match="no readable Parquet file"):
        Recorded.read(tmp_path / "text.parquet")
    pd.DataFrame({"split": ["test"]}).to_parquet(tmp_path / "other.parquet")
    with pytest.raises(ValueError, match="has format None and version None, this version of"):
        Recorded.read(tmp_path / "other.parquet")
