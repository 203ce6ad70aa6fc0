"""Packages and their floors (docs/architecture.md)."""

from __future__ import annotations

PRODUCT = ("ground", "images", "init", "health", "gitsync", "fleet", "cluster")
# Folders of a package from the bottom up; folders on one floor do not import each other. "" is the package's own
# folder.
FLOORS: dict[str, list[set[str]]] = {
    "ground": [{""}],
    "init": [
        {""}, {"plan"}, {"engine", "dropins"}, {"view"}, {"pid1", "pod"}, {"slurm"}, {"state", "accounts"},
        {"prepare", "drain", "helpers", "people"},
    ],
    "health": [{""}, {"checks", "jobs"}, {"runner", "broker", "active", "notify"}],
    "gitsync": [{""}, {"repo"}, {"tree"}, {"cycle", "mirror"}],
    "images": [{""}, {"definition"}, {"archive", "engine"}, {"make", "ship"}, {"cli"}],
    "fleet": [{""}, {"world"}, {"decide"}, {"act"}, {"report"}, {"scim"}],
    "cluster": [{"", "change", "migrate"}],
}  # fmt: skip
