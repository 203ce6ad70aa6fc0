"""The supervisors that init is measured against, each running the same services as PID 1."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable


@dataclass(frozen=True, slots=True)
class Peer:
    """One supervisor; `argv` returns its command, or None if it cannot run the services."""

    name: str

    def argv(self, directory: Path, services: Mapping[str, list[str]], chain: bool = False) -> list[str] | None:
        raise NotImplementedError

    def available(self) -> bool:
        return True


def after(name: str, directory: Path) -> str:
    return str(directory / f"ready-{name}")


# Said by the checkout that is measured: a plan's form is its own affair. An older one has these modules elsewhere.
COMPILE = """
import json, sys
try:
    from init.plan.compile import compile_plan, plan_to_json
    from init.plan.spec import parse_service
except ImportError:
    from init.plan import compile_plan, plan_to_json
    from init.spec import parse_service
services = json.load(sys.stdin)
print(plan_to_json(compile_plan("bench", [parse_service(name, what, "bench") for name, what in services.items()])))
"""


@dataclass(frozen=True, slots=True)
class MinivmPeer(Peer):
    root: Path = ROOT

    def argv(self, directory: Path, services: Mapping[str, list[str]], chain: bool = False) -> list[str] | None:
        specs, before = {}, ""
        for name, command in services.items():
            mapping: dict[str, object] = {"command": [part.replace("$", "$$") for part in command]}
            mapping["restart"] = {"window": "50ms"}
            if chain:
                mapping |= {"ready": {"file": after(name, directory)}, "needs": [before] if before else []}
            specs[name] = mapping
            before = name
        plan = directory / "plan.json"
        made = [sys.executable, "-c", COMPILE]
        done = subprocess.run(made, cwd=self.root, input=json.dumps(specs), capture_output=True, text=True, check=True)
        plan.write_text(done.stdout)
        return [PYTHON, "-I", "-S", "-Xutf8", str(self.root / "init/__main__.py"), "--plan", str(plan)]


class Floor(Peer):
    def argv(self, directory: Path, services: Mapping[str, list[str]], chain: bool = False) -> list[str] | None:
        if chain:
            return None
        plan = directory / "floor.json"
        plan.write_text(json.dumps(dict(services)))
        return [PYTHON, "-I", "-S", str(ROOT / "bench/init_floor.py"), str(plan)]


class Supervisord(Peer):
    def available(self) -> bool:
        return self._command() is not None

    def _command(self) -> str | None:
        beside = Path(sys.executable).with_name("supervisord")
        return str(beside) if beside.exists() else shutil.which("supervisord")

    def argv(self, directory: Path, services: Mapping[str, list[str]], chain: bool = False) -> list[str] | None:
        if chain:
            return None  # it has no order
        text = "[supervisord]\nnodaemon=true\nuser=root\n"
        text += f"logfile=/dev/null\nlogfile_maxbytes=0\npidfile={directory}/pid\nchildlogdir={directory}\n"
        for name, command in services.items():
            script = directory / f"{name}.sh"
            script.write_text("#!/bin/sh\n" + command[2] + "\n" if command[0] == "/bin/sh" else quoted(command))
            script.chmod(0o755)
            text += f"[program:{name}]\ncommand={script}\nautorestart=true\nstartretries=1000\n"
            text += "stdout_logfile=/dev/fd/1\nstdout_logfile_maxbytes=0\n"
        config = directory / "supervisord.conf"
        config.write_text(text)
        return [str(self._command()), "-c", str(config)]


def quoted(command: list[str]) -> str:
    import shlex

    return f"#!/bin/sh\nexec {shlex.join(command)}\n"


class S6(Peer):
    def available(self) -> bool:
        return shutil.which("s6-svscan") is not None

    def argv(self, directory: Path, services: Mapping[str, list[str]], chain: bool = False) -> list[str] | None:
        scan = directory / "scan"
        before = ""
        for name, command in services.items():
            service = scan / name
            service.mkdir(parents=True, exist_ok=True)
            lines = ["#!/bin/sh"]
            if chain:  # ordering is s6-rc's; by hand it is a wait for the one before
                (service / "notification-fd").write_text("3\n")
                # It may look before the other's supervisor is there, and would give up.
                wait = f"until s6-svwait -U {scan}/{before} 2>/dev/null; do sleep 0.002; done"
                lines += [wait] if before else []
            lines.append(command[2] if command[0] == "/bin/sh" else quoted(command).splitlines()[1])
            (service / "run").write_text("\n".join(lines) + "\n")
            (service / "run").chmod(0o755)
            before = name
        return ["s6-svscan", str(scan)]


class Reaper(Peer):
    """A reaper such as tini or dumb-init: one child, and orphans."""

    def available(self) -> bool:
        return shutil.which(self.name) is not None

    def argv(self, directory: Path, services: Mapping[str, list[str]], chain: bool = False) -> list[str] | None:
        if len(services) != 1:
            return None
        return [self.name, "--", *next(iter(services.values()))]


BEFORE = os.environ.get("BENCH_BEFORE", "")
PEERS: tuple[Peer, ...] = (
    MinivmPeer("init"),
    *((MinivmPeer("init before", Path(BEFORE).resolve()),) if BEFORE else ()),
    Floor("bare Python loop"),
    Supervisord("supervisord"),
    S6("s6"),
    Reaper("tini"),
    Reaper("dumb-init"),
)
