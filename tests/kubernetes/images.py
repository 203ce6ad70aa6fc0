"""Images for the nodes, from docker: unpacked once into a store, which every node's containerd begins with.

A store is a containerd's own directory. Its blobs and unpacked layers are never written again, so nodes have them as
hard links; the databases that name them are copied.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.kubernetes import plan, registry
from tests.kubernetes.errors import LabError
from tests.kubernetes.host import attempt, run, wait_for, write
from tests.kubernetes.machine import SYSTEM
from tests.kubernetes.plan import Machine
from tests.kubernetes.programs import KEPT, Programs

NAMESPACE = "k8s.io"
# As docker writes it; containerd's way is plan.PAUSE.
PAUSE = plan.PAUSE.removeprefix("docker.io/")
UNFINISHED = "images-unfinished"


def wanted(names: Iterable[str]) -> dict[str, str]:
    """Name -> identity, as docker has them."""
    found = {}
    for name in names:
        done = attempt("docker", "image", "inspect", "-f", "{{.Id}}", name)
        if done.returncode != 0:
            raise LabError(f"bring {name} to the nodes", "docker has no such image", hint="make images")
        found[name] = done.stdout.strip()
    return found


def pause(programs: Programs) -> None:
    """Build the image of the process that holds a pod together."""
    mark = f"minivm-lab.program={programs.root.name}"
    if attempt("docker", "image", "ls", "-q", "--filter", f"label={mark}", PAUSE).stdout.strip():
        return
    change = ("--change", 'ENTRYPOINT ["/pause"]', "--change", f"LABEL {mark}", "--change", "USER 65535:65535")
    archive = subprocess.run(["tar", "-C", programs.bin, "-c", "pause"], capture_output=True, check=True).stdout
    done = subprocess.run(["docker", "import", *change, "-", PAUSE], input=archive, capture_output=True)
    if done.returncode != 0:
        raise LabError("make the pause image", done.stderr.decode().strip())


def store(programs: Programs, images: Mapping[str, str]) -> Path:
    """The store with exactly these images. What an older one has is not unpacked again."""
    digest = hashlib.sha256(json.dumps([programs.root.name, dict(images)], sort_keys=True).encode())
    made = KEPT / f"images-{digest.hexdigest()[:12]}"
    if made.is_dir():
        return made
    unfinished = KEPT / UNFINISHED
    shutil.rmtree(unfinished, ignore_errors=True)
    older = [path for path in KEPT.glob("images-*") if path.is_dir()]
    if older:
        linked(older[0], unfinished)
    unfinished.mkdir(exist_ok=True)
    fill(programs, unfinished, list(images))
    for path in older:
        shutil.rmtree(path)
    unfinished.rename(made)
    return made


def stored() -> Path | None:
    """The store that is there, whatever is in it."""
    return next((path for path in KEPT.glob("images-*") if path.is_dir() and path.name != UNFINISHED), None)


def fill(programs: Programs, root: Path, names: list[str]) -> None:
    """By a containerd of its own, with its mounts in a namespace that ends with it."""
    place = plan.UNPACKING
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    config = place / "config.toml"
    config.write_text(
        f'version = 2\nroot = "{root}"\nstate = "{place}/state"\n'
        f'disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.internal.v1.opt"]\n'
        f'[grpc]\n  address = "{place}/socket"\n'
    )
    env = {"PATH": f"{programs.bin}:{SYSTEM}"}
    ctr = ("ctr", "-a", f"{place}/socket", "-n", NAMESPACE, "images")
    with (place / "log").open("wb") as log:
        # It ends with this process, however this one ends.
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "containerd", "-c", str(config)]
        daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env)
    try:
        wait_for(lambda: attempt(*ctr, "ls", env=env).returncode == 0, "a containerd to unpack images", within=120)
        save = subprocess.Popen(["docker", "save", *names], stdout=subprocess.PIPE)
        done = subprocess.run([*ctr, "import", "-"], stdin=save.stdout, env=env, capture_output=True, text=True)
        if save.wait() != 0 or done.returncode != 0:
            raise LabError("unpack images", f"docker save: {save.returncode}; ctr: {done.stderr.strip()[-500:]}")
        keep = {reference(name) for name in names}
        gone = [name for name in run(*ctr, "ls", "-q", env=env).split() if name not in keep]
        if gone:
            run(*ctr, "rm", "--sync", *gone, env=env)
        lines = [line.split() for line in run(*ctr, "ls", env=env).splitlines()[1:]]
        write(root / registry.NAMES, json.dumps({name: (kind, digest) for name, kind, digest, *_ in lines}))
    finally:
        daemon.terminate()
        daemon.wait()
        shutil.rmtree(place)


def reference(name: str) -> str:
    """Write the name as containerd does: docker.io/library/debian:12."""
    parts = name.split("/")
    named = len(parts) > 1 and ("." in parts[0] or ":" in parts[0] or parts[0] == "localhost")
    if named:
        return name
    return f"docker.io/{name}" if len(parts) > 1 else f"docker.io/library/{name}"


def give(machine: Machine, made: Path) -> None:
    """The machine's containerd begins with the store; a machine that has images keeps them."""
    target = machine.state / "containerd"
    if not any(target.iterdir()):
        linked(made, target)


def linked(source: Path, target: Path) -> None:
    run("cp", "-al", f"{source}/.", target) if target.is_dir() else run("cp", "-al", source, target)
    for database in target.glob("*/*.db"):
        own = database.with_suffix(".own")
        shutil.copyfile(database, own)
        own.replace(database)
