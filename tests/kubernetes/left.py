"""Find what a lab has left on this machine, by the lab's own names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from tests.kubernetes import plan
from tests.kubernetes.host import attempt
from tests.kubernetes.plan import Left

MARKS = (f"{plan.PREFIX}-", plan.LINK, "10.77.0.", f"{plan.PODS}.", f"{plan.SERVICES}.")


def look(state: Path) -> Left:
    namespaces = Path("/run/netns")
    return Left(
        processes=processes(str(state), str(plan.UNPACKING)),
        namespaces=tuple(path.name for path in namespaces.glob(f"{plan.PREFIX}-*")),
        links=with_marks(said("ip", "-o", "link"), f"{plan.PREFIX}-", plan.LINK),
        routes=with_marks(said("ip", "route"), *MARKS),
        mounts=with_marks(Path("/proc/mounts").read_text(), str(state), f"{plan.PREFIX}-"),
        cgroups=tuple(str(path) for path in Path("/sys/fs/cgroup").glob(f"*/{plan.CGROUP}")),
        rules=with_marks(said("iptables-save"), "KUBE-", "CNI-", *MARKS),
        files=tuple(str(path) for path in (state, plan.UP, plan.UNPACKING) if path.exists() or path.is_symlink()),
    )


def said(*command: str) -> str:
    try:
        return attempt(*command).stdout
    except FileNotFoundError:
        return ""


def with_marks(text: str, *marks: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.splitlines() if any(mark in line for mark in marks))


def processes(*places: str) -> tuple[str, ...]:
    """Those in the lab's cgroups, and those that were started with a file of these places."""
    inside = those(lambda path: f"/{plan.CGROUP}/" in (path / "cgroup").read_text())
    return tuple(sorted({*inside, *(found for place in places for found in started_with(place))}))


def started_with(prefix: str) -> tuple[str, ...]:
    """Processes of which a word begins with this path."""
    return those(lambda path: any(word.startswith(prefix.encode()) for word in words(path)))


def those(meant: Callable[[Path], bool]) -> tuple[str, ...]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if meant(path):
                found.append(f"{path.name} {b' '.join(words(path)).decode(errors='replace')}")
    return tuple(found)


def words(path: Path) -> list[bytes]:
    return (path / "cmdline").read_bytes().split(b"\0")
