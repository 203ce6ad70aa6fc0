"""A node's image on a machine without GPU and fabric, which is every machine that tests it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from testinfra.host import Host  # type: ignore[import-untyped]  # ships no types

from images.architectures import read_own as arch
from images.archive import wheels
from images.archive.lock import LockContext
from images.archive.wheels import Wheel
from images.definition.load import load
from images.definition.spec import BuildChoice
from images.settings import BuildSettings
from tests.container.conftest import docker, image_of, with_munge
from tests.slurm import STARTS_SCRIPTS_BY, has_pmix, labels, release_of

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

ROOT = Path(__file__).resolve().parents[3]
PLUGINS = "/usr/lib/x86_64-linux-gnu/slurm-wlm"
LIBRARIES = "/usr/lib/x86_64-linux-gnu"


@pytest.fixture
def worker(idle: Callable[[str], Host]) -> Host:
    return idle("worker")


def in_python(host: Host, program: str) -> str:
    quoted = program.replace("'", "'\\''")
    return str(host.check_output(f"python3 -I -c '{quoted}'"))


@pytest.fixture
def gpu() -> str:
    """Return the GPU plug-in that this release's packages have."""
    return release_of(image_of("worker")).gpu


def test_the_plugin_for_gpus_loads_as_slurm_loads_it(worker: Host, gpu: str) -> None:
    """Every symbol resolved: Slurm's own from libslurmfull, the GPU's from NVML where it asks that."""
    program = f"""
import ctypes
for name in ("{PLUGINS}/libslurmfull.so", "libnvidia-ml.so.1"):
    ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
import os
plugin = ctypes.CDLL("{PLUGINS}/gpu_{gpu}.so", mode=os.RTLD_NOW)
print(ctypes.c_char_p.in_dll(plugin, "plugin_type") and ctypes.string_at(ctypes.addressof(
    ctypes.c_char.in_dll(plugin, "plugin_type"))).decode())
"""
    assert in_python(worker, program) == f"gpu/{gpu}"


def test_this_slurm_starts_scripts_by_the_word_that_is_looked_for(worker: Host) -> None:
    """With another word, Slurm would silently start itself anew for each script, as if the library were absent."""
    assert worker.run(f"grep -qa {STARTS_SCRIPTS_BY} {PLUGINS}/libslurmfull.so").rc == 0


# What each says once it is loaded, and of no GPU.
SAID = {
    "nvml": ("GPU NVML plugin loaded", "0 GPU system device(s) detected"),
    "nvidia": ("loaded GPU Nvidia plugin",),
}


def test_slurmd_asks_it_and_says_that_it_finds_no_gpu(worker: Host, gpu: str) -> None:
    """AutoDetect reaches the plugin: a Slurm built without it says that it has none, or nothing."""
    configuration = with_munge(worker, "GresTypes=gpu")
    worker.check_output(f"printf 'AutoDetect={gpu}\\n' > /tmp/conf/gres.conf")
    said = worker.run(f"SLURM_CONF={configuration} slurmd -G -vv")
    text = said.stdout + said.stderr
    for words in SAID[gpu]:
        assert words in text, text


def test_the_drivers_own_nvml_wins_over_the_packaged_one(worker: Host) -> None:
    """On a GPU node the container runtime mounts the host driver's library here and runs ldconfig."""
    packaged = worker.check_output(f"readlink -f {LIBRARIES}/libnvidia-ml.so.1")
    worker.check_output(f"cp {packaged} {LIBRARIES}/libnvidia-ml.so.999.1 && ldconfig")
    try:
        assert worker.check_output(f"readlink -f {LIBRARIES}/libnvidia-ml.so.1") == f"{LIBRARIES}/libnvidia-ml.so.999.1"
    finally:
        worker.check_output(f"rm {LIBRARIES}/libnvidia-ml.so.999.1 && ln -sf {packaged} {LIBRARIES}/libnvidia-ml.so.1")


@pytest.mark.parametrize(
    "library",
    ["libcudart.so.13", "libnccl.so.2", "libpmix.so.2", "libibverbs.so.1", "libucp.so.0", "libmpi.so.40"],
)
def test_the_library_loads_with_all_its_symbols(worker: Host, library: str) -> None:
    program = f'import ctypes, os; print(ctypes.CDLL("{library}", mode=os.RTLD_NOW)._name)'
    assert in_python(worker, program) == library


def test_slurm_starts_mpi_through_pmix_or_the_image_says_that_it_does_not(worker: Host) -> None:
    listed = worker.run(f"SLURM_CONF={with_munge(worker)} srun --mpi=list")
    image = image_of("worker")
    assert ("pmix" in listed.stdout + listed.stderr) == has_pmix(image)
    assert ("pmix" in json.loads(labels(image)["io.minivm.absent"])) != has_pmix(image)


def test_mpi_passes_messages(worker: Host) -> None:
    """UCX without its ROCm plug-in still carries Open MPI."""
    program = (
        "import ctypes; m = ctypes.CDLL('libmpi.so.40', mode=ctypes.RTLD_GLOBAL); m.MPI_Init(None, None);"
        "o = ctypes.addressof(ctypes.c_char.in_dll(m, 'ompi_mpi_comm_world'));"
        "t = ctypes.addressof(ctypes.c_char.in_dll(m, 'ompi_mpi_int'));"
        "s = ctypes.addressof(ctypes.c_char.in_dll(m, 'ompi_mpi_op_sum'));"
        "a, b = ctypes.c_int(21), ctypes.c_int(0);"
        "P = ctypes.c_void_p;"
        "m.MPI_Allreduce(P(ctypes.addressof(a)), P(ctypes.addressof(b)), 1, P(t), P(s), P(o));"
        "print('sum', b.value); m.MPI_Finalize()"
    )
    quoted = program.replace('"', '\\"')
    # Asked for by name and on shared memory: by itself Open MPI takes UCX only where there is a fabric.
    options = "--mca pml ucx --mca pml_ucx_tls any --mca pml_ucx_devices any"
    said = worker.run(f'mpirun --allow-run-as-root --oversubscribe -np 2 {options} python3 -I -c "{quoted}"')
    assert said.stdout.split("\n").count("sum 42") == 2, said.stderr


def test_the_fabrics_tools_run_and_say_that_there_is_none(worker: Host) -> None:
    said = worker.run("ibv_devinfo")
    assert said.rc != 0 and "IB device" in said.stdout + said.stderr
    assert "Version" in worker.run("ib_write_bw --version").stdout
    worker.check_output("ibstat -V")


def test_the_all_reduce_program_says_that_there_is_no_gpu(worker: Host) -> None:
    said = worker.run("minivm-allreduce")
    assert said.rc == 3, said.stderr
    assert said.stdout == "" and said.stderr.startswith("minivm-allreduce: no GPU: ")


def test_the_all_reduce_program_opens_its_libraries(worker: Host) -> None:
    versions = json.loads(worker.check_output("minivm-allreduce --libraries"))
    assert versions["cuda_runtime"] >= 13000 and versions["nccl"] >= 23000


def locked_wheels(group: str) -> tuple[Wheel, ...]:
    """Return the lock's wheels of a group of the default CUDA, on this machine."""
    definition = load(ROOT)
    variant = definition.versions.variants["debian"]
    place = LockContext(
        ROOT, definition, BuildChoice("debian", variant.slurm, variant.cuda, variant.releases[0]), BuildSettings()
    )
    cuda = wheels.choose_cuda(place)
    assert cuda is not None
    locked = wheels.read(place, cuda)
    assert locked is not None
    return locked.of(group, arch())


def test_cuda_and_nccl_are_the_locked_versions_by_their_own_word(worker: Host) -> None:
    """Loaded, and asked: without a GPU and without a driver."""
    program = """
import ctypes
found = ctypes.c_int()
for library, function in (("libcudart.so.13", "cudaRuntimeGetVersion"), ("libnccl.so.2", "ncclGetVersion")):
    assert getattr(ctypes.CDLL(library), function)(ctypes.byref(found)) == 0
    print(found.value)
"""
    runtime, nccl = map(int, in_python(worker, program).split())
    (locked_runtime,), (locked_nccl,) = locked_wheels("runtime"), locked_wheels("nccl")
    assert f"{runtime // 1000}.{runtime % 1000 // 10}" == ".".join(locked_runtime.version.split(".")[:2])
    assert f"{nccl // 10000}.{nccl // 100 % 100}.{nccl % 100}" == locked_nccl.version


def test_a_worker_has_of_cuda_what_runs_and_nothing_to_compile_with(worker: Host) -> None:
    listed = worker.check_output("cd /usr/local/cuda && find . -type f").split()
    assert sorted(listed) == ["./lib64/libcudart.so.13", "./lib64/libnccl.so.2"]
    assert worker.check_output("readlink -f /usr/local/cuda/lib") == worker.check_output(
        "readlink -f /usr/local/cuda/lib64"
    )
    for name in ("nvidia-cuda-runtime", "nvidia-nccl-cu13"):
        assert worker.file(f"/usr/share/doc/{name}/License.txt").size > 1000


def test_the_image_says_where_its_cuda_is_from() -> None:
    labels = json.loads(docker("inspect", "--format", "{{json .Config.Labels}}", image_of("worker")))
    wanted = {wheel.wanted for group in ("runtime", "nccl") for wheel in locked_wheels(group)}
    assert set(labels["io.minivm.wheels"].split()) == wanted


def test_the_sbom_has_the_wheels_by_checksum(worker: Host) -> None:
    document = json.loads(worker.file("/usr/share/minivm/sbom.spdx.json").content_string)
    found = {
        (package["name"], package["versionInfo"], package["checksums"][0]["checksumValue"])
        for package in document["packages"]
        if package.get("externalRefs", [{}])[0].get("referenceLocator", "").startswith("pkg:pypi/")
    }
    assert found == {(w.name, w.version, w.sha256) for group in ("runtime", "nccl") for w in locked_wheels(group)}


def test_ssh_to_a_node_belongs_to_a_job(worker: Host) -> None:
    sshd = worker.file("/etc/pam.d/sshd").content_string.splitlines()
    account = [line for line in sshd if line.startswith(("account", "@include"))]
    assert account[-1] == "@include slurm-adopt", "it has to be the last of the account modules"
    assert "pam_slurm_adopt.so" in worker.file("/etc/pam.d/slurm-adopt").content_string


def test_slurmd_describes_the_machine(worker: Host) -> None:
    assert worker.check_output("slurmd -C").startswith("NodeName=")


@pytest.mark.parametrize("hook", ["prolog", "epilog", "task_prolog", "health"])
def test_slurms_hooks_run_the_scripts_also_without_the_resident_runner(worker: Host, hook: str) -> None:
    """slurm.conf looks for small programs there, which run the scripts themselves when no runner answers."""
    file = worker.file(f"/usr/libexec/minivm/{hook}")
    assert (file.mode & 0o777, file.user) == (0o755, "root")
    # Static: what links a program when it starts took longer than the program. No interpreter is a tenth of that.
    assert worker.check_output(f"head -c 4 {file.path}") == "\x7fELF" and file.size < 1 << 20
    done = worker.run(f"env -i SLURM_JOB_ID=7 SLURM_JOB_UID=0 /usr/libexec/minivm/{hook}")
    assert done.rc == 0, done.stderr
    record = json.loads(worker.check_output("tail -n1 /var/log/minivm/runs.jsonl"))
    assert (record["kind"], record["result"], record["commit"]) == (hook, "ok", "zero"), record
