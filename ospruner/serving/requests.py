"""What a request to a server says about stopping: flat keys, and what they mean.

To vLLM they stand in `vllm_xargs` (offline in `SamplingParams(extra_args=...)`), to SGLang in
`custom_params`. Here they are read, and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from modeling_ospruner.configuration_ospruner import (
    MODES,
    OSPrunerConfig,
    check_choice,
    check_number,
    shown,
)
from modeling_ospruner.stopping_ospruner import StopPolicyConfig

DEFAULTS = "ospruner"  # the key of vLLM's `--additional-config` that holds a server's defaults
ON = "stop_policy"
ID = "stop_id"
CONTROL = "stop_control"  # of a server's defaults only
DIAL = "stop_efforts"  # likewise: by effort a price, or a threshold of a policy of one price
# Likewise: what the policy promises, and whether a sentence holds markers, is known when it is
# loaded.
OF_SERVERS = ("stop_max_loss", "stop_wind_down")
KEYS = {  # of a request, and the fields of `StopPolicyConfig`
    "stop_mode": "mode",
    "stop_threshold": "threshold",
    "stop_price": "price",
    "stop_max_loss": "max_loss",
    "stop_seed": "seed",
    "stop_sample_index": "first_sample_index",
    "stop_answer": "answer",
    "stop_wind_down": "wind_down",
    "stop_answer_sample": "answer_do_sample",
    "min_thinking_tokens": "min_thinking_tokens",
    "max_thinking_tokens": "max_thinking_tokens",
    "max_answer_tokens": "max_answer_tokens",
}
# What clients call how much thinking they want, from little to all.
EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")
CALIBRATION_FIELDS: tuple[str, ...] = (
    *("max_loss", "confidence"),  # what it allows, and how surely
    *("mode", "threshold", "price"),  # at which settings
    *("loss", "tokens_saved", "problems", "test", "data_hash"),  # how it was measured
    *("disagreement", "traffic"),  # what a server is held against
)
EFFORT_FIELDS: tuple[str, ...] = ("mode", "threshold", "price", "tokens", "share", "loss")

# What other work, and generate's beams, call a price; refused with its name.
_OLD_PRICES = ("lambda", "length_penalty", "stop_length_penalty")
_MOST_ID_CHARACTERS = 256  # the server keeps thousands of them
_LIKE_OURS = re.compile(
    r"(?i)[\W_]*(stop([\W_]|policy|mode|threshold|seed|sample|answer|id|price)"
    r"|(min|max)[\W_]?(thinking|answer))"
)
_BUDGET = re.compile(  # what others call `max_thinking_tokens`, perhaps with what it stands in
    r"(?i)(?=.*(think|thought|reason))(?=.*(budget|token|length|limit))|(.*\.)?budget_?tokens\Z"
)
# OpenAI's in chat and in responses, and Anthropic's.
_EFFORT_NAMES = ("reasoning_effort", "reasoning.effort", "output_config.effort")
_TEMPLATE_EFFORT = "chat_template_kwargs.reasoning_effort"  # whose names are the template's
_NO_THINKING = (  # Anthropic's, Qwen's, OpenRouter's, and templates'
    *(("thinking.type", "disabled"), ("enable_thinking", False), ("reasoning.enabled", False)),
    *((f"chat_template_kwargs.{name}", False) for name in ("enable_thinking", "thinking")),
)
_BUDGET_NAMES = (  # vLLM's, Qwen's, llama.cpp's, Anthropic's, OpenRouter's
    *("thinking_token_budget", "thinking_budget", "thinking_budget_tokens"),
    *("thinking.budget_tokens", "reasoning.max_tokens"),
)
_SETTINGS = ("mode", "threshold", "price")  # what an effort says, or a promise
_FLAGS = {True: True, False: False, "true": True, "false": False}  # 1 and 0 equal True and False
_CONTENT = (  # of a body: what its author names as he likes
    *("messages", "input", "prompt", "tools", "functions", "documents", "metadata"),
    *("response_format", "structured_outputs", "output_config", "text", "json_schema"),
)
_DEEPEST = 4  # of settings within settings


def check_places(body: Mapping[str, Any], read: Collection[str], within: str) -> None:
    """Refuses our keys and budgets of thinking in a body over HTTP where nobody reads them.

    What is `read`, by dotted names, is left out with all that it holds.
    """
    found: list[str] = []

    def walk(part: Mapping[str, Any], above: str) -> None:
        for name, value in part.items():
            path = f"{above}{name}"
            if name in _CONTENT or path in read or value is None:
                continue
            if isinstance(value, dict):
                if path.count(".") < _DEEPEST:
                    walk(value, f"{path}.")
            elif name in (ON, ID) or name in KEYS or _BUDGET.match(path):
                found.append(path)

    walk(body, "")
    if found:
        raise ValueError(
            f"{shown(sorted(found))} would do nothing here: send it within {within}, a budget of "
            "thinking as 'max_thinking_tokens'"
        )


def translated(
    body: Mapping[str, Any],  # what was sent over HTTP, as JSON
    place: str,  # where the keys stand in it, by a dotted name
    own: str,  # the budget that the engine reads itself there, likewise; it stays
    defaults: StopRequest,  # the server's, settled
    config: OSPrunerConfig,
) -> tuple[Mapping[str, Any], dict[str, Any] | None]:
    """What a body says of effort and of budgets, in others' dialects, as keys of the policy.

    An effort becomes the setting that the server's table holds for it; "none", in whatever words,
    ends a thinking that the chat template has left on with its first step. A budget stays a cap;
    one below what the policy spends in the mean also brings a bolder setting of that table. What
    the request's keys say goes before both.

    Returns:
        The body without those budgets that the engine would not know, and the request's keys with
        the new ones; None where there are none, or the policy is off.

    Raises:
        ValueError: a key has a wrong value, or nobody knows the effort.
    """
    sent = said_in(body, place)
    keys = dict(sent) if isinstance(sent, Mapping) else {}
    request = StopRequest(keys, place)
    settings = request.settings(defaults)
    if settings is None or not isinstance(sent, Mapping | None):  # the engine's to refuse
        return body, None
    effort = _effort(body)
    setting = defaults.efforts.get(effort or "", {})
    budgets = {path: one for path in _BUDGET_NAMES if type(one := said_in(body, path)) is int}
    caps = [one for one in budgets.values() if one >= 0]  # llama.cpp's -1 is none
    if caps := [*caps, *[0] * (effort == "none")]:
        keys = request.take_budget(keys, min(caps), defaults) or keys
        if effort is None:
            setting = defaults.of_budget(min(caps), settings.with_defaults(config))
    decided = not {"mode", "threshold"}.isdisjoint(request.fields)
    for field in ("price",) if decided else _SETTINGS:
        if field in setting:
            keys.setdefault(f"stop_{field}", setting[field])
    for path, one in budgets.items():
        body = replaced(body, path, None) if path != own and one >= -1 else body
    return body, keys if keys != (sent or {}) else None


def _effort(body: Mapping[str, Any]) -> str | None:
    """The effort that a body asks for, if any; one that is no text is the engine's to refuse."""
    for path in _EFFORT_NAMES:
        if isinstance(effort := said_in(body, path), str):
            check_choice("the request", path, effort, ("none", *EFFORTS))
            return effort
    if any(said_in(body, path) == word for path, word in _NO_THINKING):
        return "none"
    effort = said_in(body, _TEMPLATE_EFFORT)
    return effort if isinstance(effort, str) else None


def check_measured(config: OSPrunerConfig) -> None:
    """Refuses an edited row of what `ospruner calibrate` has measured: a promise or an effort."""
    for name in config.efforts or ():
        check_choice("the policy's efforts", "a name", name, EFFORTS)
    promises, efforts = config.calibrations or [], (config.efforts or {}).values()
    rows = [("the policy's calibrations", CALIBRATION_FIELDS, one) for one in promises]
    rows += [("the policy's efforts", EFFORT_FIELDS, one) for one in efforts]
    for owner, known, one in rows:
        if not set(known) <= set(one):
            raise ValueError(
                f"{owner} holds {shown(one)}; each must have the fields {', '.join(known)}: make "
                "it again with `ospruner calibrate`"
            )
        check_choice(owner, "mode", one["mode"], MODES)
        for name in ("max_loss", "confidence", "tokens_saved", "threshold", "price", "share"):
            if one.get(name) is not None:
                check_number(owner, name, one[name], 0, 1)


def said_in(body: object, path: str) -> Any:
    """What stands in a body of JSON under a dotted name; None for nothing."""
    for name in path.split("."):
        body = body.get(name) if isinstance(body, Mapping) else None
    return body


def replaced(body: Any, path: str, value: Any) -> Any:
    """A copy of a body of JSON with another value under a dotted name; None takes the name away."""
    if not isinstance(body, Mapping):
        return body  # the engine's to refuse
    name, _, inner = path.partition(".")
    new = replaced(body.get(name) or {}, inner, value) if inner else value
    return {k: v for k, v in {**body, name: new}.items() if k != name or new is not None}


class StopRequest:
    """One request's keys, or a server's defaults.

    Raises:
        ValueError: a value is wrong, a key that begins like ours is unknown, or a word of
            ours stands without its prefix.
    """

    def __init__(
        self,
        extra: Mapping[str, Any] | None,  # what others read from these is left alone
        owner: str = "vllm_xargs",  # what the keys belong to, for messages
        server: bool = False,  # whether they are a server's defaults
    ) -> None:
        given, self._owner = extra or {}, owner
        # Which draws a server makes is vLLM's own --seed; a request says it for itself.
        others = ("stop_seed", "stop_sample_index") if server else OF_SERVERS
        keys = [k for k in KEYS if k not in others]
        known = [ON, *((CONTROL, DIAL) if server else (ID,)), *keys]
        said = self._flag(ON, given[ON]) if ON in given else None
        beside = [k for k in given if k not in known]
        bare = dict.fromkeys(_OLD_PRICES, "stop_price") | {KEYS[k]: k for k in keys}
        like = [_LIKE_OURS]
        if said is not False:  # where the policy is off, another may read them
            like.append(_BUDGET)
            for k in filter(bare.get, beside):
                raise ValueError(f"{owner}: {k} is written {bare[k]} here: send {bare[k]}")
        if unknown := [k for k in beside if any(one.match(k) for one in like)]:
            raise ValueError(f"{owner}: no {shown(unknown)}; the policy's keys are {known}")
        # Those of `StopPolicyConfig` that were given.
        self.fields: dict[str, Any] = {KEYS[k]: given[k] for k in keys if k in given}
        if (flag := "stop_answer_sample") in given:
            self.fields["answer_do_sample"] = self._flag(flag, given[flag])
        self.name: str | None = given.get(ID)  # under which its record can be read, if any
        if self.name is not None and not (
            isinstance(self.name, str)
            and 0 < len(self.name) <= _MOST_ID_CHARACTERS
            and self.name.isprintable()  # so that it can stand in an address
        ):
            raise ValueError(
                f"{owner}: {ID} is {shown(self.name)}; it must be a text of 1 to "
                f"{_MOST_ID_CHARACTERS} printable characters"
            )
        self.control: float = given.get(CONTROL, 0.0)  # share of requests that never stop
        check_number(owner, CONTROL, self.control, 0, 1)
        # Of settled defaults, by a client's effort the setting that it asks for.
        self.efforts: dict[str, dict[str, Any]] = {}
        self._dial: dict[str, float] | None = given.get(DIAL)
        if not isinstance(self._dial, dict | None):
            raise TypeError(f"{owner}: {DIAL} is {shown(self._dial)}; it must be a dict")
        # Whether the policy stops the request; None where it does not say. A server stops then.
        self.on = (bool(self.fields) or server or None) if said is None else said
        mode = self._made(self.fields).mode
        if mode is not None:  # also where a threshold alone says it
            self.fields["mode"] = mode
        if "first_sample_index" in self.fields and "seed" not in self.fields:
            raise ValueError(
                f"{owner}: stop_sample_index is {self.fields['first_sample_index']} without a "
                "stop_seed, and does nothing: the draws of a request without one are always new. "
                "Send both, or none"
            )

    def settle(self, config: OSPrunerConfig) -> None:
        """Puts what the policy promises in the place of a server's `stop_max_loss`.

        The efforts are the policy's, or what the server says of some; none where it says {}.

        Raises:
            ValueError: no calibration promises as little, or the policy does not know a price.
        """
        check_measured(config)
        if "max_loss" in self.fields:
            kept = self._made({"max_loss": self.fields.pop("max_loss")}, config)
            self.fields |= {name: vars(kept)[name] for name in _SETTINGS}
        self.check_price(config)
        self.efforts = {} if self._dial == {} else dict(config.efforts or {})
        for name, value in (self._dial or {}).items():
            check_choice(f"{self._owner}: {DIAL}", "a name", name, EFFORTS)
            self.efforts[name] = {"threshold" if config.prices is None else "price": value}
            self._made(self.efforts[name], config)
        self.efforts = {
            name: {field: value for field, value in one.items() if value is not None}
            for name, one in self.efforts.items()
        }

    def of_budget(self, budget: int, usual: StopPolicyConfig) -> dict[str, Any]:
        """The setting that a budget of thinking tokens brings with it; {} for the usual one.

        It is the most careful one of those efforts that spend no more in the mean, or else the
        boldest, where that is bolder than the usual one.
        """
        rows = sorted(
            (one for one in self.efforts.values() if "tokens" in one), key=lambda one: one["tokens"]
        )
        within = [one for one in rows if one["tokens"] <= budget] or rows[:1]
        if not within:
            return {}
        found = within[-1]
        # By price, and at equal prices by threshold; draws are as bold as can be.
        price, threshold = usual.price or 0.0, usual.threshold or 0.0
        bolder = (found.get("price", price), -found.get("threshold", 1.0)) > (price, -threshold)
        return found if bolder else {}

    def check_price(self, config: OSPrunerConfig) -> None:
        """Refuses a price that the policy does not know, naming it and those that it knows."""
        self._made({"price": self.fields.get("price")}, config)

    def check_tools(self, tools: object, choice: object, defaults: StopRequest) -> None:
        """Refuses tools beside an answer that is forced into a box, which no call would fit in."""
        settings = self.settings(defaults)
        # With another choice than "auto" a grammar holds, under which the policy does not stop.
        if tools and choice == "auto" and settings is not None and settings.answer == "forced":
            raise ValueError(
                "tools are offered, but stop_answer is 'forced', whose box no call fits in: send "
                f"stop_answer 'tools' in {self._owner} (`ospruner serve --answer tools` makes it "
                "the default), or stop_policy false, or tool_choice 'none'"
            )

    def settings(self, defaults: StopRequest, least_tokens: int = 0) -> StopPolicyConfig | None:
        """The request's settings over a server's defaults; None where the policy is off.

        Before `least_tokens` the request does not end, by the engine's own setting.

        Raises:
            ValueError: the request's own budget is below `least_tokens`.
        """
        on = defaults.on if self.on is None else self.on
        if not on:
            return None
        fields = {**defaults.fields, **self.fields}
        if fields.get("mode") == "sample":
            fields.pop("threshold", None)  # of the defaults
        most = fields.get("max_thinking_tokens")
        least = max(fields.get("min_thinking_tokens", 0), least_tokens)
        if most is not None and least > most:  # the request's word is the later one
            if "max_thinking_tokens" not in self.fields:
                del fields["max_thinking_tokens"]
            elif least_tokens <= most:
                least = least_tokens
            else:
                raise ValueError(
                    f"{self._owner}: max_thinking_tokens is {most}, but the request is to have at "
                    f"least {least_tokens} tokens: lower its minimum (min_tokens, in SGLang "
                    "min_new_tokens), or raise the budget"
                )
        return StopPolicyConfig(**fields | {"min_thinking_tokens": least})

    def take_budget(
        self, extra: Mapping[str, Any], budget: int, defaults: StopRequest
    ) -> dict[str, Any] | None:
        """The keys with an engine's own budget as theirs; None where the policy is off.

        Where the request or the server has a budget of thinking tokens, too, the lower one holds.
        """
        settings = self.settings(defaults)
        if settings is None:
            return None
        most = min(budget, settings.max_thinking_tokens or budget)
        return {**extra, "max_thinking_tokens": max(most, 1)}

    def _flag(self, key: str, value: Any) -> bool:
        if isinstance(value, bool | int | str) and value in _FLAGS:
            return _FLAGS[value]
        raise ValueError(f"{self._owner}: {key} is {shown(value)}; it must be true or false")

    def _made(
        self, fields: Mapping[str, Any], config: OSPrunerConfig | None = None
    ) -> StopPolicyConfig:
        """Settings, with a policy's defaults; errors about fields are told in a request's words."""
        try:
            made = StopPolicyConfig(**fields)
            return made if config is None else made.with_defaults(config)
        except (TypeError, ValueError) as error:
            owner, _, message = str(error).partition(": ")  # stop_policy, and perhaps a note
            name = message.partition(" ")[0]
            key = {name: key for key, name in KEYS.items()}.get(name, name)
            owner = owner.replace("stop_policy", self._owner)
            raise ValueError(f"{owner}: {key}{message.removeprefix(name)}") from None
