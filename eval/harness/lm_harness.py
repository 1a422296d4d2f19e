"""The model `ospruner` of EleutherAI's lm-evaluation-harness (lm_eval): its `hf` with a policy.

Importing this module registers it. lm_eval looks for no plug-ins, so that its command line does
not know the model; `ospruner lm-eval` is lm_eval's own command line with the model in it.

What `hf` lacks stands here: the policy's settings, answers told from thinking by ids, stop strings
that count in the answer alone, and how long the model thought, as a metric of each task.
"""

import functools
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
import torch
from lm_eval import evaluator
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.metrics import mean, mean_stderr
from lm_eval.api.model import CachingLM
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from modeling_ospruner import OSPrunerForCausalLM
from modeling_ospruner.configuration_ospruner import max_positions
from modeling_ospruner.formats_ospruner import TokenFormat
from modeling_ospruner.stopping_ospruner import StopPolicyConfig
from ospruner.engines.interface import end_ids
from ospruner.engines.opening import device_named
from ospruner.formats import follow
from ospruner.provenance import check_policy_place

LOGGED = "ospruner"
"""Under it stands, in a sample's logged arguments, why and when thinking ended; in the results'
config, the same over all replies."""


@register_model("ospruner")
class OSPrunerLM(HFLM):
    """A policy as a model of lm_eval, for tasks that generate; say `--apply_chat_template`.

    Raises:
        ValueError: an argument is unknown or wrong.
    """

    max_gen_toks = 0  # where `hf` has a property; set for each model

    def __init__(
        self,
        policy: str | None = None,  # folder or Hub id
        *,
        stop_policy: bool = True,  # False for the base as it is
        revision: str | None = None,  # of a Hub id
        dtype: str | None = None,  # of the base; None for its own
        device: str | None = None,  # of the base; None for the GPU where there is one
        # Cap on thinking and answer, of tasks that name none. A task's own cap was meant for an
        # answer; `--gen_kwargs max_gen_toks=...` replaces it.
        max_gen_toks: int = 4096,
        batch_size: int | str | None = 1,  # as lm_eval has it
        max_batch_size: int | None = None,  # likewise
        **settings: Any,  # of `StopPolicyConfig`: price, mode, threshold, max_loss...
    ) -> None:
        if not isinstance(policy, str) or not policy:
            raise ValueError(f"policy is {policy!r}; name its folder or Hub id: policy=FOLDER")
        if not isinstance(stop_policy, bool):
            raise ValueError(f"stop_policy is {stop_policy!r}; it must be True or False")
        if settings and not stop_policy:
            raise ValueError(f"stop_policy is False, so that {sorted(settings)} would do nothing")
        self.settings = StopPolicyConfig.of(settings) if stop_policy else None
        check_policy_place(policy)
        pinned: dict[str, Any] = {} if revision is None else {"revision": revision}
        model: Any = OSPrunerForCausalLM.from_pretrained(policy, dtype=dtype or "auto", **pinned)
        if self.settings is not None:  # what the policy does not promise is refused at once
            self.settings.with_defaults(model.config)
        # lm_eval's command line says cuda:0 where its user says nothing.
        unsaid = device == "cuda:0" and not torch.cuda.is_available()
        model.to(device_named(None if unsaid else device))
        super().__init__(
            model,
            backend="causal",
            think_end_token=-1,  # answers come without it; so told, `hf` strips blanks before them
            tokenizer=model.tokenizer,
            max_length=max_positions(model.base.config),
            batch_size=batch_size or 1,
            max_batch_size=max_batch_size,
        )
        self.policy, self.max_gen_toks, self._templated = policy, max_gen_toks, False
        # The marker of the thinking's end may end a turn, too: in Harmony.
        ends = end_ids(model.base.generation_config, model.tokenizer)
        self._ends = {*(ends - {*model.token_format.think_end_ids}), self.tokenizer.pad_token_id}
        self._logs: dict[tuple[int, ...], list[dict[str, Any]]] = defaultdict(list)  # by prompt
        self._replies: list[dict[str, Any]] = []
        self.thinking: dict[str, list[float]] = {}  # tokens of each request, by task

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """As `hf`.

        Raises:
            ValueError: the task begins the answer by itself.
        """
        if not add_generation_prompt:
            raise ValueError(
                "the task begins the model's answer (gen_prefix), in front of its thinking: "
                "take a task without one"
            )
        self._templated = True
        return str(super().apply_chat_template(chat_history))

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The answer to each request.

        Raises:
            ValueError: the requests are no conversations.
        """
        if not self._templated:
            raise ValueError(
                "the requests are no conversations: say --apply_chat_template (in Python: "
                "apply_chat_template=True); a policy knows chats alone"
            )
        self._logs.clear()
        self.thinking.clear()
        answers: list[str] = super().generate_until(requests, disable_tqdm)
        # Repeated ones stand here often.
        for request in {id(one): one for one in requests}.values():
            context, settings = request.args
            if logs := self._logs.get(tuple(self.tok_encode(context))):
                request.arguments = (context, {**settings, LOGGED: logs})
                tokens = mean([log["thinking_tokens"] for log in logs])
                self.thinking.setdefault(request.task_name, []).append(tokens)
        return answers

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **arguments: Any
    ) -> torch.Tensor:
        """Prompts (B, S), each followed by its answer alone; stop strings cut that afterwards."""
        arguments.pop(LOGGED, None)
        if (several := arguments.get("num_return_sequences", 1)) != 1:
            raise ValueError(
                f"num_return_sequences is {several}; a request has one reply in lm_eval: leave it "
                "out of gen_kwargs, and repeat the task (`repeats`) where several are wanted"
            )
        mask, settings = arguments["attention_mask"], self.settings
        if settings is not None:  # rows are numbered, so that their draws differ
            first = settings.first_sample_index + len(self._replies)
            settings = replace(settings, first_sample_index=first)
        # Not `stop`: it stands in any thinking.
        written = super()._model_generate(
            context, max_length, [], stop_policy=settings or False, **arguments
        )
        answers = torch.full_like(written, self.tokenizer.pad_token_id)
        answers[:, : context.shape[1]] = context
        for row, ids in enumerate(written[:, context.shape[1] :].tolist()):
            prompt = context[row][mask[row].bool()].tolist()
            answer = torch.tensor(self._logged(row, prompt, ids))
            answers[row, context.shape[1] :][: len(answer)] = answer
        return answers

    def _logged(self, row: int, prompt: list[int], ids: list[int]) -> list[int]:
        """The answer in a row's reply; how the thinking before it ended is logged."""
        model: Any = self.model
        length = next((n for n, token in enumerate(ids) if token in self._ends), len(ids))
        thinking, answer = answer_of(model.token_format, prompt, ids[:length])
        closed = length < len(ids) or follow(model.token_format, prompt, ids).ended
        log: dict[str, Any] = {"thinking_tokens": len(thinking), "tokens": length}
        log["reason"] = "natural" if closed else "length"
        if self.settings is not None:  # a sentence forced before the closing is not counted
            record = model.last_stop[row]
            log |= {"thinking_tokens": record.thinking_tokens, "reason": str(record.reason)}
        self._replies.append(log)
        text = self.tokenizer.decode(thinking, skip_special_tokens=True)
        self._logs[tuple(prompt)].append({**log, "thinking": text.strip()})
        return answer

    def get_model_info(self) -> dict[str, Any]:
        """Which policy, and what its replies came to: means of tokens, and reasons."""
        if not self._replies:
            return {"policy": self.policy}
        frame = pd.DataFrame(self._replies)
        means = frame[["thinking_tokens", "tokens"]].mean().round(1).to_dict()
        reasons = frame["reason"].value_counts().to_dict()
        return {"policy": self.policy, LOGGED: {"replies": len(frame), **means, "reasons": reasons}}

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> Any:
        """Refused: a policy changes what is generated, not how likely a text is."""
        tasks = sorted({str(request.task_name) for request in requests})
        raise ValueError(
            f"{', '.join(tasks)} asks for log-likelihoods, which a stopping policy does not "
            "change: run it on the base (--model hf), or take a task that generates "
            "(generate_until)"
        )

    loglikelihood_rolling = loglikelihood


_evaluate = evaluator.evaluate


@functools.wraps(_evaluate)
def _with_thinking(lm: Any, *args: Any, **kwargs: Any) -> Any:
    """lm_eval's `evaluate` with a metric of the model's, thinking tokens: tasks alone have some."""
    done = _evaluate(lm, *args, **kwargs)
    model = lm.lm if isinstance(lm, CachingLM) else lm
    if done is not None and isinstance(model, OSPrunerLM):
        for task, tokens in model.thinking.items():
            error = mean_stderr(tokens) if len(tokens) > 1 else "N/A"
            told = {"thinking_tokens,none": mean(tokens), "thinking_tokens_stderr,none": error}
            done["results"][task] |= told
            done["higher_is_better"][task]["thinking_tokens"] = False
    return done


evaluator.evaluate = _with_thinking


def answer_of(
    fmt: TokenFormat, prompt: Sequence[int], ids: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Takes thinking and answer of a reply apart, by the ids of its markers.

    Of a model that thinks in its reply, all of it is the answer. What ends the text is left out.
    """
    kept = list(ids)
    if not fmt.format.think_end:
        return [], kept
    state = follow(fmt, prompt, kept)
    if not state.ended:
        return kept, []
    thinking = max(0, state.thinking_tokens)
    begins = max(0, state.thinking_tokens + state.end_tokens)
    # Between the marker and the answer: in Harmony, the answer's header.
    rest = list(fmt.closing_left(state)) if fmt.channels else []
    if kept[begins : begins + len(rest)] == rest:
        begins += len(rest)
    return kept[:thinking], kept[begins:]


def run(arguments: Sequence[str]) -> None:
    """lm_eval's command line, which then knows the model `ospruner`."""
    sys.argv = ["lm_eval", *arguments]
    cli_evaluate()
