"""What needs vLLM, but no engine: refusals at start, and how chat replies are split into thinking
and answer. Run by test_plugin.py.
"""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from vllm import SamplingParams
from vllm.reasoning import ReasoningParserManager
from vllm.v1.sample.logits_processor import BatchUpdate

from modeling_ospruner import OSPrunerForCausalLM
from modeling_ospruner.formats_ospruner import BREAK, VISIBLE
from modeling_ospruner.policy_ospruner import price_logits, price_places
from ospruner.demo.shipped import Reasoner
from ospruner.formats import HARMONY
from ospruner.serving.policies import check_base_weights
from ospruner.serving.requests import DEFAULTS
from ospruner.serving.vllm.model import (
    STOP_HEAD,
    StopHead,
    check_start,
    merge_adapters,
)
from ospruner.serving.vllm.parser import HarmonyThinkingParser
from ospruner.serving.vllm.plugin import HARMONY_PARSER, PROCESSOR, register
from ospruner.serving.vllm.processor import StopProcessor
from ospruner.serving.vllm.runner_v1 import V1Processor
from ospruner.train.untrained import untrained

from ...broken_tensors import BROKEN, break_tensors
from .plugin_replay import make_policy

ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|end|><|start|>assistant<|channel|>final<|message|>"
CALL = " to=functions.add<|channel|>commentary <|constrain|>json<|message|>{}<|call|>"


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
    with pytest.raises(ValueError, match=r"layers.0.self_attn.q_proj cannot be merged.*--tuning"):
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


class Batch:
    """vLLM's batch as a processor sees it; each row's stop logit is what `say` told last."""

    def __init__(self, model: OSPrunerForCausalLM, **defaults: Any) -> None:
        self.head = StopHead(1, model.policy.head.out_features)
        folder = model.config._name_or_path
        config: Any = SimpleNamespace(
            model_config=SimpleNamespace(
                hf_config=model.config,
                architectures=[type(model).__name__],
                model=folder,
                tokenizer=folder,
                tokenizer_revision=None,
                seed=0,
            ),
            additional_config={DEFAULTS: defaults},
            compilation_config=SimpleNamespace(static_forward_context={STOP_HEAD: self.head}),
            scheduler_config=SimpleNamespace(max_num_seqs=8),
            parallel_config=SimpleNamespace(rank=1),
        )
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
    ids = model.tokenizer.encode("<think>\nSo it is.", add_special_tokens=False)  # type: ignore[union-attr]
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


@pytest.fixture(scope="module")
def tokenizer(shared_dir: Path) -> PreTrainedTokenizerBase:
    folder = shared_dir / "data" / "tokenizers" / "gpt-oss-o200k-harmony"
    if not folder.is_dir():
        pytest.skip(f"{folder} does not exist")
    return AutoTokenizer.from_pretrained(folder)


def test_it_is_registered() -> None:
    register()
    assert ReasoningParserManager.get_reasoning_parser(HARMONY_PARSER) is HarmonyThinkingParser


@pytest.mark.parametrize(
    ("text", "thinking", "answer"),
    [
        (f"{ANALYSIS}So 1.\n\nThen 2.{FINAL}\\boxed{{5}}", "So 1.\n\nThen 2.", "\\boxed{5}"),
        (f"{ANALYSIS}So{HARMONY.closing}It is 5.<|end|>", "So", "It is 5."),
        ("<|channel|>final<|message|>5", None, "5"),
        (f"{ANALYSIS}1 < 2 <| 3 <", "1 < 2 <| 3 <", None),  # what could be half a marker
        (f"of an open analysis{FINAL}5", "of an open analysis", "5"),
        (
            f"<|channel|>commentary<|message|>I add.<|end|><|start|>assistant{ANALYSIS}So",
            "So",
            "I add.",
        ),
        (f"{ANALYSIS}So<|end|><|start|>assistant{CALL}", "So", None),
        (f"{ANALYSIS}So<|end|><|start|>assistant{ANALYSIS}on", "So\non", None),
        ("<|channel|>ana", None, None),
        ("", None, None),
    ],
)
def test_harmony_is_split(
    tokenizer: PreTrainedTokenizerBase, text: str, thinking: str | None, answer: str | None
) -> None:
    parser = HarmonyThinkingParser(tokenizer)
    assert parser.extract_reasoning(text, None) == (thinking, answer)
    for width in (1, 3, len(text)):  # streamed in pieces that cut markers
        parser, parts = HarmonyThinkingParser(tokenizer), []
        for at in range(0, len(text), max(width, 1)):
            piece = text[at : at + width]
            parts.append(parser.extract_reasoning_streaming("", piece, piece, [], [], []))
        parts.append(parser.finish_streaming())
        told = [part for part in parts if part is not None]
        assert ("".join(part.reasoning or "" for part in told) or None) == thinking
        assert ("".join(part.content or "" for part in told) or None) == answer


def test_harmony_tokens_are_counted(tokenizer: PreTrainedTokenizerBase) -> None:
    parser = HarmonyThinkingParser(tokenizer)
    thought = tokenizer.encode("So 1.\n\nThen 2.", add_special_tokens=False)
    said = tokenizer.encode("\\boxed{5}", add_special_tokens=False)
    before = tokenizer.encode(ANALYSIS, add_special_tokens=False)
    closing = tokenizer.encode(FINAL, add_special_tokens=False)
    whole = [*before, *thought, *closing, *said]
    assert parser.count_reasoning_tokens(whole) == len(thought)
    assert parser.extract_content_ids(whole) == said
    # A grammar holds in the answer alone.
    opened = len(before) + len(thought) + len(closing)
    ended = [parser.is_reasoning_end(whole[:end]) for end in range(len(whole) + 1)]
    assert ended == [False] * opened + [True] * (len(said) + 1)
    assert not parser.is_reasoning_end([*whole, *tokenizer.encode("<|return|><|start|>user")])


def test_harmony_keeps_markers_in_the_text(tokenizer: PreTrainedTokenizerBase) -> None:
    request = SimpleNamespace(skip_special_tokens=True)
    assert HarmonyThinkingParser(tokenizer).adjust_request(request).skip_special_tokens is False
