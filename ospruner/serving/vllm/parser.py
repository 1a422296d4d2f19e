r"""How a vLLM server splits a policy's chat replies into thinking and answer.

vLLM's own parsers look at the reply's text alone: what follows a thinking that the prompt has
opened, or has closed (`enable_thinking: false`, a prefilled answer), they take for the other. Ours
are told the prompt, and ask the one function that stopping asks (`TokenFormat.thinking_span`).
vLLM's parser of Harmony is bound to models whose type is gpt_oss, which a policy's is not.

Not openai-harmony's `StreamableParser` (tried: 0.0.11): it reads token ids, and vLLM gives
`extract_reasoning` text alone; of a reply that goes on in an analysis which the prompt has opened
it drops the thinking, or raises.
"""

from __future__ import annotations

import copy
import functools
import re
from abc import abstractmethod
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
_MARKER = re.compile(rf"<\|({'|'.join(_MARKERS)})\|>")
_HALF_MARKER = re.compile(r"<(\|[a-z]*\|?)?\Z")  # of which the next part of a stream decides
_THINKING, _ANSWER = "thinking", "answer"
_CHANNELS = {"analysis": _THINKING, "final": _ANSWER, "commentary": _ANSWER}


class _SplittingParser(ReasoningParser):
    """Splits a reply's text, whole or as it comes, as its prompt has left it."""

    engine_based_streaming = True  # the answer's part of a stream comes here too
    closed = False  # whether the prompt has ended the thinking, so that all of the reply is answer

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, *args, **kwargs)
        self._begin()

    def go_on(self, prompt_ids: Sequence[int]) -> None:
        """Begins a reply to a prompt."""
        self.closed = self.is_reasoning_end(list(prompt_ids))
        self._begin()

    def _begin(self) -> None:
        """Forgets all text."""
        self._held = ""  # what may become a marker

    @abstractmethod
    def _split(self, text: str, final: bool) -> tuple[str, str]:
        """What a further part of the text adds to thinking and answer; held back unless final."""

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        """The thinking and the answer of a whole reply."""
        fresh = copy.copy(self)  # of several replies one parser may be asked
        fresh._begin()
        thinking, answer = fresh._split(model_output, True)
        return thinking or None, answer or None

    def extract_reasoning_streaming(
        self, previous_text: str, current_text: str, delta_text: str, *ids: Sequence[int]
    ) -> DeltaMessage | None:
        """What has come to either since the last call."""
        return self._delta(delta_text, False)

    def finish_streaming(self) -> DeltaMessage | None:
        """What was held back, because it looked like a part of a marker."""
        return self._delta("", True)

    def _delta(self, text: str, final: bool) -> DeltaMessage | None:
        thinking, answer = self._split(text, final)
        if not thinking and not answer:
            return None
        return DeltaMessage(reasoning=thinking or None, content=answer or None)


class PromptedParser(abstract_parser.DelegatingParser):
    """vLLM's parser of replies, which tells ours of the prompt: vLLM itself keeps it from them."""

    def set_prompt_token_ids(self, prompt_token_ids: Sequence[int]) -> None:
        """Called before a whole reply is parsed, on all routes."""
        if isinstance(self._reasoning_parser, _SplittingParser):
            self._reasoning_parser.go_on(prompt_token_ids)

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
        if isinstance(parser, _SplittingParser) and not state.prompt_reasoning_checked:
            state.prompt_reasoning_checked = prompt_token_ids is not None
            parser.go_on(prompt_token_ids or [])
            state.reasoning_ended = parser.has_engine_confirmed_reasoning_end()
        return super().parse_delta(
            delta_text, delta_token_ids, request, prompt_token_ids, finished=finished
        )


# vLLM makes a subclass of what stands here for each server, once it has found the parsers.
abstract_parser.DelegatingParser = PromptedParser


@functools.cache  # a parser is made for each request
def _format_of(policy: str) -> TokenFormat:
    config = OSPrunerConfig.from_pretrained(policy)
    tokenizer = AutoTokenizer.from_pretrained(policy, config=config)
    return TokenFormat.compile(ReasoningFormat.from_dict(config.reasoning_format or {}), tokenizer)


class ThinkingParser(_SplittingParser):
    """`--reasoning-parser ospruner`: a marker ends the thinking, or the opening of a tool's call.

    The policy's format says which; it may be one token or several.

    Raises:
        ValueError: the tokenizer lies beside no policy whose thinking a marker ends.
    """

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        self._fmt = fmt = _format_of(str(tokenizer.name_or_path))
        if not fmt.format.think_end or fmt.channels is not None:
            raise ValueError(
                f"--reasoning-parser {PARSER}: of the format {fmt.format.name!r}, no marker alone "
                f"ends the thinking (think_end {fmt.format.think_end!r}): leave the option to "
                "`ospruner serve`"
            )
        self._ends = (fmt.format.think_end, *(fmt.texts[i].strip() for i in fmt.call_ids))
        super().__init__(tokenizer, *args, **kwargs)

    def adjust_request(self, request: Any) -> Any:
        """Keeps special tokens in the reply's text where the markers are such."""
        added = self.model_tokenizer.added_tokens_decoder
        if any(added[i].special for i in (*self._fmt.think_end_ids, *self._fmt.reentry_ids)):
            request.skip_special_tokens = False
        return request

    def has_engine_confirmed_reasoning_end(self) -> bool:
        """Whether all that follows is the answer, where calls of tools are looked for."""
        return self._ended

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Whether an answer is being written: from there on, a grammar holds."""
        return self._fmt.thinking_span(input_ids).closed

    def is_reasoning_end_streaming(
        self, input_ids: Sequence[int], delta_ids: Iterable[int]
    ) -> bool:
        """The same after a step, whose tokens are `delta_ids`; most cannot end it."""
        fmt = self._fmt
        turns = fmt.end_marker is not None or not fmt.added_ids.isdisjoint(delta_ids)
        return turns and self.is_reasoning_end(input_ids)

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        """The tokens of the answer."""
        state = follow(self._fmt, [], input_ids)
        return input_ids[state.thinking_tokens + state.end_tokens :] if state.ended else []

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """The tokens of the thinking, without the markers; none where the prompt has ended it."""
        if self.closed:
            return 0
        kept, start = token_ids[: self._fmt.thinking_span(token_ids, 0).end], self._fmt.start_marker
        places = [] if start is None else start.places(kept)
        opened = sum(token in self._fmt.reentry_ids for token in kept)
        return len(kept) - opened - sum(after - first for first, after in places)

    def _begin(self) -> None:
        super()._begin()
        self._begun = self._ended = self.closed  # after the start marker, and after the end marker

    def _split(self, text: str, final: bool) -> tuple[str, str]:
        if self._ended:
            return "", text
        text, self._held = self._held + text, ""
        start, end = self._fmt.format.think_start, self._fmt.format.think_end
        if not self._begun:
            if start.startswith(text) and not final:
                self._held = text
                return "", ""
            self._begun, text = True, text.removeprefix(start)
        found = [(text.index(one), one) for one in self._ends if one in text]
        if found:
            at, first = min(found)
            self._ended = True  # a call stands in the answer, its opening included
            return text[:at], text[at + len(end) :] if first == end else text[at:]
        if final:
            return text, ""
        half = max(n for one in self._ends for n in range(len(one)) if text.endswith(one[:n]))
        self._held = text[len(text) - half :]
        return text[: len(text) - half], ""


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
        super().__init__(tokenizer, *args, **kwargs)
        texts = {f"<|{name}|>": name for name in _MARKERS}
        self._markers = {self.vocab[text]: texts[text] for text in texts if text in self.vocab}

    def adjust_request(self, request: Any) -> Any:
        """Keeps special tokens in the reply's text."""
        request.skip_special_tokens = False
        return request

    def has_engine_confirmed_reasoning_end(self) -> bool:
        """Never: vLLM would pass on what follows as it is, markers included."""
        return False

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
        self._messages = self._opened()
        self._filled: set[str] = set()  # the kinds of the bodies so far that hold text
        self._fresh = False  # after a marker, before text

    def _split(self, text: str, final: bool) -> tuple[str, str]:
        text, self._held = self._held + text, ""
        if not final and (half := _HALF_MARKER.search(text)):
            text, self._held = text[: half.start()], half[0]
        found = {_THINKING: "", _ANSWER: "", "": ""}
        first, *pieces = _MARKER.split(text)
        for marker, piece in [("", first), *zip(pieces[::2], pieces[1::2], strict=True)]:
            if marker:
                self._messages.meet(marker)
                self._fresh = True
            if piece:
                kind = self._messages.write(piece)
                between = "\n" if self._fresh and kind in self._filled else ""
                found[kind] += between + piece
                self._filled.add(kind)
                self._fresh = False
        return found[_THINKING], found[_ANSWER]

    def _opened(self) -> _Messages:
        """What the prompt has left open."""
        return _Messages(_ANSWER if self.closed else _THINKING)

    def _read(self, ids: Sequence[int], messages: _Messages) -> tuple[list[str], _Messages]:
        """For each token, what the body is in which it stands, and where it all ends."""
        kinds = list[str]()
        for token in ids:
            if (marker := self._markers.get(token)) is not None:
                messages.meet(marker)
                kinds.append("")
            else:
                inside = messages.kind is not None
                kinds.append(messages.write("" if inside else self.model_tokenizer.decode([token])))
        return kinds, messages
