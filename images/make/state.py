"""Remember the last build on this machine: its inputs by name, so that `plan` shows changes, and rendered texts."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ground.files import locked, write_whole
from images.make import render
from images.make.plan import digest

# Of so many steps: of more than are in use, for somebody goes from one branch to another and back.
KEPT = 256
DIGEST = re.compile(r"[0-9a-f]{64}")


@contextmanager
def added(path: Path) -> Iterator[None]:
    """Lock a file's directory, so that concurrent builds of this tree add to the file without losing entries."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a file system without locks: the last one's word is all there is
            locked(fd, within=5.0)
        yield
    finally:
        os.close(fd)


class BuildState:
    """build/state/VARIANT.json: the inputs of each image. Losing it loses only explanations."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.built = self.read()

    def read(self) -> dict[str, Mapping[str, str]]:
        try:
            return {key: value["inputs"] for key, value in json.loads(self.path.read_text()).items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {}

    def inputs(self, key: str) -> Mapping[str, str] | None:
        return self.built.get(key)

    def record(self, key: str, inputs: Mapping[str, str]) -> None:
        with added(self.path):
            self.built = {**self.read(), key: inputs}
            data = {name: {"inputs": inputs} for name, inputs in sorted(self.built.items())}
            write_whole(self.path, json.dumps(data, indent=1), 0o600)


class Rendered:
    """Digests of rendered Dockerfiles, by everything that decides their text, so that no-op builds skip rendering.

    Stored in build/state/VARIANT.rendered.json. Losing it costs only time.
    """

    def __init__(self, templates: Path, path: Path | None = None) -> None:
        self.templates, self.path = templates, path
        self.stamps = self.stamped()
        self.makers = self.read()
        self.known = self.written()
        self.used: dict[str, str] = {}

    def written(self) -> dict[str, str]:
        try:
            data = json.loads(self.path.read_text()) if self.path else {}
            return {k: v for k, v in data.items() if isinstance(v, str) and DIGEST.fullmatch(v)}
        except (OSError, ValueError, AttributeError, RecursionError):
            return {}

    def stamped(self) -> list[tuple[int, int]]:
        """Return inodes and change times: unlike modification times, an edit that is undone still changes them."""
        return [
            (status.st_ino, status.st_ctime_ns) for status in (path.stat() for path in render.makers(self.templates))
        ]

    def read(self) -> str:
        return "".join(digest(maker.read_bytes()) for maker in render.makers(self.templates))

    def instructions(self, step: render.DockerfileContent) -> str:
        """Return the digest of a Dockerfile, without its base: the base's tag is an input of its own."""
        key = digest(f"{self.makers}{step!r}")
        if key not in self.used:
            self.used[key] = self.known.get(key) or digest(
                render.dockerfile(step, self.templates).replace(step.base, "parent", 1)
            )
        return self.used[key]

    def keep(self) -> None:
        """Save the digests, those used last at the end, which stay longest."""
        # What somebody edits while this builds may have been rendered as it was before, or after.
        if not self.path or self.used.keys() <= self.known.keys() or self.stamped() != self.stamps:
            return
        with suppress(OSError), added(self.path):  # a full disk, a tree of somebody else's
            rest = {key: value for key, value in self.written().items() if key not in self.used}
            write_whole(self.path, json.dumps(dict(list({**rest, **self.used}.items())[-KEPT:])), 0o600)
