"""The fleet's own client before a test's API server, and what that server says to who writes nonsense."""

from __future__ import annotations

import asyncio
import json
import urllib.error
from collections.abc import Awaitable, Callable
from typing import TypeVar

from kubernetes_asyncio import client

from fleet.act.api_client import ApiClient
from tests.kubernetes.apiserver import ApiServer, Object

T = TypeVar("T")


def do(api: ApiServer, deed: Callable[[ApiClient], Awaitable[T]]) -> T:
    async def whole() -> T:
        settings = client.Configuration(host=api.url)
        settings.verify_ssl = False
        settings.api_key = {"BearerToken": f"Bearer {api.token}"}
        fleet = ApiClient(client.ApiClient(settings), "default", "slurm")
        try:
            return await deed(fleet)
        finally:
            await fleet.close()

    return asyncio.run(whole())


def refused(api: ApiServer, where: str, body: Object) -> str:
    """Return the server's refusal, or "" when it accepts the change."""
    try:
        api.merge(where, body)
    except urllib.error.HTTPError as error:
        return str(json.load(error)["message"])
    return ""
