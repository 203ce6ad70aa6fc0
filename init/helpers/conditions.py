"""Readiness and its reasons as a condition of the pod, for a readiness gate and for `kubectl describe`.

A service of its own, there when the pod has a service account's token. It follows PID 1's word and patches the pod's
status; where it is not allowed to, it says so once and asks again now and then, and nothing else breaks. Beside it,
once, which GPUs the pod has, and what deep checks have said since the machine's boot.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from init.errors import InitError
from init.helpers import deep, gpus
from init.places import pod_name
from init.pod.api_server import ACCOUNT, ApiError, ApiServer
from init.pod.client import SOCKET, Client
from init.pod.dirwatch import Watcher
from init.pod.pod import Pod

TYPE = "minivm.io/Ready"
# Kubernetes' own bound for a message is 32 KiB; a person reads less.
MESSAGE = 1024
PAUSE, LONGEST_PAUSE = 1.0, 30.0
# The right may come later: a pod that `kubectl scale` made waits at its readiness gate for a Role that names it.
REFUSED_PAUSE = 60.0
# A driver that does not answer is asked so often, and an API server that refuses what deep checks have said.
GPUS_PAUSE = 60.0


def condition(found: dict[str, Any], before: dict[str, Any] | None, now: str) -> dict[str, Any]:
    """The condition for what PID 1 says. The time of the last transition changes with the status alone."""
    ready = bool(found["ready"])
    reasons = [str(reason) for reason in found["reasons"] or found["degraded"]]
    status = "True" if ready else "False"
    reason = "Ready" if ready and not reasons else "Degraded" if ready else str(found["phase"]).capitalize()
    kept = before["lastTransitionTime"] if before is not None and before["status"] == status else now
    text = "; ".join(reasons)
    message = text if len(text) <= MESSAGE else f"{text[: MESSAGE - 3]}..."
    return {"type": TYPE, "status": status, "reason": reason, "message": message, "lastTransitionTime": kept}


class Api:
    """One pod's status at one API server."""

    def __init__(self, namespace: str, pod: str, account: Path = ACCOUNT, server: str = "") -> None:
        self.server = ApiServer("set the pod's condition", account, server)
        self.path = f"/api/v1/namespaces/{namespace}/pods/{pod}/status"

    def patch(self, item: dict[str, Any]) -> None:
        """Strategic merge: the API server replaces the condition of this type and keeps the others."""
        body = {"status": {"conditions": [item]}}
        self.server.ask("PATCH", self.path, body, "application/strategic-merge-patch+json")


class Latest:
    """What PID 1 said last: a reader that is slower than the changes misses those in between, and no more."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._found: dict[str, Any] | None = None
        self._ended = False

    def put(self, found: dict[str, Any] | None) -> None:
        with self._news:
            self._found, self._ended = found or self._found, found is None
            self._news.notify()

    def take(self) -> dict[str, Any] | None:
        """The newest word, waited for; None when there will be none."""
        with self._news:
            while self._found is None and not self._ended:
                self._news.wait()
            return self._taken()

    def newer(self) -> dict[str, Any] | None:
        """What was said meanwhile, if anything."""
        with self._news:
            return self._taken()

    def _taken(self) -> dict[str, Any] | None:
        found, self._found = self._found, None
        return found


def follow(control: Path, latest: Latest) -> None:
    try:
        with Client(control) as client:
            for reply in client.stream("watch"):
                latest.put(reply)
    except InitError as error:
        print(error, file=sys.stderr)
    latest.put(None)


def run(api: Api, control: Path = SOCKET, pause: float = PAUSE, refused_pause: float = REFUSED_PAUSE) -> int:
    latest = Latest()
    threading.Thread(target=follow, args=(control, latest), daemon=True).start()
    before: dict[str, Any] | None = None
    last = ""
    wait = pause
    while (found := latest.take()) is not None:
        while (item := condition(found, before, _now())) != before:
            try:
                api.patch(item)
            except ApiError as error:
                if error.missing:
                    print(f"{error}; the pod's condition {TYPE} is not kept", flush=True)
                    return 0
                if str(error) != last:
                    print(error, file=sys.stderr, flush=True)
                last = str(error)
                time.sleep(refused_pause if error.refused else wait)
                wait = min(wait * 2, LONGEST_PAUSE)
                found = latest.newer() or found
                continue
            before, last, wait = item, "", pause
            time.sleep(pause)  # a flapping service must not become a storm at the API server
    return 1


def tell_gpus(api: Api, look: Callable[[], tuple[str, ...]], pause: float = GPUS_PAUSE) -> None:
    """Until it is told once. Of a refusal the other condition speaks, which is refused too."""
    while True:
        if found := look():
            try:
                return api.patch(gpus.condition(found, _now()))
            except ApiError as error:
                if error.missing:
                    return None
            except OSError:
                pass  # the token is being exchanged
        time.sleep(pause)


def tell_deep(api: Api, file: Path = deep.FILE, boot: Path = deep.BOOT_ID, pause: float = GPUS_PAUSE) -> None:
    """Each new word, once. Nothing polls: the kernel says when there may be one."""
    watcher, told = Watcher(), None
    while True:
        watcher.watch(file.parent)
        item = deep.condition(deep.read(file), boot.read_text().strip())
        if item is not None and item != told:
            try:
                api.patch({**item, "lastTransitionTime": _now()})
                told = item
            except (ApiError, OSError) as error:
                if isinstance(error, ApiError) and error.missing:
                    return
                # Whatever changes meanwhile: a user's jobs are in the directories beside it as often as he likes.
                time.sleep(pause)
                continue
        watcher.wait(None)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def main() -> int:
    namespace = os.environ.get("MINIVM_POD_NAMESPACE") or (ACCOUNT / "namespace").read_text().strip()
    api, pod = Api(namespace, pod_name(os.environ)), Pod(os.environ)
    if gpus.present(pod):
        threading.Thread(target=tell_gpus, args=(api, lambda: gpus.uuids(pod)), daemon=True).start()
    threading.Thread(target=tell_deep, args=(api,), daemon=True).start()
    return run(api)


if __name__ == "__main__":
    raise SystemExit(main())
