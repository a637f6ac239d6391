"""A headless Chromium, driven over a pipe by the Chrome DevTools Protocol.

`--remote-debugging-pipe` makes the browser read commands from file descriptor 3 and write replies
to 4, each a JSON text with a NUL behind it: no port, no web socket, nothing to install beside it.
"""

from __future__ import annotations

import base64
import json
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from tests.support.clocks.waiting import wait_until

NAMES = ("chromium", "chromium-browser", "google-chrome")
CALL_TIMEOUT_S = 30.0
_FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # it cannot be had as root, and the only page is our own
    "--no-first-run",
    "--no-proxy-server",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--hide-scrollbars",
)
# The shell gives the descriptors the numbers that the browser expects.
_ON_PIPE = 'exec "$0" "$@" 3<&{reads} 4>&{writes}'


def find_chromium() -> str | None:
    """The browser's path, where it is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class BrowserError(Exception):
    """The browser refused a command, or a script in the page failed."""


class Browser:
    """One process; commands are answered in order. See `running_browser`."""

    def __init__(self, path: str, folder: Path) -> None:
        reads, self._to_browser = os.pipe()
        self._from_browser, writes = os.pipe()
        self._log = (folder / "chromium.log").open("w")
        shell = _ON_PIPE.format(reads=reads, writes=writes)
        profile = f"--user-data-dir={folder / 'profile'}"
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", shell, path, *_FLAGS, profile, "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(reads, writes),
            start_new_session=True,
        )
        os.close(reads)
        os.close(writes)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._from_browser, selectors.EVENT_READ)
        self._received = b""
        self._last_id = 0
        self.events: list[dict[str, Any]] = []

    def open_tab(self) -> Tab:
        """A tab with cookies and storage of its own."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call(
            "Target.createTarget", {"url": "about:blank", "browserContextId": context}
        )["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})
        return Tab(self, session["sessionId"], context)

    def call(
        self, method: str, params: dict[str, Any] | None = None, session: str | None = None
    ) -> dict[str, Any]:
        """The reply to one command. Raises `BrowserError`."""
        self._last_id += 1
        command = {"id": self._last_id, "method": method, "params": params or {}}
        if session is not None:
            command["sessionId"] = session
        data = json.dumps(command).encode() + b"\0"
        while data:
            data = data[os.write(self._to_browser, data) :]
        ends_at_s = time.monotonic() + CALL_TIMEOUT_S
        while (message := self._receive(ends_at_s)).get("id") != self._last_id:
            self.events.append(message)
        if "error" in message:
            raise BrowserError(f"{method}: {message['error']['message']}")
        result: dict[str, Any] = message["result"]
        return result

    def close(self) -> None:
        """End it and whatever it started."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for descriptor in (self._to_browser, self._from_browser):
            os.close(descriptor)
        self._selector.close()
        self._log.close()

    def _receive(self, ends_at_s: float) -> dict[str, Any]:
        while b"\0" not in self._received:
            if not self._selector.select(ends_at_s - time.monotonic()):
                raise BrowserError(f"no answer within {CALL_TIMEOUT_S:g} s")
            data = os.read(self._from_browser, 1 << 20)
            if not data:
                raise BrowserError("the browser has ended")
            self._received += data
        message, _, self._received = self._received.partition(b"\0")
        parsed: dict[str, Any] = json.loads(message)
        return parsed


class Tab:
    """One page."""

    def __init__(self, browser: Browser, session: str, context: str) -> None:
        self._browser = browser
        self._session = session
        self._context = context
        for domain in ("Page", "Runtime", "Log", "Performance"):
            self._call(f"{domain}.enable")

    def close(self) -> None:
        """With everything that it stored."""
        self._browser.call("Target.disposeBrowserContext", {"browserContextId": self._context})

    def goto(self, url: str) -> None:
        """Open `url`; does not wait for what its scripts do."""
        reply = self._call("Page.navigate", {"url": url})
        if reply.get("errorText"):
            raise BrowserError(f"{url}: {reply['errorText']}")

    def run(self, script: str) -> Any:
        """The value of an expression, awaited when it is a promise. Raises `BrowserError`."""
        reply = self._call(
            "Runtime.evaluate",
            {"expression": script, "returnByValue": True, "awaitPromise": True},
        )
        if "exceptionDetails" in reply:
            details = reply["exceptionDetails"]
            raise BrowserError(details.get("exception", {}).get("description") or details["text"])
        return reply["result"].get("value")

    def wait(self, script: str, *, timeout_s: float = 60.0) -> Any:
        """The first true value of an expression."""

        def value() -> Any:
            try:
                return self.run(script)
            except BrowserError as error:
                # Nothing of a page that is being replaced can be asked.
                if "context" in str(error) or "of null" in str(error):
                    return None
                raise

        return wait_until(value, script, timeout_s=timeout_s)

    def text(self, selector: str) -> str:
        """What an element shows."""
        return str(self.run(f"document.querySelector({selector!r}).innerText"))

    def resize(self, width: int, height: int) -> Self:
        """The size of the window, in CSS pixels."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
        )
        return self

    def prefer(self, scheme: str) -> Self:
        """`light` or `dark`."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", {"features": features})
        return self

    def screenshot(self, path: Path, *, height: int | None = None) -> None:
        """The page from its top, whole or `height` CSS pixels of it, as PNG."""
        size = self._call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "scale": 1}
        clip["height"] = min(size["height"], height or size["height"])
        shot = self._call("Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True})
        path.write_bytes(base64.b64decode(shot["data"]))

    def type(self, text: str) -> None:
        """Into whatever has the focus."""
        self._call("Input.insertText", {"text": text})

    def press_enter(self) -> None:
        """As on the keyboard."""
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
        self._call("Input.dispatchKeyEvent", {"type": "keyDown", **key})
        self._call("Input.dispatchKeyEvent", {"type": "keyUp", **key})

    def complaints(self) -> list[str]:
        """What the page's scripts threw and what the browser refused, so far."""
        self.run("0")
        found = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            params = event.get("params", {})
            if event["method"] == "Runtime.exceptionThrown":
                found.append(json.dumps(params["exceptionDetails"])[:500])
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
                found.append(str(params["entry"]["text"]))
        return found

    def forget_complaints(self) -> None:
        """They were expected."""
        self._browser.events.clear()

    def first_paint_ms(self) -> float:
        """From the navigation's start to the first paint with content."""
        paints = "performance.getEntriesByName('first-contentful-paint')"
        return float(self.wait(f"{paints}.length && {paints}[0].startTime"))

    def _call(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._browser.call(method, params, self._session)


@contextmanager
def running_browser(path: str) -> Iterator[Browser]:
    """A browser with a profile that is gone at the end."""
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as folder:
        browser = Browser(path, Path(folder))
        try:
            yield browser
        finally:
            browser.close()
