"""How PID 1 comes by its modules: in a hurry at its start, and later in spite of what could not be read before.

Python takes 0.2 million instructions to find a module and to see that its byte code is as new as its source. And it
remembers for ever that a directory could not be looked at, and takes a package whose first file could not be looked at
for an empty one.
"""

from __future__ import annotations

import os
import sys
from _frozen_importlib import ModuleSpec  # both are there before anything is loaded; `importlib.machinery` is not
from _frozen_importlib_external import MAGIC_NUMBER
from marshal import loads

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

AS_IT_STANDS = MAGIC_NUMBER + b"\1\0\0\0"  # byte code of this Python that is not compared with its source (PEP 552)
HEAD = 16  # bytes before the code itself
MOST = 1 << 16  # what is longer is left to Python


class Compiled:
    """Our modules, from the byte code that an image has of them. Where there is none, or it is to be compared with its
    source, as in a checkout, Python's own finders are asked."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if path is None or not name.startswith(("init.", "ground.")):
            return None
        place, tail = path[0], name.rpartition(".")[2]
        return _compiled(name, place, tail) or _compiled(name, f"{place}/{tail}", "__init__")

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        return None

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        spec = module.__spec__
        code, spec.loader_state = spec.loader_state, None  # type: ignore[union-attr]
        exec(code, module.__dict__)


def _compiled(name: str, place: str, tail: str) -> ModuleSpec | None:
    file = f"{place}/__pycache__/{tail}.{sys.implementation.cache_tag}.pyc"
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = os.read(fd, MOST)
        finally:
            os.close(fd)
    except OSError:
        return None
    if not data.startswith(AS_IT_STANDS) or len(data) == MOST:
        return None
    spec = ModuleSpec(name, Compiled, origin=f"{place}/{tail}.py", loader_state=loads(memoryview(data)[HEAD:]))  # type: ignore[arg-type]
    spec.has_location, spec.cached = True, file
    if tail == "__init__":
        spec.submodule_search_locations = [place]
    return spec


def hurry() -> None:
    """Where this very module has such byte code: a checkout's would only be looked at twice."""
    if _compiled(__name__, __file__.rpartition("/")[0], "modules") is not None:
        sys.meta_path.insert(0, Compiled)


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
