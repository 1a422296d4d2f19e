"""Tools offered to `ospruner serve`, with vLLM's parsers on, by Qwen3's template: hence slow."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import BadRequestError, OpenAI
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from ...own_process import needs_vllm
from .test_harmony import policy_on, recites
from .test_server import serving, text

pytestmark = [pytest.mark.slow, needs_vllm]

ARGUMENTS_OF_CALL = {"a": 2, "b": 3}
CALL = json.dumps({"name": "add", "arguments": ARGUMENTS_OF_CALL})
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
STOPS = {"stop_mode": "threshold", "stop_threshold": 0.0}
NEVER = {"stop_mode": "threshold", "stop_threshold": 1.0}


@pytest.fixture(scope="module")
def client(
    tiny_tokenizer: PreTrainedTokenizerFast,
    shared_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[OpenAI]:
    """A policy whose base writes a thought, ends it, and calls a tool."""
    template = shared_dir / "data" / "tokenizers" / "templates" / "qwen3.jinja"
    if not template.is_file():
        pytest.skip(f"{template} does not exist")
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    words = ["<tool_call>", "</tool_call>", "First", "Second", "So", CALL]  # one token each
    tokenizer.add_tokens(words)
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = template.read_text(encoding="utf-8")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 2048}
    sizes |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    base = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), **sizes)).eval()

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


def ask(client: OpenAI, extra: dict[str, Any], **more: Any) -> Any:
    return client.chat.completions.create(
        model="toy",
        messages=[{"role": "user", "content": "2 + 3?"}],
        tools=TOOLS,
        temperature=0,
        max_tokens=20,
        extra_body={"vllm_xargs": extra},
        **more,
    )


@pytest.mark.parametrize("extra", [STOPS, NEVER], ids=["policy", "natural"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_after_a_stop_and_after_a_natural_end(
    client: OpenAI, extra: dict[str, Any], stream: bool
) -> None:
    asked = {**extra, "stop_answer": "tools", "stop_id": f"{stream}"}
    if stream:
        deltas = [part.choices[0].delta for part in ask(client, asked, stream=True)]
        calls = [call.function for one in deltas for call in one.tool_calls or ()]
        name = "".join(one.name or "" for one in calls)
        arguments = "".join(one.arguments or "" for one in calls)
        thinking = "".join(getattr(one, "reasoning", None) or "" for one in deltas)
    else:
        message = ask(client, asked).choices[0].message
        (call,) = message.tool_calls
        name, arguments = call.function.name, call.function.arguments
        thinking = message.reasoning
    assert (name, json.loads(arguments)) == ("add", ARGUMENTS_OF_CALL)
    assert thinking.strip() == ("First." if extra is STOPS else "First.\n\nSo")
    told = json.loads(text(client, f"/ospruner/stops/{stream}"))
    assert told["reason"] == ("policy" if extra is STOPS else "natural")


def test_a_box_is_not_forced_where_a_tool_is_offered(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="whose box no call fits in"):
        ask(client, STOPS)
    reply = ask(client, STOPS, tool_choice="none").choices[0].message
    assert "\\boxed{" in reply.content
