"""What a task prolog does, written down: the commit's scripts with their deadlines, and the files on which that rests.

The task prolog runs as the job's user and asks nobody (images/src/runner/task_prolog.c). It follows this while each of
those files is as it was, and else finds out by itself, as always.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from gitsync.layout import Layout, commit_of_link, is_script
from ground.files import write_whole
from health.places import Places
from health.policy import IN_A_TREE, RunnerPolicy
from health.runner import settings

KIND = "task_prolog"
# In a script's first lines: it has nothing to do for a task without this variable, and is not started then.
ONLY_WITH = b"\n# minivm: only with "


def link_of(layout: Layout) -> str:
    """Where the link leads; empty where there is none, which is generation zero."""
    try:
        return os.readlink(layout.current)  # noqa: PTH115  # its words, not a path's
    except OSError:
        return ""


def rests_on(places: Places, tree: Path) -> list[str]:
    """By words: before each job, and making a path of each takes longer than looking at it."""
    folder = f"{tree}/{KIND}.d"
    return [
        str(places.policy),
        f"{tree}/{IN_A_TREE}",
        folder,
        *(f"{folder}/{name}" for name in scripts(tree, KIND)),
        *settings.files(tree),
    ]


def scripts(tree: Path, kind: str) -> list[str]:
    folder = tree / f"{kind}.d"
    if not folder.is_dir():
        return []
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_file() and is_script(entry.name))


def only_with(script: Path) -> str:
    """The variable of a task's environment without which it has nothing to do; empty: it runs for every task."""
    try:
        with script.open("rb") as file:
            line = file.read(2048).partition(ONLY_WITH)[2].partition(b"\n")[0].decode("ascii").strip()
    except (OSError, ValueError):
        return ""
    return line if line.isidentifier() else ""


def render(
    layout: Layout,
    link: str,
    stamps: Iterable[tuple[str, str]],
    commit: str,
    policy: RunnerPolicy,
    names: Mapping[str, str],
    told: settings.Settings = settings.NONE,
) -> str | None:
    """`names`: the scripts, and what each is about; `told`: which of them need no shell.

    None where a name or a path has what separates them.
    """
    tree = layout.tree(commit)
    rows = [["link", str(layout.current), link]]
    rows += [["same", path, stamp] for path, stamp in stamps]
    rows += [["commit", commit], ["tree", str(tree)], ["budget", f"{policy.kind(KIND).budget_s * 1000:.0f}"]]
    rows += [["set", *row] for row in told.rows]
    steps = [
        [name, f"{policy.deadline_s(KIND, script) * 1000:.0f}", policy.broken(KIND, script), variable]
        + ([told.known[name]] if name in told.known else [])
        for name, script, variable in ((name, f"{KIND}.d/{name}", variable) for name, variable in names.items())
    ]
    if any(mark in word for row in (*rows, *steps) for word in row for mark in "\t\n\0"):
        return None
    lines = ["minivm task_prolog 2", *map("\t".join, rows), "scripts", *map("\t".join, steps), "end"]
    return "\n".join(lines) + "\n"


def stamp(path: str) -> str:
    """As the program writes it: what it compares is words."""
    try:
        found = os.stat(path)  # noqa: PTH116  # as above
    except OSError:
        return "-"
    seconds, rest = divmod(found.st_mtime_ns, 10**9)
    return f"{seconds}.{rest:09d}.{found.st_size}.{found.st_ino}"


def write(places: Places, layout: Layout, commit: str, policy: RunnerPolicy) -> None:
    """Stamped before it is read: a file that changes meanwhile makes a plan that does not hold, and none that lies."""
    link = link_of(layout)
    stamps = [(path, stamp(path)) for path in rests_on(places, layout.tree(commit))]
    said = commit_of_link(link, layout.zero)
    text = None
    # A link to something else means generation zero too, but only after all; that is not for a plan.
    if commit == said or (not link and layout.tree(commit) == layout.zero):
        tree = layout.tree(commit)
        names = {name: only_with(tree / f"{KIND}.d" / name) for name in scripts(tree, KIND)}
        told = settings.read(tree, names)
        # A site's own script may have other files there, which its users may not see: the plan does not rest on those.
        unread = {*settings.files(tree)} - {*told.files}
        stamps = [(path, stamp) for path, stamp in stamps if path not in unread]
        text = render(layout, link, stamps, commit, policy, names, told)
    if text is None:
        places.plan.unlink(missing_ok=True)
    else:
        write_whole(places.plan, text)
