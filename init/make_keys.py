"""The keys of a cluster, made in it once: the chart's Job fills the Secrets that hold nothing.

`python3 -I -m init.make_keys SECRET:KEY:HOW...`, where HOW is `bytes:N`, `letters:N` or `ed25519`. A Secret that holds
anything is left alone, whoever filled it and with whatever: nothing here can change a key.
"""

from __future__ import annotations

import base64
import os
import secrets
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from init.api_server import ACCOUNT, ApiError, ApiServer
from init.errors import InitError
from init.fields import number
from init.records import record

# What tells the chart that the key is not its own to write (cluster/chart/templates/_helpers.tpl).
MARK = {"minivm.io/key": "made"}
# The Job may start before its Secrets and its rights are there.
PATIENCE, PAUSE = 120.0, 0.5
LONGEST = 4096


@record()
class Wanted:
    secret: str
    key: str
    how: str
    size: int


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
        argv = ["ssh-keygen", "-q", "-t", wanted.how, "-N", "", "-C", wanted.secret, "-f", str(path)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise InitError(f"make {wanted.key}", done.stderr.strip() or f"ssh-keygen ended with {done.returncode}")
        return path.read_bytes()


def fill(server: ApiServer, namespace: str, wanted: Wanted) -> str:
    """One look, and one write if there is nothing; what became of it. The write holds for the Secret that was looked
    at alone: of two that fill it at once the second gets a conflict, and then finds it filled."""
    path = f"/api/v1/namespaces/{namespace}/secrets/{wanted.secret}"
    found = server.ask("GET", path)
    there = found.get("data") or {}
    if wanted.key in there:
        return "is there"
    if there:
        raise InitError(f"make {wanted.key}", f"the Secret {wanted.secret} holds {', '.join(sorted(there))} without it",
                        hint="add it, or name another Secret in the chart's values")  # fmt: skip
    data = {wanted.key: base64.b64encode(fresh(wanted)).decode()}
    metadata = {"resourceVersion": found["metadata"]["resourceVersion"], "annotations": MARK}
    server.ask(
        "PATCH", f"{path}?fieldManager=minivm-keys", {"metadata": metadata, "data": data},
        "application/merge-patch+json",
    )  # fmt: skip
    return "made"


def run(server: ApiServer, namespace: str, todo: Sequence[Wanted], patience: float = PATIENCE) -> int:
    until, told = time.monotonic() + patience, ""
    for wanted in todo:
        while True:
            try:
                print(f"{wanted.secret}: {wanted.key} {fill(server, namespace, wanted)}", flush=True)
                break
            except ApiError as error:
                if time.monotonic() >= until:
                    print(f"{wanted.secret}: {error}", file=sys.stderr, flush=True)
                    return 1
                if str(error) != told:
                    print(f"{wanted.secret}: {error}; asked again", flush=True)
                told = str(error)
                time.sleep(PAUSE)
            except InitError as error:
                print(error, file=sys.stderr, flush=True)
                return 1
    return 0


def main() -> int:
    try:
        todo = [parse(text) for text in sys.argv[1:]]
    except ValueError as error:
        print(f"cannot make keys: {error} is not SECRET:KEY:HOW", file=sys.stderr)
        return 2
    namespace = os.environ.get("MINIVM_POD_NAMESPACE") or (ACCOUNT / "namespace").read_text().strip()
    return run(ApiServer("make the cluster's keys"), namespace, todo)


if __name__ == "__main__":
    raise SystemExit(main())
