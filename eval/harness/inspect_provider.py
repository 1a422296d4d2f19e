"""The model provider `ospruner` of Inspect (inspect_ai): `--model ospruner/POLICY`.

inspect_ai finds it by its entry point; importing this module registers it as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    ContentReasoning,
    ContentText,
    GenerateConfig,
    ModelAPI,
    ModelOutput,
    ModelUsage,
    modelapi,
)
from inspect_ai.tool import ToolChoice, ToolInfo

from .replies import Asked, Policy, open_policy

__all__ = ["OSPrunerAPI", "ospruner"]

_MAX_TOKENS = 4096
# Settings that mean the same here; any other that is set is refused.
_PASSED = ("top_p", "top_k")
_KNOWN = {"max_tokens", "stop_seqs", "temperature", *_PASSED}
# What concerns inspect_ai itself, and not what is generated.
_OWN = {
    "max_retries", "timeout", "attempt_timeout", "max_connections", "adaptive_connections",
    "system_message", "cache", "batch", "modalities",
}  # fmt: skip


@modelapi(name="ospruner")
def ospruner() -> type[ModelAPI]:
    """The provider's class, as inspect_ai asks for it."""
    return OSPrunerAPI


class OSPrunerAPI(ModelAPI):
    """A policy as a model of Inspect: the completion is the answer, the thinking its reasoning.

    The output's metadata says what ended the thinking (`ospruner_reason`) and after how many
    tokens (`ospruner_thinking_tokens`).

    Args:
        model_name: folder or Hub id; with a url, the name under which the server knows it.
        base_url: inspect_ai's name for the url of `ospruner serve`.
        api_key: the server's.
        config: inspect_ai's settings.
        model_args: the others of `open_policy` (`-M threshold=0.5`), settings of
            `StopPolicyConfig` among them.

    Raises:
        ValueError: an argument is unknown or wrong.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008  # as inspect_ai declares it
        **model_args: Any,
    ) -> None:
        super().__init__(model_name, base_url, api_key, [], config)
        url = model_args.pop("url", None) or base_url
        self.url = url
        self.policy: Policy = open_policy(model_name, url=url, api_key=api_key, **model_args)

    async def generate(
        self,
        input: list[ChatMessage],
        tools: list[ToolInfo],
        tool_choice: ToolChoice,
        config: GenerateConfig,
    ) -> ModelOutput:
        """One reply.

        Raises:
            ValueError: tools, pictures or a setting that is not known are asked for.
        """
        if tools:
            raise ValueError(
                f"the tools {[tool.name for tool in tools]} are offered, which the provider "
                "ospruner does not pass on: ask a server with inspect_ai's own provider for vLLM"
            )
        set_ = {name for name, value in config.model_dump(exclude_none=True).items() if value}
        if unknown := sorted(set_ - _KNOWN - _OWN):
            raise ValueError(
                f"{unknown} is set, which the provider ospruner does not know; it knows "
                f"{sorted(_KNOWN)}"
            )
        given = config.model_dump(include=set(_PASSED), exclude_none=True)
        asked = Asked(
            config.max_tokens or _MAX_TOKENS,
            tuple(config.stop_seqs or ()),
            config.temperature or 0.0,
            given,
        )
        (reply,) = await asyncio.to_thread(self.policy.ask, [_messages(input)], asked)
        message = ChatMessageAssistant(
            content=[ContentReasoning(reasoning=reply.thinking), ContentText(text=reply.answer)],
            model=self.model_name,
            source="generate",
        )
        cut_off = reply.reason == "length" or reply.tokens >= asked.max_tokens
        return ModelOutput(
            model=self.model_name,
            choices=[
                ChatCompletionChoice(
                    message=message, stop_reason="max_tokens" if cut_off else "stop"
                )
            ],
            usage=ModelUsage(
                input_tokens=reply.prompt_tokens,
                output_tokens=reply.tokens,
                total_tokens=reply.prompt_tokens + reply.tokens,
                reasoning_tokens=reply.thinking_tokens,
            ),
            metadata={
                "ospruner_reason": reply.reason,
                "ospruner_thinking_tokens": reply.thinking_tokens,
            },
        )

    def max_tokens(self) -> int | None:
        """The cap on thinking and answer where none is set."""
        return _MAX_TOKENS

    def max_connections(self) -> int:
        """One at a time in this process; a server takes many."""
        return 1 if self.url is None else 16


def _messages(input: Sequence[ChatMessage]) -> list[dict[str, str]]:
    """The conversation, without the thinking of earlier turns, which templates leave out too.

    Raises:
        ValueError: it holds more than text, or the reply of a tool.
    """
    messages = []
    for message in input:
        if message.role == "tool":
            raise ValueError("a tool's reply is in the conversation: tools are not passed on")
        parts = [] if isinstance(message.content, str) else message.content
        if other := sorted({part.type for part in parts} - {"text", "reasoning"}):
            raise ValueError(f"a message holds {other}; the policies' bases read text alone")
        messages.append({"role": message.role, "content": message.text})
    return messages
