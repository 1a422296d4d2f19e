r"""How a vLLM server splits a policy's chat replies into thinking and answer.

vLLM's own parsers look at the reply's text alone: what follows a thinking that the prompt has
opened, or has closed (`enable_thinking: false`, a prefilled answer), they take for the other, and
a marker that a reply only speaks of for a marker. Ours are told the prompt, follow the reply's ids
as stopping does (`BoundaryState`), and cut its text where the ids say.
vLLM's parser of Harmony is bound to models whose type is gpt_oss, which a policy's is not.

Not openai-harmony's `StreamableParser` (tried: 0.0.11): of a reply that goes on in an analysis
which the prompt has opened it drops the thinking, or raises.
"""

from __future__ import annotations

import copy
import functools
import re
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from transformers import AutoTokenizer
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.parser import abstract_parser
from vllm.reasoning import ReasoningParser

from modeling_ospruner.configuration_ospruner import OSPrunerConfig
from modeling_ospruner.formats_ospruner import ReasoningFormat, TokenFormat
from ospruner.formats import follow

from .plugin import PARSER

__all__ = ["HarmonyThinkingParser", "PromptedParser", "ThinkingParser"]

_MARKERS = ("start", "channel", "constrain", "message", "end", "return", "call")
_THINKING, _ANSWER = "thinking", "answer"
_CHANNELS = {"analysis": _THINKING, "final": _ANSWER, "commentary": _ANSWER}


class _SplittingParser(ReasoningParser):
    """Splits a reply's text, whole or as it comes, as its prompt has left it.

    Ids say which markers are meant, and how often their text stands before them as text alone.
    """

    engine_based_streaming = True  # vLLM then keeps no text of its own
    prompt: Sequence[int] | None = None
    reply_ids: Sequence[int] = ()  # of the whole reply that is split next

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, *args, **kwargs)
        self._begin()

    def go_on(self, prompt_ids: Sequence[int]) -> None:
        """Begins a reply to a prompt."""
        self.prompt = list(prompt_ids)
        self._begin()

    def _begin(self) -> None:
        """Forgets the reply."""
        self._markers = deque[tuple[str, int]]()  # met: their text, how often it is none before
        self._literals = set[str]()  # what may become one
        self._text, self._told = "", 0  # since the last one, and how much of it has been told
        self._filled = set[str]()  # the kinds of what has been told
        self._fresh = False  # right after one
        self.answer_ids = list[int]()  # that no one has taken yet

    @abstractmethod
    def _follow(self, ids: Iterable[int]) -> None:
        """Takes further ids, and notes the markers among them."""

    @abstractmethod
    def _meet(self, literal: str) -> str:
        """Goes on after a marker; what of its text is told."""

    @abstractmethod
    def _kind(self, text: str) -> str:
        """What further text between two markers is; "" of one that is left out."""

    def split(self, text: str, ids: Iterable[int], final: bool) -> tuple[str, str]:
        """What a further part of a reply adds to thinking and answer.

        What may become a marker is held back, unless it is the final part.
        """
        self._follow(ids)
        self._text += text
        found = {_THINKING: "", _ANSWER: "", "": ""}
        while self._markers:
            literal, before = self._markers[0]
            places = [one.start() for one in re.finditer(re.escape(literal), self._text)]
            if len(places) <= before:
                break  # ids may be ahead of the text
            self._markers.popleft()
            self._tell(places[before], found)
            rest = self._text[places[before] + len(literal) :]
            self._text, self._told, self._fresh = self._meet(literal) + rest, 0, True
        end, told = len(self._text), self._told
        for one in () if final else self._literals:
            half = max(n for n in range(len(one)) if self._text.endswith(one[:n], told))
            end = min(end, len(self._text) - half)
        self._tell(end, found)
        return found[_THINKING], found[_ANSWER]

    def _tell(self, end: int, found: dict[str, str]) -> None:
        if text := self._text[self._told : end]:
            kind = self._kind(text)
            found[kind] += ("\n" if self._fresh and kind in self._filled else "") + text
            self._filled.add(kind)
            self._told, self._fresh = end, False

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        """The thinking and the answer of a whole reply."""
        fresh = copy.copy(self)  # of several replies one parser may be asked
        fresh._begin()
        ids = self.reply_ids or self.model_tokenizer.encode(model_output, add_special_tokens=False)
        thinking, answer = fresh.split(model_output, ids, True)
        return thinking or None, answer or None

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> DeltaMessage | None:
        """What has come to either since the last call; `PromptedParser` asks `split` itself."""
        thinking, answer = self.split(delta_text, delta_token_ids, False)
        return DeltaMessage(reasoning=thinking or None, content=answer or None)


class PromptedParser(abstract_parser.DelegatingParser):
    """vLLM's parser of replies, where ours splits them: vLLM keeps prompt and ids from it.

    Of a stream vLLM's own looks at the answers alone, for calls of tools.
    """

    _answers = False  # whether an answer has begun

    def set_prompt_token_ids(self, prompt_token_ids: Sequence[int]) -> None:
        """Called before a whole reply is parsed, on all routes."""
        if isinstance(self._reasoning_parser, _SplittingParser):
            self._reasoning_parser.go_on(prompt_token_ids)

    def parse(
        self,
        model_output: str,
        request: Any,
        enable_auto_tools: bool = False,
        model_output_token_ids: Sequence[int] = (),
    ) -> tuple[str | None, str | None, Any]:
        """A whole reply: thinking, answer, calls."""
        if isinstance(self._reasoning_parser, _SplittingParser):
            self._reasoning_parser.reply_ids = model_output_token_ids
        return super().parse(model_output, request, enable_auto_tools, model_output_token_ids)

    def parse_delta(
        self,
        delta_text: str,
        delta_token_ids: list[int],
        request: Any,
        prompt_token_ids: list[int] | None = None,
        *,
        finished: bool,
    ) -> DeltaMessage | None:
        """One piece of a stream; the first one tells the prompt."""
        parser, state = self._reasoning_parser, self._stream_state
        if not isinstance(parser, _SplittingParser):
            return super().parse_delta(
                delta_text, delta_token_ids, request, prompt_token_ids, finished=finished
            )
        if not state.prompt_reasoning_checked:
            state.prompt_reasoning_checked = state.reasoning_ended = True
            parser.go_on(prompt_token_ids or [])
        thinking, answer = parser.split(delta_text, delta_token_ids, finished)
        self._answers |= bool(answer)
        delta = None
        if answer or (finished and self._answers):
            ids, parser.answer_ids = parser.answer_ids, []
            delta = super().parse_delta(answer, ids, request, finished=finished)
        if thinking and request.include_reasoning:
            delta = DeltaMessage() if delta is None else delta
            delta.reasoning = thinking
        return delta


# vLLM makes a subclass of what stands here for each server, once it has found the parsers.
abstract_parser.DelegatingParser = PromptedParser


@functools.cache  # a parser is made for each request
def format_of(policy: str) -> TokenFormat:
    config = OSPrunerConfig.from_pretrained(policy)
    tokenizer = AutoTokenizer.from_pretrained(policy, config=config)
    return TokenFormat.compile(ReasoningFormat.from_dict(config.reasoning_format or {}), tokenizer)


class ThinkingParser(_SplittingParser):
    """`--reasoning-parser ospruner`: a marker ends the thinking, or the opening of a tool's call.

    The policy's format says which; it may be one token or several. A thinking that the answer opens
    again is thinking, too.

    Raises:
        ValueError: the tokenizer lies beside no policy whose thinking a marker ends.
    """

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        self._fmt = fmt = format_of(str(tokenizer.name_or_path))
        if not fmt.format.think_end or fmt.channels is not None:
            raise ValueError(
                f"--reasoning-parser {PARSER}: of the format {fmt.format.name!r}, no marker alone "
                f"ends the thinking (think_end {fmt.format.think_end!r}): leave the option to "
                "`ospruner serve`"
            )
        openers = [fmt.texts[i] for i in fmt.call_ids]
        openers += [] if fmt.call_marker is None else [fmt.call_marker.literal]
        self._openers = {one.strip() for one in openers}
        super().__init__(tokenizer, *args, **kwargs)

    def adjust_request(self, request: Any) -> Any:
        """Keeps special tokens in the reply's text where the markers are such."""
        fmt, added = self._fmt, self.model_tokenizer.added_tokens_decoder
        calls = fmt.call_ids if request.tools else ()
        if any(added[i].special for i in (*fmt.think_end_ids, *fmt.reentry_ids, *calls)):
            request.skip_special_tokens = False
        return request

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Whether an answer is being written: from there on, a grammar holds."""
        return self._fmt.thinking_span(input_ids).closed

    def is_reasoning_end_streaming(
        self, input_ids: Sequence[int], delta_ids: Iterable[int]
    ) -> bool:
        """The same after a step, whose tokens are `delta_ids`; most cannot end it."""
        fmt = self._fmt
        turns = fmt.end_marker or fmt.call_marker or not fmt.added_ids.isdisjoint(delta_ids)
        return bool(turns) and self.is_reasoning_end(input_ids)

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        """The tokens of the answer."""
        state = follow(self._fmt, [], input_ids)
        return input_ids[state.thinking_tokens + state.end_tokens :] if state.ended else []

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """The tokens of the thinking, without the markers."""
        counted = self
        if self._followed != len(token_ids):  # else those of the stream that it splits
            counted = copy.copy(self)
            counted._begin()
            counted._follow(token_ids)
        return counted._thought + (0 if counted._state.ended else len(counted._ids))

    def _begin(self) -> None:
        super()._begin()
        fmt, prompt = self._fmt, self.prompt
        self._state = fmt.boundary_state() if prompt is None else fmt.prompt_state(prompt)
        self._literals = {fmt.format.think_end, fmt.format.think_start, *self._openers} - {""}
        if fmt.end_marker is not None and prompt:  # which may have begun in the prompt
            before, end = fmt.text(prompt[-len(fmt.format.think_end) :]), fmt.format.think_end
            self._literals |= {end[n:] for n in range(1, len(end)) if before.endswith(end[:n])}
        self._thinks = not self._state.ended  # the text that is told
        self._begun = self._state.ended  # after a start marker, or other text
        self._followed = self._thought = 0  # ids, and how many of them are thinking
        self._ids, self._first = list[int](), self._state.thinking_tokens  # since the last marker

    def _follow(self, ids: Iterable[int]) -> None:
        fmt, state, start = self._fmt, self._state, self._fmt.format.think_start
        for token in ids:
            self._followed += 1
            thinks = not state.ended
            if thinks and token in fmt.eos_ids and token != fmt.think_end_id:
                continue
            state.push(token)
            self._ids.append(token)
            if state.ended and (state.calls or not thinks):
                self.answer_ids.append(token)
            if not self._begun and (text := fmt.text(self._ids).strip()):
                self._begun = text == start or not start.startswith(text)
                if text == start:
                    self._mark(start)
            if thinks and state.ended:
                self._thought += max(0, state.thinking_tokens - self._first)
                literal, call = fmt.format.think_end, fmt.call_marker
                if state.calls:
                    textual = call is not None and token not in fmt.call_ids
                    literal = (call.literal if call and textual else fmt.texts[token]).strip()
                self._mark(literal)
            elif not thinks and not state.ended:
                self._mark(start)

    def _mark(self, literal: str) -> None:
        text = self._fmt.text(self._ids)
        if literal not in text:  # it begins in the prompt
            rests = (literal[n:] for n in range(len(literal) + 1))
            literal = next(rest for rest in rests if text.startswith(rest))
        self._markers.append((literal, max(0, text.count(literal) - 1)))
        self._ids, self._first = [], self._state.thinking_tokens

    def _meet(self, literal: str) -> str:
        self._thinks = literal == self._fmt.format.think_start
        return literal if literal in self._openers else ""  # a call's stands in the answer

    def _kind(self, text: str) -> str:
        return _THINKING if self._thinks else _ANSWER


class _Messages:
    """A turn of several messages as it is written.

    Attributes:
        kind: of the message in whose body it is; "" of one that is left out, None in a header.
    """

    def __init__(self, kind: str = _THINKING) -> None:
        self.kind: str | None = kind  # text under no header
        self._header = ""  # without markers: `assistant`, the channel, a recipient

    def meet(self, marker: str) -> None:
        """Goes on after a marker."""
        if marker != "message":
            self.kind = None
            self._header = "" if marker == "start" else f"{self._header} "
            return
        words = self._header.removeprefix("assistant").split()
        addressed = any(word.startswith("to=") for word in words)
        self.kind = "" if addressed else _CHANNELS.get("".join(words[:1]), "")
        self._header = ""

    def write(self, text: str) -> str:
        """Goes on after other text; the kind of the body in which it stands, "" outside of one."""
        if self.kind is None:
            self._header += text
        return self.kind or ""


class HarmonyThinkingParser(_SplittingParser):
    """`--reasoning-parser ospruner_harmony`, for a policy on GPT-OSS.

    Messages of the analysis channel are thinking, as is text under no header. Those of the final
    channel, and of the commentary where it is addressed to nobody, are the answer. Others, calls
    of tools, are left out. Special tokens are kept in the text, for by them it is split.
    """

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        known = tokenizer.get_vocab()
        texts = {f"<|{name}|>": name for name in _MARKERS}
        self._names = {known[text]: name for text, name in texts.items() if text in known}
        super().__init__(tokenizer, *args, **kwargs)

    def adjust_request(self, request: Any) -> Any:
        """Keeps special tokens in the reply's text."""
        request.skip_special_tokens = False
        return request

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Whether an answer is being written: from there on, a grammar holds."""
        return self._read(input_ids, _Messages())[1].kind == _ANSWER

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        """The tokens of the answer."""
        kinds, _ = self._read(input_ids, self._opened())
        return [token for token, kind in zip(input_ids, kinds, strict=True) if kind == _ANSWER]

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """The tokens of the thinking, without markers and headers."""
        return self._read(token_ids, self._opened())[0].count(_THINKING)

    def _begin(self) -> None:
        super()._begin()
        self._messages, self._ordinary = self._opened(), ""  # text since the last marker
        self._literals = {f"<|{name}|>" for name in _MARKERS}

    def _follow(self, ids: Iterable[int]) -> None:
        for token in ids:
            self.answer_ids.append(token)
            if (name := self._names.get(token)) is None:
                self._ordinary += self.model_tokenizer.decode([token])
            else:
                self._markers.append((f"<|{name}|>", self._ordinary.count(f"<|{name}|>")))
                self._ordinary = ""

    def _meet(self, literal: str) -> str:
        self._messages.meet(literal[2:-2])
        return ""

    def _kind(self, text: str) -> str:
        return self._messages.write(text)

    def _opened(self) -> _Messages:
        """What the prompt has left open."""
        closed = self.prompt is not None and self.is_reasoning_end(self.prompt)
        return _Messages(_ANSWER if closed else _THINKING)

    def _read(self, ids: Sequence[int], messages: _Messages) -> tuple[list[str], _Messages]:
        """For each token, what the body is in which it stands, and where it all ends."""
        kinds = list[str]()
        for token in ids:
            if (marker := self._names.get(token)) is not None:
                messages.meet(marker)
                kinds.append("")
            else:
                inside = messages.kind is not None
                kinds.append(messages.write("" if inside else self.model_tokenizer.decode([token])))
        return kinds, messages
