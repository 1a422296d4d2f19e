"""The model `ospruner` of EleutherAI's lm-evaluation-harness (lm_eval).

Importing this module registers it. lm_eval looks for no plug-ins, so that its command line does
not know the model; `ospruner lm-eval` is lm_eval's own command line with the model in it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from tqdm import tqdm  # type: ignore[import-untyped]

from .replies import Asked, open_policy

__all__ = ["LOGGED", "OSPrunerLM", "run"]

LOGGED = "ospruner"
"""The key of a sample's logged arguments under which it stands why and when thinking ended."""


@register_model("ospruner")
class OSPrunerLM(LM):
    """A policy as a model of lm_eval, for tasks that generate; say `--apply_chat_template`.

    What is graded is the answer. A sample's log holds, in its arguments under `ospruner`, for
    each reply the thinking, its tokens, and what ended it.

    Args:
        policy: folder or Hub id; with a url, the name under which the server knows it.
        batch_size: replies generated together; with a url, requests sent at once.
        max_batch_size: of lm_eval's "auto", which is not offered.
        device: of the base; not with a url.
        max_gen_toks: cap on thinking and answer, of tasks that name none. A task's own cap was
            meant for an answer; `--gen_kwargs max_gen_toks=...` replaces it.
        arguments: the others of `open_policy`: url, revision, dtype, stop_policy, and the
            settings of `StopPolicyConfig`.

    Raises:
        ValueError: an argument is unknown or wrong.
    """

    def __init__(
        self,
        policy: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        max_gen_toks: int = 4096,
        **arguments: Any,
    ) -> None:
        super().__init__()
        size = None if batch_size is None else str(batch_size)
        if max_batch_size is not None or (size is not None and not size.isdigit()):
            raise ValueError(
                f"batch_size is {batch_size!r} and max_batch_size {max_batch_size}; give one "
                "number, --batch_size 8: no batch size is looked for"
            )
        if "url" in arguments:
            device = None  # lm_eval's default, which the server does not ask for
        self.max_gen_toks = max_gen_toks
        self.policy = open_policy(
            policy,
            batch_size=None if size is None else int(size),
            device=device,
            **arguments,
        )

    @property
    def tokenizer_name(self) -> str:
        """What lm_eval's cache of requests tells conversations apart by."""
        return f"ospruner-messages-{self.policy.name}".replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Nothing: the base's own template is applied with each request."""
        if isinstance(chat_template, str):
            raise ValueError(
                f"chat_template is {chat_template!r}: a policy uses its base's own; say "
                "--apply_chat_template alone"
            )
        return ""

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The conversation as JSON; the base's template makes a prompt of it later.

        Raises:
            ValueError: the task begins the answer by itself.
        """
        if not add_generation_prompt:
            raise ValueError(
                "the task begins the model's answer (gen_prefix), in front of its thinking: "
                "take a task without one"
            )
        return json.dumps(chat_history, ensure_ascii=False)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The answer to each request.

        Raises:
            ValueError: a context is no conversation, or a task asks for what is not known.
        """
        answers: dict[int, str] = {}
        groups: dict[str, list[int]] = {}
        for place, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(place)
        logs: dict[int, list[dict[str, Any]]] = {}
        with tqdm(total=len(requests), disable=disable_tqdm, desc="ospruner") as bar:
            for places in groups.values():
                asked = self._asked(requests[places[0]].args[1])
                for some in _chunks(places, 64):
                    conversations = [_messages(requests[place].args[0]) for place in some]
                    replies = self.policy.ask(conversations, asked)
                    for place, reply in zip(some, replies, strict=True):
                        answers[place] = reply.answer
                        # Before the log changes the arguments, of which lm_eval's cache makes
                        # its key.
                        self.cache_hook.add_partial(
                            "generate_until", requests[place].args, reply.answer
                        )
                        logs.setdefault(id(requests[place]), []).append(reply.log())
                    bar.update(len(some))
        for request in requests:
            if id(request) in logs:  # a repeated request stands here several times
                context, settings = request.args
                request.arguments = (context, {**settings, LOGGED: logs.pop(id(request))})
        return [answers[place] for place in range(len(requests))]

    def _asked(self, settings: dict[str, Any]) -> Asked:
        given = {name: value for name, value in settings.items() if name != LOGGED}
        wanted: dict[str, Any] = dict(normalize_gen_kwargs(given, self.max_gen_toks))
        wanted.pop("do_sample")
        return Asked(
            wanted.pop("max_gen_toks"),
            tuple(stop for stop in wanted.pop("until") if stop),
            wanted.pop("temperature", 0.0),
            wanted,
        )

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Refused: a policy changes what is generated, not how likely a text is."""
        raise _refusal(requests)

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Refused, as `loglikelihood`."""
        raise _refusal(requests)


def run(arguments: Sequence[str]) -> None:
    """lm_eval's command line, which then knows the model `ospruner`."""
    sys.argv = ["lm_eval", *arguments]
    cli_evaluate()


def _refusal(requests: Sequence[Any]) -> ValueError:
    tasks = sorted({str(request.task_name) for request in requests})
    return ValueError(
        f"{', '.join(tasks)} asks for log-likelihoods, which a stopping policy does not change: "
        "run it on the base (--model hf), or take a task that generates (generate_until)"
    )


def _messages(context: str) -> list[dict[str, str]]:
    """The conversation of a context that `apply_chat_template` wrote.

    Raises:
        ValueError: it is something else.
    """
    try:
        messages: list[dict[str, str]] = json.loads(context)
        roles = [message["role"] for message in messages]
    except (ValueError, TypeError, KeyError):
        roles = []
    if not roles:
        raise ValueError(
            f"the context {context[:60]!r} is no conversation: say --apply_chat_template (in "
            "Python: apply_chat_template=True); a policy knows chats alone"
        )
    return messages


def _chunks(places: Sequence[int], size: int) -> list[Sequence[int]]:
    return [places[first : first + size] for first in range(0, len(places), size)]
