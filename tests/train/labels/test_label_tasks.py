"""Labels of other tasks than mathematics, from the command to a replayed policy."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from modeling_ospruner import OSPrunerConfig
from modeling_ospruner.formats_ospruner import TokenFormat
from ospruner.calibrating import calibrate
from ospruner.comparing import compare
from ospruner.eval.problems.domains import parse_task
from ospruner.eval.problems.problem import Problem
from ospruner.eval.schema import LabelSettings
from ospruner.eval.table import TraceTable
from ospruner.formats import DEEPSEEK_R1
from ospruner.train.labels.folder import read_labels, read_manifest
from ospruner.train.labels.label import regrade
from ospruner.train.labels.labelling import grade_rows

from ..conftest import command, make_labels, rewrite, trained_on, write_rows


def label(base: Path, rows: list[dict[str, Any]], out: Path, more: str) -> Dataset:
    path = write_rows(out.with_suffix(".jsonl"), rows)
    given = f"label --base {base} --dataset {path} --out {out} {more}"
    command(*given.split(), "--max-thinking-tokens", 40, "--set", "temperature=1")
    return read_labels(out)


QUIZ = [
    {"id": f"q{n}", "question": f"What is {n} + 4?", "choices": [str(n), str(n + 4)], "answer": 1}
    for n in range(12)
]


def test_from_a_choice_to_a_replayed_policy(tiny_base_dir: Path, tmp_path: Path) -> None:
    named = "choice:force=answer,labels=decoded"
    labels = label(tiny_base_dir, QUIZ, tmp_path / "quiz", f"--task {named}")
    task = parse_task(named)
    settings = LabelSettings.from_dict(read_manifest(tmp_path / "quiz")["settings"])
    assert settings.task == {"name": "choice", "force": "answer", "labels": "decoded"}
    assert settings.reasoning_format["box_prefix"] == "Answer:"
    assert settings.max_answer_tokens == 8
    assert labels[0]["problem"] == "What is 0 + 4?\n\nA. 0\nB. 4"
    tokenizer = AutoTokenizer.from_pretrained(tiny_base_dir)
    assert "put the letter of the right option" in tokenizer.decode(labels[0]["prompt_ids"])
    for row in labels:
        assert row["answer"] == "B"
        for ids, answer, grade in zip(
            row["forced_answer_ids"], row["forced_answers"], row["forced_correct"], strict=True
        ):
            text = str(tokenizer.decode(ids))
            assert answer == (task.read_forced(text) or "")
            assert "\n" not in text[:-1] or len(ids) <= 8
            assert grade == task.grade_many([(answer, Problem("q", "?", "B"))])[0].value
    assert regrade(tmp_path / "quiz").changed == {}

    def knows_letters(rows: list[dict[str, Any]]) -> None:  # which the tiny base does not
        for row in rows:
            half = len(row["forced_answers"]) // 2
            row["forced_answers"][half:] = ["(b)"] * (len(row["forced_answers"]) - half)
            row["forced_answers"][:half] = ["A"] * half
            row["ended"] = "natural"

    rewrite(tmp_path / "quiz", knows_letters)
    regrade(tmp_path / "quiz")
    assert {row["forced_correct"][-1] for row in read_labels(tmp_path / "quiz")} == {1.0}

    policy = trained_on(tmp_path / "quiz", tmp_path / "policy", batch_size=2, held_out=3).path
    assert OSPrunerConfig.from_pretrained(policy).task == settings.task
    methods = [str(policy), "agreement:2"]
    report = compare(tmp_path / "quiz", methods, benchmark="quiz", device="cpu")
    assert np.isfinite(report.rules[1].outcome.tokens).all()

    other = [{"id": row["id"], "problem": row["question"], "answer": "4"} for row in QUIZ]
    label(tiny_base_dir, other, tmp_path / "exact", "--task exact --limit 3")
    with pytest.raises(ValueError, match=r"trained on the task choice .force=answer, labels=decod"):
        compare(tmp_path / "exact", [str(policy)], benchmark="quiz", device="cpu")
    carried = compare(
        tmp_path / "exact", [str(policy)], benchmark="quiz", device="cpu", across_tasks=True
    )
    assert len(carried) == 3
    with pytest.raises(ValueError, match=r"other settings .*task: "):
        label(tiny_base_dir, other, tmp_path / "exact", "--task math --limit 3")


def test_a_choice_is_read_in_one_forward(tiny_base_dir: Path, tmp_path: Path) -> None:
    graded = label(tiny_base_dir, QUIZ, tmp_path / "graded", "--task choice")
    named = "choice:labels=probability"
    shares = label(tiny_base_dir, QUIZ, tmp_path / "shares", f"--task {named}")
    tokenizer = AutoTokenizer.from_pretrained(tiny_base_dir)
    base = AutoModelForCausalLM.from_pretrained(tiny_base_dir, dtype=torch.float32).eval()
    settings = LabelSettings.from_dict(read_manifest(tmp_path / "shares")["settings"])
    assert settings.task == {"name": "choice", "labels": "probability"}
    fmt = TokenFormat.compile(DEEPSEEK_R1, tokenizer)
    letters = [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "AB"]
    for one, other in zip(graded, shares, strict=True):
        assert one["trace_ids"] == other["trace_ids"]
        for step, end in enumerate(one["step_ends"]):
            text = [*one["prompt_ids"], *one["trace_ids"][:end], *fmt.forced_suffix()]
            with torch.no_grad():
                expected = base(torch.tensor([text])).logits[0, -1, letters].softmax(-1).tolist()
            said = one["option_probabilities"][step]
            assert said == pytest.approx(expected, abs=1e-4)
            assert other["option_probabilities"][step] == pytest.approx(said, abs=1e-4)
            assert one["forced_answers"][step] == ("A" if said[0] > said[1] else "B")
            assert one["forced_answer_ids"][step] == [letters[said.index(max(said))]]
            assert one["forced_correct"][step] == float(said[1] > said[0])
            assert other["forced_correct"][step] == pytest.approx(said[1], abs=1e-4)
            assert one["forced_logprob"][step] == pytest.approx(math.log(max(said)), abs=1e-5)
            entropy = -sum(p * math.log(p) for p in said)
            assert one["forced_entropy"][step] == pytest.approx(entropy, abs=1e-4)
    assert regrade(tmp_path / "shares").changed == {}

    def ended(rows: list[dict[str, Any]]) -> None:  # which the tiny base never does
        for row in rows:
            row["ended"] = "natural"

    for name in ("graded", "shares"):
        rewrite(tmp_path / name, ended)
    saved = trained_on(tmp_path / "shares", tmp_path / "policy", batch_size=2, held_out=3)
    policy = str(saved.path)
    expected = compare(tmp_path / "shares", [policy], benchmark="quiz", device="cpu")
    table = TraceTable.from_dataset(shares)
    assert expected.full.correct == pytest.approx(table.full_correct, abs=1e-6)
    assert "probabilities of right answers" in expected.results.setting
    assert "never_right" not in expected.results.about
    # How labels are read is no part of what a policy was trained to stop.
    compare(tmp_path / "graded", [policy], benchmark="quiz", device="cpu")
    with pytest.raises(ValueError, match="hold probabilities of right answers, and a promise is"):
        calibrate(policy, tmp_path / "shares", 0.1)


def test_choices_that_cannot_be_read(tiny_base_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'A' is not one token of its own behind 'Answer:': these"):
        label(tiny_base_dir, QUIZ, tmp_path / "words", "--task choice:force=answer")
    how = "--task choice --limit 2 --answer free"
    free = label(tiny_base_dir, QUIZ, tmp_path / "open", how)
    assert {tuple(row["option_probabilities"]) for row in free} <= {
        (None,) * len(row["step_ends"]) for row in free
    }


def test_a_forced_answer_ends_at_several_tokens(tiny_tokenizer: Any) -> None:
    shape = replace(DEEPSEEK_R1, box_prefix="```python\n", answer_end="\n```")
    fmt = TokenFormat.compile(shape, tiny_tokenizer)
    assert tiny_tokenizer.decode(fmt.forced_suffix()).endswith("```python\n")
    text = "x = '```'\ny = `1`\n```\nmore"
    state, ids = fmt.box_state(), tiny_tokenizer.encode(text, add_special_tokens=False)
    end = next(n for n, token in enumerate(ids, 1) if state.push(token))
    written = tiny_tokenizer.decode(ids[:end])
    assert "x = '```'\ny = `1`\n```" in written
    assert "more" not in written

    empty = fmt.box_state()  # the line break before the fence may be the prefix's own
    fence = tiny_tokenizer.encode("```\n", add_special_tokens=False)
    assert any(empty.push(token) for token in fence)


def test_rows_are_graded_by_their_task() -> None:
    answers = ["", "seven", "the seven."]
    rows = list(make_labels(1, answer="Seven", forced_answers=answers, step_ends=[1, 2, 3]))
    grade_rows(rows, parse_task("exact"))
    assert rows[0]["forced_correct"] == [None, 1.0, 1.0]
    assert rows[0]["ungraded_reasons"] == ["no answer", None, None]
    assert rows[0]["matches_final"] == [None, True, True]
    assert rows[0]["natural_correct"] == 0.0  # "7"
