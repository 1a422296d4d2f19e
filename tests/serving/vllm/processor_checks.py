"""The batches that processors of both runners see, without an engine; run by test_plugin.py."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.sample.logits_processor import BatchUpdate

from modeling_ospruner import OSPrunerForCausalLM as Policy
from modeling_ospruner.formats_ospruner import BREAK, VISIBLE
from ospruner.demo.shipped import Reasoner
from ospruner.serving.vllm.model import STOP_HEAD, StopHead
from ospruner.serving.vllm.runner_v1 import V1Processor
from ospruner.serving.vllm.runner_v2 import V2Processor

from ..sglang.test_stopper import MOST, SLOTS, Request, by_rows, make_request, said
from .plugin_replay import make_policy


@pytest.fixture(scope="module")
def model(reasoner: Reasoner, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return make_policy(reasoner, tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def queries(reasoner: Reasoner, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return make_policy(reasoner, tmp_path_factory.mktemp("queries"), 1, "queries")


def engine_config(model: Policy, head: StopHead, drafts: int = 0) -> Any:
    """As much of vLLM's configuration as processors read."""
    folder = model.config._name_or_path
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=model.config,
            architectures=[type(model).__name__],
            model=folder,
            tokenizer=folder,
            tokenizer_revision=None,
            seed=0,
        ),
        additional_config={},
        compilation_config=SimpleNamespace(static_forward_context={STOP_HEAD: head}),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        speculative_config=SimpleNamespace(num_speculative_tokens=drafts) if drafts else None,
        parallel_config=SimpleNamespace(rank=1),
    )


class Batch:
    """vLLM's batch as a processor sees it; each row's stop logit is what `say` told last."""

    def __init__(self, model: Policy) -> None:
        self.head = StopHead(1, model.policy.head.out_features)
        config = engine_config(model, self.head)
        self.processor = V1Processor(config, torch.device("cpu"), False)
        self.rows: dict[int, tuple[SamplingParams, list[int], list[int]]] = {}

    def update(
        self, removed: list[int], added: dict[int, tuple[SamplingParams, list[int], list[int]]]
    ) -> None:
        for i in removed:
            del self.rows[i]
        self.rows |= added
        entering = [(i, *row) for i, row in added.items()]
        replaced = [i for i in removed if i not in added]  # as vLLM: an index taken again is not in
        self.processor.update_state(BatchUpdate(len(self.rows), replaced, entering, []))

    def step(self, logit: float = -9.0) -> torch.Tensor:
        """The logits that are left, (B, V)."""
        size = 1 + max(self.rows)
        last = [len(self.rows[i][1]) + len(self.rows[i][2]) - 1 for i in range(size)]
        self.head.outputs = torch.full((size, self.head.out_features), logit)
        self.head.positions = torch.tensor(last, dtype=torch.int32)
        return self.processor.apply(torch.zeros(size, 640))


def test_a_preempted_request_goes_on_with_another_list(model: Policy) -> None:
    """As where steps are scheduled ahead; also if it leaves and comes back in one step."""
    fmt, batch = model.token_format, Batch(model)
    ids = model.tokenizer.encode("<think>\nSo it is.", add_special_tokens=False)
    word = next(i for i, kind in enumerate(fmt.kinds) if kind == VISIBLE)
    end = next(i for i, kind in enumerate(fmt.kinds) if kind & BREAK)
    extra = {"stop_mode": "threshold", "stop_threshold": 0.5}
    params = [SamplingParams(extra_args=extra | {"stop_id": name}) for name in "ab"]
    # Two texts of one prompt, which share their parameters, and another request.
    texts: list[list[int]] = [[], [], []]
    rows = [(params[0], ids, texts[0]), (params[0], ids, texts[1]), (params[1], ids, texts[2])]
    batch.update([], dict(enumerate(rows)))
    requests = dict(batch.processor._requests)
    assert len({id(request) for request in requests.values()}) == 3
    for tokens in ((word, word + 1, word), (word, word, word), (end, end, end)):
        for text, token in zip(texts, tokens, strict=True):
            text.append(token)
        batch.step()
    for text in texts:
        text.append(word)
    batch.step()
    texts[1].append(-1)  # sampled, but not told yet
    batch.update([0, 1, 2], {})
    swapped = [[*text] for text in texts]
    swapped[1][-1] = end
    rows = [(*row[:2], text) for row, text in zip(rows, swapped, strict=True)]
    batch.update([], {0: rows[1], 1: rows[2]})
    assert batch.processor._requests == {0: requests[1], 1: requests[2]}
    batch.step()
    batch.update([0, 1], {0: rows[0], 1: (*rows[1][:2], [*swapped[1]]), 2: rows[2]})
    assert batch.processor._requests == requests
    for request, steps in zip(requests.values(), ([3], [3, 5], [3]), strict=True):
        assert request.served.record.step_ends == steps
    [named] = batch.processor.named("stop_id", "b")
    told = named.record
    assert named is requests[2].served
    # It ends there by its own probability: one step, decided once, and the closing forced.
    swapped[2].append(end)
    left = batch.step(logit=9.0)
    assert told.step_ends == [3, 5]
    assert told.reason == "policy"
    assert left[2].isfinite().nonzero().tolist() == [[fmt.forced_suffix()[0]]]


COLUMNS = ("expanded_idx_mapping", "expanded_local_pos", "pos", "input_ids")


class RunnerV2:
    """vLLM's model runner V2 as its processor sees it: slots, drafts, and a base that recites."""

    def __init__(self, model: Policy, drafts: int) -> None:
        self.drafts, self.here = drafts, dict[int, tuple[str, Request, list[int]]]()
        self.allowed: Callable[[list[int]], set[int] | None] = lambda ids: None  # by a grammar
        self.ids = torch.zeros(SLOTS, 300, dtype=torch.int32)
        self.total = torch.zeros(SLOTS, dtype=torch.int32)
        head: Any = StopHead(1, 1)
        head.weight.data.fill_(1.0)
        head.bias.data.zero_()
        head.pages = SimpleNamespace(hidden=self.hidden)
        self.arrivals = SimpleNamespace(entering={}, leaving=None, batch=None)
        head.arrivals = self.arrivals
        slots: Any = SimpleNamespace(
            device=torch.device("cpu"),
            max_num_reqs=SLOTS,
            total_len=SimpleNamespace(gpu=self.total),
            all_token_ids=SimpleNamespace(gpu=self.ids),
        )
        self.processor = V2Processor(engine_config(model, head, drafts), slots)

    def come(self, slot: int, name: str, request: Request, **more: Any) -> None:
        text = [*request.origin_input_ids, *request.output_ids]
        self.ids[slot, : len(text)] = torch.tensor(text)
        self.total[slot], self.here[slot] = len(text), (name, request, [])
        self.arrivals.entering[slot] = SimpleNamespace(
            req_id=name, prompt_token_ids=request.origin_input_ids, prefill_token_ids=text
        )
        keys = request.sampling_params.custom_params | {"stop_id": name}
        self.processor.add_request(slot, SamplingParams(max_tokens=MOST, extra_args=keys, **more))

    def leave(self, slot: int) -> None:
        self.arrivals.leaving(self.here.pop(slot)[0])

    def hidden(self, rows: Any, lengths: Any, places: Any) -> torch.Tensor:
        texts = [one.origin_input_ids + one.output_ids + d for _, one, d in self.here.values()]
        asked = [
            texts[row][:length] for row, length in zip(rows.tolist(), lengths.tolist(), strict=True)
        ]
        assert not any(-1 in text for text in asked)  # no draft: it and what follows are rejected
        return torch.tensor([[said(text)] for text in asked])

    def step(self, draw: random.Random) -> None:
        """One forward: each request's last token and its drafts, some of them wrong."""
        rows: list[tuple[int, int, int, int]] = []
        scripts, starts, positions = [], [0], list[int]()
        for slot, (name, one, _) in self.here.items():
            done, end = len(one.output_ids), len(one.origin_input_ids) + len(one.output_ids) - 1
            tokens = [self.written(one, done + j) for j in range(self.drafts)]
            tokens = [draw.choice([token, token, token, 7, -1]) for token in tokens]
            self.here[slot] = (name, one, tokens)
            for j, token in enumerate([int(self.ids[slot, end]), *tokens]):
                rows.append((slot, j, end + j, token))
                scripts.append(self.written(one, done + j))
            positions += range(end, end + 1 + len(tokens))
            starts.append(len(positions))
        slots = torch.tensor([*self.here])
        self.arrivals.batch = SimpleNamespace(
            idx_mapping_np=slots.numpy(),
            query_start_loc=torch.tensor(starts),
            positions=torch.tensor(positions),
        )
        ctx: Any = SimpleNamespace(
            idx_mapping=slots,
            idx_mapping_np=slots.numpy(),
            **dict(zip(COLUMNS, torch.tensor(rows).unbind(1), strict=True)),
        )
        logits = torch.zeros(len(rows), 640)
        logits[torch.arange(len(rows)), torch.tensor(scripts)] = 9.0
        for place, (slot, *_) in enumerate(rows):
            if (allowed := self.allowed(self.here[slot][1].output_ids)) is not None:
                logits[place, [i for i in range(640) if i not in allowed]] = -math.inf
        chosen = iter(self.processor.apply(logits, ctx).argmax(-1).tolist())
        for slot, (_, one, tokens) in self.here.items():
            sampled = [next(chosen) for _ in range(1 + len(tokens))]
            right = [a == b for a, b in zip(sampled, [*tokens, -1], strict=True)].index(False)
            taken = sampled[: right + 1]
            at = int(self.total[slot])
            self.ids[slot, at : at + len(taken)] = torch.tensor(taken, dtype=torch.int32)
            self.total[slot] += len(taken)
            one.output_ids += taken

    @staticmethod
    def written(one: Request, i: int) -> int:
        return one.script[min(i, len(one.script) - 1)]


@pytest.mark.parametrize("drafts", [0, 3])
def test_slots_of_runner_v2_stop_as_rows_do(queries: Policy, drafts: int) -> None:
    """Through slots that are used again, preempted in between, and ahead of what stands."""
    model = queries
    runner, draw = RunnerV2(model, drafts), random.Random(0)
    waiting = [make_request(model, i, max_answer_tokens=3) for i in range(10)]
    names = {id(request): f"r{i}" for i, request in enumerate(waiting)}
    reasons = []
    for step in range(200):
        if step % 5 == 4 and runner.here:  # the oldest is preempted
            slot = min(runner.here)
            waiting.insert(0, runner.here[slot][1])
            runner.leave(slot)
        for slot in sorted(set(range(SLOTS)) - set(runner.here), reverse=True):
            if waiting:
                request = waiting.pop(0)
                runner.come(slot, names[id(request)], request)
        if not runner.here:
            break
        runner.step(draw)
        for slot, (name, one, _) in list(runner.here.items()):
            ends = [i for i, t in enumerate(one.output_ids) if t in model.token_format.eos_ids]
            if not ends and len(one.output_ids) < MOST:
                continue
            runner.leave(slot)
            ids = one.output_ids[: min([MOST, *(i + 1 for i in ends)])]
            [named], (wanted, record) = (
                runner.processor.named("stop_id", name),
                by_rows(model, one, MOST),
            )
            told = named.record
            assert ids[: len(wanted)] == wanted
            assert len(ids) <= len(wanted) + 1  # the end, which is forced here
            known = (told.reason, told.thinking_tokens, told.step_ends)
            assert known == (record.reason, record.thinking_tokens, record.step_ends)
            assert told.probabilities == pytest.approx(record.probabilities, abs=1e-6)
            reasons.append(told.reason)
    assert len(reasons) == 10
    assert {"policy", "natural"} <= set(reasons)


@pytest.mark.parametrize("held", [False, True])
def test_a_grammar_in_runner_v2(queries: Policy, held: bool) -> None:
    """It governs the answer of a pruned thinking; where it holds before, the policy is off."""
    model, runner, draw = queries, RunnerV2(queries, 0), random.Random(0)
    end, ruled = model.token_format.think_end_id, {11, 12}
    for number in range(3):
        request = make_request(model, number, max_answer_tokens=None)
        request.sampling_params.custom_params = {"stop_mode": "threshold", "stop_threshold": 0.0}
        wanted, record = by_rows(model, request, MOST)
        assert record.reason == "policy"
        # The thinking's end turns it on, unless it holds before.
        runner.allowed = lambda ids: ruled if held or end in ids else None
        grammar = StructuredOutputsParams(regex="a")
        runner.come(0, f"g{number}", request, structured_outputs=grammar)
        ids = request.output_ids
        while len(ids) < record.thinking_tokens + 8:
            runner.step(draw)
        [named] = runner.processor.named("stop_id", f"g{number}")
        told = named.record
        runner.leave(0)
        if held:
            assert set(ids) <= ruled
            assert told.reason == "length"
            continue
        at = ids.index(end)
        assert ids[: at + 1] == wanted[: at + 1]
        assert set(ids[at + 1 :]) <= ruled  # no box is forced
        assert (told.reason, told.thinking_tokens) == ("policy", at)
