"""The loop as a service: ready with whatever tree there is, hurried by a poke, quiet, small, gone when told."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from gitsync.state import load_state
from tests.process.gitsync_world import GOOD_TREE, World
from tests.process.living import alive
from tests.support.ports import free_port
from tests.waiting import until


@dataclass
class Running:
    process: subprocess.Popen[bytes]
    notify: socket.socket
    env: dict[str, str]
    log: Path
    told: list[str] = field(default_factory=list)
    ends_with: int = 0

    def hear(self) -> str:
        with contextlib.suppress(BlockingIOError):
            while True:
                self.told += self.notify.recv(65536).decode().splitlines()
        return "\n".join(self.told)

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "gitsync.cli", *words]
        return subprocess.run(argv, env=self.env, capture_output=True, text=True, timeout=60)


@contextmanager
def loop(world: World, program: tuple[str, ...] = ("gitsync.cli", "loop"), /, **extra: str) -> Iterator[Running]:
    settings = world.settings
    path = world.folder / "notify"
    notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    notify.bind(str(path))
    env = {
        "PATH": os.environ["PATH"],
        "NOTIFY_SOCKET": str(path),
        "MINIVM_POD_NAME": "pod-0",
        "MINIVM_GITSYNC_REPO": str(settings.repo),
        "MINIVM_GITSYNC_ROOT": str(settings.root),
        "MINIVM_GITSYNC_ZERO": str(settings.zero),
        "MINIVM_GITSYNC_ALLOWED_SIGNERS": str(settings.allowed_signers),
        "MINIVM_GITSYNC_METRICS": str(settings.metrics),
        "MINIVM_GITSYNC_CONTROL": str(settings.control),
        "MINIVM_GITSYNC_PERIOD": "3600",
        **extra,
    }
    log = world.folder / "loop.log"
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-m", *program], stdout=out, stderr=out, env=env)
    running = Running(process, notify, env, log)
    try:
        yield running
    finally:
        running.process.terminate()
        try:
            assert running.process.wait(timeout=120) == running.ends_with, log.read_text()
        finally:
            running.process.kill()
            notify.close()
            path.unlink()


def test_ready_with_generation_zero_then_hurried_to_a_commit(world: World) -> None:
    with loop(world) as running:
        until(lambda: "READY=1" in running.hear(), "it is ready")
        # Its first question comes within two seconds, and there is nothing to answer it yet.
        until(lambda: "STATUS=zero" in running.hear(), "it tells what it has")
        commit = world.upstream.commit(dict(GOOD_TREE), signer=world.alice)
        assert running.command("now").returncode == 0
        until(lambda: f"STATUS={commit[:12]}" in running.hear(), "the poke publishes it")
        assert world.live() == commit
        shown = running.command("status", "--json")
        assert shown.returncode == 0 and json.loads(shown.stdout)["current"] == commit
        assert 'commit="' + commit in world.settings.metrics.read_text()


def test_a_cycle_that_is_killed_is_survived_and_healed(world: World) -> None:
    commit = world.upstream.commit(dict(GOOD_TREE), signer=world.alice)
    with loop(world, ("tests.process.gitsync_faults", "link-made", "kill")) as running:
        until(lambda: "a cycle ended with -9" in running.log.read_text(), "a cycle dies")
        until(lambda: "STATUS=" in running.hear(), "it still tells")
        assert running.process.poll() is None
    with loop(world) as running:
        until(lambda: world.layout.current.is_symlink() and world.live() == commit, "the next loop publishes it")
        assert not list(world.layout.root.glob(".unfinished-*"))


def test_a_start_forgets_neither_failures_nor_when_the_server_last_answered(world: World) -> None:
    """The backoff goes on where it was: a fleet that restarts must not fall upon a server that is down."""
    commit = world.upstream.commit(dict(GOOD_TREE), signer=world.alice)
    with loop(world) as running:
        until(lambda: f"STATUS={commit[:12]}" in running.hear(), "it is published")
    answered = load_state(world.layout.state).last_success
    world.upstream.path.rename(world.folder / "gone")
    for failures in (1, 2):
        with loop(world) as running:
            until(lambda: "READY=1" in running.hear(), "it is ready")
            running.command("now")
            until(lambda: load_state(world.layout.state).failures >= failures, "the server is missed")  # noqa: B023
    known = load_state(world.layout.state)
    assert known.last_success == answered and world.live() == commit


def test_a_loop_that_is_killed_takes_its_cycle_along(world: World) -> None:
    world.upstream.commit(dict(GOOD_TREE), signer=world.alice)
    with loop(world) as running:
        until(lambda: "READY=1" in running.hear(), "it is ready")
    check = f'["bash", "-c", "echo $PPID >{world.folder}/cycle; sleep 600"]'
    with loop(world, MINIVM_GITSYNC_CHECK_COMMAND=check) as running:
        world.upstream.commit({"new": "x"}, signer=world.alice)
        running.command("now")
        pid = world.folder / "cycle"
        until(lambda: pid.exists() and pid.read_text().strip(), "a cycle is in its check")
        running.process.kill()
        running.process.wait()
        until(lambda: not alive(int(pid.read_text())), "the cycle is gone too")
        running.ends_with = -signal.SIGKILL


def test_between_cycles_it_is_one_small_sleeping_process(world: World) -> None:
    commit = world.upstream.commit(dict(GOOD_TREE), signer=world.alice)
    with loop(world) as running:
        until(lambda: f"STATUS={commit[:12]}" in running.hear(), "it is published")
        status = Path(f"/proc/{running.process.pid}/status")
        children = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children")
        until(lambda: not children.read_text(), "its cycle is over")
        until(lambda: "State:\tS" in status.read_text(), "it sleeps")
        text = status.read_text()
        resident = re.search(r"VmRSS:\s+(\d+) kB", text)
        assert resident is not None and int(resident[1]) < 32_000
        assert "Threads:\t1\n" in text


def test_a_push_hurries_it_through_the_webhook(world: World) -> None:
    secret = world.folder / "secret"
    secret.write_text("s3cret\n")
    port = free_port()
    extra = {"MINIVM_GITSYNC_WEBHOOK": f"127.0.0.1:{port}", "MINIVM_GITSYNC_WEBHOOK_SECRET": str(secret)}
    first = world.upstream.commit(dict(GOOD_TREE), signer=world.alice)
    with loop(world, **extra) as running:
        until(lambda: f"STATUS={first[:12]}" in running.hear(), "the first is published")
        second = world.upstream.commit({"new": "x"}, signer=world.alice)
        signature = hmac.new(b"s3cret", b"{}", hashlib.sha256).hexdigest()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/", data=b"{}", headers={"X-Hub-Signature-256": f"sha256={signature}"}
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            assert reply.status == 202
        until(lambda: world.live() == second, "the push is published")


def test_a_refused_commit_degrades_the_pod_and_its_reason_is_everywhere(world: World) -> None:
    """The status, `why`, the metrics, STATUS= and init's condition show the reason until the next good commit."""
    heard: list[dict[str, object]] = []
    world.settings.control.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as control:
        control.bind(str(world.settings.control))
        control.listen()

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    line, _ = control.accept()
                    with line, contextlib.suppress(OSError):  # a cycle waits two seconds for the answer
                        heard.append(json.loads(line.makefile().readline()))
                        line.sendall(b'{"ok": true, "conditions": []}\n')

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        first = world.upstream.commit(dict(GOOD_TREE), signer=world.alice)
        with loop(world) as running:
            until(lambda: f"STATUS={first[:12]}" in running.hear(), "the first is published")
            world.upstream.commit({"new": "x"}, signer=world.mallory)
            running.command("now")
            until(lambda: "refused" in running.hear(), "it says so")

            def says(words: str) -> bool:
                if heard and words in str(heard[-1]["text"]) and bool(words) == bool(heard[-1]["text"]):
                    return True
                running.command("now")  # the next cycle tells init what it has missed
                return False

            until(lambda: says("no allowed signer holds"), "init hears it")
            assert heard[-1]["op"] == "condition" and heard[-1]["blocking"] is False
            assert "minivm_gitsync_quarantined 1" in world.settings.metrics.read_text()
            for command in ("status", "why"):
                assert "no allowed signer holds" in running.command(command).stdout
            assert running.command("status").returncode == 1
            mended = world.upstream.commit({"new": "y"}, signer=world.alice)
            running.command("now")
            until(lambda: world.live() == mended and says(""), "the condition is taken back")
        control.shutdown(socket.SHUT_RDWR)
        thread.join(timeout=10)


def test_pin_holds_and_unpin_follows_again(world: World) -> None:
    first = world.upstream.commit(dict(GOOD_TREE), signer=world.alice)
    with loop(world) as running:
        until(lambda: f"STATUS={first[:12]}" in running.hear(), "the first is published")
        second = world.upstream.commit({"new": "x"}, signer=world.alice)
        running.command("now")
        until(lambda: world.live() == second, "the second is published")
        pinned = running.command("pin", first[:12])
        assert pinned.returncode == 0 and world.live() == first, pinned.stderr
        before = load_state(world.layout.state).last_attempt
        running.command("now")
        until(lambda: load_state(world.layout.state).last_attempt > before, "another cycle ran")
        assert world.live() == first
        assert "pinned" in running.command("why").stdout
        assert running.command("unpin").returncode == 0
        until(lambda: world.live() == second, "it follows the branch again")


def test_commands_say_what_they_cannot_do(world: World) -> None:
    with loop(world) as running:
        until(lambda: "READY=1" in running.hear(), "it is ready")
        wrong = running.command("rollback", "abcdef12")
        assert wrong.returncode == 1 and "is the beginning of 0 commits on this node" in wrong.stderr
        assert "Traceback" not in wrong.stderr
        missing = running.command("rollback", "0" * 40)
        assert missing.returncode == 1 and missing.stderr.startswith("error: cannot ")
    alone = running.command("now")
    assert alone.returncode == 1 and "no loop is running here" in alone.stderr
    running.env["MINIVM_GITSYNC_PEROID"] = "1"
    typo = running.command("status")
    assert typo.returncode == 1 and "did you mean MINIVM_GITSYNC_PERIOD?" in typo.stderr


def test_stop_ends_a_cycle_that_does_not_end(world: World) -> None:
    world.upstream.commit(dict(GOOD_TREE), signer=world.alice)
    with loop(world, MINIVM_GITSYNC_CHECK_COMMAND='["sleep", "600"]') as running:
        children = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children")
        until(lambda: "READY=1" in running.hear() and children.read_text(), "a cycle is at work")
        cycle = int(children.read_text().split()[0])
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(timeout=120) == 0
        assert not alive(cycle)
