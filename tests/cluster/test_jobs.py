"""Jobs as a user meets them: accounts, shared memory, ranks, a shell on the node; and an end with the login pod."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.local import LocalCluster
from cluster.values import merge
from fleet.act.slurm_client import SlurmClient
from fleet.report.jobs import JobRow, read_table
from images.engine.docker import DockerEngine
from tests.cluster.conftest import IMAGES, NAME
from tests.cluster.researcher import Researcher, World
from tests.cluster.small import small_cluster
from tests.slurm import has_pmix, release_of
from tests.waiting import PATIENCE, until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

LOGIN, WORKER = "slurm-login-0", "slurm-worker-0"
MIB = 1 << 20
# Takes memory, reads and writes, computes, and stays until it was seen.
WORK = """
import hashlib, os, time
held = bytearray(200 << 20)
with open("scratch", "wb") as file:
    file.write(held[: 50 << 20])
with open("scratch", "rb") as file:
    file.read()
os.unlink("scratch")
end = time.process_time() + 2
while time.process_time() < end:
    hashlib.sha256(held[: 1 << 20])
open("there", "w").close()
while not os.path.exists("seen"):
    time.sleep(0.2)
"""
RANK = """
import ctypes
mpi = ctypes.CDLL("libmpi.so.40", mode=ctypes.RTLD_GLOBAL)
mpi.MPI_Init(None, None)
world = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(mpi, "ompi_mpi_comm_world")))
rank, size = ctypes.c_int(), ctypes.c_int()
mpi.MPI_Comm_rank(world, ctypes.byref(rank))
mpi.MPI_Comm_size(world, ctypes.byref(size))
print("rank", rank.value, "of", size.value, flush=True)
mpi.MPI_Finalize()
"""
FIGURES = ("MaxRSS", "AveRSS", "MaxVMSize", "MaxDiskRead", "MaxDiskWrite")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Start a cluster that tracks jobs but does not contain them, as where pods may not write cgroups."""
    values = {"slurm": {"proctrack": "linuxproc", "fastScripts": True}, "login": {"graceSeconds": 75}}
    with small_cluster(DockerEngine().client, f"{NAME}-plain", tmp_path_factory.mktemp("plain"), values) as cluster:
        cluster.up(timeout=240)
        yield World(cluster)


@pytest.fixture
def bob(plain: World) -> Researcher:
    return Researcher(plain, "bob")


def figures(text: str) -> dict[str, float]:
    """Slurm's 204800K in bytes; what is empty is not there."""
    units = {"K": 1024.0, "M": 1024.0**2, "G": 1024.0**3}
    found = dict(zip(FIGURES, text.strip().split("|"), strict=True))
    return {
        name: float(value.rstrip("KMG")) * units.get(value[-1], 1.0) for name, value in found.items() if value.strip()
    }


def accounted(person: Researcher) -> None:
    person("rm -f there seen; cat > work.py", stdin=WORK)
    # Sampled often, so that a short job has figures while it runs.
    job = person.submit("--acctg-freq=1", "--mem=600M", "-o", "/dev/null", script="exec python3 work.py")
    until(lambda: person.try_("test -e there").returncode == 0, "it has worked", seen=lambda: person("squeue --me"))

    def running() -> dict[str, float]:
        """Return nothing while there is none: slurmd may not have answered sstat in time."""
        lines = person.try_(f"sstat -n -P -j {job}.batch -o {','.join(FIGURES)}").stdout.splitlines()
        return figures(lines[-1]) if lines else {}

    until(lambda: running().get("MaxRSS", 0) > 190 * MIB, "sstat sees its memory", seen=running)
    person("touch seen")
    person.wait_for(job, "COMPLETED")

    def line() -> str:
        return person(f"sacct -n -P -j {job}.batch -o {','.join(FIGURES)},TotalCPU,State")

    until(lambda: "COMPLETED" in line(), "it is accounted", seen=line)
    *measured, cpu, _ = line().strip().split("|")
    found = figures("|".join(measured))
    assert set(found) == set(FIGURES), line()
    assert 190 * MIB < found["AveRSS"] <= found["MaxRSS"] < 600 * MIB
    assert found["MaxVMSize"] > 190 * MIB
    assert 50 * MIB <= found["MaxDiskRead"] < 500 * MIB
    assert 50 * MIB <= found["MaxDiskWrite"] < 500 * MIB
    minutes, _, seconds = cpu.rpartition(":")
    assert int(minutes.rpartition(":")[2]) * 60 + float(seconds) >= 2, cpu
    # The same in the words that people know, where they log in and where their jobs run.
    told = person(f"seff {job}")
    assert person(f"srun seff {job}") == told
    said = dict(line.split(": ", 1) for line in told.splitlines())
    assert (said["Job ID"], said["State"], said["Cores"]) == (job, "COMPLETED (exit code 0)", "1")
    assert said["User/Group"].startswith(f"{person.user}/") and said["CPU Utilized"] >= "00:00:02"
    number, unit = said["Memory Utilized"].split()
    assert 190 < float(number) < 600 and unit == "MB" and said["Memory Efficiency"].endswith("% of 600.00 MB")


def test_a_person_s_job_is_accounted_whole(bob: Researcher) -> None:
    accounted(bob)


def test_so_is_one_in_cgroups(alice: Researcher) -> None:
    accounted(alice)


def test_a_requeued_job_keeps_the_output_of_its_first_run(bob: Researcher) -> None:
    script = 'echo "run ${SLURM_RESTART_COUNT:-0}"; [ "$SLURM_RESTART_COUNT" = 1 ] || { touch ran; exec sleep 300; }'
    bob("rm -f ran again.out")
    job = bob.submit("-o", "again.out", script=script)
    until(lambda: bob.try_("test -e ran").returncode == 0, "it runs", seen=lambda: bob("squeue --me"))
    bob(f"scontrol requeue {job}")
    until(lambda: bob.state(job) == "PENDING", "it waits again", seen=lambda: bob("squeue --me"))
    # slurmd refuses a credential of the second in which it killed the job's first run: "already killed, do not launch".
    bob.world.slurm("scontrol", "update", f"jobid={job}", "starttime=now+2")
    bob.wait_for(job, "COMPLETED")
    assert [line for line in bob("cat again.out").splitlines() if line.startswith("run ")] == ["run 0", "run 1"]


def test_a_job_has_shared_memory_for_its_loaders(bob: Researcher) -> None:
    share = "from multiprocessing.shared_memory import SharedMemory as S; s = S(create=True, size=300 << 20);"
    assert bob(f"srun python3 -c '{share} s.buf[:] = bytes(300 << 20); s.close(); s.unlink(); print(1)'") == "1\n"


def test_ranks_find_each_other_without_a_word_of_mpi(bob: Researcher) -> None:
    """Use srun where this Slurm speaks PMIx, and mpirun in a job where it does not."""
    bob("cat > rank.py", stdin=RANK)
    pmix = has_pmix(f"{IMAGES}/worker:latest")
    line = "srun -n2 --mem-per-cpu=200M" if pmix else "salloc -Q -n2 --mem-per-cpu=200M mpirun"
    assert sorted(bob(f"{line} python3 rank.py").splitlines()) == ["rank 0 of 2", "rank 1 of 2"]


def test_a_command_over_ssh_has_a_locale(bob: Researcher) -> None:
    """A user whose own machine sends no locale has one too: ssh reads no profile for a command."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("LANG", "LC_"))}
    done = subprocess.run(bob.command("echo $LANG; locale charmap"), env=env, capture_output=True, text=True)
    assert done.stdout == "C.UTF-8\nUTF-8\n"


def test_salloc_gives_a_shell_on_the_node(bob: Researcher) -> None:
    shown = bob.try_("salloc -Q", options=("-tt",), stdin="echo I am on $(hostname)\nexit\n").stdout
    assert f"I am on {WORKER}" in shown


REFUSED = "minivm: --container: this cluster has no container runtime"


@pytest.mark.parametrize(
    "line",
    [
        "srun --container=/tmp/bundle hostname",
        "srun --mpi=none --container=/tmp/bundle hostname",
        "salloc --container=/tmp/bundle hostname",
        "sbatch --container=/tmp/bundle --wrap hostname",
        "SBATCH_CONTAINER=/tmp/bundle sbatch --wrap hostname",
        "printf '#!/bin/sh\n#SBATCH --container=/tmp/bundle\nhostname\n' | sbatch",
        # A step within a job, from a worker.
        "srun -n1 --mpi=none srun --overlap --container=/tmp/bundle hostname",
    ],
)
def test_a_container_is_refused_before_there_is_a_job(bob: Researcher, line: str) -> None:
    """While there is no runtime, in words, also where PMIx would fail on one first."""
    before = newest_job(bob)
    refused = bob.try_(line)
    assert refused.returncode != 0 and REFUSED in refused.stderr, refused
    assert WORKER not in refused.stdout
    assert newest_job(bob) == before + 1 + ("--overlap" in line)


@pytest.mark.parametrize("line", ["sbatch -N 9 --wrap true", "sbatch -n 4000 --wrap true", "srun -N 9 true"])
def test_a_job_that_no_partition_can_ever_run_is_refused(bob: Researcher, line: str) -> None:
    """Slurm 26.05 would let it wait, without a word that it waits for ever."""
    before = newest_job(bob)
    refused = bob.try_(line)
    assert refused.returncode != 0, refused
    assert ("Unable to allocate" if line.startswith("srun") else "submission failed") in refused.stderr
    assert newest_job(bob) == before + 1


def newest_job(bob: Researcher) -> int:
    """Return the last job number, by taking the next one for a moment."""
    job = int(bob.submit("--hold", "-o", "/dev/null", script="true"))
    bob("scancel", str(job))
    return job


def test_a_container_that_slips_past_is_refused_at_launch(bob: Researcher) -> None:
    """A person's own slurm.conf, or REST: no filter is asked there."""
    own = "sed /CliFilterPlugins/d /run/slurm/conf/slurm.conf > own.conf; export SLURM_CONF=$PWD/own.conf;"
    for more in ("", "--mpi=none"):
        refused = bob.try_(f"{own} srun {more} --container=/tmp/bundle hostname")
        assert refused.returncode != 0 and WORKER not in refused.stdout
    assert REFUSED in refused.stdout
    job = bob(f"{own} sbatch --parsable --container=/tmp/bundle -o refused --wrap hostname").strip()
    bob.wait_for(job, "FAILED")
    assert REFUSED in bob("cat refused") and WORKER not in bob("grep -v slurmstepd refused")
    kept = {"idle", "allocated", "mixed", "completing"}
    until(lambda: set(bob.world.node_states().values()) <= kept, "no node is drained", seen=bob.world.node_states)


def test_a_job_s_own_places_are_its_user_s_to_set(bob: Researcher) -> None:
    line = 'echo "$TMPDIR:${XDG_CACHE_HOME:-none}"'
    assert bob(f"srun -n1 bash -c '{line}'").endswith(":none\n")
    own = "export TMPDIR=/tmp/own XDG_CACHE_HOME=/tmp/cache;"
    assert bob(f"{own} srun -n1 bash -c '{line}'") == "/tmp/own:/tmp/cache\n"
    job = bob.submit("-n1", "-o", "places", script=f"{own} srun bash -c '{line}'")
    bob.wait_for(job, "COMPLETED")
    assert bob("cat places") == "/tmp/own:/tmp/cache\n"


def test_a_job_that_brings_no_environment_has_its_user_s(bob: Researcher) -> None:
    """The profile prints and leaves a process running; Slurm's own method would end slurmd in a pod."""
    words = "echo words=here; (sleep 600 &); export OF_PROFILE='two words' PATH=$PATH:$HOME/bin FOO=profile TMPDIR=/tmp"
    bob("cat > .profile", stdin=f"{words}\n")
    script = 'echo "$HOME:$USER:$SHELL:$OF_PROFILE:$FOO:$TMPDIR:${PATH##*:}:$words"; srun --export=ALL hostname'
    try:
        for option, foo in (("NONE", "profile"), ("FOO=given", "given")):
            once = ("-n1", "--mem=100M", "-o", "environment", "--open-mode=truncate")
            job = bob.submit(*once, f"--export={option}", script=script)
            bob.wait_for(job, "COMPLETED")
            line = f"/home/bob:bob:/bin/bash:two words:{foo}:/tmp:/home/bob/bin:"
            assert bob("cat environment").splitlines() == [line, WORKER]
        bob("cat > .profile", stdin="setsid sleep 600 & while :; do sleep 1; done\n")
        script = "echo $HOME:$OF_PROFILE:$USER"
        job = bob.submit(*once, "--export=NONE", script=script)
        bob.wait_for(job, "COMPLETED")
        told, line = bob("cat environment").splitlines()
        assert told.startswith("minivm: your login shell (/bin/bash) gave no environment") and line == "/home/bob::bob"
    finally:
        bob("rm .profile")


def test_what_a_job_leaves_goes_with_the_pod_s_own_capabilities(bob: Researcher) -> None:
    """Deaf to TERM, in a session of its own, without the job's environment; shared memory, also System V."""
    deaf = 'trap "" TERM; while :; do sleep 1; done'
    script = f"env -i setsid bash -c '{deaf}' stray &\ndate > /dev/shm/left\nipcmk -M 4096\nsleep 1"
    job = bob.submit("-o", "/dev/null", script=script)
    bob.wait_for(job, "COMPLETED")

    def left() -> str:
        look = "ps -u bob -o args= | grep stray; ls /dev/shm; awk '$8 > 1000' /proc/sysvipc/shm | tail -n +2"
        return bob.world.cluster.exec(WORKER, ["sh", "-c", look])[1].strip()

    until(lambda: left() == "", "nothing of it is left", seen=left)


def test_a_job_that_a_leaving_worker_ends_has_the_reason_in_its_output_and_comment(
    plain: World, bob: Researcher
) -> None:
    """The drain's last seconds are for the requeue: on a busy machine the reason may fit for another job only."""
    reason = f"the pod of node {WORKER} stops"

    def ended() -> bool:
        job = bob.submit("--mem=100M", "-o", "leaves-%j.out", script="exec sleep 300")
        bob.wait_for(job, "RUNNING")
        try:
            plain.run(WORKER, "env", "MINIVM_DRAIN_SECONDS=7", "minivm", "drain")
        finally:
            plain.run(WORKER, "minivm", "resume")
            bob(f"scancel {job}")
        comments = plain.slurm("sacct", "-n", "-P", "-D", "-X", "-j", job, "-o", "state,admincomment")
        return reason in bob(f"cat leaves-{job}.out") and any(
            line.startswith("REQUEUED") and reason in line for line in comments.splitlines()
        )

    until(ended, "the reason is told", within=400)


def test_root_has_no_jobs_and_users_make_no_tokens(plain: World, bob: Researcher) -> None:
    """Slurm's own user makes tokens all the same: operators of slurmrestd need them."""
    code, text = plain.cluster.exec(LOGIN, ["sbatch", "-D", "/tmp", "--wrap", "true"])
    assert code and "error" in text, text
    refused = bob.try_("scontrol token lifespan=2000000000")
    assert refused.returncode and "SLURM_JWT=" not in refused.stdout, refused
    assert plain.slurm("scontrol", "token", "username=bob", "lifespan=9").startswith("SLURM_JWT=")


def test_the_fleets_page_reads_the_jobs_that_a_real_slurmrestd_lists(alice: Researcher) -> None:
    cluster = alice.world.cluster
    address = f"{alice.world.running('slurm-controller-0').address}:6820"
    client = SlurmClient(address, cluster.state / "keys" / "jwt_hs256.key")

    def rows() -> dict[str, JobRow]:
        table = read_table(client.jobs(), time.time(), names=True)
        assert not table.unread
        return {row.job: row for row in table.rows}

    failed = alice.submit("-J", "fails", "-o", "/dev/null", script="exit 3")
    held = alice.submit("-H", "--array=1-5%2", "-o", "/dev/null", script="true")
    killed = alice.submit("-o", "/dev/null", script="kill -SEGV $$")
    try:
        until(lambda: {rows()[failed].state, rows()[killed].state} == {"failed"}, "both have failed", seen=rows)
        seen = rows()
    finally:
        alice(f"scancel {held}")
    assert (seen[failed].name, seen[failed].user, seen[failed].why) == ("fails", "alice", "exit code 3")
    assert 0 < seen[failed].submitted <= seen[failed].started <= seen[failed].ended
    assert seen[killed].why.startswith("signal ")
    waiting = seen[f"{held}_[1-5%2]"]
    assert (waiting.state, waiting.why, waiting.started) == ("pending", "JobHeldUser", 0)


def loaded(world: World) -> list[str]:
    """List the names of a worker's processes that have the library of `slurm.fastScripts` loaded."""
    look = "cd /proc; grep -ls /launch.so [1-9]*/maps | while read -r map; do cat ${map%maps}comm; done | sort -u"
    return world.cluster.exec(WORKER, ["sh", "-c", look])[1].split()


def test_no_process_loads_the_library_of_fast_scripts_unless_the_site_sets_it(alice: Researcher) -> None:
    """Use a cluster with the chart's defaults, while a job runs."""
    job = alice.submit("-w", WORKER, "-n1", "--mem=100M", "-o", "unloaded", script="env; exec sleep 600")
    alice.wait_for(job, "RUNNING")
    try:
        until(
            lambda: f"SLURM_JOB_ID={job}\n" in alice.try_("cat unloaded").stdout, "the job has printed its environment"
        )
        assert loaded(alice.world) == []
        assert "LD_PRELOAD" not in alice.world.run(WORKER, "sh", "-c", "cat /proc/$(pidof -s slurmd)/environ")
    finally:
        alice(f"scancel {job}")
    alice.world.wait_idle()


def test_slurm_alone_loads_the_library_of_fast_scripts(bob: Researcher) -> None:
    """slurmd and slurmstepd load it; a task, its environment and every other process on the node do not."""
    job = bob.submit("-n1", "--mem=100M", "-o", "loaded", script="env; exec sleep 600")
    bob.wait_for(job, "RUNNING")
    try:
        until(lambda: f"SLURM_JOB_ID={job}\n" in bob.try_("cat loaded").stdout, "the job has printed its environment")
        until(
            lambda: loaded(bob.world) == ["slurmd", "slurmstepd"], "Slurm alone has it", seen=lambda: loaded(bob.world)
        )
        assert "LD_PRELOAD" not in bob("cat loaded")
    finally:
        bob(f"scancel {job}")


# What each says on its terminal, once it was told: salloc that it gives its allocation back, or that it was taken.
ENDS = {"srun": "forcing job termination", "salloc": "ob allocation"}
TOLD = "srun and salloc end with it"


def test_a_login_pod_that_goes_leaves_no_node_taken(plain: World, bob: Researcher, tmp_path: Path) -> None:
    """`srun --pty` and `salloc` end with the pod that they came from, and say so on their terminals."""
    cluster: LocalCluster = plain.cluster
    lines = {"srun": "srun -n1 --mem=100M --pty bash", "salloc": "salloc -n1 --mem=100M"}
    started = {}
    for name, line in lines.items():
        with (tmp_path / name).open("wb") as terminal:
            command = bob.command(line, options=("-tt",))
            started[name] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=terminal)
    try:

        def running() -> list[str]:
            return plain.slurm("squeue", "-h", "-t", "RUNNING", "-o", "%i").split()

        def shown(name: str) -> str:
            return (tmp_path / name).read_text(errors="replace")

        until(lambda: len(running()) == len(lines), "they run", seen=lambda: plain.slurm("squeue"))
        # The shell's prompt: before it, a client that is still starting its step has other last words.
        for name in lines:
            until(lambda name=name: f"bob@{WORKER}" in shown(name), f"{name} has a shell")  # type: ignore[misc]
        cluster.kubelet.stop(cluster.kubelet.list_pods()[LOGIN])
        until(lambda: running() == [], "their nodes are free", seen=running)
        for name, process in started.items():
            process.wait(timeout=PATIENCE)
            said = shown(name)
            assert TOLD in said, name
            assert ENDS[name] in said.partition(TOLD)[2], said
    finally:
        for process in started.values():
            process.kill()
        cluster.up(timeout=240)


FREEZER = Path("/sys/fs/cgroup/freezer")


@contextmanager
def frozen(world: World, words: str) -> Iterator[Callable[[], None]]:
    """Freeze the worker's process with these words in its command: no signal, not even KILL, reaches it."""
    container = world.running(WORKER).container

    def found() -> list[int]:
        every = [path for path in Path("/proc").glob("[0-9]*") if container in read(path / "cgroup")]
        return [int(path.name) for path in every if read(path / "cmdline") == words.replace(" ", "\0") + "\0"]

    until(lambda: len(found()) == 1, "the process is there", seen=found)
    (pid,) = found()
    group = FREEZER / f"{NAME}-unkillable"
    home = FREEZER / read(Path(f"/proc/{pid}/cgroup")).partition("freezer:/")[2].partition("\n")[0]
    group.mkdir(exist_ok=True)

    def thaw() -> None:
        (group / "freezer.state").write_text("THAWED")

    try:
        (group / "cgroup.procs").write_text(str(pid))
        (group / "freezer.state").write_text("FROZEN")
        yield thaw
    finally:
        thaw()
        for left in read(group / "cgroup.procs").split():
            # A process that was to be killed can end between the list and the move.
            with suppress(ProcessLookupError):
                (home / "cgroup.procs").write_text(left)
        until(lambda: not read(group / "cgroup.procs"), "nothing is left in it")
        group.rmdir()


def read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


@pytest.fixture(scope="module")
def impatient(plain: World) -> World:
    """Give a step 5 s to end, and not 180, for the last tests of the module."""
    if release_of(f"{IMAGES}/worker:latest").name == "26.05":
        pytest.skip("a step that scancel has signalled has no deadline there: its node stays COMPLETING")
    before = plain.cluster.options
    overrides = {"slurm": {"config": {"UnkillableStepTimeout": "5", "KillWait": "2"}}}
    plain.cluster.options = replace(before, overrides=merge(before.overrides, overrides))
    plain.cluster.up(timeout=240)
    limit = "UnkillableStepTimeout   = 5 sec"
    until(lambda: limit in plain.slurm("scontrol", "show", "config"), "slurmctld has it")
    # slurmd fetches it at the reconfiguration, and a step has slurmd's.
    plain.run(WORKER, "minivm", "restart", "slurmd")
    plain.wait_ready()
    return plain


def output(world: World, *command: str) -> str:
    return world.cluster.exec(WORKER, command)[1]


def reason(world: World) -> str:
    return world.slurm("sinfo", "-h", "-n", WORKER, "-o", "%T %E").strip()


needs_freezer = pytest.mark.skipif(not FREEZER.is_dir(), reason="a frozen process of cgroup v2 can be killed")


@needs_freezer
def test_a_step_that_cannot_be_killed_is_named_and_its_node_comes_back_when_it_ends(
    impatient: World, bob: Researcher
) -> None:
    job = bob.submit("-n1", "--mem=100M", "-o", "/dev/null", script="exec sleep 6543")
    bob.wait_for(job, "RUNNING")
    with frozen(impatient, "sleep 6543") as thaw:
        bob(f"scancel {job}")
        until(lambda: "Kill task failed" in reason(impatient), "Slurm drains it", seen=lambda: reason(impatient))
        until(lambda: "still: pid" in reason(impatient), "it is named", seen=lambda: reason(impatient))
        assert "(sleep) state D" in reason(impatient)
        told = "Slurm drained the node: Kill task failed"
        until(lambda: told in output(impatient, "minivm", "why"), "the pod tells of it")
        thaw()
        until(lambda: reason(impatient).startswith("idle"), "it is back", within=300, seen=lambda: reason(impatient))


@needs_freezer
def test_a_person_s_drain_outlives_a_step_that_cannot_be_killed(impatient: World, bob: Researcher) -> None:
    """slurmstepd replaces the person's reason: the broker puts it back, and lifts nothing."""
    job = bob.submit("-n1", "--mem=100M", "-o", "/dev/null", script="exec sleep 6543")
    bob.wait_for(job, "RUNNING")
    with frozen(impatient, "sleep 6543") as thaw:
        impatient.slurm("scontrol", "update", f"nodename={WORKER}", "state=drain", "reason=fan is loud, ask Ann")
        bob(f"scancel {job}")
        put_back = f"update {WORKER}: fan is loud, ask Ann"
        until(lambda: put_back in output(impatient, "minivm", "logs", "broker"), "it is put back")
        until(lambda: "fan is loud, ask Ann" in reason(impatient), "Slurm has it", seen=lambda: reason(impatient))
        thaw()
    until(lambda: reason(impatient) == "drained fan is loud, ask Ann", "it stays", seen=lambda: reason(impatient))
    impatient.slurm("scontrol", "update", f"nodename={WORKER}", "state=resume")
    until(lambda: reason(impatient).startswith("idle"), "a person ends it", seen=lambda: reason(impatient))
