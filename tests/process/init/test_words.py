"""Output of PID 1 for people: its log, and the command line's answers."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.process.init_world import NOTIFIES, World, python, shell

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.root


def minivm(pod: World, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"MINIVM_SOCKET": str(pod.run / "control.sock")}
    command = [sys.executable, "-m", "init.cli", *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=60)


def test_a_death_stands_in_the_pods_log_and_in_inits_own(pod: World) -> None:
    """A service that is killed says nothing itself: both were silent about it."""
    pod.start(
        {"a": {"command": NOTIFIES, "ready": "notify", "restart": {"delay": "1h", "max-delay": "1h", "jitter": 0}}}
    )
    pod.until_ready()
    pod.ask("signal", service="a", signal="KILL")
    pod.until(lambda: "init | a: ready again\n" in pod.output(), "it came back")
    assert "init | a: killed by KILL; starts again\n" in pod.output()
    pod.ask("signal", service="a", signal="KILL")
    pod.until(lambda: "init | a: killed by KILL; failed twice, next start in 3600.0 s\n" in pod.output(), "and waits")
    minivm(pod, "restart", "a")
    said = minivm(pod, "logs").stdout.splitlines()
    assert said[0].startswith("ready: ") and "a: killed by KILL; starts again" in said
    assert "a: restart was asked for" in said and "a: ready again" in said[said.index("a: restart was asked for") :]
    assert "was asked for" not in pod.output() and "ready: " not in pod.output(), "what went well is not news"


def test_a_start_of_a_daemon_that_dies_at_once_is_told_with_its_cause(pod: World) -> None:
    """Ready for a moment is not ready, whether readiness is reported or is the start itself."""
    dies = "time.sleep(0.1); print('no licence'); sys.exit(3)"
    slow = {"delay": "1h", "max-delay": "1h"}
    pod.start(
        {
            "reports": {"command": python(f"tell('READY=1'); {dies}"), "ready": "notify", "restart": slow},
            "silent": {"command": python(dies), "restart": {"when": "never"}},
            "reloads": {
                "command": python("tell('READY=1'); signal.pause()"),
                "ready": "notify",
                "reload": {"signal": "HUP"},
                "restart": {"when": "never"},
            },
            "well": {"command": ["/bin/sleep", "1000"]},
        }
    )
    pod.until(lambda: pod.service("well").ready and pod.service("silent").state == "failed", "they have started")
    for verb in ("start", "restart"):
        for name, state in (("reports", "backoff"), ("silent", "failed")):
            done = minivm(pod, verb, name)
            assert done.returncode == 1 and done.stdout.startswith(f"{name}: {state} (exited 3: no licence"), done
        done = minivm(pod, verb, "well")
        assert (done.returncode, done.stdout) == (0, "well: ready\n")
    done = minivm(pod, "reload", "reloads")
    assert (done.returncode, done.stdout) == (1, "reloads: failed (killed by HUP)\n"), "it does not know the signal"


def test_a_service_that_gives_up_and_one_that_fails_at_each_turn_are_told_once(pod: World) -> None:
    pod.start(
        {
            "bad": {"command": shell("echo wrong; exit 9"), "restart": {"fatal-codes": [9]}},
            "turns": {"kind": "periodic", "every": "20ms", "command": shell("echo $$; exit 4")},
        }
    )
    pod.until(lambda: pod.service("turns").starts > 5, "it ran some times")
    told = [line for line in pod.output().splitlines() if line.startswith("init | ")]
    assert "init | bad: exited 9: wrong; no retry can mend exit code 9" in told
    assert len([line for line in told if line.startswith("init | turns: last run exited 4: ")]) == 1


def test_nothing_written_is_said_to_be_nothing(pod: World) -> None:
    pod.start({"a": {"command": NOTIFIES, "ready": "notify"}})
    pod.until_ready()
    done = minivm(pod, "logs", "a")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "minivm: a has written nothing\n")


def test_of_a_service_that_was_asked_for_no_line_nothing_is_said(pod: World) -> None:
    pod.start({"a": {"command": shell("echo something; exec sleep 1000")}})
    pod.until(lambda: "something" in pod.output(), "it has written something")
    done = minivm(pod, "logs", "a", "-n", "0")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert "-1 is not in the range" in minivm(pod, "logs", "a", "-n", "-1").stderr


def test_a_stop_is_of_one_service_as_its_help_says(pod: World) -> None:
    services = {"munged": {"command": NOTIFIES, "ready": "notify"}}
    pod.start(services | {"slurmd": {"command": NOTIFIES, "ready": "notify", "needs": ["munged"]}})
    pod.until_ready()
    before = pod.service("slurmd").pid
    assert minivm(pod, "stop", "munged").stdout == "munged: stopped (stopped on request)\n"
    assert pod.service("slurmd").pid == before, "jobs run below it"
    assert "services that need it keep running" in " ".join(minivm(pod, "stop", "--help").stdout.split())
    assert minivm(pod, "start", "munged").stdout == "munged: ready\n"
    assert pod.get("/readyz")[0] == 200


def test_a_drain_taken_back_is_told_as_it_went(pod: World, tmp_path: Path) -> None:
    resume = shell(f"test -e {tmp_path}/good || {{ echo no controller; exit 3; }}")
    pod.start({"a": {"command": NOTIFIES, "ready": "notify"}}, {"command": ["/bin/true"], "resume": resume})
    pod.until_ready()
    assert minivm(pod, "drain").stdout == "drained\n"
    failed = minivm(pod, "resume")
    assert (failed.returncode, failed.stdout) == (1, "failed: exited 3: no controller\n"), "it printed `not drained`"
    (tmp_path / "good").touch()
    again = minivm(pod, "resume")
    assert (again.returncode, again.stdout) == (0, "takes work again\n")


def test_refusals_are_sentences(pod: World) -> None:
    pod.start({"munged": {"command": NOTIFIES, "ready": "notify"}})
    pod.until_ready()
    hint = "no such service (did you mean munged?)"
    assert minivm(pod, "why", "mungd").stderr == f"minivm: cannot tell why mungd is not ready: {hint}\n"
    assert minivm(pod, "logs", "mungd").stderr == f"minivm: cannot show the log of mungd: {hint}\n"
    assert minivm(pod, "stop", "mungd").stderr == f"minivm: cannot stop mungd: {hint}\n"
    wrong = minivm(pod, "stauts")
    assert wrong.returncode == 2 and "no command 'stauts' (did you mean status?)" in wrong.stderr


def as_nobody(pod: World, address: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    # A user cannot read this checkout, so everything is imported before.
    modules = "os, difflib, encodings.idna, shutil, init.pod.client, init.view.status"
    code = f"import {modules}; from init.cli import main; os.setuid(65534); main({list(arguments)!r})"
    env = os.environ | {"MINIVM_SOCKET": str(pod.run / "control.sock"), "MINIVM_HTTP": address}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=60)


def test_a_user_learns_why_the_pod_is_not_ready(pod: World) -> None:
    """PID 1 answers root alone on its socket, and tells everybody by HTTP."""
    pod.start(
        {"munged": {"command": shell("echo my secret >&2; exit 3"), "restart": {"delay": "1h", "max-delay": "1h"}}}
    )
    pod.until(lambda: pod.ask("status")["snapshot"]["reasons"] != [], "it has failed")
    address = f"127.0.0.1:{pod.port}"
    done = as_nobody(pod, address, "why")
    assert done.returncode == 1 and "is not ready:\n  munged: exited 3" in done.stdout, done
    assert done.stdout.endswith("Why a job waits, fails or ended: `minivm job`.\n") and "secret" not in done.stdout
    assert "exited 3" in as_nobody(pod, address, "why", "munged").stdout
    assert "did you mean munged?" in as_nobody(pod, address, "why", "mungd").stderr
    assert "`minivm job 12_3`" in as_nobody(pod, address, "why", "12_3").stderr
    table = as_nobody(pod, address, "status")
    assert table.returncode == 0 and "munged" in table.stdout


def test_what_another_process_answers_on_that_port_is_bounded_and_printable(pod: World) -> None:
    pod.start({"munged": {"command": shell("sleep 1000"), "ready": "notify"}})
    pod.until(lambda: pod.ask("status")["snapshot"]["reasons"] != [], "it waits")
    snapshot = pod.ask("status")["snapshot"] | {"reasons": ["\x1b]0;evil\x07munged waits"]}

    class Liar(BaseHTTPRequestHandler):
        body = json.dumps(snapshot).encode()

        def do_GET(self) -> None:
            self.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n" + self.body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Liar) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        shown = as_nobody(pod, address, "why").stdout
        assert "evil" in shown and "\x1b" not in shown and "\x07" not in shown
        Liar.body = b" " * (5 << 20) + Liar.body
        assert "only root may" in as_nobody(pod, address, "why").stderr
        server.shutdown()
    assert "only root may" in as_nobody(pod, "127.0.0.1:x", "why").stderr


@pytest.mark.parametrize("part", [b"X: y\r\n", b" "], ids=["headers", "body"])
def test_an_answer_that_never_ends_holds_no_user(pod: World, part: bytes) -> None:
    """Each piece comes well within any timeout of a single read."""
    pod.start({"munged": {"command": shell("sleep 1000"), "ready": "notify"}})
    pod.until(lambda: pod.ask("status")["snapshot"]["reasons"] != [], "it waits")
    over = threading.Event()

    def drip(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(b"HTTP/1.0 200 OK\r\n" + (b"" if part.strip() else b"\r\n"))
            while not over.wait(0.2):
                connection.sendall(part)

    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = threading.Thread(target=drip, args=(server,))
        sender.start()
        try:
            assert "only root may" in as_nobody(pod, f"127.0.0.1:{server.getsockname()[1]}", "why").stderr
        finally:
            over.set()
            sender.join()


def test_only_root_may_change_a_pod_and_users_are_told_so(pod: World) -> None:
    pod.start({"munged": {"command": NOTIFIES, "ready": "notify"}})
    pod.until_ready()
    for arguments in (["restart", "munged"], ["logs"]):
        done = as_nobody(pod, "127.0.0.1:1", *arguments)
        assert done.returncode == 1 and "only root may, and you are user 65534 (a user has `minivm job`" in done.stderr
    done = as_nobody(pod, "127.0.0.1:1", "why")
    assert done.returncode == 1 and "only root may" in done.stderr, "without an answer by HTTP either"
