r"""How a vLLM server splits a policy's chat replies into thinking and answer.

vLLM's own parser of `<think>...</think>` counts what follows a `<think>` in the text alone; the
chat templates of R1-Distill and the like write it into the prompt, and `usage` would say 0. Its own
parser of Harmony is bound to models whose type is gpt_oss, which a policy's is not.

Not openai-harmony's `StreamableParser` (tried: 0.0.11): it reads token ids, and vLLM gives
`extract_reasoning` text alone; of a reply that goes on in an analysis which the prompt has opened
it drops the thinking, or raises.
"""

from __future__ import annotations

import copy
import functools
import re
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from transformers import AutoTokenizer
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.reasoning import ReasoningParser
from vllm.reasoning.deepseek_r1_reasoning_parser import DeepSeekR1ReasoningParser

from modeling_ospruner.configuration_ospruner import OSPrunerConfig
from modeling_ospruner.formats_ospruner import ReasoningFormat, TokenFormat
from ospruner.formats import follow

__all__ = ["HarmonyThinkingParser", "MarkerThinkingParser", "ThinkingParser"]

_MARKERS = ("start", "channel", "constrain", "message", "end", "return", "call")
_MARKER = re.compile(rf"<\|({'|'.join(_MARKERS)})\|>")
_HALF_MARKER = re.compile(r"<(\|[a-z]*\|?)?\Z")  # of which the next part of a stream decides
_THINKING, _ANSWER = "thinking", "answer"
_CHANNELS = {"analysis": _THINKING, "final": _ANSWER, "commentary": _ANSWER}


class ThinkingParser(DeepSeekR1ReasoningParser):
    """`--reasoning-parser ospruner`."""

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """The tokens before the end marker; all, where there is none."""
        ids = list(token_ids)
        thinking = ids[: ids.index(self.end_token_id)] if self.end_token_id in ids else ids
        return len(thinking) - thinking.count(self.start_token_id)


class _SplittingParser(ReasoningParser):
    """Splits a reply's text, whole or as it comes."""

    engine_based_streaming = True  # the answer's part of a stream comes here too

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, *args, **kwargs)
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

    def has_engine_confirmed_reasoning_end(self) -> bool:
        """Never: vLLM would pass on what follows as it is, markers included."""
        return False

    def _delta(self, text: str, final: bool) -> DeltaMessage | None:
        thinking, answer = self._split(text, final)
        if not thinking and not answer:
            return None
        return DeltaMessage(reasoning=thinking or None, content=answer or None)


@functools.cache  # a parser is made for each request
def _format_of(policy: str) -> TokenFormat:
    config = OSPrunerConfig.from_pretrained(policy)
    tokenizer = AutoTokenizer.from_pretrained(policy, config=config)
    return TokenFormat.compile(ReasoningFormat.from_dict(config.reasoning_format or {}), tokenizer)


class MarkerThinkingParser(_SplittingParser):
    """`--reasoning-parser ospruner_markers`, where what ends the thinking is several tokens.

    The policy's format says which.

    Raises:
        ValueError: the tokenizer lies beside no policy whose thinking such a marker ends.
    """

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, *args, **kwargs)
        self._fmt = fmt = _format_of(str(tokenizer.name_or_path))
        if fmt.end_marker is None or not fmt.format.think_end:
            raise ValueError(
                f"--reasoning-parser ospruner_markers: of the format {fmt.format.name!r}, no marker"
                f" of several tokens ends the thinking (think_end {fmt.format.think_end!r}): leave "
                "the option to `ospruner serve`"
            )

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Whether an answer is being written: from there on, a grammar holds."""
        return self._fmt.thinking_span(input_ids).closed

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        """The tokens of the answer."""
        state = follow(self._fmt, [], input_ids)
        return input_ids[state.thinking_tokens + state.end_tokens :] if state.ended else []

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """The tokens of the thinking, without the markers."""
        tokens = self._fmt.thinking_span(token_ids, 0).end
        start = self._fmt.start_marker
        places = [] if start is None else start.places(token_ids[:tokens])
        return tokens - sum(after - first for first, after in places)

    def _begin(self) -> None:
        super()._begin()
        self._begun = self._ended = False  # after the start marker, and after the end marker

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
        thinking, found, answer = text.partition(end)
        self._ended = bool(found)
        if not found and not final:
            half = max(n for n in range(len(end)) if text.endswith(end[:n]))
            thinking, self._held = text[: len(text) - half], text[len(text) - half :]
        return thinking, answer


class _Messages:
    """A turn of several messages as it is written.

    Attributes:
        kind: of the message in whose body it is; "" of one that is left out, None in a header.
    """

    def __init__(self) -> None:
        self.kind: str | None = _THINKING  # text under no header
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

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Whether an answer is being written: from there on, a grammar holds."""
        return self._read(input_ids)[1].kind == _ANSWER

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        """The tokens of the answer."""
        kinds, _ = self._read(input_ids)
        return [token for token, kind in zip(input_ids, kinds, strict=True) if kind == _ANSWER]

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """The tokens of the thinking, without markers and headers."""
        return self._read(token_ids)[0].count(_THINKING)

    def _begin(self) -> None:
        super()._begin()
        self._messages = _Messages()
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

    def _read(self, ids: Sequence[int]) -> tuple[list[str], _Messages]:
        """For each token, what the body is in which it stands, and where it all ends."""
        messages, kinds = _Messages(), list[str]()
        for token in ids:
            if (marker := self._markers.get(token)) is not None:
                messages.meet(marker)
                kinds.append("")
            else:
                inside = messages.kind is not None
                kinds.append(messages.write("" if inside else self.model_tokenizer.decode([token])))
        return kinds, messages
