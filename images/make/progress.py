"""Show a build's progress: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TextIO

from ground.errors import counted
from images.make.plan import BuildResult, Planned

# minivm's marker on a line of its own, as the classic builder and BuildKit show it; never in an echoed RUN line.
STEP = re.compile(r"^(?:#\d+ [\d.]+ )?minivm: (?P<step>.+)$")
UNPACKING = re.compile(r"^(?:#\d+ [\d.]+ )?(?:Unpacking|Setting up|Get:\d+) (?:\S+ )?(?P<what>\S+)")


class Reporter(Protocol):
    """Interface through which a build reports progress."""

    def log(self, text: str) -> None: ...
    def start(self, key: str, why: str) -> None: ...
    def line(self, key: str, text: str) -> None: ...
    def done(self, key: str, seconds: float) -> None: ...


class Plain:
    """Print one line when an image begins, passes a step, or ends: for logs and pipes."""

    def __init__(self, to: TextIO | None = None) -> None:
        self.steps: dict[str, str] = {}
        self.lock = threading.Lock()
        self.to = to

    def log(self, text: str) -> None:
        with self.lock:
            print(text, file=self.to or sys.stdout, flush=True)

    def start(self, key: str, why: str) -> None:
        self.log(f"{key}: building ({why})")

    def line(self, key: str, text: str) -> None:
        match = STEP.match(text)
        if match and self.steps.get(key) != match["step"]:
            self.steps[key] = match["step"]
            self.log(f"{key}: {match['step']}")

    def done(self, key: str, seconds: float) -> None:
        self.log(f"{key}: done in {seconds:.1f} s")


class Bars:
    """Show a line for each image being built, with its step and output, and a bar over all of them."""

    def __init__(self, total: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self.progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description:<24}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[step]}"),
        )
        self.all = self.progress.add_task("images", total=total, step="")
        self.tasks: dict[str, object] = {}
        self.steps: dict[str, str] = {}

    def log(self, text: str) -> None:
        self.progress.console.print(text, highlight=False, markup=False)

    def start(self, key: str, why: str) -> None:
        self.tasks[key] = self.progress.add_task(key, total=None, step=why)

    def line(self, key: str, text: str) -> None:
        match = STEP.match(text)
        if match:
            self.steps[key] = match["step"]
        passing = UNPACKING.match(text)
        step = self.steps.get(key, "")
        shown = f"{step}: {passing['what']}" if passing else step
        self.progress.update(self.tasks[key], step=shown[:70])  # type: ignore[arg-type]  # rich's own TaskID

    def done(self, key: str, seconds: float) -> None:
        self.progress.remove_task(self.tasks.pop(key))  # type: ignore[arg-type]  # rich's own TaskID
        self.progress.advance(self.all)
        self.log(f"{key}: done in {seconds:.1f} s")


@contextmanager
def open_reporter(total: int, to: TextIO) -> Iterator[Reporter]:
    if not sys.stdout.isatty() or not total or to is not sys.stdout:
        yield Plain(to)
        return
    bars = Bars(total)
    with bars.progress:
        yield bars


# Output of tables for people and JSON for programs.


def format_megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB"


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
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


def format_reasons(why: Sequence[str], limit: int = 3) -> str:
    rest = len(why) - limit
    return "; ".join(why[:limit]) + (f"; and {rest} more" if rest > 0 else "")


def list_plan_rows(planned: Iterable[Planned]) -> list[tuple[str, str, str]]:
    return [(p.image.reference, "present" if p.present else "build", format_reasons(p.why)) for p in planned]


def describe_plan(planned: Iterable[Planned]) -> list[Mapping[str, Any]]:
    return [{"image": p.image.reference, "present": p.present, "changed": list(p.why)} for p in planned]


def list_result_rows(results: Iterable[BuildResult], sizes: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Return a row for each image that was built."""
    rows: list[tuple[str, ...]] = []
    for result in results:
        if result.built:
            size = format_megabytes(sizes.get(result.image.reference, 0))
            rows.append((result.image.reference, size, format_reasons(result.why, 2), f"{result.seconds:.1f}"))
    return rows


def print_results(results: Sequence[BuildResult], sizes: Mapping[str, int]) -> None:
    if rows := list_result_rows(results, sizes):
        print_table(("image", "size", "what changed", "seconds"), rows)
    if current := len(results) - len(rows):
        print(f"up to date: {counted(current, 'image')}")


def describe_results(results: Iterable[BuildResult], sizes: Mapping[str, int]) -> list[Mapping[str, Any]]:
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


def print_json(data: Any) -> None:
    print(json.dumps(data, indent=2))
