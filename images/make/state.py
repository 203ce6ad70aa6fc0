"""What was built last on this machine: the inputs by name, so that `plan` can say which of them changed; and what was
rendered for it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ground.files import write_whole
from images.make import render
from images.make.plan import digest

# Of so many steps: of more than are in use, for somebody goes from one branch to another and back.
KEPT = 256
DIGEST = re.compile(r"[0-9a-f]{64}")


class State:
    """build/state/VARIANT.json. Losing it costs nothing but the reasons: presence is asked of the engine."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.built: dict[str, Mapping[str, str]] = {}
        try:
            self.built = {key: value["inputs"] for key, value in json.loads(path.read_text()).items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            self.built = {}

    def inputs(self, key: str) -> Mapping[str, str] | None:
        return self.built.get(key)

    def record(self, key: str, inputs: Mapping[str, str]) -> None:
        self.built[key] = inputs
        data = {name: {"inputs": inputs} for name, inputs in sorted(self.built.items())}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, json.dumps(data, indent=1), 0o600)


class Rendered:
    """The digests of Dockerfiles that were made before, by all that decides their text: what need not be made again.

    build/state/VARIANT.rendered.json. Losing it costs time alone.
    """

    def __init__(self, templates: Path, path: Path | None = None) -> None:
        self.templates, self.path = templates, path
        self.makers = self.read()
        self.known: dict[str, str] = {}
        try:
            found = json.loads(path.read_text()) if path else {}
            self.known = {k: v for k, v in found.items() if isinstance(v, str) and DIGEST.fullmatch(v)}
        except (OSError, ValueError, AttributeError, RecursionError):
            pass
        self.used: dict[str, str] = {}

    def read(self) -> str:
        return "".join(digest(maker.read_bytes()) for maker in render.makers(self.templates))

    def instructions(self, step: render.Step) -> str:
        """The base's tag is its hash, and that is an input of its own: a change below must not read as one up here."""
        key = digest(f"{self.makers}{step!r}")
        if key not in self.used:
            self.used[key] = self.known.get(key) or digest(
                render.dockerfile(step, self.templates).replace(step.base, "parent", 1)
            )
        return self.used[key]

    def keep(self) -> None:
        """What was used last stays longest."""
        rest = {key: value for key, value in self.known.items() if key not in self.used}
        kept = dict(list({**rest, **self.used}.items())[-KEPT:])
        # What somebody edits while this builds may have been rendered as it was before, or after.
        if self.path and kept.keys() != self.known.keys() and self.read() == self.makers:
            with suppress(OSError):  # a full disk, a tree of somebody else's
                self.path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(self.path, json.dumps(kept), 0o600)
