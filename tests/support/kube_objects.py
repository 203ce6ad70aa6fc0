"""An API server of a few objects, as far as Helm's `lookup` asks one: which kinds there are, one object, and a list."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import helm_python
import yaml

from tests import kube_api

Object = dict[str, Any]
KINDS = {"configmaps": "ConfigMap", "secrets": "Secret", "serviceaccounts": "ServiceAccount", "roles": "Role",
         "statefulsets": "StatefulSet", "workerpools": "WorkerPool",
         "endpoints": "Endpoints", "pods": "Pod"}  # fmt: skip
GROUPS = {
    "v1": ("configmaps", "secrets", "serviceaccounts", "endpoints", "pods"),
    "apps/v1": ("statefulsets",),
    "rbac.authorization.k8s.io/v1": ("roles",),
    "minivm.io/v1alpha1": ("workerpools",),
}


@contextlib.contextmanager
def cluster_of(objects: list[Object], folder: Path, *, forbidden: tuple[str, ...] = ()) -> Iterator[helm_python.Config]:
    """Serve the objects in the namespace hpc, and yield Helm's way there. `forbidden`: kinds that may not be listed."""
    there = {(item["kind"], item["metadata"]["name"]): item for item in objects}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            code, body = answer(self.path.partition("?")[0].strip("/").split("/"), there, forbidden)
            data = json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = kube_api.serve(folder, Handler)
    address = {"server": f"https://localhost:{server.server_port}", "certificate-authority": str(folder / "ca.crt")}
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": address}],
        "users": [{"name": "u", "user": {"token": kube_api.TOKEN}}],
    }  # fmt: skip
    try:
        with helm_python.Config(kubeconfig_content=yaml.safe_dump(config), namespace="hpc") as found:
            yield found
    finally:
        server.shutdown()
        server.server_close()


def answer(path: list[str], there: Mapping[tuple[str, str], Object], forbidden: tuple[str, ...]) -> tuple[int, Object]:
    if path == ["version"]:
        return 200, {"major": "1", "minor": "33", "gitVersion": "v1.33.0"}
    if path == ["api"]:
        return 200, {"kind": "APIVersions", "versions": ["v1"]}
    if path == ["apis"]:
        versions = [{"groupVersion": name, "version": name.partition("/")[2]} for name in GROUPS if "/" in name]
        groups = [{"name": one["groupVersion"].partition("/")[0], "versions": [one], "preferredVersion": one}
                  for one in versions]  # fmt: skip
        return 200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    version = "/".join(path[1:2] if path[0] == "api" else path[1:3])
    rest = path[2:] if path[0] == "api" else path[3:]
    if not rest and version in GROUPS:
        kinds = [{"name": name, "kind": KINDS[name], "namespaced": True, "verbs": ["get", "list"]}
                 for name in GROUPS[version]]  # fmt: skip
        return 200, {"kind": "APIResourceList", "groupVersion": version, "resources": kinds}
    if rest[:2] == ["namespaces", "hpc"] and len(rest) in (3, 4) and rest[2] in KINDS:
        kind = KINDS[rest[2]]
        if len(rest) == 4:
            found = there.get((kind, rest[3]))
            return (200, found) if found else status(404, "NotFound", f'{rest[2]} "{rest[3]}" not found')
        if kind in forbidden:
            return status(403, "Forbidden", f"{rest[2]} is forbidden: cannot list")
        items = [item for (of, _), item in there.items() if of == kind]
        return 200, {"kind": f"{kind}List", "apiVersion": version, "metadata": {}, "items": items}
    return status(404, "NotFound", "the server could not find the requested resource")


def status(code: int, reason: str, message: str) -> tuple[int, Object]:
    return code, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason,
                  "message": message}  # fmt: skip
