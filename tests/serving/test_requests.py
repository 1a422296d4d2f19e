"""What a request says about stopping, over a server's defaults."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modeling_ospruner import OSPrunerConfig, StopPolicyConfig
from ospruner.cli import app
from ospruner.cli.fields import whole_commands
from ospruner.serving.requests import CONTROL, ID, KEYS, OF_SERVERS, ON, PRICE, StopRequest
from ospruner.serving.vllm import vllm_server


def settings(
    request: dict[str, Any] | None, defaults: dict[str, Any] | None = None
) -> StopPolicyConfig | None:
    return StopRequest(request).settings(StopRequest(defaults, "defaults"))


def test_a_request_is_on_by_its_own_word_or_by_default() -> None:
    assert settings(None) is None
    assert settings({}) is None
    assert settings({"other": 3, "stop_policy": 0}) is None
    assert settings({"stop_policy": True}) == StopPolicyConfig()
    assert settings({"stop_policy": "true"}) == StopPolicyConfig()
    assert settings({"stop_threshold": 0.7}) == StopPolicyConfig(threshold=0.7)
    assert settings(None, {"stop_policy": True, "stop_answer": "free"}) == StopPolicyConfig(
        answer="free"
    )
    assert settings({"stop_policy": False}, {"stop_policy": True}) is None


def test_a_request_goes_before_the_defaults() -> None:
    defaults = {"stop_mode": "threshold", "stop_threshold": 0.5, "max_thinking_tokens": 100}
    assert settings({"stop_threshold": 0.9}, defaults) == StopPolicyConfig(
        mode="threshold", threshold=0.9, max_thinking_tokens=100
    )
    # The two would contradict each other: the request's word is the later one.
    assert settings({"min_thinking_tokens": 200}, defaults) == StopPolicyConfig(
        mode="threshold", threshold=0.5, min_thinking_tokens=200
    )
    least = {"stop_policy": True, "min_thinking_tokens": 50}
    assert settings({"max_thinking_tokens": 10}, least) == StopPolicyConfig(max_thinking_tokens=10)
    every = {
        "stop_mode": "sample",
        "stop_seed": 4,
        "stop_sample_index": 2,
        "stop_answer_sample": 1,
        "max_answer_tokens": 9,
    }
    assert settings(every) == StopPolicyConfig(
        mode="sample", seed=4, first_sample_index=2, answer_do_sample=True, max_answer_tokens=9
    )


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"stop_policy": 2}, "vllm_xargs: stop_policy is 2; it must be true or false"),
        ({"stop_mode": "greedy"}, "stop_mode is 'greedy'; it must be 'sample' or 'threshold'"),
        ({"stop_threshold": 10**400}, r"stop_threshold is 10+; it must lie in \[0, 1\]"),
        (
            {"stop_answer": "short"},
            "stop_answer is 'short'; it must be 'forced' or 'free' or 't",
        ),
        ({"stop_wind_down": "So:"}, r"no \['stop_wind_down'\]; the policy's keys are"),
        ({"stop_answer_sample": "no"}, "stop_answer_sample is 'no'; it must be true or false"),
        ({"min_thinking_tokens": 5, "max_thinking_tokens": 4}, "max_thinking_tokens is 4, below"),
        ({"stop_id": "a\nb"}, r"stop_id is 'a\\nb'; it must be a text of 1 to 256 printable"),
        ({"stop_mode": "x" * 9999}, r"stop_mode is 'x{199}\.\.\. \(10001 characters\); it must be"),
        ({"max_thinking_token": 5}, r"no \['max_thinking_token'\]; the policy's keys are"),
        ({"stop_treshold": 0.5}, r"no \['stop_treshold'\]; the policy's keys are \['stop_policy'"),
    ],
)
def test_wrong_values_are_named(request_: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StopRequest(request_)


def test_old_names_and_other_peoples_keys() -> None:
    assert StopRequest({"stopwatch": 1, "others": 2}).fields == {}
    for gone in ("stop_length_penalty", "stop_domain"):
        with pytest.raises(ValueError, match=rf"no \['{gone}'\]; the policy's keys are .*stop_pri"):
            StopRequest({gone: 1e-4})


REQUESTED: dict[str, tuple[dict[str, Any], Any]] = {
    "stop_mode": ({}, "sample"),
    "stop_threshold": ({}, 0.25),
    PRICE: ({}, 1e-4),
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


SERVED = {
    "--mode": "threshold",
    "--threshold": "0.4",
    "--max-loss": "0.02",
    "--price": "2e-4",
    "--answer": "free",
    "--wind-down": "So:",
    "--min-thinking-tokens": "3",
    "--max-thinking-tokens": "90",
    "--control": "0.1",
    "--opt-in": None,
    "--dtype": "half",
}


def test_every_option_of_serve_changes_what_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(vllm_server, "serve_vllm", lambda *arguments: told.append(arguments))
    serve = whole_commands(app)["serve"]
    known = {one.opts[0] for one in serve.params if one.opts[0].startswith("-")}
    assert known == {*SERVED, "--engine"} - {"--dtype"}  # whose server it is; its own option
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
