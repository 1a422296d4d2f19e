"""A policy of queries only inside vLLM, in process; run by test_plugin.py.

Of the checks of `plugin_checks` those that a tail beside the base's pages may fail; all of them
hold in runner V2 (`runner_v2_checks.py`).
"""

from __future__ import annotations

import pytest

from modeling_ospruner import OSPrunerForCausalLM as Policy
from ospruner.demo.shipped import Reasoner

from . import plugin_checks
from .plugin_checks import environment, mixed, plain, served
from .plugin_replay import make_policy

__all__ = ["environment", "mixed", "plain", "served"]

test_never = plugin_checks.test_a_policy_that_never_fires_changes_nothing
test_stops = plugin_checks.test_stops_where_generate_would
test_aborts = plugin_checks.test_requests_that_are_aborted_leave_the_others_alone


@pytest.fixture(scope="module")
def model(reasoner: Reasoner, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return make_policy(reasoner, tmp_path_factory.mktemp("policy"), tuning="queries")
