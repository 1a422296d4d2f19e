"""What a run says beforehand that it will hold is what it then holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from modeling_ospruner.formats_ospruner import DEEPSEEK_R1
from ospruner.eval.schema import LabelSettings
from ospruner.train.fresh import batch_loss, new_policy
from ospruner.train.loop import StageResult, memory_need
from ospruner.train.processes import Processes
from ospruner.train.run import new_optimizer
from ospruner.train.settings import TrainSettings
from ospruner.train.tail import step_outputs
from ospruner.train.traces import LabelledTraces

from .conftest import SHORT, MakeLabels


def held(tensors: Iterable[torch.Tensor | None]) -> int:
    return sum(t.nbytes for t in tensors if t is not None)


@pytest.mark.parametrize("tuning", ["layers", "queries", "attention", "lora", "head"])
def test_the_statement_is_what_tensors_then_take(
    tuning: str,
    tiny_base: Qwen2ForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    tiny_base_dir: Path,
    make_labels: MakeLabels,
    tmp_path: Path,
) -> None:
    settings = TrainSettings(length_penalties=(1e-2, 1e-3), tuning=tuning)  # type: ignore[arg-type]
    targets = list(settings.targets().values())
    traces = LabelledTraces.from_dataset(make_labels(12))
    need = memory_need(tiny_base, targets, traces, traces)
    labels = LabelSettings(base_model=str(tiny_base_dir), reasoning_format=DEEPSEEK_R1.to_dict())
    model = new_policy(tiny_base, tiny_tokenizer, settings, labels)
    own = model.policy.own_names()
    assert need.tail_bytes == held(p for n, p in model.policy.named_parameters() if n in own)
    optimizer = new_optimizer(model, settings)
    batch = traces.batch(torch.arange(8).numpy())
    states = traces.states(model, batch.rows)
    logits = step_outputs(model.policy, states, batch.positions)[..., 0]
    batch_loss("os-pruner", logits, batch, 1e-2).backward()
    assert need.gradient_bytes == held(p.grad for p in model.policy.parameters())
    optimizer.step()
    moments = [s[name] for s in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert need.optimizer_bytes == held(moments)
    assert need.states_bytes == 2 * traces.cache_states(model, 2**30)
    traces.keep_states(tmp_path)
    small = memory_need(tiny_base, [settings], traces, traces)
    assert (small.states_bytes, small.disk_bytes) == (0, need.states_bytes)
    assert "on disk" in str(small)
    assert need.base_bytes == tiny_base.get_memory_footprint()
    each = 4 * (need.tail_bytes + need.optimizer_bytes)
    assert need.total_bytes == need.base_bytes + each + need.gradient_bytes + need.states_bytes
    assert str(need).startswith("4 target(s) will hold ")


def test_averaged_weights_are_part_of_the_statement(
    fit: Callable[..., list[StageResult]],
    tiny_base: Qwen2ForCausalLM,
    make_labels: MakeLabels,
    tmp_path: Path,
) -> None:
    settings = dataclasses.replace(SHORT, swa_share=1.0, checkpoint_every=1)
    found: list[int] = []

    def progress(phase: str, done: int, total: int, note: str = "") -> None:
        if phase == "train" and done > 1:
            checkpoint = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
            found.append(held(s["swa"] for s in checkpoint["optimizer"]["state"].values()))

    fit(settings, make_labels(64), progress=progress)
    traces = LabelledTraces.from_dataset(make_labels(12))
    plain = dataclasses.replace(settings, swa_share=0.0)
    with_means, without = (memory_need(tiny_base, [s], traces, traces) for s in (settings, plain))
    assert set(found) == {with_means.optimizer_bytes - without.optimizer_bytes}


@pytest.mark.parametrize("tuning", ["layers", "queries", "lora"])
@pytest.mark.parametrize("kept", ["memory", "disk", "nowhere"])
def test_the_base_leaves_the_device_once_its_states_are_kept(
    kept: str,
    tuning: str,
    fit: Callable[..., list[StageResult]],
    tiny_base: Qwen2ForCausalLM,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = dataclasses.replace(
        SHORT,
        tuning=tuning,  # type: ignore[arg-type]
        lora_rank=2,
        cache_limit_bytes=2**30 if kept == "memory" else 0,
    )
    states = tmp_path / "states" if kept == "disk" else None
    (alone,) = fit(settings, out=tmp_path / "alone", states=states)
    assert not any(p.is_meta for p in tiny_base.parameters())  # the caller put it where it is
    monkeypatch.setattr("ospruner.train.processes._HOST", "meta")  # where nothing can be computed
    processes = Processes()
    processes.device = torch.device("cpu")
    (result,) = fit(settings, out=tmp_path / "placed", states=states, processes=processes)
    left = {name for name, p in tiny_base.named_parameters() if p.is_meta}
    last = {
        name for name, _ in tiny_base.named_parameters() if "layers.2" in name or "layers.3" in name
    }
    if kept == "nowhere":
        assert left == set()
    else:
        shared = {*last, "model.norm.weight"} if tuning == "lora" else set()
        assert left == {name for name, _ in tiny_base.named_parameters()} - shared
        assert tiny_base.lm_head.weight is tiny_base.model.embed_tokens.weight  # still one
    ours, theirs = (load_file(one.path / "model.safetensors") for one in (result, alone))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (result.accuracy, result.tokens) == (alone.accuracy, alone.tokens)
