"""docs/training.md, docs/labels.md and docs/examples/thinker.py: all of it is run, on little."""

import gzip
import json
import runpy
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config

from modeling_ospruner.formats_ospruner import TokenFormat
from ospruner.demo import REASONER
from ospruner.demo.shipped import draw_split
from ospruner.formats import guess

from ..conftest import REPO, TINY_CHAT_TEMPLATE, TINY_CORPUS, LoadScript
from ..families import COMMON
from ..pages import blocks, commands
from .conftest import command, write_rows

SMALL = {
    "--prices r1": "--prices 5e-4,5e-5",
    "eval_steps=50": "eval_steps=2",
    "Qwen/Qwen2.5-7B-Instruct": "{judge}",
}


def test_every_command_of_training(
    labelled: Path, tiny_base_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(labelled / "train", tmp_path / "runs" / "labels")
    monkeypatch.chdir(tmp_path)
    lines = commands(REPO / "docs" / "training.md")
    for old in SMALL:
        assert any(old in line for line in lines), f"{old!r} is not in the page any more"
    done = []
    for line in lines:
        for old, new in SMALL.items():
            line = line.replace(old, new.format(judge=tiny_base_dir))
        # What accelerate launches is run in this process; test_resume has two.
        launched = line.rpartition("-m ospruner.cli ")[2].removeprefix("ospruner ")
        if launched.startswith("python "):
            continue  # tests/project/test_pages.py
        arguments = shlex.split(launched)
        arguments += ["--batch-size", "8", "--limit", "14"]
        if "--num-train-epochs" not in arguments:
            arguments += ["--num-train-epochs", "2"]
        done.append(command(*arguments))
    assert len(done) == len(lines) - 1  # one of them is a script
    assert all("On the validation traces" in output for output in done)
    assert (tmp_path / "runs" / "annealed" / "price5e-5" / "model.safetensors").is_file()


def test_every_command_and_line_of_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = REPO / "docs" / "labels.md"
    write_rows(tmp_path / "problems.jsonl", map(vars, draw_split("test", 4, 0)))
    monkeypatch.chdir(tmp_path)
    ran = 0
    for line in commands(page):
        arguments = shlex.split(line, comments=True)[1:]
        if "labels/toy" not in arguments:
            continue
        arguments = [str(REASONER) if a == "ospruner/demo/reasoner" else a for a in arguments]
        if arguments[0] == "label":  # the page's 60 traces would take a minute
            arguments[arguments.index("--limit") + 1] = "4"
            arguments[arguments.index("--max-thinking-tokens") + 1] = "300"
        command(*arguments)
        ran += 1
    assert ran == 2
    names: dict[str, Any] = {}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), names)
    assert len(names["traces"]) == 4
    assert len(names["prefixes"]) == sum(map(len, names["traces"]["step_ends"]))


# The example: a model without markers learns to think.


@pytest.fixture
def base(load_script: LoadScript, tmp_path: Path) -> Path:
    """The tiny base's size with a tokenizer that has no thinking markers."""
    special = ["<|end|>", "<|user|>", "<|assistant|>"]
    bpe_tokenizer = load_script("docs/examples/reasoner/recipe.py").bpe_tokenizer
    pieces = bpe_tokenizer(TINY_CORPUS * 2, 340, special, min_frequency=2)
    plain = PreTrainedTokenizerFast(tokenizer_object=pieces, eos_token="<|end|>")
    plain.chat_template = TINY_CHAT_TEMPLATE.replace("<think>\n", "")
    torch.manual_seed(0)
    sizes = COMMON | {"intermediate_size": 64, "num_hidden_layers": 2, "initializer_range": 0.3}
    sizes |= {"vocab_size": len(plain) + 8}  # as Qwen's: more rows than the tokenizer has ids
    config = Qwen2Config(**sizes, tie_word_embeddings=True, eos_token_id=plain.eos_token_id)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    plain.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def tune(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs the example in this process, on six traces of which two are learnt."""
    traces = tmp_path / "traces.jsonl.gz"
    thought = "So 3 + 4 = 7.\n\nWait, let me check: 7 - 4 = 3."
    rows = [
        {"problem": "3 + 4?", "answer": "7", "reasoning": thought, "correct": True, "model": "A"},
        {"problem": "3 + 4?", "answer": "7", "reasoning": thought * 2, "model": "A"},  # longer
        {"problem": "12 * 2?", "answer": "24", "reasoning": thought, "closed": True, "model": "A"},
        {"problem": "wrong?", "answer": "1", "reasoning": thought, "correct": False, "model": "A"},
        {"problem": "cut?", "answer": "1", "reasoning": thought, "closed": False, "model": "A"},
        {"problem": "other?", "answer": "1", "reasoning": thought, "model": "B"},
    ]
    traces.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    example = runpy.run_path(str(REPO / "docs/examples/thinker.py"))

    def run(*options: str, base: Path = base) -> None:
        given = [base, traces, "--out", tmp_path / "out", "--device", "cpu", *options]
        given += ["--min-tokens", "1"]
        monkeypatch.setattr(sys, "argv", ["thinker.py", *map(str, given)])
        example["main"]()

    return run


def test_a_plain_model_learns_to_think(tune: Callable[..., None], tmp_path: Path) -> None:
    options = ["--dtype", "float32", "--first-layer", "0", "--batch-size", "2", "--rank", "8"]
    tune("--models", "A", "--epochs", "150", "--learning-rate", "2e-2", *options)

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    fmt = TokenFormat.compile(guess(tokenizer), tokenizer)
    assert fmt.format.name == "deepseek-r1"
    turns = [{"role": "user", "content": f"3 + 4?\n\n{fmt.format.user_instruction}"}]
    prompt = str(tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))
    assert prompt.endswith("<|assistant|><think>\n")
    assert "<think>" not in str(tokenizer.apply_chat_template(turns, tokenize=False))
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
    assert not fmt.thinking_span(ids[0].tolist()).closed
    written = model.generate(ids, max_new_tokens=80, do_sample=False)[0, ids.shape[1] :]
    text = tokenizer.decode(written)
    assert "Wait, let me check" in text
    assert "\n</think>\n\n" in text
    learnt = (tmp_path / "out/problems.jsonl").read_text().splitlines()
    assert {json.loads(line)["problem"] for line in learnt} == {"3 + 4?", "12 * 2?"}


def test_thinkers_learn_on(tune: Callable[..., None], tmp_path: Path, tiny_base_dir: Path) -> None:
    with pytest.raises(SystemExit, match="its models are A, B"):
        tune("--models", "C")
    before = AutoTokenizer.from_pretrained(tiny_base_dir)
    weight = AutoModelForCausalLM.from_pretrained(tiny_base_dir).lm_head.weight
    tune("--models", "A", "--dtype", "float32", "--learning-rate", "1e-6", base=tiny_base_dir)
    after = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert after.chat_template == before.chat_template
    assert after.get_vocab() == before.get_vocab()
    taught = AutoModelForCausalLM.from_pretrained(tmp_path / "out").lm_head.weight
    marker = before.convert_tokens_to_ids("</think>")
    torch.testing.assert_close(taught[marker], weight[marker], atol=1e-3, rtol=0)
    with pytest.raises(SystemExit, match="holds a finished thinker"):
        tune("--models", "A")


def test_a_stopped_run_goes_on_to_the_same_weights(
    tune: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--models", "A", "--dtype", "float32", "--first-layer", "0", "--epochs", "6"]
    options += ["--batch-size", "1", "--checkpoint-minutes", "0"]
    tune(*options)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    (tmp_path / "out").rename(tmp_path / "whole")

    stopped = torch.optim.AdamW.step
    steps = []

    def step(self: torch.optim.AdamW, *args: Any, **kwargs: Any) -> Any:
        steps.append(1)
        if len(steps) == 8:
            raise KeyboardInterrupt
        return stopped(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    with pytest.raises(KeyboardInterrupt):
        tune(*options)
    tune(*options)
    assert len(steps) == 8 + 12 - 7  # seven were done, the eighth was cut
    resumed = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name, tensor in whole.items():
        torch.testing.assert_close(resumed[name], tensor)
