"""A policy in vLLM's model runner V2, in process; run by test_plugin.py.

The checks of V1, by the same code: what must be equal is.
"""

from __future__ import annotations

from . import on_runner_v2  # isort: skip

from collections.abc import Callable
from pathlib import Path

from modeling_ospruner import OSPrunerForCausalLM
from ospruner.demo.shipped import Reasoner

from . import bases_checks, plugin_checks, queries_checks
from .bases_checks import make
from .plugin_checks import TIGHT, Prompts, Texts, check_as_ever, start_policy
from .plugin_replay import make_policy
from .queries_checks import model

__all__ = ["make", "model", "on_runner_v2"]

test_never = plugin_checks.test_a_policy_that_never_fires_changes_nothing
test_stops = plugin_checks.test_stops_where_generate_would
test_draws = plugin_checks.test_the_ith_text_draws_as_sample_index_i
test_limits = plugin_checks.test_limits_and_stop_strings_end_requests_as_ever
test_aborts = plugin_checks.test_requests_that_are_aborted_leave_the_others_alone
test_grammars = plugin_checks.test_a_grammar_governs_the_answer_of_a_pruned_thinking
test_answers = plugin_checks.test_a_request_under_way_answers_when_it_is_told
test_closed = plugin_checks.test_a_prompt_that_closed_its_thinking_is_left_alone
# From here on each starts an engine of its own, which ends the one before.
test_prices = queries_checks.test_it_is_served_at_the_prices_of_server_and_requests


def test_a_hybrid(make: Callable[..., OSPrunerForCausalLM], tmp_path: Path) -> None:
    """Its tokens; `bases_checks` compares what is said, by the same code."""
    model = make("qwen3_next", 2, "queries", fresh=True)
    bases_checks.check(model, tmp_path, 3, tolerance=1, dtype="bfloat16")


def test_layers_of_their_own_stop_where_generate_would(
    plain: Texts, reasoner: Reasoner, mixed: Prompts, tmp_path: Path
) -> None:
    model = make_policy(reasoner, tmp_path)
    served = start_policy(tmp_path, **TIGHT)
    assert check_as_ever(served, model, mixed[:12], plain[:12])["policy"] > 0
