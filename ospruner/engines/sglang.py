"""SGLang servers over their native endpoint: their radix cache shares the prefixes of forks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from .asking import Ask, Reply
from .endpoints import EndpointsEngine
from .interface import ENTROPY_TOKENS, base_end_ids

__all__ = ["SGLangEngine"]


class SGLangEngine(EndpointsEngine):
    """Samples traces and forks answers over the `/generate` of one or more SGLang servers.

    This is what SGLang's frontend `fork` does, in token ids: the radix cache computes every
    shared prefix once, to the token. Draws follow the rows' keys only on servers that run with
    `--enable-deterministic-inference`; others ignore seeds.

    Args:
        base: the model's folder or Hub id.
        tokenizer: its tokenizer, for the ids that end a text.
        urls: the servers.
        revision: of a Hub id.
        concurrency: requests that each server works on at once.
        timeout_seconds: how long one request may take; a whole trace is one.
        retries: how often a request that failed is sent again.
        api_key: the servers' key; None for the environment's OPENAI_API_KEY.

    Raises:
        MissingPackageError: the openai package, whose client is used, is not installed.
        ValueError: bad URLs or limits.
    """

    shares_within_batches = False

    def __init__(
        self,
        base: str,
        tokenizer: PreTrainedTokenizerBase,
        urls: Sequence[str],
        *,
        revision: str | None = None,
        concurrency: int = 256,
        timeout_seconds: float = 3600,
        retries: int = 5,
        api_key: str | None = None,
    ) -> None:
        ids = base_end_ids(base, revision, tokenizer)
        super().__init__(urls, ids, concurrency, timeout_seconds, retries, api_key)

    def _request(self, ask: Ask) -> tuple[str, dict[str, Any]]:
        sampling: dict[str, Any] = {
            "max_new_tokens": ask.max_new_tokens,
            "temperature": ask.temperature,
            "top_p": ask.top_p,
            "top_k": ask.top_k or -1,
            "stop_token_ids": sorted(ask.end_ids),
            "ignore_eos": False,
            "skip_special_tokens": False,
        }
        if ask.seed is not None:
            sampling["sampling_seed"] = ask.seed
        if ask.stop is not None:
            sampling |= {"stop": [ask.stop().final_text], "no_stop_trim": True}
        body: dict[str, Any] = {"input_ids": ask.prompt_ids, "sampling_params": sampling}
        if ask.scored:
            body |= {"return_logprob": True, "top_logprobs_num": ENTROPY_TOKENS}
        if ask.options:
            body["token_ids_logprob"] = list(ask.options)
        return "/generate", body

    def _reply(self, ask: Ask, answer: Mapping[str, Any]) -> Reply:
        about = answer["meta_info"]
        ids, cached = answer["output_ids"], about["cached_tokens"]
        # Its own ids that end a text cannot be switched off without those that it was given.
        ended = isinstance(about["finish_reason"].get("matched"), int)
        if not ask.scored:
            return Reply.of(ask, ids, cached, server_ended=ended)
        # Each token is [log-probability, id, text].
        logprobs = [entry[0] for entry in about["output_token_logprobs"]]
        top = [[entry[0] for entry in entries] for entries in about["output_top_logprobs"]]
        reply = Reply.of(ask, ids, cached, logprobs, top, server_ended=ended)
        if not ask.options:
            return reply
        said = {entry[1]: entry[0] for entry in about["output_token_ids_logprobs"][0]}
        return replace(reply, option_logprobs=[said[one] for one in ask.options])

    def _needs(self) -> str:
        return "it must be an SGLang server; others are spoken to by the engine 'openai'"
