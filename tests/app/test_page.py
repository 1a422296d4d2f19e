"""The page as its own client asks it: both columns, errors in words, nothing from elsewhere."""

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from ospruner.app.columns import Columns, LocalSource, Question
from ospruner.app.web import running_app
from ospruner.demo.shipped import Reasoner
from ospruner.train.untrained import untrained

gradio_client = pytest.importorskip(
    "gradio_client", reason="Gradio is not installed: pip install 'ospruner[app]'"
)
QUESTION = "Tom has 45 cards. Tom buys 17. The total grows 3 times. How many cards does Tom have?"
KNOBS = (None, None, 0.6, 0, 300)  # price, budget, temperature, seed, most tokens


class Gone:
    """A source whose server went away, of a policy of every price."""

    policy = "org/policy"
    positions: int | None = 512
    prices: tuple[float, float] | None = (0.0, 1e-3)

    def ask(self, question: Question, pruned: bool) -> Columns:
        raise ConnectionError(f"the server is gone: start it again; {question.stop_policy}")
        yield

    def answer_now(self) -> None:
        raise AssertionError("nobody asks")


@pytest.fixture(scope="module")
def address(reasoner: Reasoner) -> Iterator[str]:
    model = untrained(reasoner.model, reasoner.tokenizer, init_bias=-0.5, tuning="layers")
    with running_app(LocalSource(model, "policy")) as url:
        yield url


def asked(url: str, *values: Any) -> list[str]:
    """The columns as they grow."""
    job = gradio_client.Client(url, verbose=False).submit(*values, api_name="/ask")
    job.result()
    return [str(one) for one in job.outputs()]


def test_two_columns_stream(address: str) -> None:
    first, *_, last = asked(address, QUESTION, *KNOBS)
    assert "saved" not in first
    for words in ("saved", "stopped by the policy", "osp-spared", "\\boxed{"):
        assert words in last


def test_errors_say_what_to_do_and_a_price_has_its_knob(address: str) -> None:
    with pytest.raises(gradio_client.exceptions.AppError, match="question is empty: write one"):
        asked(address, " ", *KNOBS)
    with (
        running_app(Gone()) as url,
        pytest.raises(gradio_client.exceptions.AppError, match="start it again; {'price': 0.0005"),
    ):
        asked(url, "1+4?", 5e-4, *KNOBS[1:])


def test_nothing_is_asked_of_others(address: str) -> None:
    named = re.findall(r"(?:src|href)=\"(https?://[^\"]+)", httpx.get(address).text)
    assert [one for one in named if not one.startswith(address)] == []
