"""Fetching over real servers: credentials that never show, lines that are cut, servers that go silent."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from gitsync.cycle.run import run_cycle
from tests.process.gitsync_servers import HttpGit, Line
from tests.process.gitsync_world import GOOD_TREE, World, run
from tests.waiting import PATIENCE

TOKEN = "tok-3f9a1c77d2"


def watch_arguments(stop: threading.Event, secret: str, found: list[str], looked: list[int]) -> None:
    """Every process's arguments, again and again: where a secret would be read by anybody on the node."""
    while not stop.is_set():
        looked[0] += 1
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "cmdline").read_bytes()
                except OSError:
                    continue
                if secret.encode() in words:
                    found.append(words.decode(errors="replace"))
        time.sleep(0.001)


def test_a_token_is_read_at_each_use_and_shows_nowhere(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    first = world.upstream.commit(dict(GOOD_TREE), signer=world.alice)
    token = world.folder / "token"
    token.write_text(f"{TOKEN}\n")
    with HttpGit(world.folder, token=TOKEN).serve() as server:
        world.settings = replace(world.settings, repo=server.url.format(name="upstream.git"), token_file=token)
        stop, found, looked = threading.Event(), list[str](), [0]
        watcher = threading.Thread(target=watch_arguments, args=(stop, TOKEN, found, looked))
        watcher.start()
        try:
            state = run_cycle(world.settings)
        finally:
            stop.set()
            watcher.join()
        assert state.failures == 0 and world.live() == first
        assert looked[0] > 5 and not found
        # The token is changed on the server, and only later in the file.
        server.token = "another-" + TOKEN[::-1]
        second = world.upstream.commit({"new": "x"}, signer=world.alice)
        state = run_cycle(world.settings)
        assert state.failures == 1 and "TOKEN_FILE" in state.last_error and world.live() == first
        token.write_text(server.token)
        state = run_cycle(world.settings)
        assert state.failures == 0 and world.live() == second
        said = capfd.readouterr()
        for secret in (TOKEN, server.token):
            assert secret not in said.out + said.err + state.last_error
            for path in (path for path in world.layout.root.rglob("*") if path.is_file()):
                assert secret.encode() not in path.read_bytes(), path


def test_a_token_that_no_server_asks_for_is_not_sent(world: World) -> None:
    """The helper answers the server of the repository when asked; a redirect to elsewhere is not followed."""
    world.upstream.commit(dict(GOOD_TREE), signer=world.alice)
    with HttpGit(world.folder).serve() as server:
        world.settings = replace(world.settings, repo=server.url.format(name="upstream.git"))
        assert run_cycle(world.settings).failures == 0


@pytest.mark.parametrize("silent", [False, True], ids=["cut", "silent"])
def test_a_line_that_is_lost_in_the_middle_costs_nothing_but_time(world: World, silent: bool) -> None:
    """At several points of the transfer: the last good tree stays, no git is left, and the next fetch succeeds."""
    first = world.upstream.commit(dict(GOOD_TREE), signer=world.alice)
    run_cycle(world.settings)
    second = world.upstream.commit({"big": os.urandom(200_000)}, signer=world.alice)
    with HttpGit(world.folder).serve() as server:
        port = int(server.url.split(":")[2].split("/")[0])
        cuts = (0, 5000, 150_000) if silent else (0, 1, 50, 400, 1000, 5000, 50_000, 150_000, 199_000)
        for cut in cuts:
            with Line(("127.0.0.1", port), cut_after=cut, silent=silent).open() as line:
                world.settings = replace(
                    world.settings,
                    repo=f"http://127.0.0.1:{line.port}/upstream.git",
                    timeout=1.0 if silent else PATIENCE,
                )
                state = run_cycle(world.settings)
                assert state.failures > 0 and state.last_error and world.live() == first
                assert (world.layout.current / "prolog.d/10-hello").read_text() == GOOD_TREE["prolog.d/10-hello"]
        with Line(("127.0.0.1", port)).open() as line:
            world.settings = replace(
                world.settings, repo=f"http://127.0.0.1:{line.port}/upstream.git", timeout=PATIENCE
            )
            state = run_cycle(world.settings)
            assert state.failures == 0 and world.live() == second
            assert line.passed > 200_000
    run("git", f"--git-dir={world.layout.repository}", "fsck", "--strict", "--no-dangling")


def test_a_one_line_change_transfers_little(world: World) -> None:
    """Without history and without the files that did not change."""
    big: dict[str, str | bytes | None] = {f"lib/{number}": os.urandom(20_000) for number in range(50)}
    world.upstream.commit({**GOOD_TREE, **big}, signer=world.alice)
    with HttpGit(world.folder).serve() as server:
        port = int(server.url.split(":")[2].split("/")[0])
        with Line(("127.0.0.1", port)).open() as line:
            world.settings = replace(world.settings, repo=f"http://127.0.0.1:{line.port}/upstream.git")
            run_cycle(world.settings)
            assert line.passed > 1_000_000
            commit = world.upstream.commit({"prolog.d/10-hello": "#!/bin/sh\necho new\n"}, signer=world.alice)
            line.passed = 0
            run_cycle(world.settings)
            assert world.live() == commit
            assert line.passed < 20_000
