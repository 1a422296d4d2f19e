r"""How a vLLM server splits a policy's chat replies into thinking and answer.

vLLM's own parsers look at the reply's text alone: what follows a thinking that the prompt has
opened, or has closed (`enable_thinking: false`, a prefilled answer), they take for the other, and
a marker that a reply only speaks of for a marker. Ours are told the prompt, follow the reply's ids
as stopping does (`BoundaryState`), and cut its text where the ids say.
vLLM's parser of Harmony is bound to models whose type is gpt_oss, which a policy's is not.

Not openai-harmony's `StreamableParser` (tried: 0.0.11): of a reply that goes on in an analysis
which the prompt has opened it drops the thinking, or raises.
"""

import copy
import re
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self

from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.parser import abstract_parser
from vllm.reasoning import ReasoningParser

from ..core import format_of
from .plugin import PARSER

_THINKING, _ANSWER, _LEFT_OUT = "thinking", "answer", ""
_MARKERS = ("start", "channel", "constrain", "message", "end", "return", "call")
_CHANNELS = {"analysis": _THINKING, "final": _ANSWER, "commentary": _ANSWER}


class _Mark(NamedTuple):
    """A marker among a reply's ids."""

    literal: str
    before: int  # how often the same text, which is none, stands between the last one and it
    kind: str  # of the text that follows
    kept: bool = False  # whether its own text is told with that


class _SplittingParser(ReasoningParser):
    """Splits a reply's text, whole or as it comes, as its prompt has left it.

    Ids say which markers are meant, and how often their text stands before them as text alone.
    """

    engine_based_streaming = True  # vLLM then keeps no text of its own
    reply_ids: Sequence[int] = ()  # of the whole reply that is split next

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, *args, **kwargs)
        self.go_on(())

    def go_on(self, prompt_ids: Sequence[int]) -> None:
        """Begins a reply to a prompt."""
        self.prompt = list(prompt_ids)
        self.answer_ids = list[int]()  # that no one has taken yet
        self._followed = self._thought = 0  # ids, and how many of them are thinking
        self._ids = list[int]()  # since the last marker
        self._marks = deque[_Mark]()  # met in ids, and not in the text yet
        self._text, self._told = "", 0  # since the last one, and how much of it has been told
        self._filled = set[str]()  # the kinds of what has been told
        self._fresh = False  # right after one
        self._kind = self._begin()  # of the text that is told next

    @abstractmethod
    def _begin(self) -> str:
        """Follows the prompt, says which `_literals` may become markers, and what comes first."""

    @abstractmethod
    def _take(self, token: int) -> None:
        """Takes a further id, and notes a marker that ends with it."""

    def _after(self, ids: Iterable[int], prompt: Sequence[int] = ()) -> Self:
        """Another one, which has taken ids."""
        fresh = copy.copy(self)
        fresh.go_on(prompt)
        fresh.split("", ids, False)
        return fresh

    def split(self, text: str, ids: Iterable[int], final: bool) -> tuple[str, str]:
        """What a further part of a reply adds to thinking and answer.

        What may become a marker is held back, unless it is the final part.
        """
        for token in ids:
            self._followed += 1
            self._take(token)
        self._text += text
        found = {_THINKING: "", _ANSWER: "", _LEFT_OUT: ""}
        while self._marks:
            mark = self._marks[0]
            places = [one.start() for one in re.finditer(re.escape(mark.literal), self._text)]
            if len(places) <= mark.before:
                break  # ids may be ahead of the text
            self._marks.popleft()
            at = places[mark.before]
            self._tell(at, found)
            rest = self._text[at + len(mark.literal) :]
            self._text = mark.literal + rest if mark.kept else rest
            self._told, self._fresh, self._kind = 0, True, mark.kind
        end, told = len(self._text), self._told
        for one in () if final else self._literals:
            half = max(n for n in range(len(one)) if self._text.endswith(one[:n], told))
            end = min(end, len(self._text) - half)
        self._tell(end, found)
        return found[_THINKING], found[_ANSWER]

    def _tell(self, end: int, found: dict[str, str]) -> None:
        if text := self._text[self._told : end]:
            again = self._fresh and self._kind in self._filled
            found[self._kind] += ("\n" if again else "") + text
            self._filled.add(self._kind)
            self._told, self._fresh = end, False

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        """The thinking and the answer of a whole reply; of several one parser may be asked."""
        ids = self.reply_ids or self.model_tokenizer.encode(model_output, add_special_tokens=False)
        thinking, answer = self._after((), self.prompt).split(model_output, ids, True)
        return thinking or None, answer or None

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """The tokens of the thinking, without markers and headers."""
        same = self._followed == len(token_ids)  # those of the stream that it splits
        counted = self if same else self._after(token_ids, self.prompt)
        return counted._thought


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

    def _begin(self) -> str:
        fmt, end = self._fmt, self._fmt.format.think_end
        self._state = state = fmt.prompt_state(self.prompt)
        self._literals = {end, fmt.format.think_start, *self._openers} - {""}
        if fmt.end_marker is not None:  # which may have begun in the prompt
            before = fmt.text(self.prompt[-len(end) :])
            self._literals |= {end[n:] for n in range(1, len(end)) if before.endswith(end[:n])}
        self._begun = state.ended  # after a start marker, or other text
        self._first = state.thinking_tokens  # at the last marker
        self._ended = 0  # tokens of parts of the thinking that have ended
        return _ANSWER if state.ended else _THINKING

    def _take(self, token: int) -> None:
        fmt, state, start = self._fmt, self._state, self._fmt.format.think_start
        thinks = not state.ended
        if thinks and token in fmt.eos_ids and token != fmt.think_end_id:
            return
        state.push(token)
        self._ids.append(token)
        if state.ended and (state.calls or not thinks):
            self.answer_ids.append(token)
        if not self._begun and (text := fmt.text(self._ids).strip()):
            self._begun = text == start or not start.startswith(text)
            if text == start:
                self._mark(start, _THINKING)
        if thinks and state.ended:
            self._ended += max(0, state.thinking_tokens - self._first)
            literal, call = fmt.format.think_end, fmt.call_marker
            if state.calls:
                textual = call is not None and token not in fmt.call_ids
                literal = (call.literal if call and textual else fmt.texts[token]).strip()
            self._mark(literal, _ANSWER)
        elif not thinks and not state.ended:
            self._mark(start, _THINKING)
        self._thought = self._ended + (0 if state.ended else len(self._ids))

    def _mark(self, literal: str, kind: str) -> None:
        text = self._fmt.text(self._ids)
        if literal not in text:  # it begins in the prompt
            rests = (literal[n:] for n in range(len(literal) + 1))
            literal = next(rest for rest in rests if text.startswith(rest))
        kept = literal in self._openers  # a call's stands in the answer
        self._marks.append(_Mark(literal, max(0, text.count(literal) - 1), kind, kept))
        self._ids, self._first = [], self._state.thinking_tokens


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
        self._literals = set(texts)
        super().__init__(tokenizer, *args, **kwargs)

    def adjust_request(self, request: Any) -> Any:
        """Keeps special tokens in the reply's text."""
        request.skip_special_tokens = False
        return request

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Whether an answer is being written: from there on, a grammar holds."""
        return self._after(input_ids)._body == _ANSWER

    def _begin(self) -> str:
        closed = bool(self.prompt) and self.is_reasoning_end(self.prompt)
        begun = _ANSWER if closed else _THINKING
        self._body: str | None = begun  # the kind of the message that is open; None in a header
        self._header = ""  # without markers: `assistant`, the channel, a recipient
        return begun

    def _take(self, token: int) -> None:
        self.answer_ids.append(token)
        name = self._names.get(token)
        if name is None:
            self._ids.append(token)
            self._thought += self._body == _THINKING
            return
        text, literal = self.model_tokenizer.decode(self._ids), f"<|{name}|>"
        header = self._header + (text if self._body is None else "")
        self._ids, self._header, self._body = [], "", None
        if name == "message":
            words = header.removeprefix("assistant").split()
            addressed = any(word.startswith("to=") for word in words)
            self._body = _LEFT_OUT if addressed else _CHANNELS.get("".join(words[:1]), _LEFT_OUT)
        elif name != "start":
            self._header = f"{header} "
        self._marks.append(_Mark(literal, text.count(literal), self._body or _LEFT_OUT))
