"""A real PID 1: start in order, readiness of every kind, crashes, stops."""

from __future__ import annotations

import os
import signal
import socket
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from threading import Thread

import pytest

from init.errors import InitError
from tests.process.init_world import NOTIFIES, World, python, shell
from tests.waiting import PATIENCE

pytestmark = pytest.mark.root


def test_a_chain_starts_in_order_and_stops_in_reverse(pod: World) -> None:
    names = ["a", "b", "c"]
    services = {
        name: {
            "command": python(
                f"print('up {name}'); tell('READY=1')\n"
                f"signal.signal(signal.SIGTERM, lambda *_: (print('down {name}'), sys.exit(0)))\nsignal.pause()"
            ),
            "ready": "notify",
            "needs": names[:place][-1:],
        }
        for place, name in enumerate(names)
    }
    pod.start(services)
    pod.until_ready()
    assert pod.stop() == 0
    lines = [line for line in pod.output().splitlines() if "|" in line]
    assert lines == ["a | up a", "b | up b", "c | up c", "c | down c", "b | down b", "a | down a"]


def test_a_service_that_may_be_late_is_not_stopped_and_holds_nothing_up(pod: World, tmp_path: Path) -> None:
    flag = tmp_path / "converted"
    pod.start(
        {
            "database": {
                "command": ["/bin/sleep", "1000"],
                "ready": {"file": str(flag), "interval": "50ms", "within": "500ms", "late": "wait"},
            },
            "jobs": {"command": NOTIFIES, "ready": "notify", "after": ["database"]},
        }
    )
    pod.until_state("jobs", "ready")
    late = pod.service("database")
    assert late.state == "starting" and late.failures == 0 and f"file {flag} missing" in str(late.reasons)
    reply = pod.ask("start", service="database", wait=True)
    assert reply["state"] == "starting", "the answer does not wait, either"
    assert pod.get("/readyz")[0] == 503 and pod.get("/startupz")[0] == 200, "the kubelet does not restart the pod"
    flag.touch()
    pod.until_ready()
    assert pod.service("database").pid == late.pid


def test_every_kind_of_readiness(pod: World, tmp_path: Path) -> None:
    """Each is waited for with its reason, and is ready once what it waits for is there."""
    flag, unix, checked = tmp_path / "deep" / "er" / "flag", tmp_path / "x.sock", tmp_path / "checked"
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    pod.start(
        {
            "file": {"command": ["/bin/sleep", "1000"], "ready": {"file": str(flag)}},
            "socket": {"command": ["/bin/sleep", "1000"], "ready": {"socket": str(unix)}},
            "tcp": {"kind": "gate", "ready": {"tcp": f"localhost:{port}"}},
            "exec": {
                "command": ["/bin/sleep", "1000"],
                "ready": {"exec": shell(f"echo not yet; test -e {checked}"), "interval": "50ms"},
            },
            "late": {"command": NOTIFIES, "ready": "notify", "needs": ["tcp"]},
        }
    )
    pod.until(lambda: "not yet" in str(pod.service("exec").reasons), "the probe's last line is the reason")
    pod.until(lambda: "refused" in str(pod.service("late").reasons), "the leaf cause is told")
    reasons = "\n".join(pod.snapshot().reasons)
    assert f"file {flag} missing" in reasons
    assert f"socket {unix} missing" in reasons
    assert f"late waits for tcp: tcp localhost:{port} refused for" in reasons
    address = socket.getaddrinfo("localhost", port, type=socket.SOCK_STREAM)[0][4][0]
    assert f"(resolves to {address}" in reasons
    assert pod.get("/readyz")[0] == 503 and pod.get("/startupz")[0] == 503 and pod.get("/livez")[0] == 200
    flag.parent.mkdir(parents=True)
    flag.touch()
    checked.touch()
    listener.listen()
    with socket.socket(socket.AF_UNIX) as served:
        served.bind(str(unix))
        pod.until(lambda: "refused" in str(pod.service("socket").reasons), "bound is not yet listening")
        served.listen()
        pod.until_ready()
    assert pod.get("/readyz") == (200, "ok\n") and pod.get("/startupz")[0] == 200
    listener.close()


class Port:
    """Server that sends its current answer to each client; None stays silent until the client leaves."""

    def __init__(self, answer: bytes | None) -> None:
        self.answer, self.asked = answer, list[bytes]()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                stream = self.listener.accept()[0]
            except OSError:
                return
            Thread(target=self._serve, args=(stream,), daemon=True).start()

    def _serve(self, stream: socket.socket) -> None:
        with stream, suppress(OSError):
            self.asked.append(stream.recv(1024))
            if self.answer is None:
                stream.recv(1)
            else:
                stream.sendall(self.answer)

    def __enter__(self) -> Port:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (None, "accepts and does not answer"),
        (b"HTTP/1.1 503 Slurm is away\r\n\r\n", "answers 503"),
        (b"HTTP/1.1 2000 OK\r\n\r\n", "does not answer in HTTP"),
        (b"SSH-2.0-OpenSSH_10.0\r\n", "does not answer in HTTP"),
        (b"x" * 100_000, "does not answer in HTTP"),
    ],
)
def test_a_port_is_asked_by_http_and_its_words_are_not_repeated(pod: World, answer: bytes | None, why: str) -> None:
    """The port accepts connections before it is ready; a bare connect would have taken it for ready."""
    with Port(answer) as port:
        target = f"{port.address}/readyz"
        pod.start({"gate": {"kind": "gate", "ready": {"http": target, "interval": "100ms", "timeout": "2s"}}})
        pod.until(lambda: f"http {target} {why} for" in str(pod.service("gate").reasons), "it is told")
        assert "away" not in str(pod.snapshot())
        port.answer = b"HTTP/1.1 204 NO CONTENT\r\n\r\n"
        pod.until_ready()
        assert set(port.asked) == {b"GET /readyz HTTP/1.0\r\n\r\n"}


def test_a_port_that_hangs_up_without_a_word_speaks_no_http_and_counts(pod: World) -> None:
    """Slurm's daemons do so where a site has switched their HTTP off."""
    with Port(b"") as port:
        pod.start({"gate": {"kind": "gate", "ready": {"http": f"{port.address}/readyz"}}})
        pod.until_ready()


def test_a_gate_looks_where_a_preparation_found_out_to_look(pod: World, tmp_path: Path) -> None:
    """The name of a cluster's controller is known at the boot alone: the file is not there before."""
    found = tmp_path / "env"
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        write = f"echo WHERE=127.0.0.1:{listener.getsockname()[1]} > {found}"
        pod.start(
            {
                "prepare": {"kind": "oneshot", "command": shell(write)},
                "gate": {
                    "kind": "gate",
                    "needs": ["prepare"],
                    "environment-files": [str(found)],
                    "ready": {"tcp": "${WHERE:-nowhere.invalid:1}"},
                },
            }
        )
        pod.until_ready()


def test_a_file_that_comes_by_rename_is_noticed(pod: World, tmp_path: Path) -> None:
    pod.start({"a": {"command": ["/bin/sleep", "1000"], "ready": {"file": str(tmp_path / "d" / "f")}}})
    pod.until_state("a", "starting")
    (tmp_path / "staged").mkdir()
    (tmp_path / "staged" / "f").touch()
    (tmp_path / "staged").rename(tmp_path / "d")
    pod.until_ready()


def test_a_crash_is_restarted_at_once_and_then_backs_off(pod: World) -> None:
    pod.start({"a": {"command": NOTIFIES, "ready": "notify", "restart": {"delay": "1h", "max-delay": "1h"}}})
    pod.until_ready()
    first = pod.service("a").pid
    pod.ask("signal", service="a", signal="KILL")
    pod.until(lambda: (v := pod.service("a")).ready and v.pid != first, "it runs again")
    pod.ask("signal", service="a", signal="KILL")
    view = pod.until_state("a", "backoff")
    assert view.failures == 2 and view.starts == 2 and view.last_exit == "killed by KILL"
    assert view.next_start_in is not None and view.next_start_in > 2000
    status, text = pod.get("/readyz")
    assert status == 503 and "killed by KILL; failed twice, next start in" in text
    assert pod.get("/startupz")[0] == 200, "it was ready once"
    assert pod.ask("start", service="a")["state"] == "ready"


def test_an_exhausted_critical_service_ends_the_pod(pod: World) -> None:
    """The pod ends in order, with the documented code, and with the reason where Kubernetes looks.

    The reason lacks the daemon's own words, since more people read a pod's status than its log.
    """
    restart = {"limit": 2, "delay": "10ms", "exhausted": "end-pod"}
    pod.start(
        {
            "base": {
                "command": python("tell('READY=1')\ntry: signal.pause()\nfinally: print('never')"),
                "ready": "notify",
            },
            "bad": {"command": shell("echo no licence; exit 3"), "needs": ["base"], "restart": restart},
        }
    )
    assert pod.ended() == 69
    assert pod.last_words.read_text() == "bad exited 3; gave up after 3 failures within 60 s\n"
    assert "ended: bad exited 3: no licence; gave up after 3 failures" in pod.output()
    assert pod.output().count("bad | no licence") == 3


def test_an_exhausted_service_degrades_with_its_reason(pod: World) -> None:
    pod.start(
        {
            "fine": {"command": NOTIFIES, "ready": "notify"},
            "bad": {"command": shell("echo wrong key >&2; exit 9"), "restart": {"fatal-codes": [9]}},
            "after": {"command": NOTIFIES, "ready": "notify", "after": ["bad"]},
        }
    )
    assert pod.until_state("bad", "failed").starts == 1
    pod.until_state("after", "ready")
    pod.until_state("fine", "ready")
    (reason,) = pod.snapshot().reasons
    assert reason == "bad: exited 9: wrong key; no retry can mend exit code 9"
    assert pod.stop() == 0


def test_a_proof_is_tried_until_it_succeeds(pod: World, tmp_path: Path) -> None:
    key = tmp_path / "key"
    pod.start(
        {
            "proof": {
                "kind": "oneshot",
                "command": shell(f"test -e {key} || {{ echo the key is not there; exit 1; }}"),
                "restart": {"delay": "20ms", "max-delay": "20ms"},
            },
            "user": {"command": NOTIFIES, "ready": "notify", "needs": ["proof"]},
        }
    )
    pod.until(lambda: "the key is not there" in str(pod.snapshot().reasons), "the reason is the last line")
    assert pod.service("user").state == "waiting"
    key.touch()
    pod.until_ready()
    assert pod.service("proof").state == "done"


def test_a_service_that_ignores_term_costs_only_its_own_grace(pod: World) -> None:
    """The others are told at once, and the exit code says that something had to be killed."""
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN); tell('READY=1')\nwhile True: signal.pause()"
    pod.start(
        {
            "a": {"command": NOTIFIES, "ready": "notify"},
            "deaf": {"command": python(deaf), "ready": "notify", "stop": {"grace": "300ms"}},
            "b": {"command": NOTIFIES, "ready": "notify"},
            "top": {"command": NOTIFIES, "ready": "notify", "needs": ["deaf"]},
        }
    )
    pod.until_ready()
    assert pod.stop() == 75


def test_a_second_term_hurries(pod: World, tmp_path: Path) -> None:
    """Graces of ten minutes are cut; without it this test would meet its deadline."""
    deaf = "signal.signal(signal.SIGTERM, lambda *_: print('heard')); tell('READY=1')\nwhile True: signal.pause()"
    pod.start({"deaf": {"command": python(deaf), "ready": "notify", "stop": {"grace": "10m"}}}, grace=900)
    pod.until_ready()
    pod.term()
    pod.until(lambda: "deaf | heard" in pod.output(), "the first TERM arrived")
    pod.term()
    assert pod.ended() == 75


def test_the_whole_stop_has_one_deadline(pod: World) -> None:
    """A chain of the deaf with long graces: all are shortened alike, and it ends within the pod's grace period."""
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN); tell('READY=1')\nwhile True: signal.pause()"
    names = ["a", "b", "c"]
    services = {
        name: {
            "command": python(deaf), "ready": "notify", "stop": {"grace": "10m"}, "needs": names[:place][-1:],
        }
        for place, name in enumerate(names)
    }  # fmt: skip
    pod.start(services, grace=3)
    pod.until_ready()
    assert pod.stop() == 75


def test_drain_runs_before_the_stop_and_only_once(pod: World, tmp_path: Path) -> None:
    """preStop asks for it over the socket, TERM comes while it runs: both wait for the same drain."""
    go, count = tmp_path / "go", tmp_path / "count"
    pod.start(
        {"a": {"command": python("tell('READY=1')\nsignal.pause()"), "ready": "notify"}},
        {"command": shell(f"echo x >> {count}; while ! test -e {go}; do sleep 0.01; done; echo drained it")},
        grace=60,
    )
    pod.until_ready()
    assert pod.ask("drain", wait=False)["drain"] == "draining"
    pod.until(count.exists, "the drain runs")
    assert "drain: draining" in pod.get("/readyz")[1]
    pod.term()
    pod.until(lambda: pod.snapshot().phase == "draining", "the stop waits for the drain")
    assert pod.service("a").ready, "nothing is stopped before the drain has ended"
    go.touch()
    assert pod.ended() == 0
    assert count.read_text() == "x\n"
    assert "drain | drained it" in pod.output()


def test_a_drain_says_in_the_status_what_it_waits_for(pod: World) -> None:
    pod.start(
        {"a": {"command": NOTIFIES, "ready": "notify"}},
        {"command": python("tell('STATUS=waiting for 2 jobs: 4711 4712')\nsignal.pause()")},
    )
    pod.until_ready()
    pod.ask("drain", wait=False)
    pod.until(lambda: pod.snapshot().drain == "draining: waiting for 2 jobs: 4711 4712", "the drain tells")


def test_a_drain_over_its_budget_does_not_hold_the_stop(pod: World) -> None:
    pod.start(
        {"a": {"command": NOTIFIES, "ready": "notify"}},
        {"command": shell("trap '' TERM; while :; do sleep 0.05; done"), "budget": "200ms"},
        grace=30,
    )
    pod.until_ready()
    assert pod.stop() in (0, 75)


def test_resume_takes_a_drain_back(pod: World, tmp_path: Path) -> None:
    back = tmp_path / "back"
    pod.start(
        {"a": {"command": NOTIFIES, "ready": "notify"}},
        {"command": ["/bin/true"], "resume": ["/bin/touch", str(back)]},
    )
    pod.until_ready()
    assert pod.ask("drain")["drain"] == "drained"
    assert pod.get("/readyz") == (503, "drain: drained\n")
    assert pod.ask("resume")["drain"] == ""
    assert back.exists()
    assert pod.get("/readyz")[0] == 200


def asked(pod: World, op: str) -> Future[str]:
    """Send a request in the background and return its final answer; several requests may run at once."""
    told: Future[str] = Future()

    def ask() -> None:
        try:
            told.set_result(str(pod.ask(op)["drain"]))
        except (InitError, EOFError, OSError) as error:
            told.set_result(str(error))

    Thread(target=ask, daemon=True).start()
    return told


def test_a_drain_that_still_waits_is_taken_back_and_both_are_told(pod: World) -> None:
    """A user drains, sees which job is in the way, and takes the drain back."""
    pod.start(
        {"a": {"command": NOTIFIES, "ready": "notify"}},
        {"command": python("tell('STATUS=waiting for 1 job: 4711'); signal.pause()"), "resume": ["/bin/true"]},
    )
    pod.until_ready()
    drain = asked(pod, "drain")
    pod.until(lambda: "4711" in pod.snapshot().drain, "it waits for the job")
    assert asked(pod, "resume").result(PATIENCE) == ""
    assert "taken back" in drain.result(PATIENCE)
    assert pod.get("/readyz")[0] == 200


def test_of_drain_and_resume_the_last_word_counts_and_never_both_run(pod: World, tmp_path: Path) -> None:
    """Two people at once, or a hook and a person: nobody waits for ever, and the node hears of one at a time."""
    alone, ran = tmp_path / "alone", tmp_path / "ran"
    alone.touch()
    # Only the shell holds the lock: what it runs outlives it for a moment, and is not the errand.
    slow = f"exec 9<{alone}; flock -n 9 || echo BOTH >>{ran}; sleep 0.2 9<&-; echo $0 >>{ran}"
    pod.start(
        {"a": {"command": NOTIFIES, "ready": "notify"}},
        {"command": [*shell(slow), "drain"], "resume": [*shell(slow), "resume"]},
    )
    pod.until_ready()
    for last, word in (("resume", ""), ("drain", "drained"), ("resume", "")):
        for other in [asked(pod, op) for op in ("drain", "resume") * 3]:
            other.result(PATIENCE)
        assert asked(pod, last).result(PATIENCE) == word
        assert pod.get("/readyz")[0] == (503 if word else 200)
    assert "BOTH" not in ran.read_text()


def test_the_end_drains_also_while_a_resume_runs(pod: World, tmp_path: Path) -> None:
    drained, resumes = tmp_path / "drained", tmp_path / "resumes"
    pod.start(
        {"a": {"command": NOTIFIES, "ready": "notify"}},
        {"command": shell(f"echo once >>{drained}"), "resume": shell(f"touch {resumes}; exec sleep 1000")},
    )
    pod.until_ready()
    asked(pod, "drain").result(PATIENCE)
    asked(pod, "resume")
    pod.until(resumes.exists, "the resume runs")
    assert pod.stop() == 0
    assert drained.read_text() == "once\nonce\n"


def test_a_watchdog_restarts_a_service_that_hangs(pod: World) -> None:
    hang = "tell('READY=1'); tell('WATCHDOG=1'); print('pid', os.getpid(), os.environ['WATCHDOG_USEC']); signal.pause()"
    pod.start({"a": {"command": python(hang), "ready": "notify", "watchdog": "200ms"}})
    pod.until(lambda: pod.service("a").failures >= 1, "the watchdog bit")
    assert "watchdog: no sign of life for 0.2 s" in str(pod.ask("trace")["events"])
    pod.until(lambda: "200000" in pod.output(), "its environment tells the period")


def test_a_watchdog_that_is_fed_stays_quiet(pod: World) -> None:
    fed = "tell('READY=1')\nfor _ in range(80): tell('WATCHDOG=1'); time.sleep(0.1)\nprint('fed'); signal.pause()"
    pod.start({"a": {"command": python(fed), "ready": "notify", "watchdog": "4s"}})
    pod.until(lambda: "a | fed" in pod.output(), "it lived twice as long as one period")
    assert pod.service("a").failures == 0


def test_prepare_runs_before_each_start(pod: World, tmp_path: Path) -> None:
    pod.start(
        {
            "a": {
                "command": NOTIFIES, "ready": "notify", "user": "nobody",
                "prepare": [shell("echo one; id -u"), shell(f"echo two; test ! -e {tmp_path}/stop")],
            }
        }
    )  # fmt: skip
    pod.until_ready()
    pod.ask("signal", service="a", signal="KILL")
    pod.until(lambda: pod.service("a").starts == 2 and pod.service("a").ready, "it runs again")
    assert pod.output().count("a | one\na | 0\na | two\n") == 2
    (tmp_path / "stop").touch()
    assert pod.ask("restart", service="a")["ready"] is False
    assert "/bin/sh (prepare) exited 1: two" in str(pod.service("a").reasons)


def test_who_a_service_is(pod: World, tmp_path: Path) -> None:
    """User, groups, umask, directory, limits, environment from every source, capabilities: seen from inside."""
    secret, extra = tmp_path / "secret", tmp_path / "extra"
    secret.write_text("s3cret\n")
    extra.write_text("# a comment\nEXTRA=from file\n")
    show = (
        "import resource\n"
        "status = [line.split() for line in open('/proc/self/status')]\n"
        "caps = [words[1] for words in status if words[0] in ('CapEff:', 'CapBnd:', 'NoNewPrivs:')]\n"
        "print(os.getuid(), os.getgid(), os.getgroups(), oct(os.umask(0)), os.getcwd(), os.getsid(0) == os.getpid())\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE), caps, open('/proc/self/oom_score_adj').read().strip())\n"
        "print(*(os.environ.get(n) for n in ('PLAIN', 'SECRET', 'EXTRA', 'POD', 'NOTIFY_SOCKET', 'HOME')), sep=';')\n"
        "fds = sorted(os.listdir('/proc/self/fd'))\n"
        "print(fds[:3], len(fds), signal.pthread_sigmask(0, []))\n"
    )
    pod.start(
        {
            "a": {
                "kind": "oneshot", "command": python(show), "user": "nobody", "groups": [7, 8], "umask": "0027",
                "cwd": "/usr", "limits": {"nofile": "100:200"}, "capabilities": ["NET_BIND_SERVICE"],
                "no-new-privileges": True, "oom-score": 500, "environment-files": [str(extra), "/nowhere"],
                "environment": {"PLAIN": "x-${POD}-$$", "SECRET": {"secret": str(secret)}},
            }
        },
        POD="pod7",
    )  # fmt: skip
    pod.until_ready()
    lines = [line.removeprefix("a | ") for line in pod.output().splitlines()]
    nobody = 65534
    assert lines[0] == f"{nobody} {nobody} [7, 8] 0o27 /usr True"
    assert lines[1] == "(100, 200) ['0000000000000400', '0000000000000400', '1'] 500"
    assert lines[2] == "x-pod7-$;s3cret;from file;pod7;None;/nonexistent"
    assert lines[3] == "['0', '1', '2'] 4 set()", "no descriptor of PID 1, no blocked signal"
    shown = pod.ask("env", service="a")["environment"]
    assert shown["SECRET"] == "********" and shown["PLAIN"] == "x-pod7-$"


def test_a_start_that_cannot_be_made_says_why(pod: World) -> None:
    pod.start(
        {
            "nobody-here": {"command": ["/bin/true"], "user": "missing-user"},
            "no-file": {"command": ["/nowhere/daemon"]},
        }
    )
    pod.until(lambda: pod.service("no-file").failures and pod.service("nobody-here").failures, "both failed")
    reasons = "\n".join(pod.snapshot().reasons)
    assert "cannot start nobody-here: no user 'missing-user'" in reasons
    assert "/nowhere/daemon: No such file or directory" in reasons


def test_periodic_runs_again_and_its_failure_is_a_degraded_reason(pod: World) -> None:
    pod.start({"p": {"kind": "periodic", "every": "50ms", "command": shell("echo tick; exit 4")}})
    pod.until(lambda: pod.output().count("p | tick") >= 3, "it ran three times")
    found = pod.until_ready()
    assert found.degraded == ("p: last run exited 4: tick",)


def test_a_new_plan_restarts_only_what_changed(pod: World) -> None:
    same = {"command": NOTIFIES, "ready": "notify"}
    pod.start({"kept": same, "gone": same, "changed": same, "renamed": same | {"about": "old words"}})
    pod.until_ready()
    before = {view.name: view.pid for view in pod.snapshot().services}
    with pod.client() as client:
        pod.write_plan(
            {
                "kept": same, "new": same | {"needs": ["changed"]}, "renamed": same | {"about": "new words"},
                "changed": same | {"environment": {"X": "1"}},
            }
        )  # fmt: skip
        import json

        reply = client.request("apply", plan=json.loads(pod.plan.read_text()))
    assert (reply["added"], reply["removed"], reply["changed"]) == (["new"], ["gone"], ["changed"])
    pod.until(lambda: {view.name for view in pod.snapshot().services} == {"kept", "new", "renamed", "changed"}, "gone")
    after = {view.name: view for view in pod.until_ready().services}
    assert after["kept"].pid == before["kept"] and after["renamed"].pid == before["renamed"]
    assert after["renamed"].about == "new words"
    assert after["changed"].pid != before["changed"] and after["changed"].failures == 0
    with pytest.raises(Exception, match="no service 'nowhere'"):
        pod.ask("apply", plan={"version": 1, "role": "t", "services": {"x": same | {"needs": ["nowhere"]}}})
    assert pod.service("kept").ready, "a wrong plan changes nothing"


def test_conditions_come_and_go(pod: World) -> None:
    pod.start({"a": {"command": NOTIFIES, "ready": "notify"}})
    pod.until_ready()
    pod.ask("condition", name="config", text="slurm.conf line 3 is wrong")
    assert pod.snapshot().degraded == ("config: slurm.conf line 3 is wrong",) and pod.snapshot().ready
    pod.ask("condition", name="broker", text="drained by a check", blocking=True, expires=0.1)
    pod.until(lambda: pod.snapshot().conditions and pod.snapshot().ready, "the blocking one expired")
    pod.ask("condition", name="config", text="")
    assert pod.snapshot().conditions == ()


def test_only_the_main_process_is_signalled_on_a_restart(pod: World) -> None:
    """A job step in a session of its own, and a plain child, both survive their daemon's restart (FACTS of Slurm)."""
    code = (
        "if os.fork() == 0:\n    os.setsid(); print('step', os.getpid()); signal.pause()\n"
        "if os.fork() == 0:\n    print('child', os.getpid()); signal.pause()\n"
        "tell('READY=1'); signal.pause()"
    )
    pod.start({"slurmd": {"command": python(code), "ready": "notify"}})
    pod.until_ready()
    pod.until(lambda: pod.output().count("slurmd | ") == 2, "both told their pids")
    assert pod.ask("restart", service="slurmd")["ready"]
    pod.until(lambda: pod.output().count("slurmd | ") == 4, "the new ones too")
    inside = Path(f"/proc/{pod.pid}/root/proc")
    pids = [line.split()[-1] for line in pod.output().splitlines() if line.startswith("slurmd | ")]
    assert all((inside / pid).exists() for pid in pids)
    assert pod.stop() == 0, "at the very end they are swept up"


def test_shutdown_and_refusals(pod: World) -> None:
    pod.start({"slurmd": {"command": NOTIFIES, "ready": "notify"}})
    pod.until_ready()
    for op, keys, words in [
        ("restart", {"service": "slurmx"}, "cannot restart slurmx: no such service"),
        ("reload", {"service": "slurmd"}, "it cannot reload its configuration"),
        ("signal", {"service": "slurmd", "signal": "TREM"}, "unknown signal"),
        ("fly", {}, "no such request"),
    ]:
        with pytest.raises(Exception, match=words):
            pod.ask(op, **keys)
    assert (pod.run / "control.sock").stat().st_mode & 0o777 == 0o600
    assert pod.ask("shutdown")["phase"] == "stopping"
    assert pod.ended() == 0


def test_stop_and_start_by_hand(pod: World) -> None:
    pod.start({"a": {"command": NOTIFIES, "ready": "notify"}})
    pod.until_ready()
    assert pod.ask("stop", service="a")["state"] == "stopped"
    assert pod.get("/readyz") == (503, "a: stopped on request\n")
    assert pod.ask("start", service="a")["ready"] is True
    assert pod.service("a").failures == 0


def test_signals_other_than_term_do_not_hurt_pid_1(pod: World) -> None:
    pod.start({"a": {"command": NOTIFIES, "ready": "notify"}})
    pod.until_ready()
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE, signal.SIGCHLD):
        os.kill(pod.pid, number)
    assert pod.get("/livez")[0] == 200 and pod.service("a").ready
