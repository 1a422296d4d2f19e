"""Policies of queries only inside vLLM, in process; run by test_plugin.py.

Of the checks of `plugin_checks` those that a tail beside the base's pages may fail; all of them
hold in runner V2 (`runner_v2_checks.py`).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from modeling_ospruner import OSPrunerForCausalLM as Policy
from ospruner.demo.shipped import Reasoner

from ...chats import prompts_of
from . import plugin_checks
from .plugin_checks import greedy, record, run, start_policy
from .plugin_replay import make_policy, replay


@pytest.fixture(scope="module")
def model(reasoner: Reasoner, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return make_policy(reasoner, tmp_path_factory.mktemp("policy"), tuning="queries")


ASKED = (2e-3, 1e-4, 1e-2)  # the first is the server's


def test_it_is_served_at_the_prices_of_server_and_requests(
    environment: None, reasoner: Reasoner, tmp_path: Path
) -> None:
    every: dict[str, Any] = {"tuning": "queries", "price_range": (5e-5, 1e-2), "price": 1e-4}
    model = make_policy(reasoner, tmp_path, **every)
    defaults = {"stop_policy": True, "stop_price": ASKED[0]}
    llm = start_policy(tmp_path, additional_config={"ospruner": defaults})
    prompts = prompts_of(reasoner, 12)
    extras = [
        {"stop_id": f"p{i}", "stop_seed": 3, "stop_sample_index": i}
        | ({} if i % 3 == 0 else {"stop_price": ASKED[i % 3]})
        for i in range(len(prompts))
    ]
    outputs = run(llm, prompts, [greedy(extra) for extra in extras])
    stopped, seen = 0, []
    for i, [ids] in enumerate(outputs):
        told = record(llm, f"p{i}")
        assert len(told["prices"]) == len(told["probabilities"]) == len(told["step_ends"])
        for price, probability in zip(told["prices"], told["probabilities"], strict=True):
            assert (price <= ASKED[i % 3]) == (probability >= 0.5)
            seen.append(price)
        stopped += told["reason"] == "policy"
        model.config.price = ASKED[i % 3]
        replay(model, prompts[i], ids, extras[i], told["probabilities"])
    assert stopped > 3
    assert len({price for price in seen if 0 < price < math.inf}) > 5


test_never = plugin_checks.test_a_policy_that_never_fires_changes_nothing
test_stops = plugin_checks.test_stops_where_generate_would
test_aborts = plugin_checks.test_requests_that_are_aborted_leave_the_others_alone
