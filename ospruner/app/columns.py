"""Where the page's columns come from: a policy in this process, or a server of `ospruner serve`.

A column is thinking and answer, as plain values and as HTML; it is given again and again while it
grows.
"""

import math
import threading
import time
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from transformers import StoppingCriteria, StoppingCriteriaList

from modeling_ospruner import OSPrunerForCausalLM
from modeling_ospruner.stopping_ospruner import StopRecord
from ospruner.eval.problems.problem import Problem, user_message
from ospruner.eval.problems.task import prompt_token_ids
from ospruner.optional import needed
from ospruner.serving.requests import KEYS

FRAME_SECONDS = 0.1
_RECORD_SECONDS = 0.5
_ANSWER_SECONDS = 30.0  # as long as it may take to answer anything at all
_KEY_OF = {name: key for key, name in KEYS.items()}
REASONS = {
    "policy": "stopped by the policy",
    "budget": "stopped by the budget",
    "natural": "ended by itself",
    "request": "ended because you asked",
    "length": "cut by the limit on tokens",
}
_TEMPLATE = Environment(
    loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
).get_template("columns.html.jinja")


@dataclass(frozen=True)
class Question:
    """What is asked, and how; ValueError where it is empty or far too long."""

    text: str  # without any instruction
    stop_policy: dict[str, Any]  # of the pruned column, by the fields of `StopPolicyConfig`
    temperature: float  # of the thinking; 0 is greedy
    seed: int  # of both columns' sampling and of the policy's draws
    max_tokens: int  # cap on thinking and answer together

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise ValueError("The question is empty: write one, or take an example.")
        if len(self.text) > 20_000:
            raise ValueError(
                f"The question has {len(self.text):,} characters; 20,000 are allowed: shorten it."
            )


@dataclass(frozen=True)
class Paragraph:
    """A step of the thinking, with the blank lines after it."""

    text: str
    tokens: int  # of the thinking through its end
    probability: float | None = None  # None where the policy was not asked, NaN where it gave none

    @property
    def known(self) -> float | None:
        """The probability, where there is one."""
        return None if math.isnan(self.probability or 0) else self.probability


@dataclass(frozen=True)
class AppColumn:
    """One column, at any moment; the last paragraph may be incomplete."""

    thinking: Sequence[Paragraph] = ()
    answer: str = ""
    tokens: int = 0  # of the thinking so far
    seconds: float = 0.0  # since its start, to its end
    reason: str | None = None  # what ended the thinking; None where it goes on
    done: bool = False


Columns = Generator[AppColumn, None, None]
"""One column, again and again while it grows; closing it ends its generation."""


def columns_html(plain: AppColumn, pruned: AppColumn) -> str:
    """The two columns with what was saved, as HTML; every text in it is escaped."""
    numbers = []
    for name, before, after, digits in (
        ("thinking tokens", plain.tokens, pruned.tokens, 0),
        ("seconds", plain.seconds, pruned.seconds, 1),
    ):
        share = 1 - after / before if before else 0.0
        saved = f"{share:.0%} saved" if share >= 0 else f"{-share:.0%} more"
        change = f"{before:,.{digits}f} → {after:,.{digits}f} {name}"
        numbers.append((saved if plain.done and pruned.done else "…", change))
    shown = {"plain": plain, "pruned": pruned, "empty": AppColumn(), "reasons": REASONS}
    return _TEMPLATE.render(shown, numbers=[] if plain == pruned == AppColumn() else numbers)


class LocalSource:
    """A policy with its base, loaded in this process.

    Attributes:
        policy: Its name on the page.
        positions: The longest text in tokens; None where that is not known.
        prices: Lowest and highest that it takes; None of a fixed policy.
    """

    def __init__(self, model: OSPrunerForCausalLM, policy: str) -> None:
        self.model = model
        self.policy = policy
        self._running: _Written | None = None
        config = model.base.config.get_text_config()
        self.positions: int | None = getattr(config, "max_position_embeddings", None)
        known = model.config.prices  # of a policy of every price
        self.prices: tuple[float, float] | None = None if known is None else (0.0, known.high)

    def ask(self, question: Question, pruned: bool) -> Columns:
        """A column, with the policy or without.

        Raises:
            ValueError: The question is too long for the base, or a setting is out of range.
        """
        ids = self._prompt_ids(question)
        self._running = written = _Written(self.model, ids.shape[1])
        arguments: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        arguments |= {"do_sample": False, "stop_policy": False}
        arguments |= {"max_new_tokens": question.max_tokens}
        arguments["stopping_criteria"] = StoppingCriteriaList([written])
        if question.temperature > 0:
            sampling = {"temperature": question.temperature, "top_p": 0.95, "top_k": 0}
            arguments |= {"do_sample": True, **sampling}
        if pruned:
            arguments["stop_policy"] = {"seed": question.seed, **question.stop_policy}
            arguments["on_step"] = written.on_step
        work = (arguments, question.seed, pruned)
        thread = threading.Thread(target=written.run, args=work, daemon=True)
        thread.start()
        try:
            while thread.is_alive():
                thread.join(FRAME_SECONDS)
                yield written.column(done=False)
            if written.error is not None:
                raise written.error
            yield written.column(done=True)
        finally:
            written.ended = True  # generate ends with its next token
            thread.join()

    def answer_now(self) -> None:
        """Ends the thinking of the pruned column that grows, with the paragraph in writing."""
        if self._running is not None:
            self._running.answers = True

    def _prompt_ids(self, question: Question) -> torch.Tensor:
        """The prompt's ids, (1, S)."""
        fmt, tokenizer = self.model.token_format, self.model.tokenizer
        assert tokenizer is not None  # a saved policy has one
        asked = user_message(Problem("", question.text, ""), fmt.format)
        ids = prompt_token_ids("asked here", asked, tokenizer, fmt)
        if self.positions is not None and len(ids) + question.max_tokens > self.positions:
            raise ValueError(
                f"The question is {len(ids)} tokens long with its prompt, and "
                f"{question.max_tokens} are kept for thinking and answer; the base takes "
                f"{self.positions} in all. Shorten the question, or lower “Most tokens”."
            )
        return torch.tensor([ids], device=self.model.device)


class _Written(StoppingCriteria):
    """What one generate has written after a prompt; as a stopping criterion it sees each token."""

    def __init__(self, model: OSPrunerForCausalLM, width: int) -> None:
        self.ended = self.answers = False
        self.error: Exception | None = None
        self._model, self._width = model, width
        self._ids: list[int] = []
        self._record = StopRecord()
        self._began = time.perf_counter()

    def run(self, arguments: dict[str, Any], seed: int, pruned: bool) -> None:
        """Generates; an error is raised again in the page's thread."""
        torch.manual_seed(seed)
        try:
            output = self._model.generate(**arguments, return_dict_in_generate=True)
            if pruned:  # not `last_stop`, which may be another visitor's by now
                self._record = output.stop[0]
        except Exception as error:  # noqa: BLE001
            self.error = error

    def on_step(self, row: int, record: StopRecord) -> bool:
        """Takes the record, which goes on changing; whether the thinking ends here."""
        self._record = record
        return self.answers

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        """After each token."""
        self._ids = input_ids[0, self._width :].tolist()
        return torch.full((1,), self.ended, device=input_ids.device)

    def column(self, done: bool) -> AppColumn:
        """The ids as paragraphs and answer."""
        ids, record, fmt = self._ids, self._record, self._model.token_format
        tokenizer: Any = self._model.tokenizer
        span = fmt.thinking_span([0] * self._width + ids, self._width)
        tokens = span.end - span.start
        known = dict(zip(record.step_ends, record.probabilities, strict=False))
        ends = fmt.step_ends(ids[:tokens])
        paragraphs = [
            Paragraph(tokenizer.decode(ids[begin:end]), end, known.get(end))
            for begin, end in zip([0, *ends], ends, strict=False)
        ]
        reason = "natural" if span.closed else "length" if done else None
        rest, marker = ids[tokens:], fmt.end_marker
        if marker is None:  # after as much of the closing as stands there
            pairs = zip(rest, [*fmt.closing_ids, -1], strict=False)
            rest = rest[next((n for n, (one, other) in enumerate(pairs) if one != other), 0) :]
        answer = str(tokenizer.decode(rest, skip_special_tokens=True))
        if marker is not None:
            answer = answer.partition(marker.literal)[2]
        return AppColumn(
            paragraphs,
            answer.strip(),
            tokens,
            time.perf_counter() - self._began,
            reason if record.reason == "length" else record.reason,
            done,
        )


class ServedSource:
    """A server of `ospruner serve`, in the place of a `LocalSource`.

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
        self._openai: Any = needed("openai", "asking a server", "pip install 'ospruner[app]'")
        self._client = self._openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", timeout=_ANSWER_SECONDS, max_retries=0
        )
        try:
            served = self._client.models.list().data[0]
        except (self._openai.OpenAIError, IndexError) as error:
            raise self._gone(error) from error
        self.policy = str(served.id)
        self._instruction = str((self._told("format") or {}).get("user_instruction", ""))
        self._asked = ""  # the name of the last pruned request
        self.positions: int | None = served.model_dump().get("max_model_len")

    def ask(self, question: Question, pruned: bool) -> Columns:
        """See `LocalSource.ask`.

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
        asked = f"{question.text}\n\n{self._instruction}"
        began = looked = time.perf_counter()
        pieces: list[tuple[int, str]] = []  # tokens so far, text
        answer, tokens = "", 0
        record: dict[str, Any] = {}
        try:
            with self._client.chat.completions.create(
                model=self.policy,
                messages=[{"role": "user", "content": asked.rstrip()}],
                temperature=question.temperature,
                max_tokens=question.max_tokens,
                seed=question.seed,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"vllm_xargs": extra, "return_token_ids": True},
            ) as parts:
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
        except self._openai.OpenAIError as error:
            refused = isinstance(error, self._openai.APIStatusError)
            if not refused or vars(error)["status_code"] >= 500:
                raise self._gone(error) from error
            raise ValueError(
                f"The server refuses the question ({error}). Change what it names, or shorten the "
                "question."
            ) from error
        seconds = time.perf_counter() - began
        record = (self._told(f"stops/{name}") or record) if pruned else {}
        reason = record.get("reason") or ("natural" if answer else "length")
        yield AppColumn(_paragraphs(pieces, record), answer.strip(), tokens, seconds, reason, True)

    def answer_now(self) -> None:
        """See `LocalSource.answer_now`."""
        self._told(f"answer/{self._asked}", self._client.post)

    def _told(self, what: str, ask: Callable[..., Any] | None = None) -> dict[str, Any] | None:
        """What the server says of a request, or of its policy; None where it knows nothing."""
        try:
            told: dict[str, Any] = (ask or self._client.get)(
                f"{self.url}/ospruner/{what}", cast_to=object
            )
        except self._openai.APIStatusError:
            return None
        except self._openai.OpenAIError as error:
            raise self._gone(error) from error
        return told

    def _gone(self, error: Exception) -> ConnectionError:
        return ConnectionError(
            f"{self.url} does not answer as a server of `ospruner serve` ({error}): start one with "
            "`ospruner serve POLICY --port 8000`, or name another with --url"
        )


Source = LocalSource | ServedSource
"""Where texts come from."""


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
