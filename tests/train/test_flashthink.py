"""FlashThink: a verifier with a tokenizer of its own learns, is saved, replayed, and charged."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from ospruner.comparing import compare
from ospruner.demo.shipped import Reasoner
from ospruner.eval.compute import ModelWork
from ospruner.eval.methods import parse_policies
from ospruner.eval.schema import LabelSettings
from ospruner.train.flashthink import PROMPT, Verifier, tokens_read, verifier_traces
from ospruner.train.labels.loading import load_labels

from .conftest import files_for_a_group, log_of, make_labels, trained_on


def test_the_verifier_reads_problem_and_thinking_in_its_own_tokens(
    tiny_tokenizer: PreTrainedTokenizerFast, reasoner: Reasoner
) -> None:
    dataset = make_labels(5)
    theirs = reasoner.tokenizer
    judged = verifier_traces(dataset, tiny_tokenizer, theirs)
    read = tokens_read(judged)
    for n, row in enumerate(dataset):
        ids = judged.tokens[n].tolist()
        for t, end in enumerate(row["step_ends"]):
            text = str(theirs.decode(ids[: read[n, t]]))
            assert text.endswith(str(tiny_tokenizer.decode(row["trace_ids"][:end])))
            assert PROMPT.format(problem=row["problem"]) in text
    assert (np.diff(read, axis=1)[judged.table.mask[:, 1:]] > 0).all()
    np.testing.assert_array_equal(judged.table.correct[0, :3], dataset[0]["forced_correct"][:3])
    short = SimpleNamespace(config=Qwen2Config(max_position_embeddings=20))
    with pytest.raises(ValueError, match=r"longer than the base's 20 positions .* a verifier with"):
        judged.refuse_beyond_positions(short)
    # Where the verifier has a chat template, it reads inside the user's turn.
    judged = verifier_traces(dataset, tiny_tokenizer, tiny_tokenizer)
    text = str(tiny_tokenizer.decode(judged.tokens[0]))
    assert text.startswith("<|user|>Another model is thinking")
    assert "<|assistant|>" not in text


def test_train_save_replay_and_charge(
    labels: Path, tiny_base_dir: Path, tmp_path: Path, tiny_base: Qwen2ForCausalLM
) -> None:
    how: dict[str, Any] = {"method": "flashthink", "verifier": str(tiny_base_dir), "layers": 2}
    how |= {"learning_rate": 2e-3, "num_train_epochs": 6, "limit": 40}
    with files_for_a_group(tmp_path / "run"):
        stage = trained_on(labels, tmp_path / "run", **how)
    assert stage.method == "flashthink"
    losses = [entry["loss"] for entry in log_of(tmp_path / "run") if "loss" in entry]
    assert losses[-1] < losses[0]
    about = json.loads((stage.path / "flashthink.json").read_text())
    assert about["prompt"] == PROMPT
    assert len(parse_policies([str(tmp_path / "run")])) == 5  # the paper's thresholds
    report = compare(labels, [f"{stage.path}@0,1", f"{stage.path}@sample"])
    first, never, sampled = report.rules[1:4]
    assert [rule.method for rule in (first, never)] == ["FlashThink"] * 2
    # At threshold 0 it stops after the first step, having read the prompt and that step.
    ours = load_labels(labels)
    verifier = Verifier.load(stage.path, ours.settings, torch.device("cpu"))
    tokenizer = Reasoner().tokenizer
    theirs: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(tiny_base_dir)
    judged = verifier_traces(ours.traces, tokenizer, theirs)
    read, last = tokens_read(judged), judged.table.last
    charged = np.where(last > 0, read[:, 0], 0)
    np.testing.assert_array_equal(first.outcome.probe_tokens, charged)
    rows = np.flatnonzero(last > 0)
    np.testing.assert_array_equal(never.outcome.probe_tokens[rows], read[rows, last[rows] - 1])
    between = sampled.outcome.probe_tokens[rows]
    assert (between >= charged[rows] - 1e-6).all()
    assert (between <= never.outcome.probe_tokens[rows] + 1e-6).all()
    # As compute it pays for what it reads at its own model's price, and not for its length.
    work = ModelWork.of_config(tiny_base.config)
    full = report.full
    more = never.outcome.flops - full.flops
    np.testing.assert_allclose(more[rows], work.read(0, read[rows, last[rows] - 1]))
    assert (full.flops > 0).all()
    scores = replace(report, prices=(1e-3,)).frame[["aes", "reward@1e-3"]]
    assert scores.loc[2].equals(scores.loc[0])
    ratio = report.frame["flops_ratio"][2]
    assert ratio == pytest.approx((never.outcome.flops / full.flops.mean()).mean())
    assert ratio > 1
    assert verifier.config.base_model_name_or_path == str(tiny_base_dir)
    other = LabelSettings(base_model="org/other", reasoning_format=ours.settings.reasoning_format)
    with pytest.raises(ValueError, match=r"was trained on traces of .*reasoner.*these are of org"):
        Verifier.load(stage.path, other, torch.device("cpu"))
