"""What a server is asked, and answers: vLLM, SGLang and HTTP endpoints have it in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ospruner.logits import top_entropy

from .interface import AnswerStop

__all__ = ["Ask", "Reply", "Server", "ServerDownError"]


class ServerDownError(Exception):
    """A server cannot be used any more; another one may do its work.

    Args:
        server: its name.
        reason: what it did.
    """

    def __init__(self, server: str, reason: str) -> None:
        super().__init__(f"{server}: {reason}")


@dataclass(frozen=True)
class Ask:
    """One request: a prompt to be continued.

    Attributes:
        prompt_ids: the prompt.
        max_new_tokens: cap on the continuation.
        end_ids: ids that end it.
        temperature: 0 decodes greedily.
        top_p: as in `SamplingSettings`.
        top_k: as in `SamplingSettings`.
        seed: of the draws, below 2**63; None for a greedy request.
        scored: whether log-probabilities are asked for.
        stop: makes the rule that completes it, beside `end_ids`. A server may go on beyond that,
            or stop before it, wherever the rule's `final_text` appears.
        options: token ids whose log-probabilities at the first token are asked for; () for none.
    """

    prompt_ids: list[int]
    max_new_tokens: int
    end_ids: frozenset[int]
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    scored: bool = False
    stop: Callable[[], AnswerStop] | None = None
    options: tuple[int, ...] = ()


@dataclass(frozen=True)
class Reply:
    """What a server answered.

    Attributes:
        ids: the continuation, without the token that ended it.
        end_id: the one of `Ask.end_ids` that ended it; None where something else did.
        cached_tokens: of the prompt's tokens, how many were not computed again.
        logprobs: natural log-probability of each of `ids` at temperature 1, where asked for.
        entropies: in nats, of the distribution at each generated token, that of `end_id` last, over
            its ENTROPY_TOKENS most likely tokens, where asked for.
        option_logprobs: natural log-probability of each of `Ask.options`; None where the server
            gives only those of the likeliest tokens, and it is none of them.
    """

    ids: list[int]
    end_id: int | None
    cached_tokens: int
    logprobs: list[float]
    entropies: list[float]
    option_logprobs: list[float | None] = field(default_factory=list)

    @property
    def written(self) -> list[int]:
        """What was generated, the token that ended it included."""
        return self.ids if self.end_id is None else [*self.ids, self.end_id]

    @classmethod
    def of(
        cls,
        ask: Ask,
        ids: Sequence[int],
        cached_tokens: int,
        logprobs: Sequence[float] = (),
        top_logprobs: Sequence[Sequence[float]] = (),
        server_ended: bool = False,
    ) -> Reply:
        """The reply in generated ids, of which the last may be the one that ended them.

        Args:
            ask: what was asked.
            ids: what was generated.
            cached_tokens: see the class.
            logprobs: of all of `ids`.
            top_logprobs: of the most likely tokens at each of `ids`, in any order, or a few more of
                them.
            server_ended: the server says that the last one ends a text for it.
        """
        ends = bool(ids) and (server_ended or ids[-1] in ask.end_ids)
        kept = len(ids) - ends
        entropies = [float(top_entropy(torch.tensor(list(top)))) for top in top_logprobs]
        end_id = ids[-1] if ends else None
        return cls(list(ids[:kept]), end_id, cached_tokens, list(logprobs[:kept]), entropies)


class Server(Protocol):
    """Something that answers requests, one of possibly many."""

    async def ask(self, ask: Ask) -> Reply:
        """Answers one request.

        Raises:
            ServerDownError: it cannot be used any more.
            ValueError: it refuses this request.
        """
