import importlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ospruner.eval.grading import boxed, worker
from ospruner.eval.grading.boxed import (
    MAX_ANSWER_CHARS,
    compare_many,
    equal,
    extract_boxed,
    read_box,
)
from ospruner.eval.grading.pool import Grade, GradingPool


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One second a computation, and no verdict remembered from before or for after."""
    monkeypatch.setattr(boxed, "TIME_LIMIT_SECONDS", 1)
    boxed._ask.cache_clear()
    yield
    boxed._ask.cache_clear()


@pytest.fixture
def one_worker(monkeypatch: pytest.MonkeyPatch, impatient: None) -> Iterator[GradingPool]:
    pool = GradingPool(1)
    monkeypatch.setattr(boxed, "_POOL", pool)
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("text", "content"),
    [
        *((r"so \boxed{42}.", "42"), (r"\boxed{1} no, \boxed{2}", "2"), (r"\boxed {7}", "7")),
        *((r"\boxed{\frac{1}{2}} and }", r"\frac{1}{2}"), (r"\boxed{\boxed{3}}", r"\boxed{3}")),
        *((r"\boxed{\left\{1, 2\right.}", r"\left\{1, 2\right."), (r"\boxed{a \\} b", "a \\\\")),
        *((r"\fbox{8}", "8"), (r"\boxed{}", ""), (r"\boxed{never closed", None)),
        *((r"\boxed{5} then \boxed{6", "5"), (r"\boxed{1}, \boxed{2} and $\boxed{3}$", "1, 2, 3")),
        *((r"\boxed{1} or \boxed{2}", "1, 2"), (r"\boxed{1}. So \boxed{2}", "2")),
        *((r"} \boxed{1 \boxed{5}", "5"), (r"{a \boxed{6}", "6"), (r"\\boxed{7}", None)),
        *(("\\boxed{" * 20_000, None), ("no box", None), ("", None)),
    ],
)
def test_extract_boxed(text: str, content: str | None) -> None:
    assert extract_boxed(text) == content


@given(st.text(st.characters(codec="utf-8", exclude_characters="{}\\"), max_size=30), st.text())
def test_what_stands_in_a_box_is_read(content: str, before: str) -> None:
    assert extract_boxed(rf"\boxed{{{content}}}") == content.strip()
    assert read_box(f"{content}}} more") == content.strip()
    assert read_box(content) is None
    assert read_box(r"\frac{1}{2}}") == r"\frac{1}{2}"
    extract_boxed(before)
    read_box(before)


def test_what_needs_no_child_is_decided_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boxed, "_ask", lambda *_: pytest.fail("Math-Verify was asked"))
    assert compare_many([]) == []
    assert [equal("7", "7"), equal("7", " 8 "), equal("x+1", "x+1")] == [True, False, True]
    for answer in (None, "", "   ", "7" * 5000, "{" * 5000, "\x00" * 5000):
        assert equal("7", answer) is equal(answer, "7") is None
        reason = "too long" if (answer or "").strip() else "no answer"
        assert compare_many([("7", answer)]) == [Grade(None, reason)]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("answer", ["9^{9^{9^9}}", "100000000!", "(" * MAX_ANSWER_CHARS])
def test_pathological_answers_get_no_verdict_and_harm_nobody(answer: str) -> None:
    (verdict,) = compare_many([("42", answer)])
    assert verdict.value is None
    assert verdict.reason == "time limit" or not answer.startswith("9^")
    assert equal("42", "42.0") is True  # the next answer is served


def test_a_hung_child_is_replaced(one_worker: GradingPool) -> None:
    assert equal("42", "42.0") is True
    process = one_worker.idle.queue[0]
    assert process is not None
    own = os.getpgid(process.pid), os.getsid(process.pid)
    assert own == (process.pid, os.getsid(0))  # Ctrl-C is not for it, and no autogroup starves it
    process.send_signal(signal.SIGSTOP)  # it hangs where no signal of its own reaches it
    assert compare_many([("42", "43.0")]) == [Grade(None, "time limit")]
    assert process.poll() is not None
    assert equal("44", "44.0") is True


def test_a_child_that_dies_of_an_answer_gives_none_and_a_reason(
    one_worker: GradingPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parser that crashes its process: the next answers are graded all the same."""
    real = importlib.import_module("math_verify").__path__[0]
    (tmp_path / "math_verify.py").write_text(
        f"import os, sys\nsys.path.insert(0, {str(Path(real).parent)!r})\n__path__ = [{real!r}]\n"
        "from math_verify import grader, parser\nverify = grader.verify\n"
        "def parse(text, **options):\n"
        "    return os.abort() if 'boom' in text else parser.parse(text, **options)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pairs = [(r"\frac{1}{5}", "boom"), (r"\frac{1}{5}", "0.2"), ("7", "boom^2"), ("7", "7.0")]
    crash = Grade(None, "crash")
    assert compare_many(pairs) == [crash, Grade(True), crash, Grade(True)]


def test_pairs_run_side_by_side_and_equal_ones_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Mock(wraps=boxed._ask.__wrapped__)
    monkeypatch.setattr(boxed, "_ask", asked)
    pairs: list[Any] = [(rf"\frac{{{n}}}{{7}}", f"{n + n % 2}/7") for n in range(24)]
    expected = [Grade(n % 2 == 0) for n in range(24)]
    verdicts = compare_many([*pairs, *pairs[:6], ("7", None), ("8", "8")])
    assert verdicts == [*expected, *expected[:6], Grade(None, "no answer"), Grade(True)]
    assert asked.call_count == 24
    assert sum(one is not None for one in boxed._POOL.idle.queue) <= min(boxed._POOL.size, 4)


def test_the_grader_is_checked_by_its_own_judgements(monkeypatch: pytest.MonkeyPatch) -> None:
    boxed.check_grader.cache_clear()
    boxed.check_grader()
    boxed.check_grader.cache_clear()
    monkeypatch.setattr(boxed._POOL, "compare", lambda *_: Grade(True))
    with pytest.raises(ValueError, match="it says True .*, which is False: nothing can be graded"):
        boxed.check_grader()
    monkeypatch.undo()
    monkeypatch.setattr(boxed, "_POOL", GradingPool(1))
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(ValueError, match="the grading process did not start.* pip install"):
        boxed.check_grader()


def test_a_fork_starts_its_own_child() -> None:
    assert equal(r"\frac{1}{11}", "1/11") is True
    if (pid := os.fork()) == 0:
        os._exit(0 if equal(r"\frac{2}{11}", "2/11") is True else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert equal(r"\frac{3}{11}", "3/11") is True


@settings(deadline=None, max_examples=25)
@given(st.text(alphabet="0123456789+-*/^_(){}[]\\,. xπ%$&=<>fracsqrt", max_size=25))
def test_any_text_gets_a_verdict_or_none(text: str) -> None:
    assert equal("42", text) in (True, False, None)


def test_a_table_of_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grades by kind; what Math-Verify gives by itself stands beside them."""
    lines = Path(__file__).with_name("grades.tsv").read_text("utf-8").splitlines()[1:]
    rows = [re.sub(r"\\(u2009|xa0)", " ", line).split("\t") for line in lines]
    assert len(rows) >= 260
    words: dict[float | None, str] = {True: "right", False: "wrong", None: "none"}
    pairs = [(row[1], row[2]) for row in rows]
    for asked in (pairs, [pair[::-1] for pair in pairs]):
        verdicts = [words[verdict.value] for verdict in compare_many(asked)]
        assert [row for row, said in zip(rows, verdicts, strict=True) if said != row[3]] == []
    some = rows[::8]
    monkeypatch.setattr(worker, "_roots_apart", lambda reading: reading)
    alone = [words[worker.verdict(row[1], row[2], 5)[0]] for row in some]
    assert alone == [row[4] for row in some]
