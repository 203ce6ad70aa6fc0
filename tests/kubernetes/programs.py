"""The programs of a Kubernetes: built once a machine from the distribution's archive, kept by a hash of the recipe.

`MINIVM_KUBERNETES_PROGRAMS` names a directory with the programs of another release instead: `bin/` and `cni/`.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.kubernetes.errors import LabError

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# A directory with `bin` and `cni` of another release, or empty.
GIVEN = os.environ.get("MINIVM_KUBERNETES_PROGRAMS", "")
NEEDED = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl", "etcd",
          "containerd", "containerd-shim-runc-v2", "ctr", "runc", "pause")  # fmt: skip
# Never committed; a worktree may share another one's.
KEPT = Path(os.environ.get("MINIVM_KUBERNETES", ROOT / "build" / "kubernetes"))
RECIPE = (HERE / "build.sh", HERE / "pause.go")
RELEASE = "bookworm"


@dataclass(frozen=True, slots=True)
class Programs:
    """Where they are, once they are built."""

    root: Path

    @property
    def bin(self) -> Path:
        return self.root / "bin"

    @property
    def cni(self) -> Path:
        return self.root / "cni"

    @property
    def minor(self) -> int:
        """The minor release: 20 of 1.20."""
        return minor_release(self.bin / "kubectl")


@functools.cache
def minor_release(kubectl: Path) -> int:
    shown = subprocess.run([kubectl, "version", "--client", "-o", "json"], capture_output=True, text=True, check=True)
    return int(json.loads(shown.stdout)["clientVersion"]["minor"].rstrip("+"))


def programs() -> Programs:
    if GIVEN:
        return Programs(Path(GIVEN).resolve())
    digest = hashlib.sha256(platform.machine().encode())
    for part in RECIPE:
        digest.update(part.read_bytes())
    return Programs(KEPT / f"programs-{digest.hexdigest()[:12]}")


def built() -> bool:
    return programs().root.is_dir()


def refusal(release: Path = Path("/etc/os-release")) -> str:
    """Say why they cannot be built here, or return an empty text."""
    lines = release.read_text().splitlines() if release.exists() else []
    if f"VERSION_CODENAME={RELEASE}" not in lines:
        return "only Debian 12's archive holds the source of a whole Kubernetes, and this is another system"
    return ""


def build() -> Programs:
    """Return the programs, built if need be: minutes the first time, nothing later. Two calls at once build once."""
    wanted = programs()
    if GIVEN:
        check(wanted)
        return wanted
    KEPT.mkdir(parents=True, exist_ok=True)
    with locked(KEPT / "building"):
        if wanted.root.is_dir():
            return wanted
        if why := refusal():
            raise LabError("build Kubernetes", why, hint="KUBECONFIG=... names one that is there already")
        unfinished, work = KEPT / "unfinished", KEPT / "work"
        shutil.rmtree(unfinished, ignore_errors=True)
        done = subprocess.run([str(RECIPE[0]), str(unfinished), str(work)], stdout=sys.stderr)
        if done.returncode != 0:
            raise LabError("build Kubernetes", f"{RECIPE[0].name} ended with {done.returncode}; it said why above")
        # What an older recipe has built.
        for old in KEPT.glob("programs-*"):
            shutil.rmtree(old)
        unfinished.rename(wanted.root)
        remove(work)
    return wanted


def check(given: Programs) -> None:
    """Refuse a directory of programs that lacks one."""
    if lacking := [name for name in NEEDED if not (given.bin / name).is_file()]:
        hint = "`python -m tests.kubernetes build` shows a whole one: programs of Kubernetes, etcd, containerd, runc"
        raise LabError("use MINIVM_KUBERNETES_PROGRAMS", f"{given.bin} lacks {', '.join(lacking)}", hint=hint)


def beside() -> subprocess.Popen[bytes]:
    """The build, by what others leave of the processors; it ends with this process, however this one ends."""
    KEPT.mkdir(parents=True, exist_ok=True)
    # What it has started is below its own PID 1 and goes with it.
    alone = ("setpriv", "--pdeathsig", "KILL", "unshare", "--pid", "--mount-proc", "--fork", "--kill-child")
    command = (*alone, "nice", "-n", "19", sys.executable, "-m", "tests.kubernetes", "build")
    with (KEPT / "build.log").open("wb") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT)


def end(builder: subprocess.Popen[bytes]) -> None:
    """What was compiled stays for the next time."""
    builder.kill()
    builder.wait()


def remove(tree: Path) -> None:
    """Go writes its sources read-only."""
    for directory, _, _ in os.walk(tree):
        Path(directory).chmod(0o755)
    shutil.rmtree(tree, ignore_errors=True)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """The kernel opens it when its holder dies, however."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
