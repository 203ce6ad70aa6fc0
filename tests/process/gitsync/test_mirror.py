"""The mirror as a process: what it shows, what it keeps from the fleet, and what the fleet costs it."""

from __future__ import annotations

import gzip
import hashlib
import hmac
import os
import re
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from gitsync import rings
from gitsync.cycle.run import run_cycle
from tests.process.gitsync_world import GOOD_TREE, World
from tests.waiting import PATIENCE, until

SECRET = "hook-secret"


@dataclass
class Running:
    """A mirror that listens."""

    url: str
    log: Path

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=60) as reply:
            return str(reply.read().decode())

    def count(self, name: str) -> int:
        found = re.search(rf"^minivm_gitsync_mirror_{name} (\d+)$", self.get("/metrics"), re.M)
        assert found is not None
        return int(found[1])

    def post(self, path: str, body: bytes, **headers: str) -> int:
        request = urllib.request.Request(f"{self.url}{path}", data=body, method="POST")
        for name, value in headers.items():
            request.add_header(name.replace("_", "-"), value)
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as error:
            return int(error.code)

    def hurry(self) -> None:
        """Post the webhook that a git host sends after a push."""
        signature = "sha256=" + hmac.new(SECRET.encode(), b"{}", hashlib.sha256).hexdigest()
        assert self.post("/webhook", b"{}", X_Hub_Signature_256=signature) == 202


@contextmanager
def mirror(world: World, **extra: str) -> Iterator[Running]:
    secret = world.folder / "hook"
    secret.write_text(SECRET)
    settings = world.settings
    env = {
        "PATH": os.environ["PATH"],
        "MINIVM_GITSYNC_REPO": str(settings.repo),
        "MINIVM_GITSYNC_ROOT": str(world.folder / "controller"),
        "MINIVM_GITSYNC_ALLOWED_SIGNERS": str(settings.allowed_signers),
        "MINIVM_GITSYNC_WEBHOOK_SECRET": str(secret),
        "MINIVM_GITSYNC_MIRROR": "127.0.0.1:0",
        "MINIVM_GITSYNC_PERIOD": "3600",
        **extra,
    }
    log = world.folder / "mirror.log"
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-m", "gitsync.cli", "mirror"], stdout=out, stderr=out, env=env)
    try:
        until(lambda: "serves http://" in log.read_text() or process.poll() is not None, "the mirror listens")
        found = re.search(r"serves (http://\S+)/scripts.git", log.read_text())
        assert found is not None, log.read_text()
        yield Running(found[1], log)
    finally:
        process.terminate()
        assert process.wait(timeout=120) == 0, log.read_text()


def node(world: World, running: Running, name: str = "node") -> None:
    world.settings = replace(world.settings, repo=f"{running.url}/scripts.git", root=world.folder / name, pod=name)


def test_nodes_follow_the_mirror_and_never_see_what_it_refused(world: World) -> None:
    first = world.upstream.commit(dict(GOOD_TREE), signer=world.alice)
    with mirror(world) as running:
        until(lambda: first[:12] in running.log.read_text(), "the mirror shows the first commit")
        node(world, running)
        state = run_cycle(world.settings)
        assert state.failures == 0 and world.live() == first
        assert state.published is not None and "alice" in state.published.signer
        unsigned = world.upstream.commit({"new": "x"}, signer=None)
        running.hurry()
        until(lambda: f"refused {unsigned[:12]}" in running.log.read_text(), "the mirror refuses it")
        state = run_cycle(world.settings)
        assert state.quarantine is None and state.failures == 0 and world.live() == first
        third = world.upstream.commit({"new": "y"}, signer=world.alice)
        running.hurry()
        until(lambda: f"serves {third[:12]}" in running.log.read_text(), "the mirror shows the next")
        run_cycle(world.settings)
        assert world.live() == third
        # A rollback to what the mirror keeps, on a node that never had it.
        node(world, running, "another")
        run_cycle(world.settings, only=first, leave=True)
        assert world.live() == first


def test_the_mirror_checks_nothing_on_trust(world: World) -> None:
    """A node with other signers than its mirror's refuses what the mirror shows."""
    commit = world.upstream.commit(dict(GOOD_TREE), signer=world.alice)
    with mirror(world) as running:
        until(lambda: f"serves {commit[:12]}" in running.log.read_text(), "the mirror shows it")
        node(world, running)
        world.settings.allowed_signers.write_text(world.mallory.allowed_line)
        state = run_cycle(world.settings)
        assert state.quarantine is not None and "no allowed signer holds" in state.quarantine.reason


def test_many_nodes_with_one_question_cost_one_git(world: World) -> None:
    commit = world.upstream.commit(dict(GOOD_TREE), signer=world.alice)
    with mirror(world) as running:
        until(lambda: f"serves {commit[:12]}" in running.log.read_text(), "the mirror shows it")
        clones = [
            subprocess.Popen(
                ["git", "-c", "protocol.version=2", "clone", "-q", "--bare", "--depth=1", f"{running.url}/scripts.git",
                 str(world.folder / f"clone-{number}")],
            )
            for number in range(12)
        ]  # fmt: skip
        assert [clone.wait(timeout=PATIENCE) for clone in clones] == [0] * 12
        assert running.count("requests") >= 36
        # The advertisement, the list of refs, the pack: each made once.
        assert running.count("gits") == 3
        until(lambda: running.count("open") <= 1, "the clients' connections are over")


def test_a_webhook_without_the_secret_and_nonsense_are_turned_away(world: World) -> None:
    world.upstream.commit(dict(GOOD_TREE), signer=world.alice)
    with mirror(world) as running:
        assert running.post("/webhook", b"{}", X_Hub_Signature_256="sha256=" + "0" * 64) == 403
        assert running.post("/webhook", b"{}", X_Gitlab_Token="wrong") == 403
        assert running.post("/webhook", b"{}") == 403
        assert running.post("/webhook", b"{}", X_Gitlab_Token=SECRET) == 202
        assert running.post("/scripts.git/git-receive-pack", b"0000") == 404
        assert running.post("/scripts.git/git-upload-pack", b"nonsense") == 503
        assert running.post("/ring", b"nonsense") == 400
        # Turned away by its headers, before a byte of the body is read.
        host, port = running.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as line:
            line.sendall(b"POST /ring HTTP/1.1\r\nHost: x\r\nContent-Length: 2000000\r\n\r\n")
            assert line.recv(100).startswith(b"HTTP/1.1 413 ")


def test_no_request_costs_the_mirror_a_thread(world: World) -> None:
    with mirror(world) as running:
        for _ in range(70):
            assert running.post("/ring", b"[" * 200_000) == 400
            assert running.post("/webhook", gzip.compress(b"x" * 100)[:-20] + b"!" * 20, Content_Encoding="gzip") == 413
        assert running.count("errors") == 0
        # Who is answered is still open for a moment: it is what asks now that stays.
        until(lambda: running.count("open") == 1, "none but who asks is open")


def test_who_sends_a_byte_now_and_then_holds_no_thread(world: World) -> None:
    with mirror(world) as running:
        host, port = running.url.removeprefix("http://").split(":")
        lines = [socket.create_connection((host, int(port)), timeout=30) for _ in range(64)]
        stop = threading.Event()

        def trickle() -> None:
            for line in lines:
                line.sendall(b"POST /ring HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n")
            while not stop.wait(1.0):
                for line in lines:
                    with suppress(OSError):
                        line.sendall(b"[")

        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            until(lambda: answers(running), "the mirror answers somebody else")
        finally:
            stop.set()
            thread.join()
            for line in lines:
                line.close()


def answers(running: Running) -> bool:
    try:
        with urllib.request.urlopen(f"{running.url}/metrics", timeout=60) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def test_only_what_was_verified_is_served_by_its_hash(world: World) -> None:
    first = world.upstream.commit(dict(GOOD_TREE), signer=world.alice)
    with mirror(world) as running:
        until(lambda: first[:12] in running.log.read_text(), "the mirror shows the first commit")
        unsigned = world.upstream.commit({"new": "x"}, signer=None)
        running.hurry()
        until(lambda: f"refused {unsigned[:12]}" in running.log.read_text(), "the mirror refuses it")
        into = str(world.folder / "clone")
        subprocess.run(["git", "init", "-q", "--bare", into], check=True)
        for version in ("0", "2"):
            for commit, served in ((first, True), (unsigned, False)):
                argv = ["git", "-C", into, "-c", f"protocol.version={version}", "fetch", "-q", "--depth=1"]
                done = subprocess.run([*argv, f"{running.url}/scripts.git", commit], capture_output=True, text=True)
                assert (done.returncode == 0) is served, (version, served, done.stderr)


def test_with_a_secret_the_ring_hears_only_who_knows_it(world: World) -> None:
    first = world.upstream.commit(dict(GOOD_TREE), signer=world.alice)
    secret = world.folder / "ring"
    secret.write_text("ring-secret\n")
    with mirror(world, MINIVM_GITSYNC_RING_SECRET=str(secret)) as running:
        until(lambda: first[:12] in running.log.read_text(), "the mirror shows the first commit")
        url = f"{running.url}/ring"
        assert not rings.send_result(url, "liar", first, ok=False, reason="no")
        assert '"failed": 0' in running.get(f"/ring/{first}")
        node(world, running)
        world.settings = replace(world.settings, ring_url=url, ring_secret=secret, canary_percent=100.0)
        run_cycle(world.settings)
        assert '"good": 1' in running.get(f"/ring/{first}")
        assert rings.send_result(url, "node", first, ok=False, reason="no", secret=secret)
        assert '"failed": 1' in running.get(f"/ring/{first}")


def pods(percent: float, canary: bool) -> str:
    """Return the name of a pod inside or outside the first ring."""
    return next(f"pod-{n}" for n in range(1000) if rings.is_canary(f"pod-{n}", percent) is canary)


def test_the_rest_of_the_fleet_waits_for_the_canaries(world: World) -> None:
    """The canary's check fails: the rest hold. A mended commit they take, when the delay is over."""
    first = world.upstream.commit(dict(GOOD_TREE), signer=world.alice)
    with mirror(world) as running:

        def shows(commit: str) -> None:
            until(lambda: f"serves {commit[:12]}" in running.log.read_text(), f"the mirror shows {commit}")

        shows(first)
        base = replace(
            world.settings, repo=f"{running.url}/scripts.git", canary_percent=10.0, ring_delay=0.0,
            ring_url=f"{running.url}/ring",
        )  # fmt: skip
        canary = replace(base, root=world.folder / "canary", pod=pods(10, True))
        rest = replace(base, root=world.folder / "rest", pod=pods(10, False))
        late = replace(rest, ring_delay=3600.0, root=world.folder / "late")
        for settings in (canary, rest):
            state = run_cycle(settings)
            assert state.published is not None and state.published.commit == first
        bad = world.upstream.commit({"bad": "x"}, signer=world.alice)
        running.hurry()
        shows(bad)
        refused = run_cycle(replace(canary, check_command=("bash", "-c", "test ! -e {tree}/bad")))
        assert refused.quarantine is not None
        held = run_cycle(rest)
        assert held.published is not None and held.published.commit == first
        assert held.candidate is not None and held.candidate.commit == bad
        assert canary.pod in held.candidate.reason and "failed" in held.candidate.reason
        good = world.upstream.commit({"bad": None, "good": "x"}, signer=world.alice)
        running.hurry()
        shows(good)
        waiting = run_cycle(late)
        assert waiting.candidate is not None and "after the canaries" in waiting.candidate.reason
        for settings in (canary, rest):
            state = run_cycle(settings)
            assert state.published is not None and state.published.commit == good
    # The ring is gone with the mirror: nobody but a canary takes anything new.
    next_one = world.upstream.commit({"good": "y"}, signer=world.alice)
    direct = str(world.upstream.path)
    state = run_cycle(replace(rest, repo=direct))
    assert state.candidate is not None and "does not answer" in state.candidate.reason
    state = run_cycle(replace(canary, repo=direct))
    assert state.published is not None and state.published.commit == next_one


def test_a_broken_script_that_the_runner_reports_holds_the_ring(world: World) -> None:
    from gitsync import lease

    first = world.upstream.commit(dict(GOOD_TREE), signer=world.alice)
    with mirror(world) as running:
        until(lambda: f"serves {first[:12]}" in running.log.read_text(), "the mirror shows it")
        node(world, running)
        world.settings = replace(world.settings, ring_url=f"{running.url}/ring", canary_percent=100.0)
        run_cycle(world.settings)
        assert lease.report(first, "10-hello", "timed out after 5 s", world.layout)
        run_cycle(world.settings)
        view = running.get(f"/ring/{first}")
        assert '"failed": 1' in view and "10-hello: timed out after 5 s" in view
        assert not list(world.layout.reports.iterdir())
