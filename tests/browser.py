"""A real browser without a window, told what to do by its own protocol over a pipe: Debian's chromium, no driver."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.waiting import until

WITHIN_S = 60.0
OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--mute-audio",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--force-device-scale-factor=1",
    "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip


def program() -> str:
    """Nothing where this machine has none."""
    return shutil.which("chromium") or ""


class Browser:
    """One page of a real browser."""

    def __init__(self, directory: Path, width: int, height: int) -> None:
        to, hears = os.pipe()[::-1], os.pipe()
        self._to, self._from = to[0], hears[0]
        # The browser reads 3 and writes 4, and what is passed on must not be one of them before.
        theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (to[1], hears[1])]
        log = (os.POSIX_SPAWN_OPEN, 2, str(directory / "browser.log"), os.O_WRONLY | os.O_CREAT, 0o600)
        actions = [(os.POSIX_SPAWN_DUP2, theirs[0], 3), (os.POSIX_SPAWN_DUP2, theirs[1], 4), log]
        size = f"--window-size={width},{height}"
        argv = [program(), *OPTIONS, f"--user-data-dir={directory / 'profile'}", size, "about:blank"]
        env = {**os.environ, "HOME": str(directory)}
        self.pid = os.posix_spawn(argv[0], argv, env, file_actions=actions, setpgroup=0)
        for fd in (to[1], hears[1], *theirs):
            os.close(fd)
        self._kept, self._number, self._session = b"", 0, ""
        self.said: list[str] = []
        target = self.tell("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.tell("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for area in ("Page", "Runtime", "Log"):
            self.tell(f"{area}.enable")

    def tell(self, method: str, **words: object) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": words}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        ends = time.monotonic() + WITHIN_S
        while True:
            *lines, self._kept = self._kept.split(b"\0")
            answer = None
            for line in lines:
                found = json.loads(line)
                if found.get("id") == self._number:
                    answer = found
                else:
                    self._note(found)
            if answer is not None:
                assert "error" not in answer, (method, answer)
                return dict(answer["result"])
            ready, _, _ = select.select([self._from], [], [], max(0.0, ends - time.monotonic()))
            assert ready, f"the browser does not answer {method}"
            self._kept += os.read(self._from, 1 << 20)

    def _note(self, event: dict[str, Any]) -> None:
        """Record page errors and content policy violations, which a developer's console shows in red."""
        if event.get("method") == "Runtime.exceptionThrown":
            self.said.append(str(event["params"]["exceptionDetails"].get("exception", {}).get("description")))
        if event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            self.said.append(f"{event['params']['entry']['text']} {event['params']['entry'].get('url', '')}")

    def open(self, url: str) -> None:
        self.scheme(dark=False)
        self.tell("Page.navigate", url=url)

    def scheme(self, *, dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.tell("Emulation.setEmulatedMedia", features=[scheme])

    def clear(self) -> None:
        """Leave the page, its size and what it said."""
        self.tell("Emulation.clearDeviceMetricsOverride")
        self.tell("Page.navigate", url="about:blank")
        self.said.clear()

    def value(self, expression: str) -> Any:
        found = self.tell("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression: str, what: str) -> Any:
        def seen() -> object:
            return self.said, self.value("document.body.innerText")

        return until(lambda: self.value(expression), what, seen=seen)

    def key(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self.tell("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key], **text)

    def size(self, width: int, height: int) -> None:
        """Set the page's size, which may be smaller than a window's minimum."""
        self.tell("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.tell("Page.captureScreenshot", format="png")["data"]))

    def end(self) -> None:
        os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._to)
        os.close(self._from)


KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "ArrowRight": 39, "ArrowDown": 40}


@contextlib.contextmanager
def browser(directory: Path, width: int = 1280, height: int = 800) -> Iterator[Browser]:
    made = Browser(directory, width, height)
    try:
        yield made
    finally:
        made.end()
