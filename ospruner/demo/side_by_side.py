"""Loads a policy folder as any user would and generates with the policy off and on.

A script for a process of its own, `side_by_side.py POLICY ANSWERS`: it imports torch and
transformers alone, reads the request, JSON, from its input and writes the answers as a JSON file.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

SAMPLING = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 0}


def answer(folder: str, contents: list[str], seed: int, max_new_tokens: int) -> list[Any]:
    """Sample an answer to each message twice from the same seed: full thinking, and pruned.

    Args:
        folder: The policy's.
        contents: What a user says.
        seed: Of the sampling.
        max_new_tokens: Cap on thinking and answer together.

    Returns:
        For each the "content", and under "off" and "on" the answer, the thinking and its tokens,
        and why it ended.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype=torch.float32
    )
    end = tokenizer.convert_tokens_to_ids("</think>")
    answers: list[Any] = []
    for content in contents:
        chat = [{"role": "user", "content": content}]
        inputs: Any = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        sides: dict[str, Any] = {"content": content}
        for name, stop_policy in (("off", False), ("on", True)):
            torch.manual_seed(seed)
            output = model.generate(
                **inputs, **SAMPLING, max_new_tokens=max_new_tokens, stop_policy=stop_policy
            )
            ids = output[0, inputs["input_ids"].shape[1] :].tolist()
            count = ids.index(end) if end in ids else len(ids)
            answered = tokenizer.decode(ids[count + 1 :], skip_special_tokens=True)
            sides[name] = {
                "thinking": tokenizer.decode(ids[:count]),
                "answer": str(answered).strip(),
                "thinking_tokens": count,
                "reason": model.last_stop[0].reason if stop_policy else "natural",
            }
        answers.append(sides)
    return answers


if __name__ == "__main__":
    policy, target = sys.argv[1:]
    found = answer(policy, **json.load(sys.stdin))
    Path(target).write_text(json.dumps(found, indent=2), "utf-8")
