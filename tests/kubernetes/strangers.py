"""Pods that are no part of a release, and what they get to see of it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

from tests.kubernetes.kubectl import Object
from tests.kubernetes.world import IMAGES, Release
from tests.waiting import until

# Exit 0: somebody answers. 1: nobody listens. 2: the way is closed, as the lab's filters say it. 3: no word at all.
KNOCK = """
import errno, socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=10).close()
except TimeoutError:
    sys.exit(3)
except OSError as error:
    sys.exit(1 if error.errno == errno.ECONNREFUSED else 2)
"""
PYTHON = "/opt/minivm/bin/python3"
ANSWERS = {0: "open", 1: "nobody", 2: "closed", 3: "closed"}


@contextlib.contextmanager
def stranger(release: Release, name: str = "stranger", **spec: object) -> Iterator[str]:
    """A pod of somebody else in the release's own namespace, with an image that its machine has."""
    container: Object = {"name": "main", "image": f"{IMAGES}/controller:latest", "imagePullPolicy": "IfNotPresent"}
    container |= {"command": ["sleep", "infinity"], "resources": spec.pop("resources", {})}
    whole = {"containers": [container], "terminationGracePeriodSeconds": 0, "automountServiceAccountToken": False}
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": whole | spec}
    release.kubectl("apply", "-f", "-", stdin=json.dumps(body))
    try:
        yield name
    finally:
        release.kubectl("delete", "pod", name, "--wait=false")


def running(release: Release, name: str) -> bool:
    return bool(release.get("pod", name)["status"].get("phase") == "Running")


def knock(release: Release, name: str, address: str, port: int) -> str:
    done = release.kubernetes.attempt(
        "-n", release.namespace, "exec", name, "--", PYTHON, "-I", "-c", KNOCK, address, str(port)
    )
    assert done.returncode in ANSWERS and "rror from server" not in done.stderr, done
    return ANSWERS[done.returncode]


def wait_running(release: Release, name: str, *, within: float = 120) -> None:
    def why() -> str:
        return release.kubectl("describe", "pod", name)[-3000:]

    until(lambda: running(release, name), f"{name} runs", within=within, seen=why)
