"""Controller, two workers and a login pod of the real images, with named capabilities only: what an operator relies on.

One cluster for the module; the tests run in the order in which they stand, and each leaves the cluster whole.
"""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.container.init_pods import PYTHON, Pod, World, slurm_conf, world
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]


# Stops the process that slurmd becomes on a reconfigure: its grandchild, by then of the same command line.
FREEZE = """
import os, pathlib, signal, sys
old = sys.argv[1]
line = pathlib.Path("/proc", old, "cmdline").read_bytes()
pathlib.Path("/tmp/watching").touch()
while True:
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            parent = pathlib.Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[1]
            if pid != old and parent != old and pathlib.Path("/proc", pid, "cmdline").read_bytes() == line:
                os.kill(int(pid), signal.SIGSTOP)
                pathlib.Path("/tmp/new").write_text(pid)
                os.rename("/tmp/new", "/tmp/frozen")
                sys.exit()
        except OSError:
            pass
"""


WAITS = re.compile(r"^MessageTimeout\s+= 60 sec", re.MULTILINE)
FAILED = "reconfigure failed"
# Stops the process $0 at the next such line of its log, after the $1 that are there already.
STOP_AT = f"""
minivm logs slurmctld --lines 2000 -f | while read -r line; do
    case "$line" in *"{FAILED}"*)
        if [ "$1" -gt 0 ]; then set -- $(($1 - 1)); continue; fi
        kill -STOP "$0"; touch /tmp/stopped; exit;;
    esac
done
"""


class Cluster:
    def __init__(self, made: World) -> None:
        self.world = made
        made.configure({"slurm.conf": slurm_conf()})
        self.controller = made.pod("controller", "slurm-controller")
        self.workers = [made.pod("worker", name) for name in ("w1", "w2")]
        self.login = made.pod("login", "login")
        self.pods = [self.controller, *self.workers, self.login]

    def wait_ready(self) -> None:
        for pod in self.pods:
            pod.wait_ready()

    def slurm(self, *argv: str) -> str:
        return self.login.run(*argv)

    def submit(self, *options: str, command: str) -> str:
        return self.login.run(
            "sbatch", "--parsable", "--chdir=/tmp", "--output=/tmp/%j.out", *options, "--wrap", command, user="demo"
        ).strip()

    def wait_answer(self) -> None:
        """slurmctld answers on the login pod."""
        last = ""

        def answers() -> bool:
            nonlocal last
            code, last = self.login.code("scontrol", "ping")
            return code == 0

        until(answers, "Slurm answers", seen=lambda: f"{last}\n{self.controller.logs()[-3000:]}")

    def job(self, job: str) -> dict[str, str]:
        text = self.slurm("scontrol", "--oneliner", "show", "job", job)
        return dict(word.partition("=")[::2] for word in text.split())

    def wait_state(self, job: str, state: str) -> None:
        until(lambda: self.job(job)["JobState"] == state, f"job {job} is {state}")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with world(tmp_path_factory.mktemp("cluster"), "cluster") as made:
        found = Cluster(made)
        for pod in found.pods:
            pod.add_user()
        found.wait_ready()
        yield found


def test_a_two_node_job_runs(cluster: Cluster) -> None:
    output = cluster.login.run("srun", "-N2", "--chdir=/tmp", "hostname", user="demo")
    assert sorted(output.split()) == ["w1", "w2"]


def test_accounting_knows_the_job(cluster: Cluster) -> None:
    job = cluster.submit(command="true")
    until(
        lambda: "COMPLETED" in cluster.login.code("sacct", "-nX", "-j", job, "--format", "State%20")[1],
        "sacct shows the job as completed",
    )


def test_probes_say_the_same_over_http(cluster: Cluster) -> None:
    def answer(url: str) -> int:
        try:
            with urllib.request.urlopen(url, timeout=60) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as error:
            return error.code

    for pod in cluster.pods:
        pod.container.reload()
        address = pod.container.attrs["NetworkSettings"]["Networks"][cluster.world.network.name]["IPAddress"]
        for path in ("/livez", "/readyz", "/startupz"):
            url = f"http://{address}:8650{path}"
            # A pod is not ready for a moment while slurmctld is busy.
            until(lambda url=url: answer(url) == 200, f"{pod.name} answers {path}", seen=pod.account)  # type: ignore[misc]


def test_the_trace_of_a_worker_tells_the_order(cluster: Cluster) -> None:
    events = json.loads(cluster.workers[0].run("minivm", "trace", "--json"))["events"]
    at = {(item["service"], item["event"]): item["t"] for item in reversed(events)}
    assert at["munged", "ready"] <= at["fresh-node", "starting"]
    assert at["fresh-node", "done"] <= at["slurmd", "starting"]
    assert at["slurmd", "ready"] <= at["cluster-proof", "starting"]
    assert at["cluster-proof", "done"] <= at["", "ready"]
    picture = cluster.workers[0].run("minivm", "trace")
    assert "slurmd" in picture and "waiting" in picture


def test_the_database_keeps_no_addresses_aside_to_grow_into(cluster: Cluster) -> None:
    """MariaDB's default is room for 8 TiB, for which an emulator of another architecture takes all memory there is."""
    (pod,) = (one for one in cluster.pods if one.container.attrs["Config"]["Hostname"] == "slurm-controller")
    said = pod.run("cat", f"/proc/{pod.service('mariadb')['pid']}/status")
    peak = next(line.split()[1] for line in said.splitlines() if line.startswith("VmPeak:"))
    assert int(peak) < 16 << 20, "KiB"


@pytest.fixture(scope="class")
def long_job(cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Run a job on both nodes; yield it and its start time."""
    job = cluster.submit("-N2", command="srun sleep 7777")
    cluster.wait_state(job, "RUNNING")
    # srun has these words among its own.
    task = re.compile(r"^(/\S*/)?sleep 7777$", re.MULTILINE)
    until(lambda: all(task.search(w.run("ps", "-eo", "args")) for w in cluster.workers), "both steps run")
    yield job, cluster.job(job)["StartTime"]
    # A job that ended just before slurmctld was killed is RUNNING in its state until the node registers.
    cluster.slurm("scancel", "--user=demo")
    until(lambda: not cluster.slurm("squeue", "-h").strip(), "the nodes are free", within=240)


class TestWhileAJobRuns:
    @pytest.mark.parametrize(
        ("place", "daemons"),
        [
            ("w1", {"munged", "slurmd", "sshd"}),
            ("login", {"munged", "sackd", "sshd"}),
            ("slurm-controller", {"munged", "mariadb", "slurmdbd", "slurmctld"}),
        ],
    )
    def test_it_survives_the_death_of_each_service(
        self, cluster: Cluster, long_job: tuple[str, str], place: str, daemons: set[str]
    ) -> None:
        """Kill one after the other: Slurm's daemons, and every helper of the pod's."""
        pod = next(pod for pod in cluster.pods if pod.container.attrs["Config"]["Hostname"] == place)
        views = [view for view in pod.status()["services"] if view["kind"] == "longrun" and view["pid"]]
        assert daemons < {view["name"] for view in views}
        for before in views:
            name = before["name"]
            pod.run("kill", "-9", str(before["pid"]))
            again = _under_a_new_pid(pod, name, int(before["pid"]))
            assert again["failures"] == before["failures"] + 1, name
            pod.wait_ready()
            cluster.wait_answer()
            self.the_job_runs_on(cluster, long_job)
        events = json.loads(pod.run("minivm", "trace", "--json"))["events"]
        told = {item["service"] for item in events if item["event"] == "exited" and "killed by KILL" in item["detail"]}
        assert told >= {view["name"] for view in views}, "the whole story"

    def the_job_runs_on(self, cluster: Cluster, long_job: tuple[str, str]) -> None:
        """Check the same run of the same job, on both nodes, with its processes."""
        job, started = long_job
        found = cluster.job(job)
        assert (found["JobState"], found["Restarts"], found["StartTime"]) == ("RUNNING", "0", started)
        for worker in cluster.workers:
            assert "sleep 7777" in worker.run("ps", "-eo", "args")

    def test_ten_reconfigures_under_load_lose_nothing(self, cluster: Cluster, long_job: tuple[str, str]) -> None:
        """Jobs are submitted, start and end all the while."""
        # A reconfigure on a busy machine takes longer than the ten seconds for which Slurm's clients wait.
        cluster.world.configure({"slurm.conf": slurm_conf("MessageTimeout=60")})
        for pod in (cluster.controller, cluster.login):
            until(lambda pod=pod: WAITS.search(pod.code("scontrol", "show", "config")[1]), "slurmctld has the limit")  # type: ignore[misc]
        file = "/run/slurm/conf/slurm.conf"
        until(lambda: cluster.login.code("grep", "^MessageTimeout=60", file)[0] == 0, "users' clients have it, too")
        cluster.wait_ready()
        before = {pod.name: pod.service(name) for pod, name in _replaced(cluster)}
        submit = "sbatch --parsable --chdir=/tmp --output=/dev/null --oversubscribe --wrap 'sleep 0.2'"
        loop = f"until [ -e /tmp/enough ]; do {submit} || echo refused; sleep 0.1; done >> /tmp/submitted"
        cluster.login.run("sh", "-c", "rm -f /tmp/enough; install -m 666 /dev/null /tmp/submitted")
        cluster.login.container.exec_run(["sh", "-c", loop], user="demo", detach=True)

        def submitted() -> list[str]:
            return cluster.login.run("cat", "/tmp/submitted").split()

        for count in range(10):
            until(lambda count=count: len(submitted()) > 2 * count, "there is load")  # type: ignore[misc]
            cluster.controller.run("scontrol", "reconfigure")
        cluster.login.run("touch", "/tmp/enough")
        for pod, name in _replaced(cluster):
            view = _under_a_new_pid(pod, name, int(before[pod.name]["pid"]))
            assert (view["failures"], view["starts"]) == (before[pod.name]["failures"], before[pod.name]["starts"])
            # One that has handed over may take a moment to end, and a fork has its name until it starts a script.
            until(lambda pod=pod, name=name: len(pids(pod, name)) == 1, f"one {name} is left", seen=pod.account)  # type: ignore[misc]
        jobs = submitted()
        assert "refused" not in jobs, "nobody was turned away"
        for job in jobs:
            cluster.wait_state(job, "COMPLETED")
        self.the_job_runs_on(cluster, long_job)
        cluster.wait_ready()

    def test_a_slurmd_and_a_sackd_whose_successors_hang_are_restarted(
        self, cluster: Cluster, long_job: tuple[str, str]
    ) -> None:
        worker = cluster.workers[0]
        # slurmctld requeues the job of a node that is silent for longer, whatever the pod does.
        before = worker.service("slurmd")
        cluster.world.configure({"slurm.conf": slurm_conf().replace("SlurmdTimeout=60", "SlurmdTimeout=600")})
        limit = re.compile(r"^SlurmdTimeout\s+= 600 sec", re.MULTILINE)
        until(lambda: limit.search(cluster.login.code("scontrol", "show", "config")[1]), "slurmctld waits for longer")
        _under_a_new_pid(worker, "slurmd", int(before["pid"]))
        daemons = {"slurmd": worker, "sackd": cluster.login}
        after = self.end_hand_overs(cluster, daemons)
        self.everything_is_well(cluster, long_job)
        until(lambda: cluster.slurm("sinfo", "-h", "-n", "w1", "-o", "%T")[:5] in ("mixed", "alloc"), "w1 serves")
        run = ("srun", "--overlap", "--jobid", long_job[0], "-w", "w1", "-N1", "-n1", "hostname")
        assert cluster.login.run(*run, user="demo").strip() == "w1", "slurmd starts steps"
        cluster.world.configure({"slurm.conf": slurm_conf()})
        for name, pod in daemons.items():
            _under_a_new_pid(pod, name, after[name])

    def end_hand_overs(self, cluster: Cluster, daemons: dict[str, Pod]) -> dict[str, int]:
        """Freeze the successors, for which the old processes wait without limit; return the restarted daemons' pids."""

        def told(name: str) -> bool:
            texts = daemons[name].status()["degraded"]
            return any(text.startswith(name) and "did not hand over to its successor" in text for text in texts)

        def is_over(name: str, old: int) -> bool:
            return int(daemons[name].service(name)["pid"]) != old or told(name)

        after: dict[str, int] = {}
        for _ in range(10):
            olds = {name: int(pod.service(name)["pid"]) for name, pod in daemons.items() if name not in after}
            frozen = self.freeze_successors(cluster, {name: daemons[name] for name in olds}, olds)
            # The pod tells first and restarts then: a new pid without the text is a hand-over that was not stopped.
            for name, old in olds.items():
                pod = daemons[name]
                until(
                    lambda name=name, old=old: is_over(name, old),  # type: ignore[misc]
                    f"the pod says that the hand-over of {name} hung",
                    within=300,
                    seen=pod.account,
                )
                if told(name):
                    after[name] = int(_under_a_new_pid(pod, name, old)["pid"])
                    alone = [str(after[name])]
                    until(lambda name=name, pod=pod, alone=alone: pids(pod, name) == alone, "no other is left")  # type: ignore[misc]
                else:
                    # On a busy machine the freeze comes after the last word of the successor, which serves by now.
                    pod.run("kill", "-CONT", frozen[name])
            if len(after) == len(daemons):
                return after
        raise AssertionError(f"ten successors took over before the test froze them: {daemons.keys() - after.keys()}")

    def freeze_successors(self, cluster: Cluster, daemons: dict[str, Pod], olds: dict[str, int]) -> dict[str, str]:
        """Reconfigure the cluster and stop the process that each daemon starts for it; return their pids."""
        for name, pod in daemons.items():
            pod.run("rm", "-f", "/tmp/watching", "/tmp/frozen")
            pod.container.exec_run([PYTHON, "-I", "-c", FREEZE, str(olds[name])], detach=True)
        for file, what in (("watching", "the test watches for the successors"), ("frozen", "they are frozen")):
            for pod in daemons.values():
                path = f"/tmp/{file}"
                until(lambda pod=pod, path=path: pod.code("test", "-e", path)[0] == 0, what)  # type: ignore[misc]
            if file == "watching":
                cluster.controller.run("scontrol", "reconfigure")
        return {name: pod.run("cat", "/tmp/frozen").strip() for name, pod in daemons.items()}

    def test_a_slurmctld_that_hangs_is_restarted_and_takes_the_new_configuration(
        self, cluster: Cluster, long_job: tuple[str, str]
    ) -> None:
        """A silent slurmctld has not judged the file: init asks again after the restart."""
        before = cluster.controller.service("slurmctld")
        cluster.controller.run("kill", "-STOP", str(before["pid"]))
        cluster.world.configure({"slurm.conf": slurm_conf("PartitionName=thawed Nodes=ALL State=UP")})
        until(lambda: "thawed" in partitions(cluster), "the new partition is there", within=240)
        assert cluster.controller.service("slurmctld")["starts"] == before["starts"] + 1
        log = cluster.controller.run("minivm", "logs", "configwatch")
        assert "slurmctld hung and was restarted; the new configuration is tried once more" in log
        self.everything_is_well(cluster, long_job)

    def test_a_slurmctld_that_hangs_on_a_file_it_refused_is_restarted_without_it(
        self, cluster: Cluster, long_job: tuple[str, str]
    ) -> None:
        """24.11 sometimes hangs after it has refused a file; here the test freezes it at that moment."""
        controller = cluster.controller
        for _ in range(10):
            before = controller.service("slurmctld")
            controller.run("rm", "-f", "/tmp/stopped")
            failed = controller.run("minivm", "logs", "slurmctld", "--lines", "2000").count(FAILED)
            controller.container.exec_run(["sh", "-c", STOP_AT, str(before["pid"]), str(failed)], detach=True)
            cluster.world.configure({"slurm.conf": slurm_conf("PartitionName=hanging Nodes=nosuch")})
            text = until(lambda: refusal(cluster), "the refusal is told", within=240)
            assert "Invalid node names in partition hanging" in text
            until(lambda: controller.code("test", "-e", "/tmp/stopped")[0] == 0, "the test has frozen slurmctld")
            after = controller.service("slurmctld")
            if after["starts"] != before["starts"]:
                break
            # On a busy machine the freeze comes after slurmctld has answered again.
            controller.run("kill", "-CONT", str(before["pid"]), check=False)
            cluster.world.configure({"slurm.conf": slurm_conf("PartitionName=thawed Nodes=ALL State=UP")})
            until(lambda: not refusal(cluster), "the reason is gone")
        assert after["starts"] == before["starts"] + 1
        assert "thawed" in partitions(cluster), "the last good configuration serves on"
        cluster.world.configure({"slurm.conf": slurm_conf()})
        until(lambda: "thawed" not in partitions(cluster) and not refusal(cluster), "the mended file is live")
        self.everything_is_well(cluster, long_job)

    def test_a_bad_file_that_meets_a_dead_slurmctld_is_refused_too(
        self, cluster: Cluster, long_job: tuple[str, str]
    ) -> None:
        """slurmctld says READY before it has read all of its file: a bad one would restart it again and again."""
        cluster.controller.run("minivm", "stop", "slurmctld")
        cluster.world.configure({"slurm.conf": slurm_conf("PartitionName=dead Nodes=nosuch")})
        text = until(lambda: refusal(cluster), "the refusal is told", within=240)
        assert "Invalid node names in partition dead" in text
        cluster.world.configure({"slurm.conf": slurm_conf()})
        until(lambda: not refusal(cluster), "the reason is gone")
        self.everything_is_well(cluster, long_job)

    def everything_is_well(self, cluster: Cluster, long_job: tuple[str, str]) -> None:
        cluster.wait_ready()
        cluster.wait_answer()
        self.the_job_runs_on(cluster, long_job)


def pids(pod: Pod, name: str) -> list[str]:
    """Return the processes of this daemon, also those that it has just forked."""
    return re.findall(rf"^\s*(\d+)\s+/usr/sbin/{name}\b", pod.run("ps", "-eo", "pid,args"), re.MULTILINE)


def partitions(cluster: Cluster) -> str:
    return cluster.login.code("sinfo", "-h", "-o", "%R")[1]


def refusal(cluster: Cluster) -> str:
    return next((text for text in cluster.controller.status()["degraded"] if "slurm.conf: refused" in text), "")


def _under_a_new_pid(pod: Pod, name: str, old: int) -> dict[str, Any]:
    def found() -> dict[str, Any] | None:
        view = pod.service(name)
        return view if view["ready"] and view["pid"] not in (0, old) else None

    view = until(found, f"{name} of {pod.name} runs under a new pid")
    assert view is not None
    return view


def _replaced(cluster: Cluster) -> list[tuple[Pod, str]]:
    return [(cluster.controller, "slurmctld"), *((worker, "slurmd") for worker in cluster.workers)]


def test_a_changed_slurm_conf_is_live_without_restarts(cluster: Cluster) -> None:
    pid = cluster.controller.service("slurmctld")["starts"]
    cluster.world.configure({"slurm.conf": slurm_conf("PartitionName=fresh Nodes=ALL State=UP")})
    until(lambda: "fresh" in partitions(cluster), "the new partition is there")
    assert cluster.controller.service("slurmctld")["starts"] == pid
    cluster.wait_ready()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("SlurmdTimout=100", "SlurmdTimout"),  # a client's parser refuses it
        ("PartitionName=broken Nodes=nosuch", "Invalid node names in partition broken"),  # only slurmctld does
    ],
)
def test_a_bad_slurm_conf_is_refused_and_the_running_one_stays(cluster: Cluster, line: str, reason: str) -> None:
    good = slurm_conf("PartitionName=fresh Nodes=ALL State=UP")
    pid = cluster.controller.service("slurmctld")["pid"]
    cluster.world.configure({"slurm.conf": slurm_conf(line)})
    text = until(lambda: refusal(cluster), "the refusal is told", within=240)
    assert reason in text
    if "was restarted" not in text:  # a slurmctld that hung on it, as 24.11 sometimes does
        assert cluster.controller.service("slurmctld")["pid"] == pid
    cluster.controller.wait_ready()
    cluster.wait_answer()
    assert "fresh" in cluster.slurm("sinfo", "-h", "-o", "%R"), "the running configuration serves on"
    assert line not in cluster.controller.run("cat", "/etc/slurm/slurm.conf")
    cluster.world.configure({"slurm.conf": good})
    until(lambda: not refusal(cluster), "the reason is gone")


# Holds the cluster's row in the database until somebody waits for it, changes it, and begins again, until it is enough.
BESIEGE = """
import os, subprocess, time
WAITING = "SELECT COUNT(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'"
mine = subprocess.Popen(["mariadb", "slurm_acct_db"], stdin=subprocess.PIPE, text=True)
say = lambda words: print(words, file=mine.stdin, flush=True)
count = lambda: int(subprocess.run(["mariadb", "-Ne", WAITING], capture_output=True, text=True, check=True).stdout)
while not os.path.exists("/tmp/enough"):
    say("BEGIN; UPDATE cluster_table SET mod_time = mod_time + 1;")
    open("/tmp/held", "w").close()
    while not count() and not os.path.exists("/tmp/enough"):
        time.sleep(0.2)  # who looks more often than ten times a second is shown what he has seen
    say("COMMIT;")
mine.stdin.close()
mine.wait()
"""


def test_a_refused_slurm_conf_leaves_the_cluster_its_number(cluster: Cluster) -> None:
    """A slurmctld that goes on after a refusal registers anew, and without an answer makes itself another number.

    The next slurmctld would not start with that number. Here the database is busy with the cluster while it
    registers.
    """
    number = cluster.controller.run("cat", "/var/spool/slurmctld/clustername")
    cluster.controller.run("rm", "-f", "/tmp/enough", "/tmp/held")
    cluster.controller.container.exec_run([PYTHON, "-c", BESIEGE], detach=True)
    try:
        until(lambda: cluster.controller.code("test", "-e", "/tmp/held")[0] == 0, "the cluster's row is held")
        cluster.world.configure({"slurm.conf": slurm_conf("PartitionName=broken Nodes=nosuch")})
        until(lambda: refusal(cluster), "the refusal is told", within=240)
        # Where slurmctld hung on it, slurmdbd has been waiting for the one that is gone, too.
        cluster.wait_answer()
    finally:
        cluster.controller.run("touch", "/tmp/enough")
    assert cluster.controller.run("cat", "/var/spool/slurmctld/clustername") == number
    cluster.world.configure({"slurm.conf": slurm_conf("PartitionName=fresh Nodes=ALL State=UP")})
    until(lambda: not refusal(cluster), "the reason is gone")
    # One that hung on the new file is being started anew.
    before = _under_a_new_pid(cluster.controller, "slurmctld", 0)
    cluster.controller.run("kill", "-9", str(before["pid"]))
    again = _under_a_new_pid(cluster.controller, "slurmctld", int(before["pid"]))
    cluster.wait_answer()
    assert again["failures"] == before["failures"] + 1
    assert cluster.controller.run("cat", "/var/spool/slurmctld/clustername") == number


def test_a_changed_drop_in_restarts_only_what_changed(cluster: Cluster) -> None:
    directory = cluster.world.mounts / "config" / "services.d"
    # Periodic services have another pid each time.
    services = cluster.login.status()["services"]
    before = {view["name"]: view["pid"] for view in services if view["pid"] and view["kind"] == "longrun"}
    directory.mkdir()
    (directory / "extra.yaml").write_text("command: [/bin/sleep, '1000']\nneeds: [munged]\nrequired: false\n")
    until(lambda: _has(cluster.login, "extra", "ready"), "the new service runs")
    after = {view["name"]: view["pid"] for view in cluster.login.status()["services"] if view["name"] in before}
    assert after == before
    (directory / "extra.yaml").write_text("comand: [/bin/sleep, '1000']\n")
    until(
        lambda: [text for text in cluster.login.status()["degraded"] if "did you mean command?" in text],
        "the wrong one is told",
    )
    assert _has(cluster.login, "extra", "ready"), "the last good one stays"
    (directory / "extra.yaml").unlink()
    until(lambda: not _has(cluster.login, "extra", ""), "it is gone")


def _has(pod: Pod, name: str, state: str) -> bool:
    return any(view["name"] == name and state in ("", view["state"]) for view in pod.status()["services"])


def test_supervisorctl_speaks_to_the_same_services(cluster: Cluster) -> None:
    def ctl(*words: str) -> tuple[int, str]:
        return cluster.login.code("supervisorctl", "-s", "unix:///run/minivm/supervisor.sock", *words)

    code, text = ctl("status")
    assert re.search(r"^sshd\s+RUNNING\s+pid \d+, uptime", text, re.MULTILINE), text
    pid = cluster.login.service("sshd")["pid"]
    assert ctl("restart", "sshd") == (0, "sshd: stopped\nsshd: started\n")
    assert cluster.login.service("sshd")["pid"] not in (0, pid)
    assert ctl("stop", "sshd") == (0, "sshd: stopped\n")
    assert cluster.login.service("sshd")["state"] == "stopped"
    assert "sshd" in cluster.login.why()
    assert ctl("start", "sshd") == (0, "sshd: started\n")
    assert ctl("signal", "HUP", "sshd") == (0, "sshd: signalled\n")
    until(lambda: "Server listening" in ctl("tail", "sshd")[1], "its line is in the log")
    code, text = ctl("start", "nosuch")
    assert code != 0 and "no such" in text
    cluster.login.wait_ready()


def test_a_stopped_worker_leaves_slurm_and_its_job_runs_elsewhere(cluster: Cluster) -> None:
    """`docker stop` is TERM as Kubernetes sends it: drain, requeue, the node is down, then stop."""
    job = cluster.submit("-N1", "--requeue", command="sleep 7777")
    cluster.wait_state(job, "RUNNING")
    name = cluster.job(job)["BatchHost"]
    worker = cluster.workers[("w1", "w2").index(name)]
    worker.container.stop(timeout=90)  # a busy machine may need more than the grace of 20 s
    worker.container.reload()
    assert worker.container.attrs["State"]["ExitCode"] == 0, worker.logs()[-3000:]
    assert cluster.slurm("sinfo", "-h", "-n", name, "-o", "%T|%E").startswith("drained")
    assert "minivm: pod stops" in cluster.slurm("sinfo", "-h", "-n", name, "-o", "%E")
    found = cluster.job(job)
    assert (found["JobState"], found["Restarts"]) == ("PENDING", "1"), "requeued, not lost and not a ghost"
    # Slurm keeps a requeued job back until its old credential has expired, two minutes; the test does not wait.
    cluster.slurm("scontrol", "update", f"jobid={job}", "starttime=now")
    cluster.wait_state(job, "RUNNING")
    assert cluster.job(job)["BatchHost"] == ("w2" if name == "w1" else "w1")
    cluster.slurm("scancel", job)
    worker.container.start()
    worker.wait_ready()
    until(lambda: cluster.slurm("sinfo", "-h", "-n", name, "-o", "%T").strip() == "idle", f"{name} is idle")


def test_a_killed_worker_that_comes_back_leaves_no_ghost_job(cluster: Cluster) -> None:
    job = cluster.submit("-N1", "--nodelist=w2", "--requeue", command="sleep 7777")
    cluster.wait_state(job, "RUNNING")
    cluster.workers[1].container.kill()
    cluster.workers[1].container.start()
    cluster.workers[1].wait_ready()
    until(lambda: int(cluster.job(job)["Restarts"]) == 1, "the lost job was requeued")
    cluster.slurm("scancel", job)
    output = cluster.login.run("srun", "-N1", "--nodelist=w2", "--chdir=/tmp", "hostname", user="demo")
    assert output.strip() == "w2"


def test_a_persons_drain_survives_a_new_pod(cluster: Cluster) -> None:
    cluster.slurm("scontrol", "update", "nodename=w2", "state=drain", "reason=fan is loud")
    cluster.workers[1].container.kill()
    cluster.workers[1].container.start()
    cluster.workers[1].wait_ready()
    text = cluster.slurm("scontrol", "--oneliner", "show", "node", "w2")
    assert "DRAIN" in text and "fan is loud" in text
    cluster.slurm("scontrol", "update", "nodename=w2", "state=resume")


def test_drain_and_resume_by_hand(cluster: Cluster) -> None:
    cluster.login.run("minivm", "drain")
    assert cluster.login.status()["drain"] == "drained"
    assert "about to stop" in cluster.login.run("cat", "/run/nologin")
    cluster.login.run("minivm", "resume")
    assert cluster.login.code("test", "-e", "/run/nologin")[0] == 1
    assert cluster.login.status()["drain"] == ""


def test_a_drained_worker_is_taken_back(cluster: Cluster) -> None:
    worker = cluster.workers[0]
    worker.run("minivm", "drain")
    assert cluster.slurm("sinfo", "-h", "-n", "w1", "-o", "%T|%E").strip() == "drained|minivm: pod stops"
    worker.run("minivm", "resume")
    output = cluster.login.run("srun", "-N1", "--nodelist=w1", "--chdir=/tmp", "hostname", user="demo")
    assert output.strip() == "w1"


def test_the_controllers_pod_stops_and_comes_back_with_its_jobs(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit("-N1", command="sleep 7777")
    cluster.wait_state(job, "RUNNING")
    cluster.controller.container.stop(timeout=90)  # a busy machine may need more than the grace of 20 s
    cluster.controller.container.reload()
    assert cluster.controller.container.attrs["State"]["ExitCode"] == 0, cluster.controller.logs()[-3000:]
    cluster.controller.container.start()
    cluster.controller.wait_ready()
    cluster.wait_answer()
    found = cluster.job(job)
    assert (found["JobState"], found["Restarts"]) == ("RUNNING", "0")
    cluster.slurm("scancel", job)
