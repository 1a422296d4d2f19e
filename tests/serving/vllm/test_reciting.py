"""`ospruner serve` on bases that recite: GPT-OSS with its real tokenizer, and calls of tools by
Qwen3's template, with vLLM's parsers on; slow.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import BadRequestError, OpenAI
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from modeling_ospruner.formats_ospruner import TokenFormat
from ospruner.train.untrained import untrained

from ...own_process import needs_vllm
from .test_server import ask, serving

pytestmark = [pytest.mark.slow, needs_vllm]

STOPS = {"stop_mode": "threshold", "stop_threshold": 0.0}
NEVER = {"stop_mode": "threshold", "stop_threshold": 1.0}
ADD = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
TOOLS: Any = [{"type": "function", "function": ADD}]
ASKED: Any = [{"role": "user", "content": "2 + 3?"}]
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


@pytest.fixture(scope="module")
def gpt_oss(
    real_harmony: tuple[Any, TokenFormat], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OpenAI]:
    """A policy whose base recites `SCRIPT` in a circle, and after the box prefix `5}`."""
    tokenizer, fmt = real_harmony
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32}
    sizes |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 1024}
    sizes |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = AutoConfig.for_model("gpt_oss", vocab_size=201_088, sliding_window=32, **sizes)
    base = AutoModelForCausalLM.from_config(config).eval()
    script = tokenizer.encode(SCRIPT, add_special_tokens=False)
    answer = [fmt.box_prefix_ids[-1], *tokenizer.encode("5}", add_special_tokens=False)]
    assert len({*script, *answer}) == len(script) + len(answer)
    recites(base, [*script, script[0]], answer)
    with serving(policy_on(base, tokenizer, tmp_path_factory.mktemp("g")), "--opt-in") as url:
        yield OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize(
    ("extra", "reason", "thinking", "answer"),
    [
        (STOPS, "policy", "First.\n\n", "\\boxed{5}"),
        (NEVER | {"max_thinking_tokens": 6}, "budget", "First.\n\n Then!\n\n", "\\boxed{5}"),
        (NEVER, "natural", THOUGHT, "\\boxed{5}"),
        ({"stop_policy": False}, None, f"{THOUGHT}\n{THOUGHT}", ""),
    ],
)
def test_harmony_chat_is_stopped_and_split(
    gpt_oss: OpenAI, extra: dict[str, Any], reason: str | None, thinking: str, answer: str
) -> None:
    body = {"messages": ASKED, "max_tokens": 24, "vllm_xargs": extra}
    found = ask(gpt_oss, "/chat/completions", body)
    assert (found.thinking, found.content) == (thinking, answer)
    assert found.ended == ("length" if reason is None else "stop")
    assert ask(gpt_oss, "/chat/completions", body, stream=True) == found
    if reason is not None:
        assert found.told["reason"] == reason
        # The record counts the header, usage what is written under it.
        assert found.told["thinking_tokens"] == found.counted + 3


def test_tools_are_refused_by_name(gpt_oss: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "toy", "messages": ASKED, "tools": TOOLS, "max_tokens": 4}
    with pytest.raises(BadRequestError, match="calls are not parsed"):
        gpt_oss.chat.completions.create(**asked)
    assert gpt_oss.chat.completions.create(**asked, tool_choice="none").choices


CALL = json.dumps({"name": "add", "arguments": {"a": 2, "b": 3}})


@pytest.fixture(scope="module")
def qwen3(
    tiny_tokenizer: PreTrainedTokenizerFast,
    shared_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[OpenAI]:
    """A policy whose base writes a thought, ends it, and calls a tool."""
    template = shared_dir / "data" / "tokenizers" / "templates" / "qwen3.jinja"
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "First", "So", CALL])  # one token each
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = template.read_text(encoding="utf-8")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 2048}
    sizes |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    config = AutoConfig.for_model("qwen2", vocab_size=len(tokenizer), **sizes)
    base = AutoModelForCausalLM.from_config(config).eval()

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    first_break, second_break, after = ids(".\n\n"), ids("\n\n"), ids("</think>")
    assert len(first_break) == len(second_break) == 1
    recites(
        base,
        [*ids("assistant")[-1:], *ids("First"), *first_break, *ids("So"), *after, *second_break],
        [*ids("\n"), *ids("First")],  # what follows the prompt's last token
        [*second_break, *ids("<tool_call>"), *ids(CALL), *ids("</tool_call>"), *ids("<|im_end|>")],
    )
    parsers = ("--enable-auto-tool-choice", "--tool-call-parser", "qwen3_json")
    with serving(policy_on(base, tokenizer, tmp_path_factory.mktemp("qwen3")), *parsers) as url:
        yield OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


OFFERED: dict[str, Any] = {"messages": ASKED, "tools": TOOLS, "max_tokens": 20}


@pytest.mark.parametrize("extra", [STOPS, NEVER], ids=["policy", "natural"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_after_a_stop_and_after_a_natural_end(
    qwen3: OpenAI, extra: dict[str, Any], stream: bool
) -> None:
    asked = OFFERED | {"vllm_xargs": {**extra, "stop_answer": "tools"}}
    found = ask(qwen3, "/chat/completions", asked, stream)
    assert found.called.startswith("add")
    assert json.loads(found.called.removeprefix("add")) == {"a": 2, "b": 3}
    assert found.thinking.strip() == ("First." if extra is STOPS else "First.\n\nSo")
    assert found.told["reason"] == ("policy" if extra is STOPS else "natural")


def test_a_box_is_not_forced_where_a_tool_is_offered(qwen3: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="whose box no call fits in"):
        qwen3.chat.completions.create(model="toy", messages=ASKED, tools=TOOLS)
    asked = OFFERED | {"vllm_xargs": STOPS, "tool_choice": "none"}
    assert "\\boxed{" in ask(qwen3, "/chat/completions", asked).content
