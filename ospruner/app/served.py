"""A server of `ospruner serve`: each column is a streamed request."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from ospruner.optional import needed
from ospruner.serving.requests import KEYS

from .columns import AppColumn, Columns, Paragraph, Question

__all__ = ["ServedSource"]

_RECORD_SECONDS = 0.5
_ANSWER_SECONDS = 30.0  # as long as it may take to answer anything at all
_KEY_OF = {name: key for key, name in KEYS.items()}


class ServedSource:
    """A server of `ospruner serve`; see `Source`.

    Args:
        url: Its address, with or without `/v1`.

    Raises:
        MissingPackageError: The package openai is not installed.
        ValueError: The address is none.
        ConnectionError: Nobody answers there, or no policy's server.
    """

    prices: tuple[float, float] | None = None  # the server knows them

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(f"--url is {url!r}; it must be like http://localhost:8000")
        self.url = url.rstrip("/").removesuffix("/v1")
        openai = needed("openai", "asking a server", "pip install 'ospruner[app]'")
        self._error: type[Exception] = openai.OpenAIError
        self._client: Any = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", timeout=_ANSWER_SECONDS, max_retries=0
        )
        try:
            served = self._client.models.list().data[0]
        except (self._error, IndexError) as error:
            raise ConnectionError(self._gone(error)) from error
        self.policy = str(served.id)
        self._instruction = str((self._told("format") or {}).get("user_instruction", ""))
        self._asked = ""  # the name of the last pruned request
        self.positions: int | None = served.model_dump().get("max_model_len")

    def ask(self, question: Question, pruned: bool) -> Columns:
        """See `Source.ask`.

        Raises:
            ValueError: The server refuses the request; it says why.
            ConnectionError: The server is gone.
        """
        name = f"app-{uuid.uuid4().hex}"
        extra: dict[str, Any] = {"stop_policy": pruned}
        if pruned:
            extra |= {_KEY_OF[one]: value for one, value in question.stop_policy.items()}
            extra |= {"stop_id": name, "stop_seed": question.seed}
            self._asked = name
        began = looked = time.perf_counter()
        pieces: list[tuple[int, str]] = []  # tokens so far, text
        answer, tokens = "", 0
        record: dict[str, Any] = {}
        try:
            with self._streamed(question, extra) as parts:
                for part in parts:
                    if part.usage is not None and part.usage.completion_tokens_details is not None:
                        tokens = part.usage.completion_tokens_details.reasoning_tokens
                    for choice in part.choices:
                        fields = choice.model_dump()
                        delta = fields["delta"]  # servers differ in the name
                        if thought := delta.get("reasoning") or delta.get("reasoning_content"):
                            tokens += len(fields.get("token_ids") or ())
                            pieces.append((tokens, thought))
                        answer += delta.get("content") or ""
                    now = time.perf_counter()
                    if pruned and now - looked > _RECORD_SECONDS:
                        record, looked = self._told(f"stops/{name}") or record, now
                    yield AppColumn(
                        _paragraphs(pieces, record), answer.strip(), tokens, now - began
                    )
        except self._error as error:
            status = vars(error).get("status_code")
            if status is None or status >= 500:
                raise ConnectionError(self._gone(error)) from error
            raise ValueError(
                f"The server refuses the question ({error}). Change what it names, or shorten the "
                "question."
            ) from error
        seconds = time.perf_counter() - began
        record = (self._told(f"stops/{name}") or record) if pruned else {}
        reason = record.get("reason") or ("natural" if answer else "length")
        yield AppColumn(_paragraphs(pieces, record), answer.strip(), tokens, seconds, reason, True)

    def answer_now(self) -> None:
        """See `Source.answer_now`."""
        self._told(f"answer/{self._asked}", "POST")

    def _streamed(self, question: Question, extra: dict[str, Any]) -> Any:
        return self._client.chat.completions.create(
            model=self.policy,
            messages=[
                {"role": "user", "content": f"{question.text}\n\n{self._instruction}".rstrip()}
            ],
            temperature=question.temperature,
            max_tokens=question.max_tokens,
            seed=question.seed,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"vllm_xargs": extra, "return_token_ids": True},
        )

    def _told(self, what: str, method: str = "GET") -> dict[str, Any] | None:
        """What the server says of a request, or of its policy; None where it knows nothing."""
        try:
            asked = urllib.request.Request(f"{self.url}/ospruner/{what}", method=method)
            with urllib.request.urlopen(asked, timeout=10) as answer:
                told: dict[str, Any] = json.load(answer)
                return told
        except urllib.error.HTTPError:
            return None
        except OSError as error:
            raise ConnectionError(self._gone(error)) from error

    def _gone(self, error: Exception) -> str:
        return (
            f"{self.url} does not answer as a server of `ospruner serve` ({error}): start one with "
            "`ospruner serve POLICY --port 8000`, or name another with --url"
        )


def _paragraphs(pieces: Sequence[tuple[int, str]], record: Mapping[str, Any]) -> list[Paragraph]:
    """Streamed pieces as paragraphs: up to the last known step end by tokens, then by blank lines.

    A piece may hold several tokens; it belongs to the step in which it ends.
    """
    steps = record.get("step_ends", ()), record.get("probabilities", ())
    known = list(zip(*steps, strict=False))
    found: list[Paragraph] = []
    text, last = "", 0

    def end(tokens: int, *said: float | None) -> None:
        nonlocal text
        if text.strip():
            given = [float("nan") if one is None else one for one in said]  # JSON has no NaN
            found.append(Paragraph(text, tokens, *given))
        text = ""

    for tokens, piece in pieces:
        while known and tokens > known[0][0]:
            end(*known.pop(0))
        text, last = text + piece, tokens
        if not known and text.endswith("\n\n"):
            end(tokens)
    if known and last >= known[0][0]:
        end(*known[0])
    end(last)
    return found
