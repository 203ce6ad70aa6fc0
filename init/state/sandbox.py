"""Run a program that can reach no network but some ports of its own: `python3 -I -m init.state.sandbox PORTS ARGV...`.

A pod may make no network namespace, so this is Landlock's rule on TCP (Linux 6.7 on), which needs no privilege: the
program and its children may bind and connect to these ports alone. Slurm uses no other protocol. A slurmctld that runs
on a copy of the state would otherwise call the nodes of the real cluster.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

CREATE, ADD, RESTRICT = 444, 445, 446  # the same on every architecture
NET_SINCE = 4  # Landlock's version
BIND, CONNECT = 1, 2
RULE_PORT = 2
DEATH_SIGNAL, NO_NEW_PRIVILEGES = 1, 38
SIGKILL = 9
EX_CONFIG = 78


def _call(number: int, *arguments: object) -> int:
    result: int = _libc().syscall(number, *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), "landlock")
    return result


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def is_possible() -> bool:
    """Tell if this kernel keeps a program from TCP ports."""
    try:
        return _call(CREATE, None, ctypes.c_size_t(0), 1) >= NET_SINCE
    except OSError:
        return False


def close_network(ports: list[int]) -> None:
    """Restrict this process, for good, to these TCP ports."""
    attributes = struct.pack("QQ", 0, BIND | CONNECT)
    rules = _call(CREATE, attributes, ctypes.c_size_t(len(attributes)), 0)
    for port in ports:
        _call(ADD, rules, RULE_PORT, struct.pack("QQ", BIND | CONNECT, port), 0)
    if _libc().prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs is refused", "prctl")
    _call(RESTRICT, rules, 0)
    os.close(rules)


def main(arguments: list[str]) -> int:
    ports = [int(port) for port in arguments[0].split(",")]
    try:
        _libc().prctl(DEATH_SIGNAL, SIGKILL, 0, 0, 0)  # a proof that is killed leaves no daemon behind
        close_network(ports)
        os.execv(arguments[1], arguments[1:])
    except OSError as error:
        print(f"cannot run {arguments[1]} without network: {error}", file=sys.stderr)
    return EX_CONFIG


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
