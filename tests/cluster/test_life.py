"""Pods come and go, configuration changes, parts fail: what must go on, goes on."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import ClusterError
from cluster.local import read_options
from cluster.names import free_port
from cluster.report import table
from cluster.values import merge
from init.slurm.client import read_backfilled
from tests.callers import calling
from tests.cluster.researcher import Researcher, World, push
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]


WORKERS = ("slurm-worker-0", "slurm-worker-1")
ROOT = Path(__file__).resolve().parents[2]


def host_key(world: World, pod: str) -> str:
    return world.run(pod, "ssh-keygen", "-lf", "/etc/ssh/ssh_host_ed25519_key")


def change(world: World, overrides: dict[str, Any]) -> None:
    """Apply new values on top of the current ones, as `helm upgrade` would."""
    world.cluster.options = replace(world.cluster.options, overrides=merge(world.cluster.options.overrides, overrides))
    world.cluster.up(timeout=240)
    world.manifests = world.cluster.manifests()


def operator(world: World, tmp_path: Path, command: str, *arguments: str) -> str:
    """Run a command of build.py on this cluster with its current values and return the output."""
    values = tmp_path / "values.yaml"
    image = {"image": {"repository": world.cluster.options.repository}}
    values.write_text(yaml.safe_dump(merge(image, world.cluster.options.overrides)))
    line = [sys.executable, "build.py", command, "--name", world.cluster.options.name, "--values", str(values)]
    done = subprocess.run([*line, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    world.reload()
    return done.stdout


def test_a_deleted_login_pod_comes_back_as_itself(healthy: World, alice: Researcher) -> None:
    before, key = healthy.running("slurm-login-0"), host_key(healthy, "slurm-login-0")
    alice("echo kept > note")
    healthy.cluster.delete("slurm-login-0")
    healthy.wait_ready()
    after = healthy.running("slurm-login-0")
    assert after.container != before.container and after.address != before.address
    assert host_key(healthy, "slurm-login-0") == key
    # known_hosts is strict: a changed host key would end this.
    assert alice("hostname; cat note").split() == ["slurm-login-0", "kept"]


def test_a_worker_that_dies_loses_its_job_to_the_queue_and_no_other(healthy: World, alice: Researcher) -> None:
    healthy.wait_idle()
    jobs = [alice.submit("-N1", "--exclusive", "-o", "/dev/null", script="sleep 600") for _ in range(2)]
    for job in jobs:
        alice.wait_for(job, "RUNNING")
    where = dict(line.split() for line in alice("squeue --me -h -o '%N %i'").splitlines())
    lost, kept = where["slurm-worker-1"], where["slurm-worker-0"]
    started = healthy.slurm("squeue", "-h", "-j", kept, "-o", "%S")
    healthy.cluster.delete("slurm-worker-1", force=True)
    healthy.wait_ready()
    # At once: when the new pod is ready, Slurm no longer believes in the old one's job.
    shown = healthy.slurm("scontrol", "-o", "show", "job", lost)
    assert "Restarts=1" in shown and "minivm: the pod of node slurm-worker-1 was replaced" in shown
    assert (alice.state(kept), healthy.slurm("squeue", "-h", "-j", kept, "-o", "%S")) == ("RUNNING", started)
    # Its requeue waits some time before it may start again (Slurm's own rule): it is not lost.
    assert alice.state(lost) in ("PENDING", "RUNNING")
    assert sorted(alice("srun -N1 -w slurm-worker-1 --overcommit hostname").split()) == ["slurm-worker-1"]
    alice(f"scancel {lost} {kept}")
    healthy.wait_idle()


def test_a_deleted_worker_waits_for_its_job_and_is_the_same_node_again(healthy: World, alice: Researcher) -> None:
    key, before = host_key(healthy, "slurm-worker-1"), healthy.running("slurm-worker-1")
    script = "until [ -e go-$SLURM_JOB_ID ]; do sleep 0.2; done; hostname"
    job = alice.submit("-w", "slurm-worker-1", "-o", "done-%j", script=script)
    alice.wait_for(job, "RUNNING")
    drained = "until sinfo -h -n slurm-worker-1 -o %T | grep -q drain; do sleep 0.5; done"
    alice(f"({drained}; touch go-{job}) > /dev/null 2>&1 < /dev/null &")
    healthy.cluster.delete("slurm-worker-1")
    alice.wait_for(job, "COMPLETED")
    assert "Restarts=0" in healthy.slurm("scontrol", "-o", "show", "job", job)
    assert alice(f"cat done-{job}") == "slurm-worker-1\n"
    healthy.wait_ready()
    assert host_key(healthy, "slurm-worker-1") == key
    assert healthy.running("slurm-worker-1").address != before.address
    # The cluster agrees: Slurm's address of the node is the new pod's, and a job across both runs.
    shown = healthy.slurm("scontrol", "-o", "show", "node", "slurm-worker-1")
    assert f"NodeAddr={healthy.running('slurm-worker-1').address}" in shown
    assert sorted(alice("srun -N2 hostname").split()) == ["slurm-worker-0", "slurm-worker-1"]


def test_the_controller_restarts_under_fifty_queued_and_two_running_jobs(healthy: World, alice: Researcher) -> None:
    healthy.wait_idle()
    running = [alice.submit("-N1", "--exclusive", "-o", "/dev/null", script="sleep 3000") for _ in range(2)]
    for job in running:
        alice.wait_for(job, "RUNNING")
    array = alice.submit("--array=1-50", "-o", "/dev/null", script="true")
    starts = healthy.slurm("squeue", "-h", "-t", "R", "-o", "%i %S")
    begun = time.monotonic()
    into_login = ("docker", "exec", "-i", healthy.running("slurm-login-0").container)
    with calling(into_login, "bob", ("squeue -h", "scontrol show partition")) as calls:
        healthy.cluster.delete("slurm-controller-0")
        # While it is away people still log in, are told, and see why a command fails.
        assert alice("echo in") == "in\n"
        until(
            lambda: alice.try_("sbatch --parsable -o /dev/null --wrap true", timeout=120).returncode == 0,
            "a submission is taken",
            seen=lambda: alice.try_("sinfo").stderr,
        )
        outage = time.monotonic() - begun
        healthy.wait_ready()
    print(f"no submissions for {outage:.1f} s; the controller's pod was ready after {time.monotonic() - begun:.1f} s")
    print(f"meanwhile: {calls}")
    assert calls.failed == [], "a command resolves the name once: the address outlives the pod"
    assert healthy.slurm("squeue", "-h", "-t", "R", "-o", "%i %S") == starts
    queued = healthy.slurm("squeue", "-h", "-r", "-j", array, "-o", "%T").split()
    assert queued == ["PENDING"] * 50
    # Ten of them show that the queue moves on.
    alice(f"scancel {array}_[11-50] {' '.join(running)}")
    until(
        lambda: healthy.slurm("squeue", "-h", "-j", array) == "",
        "the cancelled jobs are gone",
        seen=lambda: healthy.slurm("squeue"),
    )

    def completed() -> str:
        return alice(f"sacct -n -X -P -j {array} -o state")

    until(lambda: completed().split().count("COMPLETED") == 10, "ten are completed", seen=completed)


def test_a_job_that_backfill_started_goes_on_when_slurmctld_is_killed(healthy: World, alice: Researcher) -> None:
    """slurmctld saves no job that sched/backfill starts, until another job changes or five minutes have passed."""
    controller = "slurm-controller-0"
    healthy.wait_idle()
    alice.wait_for(alice.submit("-w", "slurm-worker-0", "-o", "/dev/null", script="sleep 3000"), "RUNNING")
    alice.submit("-N2", "--exclusive", "-o", "/dev/null", script="true")
    job = alice.submit("-w", "slurm-worker-1", "-o", "/dev/null", script="sleep 3000")
    alice.wait_for(job, "RUNNING")
    assert read_backfilled(healthy.slurm("sdiag")), "the main scheduler waits for the job of two nodes"

    def shown() -> str:
        return healthy.slurm("squeue", "-h", "-j", job, "-o", "%T %S")

    before = shown()
    started = datetime.fromisoformat(f"{before.split()[1]}+00:00").timestamp()
    until(
        lambda: float(healthy.run(controller, "stat", "-c", "%Y", "/var/spool/slurmctld/job_state")) > started + 1,
        "slurmctld has saved the job",
    )
    healthy.run(controller, "pkill", "-KILL", "-x", "slurmctld")
    until(lambda: shown() == before, "the job runs on", seen=lambda: healthy.slurm("squeue"))
    healthy.wait_ready()
    # Its node has registered by then, and ends a job that slurmctld does not know as running.
    until(lambda: healthy.node_states()["slurm-worker-1"] in ("mixed", "allocated"), "the node has the job")
    assert shown() == before
    alice("scancel --user=alice")


SUBMITS = r"""
cat > again.sh
for i in $(seq 10); do
    options=(--begin now+1hour --time 7 -o again-$i.txt)
    WORD="a\tb" sbatch --parsable --job-name "forgotten $i" --comment "c $i" "${options[@]}" again.sh "arg $i"
done
"""
# Wait until slurmctld saves its jobs, whose last time is $1.
SAVES = """
for i in $(seq 300); do
    [ "$(stat -c %y /var/spool/slurmctld/job_state 2>/dev/null)" = "$1" ] || { echo saved; break; }
    sleep 0.1
done
"""
AGAIN = """#!/bin/sh
#SBATCH --mem=64M
printf '%s|' "$1" "$WORD" "$SLURM_SUBMIT_DIR" "$SLURM_SUBMIT_HOST" "$PWD" "$SLURM_MEM_PER_NODE" \\
    "$MINIVM_BROUGHT_BACK$MINIVM_WAS_SLURM_UMASK"
"""


def test_jobs_that_slurmctld_forgot_are_back_held_once_and_as_they_were(healthy: World, alice: Researcher) -> None:
    """Slurm saves a job up to 6 s after it answered sbatch; killed twice, it forgets the second submissions, too."""
    controller = "slurm-controller-0"
    fields = "NAME:|,USERNAME:|,TIMELIMIT:|,COMMENT:|,REASON:|,ADMIN_COMMENT:|,JOBID:|"

    def listed() -> dict[str, list[str]]:
        rows = [line.split("|") for line in healthy.slurm("squeue", "-h", "-O", fields).splitlines()]
        found = [row for row in rows if row[0].startswith("forgotten ")]
        assert len({row[0] for row in found}) == len(found), "a job is there twice"
        return {row[0]: row for row in found}

    def killed_twice() -> tuple[set[str], dict[str, list[str]]]:
        """Return the numbers that the jobs had first, and the jobs that are there afterwards."""
        before = healthy.run(controller, "sh", "-c", "stat -c %y /var/spool/slurmctld/job_state || true").strip()
        alice.submit("-H", "-o", "/dev/null", script="true")
        # Its next time is 5 s after this one.
        assert healthy.run(controller, "sh", "-c", SAVES, "sh", before).strip() == "saved"
        old = set(alice(f"bash -c {shlex.quote(SUBMITS)}", stdin=AGAIN).split())
        assert len(old) == 10
        for _ in range(2):
            healthy.run(controller, "pkill", "-KILL", "-x", "slurmctld")
            until(lambda: len(listed()) == 10, "all are there", seen=lambda: healthy.slurm("squeue"))
        healthy.wait_ready()
        return old, listed()

    for _ in range(20):
        old, jobs = killed_twice()
        back = [row for row in jobs.values() if row[6] not in old]
        if back:
            break
        # On a busy machine slurmctld has saved the last submission before the test kills it.
        alice("scancel --user=alice")
        until(lambda: listed() == {}, "the next try begins without them", seen=lambda: healthy.slurm("squeue"))
    print(f"{len(back)} of 10 came back with another number")
    assert back
    for row in jobs.values():
        assert row[1:4] == ["alice", "7:00", f"c {row[0].split()[1]}"]
    for row in back:
        assert row[4] == "JobHeldUser" and row[5].startswith("minivm: job ")
    name, number = back[-1][0].split()[1], back[-1][6]
    assert "which may have run" in alice(f"minivm job {number}")
    (was,) = old & set(re.findall(r" job ([0-9]+)", back[-1][5]))  # the second kill forgot second submissions, too
    assert f"Job {number}" in alice(f"minivm job {was}")
    alice(f"scontrol update jobid={number} starttime=now; scontrol release {number}")
    written = until(lambda: alice(f"cat again-{name}.txt 2>/dev/null || true"), "it has run")
    assert written == f"arg {name}|a\\tb|/home/alice|slurm-login-0|/home/alice|64||"
    alice("scancel --user=alice; rm -f again*")


def test_a_job_with_many_arguments_runs(healthy: World, alice: Researcher) -> None:
    """The filters keep the arguments in one variable of the job, where 128 KiB would let no program start."""
    submit = "cat > many.sh; sbatch -o many.txt many.sh $(seq -f data/%0080g.fastq 2000)"
    alice(f"bash -c {shlex.quote(submit)}", stdin='#!/bin/sh\n/bin/echo "$#"\n')
    assert until(lambda: alice("cat many.txt 2>/dev/null || true"), "it has run").strip() == "2000"
    alice("rm -f many.sh many.txt")


def test_workers_roll_to_a_new_image_while_an_array_runs(healthy: World, alice: Researcher, tmp_path: Path) -> None:
    tag, image = healthy.another_image("worker")
    before = {pod: healthy.running(pod).container for pod in WORKERS}
    begun = healthy.slurm("date", "+%FT%T").strip()
    array = alice.submit("--array=1-24", "-o", "/dev/null", script="sleep 1")
    alice.wait_for(f"{array}_1", "RUNNING", "COMPLETED")  # a task of one second may have ended between two looks
    # What an operator types; on Kubernetes it is `helm upgrade --set image.tags.worker=...`.
    shown = operator(healthy, tmp_path, "up", "--yes", "--tag", f"worker={tag}")
    for pod, container in before.items():
        after = healthy.running(pod).container
        assert after != container
        assert (healthy.cluster.kubelet.inspect(after) or {})["Image"] == image
    # One by one: the next one goes when the one before it is ready again.
    steps = [f"slurm-worker-{number}: {step}" for number in (1, 0) for step in ("replaced", "started", "ready")]
    places = [shown.index(step) for step in steps]
    assert places == sorted(places), shown

    def states() -> str:
        return alice(f"sacct -n -X -P -j {array} -o state")

    def story() -> str:
        """Why one of them is not: what slurmctld says of it now, and what it has said."""
        now = healthy.slurm("scontrol", "show", "job", array), healthy.slurm("sinfo", "-N", "-o", "%N %T %E")
        said = healthy.run("slurm-controller-0", "minivm", "logs", "slurmctld", "--lines", "300")
        told = [line for line in said.splitlines() if "WEXITSTATUS" not in line and not line.endswith(" done")]
        return "\n".join((states(), *now, shown, *told))

    until(lambda: states().split() == ["COMPLETED"] * 24, "all are completed", seen=story)
    # Drained first, by Slurm's own record, and so no task was cut and begun again.
    events = healthy.slurm("sacctmgr", "-nP", "show", "events", f"start={begun}", "format=nodename,state,reason")
    drained = {line.split("|")[0] for line in events.splitlines() if "DRAIN" in line and "minivm: pod stops" in line}
    assert drained == {*WORKERS}, events
    assert set(alice(f"sacct -n -X -D -P -j {array} -o jobid").split()) == {f"{array}_{n}" for n in range(1, 25)}


def test_a_pinned_image_that_was_removed_is_told_and_nothing_else_is_touched(healthy: World, tmp_path: Path) -> None:
    before = healthy.cluster.options
    tag, image = healthy.another_image("login")
    try:
        operator(healthy, tmp_path, "up", "--tag", f"login={tag}")
        assert healthy.running("slurm-login-0").image == image
        api = healthy.cluster.kubelet.api
        api.remove_container(healthy.running("slurm-login-0").container, force=True)
        api.remove_image(healthy.tags.pop())
        others = {pod: item.container for pod, item in healthy.cluster.kubelet.list_pods().items()}
        for command in (("up",), ("delete", "slurm-login-0")):
            done = build(healthy, *command)
            assert done.returncode == 1 and "was removed from this machine\nhint: `make images SLURM=" in done.stderr, (
                done
            )
        assert {pod: item.container for pod, item in healthy.cluster.kubelet.list_pods().items()} == others
    finally:
        healthy.cluster.options = before
        healthy.cluster.up(timeout=240)
        healthy.manifests = healthy.cluster.manifests()


def partitions(world: World) -> list[str]:
    return world.slurm("sinfo", "-h", "-o", "%R").split()


def test_a_new_partition_is_live_without_restarts(healthy: World, alice: Researcher) -> None:
    pods = ("slurm-controller-0", "slurm-worker-0", "slurm-login-0")
    before = {pod: (healthy.running(pod).container, healthy.running(pod).restarts) for pod in pods}
    change(healthy, {"slurm": {"extraConfig": "PartitionName=short Nodes=pool_worker MaxTime=10 State=UP"}})
    until(lambda: "short" in partitions(healthy), "it is live", seen=lambda: partitions(healthy))
    assert alice("srun -p short -N2 -l true") == ""
    assert {pod: (healthy.running(pod).container, healthy.running(pod).restarts) for pod in pods} == before


def test_a_broken_slurm_conf_is_refused_with_a_reason(healthy: World, alice: Researcher) -> None:
    good = str(healthy.cluster.options.overrides["slurm"]["extraConfig"])
    options = healthy.cluster.options
    broken = {"slurm": {"extraConfig": good + "\nNoSuchSetting=1"}}
    before = {name: item.container for name, item in healthy.cluster.kubelet.list_pods().items()}
    with pytest.raises(ClusterError, match=r"(?s)unrecognized key: NoSuchSetting.*no pod was changed"):
        change(healthy, {**broken, "workers": {"pools": {"more": {"replicas": 1}}}})

    def shown() -> str:
        return "\n".join(table(healthy.cluster.status(), width=1000))

    assert {name: item.container for name, item in healthy.cluster.kubelet.list_pods().items()} == before
    assert "NoSuchSetting" not in shown()
    # Kubernetes publishes it all the same.
    healthy.cluster.options = replace(options, overrides=merge(options.overrides, broken))
    desired = healthy.cluster.manifests()
    for pod in desired.pods:
        healthy.cluster.kubelet.publish_files(pod, desired)
    until(lambda: "slurm.conf: refused" in shown() and "NoSuchSetting" in shown(), "the refusal is told", seen=shown)
    # The running one stays: jobs run, also from new clients.
    assert alice("srun -p short -N2 -l true") == ""
    # Nor does the next pod of the controller take it.
    healthy.cluster.delete("slurm-controller-0")
    healthy.wait_ready()
    until(lambda: "NoSuchSetting" in shown(), "it is told by the next pod too", seen=shown)
    assert alice("srun -p short -N2 -l true") == ""
    change(healthy, {"slurm": {"extraConfig": good}})
    until(lambda: "NoSuchSetting" not in shown(), "the refusal is taken back", seen=shown)
    # The pages that later tests follow lose no partition.
    change(healthy, {"slurm": {"extraConfig": ""}})
    until(lambda: "short" not in partitions(healthy), "it is gone", seen=lambda: partitions(healthy))


def build(world: World, *words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "build.py", *words[:2], "--name", world.cluster.options.name, *words[2:]]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)


def test_values_whose_slurm_conf_only_slurmctld_refuses_are_not_stored(healthy: World, tmp_path: Path) -> None:
    options = healthy.cluster.options
    before = read_options(options.name)
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(merge(options.overrides, {"slurm": {"config": {"BurstBufferType": "lua"}}})))
    done = build(healthy, "up", f"--values={file}")
    assert done.returncode == 1 and "burst_buffer" in done.stderr and "keeps the values from before" in done.stderr, (
        done
    )
    assert read_options(options.name) == before
    again = build(healthy, "up")
    assert again.returncode == 0 and "files of slurm-config" in again.stdout, again
    assert "BurstBufferType         = (null)" in healthy.slurm("scontrol", "show", "config")


def test_a_partition_comes_beside_the_others_and_goes_only_without_jobs(
    healthy: World, alice: Researcher, tmp_path: Path
) -> None:
    """The example of docs/how-to/change-slurm-conf.md, and the way back."""
    stays = alice.submit("-p", "all", "--mem=10", "-o", "/dev/null", script="sleep 600")
    alice.wait_for(stays, "RUNNING")
    long = {"pools": ["worker"], "default": True, "options": {"MaxTime": "7-00:00:00"}}
    before = dict(healthy.cluster.options.overrides)
    change(healthy, {"slurm": {"partitions": {"long": long}}})
    until(lambda: "long" in partitions(healthy), "it is live", seen=lambda: partitions(healthy))
    ends = alice.submit("--mem=10", "-o", "/dev/null", script="sleep 600")
    alice.wait_for(ends, "RUNNING")

    def running() -> set[str]:
        """Return each running job's number and start; a requeued job that runs again is another line."""
        return set(healthy.slurm("squeue", "-h", "-t", "R", "-o", "%i %S").splitlines())

    both = until(lambda: found if len(found := running()) == 2 else None, "both run", seen=running)
    # Looked at first, from outside.
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump(before))
    asked = build(healthy, "config", "check", "--values", str(values))
    assert asked.returncode == 1 and f"ends jobs: partition long goes: job {ends}" in asked.stdout, asked
    # Done all the same, it is refused, and nobody's job ends.
    healthy.cluster.options = replace(healthy.cluster.options, overrides=before)
    with pytest.raises(ClusterError, match=f"it would end jobs: partition long goes: job {ends}"):
        change(healthy, {})
    until(lambda: running() == both, "both run on", seen=running)
    told = build(healthy, "config", "status")
    assert told.returncode == 1
    accepted = build(healthy, "config", "accept", told.stdout.partition(":")[0])
    assert accepted.returncode == 0, accepted
    until(lambda: "long" not in partitions(healthy), "it is gone", seen=lambda: partitions(healthy))
    on = {line for line in both or () if line.startswith(f"{stays} ")}
    until(lambda: running() == on, "the other runs on", seen=running)
    alice("scancel -u alice")


def test_an_allocation_ends_when_the_login_pod_it_came_from_has_died(healthy: World, alice: Researcher) -> None:
    """The login pod dies silently, as with its machine.

    The time limit fits a test: slurmctld asks a client at each third of it, and the client has four thirds and
    MessageTimeout, 35 s in all; Slurm looks every half minute. It is lowered when all jobs run: a client that is slow
    to start would lose its job by it.
    """
    usual, limit = 600, 18

    def set_limit(seconds: int) -> None:
        change(healthy, {"slurm": {"config": {"InactiveLimit": seconds}}})
        live = f"InactiveLimit           = {seconds} sec"
        until(lambda: live in healthy.slurm("scontrol", "show", "config"), f"a limit of {seconds} s is live")

    def there() -> set[str]:
        return set(healthy.slurm("squeue", "-h", "-u", "alice", "-t", "R", "-o", "%j").split())

    # It has no client from the beginning, and is meant to stay.
    alice("salloc -Q -n1 --mem=10 -J kept --no-shell")
    lines = {
        "allocation": "salloc -Q -n1 --mem=10 -J allocation sleep 600",
        "shell": "srun -n1 --mem=10 -J shell --pty sleep 600",
    }
    clients = [client(alice, line) for line in lines.values()]
    try:
        until(lambda: there() == {"kept", *lines}, "all run", seen=there)
        set_limit(limit)
        assert there() == {"kept", *lines}, "clients that answer keep their jobs"
        healthy.cluster.delete("slurm-login-0", force=True)
        healthy.wait_ready()
        clients.append(client(alice, "salloc -Q -n1 --mem=10 -J alive sleep 600"))
        until(lambda: not there() & set(lines) and "alive" in there(), "the dead ones end", within=240, seen=there)
        assert there() == {"kept", "alive"}
    finally:
        for process in clients:
            process.kill()
            process.wait()
        # A slurmd that a reconfigure replaces in the middle of an epilog forgets to tell slurmctld of its end.
        healthy.end_jobs_except(set())
        set_limit(usual)


def client(who: Researcher, line: str) -> subprocess.Popen[bytes]:
    """Run a user's command on a terminal that nobody looks at."""
    quiet = subprocess.DEVNULL
    return subprocess.Popen(who.command(line, options=("-tt",)), stdin=quiet, stdout=quiet, stderr=quiet)


def test_a_port_that_is_asked_for_is_the_one_that_answers(healthy: World, alice: Researcher, tmp_path: Path) -> None:
    """A running cluster also moves to the requested port; unrequested settings stay as they are."""
    wanted = free_port(healthy.cluster.options.port + 50)
    assert "slurm-login-0: replaced" in operator(healthy, tmp_path, "up", "--port", str(wanted))
    assert healthy.cluster.options.port == wanted
    assert alice("hostname") == "slurm-login-0\n"
    assert "replaced" not in operator(healthy, tmp_path, "up")


def test_a_cluster_that_never_was_is_not_said_to_be_gone(healthy: World) -> None:
    """To take down what is not there is nothing to do, and a name that was misspelt is told which there are."""
    name = healthy.cluster.options.name
    line = [sys.executable, "build.py", "down", "--name", f"{name}-x"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert f"there is no cluster {name}-x" in done.stdout and "is gone" not in done.stdout
    assert name in done.stdout.partition("hint: ")[2].partition(";")[0].replace(",", "").split()


def test_a_pushed_prolog_runs_on_every_node_and_a_broken_one_on_none(healthy: World, alice: Researcher) -> None:
    def everywhere() -> list[str]:
        return [healthy.run(pod, "readlink", "/var/lib/minivm/scripts/current") for pod in WORKERS]

    prolog = "#!/bin/sh\\ntouch /run/minivm/marked-$SLURM_JOB_ID\\n"
    good = push(healthy, f"printf '{prolog}' > prolog.d/90-mark && chmod 755 prolog.d/90-mark")
    for pod in WORKERS:
        healthy.run(pod, "gitsync", "now")
    until(lambda: all(good in each for each in everywhere()), "the push is on every node", seen=everywhere)
    assert good in healthy.run(WORKERS[0], "minivm", "gitsync", "status")
    job = alice.submit("-N2", "-o", "/dev/null", script="true")
    alice.wait_for(job, "COMPLETED")
    for pod in WORKERS:
        healthy.run(pod, "test", "-e", f"/run/minivm/marked-{job}")
    broken = push(healthy, "echo 'if then' >> prolog.d/90-mark")
    for pod in WORKERS:
        healthy.run(pod, "gitsync", "now")

    def told() -> bool:
        rows = [healthy.row(pod) for pod in WORKERS]
        return all(any(broken[:7] in text and "90-mark" in text for text in row.also) for row in rows)

    until(told, "both tell the refusal", seen=lambda: [healthy.row(pod) for pod in WORKERS])
    assert all(good in each for each in everywhere())
    assert sorted(alice("srun -N2 hostname").split()) == [*WORKERS]
    mended = push(healthy, "git rm -q prolog.d/90-mark")
    for pod in WORKERS:
        healthy.run(pod, "gitsync", "now")
    until(lambda: all(mended in each for each in everywhere()), "the mended one is on every node", seen=everywhere)


def test_a_job_whose_prolog_takes_its_time_is_not_taken_for_lost(healthy: World, alice: Researcher) -> None:
    """slurmctld requeues a batch job that its node, when it registers, does not tell of so long after its start."""

    def taken(commit: str) -> None:
        healthy.run(WORKERS[0], "gitsync", "now")
        current = ("readlink", "/var/lib/minivm/scripts/current")
        until(
            lambda: commit in healthy.run(WORKERS[0], *current),
            "the push is there",
            seen=lambda: healthy.row(WORKERS[0]),
        )

    # As long as two that look at GPUs may take; Slurm's own patience would be 20 s.
    slow = "printf '#!/bin/sh\\nexec sleep 10\\n'"
    taken(push(healthy, f"for n in 91 92 93; do {slow} > prolog.d/$n-slow; chmod 755 prolog.d/$n-slow; done"))
    try:
        begun = time.monotonic()
        job = alice.submit("-w", WORKERS[0], "-o", "/dev/null", script="sleep 1")
        alice.wait_for(job, "RUNNING")
        until(lambda: time.monotonic() - begun > 26, "its prolog runs for long")
        # As each node does every quarter of an hour, and here because somebody has lifted a drain.
        for state in ("drain", "resume"):
            healthy.slurm("scontrol", "update", f"nodename={WORKERS[0]}", f"state={state}", "reason=to look")
        alice.wait_for(job, "COMPLETED")
        assert "Restarts=0" in healthy.slurm("scontrol", "-o", "show", "job", job)
    finally:
        taken(push(healthy, "git rm -q 'prolog.d/9*-slow'"))


def test_without_directory_and_git_server_people_and_jobs_go_on(healthy: World, alice: Researcher) -> None:
    alice("true")
    demo = healthy.running("slurm-demo-0")
    healthy.cluster.kubelet.api.pause(demo.container)
    try:
        assert alice("id -un") == "alice\n"
        assert sorted(alice("srun -N2 hostname").split()) == ["slurm-worker-0", "slurm-worker-1"]
        row = healthy.row("slurm-demo-0")
        assert not row.ready and "does not answer" in row.why
    finally:
        healthy.cluster.kubelet.api.unpause(demo.container)


def test_without_the_database_jobs_run_and_are_accounted_later(healthy: World, alice: Researcher) -> None:
    healthy.run("slurm-controller-0", "minivm", "stop", "slurmdbd")
    try:
        job = alice.submit("-o", "/dev/null", script="true")
        alice.wait_for(job, "COMPLETED")
        assert "slurmdbd: stopped on request" in healthy.row("slurm-controller-0").also
        assert alice.try_("timeout 60 sacct -n -X").returncode != 0
    finally:
        healthy.run("slurm-controller-0", "minivm", "start", "slurmdbd")

    def accounted() -> str:
        return alice(f"sacct -n -X -P -j {job} -o state")

    until(lambda: accounted().strip() == "COMPLETED", "it is accounted after all", seen=accounted)


def test_a_container_that_exits_is_started_again_in_the_same_pod(healthy: World) -> None:
    before = healthy.running("slurm-login-0")
    # What a kubelet does after a failed liveness probe: PID 1 gets TERM.
    healthy.cluster.kubelet.exec(before.container, ["kill", "-TERM", "1"])
    until(
        lambda: healthy.running("slurm-login-0").restarts == before.restarts + 1,
        "it is started again",
        seen=lambda: healthy.running("slurm-login-0"),
    )
    healthy.wait_ready()
    after = healthy.running("slurm-login-0")
    assert (after.container, after.address) == (before.container, before.address)
    assert healthy.row("slurm-login-0").restarts == before.restarts + 1


def test_a_pod_that_the_machine_refuses_is_told_and_better_values_mend_it(healthy: World) -> None:
    """A volume on a file, or a capability that is not to be had: the container is there, and can never run."""
    before = healthy.cluster.options
    others = {
        name: item.container for name, item in healthy.cluster.kubelet.list_pods().items() if name != "slurm-worker-1"
    }
    try:
        with pytest.raises(ClusterError, match=r"^cannot start slurm-worker-1: .*/etc/passwd"):
            change(healthy, {"mounts": {"data": {"mountPath": "/etc/passwd", "hostPath": "/srv"}}})
        assert not healthy.running("slurm-worker-1").running
    finally:
        healthy.cluster.options = before
        healthy.cluster.up(timeout=240)
        healthy.manifests = healthy.cluster.manifests()
    after = {name: item.container for name, item in healthy.cluster.kubelet.list_pods().items()}
    assert set(after) == {*others, "slurm-worker-1"} and others.items() <= after.items(), "nobody else was touched"
    healthy.wait_idle()


def test_nothing_listens_beyond_this_machine(healthy: World) -> None:
    for running in healthy.cluster.kubelet.list_pods().values():
        detail = healthy.cluster.kubelet.inspect(running.container)
        assert detail
        bindings = detail["HostConfig"]["PortBindings"] or {}
        assert {item["HostIp"] for items in bindings.values() for item in items} <= {"127.0.0.1"}
        assert not detail["HostConfig"]["Privileged"]
