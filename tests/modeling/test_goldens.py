"""Generate gives what it gave before the uploaded files were rewritten.

`goldens.json` was written by the old code. Each case is a policy of seeded weights on a seeded
base, a batch of prompts, and arguments of generate; what stands in the file are the tokens, the
records, or the type of the error.
"""

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from ospruner.demo.shipped import Reasoner
from ospruner.train.untrained import untrained

from ..conftest import _make_tiny_base
from .families import ORDINARY, make_base, padded_prompts

GOLDENS = Path(__file__).with_name("goldens.json")
RANGE = (1e-4, 1e-2)
SAMPLED = {"do_sample": True, "temperature": 0.9, "top_p": 0.95, "top_k": 0}
QUESTIONS = [
    "<|user|>What is 3 + 4 * 5?<|assistant|><think>\n",
    "<|user|>Ann has 3 apples and buys 4 more. How many has she?<|assistant|><think>\n",
    "<|user|>17 - 9<|assistant|><think>\n",
]


@dataclass(frozen=True)
class Case:
    """One call of generate."""

    name: str
    base: str  # of `ORDINARY`, or "tiny", or "reasoner"
    tuning: str = "queries"
    layers: int = 2
    priced: bool = False
    stop_policy: Any = True
    arguments: dict[str, Any] = field(default_factory=dict)
    rows: int = 2
    natural: bool = False  # the base is biased to end its thinking itself
    prompt: str = ""  # in place of the usual prompts


def cases() -> Iterator[Case]:
    """All of them."""
    for name in ORDINARY:
        yield Case(f"{name} layers", name, "layers")
        if name != "nemotron_h":
            yield Case(f"{name} queries", name)
    bold = {"mode": "threshold", "threshold": 0.2}
    settings: dict[str, Any] = {
        "plain draws": True,
        "seed": {"seed": 11},
        "first index": {"first_sample_index": 5},
        "threshold": bold,
        "always": {"threshold": 0.0},
        "never": {"threshold": 1.0},
        "budget": {"threshold": 1.0, "max_thinking_tokens": 12},
        "floor": {"threshold": 0.0, "min_thinking_tokens": 15},
        "free": {"seed": 1, "answer": "free"},
        "tools": {"threshold": 0.0, "answer": "tools"},
        "wind down": {"threshold": 0.0, "wind_down": "So now 7.\n"},
        "short answers": {"threshold": 0.0, "max_answer_tokens": 3},
        "sampled answers": {"threshold": 0.0, "answer_do_sample": True},
        "re-entry": {"threshold": 0.0, "mask_reentry": False},
    }
    for label, stop_policy in settings.items():
        yield Case(label, "tiny", stop_policy=stop_policy, arguments=SAMPLED)
        yield Case(f"{label}, layers", "tiny", "layers", stop_policy=stop_policy)
    yield Case("head alone", "tiny", layers=0, stop_policy=bold)
    yield Case("one row", "tiny", "layers", rows=1, stop_policy=bold)
    yield Case("five rows", "tiny", rows=5, arguments=SAMPLED)
    yield Case("natural ends", "tiny", natural=True, stop_policy={"threshold": 1.0})
    yield Case(
        "natural, free", "tiny", natural=True, stop_policy={"threshold": 1, "answer": "free"}
    )
    yield Case("natural, drawn", "tiny", "layers", natural=True, arguments=SAMPLED, rows=5)
    closed = "<|user|>3<|assistant|><think>\n3 + 4\n\n</think>\n"
    yield Case("closed prompt", "tiny", prompt=closed, rows=1)
    yield Case("opened prompt", "tiny", prompt=f"{QUESTIONS[0]}So 3.\n\nWait", rows=1)
    yield Case("several texts", "tiny", arguments={**SAMPLED, "num_return_sequences": 2})
    yield Case("static cache", "tiny", arguments={"cache_implementation": "static"})
    yield Case("prompt in pieces", "tiny", "layers", arguments={"prefill_chunk_size": 4})
    for price in (None, 0.0, 1e-3, 1e-2):
        said = {} if price is None else {"price": price}
        yield Case(f"price {price}", "tiny", priced=True, stop_policy=said, arguments=SAMPLED)
        yield Case(f"demo {price}", "reasoner", priced=True, stop_policy=said, rows=3)
    yield Case("demo sampled", "reasoner", priced=True, arguments=SAMPLED, rows=3)
    yield Case("demo layers", "reasoner", "layers", 1, stop_policy=bold, rows=3)
    wrong: dict[str, tuple[Any, dict[str, Any]]] = {
        "unknown key": ({"treshold": 0.5}, {}),
        "threshold above 1": ({"threshold": 1.5}, {}),
        "no number": ({"threshold": "0.5"}, {}),
        "other price": ({"price": 2e-3}, {}),
        "no promise": ({"max_loss": 0.02}, {}),
        "beams": (True, {"num_beams": 2}),
        "prompt lookup": (True, {"prompt_lookup_num_tokens": 3}),
        "no cache": (True, {"use_cache": False}),
        "guidance": (True, {"guidance_scale": 2.0}),
        "flag": ({"mask_reentry": 1}, {}),
        "word": ("yes", {}),
        "two": ({"mode": "sample", "threshold": 0.5}, {}),
    }
    for label, (stop_policy, arguments) in wrong.items():
        yield Case(f"error: {label}", "tiny", stop_policy=stop_policy, arguments=arguments)


@cache
def model_of(
    base_name: str, tuning: str, layers: int, priced: bool, natural: bool, tokenizer: Any
) -> Any:
    """A policy whose weights depend on nothing but its names and seeds."""
    if base_name == "reasoner":
        reasoner = Reasoner()
        base, tokenizer = reasoner.model, reasoner.tokenizer
    elif base_name == "tiny":
        base = _make_tiny_base(tokenizer)
    else:
        base = make_base(base_name, tokenizer)
    model: Any = untrained(
        base,
        tokenizer,
        num_policy_layers=layers,
        tuning=tuning,
        price_range=RANGE if priced else None,
    )
    with torch.no_grad():
        for name, parameter in model.policy.named_parameters():
            drawn = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            noise = torch.randn(parameter.shape, generator=drawn)
            parameter.add_(noise * (0.15 if name.startswith("head.") else 0.02))
        model.policy.head.bias[0] = -2.0
    if base_name != "reasoner":
        kinds = enumerate(model.token_format.kinds)
        breaks = [i for i, kind in kinds if kind & 1 and kind & 8]
        end = model.token_format.think_end_id
        model.base.generation_config.sequence_bias = {
            **{(i,): 2.0 if natural else 4.5 for i in breaks},
            (tokenizer.eos_token_id,): -30.0,
            (end,): 3.5 if natural else -30.0,
        }
    return model


def run(case: Case, tiny_tokenizer: Any) -> dict[str, Any]:
    """What a case gives: tokens and records, or the type of its error."""
    model = model_of(case.base, case.tuning, case.layers, case.priced, case.natural, tiny_tokenizer)
    tokenizer = model.tokenizer
    if case.base not in ("tiny", "reasoner"):
        inputs: dict[str, Any] = padded_prompts(9)
    elif case.prompt:
        inputs = dict(tokenizer(case.prompt, return_tensors="pt", add_special_tokens=False))
    else:
        texts = [QUESTIONS[i % len(QUESTIONS)] for i in range(case.rows)]
        if case.base == "reasoner":
            asked = [text.split("<|user|>")[1].split("<|assistant|>")[0] for text in texts]
            texts = [
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": one}], tokenize=False, add_generation_prompt=True
                )
                for one in asked
            ]
        inputs = dict(tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False))
    inputs.pop("token_type_ids", None)
    arguments = {"max_new_tokens": 60, "do_sample": False, **case.arguments}
    if case.base == "reasoner":
        arguments["max_new_tokens"] = 120
    said = {} if case.stop_policy is True else case.stop_policy
    if isinstance(said, dict):  # without a seed each call draws anew; it was 0
        said = {"seed": 0, **said}
    torch.manual_seed(5)
    try:
        output = model.generate(**inputs, **arguments, stop_policy=said)
    except (TypeError, ValueError) as error:
        return {"error": type(error).__name__}
    width = inputs["input_ids"].shape[1]
    return {
        "tokens": output[:, width:].tolist(),
        "records": [
            {
                "reason": record.reason,
                "thinking_tokens": record.thinking_tokens,
                "step_ends": record.step_ends,
                "probabilities": [round(one, 4) for one in record.probabilities],
                "prices": [float(f"{one:.3g}") for one in record.prices],
            }
            for record in model.last_stop
        ],
    }


FOUND = json.loads(GOLDENS.read_text("utf-8"))


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_tokens_records_and_errors(case: Case, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    wanted, found = FOUND[case.name], run(case, tiny_tokenizer)
    assert found.get("tokens") == wanted.get("tokens")
    assert found.get("error") == wanted.get("error")
    for one, other in zip(found.get("records", []), wanted.get("records", []), strict=True):
        for name in ("probabilities", "prices"):
            measured = pytest.approx(other.pop(name), rel=1e-3, abs=2e-4, nan_ok=True)
            assert one.pop(name) == measured
        assert one == other
