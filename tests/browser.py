"""A browser without a window, driven through its DevTools protocol over a pair of pipes.

The messages are those of https://chromedevtools.github.io/devtools-protocol/, each ended by a zero byte.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--headless=new", "--remote-debugging-pipe", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
QUIET = ("--disable-extensions", "--disable-background-networking", "--disable-component-update", "--mute-audio")
SECONDS = 60.0  # loaded machines are slow
KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowRight": 39, "ArrowLeft": 37}


def program() -> str:
    """The browser's path."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    assert found is not None, f"the web page's tests need one of {', '.join(NAMES)}: tools/setup.sh --dev installs it"
    return found


class Browser:
    """The running program. As a context manager it ends it."""

    def __init__(self) -> None:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        read, self._write = os.pipe()
        self._read, write = os.pipe()
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # it refuses to run as root with one
        self._process = subprocess.Popen(
            [program(), *FLAGS, *QUIET, *sandbox, f"--user-data-dir={self._profile.name}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,  # Python's own are not inherited anyway, and the two that the function below makes must be
            preexec_fn=lambda: _as_descriptors_3_and_4(read, write),
        )
        os.close(read)
        os.close(write)
        self._numbers, self._rest = count(1), b""
        self.on_event: Callable[[dict[str, Any]], None] = lambda event: None

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """A command's result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])

    def page(self, url: str, script: str = "") -> Page:
        """A new page, loaded. script: runs in it before its own."""
        return Page(self, url, script)

    def _next(self) -> dict[str, Any]:
        """The next message; events are handed over on the way."""
        end = time.monotonic() + SECONDS
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            data = os.read(self._read, 1 << 20) if ready else b""
            assert data, "the browser is silent, or gone"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        if "id" not in found:
            self.on_event(found)
        return found

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)
        self._profile.cleanup()


class Page:
    """One page. complaints: what its console said of errors and refusals."""

    def __init__(self, browser: Browser, url: str, script: str = "") -> None:
        self._browser = browser
        self.complaints: list[str] = []
        self._target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = browser.call("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        browser.on_event = self._on_event
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.resize(1000, 800)
        self.call("Page.addScriptToEvaluateOnNewDocument", source=script)
        self.go(url)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def go(self, url: str) -> None:
        """Load an address."""
        self.call("Page.navigate", url=url)
        self.wait("location.href !== 'about:blank' && document.readyState === 'complete'")

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)

    def resize(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def dark(self, wanted: bool) -> None:
        """What the person's system asks of pages."""
        value = "dark" if wanted else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    def offline(self) -> None:
        """Cut the page off from every server."""
        self.call("Network.enable")
        speeds = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        self.call("Network.emulateNetworkConditions", offline=True, **speeds)

    def evaluate(self, script: str) -> Any:
        """The value of an expression, awaited."""
        done = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def wait(self, script: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + SECONDS
        while not self.evaluate(f"Boolean({script})"):
            assert time.monotonic() < end, f"waited for {script}; the page says: {self.text('body')}"
            time.sleep(0.02)

    def text(self, selector: str) -> str:
        """The text that a person sees in the first element."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def texts(self, selector: str) -> list[str]:
        return list(self.evaluate(f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.innerText)"))

    def click(self, selector: str) -> None:
        """Press the left button of the mouse over the middle of the first element."""
        x, y = self._middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def _middle(self, selector: str) -> tuple[float, float]:
        """The place of the middle of the first element, which is brought into view."""
        found = f"document.querySelector({json.dumps(selector)})"
        place = self.evaluate(
            f"(() => {{ const e = {found}; e.scrollIntoView({{block: 'nearest'}}); const r = e.getBoundingClientRect();"
            " return [r.x + r.width / 2, r.y + r.height / 2, r.width * r.height]; })()"
        )
        assert place[2] > 0, f"{selector} is not to be seen"
        return place[0], place[1]

    def type(self, text: str) -> None:
        """Insert text where the focus is, as a keyboard or an input method does."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, shift: bool = False) -> None:
        """Press and release a key."""
        common = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key], "modifiers": 8 if shift else 0}
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **common, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def drop(self, selector: str, *, text: str = "", files: Sequence[Path] = ()) -> None:
        """Drag text, or files from outside, over an element and let go."""
        x, y = self._middle(selector)
        items = [{"mimeType": "text/plain", "data": text}] if text else []
        data = {"items": items, "files": list(map(str, files)), "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.call("Input.dispatchDragEvent", type=kind, x=x, y=y, data=data)

    def choose_file(self, selector: str, path: Path) -> None:
        """What a person chose in the dialog of a file input."""
        found = self.call("Runtime.evaluate", expression=f"document.querySelector({json.dumps(selector)})")
        self.call("DOM.setFileInputFiles", files=[str(path)], objectId=found["result"]["objectId"])

    def nameless(self) -> list[str]:
        """Controls that a screen reader has no name for."""
        roles = {"button", "textbox", "checkbox", "radio", "spinbutton", "tab", "link", "image", "log", "dialog"}
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        seen = [node for node in nodes if not node.get("ignored") and node["role"]["value"] in roles]
        assert len(seen) > 5
        return [node["role"]["value"] for node in seen if not node.get("name", {}).get("value")]

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def _on_event(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event["method"] == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif event["method"] == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif event["method"] == "Runtime.consoleAPICalled":
            self.complaints.append(str(params["args"]))


def _as_descriptors_3_and_4(read: int, write: int) -> None:
    """Where the browser looks for its commands and puts its answers. Neither may be lost to the other on the way."""
    read, write = os.dup(read), os.dup(write)
    while read in (3, 4) or write in (3, 4):
        read, write = os.dup(read), os.dup(write)
    os.dup2(read, 3)
    os.dup2(write, 4)
