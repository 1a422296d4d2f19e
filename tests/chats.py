"""Chats as a base reads them."""

from typing import Any

from ospruner.demo.shipped import Reasoner, draw_split
from ospruner.eval.problems.problem import user_message


def chat_ids(tokenizer: Any, content: str, more: str = "") -> list[int]:
    """The prompt of one message, with the model's turn opened, and what the turn begins with."""
    chat = [{"role": "user", "content": content}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return list(tokenizer.encode(f"{text}{more}", add_special_tokens=False))


def chat_batch(tokenizer: Any, contents: list[str], more: str = "") -> dict[str, Any]:
    """The left-padded prompts of several, as generate takes them."""
    rows = {"input_ids": [chat_ids(tokenizer, content, more) for content in contents]}
    return dict(tokenizer.pad(rows, return_tensors="pt", padding_side="left"))


def asked_of(reasoner: Reasoner, count: int, first: int = 0) -> list[str]:
    """So many test problems, as the embedded reasoner is asked for them."""
    form = reasoner.token_format.format
    return [user_message(one, form) for one in draw_split("test", first + count, 0)[first:]]


def prompts_of(reasoner: Reasoner, count: int, first: int = 0) -> list[list[int]]:
    """Their prompts."""
    return [chat_ids(reasoner.tokenizer, one) for one in asked_of(reasoner, count, first)]
