"""No setting is accepted and then ignored: each one changes something where it has a meaning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch

from modeling_ospruner import OSPrunerConfig, OSPrunerForCausalLM, StopPolicyConfig
from ospruner.demo.shipped import Reasoner
from ospruner.engines.opening import ENGINES, EngineOptions, open_engine
from ospruner.rules import Budget
from ospruner.train.untrained import untrained

from .test_generate_options import ALWAYS, NEVER, SAMPLED, Prefer, inputs_for, run, with_policy


@pytest.fixture(scope="module")
def model(reasoner: Reasoner) -> OSPrunerForCausalLM:
    return with_policy(reasoner.model, reasoner)


@pytest.fixture
def as_made(model: OSPrunerForCausalLM) -> Iterator[OSPrunerConfig]:
    """The model's configuration, put back after the test."""
    names = ("default_mode", "default_threshold", "calibrations")
    before = {name: vars(model.config).get(name) for name in names}
    yield model.config
    vars(model.config).update(before)


def outcome(model: OSPrunerForCausalLM, settings: Any, **how: Any) -> tuple[Any, ...]:
    """What is generated, and what is told of it."""
    texts = run(model, inputs_for(model, 12), stop_policy=settings, **how)
    return texts.tolist(), [(one.reason, one.step_ends) for one in model.last_stop]


def test_a_threshold_alone_means_threshold_mode(
    model: OSPrunerForCausalLM, as_made: OSPrunerConfig
) -> None:
    assert as_made.default_mode == "sample"
    for value in (0.0, 0.5, 1.0):
        alone = outcome(model, {"threshold": value})
        assert alone == outcome(model, {"mode": "threshold", "threshold": value})
        assert alone == outcome(model, StopPolicyConfig(threshold=value))
    assert outcome(model, {"threshold": 0.0}) != outcome(model, {"threshold": 1.0})
    with pytest.raises(ValueError, match=r"threshold is 0.3, but mode 'sample' draws and has none"):
        model.generate(**inputs_for(model, 1), stop_policy={"mode": "sample", "threshold": 0.3})


# Of each setting: others that give it a meaning, and two values of it that must differ in effect.
CHANGES: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "mode": ({}, "sample", "threshold"),
    "threshold": ({}, 0.0, 1.0),
    "price": ({}, 0.0, 0.1),
    "max_loss": ({}, 0.01, 0.02),
    "seed": ({"mode": "sample"}, 0, 1),
    "first_sample_index": ({"mode": "sample"}, 0, 4),
    "min_thinking_tokens": (ALWAYS, 0, 30),
    "max_thinking_tokens": (NEVER, None, 5),
    "answer": (ALWAYS, "forced", "free"),
    "wind_down": (ALWAYS, None, "So:"),
    "max_answer_tokens": (ALWAYS, None, 1),
    "answer_do_sample": (ALWAYS, False, True),
    "mask_reentry": (ALWAYS, True, False),
    "rule": ({"max_answer_tokens": 3}, None, Budget(1)),
}


def test_every_setting_of_generate_changes_something(
    model: OSPrunerForCausalLM, as_made: OSPrunerConfig
) -> None:
    as_made.calibrations = [
        {"max_loss": loss, "confidence": 0.95, "price": None}
        | {"mode": "threshold", "threshold": threshold}
        for loss, threshold in ((0.01, 1.0), (0.02, 0.0))
    ]
    assert model.tokenizer is not None
    priced = untrained(
        model.base, model.tokenizer, num_policy_layers=1, price_range=(1e-4, 0.1), tuning="layers"
    )
    fmt = model.token_format
    again = Prefer(fmt.reentry_ids[0], lambda ids: (ids == fmt.think_end_id).any(-1))
    hot = {**SAMPLED, "temperature": 20.0}
    how: dict[str, dict[str, Any]] = {
        "answer_do_sample": hot,
        "mask_reentry": {"logits_processor": [again]},
    }
    assert list(CHANGES) == [one.name for one in fields(StopPolicyConfig)]
    for name, (others, one, another) in CHANGES.items():
        asked = priced if name == "price" else model
        first, second = (
            outcome(asked, {**others, name: value}, **how.get(name, {})) for value in (one, another)
        )
        assert first != second, name


def test_a_policys_defaults_change_what_true_means(
    model: OSPrunerForCausalLM, as_made: OSPrunerConfig
) -> None:
    sampled = outcome(model, True)
    as_made.default_mode = "threshold"
    compared = outcome(model, True)
    as_made.default_threshold = 0.0
    always = outcome(model, True)
    assert len({str(one) for one in (sampled, compared, always)}) == 3


def test_options_that_an_engine_does_not_look_at_are_refused(reasoner: Reasoner) -> None:
    values = {"dtype": "float16", "device": "cpu", "urls": ("http://localhost:1",)}
    looked_at = {
        "transformers": {"dtype", "device"}, "vllm": {"dtype"}, "sglang": {"urls"},
        "openai": {"urls"},
    }  # fmt: skip
    assert set(looked_at) == set(ENGINES)
    for name, own in looked_at.items():
        for option in values.keys() - own:
            options = EngineOptions(str(reasoner.folder), **{option: values[option]})  # type: ignore[arg-type]
            with pytest.raises(ValueError, match=f"{option} is .*, which the engine '{name}' does"):
                open_engine(name, reasoner.tokenizer, options)
    options = EngineOptions(str(reasoner.folder), dtype="float16", device="cpu")
    opened: Any = open_engine("transformers", reasoner.tokenizer, options)
    assert opened.model.dtype == torch.float16
