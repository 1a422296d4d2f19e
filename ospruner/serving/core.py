"""The way of an engine's requests to their stops: one `StopRow` each, as in generate.

An adapter admits the requests that come, gives each its tokens, asks the policy about those that
have ended a step, and lets `RowCore` decide and shape the logits. All of it runs on the host, so
that an engine that keeps its tokens on the device copies those of a step once.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, replace
from typing import Any

import torch

from modeling_ospruner.configuration_ospruner import OSPrunerConfig
from modeling_ospruner.formats_ospruner import BREAK, NEWLINE, TokenFormat
from modeling_ospruner.modeling_ospruner import compiled_format, load_tokenizer
from modeling_ospruner.policy_ospruner import price_logits, price_places
from modeling_ospruner.stopping_ospruner import (
    Phase,
    RowPlan,
    Said,
    StopPolicyConfig,
    StopRecord,
    StopRow,
    mix64,
    shape_scores,
    uniform,
)

from .requests import StopRequest

logger = logging.getLogger(__name__)

# What excludes a policy whose thinking no single token ends: structured outputs, forced calls.
GRAMMAR = "a grammar"
IN_THINKING = f"{GRAMMAR}, which holds in the thinking already"


@dataclass(eq=False)
class ServedRow:
    """A request that the policy may stop, after a prompt without padding; its `row` decides."""

    plan: RowPlan  # as in generate
    prompt_ids: InitVar[Sequence[int]]
    end_id: int  # the token that ends it, once its answer is complete
    grammar: bool = False  # whether an engine's grammar holds, from the answer on
    control: bool = False  # whether it belongs to those that never stop
    promise: Mapping[str, Any] | None = None  # the calibration that it stops by, if any

    def __post_init__(self, prompt_ids: Sequence[int]) -> None:
        self.said: dict[int, Said] = {}  # what the policy has said at step ends, by `taken`
        self.asked = False  # whether somebody wants its answer now
        # Tokens and rethinks of its answer that have been counted; None: neither has its thinking.
        self.told: tuple[int, int] | None = None
        self.most_tokens = sys.maxsize  # of prompt and text; what an engine adds is no part of it
        self._answers_at: int | None = None  # as many as were taken when somebody was heard
        self._begin(prompt_ids)

    def _begin(self, prompt_ids: Sequence[int]) -> None:
        self.row = StopRow(self.plan, prompt_ids, self.plan.settings.first_sample_index)
        self.taken = len(prompt_ids)  # tokens of prompt and text that `row` has taken in
        self.complete = False  # whether its answer is, by a token that does not end a text
        # Of a control request that would stop by a promise: its tokens, prompt and text.
        self._ids = list(prompt_ids) if self.control and self.promise is not None else None
        self._answer_ids = list[int]()  # of these what follows what was forced
        self._stop: int | None = None  # how many precede the policy's first stop, if there is one

    @property
    def record(self) -> StopRecord:
        """What has happened to it."""
        return self.row.record

    @property
    def thinks(self) -> bool:
        """Whether it may still be stopped."""
        return self.row.phase is Phase.THINKING

    def take(self, token: int) -> None:
        """Takes in the next token, after the step that the last one may have ended."""
        if self.taken >= self.most_tokens:
            return
        if self.taken == self._answers_at:
            self.row.answer_now()
        if self.row.at_boundary:
            self.decide(self.said.get(self.taken, self.plan.unasked))
        if self._ids is not None:
            self._ids.append(token)
            if self.row.phase is Phase.ANSWER:
                self._answer_ids.append(token)
        if self.row.push(token):
            self.complete = token not in self.plan.eos_ids
        self.taken += 1

    def decide(self, said: Said) -> None:
        """Decides on the step that has ended; notes where a control request would have stopped."""
        if self._ids is not None and self._stop is None and self.row.wants_stop(said):
            self._stop = self.taken
        self.row.decide(said)

    def hear(self) -> None:
        """Turns to the answer, with all of its tokens taken in, where somebody wants it now."""
        if self.asked and self.thinks:
            self._answers_at = self.taken
            self.row.answer_now()

    @property
    def report(self) -> dict[str, Any]:
        """What has happened to it, and at which price, for JSON: that has no NaN and no inf.

        NaN, a step at which the policy gave no probability, is None; inf, a price above all that it
        knows, "inf".
        """
        said = vars(self.record) | {"price": self.plan.settings.price}
        for name in ("probabilities", "prices"):
            numbers = said[name]
            said[name] = [None if math.isnan(x) else "inf" if x == math.inf else x for x in numbers]
        return said

    @property
    def fork(self) -> dict[str, Any] | None:
        """What tells whether its pruned answer differs, for JSON; None where nothing is to tell.

        "ids" of the request that forces the answer where it would have stopped, None where it would
        not; "answer_ids" of its own, of "max_tokens" at most; and the "promise".
        """
        natural = self.record.reason == "natural"
        if self._ids is None or self.promise is None or not (natural and self.complete):
            return None
        suffix = self.plan.token_format.forced_suffix("forced")
        return {
            "ids": None if self._stop is None else [*self._ids[: self._stop], *suffix],
            "answer_ids": self._answer_ids,
            "max_tokens": self.plan.settings.max_answer_tokens,
            "promise": {k: self.promise[k] for k in ("max_loss", "confidence", "disagreement")},
        }

    def may_turn(self, token: int, place: int = 1) -> bool:
        """Whether the place-th next token may end a step or the thinking, or find neither on."""
        fmt = self.plan.token_format
        if not self.thinks or token in self.plan.eos_ids or token in fmt.added_ids:
            return True
        breaks = 0 <= token < len(fmt.kinds) and bool(fmt.kinds[token] & (BREAK | NEWLINE))
        full = 0 < fmt.format.step_tokens <= self.row.step_tokens + place
        return breaks or full or bool(fmt.end_marker or fmt.call_marker)

    def come_back(self, prompt_ids: Sequence[int], text_ids: Sequence[int]) -> None:
        """Goes on after an engine has put it back, perhaps with fewer tokens than were taken in."""
        length = len(prompt_ids) + len(text_ids)
        if length - 1 <= self.taken <= length:
            return
        old = self.record
        prices: Sequence[float | None] = old.prices or [None] * len(old.step_ends)
        told = zip(old.step_ends, old.probabilities, prices, strict=True)
        self.said = {len(prompt_ids) + end: Said(signal, price) for end, signal, price in told}
        self._begin(prompt_ids)
        for token in text_ids:
            self.take(token)

    def ahead(self) -> ServedRow:
        """A copy that takes in drafted tokens, while this one waits for those that are accepted.

        What the policy says after them is told to both.
        """
        fmt = self.plan.token_format
        kept = (self.said, self.plan, self.promise, fmt, *vars(fmt).values())
        return copy.deepcopy(self, {id(one): one for one in kept})


@functools.cache  # said once
def log_off(why: str) -> None:
    """Logs that requests go on without the policy."""
    logger.warning("a request goes on without the policy: %s (said once)", why)


@functools.cache  # a parser is made for each request
def format_of(policy: str) -> TokenFormat:
    """How a policy's base thinks, by the policy's folder or Hub id."""
    config = OSPrunerConfig.from_pretrained(policy)
    return compiled_format(config, load_tokenizer(policy, config, {}))


def served_format(
    config: OSPrunerConfig, tokenizer: str, revision: str | None, defaults: StopRequest
) -> TokenFormat:
    """Of a base's tokenizer, by its folder or Hub id; the server's own sentence winds down."""
    found = load_tokenizer(tokenizer, config, {"revision": revision})
    token_format, sentence = compiled_format(config, found), defaults.fields.get("wind_down")
    return token_format.winding_down(sentence, found) if sentence else token_format


class RowCore:
    """What a server knows: its policy and its defaults. It admits, decides, and shapes logits.

    Raises:
        ValueError: the defaults are wrong for this policy.
    """

    def __init__(
        self,
        config: OSPrunerConfig,
        token_format: TokenFormat,
        defaults: StopRequest,
        seed: int,  # for the draws of requests without one
        on_leave: Callable[[ServedRow], None] | None = None,  # see `tell_leaving`
        on_off: Callable[[str], None] = log_off,  # called where the policy is off, with why
    ) -> None:
        defaults.settle(config)
        self._config, self._prices = config, config.prices
        self._format = token_format
        self._bare: TokenFormat | None = None  # nothing follows its marker but a grammar's answer
        if token_format.think_end_ids and token_format.channels is None:
            self._bare = replace(token_format, closing_ids=token_format.think_end_ids)
        self._defaults = defaults
        self._seed = mix64(seed)
        self._on_leave, self._on_off = on_leave, on_off
        self._seen = 0  # requests
        self._warned = False

    def admit(
        self,
        extra: Mapping[str, Any] | None,  # its keys, among others
        prompt_ids: Sequence[int],  # without padding
        stop_ids: Iterable[int],  # that end it, beside the tokenizer's own end of text
        end_id: int | None = None,  # ends it once its answer is complete; None: that end of text
        text: int = 0,  # which one it is of several of one prompt; with a seed only
        least_tokens: int = 0,  # of its text, before which it does not end, and nothing stops it
        excluded: str | None = None,  # what of it, in the engine's words, excludes the policy
        ends: bool = True,  # whether the tokenizer's end of text ends it
    ) -> ServedRow | None:
        """Takes in a request that comes; None for one that is not stopped.

        Under a grammar (`excluded` is `GRAMMAR`) the thinking is stopped where the format lets it,
        and the answer is the grammar's: no box is forced.
        """
        try:
            asked = StopRequest(extra)
            settings = asked.settings(self._defaults, least_tokens)
            if settings is None:
                return None
            settings = settings.with_defaults(self._config)
        except ValueError as error:  # over HTTP it was a 400; here an error would end the engine
            logger.error("a request goes on without the policy: %s", error)
            return None
        grammar, fmt = excluded == GRAMMAR, self._format
        if grammar and self._bare is not None:
            settings, fmt = replace(settings, answer="tools", max_answer_tokens=None), self._bare
        elif excluded is not None:
            self._on_off(excluded)
            return None
        self._seen += 1
        control = uniform(self._seed, self._seen, -1) < self._defaults.control
        promise = promise_of(settings, self._config)
        if control:
            settings = replace(settings, min_thinking_tokens=sys.maxsize, max_thinking_tokens=None)
        if "seed" in asked.fields:
            settings = replace(settings, first_sample_index=settings.first_sample_index + text)
        else:  # as if each request were another sample; on all tensor-parallel ranks the same
            settings = replace(settings, first_sample_index=self._seen, seed=self._seed)
        [eos_id] = self._format.eos_ids
        eos_ids = frozenset({eos_id, *stop_ids}) if ends else frozenset(stop_ids)
        priced, stride = self._prices is not None, self._config.step_stride
        return ServedRow(
            RowPlan(settings, fmt, eos_ids, stride, priced, least_tokens),
            prompt_ids,
            eos_id if end_id is None else end_id,
            grammar,
            control,
            promise,
        )

    def decide(self, rows: Sequence[ServedRow], outputs: torch.Tensor) -> None:
        """Decides on K rows whose last tokens have ended a step, each at its own price.

        There the head's outputs are (K, 1 or 6).
        """
        outputs = outputs.float().cpu()  # the one wait for the device
        logits = outputs[:, 0]
        prices: list[float | None] = [None] * len(rows)
        if self._prices is not None:
            asked = [self._prices.place(one.plan.settings.price or 0.0) for one in rows]
            logits = price_logits(outputs, torch.tensor(asked))
            prices = [self._prices.price_at(place) for place in price_places(outputs).tolist()]
        for row, signal, price in zip(rows, torch.sigmoid(logits).tolist(), prices, strict=True):
            said = Said(signal, price) if row.row.asks else row.plan.unasked
            row.said[row.taken] = said
            row.decide(said)
            if math.isnan(signal) and not self._warned:
                self._warned = True
                logger.warning(
                    "the stopping policy gave NaN: requests continue. Its weights, or the base's "
                    "hidden states, are broken"
                )

    def tell_leaving(self, row: ServedRow) -> None:
        """Tells that a row which has ended its thinking leaves a batch: for good or for a while."""
        if self._on_leave is not None and not row.thinks:
            self._on_leave(row)

    def shape(self, logits: torch.Tensor, rows: Iterable[tuple[int, ServedRow]]) -> None:
        """Shapes the logits (B, V) of rows, at their places, whose thinking has ended; in place.

        A row whose answer is complete gets the token that ends its text, for an engine ends a
        request by nothing else; one whose grammar holds in the thinking already is left alone.
        """
        ended = []
        for place, one in rows:
            one.hear()
            if not one.thinks:
                ended.append((place, one))
        forced = [(place, one) for place, one in ended if one.grammar and one.row.forced]
        if forced:  # a grammar that holds in the thinking already forbids its end
            places = torch.tensor([[place, one.row.forced[0]] for place, one in forced])
            scores = logits[places.to(logits.device).unbind(1)].tolist()
            for (_, one), score in zip(forced, scores, strict=True):
                if score == -math.inf:
                    one.row.forced.clear()
                    one.row.end()
                    one.record.reason, one.told = "length", (0, 0)
                    self._on_off(IN_THINKING)
        if ended:
            complete = {
                place: one.end_id for place, one in ended if one.complete and not one.grammar
            }
            shape_scores(logits, [(place, one.row) for place, one in ended], complete)


def promise_of(settings: StopPolicyConfig, config: OSPrunerConfig) -> dict[str, Any] | None:
    """The calibration by which settings, with the policy's defaults, stop; None for none."""
    draws = {name: vars(settings)[name] for name in ("seed", "first_sample_index")}
    for one in config.calibrations or []:
        price = settings.price if one["price"] is None else one["price"]
        promised = StopPolicyConfig(one["mode"], one["threshold"], price, **draws)
        if settings == promised:
            return one
    return None
