"""Requests inside SGLang, followed without it: a small scheduler in its place.

It does with requests what SGLang does: slots are used again, requests are put back and come into
others' slots, prompts are computed in chunks, and steps are scheduled before the last one's tokens
are known.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from modeling_ospruner import OSPrunerForCausalLM
from modeling_ospruner.stopping_ospruner import RowPlan, Said, StopRow
from ospruner.demo.shipped import Reasoner
from ospruner.serving.requests import StopRequest
from ospruner.serving.sglang.stopper import DEFAULTS_VARIABLE, Stopper
from ospruner.train.untrained import untrained

from ...chats import chat_ids
from .test_custom_params import params

SLOTS = 4


@dataclass(eq=False)
class Request:
    """What of SGLang's `Req` is looked at."""

    origin_input_ids: list[int]
    sampling_params: Any
    script: list[int]  # what the base would write
    output_ids: list[int] = field(default_factory=list)
    kv: Any = field(default_factory=lambda: SimpleNamespace(req_pool_idx=None))
    eos_token_ids: frozenset[int] = frozenset()

    @property
    def output_ids_through_stop(self) -> list[int]:
        return self.output_ids

    def next_of_script(self, place: int) -> int:
        return self.script[min(place, len(self.script) - 1)]


def said(tokens: list[int]) -> float:
    """A stop logit, of a text that ends with the last token."""
    return 4 * math.sin(17.0 * len(tokens) + tokens[-1])


class Engine:
    """A scheduler over slots, and the model's part of the stopper."""

    def __init__(self, policy: OSPrunerForCausalLM, folder: Path) -> None:
        unsaid = dict.fromkeys(("tokenizer_path", "revision", "random_seed"))
        own = {
            "server_args": SimpleNamespace(model_path=str(folder), **unsaid),
            "model_config": SimpleNamespace(hf_config=policy.config),
            "req_to_token_pool": SimpleNamespace(req_to_token=torch.zeros(SLOTS, 1)),
        }
        runner = SimpleNamespace(**own, device="cpu", attn_backend=None, model=self)
        self.vocabulary = policy.config.get_text_config().vocab_size
        self.texts: dict[int, list[int]] = {}  # by slot, what has been computed
        self.stopper = Stopper(runner)

    def hold(self, num_slots: int) -> None:
        assert num_slots == SLOTS

    def ask(self, backend: Any, slots: list[int], lengths: list[int]) -> torch.Tensor:
        pairs = zip(slots, lengths, strict=True)
        return torch.tensor([[said(self.texts[slot][:length])] for slot, length in pairs])

    def compute(self, requests: list[Request], lengths: list[int] | None = None) -> list[int]:
        """One batch, by default of whole texts: the tokens that follow."""
        self.stopper.meet(requests)
        tokens, ends = [], []
        slots = [request.kv.req_pool_idx for request in requests]
        logits = torch.zeros(len(requests), self.vocabulary)
        for i, request in enumerate(requests):
            text = [*request.origin_input_ids, *request.output_ids]
            self.texts[slots[i]] = text = text if lengths is None else text[: lengths[i]]
            tokens += text[-3:]  # as if all before were found in the cache
            ends.append(len(text))
            logits[i, request.next_of_script(len(request.output_ids))] = 9.0
        batch = SimpleNamespace(
            req_pool_indices=torch.tensor(slots, dtype=torch.int32),
            seq_lens=torch.tensor(ends),
            input_ids=torch.tensor(tokens),
            extend_start_loc=torch.arange(len(slots)) * 3,
            extend_seq_lens=torch.full((len(slots),), 3),
            forward_mode=SimpleNamespace(is_decode=lambda: False),
        )
        self.stopper.step(logits, batch)
        chosen: list[int] = logits.argmax(-1).tolist()
        return chosen


Saved = tuple[OSPrunerForCausalLM, Path]  # a policy and its folder


@pytest.fixture(scope="module")
def policy(reasoner: Reasoner, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("policy")
    made = untrained(reasoner.model, reasoner.tokenizer, 1, tuning="queries")
    made.save_pretrained(folder)
    return made, folder


@pytest.fixture
def engine(policy: Saved) -> Engine:
    return Engine(*policy)


def make_request(policy: OSPrunerForCausalLM, i: int, **keys: Any) -> Request:
    """Of a prompt that thinks, with a script of paragraphs; each fourth one ends by itself."""
    tokenizer: Any = policy.tokenizer
    prompt = chat_ids(tokenizer, f"Solve {i + 2}x = 6.")
    ends = i % 4 == 3
    written = "".join(f"Step {j}: {i + 3} + {j}.\n\n" for j in range(2 if ends else 8))
    script = tokenizer.encode(written, add_special_tokens=False)
    extra = {"stop_seed": 5, "stop_sample_index": i, **keys}
    if ends:
        extra["stop_threshold"] = 1.0
        script.append(policy.token_format.think_end_id)
    ignored = {"ignore_eos": False, "stop_token_ids": None}
    return Request(prompt, params(custom_params=extra, **ignored), script)


def by_rows(policy: OSPrunerForCausalLM, request: Request, most: int) -> tuple[list[int], Any]:
    """The text that `StopRow` allows, with its record."""
    asked = StopRequest(request.sampling_params.custom_params).settings(StopRequest(None))
    assert asked is not None
    settings, eos = asked.with_defaults(policy.config), frozenset(policy.token_format.eos_ids)
    plan = RowPlan(settings, policy.token_format, eos)
    row = StopRow(plan, request.origin_input_ids, settings.first_sample_index)
    text: list[int] = []
    while len(text) < most:
        if row.at_boundary:
            logit = torch.tensor(said([*request.origin_input_ids, *text]))
            row.decide(Said(float(torch.sigmoid(logit))))
        token = row.forced[0] if row.forced else request.next_of_script(len(text))
        text.append(token)
        if row.push(token) or token in eos:
            break
    return text, row.record


MOST = 40


def check(engine: Engine, policy: OSPrunerForCausalLM, request: Request) -> str:
    """Compares a request that is done; why its thinking ended."""
    record = engine.stopper.record(request)
    assert record is not None
    wanted, told = by_rows(policy, request, MOST)
    assert request.output_ids[: len(wanted)] == wanted
    assert len(request.output_ids) <= len(wanted) + 1  # the end, which is forced here
    for one in ("reason", "thinking_tokens", "step_ends"):
        assert record[one] == getattr(told, one)
    assert record["probabilities"] == pytest.approx(told.probabilities, abs=1e-6, nan_ok=True)
    assert engine.stopper.record(request) is None  # told once
    json.dumps(record, allow_nan=False)
    return str(record["reason"])


def is_done(policy: OSPrunerForCausalLM, request: Request) -> bool:
    ended = bool(request.output_ids) and request.output_ids[-1] in policy.token_format.eos_ids
    return ended or len(request.output_ids) == MOST


def test_requests_are_put_back_and_go_on_in_others_slots(engine: Engine, policy: Saved) -> None:
    """More of them than slots: every few steps all leave, and one token of each is lost."""
    model = policy[0]
    waiting = [make_request(model, i, max_answer_tokens=3) for i in range(12)]
    running, reasons = list[Request](), list[str]()
    for step in range(400):
        if step % 4 == 0 or not running:
            waiting = [*waiting[:2], *running, *waiting[2:]]
            running, waiting = waiting[: SLOTS - 1], waiting[SLOTS - 1 :]
            for slot, request in enumerate(running, start=1):
                request.kv.req_pool_idx = slot
            # The prompts' first parts are computed apart.
            engine.compute(running, [len(one.origin_input_ids) - 2 for one in running])
        if not running:
            break
        tokens = engine.compute(running)
        for request, token in zip([] if step % 4 == 3 else list(running), tokens, strict=False):
            request.output_ids.append(token)
            if is_done(model, request):
                running.remove(request)
                engine.compute([request])  # scheduled before its end was known
                reasons.append(check(engine, model, request))
    assert len(reasons) == 12
    assert {"policy", "natural"} <= set(reasons)


def test_requests_that_do_not_ask_are_left_alone(
    policy: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a server that says so."""
    monkeypatch.setenv(DEFAULTS_VARIABLE, json.dumps({"stop_policy": False}))
    model, engine = policy[0], Engine(*policy)
    asking, other = make_request(model, 0), make_request(model, 1)
    other.sampling_params.custom_params = None
    wrong = make_request(model, 2, stop_treshold=1)  # which the server refuses
    requests = [asking, other, wrong]
    for slot, request in enumerate(requests, start=1):
        request.kv.req_pool_idx = slot
    for _ in range(MOST):
        for request, token in zip(requests, engine.compute(requests), strict=True):
            request.output_ids.append(token)
    wanted = [*other.script, *[other.script[-1]] * MOST][:MOST]
    assert other.output_ids == wanted
    assert wrong.output_ids[: len(wrong.script)] == wrong.script[:MOST]
    assert engine.stopper.record(other) is engine.stopper.record(wrong) is None


@pytest.mark.parametrize("ends", [False, True])
def test_no_request_ends_before_its_own_minimum(engine: Engine, policy: Saved, ends: bool) -> None:
    """Not by the policy, and after a natural end not by its answer's closing brace."""
    model, least = policy[0], 36
    request = make_request(model, 3 if ends else 0, max_answer_tokens=1)
    if not ends:
        request.sampling_params.custom_params["stop_threshold"] = 0.0  # at the first step end
    request.sampling_params.min_new_tokens, request.kv.req_pool_idx = least, 1
    for _ in range(least + 20):
        request.output_ids.append(engine.compute([request])[0])
    text, fmt = request.output_ids, model.token_format
    end = next(i for i, token in enumerate(text) if token in fmt.eos_ids)
    closed = text.index(fmt.think_end_id)
    assert (closed < least <= end) if ends else (least <= closed < end)
    assert set(text[end:]) == set(fmt.eos_ids)


def test_the_answer_says_that_a_grammar_put_the_policy_off(
    policy: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DEFAULTS_VARIABLE, json.dumps({"stop_policy": True}))
    engine = Engine(*policy)
    request, plain = make_request(policy[0], 0), make_request(policy[0], 0)
    for slot, one in enumerate((request, plain), start=1):
        one.sampling_params.custom_params, one.kv.req_pool_idx = None, slot
    request.sampling_params.json_schema = "{}"
    plain.sampling_params.custom_params = {"stop_policy": False}
    engine.compute([request, plain])
    assert engine.stopper.record(request) == {"off": "json_schema"}
    assert engine.stopper.record(request) is engine.stopper.record(plain) is None
