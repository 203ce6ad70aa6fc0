"""Output of tables for people and JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from images.make.plan import BuildResult, Planned


def megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print aligned columns: by rich on a terminal, plain elsewhere (without importing rich)."""
    listed = [tuple(row) for row in rows]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        shown = Table(box=None, header_style="bold", pad_edge=False)
        for column in columns:
            shown.add_column(column, overflow="fold")
        for row in listed:
            shown.add_row(*row)
        Console().print(shown, highlight=False, markup=False)
        return
    widths = [max(len(text) for text in column) for column in zip(columns, *listed, strict=True)]
    for row in (tuple(columns), *listed):
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def why_shown(why: Sequence[str], limit: int = 3) -> str:
    rest = len(why) - limit
    return "; ".join(why[:limit]) + (f"; and {rest} more" if rest > 0 else "")


def plan_rows(planned: Iterable[Planned]) -> list[tuple[str, str, str]]:
    return [(p.image.reference, "present" if p.present else "build", why_shown(p.why)) for p in planned]


def plan_data(planned: Iterable[Planned]) -> list[Mapping[str, Any]]:
    return [{"image": p.image.reference, "present": p.present, "changed": list(p.why)} for p in planned]


def result_rows(results: Iterable[BuildResult], sizes: Mapping[str, int]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for result in results:
        reference = result.image.reference
        seconds = f"{result.seconds:.1f}" if result.built else "-"
        rows.append((reference, megabytes(sizes.get(reference, 0)), why_shown(result.why, 2) or "nothing", seconds))
    return rows


def result_data(results: Iterable[BuildResult], sizes: Mapping[str, int]) -> list[Mapping[str, Any]]:
    return [
        {
            "image": r.image.reference,
            "size": sizes.get(r.image.reference, 0),
            "built": r.built,
            "changed": list(r.why),
            "seconds": round(r.seconds, 2),
        }
        for r in results
    ]


def as_json(data: Any) -> None:
    print(json.dumps(data, indent=2))
