"""Render the chart with Helm's own engine (the adapter of helm_python), and read a person's values for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from cluster.errors import ClusterError
from images.definition.load import UniqueLoader, read_yaml

CHART = Path(__file__).resolve().parents[1] / "chart"

Document = dict[str, Any]


def render_texts(values: Mapping[str, Any], *, release: str, namespace: str, chart: Path = CHART) -> dict[str, str]:
    """Render template -> text. Values are checked against the chart's schema first."""
    import helm_python  # imported late: it takes 50 ms and 40 MB

    try:
        with helm_python.Chart.load(chart) as loaded:
            loaded.validate_schema(loaded.merge_values(dict(values)))
            return loaded.render(dict(values), name=release, namespace=namespace)
    except helm_python.HelmError as error:
        raise ClusterError(f"render {chart.name}", str(error).strip()) from error


def render(values: Mapping[str, Any], *, release: str, namespace: str) -> list[Document]:
    """Return the chart's objects, in the order of the templates."""
    documents: list[Document] = []
    texts = render_texts(values, release=release, namespace=namespace)
    for template, text in sorted(texts.items()):
        if not template.endswith((".yaml", ".yml")):
            continue
        try:
            documents += [item for item in yaml.load_all(text, Loader=UniqueLoader) if item]
        except yaml.YAMLError as error:
            raise ClusterError(f"read what {template} renders to", str(error)) from error
    return documents


def read_overrides(file: Path) -> dict[str, Any]:
    """Read a file of values; the chart's schema checks names and types."""
    what = "read the values"
    data = read_yaml(file, str(file), what)
    if data is None:
        return {}
    if not isinstance(data, dict):
        problem = f"{file} holds a {type(data).__name__}, not names with values"
        raise ClusterError(what, problem, hint="as in cluster/chart/values.yaml")
    return data
