"""Paths of the fleet's objects at a real API server."""

from __future__ import annotations

from tests.kubernetes.apiserver import Object

PLURAL = {
    "ServiceAccount": "/api/v1", "Lease": "/apis/coordination.k8s.io/v1",
    **dict.fromkeys(("Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"), "/apis/rbac.authorization.k8s.io/v1"),
}  # fmt: skip
WIDE = ("ClusterRole", "ClusterRoleBinding")


def path(item: Object, name: str = "", *, namespace: str = "hpc") -> str:
    where = "" if item["kind"] in WIDE else f"/namespaces/{item['metadata'].get('namespace', namespace)}"
    return f"{PLURAL[item['kind']]}{where}/{item['kind'].lower()}s{name and '/' + name}"
