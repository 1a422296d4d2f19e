"""Servers behind HTTP: OpenAI-compatible ones that give token ids, as vLLM's does, and SGLang's."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from transformers import PreTrainedTokenizerBase

from ospruner.optional import needed

from .calling import Ask, AskingEngine, Reply, Server, ServerDownError
from .interface import ENTROPY_TOKENS, base_end_ids

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_PIP_LINE = "pip install 'ospruner[openai]'"
_ID_PREFIX = "token_id:"


class HTTPEngine(AskingEngine):
    """An engine over servers at URLs that take and give token ids: nothing is tokenised again.

    A request that times out, or that a server answers with 408, 409, 429 or 5xx, is sent again
    with growing, jittered pauses. A server that fails beyond that is left alone for the rest of
    the call and the others do its work. An answer stops at each text that could end it, and is
    asked on where that was not its end.

    Raises:
        MissingPackageError: the openai package, whose client is used, is not installed.
        ValueError: no URLs, one that is no http(s) address, two that are equal, or bad limits.
    """

    needs: str
    """What a server must be and have switched on, for errors."""

    def __init__(
        self,
        base: str,  # the model's folder or Hub id
        tokenizer: PreTrainedTokenizerBase,  # its own, for the ids that end a text
        urls: Sequence[str],
        *,
        revision: str | None = None,  # of a Hub id
        concurrency: int = 256,  # requests that each server works on at once
        timeout_seconds: float = 3600,  # of one request; a whole trace is one
        retries: int = 5,  # of a request that failed
    ) -> None:
        super().__init__(base_end_ids(base, revision, tokenizer), concurrency)
        needed("openai", "an engine behind HTTP", _PIP_LINE)
        self.urls = [_checked(url) for url in urls]
        if not self.urls or len(set(self.urls)) < len(self.urls):
            raise ValueError(f"urls is {list(urls)}; name at least one server, and each once")
        if timeout_seconds <= 0 or retries < 0:
            raise ValueError(
                f"timeout_seconds is {timeout_seconds} and retries {retries}; the former must be "
                "above 0, the latter 0 or more"
            )
        self.timeout_seconds = timeout_seconds
        self.retries = retries

    @abstractmethod
    def _request(self, ask: Ask) -> tuple[str, dict[str, Any]]:
        """The path and JSON body that ask it."""

    @abstractmethod
    def _reply(self, ask: Ask, answer: Mapping[str, Any]) -> Reply:
        """What the JSON of an answer says.

        Raises:
            KeyError, IndexError, TypeError: the answer lacks something.
        """

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[Sequence[Server]]:
        from openai import AsyncOpenAI

        limits: Any = {"timeout": self.timeout_seconds, "max_retries": self.retries}
        key = os.environ.get("OPENAI_API_KEY") or "none"
        async with AsyncExitStack() as stack:
            clients = [AsyncOpenAI(api_key=key, base_url=url, **limits) for url in self.urls]
            opened = [await stack.enter_async_context(client) for client in clients]
            asking = zip(self.urls, opened, strict=True)
            yield [partial(self._ask, url, client) for url, client in asking]

    async def _ask(self, url: str, client: AsyncOpenAI, ask: Ask) -> Reply:
        """Asks one server; see `Server`."""
        from openai import APIConnectionError, APIStatusError, InternalServerError, RateLimitError

        path, body = self._request(ask)
        try:
            answer = await client.post(path, cast_to=object, body=body)
        except (APIConnectionError, InternalServerError, RateLimitError) as error:  # time-outs too
            reason = f" ({error.__cause__})" if error.__cause__ else ""
            raise ServerDownError(f"{url}: {error}{reason}") from error
        except APIStatusError as error:
            raise ValueError(
                f"{url} refuses a request of {len(ask.prompt_ids)} prompt tokens and up to "
                f"{ask.max_new_tokens} new ones: {error}"
            ) from error
        try:
            return self._reply(ask, answer)  # type: ignore[arg-type]
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"the answer of {url} lacks {error}: {self.needs}") from error


class OpenAIEngine(HTTPEngine):
    """The completions endpoints of servers, with or without `/v1` in their URLs."""

    needs = (
        "it must be a server that takes prompts of token ids and gives token ids back, such as "
        "vLLM's (return_token_ids, return_tokens_as_token_ids); SGLang's is spoken to by the "
        "engine 'sglang'"
    )

    def __init__(
        self,
        base: str,
        tokenizer: PreTrainedTokenizerBase,
        urls: Sequence[str],
        *,
        model: str | None = None,  # as the servers call it; None for `base`
        seeds: bool = True,  # sent with requests; vLLM on a CPU cannot take any, and would end
        **more: Any,  # of `HTTPEngine`
    ) -> None:
        urls = [url if urlsplit(url).path.strip("/") else f"{url.rstrip('/')}/v1" for url in urls]
        super().__init__(base, tokenizer, urls, **more)
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
            return Reply(choice["token_ids"], cached)
        scores = choice["logprobs"]
        ids = [_token_id(token) for token in scores["tokens"]]
        if ask.options and ids[0] not in ask.options:
            raise ValueError(
                f"a server answered the token {ids[0]} where only {list(ask.options)} were allowed "
                "(allowed_token_ids): answers of choices can only be read on servers that know "
                "it, as vLLM's; or decode them (--task choice:labels=decoded)"
            )
        known = {_token_id(token): value for token, value in scores["top_logprobs"][0].items()}
        known[ids[0]] = scores["token_logprobs"][0]
        top = [list(of_token.values()) for of_token in scores["top_logprobs"]]
        options = [known.get(one) for one in ask.options]
        return Reply(ids, cached, scores["token_logprobs"], top, options)


class SGLangEngine(HTTPEngine):
    """The `/generate` of SGLang servers, whose radix cache shares the prefixes of forks.

    This is what SGLang's frontend `fork` does, in token ids: every shared prefix is computed once,
    to the token. Draws follow the rows' keys only on servers that run with
    `--enable-deterministic-inference`; others ignore seeds.
    """

    needs = "it must be an SGLang server; others are spoken to by the engine 'openai'"
    shares_within_batches = False

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
            return Reply(ids, cached, ended=ended)
        # Each token is [log-probability, id, text].
        logprobs = [entry[0] for entry in about["output_token_logprobs"]]
        top = [[entry[0] for entry in entries] for entries in about["output_top_logprobs"]]
        own = about["output_token_ids_logprobs"][0] if ask.options else ()
        said = {entry[1]: entry[0] for entry in own}
        return Reply(ids, cached, logprobs, top, [said[one] for one in ask.options], ended)


def _token_id(token: str) -> int:
    if not token.startswith(_ID_PREFIX):
        raise KeyError(f"{_ID_PREFIX!r} before the token {token!r}")
    return int(token.removeprefix(_ID_PREFIX))


def _checked(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"urls holds {url!r}; give addresses such as http://127.0.0.1:8000")
    return url.rstrip("/")
