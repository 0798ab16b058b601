"""Headless Chromium over its debugging pipe: requests, messages and appearance of a page.

https://chromedevtools.github.io/devtools-protocol/ - descriptors 3 and 4, JSON ended by a NUL byte.
"""

import base64
import json
import os
import select
import subprocess
import time
from pathlib import Path

import pytest

PROGRAM = "/usr/bin/chromium"
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-extensions", "--disable-sync",
    "--disable-component-update", "--remote-debugging-pipe",
)  # fmt: skip
TIMEOUT = 60  # seconds for any answer, on a busy machine


class Browser:
    """One browser with one page. ``events`` has all its events since :meth:`open`."""

    def __init__(self, profile):
        own_in, their_out = os.pipe()
        their_in, own_out = os.pipe()
        self._write, self._read = own_out, own_in
        self._rest, self._number, self.events = b"", 0, []

        # The other pipe's ends may have the numbers 3 and 4 here: the shell reorders them.
        place = f"exec {PROGRAM} {' '.join(FLAGS)} --user-data-dir='{profile}' about:blank"
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", f"exec 8<&{their_in} 9>&{their_out} 3<&8 4>&9; {place}"],
            pass_fds=(their_in, their_out), stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": str(profile)},
        )  # fmt: skip
        os.close(their_in)
        os.close(their_out)
        self._session = None
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(t for t in targets if t["type"] == "page")
        found = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility", "Audits"):
            self.call(f"{domain}.enable")

    def close(self):
        os.close(self._write)
        os.close(self._read)
        self._process.terminate()
        self._process.wait(TIMEOUT)

    def call(self, method, **params):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _next(self):
        end = time.monotonic() + TIMEOUT
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            part = os.read(self._read, 1 << 16)
            assert part, "the browser has ended"
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)

    def open(self, path, *, width=1280, height=900, dark=False):
        """Show a file; return when it is loaded."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 800,
        )  # fmt: skip
        self.events.clear()
        self.call("Page.navigate", url=f"file://{path}")
        while not self.seen("Page.loadEventFired"):
            self.events.append(self._next())
        self.value("new Promise(done => requestAnimationFrame(() => setTimeout(done, 50)))")

    def seen(self, method):
        return [e["params"] for e in self.events if e.get("method") == method]

    @property
    def complaints(self):
        """All errors and warnings of the console, blocked requests and exceptions."""
        found = [
            e["entry"]["text"]
            for e in self.seen("Log.entryAdded")
            if e["entry"]["level"] in ("warning", "error")
        ]
        found += [e["args"] for e in self.seen("Runtime.consoleAPICalled")]
        found += [e["exceptionDetails"]["text"] for e in self.seen("Runtime.exceptionThrown")]
        return found + [e["issue"]["code"] for e in self.seen("Audits.issueAdded")]

    @property
    def requests(self):
        return [e["request"]["url"] for e in self.seen("Network.requestWillBeSent")]

    def value(self, expression):
        """Return the result of the test's JavaScript; the page's own scripts may not run."""
        result = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def accessible(self):
        """Return (role, name) of everything that a screen reader reads."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        shown = [n for n in nodes if not n.get("ignored")]
        return [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in shown]

    def screenshot(self, path, *, whole=True):
        options = {"format": "png", "captureBeyondViewport": whole}
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", **options)["data"]))


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    assert Path(PROGRAM).exists(), f"{PROGRAM} is missing: apt-get install chromium"
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()
