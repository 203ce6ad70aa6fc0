"""Render the chart with Helm's own engine (the adapter of helm_python), and read a person's values for it."""

from __future__ import annotations

import re
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
            try:
                loaded.validate_schema(loaded.merge_values(dict(values)))
            except helm_python.HelmError as error:
                hint = "docs/reference/chart.md has the keys"
                raise ClusterError("use the values", in_words(str(error)), hint=hint) from error
            return loaded.render(dict(values), name=release, namespace=namespace)
    except helm_python.HelmError as error:
        raise ClusterError(f"render {chart.name}", str(error).strip()) from error


_LINE = re.compile(r"\s*- at '(?P<at>[^']*)': (?P<what>.*)")
_GOT = re.compile(r"(?P<bound>minimum: |maximum: |)got (?P<got>.*), want (?P<want>.*)")
_BOUNDS = {"minimum: ": "at least ", "maximum: ": "at most ", "": ""}
_EXTRA = re.compile(r"additional properties (?P<keys>.*) not allowed")


def in_words(text: str) -> str:
    """Write the schema's errors as `FIELD: what is wrong`, one line each; a line that is of no known form stays."""
    lines = []
    for line in text.strip().splitlines()[1:]:
        if not (found := _LINE.fullmatch(line)):
            lines.append(line.strip())
            continue
        field, what = ".".join(found["at"].strip("/").split("/")) or "the values", found["what"]
        if what.endswith(("failed", ", want null")):
            continue  # the lines below it say what is wrong
        if extra := _EXTRA.fullmatch(what):
            what = f"no such key: {extra['keys']}"
        elif got := _GOT.fullmatch(what):
            what = f"it must be {_BOUNDS[got['bound']]}{got['want']}, not {got['got']}"
        lines.append(f"{field}: {what}")
    return "; ".join(lines) if len(lines) == 1 else "\n".join(["", *(f"  {line}" for line in lines)]) or text.strip()


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
