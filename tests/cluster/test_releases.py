"""Upgrade Slurm from one release to the next under jobs; refuse the way back; start a cluster of the newer one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from cluster import ClusterError
from cluster.change.pinning import Wish, find_newest_here
from cluster.local import LocalCluster
from cluster.pods import LABEL
from images.engine.docker import DockerEngine
from tests.cluster.conftest import IMAGES, NAME
from tests.cluster.researcher import Researcher, World
from tests.cluster.small import small_cluster
from tests.pages import blocks
from tests.reader import ROOT, checkout, follow_all, programs
from tests.slurm import STARTS_SCRIPTS_BY, has_pmix
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

OLD, NEW = "24.11", "26.05"
CONTROLLER, LOGIN, WORKERS = "slurm-controller-0", "slurm-login-0", ("slurm-worker-0", "slurm-worker-1")
QUEUED = 50
HOW_TO = ROOT / "docs/how-to"


@pytest.fixture(scope="module")
def tags() -> dict[str, dict[str, str]]:
    """Release -> role -> tag."""
    client = DockerEngine().client
    return {slurm: find_newest_here(client, IMAGES, slurm=slurm, variant="debian") for slurm in (OLD, NEW)}


@pytest.fixture(scope="module")
def world(tags: dict[str, dict[str, str]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    values = {
        "workers": {"defaults": {"graceSeconds": 40, "drainSeconds": 20}, "pools": {"worker": {"replicas": 2}}},
        "slurm": {
            "proctrack": "linuxproc",
            "partitions": {"night": {"pools": ["worker"]}},
            "requeue": {"guiltyNode": "act"},
        },
    }
    with small_cluster(DockerEngine().client, f"{NAME}-release", tmp_path_factory.mktemp("release"), values) as cluster:
        cluster.options = replace(cluster.options, tags=tags[OLD])
        cluster.up(timeout=240)
        yield World(cluster)


@pytest.fixture
def bob(world: World) -> Researcher:
    return Researcher(world, "bob")


def roll(world: World, tags: dict[str, str], *roles: str, within: float = 300) -> None:
    """Roll these roles to these tags by the operator's values."""
    cluster: LocalCluster = world.cluster
    now = {**cluster.options.tags, **{role: tags[role] for role in roles}}
    cluster.options = replace(cluster.options, tags=now)
    cluster.up(timeout=within)
    world.manifests = cluster.manifests()


def queue(world: World) -> dict[str, str]:
    return dict(line.split() for line in world.slurm("squeue", "-h", "-r", "-o", "%i %T").splitlines())


def version(world: World, pod: str, daemon: str) -> str:
    return world.run(pod, daemon, "-V").split()[-1]


def by_hand(world: World, role: str, tag: str, pod: str) -> None:
    """Replace a pod by one of another image, which `up` would refuse."""
    cluster: LocalCluster = world.cluster
    now = replace(cluster.options, tags={**cluster.options.tags, role: tag})
    LocalCluster(cluster.kubelet.client, now, root=cluster.state.parent, log=print).delete(pod)


def why_not(world: World, pod: str) -> str:
    return world.row(pod).why


def test_a_login_that_is_newer_than_its_controller_says_so(world: World, tags: dict[str, dict[str, str]]) -> None:
    """slurmctld itself answers as to a wrong key."""
    before = world.running(LOGIN).container
    with pytest.raises(ClusterError, match=f"the controller has Slurm {OLD}, .* no pod was touched"):
        roll(world, tags[NEW], "login")
    assert world.running(LOGIN).container == before
    world.cluster.options = replace(world.cluster.options, tags=tags[OLD])
    by_hand(world, "login", tags[NEW]["login"], LOGIN)
    said = f"has Slurm {OLD}, which does not understand this image's {NEW}: the controller is upgraded first"
    until(lambda: said in why_not(world, LOGIN), "it says so", seen=lambda: why_not(world, LOGIN))
    roll(world, tags[OLD], "login")


def test_a_rehearsal_names_what_an_upgrade_would_lose_and_changes_nothing(
    world: World, bob: Researcher, tags: dict[str, dict[str, str]]
) -> None:
    """The newer Slurm starts on a copy, with a slurm.conf that has one partition less."""
    jobs = [bob.submit("-H", "-p", partition, script="true") for partition in ("all", "night")]
    cluster: LocalCluster = world.cluster
    before = {name: pod.container for name, pod in cluster.kubelet.list_pods().items()}
    changed = {**cluster.options.overrides, "slurm": {"proctrack": "linuxproc"}}
    wanted = replace(cluster.options, tags={**cluster.options.tags, **tags[NEW]}, overrides=changed)
    rehearsed = LocalCluster(cluster.kubelet.client, wanted, root=cluster.state.parent, log=print)
    code, text = rehearsed.rehearse(Wish(anew=True))
    assert code == 1, text
    assert f"Slurm {NEW} on the state of Slurm {OLD}: 1 job is the same" in text
    assert f"job {jobs[1]}, pending now, would be gone" in text and "partition night would be gone" in text
    assert f"job {jobs[0]}" not in text and "accounting: slurmdbd answered" in text
    assert {name: pod.container for name, pod in cluster.kubelet.list_pods().items()} == before
    assert not cluster.kubelet.api.containers(all=True, filters={"label": f"{LABEL}={cluster.kubelet.cluster}-check"})
    assert version(world, CONTROLLER, "slurmctld").startswith(OLD) and queue(world) == dict.fromkeys(jobs, "PENDING")
    bob(f"scancel {' '.join(jobs)}")


def test_jobs_that_run_and_jobs_that_wait_outlive_the_upgrade(
    world: World, bob: Researcher, tags: dict[str, dict[str, str]]
) -> None:
    """The controller's pod alone is replaced, as docs/how-to/upgrade.md says: the workers' old slurmd are served."""
    before = bob.submit("-o", "/dev/null", script="true")
    bob.wait_for(before, "COMPLETED")
    hold = "touch started-$SLURM_JOB_ID; while [ ! -e enough ]; do sleep 0.2; done; echo done > out-$SLURM_JOB_ID"
    running = [bob.submit("--exclusive", "-o", "/dev/null", script=hold) for _ in WORKERS]
    for job in running:
        bob.wait_for(job, "RUNNING")
    waiting = [bob.submit("-o", "/dev/null", script="true") for _ in range(3)]
    array = bob.submit(f"--array=1-{QUEUED - 3}", "-o", "/dev/null", script="true")
    waiting += [f"{array}_{number}" for number in range(1, QUEUED - 2)]
    until(lambda: len(queue(world)) == QUEUED + 2, "all are queued", seen=lambda: queue(world))
    was, starts = queue(world), world.slurm("squeue", "-h", "-t", "R", "-o", "%i %S")
    assert {job: was[job] for job in running} == dict.fromkeys(running, "RUNNING")
    assert version(world, CONTROLLER, "slurmctld").startswith(OLD)

    begun = time.monotonic()
    roll(world, tags[NEW], "controller")
    print(f"the controller's pod was replaced in {time.monotonic() - begun:.1f} s")
    assert version(world, CONTROLLER, "slurmctld").startswith(NEW)
    assert version(world, WORKERS[0], "slurmd").startswith(OLD)
    assert queue(world) == was, "none is lost, and none began again"
    assert world.slurm("squeue", "-h", "-t", "R", "-o", "%i %S") == starts

    bob("touch enough")
    for job in running:
        bob.wait_for(job, "COMPLETED")
        assert bob(f"cat out-{job}") == "done\n"
    until(lambda: queue(world) == {}, "all have run, on slurmds of before", within=180, seen=lambda: queue(world))

    def accounted() -> list[str]:
        listed = bob("sacct", "-n", "-X", "-P", "-o", "jobid,state").split()
        return sorted(line.partition("|")[0] for line in listed if line.endswith("|COMPLETED"))

    wanted = sorted([before, *running, *waiting])
    until(lambda: accounted() == wanted, "all are accounted, also who ran before", seen=accounted)


def test_the_way_back_is_refused_and_nothing_is_touched(world: World, tags: dict[str, dict[str, str]]) -> None:
    look = "cd /var/spool/slurmctld && sha256sum job_state node_state part_state"
    cluster: LocalCluster = world.cluster
    roll(world, tags[NEW], "controller")
    upgraded, container = cluster.options, world.running(CONTROLLER).container
    with pytest.raises(
        ClusterError, match=f"its state is of Slurm {NEW}, and Slurm has no way back; no pod was touched"
    ):
        roll(world, tags[OLD], "controller")
    assert world.running(CONTROLLER).container == container
    cluster.options = upgraded
    # Nor does the image itself, on Kubernetes.
    by_hand(world, "controller", tags[OLD]["controller"], CONTROLLER)
    said = f"slurmctld's state is of Slurm {NEW}, this image has {OLD}, and there is no way back"
    until(lambda: said in why_not(world, CONTROLLER), "it says so", seen=lambda: why_not(world, CONTROLLER))
    before = world.run(CONTROLLER, "sh", "-c", look)
    code, _ = cluster.exec(CONTROLLER, ["pgrep", "slurmctld"])
    assert code == 1, "the older one was not started"
    code, _ = cluster.exec(CONTROLLER, ["pgrep", "slurmdbd"])
    assert code == 1
    assert world.run(CONTROLLER, "sh", "-c", look) == before
    roll(world, tags[NEW], "controller")
    assert version(world, CONTROLLER, "slurmctld").startswith(NEW)


def test_an_older_login_starts_steps_on_newer_workers(
    world: World, bob: Researcher, tags: dict[str, dict[str, str]]
) -> None:
    """The login's sackd has fetched what the newer controller says of MPI; with the older default, steps hang."""
    roll(world, tags[NEW], "controller")
    roll(world, tags[NEW], "worker")
    world.wait_idle()
    assert version(world, LOGIN, "sinfo").startswith(OLD)
    assert sorted(bob("timeout 60 srun -N2 hostname").split()) == sorted(WORKERS)
    assert bob("timeout 60 salloc -N1 srun hostname").split()[-1] in WORKERS
    until(lambda: queue(world) == {}, "no job stays", seen=lambda: queue(world))


def test_a_whole_cluster_of_the_newer_one_works(world: World, bob: Researcher, tags: dict[str, dict[str, str]]) -> None:
    roll(world, tags[NEW], "controller", "login", "worker")
    world.wait_idle()
    for pod, daemon in ((CONTROLLER, "slurmctld"), (WORKERS[0], "slurmd"), (LOGIN, "sinfo")):
        assert version(world, pod, daemon).startswith(NEW), pod
    assert sorted(bob("srun -N2 hostname").split()) == sorted(WORKERS)
    ask = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=60).status)"
    for at in ("127.0.0.1:6817/livez", "127.0.0.1:6817/readyz", f"{WORKERS[0]}.slurm-worker:6818/readyz"):
        assert int(world.run(CONTROLLER, "python3", "-c", ask, f"http://{at}")) in (200, 204), at
    # Nothing of the cluster is told by it that nobody has asked for.
    pages = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=60).read().decode())"
    assert "slurm_" not in world.run(LOGIN, "python3", "-c", pages, "http://slurm-controller:6817/metrics/nodes")
    job = bob.submit("-N2", "-o", "both", script="srun hostname")
    bob.wait_for(job, "COMPLETED")
    assert sorted(bob("cat both").split()) == sorted(WORKERS)
    until(lambda: "COMPLETED" in bob(f"sacct -n -X -P -j {job} -o state"), "it is accounted")

    def ran() -> set[tuple[str, str]]:
        lines = world.run(WORKERS[0], "cat", "/var/log/minivm/runs.jsonl").splitlines()
        return {(record["kind"], str(record.get("job"))) for record in map(json.loads, lines)}

    until(lambda: {("prolog", job), ("epilog", job)} <= ran(), "the scripts ran", seen=ran)
    world.run(WORKERS[0], "sh", "-c", f"grep -qa {STARTS_SCRIPTS_BY} /usr/lib/*/slurm-wlm/libslurmfull.so")
    # slurmd would end on this one.
    job = bob.submit("--export=NONE", "-o", "alone", script='echo "$HOME:$USER"')
    bob.wait_for(job, "COMPLETED")
    assert bob("cat alone") == "/home/bob:bob\n"
    world.slurm("scontrol", "update", f"nodename={WORKERS[1]}", "state=drain", "reason=fan is loud")
    until(lambda: world.node_states()[WORKERS[1]] == "drained", "it is drained", seen=world.node_states)
    assert "fan is loud" in world.slurm("sinfo", "-h", "-n", WORKERS[1], "-o", "%E")
    world.slurm("scontrol", "update", f"nodename={WORKERS[1]}", "state=resume")
    world.wait_idle()
    refused = bob.try_("srun --container=/tmp/bundle hostname")
    assert refused.returncode != 0 and "this cluster has no container runtime" in refused.stderr
    large = bob.try_("sbatch -N 9 --wrap true")
    assert large.returncode != 0 and "submission failed" in large.stderr, large
    asked = bob.try_("srun --mpi=list")
    listed = asked.stdout + asked.stderr
    assert ("pmi2" in listed, "pmix" in listed) == (True, has_pmix(f"{IMAGES}/worker:{tags[NEW]['worker']}")), listed


def test_a_job_that_died_by_its_machine_runs_again_without_it(
    world: World, bob: Researcher, tags: dict[str, dict[str, str]]
) -> None:
    """The policy `slurm.requeue: act` on the newer Slurm: its clients' answers and its requeue are other ones."""
    roll(world, tags[NEW], "controller", "login", "worker")
    world.wait_idle()
    script = '[ "${SLURM_RESTART_COUNT:-0}" != 0 ] || { until [ -e die ]; do sleep 0.2; done; exit 1; }'
    job = bob.submit("--requeue", "-o", "again-%j", script=script)
    bob.wait_for(job, "RUNNING")
    node = world.slurm("squeue", "-h", "-j", job, "-o", "%N").strip()
    (other,) = {*WORKERS} - {node}
    world.run(node, "minivm", "stop", "broker")  # it would lift a drain of which it knows no verdict
    reason = "reason=minivm: fabric[manual]@9f2c: the fabric is gone"
    world.slurm("scontrol", "update", f"nodename={node}", "state=drain", reason)
    bob("touch die")
    until(lambda: bob.state(job) != "RUNNING", "it has died", seen=lambda: bob.state(job))
    world.run(CONTROLLER, "minivm", "restart", "requeue")  # it comes each minute, maybe just before this

    def shown() -> str:
        return world.slurm("scontrol", "-o", "show", "job", job)

    until(lambda: f"ExcNodeList={node} " in shown(), "it is queued again without its node", within=120, seen=shown)
    # Slurm starts a requeued job after two minutes; the test asks for it at once.
    until(lambda: "JobState=PENDING" in shown() and "JobHeld" not in shown(), "it is released", seen=shown)
    world.slurm("scontrol", "update", f"jobid={job}", "starttime=now")
    bob.wait_for(job, "COMPLETED")
    assert f" NodeList={other} " in shown() and " Restarts=1 " in shown()
    assert f"again without {node} (requeue 1" in bob(f"minivm job {job}")
    world.run(node, "minivm", "start", "broker")
    world.slurm("scontrol", "update", f"nodename={node}", "state=resume")
    world.wait_idle()


def test_metrics_are_read_where_a_site_wants_them(world: World, tags: dict[str, dict[str, str]]) -> None:
    roll(world, tags[NEW], "controller", "login", "worker")
    cluster: LocalCluster = world.cluster
    overrides = {**cluster.options.overrides}
    overrides["slurm"] = {**overrides.get("slurm", {}), "metrics": True}
    cluster.options = replace(cluster.options, overrides=overrides)
    cluster.up(timeout=240)
    world.wait_idle()
    ask = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=60).read().decode())"

    def page(name: str) -> str:
        return world.run(LOGIN, "python3", "-c", ask, f"http://slurm-controller:6817/metrics/{name}")

    until(lambda: "slurm_nodes" in page("nodes"), "slurmctld tells", seen=lambda: page("nodes")[:2000])
    for name in ("jobs", "partitions", "scheduler", "jobs-users-accts"):
        assert page(name).startswith("#"), name


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Build the environment of a user who follows the page, with a cluster of their own."""
    name = f"{NAME}-upgrade"
    env = os.environ | {"MINIVM_NAME": name, "MINIVM_BUILD_PREFIX": IMAGES}
    for variable in ("MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "MAKELEVEL", "ARGS", "MINIVM_VALUES", "SLURM"):
        env.pop(variable, None)
    env["PATH"] = f"{programs(tmp_path / 'bin')}:{env['PATH']}"
    yield env
    build(env, "down")


def build(env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "build.py", *words]
    return subprocess.run(
        line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500, stdin=subprocess.DEVNULL
    )


def test_the_page_upgrades_a_cluster_under_jobs(reader: dict[str, str], tmp_path: Path) -> None:
    """Run docs/how-to/upgrade.md by the command line, from the first `up` to the refused way back."""
    values = tmp_path / "values.yaml"
    own = {"slurm": {"proctrack": "linuxproc"}, "workers": {"defaults": {"graceSeconds": 90, "drainSeconds": 75}}}
    values.write_text(yaml.safe_dump(own))
    first = build(reader, "up", "--workers", "1", "--values", str(values), "--slurm-version", OLD)
    assert first.returncode == 0, first.stdout + first.stderr
    values.unlink()
    world = World(LocalCluster.load(DockerEngine().client, reader["MINIVM_NAME"], log=print))
    bob = Researcher(world, "bob")

    # Another `up` keeps workers, values and images, and finds nothing to do.
    before = {pod: item.container for pod, item in world.cluster.kubelet.list_pods().items()}
    again = build(reader, "up")
    assert again.returncode == 0 and "nothing to change" in again.stdout, again.stdout + again.stderr
    assert {pod: item.container for pod, item in world.cluster.kubelet.list_pods().items()} == before
    # So does a pod's replacement.
    images = {pod: item.image for pod, item in world.cluster.kubelet.list_pods().items()}
    assert build(reader, "delete", LOGIN).returncode == 0
    world.wait_ready()
    assert {pod: item.image for pod, item in world.cluster.kubelet.list_pods().items()} == images

    # It ends within its node's drain.
    hold = "touch started; while [ ! -e enough ]; do sleep 0.2; done"
    running = bob.submit("--exclusive", "-o", "/dev/null", script=hold)
    bob.wait_for(running, "RUNNING")
    queued = bob.submit("-o", "/dev/null", script="true")
    refused = build(reader, "up", "--slurm-version", NEW)
    assert refused.returncode == 1 and f"requeued: {running} of bob" in refused.stdout, refused.stdout + refused.stderr
    assert "`--yes` agrees" in refused.stderr
    assert {pod: item.image for pod, item in world.cluster.kubelet.list_pods().items()} == images

    until(lambda: version(world, CONTROLLER, "slurmctld").startswith(OLD), "slurmctld runs")
    drained = "until sinfo -h -o %T | grep -q drain; do sleep 0.5; done"
    bob(f"({drained}; touch enough) > /dev/null 2>&1 < /dev/null &")
    said = "\n".join(follow_all(blocks(HOW_TO / "upgrade.md"), reader, checkout(tmp_path / "checkout")).values())
    steps = [f"{pod}: {step}" for pod in (CONTROLLER, WORKERS[0], LOGIN) for step in ("replaced", "started", "ready")]
    places = [said.rindex("plan:\n"), *(said.index(step) for step in steps)]
    assert places == sorted(places), said
    assert "nothing to change" in said, "the page's last command"
    assert said.index(f"{LOGIN}: sackd restarted") < said.index(f"{WORKERS[0]}: replaced"), said
    world.reload()
    for pod, daemon in ((CONTROLLER, "slurmctld"), (WORKERS[0], "slurmd"), (LOGIN, "sinfo")):
        assert version(world, pod, daemon).startswith(NEW), pod
        assert world.row(pod).version.startswith(NEW)
    for job in (running, queued):
        until(lambda: "COMPLETED" in bob(f"sacct -n -X -P -j {job} -o state"), f"job {job} is accounted")  # noqa: B023 - within the loop

    now = {pod: item.container for pod, item in world.cluster.kubelet.list_pods().items()}
    back = build(reader, "up", "--yes", "--slurm-version", OLD)
    assert back.returncode == 1 and "no way back; no pod was touched" in back.stderr, back.stdout + back.stderr
    assert {pod: item.container for pod, item in world.cluster.kubelet.list_pods().items()} == now
