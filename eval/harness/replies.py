r"""What a policy replies to a conversation, apart from its thinking: local, or behind a server.

Stop strings of a harness are looked for in the answer alone. A harness sends them with each
request, and many of them ("\n\n", "Question:") stand in any thinking.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from threading import Lock
from typing import Any, Protocol

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from modeling_ospruner import OSPrunerForCausalLM
from modeling_ospruner.formats_ospruner import TokenFormat
from modeling_ospruner.states_ospruner import BoundaryState
from modeling_ospruner.stopping_ospruner import StopPolicyConfig
from ospruner.engines.interface import end_ids
from ospruner.optional import needed
from ospruner.serving.requests import ID, KEYS, ON, StopRequest

__all__ = ["Asked", "Policy", "Reply", "open_policy"]

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Asked:
    """How replies are generated.

    Attributes:
        max_tokens: cap on thinking and answer together.
        until: texts that end the answer; they are not part of it.
        temperature: 0 decodes greedily.
        more: further arguments of transformers' generate, or of the request: top_p, top_k.
    """

    max_tokens: int
    until: tuple[str, ...] = ()
    temperature: float = 0.0
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """One reply.

    Attributes:
        answer: what is graded: the text after the thinking, up to a stop string.
        thinking: the text before.
        thinking_tokens: of the thinking.
        prompt_tokens: of the prompt.
        tokens: generated in all, forced ones included.
        reason: what ended the thinking: "policy", "budget", "natural" or "length".
    """

    answer: str
    thinking: str
    thinking_tokens: int
    prompt_tokens: int
    tokens: int
    reason: str

    def log(self) -> dict[str, Any]:
        """What a log keeps beside the answer."""
        return {name: value for name, value in asdict(self).items() if name != "answer"}


class Policy(Protocol):
    """A policy that can be asked."""

    name: str

    def ask(self, conversations: Sequence[Sequence[Message]], asked: Asked) -> list[Reply]:
        """One reply for each conversation."""


def open_policy(
    policy: str | None,
    *,
    url: str | None = None,
    revision: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    batch_size: int | None = None,
    api_key: str | None = None,
    timeout_seconds: float = 3600,
    stop_policy: bool = True,
    **settings: Any,
) -> Policy:
    """Opens a policy for a harness.

    Args:
        policy: folder or Hub id; with a url, the name under which the server knows it.
        url: of `ospruner serve`; None loads the policy here, in transformers.
        revision: of a Hub id.
        dtype: of the base; None for its own.
        device: of the base; None for the GPU where there is one.
        batch_size: conversations generated together, or requests sent at once; None for 1 and 16.
        api_key: the server's; None for the environment's OPENAI_API_KEY.
        timeout_seconds: of one request.
        stop_policy: False for the base as it is.
        settings: of `StopPolicyConfig`: mode, threshold, max_loss, max_thinking_tokens...

    Raises:
        ValueError: an argument is unknown, wrong, or of no use where the policy runs.
        MissingPackageError: a url is given, and the openai package is not installed.
    """
    if not isinstance(stop_policy, bool):
        raise ValueError(f"stop_policy is {stop_policy!r}; it must be True or False")
    if settings and not stop_policy:
        raise ValueError(f"stop_policy is False, so that {sorted(settings)} would do nothing")
    if not isinstance(policy, str) or not policy:
        raise ValueError(
            f"policy is {policy!r}; name its folder or Hub id, or what the server at url calls it"
        )
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
    wanted = StopPolicyConfig.of(settings) if stop_policy else None
    if url is None:
        if api_key is not None:
            raise ValueError("api_key is for a server: give its url too, or leave it out")
        return LocalPolicy(policy, wanted, revision, dtype, device, batch_size or 1)
    local = {"revision": revision, "dtype": dtype, "device": device}
    if given := [name for name, value in local.items() if value is not None]:
        raise ValueError(f"{given} would do nothing: the server at {url} has loaded its policy")
    extra = _request_keys(settings) if stop_policy else {ON: False}
    return ServedPolicy(policy, url, extra, batch_size or 16, api_key, timeout_seconds)


class LocalPolicy:
    """A policy in transformers.

    Args:
        policy: folder or Hub id.
        settings: how to stop; None for the base as it is.
        revision: of a Hub id.
        dtype: of the base.
        device: of the base.
        batch_size: conversations generated together.
    """

    def __init__(
        self,
        policy: str,
        settings: StopPolicyConfig | None,
        revision: str | None,
        dtype: str | None,
        device: str | None,
        batch_size: int,
    ) -> None:
        hub: dict[str, Any] = {} if revision is None else {"revision": revision}
        self.name = policy
        self.settings = settings
        self.batch_size = batch_size
        self.model = OSPrunerForCausalLM.from_pretrained(policy, dtype=dtype or "auto", **hub)
        if settings is not None:  # what the policy does not promise is refused before any work
            settings.with_defaults(self.model.config)
        found = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.model.to(found)  # type: ignore[arg-type]
        tokenizer: Any = self.model.tokenizer
        self._ends = end_ids(self.model.base.generation_config, tokenizer)
        self._asked = 0
        self._lock = Lock()

    def ask(self, conversations: Sequence[Sequence[Message]], asked: Asked) -> list[Reply]:
        """One reply for each conversation, batch by batch."""
        replies: list[Reply] = []
        with self._lock:  # rows are numbered as they come: the draws of mode "sample" need it
            for first in range(0, len(conversations), self.batch_size):
                replies += self._batch(conversations[first : first + self.batch_size], asked)
        return replies

    def _batch(self, conversations: Sequence[Sequence[Message]], asked: Asked) -> list[Reply]:
        model, fmt = self.model, self.model.token_format
        tokenizer: Any = model.tokenizer
        prompts: list[list[int]] = [
            tokenizer.apply_chat_template(
                [dict(message) for message in one], add_generation_prompt=True, return_dict=False
            )
            for one in conversations
        ]
        width = max(map(len, prompts))
        pad = min(self._ends)  # masked, so that any id will do
        rows = [[pad] * (width - len(p)) + p for p in prompts]
        mask = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
        arguments: dict[str, Any] = {
            "attention_mask": torch.tensor(mask, device=model.device),
            "max_new_tokens": asked.max_tokens,
            "pad_token_id": pad,
            "do_sample": asked.temperature > 0,
            **asked.more,
        }
        if asked.temperature > 0:
            arguments["temperature"] = asked.temperature
        if asked.until:
            ends = AnswerStrings(fmt, tokenizer, prompts, asked.until)
            arguments["stopping_criteria"] = StoppingCriteriaList([ends])
        settings: StopPolicyConfig | bool = False
        if self.settings is not None:
            first = self.settings.first_sample_index + self._asked
            settings = replace(self.settings, first_sample_index=first)
        ids = torch.tensor(rows, device=model.device)
        with torch.inference_mode():
            output = model.generate(ids, stop_policy=settings, **arguments)
        self._asked += len(prompts)
        records = model.last_stop if self.settings is not None else [None] * len(prompts)
        replies = []
        for prompt, row, record in zip(prompts, output[:, width:].tolist(), records, strict=True):
            parts = _parts(fmt, prompt, row, self._ends - {fmt.think_end_id})
            answer = str(tokenizer.decode(parts.answer, skip_special_tokens=True))
            if fmt.in_reply:  # all of which is the reply
                answer = str(tokenizer.decode(row[: parts.tokens], skip_special_tokens=True))
            thinking_tokens = len(parts.thinking)
            reason = "natural" if parts.closed else "length"
            if record is not None:  # a sentence forced before the closing is not counted
                thinking_tokens, reason = record.thinking_tokens, record.reason
            replies.append(
                Reply(
                    cut(answer.lstrip(), asked.until),
                    ""
                    if fmt.in_reply
                    else str(tokenizer.decode(parts.thinking, skip_special_tokens=True)).strip(),
                    thinking_tokens,
                    len(prompt),
                    parts.tokens,
                    reason,
                )
            )
        return replies


@dataclass(frozen=True)
class _Parts:
    """A generated row, without the padding after its end; `closed`: by the model or a stop."""

    thinking: list[int]
    answer: list[int]
    tokens: int
    closed: bool


def _parts(
    fmt: TokenFormat, prompt: Sequence[int], row: Sequence[int], ends: frozenset[int]
) -> _Parts:
    """Takes the thinking and the answer of a row apart, by the ids of its markers."""
    length = next((place for place, token in enumerate(row) if token in ends), len(row))
    state = fmt.follow(prompt, row[:length])
    if not state.ended:
        return _Parts(list(row[:length]), [], length, length < len(row))
    thinking = max(0, state.thinking_tokens)
    begins = max(0, state.thinking_tokens + state.end_tokens)
    rest = _header_rest(fmt, state)
    if rest and list(row[begins : begins + len(rest)]) == rest:
        begins += len(rest)
    return _Parts(list(row[:thinking]), list(row[begins:length]), length, True)


def _header_rest(fmt: TokenFormat, state: BoundaryState) -> list[int]:
    """What stands between an end marker and the answer: in Harmony, the answer's header."""
    return list(fmt.closing_left(state)) if fmt.channels else []


def cut(text: str, until: Sequence[str]) -> str:
    """A text up to the first of the stop strings."""
    return text[: min((text.find(stop) for stop in until if stop in text), default=len(text))]


class AnswerStrings(StoppingCriteria):
    """Ends a row where a stop string stands in its answer; its thinking is not looked at.

    Of a model that thinks in its reply, all of it is the answer.

    Args:
        fmt: how the base writes its thinking.
        tokenizer: the base's.
        prompts: of the rows, without padding.
        until: the stop strings.
    """

    def __init__(
        self,
        fmt: TokenFormat,
        tokenizer: Any,
        prompts: Sequence[Sequence[int]],
        until: Sequence[str],
    ) -> None:
        self._tokenizer = tokenizer
        self._until = tuple(until)
        self._fmt = fmt
        self._states: list[BoundaryState] = []
        self._answers: list[list[int] | None] = []
        for prompt in prompts:
            span = fmt.thinking_span(prompt)
            self._states.append(fmt.boundary_state(prompt[span.start :]))
            self._answers.append([] if span.closed or fmt.in_reply else None)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Which rows (B,) end with their last token."""
        return torch.tensor(
            [self._ends(row, token) for row, token in enumerate(input_ids[:, -1].tolist())],
            device=input_ids.device,
        )

    def _ends(self, row: int, token: int) -> bool:
        answer, state = self._answers[row], self._states[row]
        if answer is None:
            state.push(token)
            if state.ended:
                self._answers[row] = []
            return False
        answer.append(token)
        rest = _header_rest(self._fmt, state)
        shown = answer[len(rest) :] if answer[: len(rest)] == rest[: len(answer)] else answer
        # As in the reply: blank text before the answer does not count.
        text = str(self._tokenizer.decode(shown, skip_special_tokens=True)).lstrip()
        return any(stop in text for stop in self._until)


def _request_keys(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of `StopPolicyConfig` as a request's keys.

    Raises:
        ValueError: a setting cannot be sent with a request.
    """
    keys = {name: key for key, name in KEYS.items()}
    if unsent := sorted(set(settings) - set(keys)):
        raise ValueError(f"{unsent} cannot be sent to a server; what can is {sorted(keys)}")
    extra = {ON: True, **{keys[name]: value for name, value in settings.items()}}
    StopRequest(extra, "the model's arguments")
    return extra


class ServedPolicy:
    """A policy behind `ospruner serve`.

    Args:
        name: what the server calls it.
        url: the server, with or without its `/v1`.
        extra: the policy's keys of each request.
        concurrency: requests sent at once.
        api_key: the server's key.
        timeout_seconds: of one request.
    """

    def __init__(
        self,
        name: str,
        url: str,
        extra: Mapping[str, Any],
        concurrency: int,
        api_key: str | None,
        timeout_seconds: float,
    ) -> None:
        needed("openai", "a policy behind a url", "pip install 'ospruner[openai]'")
        from openai import OpenAI

        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url is {url!r}; give an address such as http://127.0.0.1:8000")
        self.name = name
        self.extra = dict(extra)
        self.concurrency = concurrency
        self._root = url.rstrip("/").removesuffix("/v1")
        key = api_key or os.environ.get("OPENAI_API_KEY") or "none"
        self._client = OpenAI(base_url=f"{self._root}/v1", api_key=key, timeout=timeout_seconds)
        self._asked = 0
        self._lock = Lock()

    def ask(self, conversations: Sequence[Sequence[Message]], asked: Asked) -> list[Reply]:
        """One reply for each conversation, several at once.

        Raises:
            ValueError: the server refuses a request, or does not tell why it stopped.
            ConnectionError: it cannot be reached.
        """
        with self._lock:
            first, self._asked = self._asked, self._asked + len(conversations)
        numbers = range(first, first + len(conversations))
        with ThreadPoolExecutor(self.concurrency) as threads:
            return list(threads.map(lambda c, n: self._one(c, n, asked), conversations, numbers))

    def _one(self, messages: Sequence[Message], number: int, asked: Asked) -> Reply:
        from openai import APIConnectionError, APIStatusError, NotFoundError

        on = bool(self.extra[ON])
        extra = dict(self.extra)
        if on:
            extra[ID] = uuid.uuid4().hex
        if "stop_seed" in extra:  # as rows of one run: else all would draw alike
            extra["stop_sample_index"] = extra.get("stop_sample_index", 0) + number
        # The stop strings stay here: the server would find them in the thinking, too.
        body = {
            "model": self.name,
            "messages": [dict(message) for message in messages],
            "max_tokens": asked.max_tokens,
            "temperature": asked.temperature,
            **asked.more,
            "vllm_xargs": extra,
        }
        record: Any = None
        try:
            reply: Any = self._client.post("/chat/completions", cast_to=object, body=body)
            if on:
                record = self._client.get(
                    f"{self._root}/ospruner/stops/{extra[ID]}", cast_to=object
                )
        except APIConnectionError as error:
            raise ConnectionError(f"{self._root} cannot be reached ({error})") from error
        except NotFoundError as error:
            raise ValueError(
                f"{self._root} does not know {error.request.url.path} ({error}): start it with "
                f"`ospruner serve`, and name the policy as it does"
            ) from error
        except APIStatusError as error:
            raise ValueError(f"{self._root} refuses a request: {error}") from error
        choice, usage = reply["choices"][0], reply["usage"]
        thinking = choice["message"].get("reasoning") or ""
        answer = choice["message"].get("content") or ""
        if record is not None:
            tokens, reason = record["thinking_tokens"], record["reason"]
        else:
            details = usage.get("completion_tokens_details") or {}
            tokens = details.get("reasoning_tokens") or 0
            cut_off = choice["finish_reason"] == "length" and not answer
            reason = "length" if cut_off else "natural"
        return Reply(
            cut(answer.lstrip(), asked.until),
            thinking.strip(),
            tokens,
            usage["prompt_tokens"],
            usage["completion_tokens"],
            reason,
        )
