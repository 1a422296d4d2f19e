"""Results made up for tests: nothing was measured."""

from __future__ import annotations

import math
from typing import Any

from ospruner.eval.results import ENDS, Estimate, parameter_text


def around(value: float, half: float) -> Estimate:
    return Estimate(value, value - half, value + half)


def spread(name: str, number: Estimate) -> dict[str, float]:
    """The columns that hold a number under a name."""
    return {name + end: one for end, one in zip(ENDS, number, strict=True)}


def make_result(
    method: str,
    accuracy: float,
    tokens: float,
    parameter: float | None = None,
    parameter_name: str = "",
    chosen: bool = False,
    problems: int = 1500,
    kind: str = "rule",
) -> dict[str, Any]:
    """A row of a frame of results (`frame_of`)."""
    aes, unknown = 1 - tokens / 200 + 3 * (accuracy - 0.6), Estimate(math.nan, math.nan, math.nan)
    numbers = {
        **{"accuracy": around(accuracy, 0.02), "aes": around(aes, 0.05)},
        **dict.fromkeys(("reduction", "total_reduction"), around(1 - tokens / 200, 0.01)),
        **{"tokens": around(tokens, 5), "generated_tokens": around(tokens + 6, 5)},
        **{"helped": around(0.1, 0.01), "harmed": around(0.05, 0.01)},
        **dict.fromkeys(("truncated", "probe_tokens"), around(0.0, 0.0)),
        "answer_tokens": around(6, 0.1),
        "reward@1e-3": around(accuracy - 0.001 * tokens, 0.02),
        **dict.fromkeys(("time_ratio", "tokens_per_second", "flops", "flops_ratio"), unknown),
    }
    columns = {key: x for name, one in numbers.items() for key, x in spread(name, one).items()}
    return columns | {
        **{"kind": kind, "method": method, "chosen": chosen, "traces": 1500, "problems": problems},
        **{"parameter": parameter, "parameter_name": parameter_name},
        "setting": parameter_text(parameter, parameter_name),
        "aes_label": "absolute, α=1, β=3, γ=5",
    }
