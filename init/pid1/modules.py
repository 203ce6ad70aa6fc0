"""What PID 1 cannot load now it must be able to load later.

Python remembers for ever that a directory could not be looked at, and takes a package whose first file could not be
looked at for an empty one.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class Finder:
    """In the place of Python's own, which it asks. What is not found is looked for anew the next time, and a package
    without files is not found: there are none here."""

    def __init__(self, own: Finder) -> None:
        self._own = own

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = self._own.find_spec(name, path, target)
        if spec is not None and spec.origin is not None:
            return spec
        known = sys.path_importer_cache
        for place in list(known):
            del known[place]
        return None


def look_again() -> None:
    found = sys.meta_path
    found[:] = [Finder(one) if getattr(one, "__name__", "") == "PathFinder" else one for one in found]  # type: ignore[arg-type]  # the protocol is private
