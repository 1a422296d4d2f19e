"""Labels: what is in a row, what the manifest counts, which folders are refused, where they end."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2ForCausalLM

from modeling_ospruner.formats_ospruner import TokenFormat
from ospruner.demo.shipped import Reasoner, draw_split
from ospruner.durable import lock_folder
from ospruner.engines.interface import ForkRequest
from ospruner.engines.transformers.engine import TransformersEngine
from ospruner.eval.grading.boxed import equal, read_box
from ospruner.eval.problems.problem import Problem
from ospruner.formats import DEEPSEEK_R1, follow
from ospruner.rules import Budget
from ospruner.rules.live import generate_with_rule
from ospruner.train.labels.features import validate_row
from ospruner.train.labels.folder import read_manifest
from ospruner.train.labels.making import Labeller, label_problems

from ..conftest import TINY, sums

SETTINGS = replace(TINY, temperature=1.0, top_p=1.0, max_new_tokens=48, max_answer_tokens=6)


@pytest.fixture
def engine(tiny_base: Qwen2ForCausalLM, tiny_tokenizer: Any) -> TransformersEngine:
    return TransformersEngine(tiny_base, tiny_tokenizer, batch_size=8)


def test_labels_are_the_engines_answers_read_and_graded(
    engine: TransformersEngine, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    """The engine's answers are those of each prefix encoded from scratch: tests/engines."""
    labeller = Labeller.of(tiny_tokenizer, SETTINGS)
    fmt, suffix = labeller.fmt, labeller.fmt.forced_suffix("forced")
    dataset = label_problems(sums(6), engine, labeller, tmp_path, chunk_traces=2)
    computed, unique = engine.counts.computed, engine.counts.unique
    assert sum(map(len, dataset["step_ends"])) > len(dataset)  # some trace has several steps
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
    assert (manifest["computed_tokens"], manifest["unique_tokens"]) == (computed, unique)
    assert manifest["settings"]["reasoning_format"] == DEEPSEEK_R1.to_dict()


def test_other_problems_files_and_runs_are_refused(
    engine: TransformersEngine, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    def run(folder: Path, problems: list[Problem]) -> None:
        label_problems(problems, engine, Labeller.of(tiny_tokenizer, SETTINGS), folder)

    problems, folder, other = sums(2), tmp_path / "labels", tmp_path / "other"
    run(folder, problems)
    with lock_folder(folder), pytest.raises(ValueError, match="being written by another run"):
        run(folder, problems)
    other.mkdir()
    (other / "thesis.tex").touch()
    for out, given, message in (
        (folder, problems[:1], "traces of problem 'p1', which is not among the 1 given"),
        (folder, [replace(problems[0], answer="5"), problems[1]], "traces of problem 'p0' with"),
        (other, problems, r"another run's files \(thesis\.tex\)"),
        (tmp_path / "new", [problems[0], problems[0]], "share the id 'p0'"),
        (tmp_path / "new", [], "problems is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            run(out, given)
    assert [path.name for path in other.iterdir()] == ["thesis.tex"]


def test_every_keeps_the_last_step(tiny_tokenizer: Any) -> None:
    trace = tiny_tokenizer.encode("a.\n\nb.\n\nc.\n\nd.\n\ne", add_special_tokens=False)
    ends = Labeller.of(tiny_tokenizer, SETTINGS).step_ends(trace)
    assert len(ends) == 5
    for stride, kept in ((2, [1, 3, 4]), (3, [2, 4]), (9, [4])):
        found = Labeller.of(tiny_tokenizer, replace(SETTINGS, step_stride=stride)).step_ends(trace)
        assert found == [ends[step] for step in kept]


# Where thinking ends with several tokens, generate ends it there too.

WORDS: dict[str, dict[str, Any]] = {
    "marker": {"think_end": "That gives", "closing": "That gives "},
    "phrase": {
        **{"think_end": "", "think_start": "", "answer_phrase": "That gives"},
        "closing": "So.\n\nThat gives ",
    },
}


@pytest.fixture(scope="module", params=WORDS)
def fmt(request: pytest.FixtureRequest, reasoner: Reasoner) -> TokenFormat:
    """The reasoner's own last words, taken for an end marker or for those of its answer."""
    form = replace(reasoner.token_format.format, name="last", **WORDS[request.param])
    return TokenFormat.compile(form, reasoner.tokenizer)


def test_generate_ends_it_there_too(reasoner: Reasoner, fmt: TokenFormat, tmp_path: Path) -> None:
    greedy = replace(SETTINGS, temperature=0, max_new_tokens=300, max_answer_tokens=12)
    labeller, natural = Labeller(reasoner.tokenizer, fmt, greedy), 0
    for row in label_problems(draw_split("test", 4, 0), reasoner.engine, labeller, tmp_path / "l"):
        prompt, trace = row["prompt_ids"], row["trace_ids"]
        given = (reasoner.model, reasoner.tokenizer, Budget(10_000), torch.tensor([prompt]), fmt)
        how: dict[str, Any] = {"max_new_tokens": greedy.max_new_tokens, "do_sample": False}
        output, (record,) = generate_with_rule(*given, **how)
        written = output[0, len(prompt) :].tolist()
        assert written[: len(trace)] == trace
        assert "That gives" not in reasoner.tokenizer.decode(trace)
        assert row["step_ends"] == fmt.step_ends(trace)
        if row["ended"] == "cap":
            continue
        assert (record.reason, record.thinking_tokens) == ("natural", len(trace))
        text = str(reasoner.tokenizer.decode(written))
        if "That gives" not in text:
            continue
        natural += 1
        both = zip(record.step_ends, row["step_ends"], strict=False)
        assert all(ours == theirs for ours, theirs in both)
        # The marker and what follows it are the answer's, in generate and in the labels.
        state = follow(fmt, prompt, written)
        after = len(trace) + state.end_tokens
        assert str(reasoner.tokenizer.decode(written[len(trace) : after])).endswith("That gives")
        assert str(reasoner.tokenizer.decode(written[after:])).startswith(" \\boxed{")
        assert row["natural_answer_ids"]
        assert row["natural_answer"], "its own box stands after the marker"
    assert natural >= 2
