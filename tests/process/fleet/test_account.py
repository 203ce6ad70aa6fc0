"""The pod's own account, over real TLS: an authority as clusters have them, a token that changes, one that is away."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from kubernetes_asyncio.config import incluster_config

from fleet import FleetError
from fleet.act.api_client import ApiClient
from tests import kube_api

LIST = {"items": [{"metadata": {"name": "n0", "uid": "u"}}], "metadata": {"resourceVersion": "1"}}


@pytest.fixture
def tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Those that the server was shown."""
    shown: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            shown.append(self.headers["Authorization"])
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(LIST).encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server: ThreadingHTTPServer = kube_api.serve(tmp_path, Handler)
    (tmp_path / "token").write_text("first")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "localhost")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.server_port))
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    yield shown
    server.shutdown()
    server.server_close()


async def listed(api: ApiClient) -> list[str]:
    return [item["metadata"]["name"] async for items, _ in api.list("Node") for item in items]


def test_an_authority_without_a_key_usage_is_believed(tokens: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Many clusters' authorities have none, and Python 3.13, which the image has, asks for it of itself."""
    made = ssl.create_default_context

    def strict(*words: Any, **settings: Any) -> ssl.SSLContext:
        context = made(*words, **settings)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", strict)

    async def whole() -> list[str]:
        api = await ApiClient.open("hpc", "slurm")
        try:
            return await listed(api)
        finally:
            await api.close()

    assert asyncio.run(whole()) == ["n0"]
    assert tokens == ["Bearer first"]


def test_a_server_that_its_authority_has_not_signed_is_not(
    tokens: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    kube_api._certificate(tmp_path / "other", "ca", "-subj", "/CN=authority")
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "other" / "ca.crt"))

    async def whole() -> None:
        api = await ApiClient.open("hpc", "slurm")
        try:
            with pytest.raises(FleetError, match="certificate"):
                await listed(api)
        finally:
            await api.close()

    asyncio.run(whole())
    assert tokens == [], "nobody was shown the token"


def test_a_token_is_read_again_and_one_that_is_away_is_an_error_and_no_end(
    tokens: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It is read at each request.
    monkeypatch.setattr(incluster_config, "TOKEN_REFRESH_PERIOD", -incluster_config.TOKEN_REFRESH_PERIOD)

    async def whole() -> None:
        api = await ApiClient.open("hpc", "slurm")
        try:
            await listed(api)
            for gone in (lambda: (tmp_path / "token").write_text(""), (tmp_path / "token").unlink):
                gone()
                with pytest.raises(FleetError, match="cannot list Nodes"):
                    await listed(api)
            (tmp_path / "token").write_text("second")
            await listed(api)
        finally:
            await api.close()

    asyncio.run(whole())
    assert tokens == ["Bearer first", "Bearer second"]
