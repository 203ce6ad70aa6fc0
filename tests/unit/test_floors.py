"""Who may import whom (docs/architecture.md, "Floors"): read from the source, so that a breach fails here."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = {"images", "init", "gitsync", "cluster", "bench", "build"}

# Our packages that a package may import, beside itself.
MAY_USE = {
    "images": {"init.spec", "init.graph", "init.plan", "init.service", "init.errors"},
    "init": set[str](),
    "gitsync": set[str](),
    "cluster": {"images", "init.spec"},
}
# Third-party libraries, and the only modules that may import each ("*": any module of the package).
THIRD_PARTY = {
    "images": {
        "docker": {"images.engine"},
        "requests": {"images.engine"},  # what docker's SDK lets through when the engine goes away
        "jinja2": {"images.render"},
        "yaml": {"images.load"},
        "rich": {"images.progress", "images.report"},
        "click": {"*"},
    },
    "init": {"click": {"*"}, "yaml": {"init.dropins"}, "supervisor": {"init.supervisor_files", "init.supervisor_rpc"}},
    "gitsync": {"click": {"*"}, "git": {"gitsync.repo"}},
    "cluster": {"click": {"*"}, "yaml": {"*"}, "helm_python": {"cluster.render"}},
}
# Modules of init that PID 1 must never load at boot: what they need is not in its standard-library floor.
NOT_ON_THE_BOOT_PATH = {"click", "yaml", "supervisor"}


def modules(package: str) -> Iterator[tuple[str, Path]]:
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(path: Path, *, top_level_only: bool = False) -> set[str]:
    """Every module a file imports, relative imports resolved; `if TYPE_CHECKING` counts too."""
    tree = ast.parse(path.read_text(), str(path))
    package = path.relative_to(ROOT).parent.parts
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree) if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{module}.{alias.name}" for alias in node.names} if module in OURS else {module}
    return found


@pytest.mark.parametrize("package", sorted(MAY_USE))
def test_a_package_uses_only_the_packages_below_it(package: str) -> None:
    breaches = []
    for name, path in modules(package):
        for target in imports(path):
            top = target.split(".")[0]
            if top not in OURS or top == package:
                continue
            if not any(target == allowed or target.startswith(f"{allowed}.") for allowed in MAY_USE[package]):
                breaches.append(f"{name} imports {target}")
    assert not breaches, "\n".join(breaches)


@pytest.mark.parametrize("package", sorted(THIRD_PARTY))
def test_a_third_party_library_has_one_adapter(package: str) -> None:
    breaches = []
    for name, path in modules(package):
        for target in imports(path):
            top = target.split(".")[0]
            if top in OURS or top in sys.stdlib_module_names:
                continue
            allowed = THIRD_PARTY[package].get(top, set())
            if "*" not in allowed and name not in allowed:
                breaches.append(f"{name} imports {top}")
    assert not breaches, "\n".join(breaches)


def test_pid_1_loads_the_standard_library_only() -> None:
    """From `init.__main__`, through every import at a module's top level, nothing third-party is reached."""
    by_name = dict(modules("init"))
    if "init.__main__" not in by_name:
        pytest.fail("init/__main__.py is the entrypoint and does not exist")
    seen: set[str] = set()
    todo = ["init.__main__"]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        for target in imports(by_name[name], top_level_only=True):
            assert target.split(".")[0] not in NOT_ON_THE_BOOT_PATH, f"{name} imports {target} on the boot path"
            while target and target not in by_name:
                target = target.rpartition(".")[0]
            if target:
                todo.append(target)
