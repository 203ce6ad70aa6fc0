"""Plan of a task prolog: the commit's scripts with their deadlines, and the files that the plan depends on.

The task prolog runs as the job's user and asks no daemon (images/src/runner/task_prolog.c). It follows the plan while
each of those files is unchanged; otherwise it determines everything itself.
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
# Declared in a script's first lines: without this variable the script has nothing to do for a task and is not started.
ONLY_WITH = b"\n# minivm: only with "


def link_of(layout: Layout) -> str:
    """Return the link's target; "" without a link, which means generation zero."""
    try:
        return os.readlink(layout.current)  # noqa: PTH115  # the text, not a path
    except OSError:
        return ""


def rests_on(places: Places, tree: Path) -> list[str]:
    """List the files that the plan depends on. Strings: building a Path takes longer than a stat, before each job."""
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
    """Return the variable without which the script has nothing to do; "": it runs for every task."""
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
    shell_free: settings.Settings = settings.NONE,
) -> str | None:
    """Render the plan. `names` maps each script to its variable; `told` has the scripts that need no shell.

    Returns None if a name or path contains a separator.
    """
    tree = layout.tree(commit)
    rows = [["link", str(layout.current), link]]
    rows += [["same", path, stamp] for path, stamp in stamps]
    rows += [["commit", commit], ["tree", str(tree)], ["budget", f"{policy.kind(KIND).budget_s * 1000:.0f}"]]
    rows += [["set", *row] for row in shell_free.rows]
    steps = [
        [name, f"{policy.deadline_s(KIND, script) * 1000:.0f}", policy.broken(KIND, script), variable]
        + ([shell_free.known[name]] if name in shell_free.known else [])
        for name, script, variable in ((name, f"{KIND}.d/{name}", variable) for name, variable in names.items())
    ]
    if any(mark in word for row in (*rows, *steps) for word in row for mark in "\t\n\0"):
        return None
    lines = ["minivm task_prolog 2", *map("\t".join, rows), "scripts", *map("\t".join, steps), "end"]
    return "\n".join(lines) + "\n"


def stamp(path: str) -> str:
    """Return a file's identity in the text form that the C program compares."""
    try:
        status = os.stat(path)  # noqa: PTH116  # as above
    except OSError:
        return "-"
    seconds, rest = divmod(status.st_mtime_ns, 10**9)
    return f"{seconds}.{rest:09d}.{status.st_size}.{status.st_ino}"


def write(places: Places, layout: Layout, commit: str, policy: RunnerPolicy) -> None:
    """Write the plan. Stamps come before reads: a file that changes meanwhile makes the plan invalid, never wrong."""
    link = link_of(layout)
    stamps = [(path, stamp(path)) for path in rests_on(places, layout.tree(commit))]
    linked = commit_of_link(link, layout.zero)
    text = None
    # A link to anything else means generation zero too, which the task prolog must determine itself.
    if commit == linked or (not link and layout.tree(commit) == layout.zero):
        tree = layout.tree(commit)
        names = {name: only_with(tree / f"{KIND}.d" / name) for name in scripts(tree, KIND)}
        shell_free = settings.read(tree, names)
        # A site's own script may use other files there, which its users may not read: the plan does not depend on
        # those.
        unread = {*settings.files(tree)} - {*shell_free.files}
        stamps = [(path, stamp) for path, stamp in stamps if path not in unread]
        text = render(layout, link, stamps, commit, policy, names, shell_free)
    if text is None:
        places.plan.unlink(missing_ok=True)
    else:
        write_whole(places.plan, text)
