"""Measure gitsync: a one-line change among 10,000 files, and 1,000 nodes that fetch at once. Loopback only.

`python -m bench gitsync`, or `python -m bench.gitsync`.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.request import urlopen

from gitsync import rings
from gitsync.cycle.run import run_cycle
from gitsync.settings import GitsyncSettings
from tests.process.gitsync_servers import HttpGit, Line
from tests.process.gitsync_world import World, run
from tests.waiting import until

FILES = 10_000
CHANGES = 7
PODS = 1_000
SPREAD = 20.0
Request = tuple[str, str, dict[str, str], bytes]


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"**{title}**", "", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows), ""])


def ms(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds) * 1000:.0f} ({min(seconds) * 1000:.0f}-{max(seconds) * 1000:.0f})"


# One change


def many_files(world: World) -> None:
    """Make a realistic repository: 10,000 scripts of about 1 KB, twenty commits, packed."""
    for number in range(FILES):
        folder = world.upstream.work / f"lib/{number // 100:03d}"
        folder.mkdir(parents=True, exist_ok=True)
        body = "".join(f"echo {number} {line} {number * 7919 + line}\n" for line in range(50))
        (folder / f"{number:05d}.sh").write_text(f"#!/bin/bash\n{body}")
    world.upstream.write({"prolog.d/10-hello": "#!/bin/bash\necho 0\n"})
    for number in range(20):
        world.upstream.commit({"README": f"{number}\n"}, signer=world.alice)
    run("git", f"--git-dir={world.upstream.path}", "repack", "-adq")


def environment(world: World, url: str) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "MINIVM_GITSYNC_REPO": url,
        "MINIVM_GITSYNC_ROOT": str(world.settings.root),
        "MINIVM_GITSYNC_ZERO": str(world.settings.zero),
        "MINIVM_GITSYNC_ALLOWED_SIGNERS": str(world.settings.allowed_signers),
        "MINIVM_GITSYNC_METRICS": str(world.settings.metrics),
    }


def loop_cycle(settings: GitsyncSettings, look: bool) -> float:
    """Run a cycle as the loop does, in a forked child; return its seconds."""
    begun = time.monotonic()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            status = 1 if run_cycle(settings, compare=look).failures else 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    return time.monotonic() - begun


def timed(argv: list[str], env: dict[str, str], cwd: Path) -> float:
    begun = time.monotonic()
    done = subprocess.run(argv, env=env, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return time.monotonic() - begun


KINDS = ("pull", "gitsync", "idle pull", "idle gitsync")


@dataclass(slots=True)
class ChangeFigures:
    """Seconds and received bytes of a first transfer and of each change, by `git pull` and by gitsync."""

    first_clone: float = 0.0
    first_sync: float = 0.0
    clone_bytes: int = 0
    sync_bytes: int = 0
    times: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in (*KINDS, "published")})
    moved: dict[str, list[int]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    steps: list[dict[str, float]] = field(default_factory=list)


def measure_one_change(folder: Path) -> str:
    world = World.make(folder)
    many_files(world)
    return show_changes(measure_changes(world, folder))


def measure_changes(world: World, folder: Path) -> ChangeFigures:
    plain, figures = folder / "plain", ChangeFigures()
    with HttpGit(folder).serve() as server:
        port = int(server.url.split(":")[2].split("/")[0])
        with Line(("127.0.0.1", port)).open() as line:
            url = f"http://127.0.0.1:{line.port}/upstream.git"
            git_env = {"PATH": os.environ["PATH"], "GIT_CONFIG_NOSYSTEM": "1", "HOME": str(folder)}
            pull = ["git", "-C", str(plain), "pull", "-q", "--ff-only"]
            line.total = 0
            figures.first_clone = timed(["git", "clone", "-q", url, str(plain)], git_env, folder)
            figures.clone_bytes, line.total = line.total, 0
            settings = replace(world.settings, repo=url, keep=2)
            figures.first_sync = loop_cycle(settings, look=True)
            figures.sync_bytes = line.total
            work: dict[str, Callable[[], float]] = {
                "pull": lambda: timed(pull, git_env, folder),
                "gitsync": lambda: loop_cycle(settings, look=False),
            }
            for number in range(CHANGES):
                world.upstream.commit({"prolog.d/10-hello": f"#!/bin/bash\necho {number + 1}\n"}, signer=world.alice)
                # In turn, so that neither always meets the other's warm cache.
                for name in sorted(work, reverse=bool(number % 2)):
                    for kind in (name, f"idle {name}"):
                        line.total, at = 0, time.time()
                        figures.times[kind].append(work[name]())
                        figures.moved[kind].append(line.total)
                        if kind == "gitsync":
                            state = json.loads(world.layout.state.read_text())
                            figures.steps.append(state["durations"])
                            figures.times["published"].append(state["published"]["at"] - at)
                assert world.live() == world.upstream.git("rev-parse", "HEAD")
            figures.times["look gitsync"] = [loop_cycle(settings, look=True) for _ in range(3)]
    return figures


def show_changes(figures: ChangeFigures) -> str:
    times, moved = figures.times, figures.moved
    clone, sync = (f"{seconds * 1000:.0f}" for seconds in (figures.first_clone, figures.first_sync))
    rows = [
        ["first: clone, or publish 10,000 files", clone, f"{figures.clone_bytes:,}", "git clone"],
        ["", sync, f"{figures.sync_bytes:,}", "gitsync (depth 1; every file hashed and parsed)"],
        ["one line changed", ms(times["pull"]), f"{int(statistics.median(moved['pull'])):,}", "git pull"],
        ["", ms(times["published"]), f"{int(statistics.median(moved['gitsync'])):,}", "gitsync, until readers get it"],
        ["", ms(times["gitsync"]), "", "gitsync, and the oldest tree removed"],
        ["nothing changed", ms(times["idle pull"]), f"{int(statistics.median(moved['idle pull'])):,}", "git pull"],
        ["", ms(times["idle gitsync"]), f"{int(statistics.median(moved['idle gitsync'])):,}", "gitsync"],
        ["", ms(times["look gitsync"]), "", "gitsync, and every file looked at (each ten minutes)"],
    ]
    text = table(f"A repository of {FILES:,} files over http", ["", "ms: median (range)", "bytes received", "by"], rows)
    parts = ", ".join(
        f"{name} {statistics.median([each.get(name, 0.0) for each in figures.steps]) * 1000:.0f}"
        for name in ("fetch", "verify", "write", "check", "publish", "prune")
    )
    return f"{text}\nSteps of gitsync for the changed line, median ms: {parts}.\n"


# A thousand nodes


@dataclass(frozen=True, slots=True)
class Herd:
    """Results of a thousand nodes."""

    last: float
    median: float
    failed: int


async def one_node(host: str, port: int, requests: Sequence[Request], wait: float) -> float:
    """Replay one node's fetch: the recorded requests on one connection, replies read whole."""
    await asyncio.sleep(wait)
    begun = time.monotonic()
    reader, writer = await asyncio.open_connection(host, port)
    try:
        for method, path, headers, body in requests:
            passed = {name: value for name, value in headers.items() if name not in {"Host", "Content-Length"}}
            lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", f"Content-Length: {len(body)}"]
            lines += [f"{name}: {value}" for name, value in passed.items()]
            writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
            await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
            if b" 200 " not in head.split(b"\r\n")[0]:
                raise OSError(head.split(b"\r\n")[0].decode())
            length = re.search(rb"content-length: (\d+)", head, re.I)
            assert length is not None
            await reader.readexactly(int(length[1]))
    finally:
        writer.close()
    return time.monotonic() - begun


async def herd(port: int, requests: Sequence[Request], spread: float) -> Herd:
    begun = time.monotonic()
    outcomes = await asyncio.gather(
        *(
            one_node("127.0.0.1", port, requests, spread * rings.place(f"worker-{number}", "first"))
            for number in range(PODS)
        ),
        return_exceptions=True,
    )
    took = [each for each in outcomes if isinstance(each, float)]
    return Herd(time.monotonic() - begun, statistics.median(took), PODS - len(took))


def recorded_update(world: World, server: HttpGit, name: str) -> list[Request]:
    """Record the requests of a real git when the ref has moved by one commit, for all nodes to replay."""
    node = world.folder / "recorder"
    if not node.exists():
        run("git", "init", "-q", "--bare", node)
    fetch = ["git", f"--git-dir={node}", "-c", "protocol.version=2", "fetch", "-q", "--depth=1", "--no-tags"]
    url = server.url.format(name=name)
    run(*fetch, url, "+refs/heads/main:refs/minivm/fetched")
    world.upstream.commit({"prolog.d/10-hello": f"#!/bin/sh\necho {time.time_ns()}\n"}, signer=world.alice)
    server.record = []
    run(*fetch, url, "+refs/heads/main:refs/minivm/fetched")
    requests, server.record = server.record, None
    return requests


def a_thousand(folder: Path) -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 8192)), hard))
    world = World.make(folder)
    library = {f"lib/{n}": f"{n}\n" * 300 for n in range(60)}
    world.upstream.commit({"prolog.d/10-hello": "#!/bin/sh\n", **library}, signer=world.alice)
    rows = []
    with HttpGit(folder).serve() as server:
        requests = recorded_update(world, server, "upstream.git")
        port = int(server.url.split(":")[2].split("/")[0])
        for how, spread in (("at once", 0.0), (f"over {SPREAD:.0f} s", SPREAD)):
            server.requests = server.open_peak = server.running_peak = 0
            times = asyncio.run(herd(port, requests, spread))
            rows.append(
                [f"direct, {how}", f"{times.last:.1f}", f"{times.median * 1000:.0f}", str(times.failed),
                 f"{server.requests:,}", str(server.open_peak), str(server.running_peak)]
            )  # fmt: skip
        rows += through_the_mirror(world, server, requests)
    return table(
        f"{PODS:,} nodes fetch the same new commit",
        ["", "s until all have it", "ms a node, median", "failed", "requests to the git server",
         "its peak of connections", "its peak of git processes"],
        rows,
    )  # fmt: skip


def through_the_mirror(world: World, server: HttpGit, requests: Sequence[Request]) -> list[list[str]]:
    env = {
        **environment(world, server.url.format(name="upstream.git")),
        "MINIVM_GITSYNC_ROOT": str(world.folder / "controller"),
        "MINIVM_GITSYNC_MIRROR": "127.0.0.1:0",
        "MINIVM_GITSYNC_PERIOD": "3600",
    }
    log = world.folder / "mirror.log"
    server.requests = server.open_peak = server.running_peak = 0
    # The commit before the newest one, so that nodes have something to be behind of.
    with log.open("wb") as out:
        mirror = subprocess.Popen(
            [sys.executable, "-m", "gitsync.cli", "mirror"], stdout=out, stderr=out, env=env,
            cwd=Path(__file__).resolve().parents[1],
        )  # fmt: skip
    rows = []
    try:
        until(lambda: "shows" in log.read_text(), "the mirror shows the commit")
        port_match = re.search(r"http://127\.0\.0\.1:(\d+)/", log.read_text())
        assert port_match is not None
        port = int(port_match[1])
        through_mirror = [(method, path.replace("/upstream.git", "/scripts.git"), headers, body)
                 for method, path, headers, body in requests]  # fmt: skip
        for how, spread in (("at once", 0.0), (f"over {SPREAD:.0f} s", SPREAD)):
            before = counters(port)
            times = asyncio.run(herd(port, through_mirror, spread))
            after = counters(port)
            rows.append(
                [f"mirror, {how}", f"{times.last:.1f}", f"{times.median * 1000:.0f}", str(times.failed),
                 f"{server.requests:,} (the mirror's own)", str(server.open_peak), str(server.running_peak)]
            )  # fmt: skip
            rows.append(
                ["  at the mirror", "", "", "", f"{after['requests'] - before['requests'] - 1:,}",
                 f"{after['open_peak']}, the rest queued", f"{after['gits'] - before['gits']} in all"]
            )  # fmt: skip
    finally:
        mirror.terminate()
        mirror.wait()
    return rows


def counters(port: int) -> dict[str, int]:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    return {name.removeprefix("minivm_gitsync_mirror_"): int(value) for name, value in (line.split() for line in lines)}


def main() -> int:
    for part in (measure_one_change, a_thousand):
        folder = Path(tempfile.mkdtemp(prefix="bench-gitsync-"))
        try:
            print(part(folder), flush=True)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
