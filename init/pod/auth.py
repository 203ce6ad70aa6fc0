"""Authentication between Slurm's daemons: munge, or Slurm's own auth/slurm (the setting MINIVM_AUTH).

With auth/slurm a daemon signs with its own copy of the key, and a client asks the nearest daemon's socket. On a worker
and on a login pod no daemon runs when init makes its first requests: `signing` runs one for that time.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from init.errors import InitError

SETTING = "MINIVM_AUTH"
MUNGE, SLURM = "munge", "slurm"
SACKD = "/usr/sbin/sackd"
SOCKET = "/run/slurm/sack.socket"
# slurmctld's and slurmdbd's, which clients try too.
OTHERS = ("/run/slurmctld/sack.socket", "/run/slurmdbd/sack.socket")
CONFIGURATION = "/run/minivm/sackd.conf"
# Where the daemons find the key. Without these they look beside the slurm.conf that they read.
KEYS = {"SLURM_SACK_KEY": "/etc/slurm/slurm.key", "SLURM_SACK_JWKS": "/etc/slurm/slurm.jwks"}
WITHIN = 10.0
STEP = 0.02
# Lifetime of a credential in seconds: the clocks of two pods may differ by so much.
LIVES = {MUNGE: 300.0, SLURM: 60.0}


def mode() -> str:
    """Return the authentication of this pod. As for munged's service, anything but `slurm` is munge."""
    return SLURM if os.environ.get(SETTING) == SLURM else MUNGE


@contextmanager
def signing(controller: str) -> Iterator[None]:
    """Run a sackd that signs the requests made inside, unless a daemon already has a socket."""
    if mode() != SLURM or any(map(os.path.lexists, (SOCKET, *OTHERS))):
        yield
        return
    # With a file of its own sackd fetches none from slurmctld and listens on no port.
    with open(CONFIGURATION, "w") as file:  # noqa: PTH123 - pathlib costs 8 ms of boot
        file.write(f"ClusterName=minivm\nSlurmctldHost={controller.rpartition(':')[0]}\nSlurmUser=slurm\n")
        file.write("AuthType=auth/slurm\nCredType=cred/slurm\n")
    argv = [SACKD, "-D", "-f", CONFIGURATION]
    env = {"PATH": "/usr/bin:/usr/sbin:/bin:/sbin", "LC_ALL": "C.UTF-8", **KEYS}
    child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=env)
    try:
        _wait(child)
        yield
    finally:
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(2.0)
        if child.returncode is None:
            child.kill()
            child.wait()
        with suppress(FileNotFoundError):
            os.unlink(SOCKET)  # noqa: PTH108 - pathlib costs 8 ms of boot


def _wait(child: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + WITHIN
    while not os.path.exists(SOCKET):  # noqa: PTH110 - pathlib costs 8 ms of boot
        if child.poll() is not None:
            lines = (child.stderr.read() if child.stderr else b"").decode(errors="replace").strip().splitlines()
            raise InitError(
                "sign requests to slurmctld", lines[-1] if lines else f"sackd ended with {child.returncode}"
            )
        if time.monotonic() > until:
            raise InitError("sign requests to slurmctld", f"sackd made no socket within {WITHIN:g} s")
        time.sleep(STEP)
