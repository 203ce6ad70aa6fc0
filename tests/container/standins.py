"""The stand-ins of the nvidia variant: the packages, tarballs and repositories that its layers ask for, tiny.

Every name that the definition asks for exists; those that a layer's `verify` runs answer. See `archive.py` for what
stand-ins prove and what not.
"""

from __future__ import annotations

import io
import shutil
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.container.archive import EPOCH, Standin

LIB = "usr/lib/x86_64-linux-gnu"
# A tiny real library of glibc's; with its name replaced it is one that ldconfig lists under another.
TEMPLATE, TEMPLATE_NAME = Path("/lib/x86_64-linux-gnu/libutil.so.1"), b"libutil.so.1"

# A program that is linked to something, for whoever asks ldd.
BINARY = Path("/bin/true")
# This machine's own make, which needs nothing but libc.
MAKE = Path(shutil.which("make") or "/usr/bin/make")
# Above every real version: the base's own packages break older ones of some of these names.
NEWEST = "99:1.0"
SAYS = "#!/bin/sh\necho '{} stand-in'\n"
# Finds what `-o` names and makes it a program that can say its version.
COMPILER = """#!/bin/sh
while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; shift; done
printf '#!/bin/sh\\necho stand-in\\n' > "$out"
chmod 755 "$out"
"""


def library(name: str) -> bytes:
    """Make a shared library that ldconfig lists as `name`, of twelve letters as the template's."""
    assert len(name) == len(TEMPLATE_NAME), name
    return TEMPLATE.read_bytes().replace(TEMPLATE_NAME, name.encode())


def programs(*paths: str) -> dict[str, str]:
    return {path: SAYS.format(path.rpartition("/")[2]) for path in paths}


@dataclass(frozen=True, slots=True)
class Repositories:
    """Content of each repository; every requested name that is not the vendors' is the distribution's."""

    ubuntu: tuple[Standin, ...]
    cuda: tuple[Standin, ...]
    doca: tuple[Standin, ...]


def repositories(asked: Iterable[str]) -> Repositories:
    cuda = [
        Standin("cuda-cudart-13-0", "13.0.1", {f"{LIB}/libcudart.so": library("libcudart.so")}),
        Standin("libnccl2", "2.27-cuda13", {f"{LIB}/libnccl.so.2": library("libnccl.so.2")}),
        Standin("cuda-nvml-dev-13-0", "13.0.1", {"usr/local/cuda/include/nvml.h": "/* stand-in */\n"}),
        Standin("datacenter-gpu-manager-4-cuda13", "4.4", programs("usr/bin/dcgmi")),
    ]
    doca = [
        # Older than the distribution's: only the pin brings it in.
        Standin("rdma-core", "24.10-doca", {"usr/share/doc/rdma-core/from": "doca\n"}),
        Standin(
            "doca-ofed-userspace",
            "3.1.0",
            {
                "usr/bin/ibv_devinfo": BINARY.read_bytes(),
                "usr/bin/ib_write_bw": SAYS.format("Version"),
                **programs("usr/sbin/ibstat"),
            },
            depends="rdma-core",
        ),
    ]
    special = {
        "rdma-core": Standin("rdma-core", "50.0-ubuntu", {"usr/share/doc/rdma-core/from": "ubuntu\n"}),
        "mount": Standin("mount", NEWEST, programs("usr/bin/mount", "usr/bin/umount")),
        "munge": Standin("munge", NEWEST, programs("usr/sbin/munged")),
        "sssd-tools": Standin("sssd-tools", NEWEST, programs("usr/sbin/sss_cache")),
        "python3": Standin("python3", NEWEST, {"usr/bin/python3": "#!/bin/sh\nexit 0\n"}),
        "python-is-python3": Standin("python-is-python3", NEWEST, programs("usr/bin/python")),
        "libpmix2t64": Standin("libpmix2t64", NEWEST, {f"{LIB}/libpmix.so.2": library("libpmix.so.2")}),
        "libnss-extrausers": Standin("libnss-extrausers", NEWEST, {f"{LIB}/libnss_extrausers.so.2": "stand-in\n"}),
        "openssh-server": Standin("openssh-server", NEWEST, programs("usr/sbin/sshd")),
        "gcc": Standin("gcc", NEWEST, {"usr/bin/gcc": COMPILER}),
        "make": Standin("make", NEWEST, {"usr/bin/make": MAKE.read_bytes()}),
    }
    vendors = {package.name for package in (*cuda, *doca)}
    names = sorted(({*asked} - vendors) | {"rdma-core"})
    return Repositories(tuple(special.get(name, Standin(name, NEWEST)) for name in names), tuple(cuda), tuple(doca))


def tarball(target: Path, top: str, files: Mapping[str, str]) -> Path:
    """Write a source tarball: everything under one directory, scripts executable."""
    with tarfile.open(target, "w:gz") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(f"{top}/{name}")
            info.mode = 0o755 if text.startswith("#!") else 0o644
            info.mtime, info.size = EPOCH, len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
    return target


# As autotools would leave it: configure writes the Makefile, and remembers what it was asked.
CONFIGURE = """#!/bin/sh
set -e
printf '%s\\n' "$@" > configured
mkdir -p contribs/pam_slurm_adopt
sed 's/@all@/all-daemons/' Makefile.in > Makefile
sed 's/@all@/all-pam/' pam.in > contribs/pam_slurm_adopt/Makefile
"""
PROGRAMS = "sbin/slurmctld sbin/slurmdbd sbin/slurmrestd sbin/slurmd sbin/slurmstepd sbin/sackd"
CLIENTS = "bin/sinfo bin/srun bin/sbatch bin/scontrol bin/squeue bin/sacctmgr"
PLUGINS = (
    "gpu_nvml mpi_pmix auth_jwt auth_munge auth_slurm accounting_storage_mysql cgroup_v2 cli_filter_lua job_submit_lua"
    " proctrack_cgroup"
)
MAKEFILE = f"""
@all@: made
made: ; printf '#!/bin/sh\\necho "slurm @version@ stand-in pmix pmix_v5"\\n' > made
install: made
\tfor f in {PROGRAMS} {CLIENTS}; do install -D -m 755 made $(DESTDIR)/usr/$$f || exit 1; done
\tfor f in {PLUGINS}; do install -D -m 644 made $(DESTDIR)/{LIB}/slurm/$$f.so || exit 1; done
\tinstall -D -m 644 made $(DESTDIR)/usr/include/slurm/slurm.h
\tinstall -D -m 644 configured $(DESTDIR)/usr/share/slurm/configured
"""
PAM = f"""
@all@: ; touch pam
install: @all@
\tinstall -D -m 644 pam $(DESTDIR)/{LIB}/security/pam_slurm_adopt.so
"""


# As Slurm's own begins.
META = "##\n# Metadata\n##\n  Meta:\t\t1\n  Name:\t\tslurm\n  Version:\t{}\n  Release:\t1\n"


def slurm(target: Path, version: str) -> Path:
    """Write a tarball that configures, makes and installs as Slurm's does, in no time."""
    files = {"configure": CONFIGURE, "Makefile.in": MAKEFILE.replace("@version@", version), "pam.in": PAM}
    files["META"] = META.format(version)
    return tarball(target, f"slurm-{version}", files)


def pyxis(target: Path) -> Path:
    return tarball(target, "pyxis", {"Makefile": "spank_pyxis.so: ; touch spank_pyxis.so\n"})


# As enroot's own leaves it: paths that are written in when it is made, programs that ours stand in for, its hooks.
ENROOT = """
all: ; printf '#!/bin/sh\\necho stand-in\\n' > enroot
install: all
\tinstall -D -m 755 enroot $(DESTDIR)/usr/bin/enroot
\tinstall -D -m 755 enroot $(DESTDIR)/usr/bin/enroot-aufs2ovlfs
\tinstall -D -m 755 enroot $(DESTDIR)/usr/bin/enroot-mksquashovlfs
\tmkdir -p $(DESTDIR)/usr/lib/enroot
\tinstall -D -m 755 enroot $(DESTDIR)/etc/enroot/hooks.d/98-nvidia.sh
\tinstall -D -m 755 enroot $(DESTDIR)/etc/enroot/hooks.d/10-cgroups.sh
\tinstall -D -m 755 enroot $(DESTDIR)/usr/share/enroot/hooks.d/50-slurm-pmi.sh
"""


def enroot(target: Path) -> Path:
    return tarball(target, "enroot", {"Makefile": ENROOT, "deps/Makefile": "libbsd: ; touch libbsd\n"})


def hpcx(target: Path) -> Path:
    mpirun = {"ompi/bin/mpirun": SAYS.format("mpirun"), "hpcx-init.sh": "hpcx_load() { :; }\n"}
    return tarball(target, "hpcx", mpirun | {"sources/fat.tar": "x" * 1000})
