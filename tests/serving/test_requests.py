"""What a request says about stopping, over a server's defaults."""

from typing import Any

import pytest

from modeling_ospruner import OSPrunerConfig, StopPolicyConfig
from ospruner.cli import app
from ospruner.serving import launch
from ospruner.serving.requests import CONTROL, DIAL, ID, KEYS, OF_SERVERS, StopRequest, translated

from ..pages import whole_commands

ALL_ON = {"stop_policy": True}
HALF = {"stop_mode": "threshold", "stop_threshold": 0.5, "max_thinking_tokens": 100}
HALF_FIELDS = {"mode": "threshold", "threshold": 0.5, "max_thinking_tokens": 100}


def settings(
    request: dict[str, Any] | None, defaults: dict[str, Any] | None = None
) -> StopPolicyConfig | None:
    return StopRequest(request).settings(StopRequest(defaults, "defaults", server=True))


@pytest.mark.parametrize(
    ("request_", "defaults", "wanted"),
    [
        # On by a request's own word, or by default.
        (None, None, {}),
        (None, {"stop_policy": False}, None),
        ({"other": 3, "stop_policy": 0}, None, None),
        ({"stop_policy": "true"}, None, {}),
        ({"stop_threshold": 0.7}, None, {"threshold": 0.7}),
        (None, ALL_ON | {"stop_answer": "free"}, {"answer": "free"}),
        ({"stop_policy": False}, ALL_ON, None),
        # The request's word is the later one, also where the two would contradict each other.
        ({"stop_threshold": 0.9}, HALF, HALF_FIELDS | {"threshold": 0.9}),
        ({"stop_mode": "sample"}, HALF, {"mode": "sample", "max_thinking_tokens": 100}),
        ({"stop_mode": "threshold"}, HALF, HALF_FIELDS),
        ({"stop_mode": "threshold"}, {"stop_mode": "sample"}, {"mode": "threshold"}),
        ({"stop_threshold": 0.7}, {"stop_mode": "sample"}, {"threshold": 0.7}),
        ({"min_thinking_tokens": 200}, HALF, {"threshold": 0.5, "min_thinking_tokens": 200}),
        ({"max_thinking_tokens": 9}, {"min_thinking_tokens": 50}, {"max_thinking_tokens": 9}),
    ],
)
def test_a_request_goes_before_the_defaults(
    request_: dict[str, Any] | None, defaults: dict[str, Any] | None, wanted: dict[str, Any] | None
) -> None:
    assert settings(request_, defaults) == (None if wanted is None else StopPolicyConfig(**wanted))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"stop_threshold": 10**400}, "stop_threshold is 10+"),
        ({"stop_mode": "sample", "stop_threshold": 0.3}, "stop_threshold is 0.3, but mode 'samp"),
        ({"stop_sample_index": 2}, "stop_sample_index is 2 without a stop_seed"),
        ({"min_thinking_tokens": 5, "max_thinking_tokens": 4}, "max_thinking_tokens is 4, below"),
        *(  # without the prefix, or as others call it
            ({word: 0.5}, f"vllm_xargs: {word} is written stop_{key} here: send stop_{key}")
            for word, key in (
                *(("price", "price"), ("threshold", "threshold"), ("mode", "mode")),
                *(("length_penalty", "price"), ("stop_length_penalty", "price")),
                *(("lambda", "price"), ("first_sample_index", "sample_index")),
            )
        ),
        *(  # near misses, names of old, and what a server alone may say
            ({key: 0.5}, rf"no \['{key}'\]; the policy's keys are \['stop_policy'.*stop_price")
            for key in (
                *(DIAL, CONTROL, *OF_SERVERS, "max_thinking_token", "stop_treshold", "stop_domain"),
                *("thinking_budget", "thinking_token_budget", "max_think_tokens", "budget_tokens"),
            )
        ),
    ],
)
def test_wrong_values_are_named(request_: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StopRequest(request_)


LEAST_50 = {"min_thinking_tokens": 50}
BUDGET_60 = {"max_thinking_tokens": 60}


@pytest.mark.parametrize(
    ("request_", "defaults", "wanted"),
    [
        ({}, {}, LEAST_50),
        ({"min_thinking_tokens": 80}, {}, {"min_thinking_tokens": 80}),
        ({}, {"min_thinking_tokens": 80}, {"min_thinking_tokens": 80}),
        ({}, {"max_thinking_tokens": 49}, LEAST_50),
        ({}, {"max_thinking_tokens": 50}, LEAST_50 | {"max_thinking_tokens": 50}),
        (BUDGET_60, {"min_thinking_tokens": 80}, LEAST_50 | BUDGET_60),
    ],
)
def test_nothing_stops_before_an_engines_minimum(request_: Any, defaults: Any, wanted: Any) -> None:
    asked, on = StopRequest(ALL_ON | request_), StopRequest(defaults, server=True)
    assert asked.settings(on, 50) == StopPolicyConfig(**wanted)
    low = StopRequest({"max_thinking_tokens": 49})
    with pytest.raises(ValueError, match="max_thinking_tokens is 49, but .* at least 50"):
        low.settings(on, 50)


@pytest.mark.parametrize(
    ("request_", "defaults", "budget", "wanted"),
    [
        ({}, ALL_ON, 2000, 2000),
        ({}, ALL_ON | {"max_thinking_tokens": 500}, 2000, 500),
        ({}, ALL_ON | {"min_thinking_tokens": 5000}, 2000, 2000),
        ({"stop_policy": True}, {}, 0, 1),
        ({"max_thinking_tokens": 30}, {}, 20, 20),
        ({"stop_policy": False}, ALL_ON, 2000, None),
        ({}, {"stop_policy": False}, 2000, None),
    ],
)
def test_an_engines_budget_is_ours(request_: Any, defaults: Any, budget: int, wanted: Any) -> None:
    on = StopRequest(defaults, server=True)
    extra = {"others": 3, **request_}
    taken = StopRequest(request_).take_budget(extra, budget, on)
    assert taken == (None if wanted is None else extra | {"max_thinking_tokens": wanted})


def row(value: float, tokens: float, **more: Any) -> dict[str, Any]:
    """An effort as `calibrate` stores it."""
    same = {"mode": "threshold", "tokens": tokens, "share": tokens / 200, "loss": 0.0}
    return {**same, "threshold": 0.5, "price": value, **more}


LOW, MEDIUM, MAX = row(2e-3, 50.0), row(4e-4, 120.0), row(0.0, 198.0)
EFFORTS = {"low": LOW, "medium": MEDIUM, "max": MAX}
EVERY = OSPrunerConfig(head="price", price_range=[5e-5, 1e-2], price=3e-4, efforts=EFFORTS)
ONE = {"low": row(0, 50.0) | {"threshold": 0.2, "price": None}}
FIXED = OSPrunerConfig(price=1e-3, default_mode="threshold", efforts=ONE)
CHEAP = {"stop_mode": "threshold", "stop_threshold": 0.5, "stop_price": 2e-3}
USUAL = {**CHEAP, "stop_price": 4e-4}
AT_ONCE = {"max_thinking_tokens": 1}
LITTLE = {"reasoning_effort": "low"}
SAMPLE = {"stop_mode": "sample"}


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        # Effort, in each dialect.
        (LITTLE, CHEAP),
        ({"reasoning": {"effort": "medium"}}, USUAL),
        ({"output_config": {"effort": "low"}}, CHEAP),
        ({"chat_template_kwargs": {"reasoning_effort": "low"}}, CHEAP),
        ({"reasoning_effort": "max"}, {**CHEAP, "stop_price": 0.0}),
        ({"reasoning_effort": "none"}, AT_ONCE),
        ({"thinking": {"type": "disabled"}}, AT_ONCE),
        ({"enable_thinking": False}, AT_ONCE),
        ({"reasoning": {"enabled": False}}, AT_ONCE),
        ({"chat_template_kwargs": {"thinking": False}}, AT_ONCE),
        ({"enable_thinking": True, "thinking": {"type": "adaptive"}}, None),
        ({"chat_template_kwargs": {"reasoning_effort": "huge"}}, None),  # the template's word
        ({"reasoning_effort": "minimal"}, None),  # not in this table
        # The request's own keys go first.
        (LITTLE | {"vllm_xargs": {"stop_price": 1e-4}}, CHEAP | {"stop_price": 1e-4}),
        (LITTLE | {"vllm_xargs": SAMPLE}, SAMPLE | {"stop_price": 2e-3}),
        (LITTLE | {"vllm_xargs": {"stop_policy": False}}, None),
        # A budget is a cap; a small one brings a price, where that is bolder than the usual one.
        ({"thinking_budget": 60}, CHEAP | BUDGET_60),
        ({"thinking_budget_tokens": 20}, {**CHEAP, "max_thinking_tokens": 20}),
        ({"thinking_token_budget": 130}, {**USUAL, "max_thinking_tokens": 130}),
        ({"thinking": {"budget_tokens": 4000}}, {"max_thinking_tokens": 4000}),
        ({"reasoning": {"max_tokens": 4000}}, {"max_thinking_tokens": 4000}),
        ({"thinking_budget": 0}, CHEAP | AT_ONCE),
        ({"thinking_budget_tokens": -1}, None),
        ({"thinking_budget": 60, "reasoning_effort": "medium"}, USUAL | BUDGET_60),
        ({"thinking_budget": 90, "vllm_xargs": BUDGET_60}, CHEAP | BUDGET_60),
        # What is no effort, and what stands where its author names things.
        ({"reasoning_effort": 3}, None),
        ({"messages": [{"reasoning_effort": "low"}]}, None),
        ({"reasoning": "low"}, None),
    ],
)
def test_effort_and_budget_by_dialect(body: dict[str, Any], wanted: dict[str, Any] | None) -> None:
    on = StopRequest(ALL_ON, server=True)
    on.settle(EVERY)
    sent = {"model": "toy", **body}
    told, keys = translated(sent, "vllm_xargs", "thinking_token_budget", on, EVERY)
    assert keys == wanted
    names = {"thinking_budget", "thinking_budget_tokens"}
    left = {k: v for k, v in sent.items() if k not in names}
    for place in ("thinking", "reasoning"):
        if isinstance(left.get(place), dict):
            left[place] = {k: v for k, v in left[place].items() if not k.endswith("tokens")}
    assert told == left
    within = {"sampling_params": {"extra_args": body.get("vllm_xargs")}, **body}
    assert translated(within, "sampling_params.extra_args", "", on, EVERY)[1] == wanted
    off = StopRequest({"stop_policy": False}, server=True)
    off.settle(EVERY)
    if not body.get("vllm_xargs"):
        assert translated(sent, "vllm_xargs", "", off, EVERY) == (sent, None)


@pytest.mark.parametrize("above", ["", "reasoning.", "output_config."])
def test_an_effort_that_nobody_knows_is_refused(above: str) -> None:
    body = {above[:-1]: {"effort": "huge"}} if above else {"reasoning_effort": "huge"}
    with pytest.raises(ValueError, match=f"{above}[a-z_]*effort is 'huge'"):
        translated(body, "vllm_xargs", "", StopRequest(ALL_ON, server=True), EVERY)


def test_what_efforts_mean_is_the_servers_word() -> None:
    body = {"reasoning_effort": "low"}

    def told(config: OSPrunerConfig, **defaults: Any) -> Any:
        on = StopRequest(ALL_ON | defaults, "the defaults", server=True)
        on.settle(config)
        return translated(body, "vllm_xargs", "", on, config)[1]

    assert told(EVERY, stop_efforts={"low": 7e-4}) == {"stop_price": 7e-4}
    assert told(EVERY, stop_efforts={"high": 7e-4}) == CHEAP
    assert told(EVERY, stop_efforts={}) is None
    assert told(FIXED) == {"stop_mode": "threshold", "stop_threshold": 0.2}
    assert told(FIXED, stop_efforts={"low": 0.1}) == {"stop_threshold": 0.1}
    assert told(OSPrunerConfig()) is None
    for config, wrong, message in (
        (EVERY, {"low": 0.5}, "stop_price is 0.5"),
        (FIXED, {"low": 2}, "stop_threshold is 2"),
        (EVERY, {"tiny": 1e-4}, "stop_efforts: a name is 'tiny'"),
    ):
        with pytest.raises(ValueError, match=message):
            told(config, stop_efforts=wrong)
    with pytest.raises(TypeError, match="stop_efforts is 'low'"):
        told(EVERY, stop_efforts="low")


FREE = {"low": row(0.0, 80.0, threshold=0.3), "high": row(0.0, 120.0, threshold=0.6)}
ZERO = OSPrunerConfig(head="price", price_range=[5e-5, 1e-2], price=0.0, efforts=FREE)


@pytest.mark.parametrize(
    ("policy", "budget", "threshold", "wanted"),
    [
        *((FIXED, 60, 0.5, 0.2), (FIXED, 5, 0.5, 0.2), (FIXED, 60, 0.1, None)),
        *((ZERO, 150, 0.95, 0.6), (ZERO, 150, 0.5, None), (ZERO, 90, 0.95, 0.3)),
    ],
)
def test_a_budget_lowers_the_threshold_of_one_price_and_at_a_price_of_zero(
    policy: OSPrunerConfig, budget: int, threshold: float, wanted: float | None
) -> None:
    on = StopRequest(ALL_ON | {"stop_threshold": threshold}, server=True)
    on.settle(policy)
    _, keys = translated({"thinking_budget": budget}, "vllm_xargs", "", on, policy)
    assert keys is not None
    assert keys.get("stop_threshold") == wanted


REQUESTED: dict[str, Any] = {
    **{"stop_mode": "sample", "stop_threshold": 0.25, "stop_price": 1e-4, "stop_seed": 3},
    **{"stop_sample_index": 2, "stop_answer": "tools", "stop_answer_sample": True},
    **{"min_thinking_tokens": 7, "max_thinking_tokens": 70, "max_answer_tokens": 9},
}


def test_every_key_of_a_request_changes_something() -> None:
    assert list(REQUESTED) == [key for key in KEYS if key not in OF_SERVERS]
    for key, value in REQUESTED.items():
        others = ALL_ON | ({"stop_seed": 3} if key == "stop_sample_index" else {})
        with_it = settings({**others, key: value})
        assert with_it is not None
        assert with_it != settings(others), key
        assert vars(with_it)[KEYS[key]] == value
    assert StopRequest({ID: "a"}).name == "a"
    assert StopRequest({CONTROL: 0.5}, server=True).control == 0.5
    assert StopRequest({"stopwatch": 1, "others": 2}).fields == {}  # other people's
    for key in ("stop_seed", "stop_sample_index", ID):  # which a server cannot say
        with pytest.raises(ValueError, match=rf"no \['{key}'\]"):
            StopRequest({key: 2}, server=True)


SERVED = (
    *("--mode threshold", "--threshold 0.4", "--max-loss 0.02", "--price 2e-4", "--answer free"),
    *("--wind-down So:", "--efforts low=5e-4", "--control 0.1", "--min-thinking-tokens 3"),
    *("--max-thinking-tokens 90", "--opt-in", "--dtype half"),
)


def test_every_option_of_serve_changes_what_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(launch, "serve", lambda *arguments: told.append(arguments))
    serve = whole_commands(app)["serve"]
    known = {one.opts[0] for one in serve.params if one.opts[0].startswith("-")}
    tried = {option.split()[0] for option in SERVED}
    assert known == {*tried, "--engine"} - {"--dtype"}  # whose server it is; its own option
    serve.main(["org/policy"], standalone_mode=False)
    for option in SERVED:
        serve.main(["org/policy", *option.split()], standalone_mode=False)
        assert told[-1] != told[0], option
        defaults = StopRequest(told[-1][2], server=True)
        assert defaults.on is (option != "--opt-in")
        if option == "--threshold 0.4":
            assert StopRequest({}).settings(defaults) == StopPolicyConfig(threshold=0.4)
