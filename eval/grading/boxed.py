r"""Boxed answers and their grades, by Math-Verify under a time limit.

Most answers are decided here: equal texts and plain integers need no computer algebra. The rest
goes to child processes (`pool.py`), which can be killed.
"""

import atexit
import re
import unicodedata
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache

from .numbers import compared, compared_quantities, in_radians
from .pool import Grade, GradingPool

TIME_LIMIT_SECONDS = 5
"""What one parse or one comparison may take; an answer beyond it stays ungraded."""

MAX_ANSWER_CHARS = 1_000
"""Longer answers stay ungraded: the longest reference of our benchmarks has 53 characters."""

_BRACE = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)
"""What opens a box, what is escaped (the brace of `\\left\\{` opens nothing), a plain brace."""
_AND = r"(?:\band\b|\bor\b|\\text\{ *(?:and|or) *\})"
_JOINED = re.compile(rf"[\s$]*(?:[,;]|{_AND})[\s$]*(?:{_AND}[\s$]*)?")
_ROOT = re.compile(r"([√∛∜])\s*(?:\(((?:[^()]|\([^()]*\))*)\)|\{([^{}]*)\}|(\d+(?:\.\d+)?|\\?\w+))")
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+")
_LOWERED = re.compile("[₀-₉]+")
_FRACTION = re.compile("[¼-¾⅐-⅞]")
_SIGNS = str.maketrans({"−": "-", "∞": r"\infty ", "·": r"\cdot ", "°": r"^\circ "})
_RELATION = r"(?:[<>≤≥≠∈]|\\(?:[lg]eq?(?:slant)?|neq?|lt|gt|in)(?![a-z]))"
_WORD = r"(?:for|where|with|when|if|and)"
_CONDITION = re.compile(
    rf"(?s)(?P<main>.+?)(?:\\[,;: ]|\\q?quad|[\s,;~$])*(?:\((?P<one>[^()]*{_RELATION}.*)\)\s*\$?"
    rf"|(?:[,;]|\\text\s*\{{\s*{_WORD}\s*\}}|\b{_WORD}\b)(?P<other>[^,;()]*{_RELATION}.*))"
)
_INTEGERS = re.compile(r"[\s$]*[a-z]\s*(?:∈|\\in)\s*(?:Z|\\(?:mathbb|mathbf)\s*\{?Z\}?)[\s$]*")
_INTEGER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)")


def read_box(text: str) -> str | None:
    r"""The content of a box that is already open: everything before its closing brace.

    For forced answers, whose `\boxed{` is forced and not part of the generated text.

    Returns:
        The content, stripped; None where the box never closes.
    """
    depth = 1
    for found in _BRACE.finditer(text):
        depth += (found[0] == "{" or found["box"] is not None) - (found[0] == "}")
        if depth == 0:
            return text[: found.start()].strip()
    return None


def extract_boxed(text: str) -> str | None:
    r"""The content of the last closed `\boxed{...}` (or `\fbox{...}`), braces balanced.

    Boxes that only a comma or a word such as "and" parts are read together: `\boxed{1} or
    \boxed{2}` is `1, 2`. A box inside the last one is part of its content. None where there is no
    closed box. One pass, so that a text of nothing but opening boxes is no trap.
    """
    answer, before = None, 0  # what was read so far, and where it ended
    opened: list[re.Match[str] | None] = []  # what opened a box; None for a plain brace
    for found in _BRACE.finditer(text):
        if found[0] == "{" or found["box"]:
            opened.append(found if found["box"] else None)
        elif found[0] == "}" and opened and (box := opened.pop()):
            content = text[box.end() : found.start()].strip()
            joined = answer is not None and _JOINED.fullmatch(text, before, box.start())
            # An enclosing box closes later, and wins.
            answer = f"{answer}, {content}" if joined else content
            before = found.end()
    return answer


_KNOWN = (
    (r"\frac{1}{2}", "0.5", True),
    (r"\sqrt{8}", r"2\sqrt{2}", True),
    ("x^2+2x+1", "(x+1)^2", True),
    (r"\frac{1}{2}", r"\frac{1}{3}", False),
    (r"\sqrt{8}", "3", False),
)
"""Pairs that Math-Verify reads by LaTeX, and what it must say of them."""


@cache
def check_grader() -> None:
    """Lets the grader judge a few known pairs: a broken one would call everything wrong.

    Once a process: what was found to work is not tried again.

    Raises:
        ValueError: it does not start, or misjudges one; with what it said.
    """
    way_out = (
        "nothing can be graded. Install the versions that belong together: pip install "
        "--force-reinstall math-verify latex2sympy2_extended antlr4-python3-runtime==4.13.2"
    )
    for reference, answer, expected in _KNOWN:
        try:
            # A machine that is busy is not broken: nothing here takes long by itself.
            said = _POOL.compare(reference, answer, 12 * TIME_LIMIT_SECONDS)
        except RuntimeError as error:
            raise ValueError(f"{error}: {way_out}") from error
        if said.value is not expected:
            raise ValueError(
                f"the grader is broken: of {answer!r} against {reference!r} it says "
                f"{said.value} ({said.reason or 'without a reason'}), which is {expected}: "
                f"{way_out}"
            )


def equal(a: str | None, b: str | None) -> bool | None:
    """Do two answers mean the same? None where either is missing or there is no verdict."""
    pair = _plain(a), _plain(b)
    value = (_at_once(*pair) or _ask(*pair)).value
    return None if value is None else bool(value)


def compare_many(pairs: Sequence[tuple[str | None, str | None]]) -> list[Grade]:
    """Compares many pairs (reference, answer), several at once in processes of their own.

    An answer that hangs, is unreadable or kills its process gets no verdict, and a reason.

    Returns:
        A verdict for each pair, in order; equal pairs are compared once.
    """
    stripped = [(_plain(reference), _plain(answer)) for reference, answer in pairs]
    known = {pair: _at_once(*pair) for pair in stripped}
    hard = [pair for pair, verdict in known.items() if verdict is None]
    # A process takes a second to start: a few pairs are not worth many.
    with ThreadPoolExecutor(min(_POOL.size, 1 + len(hard) // 8)) as threads:
        asked = dict(zip(hard, threads.map(lambda pair: _ask(*pair), hard), strict=True))
    return [known[pair] or asked[pair] for pair in stripped]


def _at_once(reference: str, answer: str) -> Grade | None:
    """The verdict where no computer algebra is needed."""
    if not reference or not answer:
        return Grade(None, "no answer")
    if max(len(reference), len(answer)) > MAX_ANSWER_CHARS:
        return Grade(None, "too long")
    if reference == answer:
        return Grade(True)
    if _INTEGER.fullmatch(reference) and _INTEGER.fullmatch(answer):
        return Grade(int(reference.replace(",", "")) == int(answer.replace(",", "")))
    same = compared(reference, answer)
    same = compared_quantities(reference, answer) if same is None else same
    return None if same is None else Grade(same)


@lru_cache(maxsize=200_000)
def _ask(reference: str, answer: str) -> Grade:
    reference, answer = in_radians(reference, answer)
    (main, condition), (other, its) = _apart(reference), _apart(answer)
    lone = condition or its
    both = bool(condition and its)
    if not lone or (not both and re.search(_RELATION, other if condition else main)):
        return _POOL.compare(reference, answer, TIME_LIMIT_SECONDS)
    if not both and not _INTEGERS.fullmatch(lone):
        return Grade(False)
    verdict = _at_once(main, other) or _POOL.compare(main, other, TIME_LIMIT_SECONDS)
    if not verdict.value or not both:
        return verdict
    return _at_once(condition, its) or _POOL.compare(condition, its, TIME_LIMIT_SECONDS)


def _apart(text: str) -> tuple[str, str]:
    """A curve, or a term, and the condition on its side; "" where there is none."""
    found = _CONDITION.fullmatch(text)
    if found is None or re.search(_RELATION, found["main"]):
        return text, ""
    return found["main"], (found["one"] or found["other"]).strip()


def _plain(text: str | None) -> str:
    r"""A text in signs that Math-Verify reads: x² is x^{2}, √n is \sqrt{n}, ½ is 1/2."""

    def root(found: re.Match[str]) -> str:
        degree = {"√": "", "∛": "[3]", "∜": "[4]"}[found[1]]
        return rf"\sqrt{degree}{{{found[2] or found[3] or found[4]}}}"

    text = _RAISED.sub(lambda found: f"^{{{found[0]}}}", text or "")
    text = _LOWERED.sub(lambda found: f"_{{{found[0]}}}", text)
    text = _FRACTION.sub(lambda found: f" {unicodedata.normalize('NFKC', found[0])}", text)
    text = unicodedata.normalize("NFKC", text.translate(_SIGNS)).replace("⁄", "/")
    return _ROOT.sub(root, text.replace("−", "-")).strip()


_POOL = GradingPool()
atexit.register(_POOL.close)
