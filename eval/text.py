"""Numbers and tables as text: one way for terminal, cards, reports and names."""

from __future__ import annotations

import math
from collections.abc import Sequence


def number_text(value: float, digits: int, *, signed: bool = False) -> str:
    """A number of so many decimals, without minus zero, thousands apart; – for NaN."""
    sign = "+" if signed else ""
    return "–" if math.isnan(value) else f"{round(value, digits) + 0.0:{sign},.{digits}f}"


def price_name(price: float) -> str:
    """A lambda as it stands in names and tables: 1e-4, 2.5e-5, 0."""
    if price == 0:
        return "0"
    mantissa, _, exponent = f"{price:.6e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def parameter_text(parameter: float | None, name: str) -> str:
    """A rule's parameter as tables and pictures write it: price=5e-4, ≥.70, 110 tokens, or ""."""
    if parameter is None:
        return ""
    if name == "price":
        return f"price={price_name(parameter)}"
    if name == "threshold" and abs(parameter) >= 2**31 - 1:  # as far as a rule's range goes
        return f"≥{'-' * (parameter < 0)}∞"
    if name == "threshold":
        # Of quantiles as many digits as tell them apart.
        digits = f"{parameter:.2f}" if round(parameter, 2) == parameter else f"{parameter:g}"
        return f"≥{digits}".replace("0.", ".", 1)
    if name == "step":
        return f"step {parameter:g}"
    if name == "nats":
        return f"≤{parameter:.3g} nats"
    return f"{parameter:g} {name}".rstrip()


# Our own: pandas' to_markdown needs one more package, tabulate.
def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in GitHub's markdown, all columns but the first aligned to the right."""
    rule = [":--", *["--:"] * (len(columns) - 1)]
    lines = [[cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in (columns, rule, *lines))
