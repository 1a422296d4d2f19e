"""`ospruner serve` on a GPT-OSS policy with the real tokenizer, over HTTP: hence slow."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import BadRequestError, OpenAI
from transformers import AutoTokenizer, GptOssConfig, GptOssForCausalLM

from modeling_ospruner.formats_ospruner import TokenFormat
from ospruner.formats import HARMONY
from ospruner.train.untrained import untrained

from ...own_process import needs_vllm
from .test_server import ask, serving

pytestmark = [pytest.mark.slow, needs_vllm]

THOUGHT = "First.\n\n Then!\n\n So"
SCRIPT = f"assistant<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>"


def recites(base: Any, *chains: list[int]) -> None:
    """Lets random layers matter little: after a token of a chain its next one is likely."""
    known = list(dict.fromkeys(itertools.chain(*chains)))
    assert len(known) <= base.config.hidden_size
    with torch.no_grad():
        base.lm_head.weight.zero_()
        for here, following in itertools.chain(*map(itertools.pairwise, chains)):
            dimension = known.index(here)
            base.model.embed_tokens.weight[here] = 0.0
            base.model.embed_tokens.weight[here, dimension] = 8.0
            base.lm_head.weight[following, dimension] = 8.0


def policy_on(base: Any, tokenizer: Any, folder: Path) -> Path:
    """An untrained policy of layers on a base, both saved in a folder."""
    base.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    where = str(folder / "base")
    policy = untrained(base, tokenizer, 2, base_model_name_or_path=where, tuning="layers")
    policy.save_pretrained(folder / "policy")
    return folder / "policy"


def reciter(tokenizer: Any) -> GptOssForCausalLM:
    """Recites `SCRIPT` in a circle, and after the box prefix `5}`."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32}
    sizes |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 1024}
    sizes |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    base = GptOssForCausalLM(GptOssConfig(vocab_size=201_088, sliding_window=32, **sizes)).eval()
    script = tokenizer.encode(SCRIPT, add_special_tokens=False)
    prefix = TokenFormat.compile(HARMONY, tokenizer).box_prefix_ids
    answer = [prefix[-1], *tokenizer.encode("5}", add_special_tokens=False)]
    assert len({*script, *answer}) == len(script) + len(answer)
    recites(base, [*script, script[0]], answer)
    return base


@pytest.fixture(scope="module")
def client(shared_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    source = shared_dir / "data" / "tokenizers" / "gpt-oss-o200k-harmony"
    if not source.is_dir():
        pytest.skip(f"{source} does not exist")
    tokenizer = AutoTokenizer.from_pretrained(source)
    folder = policy_on(reciter(tokenizer), tokenizer, tmp_path_factory.mktemp("gpt-oss"))
    with serving(folder, "--opt-in") as url:
        yield OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize(
    ("extra", "reason", "thinking", "answer"),
    [
        ({"stop_mode": "threshold", "stop_threshold": 0.0}, "policy", "First.\n\n", "\\boxed{5}"),
        (
            {"stop_mode": "threshold", "stop_threshold": 1.0, "max_thinking_tokens": 6},
            "budget",
            "First.\n\n Then!\n\n",
            "\\boxed{5}",
        ),
        ({"stop_mode": "threshold", "stop_threshold": 1.0}, "natural", THOUGHT, "\\boxed{5}"),
        ({"stop_policy": False}, None, f"{THOUGHT}\n{THOUGHT}", None),
    ],
)
def test_harmony_chat_is_stopped_and_split(
    client: OpenAI, extra: dict[str, Any], reason: str | None, thinking: str, answer: str | None
) -> None:
    said: list[Any] = [{"role": "user", "content": "2 + 3?"}]
    body = {"messages": said, "max_tokens": 24, "vllm_xargs": extra}
    found = ask(client, "/chat/completions", body)
    assert (found.thinking, found.content) == (thinking, answer or "")
    assert found.ended == ("length" if reason is None else "stop")
    assert ask(client, "/chat/completions", body, stream=True) == found
    if reason is not None:
        assert found.told["reason"] == reason
        # The record counts the header, usage what is written under it.
        assert found.told["thinking_tokens"] == found.counted + 3


def test_tools_are_refused_by_name(client: OpenAI) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "2 + 3?"}]}
    asked |= {"model": "toy", "max_tokens": 4}
    asked |= {"tools": [{"type": "function", "function": {"name": "add", "description": "Adds."}}]}
    with pytest.raises(BadRequestError, match="of a GPT-OSS policy's replies calls are not parsed"):
        client.chat.completions.create(**asked)
    assert client.chat.completions.create(**asked, tool_choice="none").choices
