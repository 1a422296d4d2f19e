r"""How a vLLM server splits a policy's chat replies into thinking and answer.

vLLM's own parser of `<think>...</think>` counts what follows a `<think>` in the text alone; the
chat templates of R1-Distill and the like write it into the prompt, and `usage` would say 0. Its own
parser of Harmony is bound to models whose type is gpt_oss, which a policy's is not.

Not openai-harmony's `StreamableParser` (tried: 0.0.11): it reads token ids, and vLLM gives
`extract_reasoning` text alone; of a reply that goes on in an analysis which the prompt has opened
it drops the thinking, or raises.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.reasoning import ReasoningParser
from vllm.reasoning.deepseek_r1_reasoning_parser import DeepSeekR1ReasoningParser

from modeling_ospruner.configuration_ospruner import OSPrunerConfig
from modeling_ospruner.formats_ospruner import ReasoningFormat, TokenFormat
from ospruner.formats import follow

__all__ = ["HarmonyThinkingParser", "MarkerThinkingParser", "ThinkingParser"]

_MARKER = re.compile(r"<\|(start|channel|constrain|message|end|return|call)\|>")
_THINKING, _ANSWER = "thinking", "answer"
_HALF_MARKER = re.compile(r"<(\|[a-z]*\|?)?\Z")  # of which the next part of a stream decides


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
        self._text = ""
        self._sent = [0, 0]  # characters of thinking and answer

    def _split(self, text: str, final: bool) -> tuple[str, str]:
        """The thinking and the answer; unless `final`, without what may become a marker."""
        raise NotImplementedError

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        """The thinking and the answer of a whole reply."""
        thinking, answer = self._split(model_output, True)
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
        """What has come to either since the last call."""
        self._text += delta_text  # vLLM gathers none for parsers with `engine_based_streaming`
        return self._send(False)

    def finish_streaming(self) -> DeltaMessage | None:
        """What was held back, because it looked like a part of a marker."""
        return self._send(True)

    def has_engine_confirmed_reasoning_end(self) -> bool:
        """Never: vLLM would pass on what follows as it is, markers included."""
        return False

    def _send(self, final: bool) -> DeltaMessage | None:
        wholes = self._split(self._text, final)
        parts = [part[sent:] for part, sent in zip(wholes, self._sent, strict=True)]
        self._sent = [sent + len(part) for part, sent in zip(parts, self._sent, strict=True)]
        return _delta(*parts)


class MarkerThinkingParser(_SplittingParser):
    """`--reasoning-parser ospruner_markers`, where what ends the thinking is several tokens.

    The policy's format says which.

    Raises:
        ValueError: the tokenizer lies beside no policy whose thinking such a marker ends.
    """

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, *args, **kwargs)
        literals = _literals(str(tokenizer.name_or_path))
        if literals not in _FORMATS:  # once a server: a parser is made for each request
            form = ReasoningFormat.from_dict(dict(literals))
            _FORMATS[literals] = TokenFormat.compile(form, tokenizer)
        fmt = _FORMATS[literals]
        if fmt.end_marker is None or not fmt.format.think_end:
            raise ValueError(
                f"--reasoning-parser ospruner_markers: of the format {fmt.format.name!r}, no marker"
                f" of several tokens ends the thinking (think_end {fmt.format.think_end!r}): leave "
                "the option to `ospruner serve`"
            )
        self._fmt = fmt
        self._end = fmt.end_marker.literal
        self._start = fmt.format.think_start

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

    def _split(self, text: str, final: bool) -> tuple[str, str]:
        if self._start and text.startswith(self._start):
            text = text[len(self._start) :]
        elif not final and self._start.startswith(text):
            return "", ""
        thinking, end, answer = text.partition(self._end)
        if not end and not final:
            held = max(n for n in range(len(self._end)) if text.endswith(self._end[:n]))
            thinking = thinking[: len(thinking) - held]
        return thinking, answer


_FORMATS: dict[tuple[tuple[str, str], ...], TokenFormat] = {}  # by literals


@functools.cache
def _literals(folder: str) -> tuple[tuple[str, str], ...]:
    """The literals of a policy's format, by its folder or Hub id."""
    return tuple((OSPrunerConfig.from_pretrained(folder).reasoning_format or {}).items())


class HarmonyThinkingParser(_SplittingParser):
    """`--reasoning-parser ospruner_harmony`, for a policy on GPT-OSS.

    Messages of the analysis channel are thinking, as is text under no header. Those of the final
    channel, and of the commentary where it is addressed to nobody, are the answer. Others, calls
    of tools, are left out. Special tokens are kept in the text, for by them it is split.
    """

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, *args, **kwargs)
        self._markers = {
            self.vocab[text]: name
            for name in ("start", "channel", "constrain", "message", "end", "return", "call")
            if (text := f"<|{name}|>") in self.vocab
        }
        self._open = ""  # the kind of text that is being sent, where no marker has begun

    def adjust_request(self, request: Any) -> Any:
        """Keeps special tokens in the reply's text."""
        request.skip_special_tokens = False
        return request

    def extract_reasoning_streaming(
        self, previous_text: str, current_text: str, delta_text: str, *ids: Sequence[int]
    ) -> DeltaMessage | None:
        """What has come to either since the last call."""
        if self._open and "<" not in delta_text:  # without a look at all that came before
            self._text += delta_text
            self._sent[self._open == _ANSWER] += len(delta_text)
            return _delta(*((delta_text, "") if self._open == _THINKING else ("", delta_text)))
        return super().extract_reasoning_streaming(previous_text, current_text, delta_text, *ids)

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Whether an answer is being written: from there on, a grammar holds."""
        return self._kinds([*input_ids, -1])[-1] == _ANSWER  # where a further token would stand

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        """The tokens of the answer."""
        kinds = self._kinds(input_ids)
        return [token for token, kind in zip(input_ids, kinds, strict=True) if kind == _ANSWER]

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """The tokens of the thinking, without markers and headers."""
        return self._kinds(token_ids).count(_THINKING)

    def _split(self, text: str, final: bool) -> tuple[str, str]:
        whole = text if final else _HALF_MARKER.sub("", text)
        first, *pieces = _MARKER.split(whole)
        found: dict[str, list[str]] = {_THINKING: [first], _ANSWER: [], "": []}
        header, kind, last = "", _THINKING, first
        for marker, last in zip(pieces[::2], pieces[1::2], strict=True):
            if marker == "message":
                kind, header = _kind(header), ""
                found[kind].append(last)
            else:
                kind = ""
                header = last if marker == "start" else f"{header} {last}"
        self._open = kind if last and whole == text else ""
        thinking, answer = (list(filter(None, found[one])) for one in (_THINKING, _ANSWER))
        return "\n".join(thinking), "\n".join(answer)

    def _kinds(self, ids: Sequence[int]) -> list[str]:
        """For each token, what the message is in whose body it stands; "" outside of bodies."""
        kinds: list[str] = []
        kind = _THINKING
        header: list[int] = []
        for token in ids:
            marker = self._markers.get(token)
            if marker == "message":
                kind = _kind(self.model_tokenizer.decode(header))
            elif marker is not None:
                kind = ""
                if marker == "start":
                    header = []
            elif not kind:
                header.append(token)
            kinds.append("" if marker else kind)
        return kinds


def _delta(thinking: str, answer: str) -> DeltaMessage | None:
    if not thinking and not answer:
        return None
    return DeltaMessage(reasoning=thinking or None, content=answer or None)


def _kind(header: str) -> str:
    """What a message is, by its header without markers: `assistant`, the channel, a recipient."""
    words = header.removeprefix("assistant").split()
    if not words or any(word.startswith("to=") for word in words):
        return ""
    return {"analysis": _THINKING, "final": _ANSWER, "commentary": _ANSWER}.get(words[0], "")
