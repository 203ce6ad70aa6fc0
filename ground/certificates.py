"""When certificates expire, by the openssl of the image."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from ground.files import read_plain

OPENSSL = "/usr/bin/openssl"
LARGEST, MOST = 256 * 1024, 20
MOST_FILES = 20
_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----[A-Za-z0-9+/=\s]+-----END CERTIFICATE-----")


def list_expiries(directory: Path) -> dict[str, float]:
    """Return when the first certificate of each file of a mounted Secret expires, by the file's name."""
    ends = {path.name: read_expiry(path) for path in sorted(directory.glob("[!.]*"))[:MOST_FILES]}
    return {name: end for name, end in ends.items() if end is not None}


def read_expiry(path: Path) -> float | None:
    """Return when the first of a file's certificates expires.

    None if the file has none, or more than MOST, or one that cannot be read.
    """
    text = read_plain(path.resolve(), LARGEST + 1) or b""  # a mounted file is a link of the kubelet's
    found = _PEM.findall(text)
    if len(text) > LARGEST or not 0 < len(found) <= MOST:
        return None
    ends: list[float] = []
    for certificate in found:
        if (end := _read_end(certificate)) is None:
            return None
        ends.append(end)
    return min(ends)


def _read_end(certificate: bytes) -> float | None:
    import ssl  # late: most callers look often, and most have no certificate

    argv = [OPENSSL, "x509", "-noout", "-enddate"]
    try:
        done = subprocess.run(argv, input=certificate, capture_output=True, timeout=5.0, check=True)
        return float(ssl.cert_time_to_seconds(done.stdout.decode().strip().removeprefix("notAfter=")))
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
