"""`generate` with a stop policy: any base's, hooked in one place.

In this order: what is refused before anything runs, because stopping inside generate would do it
wrong in silence; the capture of what enters the policy while the base runs; the hook; generate.

The hook is a logits processor with a stopping criterion. It looks at each token as soon as it is
chosen; the decision after a step's last token and the first forced token fall into the same decode
step. Until its stop, every row is what plain generate would have written.
"""

from __future__ import annotations

import copy
import math
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import nn
from transformers import (
    Cache,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from .configuration_ospruner import (
    check_length,
    decoder_layers,
    hidden_entering,
    max_positions,
    price_places,
)
from .formats_ospruner import TokenFormat, guess
from .policy_ospruner import LayerKeys, Reader, StoppingPolicy
from .rules_ospruner import StopRule, TrialAnswer, TrialAnswers, top_entropy
from .stopping_ospruner import (
    HINT,
    Phase,
    RowPlan,
    StopPolicyConfig,
    StopRecord,
    StopRow,
    refuse_unsupported,
    shape_scores,
)

OnStep = Callable[[int, StopRecord], None]


def refuse_prompts(base: Any, input_ids: torch.Tensor, mask: torch.Tensor | None) -> None:
    """Refuses prompts that the base cannot read.

    Args:
        base: the model whose generate is called.
        input_ids: (B, S).
        mask: (B, S), 1 for tokens; None where all are.

    Raises:
        ValueError: an id is not in the vocabulary, or a prompt has more tokens than positions.
    """
    size = base.config.get_text_config().vocab_size
    if (outside := input_ids[(input_ids < 0) | (input_ids >= size)].unique()).numel():
        raise ValueError(
            f"input_ids holds {outside[:5].tolist()}; the base's vocabulary has the ids 0 to "
            f"{size - 1}: use its own tokenizer, and for padding its pad_token_id"
        )
    lengths = torch.full((len(input_ids),), input_ids.shape[1]) if mask is None else mask.sum(-1)
    limit = max_positions(base.config)
    if limit is not None and int(lengths.max()) > limit:
        row = int(lengths.argmax())
        raise ValueError(
            f"the prompt of row {row} has {int(lengths[row])} tokens; the base has {limit} "
            "positions (max_position_embeddings): shorten the prompt, or take a base with a longer "
            "context"
        )


def refuse_base(base: Any) -> None:
    """Refuses bases in which hooks do not do their work.

    Args:
        base: the model whose generate is called.

    Raises:
        ValueError: it is compiled, or an encoder-decoder.
    """
    if "_orig_mod" in dict(base.named_children()):
        raise ValueError(
            "the base is what torch.compile(base) returned, whose generate runs the model behind "
            f"it uncompiled anyway: pass that model itself (base._orig_mod), {HINT}"
        )
    for name, module in base.named_modules():
        if module._compiled_call_impl is not None or _has_compiled_forward(module):
            where = f"its module {name!r} is" if name else "it is"
            raise ValueError(
                "the base is compiled by torch.compile, which skips hooks placed later in silence "
                f"({where}): stop_policy needs it as it was loaded, {HINT}"
            )
    if base.config.is_encoder_decoder:
        raise ValueError(
            f"{type(base).__name__} is an encoder-decoder; stop_policy works with decoder-only "
            "language models"
        )


def _has_compiled_forward(module: nn.Module) -> bool:
    """Whether its forward was replaced by `torch.compile(module.forward)`."""
    replaced: Callable[..., Any] | None = vars(module).get("forward")
    return replaced is not None and "_torchdynamo_orig_callable" in vars(replaced)


def refuse_closing(token_format: TokenFormat, eos_ids: frozenset[int]) -> None:
    """Refuses a closing that generate would take for the end of the text.

    Args:
        token_format: the base's way of thinking.
        eos_ids: ids that end a text.

    Raises:
        ValueError: naming the tokens that are both.
    """
    if both := sorted(set(token_format.forced_suffix("forced")) & eos_ids):
        raise ValueError(
            f"the tokens {both} close the thinking (format {token_format.format.name!r}) and are "
            "eos_token_id, too, so that a row would end before its answer: take them out of "
            "base.generation_config.eos_token_id"
        )


_MOST_WAITING = 1024  # columns; a row that lags more is taken in unasked, to free their memory


class _CapturedRow:
    """What the policy has seen of one row.

    Attributes:
        start: the column of the row's first token; padding stands before it.
        seen: the columns, padding included, that are in `cache`.
        cache: the policy's.
        outputs: (1 or 6,) of the head after the last column seen.
    """

    def __init__(self, start: int, cache: Cache | None) -> None:
        self.start = start
        self.seen = start
        self.cache = cache
        self.outputs = torch.empty(0)


class Capture:
    """A context in which the base's forwards feed the policy, lazily.

    Hidden states are kept until a row's probability is asked for. Then the tail runs on all that
    is new in that row at once, extending the row's own cache, so that a row costs what it costs
    alone, whatever stands beside it. In the tail's last layer all tokens leave keys and values,
    but only the last one goes on through the MLP: no other is looked at, then or later. Only
    forwards of the thread that opened the context count.

    Args:
        base: the causal LM.
        policy: its policy.
        price: the price of a token, for a policy of every price.
    """

    def __init__(
        self, base: PreTrainedModel, policy: StoppingPolicy, price: float | None = None
    ) -> None:
        self.policy = policy
        self._price = price
        self._base = base
        self._decoder = base.get_decoder()
        self._thread = threading.get_ident()
        self._handles: list[Any] = []
        # Hidden states (B, S, H) by their first column, in order; for n = 0 the last column only.
        self._chunks: list[tuple[int, torch.Tensor]] = []
        self._columns = 0  # of the batch so far, padding included
        self._last_positions = torch.empty(0, 1)  # (B, 1)
        self._rows: dict[int, _CapturedRow] = {}
        self._wanted: Collection[int] | None = None
        self._running = False
        self._listening = True
        self._numbers: dict[int, Sequence[float]] = {}  # of rows' trial answers

    def __enter__(self) -> Capture:
        decoder = self._decoder
        self._handles.append(
            decoder.register_forward_pre_hook(self._keep_positions, with_kwargs=True)
        )
        if self.policy.tail is None:
            self._handles.append(decoder.register_forward_hook(self._keep_last))
        else:
            layer = decoder_layers(self._base)[-len(self.policy.layers)]
            self._handles.append(layer.register_forward_pre_hook(self._keep, with_kwargs=True))
            mlp = dict(self.policy.layers[-1].named_children()).get("mlp")
            if mlp is not None:
                self._handles.append(
                    mlp.register_forward_pre_hook(self._last_only, with_kwargs=True)
                )
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stops capturing and forgets everything."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._chunks.clear()
        self._rows.clear()

    def expect(self, rows: list[int], column: int) -> None:
        """Says which rows may be asked for after the next forward: here any may be."""

    def only(self, rows: Collection[int]) -> None:
        """Says which rows may still be asked for: what no other needs is forgotten."""
        self._wanted = rows
        for row in self._rows.keys() - set(rows):
            del self._rows[row]

    @contextmanager
    def unheard(self) -> Iterator[None]:
        """In this block the base's forwards are no part of the rows."""
        self._listening = False
        try:
            yield
        finally:
            self._listening = True

    @torch.no_grad()
    def probability(self, row: int, numbers: Sequence[float] = ()) -> float:
        """The stop probability after a row's last token.

        Args:
            row: its index.
            numbers: the `TRIAL_NUMBERS` there, of a policy that tries answers.
        """
        self._numbers[row] = numbers
        said = _with_numbers(self.policy, self._asked(row), numbers)
        return float(torch.sigmoid(self.policy.logits(said, self._price)))

    @torch.no_grad()
    def price(self, row: int) -> float:
        """The price of indifference where the probability was asked for, of every price."""
        prices = self.policy.prices
        if prices is None:
            return math.nan
        said = _with_numbers(self.policy, self._asked(row), self._numbers.get(row, ()))
        return prices.price_at(float(price_places(said)))

    def _asked(self, row: int) -> torch.Tensor:
        """What the head says (1 or 6,) after a row's last token, which is taken in."""
        if self.policy.tail is None:
            return self.policy.outputs(self._chunks[-1][1][row : row + 1])[0, -1]
        if not self._rows:
            starts = (self._columns - 1 - self._last_positions[:, 0]).tolist()
            wanted = range(len(starts)) if self._wanted is None else self._wanted
            self._rows = {i: _CapturedRow(starts[i], self.policy.new_cache()) for i in wanted}
        for i, state in self._rows.items():
            waiting = self._columns - state.seen
            if waiting > (0 if i == row else _MOST_WAITING):
                self._take_in(i, state)
        needed = min(state.seen for state in self._rows.values())
        while self._chunks and self._chunks[0][0] + self._chunks[0][1].shape[1] <= needed:
            del self._chunks[0]
        return self._rows[row].outputs

    def _take_in(self, row: int, state: _CapturedRow) -> None:
        """Runs the tail on the columns of a row that it has not seen."""
        parts = [
            chunk[row, max(0, state.seen - first) :]
            for first, chunk in self._chunks
            if first + chunk.shape[1] > state.seen
        ]
        hidden = torch.cat(parts)[None]  # (1, S, H)
        begin, end = state.seen - state.start, self._columns - state.start
        positions = torch.arange(begin, end, device=hidden.device)[None]
        self._running = True
        try:
            outputs = self.policy.outputs(hidden, positions, None, state.cache)
        finally:
            self._running = False
        state.seen = self._columns
        state.outputs = outputs[0, -1]

    def _hears(self) -> bool:
        return self._listening and threading.get_ident() == self._thread

    def _keep_positions(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not self._hears():
            return
        ids = kwargs["input_ids"] if kwargs.get("input_ids") is not None else args[0]
        B, S = ids.shape
        self._columns += S
        positions = kwargs.get("position_ids")
        if positions is None:
            self._last_positions = torch.full((B, 1), self._columns - 1, device=ids.device)
        else:
            self._last_positions = positions[:, -1:].expand(B, 1)

    def _keep(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._hears():
            hidden = hidden_entering(args, kwargs).detach()
            self._chunks.append((self._columns - hidden.shape[1], hidden))

    def _keep_last(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._hears():
            hidden = output.last_hidden_state[:, -1:].detach()
            self._chunks[:] = [(self._columns - 1, hidden)]

    def _last_only(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Leaves an MLP (1, 1, H) of (1, S, H); its output is then added to every position."""
        if not self._running or threading.get_ident() != self._thread:
            return None
        last = hidden_entering(args, kwargs)[:, -1:]
        if "hidden_states" in kwargs:
            return args, {**kwargs, "hidden_states": last}
        return (last, *args[1:]), kwargs


class QueryCapture:
    """A context in which the base's forwards feed a policy that is queries only.

    Only the forward of a step's last token leaves something, until the next token is chosen; all
    rows that are at a step's end are then asked at once.

    Args:
        base: the causal LM.
        policy: its policy.
        price: the price of a token, for a policy of every price.
    """

    def __init__(
        self, base: PreTrainedModel, policy: StoppingPolicy, price: float | None = None
    ) -> None:
        self.policy = policy
        self._price = price
        # Its hooks stay, silent: to take them off and on would break other threads' forwards.
        self._reader = Reader(base, len(policy.layers), queries=True)
        self._reader.listening = False
        self._rows: list[int] = []
        self._column = 0  # of the token that the next forward reads
        self._outputs = torch.empty(0)  # (R, 1 or 6) of the expected rows; empty before
        self._said: dict[int, tuple[float, float]] = {}  # by row: stop probability, price

    def __enter__(self) -> QueryCapture:
        self._reader.__enter__()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stops capturing and forgets everything."""
        self._reader.close()

    def only(self, rows: Collection[int]) -> None:
        """Says which rows may still be asked for."""

    def expect(self, rows: list[int], column: int) -> None:
        """Says which rows may be asked for after the next forward, and what column it reads."""
        if rows or self._rows:
            self._outputs = torch.empty(0)
            self._said.clear()
            self._reader.forget()
            self._reader.listening = bool(rows)
        self._rows, self._column = rows, column

    @contextmanager
    def unheard(self) -> Iterator[None]:
        """In this block the base's forwards are no part of the rows."""
        listening, self._reader.listening = self._reader.listening, False
        try:
            yield
        finally:
            self._reader.listening = listening

    @torch.no_grad()
    def probability(self, row: int, numbers: Sequence[float] = ()) -> float:
        """The stop probability after a row's last token.

        Args:
            row: its index.
            numbers: the `TRIAL_NUMBERS` there, of a policy that tries answers.
        """
        if not len(self._outputs):
            self._outputs = self._ask()[:, 0]  # (R, 1 or 6)
        if numbers:
            place = self._rows.index(row)
            self._say([row], _with_numbers(self.policy, self._outputs[place], numbers)[None])
        elif not self._said:
            self._say(self._rows, _with_numbers(self.policy, self._outputs, numbers))
        return self._said[row][0]

    def price(self, row: int) -> float:
        """The price of indifference where the probability was asked for, of every price."""
        return self._said[row][1]

    def _say(self, rows: Sequence[int], outputs: torch.Tensor) -> None:
        """Keeps what the outputs (R, 1 or 6) mean for rows."""
        logits = self.policy.logits(outputs, self._price)
        prices, priced = self.policy.prices, [math.nan] * len(logits)
        if prices is not None:
            priced = [prices.price_at(place) for place in price_places(outputs).tolist()]
        said = zip(torch.sigmoid(logits).tolist(), priced, strict=True)
        self._said.update(zip(rows, said, strict=True))

    def _ask(self) -> torch.Tensor:
        """What the head says of the expected rows, (R, 1, 1 or 6)."""
        reader, rows, column = self._reader, self._rows, self._column
        B = len(reader.hidden)
        if len(rows) == B:
            chosen: Any = slice(None)
        else:  # of a single row nothing is copied
            chosen = slice(rows[0], rows[0] + 1) if len(rows) == 1 else rows
        keys = [LayerKeys(one.keys[chosen], one.values[chosen], one.first) for one in reader.keys]
        columns = torch.full((len(rows), 1), column, device=reader.hidden.device)
        padding = column - reader.last_positions.to(columns.device).expand(B, 1)[chosen]  # (R, 1)
        tokens = None
        if bool(padding.any()):
            tokens = torch.arange(column + 1, device=columns.device) >= padding
        hidden = reader.hidden[chosen, -1:]
        return self.policy.outputs(hidden, columns - padding, tokens, None, keys, columns)


def _with_numbers(
    policy: StoppingPolicy, outputs: torch.Tensor, numbers: Sequence[float]
) -> torch.Tensor:
    """What the head says, with what `TRIAL_NUMBERS` add; () where there are none."""
    given = torch.tensor(numbers, dtype=torch.float32) if numbers else None
    return policy.with_history(outputs, given)


class StopHook(LogitsProcessor):
    """Decides at step ends and forces what follows; see the module.

    Args:
        settings: how to stop.
        rule: what decides.
        token_format: the base's way of thinking.
        eos_ids: ids that end a text.
        capture: gives the learned policy's probabilities; for a rule that asks for them.
        trials: gives trial answers; for a rule that asks for them.
        decode: from token ids to text; for a rule that asks for texts.
        on_step: told of each decision, see `generate_pruned`.
    """

    def __init__(
        self,
        settings: StopPolicyConfig,
        rule: StopRule,
        token_format: TokenFormat,
        eos_ids: frozenset[int],
        capture: Capture | QueryCapture | None = None,
        trials: TrialAnswers | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
        on_step: OnStep | None = None,
    ) -> None:
        self.plan = RowPlan(settings, rule, token_format, eos_ids)
        self.rows: list[StopRow] = []
        self._capture = capture
        self._trials = trials
        self._decode = decode
        self._on_step = on_step
        self._warned = False
        self._released = False
        self._entropies: list[float] = []  # sums over the thinking so far, one a row

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """One decode step: decides where steps have ended, and shapes the scores (B, V)."""
        if not self.rows:
            self._start(input_ids)
        for i, row in enumerate(self.rows):
            if row.at_boundary:
                self._decide(i, row, input_ids[i], scores)
        self._measure(scores)
        self._release()
        closing = [
            (i, row)
            for i, row in enumerate(self.rows)
            if row.phase in (Phase.FORCING, Phase.ANSWER)
        ]
        if closing:
            scores = scores.clone()  # the caller may keep the model's own
            shape_scores(scores, closing)
        return scores

    def _start(self, input_ids: torch.Tensor) -> None:
        first = self.plan.settings.first_sample_index
        for i, ids in enumerate(input_ids.tolist()):
            self.rows.append(StopRow(self.plan, ids, first + i))
        self._entropies = [0.0] * len(self.rows)
        if self._trials is not None:
            self._trials.check()

    def _measure(self, scores: torch.Tensor) -> None:
        """Adds the entropies at which thinking rows draw their next tokens, where asked for."""
        if "thinking_entropy" not in self.plan.rule.asks or self._released:
            return
        thinking = [i for i, row in enumerate(self.rows) if row.phase is Phase.THINKING]
        for i, entropy in zip(thinking, top_entropy(scores[thinking]).tolist(), strict=True):
            self._entropies[i] += entropy

    def _decide(self, i: int, row: StopRow, ids: torch.Tensor, scores: torch.Tensor) -> None:
        capture = self._capture

        def trial_answer(max_tokens: int) -> TrialAnswer:
            assert self._trials is not None  # the rule asks for trial answers
            with nullcontext() if capture is None else capture.unheard():
                answer, tokens = self._trials.answer(i, max_tokens)
            row.record.probe_tokens += tokens
            return answer

        priced = None if capture is None or capture.policy.prices is None else capture.price
        row.decide(
            stop_probability=partial(self._probability, i),
            trial_answer=trial_answer,
            next_text=lambda: self._text([int(scores[i].argmax())]),
            indifference=None if priced is None else partial(priced, i),
            step_text=lambda: self._text(ids[-_step_tokens(row.record) :].tolist()),
            thinking_entropy=lambda: self._entropies[i] / row.record.step_ends[-1],
        )
        if row.record.nan_steps:
            self._warn_of_nan()
        if self._on_step is not None:
            self._on_step(i, row.record)

    def _probability(self, i: int, numbers: Sequence[float] = ()) -> float:
        """The learned policy's for one row."""
        assert self._capture is not None  # the rule asks for stop probabilities
        return self._capture.probability(i, numbers)

    def _text(self, ids: Sequence[int]) -> str:
        assert self._decode is not None  # the rule asks for texts
        return self._decode(ids)

    def _warn_of_nan(self) -> None:
        if not self._warned:
            warnings.warn(
                "the stopping policy gave NaN: rows continue. Its weights, or the base's "
                "hidden states, are broken; StopRecord.nan_steps counts the steps",
                stacklevel=2,
            )
        self._warned = True

    def finish(self, input_ids: torch.Tensor, ended: torch.Tensor | None = None) -> list[int]:
        """After a token was chosen in each row: takes it in.

        Args:
            input_ids: (B, S).
            ended: rows (B,) that something else ends with this token.

        Returns:
            The rows that have completed their answer.
        """
        others = [False] * len(self.rows) if ended is None else ended.tolist()
        done = []
        for i, token in enumerate(input_ids[:, -1].tolist()):
            if self.rows[i].push(token):
                done.append(i)
            if others[i]:
                self.rows[i].end()
        if self._capture is not None and not self._released:
            at_end = [i for i, row in enumerate(self.rows) if row.at_boundary]
            self._capture.expect(at_end, input_ids.shape[1] - 1)
        return done

    def records(self) -> list[StopRecord]:
        """One record a row, after generate has ended."""
        return [row.record for row in self.rows]

    def _release(self) -> None:
        if self._released:
            return
        thinking = [i for i, row in enumerate(self.rows) if row.phase is Phase.THINKING]
        if self._capture is not None:
            self._capture.only(thinking)
        if not thinking:
            self._released = True
            for source in (self._capture, self._trials):
                if source is not None:
                    source.close()


def _step_tokens(record: StopRecord) -> int:
    """How many tokens the last step has."""
    before, end = [0, *record.step_ends][-2:]
    return end - before


class AnswerEnd(StoppingCriteria):
    """Ends a row as soon as its answer is complete, or where one of `others` ends it.

    The others are the caller's own criteria: a row that they end is not looked at any more.
    """

    def __init__(self, hook: StopHook, others: StoppingCriteriaList) -> None:
        self.hook = hook
        self.others = others
        self._none: torch.Tensor | None = None

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        """Which rows (B,) end with their last token."""
        ended = self.others(input_ids, scores, **kwargs) if len(self.others) else None
        done = self.hook.finish(input_ids, ended)
        if self._none is None:
            self._none = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        if not done:
            return self._none if ended is None else ended
        result = self._none.clone() if ended is None else ended.clone()
        result[done] = True
        return result


class LastStop(threading.local):
    """The records of the last generate: of this thread's, if it had any, else of any thread's.

    So concurrent calls each read their own, and a thread that only waits for another's generate
    (as with a streamer) reads that one's.
    """

    _own: list[StopRecord] | None = None

    def __init__(self, shared: list[list[StopRecord]]) -> None:
        self._shared = shared  # one list for all threads; its one element is replaced as a whole

    def get(self) -> list[StopRecord]:
        """One record a row; empty before the first call."""
        return self._shared[0] if self._own is None else self._own

    def set(self, records: list[StopRecord]) -> None:
        """Keeps the records of a call that has ended."""
        self._own = self._shared[0] = records

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies of a model start without records."""
        return type(self), ([[]],)


def generate_pruned(
    base: Any,
    policy: StoppingPolicy | None,
    token_format: TokenFormat,
    settings: StopPolicyConfig,
    inputs: torch.Tensor | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    on_step: OnStep | None = None,
    **kwargs: Any,
) -> tuple[Any, list[StopRecord]]:
    """`base.generate` with the hook in it.

    It may run in several threads at once, on one base: each call sees its own forwards only.
    Greedy calls give what they give alone; those that sample share torch's global generator, so
    that their texts depend on how the threads take turns.

    Args:
        base: the causal LM that generates (a `PreTrainedModel` with `generate`).
        policy: its policy; None with a rule that does without.
        token_format: the base's way of thinking.
        settings: with a rule, or with mode, threshold and price filled in.
        inputs: prompt ids (B, S), left-padded; or pass `input_ids`.
        tokenizer: the base's, for rules that read texts, and for `stop_strings`.
        on_step: called with a row and its record after each decision, in generate's thread. The
            record is the live one: copy what shall not change.
        kwargs: generate's own arguments.

    Returns:
        What generate returns (an output object holds the records as `stop`, too), and one
        record a row.

    Raises:
        TypeError: the prompt is not a tensor of integers.
        ValueError: the decoding, the base or the rule cannot be combined, or a prompt is empty,
            longer than the base's positions, or holds ids that are not in its vocabulary.
    """
    given = copy.deepcopy(kwargs.pop("generation_config", None))
    config = GenerationMixin._prepare_generation_config(base, given, **kwargs)[0]
    refuse_base(base)
    refuse_unsupported(inputs, config, kwargs)
    prompts = kwargs["input_ids"] if inputs is None else inputs
    refuse_prompts(base, prompts, kwargs.get("attention_mask"))
    eos = config.eos_token_id
    eos_ids = frozenset([eos] if isinstance(eos, int) else torch.as_tensor(eos).tolist())
    refuse_closing(token_format, eos_ids)
    own_format = token_format
    if settings.wind_down is not None:
        if tokenizer is None:
            raise ValueError("wind_down needs the base's tokenizer: pass tokenizer=")
        token_format = token_format.winding_down(settings.wind_down, tokenizer)
    if policy is None:
        rule = settings.chosen_rule()
    else:
        rule = settings.chosen_rule(policy.step_stride, policy.trial_every, policy.trial_max_tokens)
    _refuse_asks(rule, policy, tokenizer)
    if "stop_probability" in rule.asks:
        prompt_tokens = (kwargs["input_ids"] if inputs is None else inputs).shape[1]
        new_tokens = config.max_new_tokens
        longest = config.max_length or 0 if new_tokens is None else prompt_tokens + new_tokens
        check_length(base.config, max(prompt_tokens, longest), "prompt and answer")
    processors = LogitsProcessorList(kwargs.pop("logits_processor", None) or [])
    others = StoppingCriteriaList(kwargs.pop("stopping_criteria", None) or [])
    if config.stop_strings is not None:
        if tokenizer is None:
            raise ValueError("stop_strings needs the base's tokenizer: pass tokenizer=")
        others.append(StopStringCriteria(tokenizer, config.stop_strings))
        kwargs["stop_strings"] = None  # our own criterion takes its place
    if given is None:
        kwargs["disable_compile"] = True  # a hook added after compilation is skipped in silence
    else:
        given.disable_compile = True
    with ExitStack() as stack:
        decode = None if tokenizer is None else _decoder(tokenizer)
        capture: Capture | QueryCapture | None = None
        trials = None
        if "stop_probability" in rule.asks and policy is not None:
            price = settings.price
            if policy.queries:
                capture = stack.enter_context(QueryCapture(base, policy, price))
            else:
                capture = stack.enter_context(Capture(base, policy, price))
        if "trial_answer" in rule.asks:
            # A policy's history is of answers as its labels forced them, whatever is asked for.
            learned = "stop_probability" in rule.asks
            masks = settings.mask_reentry or learned
            tried = own_format if learned else token_format
            masked = tried.reentry_ids if masks else ()
            ends = eos_ids.union(tried.answer_end_ids)
            trials = TrialAnswers(base, tried, ends, masked, decode, masks)
            stack.enter_context(trials)
        hook = StopHook(settings, rule, token_format, eos_ids, capture, trials, decode, on_step)
        # The class's own generate: an instance's may be a policy's `custom_generate`.
        output = type(base).generate(
            base,
            inputs,
            generation_config=given,
            logits_processor=LogitsProcessorList([*processors, hook]),
            stopping_criteria=StoppingCriteriaList([AnswerEnd(hook, others)]),
            **kwargs,
        )
    records = hook.records()
    if not isinstance(output, torch.Tensor):
        output["stop"] = records
    return output, records


def _decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[int]], str]:
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True))


def _refuse_asks(
    rule: StopRule, policy: StoppingPolicy | None, tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """Refuses a rule that asks for what is not there."""
    name = type(rule).__name__
    if "stop_probability" in rule.asks and policy is None:
        raise ValueError(
            f"the rule {name} asks for stop probabilities, but there is no policy: load a model "
            "with one, or use a rule such as AnswerEntropy()"
        )
    if "text" in rule.asks and tokenizer is None:
        raise ValueError(f"the rule {name} reads texts: pass tokenizer=")


def generate_with_rule(
    base: Any,
    tokenizer: PreTrainedTokenizerBase,
    stop_policy: StopRule | StopPolicyConfig | dict[str, Any],
    inputs: torch.Tensor | None = None,
    token_format: TokenFormat | None = None,
    **kwargs: Any,
) -> tuple[Any, list[StopRecord]]:
    """`base.generate` with a training-free stop rule, on any reasoning model, without a policy.

    Args:
        base: the causal LM.
        tokenizer: its tokenizer.
        stop_policy: a rule such as `AnswerEntropy()`, or settings that hold one as `rule`.
        inputs: prompt ids (B, S), left-padded; or pass `input_ids`.
        token_format: the base's way of thinking; None guesses it from the tokenizer, anew in each
            call: compile it once (`TokenFormat.compile`) for many.
        kwargs: generate's own arguments.

    Returns:
        What generate returns (an output object holds the records as `stop`, too), and one
        record a row.

    Raises:
        TypeError, ValueError: as `generate_pruned`, or the settings hold no rule.
    """
    settings = StopPolicyConfig.of(stop_policy)
    if settings.rule is None:
        raise ValueError(
            "stop_policy holds no rule, and without a policy something has to decide: pass a rule, "
            "such as AnswerEntropy(), or Budget(1000)"
        )
    if token_format is None:
        token_format = TokenFormat.compile(guess(tokenizer), tokenizer)
    return generate_pruned(base, None, token_format, settings, inputs, tokenizer, **kwargs)
