"""What the benchmarks run: random bases, policies on them, prompts and labelled traces."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset
from timing import HERE
from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from modeling_ospruner import TokenFormat
from modeling_ospruner.formats_ospruner import BREAK, VISIBLE
from ospruner.demo.shipped import Reasoner, draw_split
from ospruner.eval.problems.problem import user_message
from ospruner.eval.problems.task import prompt_token_ids
from ospruner.train.labels.features import FEATURES
from ospruner.train.untrained import untrained

NEVER = {"mode": "threshold", "threshold": 1.0, "answer": "free"}
"""A policy that is on and never stops: generate's `stop_policy`, and what requests tell vLLM."""
VLLM_NEVER = {f"stop_{key}": value for key, value in NEVER.items()}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WORDS = 40
"""Of so many tokens one ends a paragraph: random weights take each about as often."""


class Shape(NamedTuple):
    """A base's sizes. The vocabulary's share of the work is about R1-Distill-Qwen-7B's."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int


SHAPES = {
    "tiny": Shape(4, 128, 256, 4, 2, 1024),  # for tests; vLLM on a CPU wants heads of 32
    "7b": Shape(28, 3584, 18944, 28, 4, 152064),
}


def shape_of(name: str) -> Shape:
    """One of `SHAPES`, or 28 layers of a width, of R1-Distill-Qwen-7B's proportions."""
    if name in SHAPES:
        return SHAPES[name]
    hidden = int(name)
    return Shape(28, hidden, 4 * hidden, max(4, hidden // 64), 2, 24 * hidden)


def random_base(
    shape: Shape,
    tokenizer: PreTrainedTokenizerBase,
    positions: int,
    seed: int,
    dtype: str = "float32",
    attention: str = "sdpa",
) -> Qwen2ForCausalLM:
    """A Qwen2 of random weights, on `DEVICE`."""
    tokens = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    more: dict[str, Any] = {"max_position_embeddings": positions, "tie_word_embeddings": False}
    config = Qwen2Config(**shape._asdict(), **tokens, **more, bos_token_id=None)
    how = {"dtype": getattr(torch, dtype), "attn_implementation": attention}
    torch.manual_seed(seed)
    with torch.device(DEVICE):
        base = Qwen2ForCausalLM._from_config(config, **how)
    return base.eval()


def words_of(fmt: TokenFormat) -> list[int]:
    """`WORDS` tokens that random weights may write: the first ends a paragraph, no other does.

    All can be seen, for a paragraph without anything to see does not end, and none is a brace or
    marks anything.
    """
    own = next(i for i, kind in enumerate(fmt.kinds) if kind & BREAK and kind & VISIBLE)
    marks = {*fmt.added_ids, fmt.think_end_id, *fmt.eos_ids}
    seen = (i for i, kind in enumerate(fmt.kinds) if kind == VISIBLE and i not in marks)
    plain = (i for i in seen if set("{}\\").isdisjoint(fmt.texts[i]))
    return [own, *islice(plain, WORDS - 1)]


def save_random(
    folder: Path,
    shape: Shape,
    positions: int,
    seed: int,
    dtype: str = "float32",
    spread: float = 0.0,
    **tail: Any,
) -> None:
    """Writes a random base into `folder/base`, and an untrained policy on it into `folder/policy`.

    The head's weights have the standard deviation `spread`; zeros hide the states. `tail` is for
    `untrained`, the other arguments for `random_base`.
    """
    tokenizer, place = Reasoner().tokenizer, folder / "base"
    base = random_base(shape, tokenizer, positions, seed, dtype)
    base.save_pretrained(place)
    tokenizer.save_pretrained(place)
    model = untrained(base, tokenizer, base_model_name_or_path=str(place), **tail)
    torch.nn.init.normal_(model.policy.head.weight, std=spread)
    model.save_pretrained(folder / "policy")


def reasoner_prompts(reasoner: Reasoner, count: int, seed: int) -> dict[str, list[int]]:
    """The embedded reasoner's first test problems, as its tokens, by their ids."""
    fmt, tokenizer = reasoner.token_format, reasoner.tokenizer
    return {
        one.id: prompt_token_ids(one.id, user_message(one, fmt.format), tokenizer, fmt)
        for one in draw_split("test", count, seed)
    }


def random_traces(
    count: int, steps: int, mean_tokens: int, vocabulary: int, seed: int, spread: float = 0.5
) -> Dataset:
    """Labelled traces of random tokens; the logarithm of their lengths spreads by `spread`."""
    sys.path.append(str(HERE))
    from tests.label_rows import label_row

    draws, rows = np.random.default_rng(seed), []
    lengths = np.exp(draws.normal(np.log(mean_tokens), spread, count)).round().astype(int)
    for n, length in enumerate(np.maximum(lengths, steps).tolist()):
        ends = np.sort(draws.choice(np.arange(1, length), steps - 1, replace=False)).tolist()
        right = np.arange(steps) >= draws.integers(1, steps)
        name = f"p{seed}-{n}"
        told = {
            "problem": name,
            "prompt_ids": draws.integers(0, vocabulary, 60).tolist(),
            "trace_ids": draws.integers(0, vocabulary, length).tolist(),
            "step_ends": [*ends, length],
            "forced_correct": right.astype(float).tolist(),
            "matches_final": right.tolist(),
        }
        rows.append(label_row(name, steps=steps, **told))
    return Dataset.from_list(rows, features=FEATURES)


@contextmanager
def served(policy: Path, asked: str, **environment: str) -> Iterator[str]:
    """The address of `ospruner serve` on a policy, under the name "policy", with more options."""
    sys.path.append(str(HERE))
    from tests.server_process import running_server

    asked = f"serve {policy} --served-model-name policy {asked} --block-size 32"
    asked += " --enforce-eager" * (DEVICE == "cpu")
    command = [sys.executable, "-m", "ospruner.cli", *asked.split()]
    with (
        tempfile.TemporaryDirectory() as logs,
        running_server(command, environment, Path(logs) / "server.log") as url,
    ):
        yield url


def vllm_on_a_cpu() -> None:
    """What vLLM is told by its environment; call it before vLLM is imported."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if DEVICE == "cpu":
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GB
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
