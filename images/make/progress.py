"""Show a build's progress: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

# A marker of ours on a line of its own, as the classic builder and BuildKit show it; never in an echoed RUN line.
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
        found = STEP.match(text)
        if found:
            self.steps[key] = found["step"]
        passing = UNPACKING.match(text)
        step = self.steps.get(key, "")
        shown = f"{step}: {passing['what']}" if passing else step
        self.progress.update(self.tasks[key], step=shown[:70])  # type: ignore[arg-type]  # rich's own TaskID

    def done(self, key: str, seconds: float) -> None:
        self.progress.remove_task(self.tasks.pop(key))  # type: ignore[arg-type]  # rich's own TaskID
        self.progress.advance(self.all)
        self.log(f"{key}: done in {seconds:.1f} s")


@contextmanager
def reporter(total: int, to: TextIO) -> Iterator[Reporter]:
    if not sys.stdout.isatty() or not total or to is not sys.stdout:
        yield Plain(to)
        return
    bars = Bars(total)
    with bars.progress:
        yield bars
