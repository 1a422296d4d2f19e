"""The interface of engines: sampling traces, and forking answers off them, over token ids."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from modeling_ospruner.formats_ospruner import BoxState, MarkerState, TokenFormat
from modeling_ospruner.stopping_ospruner import mix64
from ospruner.rules.signals import ENTROPY_TOKENS as ENTROPY_TOKENS


def top_entropy(logits: torch.Tensor) -> torch.Tensor:
    """Entropy in nats (...) over the ENTROPY_TOKENS most likely tokens of logits (..., V)."""
    kept = logits.float().topk(min(ENTROPY_TOKENS, logits.shape[-1]), dim=-1).values
    logs = kept.log_softmax(-1)
    return -(logs.exp() * logs).sum(-1)


class EnginesDownError(ConnectionError):
    """No server is left to do the work. What was finished before has been handed on."""


@dataclass(frozen=True)
class SamplingSettings:
    """How traces are sampled; `LabelSettings` refuses what is out of range."""

    temperature: float = 0.6  # 0 decodes greedily
    top_p: float = 0.95  # mass of the most likely tokens that are kept, in (0, 1]
    top_k: int = 0  # how many of the most likely tokens are kept; 0 keeps all
    max_new_tokens: int = 15_000  # of the thinking; the end marker is not counted
    max_answer_tokens: int = 512  # of the natural answer
    seed: int = 0  # with a row's key, decides all of its draws


@dataclass(frozen=True)
class Sampled:
    """One sampled trace."""

    trace_ids: list[int]  # the thinking tokens: no prompt, no end marker
    answer_ids: list[int]  # what followed the end marker, without the token that ends the text
    ended: Literal["natural", "cap"]  # by the model, or by the cap on its thinking
    # Of an end marker of several tokens, as the model wrote it: the first may begin with other
    # text, the last end with some of the answer's.
    end_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class ForkRequest:
    """A trace and where to fork answers off it."""

    prompt_ids: Sequence[int]
    trace_ids: Sequence[int]  # the thinking tokens
    cuts: Sequence[int]  # of each fork: how many of these it keeps, in 0..len(trace_ids)
    # Token ids of which the likeliest is the answer, read in the forward that runs the suffix; ()
    # decodes the answer.
    options: Sequence[int] = ()

    def __post_init__(self) -> None:
        if bad := [cut for cut in self.cuts if not 0 <= cut <= len(self.trace_ids)]:
            raise ValueError(
                f"cuts holds {bad}; each must lie in 0..{len(self.trace_ids)}, the trace's length"
            )
        if len(self.options) == 1 or len(set(self.options)) < len(self.options):
            raise ValueError(
                f"options is {list(self.options)}; it must hold two or more different token ids, "
                "or none"
            )


@dataclass(frozen=True)
class TraceRequest:
    """One trace to be sampled and forked."""

    prompt_ids: Sequence[int]
    key: str  # the row's name: with the seed, it decides all of the trace's draws
    options: Sequence[int] = ()  # as in `ForkRequest`, of its forks
    trace: Sampled | None = None  # where it was sampled before, and is only to be forked


@dataclass(frozen=True)
class ForkedAnswer:
    """A greedy answer after prompt, cut trace and suffix.

    Where the request has options, the answer is one token, and the distribution is over these.
    """

    # After the suffix, without the token that ends the text; with the one that closed the box.
    ids: list[int]
    ended: Literal["closed", "eos", "length"]  # "closed" by the stop rule, "length" at the cap
    logprobs: list[float]  # natural ones of `ids`, under the model's plain (temperature 1) shares
    # In nats, of the distribution at the answer's first token over its ENTROPY_TOKENS most likely
    # tokens, renormalised; and the sum over all of its tokens, that of its end included.
    entropy: float
    whole_entropy: float
    # Natural ones of the request's options, among them alone; None where the answer was decoded.
    option_logprobs: list[float] | None = None

    @classmethod
    def chosen(cls, options: Sequence[int], scores: Sequence[float]) -> ForkedAnswer:
        """The likeliest of a request's options, by their logits or log-probabilities.

        Raises:
            ValueError: a score is not finite.
        """
        if not all(map(math.isfinite, scores)):
            raise ValueError(f"the options {list(options)} have the scores {list(scores)}")
        best = max(range(len(scores)), key=lambda i: scores[i])
        total = math.log(math.fsum(math.exp(score - scores[best]) for score in scores))
        logprobs = [score - scores[best] - total for score in scores]
        entropy = max(0.0, -math.fsum(math.exp(value) * value for value in logprobs))
        return cls([options[best]], "closed", [logprobs[best]], entropy, entropy, logprobs)


@dataclass
class TokenCount:
    """Tokens computed, against those that could not have been shared."""

    computed: int = 0  # that entered the model's forward, padding apart
    padding: int = 0  # that entered it beside them
    unique: int = 0  # that cannot be shared in a call, see `Call`


AnswerStop = BoxState | MarkerState
"""Says when one answer is complete; `TokenFormat.box_state` makes such.

Its `final_text` stands there then, not before. Servers behind HTTP know texts only: they stop
there, and are asked on where it was not the end.
"""


class TraceDesk(Protocol):
    """Where an engine gets the traces of a stream, and hands in what it made of them.

    Every trace that was begun is either done or failed, or still in flight.
    """

    def begin(self) -> TraceRequest | None:
        """The next trace; None where there is none now.

        There may be one after the next is handed in. While none is in flight, None is the end.
        """

    def sampled(self, request: TraceRequest, trace: Sampled) -> list[int]:
        """Takes note of a sampled trace; the cuts at which answers are to be forked off it."""

    def done(self, request: TraceRequest, trace: Sampled, answers: Sequence[ForkedAnswer]) -> None:
        """Takes a trace with the answers at its cuts."""

    def failed(self, request: TraceRequest, error: Exception) -> None:
        """Takes note of an error that ended a trace, and no other one."""


class Engine:
    """What labelling and evaluation ask of any engine: a stream of traces, sampled and forked."""

    batch_effects: str | None
    """Why a row may get other tokens in another call with the same seed; None where it does not."""
    calls: type[Call]
    """What does one call."""

    def __init__(self) -> None:
        self.counts = TokenCount()  # of all forks so far
        self.sample_counts = TokenCount()  # of all sampling so far

    def sample_and_fork(
        self,
        desk: TraceDesk,
        settings: SamplingSettings,
        fmt: TokenFormat | None,
        suffix_ids: Sequence[int],
        max_new_tokens: int,
        stop: Callable[[], AnswerStop] | None = None,
    ) -> None:
        """Samples traces and forks answers off each, until the desk has no more of them.

        A trace is forked while others are still being sampled, and another is begun wherever there
        is room. `fmt` says where the thinking ends; None where nothing is to be sampled. The suffix
        and what follows are as in `fork`.

        Raises:
            ValueError: as `fork`. What a single trace asks too much fails that trace alone.
            EnginesDownError: no server is left.
            Exception: an error that cannot be told to be a single trace's. Those in flight are
                not handed in.
        """
        self.calls(self, desk, settings, fmt, suffix_ids, max_new_tokens, stop).run()

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        settings: SamplingSettings,
        fmt: TokenFormat,
        keys: Sequence[str] | None = None,
    ) -> list[Sampled]:
        """Samples one trace and its natural answer per prompt.

        Keys are names of the rows, such as problem and sample index: a row's draws depend on the
        seed and its key only. Default: the prompts' numbers.

        Raises:
            ValueError: a prompt is too long with the cap.
        """
        keys = [str(i) for i in range(len(prompts))] if keys is None else keys
        asked = [TraceRequest(prompt, key) for prompt, key in zip(prompts, keys, strict=True)]
        desk = _ListDesk(asked, [[] for _ in asked])
        self.sample_and_fork(desk, settings, fmt, (), 1)
        return [trace for trace, _ in desk.results()]

    def fork(
        self,
        requests: Sequence[ForkRequest],
        suffix_ids: Sequence[int],
        max_new_tokens: int,
        stop: Callable[[], AnswerStop] | None = None,
    ) -> list[list[ForkedAnswer]]:
        """Decodes greedily after every cut of every trace, computing shared tokens once.

        Of requests with options nothing is decoded: one forward gives their distribution.

        Args:
            requests: traces and their cuts.
            suffix_ids: put after each cut: `TokenFormat.forced_suffix`.
            max_new_tokens: cap on each answer.
            stop: makes the rule that completes one answer: `fmt.box_state` after the box
                prefix. Default: the end-of-text token alone.

        Raises:
            ValueError: a trace is too long.
        """
        asked = []
        for one in requests:
            trace = Sampled(list(one.trace_ids), [], "natural")
            asked.append(TraceRequest(one.prompt_ids, "", one.options, trace))
        desk = _ListDesk(asked, [list(one.cuts) for one in requests])
        self.sample_and_fork(desk, SamplingSettings(), None, suffix_ids, max_new_tokens, stop)
        return [list(answers) for _, answers in desk.results()]


class _ListDesk(TraceDesk):
    """A desk over a list of traces and their cuts; an error of one ends all."""

    def __init__(self, requests: Sequence[TraceRequest], cuts: Sequence[list[int]]) -> None:
        self._todo = iter(requests)
        self._cuts = {id(request): own for request, own in zip(requests, cuts, strict=True)}
        self._made: dict[int, tuple[Sampled, Sequence[ForkedAnswer]]] = {}

    def begin(self) -> TraceRequest | None:
        return next(self._todo, None)

    def sampled(self, request: TraceRequest, trace: Sampled) -> list[int]:
        return self._cuts[id(request)]

    def done(self, request: TraceRequest, trace: Sampled, answers: Sequence[ForkedAnswer]) -> None:
        self._made[id(request)] = trace, answers

    def failed(self, request: TraceRequest, error: Exception) -> None:
        raise error

    def results(self) -> list[tuple[Sampled, Sequence[ForkedAnswer]]]:
        """What was made of each request, in their order."""
        return [self._made[one] for one in self._cuts]


def row_state(seed: int, key: str) -> int:
    """The 64-bit state that all of one row's draws come from."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return mix64(mix64(seed) ^ int.from_bytes(digest, "big"))


@dataclass
class ForkJob:
    """A sampled trace whose answers are to be forked."""

    request: TraceRequest
    trace: Sampled
    fork: ForkRequest
    answers: dict[int, ForkedAnswer] = field(default_factory=dict)  # so far, by their cut's place


@dataclass
class Call(ABC):
    """One call of an engine; its fields are that and the arguments of `sample_and_fork`.

    It counts the tokens that cannot be shared: each prompt once, each trace once, and once at each
    of its cuts the suffix and the answer; the last token does not count, for nothing follows it.
    """

    engine: Engine
    desk: TraceDesk
    settings: SamplingSettings
    fmt: TokenFormat | None
    suffix_ids: Sequence[int]
    max_new_tokens: int
    stop: Callable[[], AnswerStop] | None
    _prompts: set[tuple[bool, int]] = field(default_factory=set, init=False)  # if forked, hashes

    @abstractmethod
    def run(self) -> None:
        """See `Engine.sample_and_fork`."""

    def count_sampled(self, request: TraceRequest, tokens: int) -> None:
        """Counts a trace that was sampled in so many tokens."""
        self.engine.sample_counts.unique += self._new(request.prompt_ids, False) + tokens - 1

    def sampled(self, request: TraceRequest, trace: Sampled) -> ForkJob | None:
        """Hands in a sampled trace; what is to be forked off it, or None, and then it is done."""
        if cuts := self.desk.sampled(request, trace):
            kept = trace.trace_ids[: max(cuts)]
            fork = ForkRequest(request.prompt_ids, kept, cuts, request.options)
            return ForkJob(request, trace, fork)
        self.desk.done(request, trace, [])
        return None

    def forked(self, job: ForkJob, answers: Sequence[ForkedAnswer]) -> None:
        """Hands in the answers that were forked off a trace, and counts them."""
        fork = job.fork
        alike = dict(zip(fork.cuts, answers, strict=True))  # at one cut all is shared
        forks = sum(len(self.suffix_ids) + len(a.ids) - (a.ended != "eos") for a in alike.values())
        prompt = self._new(fork.prompt_ids, True)
        self.engine.counts.unique += prompt + len(fork.trace_ids) + forks
        self.desk.done(job.request, job.trace, answers)

    def _new(self, prompt_ids: Sequence[int], forked: bool) -> int:
        """How many tokens of a prompt are new: all or none."""
        before = len(self._prompts)
        self._prompts.add((forked, hash(tuple(prompt_ids))))
        return len(prompt_ids) if len(self._prompts) > before else 0


def end_ids(config: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The ids that end a text, by a base's generation config and its tokenizer.

    Raises:
        ValueError: neither names one.
    """
    configured = None if config is None else config.eos_token_id
    ids = [configured] if isinstance(configured, int) else list(configured or [])
    if tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    if not ids:
        raise ValueError(
            "neither the model's generation config nor the tokenizer names a token that ends a "
            "text; set tokenizer.eos_token"
        )
    return frozenset(ids)


def base_end_ids(
    base: str, revision: str | None, tokenizer: PreTrainedTokenizerBase
) -> frozenset[int]:
    """The same for a base that is not loaded here, by its folder or Hub id."""
    try:
        config = GenerationConfig.from_pretrained(base, revision=revision or "main")
    except OSError:  # a base may come without one
        config = None
    return end_ids(config, tokenizer)
