"""What a server of `make_policy`'s policy replied at 1b71721, and how it was asked.

`served.json` was recorded from that commit's `ospruner serve` (vLLM on a CPU, float32);
tests/serving/vllm/test_server.py asks again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from openai import OpenAI

SERVED = Path(__file__).with_name("served.json")
QUESTIONS = ("Solve 3x+54=102 for x.", "What is 3 + 4 * 5?", "What is 17 - 9 + 40?")
ASKED: dict[str, dict[str, Any]] = {
    "drawn": {"stop_policy": True, "stop_seed": 5},
    "never": {"stop_threshold": 1.0},
    "threshold": {"stop_threshold": 0.1},
    "at once": {"stop_threshold": 0.0},
    "budget": {"stop_threshold": 1.0, "max_thinking_tokens": 20},
    "not before": {"stop_threshold": 0.0, "min_thinking_tokens": 30},
    "free": {"stop_threshold": 0.05, "stop_answer": "free"},
    "off": {"stop_policy": False},
}


def replies(client: OpenAI) -> dict[str, Any]:
    """The answer to each question asked in each way: as a chat; and one raw text, sampled."""
    told = {}
    for name, extra in ASKED.items():
        for number, question in enumerate(QUESTIONS):
            asked: dict[str, Any] = {"model": "toy", "temperature": 0, "max_tokens": 300}
            asked["messages"] = [{"role": "user", "content": question}]
            reply = client.chat.completions.create(**asked, extra_body={"vllm_xargs": extra})
            choice, usage = reply.choices[0], reply.usage
            assert usage is not None
            told[f"{name} {number}"] = [
                getattr(choice.message, "reasoning", None),
                choice.message.content,
                choice.finish_reason,
                usage.completion_tokens,
            ]
    sampled: dict[str, Any] = {"model": "toy", "prompt": QUESTIONS[0], "temperature": 0.8}
    sampled |= {"seed": 1, "max_tokens": 60}
    off = {"vllm_xargs": {"stop_policy": False}}
    told["raw"] = client.completions.create(**sampled, extra_body=off).choices[0].text
    return told


def recorded() -> dict[str, Any]:
    """What 1b71721 replied."""
    return dict(json.loads(SERVED.read_text("utf-8")))
