"""The images under Slinky's operator, with its pods' users, files, arguments and hooks (run-under-slinky.md).

`make test` builds these images: `build.py --slurm 26.05 build slinky-controller slinky-worker slinky-login`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from docker.types import Mount  # type: ignore[import-untyped]  # it carries no types

from cluster.change.pinning import find_newest_here
from images.engine.docker import DockerEngine
from tests.container.init_pods import IMAGES, LABELS, PYTHON, ROOT, Pod, World, image_of, slurm_conf, world
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

SLURM_UID = 401
CONTROLLER = "slurm-controller"
# What the operator writes, without cgroups, which these pods do not have.
SLURM_CONF = f"""\
ClusterName=slinky
SlurmctldHost={CONTROLLER}({CONTROLLER})
SlurmUser=slurm
SlurmdUser=root
AuthType=auth/slurm
CredType=cred/slurm
AuthInfo=use_client_ids
AuthAltTypes=auth/jwt
AuthAltParameters=jwt_key=/etc/slurm/jwt.key
SlurmctldParameters=enable_configless,reconfig_on_restart
StateSaveLocation=/var/spool/slurmctld/slinky
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MaxNodeCount=1024
ReturnToService=2
MessageTimeout=60
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
PartitionName=all Nodes=ALL Default=YES OverSubscribe=FORCE:4
"""
WORKER = ["-Z", "--conf-server", f"{CONTROLLER}:6817", "--conf", "'Features=blue Topology='\"$SLINKY_TOPOLOGY\"''"]
PRE_STOP = "scontrol update nodename=$(hostname) state=down reason='slurm-operator: Pod is terminating'"
# As the operator's Kubernetes probes ask: by HTTP, on the daemon's own port.
PROBE = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=60).status)"


class Slinky:
    """A cluster as the operator makes it: a read-only /etc/slurm in each pod, with the key for its own reader."""

    def __init__(self, made: World, directory: Path) -> None:
        self.world, self.directory = made, directory
        self.volumes: list[str] = []
        self.key = os.urandom(128)

    def etc(self, pod: str, uid: int, files: dict[str, bytes]) -> dict[Path, str]:
        directory = self.directory / pod / "etc"
        directory.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (directory / name).write_bytes(data)
            (directory / name).chmod(0o600)
            os.chown(directory / name, uid, uid)
        return {directory: "/etc/slurm"}

    def memory(self, name: str, target: str) -> Mount:
        """Return an emptyDir of a pod with fsGroup 401. A tmpfs of docker's own would have the image's mode."""
        volume = f"{self.world.network.name}-{name}"
        options = {"type": "tmpfs", "device": "tmpfs", "o": f"mode=2777,gid={SLURM_UID}"}
        self.world.client.volumes.create(volume, driver_opts=options)
        if volume not in self.volumes:
            self.volumes.append(volume)
        return Mount(target, volume, type="volume", no_copy=True)

    def controller(self, state: Path | None = None) -> Pod:
        """Start slurmctld; `state` is the claim that the operator mounts, or the state goes with the pod."""
        if state is None:
            claim = self.memory("state", "/var/spool/slurmctld")
        else:
            claim = Mount("/var/spool/slurmctld/slinky", str(state), type="bind")
        files = {"slurm.conf": SLURM_CONF.encode(), "slurm.key": self.key, "jwt.key": os.urandom(32)}
        return self.world.pod(
            "slinky-controller", CONTROLLER, mounts=self.directory / "empty",
            volumes=self.etc(CONTROLLER, SLURM_UID, files),
            extra_mounts=[
                self.memory("run", "/run"), self.memory("auth", "/run/slurmctld"),
                claim, self.memory("log", "/var/log/slurm"),
            ],
            user=f"{SLURM_UID}:{SLURM_UID}", security_opt=["no-new-privileges"],
        )  # fmt: skip

    def worker(self, name: str, *arguments: str, topology: str = "") -> Pod:
        return self.world.pod(
            "slinky-worker", name, mounts=self.directory / "empty", volumes=self.etc(name, 0, {"slurm.key": self.key}),
            # The name is the pod's `hostname`: the operator tells no other.
            env={"MINIVM_POD_NAME": "", "SLINKY_TOPOLOGY": topology, "POD_CPUS": "0", "POD_MEMORY": "0"},
            command=[*WORKER, *arguments],
        )  # fmt: skip

    def close(self) -> None:
        for volume in self.volumes:
            self.world.client.volumes.get(volume).remove(force=True)


@pytest.fixture(scope="module")
def slinky(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slinky]:
    directory = tmp_path_factory.mktemp("slinky")
    (directory / "empty").mkdir()
    with world(directory, "slinky") as made:
        for role in ("controller", "worker", "login"):
            if not made.client.images.list(image_of(f"slinky-{role}")):
                pytest.skip(f"no image {image_of(f'slinky-{role}')}: `make other-slurm` builds it")
        cluster = Slinky(made, directory)
        yield cluster
        for pod in made.pods:
            pod.remove()
        cluster.close()


@pytest.fixture(scope="module")
def controller(slinky: Slinky) -> Pod:
    return slinky.controller().wait_ready()


@pytest.fixture(scope="module")
def worker(slinky: Slinky, controller: Pod) -> Pod:
    return slinky.worker("blue-0").wait_ready()


@pytest.fixture(scope="module")
def login(slinky: Slinky, controller: Pod, tmp_path_factory: pytest.TempPathFactory) -> Pod:
    """Start a login pod with its files mounted one by one, as by subPath."""
    ssh = tmp_path_factory.mktemp("ssh")
    key, settings = ssh / "ssh_host_ed25519_key", ssh / "sshd_config"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    settings.write_text("Include /etc/ssh/sshd_config.d/*.conf\nUsePAM yes\n")
    files = {file: f"/etc/ssh/{file.name}" for file in (key, key.with_name(f"{key.name}.pub"), settings)}
    return slinky.world.pod(
        "slinky-login", "login", mounts=slinky.directory / "empty",
        volumes={**slinky.etc("login", SLURM_UID, {"slurm.key": slinky.key}), **files},
        env={"MINIVM_POD_NAME": "", "SACKD_OPTIONS": f"--conf-server {CONTROLLER}:6817"},
    ).wait_ready()  # fmt: skip


def asked(controller: Pod, *argv: str) -> str:
    """Run a command as the pod's own user: even root has no rights there, and cannot read slurm.conf."""
    return controller.run(*argv, user="")


def test_the_controller_runs_as_401_without_any_right(controller: Pod) -> None:
    assert asked(controller, "id", "-u").strip() == str(SLURM_UID)
    status = controller.run("cat", "/proc/1/status")
    assert "CapEff:\t0000000000000000" in status
    assert "is UP" in asked(controller, "scontrol", "ping")
    assert json.loads(asked(controller, "minivm", "status", "--json"))["degraded"] == [], (
        "nothing that a pod without rights cannot have is missed"
    )


def test_the_operators_probes_are_answered(controller: Pod, worker: Pod) -> None:
    for pod, port in ((controller, 6817), (worker, 6818)):
        for path in ("livez", "readyz"):
            assert pod.run(PYTHON, "-c", PROBE, f"http://127.0.0.1:{port}/{path}").strip() == "204", (pod.name, path)


def test_a_worker_registers_by_its_host_name_with_the_operators_features(controller: Pod, worker: Pod) -> None:
    node = asked(controller, "scontrol", "--oneliner", "show", "node", "blue-0")
    assert "AvailableFeatures=minivm,blue " in node, node
    assert "Topology=" not in worker.run("cat", "/run/minivm/env/slurmd")
    names = {view["name"] for view in worker.status()["services"]}
    assert not {"munged", "fresh-node", "configwatch"} & names, "the operator keeps the nodes and the configuration"


def test_jobs_run_from_the_login_pod(controller: Pod, worker: Pod, login: Pod) -> None:
    for pod in (worker, login):
        pod.add_user()
    assert login.code("test", "-S", "/run/slurm/sack.socket")[0] == 0, "the operator's own probe of a login pod"
    assert login.run("srun", "--chdir=/tmp", "sh", "-c", "echo $(hostname) $(id -un)", user="demo").split() == [
        "blue-0", "demo",
    ]  # fmt: skip
    job = login.run("sbatch", "--parsable", "--chdir=/tmp", "--wrap", "sleep 600", user="demo").strip()
    until(lambda: "RUNNING" in login.run("squeue", "-h", "-j", job, "-o", "%T"), "the job runs")
    login.run("scancel", job, user="demo")
    until(lambda: login.run("squeue", "-h", "-t", "running").strip() == "", "it is gone")


def test_the_login_pod_uses_the_mounted_host_key(login: Pod) -> None:
    mounted = login.run("cat", "/etc/ssh/ssh_host_ed25519_key.pub").split()[1]
    assert mounted in login.run("ssh-keyscan", "-t", "ed25519", "127.0.0.1")


def test_their_reconfigure_reaches_the_worker(slinky: Slinky, controller: Pod, worker: Pod) -> None:
    text = SLURM_CONF.replace("PartitionName=all", "PartitionName=more Nodes=ALL\nPartitionName=all")
    slinky.etc(CONTROLLER, SLURM_UID, {"slurm.conf": text.encode()})
    # The operator's sidecar is of the same image, and starts with tini.
    asked(controller, "tini", "-g", "--", "bash", "-c", "scontrol reconfigure")
    until(lambda: "PartitionName=more" in worker.code("scontrol", "show", "partition")[1], "the partition is there")
    until(lambda: "PartitionName=more" in worker.run("cat", "/run/slurm/conf/slurm.conf"), "slurmd has the file")
    controller.wait_ready()
    worker.wait_ready()


def test_a_pod_that_the_operator_ends_leaves_at_once(slinky: Slinky, controller: Pod, worker: Pod) -> None:
    """Its preStop sets the node down; nothing of ours waits for jobs after that, or changes the reason."""
    pod = slinky.worker("blue-1", topology="").wait_ready()
    pod.run("sh", "-c", PRE_STOP)
    pod.container.stop(timeout=120)
    pod.container.reload()
    assert pod.container.attrs["State"]["ExitCode"] == 0, pod.logs()
    assert "Reason=slurm-operator: Pod is terminating" in asked(controller, "scontrol", "-o", "show", "node", "blue-1")
    worker.wait_ready()


def test_arguments_that_only_a_shell_understands_end_the_pod_with_the_reason(slinky: Slinky) -> None:
    pod = slinky.worker("blue-2", "$(id)")
    assert pod.container.wait()["StatusCode"] == 78
    assert "cannot use the pod's arguments" in pod.logs() and "$(id)" in pod.logs()


@pytest.mark.parametrize(
    ("command", "words"),
    [(["slurmdbd", "-D"], "StorageType must be specified"), (["slurmrestd", "-h"], "Usage: slurmrestd")],
)
def test_the_controllers_image_has_what_the_operator_starts(slinky: Slinky, command: list[str], words: str) -> None:
    """Both begin with tini, as the sidecar does; without a configuration slurmdbd comes as far as saying so."""
    container = slinky.world.client.containers.create(
        image_of("slinky-controller"), ["-g", "--", *command], entrypoint="tini", user=str(SLURM_UID), labels=LABELS,
        network_mode="none",
    )  # fmt: skip
    try:
        container.start()
        container.wait()
        assert words in container.logs().decode()
    finally:
        container.remove(force=True)


# From there to minivm's own controller and back, by the commands of cluster/migrate/move.sh


class Move:
    """One claim, the controller that has it, and workers of both: Slinky's and minivm's."""

    def __init__(self, slinky: Slinky, claim: Path, tags: dict[str, str]) -> None:
        self.slinky, self.world, self.claim, self.tags = slinky, slinky.world, claim, tags
        secrets = self.world.mounts / "secrets/slurm-key"
        secrets.mkdir()
        (secrets / "slurm.key").write_bytes(slinky.key)
        (self.world.mounts / "claim").mkdir()
        # As the chart's: paths that Slinky's images do not have.
        own = ["SlurmdLogFile=/var/log/minivm/slurmd.log", "Epilog=/usr/libexec/minivm/epilog"]
        conf = slurm_conf(*own, accounting=False, auth="slurm").replace("ClusterName=minivm", "ClusterName=slinky")
        # Slurm ends the jobs of a partition that is gone, so the plan keeps their names. Its nodes are minivm's alone.
        conf = conf.replace("PartitionName=main Nodes=ALL", "NodeSet=pool Feature=pool\nPartitionName=all Nodes=pool")
        self.world.configure({"slurm.conf": conf})

    def ours(self, role: str, host: str) -> Pod:
        """Start a pod of the chart; of the controller's claim it has a directory, and sees the top."""
        env = {"MINIVM_AUTH": "slurm", "MINIVM_ACCOUNTING": "none", "MINIVM_BACKUP_EVERY": "0",
               "MINIVM_SLURM_UID": str(SLURM_UID), "MINIVM_NODE_FEATURES": "pool"}  # fmt: skip
        mounts = []
        if role == "controller":
            (self.claim / "slurmctld").mkdir(exist_ok=True)  # as the kubelet does for a subPath
            mounts = [
                Mount("/var/spool/slurmctld", str(self.claim / "slurmctld"), type="bind"),
                Mount("/mnt/minivm/claim", str(self.claim), type="bind", read_only=True),
            ]
        image = f"{IMAGES}/{role}:{self.tags[role]}"
        return self.world.pod(role, host, image=image, env=env, extra_mounts=mounts)

    def state(self, way: str) -> tuple[int, str]:
        """Run the script of the Job that moves the state, as the user that Slinky's slurmctld is."""
        text = (ROOT / "cluster/migrate/move.sh").read_text()
        (script,) = re.findall(rf"^state_{way}='(.*?)'$", text, re.DOTALL | re.MULTILINE)
        container = self.world.client.containers.create(
            f"{IMAGES}/controller:{self.tags['controller']}", ["-euc", script], entrypoint="sh",
            user=f"{SLURM_UID}:{SLURM_UID}", mounts=[Mount("/claim", str(self.claim), type="bind")], labels=LABELS,
            network_mode="none", cap_drop=["ALL"],
        )  # fmt: skip
        try:
            container.start()
            return int(container.wait()["StatusCode"]), container.logs().decode()
        finally:
            container.remove(force=True)


@pytest.fixture
def move(tmp_path: Path) -> Iterator[Move]:
    tags = find_newest_here(DockerEngine().client, IMAGES, slurm="26.05", variant="debian")
    (tmp_path / "empty").mkdir()
    claim = tmp_path / "claim"
    claim.mkdir()
    os.chown(claim, SLURM_UID, SLURM_UID)
    with world(tmp_path, "move") as made:
        cluster = Slinky(made, tmp_path)
        yield Move(cluster, claim, tags)
        for pod in made.pods:
            pod.remove()
        cluster.close()


def stopped(pod: Pod) -> None:
    pod.container.stop(timeout=60)
    pod.remove()


def submitted(worker: Pod, *options: str) -> str:
    """Submit a job that runs until its file is there, and return its number."""
    wait = "until test -e /tmp/end.$SLURM_JOB_ID; do sleep 0.1; done"
    return worker.run("sbatch", "--parsable", "--chdir=/tmp", "--mem=50", *options, "--wrap", wait, user="demo").strip()


def jobs(worker: Pod) -> dict[str, str]:
    """Return the state of each job and the node on which it runs."""
    listed = worker.run("squeue", "-h", "-o", "%i %T %N").splitlines()
    return {job: " ".join(rest) for job, *rest in map(str.split, listed)}


def ends(worker: Pod, job: str, asked_pod: Pod | None = None) -> None:
    worker.run("touch", f"/tmp/end.{job}")
    until(
        lambda: "JobState=COMPLETED" in (asked_pod or worker).run("scontrol", "show", "job", job), f"job {job} is done"
    )


def test_running_and_waiting_jobs_go_over_to_minivm_and_back(move: Move) -> None:
    theirs = move.slinky.controller(move.claim).wait_ready()
    old = move.slinky.worker("blue-0").wait_ready()
    old.add_user()
    later = "--begin=now+10hours"
    runs, cancelled = submitted(old), submitted(old)
    first, second = submitted(old, later), submitted(old, later)
    until(lambda: list(jobs(old).values()).count("RUNNING blue-0") == 2, "two jobs run", seen=lambda: jobs(old))
    asked(theirs, "scontrol", "update", "nodename=blue-0", "state=drain", "reason=moved to minivm")

    # minivm's controller refuses the claim on which Slinky's slurmctld has its state, which may be running.
    move.ours("controller", "refused").wait_reason("another operator's slurmctld has its state")
    move.world.pods[-1].remove()
    stopped(theirs)
    assert move.state("over") == (0, "the state is at slurmctld/\n")
    assert move.state("over") == (0, "the state is at slurmctld/\n"), "a second time changes nothing"
    # Slinky's slurmctld, if the operator comes back by mistake, refuses the claim, and writes no state there.
    mistaken = move.slinky.controller(move.claim)
    until(lambda: "CLUSTER NAME MISMATCH" in mistaken.logs(), "it refuses", seen=mistaken.logs)
    mistaken.remove()
    assert move.state("over")[0] == 0

    ours = move.ours("controller", CONTROLLER).wait_ready()
    new = move.ours("worker", "minivm-blue-0").wait_ready()
    for pod in (ours, new):
        pod.add_user()
    assert jobs(new) == {
        runs: "RUNNING blue-0", cancelled: "RUNNING blue-0", first: "PENDING", second: "PENDING",
    }  # fmt: skip
    # Slinky's slurmd obeys minivm's slurmctld: the user slurm has the same number.
    old.run("rm", "-rf", "/var/log/minivm", "/usr/libexec/minivm")
    ours.run("scontrol", "reconfigure")
    new.run("scancel", cancelled, user="demo")
    until(lambda: cancelled not in jobs(new), "the job on Slinky's worker is ended")
    ends(old, runs, new)
    stopped(old)
    ours.run("scontrol", "delete", "nodename=blue-0")
    new.run("scontrol", "update", f"jobid={first}", "starttime=now", user="demo")
    until(lambda: jobs(new)[first] == "RUNNING minivm-blue-0", "the waiting job runs on minivm's worker")
    third = submitted(new, later)
    assert int(third) > int(second), "job numbers go on"
    ours.run("scontrol", "update", "nodename=minivm-blue-0", "state=drain", "reason=moved to Slinky")
    stopped(ours)

    assert move.state("back") == (0, "the state is at the top of the claim\n")
    assert move.state("back") == (0, "the state is at the top of the claim\n")
    theirs = move.slinky.controller(move.claim).wait_ready()
    assert jobs(new) == {first: "RUNNING minivm-blue-0", second: "PENDING", third: "PENDING"}
    ends(new, first)
    fourth = submitted(new, later)
    assert int(fourth) > int(third)
