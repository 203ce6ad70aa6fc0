"""Find a bad link and a bad switch by real TCP through network namespaces that tc and iptables shape.

Each machine is a namespace with one link to the bridge of its leaf switch; the bridges meet in a spine bridge. The
measuring program, the check `tcp` and the planner are the real ones; only srun has a stand-in, which enters the peer's
namespace. Healthy links have 100 Mbit/s, so that a busy computer reaches it.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from health.active import measure
from health.active.culprit import Culprit, Diagnosis, GroupResult, GroupTest, Part, PlacedMachine, diagnose, sweep
from health.api import Capture, Failure, Limits, Result
from health.checks.judge import Setting, judge
from health.checks.load import load_checks

ROOT = Path(__file__).resolve().parents[3]
MEASURE = ROOT / "health/active/measure.py"
CHECK = load_checks(ROOT / "scripts", ["tcp"], "active.d").checks["tcp"]
# Rate of a link. A kernel without netem has no delay.
RATE = "tbf rate {} burst 64k latency 100ms"
HEALTHY, SLOW = RATE.format("100mbit"), RATE.format("10mbit")
DELAY = "netem rate 100mbit delay 800ms"
LOSS = "iptables -A INPUT -m statistic --mode random --probability 0.4 -j DROP"
LIMITS = Limits({"default": {"tcp_min_mbs": 5}}, "tests")
SRUN = """#!{python}
import os, subprocess, sys
names = next(word for word in sys.argv if word.startswith("--nodelist=")).partition("=")[2].split(",")
command = sys.argv[next(i for i, word in enumerate(sys.argv[1:], 1) if not word.startswith("-")) :]
tasks = [
    subprocess.Popen(
        ["nsenter", f"--net=/run/netns/{prefix}{{name}}", *command], env={{**os.environ, "SLURMD_NODENAME": name}}
    )
    for name in names
]
sys.exit(max(task.wait() for task in tasks))
"""


def judged(done: subprocess.CompletedProcess[str]) -> Result:
    capture = Capture(done.stdout) if done.returncode == 0 else Capture("", Failure.FAILED, done.stderr[-300:])
    verdict = judge(CHECK, {"tcp_rates": capture}, lambda _: LIMITS, Setting("c", "b", 1.0, {}), {}).verdict
    print(verdict.result, verdict.reason)
    return verdict.result


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


def refusal() -> str:
    """Return why this machine cannot have shaped namespaces; "" if it can."""
    if missing := [name for name in ("ip", "tc", "nsenter", "iptables") if not shutil.which(name)]:
        return f"no {missing[0]}"
    if os.geteuid():
        return "namespaces need root"
    name = f"mvt{os.getpid()}"
    try:
        run("ip", "netns", "add", name)
        run("ip", "-n", name, "link", "add", "leaf0", "type", "bridge")
        run("ip", "-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", "n0")
        run("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", *HEALTHY.split())
    except AssertionError as error:
        return str(error)
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return ""


@dataclass
class Fabric:
    prefix: str
    bin: Path
    machines: list[PlacedMachine] = field(default_factory=list)

    def build(self, leaves: int, per_leaf: int) -> None:
        self.bin.mkdir()
        (self.bin / "srun").write_text(SRUN.format(python=sys.executable, prefix=self.prefix))
        (self.bin / "srun").chmod(0o755)
        fabric = f"{self.prefix}fabric"
        run("ip", "netns", "add", fabric)
        run("ip", "-n", fabric, "link", "add", "spine", "type", "bridge")
        run("ip", "-n", fabric, "link", "set", "spine", "up")
        for leaf in range(leaves):
            run("ip", "-n", fabric, "link", "add", f"leaf{leaf}", "type", "bridge")
            run("ip", "-n", fabric, "link", "add", f"up{leaf}", "type", "veth", "peer", "name", f"down{leaf}")
            for port, bridge in ((f"up{leaf}", f"leaf{leaf}"), (f"down{leaf}", "spine")):
                run("ip", "-n", fabric, "link", "set", port, "master", bridge, "up")
            run("ip", "-n", fabric, "link", "set", f"leaf{leaf}", "up")
            for _ in range(per_leaf):
                self._join(fabric, leaf)

    def _join(self, fabric: str, leaf: int) -> None:
        name = f"n{len(self.machines)}"
        inside = self.prefix + name
        run("ip", "netns", "add", inside)
        run("ip", "-n", inside, "link", "add", "eth0", "type", "veth", "peer", "name", name, "netns", fabric)
        run("ip", "-n", inside, "addr", "add", f"10.77.0.{len(self.machines) + 1}/24", "dev", "eth0")
        run("ip", "-n", inside, "link", "set", "lo", "up")
        run("ip", "-n", inside, "link", "set", "eth0", "up")
        run("ip", "-n", fabric, "link", "set", name, "master", f"leaf{leaf}", "up")
        self.machines.append(PlacedMachine(name, ("/", f"/leaf{leaf}")))
        self.shape(name, HEALTHY)

    def shape(self, name: str, how: str) -> None:
        """Shape the machine's link, as it sends."""
        words = how.split()
        tool = ("tc", "qdisc", "replace", "dev", "eth0", "root", *words) if words[0] != "iptables" else words
        try:
            run("nsenter", f"--net=/run/netns/{self.prefix}{name}", *tool)
        except AssertionError as error:
            pytest.skip(f"this kernel does not shape so: {error}")

    def remove(self) -> None:
        for name in (*(machine.name for machine in self.machines), "fabric"):
            subprocess.run(["ip", "netns", "del", self.prefix + name], capture_output=True)

    def passes(self, test: GroupTest) -> bool | None:
        first, *peers = test.machines
        number = [machine.name for machine in self.machines].index(first)
        environment = {
            "PATH": f"{self.bin}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "MINIVM_PEERS": ",".join(peers),
            "SLURM_LAUNCH_NODE_IPADDR": f"10.77.0.{number + 1}", "SLURMD_NODENAME": first,
        }  # fmt: skip
        command = ["nsenter", f"--net=/run/netns/{self.prefix}{first}", sys.executable, str(MEASURE), "tcp"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        result = judged(done)
        return None if result is Result.UNKNOWN else result is Result.OK

    def find(self) -> tuple[Diagnosis, int]:
        groups = sweep(self.machines, 0)
        results: list[GroupResult] = []
        for _ in range(20):
            diagnosis = diagnose(self.machines, groups, results)
            if not diagnosis.wanted:
                return diagnosis, len(results) - len(groups)
            with ThreadPoolExecutor(len(diagnosis.wanted)) as pool:
                for test, passed in zip(diagnosis.wanted, pool.map(self.passes, diagnosis.wanted), strict=True):
                    assert passed is not None, f"no result of {test}"
                    results.append(GroupResult(test, passed))
        raise AssertionError(f"no diagnosis: {results}")


@pytest.fixture
def fabric(tmp_path: Path) -> Iterator[Fabric]:
    if reason := refusal():
        pytest.skip(f"no shaped network namespaces here: {reason}")
    made = Fabric(f"mvt{os.getpid()}", tmp_path / "bin")
    try:
        made.build(leaves=2, per_leaf=4)
        yield made
    finally:
        made.remove()


@pytest.mark.parametrize("how", [SLOW, LOSS, DELAY], ids=["rate", "loss", "delay"])
def test_a_bad_link_is_found(fabric: Fabric, how: str) -> None:
    fabric.shape("n5", how)
    diagnosis, further = fabric.find()
    assert diagnosis.culprits == (Culprit(Part.MACHINE, "n5", 2),)
    assert further <= 2 * 3 + 4


def test_a_link_that_is_down_is_found(fabric: Fabric) -> None:
    run("ip", "-n", f"{fabric.prefix}fabric", "link", "set", "n2", "down")
    diagnosis, further = fabric.find()
    assert diagnosis.culprits == (Culprit(Part.MACHINE, "n2", 2),)
    assert further <= 2 * 3 + 4


def test_a_bad_leaf_switch_is_found_and_no_machine(fabric: Fabric) -> None:
    for machine in fabric.machines[4:]:
        fabric.shape(machine.name, SLOW)
    diagnosis, further = fabric.find()
    assert diagnosis.culprits == (Culprit(Part.LEAF, "/leaf1", 4),)
    assert further <= 2 * 3 + 4


def test_a_healthy_fabric_blames_nothing(fabric: Fabric) -> None:
    assert fabric.find() == (Diagnosis((), ()), 0)


@pytest.mark.parametrize("peer", ["comes", "finds no way"])
def test_programs_that_connect_and_say_nothing_change_no_result(tmp_path: Path, peer: str) -> None:
    """Any program of a node may connect to the measuring port, before the peers do."""
    srun = tmp_path / "srun"
    srun.write_text(f"""#!{sys.executable}
import os, socket, subprocess, sys
port = int(sys.argv[-1])
strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
strangers[0].sendall(b"token from b\\n")
strangers[1].sendall(b"x" * 10000)
if {peer == "comes"}:
    command = sys.argv[next(i for i, word in enumerate(sys.argv[1:], 1) if not word.startswith("-")) :]
    sys.exit(subprocess.run(command, env={{**os.environ, "SLURMD_NODENAME": "b"}}).returncode)
sys.exit({measure.NO_WAY})
""")
    srun.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "MINIVM_PEERS": "b",
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1", "SLURMD_NODENAME": "a",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(MEASURE), "tcp"], env=environment, capture_output=True, text=True, timeout=120
    )
    assert judged(done) is (Result.OK if peer == "comes" else Result.PROBLEM), done.stderr


def test_a_crowd_that_may_have_kept_the_peers_out_makes_the_result_unknown() -> None:
    with measure.listen() as server:
        acceptor = measure.PeerAcceptor(server, "secret")
        port = server.getsockname()[1]
        crowd = [socket.create_connection(("127.0.0.1", port)) for _ in range(measure.MOST_WAITING + 5)]
        with socket.create_connection(("127.0.0.1", port)) as late:
            late.sendall(b"secret from b\n")
            connection, direction, name = acceptor.peers.get(timeout=20)
            connection.close()
        acceptor.close()
        for stranger in crowd:
            stranger.close()
    assert (direction, name, acceptor.stranger) == ("from", "b", "::ffff:127.0.0.1") and acceptor.turned_away
