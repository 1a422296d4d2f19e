"""What generate's options and surroundings do to a stop policy, on the embedded reasoner."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, MinNewTokensLengthLogitsProcessor

from modeling_ospruner import OSPrunerForCausalLM
from ospruner.demo.shipped import Reasoner, draw_split
from ospruner.eval.problems.problem import user_message
from ospruner.rules import AnswerEntropy

from ..chats import chat_batch
from ..families import ALWAYS, NEVER, random_policy

SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 0}
GREEDY: dict[str, Any] = {"do_sample": False}
UNSTOPPED = NEVER | {"answer": "free"}


@pytest.fixture(scope="module")
def model(reasoner: Reasoner) -> OSPrunerForCausalLM:
    """The reasoner with a random policy, whose probabilities spread over (0, 1)."""
    return random_policy(reasoner.model, reasoner.tokenizer, 1)


def inputs_for(model: OSPrunerForCausalLM, batch: int) -> dict[str, torch.Tensor]:
    """Left-padded prompts."""
    problems, fmt = draw_split("test", batch, 0), model.token_format.format
    return chat_batch(model.tokenizer, [user_message(problem, fmt) for problem in problems])


def run(model: Any, inputs: dict[str, Any], new: int = 60, **kwargs: Any) -> torch.Tensor:
    """What is generated after the prompts, (B, S)."""
    torch.manual_seed(5)
    output: torch.Tensor = model.generate(**inputs, max_new_tokens=new, **{**GREEDY, **kwargs})
    return output[:, inputs["input_ids"].shape[1] :]


@pytest.mark.parametrize("prices", [None, (5e-5, 1e-2)])
def test_a_policy_decides_at_the_stride_of_its_labels(reasoner: Reasoner, prices: Any) -> None:
    model = random_policy(reasoner.model, reasoner.tokenizer, 1, price_range=prices)
    inputs = inputs_for(model, 2)
    run(model, inputs, stop_policy=NEVER)
    every = model.last_stop
    model.config.step_stride = 2
    run(model, inputs, stop_policy=NEVER)
    for one, strided in zip(every, model.last_stop, strict=True):
        assert len(one.step_ends) > 2
        assert strided.step_ends == one.step_ends
        asked = [(i + 1) % 2 == 0 for i in range(len(one.step_ends))]
        assert [not math.isnan(p) for p in strided.probabilities] == asked
        assert [not math.isnan(p) for p in strided.prices] == (asked if prices else [])
        assert strided.probabilities[1::2] == pytest.approx(one.probabilities[1::2])
        assert strided.nan_steps == 0
    run(model, inputs, stop_policy=ALWAYS)
    for one, strided in zip(every, model.last_stop, strict=True):
        assert strided.step_ends == one.step_ends[:2]


def test_rows_that_something_else_ends_are_let_go(model: OSPrunerForCausalLM) -> None:
    """The padding that follows is no thinking, and no natural end."""
    inputs = inputs_for(model, 3)
    columns = inputs["input_ids"].shape[1] + 9

    def second_after_nine(ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        return (torch.arange(3) == 1) & (ids.shape[1] >= columns)

    how: dict[str, Any] = {"stopping_criteria": [second_after_nine]}
    assert torch.equal(run(model, inputs, stop_policy=UNSTOPPED, **how), run(model, inputs, **how))
    ended = model.last_stop[1]
    assert (ended.thinking_tokens, ended.reason) == (9, "length")
    assert all(end <= 9 for end in ended.step_ends)
    assert all(record.thinking_tokens > 9 for record in model.last_stop[::2])


def test_stop_strings_end_answers_and_cut_no_thinking(model: OSPrunerForCausalLM) -> None:
    """Each row's own answer; where one ends, in which words, is in test_formats_generate.py."""
    inputs, pruned, tokenizer = inputs_for(model, 3), ALWAYS | {"answer": "free"}, model.tokenizer
    whole, closing = run(model, inputs, stop_policy=pruned).tolist(), model.token_format.closing_ids
    begins = [record.thinking_tokens + len(closing) for record in model.last_stop]
    answers = [str(tokenizer.decode(ids[at:])) for ids, at in zip(whole, begins, strict=True)]
    strings = ["\n\n", "=", *(answer.strip()[3:5] for answer in answers)]  # the first ones think
    ended = run(model, inputs, stop_policy=pruned, stop_strings=strings).tolist()
    for ids, at, answer in zip(ended, begins, answers, strict=True):
        told = str(tokenizer.decode(ids[at:], skip_special_tokens=True))
        assert answer.startswith(told)
        assert any(one in told for one in strings)
        assert all(one not in told.strip()[:-8] for one in strings)  # the last token may go on


@pytest.mark.parametrize("rule", [{"seed": 2}, AnswerEntropy(0.05)], ids=["policy", "rule"])
def test_concurrent_calls_do_not_mix(model: OSPrunerForCausalLM, rule: Any) -> None:
    batches = [inputs_for(model, size) for size in (1, 2, 3)]
    how: dict[str, Any] = {"max_new_tokens": 50, "return_dict_in_generate": True, **GREEDY}

    def solve(inputs: dict[str, torch.Tensor]) -> tuple[list[int], Any]:
        output = model.generate(**inputs, **how, stop_policy=rule)
        told = [(r.step_ends, r.signals, r.probe_tokens) for r in output.stop]
        return output.sequences.tolist(), told

    alone = [solve(inputs) for inputs in batches]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(solve, batches)) == alone


class Allow(LogitsProcessor):
    """A grammar: nothing but some tokens, once `begin` stands in the text."""

    def __init__(self, tokens: list[int], begin: int | None = None) -> None:
        self.tokens, self.begin = tokens, begin

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        masked = torch.full_like(scores, -torch.inf)
        masked[:, self.tokens] = scores[:, self.tokens]
        if self.begin is None:
            return masked
        return torch.where((input_ids == self.begin).any(-1)[:, None], masked, scores)


# What forbids the closing of the thinking, or what is forced behind it: its ends are given.
FORBIDDING: list[tuple[str, Callable[[int, int], dict[str, Any]]]] = [
    ("prefix_allowed_tokens_fn", lambda *_: {"prefix_allowed_tokens_fn": lambda *_: [30, 31]}),
    ("Allow", lambda *_: {"logits_processor": [Allow([30, 31])]}),
    ("Allow", lambda end, _: {"logits_processor": [Allow([30, 31], begin=end)]}),
    ("bad_words_ids", lambda end, _: {"bad_words_ids": [[end]]}),
    ("bad_words_ids", lambda end, last: {"bad_words_ids": [[end, last]]}),
    ("sequence_bias", lambda end, _: {"sequence_bias": {(end,): -math.inf}}),
    ("suppress_tokens", lambda _, last: {"suppress_tokens": [last]}),
]


@pytest.mark.parametrize(("name", "forbidding"), FORBIDDING)
def test_a_constraint_that_forbids_what_is_forced_is_refused(
    model: OSPrunerForCausalLM, name: str, forbidding: Any
) -> None:
    end, *_, last = model.token_format.closing_ids
    arguments = forbidding(end, last)
    with pytest.raises(ValueError, match=rf"must force the tokens \[.*\], .* but {name} forbids"):
        run(model, inputs_for(model, 2), stop_policy=ALWAYS, **arguments)
    run(model, inputs_for(model, 2), new=9, stop_policy=False, **arguments)


def test_constraints_that_allow_what_is_forced_are_kept(model: OSPrunerForCausalLM) -> None:
    """A grammar for the answer alone, and words that are banned elsewhere."""
    inputs, fmt = inputs_for(model, 2), model.token_format
    plain = run(model, inputs, stop_policy=False)
    banned = int(plain[0, 1])
    grammar = Allow([*fmt.closing_ids, 30, 31], begin=fmt.think_end_id)
    kept: dict[str, Any] = {"bad_words_ids": [[banned]], "logits_processor": [grammar]}
    written = run(model, inputs, stop_policy={**ALWAYS, "answer": "free"}, **kept)
    for ids, record in zip(written.tolist(), model.last_stop, strict=True):
        assert record.reason == "policy"
        assert banned not in ids
        answer = ids[ids.index(fmt.think_end_id) + len(fmt.closing_ids) :]
        assert answer
        assert set(answer) <= {30, 31, *fmt.closing_ids}


@pytest.mark.parametrize("how", ["min_new_tokens", "min_length", "processor"])
def test_no_row_stops_or_ends_before_the_fewest_tokens(
    model: OSPrunerForCausalLM, how: str
) -> None:
    inputs, least, eos = inputs_for(model, 2), 40, model.generation_config.eos_token_id
    width = inputs["input_ids"].shape[1]
    ways: dict[str, dict[str, Any]] = {
        "min_new_tokens": {"min_new_tokens": least},
        "min_length": {"min_length": width + least},
        "processor": {"logits_processor": [MinNewTokensLengthLogitsProcessor(width, least, eos)]},
    }
    arguments = ways[how]
    run(model, inputs, stop_policy=ALWAYS)
    early = [record.thinking_tokens for record in model.last_stop]
    assert max(early) < least
    run(model, inputs, 90, stop_policy=ALWAYS, **arguments)
    for record in model.last_stop:
        assert record.thinking_tokens >= least or record.reason == "natural"
    # The thinking ends by itself: the box is closed early, and the row goes on.

    def closing(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, model.token_format.think_end_id] += 100.0 * (ids.shape[1] == width + 5)
        return scores

    arguments["logits_processor"] = [*arguments.get("logits_processor", []), closing]
    short: dict[str, Any] = {**NEVER, "max_answer_tokens": 2}
    written = run(model, inputs, 90, stop_policy=short, **arguments)
    assert written.shape[1] == least
    assert [record.reason for record in model.last_stop] == ["natural"] * 2
