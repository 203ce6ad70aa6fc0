"""Import rules between packages (docs/architecture.md, "Floors"), read from the source.

Every import counts, also one inside a function or for the type checker only. A failure shows the import.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.floors import FLOORS, PRODUCT

ROOT = Path(__file__).resolve().parents[2]

# Modules in a package's own folder that may use all of the package.
ROOF = {
    "init.__main__", "init.cli", "init.command", "init.accounting_cli", "init.accounts_cli", "init.config_cli",
    "init.people_cli", "init.state_cli",
    "health.cli", "gitsync.cli", "fleet.__main__", "fleet.cli",
    "fleet.reconciler",
}  # fmt: skip
# PID 1's folders, and those of its child processes: neither imports the other.
TOWERS = ({"pid1"}, {"pod", "slurm", "state", "accounts", "prepare", "drain", "helpers", "people"})
# Modules of other packages that each package may import.
MAY_USE: dict[str, tuple[str, ...]] = {
    "ground": (),
    "init": ("ground",),
    "gitsync": ("ground",),
    "health": (
        "ground",
        "init.errors", "init.fields", "init.pod", "init.slurm", "gitsync.errors", "gitsync.layout", "gitsync.lease",
    ),
    "fleet": ("ground", "init.errors", "init.fields", "init.lean", "init.people", "init.slurm"),
    "images": ("ground", "init.plan", "init.errors"),
    "cluster": ("ground", "images", "init.plan", "init.errors", "init.people"),
}  # fmt: skip
# Exempt imports by module, with the reason.
EXEMPT = {
    ("gitsync.health_api", "health"): "the old name of health.api: checks of a site outlive images",
}
# Third-party libraries, and the only modules that may import each ("*": any module of the package).
THIRD_PARTY: dict[str, dict[str, set[str]]] = {
    "ground": {},
    "images": {
        "docker": {"images.engine.docker"},
        "requests": {"images.engine.docker"},  # docker's SDK lets its exceptions through when the engine goes away
        "jinja2": {"images.make.plan"},
        "yaml": {"images.definition.load"},
        "rich": {"images.make.progress"},
        "click": {"*"},
    },
    "init": {
        "click": {"*"},
        "yaml": {"init.dropins.merge", "init.people.read"},
        "supervisor": {"init.dropins.merge", "init.helpers.supervisor_rpc"},
    },
    "health": {},
    "gitsync": {"click": {"*"}, "git": {"gitsync.repo.reader"}},
    "fleet": {
        "click": {"*"},
        # The exceptions of kubernetes_asyncio's connections; the SCIM receiver's server.
        "aiohttp": {"fleet.act.api_client", "fleet.scim.server"},
        "kubernetes_asyncio": {"fleet.act.api_client"},
    },
    "cluster": {"click": {"*"}, "yaml": {"*"}, "helm_python": {"cluster.render"}},
}
NOT_ON_THE_BOOT_PATH = {"click", "yaml", "supervisor"}
MOST_IN_A_ROOM = 18


@dataclass(frozen=True)
class Import:
    who: str
    what: str
    line: int
    top: bool  # at module level, so it runs whenever the module is loaded

    def __str__(self) -> str:
        text = sources()[self.who].read_text().splitlines()[self.line - 1].strip()
        return f"{sources()[self.who].relative_to(ROOT)}:{self.line}: {text}"


@cache
def sources() -> dict[str, Path]:
    found = {"build": ROOT / "build.py"}
    for package in PRODUCT:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports() -> tuple[Import, ...]:
    found = []
    for who, path in sources().items():
        tree = ast.parse(path.read_text(), str(path))
        top = set(loaded(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found += [Import(who, alias.name, node.lineno, node in top) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{path}:{node.lineno}: a relative import hides where it goes"
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    what = full if full in sources() else str(node.module)
                    found.append(Import(who, what, node.lineno, node in top))
    return tuple(found)


def loaded(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run when a module is loaded: all outside of functions and of `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        yield node
        yield from loaded(node)


def room(module: str) -> str:
    """Return the first folder inside the package; "" for the package's own."""
    package, *rest = module.split(".")
    return rest[0] if rest and (ROOT / package / rest[0]).is_dir() else ""


def floor(module: str) -> int:
    if module in ROOF:
        return len(FLOORS[module.split(".")[0]])
    return next(number for number, rooms in enumerate(FLOORS[module.split(".")[0]]) if room(module) in rooms)


def inside() -> Iterator[Import]:
    for item in imports():
        package = item.who.split(".")[0]
        if package in PRODUCT and item.what.split(".")[0] == package and item.what != package:
            yield item


def told(breaches: list[Import]) -> str:
    return "\n".join(sorted({str(item) for item in breaches}))


@pytest.mark.parametrize("package", PRODUCT)
def test_every_room_has_its_floor(package: str) -> None:
    rooms = {room(module) for module in sources() if module.split(".")[0] == package}
    assert rooms == set().union(*FLOORS[package])


def test_no_import_goes_up_and_rooms_of_a_floor_do_not_know_each_other() -> None:
    breaches = []
    for item in inside():
        mine, other = floor(item.who), floor(item.what)
        beside = mine == other and room(item.who) != room(item.what) and item.who.split(".")[0] != "cluster"
        if other > mine or beside:
            breaches.append(item)
    assert not breaches, told(breaches)


def test_pid_1_and_its_children_share_the_floors_below_and_nothing_else() -> None:
    breaches = []
    for item in inside():
        if item.who.startswith("init.") and item.who not in ROOF:
            mine, other = room(item.who), room(item.what)
            if any(mine in tower and other in set().union(*TOWERS) - tower for tower in TOWERS):
                breaches.append(item)
    assert not breaches, told(breaches)


def test_a_package_uses_of_the_others_what_is_promised() -> None:
    breaches = []
    for item in imports():
        package, other = item.who.split(".")[0], item.what.split(".")[0]
        if package not in PRODUCT or other not in (*PRODUCT, "build", "bench", "tests") or other == package:
            continue
        if (item.who, other) not in EXEMPT and not any(
            item.what == allowed or item.what.startswith(f"{allowed}.") for allowed in MAY_USE[package]
        ):
            breaches.append(item)
    assert not breaches, told(breaches)


def test_no_circle_of_files() -> None:
    below: dict[str, dict[str, Import]] = {}
    for item in imports():
        if item.what in sources() and item.what != item.who:
            below.setdefault(item.who, {})[item.what] = item
    done: set[str] = set()

    def walk(module: str, path: list[str]) -> list[Import]:
        if module in path:
            circle = [*path[path.index(module) :], module]
            return [below[who][what] for who, what in pairwise(circle)]
        if module in done:
            return []
        for other in below.get(module, {}):
            if found := walk(other, [*path, module]):
                return found
        done.add(module)
        return []

    for module in sources():
        circle = walk(module, [])
        assert not circle, "\n".join(str(item) for item in circle)


@pytest.mark.parametrize("package", sorted(THIRD_PARTY))
def test_a_third_party_library_has_one_adapter(package: str) -> None:
    breaches = []
    for item in imports():
        top = item.what.split(".")[0]
        if item.who.split(".")[0] != package or top in (*PRODUCT, "build") or top in sys.stdlib_module_names:
            continue
        allowed = THIRD_PARTY[package].get(top, set())
        if "*" not in allowed and item.who not in allowed:
            breaches.append(item)
    assert not breaches, told(breaches)


def test_pid_1_loads_the_standard_library_only() -> None:
    """No third-party module is reachable from `init.__main__` through imports at module level."""
    seen: set[str] = set()
    todo = ["init.__main__"]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        for item in imports():
            if item.who == name and item.top:
                assert item.what.split(".")[0] not in NOT_ON_THE_BOOT_PATH, str(item)
                if item.what in sources():
                    todo.append(item.what)
    assert "init.pid1.start" in seen


def test_no_room_is_crowded() -> None:
    crowd = Counter(str(path.parent.relative_to(ROOT)) for path in sources().values())
    assert {where: number for where, number in crowd.items() if number > MOST_IN_A_ROOM} == {}


NAMED = re.compile(rf"(?<![\w./$-])(?:{'|'.join(PRODUCT)})(?:\.[a-z_]+)+(?![\w/-])")
FILES = {"md", "yaml", "yml", "json", "sock", "py", "svg", "prom", "conf", "sh", "git", "lock", "tar", "txt", "io", "d"}


def named_in(path: Path) -> Iterator[tuple[int, str]]:
    """Yield dotted names in strings, comments and data that look like modules of this project."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if path.suffix == ".py" and line.lstrip().startswith(("from ", "import ")):
            continue
        for found in NAMED.findall(line):
            yield number, found


def exists(name: str) -> bool:
    """Tell whether the name is a module or a member of one."""
    parts = name.split(".")
    while parts and ".".join(parts) not in sources():
        parts.pop()
    rest = name.split(".")[len(parts) :]
    if not rest or not parts:
        return bool(parts)
    return len(parts) > 1 and re.search(rf"\b{rest[0]}\b", sources()[".".join(parts)].read_text()) is not None


def test_every_module_that_is_named_by_a_string_is_there() -> None:
    data = [*(ROOT / "init/services").glob("*.yaml"), *(ROOT / "images/roles").glob("*.yaml"), ROOT / "pyproject.toml"]
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    strings = []
    for path in sources().values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                strings += [(path, node.lineno, name) for name in NAMED.findall(node.value)]
    named = [*strings, *((path, line, name) for path in [*data, *pages] for line, name in named_in(path))]
    missing = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path, line, name in named
        if name.rpartition(".")[2] not in FILES and not exists(name)
    ]
    assert not missing, "\n".join(missing)
