"""A policy in this process: two generates that take turns, one token each.

Only the one whose turn it is computes. So the seconds of a column are its own, and each draws from
a random state of its own: with the same seed the two texts are one up to the stop.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList

from modeling_ospruner.configuration_ospruner import max_positions
from modeling_ospruner.formats_ospruner import TokenFormat
from modeling_ospruner.modeling_ospruner import OSPrunerForCausalLM
from modeling_ospruner.stopping_ospruner import StopRecord

from .columns import Column, Paragraph, Question

__all__ = ["LocalSource", "answer_ids"]

_FRAME_SECONDS = 0.1
_TOP_P = 0.95


class LocalSource:
    """A policy that is loaded in this process; see `Source`.

    Args:
        model: The policy with its base.
        policy: Its name on the page.
        base: Name of the base on the page; None for the one that the policy pins.
    """

    seconds_note = "Seconds are each column's own: the two take turns, one token each."
    seeded = True

    def __init__(self, model: OSPrunerForCausalLM, policy: str, base: str | None = None) -> None:
        config = model.config
        self.model = model
        self.policy = policy
        self.base = base or str(config.base_model_name_or_path)
        self.mode = config.default_mode
        self.threshold = config.default_threshold
        self.positions = max_positions(model.base.config)
        known = config.prices  # of a policy of every price
        self.prices: tuple[float, float] | None = None if known is None else (0.0, known.high)

    def ask(self, question: Question) -> Iterator[tuple[Column, Column]]:
        """See `Source.ask`.

        Raises:
            ValueError: The question is too long for the base, or a setting is out of range.
        """
        inputs = self._prompt(question)
        baton = _Baton(self.model.device, question.seed or 0)
        sampling: dict[str, Any] = {"do_sample": False}
        if question.temperature > 0:
            sampling = {"do_sample": True, "temperature": question.temperature, "top_p": _TOP_P}
            sampling["top_k"] = 0
        settings = {"seed": question.seed or 0, **question.stop_policy}
        rows = [
            _Row(0, self.model, inputs, baton, {"stop_policy": False}),
            _Row(1, self.model, inputs, baton, {"stop_policy": settings}),
        ]
        for row in rows:
            row.start(sampling | {"max_new_tokens": question.max_tokens})
        try:
            while any(row.thread.is_alive() for row in rows):
                rows[0].thread.join(_FRAME_SECONDS)
                yield rows[0].column(), rows[1].column()
            for row in rows:
                if row.error is not None:
                    raise row.error
            yield rows[0].column(), rows[1].column()
        finally:
            baton.ended = True  # whoever computes ends with its next token
            for row in rows:
                row.thread.join()

    def _prompt(self, question: Question) -> dict[str, torch.Tensor]:
        """The prompt's ids and mask, (1, S)."""
        instruction = self.model.token_format.format.user_instruction
        content = f"{question.text}\n\n{instruction}" if instruction else question.text
        assert self.model.tokenizer is not None  # a saved policy has one
        inputs: Any = self.model.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}],
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
        width = inputs["input_ids"].shape[1]
        if self.positions is not None and width + question.max_tokens > self.positions:
            raise ValueError(
                f"The question is {width} tokens long with its prompt, and {question.max_tokens} "
                f"are kept for thinking and answer; the base takes {self.positions} in all. "
                "Shorten the question, or lower “Most tokens”."
            )
        device = self.model.device
        return {name: inputs[name].to(device) for name in ("input_ids", "attention_mask")}


class _Baton:
    """Who may compute: the two in turn, until one has ended."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.ended = False
        self._device = device
        self._turn = 0
        self._over = [False, False]
        self._changed = threading.Condition()
        state = torch.Generator(device).manual_seed(seed).get_state()
        self._states = [state, state]

    def take(self, who: int) -> None:
        """Waits for the turn, and puts one's own random state in place."""
        with self._changed:
            self._changed.wait_for(lambda: self._turn == who)
        if self._device.type == "cpu":
            torch.set_rng_state(self._states[who])
        else:
            torch.get_device_module(self._device).set_rng_state(self._states[who], self._device)

    def give(self, who: int, over: bool = False) -> None:
        """Keeps one's random state, and lets the other go on if it has not ended."""
        if self._device.type == "cpu":
            self._states[who] = torch.get_rng_state()
        else:
            module = torch.get_device_module(self._device)
            self._states[who] = module.get_rng_state(self._device)
        with self._changed:
            self._over[who] = over
            if not self._over[1 - who]:
                self._turn = 1 - who
            self._changed.notify_all()


class _Row(StoppingCriteria):
    """One of the two generates, in a thread; as a stopping criterion it sees each token."""

    def __init__(
        self,
        who: int,
        model: OSPrunerForCausalLM,
        inputs: dict[str, Any],
        baton: _Baton,
        arguments: dict[str, Any],
    ) -> None:
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self._who = who
        self._model = model
        self._inputs = inputs
        self._baton = baton
        self._arguments = arguments
        self._width = inputs["input_ids"].shape[1]
        self._ids: list[int] = []
        self._record: StopRecord | None = None  # the live one
        self._seconds = 0.0
        self._began = 0.0

    def start(self, arguments: dict[str, Any]) -> None:
        """Begins to generate."""
        self._arguments |= arguments
        if self._who == 1:
            self._arguments["on_step"] = self._on_step
        self.thread.start()

    def _on_step(self, row: int, record: StopRecord) -> None:
        self._record = record

    def _run(self) -> None:
        self._take()
        try:
            self._model.generate(
                **self._inputs, stopping_criteria=StoppingCriteriaList([self]), **self._arguments
            )
            if self._who == 1:
                self._record = self._model.last_stop[0]
        except Exception as error:  # noqa: BLE001  (raised again in the page's thread)
            self.error = error
        finally:
            self._give(over=True)

    def _take(self) -> None:
        self._baton.take(self._who)
        self._began = time.perf_counter()

    def _give(self, over: bool = False) -> None:
        self._seconds += time.perf_counter() - self._began
        self._baton.give(self._who, over)

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        """After each token: lets the other one compute its own."""
        self._ids.append(int(input_ids[0, -1]))  # waits for the device, so that seconds are true
        self._give()
        self._take()
        return torch.full((1,), self._baton.ended, device=input_ids.device)

    def column(self) -> Column:
        """What it has written so far."""
        ids, record, done = list(self._ids), self._record, not self.thread.is_alive()
        token_format, tokenizer = self._model.token_format, self._model.tokenizer
        assert tokenizer is not None  # a saved policy has one
        prompt = self._inputs["input_ids"][0].tolist()
        span = token_format.thinking_span([*prompt, *ids], self._width)
        tokens = span.end - span.start
        reason = "natural" if span.closed else "length" if done else None
        if record is not None and record.reason != "length":
            reason = record.reason
        probabilities = [] if record is None else list(record.probabilities)
        paragraphs, begin = [], 0
        for index, end in enumerate(token_format.step_ends(ids[:tokens])):
            known = index < len(probabilities) and end == _at(record, index)
            probability = probabilities[index] if known else None
            text = str(tokenizer.decode(ids[begin:end], skip_special_tokens=False))
            paragraphs.append(Paragraph(text, end, probability))
            begin = end
        answer = answer_text(ids, tokens, token_format, tokenizer)
        return Column(paragraphs, str(answer).strip(), tokens, self._seconds, reason, done)


def _at(record: StopRecord | None, index: int) -> int | None:
    return None if record is None or index >= len(record.step_ends) else record.step_ends[index]


def answer_text(
    ids: Sequence[int], thinking: int, token_format: TokenFormat, tokenizer: PreTrainedTokenizerBase
) -> str:
    """The text after the thinking, without the closing; see `answer_ids`."""
    marker = token_format.end_marker
    if marker is None:
        ids = answer_ids(ids, thinking, token_format)
        return str(tokenizer.decode(ids, skip_special_tokens=True))
    text = str(tokenizer.decode(list(ids[thinking:]), skip_special_tokens=True))
    return text.partition(marker.literal)[2]


def answer_ids(ids: Sequence[int], thinking: int, token_format: TokenFormat) -> list[int]:
    """The ids after the thinking and as much of the closing as stands there.

    Args:
        ids: What the model wrote.
        thinking: How many of them are thinking.
        token_format: The base's way of thinking.
    """
    rest = list(ids[thinking:])
    written = 0
    for one, wanted in zip(rest, token_format.closing_ids, strict=False):
        if one != wanted:
            break
        written += 1
    return rest[written:]
