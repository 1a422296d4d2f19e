"""A headless chromium, driven over the W3C WebDriver protocol by Debian's chromedriver."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from typing import Any

_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's name of a reference


class Browser:
    """One window, by the programs of a browser and its driver; a context manager."""

    def __init__(self, chromium: str, driver: str) -> None:
        self._driver = subprocess.Popen(
            [driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        said: Any = self._driver.stdout
        started = (re.search(r"started successfully on port (\d+)", line) for line in said)
        port = next((found[1] for found in started if found), None)
        if port is None:
            raise RuntimeError("chromedriver did not start")
        self._address = f"http://127.0.0.1:{port}/session"
        arguments = ["--headless=new", "--no-sandbox", "--window-size=1280,1000"]
        capabilities = {
            "browserName": "chrome",
            "goog:chromeOptions": {"binary": chromium, "args": arguments},
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        try:
            session = self._call("POST", "", {"capabilities": {"alwaysMatch": capabilities}})
        except BaseException:
            self._driver.kill()
            raise
        self._address += f"/{session['sessionId']}"

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._call("DELETE", "")
        finally:
            self._driver.kill()
            self._driver.wait()

    def open(self, address: str) -> None:
        """Loads a page anew, also where only its fragment differs."""
        self._call("POST", "/url", {"url": "about:blank"})
        self._call("POST", "/url", {"url": address})

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        return self._call("POST", "/execute/sync", {"script": f"return {script}", "args": []})

    def text(self, selector: str) -> str:
        """What a reader sees of an element."""
        return str(self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    def click(self, selector: str) -> None:
        """A real click."""
        found = self._call("POST", "/element", {"using": "css selector", "value": selector})
        self._call("POST", f"/element/{found[_ELEMENT]}/click", {})

    def press(self, *keys: str) -> None:
        """Real key presses, to whatever has the focus."""
        each = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._call("POST", "/actions", {"actions": [{"type": "key", "id": "k", "actions": each}]})

    def resize(self, width: int, height: int) -> None:
        """Changes the window."""
        self._call("POST", "/window/rect", {"width": width, "height": height})

    def errors(self) -> list[str]:
        """What the page complained of since it was last asked."""
        log = self._call("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in log if entry["level"] == "SEVERE"]

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._address + path, data, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=300) as reply:
            return json.load(reply)["value"]
