"""Three fixed prompts, by which anyone can see that a published policy still says what it said.

At publishing, the stop probabilities at every step end of three written traces are stored in
`probes.json`; verifying computes them again from the repository's weights and the pinned base.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from modeling_ospruner import OSPrunerForCausalLM
from ospruner.eval.problems.problem import Problem, user_message
from ospruner.eval.problems.task import prompt_token_ids
from ospruner.provenance import read_object
from ospruner.scoring import stop_probabilities

PROBES_FILE = "probes.json"
FORMAT_VERSION = 1
# Largest difference in log-odds that another machine explains, by the base's dtype. Probabilities
# themselves would not do: most are small, and near 0 any two policies look alike.
TOLERANCES = {"float32": 0.01, "float16": 0.05, "bfloat16": 0.25}
PROBES = {
    "What is 17 * 23?": (
        "I need 17 * 23.\n\n17 * 20 = 340 and 17 * 3 = 51.\n\nSo 17 * 23 = 340 + 51 = 391.\n\n"
        "Let me check: 391 / 17 = 23. Yes.\n\n"
    ),
    "Solve 3x + 54 = 102 for x.": (
        "Subtract 54 from both sides: 3x = 48.\n\nDivide by 3: x = 16.\n\n"
        "Wait, is 102 - 54 = 48? 54 + 48 = 102, yes.\n\nSo x = 16.\n\n"
    ),
    "How many primes are there below 20?": (
        "The primes are 2, 3, 5, 7, 11, 13, 17, 19.\n\nThat is 8.\n\n"
        "Alternatively: 9 is 3 * 3 and 15 is 3 * 5, so they are out.\n\nThe answer is 8.\n\n"
    ),
}

__all__ = ["PROBES_FILE", "largest_difference", "load_policy", "probe", "read_probes"]


def load_policy(folder: Path) -> OSPrunerForCausalLM:
    """A policy's folder with the base that it pins, by the installed code and no other.

    Raises:
        ValueError, OSError: As `OSPrunerForCausalLM.from_pretrained`.
    """
    placed: dict[str, Any] = {"device_map": "auto"} if torch.cuda.is_available() else {}
    return OSPrunerForCausalLM.from_pretrained(folder, dtype="auto", **placed)


def probe(model: OSPrunerForCausalLM) -> dict[str, Any]:
    """What a policy says about the three probes, JSON-ready.

    Raises:
        ValueError: The policy has no tokenizer, or a probability is not a number.
    """
    fmt, tokenizer = model.token_format, model.tokenizer
    if tokenizer is None:
        raise ValueError("model has no tokenizer: load it from the policy's folder")
    opening = list(fmt.think_start_ids)
    answers: list[dict[str, Any]] = []
    for problem, trace in PROBES.items():
        asked = user_message(Problem("probe", problem, ""), fmt.format)
        prompt = prompt_token_ids("probe", asked, tokenizer, fmt)
        if not any(prompt[i : i + len(opening)] == opening for i in range(len(prompt))):
            prompt += opening  # the template leaves that to the base
        one = {
            "problem": problem,
            "prompt_ids": prompt,
            "trace_ids": tokenizer.encode(trace, add_special_tokens=False),
        }
        answers.append(one | {"stop_probabilities": _say(model, one)})
    return {"format_version": FORMAT_VERSION, "dtype": _dtype(model), "probes": answers}


def read_probes(folder: Path) -> dict[str, Any]:
    """The stored probes of a folder.

    Raises:
        ValueError: There are none, or those of another version.
    """
    path = folder / PROBES_FILE
    if not path.is_file():
        raise ValueError(f"{path} does not exist: the policy was not published by ospruner")
    stored = read_object(path)
    if stored.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format_version {stored.get('format_version')!r}; this version of "
            f"ospruner reads {FORMAT_VERSION}"
        )
    return stored


def largest_difference(model: OSPrunerForCausalLM, stored: dict[str, Any]) -> tuple[float, float]:
    """How far a policy now is from what was stored, over all steps of all probes.

    Returns:
        The largest difference of a stop probability's log-odds, and the largest tolerated.
    """
    now, then = (
        torch.tensor([p for one in answers for p in one], dtype=torch.float64).logit(eps=1e-6)
        for answers in (
            [_say(model, one) for one in stored["probes"]],
            [one["stop_probabilities"] for one in stored["probes"]],
        )
    )
    tolerance = max(TOLERANCES.get(name, 0.01) for name in (stored["dtype"], _dtype(model)))
    return float((now - then).abs().max()), tolerance


def _say(model: OSPrunerForCausalLM, one: dict[str, Any]) -> list[float]:
    """Stop probabilities at the step ends of one probe, to six digits."""
    ids = [*one["prompt_ids"], *one["trace_ids"]]
    values = stop_probabilities(model, ids, prompt_length=len(one["prompt_ids"]))
    if not bool(torch.isfinite(values).all()):
        raise ValueError(
            f"the policy says {values.tolist()} about {one['problem']!r}: its weights are broken"
        )
    return [float(f"{value:.6g}") for value in values.double().tolist()]


def _dtype(model: OSPrunerForCausalLM) -> str:
    return str(model.base.dtype).removeprefix("torch.")
