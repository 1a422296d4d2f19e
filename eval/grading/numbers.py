r"""Numbers, measures and times as people write them, where Math-Verify misreads them.

Math-Verify (0.9) takes `1e5` for a product, `2 2/3` for 2 times 2/3, `12 345` for a list, and calls
1e-10 and 2e-10 equal, since it rounds to six decimals. Forms that it reads well are left to it, and
so are those that people read in two ways: 1.000 and 1,5. Of what has several parts it drops those
that it cannot read: `2 \text{ hours } 30 \text{ minutes}` is 2, a.m. is p.m., and 5 cm are 5 m.
"""

import re
from collections import Counter
from fractions import Fraction
from typing import NamedTuple

TOLERANCE = Fraction(1, 10**6)
"""Relative, where decimals do not end: as precise as Math-Verify is near 1."""

_CURRENCIES = {
    "$": r"\\?\$|us\\?\$|usd|dollars?|美元",
    "€": r"€|eur|euros?|欧元",
    "£": r"£|gbp|pounds?|英镑",
    "¥": r"¥|cny|rmb|yuan|元|人民币",
}
_SPACE = r"(?:\\[,;:! ]|~|\{,\}|,|\s)"
_DIGITS = rf"\d{{1,3}}(?:{_SPACE}\d{{3}})+(?!\d)|\d+"
_DECIMAL = rf"(?P<whole>{_DIGITS})?(?P<part>\.\d+)?"
_TIMES = r"\s*(?:\\times|\\cdot|[x*×·])\s*"
_POWER = rf"(?:e|{_TIMES}10\s*(?:\^|\*\*))\s*\{{?\(?(?P<power>[+-]?\d{{1,4}})\)?\}}?"
_NUMBER = re.compile(rf"{_DECIMAL}(?:{_POWER})?", re.IGNORECASE)
_OVER = r"(?:(\d+)\s*/\s*(\d+)|\\[dt]?frac\s*(?:\{(\d+)\}\s*\{(\d+)\}|(\d)\s*(\d)))"
_FRACTION = re.compile(rf"(?:(?P<mixed>\d+)(?:\s+|\\ )?)??{_OVER}")
_RECURRING = re.compile(
    r"(?P<whole>\d*)\.(?P<fixed>\d*)"
    r"(?:\\(?:overline|bar|dot)\s*\{?(?P<lined>\d+)\}?|\((?P<round>\d+)\))(?:\.\.\.|\\[lc]?dots|…)?"
)
# A comma behind dots between groups of three, or several such dots, can be read in one way alone.
_CONTINENTAL = re.compile(r"\d{1,3}(?:(?:\.\d{3})+,\d+|(?:\.\d{3}){2,})")
_SCALES = {
    **{"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12},
    **{"万": 10**4, "亿": 10**8},
}
_SCALED = re.compile(rf"(?P<number>.*[\d}}])\s*(?P<scale>{'|'.join(_SCALES)})", re.IGNORECASE)
_ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"),
    "nineteen",
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_SMALL = [*_ONES, *(f"{ten} {one}" for ten in _TENS for one in _ONES[:10])]
_HUNDREDS = (f"{one} hundred {text}" for one in _ONES[1:10] for text in _SMALL)
_BELOW_1000 = {text.removesuffix(" zero"): n for n, text in enumerate([*_SMALL, *_HUNDREDS])}
_SPELLED = re.compile(r"(?:(.+?) billion\b ?)?(?:(.+?) million\b ?)?(?:(.+?) thousand\b ?)?(.*)")
_ANGLE = re.compile(r"(?P<number>.+?)\s*(?:°|\^\s*\{?\s*\\circ\s*\}?|\\degree|degrees?|度)", re.I)


class _Number(NamedTuple):
    value: Fraction
    currency: str
    plain: bool  # Math-Verify reads it well

    @property
    def terminates(self) -> bool:
        """Whether its decimals end, so that nothing need be rounded to write them."""
        bottom = self.value.denominator
        return pow(10, bottom.bit_length(), bottom) == 0


def compared(one: str, other: str) -> bool | None:
    """Whether two texts are the same number; None where Math-Verify is to be asked."""
    a, b = _read(one), _read(other)
    if a is None or b is None:
        return None
    small = max(abs(a.value), abs(b.value)) < Fraction(1, 1000)
    if a.plain and b.plain and not (small and a.value != b.value):
        return None
    if a.currency and b.currency and a.currency != b.currency:
        return False
    if a.terminates and b.terminates:
        return a.value == b.value
    return abs(a.value - b.value) <= TOLERANCE * max(abs(a.value), abs(b.value))


def in_radians(one: str, other: str) -> tuple[str, str]:
    """Two texts; where the one is an angle in degrees and the other has a π, both in radians."""

    def turned(text: str, beside: str) -> str:
        found = _ANGLE.fullmatch(_unwrapped(text)) if re.search(r"\\pi|π", beside) else None
        number = None if found is None else number_of(found["number"])
        if number is None:
            return text
        return rf"\frac{{{number.numerator}\pi}}{{{180 * number.denominator}}}"

    return turned(one, other), turned(other, one)


def number_of(text: str) -> Fraction | None:
    """The number that a text is; None where it is none."""
    return None if (found := _read(text)) is None else found.value


def _read(text: str) -> _Number | None:
    text = text.strip()
    if len(text) > 2 and text[0] == text[-1] == "$":
        text = text[1:-1].strip()
    text, stop = re.subn(r"(?<=[\d})])\s*[.。]$", "", text)
    text, currency = _without_currency(text)
    value, plain = _value(text)
    if value is None:
        return None
    return _Number(value, currency, plain and not stop and not currency)


def _value(text: str) -> tuple[Fraction | None, bool]:
    """A text's number, None where it is none, and whether Math-Verify reads it well."""
    bare = _unwrapped(text)
    if found := _SCALED.fullmatch(bare):
        scaled = number_of(found["number"])
        return None if scaled is None else scaled * _SCALES[found["scale"].lower()], False
    if (spelled := _spelled(bare)) is not None:
        return Fraction(spelled), False
    sign, text = -1 if text.startswith("-") else 1, re.sub(r"^[+-]?\s*", "", text)
    if found := _RECURRING.fullmatch(text):
        again, fixed = found["lined"] or found["round"], found["fixed"]
        more = Fraction(int(again), 10 ** len(again) - 1) / 10 ** len(fixed)
        return sign * (Fraction(f"{found['whole'] or 0}.{fixed or 0}") + more), False
    if found := _FRACTION.fullmatch(text):
        top, bottom = (int(n) for n in found.groups()[1:] if n is not None)
        whole = int(found["mixed"] or 0)
        return sign * (whole + Fraction(top, bottom)) if bottom else None, not found["mixed"]
    if continental := _CONTINENTAL.fullmatch(text):
        text = text.replace(".", "").replace(",", ".")
    found = _NUMBER.fullmatch(text)
    if found is None or not (found["whole"] or found["part"]):
        return None, False
    digits = re.sub(_SPACE, "", found["whole"] or "0")
    value = Fraction(digits + (found["part"] or "")) * Fraction(10) ** int(found["power"] or 0)
    spaced = re.search(r"[\s~\\{]", found["whole"] or "")
    return sign * value, not (continental or found["power"] or spaced)


def _unwrapped(text: str) -> str:
    """A text without dollars around it, and its words without LaTeX around them."""
    text = re.sub(r"\\(?:text|mathrm)\s*\{\s*([^{}]*?)\s*\}", r" \1", text)
    return re.sub(r"\\[,;:! ]|~", " ", text).strip(" $")


def _spelled(text: str) -> int | None:
    """A whole number in words, as in "two hundred and five"; None where it is none."""
    words = " ".join(text.lower().replace("-", " ").split())
    words = re.sub(r"(?<=hundred|housand|million|billion) and ", " ", words)
    words, minus = re.subn("^(minus|negative) ", "", words)
    if not words:
        return None
    total = 0
    for part in _SPELLED.findall(words)[0]:  # billions, millions, thousands, and the rest
        if (below := _BELOW_1000.get(part or "zero")) is None:
            return None
        total = 1000 * total + below
    return -total if minus else total


def _without_currency(text: str) -> tuple[str, str]:
    """A text without the sign or word of a currency before or behind its number."""
    bare = re.sub(r"\\(?:text|mathrm)\s*\{\s*([^{}]*?)\s*\}", r"\1", text)
    for name, words in _CURRENCIES.items():
        for pattern in (rf"([+-]?)\s*(?:{words})\s*(.*\d.*)", rf"()(.*\d.*?)\s*(?:{words})"):
            if found := re.fullmatch(pattern, bare, re.IGNORECASE):
                return found[1] + found[2], name
    return text, ""


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
_AMOUNT = r"(?:\d[\d.,/ ]*|(?:\d+\s*)?\\[dt]?frac\s*\{\d+\}\s*\{\d+\})"
_PART = rf"(?P<number>{_AMOUNT})\s*(?P<unit>{'|'.join(_UNITS)})(?![a-z])"
_BETWEEN = r"\s*(?:,|and\b|零|又)?\s*"
_PARTS = re.compile(rf"(?:{re.sub('[?]P<[a-z]+>', '?:', _PART)}{_BETWEEN})+[.。]?", re.IGNORECASE)
_CLOCK = re.compile(
    r"(?i)(?P<before>上午|凌晨|早上|下午|晚上)?\s*(?P<hour>\d{1,2})"
    r"(?:[:点](?:(?P<minute>\d{2})(?:[:分](?P<second>\d{2})?)?)?)?\s*(?P<half>[ap]\.?\s?m\.?)?"
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
    text = re.sub(rf"\\?\$\s*({_AMOUNT})\s*$", r"\1 dollars", text).replace("$", " ")
    for name, half in (("noon", "p.m."), ("midnight", "a.m.")):
        text = re.sub(rf"(?i)(?:\b12(?::00)?\s*)?\b{name}\b", f"12:00 {half}", text)
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
