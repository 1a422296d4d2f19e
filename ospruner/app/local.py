"""A policy in this process: its columns grow token by token, one after the other."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from modeling_ospruner import OSPrunerForCausalLM
from modeling_ospruner.stopping_ospruner import StopRecord

from .columns import AppColumn, Columns, Paragraph, Question

__all__ = ["LocalSource"]

FRAME_SECONDS = 0.1


class LocalSource:
    """A policy with its base, loaded in this process, under its name on the page; see `Source`."""

    def __init__(self, model: OSPrunerForCausalLM, policy: str) -> None:
        self.model = model
        self.policy = policy
        self._running: _Written | None = None
        config = model.base.config.get_text_config()
        self.positions: int | None = getattr(config, "max_position_embeddings", None)
        known = model.config.prices  # of a policy of every price
        self.prices: tuple[float, float] | None = None if known is None else (0.0, known.high)

    def ask(self, question: Question, pruned: bool) -> Columns:
        """See `Source.ask`.

        Raises:
            ValueError: The question is too long for the base, or a setting is out of range.
        """
        arguments: dict[str, Any] = self._prompt(question)
        written = _Written(self.model, arguments["input_ids"].shape[1])
        arguments |= {"do_sample": False, "stop_policy": False}
        arguments |= {"max_new_tokens": question.max_tokens}
        arguments |= {"stopping_criteria": StoppingCriteriaList([written])}
        if question.temperature > 0:
            arguments |= {"do_sample": True, "temperature": question.temperature}
            arguments |= {"top_p": 0.95, "top_k": 0}
        self._running = written
        if pruned:
            arguments["stop_policy"] = {"seed": question.seed, **question.stop_policy}
            arguments["on_step"] = written.on_step
        thread = threading.Thread(
            target=written.run, args=(arguments, question.seed, pruned), daemon=True
        )
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
        """See `Source.answer_now`; it ends with the paragraph that is being written."""
        if self._running is not None:
            self._running.answers = True

    def _prompt(self, question: Question) -> dict[str, torch.Tensor]:
        """The prompt's ids and mask, (1, S)."""
        instruction = self.model.token_format.format.user_instruction
        content = f"{question.text}\n\n{instruction}".rstrip()
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
