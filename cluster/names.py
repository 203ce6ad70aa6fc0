"""Which clusters there are: told to whoever names one that is not there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from cluster.pods import LABEL


def saved(root: Path) -> set[str]:
    """Those that were brought up from this directory."""
    return {path.parent.name for path in root.glob("*/options.json")}


def labelled(api: Any) -> set[str]:
    """Those of which the engine has anything, wherever they were brought up."""
    return set(labels(api))


def labels(api: Any) -> Iterator[str]:
    filters = {"label": LABEL}
    having: list[dict[str, Any]] = [*api.containers(all=True, filters=filters), *api.networks(filters=filters)]
    having += api.volumes(filters=filters)["Volumes"] or []
    for item in having:
        yield item["Labels"][LABEL]


def hint(known: Iterable[str]) -> str:
    names = sorted(known)
    return f"there {'is' if len(names) == 1 else 'are'} {', '.join(names)}; --name chooses" if names else ""
