"""The end of a release: workers drain and go while slurmctld still answers. Run by the chart's pre-delete Job.

`python3 -I -m init.helpers.retire_workers SECONDS SELECTOR [KIND/NAME]...`

Each StatefulSet is scaled to zero and each WorkerPool is deleted: Kubernetes then stops their pods, and each drains
itself in its grace. `Deployment/NAME=GRACE` is that of login pods which would keep their sessions for hours: it is
scaled to zero, and its pods, leaving ones too, end within GRACE seconds. `Leaving/SELECTOR=GRACE` gives that end to the
leaving pods alone: those of a Deployment that is gone. The Job ends once no pod matches SELECTOR, or after SECONDS: the
uninstall goes on then, and ends what is left.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from urllib.parse import quote

from ground.errors import counted
from init.errors import InitError
from init.fields import number
from init.pod.api_server import MERGE, ApiError, ApiServer, namespace

PAUSE = 1.0
KINDS = ("StatefulSet", "WorkerPool", "Deployment", "Leaving")


def parse(words: Sequence[str]) -> tuple[int, str, list[tuple[str, str]]]:
    if len(words) < 2 or (seconds := number(words[0])) is None:
        raise ValueError("SECONDS SELECTOR [KIND/NAME]...")
    pools = [(kind, name) for kind, _, name in (word.partition("/") for word in words[2:])]
    for kind, name in pools:
        of, _, grace = name.rpartition("=")
        is_ended = kind in ("Deployment", "Leaving")
        if kind not in KINDS or not name or (is_ended and (not of or number(grace) is None)):
            raise ValueError(f"{kind}/{name}")
    return seconds, words[1], pools


def retire(server: ApiServer, namespace: str, kind: str, name: str) -> str:
    """Tell Kubernetes that a pool must have no pods. Safe to repeat."""
    try:
        if kind == "StatefulSet":
            path = f"/apis/apps/v1/namespaces/{namespace}/statefulsets/{name}/scale"
            server.ask("PATCH", f"{path}?fieldManager=minivm-uninstall", {"spec": {"replicas": 0}}, MERGE)
            return "scaled to zero"
        if kind == "Deployment":
            name, _, grace = name.partition("=")
            path = f"/apis/apps/v1/namespaces/{namespace}/deployments/{name}/scale"
            scale = server.ask("PATCH", f"{path}?fieldManager=minivm-uninstall", {"spec": {"replicas": 0}}, MERGE)
            ended = end_within(server, namespace, pods(server, namespace, scale["status"]["selector"]), int(grace))
            return f"scaled to zero; {counted(ended, 'pod ends', 'pods end')} within {grace} s"
        if kind == "Leaving":
            selector, _, grace = name.rpartition("=")
            ended = end_within(server, namespace, pods(server, namespace, selector, leaving=True), int(grace))
            return f"{counted(ended, 'pod ends', 'pods end')} within {grace} s"
        path = f"/apis/minivm.io/v1alpha1/namespaces/{namespace}/workerpools/{name}"
        server.ask("DELETE", path, {"propagationPolicy": "Background"})
        return "deleted"
    except ApiError as error:
        if error.missing:
            return "is gone"
        raise


def end_within(server: ApiServer, namespace: str, names: Sequence[str], grace: int) -> int:
    """Shorten the grace period of pods, also of those that are leaving, and return their count."""
    for pod in names:
        try:
            server.ask("DELETE", f"/api/v1/namespaces/{namespace}/pods/{pod}", {"gracePeriodSeconds": grace})
        except ApiError as error:
            if not error.missing:
                raise
    return len(names)


def pods(server: ApiServer, namespace: str, selector: str, *, leaving: bool = False) -> list[str]:
    reply = server.ask("GET", f"/api/v1/namespaces/{namespace}/pods?labelSelector={quote(selector)}")
    every = [item["metadata"] for item in reply.get("items") or ()]
    return sorted(str(item["name"]) for item in every if item.get("deletionTimestamp") or not leaving)


def run(server: ApiServer, namespace: str, seconds: float, selector: str, pools: Sequence[tuple[str, str]]) -> int:
    until, last = time.monotonic() + seconds, ""
    todo = list(pools)
    while True:
        try:
            while todo:
                print(f"{'/'.join(todo[0])}: {retire(server, namespace, *todo[0])}", flush=True)
                todo.pop(0)
            remaining = pods(server, namespace, selector)
            drain = counted(len(remaining), "worker drains", "workers drain")
            text = f"{drain}: {' '.join(remaining[:8])}{' ...' if len(remaining) > 8 else ''}"
            if not remaining:
                print("no worker is left", flush=True)
                return 0
        except ApiError as error:
            text = str(error)
            if error.refused:
                hint = "hint: helm uninstall --no-hooks ends the jobs without a drain"
                print(f"{text}\n{hint}", file=sys.stderr, flush=True)
                return 1
        if text != last:
            print(text, flush=True)
            last = text
        if time.monotonic() >= until:
            print(f"after {seconds:g} s the uninstall continues without them", flush=True)
            return 0
        time.sleep(PAUSE)


def main() -> int:
    try:
        seconds, selector, pools = parse(sys.argv[1:])
    except ValueError as error:
        print(f"cannot retire workers: wrong arguments: {error}", file=sys.stderr)
        return 2
    try:
        return run(ApiServer("drain the workers"), namespace(), seconds, selector, pools)
    except InitError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
