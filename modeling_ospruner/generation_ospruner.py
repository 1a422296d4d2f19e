"""`generate` with a stop policy: any base's, hooked in one place.

The hook itself is in `hook_ospruner.py`, what it refuses in `refusals_ospruner.py`.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from transformers import (
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)

from .capture_ospruner import Capture
from .hook_ospruner import AnswerEnd, StopHook
from .policy_ospruner import StoppingPolicy
from .reasoning_format import TokenFormat, guess
from .refusals_ospruner import refuse_base, refuse_closing, refuse_unsupported
from .settings_ospruner import StopPolicyConfig, StopRecord
from .stop_rules import StopRule
from .trial_answers import TrialAnswers


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
        settings: with a rule, or with mode and threshold filled in.
        inputs: prompt ids (B, S), left-padded; or pass `input_ids`.
        tokenizer: the base's, for rules that read texts, and for `stop_strings`.
        kwargs: generate's own arguments.

    Returns:
        What generate returns (an output object holds the records as `stop`, too), and one
        record a row.

    Raises:
        TypeError: the prompt is not a tensor.
        ValueError: the decoding, the base or the rule cannot be combined, or a prompt is empty.
    """
    given = copy.deepcopy(kwargs.pop("generation_config", None))
    config = GenerationMixin._prepare_generation_config(base, given, **kwargs)[0]
    refuse_base(base)
    refuse_unsupported(inputs, config, kwargs)
    eos = config.eos_token_id
    eos_ids = frozenset([eos] if isinstance(eos, int) else torch.as_tensor(eos).tolist())
    refuse_closing(token_format, eos_ids)
    rule = settings.chosen_rule()
    _refuse_asks(rule, policy, tokenizer)
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
        capture = trials = None
        if "stop_probability" in rule.asks and policy is not None:
            capture = stack.enter_context(Capture(base, policy))
        if "trial_answer" in rule.asks:
            masked = token_format.reentry_ids if settings.mask_reentry else ()
            ends = eos_ids.union(token_format.answer_end_ids)
            trials = TrialAnswers(base, token_format, ends, masked, decode)
            stack.enter_context(trials)
        hook = StopHook(settings, rule, token_format, eos_ids, capture, trials, decode)
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
    if {"stop_probability", "trial_answer"} <= rule.asks:
        raise ValueError(
            f"the rule {name} asks for stop probabilities and for trial answers, which cannot be "
            "had in one generate; use two rules, one after the other"
        )


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
