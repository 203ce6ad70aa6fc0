"""Authentication between Slurm's daemons: munge, or Slurm's own auth/slurm (the setting MINIVM_AUTH).

With auth/slurm a daemon signs with its own copy of the key, and a client asks the nearest daemon's socket. On a worker
and on a login pod no daemon runs when init makes its first requests: `sign_requests` runs one then.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from init.errors import InitError

SETTING = "MINIVM_AUTH"
MUNGE, SLURM = "munge", "slurm"
SACKD = "/usr/sbin/sackd"
SOCKET = "/run/slurm/sack.socket"
# slurmctld's and slurmdbd's, which clients try too, in this order.
OTHERS = ("/run/slurmctld/sack.socket", "/run/slurmdbd/sack.socket")
OWN = OTHERS[-1]  # no worker and no login pod runs slurmdbd
RECONFIGURE = "SACK_RECONFIG_FD"
CONFIGURATION = "/run/minivm/sackd.conf"
# Where the daemons find the key. Without these they look beside the slurm.conf that they read.
KEYS = {"SLURM_SACK_KEY": "/etc/slurm/slurm.key", "SLURM_SACK_JWKS": "/etc/slurm/slurm.jwks"}
# Lifetime of a credential in seconds: the clocks of two pods may differ by so much.
LIVES = {MUNGE: 300.0, SLURM: 60.0}


def mode() -> str:
    """Return the authentication of this pod. As for munged's service, anything but `slurm` is munge."""
    return SLURM if os.environ.get(SETTING) == SLURM else MUNGE


@contextmanager
def sign_requests(controller: str) -> Iterator[None]:
    """Run a sackd that signs the requests made inside, unless a daemon of Slurm listens for them.

    sackd and slurmd remove the socket of their path before they bind it, and between the two no daemon listens. So this
    sackd gets a socket of another path, made here: at slurmd's path it would replace that of a daemon that starts.
    """
    if mode() != SLURM or any(map(_listens, (SOCKET, *OTHERS))):
        yield
        return
    # With a file of its own sackd fetches none from slurmctld and listens on no port.
    with open(CONFIGURATION, "w") as file:  # noqa: PTH123 - pathlib costs 8 ms of boot
        file.write(f"ClusterName=minivm\nSlurmctldHost={controller.rpartition(':')[0]}\nSlurmUser=slurm\n")
        file.write("AuthType=auth/slurm\nCredType=cred/slurm\n")
    with suppress(FileExistsError):
        os.mkdir(os.path.dirname(OWN), 0o700)  # noqa: PTH102, PTH120 - pathlib costs 8 ms of boot
    with suppress(FileNotFoundError):
        os.unlink(OWN)  # noqa: PTH108 - of a step that was killed
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(OWN)
        listener.listen()
        child = _start_sackd(listener.fileno())
    try:
        yield
    finally:
        child.terminate()
        try:
            _, errors = child.communicate(timeout=2.0)
        except subprocess.TimeoutExpired:
            child.kill()
            _, errors = child.communicate()
        with suppress(FileNotFoundError):
            os.unlink(OWN)  # noqa: PTH108
        if child.returncode > 0:  # not by the signal
            lines = errors.decode(errors="replace").strip().splitlines()
            why = lines[-1] if lines else f"sackd ended with {child.returncode}"
            raise InitError("sign requests to slurmctld", why)


def _listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.setblocking(False)
        try:
            client.connect(path)
        except BlockingIOError:  # its queue is full
            return True
        except OSError:
            return False
        return True


def _start_sackd(listener: int) -> subprocess.Popen[bytes]:
    """Start sackd on a socket that listens already, as a sackd that reconfigures starts its successor."""
    env = {"PATH": "/usr/bin:/usr/sbin:/bin:/sbin", "LC_ALL": "C.UTF-8", RECONFIGURE: str(listener), **KEYS}
    return subprocess.Popen(
        [SACKD, "-D", "-f", CONFIGURATION],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=env,
        pass_fds=[listener],
    )
