"""Load the checks of one tree, and select those of a round: Python files by import, other executables by their header.

A program in another language declares itself in one comment line and answers by its exit code:

# minivm-check: {"about": "...", "class": "node", "period_s": 300, "deadline_s": 10, "when": ["background"]}

Exit 0 is ok, exit 80 (MINIVM_UNFIT) a problem with the last line of output as the reason. Any other exit code means a
broken script, and the verdict is unknown: a shell exits with 1 or 2 when the script itself is wrong.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from gitsync.errors import GitsyncError
from health import api
from health.api import Check, Command, When
from health.script import UNFIT
from health.verdict import Verdict

# Imports for a tree's checks: the tree's own lib comes before Python's path.
# Trees name their modules alike, so a process serves one tree at a time and drops the modules of the previous one.
# Python's own path stays unchanged.
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


def serve_imports(tree: Path) -> None:
    """Import from the tree's lib from now on."""
    _importer.serve(tree / "lib")


def load_file(path: Path) -> ModuleType:
    """Load a check's file as a module of its own."""
    spec = spec_from_file_location(f"minivm_check_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise GitsyncError("load a check", "not a Python file", file=path)
    module = module_from_spec(spec)
    # Dataclasses look up their module here.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


MARK = "minivm-check:"
HEADER_KEYS = {"about", "class", "period_s", "deadline_s", "when", "user_made"}


@dataclass(frozen=True, slots=True)
class Loaded:
    """Checks that loaded, and the errors of the rest: one broken file does not affect the rest."""

    checks: dict[str, api.CheckModule]
    broken: dict[str, str]


class _Program:
    """A check in another language, with a check module's interface."""

    def __init__(self, check: api.Check) -> None:
        self.CHECK = check
        self.parse = self._parse
        self.judge = self._judge

    def _parse(self, inputs: api.Inputs) -> Any:
        name = self.CHECK.name
        return inputs.code(name), inputs.text(name) or inputs.why(name)

    def _judge(self, measured: Any, context: api.Context) -> Iterable[api.Finding]:
        code, text = measured
        last = text.strip().splitlines()[-1].strip()[:300] if text.strip() else ""
        if code == 0:
            return [api.ok(last or "the program reports no problem")]
        if code == UNFIT:
            return [api.problem(last or "the program reports a problem")]
        return [api.unknown(f"broken script: {last}")]


def load_checks(tree: Path, names: Iterable[str] | None = None, kind: str = "health.d") -> Loaded:
    """Load the checks of one directory of the tree, `health.d` or `active.d`."""
    directory = tree / kind
    checks: dict[str, api.CheckModule] = {}
    broken: dict[str, str] = {}
    selected = None if names is None else set(names)
    serve_imports(tree)
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        if path.name.startswith((".", "_")) or path.is_dir() or (selected is not None and path.stem not in selected):
            continue
        try:
            module = _load_module(path) if path.suffix == ".py" else _load_program(path)
        # A tree's file may fail in any way; the failure counts for that file only.
        except (Exception, SystemExit) as error:
            broken[path.stem] = f"{path.name}: {type(error).__name__}: {error}"
            continue
        if module is None:
            continue
        if module.CHECK.name != path.stem:
            broken[path.stem] = f"{path.name}: declares the name {module.CHECK.name!r}, wanted {path.stem!r}"
            continue
        if module.CHECK.user_made is api.UserMade.YES and module.CHECK.class_ is not api.Class.USER:
            fault = f"declares that a job's user can cause it: set the class to user, not {module.CHECK.class_}"
            broken[path.stem] = f"{path.name}: {fault}"
            continue
        checks[path.stem] = module
    return Loaded(checks, broken)


def load_limits(tree: Path, name: str) -> api.Limits:
    path = tree / "lib" / "thresholds" / f"{name}.json"
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise GitsyncError("read thresholds", str(error), file=path) from error
    if not isinstance(data, dict) or not set(data) <= {"about", "default", "models"} or "default" not in data:
        raise GitsyncError("read thresholds", "wanted only about, default, models", file=path)
    return api.Limits(data, f"lib/thresholds/{name}.json")


def _load_module(path: Path) -> api.CheckModule:
    module = load_file(path)
    if not isinstance(getattr(module, "CHECK", None), api.Check):
        raise GitsyncError("load a check", "no CHECK = Check(...)", file=path)
    for name in ("parse", "judge"):
        if not callable(getattr(module, name, None)):
            raise GitsyncError("load a check", f"no function {name}", file=path)
    return cast("api.CheckModule", module)


def _load_program(path: Path) -> api.CheckModule | None:
    if not os.access(path, os.X_OK):
        # A README or data file.
        return None
    header = next((line for line in path.read_text().splitlines()[:20] if MARK in line), None)
    if header is None:
        raise GitsyncError("load a check", f"no comment with {MARK}", file=path)
    data = _header(header.partition(MARK)[2], path)
    check = api.Check(
        name=path.stem,
        about=data["about"],
        class_=api.Class(data.get("class", api.Class.NODE)),
        period_s=float(data.get("period_s", 300)),
        when=frozenset(map(api.When, data.get("when", [api.When.BACKGROUND]))),
        sources=(api.Command(path.stem, (str(path),), deadline_s=float(data.get("deadline_s", 10))),),
        judges_failures=True,
        thresholds="",
        user_made=api.UserMade(data.get("user_made", api.UserMade.NO)),
    )
    return cast("api.CheckModule", _Program(check))


def _header(text: str, path: Path) -> dict[str, Any]:
    def invalid(reason: str, field: str | None = None) -> GitsyncError:
        return GitsyncError("load a check", reason, file=path, field=field)

    try:
        data = json.loads(text)
    except ValueError as error:
        raise invalid(f"the text after {MARK} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise invalid(f"the text after {MARK} is not a mapping")
    if stray := set(data) - HEADER_KEYS:
        raise invalid(f"unknown key {min(stray)!r}; known: {', '.join(sorted(HEADER_KEYS))}")
    if not isinstance(data.get("about"), str):
        raise invalid("wanted a sentence", "about")
    if data.get("class", "node") not in list(api.Class):
        raise invalid(f"wanted one of {', '.join(api.Class)}, not {data['class']!r}", "class")
    # A program has one finding: a part of it cannot be user-made.
    if (user_made := data.get("user_made", "no")) not in ("no", "yes"):
        raise invalid(f"wanted no or yes, not {user_made!r}", "user_made")
    when = data.get("when", ["background"])
    if not isinstance(when, list) or not when or any(item not in list(api.When) for item in when):
        raise invalid(f"wanted a list of {', '.join(api.When)}, not {when!r}", "when")
    for key in ("period_s", "deadline_s"):
        seconds = data.get(key, 1)
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < 1e6:
            raise invalid(f"wanted seconds, not {seconds!r}", key)
    return data


SLURM = frozenset({"scontrol", "sinfo", "squeue", "sacctmgr"})


@dataclass(frozen=True, slots=True)
class CheckSelection:
    """Selection of a round's checks: by occasion or by name."""

    when: When | None = None
    names: tuple[str, ...] | None = None
    only_due: bool = False
    without_slurm: bool = False

    def takes(self, check: Check, known: Verdict | None, now: float, boot: str) -> bool:
        if self.names is None:
            if self.when is not None and self.when not in check.when:
                return False
            # A deep check runs on request only, never because all checks are requested.
            if self.when is not When.DEEP and takes_the_machine(check, self.when):
                return False
        if self.without_slurm and asks_slurm(check):
            return False
        return not self.only_due or due(check.period_s, known, now, boot)


def takes_the_machine(check: Check, when: When | None) -> bool:
    """Tell if the check loads all hardware for minutes: a deep check, or one that runs by name only."""
    return when is When.DEEP or check.when <= {When.DEEP}


def asks_slurm(check: Check) -> bool:
    """Tell if the check queries Slurm.

    While slurmd waits for its health program it answers nothing, so both would wait.
    """
    return any(isinstance(source, Command) and source.argv[0] in SLURM for source in check.sources)


def due(period_s: float, known: Verdict | None, now: float, boot: str) -> bool:
    """Tell if a background round must run the check again; a little early rather than a round late."""
    return known is None or not known.fresh(now, boot) or now - known.at >= 0.9 * period_s
