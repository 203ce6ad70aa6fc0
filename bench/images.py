"""Measure image builds: cold, no-op, one-file change, hash and plan, each beside plain `docker build`.

The plain build uses the same rendered Dockerfiles with the same contexts, one `docker build` after the other through
the same API: what a Makefile of `docker build` lines would do, with its cache for the repeated runs. The root is not
compared: plain docker cannot make one without a registry, so it is reported alone.

By default the controller's chain, two to three minutes; MINIVM_BENCH_ROLES="controller login worker" for more.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from images.cli.session import Session
from images.engine.builder import pack_context
from images.engine.docker import DockerEngine
from images.make import progress
from images.make.build import Maker
from images.make.plan import Composed, PlannedImage
from images.make.progress import Plain
from images.settings import read

ROOT = Path(__file__).resolve().parent.parent
PREFIX = "minivm-bench"
REPEATS = 5


@dataclass(frozen=True, slots=True)
class Figure:
    what: str
    minivm: float
    plain: float | None = None

    def row(self) -> tuple[str, ...]:
        if self.plain is None:
            return (self.what, seconds(self.minivm), "-", "-")
        return (self.what, seconds(self.minivm), seconds(self.plain), f"{self.minivm / self.plain:.2f}")


def seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 10 else f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


def timed(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


class Contexts:
    """Every image's context directory, kept for the plain builds."""

    def __init__(self, maker: Maker, images: list[PlannedImage], stack: ExitStack) -> None:
        self.directories: dict[str, Path] = {}
        for image in images:
            directory = (
                Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"bench-{image.name}-"))) / "context"
            )
            directory.mkdir()
            maker.write_context(image, directory)
            self.directories[image.key] = directory


def plain_build(
    engine: DockerEngine, images: list[PlannedImage], contexts: Contexts, names: dict[str, str], *, cache: bool
) -> None:
    """Run `docker build -t` for each image, parents first, through the API that the command line uses."""
    for image in images:
        with pack_context(contexts.directories[image.key]) as stream:
            for event in engine.api.build(fileobj=stream, custom_context=True, decode=True, nocache=not cache, rm=True,
                                          tag=names[image.key]):  # fmt: skip
                if "error" in event:
                    raise SystemExit(f"bench: plain build of {image.key}: {event['error']}")


def rebase(images: list[PlannedImage], contexts: Contexts, names: dict[str, str]) -> None:
    """Point the plain builds at each other instead of at minivm's images."""
    for image in images:
        dockerfile = contexts.directories[image.key] / "Dockerfile"
        if image.parent in names:
            dockerfile.write_text(dockerfile.read_text().replace(image.step.base, names[image.parent], 1))


def command(*arguments: str) -> tuple[float, float]:
    """Run build.py as a process; return wall seconds and processor seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    wall = timed(lambda: subprocess.run([sys.executable, str(ROOT / "build.py"), *arguments], check=True,
                                        stdout=subprocess.DEVNULL))  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def best(work: Callable[[], float]) -> float:
    """Return the median of a few runs: one run on a busy machine says little."""
    return statistics.median(work() for _ in range(REPEATS))


def cold(session: Session, composed: Composed, images: list[PlannedImage]) -> float:
    maker = Maker(session.place, composed, session.engine, Quiet(), "")
    return sum(maker.make(image) for image in images)


class Quiet(Plain):
    def log(self, text: str) -> None:
        """Print nothing: the bench prints its own table."""


def main() -> None:
    roles = os.environ.get("MINIVM_BENCH_ROLES", "controller").split()
    settings = replace(read(), prefix=PREFIX)
    session = Session.open(ROOT, settings)
    engine = session.engine
    composed = session.compose(roles)
    images = composed.list_needed(roles)
    root = [image for image in images if image.is_bootstrapped]
    rest = [image for image in images if not image.is_bootstrapped]
    names = {image.key: f"{PREFIX}-plain/{image.name}:{image.key.partition(':')[0]}" for image in rest}
    figures: list[Figure] = []
    with ExitStack() as stack:
        stack.callback(remove, engine)
        figures.append(Figure("the root, from nothing", cold(session, composed, root)))
        own_seconds = cold(session, composed, rest)
        maker = Maker(session.place, composed, engine, Quiet(), "")
        contexts = Contexts(maker, rest, stack)
        rebase(rest, contexts, names)
        plain = timed(lambda: plain_build(engine, rest, contexts, names, cache=False))
        figures.append(Figure(f"cold build, {len(rest)} images", own_seconds, plain))
        # The plain builds fill their cache once more, because `nocache` left them none to find.
        plain_build(engine, rest, contexts, names, cache=True)
        prefix = ("--set", f"prefix={PREFIX}")
        engine_noop = best(lambda: timed(lambda: plain_build(engine, rest, contexts, names, cache=True)))
        figures.append(Figure("no-op, wall", best(lambda: command(*prefix, "build", *roles)[0]), engine_noop))
        figures.append(Figure("no-op, processor", best(lambda: command(*prefix, "build", *roles)[1])))
        figures.append(Figure("plan, processor", best(lambda: command(*prefix, "plan", *roles)[1])))
        figures.append(Figure("hash and compose, in process", best(lambda: timed(lambda: session.compose(roles)))))
        figures.append(Figure("--help, processor", best(lambda: command("--help")[1])))
        last = images[-1]
        change = timed(lambda: maker.make(last))
        touched = contexts.directories[last.key]
        with (touched / "layer.tar").open("ab") as tar:
            tar.write(b"\0" * 512)
        figures.append(Figure(f"one file of {last.name}'s code changed", change,
                              timed(lambda: plain_build(engine, rest, contexts, names, cache=True))))  # fmt: skip
    progress.print_table(("what", "build.py", "docker build", "ratio"), [figure.row() for figure in figures])


def remove(engine: DockerEngine) -> None:
    for image in engine.images():
        for reference in image.references:
            if reference.startswith((f"{PREFIX}/", f"{PREFIX}-plain/")):
                engine.remove(reference)


if __name__ == "__main__":
    main()
