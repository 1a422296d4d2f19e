"""Generate gives what it gave before the uploaded files were rewritten.

`goldens.json` was written by the old code. Each case is a policy of seeded weights on a seeded
base, a batch of prompts, and arguments of generate; what stands in the file are the tokens and the
records.
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

from ..chats import chat_batch
from ..conftest import _make_tiny_base
from ..families import ORDINARY, let_write_paragraphs, make_base, padded_prompts

FOUND = json.loads(Path(__file__).with_name("goldens.json").read_text("utf-8"))
SAMPLED = {"do_sample": True, "temperature": 0.9, "top_p": 0.95, "top_k": 0}
HOW_MANY = "Ann has 3 apples and buys 4 more. How many has she?"
QUESTIONS = ["What is 3 + 4 * 5?", HOW_MANY, "17 - 9"]


@dataclass(frozen=True)
class Case:
    """One call of generate."""

    name: str
    base: str  # of `ORDINARY`, or "tiny", or "reasoner"
    tuning: str = "queries"
    layers: int = 2
    priced: bool = False
    stop_policy: dict[str, Any] = field(default_factory=dict)  # with the seed 0
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
        "plain draws": {},
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
    free = {"threshold": 1, "answer": "free"}
    yield Case("natural, free", "tiny", natural=True, stop_policy=free)
    yield Case("natural, drawn", "tiny", "layers", natural=True, arguments=SAMPLED, rows=5)
    yield Case("closed prompt", "tiny", prompt="<|user|>3<|assistant|><think>\n3 + 4\n\n</think>\n")
    opened = f"<|user|>{QUESTIONS[0]}<|assistant|><think>\nSo 3.\n\nWait"
    yield Case("opened prompt", "tiny", prompt=opened)
    yield Case("several texts", "tiny", arguments={**SAMPLED, "num_return_sequences": 2})
    yield Case("static cache", "tiny", arguments={"cache_implementation": "static"})
    yield Case("prompt in pieces", "tiny", "layers", arguments={"prefill_chunk_size": 4})
    for price in (None, 0.0, 1e-3, 1e-2):
        said = {} if price is None else {"price": price}
        yield Case(f"price {price}", "tiny", priced=True, stop_policy=said, arguments=SAMPLED)
        yield Case(f"demo {price}", "reasoner", priced=True, stop_policy=said, rows=3)
    yield Case("demo sampled", "reasoner", priced=True, arguments=SAMPLED, rows=3)
    yield Case("demo layers", "reasoner", "layers", 1, stop_policy=bold, rows=3)


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
    prices = (1e-4, 1e-2) if priced else None
    model: Any = untrained(base, tokenizer, layers, tuning, price_range=prices)
    with torch.no_grad():
        for name, parameter in model.policy.named_parameters():
            drawn = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            noise = torch.randn(parameter.shape, generator=drawn)
            parameter.add_(noise * (0.15 if name.startswith("head.") else 0.02))
        model.policy.head.bias[0] = -2.0
    if base_name != "reasoner":
        let_write_paragraphs(model.base, model.token_format, 2.0 if natural else 4.5)
        if natural:
            end = model.token_format.think_end_id
            bias = model.base.generation_config.sequence_bias
            bias[:] = [[ids, 3.5 if ids == [end] else more] for ids, more in bias]
    return model


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_tokens_and_records(case: Case, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    model = model_of(case.base, case.tuning, case.layers, case.priced, case.natural, tiny_tokenizer)
    if case.base not in ("tiny", "reasoner"):
        inputs: dict[str, Any] = padded_prompts(9)
    elif case.prompt:
        ids = model.tokenizer.encode(case.prompt, add_special_tokens=False)
        inputs = {"input_ids": torch.tensor([ids])}
    else:
        asked = [QUESTIONS[i % len(QUESTIONS)] for i in range(case.rows)]
        inputs = chat_batch(model.tokenizer, asked)
    most = 120 if case.base == "reasoner" else 60
    arguments = {"max_new_tokens": most, "do_sample": False, **case.arguments}
    torch.manual_seed(5)
    output = model.generate(**inputs, **arguments, stop_policy={"seed": 0, **case.stop_policy})
    wanted = FOUND[case.name]
    assert output[:, inputs["input_ids"].shape[1] :].tolist() == wanted["tokens"]
    for record, known in zip(model.last_stop, wanted["records"], strict=True):
        for name in ("probabilities", "prices"):  # as they were rounded
            measured = pytest.approx(known.pop(name), rel=1e-3, abs=2e-4, nan_ok=True)
            assert vars(record)[name] == measured
        assert {name: vars(record)[name] for name in known} == known
