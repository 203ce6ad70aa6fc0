"""The engine that DOCKER_HOST names."""

from __future__ import annotations

from typing import Any


def connect() -> Any:
    import docker  # type: ignore[import-untyped]  # no stubs are published with it

    return docker.from_env(max_pool_size=32)
