"""Create a cluster's keys once, inside it: the chart's Job fills the empty Secrets.

`python3 -I -m init.helpers.make_keys SECRET:KEY:HOW... [--known-hosts CONFIGMAP NAMES=SECRET|KEY...]`, where HOW is
`bytes:N`, `letters:N` or `ed25519`. A Secret that contains anything is left alone: nothing here can change a key. The
ConfigMap gets ssh's known hosts: the public halves of the host keys in SECRET, by NAMES, so that no pod needs another
pod's private key to know it.
"""

from __future__ import annotations

import base64
import secrets
import string
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ground.commands import ran
from ground.errors import counted
from init.errors import InitError
from init.fields import number
from init.lean import record
from init.pod.api_server import MERGE, ApiError, ApiServer, namespace

# Tells the chart that it must not write this key (cluster/chart/templates/_helpers.tpl).
MARK = {"minivm.io/key": "made"}
# The Job may start before its Secrets and its permissions exist.
PATIENCE, PAUSE = 120.0, 0.5
LONGEST = 4096


@record()
class Wanted:
    secret: str
    key: str
    how: str
    size: int


@record()
class Known:
    config_map: str
    hosts: tuple[tuple[str, str], ...]  # names, and a Secret of host keys or (with a space in it) a public key


def parse_known(words: Sequence[str]) -> Known | None:
    if not words:
        return None
    config_map, *hosts = words
    entries = tuple((names, of) for names, _, of in (text.partition("=") for text in hosts))
    for text, (names, of) in zip(hosts, entries, strict=True):
        if not names or not of:
            raise ValueError(text)
    return Known(config_map, entries)


def parse(text: str) -> Wanted:
    match text.split(":"):
        case [secret, key, "ed25519"]:
            return Wanted(secret, key, "ed25519", 0)
        case [secret, key, "bytes" | "letters" as how, size]:
            if 16 <= (count := number(size) or 0) <= LONGEST:
                return Wanted(secret, key, how, count)
    raise ValueError(text)


def fresh(wanted: Wanted) -> bytes:
    if wanted.how == "bytes":
        return secrets.token_bytes(wanted.size)
    if wanted.how == "letters":
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(wanted.size)).encode()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "key")
        keygen(wanted.key, "-q", "-t", wanted.how, "-N", "", "-C", wanted.secret, "-f", str(path))
        return path.read_bytes()


def keygen(key: str, *arguments: str) -> str:
    done = ran(["ssh-keygen", *arguments])
    if done.returncode != 0:
        raise InitError(f"make {key}", done.stderr.strip() or f"ssh-keygen ended with {done.returncode}")
    return done.stdout


def fill(server: ApiServer, namespace: str, wanted: Wanted) -> str:
    """Read the Secret, fill it if it is empty, and return the result.

    The write applies only to the version that was read: if two processes fill it at once, the second gets a conflict,
    and then finds it filled.
    """
    path = f"/api/v1/namespaces/{namespace}/secrets/{wanted.secret}"
    secret = server.ask("GET", path)
    content = secret.get("data") or {}
    if wanted.key in content:
        return "is there"
    if content:
        raise InitError(f"make {wanted.key}", f"the Secret {wanted.secret} has {', '.join(sorted(content))} without it",
                        hint="add it, or name another Secret in the chart's values")  # fmt: skip
    data = {wanted.key: base64.b64encode(fresh(wanted)).decode()}
    metadata = {"resourceVersion": secret["metadata"]["resourceVersion"], "annotations": MARK}
    server.ask(
        "PATCH", f"{path}?fieldManager=minivm-keys", {"metadata": metadata, "data": data},
        MERGE,
    )  # fmt: skip
    return "made"


def public(server: ApiServer, namespace: str, secret: str) -> list[str]:
    """Derive the public halves of a Secret's host keys."""
    data = server.ask("GET", f"/api/v1/namespaces/{namespace}/secrets/{secret}").get("data") or {}
    keys = []
    for name in sorted(data):
        if name.startswith("ssh_host_") and name.endswith("_key"):
            with tempfile.NamedTemporaryFile() as file:  # readable by its owner alone
                file.write(base64.b64decode(data[name]))
                file.flush()
                keys.append(" ".join(keygen(name, "-y", "-P", "", "-f", file.name).split()[:2]))
    if not keys:
        raise InitError("write the known hosts", f"the Secret {secret} holds no ssh_host_*_key")
    return keys


def know(server: ApiServer, namespace: str, known: Known) -> str:
    """Write the known hosts, each time: they follow from the keys, which stay."""
    lines = [
        f"{names} {key}\n"
        for names, of in known.hosts
        for key in ([of] if " " in of else public(server, namespace, of))
    ]
    path = f"/api/v1/namespaces/{namespace}/configmaps/{known.config_map}?fieldManager=minivm-keys"
    server.ask("PATCH", path, {"data": {"known_hosts": "".join(lines)}}, MERGE)
    return f"has {counted(len(lines), 'key')}"


def run(
    server: ApiServer, namespace: str, todo: Sequence[Wanted], known: Known | None = None, patience: float = PATIENCE
) -> int:
    steps = [(request.secret, request.key, partial(fill, server, namespace, request)) for request in todo]
    if known is not None:
        steps.append((known.config_map, "known_hosts", partial(know, server, namespace, known)))
    until, last = time.monotonic() + patience, ""
    for where, what, step in steps:
        while True:
            try:
                print(f"{where}: {what} {step()}", flush=True)
                break
            except ApiError as error:
                if time.monotonic() >= until:
                    print(f"{where}: {error}", file=sys.stderr, flush=True)
                    return 1
                if str(error) != last:
                    print(f"{where}: {error}; retrying", flush=True)
                last = str(error)
                time.sleep(PAUSE)
            except InitError as error:
                print(error, file=sys.stderr, flush=True)
                return 1
    return 0


def main() -> int:
    words = sys.argv[1:]
    cut = words.index("--known-hosts") if "--known-hosts" in words else len(words)
    try:
        todo, known_hosts = [parse(text) for text in words[:cut]], parse_known(words[cut + 1 :])
    except ValueError as error:
        print(f"cannot make keys: {error} is neither SECRET:KEY:HOW nor NAMES=SECRET", file=sys.stderr)
        return 2
    return run(ApiServer("make the cluster's keys"), namespace(), todo, known_hosts)


if __name__ == "__main__":
    raise SystemExit(main())
