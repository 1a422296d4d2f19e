"""What processors of both runners see, without an engine; run by test_plugin.py."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from modeling_ospruner import OSPrunerForCausalLM as Policy
from ospruner.demo.shipped import Reasoner
from ospruner.serving.vllm.model import STOP_HEAD, StopHead
from ospruner.serving.vllm.runner_v1 import _Request
from ospruner.serving.vllm.runner_v2 import V2Processor

from ..sglang.test_stopper import MOST, SLOTS, Request, by_rows, make_request, said
from .plugin_replay import make_policy


def test_a_request_that_comes_back_to_v1_is_known_by_its_parameters_and_tokens() -> None:
    """Texts of one prompt share their parameters; lists are others where steps are ahead."""
    served: Any = SimpleNamespace(taken=3)  # its prompt
    params, text = SamplingParams(), [7, 8, 9]
    request = _Request(served, params, text)
    served.taken += 2
    assert request.comes_back(params, text)
    assert request.comes_back(params, [7, 8])
    assert not request.comes_back(params, [7, 9, 9])  # another text
    assert not request.comes_back(params, [7])
    assert not request.comes_back(SamplingParams(), text)


COLUMNS = ("expanded_idx_mapping", "expanded_local_pos", "pos", "input_ids")


class RunnerV2:
    """vLLM's model runner V2 as its processor sees it: slots, drafts, and a base that recites."""

    def __init__(self, model: Policy, drafts: int) -> None:
        self.drafts, self.here = drafts, dict[int, tuple[str, Request, list[int]]]()
        self.ids = torch.zeros(SLOTS, 300, dtype=torch.int32)
        self.total = torch.zeros(SLOTS, dtype=torch.int32)
        head: Any = StopHead(1, 1)
        head.weight.data.fill_(1.0)
        head.bias.data.zero_()
        head.pages = SimpleNamespace(hidden=self.hidden)
        self.arrivals = head.arrivals = SimpleNamespace(entering={}, leaving=None, batch=None)
        slots: Any = SimpleNamespace(
            device=torch.device("cpu"),
            max_num_reqs=SLOTS,
            total_len=SimpleNamespace(gpu=self.total),
            all_token_ids=SimpleNamespace(gpu=self.ids),
        )
        folder = model.config._name_or_path
        named = {"hf_config": model.config, "tokenizer": folder, "tokenizer_revision": None}
        config: Any = SimpleNamespace(
            model_config=SimpleNamespace(seed=0, **named),
            additional_config={},
            compilation_config=SimpleNamespace(static_forward_context={STOP_HEAD: head}),
            speculative_config=SimpleNamespace(num_speculative_tokens=drafts) if drafts else None,
            parallel_config=SimpleNamespace(rank=1),
        )
        self.processor = V2Processor(config, slots)

    def come(self, slot: int, name: str, request: Request) -> None:
        text = [*request.origin_input_ids, *request.output_ids]
        self.ids[slot, : len(text)] = torch.tensor(text)
        self.total[slot], self.here[slot] = len(text), (name, request, [])
        self.arrivals.entering[slot] = SimpleNamespace(
            req_id=name, prompt_token_ids=request.origin_input_ids, prefill_token_ids=text
        )
        keys = request.sampling_params.custom_params | {"stop_id": name}
        self.processor.add_request(slot, SamplingParams(max_tokens=MOST, extra_args=keys))

    def leave(self, slot: int) -> None:
        self.arrivals.leaving(self.here.pop(slot)[0])

    def hidden(self, rows: Any, lengths: Any, places: Any) -> torch.Tensor:
        texts = [one.origin_input_ids + one.output_ids + d for _, one, d in self.here.values()]
        pairs = zip(rows.tolist(), lengths.tolist(), strict=True)
        asked = [texts[row][:length] for row, length in pairs]
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
def test_slots_of_runner_v2_stop_as_rows_do(
    reasoner: Reasoner, tmp_path: Path, drafts: int
) -> None:
    """Through slots that are used again, preempted in between, and ahead of what stands."""
    model = make_policy(reasoner, tmp_path, 1, "queries")
    runner, draw = RunnerV2(model, drafts), random.Random(0)
    waiting = [(f"r{i}", make_request(model, i, max_answer_tokens=3)) for i in range(10)]
    reasons = []
    for step in range(200):
        if step % 5 == 4 and runner.here:  # the oldest is preempted
            slot = min(runner.here)
            waiting.insert(0, runner.here[slot][:2])
            runner.leave(slot)
        for slot in sorted(set(range(SLOTS)) - set(runner.here), reverse=True):
            if waiting:
                runner.come(slot, *waiting.pop(0))
        if not runner.here:
            break
        runner.step(draw)
        for slot, (name, one, _) in list(runner.here.items()):
            ends = [i for i, t in enumerate(one.output_ids) if t in model.token_format.eos_ids]
            if not ends and len(one.output_ids) < MOST:
                continue
            runner.leave(slot)
            ids = one.output_ids[: min([MOST, *(i + 1 for i in ends)])]
            [named] = runner.processor.named("stop_id", name)
            told, (wanted, record) = named.record, by_rows(model, one, MOST)
            assert ids[: len(wanted)] == wanted
            assert len(ids) <= len(wanted) + 1  # the end, which is forced here
            known = (told.reason, told.thinking_tokens, told.step_ends)
            assert known == (record.reason, record.thinking_tokens, record.step_ends)
            assert told.probabilities == pytest.approx(record.probabilities, abs=1e-6)
            reasons.append(told.reason)
    assert len(reasons) == 10
    assert {"policy", "natural"} <= set(reasons)
