"""No setting is accepted and then ignored: each one changes something where it has a meaning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch
import typer
from hypothesis import given
from hypothesis import strategies as st

from modeling_ospruner import Budget, OSPrunerConfig, OSPrunerForCausalLM, StopPolicyConfig
from ospruner.cli import app
from ospruner.demo.shipped import Reasoner
from ospruner.engines.opening import ENGINES, EngineOptions, open_engine
from ospruner.serving.requests import (
    CONTROL,
    ID,
    KEYS,
    OF_SERVERS,
    ON,
    StopRequest,
    check_body,
)
from ospruner.serving.vllm import server

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
    "domain": ({}, "free", "dear"),
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
    priced = OSPrunerForCausalLM.untrained(
        model.base, model.tokenizer, num_policy_layers=1, price_range=(1e-4, 0.1), tuning="layers"
    )
    priced.config.domains = {
        name: {"task": {"name": "math"}, "price": price}
        for name, price in (("free", 0.0), ("dear", 0.1))
    }
    fmt = model.token_format
    again = Prefer(fmt.reentry_ids[0], lambda ids: (ids == fmt.think_end_id).any(-1))
    hot = {**SAMPLED, "temperature": 20.0}
    how: dict[str, dict[str, Any]] = {
        "answer_do_sample": hot,
        "mask_reentry": {"logits_processor": [again]},
    }
    assert list(CHANGES) == [one.name for one in fields(StopPolicyConfig)]
    for name, (others, one, another) in CHANGES.items():
        asked = priced if name in ("price", "domain") else model
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


REQUESTED: dict[str, tuple[dict[str, Any], Any]] = {
    "stop_mode": ({}, "sample"),
    "stop_threshold": ({}, 0.25),
    "stop_price": ({}, 1e-4),
    "stop_domain": ({}, "math"),
    "stop_seed": ({}, 3),
    "stop_sample_index": ({"stop_seed": 3}, 2),
    "stop_answer": ({}, "tools"),
    "stop_answer_sample": ({}, True),
    "min_thinking_tokens": ({}, 7),
    "max_thinking_tokens": ({}, 70),
    "max_answer_tokens": ({}, 9),
}


def test_every_key_of_a_request_changes_something() -> None:
    off = StopRequest({})
    assert list(REQUESTED) == [key for key in KEYS if key not in OF_SERVERS]
    for key, (others, value) in REQUESTED.items():
        with_it = StopRequest({ON: True, **others, key: value}).settings(off)
        assert with_it is not None
        assert with_it != StopRequest({ON: True, **others}).settings(off), key
        assert vars(with_it)[KEYS[key]] == value
    assert StopRequest({ON: False}).settings(StopRequest({ON: True})) is None
    assert StopRequest({ID: "a"}).name == "a"
    assert StopRequest({CONTROL: 0.5}, server=True).control == 0.5


def test_a_domain_stands_for_its_price() -> None:
    domains: dict[str, dict[str, Any]] = {
        "math": {"task": {"name": "math"}, "price": 3e-4},
        "quiz": {"task": {"name": "choice"}},
    }
    priced = OSPrunerConfig(head="price", price_range=[1e-4, 1e-3], domains=domains)
    settings = StopPolicyConfig(domain="math").with_defaults(priced)
    assert (settings.domain, settings.price) == (None, 3e-4)
    unknown = r"domain is 'quiz'; it must be one of \['math'\] .a policy has a price"
    with pytest.raises(ValueError, match=unknown):
        StopPolicyConfig(domain="quiz").with_defaults(priced)
    with pytest.raises(
        ValueError, match="domain is 'math'; it must be left out: the policy has none"
    ):
        StopPolicyConfig(domain="math").with_defaults(OSPrunerConfig())
    with pytest.raises(ValueError, match="domain is 'math', and so is price 0.0001 given"):
        StopPolicyConfig(domain="math", price=1e-4)
    with pytest.raises(ValueError, match="max_loss is 0.1, and so is domain given"):
        StopPolicyConfig(domain="math", max_loss=0.1)
    with pytest.raises(ValueError, match="domain are the learned policy's"):
        StopPolicyConfig(domain="math", rule=Budget(1))
    with pytest.raises(TypeError, match="domain is 3; it must be a text"):
        StopPolicyConfig(domain=3)  # type: ignore[arg-type]

    server = StopRequest({ON: True, "stop_domain": "math"}, server=True)
    server.settle(priced)
    assert server.fields["price"] == 3e-4
    with pytest.raises(ValueError, match="the server's stop_domain: domain is 'quiz'"):
        StopRequest({"stop_domain": "quiz"}, server=True).settle(priced)
    asked = StopRequest({"stop_domain": "math"}).settings(
        StopRequest({"stop_price": 1e-4}, server=True)
    )
    assert asked is not None
    assert asked.price_for("request", priced) == 3e-4
    other = StopRequest({"stop_price": 2e-4}).settings(server)
    assert other is not None
    assert other.price_for("request", priced) == 2e-4
    body = {"vllm_xargs": {"stop_domain": "quiz"}}
    with pytest.raises(ValueError, match="vllm_xargs: stop_domain is 'quiz'; it must be one of"):
        check_body(body, server, priced, True)
    check_body({"vllm_xargs": {"stop_domain": "math"}}, server, priced, True)


def test_keys_that_a_server_or_request_would_not_look_at_are_refused() -> None:
    with pytest.raises(ValueError, match="stop_sample_index is 2 without a stop_seed, and does no"):
        StopRequest({"stop_sample_index": 2})
    of_servers = {"stop_max_loss": 0.02, "stop_wind_down": "So:"}
    for key, value in of_servers.items():
        assert key in OF_SERVERS
        with pytest.raises(ValueError, match=rf"no \['{key}'\]; the policy's keys are"):
            StopRequest({key: value})
    for key in ("stop_seed", "stop_sample_index", ID):
        with pytest.raises(ValueError, match=rf"no \['{key}'\]; the policy's keys are"):
            StopRequest({key: 2}, server=True)
    with pytest.raises(ValueError, match="stop_threshold is 0.3, but mode 'sample'"):
        StopRequest({"stop_mode": "sample", "stop_threshold": 0.3})


@given(
    defaults=st.fixed_dictionaries(
        {},
        optional={
            "stop_mode": st.just("sample") | st.just("threshold"),
            "stop_threshold": st.floats(0, 1),
        },
    ),
    request=st.fixed_dictionaries(
        {},
        optional={
            "stop_mode": st.just("sample") | st.just("threshold"),
            "stop_threshold": st.floats(0, 1),
        },
    ),
)
def test_what_a_request_says_of_stopping_is_what_happens(
    defaults: dict[str, Any], request: dict[str, Any]
) -> None:
    """Over any defaults: its mode and its threshold are those in effect."""
    if "sample" in (defaults.get("stop_mode"), request.get("stop_mode")):
        defaults.pop("stop_threshold", None)
    if request.get("stop_mode") == "sample":
        request.pop("stop_threshold", None)
    merged = StopRequest({ON: True, **request}).settings(StopRequest(defaults, server=True))
    assert merged is not None
    settings = merged.with_defaults(OSPrunerConfig())
    if "stop_threshold" in request:
        assert (settings.mode, settings.threshold) == ("threshold", request["stop_threshold"])
    elif "stop_mode" in request:
        assert settings.mode == request["stop_mode"]
        if settings.mode == "threshold":
            assert settings.threshold == defaults.get("stop_threshold", 0.5)
    elif "stop_threshold" in defaults:
        assert (settings.mode, settings.threshold) == ("threshold", defaults["stop_threshold"])
    settings.chosen_rule()


SERVED = {
    "--mode": "threshold",
    "--threshold": "0.4",
    "--max-loss": "0.02",
    "--price": "2e-4",
    "--domain": "math",
    "--answer": "free",
    "--wind-down": "So:",
    "--min-thinking-tokens": "3",
    "--max-thinking-tokens": "90",
    "--control": "0.1",
    "--opt-in": None,
    "--engine-arg": "seed=1",
}


def test_every_option_of_serve_changes_what_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(server, "serve", lambda *arguments: told.append(arguments))
    commands: Any = typer.main.get_command(app)
    serve = commands.commands["serve"]
    known = {one.opts[0] for one in serve.params if one.opts[0].startswith("-")}
    assert known == {*SERVED, "--engine"}  # which says whose server it is
    serve.main(["org/policy"], standalone_mode=False)
    for option, value in SERVED.items():
        given_ = [option] if value is None else [option, value]
        serve.main(["org/policy", *given_], standalone_mode=False)
        assert told[-1] != told[0], option
        defaults = StopRequest(told[-1][1], server=True)
        assert defaults.on is (option != "--opt-in")
    serve.main(["org/policy", "--threshold", "0.4"], standalone_mode=False)
    settings = StopRequest({}).settings(StopRequest(told[-1][1], server=True))
    assert settings == StopPolicyConfig(mode="threshold", threshold=0.4)


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
