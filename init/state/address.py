"""Point the controllers' Service at this pod while it acts. A service of one of several controllers on Kubernetes.

The Service selects no pod; its endpoint is the EndpointSlice that the acting controller writes when its term begins,
and again whenever it finds the slice changed. PID 1 runs this only while `lease` is ready. Server-side apply makes the
slice too: a Role can name the object, and the chart need not contain what an upgrade would then overwrite. The pod that
the slice names owns it, so that it goes with the last one.

A late request of a former term overwrites nothing: the slice has its term, and a write names the version that it read.
"""

from __future__ import annotations

import os
import time
from enum import Enum
from pathlib import Path
from typing import Any

from ground.sockets import notify
from init.errors import InitError
from init.fields import number
from init.pod.addresses import host_and_port
from init.pod.api_server import ApiError, ApiServer
from init.pod.client import log
from init.pod.pod import MOUNTS, Pod
from init.slurm.accounting import PORT as SLURMDBD
from init.slurm.place import read_term

ACCOUNT = Path(f"{MOUNTS}/secrets/api")
GROUP = "/apis/discovery.k8s.io"
VERSIONS = ("v1", "v1beta1")  # v1 came with Kubernetes 1.21
TERM = "minivm.io/term"
WRITER = "minivm"
LOOK_S = 5.0
AGAIN_S = 1.0


class SliceAction(Enum):
    KEEP = "keep"
    WRITE = "write"
    YIELD = "yield"  # a later term has the address


def endpoint_slice(pod: Pod, term: int) -> dict[str, Any]:
    """Return the slice that names this pod, without its API's version."""
    service, slurmctld = pod.controller
    address = pod.setting("MINIVM_POD_IP")
    ports = {"slurmctld": slurmctld, "slurmdbd": SLURMDBD, "http": host_and_port(pod.setting("MINIVM_HTTP"), 8650)[1]}
    if rest := pod.setting("MINIVM_SLURMRESTD"):
        ports["slurmrestd"] = host_and_port(rest, 6820)[1]
    own = {"kind": "Pod", "name": pod.name, "uid": pod.setting("MINIVM_POD_UID")}
    return {
        "kind": "EndpointSlice",
        "metadata": {
            "name": f"{service}-active",
            "labels": {"kubernetes.io/service-name": service, "endpointslice.kubernetes.io/managed-by": WRITER},
            "annotations": {TERM: str(term)},
            "ownerReferences": [{"apiVersion": "v1", **own}],
        },
        "addressType": "IPv6" if ":" in address else "IPv4",
        "endpoints": [{"addresses": [address], "conditions": {"ready": True}, "targetRef": own}],
        "ports": [{"name": name, "port": port, "protocol": "TCP"} for name, port in sorted(ports.items())],
    }


def decide(present: dict[str, Any] | None, wanted: dict[str, Any]) -> SliceAction:
    if present is None:
        return SliceAction.WRITE
    if parse_term(present) > parse_term(wanted):
        return SliceAction.YIELD
    return SliceAction.KEEP if contains(present, wanted) else SliceAction.WRITE


def contains(present: Any, wanted: Any) -> bool:
    """Tell if the API server's object has all that is wanted: it adds fields of its own."""
    if isinstance(wanted, dict):
        return isinstance(present, dict) and all(contains(present.get(key), value) for key, value in wanted.items())
    if isinstance(wanted, list):
        if not isinstance(present, list) or len(present) != len(wanted):
            return False
        return all(any(contains(other, item) for other in present) for item in wanted)
    return bool(present == wanted)


def parse_term(item: dict[str, Any]) -> int:
    return number((item["metadata"].get("annotations") or {}).get(TERM, "0")) or 0


class Slices:
    """The API server's EndpointSlice of this name."""

    def __init__(self, namespace: str, wanted: dict[str, Any], account: Path = ACCOUNT, server: str = "") -> None:
        self.namespace, self.wanted = namespace, wanted
        self.name = str(wanted["metadata"]["name"])
        self.api = ApiServer(f"write the EndpointSlice {self.name}", account, server)
        self._version = ""

    def turn(self) -> SliceAction:
        """Read the slice, and write it where it does not name this pod."""
        present = self.read()
        act = decide(present, self.wanted)
        if act is SliceAction.WRITE:
            self.write(present)
        elif act is SliceAction.YIELD and present:
            raise ApiError(
                self.api.what,
                f"it has term {parse_term(present)}, this pod has term {parse_term(self.wanted)}: a later controller"
                f" acts. If none does, the state on the volume is an older one: kubectl delete"
                f" endpointslice {self.name}",
            )
        return act

    def read(self) -> dict[str, Any] | None:
        try:
            return self.api.ask("GET", self.path())
        except ApiError as error:
            if error.missing:
                return None
            raise

    def write(self, present: dict[str, Any] | None) -> None:
        body = {"apiVersion": f"discovery.k8s.io/{self.version()}", **self.wanted}
        if present is not None:
            version = present["metadata"]["resourceVersion"]
            body["metadata"] = {**self.wanted["metadata"], "resourceVersion": version}
        path = f"{self.path()}?fieldManager={WRITER}&force=true"
        self.api.ask("PATCH", path, body, "application/apply-patch+yaml")

    def path(self) -> str:
        return f"{GROUP}/{self.version()}/namespaces/{self.namespace}/endpointslices/{self.name}"

    def version(self) -> str:
        if not self._version:
            served = self.api.ask("GET", GROUP).get("versions") or []
            names = {item.get("version") for item in served if isinstance(item, dict)}
            self._version = next((name for name in VERSIONS if name in names), VERSIONS[0])
        return self._version


def run(slices: Slices, term: int, look: float = LOOK_S, again: float = AGAIN_S) -> None:
    """Keep the slice, until PID 1 ends this process with the term."""
    last_text = ""
    where = f"{slices.name} leads to this pod, term {term}"
    while True:
        try:
            if slices.turn() is SliceAction.WRITE:
                log(where)
            notify(f"READY=1\nSTATUS={where}")
            last_text, pause = "", look
        except (InitError, OSError) as error:
            # What was written goes on to lead here while the API server is away.
            if str(error) != last_text:
                log(str(error))
            last_text, pause = str(error), again
            notify(f"STATUS={error}")
        time.sleep(pause)


def main() -> int:
    pod = Pod(os.environ)
    try:
        term = read_term(pod)
        if not term:
            log("this pod has no term")
            return 1
        slices = Slices(pod.setting("MINIVM_POD_NAMESPACE"), endpoint_slice(pod, term))
    except (InitError, OSError) as error:
        log(f"cannot move the controller's address: {error}")
        return 1
    run(slices, term)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
