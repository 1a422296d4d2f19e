"""A server of `ospruner serve`: both columns are streamed requests, sent at the same time."""

from __future__ import annotations

import json
import queue
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from modeling_ospruner.formats_ospruner import DEEPSEEK_R1
from ospruner.optional import needed
from ospruner.serving.requests import KEYS

from .columns import Column, Paragraph, Question

__all__ = ["ServedSource"]

_FRAME_SECONDS = 0.1
_RECORD_SECONDS = 0.5
_KEY_OF = {name: key for key, name in KEYS.items()}


class ServedSource:
    """A server of `ospruner serve`; see `Source`.

    Args:
        url: Its address, with or without `/v1`.
        timeout_seconds: How long it may take to answer anything at all.

    Raises:
        MissingPackageError: The package openai is not installed.
        ValueError: The address is none.
        ConnectionError: Nobody answers there, or no policy's server.
    """

    seconds_note = "Seconds are of the server's clock: it works on both requests at once."
    seeded = False
    mode = "sample"
    threshold = 0.5
    prices: tuple[float, float] | None = None

    def __init__(self, url: str, timeout_seconds: float = 30.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(f"--url is {url!r}; it must be like http://localhost:8000")
        self.url = url.rstrip("/").removesuffix("/v1")
        openai = needed("openai", "asking a server", "pip install 'ospruner[app]'")
        self._error: type[Exception] = openai.OpenAIError
        self._client: Any = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", timeout=timeout_seconds, max_retries=0
        )
        try:
            served = self._client.models.list().data[0]
        except (self._error, IndexError) as error:
            raise ConnectionError(self._gone(error)) from error
        self.base = self.policy = str(served.id)
        self.positions: int | None = served.model_dump().get("max_model_len")

    def ask(self, question: Question) -> Iterator[tuple[Column, Column]]:
        """See `Source.ask`.

        Raises:
            ValueError: The server refuses the request; it says why.
            ConnectionError: The server is gone.
        """
        name = f"app-{uuid.uuid4().hex}"
        keys = {_KEY_OF[one]: value for one, value in question.stop_policy.items()}
        if question.seed is not None:
            keys["stop_seed"] = question.seed
        asked = {"stop_policy": True, "stop_id": name, **keys}
        streams = [
            _Stream(self._client, self.policy, question, {"stop_policy": False}),
            _Stream(self._client, self.policy, question, asked),
        ]
        record: dict[str, Any] = {}
        looked = 0.0
        try:
            while any(one.thread.is_alive() for one in streams):
                streams[0].thread.join(_FRAME_SECONDS)
                if time.perf_counter() - looked > _RECORD_SECONDS:
                    record = self._record(name) or record
                    looked = time.perf_counter()
                yield streams[0].column({}), streams[1].column(record)
            for one in streams:
                if isinstance(one.error, self._error):
                    self._explain(one.error)
                if one.error is not None:
                    raise one.error
            record = self._record(name) or record
            yield streams[0].column({}), streams[1].column(record)
        finally:
            for one in streams:
                one.ended = True

    def _record(self, name: str) -> dict[str, Any] | None:
        """The server's record of a request; None before it has any."""
        try:
            with urllib.request.urlopen(f"{self.url}/ospruner/stops/{name}", timeout=10) as answer:
                record: dict[str, Any] = json.load(answer)
                return record
        except urllib.error.HTTPError:
            return None
        except OSError as error:
            raise ConnectionError(self._gone(error)) from error

    def _explain(self, error: Exception) -> None:
        """Says what to do about an error of a request."""
        status = vars(error).get("status_code")
        if status is None or status >= 500:
            raise ConnectionError(self._gone(error)) from error
        raise ValueError(
            f"The server refuses the question ({error}). Change what it names, or shorten the "
            "question."
        ) from error

    def _gone(self, error: Exception) -> str:
        return (
            f"{self.url} does not answer as a server of `ospruner serve` ({error}): start one with "
            "`ospruner serve POLICY --port 8000`, or name another with --url"
        )


class _Stream:
    """One streamed chat request, in a thread."""

    def __init__(self, client: Any, model: str, question: Question, extra: dict[str, Any]) -> None:
        self.error: Exception | None = None
        self.ended = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        instruction = DEEPSEEK_R1.user_instruction  # the same for every preset
        content = f"{question.text}\n\n{instruction}"
        self._client = client
        self._request: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": content}],
            "temperature": question.temperature,
            "max_tokens": question.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "extra_body": {"vllm_xargs": extra, "return_token_ids": True},
        }
        if question.seed is not None:
            self._request["seed"] = question.seed
        self._pieces: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self._thinking: list[tuple[int, str]] = []  # tokens so far, text
        self._answer = ""
        self._tokens: int | None = None  # as the server counts them at the end
        self._began = time.perf_counter()
        self._seconds: float | None = None
        self.thread.start()

    def _run(self) -> None:
        tokens = 0
        try:
            with self._client.chat.completions.create(**self._request) as parts:
                for part in parts:
                    if self.ended:
                        return
                    if part.usage is not None and part.usage.completion_tokens_details is not None:
                        self._tokens = part.usage.completion_tokens_details.reasoning_tokens
                    for choice in part.choices:
                        fields = choice.model_dump()
                        delta = fields["delta"]
                        tokens += len(fields.get("token_ids") or ())
                        if delta.get("reasoning"):
                            self._pieces.put((tokens, delta["reasoning"]))
                        self._answer += delta.get("content") or ""
        except Exception as error:  # noqa: BLE001  (raised again in the page's thread)
            self.error = error
        finally:
            self._seconds = time.perf_counter() - self._began

    def column(self, record: dict[str, Any]) -> Column:
        """What has come so far, cut into paragraphs where the server's record says."""
        done = not self.thread.is_alive()
        while not self._pieces.empty():
            self._thinking.append(self._pieces.get())
        tokens = self._thinking[-1][0] if self._thinking else 0
        if done and self._tokens is not None:
            tokens = self._tokens
        over = done or bool(self._answer)
        reason = record.get("reason") if over else None
        if over and not record:
            reason = "natural" if self._answer else "length"
        seconds = time.perf_counter() - self._began if self._seconds is None else self._seconds
        paragraphs = _paragraphs(
            self._thinking, record.get("step_ends", ()), record.get("probabilities", ())
        )
        return Column(paragraphs, self._answer.strip(), tokens, seconds, reason, done)


def _paragraphs(
    pieces: Sequence[tuple[int, str]],
    step_ends: Sequence[int],
    probabilities: Sequence[float | None],
) -> list[Paragraph]:
    """Streamed pieces as paragraphs: up to the last known step end by tokens, then by blank lines.

    A piece may hold several tokens; it belongs to the step in which it ends.
    """
    found: list[Paragraph] = []
    text, at = "", 0
    known = list(zip(step_ends, probabilities, strict=False))
    for tokens, piece in pieces:
        while at < len(known) and tokens > known[at][0]:
            probability = known[at][1]
            asked = float("nan") if probability is None else probability
            found.append(Paragraph(text, known[at][0], asked))
            text, at = "", at + 1
        text += piece
        if at == len(known) and text.endswith("\n\n") and text.strip():
            found.append(Paragraph(text, tokens))
            text = ""
    if at < len(known) and pieces and pieces[-1][0] >= known[at][0]:
        probability = known[at][1]
        asked = float("nan") if probability is None else probability
        found.append(Paragraph(text, known[at][0], asked))
    elif text.strip():
        found.append(Paragraph(text, pieces[-1][0]))
    return [one for one in found if one.text.strip()]
