"""Credentials by which a node gives a job's black box to one user: by munge, or by Slurm's own auth/slurm.

Either signs a text as a user of the cluster and names the user that alone may open it. munge also encrypts, and opens a
credential once. auth/slurm does neither: the node first sends a word that the question repeats, so that a credential is
good for one connection; and a reader of the network reads the box, like all that Slurm's daemons send.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

MUNGE, SLURM = "munge", "slurm"
MUNGED, UNMUNGED = "/usr/bin/munge", "/usr/bin/unmunge"
MUNGE_SOCKET = "/run/munge/munge.socket.2"
# Of slurmd and sackd, and of slurmctld.
SACK_SOCKETS = ("/run/slurm/sack.socket", "/run/slurmctld/sack.socket")
WITHIN_S = 3.0
TTL_S = 60
# sack_api.h of Slurm. The version is not looked at by 24.11 and 26.05.
VERSION, CREATE, VERIFY = 0, 64001, 64002
LARGEST_TOKEN = 1 << 18


def way() -> str:
    """Return the cluster's way to sign, by the socket that this pod has; "" without one."""
    if os.path.exists(MUNGE_SOCKET):  # noqa: PTH110 (a word of a path)
        return MUNGE
    return SLURM if any(map(os.path.exists, SACK_SOCKETS)) else ""


def seal(text: bytes, reader: int, by: str) -> bytes:
    """Return a line that this process's user signs and that only the reader opens; OSError if nothing signs it."""
    if by == SLURM:
        answer = _ask_slurm(CREATE, _uint(reader) + _pack(text))
        if len(answer) < 6:
            raise OSError("Slurm's sack.socket signs nothing")
        return answer[4:].rstrip(b"\0") + b"\n"
    return _run([MUNGED, f"--restrict-uid={reader}", f"--ttl={TTL_S}"], text).strip() + b"\n"


def unseal(credential: bytes, by: str) -> tuple[int, bytes]:
    """Return the signer's user id and the text; OSError for a credential that is not good, or not for this user."""
    if by == SLURM:
        return _unseal_slurm(credential.strip())
    import re

    head, _, text = _run([UNMUNGED, "--keys=STATUS,UID", "--numeric"], credential).partition(b"\n\n")
    match = re.search(rb"^UID: +(\d{1,10})$", head, re.MULTILINE)
    if match is None:
        raise OSError("the credential is not good")
    return int(match[1]), text


def _unseal_slurm(token: bytes) -> tuple[int, bytes]:
    import base64
    import json

    if not token or len(token) > LARGEST_TOKEN or _ask_slurm(VERIFY, _pack(token + b"\0")) != _uint(0):
        raise OSError("the credential is not good")
    try:
        body = token.split(b".")[1]
        grants = json.loads(base64.urlsafe_b64decode(body + b"=" * (-len(body) % 4)))
        # Slurm's own requests have another context and none of these texts: neither credential passes for the other.
        if not isinstance(grants, dict) or grants.get("context") != "sack":
            raise ValueError("no sack")
        return int(grants["uid"]), base64.b64decode(grants["payload"])
    except (KeyError, IndexError, TypeError, ValueError, RecursionError):
        raise OSError("the credential is not good") from None


def _ask_slurm(what: int, message: bytes) -> bytes:
    import socket

    body = _uint(what) + message
    failure: OSError = FileNotFoundError("no sack.socket of Slurm is here")
    deadline = time.monotonic() + WITHIN_S
    for path in SACK_SOCKETS:
        answer = b""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as slurm:
                slurm.settimeout(WITHIN_S)
                slurm.connect(path)
                slurm.sendall(VERSION.to_bytes(2) + _uint(len(body) + 4) + body)
                while chunk := slurm.recv(65536):
                    answer += chunk
                    slurm.settimeout(max(0.001, deadline - time.monotonic()))
                    if len(answer) > LARGEST_TOKEN:
                        raise OSError("Slurm's sack.socket answers without end")
        except OSError as error:
            failure = error
            continue
        return answer
    raise failure


def _uint(number: int) -> bytes:
    return number.to_bytes(4)


def _pack(data: bytes) -> bytes:
    return _uint(len(data)) + data


def _run(argv: Sequence[str], text: bytes) -> bytes:
    import subprocess

    try:
        done = subprocess.run(argv, input=text, capture_output=True, timeout=WITHIN_S, check=False)
    except subprocess.TimeoutExpired:
        raise OSError("munged does not answer") from None
    if done.returncode:
        raise OSError(done.stderr.decode(errors="replace").strip()[:200] or "munge failed")
    return done.stdout
