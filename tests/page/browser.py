"""A headless Chromium for tests, controlled by WebDriver over HTTP: only Debian's chromium and chromium-driver.

    with Browser() as browser:
        browser.open("http://127.0.0.1:9710/")
        browser.text("#hit-rate")

The protocol is a dozen JSON requests (https://www.w3.org/TR/webdriver2/), so no client library is needed. Every wait
is bounded. Both processes end with the block.
"""

import base64
import json
import os
import re
import shutil
import subprocess
import tempfile
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

WAIT_S = 60.0
DRIVER, CHROMIUM = shutil.which("chromedriver"), shutil.which("chromium")
MISSING = "" if DRIVER and CHROMIUM else "no browser: apt-get install chromium chromium-driver"
KEYS = {"Left": "\ue012", "Right": "\ue014", "Tab": "\ue004", "Escape": "\ue00c", "Space": " "}


class Browser:
    """One window."""

    def __init__(self, *, width: int = 1280, height: int = 900) -> None:
        assert not MISSING, MISSING
        assert DRIVER is not None
        self._folder = Path(tempfile.mkdtemp(prefix="kv-browser-"))
        with (self._folder / "log").open("wb") as log:
            self._driver = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=log)
        self._session = ""
        self._scripts: list[str] = []
        try:
            self._address = f"http://127.0.0.1:{self._port()}"
            self._session = f"/session/{self._begin(width, height)['sessionId']}"
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Browser":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the browser, then the driver."""
        try:
            if self._session:
                self._ask("DELETE", "")
        finally:
            self._driver.terminate()
            self._driver.wait(WAIT_S)
            if self._driver.stdout is not None:
                self._driver.stdout.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    def open(self, address: str) -> None:
        self._ask("POST", "/url", {"url": address})

    def run(self, script: str, *arguments: object) -> Any:
        """Calls a JavaScript function body with the arguments; returns its result."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def text(self, selector: str) -> str:
        """The text of the first matching element."""
        return str(self.run("return document.querySelector(arguments[0]).innerText", selector))

    def sees(self, selector: str) -> bool:
        """True if the first matching element is visible on the page."""
        return bool(self.run("return document.querySelector(arguments[0]).getClientRects().length", selector))

    def table(self, selector: str) -> dict[str, list[str]]:
        """Rows of a table's body by the text of their first cell."""
        script = (
            "return [...document.querySelector(arguments[0]).rows].map(row => [...row.cells].map(c => c.textContent))"
        )
        return {cells[0]: cells[1:] for cells in self.run(script, selector)}

    def press(self, *names: str) -> None:
        """Presses keys, one by one, with the present focus."""
        strokes = [{"type": way, "value": KEYS[name]} for name in names for way in ("keyDown", "keyUp")]
        self._ask("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": strokes}]})

    def before_each_page(self, script: str) -> None:
        """Runs a script in each page opened from now on, before the page's own; replaces the previous such script."""
        self.forget_scripts()
        begun = self._devtools("Page.addScriptToEvaluateOnNewDocument", {"source": script})
        self._scripts.append(begun["identifier"])

    def forget_scripts(self) -> None:
        while self._scripts:
            self._devtools("Page.removeScriptToEvaluateOnNewDocument", {"identifier": self._scripts.pop()})

    def resize(self, width: int, height: int) -> None:
        """Sets the page's own size, independent of the window's borders."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._devtools("Emulation.setDeviceMetricsOverride", metrics)

    def prefer(self, scheme: str) -> None:
        """Sets the colour scheme: light or dark."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self._devtools("Emulation.setEmulatedMedia", {"features": [feature]})

    def picture(self) -> bytes:
        """The window's content as PNG."""
        return base64.b64decode(self._ask("GET", "/screenshot"))

    def complaints(self) -> list[str]:
        """Browser complaints since the last call: failed scripts, policy violations.

        Failed requests are left out: stories end before their pages do.
        """
        messages = [entry["message"] for entry in self._ask("POST", "/se/log", {"type": "browser"})]
        return [message for message in messages if "Failed to load resource" not in message]

    def _port(self) -> int:
        assert self._driver.stdout is not None
        for line in self._driver.stdout:
            if found := re.search(rb"started successfully on port (\d+)", line):
                return int(found[1])
        raise RuntimeError(f"{DRIVER} did not start: {(self._folder / 'log').read_text()}")

    def _begin(self, width: int, height: int) -> dict[str, Any]:
        arguments = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", f"--window-size={width},{height}"]
        arguments += [f"--user-data-dir={self._folder}/profile", "--hide-scrollbars", "--lang=en-US"]
        arguments += [
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--disable-quic",
        ]
        arguments += ["--no-first-run"]
        if os.geteuid() == 0:  # root has no sandbox; the page is our own
            arguments.append("--no-sandbox")
        options = {"binary": CHROMIUM, "args": arguments}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        begun: dict[str, Any] = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        return begun

    def _devtools(self, command: str, parameters: dict[str, object]) -> Any:
        return self._ask("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The value of the answer. Raises RuntimeError with the message if it is an error."""
        text = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._address + self._session + path, text, method=method)
        try:
            with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            with error:
                raise RuntimeError(json.load(error)["value"]["message"]) from None
