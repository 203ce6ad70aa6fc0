"""Readiness with reasons as a condition of the pod, for a readiness gate and for `kubectl describe`.

A service of its own that runs if the pod has a service account's token. It follows PID 1 and patches the pod's status;
if that is forbidden, it logs so once and retries now and then, and nothing else breaks. It also reports, once, the
pod's GPUs, and the results of deep checks since the machine's boot and of active checks. Without a token the fleet
reads all that from the pod's page; then `python3 -m init.helpers.conditions gpus` writes the list of GPUs into a file
for that page, and ends.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ground.files import write_whole
from init.errors import InitError
from init.helpers import links
from init.places import pod_name
from init.pod.api_server import ACCOUNT, ApiError, ApiServer, namespace
from init.pod.client import SOCKET, Client
from init.pod.dirwatch import Watcher
from init.pod.pod import Pod
from init.view.conditions import (
    ACTIVE_NAME,
    BOOT_ID,
    DEEP_NAME,
    GPU_NAME,
    TYPE,
    active_condition,
    deep_condition,
    gpu_condition,
    read_boot,
    read_results,
    ready_condition,
)

RUN = Path("/run/minivm")
DEEP_FILE = RUN / DEEP_NAME

# The driver is asked until it answers; its first answer holds while the pod lives, since within one boot no GPU comes
# or goes.
MOST_GPUS = 64
# GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-041a6be2-04b9-910d-91ab-94883a0ad281)
GPU_LISTED = re.compile(r"^GPU [0-9]+: .*\(UUID: (GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\)$", re.MULTILINE)


def gpu_uuids(pod: Pod) -> tuple[str, ...]:
    """Return the UUIDs in order; none if the driver does not answer."""
    return tuple(sorted(set(GPU_LISTED.findall(links.query_gpus(pod, "-L"))))[:MOST_GPUS])


PAUSE, LONGEST_PAUSE = 1.0, 30.0
# The permission may come later: a pod created by `kubectl scale` waits at its readiness gate for a Role that names it.
REFUSED_PAUSE = 60.0
# Retry interval for a driver that does not answer, and for a refused condition of deep checks.
GPUS_PAUSE = 60.0


def condition(reply: dict[str, Any], before: dict[str, Any] | None, now: str) -> dict[str, Any]:
    """Build the condition from PID 1's reply. The transition time changes with the status only."""
    item = ready_condition(reply)
    changed_at = before["lastTransitionTime"] if before is not None and before["status"] == item["status"] else now
    return {**item, "lastTransitionTime": changed_at}


class Api:
    """One pod's status at the API server."""

    def __init__(self, namespace: str, pod: str, account: Path = ACCOUNT, server: str = "") -> None:
        self.server = ApiServer("set the pod's condition", account, server)
        self.path = f"/api/v1/namespaces/{namespace}/pods/{pod}/status"

    def patch(self, item: dict[str, Any]) -> None:
        """Patch the status by a strategic merge: the API server replaces this condition and keeps the others."""
        body = {"status": {"conditions": [item]}}
        self.server.ask("PATCH", self.path, body, "application/strategic-merge-patch+json")


class Latest:
    """PID 1's latest reply: a reader slower than the changes skips those in between."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._found: dict[str, Any] | None = None
        self._ended = False

    def put(self, reply: dict[str, Any] | None) -> None:
        with self._news:
            self._found, self._ended = reply or self._found, reply is None
            self._news.notify()

    def take(self) -> dict[str, Any] | None:
        """Wait for the latest reply and take it; None when there will be none."""
        with self._news:
            while self._found is None and not self._ended:
                self._news.wait()
            return self._take()

    def newer(self) -> dict[str, Any] | None:
        """Take a newer reply, if any."""
        with self._news:
            return self._take()

    def _take(self) -> dict[str, Any] | None:
        reply, self._found = self._found, None
        return reply


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
    while (reply := latest.take()) is not None:
        while (item := condition(reply, before, _now())) != before:
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
                reply = latest.newer() or reply
                continue
            before, last, wait = item, "", pause
            time.sleep(pause)  # a flapping service must not flood the API server
    return 1


def tell_gpus(api: Api, look: Callable[[], tuple[str, ...]], pause: float = GPUS_PAUSE) -> None:
    """Report the GPUs once. Refusals are not logged: the other condition is refused too, and logs that."""
    while True:
        if ids := look():
            try:
                return api.patch({**gpu_condition(ids), "lastTransitionTime": _now()})
            except ApiError as error:
                if error.missing:
                    return None
            except OSError:
                pass  # the token is being rotated
        time.sleep(pause)


def write_gpus(look: Callable[[], tuple[str, ...]], file: Path = RUN / GPU_NAME, pause: float = GPUS_PAUSE) -> None:
    """Write the GPUs once, for the page `/conditions`."""
    while not (ids := look()):
        time.sleep(pause)
    write_whole(file, "".join(f"{uuid}\n" for uuid in ids))


def tell_deep(api: Api, file: Path = DEEP_FILE, boot: Path = BOOT_ID, pause: float = GPUS_PAUSE) -> None:
    tell_results(api, file, lambda data: deep_condition(data, read_boot(boot)), pause)


def tell_results(
    api: Api, file: Path, build: Callable[[dict[str, Any]], dict[str, Any] | None], pause: float = GPUS_PAUSE
) -> None:
    """Report each new result in the file once. Nothing polls: the kernel reports changes."""
    watcher, reported = Watcher(), None
    while True:
        watcher.watch(file.parent)
        item = build(read_results(file))
        if item is not None and item != reported:
            try:
                api.patch({**item, "lastTransitionTime": _now()})
                reported = item
            except (ApiError, OSError) as error:
                if isinstance(error, ApiError) and error.missing:
                    return
                # Retry at this interval whatever changes meanwhile: users' jobs change the neighbouring directories at
                # will.
                time.sleep(pause)
                continue
        watcher.wait(None)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def main(arguments: list[str]) -> int:
    pod = Pod(os.environ)
    if arguments == ["gpus"]:
        if pod.gpus:
            write_gpus(lambda: gpu_uuids(pod))
        return 0
    api = Api(namespace(), pod_name(os.environ))
    if pod.gpus:
        threading.Thread(target=tell_gpus, args=(api, lambda: gpu_uuids(pod)), daemon=True).start()
    threading.Thread(target=tell_deep, args=(api,), daemon=True).start()
    threading.Thread(target=tell_results, args=(api, RUN / ACTIVE_NAME, active_condition), daemon=True).start()
    return run(api)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
