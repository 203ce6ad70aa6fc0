"""Names and addresses of the lab. Pure: what stands here is all that it takes of this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HOST = "10.77.0.1"
CONTROL_PLANE = "10.77.0.2"
SERVICES = "10.96.77"
DNS = f"{SERVICES}.10"
PODS = "10.244"
API = f"https://{CONTROL_PLANE}:6443"
# One lab a machine: where its state is, whichever checkout it belongs to.
UP = Path("/run/minivm-lab")
# Of everything on the outside that has a name.
PREFIX = "mvlab"
SWITCH = f"{PREFIX}-switch"
LINK = f"{PREFIX}0"
CGROUP = "minivm-lab"
PAUSE = "docker.io/minivm-lab/pause:1"
MOST_NODES = 9
# Directories that a kubelet of this age and network plugins insist on; each machine mounts its own over them.
TARGETS = (
    "/var/lib/kubelet", "/var/lib/cni", "/var/log/pods", "/var/log/containers", "/run/containerd", "/tmp/hostpath_pv",
)  # fmt: skip
# Of the containerd that unpacks images before any machine is there.
UNPACKING = Path("/run") / f"{PREFIX}-store"


@dataclass(frozen=True, slots=True)
class Machine:
    """`cp`, the control plane, or a node: `n1` to `n9`."""

    name: str
    state: Path

    @property
    def number(self) -> int:
        return 0 if self.name == "cp" else int(self.name.removeprefix("n"))

    @property
    def address(self) -> str:
        return f"10.77.0.{10 + self.number}" if self.number else CONTROL_PLANE

    @property
    def pods(self) -> str:
        return f"{PODS}.{self.number}.0/24"

    @property
    def netns(self) -> str:
        return f"{PREFIX}-{self.name}"

    @property
    def cgroup(self) -> str:
        return f"{CGROUP}/{self.name}"


def machines(state: Path, nodes: int) -> tuple[Machine, ...]:
    names = ("cp", *(f"n{number}" for number in range(1, nodes + 1)))
    return tuple(Machine(name, state / name) for name in names)


@dataclass(frozen=True, slots=True)
class Left:
    """What a lab leaves on the outside while it is up: empty, when nothing is left."""

    processes: tuple[str, ...] = ()
    namespaces: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    routes: tuple[str, ...] = ()
    mounts: tuple[str, ...] = ()
    cgroups: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    files: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return any(getattr(self, name) for name in self.__slots__)
