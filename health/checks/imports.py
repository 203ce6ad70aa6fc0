"""Imports for a tree's checks: the tree's own lib comes before Python's path.

Trees name their modules alike, so a process serves one tree at a time and drops the modules of the previous one.
Python's own path stays unchanged.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from gitsync.errors import GitsyncError

BYTECODE = Path("/run/minivm/health/bytecode")


class _Importer:
    """Finder placed before Python's own; remembers the modules that it found."""

    def __init__(self) -> None:
        self._lib = ""
        self._found: set[str] = set()

    def serve(self, lib: Path) -> None:
        if self not in sys.meta_path:
            sys.meta_path.insert(sys.meta_path.index(PathFinder), self)
            # A published tree is never written to, so keep the bytecode elsewhere.
            if os.access(BYTECODE.parent, os.W_OK):
                sys.pycache_prefix = str(BYTECODE)
            else:
                sys.dont_write_bytecode = True
        if str(lib) != self._lib:
            for name in self._found:
                sys.modules.pop(name, None)
            self._lib, self._found = str(lib), set()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, [self._lib, *sys.path] if path is None else path, target)
        if spec is None or not self._is_in_lib(spec):
            return None
        self._found.add(name)
        return spec

    def _is_in_lib(self, spec: ModuleSpec) -> bool:
        # A namespace package (no __init__.py) has search locations instead of an origin.
        places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
        return any(place.startswith(f"{self._lib}/") for place in places)


_importer = _Importer()


def serve(tree: Path) -> None:
    """Import from the tree's lib from now on."""
    _importer.serve(tree / "lib")


def load(path: Path) -> ModuleType:
    """Load a check's file as a module of its own."""
    spec = spec_from_file_location(f"minivm_check_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise GitsyncError("load a check", "not a Python file", file=path)
    module = module_from_spec(spec)
    # Dataclasses look up their module here.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
