r"""Times and measures with all their parts, of which Math-Verify (0.9) drops what it cannot read.

To it, `2 \text{ hours } 30 \text{ minutes}` is 2, a.m. is p.m., and 5 cm are 5 m.
"""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction

from .numbers import number_of

# A quantity is kept in the first unit of its dimension; a month has no fixed number of days.
_SIZES: dict[str, dict[str, str]] = {
    "months": {"months?|个月": "1", "years?|yrs?|年": "12"},
    "seconds": {
        "seconds?|secs?|s|秒钟?": "1",
        "minutes?|mins?|分钟?": "60",
        "hours?|hrs?|h|小时": "3600",
        "days?|天": "86400",
        "weeks?|周|星期": "604800",
    },
    "metres": {
        "mm|毫米": "0.001",
        "cm|centimet(?:er|re)s?|厘米": "0.01",
        "m|met(?:er|re)s?|米": "1",
        "km|kilomet(?:er|re)s?|千米|公里": "1000",
        "in|inch(?:es)?": "0.0254",
        "ft|foot|feet": "0.3048",
        "mi|miles?": "1609.344",
    },
    "dollars": {"dollars?|美元": "1", "cents?|¢": "0.01"},
    "grams": {"mg|毫克": "0.001", "g|grams?|克": "1", "kg|kilograms?|千克|公斤": "1000"},
}
_UNITS = {
    word: (dimension, Fraction(size))
    for dimension, units in _SIZES.items()
    for word, size in units.items()
}
_NUMBER = r"(?:\d[\d.,/ ]*|(?:\d+\s*)?\\[dt]?frac\s*\{\d+\}\s*\{\d+\})"
_PART = rf"(?P<number>{_NUMBER})\s*(?P<unit>{'|'.join(_UNITS)})(?![a-z])"
_BETWEEN = r"\s*(?:,|and\b|零|又)?\s*"
_PARTS = re.compile(rf"(?:{re.sub('[?]P<[a-z]+>', '?:', _PART)}{_BETWEEN})+[.。]?", re.IGNORECASE)
_CLOCK = re.compile(
    r"(?P<before>上午|凌晨|早上|下午|晚上)?\s*(?P<hour>\d{1,2})"
    r"(?:[:点](?:(?P<minute>\d{2})(?:[:分](?P<second>\d{2})?)?)?)?\s*(?P<half>[ap]\.?\s?m\.?)?",
    re.IGNORECASE,
)


def compared_quantities(one: str, other: str) -> bool | None:
    """Whether two texts are the same measure, or time of day; None where that is not seen."""
    texts = [_worded(text) for text in (one, other)]
    a, b = map(_time_of_day, texts)
    if a is not None and b is not None and (a[1] or b[1]):
        return a == b
    (mine, parts), (theirs, others) = map(_measure, texts)
    if mine and theirs:
        return mine == theirs
    if max(parts, others) > 1 and (bare := number_of(texts[0 if theirs else 1])) is not None:
        # Of several parts none is the whole; a sum of money alone needs no unit.
        return (mine or theirs) == {"dollars": bare}
    return None


def _worded(text: str) -> str:
    """A text without LaTeX around its words, with dollars, noon and midnight as all others."""
    text = re.sub(r"\\(?:text|mathrm|textrm)\s*\{([^{}]*)\}|\\[,;: ]|~", r" \1 ", text)
    text = re.sub(rf"\\?\$\s*({_NUMBER})\s*$", r"\1 dollars", text).replace("$", " ")
    for name, half in (("noon", "p.m."), ("midnight", "a.m.")):
        text = re.sub(
            rf"(?:\b12(?::00)?\s*)?\b{name}\b", f"12:00 {half}", text, flags=re.IGNORECASE
        )
    return text.strip()


def _time_of_day(text: str) -> tuple[int, bool] | None:
    """Seconds, and whether it is known of which half of the day."""
    if (found := _CLOCK.fullmatch(text)) is None or text.isdigit():
        return None
    hour, minute, second = (int(found[name] or 0) for name in ("hour", "minute", "second"))
    marked = (found["half"] or "")[:1].lower() or found["before"]
    if marked:
        if not 1 <= hour <= 12 and found["half"]:
            return None
        hour = hour % 12 + 12 * (marked in ("p", "下午", "晚上"))
    return 3600 * hour + 60 * minute + second, bool(marked) or not 1 <= hour <= 12


def _measure(text: str) -> tuple[Counter[str], int]:
    """A quantity by dimension, and of how many parts it is written; empty where it is none."""
    total, parts = Counter[str](), 0
    for found in re.finditer(_PART, text, re.IGNORECASE) if _PARTS.fullmatch(text) else ():
        value = number_of(found["number"].strip(" ,"))
        if value is None:
            return Counter(), 0
        word = next(one for one in _UNITS if re.fullmatch(one, found["unit"], re.IGNORECASE))
        dimension, size = _UNITS[word]
        total[dimension] += value * size  # type: ignore[assignment]  # fractions count as well
        parts += 1
    return total, parts
