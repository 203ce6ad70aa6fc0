"""Each way of tests/support/ways.py to wait, to lag and to die is made to happen, and `minivm job` says which it was.

One cluster of two nodes serves all. Stand-ins replace GPUs, NCCL and a fabric's tool; the rest is Slurm and the kernel.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from images.engine.docker import DockerEngine
from tests.cluster.conftest import HASTY, NAME
from tests.cluster.researcher import Researcher, World
from tests.cluster.small import small_cluster
from tests.support.ways import DEAD, WAITING, WAYS, Way, pattern
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

CONTROLLER, LOGIN, FIRST, SECOND = "slurm-controller-0", "slurm-login-0", "slurm-worker-0", "slurm-worker-1"
SCRIPT = "prolog.d/50-way"
BY_KEY = {way.key: way for way in WAYS}
VALUES = {
    "scripts": {"policy": {"policy.json": json.dumps({**HASTY, "runner": {"scripts": {SCRIPT: {"broken": "fail"}}}})}},
    "workers": {"defaults": {"gres": ["nvme:2"]}},
    "slurm": {
        "requeue": {"guiltyNode": "act"},
        "config": {
            "AccountingStorageEnforce": "limits,qos",
            "Licenses": "matlab:1",
            "PreemptType": "preempt/partition_prio",
            "PreemptMode": "CANCEL",
        },
        "partitions": {
            "all": {"options": {"PreemptMode": "OFF"}},
            "low": {"pools": ["worker"], "options": {"PriorityTier": 1, "PreemptMode": "CANCEL"}},
            "high": {"pools": ["worker"], "options": {"PriorityTier": 50, "PreemptMode": "OFF"}},
            "short": {"pools": ["worker"]},
            "off": {"pools": ["worker"]},
            "closed": {"pools": ["worker"]},
        },
    },
}
ACCOUNTS = """
for name in physics chemistry geology; do sacctmgr -iQ add account $name; done
for name in tiny brief gone; do sacctmgr -iQ add qos $name; done
sacctmgr -iQ modify qos tiny set MaxTRESPerUser=cpu=1
sacctmgr -iQ modify qos brief set MaxWall=1
sacctmgr -iQ add user alice account=physics,chemistry,geology defaultaccount=physics
sacctmgr -iQ add user bob account=physics adminlevel=Operator
sacctmgr -iQ modify user alice set qos+=tiny,brief,gone
sacctmgr -iQ modify user where name=alice account=chemistry set MaxJobs=0
sacctmgr -iQ modify account geology set GrpTRES=cpu=1
scontrol update partitionname=off state=down
scontrol create reservation=later users=alice starttime=now+3hours duration=60 nodecnt=1
"""
# Stands for the tool of a fabric.
FABRIC = r"""cat > health.d/fabric.sh <<'END'
#!/bin/sh
# minivm-check: {"about": "the link is up", "class": "node", "period_s": 5, "when": ["background"]}
[ ! -e /run/minivm/fabric-gone ] || { echo "the fabric is gone"; exit "$MINIVM_UNFIT"; }
END
cat > prolog.d/50-way <<'END'
#!/bin/sh
[ ! -e /run/minivm/prolog-fails ]
END
chmod 755 health.d/fabric.sh prolog.d/50-way"""
OPERATOR = """
scontrol hold {admin}
scontrol update jobid={memory} minmemorynode=90000000
scontrol update jobid={nodes} numnodes=3
scontrol update jobid={gres} gres=nvme:4
scontrol update partitionname=short maxtime=1
scontrol update partitionname=closed allowaccounts=chemistry
sacctmgr -iQ modify user alice set qos-=gone
for job in {memory} {nodes} {gres} {partition-time} {account} {qos-gone}; do scontrol release $job || true; done
"""
RECORDINGS = Path(__file__).resolve().parents[1] / "recordings"
# Stand for a node's GPUs, at the interface of NVIDIA's tool and of the kernel, and for a port of InfiniBand.
TOOLS = {
    "nvidia_smi_q": "nvidia-smi/h100-healthy",
    "lspci": "nvidia-smi/h100-healthy",
    "nvlink_status": "nvlink/h100-healthy",
    "nvlink_errors": "nvlink/h100-healthy",
}
PORT = "/run/class/infiniband/mlx5_0/ports/1/counters"
STAND_INS = f"""set -e
cat > /usr/local/bin/nvidia-smi <<'END'
#!/bin/sh
case "$*" in
-q) cat /run/gpu/nvidia_smi_q ;;
"nvlink --status") cat /run/gpu/nvlink_status ;;
"nvlink -e") cat /run/gpu/nvlink_errors ;;
*) exit 1 ;;
esac
END
printf '#!/bin/sh\nexec cat /run/gpu/lspci\n' > /usr/local/bin/lspci
chmod 755 /usr/local/bin/nvidia-smi /usr/local/bin/lspci
touch /dev/nvidia0
mkdir -p {PORT}
cp -a /sys/class/net /run/class
for name in link_downed link_error_recovery symbol_error local_link_integrity_errors port_rcv_errors \\
    excessive_buffer_overrun_errors; do echo 0 > {PORT}/$name; done
"""
XID = """printf '4,1,%s,-;NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n' \\
    "$(awk '{print int($1 * 1000000)}' /proc/uptime)" > /dev/kmsg"""
# The image has no mount, and the container may not: a process of this machine enters its mount namespace.
BIND = """import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
namespace = os.open(f"/proc/{sys.argv[1]}/ns/mnt", os.O_RDONLY)
MS_BIND, CLONE_NEWNS = 0x1000, 0x20000
if libc.setns(namespace, CLONE_NEWNS) or libc.mount(b"/run/class", b"/sys/class", None, MS_BIND, None):
    sys.exit(os.strerror(ctypes.get_errno()))"""
HUNG = "import sys, health.jobs.explain as e; e.SILENCE = 5.0; from health.jobs.__main__ import main; sys.exit(main())"


class Trial:
    """Jobs of all ways, and the last page of each."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.jobs: dict[str, str] = {}
        self.nodes: dict[str, str] = {}  # of rank 1
        self.pages: dict[str, dict[str, Any]] = {}
        self.obstacles: dict[str, str] = {}

    def as_user(self, user: str, script: str) -> str:
        code, output = self.world.cluster.exec(LOGIN, ["runuser", "-l", user, "-c", f"{script} 2>errors"])
        assert code == 0, (
            f"{script[:200]}\n{output[-500:]}{self.world.run(LOGIN, 'tail', '-5', f'/home/{user}/errors')}"
        )
        return output

    def as_root(self, script: str) -> str:
        return self.world.run(CONTROLLER, "bash", "-c", f"set -e\n{script.format(**self.jobs)}")

    def submit(self, ways: Iterable[Way]) -> None:
        lines = ["set -e"]
        for way in ways:
            name = way.key.replace("-", "_")
            options = re.sub(r"\{([a-z-]+)\}", lambda match: f"${{{match[1].replace('-', '_')}}}", way.options)
            lines += [
                f"{name}=$(sbatch --parsable --time=5 --mem=100M -J {way.key} -o {way.key}.out {options} <<'SCRIPT'",
                f"#!/bin/bash\n{way.script}\nSCRIPT\n)",
                f"echo {way.key} ${name}",
            ]
        known = "".join(f"{key.replace('-', '_')}={job}\n" for key, job in self.jobs.items())
        script = known + "\n".join(lines)
        for line in self.as_user("alice", f"bash -c {shlex.quote(script)}").splitlines():
            assert re.fullmatch(r"[a-z-]+ \d+", line), line
            key, job = line.split()
            self.jobs[key] = job

    def cancel(self, *keys: str) -> None:
        self.world.slurm("scancel", *(self.jobs[key] for key in keys if key in self.jobs))

    def wait_for(self, key: str, state: str) -> None:
        def seen() -> str:
            return self.world.slurm("squeue", "-h", "-t", "all", "-j", self.jobs[key], "-o", "%T")

        until(lambda: state in seen().split(), f"job {key} is {state}", seen=seen)

    def wait_usable(self, node: str) -> None:
        def state() -> str:
            return self.world.node_states()[node]

        until(lambda: state() in ("idle", "mixed", "allocated"), f"{node} takes jobs", seen=state)

    def ask(self, ways: Sequence[Way], program: str = "minivm job") -> None:
        jobs = "\n".join(f"{self.jobs[way.key]}{way.ask}" for way in ways)
        # The login pod answers several questions at once.
        asking = f"printf '{jobs}' | xargs -P 6 -I ID sh -c '{program} ID --json > pages/ID 2>/dev/null'"
        text = self.as_user("alice", f"mkdir -p pages; {asking}; cd pages; tail -v -n +1 {' '.join(jobs.split())}")
        for part in re.split(r"^==> ", text, flags=re.MULTILINE)[1:]:
            job, _, page = part.partition(" <==\n")
            for way in ways:
                if f"{self.jobs[way.key]}{way.ask}" == job:
                    self.pages[way.key] = json.loads(page) if page.strip() else {}

    def noted(self, name: str) -> str:
        return self.world.cluster.exec(LOGIN, ["sh", "-c", f"cat {name} 2>/dev/null"])[1].strip()

    def note_nodes(self, ways: Iterable[Way]) -> None:
        for way in ways:
            if way.first:
                name = f"/home/alice/{way.key}-1"
                self.nodes[way.key] = until(partial(self.noted, name), f"{name} is there")

    def pid(self, pod: str) -> int:
        """Return the process number of a pod's PID 1 on this machine."""
        return int((self.world.cluster.kubelet.inspect(self.world.running(pod).container) or {})["State"]["Pid"])

    def text(self, way: Way) -> str:
        page = self.pages.get(way.key) or {}
        return "\n".join([page.get("headline", ""), *(fact["text"] for fact in page.get("evidence", ()))])

    def wrong(self, way: Way) -> str:
        """Return what is wrong with the page of this way; empty if it is right."""
        names = {"node": self.nodes.get(way.key, "?"), **self.jobs}
        page = self.pages.get(way.key) or {}
        if page.get("cause") != way.cause:
            return f"its cause is {page.get('cause')}, not {way.cause}: {self.text(way)}"
        has_words = re.search(pattern(way, names), self.text(way), re.DOTALL)
        return "" if has_words else f"{way.says!r} is not in: {self.text(way)}"

    def look(self, *keys: str, program: str = "minivm job") -> None:
        """Ask until each page is right, or for some time: what stays wrong fails the test of its way."""
        ways = [BY_KEY[key] for key in keys]

        def are_right() -> bool:
            self.ask([way for way in ways if self.wrong(way)], program)
            return not any(map(self.wrong, ways))

        try:
            until(are_right, f"the pages of {keys} are right")
        except AssertionError as error:
            print(str(error)[:200])

    @contextmanager
    def stage(self, *keys: str) -> Iterator[None]:
        """Keep what breaks in one stage from the other stages."""
        try:
            yield
        except Exception as error:
            self.obstacles |= dict.fromkeys(keys, repr(error)[:2000])


def prepare(trial: Trial) -> None:
    """Make accounts, homes and the check that stands in for a fabric's."""
    trial.as_root(ACCOUNTS)
    for user in ("alice", "bob"):
        Researcher(trial.world, user)("true")  # the first login makes the home
    steps = (
        "set -e; rm -rf /tmp/work; export HOME=/tmp; git clone -q /srv/git/scripts.git /tmp/work; cd /tmp/work\n"
        f"{FABRIC}\ngit add -A; git -c user.name=x -c user.email=x@x commit -q -m fabric; git push -q"
    )
    code, output = trial.world.cluster.exec("slurm-demo-0", ["bash", "-c", steps], user="nobody")
    assert code == 0, output
    for pod in (FIRST, SECOND):
        trial.world.run(pod, "gitsync", "now")


def start(trial: Trial) -> None:
    """Submit what needs no turn, and ask about all of it."""
    ways = [way for way in (*DEAD, *WAITING) if way.stage == "start"]
    trial.submit([Way("licensed", "", "", "", "", "-L matlab:1", "sleep 600")])
    trial.wait_for("licensed", "RUNNING")
    # slurmctld looks for a job's licences when it is the job's turn. No job of another way is before this one.
    trial.submit([BY_KEY["licence"]])
    trial.look("licence")
    trial.cancel("licensed")
    trial.submit(way for way in ways if way.key != "licence")
    trial.as_root(OPERATOR)
    trial.as_user("bob", f"scancel {trial.jobs['cancelled-by']}")
    trial.as_user("alice", f"scancel {trial.jobs['cancelled-early']}")
    trial.note_nodes(ways)
    trial.look(*(way.key for way in ways if way.key not in ("time", "deadline")))


def busy(trial: Trial) -> None:
    ways = [way for way in WAITING if way.stage == "busy"]
    trial.submit(ways[:1])
    trial.wait_for("array", "RUNNING")
    trial.submit(ways[1:])
    trial.look(*(way.key for way in ways))
    trial.cancel(*(way.key for way in ways))


def reserved(trial: Trial) -> None:
    when = "starttime=now duration=60 flags=maint,ignore_jobs"
    trial.as_root(f"scontrol create reservation=service users=root {when} nodes={SECOND}")
    trial.submit([BY_KEY["reserved"]])
    trial.look("reserved")
    trial.cancel("reserved")
    trial.as_root("scontrol delete reservation=service")


def drained(trial: Trial) -> None:
    """Look at a job that runs on a node and one that waits for it, while a person drains it and while a check does."""
    trial.submit([BY_KEY["goes-on"]])
    trial.jobs["sick"] = trial.jobs["goes-on"]
    trial.wait_for("goes-on", "RUNNING")
    trial.as_root(f"scontrol update nodename={SECOND} state=drain reason='new disk on Monday'")
    trial.submit([BY_KEY["drained"]])
    trial.look("goes-on", "drained")
    trial.cancel("drained")
    # A job that does not require the second node starts there.
    trial.as_root(f"scontrol update nodename={FIRST} state=drain reason=test")
    trial.as_root(f"scontrol update nodename={SECOND} state=resume")
    trial.submit([BY_KEY["again"]])
    trial.wait_for("again", "RUNNING")
    trial.as_root(f"scontrol update nodename={FIRST} state=resume")
    trial.world.run(SECOND, "touch", "/run/minivm/fabric-gone")
    until(lambda: "drain" in trial.world.node_states()[SECOND], "the broker drains it")
    trial.as_user("alice", "touch die")
    trial.submit([BY_KEY["unfit"]])
    trial.look("sick", "unfit")
    trial.world.cluster.exec(CONTROLLER, ["minivm", "restart", "requeue"])  # it comes each minute
    trial.look("again")
    assert f"ExcNodeList={SECOND} " in trial.as_root("scontrol -o show job {again}")
    trial.cancel("again")
    trial.cancel("sick", "unfit")
    trial.world.run(SECOND, "rm", "/run/minivm/fabric-gone")


def running(trial: Trial) -> None:
    trial.submit([BY_KEY["well"]])
    trial.jobs |= dict.fromkeys(("hung", "suspended", "requeued"), trial.jobs["well"])
    trial.wait_for("well", "RUNNING")
    trial.look("well")
    trial.look("hung", program=f'/opt/minivm/bin/python3 -c "{HUNG}"')
    trial.as_root("scontrol suspend {well}")
    trial.look("suspended")
    trial.as_root("scontrol resume {well}; scontrol requeue {well}")
    trial.look("requeued")
    trial.cancel("well")


def ranks(trial: Trial) -> None:
    for key in ("rank-sleeps", "rank-stopped", "rank-silent"):
        run(trial, key)
        trial.look(key)
        trial.cancel(key)


def preempted(trial: Trial) -> None:
    trial.submit([BY_KEY["preempted"]])
    trial.wait_for("preempted", "RUNNING")
    trial.submit([Way("preemptor", "", "", "", "", f"-p high -w {FIRST} --exclusive", "sleep 600")])
    trial.look("preempted")
    trial.cancel("preemptor")


def prolog(trial: Trial) -> None:
    trial.wait_usable(SECOND)
    trial.world.run(SECOND, "touch", "/run/minivm/prolog-fails")
    trial.submit([BY_KEY["prolog"]])
    trial.look("prolog")
    trial.cancel("prolog")
    trial.as_root(f"scontrol update nodename={SECOND} state=resume")
    trial.submit([BY_KEY["launch"]])
    trial.look("launch")
    trial.world.run(SECOND, "rm", "/run/minivm/prolog-fails")
    trial.as_root(f"scontrol update nodename={SECOND} state=resume || true")


def lost(trial: Trial) -> None:
    trial.wait_usable(SECOND)
    trial.submit([BY_KEY["node-down"], BY_KEY["nodes-down"]])
    for key in ("node-down", "nodes-down"):
        trial.wait_for(key, "RUNNING")
    # slurmd registers again, and the node is back by itself (ReturnToService).
    trial.as_root(f"scontrol update nodename={SECOND} state=down reason='test of a lost node'")
    trial.look("node-down", "nodes-down")
    trial.wait_usable(SECOND)
    trial.submit([BY_KEY["pod-replaced"]])
    trial.wait_for("pod-replaced", "RUNNING")
    os.kill(trial.pid(SECOND), signal.SIGKILL)  # docker starts the container again
    trial.look("pod-replaced")


def faults(trial: Trial) -> None:
    """Break a link, a port's link, an NVLink and a GPU of one node, each while a job runs there."""
    trial.wait_usable(SECOND)
    for tool, recording in TOOLS.items():
        text = (RECORDINGS / recording / f"{tool}.txt").read_text()
        trial.world.run(SECOND, "sh", "-c", f"mkdir -p /run/gpu; printf %s {shlex.quote(text)} > /run/gpu/{tool}")
    trial.world.run(SECOND, "sh", "-c", STAND_INS)
    subprocess.run([sys.executable, "-c", BIND, str(trial.pid(SECOND))], check=True)

    run(trial, "link")
    lose_link(trial, SECOND)
    fail(trial, "link")
    run(trial, "ib-link")
    trial.world.run(SECOND, "sh", "-c", f"echo 1 > {PORT}/link_downed")
    fail(trial, "ib-link")
    run(trial, "nvlink", "xid")
    trial.world.run(SECOND, "sed", "-i", "0,/Link 3: .*/s//Link 3: <inactive>/", "/run/gpu/nvlink_status")
    judge(trial, "gpu_nvlink")
    fail(trial, "nvlink")
    trial.world.run(SECOND, "sh", "-c", XID)
    judge(trial, "xid")
    fail(trial, "xid")


def run(trial: Trial, *keys: str) -> None:
    ways = [BY_KEY[key] for key in keys]
    trial.submit(ways)
    for key in keys:
        trial.wait_for(key, "RUNNING")
    trial.note_nodes(ways)


def lose_link(trial: Trial, pod: str) -> None:
    """Take the link of the pod's eth0 away for a moment, at its other end on this machine."""
    index = trial.world.run(pod, "cat", "/sys/class/net/eth0/iflink").strip()
    (end,) = [
        path.parent.name for path in Path("/sys/class/net").glob("*/ifindex") if path.read_text().strip() == index
    ]
    for state in ("down", "up"):
        subprocess.run(["ip", "link", "set", end, state], check=True)


def judge(trial: Trial, check: str) -> None:
    """Let a check look now, and wait until the broker has drained the node because of it."""
    trial.world.cluster.exec(SECOND, ["minivm", "health", check, "--run", "--when", "background"])

    def seen() -> str:
        return trial.world.slurm("sinfo", "-h", "-R", "-o", "%E")

    until(lambda: f"{check}[" in seen(), f"{check} drains the node", seen=seen)


def fail(trial: Trial, key: str) -> None:
    trial.as_user("alice", f"touch {key}-now")
    trial.look(key)


STAGES: tuple[tuple[Callable[[Trial], None], tuple[str, ...]], ...] = (
    (start, tuple(way.key for way in WAYS if way.stage == "start")),
    (busy, ("array", "resources", "priority", "het")),
    (reserved, ("reserved",)),
    (drained, ("goes-on", "drained", "sick", "unfit", "again")),
    (running, ("well", "hung", "suspended", "requeued")),
    (ranks, ("rank-sleeps", "rank-stopped", "rank-silent")),
    (preempted, ("preempted",)),
    (prolog, ("prolog", "launch")),
    (lost, ("node-down", "nodes-down", "pod-replaced")),
    (faults, ("link", "ib-link", "nvlink", "xid")),
)


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    root = tmp_path_factory.mktemp("ways")
    with small_cluster(DockerEngine().client, f"{NAME}-ways", root, VALUES, workers=2) as cluster:
        cluster.up(timeout=240)
        made = Trial(World(cluster))
        prepare(made)
        for act, keys in STAGES:
            with made.stage(*keys):
                act(made)
        with made.stage("time", "deadline"):
            made.look("time", "deadline")
        yield made


@pytest.mark.parametrize("key", BY_KEY)
def test_the_page_names_what_happened_and_its_cause(trial: Trial, key: str) -> None:
    if problem := trial.obstacles.get(key) or trial.wrong(BY_KEY[key]):
        pytest.fail(f"{BY_KEY[key].title}: {problem}", pytrace=False)
