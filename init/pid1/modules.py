"""Import hooks of PID 1: a fast path at start, and a finder that retries after errors.

Python takes 0.2 million instructions to find a module and to compare its byte code with the source. It also remembers
for ever that a directory could not be read, and takes a package whose first file could not be read for an empty one.
"""

from __future__ import annotations

import os
import sys
from _frozen_importlib import ModuleSpec  # both exist before anything is loaded, unlike `importlib.machinery`
from _frozen_importlib_external import MAGIC_NUMBER
from marshal import loads

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

AS_IT_STANDS = MAGIC_NUMBER + b"\1\0\0\0"  # byte code of this Python that is not compared with its source (PEP 552)
HEAD = 16  # bytes before the code
MOST = 1 << 16  # Python itself loads longer files


class Compiled:
    """Finder of minivm's modules in the image's byte code.

    Without such byte code, as in a checkout, Python's own finders load them.
    """

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if path is None or not name.startswith(("init.", "ground.")):
            return None
        place, tail = path[0], name.rpartition(".")[2]
        return _find_compiled(name, place, tail) or _find_compiled(name, f"{place}/{tail}", "__init__")

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        return None

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        spec = module.__spec__
        code, spec.loader_state = spec.loader_state, None  # type: ignore[union-attr]
        exec(code, module.__dict__)


def _find_compiled(name: str, place: str, tail: str) -> ModuleSpec | None:
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
    """Use the fast path if this very module has such byte code; a checkout's modules would only be searched twice."""
    if _find_compiled(__name__, __file__.rpartition("/")[0], "modules") is not None:
        sys.meta_path.insert(0, Compiled)


class Finder:
    """Wrapper of Python's own finder: forgets failures, and finds no package without files, as there are none here."""

    def __init__(self, own: Finder) -> None:
        self._own = own

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = self._own.find_spec(name, path, target)
        if spec is not None and spec.origin is not None:
            return spec
        importers = sys.path_importer_cache
        for place in list(importers):
            del importers[place]
        return None


def look_again() -> None:
    finders = sys.meta_path
    finders[:] = [Finder(finder) if getattr(finder, "__name__", "") == "PathFinder" else finder for finder in finders]  # type: ignore[arg-type]  # the protocol is private
