"""The API server as the lab's own helpers ask it, with the administrator's key."""

from __future__ import annotations

import json
import ssl
import urllib.request
from typing import Any

SERVER = "https://127.0.0.1:6443"
Object = dict[str, Any]
# Of a server that is away, or says what nobody can read.
ERRORS = (OSError, ValueError, KeyError)


class Api:
    def __init__(self, keys: str, server: str = SERVER) -> None:
        self.server = server
        self.context = ssl.create_default_context(cafile=f"{keys}/ca.crt")
        self.context.load_cert_chain(f"{keys}/admin.crt", f"{keys}/admin.key")

    def call(self, path: str, *, method: str = "GET", body: Object | None = None) -> Object:
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(
            f"{self.server}{path}", data=data, method=method, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, context=self.context, timeout=5) as reply:
            found: Object = json.load(reply)
        return found

    def items(self, path: str) -> list[Object]:
        found: list[Object] = self.call(path)["items"]
        return found
