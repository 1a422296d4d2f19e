"""Ends of thinking that are several tokens, as engines find them."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from modeling_ospruner.formats_ospruner import TokenFormat
from ospruner.demo.shipped import Reasoner
from ospruner.engines.http import OpenAIEngine, SGLangEngine
from ospruner.engines.interface import Engine, Sampled

from .conftest import GREEDY, Traces
from .local_server import LocalServer


@pytest.fixture(scope="module")
def server(reasoner: Reasoner) -> Iterator[LocalServer]:
    with LocalServer(reasoner) as one:
        yield one


@pytest.fixture(params=["transformers", "openai", "sglang"])
def engine(request: pytest.FixtureRequest, reasoner: Reasoner, server: LocalServer) -> Engine:
    if request.param == "transformers":
        return reasoner.engine
    opened = {"openai": OpenAIEngine, "sglang": SGLangEngine}[request.param]
    return opened(str(reasoner.folder), reasoner.tokenizer, [server.url])


def test_a_trace_ends_where_its_text_holds_the_marker(
    engine: Engine, reasoner: Reasoner, traces: Traces
) -> None:
    """A greedy trace's own text is made the marker: all before it stays, the answer follows."""
    tokenizer = reasoner.tokenizer
    whole = traces.sampled[0]
    ids = [*whole.trace_ids, reasoner.token_format.think_end_id, *whole.answer_ids]
    for size in (2, 3):
        literal, at = "", 0
        for at in range(8, len(whole.trace_ids) - size):
            literal = str(tokenizer.decode(ids[at : at + size]))
            before = str(tokenizer.decode(ids[: at + size - 1]))
            if "\n" not in literal and literal.isascii() and literal not in before:
                break
        form = replace(reasoner.token_format.format, think_end=literal, closing=f"{literal}\n")
        fmt = TokenFormat.compile(form, tokenizer)
        assert fmt.end_marker is not None
        after = ids[at + size :][: GREEDY.max_answer_tokens]
        expected = Sampled(ids[:at], after, "natural", ids[at : at + size])
        assert engine.sample([traces.prompts[0]], GREEDY, fmt) == [expected]
        short = replace(GREEDY, max_new_tokens=at)
        assert engine.sample([traces.prompts[0]], short, fmt) == [Sampled(ids[:at], [], "cap")]
    absent = replace(reasoner.token_format.format, think_end="</none>", closing="</none>\n")
    fmt = TokenFormat.compile(absent, tokenizer)
    (told,) = engine.sample([traces.prompts[0]], GREEDY, fmt)
    assert (told.trace_ids, told.ended, told.end_ids) == (ids, "natural", [])


def test_what_a_server_takes_for_the_marker_is_looked_at(
    reasoner: Reasoner, traces: Traces, server: LocalServer
) -> None:
    """Markers are found by their text: a token that holds more than the marker ends it, too."""
    whole = traces.sampled[0]
    fmt = reasoner.token_format
    spelled = TokenFormat.compile(
        replace(fmt.format, think_end="/think>", closing="/think>\n"), reasoner.tokenizer
    )
    before = len(server.prompts)
    asking = OpenAIEngine(str(reasoner.folder), reasoner.tokenizer, [server.url])
    (told,) = asking.sample([traces.prompts[0]], GREEDY, spelled)
    assert (told.trace_ids, told.end_ids) == (whole.trace_ids, [fmt.think_end_id])
    assert len(server.prompts) > before
