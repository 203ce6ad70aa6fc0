"""Readiness and its reasons as a condition of the pod, for a readiness gate and for `kubectl describe`.

A service of its own, there when the pod has a service account's token. It follows PID 1's word and patches the pod's
status; where it is not allowed to, it says so once and asks again now and then, and nothing else breaks.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import sys
import threading
import time
from pathlib import Path
from typing import Any

from init.addresses import host_and_port
from init.client import SOCKET, Client
from init.errors import InitError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TYPE = "minivm.io/Ready"
# Kubernetes' own bound for a message is 32 KiB; a person reads less.
MESSAGE = 1024
PAUSE, LONGEST_PAUSE = 1.0, 30.0
# The right may come later: a pod that `kubectl scale` made waits at its readiness gate for a Role that names it.
REFUSED_PAUSE = 60.0


class ApiError(InitError):
    """The API server said no, or could not be asked."""

    def __init__(self, why: str, *, status: int | None = None) -> None:
        super().__init__("set the pod's condition", why)
        self.status = status

    @property
    def final(self) -> bool:
        """There is no such pod: nothing will change that."""
        return self.status == 404

    @property
    def refused(self) -> bool:
        return self.status in (401, 403)


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
        self.account = account
        host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
        self.host, self.port = host_and_port(
            server or f"[{host}]:{os.environ.get('KUBERNETES_SERVICE_PORT', '443')}", default=443
        )
        self.path = f"/api/v1/namespaces/{namespace}/pods/{pod}/status"
        self.tls = ssl.create_default_context(cafile=str(account / "ca.crt"))
        # Python 3.13 asks of certificates what Kubernetes' own often lack: a key usage in the authority's, the
        # authority's key identifier in the server's. Its other clients do not ask; chain, name and time still count.
        self.tls.verify_flags &= ~ssl.VERIFY_X509_STRICT

    def patch(self, item: dict[str, Any]) -> None:
        """Strategic merge: the API server replaces the condition of this type and keeps the others."""
        # Tokens are rotated: read at each use.
        token = (self.account / "token").read_text().strip()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/strategic-merge-patch+json"}
        body = json.dumps({"status": {"conditions": [item]}})
        connection = http.client.HTTPSConnection(self.host, self.port, timeout=10, context=self.tls)
        try:
            connection.request("PATCH", self.path, body, headers)
            reply = connection.getresponse()
            text = reply.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise ApiError(f"{self.host}:{self.port}: {error}") from error
        finally:
            connection.close()
        if reply.status >= 300:
            raise ApiError(f"{reply.status} {_message(text)}", status=reply.status)


def _message(text: str) -> str:
    try:
        return str(json.loads(text).get("message", text))[:200]
    except (ValueError, AttributeError):
        return text[:200]


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
    told = ""
    wait = pause
    while (found := latest.take()) is not None:
        while (item := condition(found, before, time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))) != before:
            try:
                api.patch(item)
            except ApiError as error:
                if error.final:
                    print(f"{error}; the pod's condition {TYPE} is not kept", flush=True)
                    return 0
                if str(error) != told:
                    print(error, file=sys.stderr, flush=True)
                told = str(error)
                time.sleep(refused_pause if error.refused else wait)
                wait = min(wait * 2, LONGEST_PAUSE)
                found = latest.newer() or found
                continue
            before, told, wait = item, "", pause
            time.sleep(pause)  # a flapping service must not become a storm at the API server
    return 1


def main() -> int:
    namespace = os.environ.get("MINIVM_POD_NAMESPACE") or (ACCOUNT / "namespace").read_text().strip()
    return run(Api(namespace, os.environ.get("MINIVM_POD_NAME") or os.uname().nodename))


if __name__ == "__main__":
    raise SystemExit(main())
