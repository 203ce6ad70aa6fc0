"""A preparation step's pod: the root directory, the environment, the users, files, and work as another user."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from init.errors import InitError
from init.places import pod_name
from init.pod.addresses import CONTROLLER, host_and_port

# Values found at boot: one KEY=VALUE file per service that reads them (`environment_files`).
ENVIRONMENT = "/run/minivm/env"
MOUNTS = "/mnt/minivm"


class PrepareError(InitError):
    """An error that another try may resolve: a secret not mounted yet, a name that does not resolve."""


class Pod:
    """The pod's file system below `root` (tests use a scratch directory) and its environment."""

    __slots__ = ("env", "root")

    def __init__(self, env: Mapping[str, str], root: Path = Path("/")) -> None:
        self.env = env
        self.root = root

    def path(self, absolute: str) -> Path:
        return self.root / absolute.lstrip("/")

    def setting(self, name: str, default: str = "") -> str:
        """Return a variable; an empty one counts as unset, since Kubernetes cannot omit one from a template."""
        return self.env.get(name) or default

    def choice(self, name: str, default: str, known: Iterable[str]) -> str:
        value = self.setting(name, default)
        known = sorted(known)
        if value not in known:
            from init.errors import ConfigError, nearest

            raise ConfigError("prepare the pod", f"{name} is {value!r}", hint=nearest(value, known))
        return value

    @property
    def name(self) -> str:
        return pod_name(self.env)

    @property
    def controller(self) -> tuple[str, int]:
        """Return slurmctld's host and port."""
        return host_and_port(self.setting("MINIVM_CONTROLLER", CONTROLLER))

    @property
    def accounting(self) -> str:
        """Return where the accounting database is: `pod`: in a pod of its own, with slurmdbd."""
        return self.choice("MINIVM_ACCOUNTING", "embedded", ["embedded", "pod", "external", "none"])

    @property
    def gpus(self) -> int:
        """Return how many device files of NVIDIA GPUs the pod has."""
        return sum(1 for _ in self.path("/dev").glob("nvidia[0-9]*"))

    def has(self, absolute: str) -> bool:
        return self.path(absolute).exists()

    def text(self, absolute: str) -> str | None:
        """Return the file's text; None without one (a kernel without that controller, a secret not mounted)."""
        try:
            return self.path(absolute).read_text(errors="replace")
        except (FileNotFoundError, NotADirectoryError, PermissionError, OSError):
            return None

    def publish(self, service: str, values: Mapping[str, str]) -> None:
        """Pass values to a service, whose data names the file in `environment_files`."""
        lines = [f"{key}={value}\n" for key, value in sorted(values.items())]
        write(self.path(f"{ENVIRONMENT}/{service}"), "".join(lines).encode(), mode=0o600)


def user(name: str) -> tuple[int, int]:
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        raise PrepareError("prepare the pod", f"there is no user {name}", hint="the image must create it") from None
    return entry.pw_uid, entry.pw_gid


def write(path: Path, data: bytes, *, mode: int, owner: tuple[int, int] | None = None) -> bool:
    """Write a file atomically with its final mode and owner. False if it was so already (nothing is touched).

    A pod that runs as one ordinary user owns what it writes.
    """
    if os.geteuid() != 0:
        owner = None
    if _same(path, data, mode, owner):
        return False
    from ground.files import write_whole

    try:
        write_whole(path, data, mode, owner)
    except OSError as error:
        raise PrepareError(f"write {path}", error.strerror or str(error)) from error
    return True


def _same(path: Path, data: bytes, mode: int, owner: tuple[int, int] | None) -> bool:
    try:
        status = path.lstat()
        if status.st_mode != (0o100000 | mode) or (owner is not None and (status.st_uid, status.st_gid) != owner):
            return False
        return path.read_bytes() == data
    except OSError:
        return False


def writable(directory: Path) -> bool:
    """Tell if files can be created there; `os.access` detects a read-only mount too."""
    return os.access(directory, os.W_OK | os.X_OK)


def run_as(user: int, group: int, work: Callable[[], object], *, unused: int, within: int = 0) -> None:
    """Run the work as the user and group in a child that this user cannot signal, and wait for it.

    The child is killed after `within` seconds, 0 for never. For a signal the kernel compares the sender with the
    target's real user: that is `unused`, a reserved id as which no process runs. It is not root, whose processes a
    `kill(-1)` would reach.
    """
    import signal  # imported late: it costs a boot step 7 ms

    child = os.fork()
    if child == 0:
        try:
            signal.alarm(within)
            os.setgroups([])
            os.setresgid(group, group, group)
            os.setresuid(unused, user, unused)
            if os.getresuid() == (unused, user, unused):
                work()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
