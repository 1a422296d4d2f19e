from __future__ import annotations

import gzip
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ospruner.eval import grading
from ospruner.eval.grading import MAX_ANSWER_CHARS, equal, extract_boxed, grade, read_box


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One second a computation, and no verdict remembered from before or for after."""
    monkeypatch.setattr(grading, "TIME_LIMIT_SECONDS", 1)
    grading._ask.cache_clear()
    yield
    grading._ask.cache_clear()


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}} and }", r"\frac{1}{2}"),
        (r"\boxed{\boxed{3}}", r"\boxed{3}"),
        (r"\boxed {7}", "7"),
        (r"\fbox{8}", "8"),
        (r"\boxed{\left\{1, 2\right.}", r"\left\{1, 2\right."),
        (r"\boxed{a \\} b", "a \\\\"),
        (r"\boxed{}", ""),
        (r"\boxed{never closed", None),
        (r"\boxed{5} then \boxed{6", "5"),
        (r"} \boxed{1 \boxed{5}", "5"),
        (r"{a \boxed{6}", "6"),
        (r"\\boxed{7}", None),
        ("\\boxed{" * 20_000, None),
        ("no box", None),
        ("", None),
    ],
)
def test_extract_boxed(text: str, content: str | None) -> None:
    assert extract_boxed(text) == content


@pytest.mark.parametrize(
    ("text", "content"),
    [("42} more", "42"), (r"\frac{1}{2}}", r"\frac{1}{2}"), ("12", None), ("", None), ("\\", None)],
)
def test_read_box(text: str, content: str | None) -> None:
    assert read_box(text) == content


@given(st.text(st.characters(codec="utf-8", exclude_characters="{}\\"), max_size=30), st.text())
def test_box_round_trip(content: str, before: str) -> None:
    assert extract_boxed(rf"\boxed{{{content}}}") == content.strip()
    extract_boxed(before)
    read_box(before)


@pytest.mark.parametrize(
    ("answer", "reference", "verdict"),
    [
        ("42", "42", True),
        ("042", "42", True),
        ("+42", "42", True),
        ("-42", "42", False),
        ("1,234", "1234", True),
        ("12,34", "1234", False),
        ("43", "42", False),
        ("42.0", "42", True),
        (r"\frac12", "1/2", True),
        ("0.5", r"\frac{1}{2}", True),
        (r"\frac{2}{4}", r"\frac{1}{2}", True),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3, \frac{\pi}{2})", True),
        (r"x^2+2x+1", r"(x+1)^2", True),
        (r"x+1", r"x+2", False),
        (r"\text{Monday}", "Monday", True),
        (r"\text{Tuesday}", r"\text{Monday}", False),
        (r"10\%", r"10\%", True),
        (r"90^\circ", "90", True),
    ],
)
def test_grade(answer: str, reference: str, verdict: bool) -> None:
    assert grade(answer, reference) is verdict


def test_integers_need_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading, "_ask", lambda *_: pytest.fail("Math-Verify was asked"))
    assert grade("7", "7") is True
    assert grade(" 8 ", "7") is False
    assert equal("x+1", "x+1") is True


@pytest.mark.parametrize("answer", [None, "", "   ", "7" * 100_000, "{" * 100_000, "\x00" * 5000])
def test_no_verdict_at_once(answer: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading, "_ask", lambda *_: pytest.fail("Math-Verify was asked"))
    assert grade(answer, "7") is None
    assert equal(answer, "7") is None


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("answer", ["9^{9^{9^9}}", "100000000!", "(" * MAX_ANSWER_CHARS])
def test_pathological_answers_get_no_verdict_and_harm_nobody(answer: str) -> None:
    assert grade(answer, "42") is None
    assert grade("42.0", "42") is True  # the next answer is served


@pytest.mark.usefixtures("impatient")
def test_a_hung_child_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert grade("42.0", "42") is True
    process = grading._WORKER._process
    assert process is not None
    monkeypatch.setattr(grading, "_read_line", lambda *_: None)  # no reply within the limit
    assert grade("43.0", "42") is None
    assert process.poll() is not None
    monkeypatch.undo()
    assert grade("44.0", "44") is True


def test_a_dead_child_is_replaced() -> None:
    assert grade("1/3", r"\frac{1}{3}") is True
    process = grading._WORKER._process
    assert process is not None
    process.kill()
    process.wait()
    assert grade("1/7", r"\frac{1}{7}") is True


def test_grading_works_in_threads() -> None:
    verdicts: dict[int, bool | None] = {}

    def work(n: int) -> None:
        verdicts[n] = grade(f"{n}.0", str(n))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(100, 108)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verdicts == dict.fromkeys(range(100, 108), True)


def test_a_fork_starts_its_own_child() -> None:
    assert grade("1/11", r"\frac{1}{11}") is True
    pid = os.fork()
    if pid == 0:
        os._exit(0 if grade("2/11", r"\frac{2}{11}") is True else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert grade("3/11", r"\frac{3}{11}") is True


@settings(deadline=None, max_examples=25)
@given(st.text(alphabet="0123456789+-*/^_(){}[]\\,. xπ%$&=<>fracsqrt", max_size=25))
def test_any_text_gets_a_verdict_or_none(text: str) -> None:
    assert grade(text, "42") in (True, False, None)


def test_empty_reference_is_an_error() -> None:
    with pytest.raises(ValueError, match="reference is empty"):
        grade("7", " ")


@pytest.mark.parametrize("name", ["math500", "aime24"])
def test_real_references_are_equal_to_themselves_spelt_otherwise(
    shared_dir: Path, name: str
) -> None:
    path = shared_dir / "data" / f"{name}.jsonl.gz"
    if not path.is_file():
        pytest.skip(f"no {path}")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        answers = [json.loads(line)["answer"] for line in lines][::4]
    verdicts = [grade(f"{answer} ", answer) for answer in answers]
    verdicts += [grade(rf"{{{answer}}}", answer) for answer in answers]
    assert verdicts.count(True) >= 0.95 * len(verdicts)
    assert max(len(answer) for answer in answers) < MAX_ANSWER_CHARS
