"""The page in a real browser; needs chromium."""

import shutil
import time
from collections.abc import Callable, Iterator

import pytest

from ospruner.app.columns import Columns, LocalSource, Question, ServedSource
from ospruner.app.web import running_app
from ospruner.demo.shipped import Reasoner
from ospruner.train.untrained import untrained

from ..browser import Browser

pytestmark = pytest.mark.slow
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
QUESTION = "Tom has 45 cards. Tom buys 17. The total grows 3 times. How many cards does Tom have?"


class Gone(ServedSource):
    """A source whose server went away, of a policy of every price."""

    prices = (0.0, 1e-3)

    def __init__(self) -> None:
        self.policy, self.positions = "org/policy", 512

    def ask(self, question: Question, pruned: bool) -> Columns:
        raise ConnectionError(f"the server is gone: start it again; {question.stop_policy}")
        yield


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    pytest.importorskip("gradio", reason="Gradio is not installed: pip install 'ospruner[app]'")
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("no chromium here: apt-get install chromium chromium-driver")
    with Browser(CHROMIUM, DRIVER) as opened:
        yield opened


@pytest.fixture(scope="module")
def address(browser: Browser, reasoner: Reasoner) -> Iterator[str]:
    model = untrained(reasoner.model, reasoner.tokenizer, init_bias=-0.5, tuning="layers")
    with running_app(LocalSource(model, "policy")) as url:
        yield url


def until(what: Callable[[], bool], seconds: float = 20) -> None:
    """Waits for the page."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "the page did not come to it"
        time.sleep(0.05)


def ready(browser: Browser, url: str, width: int = 1280, height: int = 1000) -> None:
    browser.resize(width, height)
    browser.open(url)
    until(lambda: browser.run("document.querySelectorAll('#ask, .osp-column').length") == 3)


def write(browser: Browser, text: str) -> None:
    browser.click("#question textarea")
    browser.press(*text)


def test_two_columns_stream_and_light_up(browser: Browser, address: str) -> None:
    ready(browser, address)
    assert not browser.run("document.querySelector('#price')?.offsetParent"), "λ is fixed"
    write(browser, QUESTION)
    browser.click("#ask")
    until(lambda: browser.run("document.querySelectorAll('.osp-chip').length") >= 1)
    assert "thinking…" in browser.text(".osp-pruned")
    until(lambda: "saved" in browser.text(".osp-summary"))
    assert "stopped by the policy" in browser.text(".osp-pruned")
    for kind in ("plain", "pruned"):
        assert "\\boxed{" in browser.text(f".osp-{kind} .osp-answer")
    assert browser.run("document.querySelectorAll('.osp-plain .osp-spared').length") > 0
    tops = "[...document.querySelectorAll('.osp-column')].map(e => e.getBoundingClientRect().top)"
    left, right = browser.run(tops)
    assert left == right, "side by side"
    assert browser.errors() == []


def test_a_narrow_window_needs_no_scrolling_sideways(browser: Browser, address: str) -> None:
    ready(browser, address, 390, 844)
    browser.run("document.querySelectorAll('.gallery-item')[0].click()")
    until(lambda: "3x+54" in browser.run("document.querySelector('#question textarea').value"))
    browser.click("#ask")
    until(lambda: "saved" in browser.text(".osp-summary"))
    time.sleep(0.5)  # it scrolls smoothly
    assert browser.run("document.documentElement.scrollWidth <= window.innerWidth")
    shown = "document.querySelector('.osp-summary').getBoundingClientRect().top"
    assert 0 <= browser.run(f"{shown}") < 400, "what was asked for is in sight"


def test_nothing_is_asked_of_others(browser: Browser, address: str) -> None:
    ready(browser, address)
    asked = browser.run("performance.getEntriesByType('resource').map(one => one.name)")
    named = "[...document.querySelectorAll('link, script, img')].map(e => e.href || e.src || '')"
    others = [a for a in (*asked, *browser.run(named)) if a and not a.startswith(address)]
    assert [one for one in others if not one.startswith(("data:", "blob:"))] == []


def test_errors_say_what_to_do_and_a_price_has_its_knob(browser: Browser) -> None:
    with running_app(Gone()) as url:
        ready(browser, url)
        browser.click("#ask")
        until(lambda: "The question is empty: write one" in browser.text("body"))
        ready(browser, url)
        browser.click("#knobs button")
        until(lambda: bool(browser.run("document.querySelector('#price input')?.offsetParent")))
        browser.click("#price input")
        browser.press(*"0.0005")
        write(browser, "1+4?")
        browser.click("#ask")
        until(lambda: "the server is gone: start it again" in browser.text("body"))
        assert "'price': 0.0005" in browser.text("body")
