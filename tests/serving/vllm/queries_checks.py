"""A policy of queries only inside vLLM, in process; run by test_plugin.py.

The checks of `plugin_checks` on a policy of tuning "queries", and what holds for it alone.
"""

from __future__ import annotations

import pytest

from modeling_ospruner import OSPrunerForCausalLM
from ospruner.demo.shipped import Reasoner
from ospruner.train.untrained import untrained

from . import plugin_checks
from .plugin_checks import environment, mixed, plain, served
from .plugin_replay import perturb

__all__ = ["environment", "mixed", "plain", "served"]

test_never = plugin_checks.test_a_policy_that_never_fires_changes_nothing
test_stops = plugin_checks.test_stops_where_generate_would
test_natural_ends = plugin_checks.test_a_natural_end_gets_the_box_too
test_several_texts = plugin_checks.test_several_texts_of_one_prompt_stop_on_their_own
test_draws = plugin_checks.test_the_ith_text_draws_as_sample_index_i
test_aborts = plugin_checks.test_requests_that_are_aborted_leave_the_others_alone
test_probabilities = plugin_checks.test_probabilities_are_those_of_transformers


@pytest.fixture(scope="module")
def model(reasoner: Reasoner, tmp_path_factory: pytest.TempPathFactory) -> OSPrunerForCausalLM:
    folder = tmp_path_factory.mktemp("policy")
    made = untrained(
        reasoner.model,
        reasoner.tokenizer,
        2,
        tuning="queries",
        base_model_name_or_path=str(reasoner.folder),
    )
    perturb(made)
    made.save_pretrained(folder)
    made.config._name_or_path = str(folder)
    return made
