"""Kubernetes' API server with the pod's service account; uses the standard library's http and TLS."""

from __future__ import annotations

import http.client
import json
import os
import ssl
from pathlib import Path
from typing import Any

from init.errors import InitError
from init.pod.addresses import host_and_port

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


MERGE = "application/merge-patch+json"


def namespace() -> str:
    """Return the pod's namespace from its environment, else from its service account."""
    return os.environ.get("MINIVM_POD_NAMESPACE") or (ACCOUNT / "namespace").read_text().strip()


class ApiError(InitError):
    """The API server refused the request, or did not answer."""

    def __init__(self, what: str, why: str, *, status: int | None = None) -> None:
        super().__init__(what, why)
        self.status = status

    @property
    def missing(self) -> bool:
        """True if the object does not exist."""
        return self.status == 404

    @property
    def refused(self) -> bool:
        return self.status in (401, 403)


class ApiServer:
    def __init__(self, what: str, account: Path = ACCOUNT, server: str = "") -> None:
        """Connect with the pod's account; `what` names the purpose in errors."""
        self.what = what
        self.account = account
        host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
        self.host, self.port = host_and_port(
            server or f"[{host}]:{os.environ.get('KUBERNETES_SERVICE_PORT', '443')}", default=443
        )
        self.tls = ssl.create_default_context(cafile=str(account / "ca.crt"))
        # Python 3.13 requires certificate extensions that Kubernetes' own often lack: key usage in the authority's, the
        # authority key identifier in the server's. Other clients do not require them; chain, name and time are still
        # checked.
        self.tls.verify_flags &= ~ssl.VERIFY_X509_STRICT

    def ask(
        self, method: str, path: str, body: dict[str, Any] | None = None, kind: str = "application/json"
    ) -> dict[str, Any]:
        # Tokens are rotated: read it at each use.
        token = (self.account / "token").read_text().strip()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": kind}
        connection = http.client.HTTPSConnection(self.host, self.port, timeout=10, context=self.tls)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            reply = connection.getresponse()
            text = reply.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise ApiError(self.what, f"{self.host}:{self.port}: {error}") from error
        finally:
            connection.close()
        if reply.status >= 300:
            raise ApiError(self.what, f"{reply.status} {_message(text)}", status=reply.status)
        try:
            reply_data: dict[str, Any] = json.loads(text)
        except ValueError:
            raise ApiError(self.what, "the answer is not JSON") from None
        return reply_data


def _message(text: str) -> str:
    try:
        return str(json.loads(text).get("message", text))[:200]
    except (ValueError, AttributeError):
        return text[:200]
