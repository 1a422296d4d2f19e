"""The report in a real browser, by mouse and keyboard; no network."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from urllib.parse import parse_qs

import pytest

from ospruner.eval.report.page import write_report

from ..evaluations import save_comparison
from .browser import Browser

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("report")
    save_comparison(folder / "a", with_views=True)
    save_comparison(folder / "b", with_views=True, benchmark="MATH-500", seed=1)
    return write_report(folder)[0].as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no chromium here: apt-get install chromium chromium-driver")
    with Browser(chromium, driver) as opened:
        yield opened


def shown(browser: Browser) -> dict[str, str]:
    """What the address says."""
    return {k: v[0] for k, v in parse_qs(browser.address.partition("#")[2]).items()}


def test_tables_sort_by_a_click_and_by_keyboard(browser: Browser, page: str) -> None:
    browser.open(page)
    column = "[...document.querySelectorAll('#e1 table:first-of-type tbody tr')].map("
    column += "row => parseFloat(row.cells[2].textContent)).slice(0, 9)"
    before = browser.run(column)
    browser.click("#e1 table th:nth-child(3) button")
    after = browser.run(column)
    assert after == sorted(before)
    assert after != before
    assert browser.run("document.querySelectorAll('#e1 th[aria-sort=ascending]').length") == 1
    browser.press("Enter")  # the heading has the focus
    assert browser.run(column) == sorted(before, reverse=True)
    assert browser.errors() == []


def test_the_viewer_answers_to_keys_and_names_what_it_shows(browser: Browser, page: str) -> None:
    browser.open(page + "#traces")
    browser.press("m")
    assert shown(browser)["method"] == "OS-Pruner price=1e-4"
    assert browser.text("#saved") == "OS-Pruner price=1e-4 saves 22 of 40 thinking tokens."
    browser.press("s")
    assert shown(browser)["step"] == "2"
    assert browser.run("document.querySelector('[aria-current=true]').id") == "step-2"
    bar = "document.querySelector('#step-2 .bar')"
    assert browser.run(f"{bar}.getAttribute('aria-label')") == "stop probability 0.700"
    filled = browser.run(f"{bar}.firstChild.offsetWidth / {bar}.clientWidth")
    assert abs(filled - 0.7) < 0.03
    assert "stops here: OS-Pruner price=1e-4" in browser.text("#step-2")
    assert "✓ right" in browser.text("#step-2")
    assert "✗ wrong" in browser.text("#step-3")
    assert "</script><b>x</b>" in browser.text("#step-1")
    browser.press("ArrowDown")
    assert shown(browser)["step"] == "3"
    browser.press("ArrowUp", "ArrowUp")
    assert shown(browser)["step"] == "1"
    browser.press("j")
    assert shown(browser)["trace"] == "p1/0"
    browser.press("k")
    assert shown(browser)["trace"] == "p0/0"
    assert browser.errors() == []


def test_the_viewer_draws_what_going_on_pays(browser: Browser, page: str) -> None:
    browser.open(page + "#traces")
    assert browser.run("document.querySelector('.pays')") is None
    browser.press("m", "m")
    assert shown(browser)["method"] == "OS-Pruner, one policy price=1e-4"
    assert "goes on at every price" in browser.text("#step-1")
    assert "going on pays up to 1.0e-4 a token" in browser.text("#step-2")
    for step, filled in ((1, 1.0), (2, 0.6)):
        bar = f"document.querySelector('#step-{step} .pays')"
        found = browser.run(f"{bar}.firstChild.offsetWidth / {bar}.clientWidth")
        assert abs(found - filled) < 0.03
        line = browser.run(f"{bar}.lastChild.offsetLeft / {bar}.clientWidth")
        assert abs(line - 0.6) < 0.03  # the price
    assert browser.errors() == []


def test_a_methods_many_settings_stand_together(browser: Browser, page: str) -> None:
    browser.open(page + "#traces")
    browser.press("j", "j")
    assert shown(browser)["trace"] == "p2/0"
    rows = (
        "[...document.querySelectorAll('#trace table tbody tr')].map(r => r.cells[0].textContent)"
    )
    many = "OS-Pruner, one policy price=4e-4 · one of 7 settings"
    assert browser.run(rows) == ["full trace", many, "OS-Pruner price=1e-4"]
    label = "document.querySelector('#pick-method optgroup').label"
    assert browser.run(label) == "OS-Pruner, one policy"
    assert browser.run("document.querySelectorAll('#pick-method optgroup option').length") == 7
    browser.press("m")
    assert shown(browser)["method"] == "OS-Pruner, one policy price=4e-4"
    browser.press("]")
    assert shown(browser)["method"] == "OS-Pruner, one policy price=5e-4"
    assert browser.run(rows)[1].startswith("OS-Pruner, one policy price=5e-4")
    browser.press("[", "[", "[", "[", "[", "[")
    assert shown(browser)["method"] == "OS-Pruner, one policy price=1e-4"
    assert "OS-Pruner, one policy price=3e-4 to price=5e-4 (3)" in browser.text("#step-2")
    assert "stops here: OS-Pruner, one policy price=6e-4 to price=7e-4 (2)" in browser.text(
        "#step-1"
    )
    browser.press("m")
    assert shown(browser)["method"] == "OS-Pruner price=1e-4"
    browser.press("m")
    assert shown(browser)["method"] == "full trace"
    assert browser.errors() == []


def test_an_address_shows_its_trace_method_and_step(browser: Browser, page: str) -> None:
    name = "DeepSeek-R1-Distill-Qwen-7B%2C+MATH-500%2C+forced%2C+replay"
    browser.open(f"{page}#evaluation={name}&trace=p1%2F0&method=OS-Pruner+%CE%BB%3D1e-4&step=2")
    assert browser.run("document.querySelector('#pick-evaluation').value") == "1"
    assert "What is 6*7?" in browser.text("#trace")
    assert browser.run("document.querySelector('[aria-current=true]').id") == "step-2"
    assert "not graded" in browser.text("#step-2")
    assert "cut at the token cap" in browser.text("#trace")


def test_it_fits_a_narrow_window(browser: Browser, page: str) -> None:
    browser.resize(520, 900)
    browser.open(page + "#traces")
    wider = browser.run("document.documentElement.scrollWidth - window.innerWidth")
    browser.resize(1280, 1000)
    assert wider <= 0
