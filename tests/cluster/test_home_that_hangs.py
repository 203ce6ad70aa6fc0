"""The shared home hangs: people are told and not kept, jobs go on, and when it answers again nothing need be done."""

from __future__ import annotations

import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster.researcher import Researcher, World
from tests.cluster.shared_home import SharedHome
from tests.waiting import PATIENCE, until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

LOGIN, WORKERS = "slurm-login-0", ("slurm-worker-0", "slurm-worker-1")
ALICE = "20001:20000"


def test_a_home_that_hangs_keeps_nobody_and_stops_no_job(healthy: World, alice: Researcher, home: SharedHome) -> None:
    healthy.wait_idle()
    alice("echo kept > note")
    running = alice.submit("-w", WORKERS[0], "-D", "/tmp", "-o", "/tmp/out", script="sleep 3000")
    alice.wait_for(running, "RUNNING")
    before = {pod: (healthy.running(pod).container, healthy.running(pod).restarts) for pod in (LOGIN, *WORKERS)}

    def check(pod: str) -> None:
        """Run the node's own check twice, as its period would: only a lasting failure drains a node."""
        for _ in range(2):
            healthy.cluster.exec(pod, ["minivm", "health", "--run", "mounts"])

    def also(pod: str) -> str:
        return "; ".join(healthy.row(pod).also)

    def told(pod: str, words: str) -> None:
        until(lambda: words in also(pod), f"{pod} tells of its home", seen=lambda: also(pod))
        assert "does not answer" in also(pod)
        healthy.wait_ready(pod)
        assert "/home" in healthy.run(pod, "minivm", "status")

    with home.hanging():
        with ThreadPoolExecutor() as hands:
            coming, looks = hands.submit(alice.try_, "true"), hands.map(check, WORKERS)
            refused = coming.result()
            list(looks)
        assert refused.returncode == 255, refused
        assert "Your home /home/alice does not answer" in refused.stderr
        # An operator gets in, and Slurm answers where the home is not asked.
        assert healthy.run(LOGIN, "hostname") == f"{LOGIN}\n"
        submit = ["sbatch", "--parsable", "-D", "/tmp", "-o", "/tmp/out", "--wrap", "true"]
        code, said = healthy.cluster.exec(LOGIN, submit, user=ALICE)
        assert code == 0, said
        queued = said.strip()
        assert {running, queued} <= set(healthy.run(LOGIN, "squeue", "-h", "-t", "all", "-o", "%i").split())
        told(LOGIN, "mounts: /home")
        told(WORKERS[0], "mounts (node): /home")
        # No new job is sent where it could only hang; the one that runs goes on.
        until(
            lambda: all("minivm: mounts" in healthy.row(pod).slurm for pod in WORKERS),
            "both nodes are drained, with the reason",
            seen=lambda: [healthy.row(pod) for pod in WORKERS],
        )
        assert alice.state(running) == "RUNNING"
    # Nothing is started again, no node resumed by hand: it mends itself.
    # A login that comes while an older question is still stuck is refused.
    until(lambda: alice.try_("cat note").stdout == "kept\n", "alice works as before")
    until(lambda: "mounts" not in also(LOGIN), "the login pod is content", seen=lambda: also(LOGIN))
    with ThreadPoolExecutor() as hands:
        list(hands.map(check, WORKERS))
    alice.wait_for(queued, "COMPLETED")
    assert alice.state(running) == "RUNNING"
    assert {pod: (healthy.running(pod).container, healthy.running(pod).restarts) for pod in before} == before
    alice(f"scancel {running}")
    healthy.wait_idle()


def test_a_key_in_the_home_lets_in_unless_others_may_write_it(
    healthy: World, alice: Researcher, tmp_path: Path
) -> None:
    own = tmp_path / "own"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", own], check=True)
    public = own.with_suffix(".pub").read_text()
    alice(f"mkdir -p -m 700 .ssh && printf %s {shlex.quote(public)} > .ssh/authorized_keys && chmod 600 .ssh/*")
    with_it = alice.command("echo in")
    with_it[with_it.index("-i") + 1] = str(own)

    def enters() -> bool:
        return subprocess.run(with_it, capture_output=True, text=True, timeout=PATIENCE).stdout == "in\n"

    assert enters()
    for others in ("chmod 666 .ssh/authorized_keys", "chmod 600 .ssh/authorized_keys; chmod 777 .ssh"):
        alice(others)
        assert not enters()
    alice("chmod 700 .ssh")
    assert enters()
    alice("rm -r .ssh")
