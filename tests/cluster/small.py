"""A cluster of one worker or a few, for a module that needs one made otherwise than the shared one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster.local import LocalCluster
from cluster.values import AUTHS, Options
from tests.cluster.conftest import IMAGES
from tests.support.ports import free_port


@contextmanager
def small_cluster(
    client: Any,
    name: str,
    root: Path,
    values: dict[str, Any],
    workers: int = 1,
    controllers: int = 1,
    auth: str = AUTHS[0],
) -> Iterator[LocalCluster]:
    options = Options(
        name=name,
        workers=workers,
        controllers=controllers,
        repository=IMAGES,
        port=free_port(),
        auth=auth,
        overrides=values,
    )
    cluster = LocalCluster(client, options, root=root, log=print)
    cluster.down()
    try:
        yield cluster
    finally:
        cluster.down()
