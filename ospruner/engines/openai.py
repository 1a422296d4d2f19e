"""Any OpenAI-compatible endpoints that give token ids, as vLLM's server does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from transformers import PreTrainedTokenizerBase

from .asking import Ask, Reply
from .endpoints import EndpointsEngine
from .interface import ENTROPY_TOKENS, base_end_ids

__all__ = ["OpenAIEngine"]

_ID_PREFIX = "token_id:"


class OpenAIEngine(EndpointsEngine):
    """Samples traces and forks answers over the completions endpoints of one or more servers.

    Prompts are token ids, and the answers' ids are read back: nothing is tokenised again. An
    answer stops at each text that could end it, and is asked on where that was not its end.

    Args:
        base: the model's folder or Hub id.
        tokenizer: its tokenizer, for the ids that end a text.
        urls: the servers, with or without their `/v1`.
        revision: of a Hub id.
        model: the name under which the servers know the model; None for `base`.
        concurrency: requests that each server works on at once.
        timeout_seconds: how long one request may take; a whole trace is one.
        retries: how often a request that failed is sent again.
        api_key: the servers' key; None for the environment's OPENAI_API_KEY.
        seeds: whether requests carry a seed. vLLM on a CPU cannot take any, and would end.

    Raises:
        MissingPackageError: the openai package is not installed.
        ValueError: bad URLs or limits.
    """

    def __init__(
        self,
        base: str,
        tokenizer: PreTrainedTokenizerBase,
        urls: Sequence[str],
        *,
        revision: str | None = None,
        model: str | None = None,
        concurrency: int = 256,
        timeout_seconds: float = 3600,
        retries: int = 5,
        api_key: str | None = None,
        seeds: bool = True,
    ) -> None:
        super().__init__(
            [_with_path(url) for url in urls],
            base_end_ids(base, revision, tokenizer),
            concurrency,
            timeout_seconds,
            retries,
            api_key,
        )
        self.model = model or base
        self.seeds = seeds

    def _request(self, ask: Ask) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": ask.prompt_ids,
            "max_tokens": ask.max_new_tokens,
            "temperature": ask.temperature,
            "top_p": ask.top_p,
            "top_k": ask.top_k,
            # A server may have other defaults from the model's generation config.
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": sorted(ask.end_ids),
            "ignore_eos": True,  # what ends a text stands in stop_token_ids
            "skip_special_tokens": False,
        }
        if ask.seed is not None and self.seeds:
            body["seed"] = ask.seed
        if ask.stop is not None:
            body |= {"stop": [ask.stop().final_text], "include_stop_str_in_output": True}
        if ask.options:
            if len(ask.options) > ENTROPY_TOKENS:
                raise ValueError(
                    f"{len(ask.options)} options, of which a server with OpenAI's interface tells "
                    f"{ENTROPY_TOKENS} apart at most: take the engine 'vllm' or 'sglang'"
                )
            # One that is not among the likeliest tokens is then asked for alone.
            body["allowed_token_ids"] = list(ask.options)
        if ask.scored:  # the scored tokens name their ids; the prompt's need not come back
            body |= {"logprobs": ENTROPY_TOKENS, "return_tokens_as_token_ids": True}
        else:
            body["return_token_ids"] = True
        return "/completions", body

    def _reply(self, ask: Ask, answer: Mapping[str, Any]) -> Reply:
        choice = answer["choices"][0]
        details = answer["usage"].get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens") or 0
        if not ask.scored:
            return Reply.of(ask, choice["token_ids"], cached)
        scores = choice["logprobs"]
        ids = [_token_id(token) for token in scores["tokens"]]
        top = [list(of_token.values()) for of_token in scores["top_logprobs"]]
        reply = Reply.of(ask, ids, cached, scores["token_logprobs"], top)
        if not ask.options:
            return reply
        if ids[0] not in ask.options:
            raise ValueError(
                f"a server answered the token {ids[0]} where only {list(ask.options)} were allowed "
                "(allowed_token_ids): answers of choices can only be read on servers that know "
                "it, as vLLM's; or decode them (--task choice:labels=decoded)"
            )
        known = {_token_id(token): value for token, value in scores["top_logprobs"][0].items()}
        known[ids[0]] = scores["token_logprobs"][0]
        return replace(reply, option_logprobs=[known.get(one) for one in ask.options])

    def _needs(self) -> str:
        return (
            "it must be a server that takes prompts of token ids and gives token ids back, such "
            "as vLLM's (return_token_ids, return_tokens_as_token_ids); SGLang's is spoken to by "
            "the engine 'sglang'"
        )


def _token_id(token: str) -> int:
    if not token.startswith(_ID_PREFIX):
        raise KeyError(f"{_ID_PREFIX!r} before the token {token!r}")
    return int(token.removeprefix(_ID_PREFIX))


def _with_path(url: str) -> str:
    return url.rstrip("/") + "/v1" if not urlsplit(url).path.strip("/") else url
