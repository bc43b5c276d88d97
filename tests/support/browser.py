"""A real browser without a window, driven by its own debugging protocol: pages, clicks, keys, pictures.

Every request that a page makes and everything it says on its console is kept, so that a test can show that there
was none.
"""

import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from websockets.sync.client import connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
    *("--disable-dev-shm-usage", "--disable-default-apps", "--remote-debugging-port=0"),
)
TIMEOUT_S = 60.0


class Browser:
    """One process; ends when the `with` block does."""

    def __init__(self, profile: Path):
        if CHROMIUM is None:
            message = "no chromium to look at the page with: apt-get install chromium"
            assert os.environ.get("CI") != "true", message
            pytest.skip(message)
        self._profile = profile
        self._ids = itertools.count(1)
        self._events = []

    def __enter__(self):
        self._process = subprocess.Popen(
            [CHROMIUM, *OPTIONS, f"--user-data-dir={self._profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            port, path = self._address()
            self._socket = connect(f"ws://127.0.0.1:{port}{path}", max_size=None, compression=None)
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise
        return self

    def __exit__(self, *_):
        with contextlib.suppress(Exception):
            self._socket.close()
        self._process.kill()
        self._process.wait()

    def _address(self):
        """Return port and path, once the browser has written them down."""
        file = self._profile / "DevToolsActivePort"
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            assert self._process.poll() is None, "the browser ended at once"
            if file.exists() and len(lines := file.read_text().split("\n")) == 2 and lines[1]:
                return lines
            time.sleep(0.05)
        raise TimeoutError("the browser did not say where it listens")

    def call(self, method, session=None, **params):
        """Ask the browser for something and return its answer; what happens meanwhile is kept as events."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        self._socket.send(json.dumps(message))
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _receive(self):
        answer = json.loads(self._socket.recv(timeout=TIMEOUT_S))
        if "method" in answer:
            self._events.append(answer)
        return answer

    def events(self, session, *methods):
        """Return what happened in one page so far."""
        return [e["params"] for e in self._events if e.get("sessionId") == session and e["method"] in methods]

    def open(self, path, *, width=1280, height=1000, dark=False, scripts=True):
        """Open a file as a page of so many pixels."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session, target)
        for domain in ("Page", "Runtime", "Log", "Network", "DOM", "CSS"):
            page.call(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        page.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        page.call("Page.navigate", url=Path(path).resolve().as_uri())
        deadline = time.monotonic() + TIMEOUT_S
        while not self.events(session, "Page.loadEventFired"):
            assert time.monotonic() < deadline, f"{path} did not load"
            self.call("Browser.getVersion")
            time.sleep(0.02)
        return page


class Page:
    """One tab."""

    def __init__(self, browser, session, target):
        self._browser, self._session, self._target = browser, session, target

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._browser.call("Target.closeTarget", targetId=self._target)

    def call(self, method, **params):
        return self._browser.call(method, self._session, **params)

    def run(self, expression):
        """Return the value of an expression in the page; promises are waited for."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True, userGesture=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, condition):
        deadline = time.monotonic() + TIMEOUT_S
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < deadline, f"never became true: {condition}"
            time.sleep(0.05)

    def click(self, selector):
        """Click in the middle of an element, as a mouse does."""
        find = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{find}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        place = self.run(
            f"(() => {{ const r = {find}.getBoundingClientRect(); return [r.x + r.width/2, r.y + r.height/2] }})()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)

    def choose(self, selector, value):
        """Choose an entry of a list, and tell the page as a browser does."""
        find = f"document.querySelector({json.dumps(selector)})"
        assert self.run(f"[...{find}.options].some(o => o.value === {json.dumps(value)})"), (selector, value)
        self.run(f"{find}.value = {json.dumps(value)}; {find}.dispatchEvent(new Event('change', {{bubbles: true}}))")

    def press(self, key, code=None, key_code=0, text=None):
        event = {"key": key, "code": code or key, "windowsVirtualKeyCode": key_code}
        self.call("Input.dispatchKeyEvent", type="keyDown", **event, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def picture(self, path, *, whole=True):
        """Save what the page looks like."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"clip": {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 16000), "scale": 1}}
        found = self.call(
            "Page.captureScreenshot", format="png", captureBeyondViewport=whole, **(clip if whole else {})
        )
        Path(path).write_bytes(base64.b64decode(found["data"]))

    def requests(self):
        """Return the addresses that were asked for, other than the page's own file and what it holds itself."""
        urls = [event["request"]["url"] for event in self._browser.events(self._session, "Network.requestWillBeSent")]
        return [url for url in urls if not url.startswith(("file://", "data:", "blob:null/", "about:"))]

    def files(self):
        """Return the files that were read."""
        urls = [event["request"]["url"] for event in self._browser.events(self._session, "Network.requestWillBeSent")]
        return [url for url in urls if url.startswith("file://")]

    def complaints(self):
        """Return errors and warnings of the console, and exceptions that nobody caught."""
        events = self._browser.events
        found = [
            " ".join(str(argument.get("value", argument.get("description"))) for argument in event["args"])
            for event in events(self._session, "Runtime.consoleAPICalled")
            if event["type"] in ("error", "warning", "assert")
        ]
        found += [e["exceptionDetails"]["text"] for e in events(self._session, "Runtime.exceptionThrown")]
        return found + [
            e["entry"]["text"]
            for e in events(self._session, "Log.entryAdded")
            if e["entry"]["level"] in ("error", "warning")
        ]
