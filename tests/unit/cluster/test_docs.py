"""Statements of the documentation about the chart and the local cluster."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from cluster.render import CHART
from tests.pages import blocks

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
OURS = [
    DOCS / "tutorial.md",
    DOCS / "troubleshooting.md",
    DOCS / "reference/chart.md",
    *(DOCS / "how-to").glob("*.md"),
]


def test_the_reference_names_every_setting() -> None:
    text = (DOCS / "reference/chart.md").read_text()
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    missing = [name for name in values if f"`{name}" not in text]
    for group in ("slurm", "accounting", "secrets", "scripts", "home", "image", "workers"):
        missing += [f"{group}.{name}" for name in values[group] if name not in text]
    missing += [f"pool.{name}" for name in values["workers"]["defaults"] if f"`{name}" not in text]
    assert not missing


def test_links_lead_somewhere() -> None:
    broken = []
    for page in OURS:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if not target.startswith("http") and not (page.parent / target).resolve().exists():
                broken.append(f"{page.name}: {target}")
    assert not broken


def test_values_in_the_pages_are_settings_of_the_chart() -> None:
    """The chart's schema accepts every yaml block of the pages that looks like values."""
    from tests.support.rendered_chart import render_texts

    for page in OURS:
        for text in [block.text for block in blocks(page) if block.language == "yaml" and block.kind != "file"]:
            for line_group in [text] if not text.startswith("home: ") else text.splitlines():
                render_texts(yaml.safe_load(line_group), release="slurm", namespace="hpc")
