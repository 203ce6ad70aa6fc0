"""Public ssh keys: one line, a type that sshd accepts, and a body that is what its type says. Pure."""

from __future__ import annotations

import base64
import struct

# Types that sshd accepts here (50-minivm.conf), with the length of the body's parts; None: any.
ED25519 = "ssh-ed25519"
RSA = "ssh-rsa"
SECURITY_KEY = "sk-ssh-ed25519@openssh.com"
TYPES = (ED25519, RSA, SECURITY_KEY)
RSA_BITS = range(2048, 16385)
# Points of small order: a signature by such a "key" can be made without a private one.
_PRIME = 2**255 - 19
_ORDER_8 = 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826
SMALL_ORDER = frozenset({0, 1, _PRIME - 1, _ORDER_8, _PRIME - _ORDER_8})
LONGEST = 4096
COMMENT = 200


class KeyProblem(Exception):
    """Why a text is no key, and what to do."""

    def __init__(self, why: str, hint: str = "") -> None:
        super().__init__(why)
        self.why, self.hint = why, hint


def parse(text: str) -> tuple[str, str]:
    """Return the key as "TYPE BODY", and its comment."""
    if len(text) > LONGEST:
        raise KeyProblem(f"{len(text)} characters, more than {LONGEST}", "copy one line of a .pub file")
    if not text.isprintable():
        raise KeyProblem("more than one line, or control characters", "one entry for each key")
    if "PRIVATE KEY" in text:
        raise KeyProblem("a private key", "make a new key; copy the .pub file")
    kind, _, rest = text.strip().partition(" ")
    body, _, comment = rest.strip().partition(" ")
    if kind not in TYPES:
        raise KeyProblem(*_refused_type(kind, text))
    if len(comment) > COMMENT:
        raise KeyProblem(f"a comment of {len(comment)} characters, more than {COMMENT}")
    try:
        data = base64.b64decode(body.encode("ascii"), validate=True)
    except ValueError:
        raise KeyProblem(f"the body after {kind} is not base64", "copy the whole line of the .pub file") from None
    parts = _parts(data)
    if parts is None or not parts or parts[0] != kind.encode():
        raise KeyProblem(f"the body is not one of {kind}, or it is cut", "copy the whole line of the .pub file")
    if problem := _problem(kind, parts):
        raise KeyProblem(problem, "make a new one: ssh-keygen -t ed25519")
    return f"{kind} {base64.b64encode(data).decode()}", comment.strip()


def _refused_type(kind: str, text: str) -> tuple[str, str]:
    accepted = ", ".join(TYPES)
    if any(name in text for name in TYPES):
        return "options before the key", f"write the key alone: one of {accepted}"
    if kind.startswith(("ecdsa-", "sk-ecdsa-", "ssh-dss")):
        return f"{kind} is not accepted by this sshd", "make a new one: ssh-keygen -t ed25519"
    return f"{kind[:40]!r} is no type of key", f"accepted: {accepted}"


def _parts(data: bytes) -> list[bytes] | None:
    """Split the body into its parts, each after its length; None if they do not fit."""
    parts = []
    while data:
        if len(data) < 4:
            return None
        (size,) = struct.unpack(">I", data[:4])
        if size > len(data) - 4:
            return None
        parts.append(data[4 : 4 + size])
        data = data[4 + size :]
    return parts


def _problem(kind: str, parts: list[bytes]) -> str:
    if kind == RSA:
        if len(parts) != 3:
            return "an RSA key has two numbers"
        bits = int.from_bytes(parts[2], "big").bit_length()
        return "" if bits in RSA_BITS else f"an RSA key of {bits} bits; wanted {RSA_BITS[0]} to {RSA_BITS[-1]}"
    count = 2 if kind == ED25519 else 3
    if len(parts) != count or len(parts[1]) != 32:
        return f"a key of {kind} has 32 bytes"
    point = (int.from_bytes(parts[1], "little") & (2**255 - 1)) % _PRIME
    return "a key for which anybody can sign" if point in SMALL_ORDER else ""
