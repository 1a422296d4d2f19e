"""Labels: what is in a row, what the manifest counts, and which folders are refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from modeling_ospruner.formats_ospruner import TokenFormat
from ospruner.durable import lock_folder
from ospruner.engines.interface import ForkRequest
from ospruner.engines.transformers.engine import TransformersEngine
from ospruner.eval.grading.boxed import equal, read_box
from ospruner.eval.problems.problem import Problem
from ospruner.eval.schema import LabelSettings
from ospruner.formats import DEEPSEEK_R1
from ospruner.train.labels.features import validate_row
from ospruner.train.labels.folder import read_manifest
from ospruner.train.labels.making import Labeller, label_problems

from ..conftest import sums

SETTINGS = LabelSettings(
    base_model="tiny", temperature=1.0, top_p=1.0, max_new_tokens=48, max_answer_tokens=6
)


@pytest.fixture
def engine(
    tiny_base: Qwen2ForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> TransformersEngine:
    return TransformersEngine(tiny_base, tiny_tokenizer, batch_size=8)


@pytest.fixture(scope="session")
def fmt(tiny_tokenizer: PreTrainedTokenizerFast) -> TokenFormat:
    return TokenFormat.compile(DEEPSEEK_R1, tiny_tokenizer)


def test_labels_are_the_engines_answers_read_and_graded(
    engine: TransformersEngine,
    tiny_tokenizer: PreTrainedTokenizerFast,
    fmt: TokenFormat,
    tmp_path: Path,
) -> None:
    """The engine's answers are those of each prefix encoded from scratch: tests/engines."""
    labeller = Labeller(tiny_tokenizer, fmt, SETTINGS)
    dataset = label_problems(sums(6), engine, labeller, tmp_path, chunk_traces=2)
    computed, unique = engine.counts.computed, engine.counts.unique
    assert sum(map(len, dataset["step_ends"])) > len(dataset)  # some trace has several steps
    suffix = fmt.forced_suffix("forced")
    for row in dataset:
        validate_row(row)
        assert row["step_ends"] == fmt.step_ends(row["trace_ids"])
        request = ForkRequest(row["prompt_ids"], row["trace_ids"], row["step_ends"])
        (forks,) = engine.fork([request], suffix, SETTINGS.max_answer_tokens, fmt.box_state)
        assert row["forced_answer_ids"] == [one.ids for one in forks]
        assert row["forced_answer_tokens"] == [len(one.ids) for one in forks]
        for k, one in enumerate(forks):
            text = str(tiny_tokenizer.decode(one.ids, clean_up_tokenization_spaces=False))
            assert row["forced_answers"][k] == (read_box(text) or "")
            mean = sum(one.logprobs) / len(one.ids) if one.ids else None
            assert row["forced_logprob"][k] == (mean and pytest.approx(mean, abs=1e-5))
            assert row["forced_entropy"][k] == pytest.approx(one.entropy, abs=1e-5)
        for answer, correct, match in zip(
            row["forced_answers"], row["forced_correct"], row["matches_final"], strict=True
        ):
            assert correct == (None if not answer else equal(row["answer"], answer))
            assert match == equal(row["forced_answers"][-1] or None, answer or None)
    assert {row["ended"] for row in dataset} >= {"cap"}
    capped = next(row for row in dataset if row["ended"] == "cap")
    assert len(capped["trace_ids"]) == SETTINGS.max_new_tokens == capped["step_ends"][-1]
    assert len(capped["forced_answers"]) == len(capped["step_ends"])
    # The manifest counts what was made.
    manifest, shards = read_manifest(tmp_path), list((tmp_path / "data").iterdir())
    assert 3 <= len(shards) <= 6
    assert (manifest["finished"], manifest["traces"], manifest["problems"]) == (True, 6, 6)
    assert manifest["steps"] == sum(map(len, dataset["step_ends"]))
    assert manifest["computed_tokens"] == computed
    assert manifest["unique_tokens"] == unique
    assert manifest["settings"]["reasoning_format"] == DEEPSEEK_R1.to_dict()


def test_other_settings_problems_files_and_runs_are_refused(
    engine: TransformersEngine,
    tiny_tokenizer: PreTrainedTokenizerFast,
    fmt: TokenFormat,
    tmp_path: Path,
) -> None:
    def run(folder: Path, problems: list[Problem], settings: LabelSettings = SETTINGS) -> None:
        label_problems(problems, engine, Labeller(tiny_tokenizer, fmt, settings), folder)

    problems, folder = sums(2), tmp_path / "labels"
    run(folder, problems)
    with pytest.raises(ValueError, match=r"other settings \(temperature: 0\.5 here, 1\.0 there\)"):
        run(folder, problems, dataclasses.replace(SETTINGS, temperature=0.5))
    with pytest.raises(ValueError, match="traces of problem 'p1', which is not among the 1 given"):
        run(folder, problems[:1])
    with pytest.raises(ValueError, match="traces of problem 'p0' with"):
        run(folder, [dataclasses.replace(problems[0], answer="5"), problems[1]])
    with lock_folder(folder), pytest.raises(ValueError, match="being written by another run"):
        run(folder, problems)
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match=r"another run's files \(thesis\.tex\)"):
        run(other, problems)
    assert [path.name for path in other.iterdir()] == ["thesis.tex"]
    with pytest.raises(ValueError, match="share the id 'p0'"):
        run(tmp_path / "new", [problems[0], problems[0]])
    with pytest.raises(ValueError, match="problems is empty"):
        run(tmp_path / "new", [])


def test_every_keeps_the_last_step(
    fmt: TokenFormat, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    text = "a.\n\nb.\n\nc.\n\nd.\n\ne"
    trace = tiny_tokenizer.encode(text, add_special_tokens=False)
    ends = fmt.step_ends(trace)
    assert len(ends) == 5
    for stride, kept in ((1, [0, 1, 2, 3, 4]), (2, [1, 3, 4]), (3, [2, 4]), (9, [4])):
        settings = dataclasses.replace(SETTINGS, step_stride=stride)
        found = Labeller(tiny_tokenizer, fmt, settings).step_ends(trace)
        assert found == [ends[step] for step in kept]
