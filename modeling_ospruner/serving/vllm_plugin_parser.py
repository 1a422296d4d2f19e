"""vLLM's parser of `<think>...</think>`, whose count is right where the prompt opens the thinking.

vLLM's own counts what follows a `<think>` in the text alone; the chat templates of R1-Distill and
the like write it into the prompt, and `usage` would say 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm.reasoning.deepseek_r1_reasoning_parser import DeepSeekR1ReasoningParser

__all__ = ["ThinkingParser"]


class ThinkingParser(DeepSeekR1ReasoningParser):
    """`--reasoning-parser ospruner`."""

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """The tokens before the end marker; all, where there is none."""
        ids = list(token_ids)
        thinking = ids[: ids.index(self.end_token_id)] if self.end_token_id in ids else ids
        return len(thinking) - thinking.count(self.start_token_id)
