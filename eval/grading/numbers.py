r"""Numbers as people write them, where Math-Verify misreads them.

Math-Verify (0.9) takes `1e5` for a product, `2 2/3` for 2 times 2/3, `12 345` for a list, and calls
1e-10 and 2e-10 equal, since it rounds to six decimals. Forms that it reads well are left to it.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

__all__ = ["compared", "number_of"]

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
_NUMBER = re.compile(rf"(?P<sign>[+-]?)\s*{_DECIMAL}(?:{_POWER})?", re.IGNORECASE)
_OVER = r"(?:(\d+)\s*/\s*(\d+)|\\[dt]?frac\s*\{(\d+)\}\s*\{(\d+)\})"
_MIXED = re.compile(rf"(?P<sign>[+-]?)\s*(\d+)(?:\s+|\\ )?{_OVER}")
_FRACTION = re.compile(rf"(?P<sign>[+-]?)\s*{_OVER}")


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


def number_of(text: str) -> Fraction | None:
    """The number that a text is; None where it is none."""
    found = _read(text)
    return None if found is None else found.value


def _read(text: str) -> _Number | None:
    text = text.strip()
    if len(text) > 2 and text[0] == text[-1] == "$":
        text = text[1:-1].strip()
    text, stop = re.subn(r"(?<=[\d})])\s*[.。]$", "", text)
    text, currency = _without_currency(text)
    plain = not stop and not currency
    if found := _FRACTION.fullmatch(text):
        top, bottom = (int(n) for n in found.groups()[1:] if n is not None)
        return _signed(Fraction(top, bottom), found, currency, plain) if bottom else None
    if found := _MIXED.fullmatch(text):
        whole, top, bottom = (int(n) for n in found.groups()[1:] if n is not None)
        value = whole + Fraction(top, bottom) if bottom else None
        return None if value is None else _signed(value, found, currency, False)
    found = _NUMBER.fullmatch(text)
    if found is None or not (found["whole"] or found["part"]):
        return None
    digits = re.sub(_SPACE, "", found["whole"] or "0")
    value = Fraction(digits + (found["part"] or "")) * Fraction(10) ** int(found["power"] or 0)
    spaced = re.search(r"[\s~\\{]", found["whole"] or "") is not None
    return _signed(value, found, currency, plain and not found["power"] and not spaced)


def _signed(value: Fraction, found: re.Match[str], currency: str, plain: bool) -> _Number:
    return _Number(-value if found["sign"] == "-" else value, currency, plain)


def _without_currency(text: str) -> tuple[str, str]:
    """A text without the sign or word of a currency before or behind its number."""
    bare = re.sub(r"\\(?:text|mathrm)\s*\{\s*([^{}]*?)\s*\}", r"\1", text)
    for name, words in _CURRENCIES.items():
        for pattern in (rf"([+-]?)\s*(?:{words})\s*(.*\d.*)", rf"()(.*\d.*?)\s*(?:{words})"):
            if found := re.fullmatch(pattern, bare, re.IGNORECASE):
                return found[1] + found[2], name
    return text, ""
