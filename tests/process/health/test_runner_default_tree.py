"""The scripts that every image brings: a job's places before it, and nothing of it left after it."""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from tests.process.living import alive
from tests.process.runner_world import World, compile_clients, make, resident
from tests.waiting import until

pytestmark = pytest.mark.root

ROOT = Path(__file__).resolve().parents[3]
# Nobody else's: whatever runs under it on this machine is a test's.
USER = 61235
# The tests' own may lie where only root comes to.
PYTHON = "/usr/bin/python3"


class Job:
    def __init__(self, world: World) -> None:
        self.world = world
        self.work = world.root / "work"
        self.logs = world.root / "logs"
        self.shm = world.root / "shm"
        self.tmp = world.root / "tmp"
        for place in (self.shm, self.tmp):
            place.mkdir()
            place.chmod(0o1777)
        shutil.rmtree(world.tree)
        shutil.copytree(ROOT / "scripts", world.tree)
        # The checks of this machine are not what is tested here.
        shutil.rmtree(world.tree / "health.d")
        self.environment = {
            "SLURM_JOB_UID": str(USER),
            "SLURM_JOB_GID": str(USER),
            "MINIVM_JOB_WORK": str(self.work),
            "MINIVM_JOB_LOGS": str(self.logs),
            "MINIVM_SHM": str(self.shm),
            "MINIVM_MQUEUE": str(world.root / "mqueue"),
            "MINIVM_JOB_TMP": str(self.tmp),
            "MINIVM_DCGM_JOBS": str(world.root / "dcgm"),
            "MINIVM_SYSFS": str(world.root / "sys"),
            "MINIVM_CGROUPS": str(world.root / "cgroup"),
        }

    def step(self, started: list[subprocess.Popen[bytes]], job: str) -> None:
        """Start what slurmd starts for a step: slurmstepd by its executable, as root."""
        program = self.world.root / "slurmstepd"
        if not program.exists():
            shutil.copy(str(shutil.which("sleep")), program)
        sleep(started, 0, f"slurmstepd: [{job}.0]", program=str(program))

    def run(self, kind: str, **extra: str) -> str:
        code, out, err = self.world.run(kind, **{**self.environment, **extra})
        assert code == 0, err
        record = self.world.records()[-1]
        assert record["result"] == "ok", record
        return out


@pytest.fixture(params=["alone", "resident"])
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Job]:
    """Run each script in its own Python, and by forks of the resident runner."""
    found = Job(make(tmp_path))
    if request.param == "alone":
        yield found
        return
    compile_clients(found.world)
    with resident(found.world):
        yield found
        assert not (found.world.root / "runner/missed").exists(), "each run was the resident runner's"


def begin(
    started: list[subprocess.Popen[bytes]], uid: int, *command: str, **environment: str
) -> subprocess.Popen[bytes]:
    """Start a user's process in a session of its own."""
    process = subprocess.Popen(
        command,
        env={"PATH": os.environ["PATH"], **environment},
        user=uid,
        group=uid,
        extra_groups=[],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    started.append(process)
    return process


def once_ready(process: subprocess.Popen[bytes]) -> IO[bytes]:
    """Return the output that follows the process's "ready" line."""
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process.stdout


def sleep(
    started: list[subprocess.Popen[bytes]], uid: int, name: str = "sleep", program: str = "sleep", **environment: str
) -> int:
    """Start a user's process under any name."""
    process = begin(started, uid, "bash", "-c", f"exec -a {name!r} {program} 600", **environment)
    # `exec -a` has happened when the name is there.
    command_line = Path(f"/proc/{process.pid}/cmdline")
    until(lambda: command_line.read_bytes().startswith(name.encode()), f"it is called {name}")
    return process.pid


def deaf(started: list[subprocess.Popen[bytes]], on_term: str) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    """Start a process of job 42 that TERM does not end, and return its output."""
    script = f"trap '{on_term}' TERM; echo ready; while :; do sleep 600 & wait; done"
    process = begin(started, USER, "bash", "-c", script, SLURM_JOB_ID="42")
    return process, once_ready(process)


def test_a_job_has_its_own_places_and_only_its_logs_remain(job: Job) -> None:
    job.run("prolog")
    for place in (job.work / "42", job.logs / "42"):
        status = place.stat()
        assert (status.st_uid, status.st_gid, status.st_mode & 0o777) == (USER, USER, 0o700)
    (job.work / "42/file").touch()
    (job.logs / "42/nccl.host.1.log").touch()
    job.run("epilog")
    assert not (job.work / "42").exists()
    assert (job.logs / "42/nccl.host.1.log").exists()


@pytest.mark.parametrize("kind", ["owned", "link"])
def test_root_makes_nothing_below_a_directory_that_is_somebody_s(job: Job, kind: str) -> None:
    """Its owner could put a link in the way, and would be given whatever it leads to."""
    if kind == "owned":
        job.work.mkdir()
        os.chown(job.work, USER, USER)
    else:
        (job.world.root / "elsewhere").mkdir()
        job.work.symlink_to(job.world.root / "elsewhere")
    code, _, _ = job.world.run("prolog", **job.environment)
    assert code == 0, "a broken script stops no job"
    assert any("is not root's own directory" in str(entry) for entry in job.world.records()[-1]["scripts"])
    assert not (job.work / "42").exists()


def test_root_removes_nothing_below_a_directory_that_is_somebody_s(job: Job) -> None:
    """A user who makes the directory before the first job could otherwise let root remove a link's target."""
    victim = job.world.root / "of-root"
    (victim / "precious").mkdir(parents=True)
    (victim / "precious/file").touch()
    job.work.mkdir()
    (job.work / ".ended").symlink_to(victim)
    os.chown(job.work, USER, USER)
    job.run("epilog")
    assert (victim / "precious/file").exists()


def test_a_large_place_of_a_job_s_holds_up_nobody_and_goes(job: Job) -> None:
    job.run("prolog")
    for number in range(300):
        (job.work / f"42/{number}").mkdir()
    job.run("epilog")
    ended = job.work / ".ended"
    until(lambda: not [path for path in ended.iterdir() if path.is_dir()], "another process removes it")


def test_logs_are_kept_by_size_too_the_newest_first_and_those_of_running_jobs(job: Job) -> None:
    for number in ("7", "8", "9", "42"):
        job.run("prolog", SLURM_JOB_ID=number)
        (job.logs / number / "log").write_bytes(bytes(300 << 10))
    (job.logs / ".pruned").touch()
    for number in ("8", "9"):
        job.run("epilog", SLURM_JOB_ID=number)
    assert {path.name for path in job.logs.glob("[0-9]*")} == {"7", "8", "9", "42"}, "looked at just now"
    (job.logs / ".pruned").unlink()
    job.run("epilog", MINIVM_JOB_LOGS_MIB="1")
    until(lambda: not (job.logs / "8").exists(), "of those whose jobs have ended the oldest goes")
    alone = os.open(job.work / ".ended", os.O_RDONLY)
    fcntl.flock(alone, fcntl.LOCK_EX)  # held by what removes, to its end
    os.close(alone)
    assert {path.name for path in job.logs.glob("[0-9]*")} == {"7", "9", "42"}, "and no more than must"


def test_a_place_that_is_empty_is_not_first_put_aside(job: Job) -> None:
    """Each of the two waits for a busy disk, and most jobs leave nothing."""
    job.run("prolog")
    job.run("epilog")
    assert os.listdir(job.work) == []  # noqa: PTH208  # what is aside is hidden


NO_ROOM = """
import os, runpy, sys
fork, asked = os.fork, []
def refuse():
    asked.append(1)
    if len(asked) > 1:
        raise BlockingIOError(11, "no more processes")
    return fork()
os.fork = refuse
try:
    runpy.run_path(sys.argv[1], run_name="__main__")
finally:
    os.write(1, b"over\\n")
"""


def test_where_no_process_can_be_had_only_one_goes_on(tmp_path: Path) -> None:
    """The process that was to remove a job's place is a fork of whoever does the run."""
    (tmp_path / "work/42/inner").mkdir(parents=True)
    places = {"MINIVM_JOB_WORK": f"{tmp_path}/work", "MINIVM_JOB_LOGS": f"{tmp_path}/logs"}
    said = subprocess.run(
        [PYTHON, "-c", NO_ROOM, str(ROOT / "scripts/epilog.d/20-job-directories")],
        env={**places, "MINIVM_SCRIPTS_TREE": str(ROOT / "scripts"), "SLURM_JOB_ID": "42", "SLURM_JOB_UID": str(USER)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert said.stdout == "over\n", said


COUNTED = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
import jobs
look = jobs.look
def counted():
    os.write(1, b"looked\\n")
    return look()
jobs.look = counted
os.write(1, b"asks\\n")
assert os.getpid() in jobs.processes()
"""


def test_of_many_that_look_at_once_one_or_two_do_so_for_all(job: Job) -> None:
    """Each is in what it gets: it is of after he has asked."""
    shared = job.world.root / "shared"
    shared.mkdir(0o700)
    environment = {**job.world.environment, **job.environment, "MINIVM_RUNNER": str(shared)}
    command = [PYTHON, "-IS", "-c", COUNTED, str(job.world.tree / "lib")]
    with (shared / "processes").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        asking = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) for _ in range(12)]
        for one in asking:
            assert one.stdout is not None and one.stdout.readline() == b"asks\n"
        # The patience of the first begins about now, and is for a second.
    said = b"".join(one.communicate(timeout=60)[0] for one in asking)
    assert [one.returncode for one in asking] == [0] * 12
    assert 1 <= said.count(b"looked") < 12
    # What somebody else could have written is not believed.
    shared.chmod(0o755)
    alone = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    assert alone.stdout == b"asks\nlooked\n"


def test_tasks_are_told_their_places(job: Job) -> None:
    job.run("prolog")
    out = job.run("task_prolog")
    assert f"export TMPDIR={job.work}/42\n" in out
    assert f"export TRITON_CACHE_DIR={job.work}/42/cache/triton\n" in out


def test_a_task_s_own_places_win(job: Job) -> None:
    """A user sets these in a shell or batch script; a job submitted from within a job sets nothing."""
    job.run("prolog")
    chosen = {"TMPDIR": "/scratch", "TRITON_CACHE_DIR": "/home/a/triton", "CUDA_CACHE_PATH": f"{job.work}/41/cuda"}
    out = job.run("task_prolog", **chosen)
    assert "TMPDIR" not in out and "TRITON_CACHE_DIR" not in out
    assert f"export CUDA_CACHE_PATH={job.work}/42/cache/cuda\n" in out


def test_downloads_and_nccl_s_words_stay_where_people_look(job: Job) -> None:
    job.run("prolog")
    out = job.run("task_prolog", NCCL_DEBUG="INFO", XDG_CACHE_HOME="/home/a/.cache")
    assert not [name for name in ("XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME", "NCCL_DEBUG") if name in out]
    assert "XDG_CACHE_HOME" not in job.run("task_prolog")


def test_a_site_shares_caches_by_its_tree(job: Job) -> None:
    with (job.world.tree / "lib/caches.env").open("a") as file:
        file.write("HF_HOME=/shared/hf\n")
    assert "export HF_HOME=/shared/hf\n" in job.run("task_prolog")
    assert "HF_HOME" not in job.run("task_prolog", HF_HOME="/home/a/hf")


def test_a_task_s_environment_changes_no_script(job: Job) -> None:
    """The variables get other names: a user's broken BASH_ENV affects only the user's own task."""
    job.run("prolog")
    (job.world.root / "bash_env").write_text("echo print told; exit 7\n")
    assert "told" not in job.run("task_prolog", BASH_ENV=str(job.world.root / "bash_env"))


def test_a_container_that_nobody_can_run_is_refused_in_words(job: Job) -> None:
    """Slurm would start the program outside of any, and say that all is well."""
    code, out, _ = job.world.run("task_prolog", **job.environment, SLURM_CONTAINER="/home/a/bundle")
    assert code == 1
    (line,) = out.splitlines()
    assert line.startswith("print minivm: --container: this cluster has no container runtime")
    assert job.world.records()[-1]["scripts"][-1]["result"] == "refused"
    assert "broken" not in job.world.records()[-1], "the scripts are well, and no commit is held back for it"
    (job.world.root / "oci.conf").touch()
    job.run("task_prolog", SLURM_CONTAINER="/home/a/bundle", MINIVM_SLURM_CONF=str(job.world.root))


def test_a_container_is_refused_on_a_node_whose_image_has_none(job: Job) -> None:
    """Beside others that have: slurmstepd would only say that a shell has not found something."""
    shutil.copy(ROOT / "cluster/chart/files/oci.conf", job.world.root / "oci.conf")
    asked = {"SLURM_CONTAINER": "debian:13", "MINIVM_SLURM_CONF": str(job.world.root)}
    absent = {"MINIVM_CONTAINER_PROGRAM": "/nothing/container"}
    code, line, _ = job.world.run("task_prolog", **job.environment, **asked, **absent)
    assert code == 1 and "this node's image has no containers (worker-containers has them)" in line
    job.run("task_prolog", MINIVM_CONTAINER_PROGRAM="/bin/true", **asked)


def test_each_gpu_s_file_names_its_jobs(job: Job) -> None:
    folder = job.world.root / "dcgm"
    job.run("prolog", SLURM_JOB_GPUS="0,3")
    job.run("prolog", SLURM_JOB_GPUS="3", SLURM_JOB_ID="43")
    assert {path.name: path.read_text().split() for path in folder.iterdir()} == {"0": ["42"], "3": ["42", "43"]}
    job.run("epilog", SLURM_JOB_GPUS="0,3")
    assert {path.name: path.read_text().split() for path in folder.iterdir()} == {"3": ["43"]}


def port(root: Path, name: str, layer: str, state: str = "4: ACTIVE") -> None:
    folder = root / f"sys/class/infiniband/{name}/ports/1"
    folder.mkdir(parents=True)
    (folder / "link_layer").write_text(layer + "\n")
    (folder / "state").write_text(state + "\n")


def test_nccl_is_set_for_the_fabric_and_the_user_s_choice_wins(job: Job) -> None:
    assert "export NCCL_SOCKET_IFNAME=eth0\n" in job.run("task_prolog")
    port(job.world.root, "mlx5_0", "InfiniBand")
    port(job.world.root, "mlx5_1", "InfiniBand", "1: DOWN")
    port(job.world.root, "mlx5_2", "InfiniBand")
    out = job.run("task_prolog")
    assert "export NCCL_IB_HCA==mlx5_0,mlx5_2\n" in out
    assert "NCCL_SOCKET_IFNAME" not in out
    assert "NCCL_IB_HCA" not in job.run("task_prolog", NCCL_IB_HCA="mlx5_2")
    shutil.rmtree(job.world.root / "sys")
    port(job.world.root, "mlx5_0", "Ethernet")
    assert "export NCCL_IB_GID_INDEX=3\n" in job.run("task_prolog")


def test_what_a_job_leaves_is_ended_and_removed(job: Job, started: list[subprocess.Popen[bytes]]) -> None:
    left = sleep(started, USER)
    stubborn, _ = deaf(started, "")
    other = sleep(started, USER + 1)
    (job.shm / "psm_shm.1").touch()
    os.chown(job.shm / "psm_shm.1", USER, USER)
    (job.shm / "somebody.else").touch()
    job.run("epilog")
    assert not alive(left)
    assert not alive(stubborn.pid)
    assert alive(other)
    assert [path.name for path in job.shm.iterdir()] == ["somebody.else"]


def test_beside_another_job_only_what_carries_the_job_s_id_goes(
    job: Job, started: list[subprocess.Popen[bytes]]
) -> None:
    job.step(started, "99")
    ours = sleep(started, USER, SLURM_JOB_ID="42")
    theirs = sleep(started, USER, SLURM_JOB_ID="99")
    (job.shm / "shared").touch()
    os.chown(job.shm / "shared", USER, USER)
    job.run("epilog")
    assert not alive(ours)
    assert alive(theirs)
    assert (job.shm / "shared").exists()


def test_a_job_that_left_nothing_costs_no_look_at_all_processes(job: Job) -> None:
    """The kernel tells that the user has no process here."""

    def nobody() -> bool:
        """Check that the user has no process; the kernel also counts ended ones that their parent has not reaped."""
        try:
            os.getpriority(os.PRIO_USER, USER)
        except ProcessLookupError:
            return True
        return False

    shared = job.world.root / "runner"
    shared.mkdir(mode=0o700, exist_ok=True)

    def looked() -> bool:
        (shared / "processes").unlink(missing_ok=True)
        job.run("prolog")
        until(nobody, "nobody of the user's is here")
        job.run("epilog")
        return (shared / "processes").exists()

    # On a busy machine somebody may be counted who has ended.
    until(lambda: not looked(), "an epilog that looks at nobody")
    stray = begin([], USER, "sleep", "600")
    job.run("epilog")
    assert (shared / "processes").exists()
    assert stray.wait(120) == -signal.SIGTERM


def cgroup(job: Job, name: str) -> Path:
    """Make a cgroup as Slurm names it in each version; here only the name matters."""
    folder = job.world.root / "cgroup" / name
    folder.mkdir(parents=True)
    return folder


SLURMS = {"v1": f"freezer/slurm_node-0/uid_{USER}", "v2": "system.slice/node-0_slurmstepd.scope"}


@pytest.mark.parametrize("version", SLURMS)
def test_what_is_in_another_job_s_cgroup_is_not_asked_whose_it_is(
    job: Job, started: list[subprocess.Popen[bytes]], version: str
) -> None:
    """The process's environment names the ended job, but its cgroup, which it cannot leave, is the other job's."""
    for number in ("42", "43"):
        job.run("prolog", SLURM_JOB_ID=number)
    cgroup(job, f"{SLURMS[version]}/job_43")
    theirs = sleep(started, USER, SLURM_JOB_ID="42")
    job.run("epilog")
    assert alive(theirs)
    job.run("epilog", SLURM_JOB_ID="43")
    assert not alive(theirs), "of the last everything goes"


@pytest.mark.parametrize("there", [(), ("job_42",), ("job_42", "job_43"), ("job_44",)])
@pytest.mark.parametrize("version", SLURMS)
def test_cgroups_that_say_nothing_of_both_jobs_are_not_believed(
    job: Job, started: list[subprocess.Popen[bytes]], version: str, there: tuple[str, ...]
) -> None:
    """Left over from another configuration, or the ended job's own is still there."""
    for number in ("42", "43"):
        job.run("prolog", SLURM_JOB_ID=number)
    job.run("prolog", SLURM_JOB_ID="44", SLURM_JOB_UID=str(USER + 1), SLURM_JOB_GID=str(USER + 1))
    for name in there:
        cgroup(job, f"{SLURMS[version]}/{name}")
    ours = sleep(started, USER, SLURM_JOB_ID="42")
    theirs = sleep(started, USER, SLURM_JOB_ID="43")
    job.run("epilog")
    assert not alive(ours)
    assert alive(theirs)


def test_a_job_that_starts_while_the_last_one_is_cleaned_up_is_left_alone(
    job: Job, started: list[subprocess.Popen[bytes]]
) -> None:
    """The next job is of the same user, and begins between the TERM and the KILL."""
    clean_up = job.world.tree / "epilog.d/10-clean-up"
    text = clean_up.read_text()
    # On a busy machine the next job takes a while to begin.
    for name, before, seconds in (("PATIENCE_TERM", 2.0, 6.0), ("PATIENCE_ALL", 5.0, 12.0)):
        assert f"{name} = {before}\n" in text
        text = text.replace(f"{name} = {before}\n", f"{name} = {seconds}\n")
    clean_up.write_text(text)
    stubborn, said = deaf(started, "echo told")
    epilog = job.world.start("epilog", **job.environment)
    assert said.readline() == b"told\n"
    job.step(started, "99")
    theirs = sleep(started, USER, SLURM_JOB_ID="99")
    (job.shm / "theirs").touch()
    os.chown(job.shm / "theirs", USER, USER)
    _, err = epilog.communicate(timeout=60)
    assert epilog.returncode == 0, err
    assert not alive(stubborn.pid)
    assert alive(theirs)
    assert (job.shm / "theirs").exists()


def test_system_v_memory_of_the_job_s_user_is_removed(job: Job) -> None:
    made = subprocess.run(
        ["ipcmk", "-M", "4096"], user=USER, group=USER, extra_groups=[], capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    number = made.stdout.split()[-1]
    assert any(row.split()[1] == number for row in Path("/proc/sysvipc/shm").read_text().splitlines()[1:])
    job.run("epilog")
    assert not any(row.split()[1] == number for row in Path("/proc/sysvipc/shm").read_text().splitlines()[1:])


def test_nothing_of_root_s_is_ever_cleaned_up(job: Job) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env={"SLURM_JOB_ID": "42"})
    try:
        job.run("epilog", SLURM_JOB_UID="0")
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


# Deaf to TERM, and each process lives for a moment only: a list of processes is old before it is read.
HYDRA = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
while True:
    if os.fork():
        time.sleep(0.002)
        os._exit(0)
    os.setsid()
"""
# Exchanges a directory and a link to another one for ever.
RACER = """
import ctypes, sys
libc, directory, link = ctypes.CDLL(None), sys.argv[1].encode(), sys.argv[2].encode()
print("ready", flush=True)
while True:
    libc.renameat2(-100, directory, -100, link, 2)
"""


def hostile(
    started: list[subprocess.Popen[bytes]], script: str, *arguments: str, uid: int = USER
) -> subprocess.Popen[bytes]:
    process = begin(started, uid, PYTHON, "-c", script, *arguments)
    once_ready(process)
    return process


def owned(path: Path, uid: int = USER) -> Path:
    os.chown(path, uid, uid)
    return path


def open_to_all(path: Path) -> None:
    """Open the path to all users, as /dev/shm is: pytest keeps its directories to root."""
    for above in list(path.parents)[:-2]:
        above.chmod(above.stat().st_mode | 0o011)


def test_a_process_that_calls_itself_slurmstepd_keeps_nothing_from_being_cleaned_up(
    job: Job, started: list[subprocess.Popen[bytes]]
) -> None:
    """Any program that runs as root by its file's mode can be called by any name, and waits for a password, say."""
    program = job.world.root / "as-root"
    shutil.copy(str(shutil.which("sleep")), program)
    program.chmod(0o4755)
    open_to_all(program)
    forger = sleep(started, USER, "slurmstepd: [999.0]", program=str(program))
    assert Path(f"/proc/{forger}").stat().st_uid == 0
    stray = sleep(started, USER)
    (job.shm / "left").touch()
    owned(job.shm / "left")
    job.run("epilog")
    assert not alive(forger)
    assert not alive(stray)
    assert not (job.shm / "left").exists()


def test_who_forks_faster_than_one_can_look_is_ended(job: Job, started: list[subprocess.Popen[bytes]]) -> None:
    said = hostile(started, HYDRA).stdout
    assert said is not None

    def silent() -> bool:
        """Check that the last process that could still write has ended."""
        return bool(select.select([said], [], [], 0)[0]) and said.read(1) == b""

    try:
        job.run("epilog")
        until(silent, "none of them is left")
    finally:
        end = f"import os; os.setresuid({USER}, {USER}, {USER}); os.kill(-1, 9)"
        subprocess.run([PYTHON, "-c", end], capture_output=True)


def test_a_link_that_is_exchanged_for_a_directory_leads_root_nowhere(
    job: Job, started: list[subprocess.Popen[bytes]]
) -> None:
    """Another user, whose processes are not ended first, may swap a path in a shared directory."""
    names = [f"file{number}" for number in range(3000)]
    outer, victim = job.shm / "outer", job.world.root / "of-root"
    (outer / "inner").mkdir(parents=True)
    victim.mkdir()
    for name in names:
        (outer / "inner" / name).touch()
        owned(outer / "inner" / name)
        (victim / name).touch()
    owned(outer / "inner")
    owned(outer).chmod(0o777)
    (outer / "link").symlink_to(victim)
    open_to_all(job.shm)
    racer = hostile(started, RACER, str(outer / "inner"), str(outer / "link"), uid=USER + 1)
    job.run("epilog")
    assert sorted(path.name for path in victim.iterdir()) == sorted(names)
    racer.kill()
    racer.wait()
    job.run("epilog")
    assert list(job.shm.iterdir()) == []
    assert len(list(victim.iterdir())) == len(names)


def test_directories_go_however_deep_and_closed(job: Job) -> None:
    make = """
import os, sys
os.chdir(sys.argv[1])
for _ in range(1200):
    os.mkdir("d")
    open("f", "w").close()
    above = os.open(".", os.O_RDONLY)
    os.chdir("d")
    os.fchmod(above, 0)
    os.close(above)
os.chmod(".", 0)
"""
    (job.shm / "deep").mkdir()
    owned(job.shm / "deep")
    open_to_all(job.shm)
    subprocess.run([PYTHON, "-c", make, str(job.shm / "deep")], check=True, user=USER, group=USER)
    try:
        job.run("epilog")
        assert list(job.shm.iterdir()) == []
    finally:
        # pytest itself could not remove it.
        subprocess.run(["rm", "-rf", str(job.shm / "deep")], check=True)


TREES = """
import os, sys
os.chdir(sys.argv[1])
os.makedirs("mine/inner")
open("mine/inner/file", "w").close()
os.chmod("mine", 0)
open("file", "w").close()
os.symlink("/etc", "link")
"""


def test_temporary_files_go_with_the_users_last_job(job: Job) -> None:
    open_to_all(job.tmp)
    subprocess.run([PYTHON, "-c", TREES, str(job.tmp)], check=True, user=USER, group=USER)
    (job.tmp / "theirs").touch()
    owned(job.tmp / "theirs", USER + 1)
    for number in ("42", "43"):
        job.run("prolog", SLURM_JOB_ID=number)
    job.run("epilog")
    assert {path.name for path in job.tmp.iterdir()} == {"mine", "file", "link", "theirs"}, "another job needs them"
    job.run("epilog", SLURM_JOB_ID="43")
    assert not [path for path in job.tmp.iterdir() if path.name in ("mine", "file", "link")]
    until(lambda: [path.name for path in job.tmp.iterdir()] == ["theirs"], "another process removes it")
    assert Path("/etc/passwd").exists()


def test_temporary_files_go_from_a_disk_without_room_for_another_directory(job: Job) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,nr_inodes=6,mode=1777", "tmp", job.tmp], check=True)
    try:
        open_to_all(job.tmp)
        script = "cd $1 && mkdir a && touch a/b c d; touch e f; true"
        subprocess.run(["sh", "-c", script, "-", str(job.tmp)], check=True, user=USER, group=USER)
        assert os.statvfs(job.tmp).f_ffree == 0
        job.run("epilog")
        assert list(job.tmp.iterdir()) == []
    finally:
        subprocess.run(["umount", "-l", job.tmp], check=True)


def test_message_queues_go_too(job: Job) -> None:
    """A directory stands in for the kernel's, which lists them as files and lets their owner remove them."""
    queues = job.world.root / "mqueue"
    queues.mkdir()
    queues.chmod(0o1777)
    for name, uid in (("ours", USER), ("theirs", USER + 1)):
        (queues / name).touch()
        owned(queues / name, uid)
    open_to_all(queues)
    job.run("epilog")
    assert [path.name for path in queues.iterdir()] == ["theirs"]


def test_another_user_s_job_keeps_nothing(job: Job, started: list[subprocess.Popen[bytes]]) -> None:
    job.run("prolog")
    job.run("prolog", SLURM_JOB_ID="43", SLURM_JOB_UID=str(USER + 1), SLURM_JOB_GID=str(USER + 1))
    job.step(started, "43")
    stray, theirs = sleep(started, USER), sleep(started, USER + 1, SLURM_JOB_ID="43")
    for name, uid in (("ours", USER), ("theirs", USER + 1)):
        (job.shm / name).touch()
        owned(job.shm / name, uid)
    job.run("epilog")
    assert not alive(stray)
    assert alive(theirs)
    assert [path.name for path in job.shm.iterdir()] == ["theirs"]


def test_of_two_jobs_that_end_together_one_cleans_up(job: Job, started: list[subprocess.Popen[bytes]]) -> None:
    for number in ("42", "43"):
        job.run("prolog", SLURM_JOB_ID=number)
    stray = sleep(started, USER)
    both = [job.world.start("epilog", **job.environment, SLURM_JOB_ID=number) for number in ("42", "43")]
    for epilog in both:
        _, err = epilog.communicate(timeout=60)
        assert epilog.returncode == 0, err
    assert not alive(stray)
    assert [path.name for path in job.work.iterdir() if path.name.isdigit()] == []


def test_a_job_without_steps_keeps_its_user_s_processes(job: Job, started: list[subprocess.Popen[bytes]]) -> None:
    """An allocation that somebody entered by ssh."""
    for number in ("42", "43"):
        job.run("prolog", SLURM_JOB_ID=number)
    theirs = sleep(started, USER)
    job.run("epilog")
    assert alive(theirs)
    job.run("epilog", SLURM_JOB_ID="43")
    assert not alive(theirs)
