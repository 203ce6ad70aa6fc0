"""The lab's certificates and kubeconfigs, by openssl: made once, readable by root alone."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterable
from pathlib import Path

from tests.kubernetes import plan
from tests.kubernetes.host import run, write
from tests.kubernetes.plan import Machine

CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
SERVER_NAMES = ("localhost", *(f"kubernetes{rest}" for rest in ("", ".default", ".default.svc")))


def make(keys: Path, machines: Iterable[Machine]) -> None:
    """Whatever of them is missing."""
    before = os.umask(0o077)
    try:
        keys.mkdir(parents=True, exist_ok=True)
        if not (keys / "ca.crt").exists():
            usage = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")
            files = ("-keyout", keys / "ca.key", "-out", keys / "ca.crt")
            run("openssl", "req", "-x509", *CURVE, "-days", "3650", "-subj", "/CN=lab", *usage, *files)
        if not (keys / "sa.pub").exists():
            run("openssl", "genrsa", "-out", keys / "sa.key", "2048")
            run("openssl", "rsa", "-in", keys / "sa.key", "-pubout", "-out", keys / "sa.pub")
        addresses = [f"IP:{address}" for address in ("127.0.0.1", plan.CONTROL_PLANE, f"{plan.SERVICES}.1")]
        signed(keys, "apiserver", "/CN=kube-apiserver", [*addresses, *(f"DNS:{name}" for name in SERVER_NAMES)])
        signed(keys, "to-kubelet", "/O=system:masters/CN=kube-apiserver-kubelet-client")
        users = {
            "admin": "/O=system:masters/CN=admin",
            "controller-manager": "/CN=system:kube-controller-manager",
            "scheduler": "/CN=system:kube-scheduler",
            "proxy": "/CN=system:kube-proxy",
        }
        for name, subject in users.items():
            signed(keys, name, subject)
        nodes = [machine for machine in machines if machine.number]
        for node in nodes:
            names = [f"IP:{node.address}", f"DNS:{node.name}"]
            signed(keys, node.name, f"/O=system:nodes/CN=system:node:{node.name}", names)
        for user in (*users, *(node.name for node in nodes)):
            write(keys / f"{user}.conf", kubeconfig(keys, user))
    finally:
        os.umask(before)


def signed(keys: Path, name: str, subject: str, names: Iterable[str] = ()) -> None:
    if (keys / f"{name}.crt").exists():
        return
    request, extensions = keys / f"{name}.csr", keys / f"{name}.ext"
    lines = ["keyUsage=digitalSignature", "extendedKeyUsage=serverAuth,clientAuth"]
    if names:
        lines.append(f"subjectAltName={','.join(names)}")
    extensions.write_text("\n".join(lines) + "\n")
    run("openssl", "req", *CURVE, "-subj", subject, "-keyout", keys / f"{name}.key", "-out", request)
    authority = ("-CA", keys / "ca.crt", "-CAkey", keys / "ca.key", "-CAcreateserial", "-days", "3650")
    out = keys / f"{name}.crt"
    run("openssl", "x509", "-req", "-in", request, *authority, "-extfile", extensions, "-out", out)


def kubeconfig(keys: Path, user: str) -> str:
    def inside(path: Path) -> str:
        return base64.b64encode(path.read_bytes()).decode()

    cluster = {"server": plan.API, "certificate-authority-data": inside(keys / "ca.crt")}
    credentials = {
        "client-certificate-data": inside(keys / f"{user}.crt"),
        "client-key-data": inside(keys / f"{user}.key"),
    }
    whole = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "lab", "cluster": cluster}],
        "users": [{"name": user, "user": credentials}],
        "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": user}}],
        "current-context": "lab",
    }
    return json.dumps(whole, indent=1)
