"""What needs vLLM, but no engine: refusals at start, and the batches that processors see.

Run by test_plugin.py.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate

from modeling_ospruner import OSPrunerForCausalLM
from modeling_ospruner.formats_ospruner import BREAK, VISIBLE
from modeling_ospruner.policy_ospruner import price_logits, price_places
from ospruner.demo.shipped import Reasoner
from ospruner.serving.policies import check_base_weights, merge_adapters
from ospruner.serving.requests import DEFAULTS
from ospruner.serving.vllm.model import (
    STOP_HEAD,
    StopHead,
    check_start,
)
from ospruner.serving.vllm.plugin import PROCESSOR
from ospruner.serving.vllm.processor import StopProcessor
from ospruner.serving.vllm.runner_v1 import V1Processor
from ospruner.serving.vllm.runner_v2 import V2Processor
from ospruner.train.untrained import untrained

from ...broken_tensors import BROKEN, break_tensors
from ..sglang.test_stopper import MOST, SLOTS, Request, by_rows, make_request, said
from .plugin_replay import make_policy


@pytest.fixture(scope="module")
def model(reasoner: Reasoner, tmp_path_factory: pytest.TempPathFactory) -> OSPrunerForCausalLM:
    folder = tmp_path_factory.mktemp("policy")
    made = make_policy(reasoner, folder)
    made.config._name_or_path = str(folder)
    return made


def started(model: OSPrunerForCausalLM, **differing: Any) -> Any:
    """As much of vLLM's configuration as `check_start` reads."""
    values: dict[str, Any]
    values = {"v2": False, "speculative": None, "pipeline": 1, "processors": [PROCESSOR]}
    values |= {"config": model.config, "parser": "ospruner"}
    values |= {"folder": model.config._name_or_path}
    values |= differing
    return SimpleNamespace(
        use_v2_model_runner=values["v2"],
        speculative_config=values["speculative"],
        structured_outputs_config=SimpleNamespace(reasoning_parser=values["parser"]),
        parallel_config=SimpleNamespace(pipeline_parallel_size=values["pipeline"]),
        model_config=SimpleNamespace(
            logits_processors=values["processors"],
            hf_config=values["config"],
            model=values["folder"],
            revision=None,
        ),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
    )


def changed(model: OSPrunerForCausalLM, **fields: Any) -> Any:
    """Its configuration with other fields, of the base where the policy has none of them."""
    config = copy.deepcopy(model.config)
    for name, value in fields.items():
        setattr(config if name in vars(config) else config.text_config, name, value)
    return config


def test_what_would_not_stop_is_refused_at_start(model: OSPrunerForCausalLM) -> None:
    check_start(started(model))
    check_start(started(model, processors=["a:B", StopProcessor]))
    olmo = changed(model)
    olmo.text_config.model_type = "olmo2"
    for differing, message in (
        ({"v2": True}, "takes policies of tuning 'queries' only.*VLLM_USE_V2_MODEL_RUNNER=0"),
        ({"speculative": object()}, "speculative decoding is on.*--speculative-config"),
        (
            {
                "v2": True,
                "config": changed(model, tuning="queries"),
                "speculative": SimpleNamespace(method="eagle3"),
            },
            "'eagle3', which reads the hidden.*works with ngram, ngram_gpu, draft_model",
        ),
        ({"pipeline": 2}, "pipeline_parallel_size is 2.*--tensor-parallel-size"),
        ({"processors": None}, rf"nothing would stop.*--logits-processors {PROCESSOR}"),
        (
            {"config": olmo},
            "is a olmo2; inside vLLM the policy works with qwen2, qwen3, qwen3_moe, llama, m",
        ),
        ({"parser": "openai_gptoss"}, "'openai_gptoss'.*type is gpt_oss.*parser ospruner_harmony"),
        (
            {"config": changed(model, method="flashthink")},
            "is a verifier, which reads another",
        ),
        ({"config": changed(model, hidden_size=64)}, "hidden_size 128 where the policy needs 64"),
    ):
        with pytest.raises(ValueError, match=message):
            check_start(started(model, **differing))
    absent = changed(model, base_model_name_or_path="/nowhere/at/all")
    with pytest.raises(OSError, match="the base '/nowhere/at/all' at revision None, which the"):
        check_start(started(model, config=absent))


@pytest.mark.parametrize(
    ("field", "value", "advice"),
    [
        ("cache_dtype", "fp8", "leave --kv-cache-dtype out"),
        ("data_parallel_size", 2, "use --tensor-parallel-size"),
        ("decode_context_parallel_size", 2, "use --tensor-parallel-size"),
        ("prefill_context_parallel_size", 4, "use --tensor-parallel-size"),
        ("use_ubatching", True, "leave --enable-dbo out"),
    ],
)
def test_what_queries_cannot_do_is_refused_at_start(
    model: OSPrunerForCausalLM, field: str, value: Any, advice: str
) -> None:
    config = started(model, config=changed(model, tuning="queries"))
    config.cache_config = SimpleNamespace(cache_dtype="auto")
    for name in ("data", "decode_context", "prefill_context"):
        setattr(config.parallel_config, f"{name}_parallel_size", 1)
    config.parallel_config.use_ubatching = False
    part = config.cache_config if field == "cache_dtype" else config.parallel_config
    setattr(part, field, value)
    with pytest.raises(ValueError, match=rf"{field} is {value!r}, and .* inside vLLM .*{advice}"):
        check_start(config)


def test_adapters_are_merged_into_copies_of_the_bases_layers() -> None:
    torch.manual_seed(0)
    down, up, weight = torch.randn(2, 6), torch.randn(4, 2), torch.randn(4, 6)
    at = "policy.tail.layers.0.self_attn.q_proj"
    adapters = {f"{at}.lora_A.default.weight": down, f"{at}.lora_B.default.weight": up}
    norm = torch.randn(6)
    base = {
        "base.model.layers.0.self_attn.q_proj.weight": torch.zeros(4, 6),
        "base.model.layers.1.self_attn.q_proj.weight": weight,
        "base.model.layers.1.input_layernorm.weight": norm,
        "base.model.norm.weight": norm + 1,
    }
    found = dict(merge_adapters([*adapters.items(), *base.items()], 2, 1))
    assert set(found) - set(base) == {
        f"{at}.weight",
        "policy.tail.layers.0.input_layernorm.weight",
        "policy.tail.norm.weight",
    }
    torch.testing.assert_close(found[f"{at}.weight"], weight + 2 * up @ down)
    assert all(torch.equal(found[name], tensor) for name, tensor in base.items())
    assert torch.equal(found["policy.tail.norm.weight"], norm + 1)
    base["base.model.layers.1.self_attn.q_proj.weight"] = weight.to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"layers.0.self_attn.q_proj cannot be merged.*_rank"):
        list(merge_adapters([*base.items(), *adapters.items()], 2, 1))


def other_base(reasoner: Reasoner, folder: Path) -> Path:
    """A copy of the reasoner, to be changed."""
    return Path(shutil.copytree(reasoner.folder, folder / "base"))


def test_a_base_of_other_weights_is_refused_at_start(
    model: OSPrunerForCausalLM, reasoner: Reasoner, tmp_path: Path
) -> None:
    folder = other_base(reasoner, tmp_path)
    moved = changed(model, base_model_name_or_path=str(folder))
    check_start(started(model, config=moved))  # the same weights, lying elsewhere
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] *= 1.01  # not the norm, which is compared too
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    known = model.config.base_fingerprint
    assert known is not None
    message = rf"'{folder}' has other weights \(fingerprint .*trained on it \(fingerprint {known}\)"
    with pytest.raises(ValueError, match=message):
        check_start(started(model, config=moved))
    with pytest.raises(ValueError, match=message):
        check_base_weights(moved, None)  # after the download of a base that was not there


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"rope_type": "dynamic", "factor": 4.0}, r"\d+"),
        (
            {
                "rope_type": "longrope", "original_max_position_embeddings": 64,
                "short_factor": [1.0] * 16, "long_factor": [4.0] * 16,
            },
            "64",
        ),
    ],
    ids=["dynamic", "longrope"],
)  # fmt: skip
def test_positions_that_change_with_the_length_are_refused_at_start(
    model: OSPrunerForCausalLM,
    reasoner: Reasoner,
    tmp_path: Path,
    rope: dict[str, Any],
    length: str,
) -> None:
    folder = other_base(reasoner, tmp_path)
    literals = json.loads((folder / "config.json").read_text("utf-8"))
    literals["rope_parameters"] = {"rope_theta": 1e4, **rope}
    (folder / "config.json").write_text(json.dumps(literals), "utf-8")
    moved = changed(model, base_model_name_or_path=str(folder))
    message = rf"has rope_type '{rope['rope_type']}', whose positions change .*\(from {length} tok"
    with pytest.raises(ValueError, match=message):
        check_start(started(model, config=moved))


@pytest.mark.parametrize("how", BROKEN)
def test_broken_tensors_are_refused_at_start(
    model: OSPrunerForCausalLM, tmp_path: Path, how: str
) -> None:
    folder = shutil.copytree(model.config._name_or_path, tmp_path / "policy")
    said = break_tensors(folder, how)
    with pytest.raises(ValueError, match=said):
        check_start(started(model, folder=str(folder)))


def engine_config(
    model: OSPrunerForCausalLM, head: StopHead, defaults: dict[str, Any], drafts: int = 0
) -> Any:
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
        additional_config={DEFAULTS: defaults},
        compilation_config=SimpleNamespace(static_forward_context={STOP_HEAD: head}),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        speculative_config=SimpleNamespace(num_speculative_tokens=drafts) if drafts else None,
        parallel_config=SimpleNamespace(rank=1),
    )


class Batch:
    """vLLM's batch as a processor sees it; each row's stop logit is what `say` told last."""

    def __init__(self, model: OSPrunerForCausalLM, **defaults: Any) -> None:
        self.head = StopHead(1, model.policy.head.out_features)
        config = engine_config(model, self.head, defaults)
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


def test_a_preempted_request_goes_on_with_another_list(model: OSPrunerForCausalLM) -> None:
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
    told = batch.processor.record("b")
    assert told is requests[2].served.record
    # It ends there by its own probability: one step, decided once, and the closing forced.
    swapped[2].append(end)
    left = batch.step(logit=9.0)
    assert told is not None
    assert told.step_ends == [3, 5]
    assert told.reason == "policy"
    assert left[2].isfinite().nonzero().tolist() == [[fmt.forced_suffix()[0]]]


def test_rows_of_one_batch_stop_at_prices_of_their_own(reasoner: Reasoner, tmp_path: Path) -> None:
    """One tail and one head for all: each row is compared at its own price."""
    named: dict[str, Any] = {"base_model_name_or_path": str(reasoner.folder)}
    model = untrained(
        reasoner.model, reasoner.tokenizer, tuning="layers", price_range=(5e-5, 1e-2), **named
    )
    model.config.price = 1e-3
    model.save_pretrained(tmp_path)
    model.config._name_or_path = str(tmp_path)
    known = model.config.prices
    assert known is not None
    ids = reasoner.tokenizer.encode("<think>\nSo it is.", add_special_tokens=False)
    end = next(i for i, kind in enumerate(model.token_format.kinds) if kind & BREAK)
    extra = {"stop_mode": "threshold", "stop_threshold": 0.5}
    batch = Batch(model, stop_price=2e-4)
    texts: list[list[int]] = [[], [], []]
    asked = (2e-4, 1e-3, 1e-2)  # the server's default, and what requests say
    params = [SamplingParams(extra_args=extra | {"stop_id": name}) for name in "abc"]
    for one, price in zip(params[1:], asked[1:], strict=True):
        one.extra_args = {**(one.extra_args or {}), "stop_price": price}
    batch.update([], {i: (params[i], ids, texts[i]) for i in range(3)})
    places = [one.served.admitted.place for one in batch.processor._requests.values()]
    assert places == [known.place(price) for price in asked]
    batch.step()
    for text in texts:
        text.append(end)
    last = torch.tensor([len(ids)] * 3, dtype=torch.int32)
    said = torch.tensor([[-2.0, 0.3, 0.4, 0.5, 0.6, 0.7]]).expand(3, 6)
    batch.head.outputs, batch.head.positions = said, last
    batch.processor.apply(torch.zeros(3, 640))
    for name, price in zip("abc", asked, strict=True):
        told = batch.processor.record(name)
        assert told is not None
        logit = price_logits(said[0], torch.tensor(known.place(price)))
        assert told.probabilities == pytest.approx([float(logit.sigmoid())])
        assert told.prices == [known.price_at(float(price_places(said[0])))]
        assert told.reason == ("policy" if told.prices[0] <= price else "length")
    assert len({batch.processor.record(name).probabilities[0] for name in "abc"}) == 3  # type: ignore[union-attr]
    for wrong in (0.5, -1):
        with pytest.raises(ValueError, match="stop_price is"):
            Batch(model, stop_price=wrong)
    # Over HTTP it is refused; an error in the engine would end all requests.
    batch.update([], {3: (SamplingParams(extra_args=extra | {"stop_price": 0.5}), ids, [])})
    assert 3 not in batch.processor._requests


class RunnerV2:
    """vLLM's model runner V2 as its processor sees it: slots, drafts, and a base that recites."""

    def __init__(self, model: OSPrunerForCausalLM, drafts: int) -> None:
        self.drafts, self.here = drafts, dict[int, tuple[str, Request, list[int]]]()
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
        self.processor = V2Processor(engine_config(model, head, {}, drafts), slots)

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
        return torch.tensor([[said(texts[row][:length])] for row, length in pairs])

    def step(self, draw: random.Random) -> None:
        """One forward: each request's last token and its drafts, some of them wrong."""
        rows: list[tuple[int, int, int, int]] = []
        scripts, starts, positions = [], [0], list[int]()
        for slot, (name, one, _) in self.here.items():
            done, end = len(one.output_ids), len(one.origin_input_ids) + len(one.output_ids) - 1
            tokens = [self.written(one, done + j) for j in range(self.drafts)]
            tokens = [draw.choice([token, token, 7]) for token in tokens]
            self.here[slot] = (name, one, tokens)
            for j, token in enumerate([int(self.ids[slot, end]), *tokens]):
                rows.append((slot, j, end + j, token))
                scripts.append(self.written(one, done + j))
            positions += range(end, end + 1 + len(tokens))
            starts.append(len(positions))
        slots = torch.tensor([*self.here])
        expanded, local, pos, ids = torch.tensor(rows).unbind(1)
        self.arrivals.batch = SimpleNamespace(
            idx_mapping_np=slots.numpy(),
            query_start_loc=torch.tensor(starts),
            positions=torch.tensor(positions),
        )
        ctx: Any = SimpleNamespace(
            idx_mapping=slots,
            idx_mapping_np=slots.numpy(),
            expanded_idx_mapping=expanded,
            expanded_local_pos=local,
            pos=pos,
            input_ids=ids,
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
    model = untrained(
        reasoner.model, reasoner.tokenizer, 1, base_model_name_or_path=str(reasoner.folder)
    )
    model.save_pretrained(tmp_path)
    model.config._name_or_path = str(tmp_path)
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
            told, (wanted, record) = runner.processor.record(name), by_rows(model, one, MOST)
            assert ids[: len(wanted)] == wanted
            assert len(ids) <= len(wanted) + 1  # the end, which is forced here
            assert told is not None
            known = (told.reason, told.thinking_tokens, told.step_ends)
            assert known == (record.reason, record.thinking_tokens, record.step_ends)
            assert told.probabilities == pytest.approx(record.probabilities, abs=1e-6)
            reasons.append(told.reason)
    assert len(reasons) == 10
    assert {"policy", "natural"} <= set(reasons)
