"""A person's own values for the chart, read from a file. Their names and types are the chart's schema's to judge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cluster.errors import ClusterError
from images.definition.load import read_yaml

WHAT = "read the values"


def read_overrides(file: Path) -> dict[str, Any]:
    found = read_yaml(file, str(file), WHAT)
    if found is None:
        return {}
    if not isinstance(found, dict):
        why = f"{file} holds a {type(found).__name__}, not names with values"
        raise ClusterError(WHAT, why, hint="as in cluster/chart/values.yaml")
    return found
