"""Debian's Chromium, driven through its chromedriver by plain HTTP (W3C WebDriver).

with Chromium(folder) as browser:
    browser.open("http://127.0.0.1:8081/")
    browser.find("button").click()
"""

from __future__ import annotations

import base64
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import httpx

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-proxy-server",
    "--disable-dev-shm-usage",
    "--force-color-profile=srgb",
)
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""Key of an element's id in a reply, as the standard has it."""
ENTER, TAB, SPACE = "\ue007", "\ue004", " "


def missing() -> str:
    """Say what is not installed; empty when a browser can be started."""
    lacking = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    advice = "apt-get install chromium chromium-driver"
    return f"no {' and no '.join(lacking)} here ({advice})" if lacking else ""


@dataclass(frozen=True, slots=True)
class Element:
    browser: Chromium
    name: str

    def click(self) -> None:
        self.browser.call("POST", f"element/{self.name}/click", {})

    def type(self, text: str) -> None:
        self.browser.call("POST", f"element/{self.name}/value", {"text": text})

    @property
    def text(self) -> str:
        return str(self.browser.call("GET", f"element/{self.name}/text"))

    @property
    def role(self) -> str:
        """The role that a screen reader says."""
        return str(self.browser.call("GET", f"element/{self.name}/computedrole"))

    @property
    def label(self) -> str:
        """The name that a screen reader says."""
        return str(self.browser.call("GET", f"element/{self.name}/computedlabel"))


class Chromium:
    """One browser with an empty profile, and one tab."""

    def __init__(self, profile: Path) -> None:
        self._profile = profile
        self._client = httpx.Client(timeout=60.0, trust_env=False)
        self._session = ""

    def __enter__(self) -> Self:
        # chromedriver says on its first lines which port it took.
        self._driver = subprocess.Popen(
            ["chromedriver", "--port=0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._driver.stdout is not None
        port = ""
        for line in self._driver.stdout:
            if "was started successfully on port" in line:
                port = line.strip().rstrip(".").rpartition(" ")[2]
                break
        self._url = f"http://127.0.0.1:{port}/session"
        options = {"args": [*FLAGS, f"--user-data-dir={self._profile}"]}
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        reply = self._client.post(self._url, json={"capabilities": {"alwaysMatch": wanted}})
        assert reply.status_code == 200, reply.text
        self._session = reply.json()["value"]["sessionId"]
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._session:
                self.call("DELETE", "")
        finally:
            self._client.close()
            self._driver.terminate()
            self._driver.communicate(timeout=30.0)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        url = f"{self._url}/{self._session}/{path}".rstrip("/")
        reply = self._client.request(method, url, json=body)
        assert reply.status_code == 200, reply.text[:500]
        return reply.json()["value"]

    def open(self, url: str) -> None:
        self.call("POST", "url", {"url": url})

    @property
    def url(self) -> str:
        return str(self.call("GET", "url"))

    def find(self, selector: str) -> Element:
        found = self.call("POST", "element", {"using": "css selector", "value": selector})
        return Element(self, found[_ELEMENT])

    def find_all(self, selector: str) -> list[Element]:
        found = self.call("POST", "elements", {"using": "css selector", "value": selector})
        return [Element(self, one[_ELEMENT]) for one in found]

    @property
    def focused(self) -> Element:
        return Element(self, self.call("GET", "element/active")[_ELEMENT])

    def press(self, keys: str) -> None:
        """Press keys where the focus is, one after the other."""
        actions = [one for key in keys for one in _stroke(key)]
        typed = {"type": "key", "id": "keys", "actions": actions}
        self.call("POST", "actions", {"actions": [typed]})

    def run(self, script: str, *arguments: Any) -> Any:
        """Run the body of a function in the page. Returns: what it returns."""
        return self.call("POST", "execute/sync", {"script": script, "args": list(arguments)})

    def until(self, script: str, *arguments: Any, within_s: float = 60.0) -> Any:
        """Run a script again and again until it returns something true; within a second on an idle
        machine."""
        deadline = time.monotonic() + within_s
        while not (found := self.run(script, *arguments)):
            assert time.monotonic() < deadline, f"not within {within_s} s: {script}"
            time.sleep(0.05)
        return found

    def devtools(self, command: str, **parameters: Any) -> Any:
        return self.call("POST", "goog/cdp/execute", {"cmd": command, "params": parameters})

    def look(self, *, width: int, scheme: Literal["light", "dark"]) -> None:
        """Set the width of the window, and the colours that the visitor prefers."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.devtools("Emulation.setScrollbarsHidden", hidden=True)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.devtools("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, path: Path) -> None:
        """Write the whole page as a PNG."""
        # Its size is asked of the page: a busy browser that has not drawn it yet would say 0.
        size = self.run(
            "const page = document.documentElement;"
            "return {width: page.scrollWidth, height: page.scrollHeight}"
        )
        clip = {"x": 0, "y": 0, **size, "scale": 1}
        found = self.devtools("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(found["data"]))

    def messages(self) -> list[str]:
        """Warnings and errors of the console since the last call."""
        return [one["message"] for one in self.call("POST", "se/log", {"type": "browser"})]


def _stroke(key: str) -> tuple[dict[str, str], dict[str, str]]:
    return {"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}
