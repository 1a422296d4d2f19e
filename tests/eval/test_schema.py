import json
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from ospruner.eval.schema import LabelSettings
from ospruner.eval.table import TraceTable
from ospruner.train.labels.features import FEATURES, validate_row
from ospruner.train.labels.loading import split_of

from ..label_rows import label_row


def test_a_good_row_passes_and_survives_the_dataset() -> None:
    partly = {"forced_correct": [None, 0.0, 1.0], "matches_final": [None, False, True]}
    unread = label_row("p0", 1, 1, natural_correct=None)
    rows = [label_row("p0", 0, 3, **partly), unread, label_row("p1", 0, 2)]
    dataset = Dataset.from_list(rows, features=FEATURES)
    for row, stored in zip(rows, dataset, strict=True):
        validate_row(row)
        validate_row(stored)
        assert stored == row
    del row["ended"]
    with pytest.raises(ValueError, match=r"missing: \['ended'\], unknown: \['stopped'\]"):
        validate_row({**row, "stopped": 1})


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("step_ends", [4, 4, 12], "strictly increasing"),
        ("step_ends", [4, 8, 11], "trace_ids has 12 tokens"),
        ("step_ends", [4, 12], "forced_answers has 3 entries for 2 steps"),
        ("step_ends", [], "step_ends is empty"),
        ("step_ends", [4.5, 8, 12], "step_ends holds 4.5; it must hold integers"),
        ("trace_ids", [2**31] * 12, "trace_ids is .2147483648"),
        ("prompt_ids", [], "prompt_ids is empty"),
        ("forced_correct", [0.0, 2.0, 1.0], r"forced_correct holds 2.0; it must lie in \[0, 1\]"),
        ("forced_correct", [math.nan, 0.0, 1.0], "forced_correct holds nan"),
        ("forced_answers", [None, "1", "2"], "forced_answers holds None"),
        ("matches_final", [0.5, None, True], "matches_final is .0.5, None, True"),
        ("natural_correct", 7, "natural_correct holds 7"),
        ("forced_logprob", [0.5, -1.0, None], r"forced_logprob holds 0.5; it must lie in \[-inf"),
        ("forced_entropy", [0.5, -1.0, None], "forced_entropy holds -1"),
        ("forced_answer_ids", [[3], None, [3, 4]], "has 1 ids where forced_answer_tokens counts 2"),
        ("option_probabilities", [None, [0.5, 0.4], None], "option_probabilities holds .0.5,"),
        ("option_probabilities", [None, [1.5, -0.5], None], "option_probabilities holds 1.5"),
        ("ungraded_reasons", ["late", None, None], "ungraded_reasons holds 'late' beside the gr"),
        ("natural_answer_ids", [-1], "natural_answer_ids holds -1"),
        ("sample_index", "0", "sample_index is '0'; it must be int32"),
        ("ended", "stop", r"ended is 'stop'; it must be one of \('natural', 'cap'\)"),
        ("answer", " ", "answer is empty"),
        ("problem_id", "", "problem_id is empty"),
        ("family", None, "family is None; it must be string"),
    ],
)
def test_bad_rows_are_refused_by_column(column: str, value: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        validate_row(label_row(**{column: value}))


def test_trace_table() -> None:
    partly = {"forced_correct": [None, 0.5, 1.0], "matches_final": [None, True, True]}
    cut = label_row("p1", 0, 1, ended="cap", natural_correct=None)
    rows = [label_row("p0", 0, 3, **partly), cut, label_row("p0", 1, 2)]
    dataset = Dataset.from_list(rows, features=FEATURES)
    table = TraceTable.from_dataset(dataset)
    assert table.problem_ids == ["p0", "p1"]
    assert table.problem_index.tolist() == [0, 1, 0]
    assert table.lengths.tolist() == [[4, 8, 12], [4, 4, 4], [4, 8, 8]]
    assert table.correct.tolist() == [[0, 0.5, 1], [1, 0, 0], [0, 1, 0]]
    assert table.mask.tolist() == [[True] * 3, [True, False, False], [True, True, False]]
    assert table.matches_final.tolist()[0] == [False, True, True]
    assert table.num_steps.tolist() == [3, 1, 2]
    assert (table.full_correct.tolist(), table.full_tokens.tolist()) == ([1, 1, 1], [12, 4, 8])
    assert table.capped.tolist() == [False, True, False]
    assert np.isnan(table.natural_correct).tolist() == [False, True, False]
    assert table.answer_tokens.tolist() == [[2, 2, 2], [2, 0, 0], [2, 2, 0]]

    rows = [label_row(forced_correct=grades) for grades in ([None] * 3, [1.0])]
    ungraded, short = (Dataset.from_list([row], features=FEATURES) for row in rows)
    for refused, message in (
        (dataset.remove_columns("forced_correct"), "forced_correct.* not in the dataset"),
        (dataset.select([]), "holds no traces"),
        (ungraded, "the labels are not graded: grade them"),
        (short, "forced_correct and step_ends"),
    ):
        with pytest.raises(ValueError, match=message):
            TraceTable.from_dataset(refused)


def test_label_settings_round_trip_differ_and_are_checked() -> None:
    settings = LabelSettings(base_model="base", reasoning_format={"closing": "</think>\n\n"})
    loaded = LabelSettings.from_dict(json.loads(json.dumps(settings.to_dict())))
    assert loaded == settings
    assert settings.differences(loaded) == []
    other = LabelSettings(base_model="base", temperature=1.0)
    form = "reasoning_format: {'closing': '</think>\\n\\n'} here, {} there"
    assert settings.differences(other) == [form, "temperature: 0.6 here, 1.0 there"]
    assert settings.differences(other, but=["temperature"]) == [form]
    values = settings.to_dict()
    with pytest.raises(ValueError, match="unknown keys .'colour'. and missing keys .."):
        LabelSettings.from_dict({**values, "colour": 1})
    for field, value in {"base_model": "", "task": {}, "seed": 0.5}.items():  # more: bad_inputs.txt
        with pytest.raises((ValueError, TypeError), match=f"{field} is "):
            LabelSettings.from_dict({**values, field: value})
    del values["seed"]
    with pytest.raises(ValueError, match="missing keys .'seed'."):
        LabelSettings.from_dict(values)


def test_splits_are_stable_and_of_the_right_size() -> None:
    ids = [f"problem-{i}" for i in range(5000)]
    counts = Counter(split_of(i) for i in ids)
    assert counts["train"] == pytest.approx(4000, abs=120)
    assert counts["validation"] == pytest.approx(500, abs=90)
    assert [split_of(i) for i in ids[8:12]] == ["train", "train", "validation", "validation"]
    assert {split_of(i, fractions={"train": 1.0, "test": 0.0}) for i in ids} == {"train"}
