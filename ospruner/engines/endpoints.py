"""Servers behind HTTP: one client, with time-outs and retries, for every kind of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ospruner.optional import needed

from .asking import Ask, AskingEngine, Reply, Server
from .dispatching import ServerDownError
from .interface import SamplingSettings

if TYPE_CHECKING:
    from openai import AsyncOpenAI

__all__ = ["EndpointsEngine"]

_PIP_LINE = "pip install 'ospruner[openai]'"


class EndpointsEngine(AskingEngine):
    """An engine over servers at URLs that take and give token ids.

    A request that times out, or that a server answers with 408, 409, 429 or 5xx, is sent again
    with growing, jittered pauses. A server that fails beyond that is left alone for the rest of
    the call and the others do its work.

    Args:
        urls: the servers.
        eos_ids: ids that end a text.
        concurrency: requests that each server works on at once.
        timeout_seconds: how long one request may take; a whole trace is one.
        retries: how often a request is sent again.
        api_key: the servers' key; None for the environment's OPENAI_API_KEY.

    Raises:
        MissingPackageError: the openai package, whose client is used, is not installed.
        ValueError: no URLs, one that is no http(s) address, or two that are equal.
    """

    def __init__(
        self,
        urls: Sequence[str],
        eos_ids: frozenset[int],
        concurrency: int,
        timeout_seconds: float,
        retries: int,
        api_key: str | None,
    ) -> None:
        super().__init__(eos_ids, concurrency)
        needed("openai", "an engine behind HTTP", _PIP_LINE)
        self.urls = [_checked(url) for url in urls]
        if not self.urls:
            raise ValueError("urls is empty; give the address of at least one server")
        if len(set(self.urls)) < len(self.urls):
            raise ValueError(f"urls is {list(urls)}; each server must be named once")
        if timeout_seconds <= 0 or retries < 0:
            raise ValueError(
                f"timeout_seconds is {timeout_seconds} and retries {retries}; the former must be "
                "above 0, the latter 0 or more"
            )
        self.timeout_seconds = timeout_seconds
        self.retries = retries
        self.api_key = api_key

    @abstractmethod
    def _request(self, ask: Ask) -> tuple[str, dict[str, Any]]:
        """The path and JSON body that ask it."""

    @abstractmethod
    def _reply(self, ask: Ask, answer: Mapping[str, Any]) -> Reply:
        """What the JSON of an answer says.

        Raises:
            KeyError, IndexError, TypeError: the answer lacks something.
        """

    @abstractmethod
    def _needs(self) -> str:
        """What a server must be and have switched on, for errors."""

    def _prepare_sampling(self, settings: SamplingSettings, keys: Sequence[str]) -> None:
        """Nothing: each request carries its seed."""

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[Sequence[Server]]:
        import os

        from openai import AsyncOpenAI

        key = self.api_key or os.environ.get("OPENAI_API_KEY") or "none"
        async with AsyncExitStack() as stack:
            servers = []
            for url in self.urls:
                client = AsyncOpenAI(
                    api_key=key,
                    base_url=url,
                    timeout=self.timeout_seconds,
                    max_retries=self.retries,
                )
                servers.append(_Endpoint(self, url, await stack.enter_async_context(client)))
            yield servers


class _Endpoint:
    """One server."""

    def __init__(self, engine: EndpointsEngine, url: str, client: AsyncOpenAI) -> None:
        self._engine = engine
        self._url = url
        self._client = client

    async def ask(self, ask: Ask) -> Reply:
        """Answers one request; see `Server.ask`."""
        from openai import APIConnectionError, APIStatusError, InternalServerError, RateLimitError

        path, body = self._engine._request(ask)
        try:
            answer = await self._client.post(path, cast_to=object, body=body)
        except APIConnectionError as error:  # time-outs too
            reason = f"{error} ({error.__cause__})" if error.__cause__ else str(error)
            raise ServerDownError(self._url, reason) from error
        except (InternalServerError, RateLimitError) as error:
            raise ServerDownError(self._url, str(error)) from error
        except APIStatusError as error:
            raise ValueError(
                f"{self._url} refuses a request of {len(ask.prompt_ids)} prompt tokens and up to "
                f"{ask.max_new_tokens} new ones: {error}"
            ) from error
        try:
            return self._engine._reply(ask, answer)  # type: ignore[arg-type]
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(
                f"the answer of {self._url} lacks {error}: {self._engine._needs()}"
            ) from error


def _checked(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"urls holds {url!r}; give addresses such as http://127.0.0.1:8000")
    return url.rstrip("/")
