"""The report in a real browser: Debian's chromium with its driver, headless, no network."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs

import pytest

from ospruner.eval.html_report import write_report

from .evaluations import make_evaluation

pytestmark = pytest.mark.slow

webdriver = pytest.importorskip("selenium.webdriver")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("report")
    make_evaluation(with_views=True).save(folder / "a")
    make_evaluation(benchmark="MATH-500", seed=1, with_views=True).save(folder / "b")
    return write_report(folder)[0].as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("no chromium here: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in ("--headless=new", "--no-sandbox", "--window-size=1280,1000"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driven = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield driven
    driven.quit()


def keys(browser: object, text: str) -> None:
    webdriver.ActionChains(browser).send_keys(text).perform()


def shot(browser: object, name: str) -> None:
    """Keeps a screenshot where OSPRUNER_SCREENSHOTS names a folder."""
    if folder := os.environ.get("OSPRUNER_SCREENSHOTS"):
        browser.save_screenshot(str(Path(folder) / f"{name}.png"))  # type: ignore[attr-defined]


def test_tables_sort_by_a_click_and_by_keyboard(browser: object, page: str) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    b: webdriver.Chrome = browser  # type: ignore[name-defined]
    b.get(page)
    shot(b, "top")
    table = b.find_elements(By.CSS_SELECTOR, "#e1 table")[0]
    heading = table.find_elements(By.CSS_SELECTOR, "th button")[2]  # thinking tokens

    def column() -> list[float]:
        cells = table.find_elements(By.CSS_SELECTOR, "tbody td:nth-child(3)")
        return [float(cell.get_attribute("data-value")) for cell in cells]

    before = column()
    heading.click()
    assert column() == sorted(before)
    assert table.find_elements(By.CSS_SELECTOR, "th[aria-sort=ascending]")
    heading.send_keys(Keys.ENTER)
    assert column() == sorted(before, reverse=True)
    assert [e for e in b.get_log("browser") if e["level"] == "SEVERE"] == []


def test_the_viewer_answers_to_keys_and_names_what_it_shows(browser: object, page: str) -> None:
    from selenium.webdriver.common.by import By

    b: webdriver.Chrome = browser  # type: ignore[name-defined]
    b.get("about:blank")
    b.get(page + "#traces")

    def shown() -> dict[str, str]:
        return {k: v[0] for k, v in parse_qs(b.current_url.partition("#")[2]).items()}

    keys(b, "m")
    assert shown()["method"] == "OS-Pruner λ=1e-4"
    assert b.find_element(By.ID, "saved").text == (
        "OS-Pruner λ=1e-4 saves 22 of 40 thinking tokens."
    )
    keys(b, "s")
    assert shown()["step"] == "2"
    assert b.find_element(By.CSS_SELECTOR, "[aria-current=true]").get_attribute("id") == "step-2"
    bar = b.find_element(By.CSS_SELECTOR, "#step-2 .bar")
    assert bar.get_attribute("aria-label") == "stop probability 0.700"
    filled = bar.find_element(By.TAG_NAME, "span").size["width"] / bar.size["width"]
    assert abs(filled - 0.7) < 0.03
    assert "stops here: OS-Pruner λ=1e-4" in b.find_element(By.ID, "step-2").text
    assert "✓ right" in b.find_element(By.ID, "step-2").text
    assert "✗ wrong" in b.find_element(By.ID, "step-3").text
    assert "</script><b>x</b>" in b.find_element(By.ID, "step-1").text
    shot(b, "viewer")
    keys(b, "j")
    assert shown()["trace"] == "p1/0"
    keys(b, "k")
    assert shown()["trace"] == "p0/0"


def test_an_address_shows_its_trace_method_and_step(browser: object, page: str) -> None:
    from selenium.webdriver.common.by import By

    b: webdriver.Chrome = browser  # type: ignore[name-defined]
    b.get("about:blank")
    name = "DeepSeek-R1-Distill-Qwen-7B%2C+MATH-500%2C+forced%2C+replay"
    b.get(f"{page}#evaluation={name}&trace=p1%2F0&method=OS-Pruner+%CE%BB%3D1e-4&step=2")
    picked = b.find_element(By.ID, "pick-evaluation").get_attribute("value")
    assert picked == "1"
    assert "What is 6*7?" in b.find_element(By.ID, "trace").text
    assert b.find_element(By.CSS_SELECTOR, "[aria-current=true]").get_attribute("id") == "step-2"
    assert "not graded" in b.find_element(By.ID, "step-2").text
    assert "cut at the token cap" in b.find_element(By.ID, "trace").text


def test_it_fits_a_narrow_window(browser: object, page: str) -> None:
    b: webdriver.Chrome = browser  # type: ignore[name-defined]
    b.set_window_size(500, 900)
    b.get(page + "#traces")
    wide = b.execute_script("return document.documentElement.scrollWidth - window.innerWidth")
    shot(b, "narrow")
    b.set_window_size(1280, 1000)
    assert wide <= 0
