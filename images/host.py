"""Prepare the host: install what this machine lacks to build and test, and say what is installed.

Standard library only, because it runs before anything is installed. It installs on Debian and Ubuntu with apt;
elsewhere it names what is missing and stops.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
COPIED = ROOT / "build" / "tools"

# By what needs it: what must answer -> the Debian package that brings it.
TOOLS: Mapping[str, Mapping[str, str]] = tomllib.loads(Path(__file__).with_name("host.toml").read_text())
OWN_ENGINE = "unix:///var/run/docker.sock"
ENGINE_PID = Path("/var/run/docker.pid")
ENGINE_LOG = Path("/var/log/minivm-dockerd.log")
ENGINE_START_DEADLINE = 60.0
NOBODY = "nothing answers there"


class HostError(Exception):
    """An error that says why this machine cannot be made ready, and what to do."""


def log(text: str) -> None:
    print(f"host: {text}", flush=True)


def missing_packages(tools: Mapping[str, str]) -> list[str]:
    """Return the packages whose tool is missing, each once, in the table's order."""

    def present(tool: str) -> bool:
        if tool.startswith("/"):
            return Path(tool).exists()
        return shutil.which(tool, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is not None

    return list(dict.fromkeys(package for tool, package in tools.items() if not present(tool)))


def apt_install(packages: Iterable[str]) -> None:
    names = list(packages)
    if not names:
        return
    if shutil.which("apt-get") is None:
        raise HostError(f"cannot install {', '.join(names)}: no apt-get here; install the equivalents by hand")
    if os.geteuid() != 0:
        raise HostError(
            f"cannot install {', '.join(names)}: not root; run `sudo apt-get install {' '.join(names)}`, then again"
        )
    log(f"installing {', '.join(names)}")
    env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-qq", "-y", "--no-install-recommends", *names]
    for command in (["apt-get", "update", "-qq"], install):
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise HostError(f"cannot install {', '.join(names)}: `{' '.join(command)}` said:\n{done.stderr.strip()}")


def copy_out(tool: str, package: str) -> None:
    """Copy a program out of a Debian package that is not installed."""
    if shutil.which(tool) or (COPIED / tool).exists():
        return
    log(f"copying {tool} out of {package}")
    with tempfile.TemporaryDirectory() as directory:
        download = ["apt-get", "download", "-qq", package]
        # The lists of packages may be missing or old.
        for command in (download, ["apt-get", "update", "-qq"], download):
            done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
            if done.returncode == 0 and command is download:
                break
        packages = list(Path(directory).glob("*.deb"))
        if not packages:
            raise HostError(f"cannot copy {tool} out of {package}: `{' '.join(download)}` said:\n{done.stderr.strip()}")
        subprocess.run(["dpkg-deb", "-x", str(packages[0]), directory], check=True)
        COPIED.mkdir(parents=True, exist_ok=True)
        part = COPIED / f".{tool}"
        shutil.copy(Path(directory, "usr", "bin", tool), part)
        part.replace(COPIED / tool)


def ensure_venv() -> None:
    """Make a virtual environment with exactly requirements.txt, and this project in it, editable."""
    if importlib.util.find_spec("ensurepip") is None:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        apt_install([f"{version}-venv"])
    log(f"python packages of requirements.txt into {VENV}")
    pip = [str(VENV / "bin/python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    steps = [
        [sys.executable, "-m", "venv", str(VENV)],
        [*pip, "-r", str(ROOT / "requirements.txt")],
        [*pip, "--no-deps", "-e", str(ROOT)],
    ]
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise HostError(f"cannot make {VENV}: `{' '.join(step)}` said:\n{(done.stderr or done.stdout).strip()}")
    (VENV / "ready").touch()


def rerun_in_venv() -> NoReturn:
    """Run this program again with the Python of the virtual environment, which has its imports."""
    python = VENV / "bin/python"
    if not python.exists():
        sys.exit(f"error: cannot run {sys.argv[0]}: no {VENV} with its Python packages\nhint: `make images` makes it")
    os.execv(python, [str(python), *sys.orig_argv[1:]])


def engine_answers(address: str) -> bool:
    return not why_silent(address, 5.0)


def why_silent(address: str, within: float) -> str:
    """Explain why the engine at a unix socket does not answer a ping; empty if it does. A busy engine gets time."""
    deadline = time.monotonic() + within
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            while True:
                connection.settimeout(max(0.1, deadline - time.monotonic()))
                try:
                    connection.connect(address)
                    break
                except BlockingIOError:  # as many wait as its queue takes
                    if time.monotonic() > deadline:
                        raise TimeoutError from None
                    time.sleep(0.1)
            connection.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
            reply = connection.recv(64)
    except TimeoutError:
        return f"the listener there does not answer within {within:g} s"
    except PermissionError:
        return "you may not ask it: root may, and who is in its socket's group (docker)"
    except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
        return NOBODY
    except OSError as error:
        return f"it cannot be asked: {error.strerror or error}"
    return "" if b"200" in reply else f"what answers there is no docker engine: {reply[:30].decode(errors='replace')!r}"


def choose_engine(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the engine's address, and what selected it: empty for the machine's own. Follows docker's own rules."""
    if environ.get("DOCKER_HOST"):
        return environ["DOCKER_HOST"], "DOCKER_HOST"
    settings = Path(environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
    context = environ.get("DOCKER_CONTEXT")
    source = "DOCKER_CONTEXT" if context else str(settings / "config.json")
    try:
        context = context or json.loads((settings / "config.json").read_text()).get("currentContext")
    except (OSError, ValueError, AttributeError):
        context = None
    if context in (None, "", "default"):
        return OWN_ENGINE, ""
    meta = settings / "contexts/meta" / hashlib.sha256(context.encode()).hexdigest() / "meta.json"
    try:
        return str(json.loads(meta.read_text())["Endpoints"]["docker"]["Host"]), f"docker's context {context}"
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise HostError(f"cannot find docker's context {context}, which {source} names: `docker context ls`") from error


def ensure_engine() -> None:
    """Make sure that a docker engine answers: the selected one, or this machine's own, installed and started."""
    engine, chosen_by = choose_engine(os.environ)
    address = engine.removeprefix("unix://")
    reason = why_silent(address, ENGINE_START_DEADLINE) if engine.startswith("unix://") else ""
    if chosen_by and reason:
        # A chosen engine is never replaced by the machine's own.
        raise HostError(
            f"cannot reach the docker engine: {chosen_by} says {engine}, and {reason}; start that engine, or unset it"
            " for the machine's own"
        )
    apt_install(missing_packages(without_engine(TOOLS["engine"]) if chosen_by else TOOLS["engine"]))
    if chosen_by or not reason:
        return
    if reason != NOBODY:  # a second engine would take its socket and share its files
        raise HostError(f"cannot reach the docker engine at {address}: {reason}")
    if os.geteuid() != 0:
        raise HostError(f"cannot reach the docker engine at {address}: not root, so it cannot be started from here")
    start_engine(address)


def without_engine(tools: Mapping[str, str]) -> dict[str, str]:
    return {tool: package for tool, package in tools.items() if package != "docker.io"}


def start_engine(address: str) -> None:
    if alive := running_engine():
        log(f"waiting for the docker engine, process {alive}, to answer at {address}")
    elif Path("/run/systemd/system").exists():
        log("starting the docker engine (systemctl start docker)")
        subprocess.run(["systemctl", "start", "docker"], check=False)
    else:
        log(f"starting the docker engine (dockerd, log in {ENGINE_LOG})")
        # A pid file left by a machine that went down names a foreign process, and dockerd would refuse to start.
        ENGINE_PID.unlink(missing_ok=True)
        with ENGINE_LOG.open("ab") as output:
            subprocess.Popen(
                ["dockerd", "--host", f"unix://{address}"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
    deadline = time.monotonic() + ENGINE_START_DEADLINE
    while not engine_answers(address):
        if time.monotonic() > deadline:
            if alive := running_engine():
                raise HostError(
                    f"cannot reach the docker engine: process {alive} does not answer at {address}; if it serves at"
                    " another address, DOCKER_HOST names it"
                )
            tail = ENGINE_LOG.read_text(errors="replace").splitlines()[-8:] if ENGINE_LOG.exists() else []
            raise HostError(
                f"cannot start the docker engine: no answer at {address} within {ENGINE_START_DEADLINE:.0f} s\n"
                + "\n".join(tail)
            )
        time.sleep(0.1)


def running_engine() -> int:
    """Return the process of an engine that runs but does not answer; a second one would share its files."""
    try:
        pid = int(ENGINE_PID.read_text())
        return pid if Path(f"/proc/{pid}/comm").read_text().strip() == "dockerd" else 0
    except (OSError, ValueError):
        return 0


def ensure_emulation(names: str) -> None:
    """Make sure that this kernel runs programs of these architectures, registering Debian's qemu if needed."""
    sys.path.insert(0, str(ROOT))
    from ground.errors import Problem
    from images import architectures

    try:
        arches = architectures.parse_architectures(names)
    except Problem as error:
        raise HostError(str(error)) from error
    for arch in arches:
        if arch == architectures.read_own():
            continue
        if architectures.find_interpreter(arch) is None:
            register(arch)
        if reason := architectures.explain_refusal(arch):
            raise HostError(f"cannot build for {arch}: {reason}")
        apt_install(missing_packages(TOOLS["emulation"]))


def register(arch: str) -> None:
    from images import architectures

    interpreter = architectures.name_interpreter(arch)
    apt_install(missing_packages({interpreter: "qemu-user-static"}))
    if architectures.find_interpreter(arch):  # its package did, as it does where systemd runs
        return
    try:
        if not (architectures.REGISTRY / "register").exists():
            log(f"mounting {architectures.REGISTRY}")
            subprocess.run(["mount", "-t", "binfmt_misc", "binfmt_misc", str(architectures.REGISTRY)], check=True)
        log(f"{interpreter} runs programs of {arch} until this machine's next start (binfmt_misc)")
        (architectures.REGISTRY / "register").write_bytes(architectures.make_registration(arch))
    except FileExistsError:
        return  # another process registered it, or it is switched off: the caller checks again
    except (OSError, subprocess.CalledProcessError) as error:
        raise HostError(
            f"cannot run programs of {arch} here: {interpreter} could not be registered: {error}; "
            f"on a container or a small kernel, register it on the machine around it, or build on one of {arch}"
        ) from error


def ensure_test_tools() -> None:
    apt_install(missing_packages(TOOLS["test"]))
    for tool, package in TOOLS["copied"].items():
        copy_out(tool, package)
    try:
        apt_install(missing_packages(TOOLS["browser"]))
    except HostError as error:
        log(f"no browser, and its tests are skipped: {error}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="images/host.py", description=__doc__)
    steps: dict[str, Callable[[], None]] = {
        "venv": ensure_venv,
        "engine": ensure_engine,
        "test-tools": ensure_test_tools,
    }
    parser.add_argument("step", choices=(*steps, "emulation"), help="what to make sure of")
    parser.add_argument("arch", nargs="?", default="", help="for emulation: arm64, amd64, or both")
    options = parser.parse_args()
    try:
        steps.get(options.step, lambda: ensure_emulation(options.arch))()
    except HostError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
