"""Built-in commands: what a fork of PID 1 must be like, so that nobody can tell it from a program of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.process.init_world import NOTIFIES, World, shell

pytestmark = pytest.mark.root

# The real entrypoint with one built-in more, whose body a test writes.
ENTRY = """
import sys, time, types
import init.pid1.spawn.procs
from init.pid1.start import end, main
module = types.ModuleType("tested")
exec({code!r}, module.__dict__)
sys.modules["tested"] = module
init.pid1.spawn.procs.BUILTINS["tested"] = ("tested", "main")
end(main(sys.argv[1:], time.monotonic()))
"""
LOOK = """
import json, os, signal, sys
def main():
    fds = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in map(int, os.listdir("/proc/self/fd")) if fd < 3 or
           os.path.exists(f"/proc/self/fd/{fd}")}
    status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines())
    print(json.dumps({
        "fds": sorted(fds), "stdin": fds[0], "leader": os.getsid(0) == os.getpid(), "comm": status["Name"],
        "blocked": int(status["SigBlk"], 16), "caught": int(status["SigCgt"], 16), "umask": status["Umask"],
        "file": os.environ.get("FROM_FILE"), "own": os.environ.get("OWN"), "parent": os.getppid(),
    }), file=sys.stderr)
    print("said on stdout")
    return 0
"""


def start(pod: World, code: str, services: dict[str, dict[str, Any]], **env: Any) -> World:
    """Start PID 1 with the tested built-in under a real one's name, since writing a plan checks it, too."""
    entry = pod.directory / "entry.py"
    entry.write_text(ENTRY.format(code=code))
    pod.write_plan(services)
    pod.plan.write_text(pod.plan.read_text().replace("builtin:fresh-node", "builtin:tested"))
    return pod.start(entry=["-I", str(entry)], **env)


def test_a_built_in_is_as_good_as_a_program_of_its_own(pod: World, tmp_path: Path) -> None:
    file = tmp_path / "environment"
    file.write_text("FROM_FILE=read at its start\n")
    step: dict[str, Any] = {"command": ["builtin:fresh-node"], "kind": "oneshot", "umask": "0027"}
    step |= {"environment-files": [str(file)], "environment": {"OWN": "${MINIVM_POD_NAME}"}}
    start(pod, LOOK, {"a": {"command": NOTIFIES, "ready": "notify"}, "step": step | {"needs": ["a"]}},
          MINIVM_POD_NAME="p")  # fmt: skip
    pod.until_ready()
    pod.until(lambda: "step | said on stdout" in pod.output(), "both streams are in the log")
    line = next(line for line in pod.output().splitlines() if line.startswith("step | {"))
    found = json.loads(line.removeprefix("step | "))
    # Nothing of PID 1's: no socket, no pipe of another service, none of its signal handlers.
    assert found["fds"] == [0, 1, 2], line
    assert found["stdin"] == "/dev/null"
    assert (found["blocked"], found["caught"]) == (0, 0)
    assert found["leader"]
    assert found["parent"] == 1
    assert found["comm"] == "minivm-tested"
    assert found["umask"] == "0027"
    assert (found["file"], found["own"]) == ("read at its start", "p")


def test_nothing_of_a_step_stays_in_pid_1(pod: World) -> None:
    code = "import os\ndef main():\n    os.environ['LEFT'] = 'behind'\n    import decimal\n    return 0\n"
    after = {"command": shell("echo left: $LEFT"), "kind": "oneshot", "needs": ["step"]}
    start(pod, code, {"step": {"command": ["builtin:fresh-node"], "kind": "oneshot"}, "after": after})
    pod.until_ready()
    pod.until(lambda: "after | left:" in pod.output(), "the next service ran")
    assert "behind" not in pod.output()
    assert "decimal" not in Path(f"/proc/{pod.pid}/maps").read_text()


def test_a_bug_in_a_step_shows_its_traceback_and_is_a_failed_start(pod: World) -> None:
    code = "def main():\n    raise RuntimeError('a bug for the test')\n"
    service = {
        "command": NOTIFIES,
        "ready": "notify",
        "prepare": [["builtin:fresh-node"]],
        "restart": {"when": "never"},
    }
    start(pod, code, {"a": service})
    view = pod.until_state("a", "failed")
    assert "builtin:tested (prepare) exited 1: RuntimeError: a bug for the test" in str(view.reasons)
    assert "a | Traceback (most recent call last):" in pod.output()
    assert pod.stop() == 0


def test_a_step_that_hangs_is_stopped_like_a_program(pod: World) -> None:
    code = "import signal\ndef main():\n    print('hangs', flush=True)\n    signal.pause()\n"
    step = {"command": ["builtin:fresh-node"], "kind": "oneshot", "timeout": "200ms", "restart": {"when": "never"}}
    start(pod, code, {"step": step})
    assert "did not finish within 0.2 s" in str(pod.until_state("step", "failed").reasons)
    assert pod.service("step").last_exit == "killed by TERM"


def test_a_real_step_ends_with_its_reason_and_its_code(pod: World) -> None:
    """The real preparation: a setting that is wrong is 78, and no retry can mend that."""
    step = {"command": ["builtin:prepare", "slurmdbd-config"], "kind": "oneshot", "restart": {"fatal-codes": [78]}}
    pod.start({"step": step}, MINIVM_ACCOUNTING="embeded")
    view = pod.until_state("step", "failed")
    assert "did you mean embedded?" in str(view.reasons)
    assert "no retry can mend exit code 78" in str(view.reasons)
    assert (view.last_exit, view.starts) == ("exited 78", 1)
