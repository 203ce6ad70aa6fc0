"""Failures that a PID 1 must survive: each ends in a stated reason and in recovery."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from fleet.world.pod_page import parse_page
from tests.process.init_world import NOTIFIES, World, python, shell

pytestmark = pytest.mark.root


# Processes.


def test_two_thousand_orphans_are_reaped(pod: World) -> None:
    code = (
        "for n in range(2000):\n    if os.fork() == 0:\n        signal.pause()\n"
        "print('born')\nif os.fork() == 0:\n    os.setsid(); os.execv('/bin/sh', ['sh', '-c', 'exit 0'])\nos._exit(0)"
    )
    kill = "import glob\nfor p in glob.glob('/proc/[0-9]*'):\n"
    kill += "    n = int(p[6:])\n    if open(p + '/stat').read().split()[3] == '1' and n not in (1, os.getpid()): "
    kill += "os.kill(n, 9)"
    pod.start(
        {
            "a": {"command": NOTIFIES, "ready": "notify"},
            "breed": {"kind": "oneshot", "command": python(code)},
            "kill": {"kind": "oneshot", "command": python(kill), "needs": ["breed"]},
        }
    )
    pod.until(lambda: "breed | born" in pod.output(), "they are born")
    pod.until(lambda: children(pod) <= 2, "none of them is left, not even as a zombie")
    pod.until_ready()
    assert reaped(pod) >= 2000


def children(pod: World) -> int:
    return len(Path(f"/proc/{pod.pid}/task/{pod.pid}/children").read_text().split())


def inhabitants(pod: World) -> int:
    return sum(path.name.isdigit() for path in Path(f"/proc/{pod.pid}/root/proc").iterdir())


def reaped(pod: World) -> int:
    return int(float(next(line.split()[1] for line in pod.get("/metrics")[1].splitlines() if "reaped_total" in line)))


def test_a_service_that_forks_and_exits_says_what_to_do(pod: World) -> None:
    pod.start({"d": {"command": python("if os.fork() == 0: signal.pause()\ntime.sleep(0.2)"), "ready": "none"}})
    pod.until(lambda: pod.service("d").failures, "it failed")
    pod.until(lambda: "run it in the foreground" in str(pod.snapshot().reasons), "and says why")


HANDOVER = """
def heard(told):  # PID 1 has read all that came before: it closes what it is sent, as sd_notify_barrier(3) asks
    left, end = os.pipe()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
        s.connect(os.environ["NOTIFY_SOCKET"])
        socket.send_fds(s, [b"BARRIER=1"], [end])
    os.close(end)
    os.read(left, 1)
    os.write(told, b".")
def serve(told=0):
    print("serving", os.getpid())
    signal.signal(signal.SIGUSR1, replace)
    signal.signal(signal.SIGTERM, lambda *_: (print("down", os.getpid()), os._exit(0)))
    tell(f"READY=1\\nMAINPID={os.getpid()}") if told else tell("READY=1")
    heard(told) if told else None
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
    while True: signal.pause()
def replace(*_):
    tell("RELOADING=1")
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])  # the next one waits until this is done
    heard_of_it, told = os.pipe()
    if os.fork() == 0:
        if %r: os.setsid()
        serve(told)
    %s
    os._exit(0)
serve()
"""


@pytest.mark.parametrize(
    ("session", "between"),
    [(False, "os.read(heard_of_it, 1)"), (True, "os.read(heard_of_it, 1)"), (False, "pass")],
    ids=["old one waits for it", "new one in its own session", "old one is gone first"],
)
def test_a_main_process_that_is_replaced(pod: World, session: bool, between: str) -> None:
    """slurmctld and slurmd do so on reconfigure: no second daemon, no restart counted, ten times in a row."""
    pod.start({"slurmd": {"command": python(HANDOVER % (session, between)), "ready": "notify"}})
    pod.until_ready()
    pids = {pod.service("slurmd").pid}
    for count in range(10):
        pod.ask("signal", service="slurmd", signal="USR1")
        pod.until(lambda: pod.service("slurmd").pid not in {*pids, 0}, f"hand-over {count}")
        pids.add(pod.service("slurmd").pid)
        pod.until(lambda: pod.service("slurmd").state == "ready", "ready again")
    pod.until(lambda: inhabitants(pod) == 2, "the old ones are gone")
    view = pod.service("slurmd")
    assert (view.starts, view.failures, view.ready) == (1, 0, True)
    last = view.pid
    pod.ask("signal", service="slurmd", signal="KILL")
    pod.until(lambda: pod.service("slurmd").starts == 2 and pod.service("slurmd").ready, "a death is still a death")
    assert pod.service("slurmd").pid != last
    assert pod.stop() == 0
    assert pod.output().count("slurmd | down") == 1


def test_the_new_main_process_dies_while_the_old_one_lives(pod: World) -> None:
    """The new process is not PID 1's child yet, but PID 1 must notice its end."""
    code = (
        "pid = os.fork()\nif pid == 0:\n    signal.pause()\n"
        "tell(f'READY=1\\nMAINPID={pid}')\nprint('new', pid)\nsignal.pause()"
    )
    pod.start({"a": {"command": python(code), "ready": "notify"}})
    pod.until(lambda: "a | new" in pod.output(), "handed over")
    pod.until_ready()
    pod.ask("signal", service="a", signal="KILL")
    pod.until(lambda: pod.service("a").starts == 2, "noticed")


@pytest.mark.parametrize(
    ("pid", "why"),
    [
        ("1", "that is PID 1"),
        ("999999", "there is no such process"),
        ("open('/tmp/minivm-test-victim').read()", "it belongs to victim"),
    ],
)
def test_a_lie_about_mainpid_is_refused_and_told(pod: World, tmp_path: Path, pid: str, why: str) -> None:
    note = tmp_path / "victim"
    pid = pid.replace("/tmp/minivm-test-victim", str(note))
    pod.start(
        {
            "victim": {
                "command": python(f"open({str(note)!r}, 'w').write(str(os.getpid())); tell('READY=1'); signal.pause()"),
                "ready": "notify",
            },
            "liar": {
                "command": python(f"tell('MAINPID=' + str({pid})); tell('READY=1'); signal.pause()"),
                "ready": "notify",
                "needs": ["victim"],
            },
        }
    )
    pod.until_ready()
    pod.until(lambda: why in pod.output(), "the refusal is told")
    assert "init | notify: refused MAINPID=" in pod.output()
    victim = pod.service("victim").pid
    pod.ask("restart", service="liar")
    assert pod.service("victim").pid == victim, "nobody was killed on a liar's word"
    assert pod.service("victim").ready


def test_nobody_else_speaks_for_a_service(pod: World) -> None:
    """A process of no service (here: from outside the namespace) is not believed."""
    pod.start({"a": {"command": ["/bin/sleep", "1000"], "ready": "notify"}})
    pod.until_state("a", "starting")
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.sendto(b"READY=1", str(pod.run / "notify.sock"))
    pod.until(lambda: "refused a message" in pod.output(), "refused")
    assert pod.service("a").state == "starting"


def test_a_helper_of_the_service_may_speak_for_it(pod: World) -> None:
    """A grandchild, as a wrapper script's daemon is."""
    code = "p = os.fork()\nif p == 0:\n    if os.fork() == 0:\n        tell('READY=1\\nSTATUS=up and well')\n"
    code += "    signal.pause()\nsignal.pause()"
    pod.start({"a": {"command": python(code), "ready": "notify"}})
    pod.until_ready()
    assert pod.service("a").status == "up and well"


def test_a_login_cannot_speak_for_sshd(pod: World) -> None:
    """A user's shell descends from sshd as sshd's own processes do; only the user tells them apart.

    The socket of sshd's user is closed to it. The socket of its own user, where a service runs as the same user, does
    not make it sshd.
    """
    code = (
        "tell('READY=1\\nSTATUS=well')\nif os.fork() == 0:\n    os.setsid(); os.setuid(65534)\n"
        "    forged = f'MAINPID={os.getpid()}\\nSTATUS=forged\\nREADY=1'\n"
        "    try: tell(forged)\n    except PermissionError: print('closed')\n"
        "    os.environ['NOTIFY_SOCKET'] = os.environ['NOTIFY_SOCKET'].replace('.sock', '-65534.sock')\n"
        "    tell(forged)\nsignal.pause()"
    )
    pod.start({"own": UNPRIVILEGED, "sshd": {"command": python(code), "ready": "notify", "needs": ["own"]}})
    pod.until_ready()
    pod.until(lambda: "sshd | closed" in pod.output(), "its own socket is not the user's")
    pod.until(lambda: "refused a message" in pod.output(), "the refusal is told")
    assert "(uid 65534): sshd runs as root" in pod.output()
    view = pod.service("sshd")
    assert (view.status, view.starts) == ("well", 1)
    pod.ask("signal", service="sshd", signal="KILL")
    pod.until(lambda: pod.service("sshd").starts == 2, "its main process was still the one that was started")


UNPRIVILEGED = {
    "command": python("pid = os.fork()\nif pid: tell(f'READY=1\\nMAINPID={pid}')\nsignal.pause()"),
    "ready": "notify",
    "user": "nobody",
}


def test_a_service_that_is_not_root_speaks_as_its_user(pod: World) -> None:
    pod.start({"a": UNPRIVILEGED})
    pod.until_ready()
    assert "refused" not in pod.output()
    assert "Name:" in (text := Path(f"/proc/{pod.pid}/root/proc/{pod.service('a').pid}/status").read_text())
    assert "PPid:\t1\n" not in text, "the hand-over was believed"


def test_a_main_process_of_another_user_is_refused(pod: World) -> None:
    code = (
        "pid = os.fork()\nif pid == 0: os.setuid(65534); print('ready'); signal.pause()\n"
        "while open(f'/proc/{pid}/status').read().count('65534') < 4: time.sleep(0.01)\n"
        "tell(f'READY=1\\nMAINPID={pid}'); signal.pause()"
    )
    pod.start({"a": {"command": python(code), "ready": "notify"}})
    pod.until_ready()
    assert "it runs as uid 65534, the service as root" in pod.output()


def test_mainpid_is_for_services_that_notify(pod: World) -> None:
    """The others are not asked to, so whoever says it for them is somebody else."""
    code = f"os.environ['NOTIFY_SOCKET'] = {str(pod.run / 'notify.sock')!r}\n"
    code += "pid = os.fork()\nif pid: tell(f'MAINPID={pid}')\nsignal.pause()"
    pod.start({"plain": {"command": python(code), "ready": "none"}})
    pod.until(lambda: "the service is not one of `ready: notify`" in pod.output(), "refused")


def test_what_a_removed_service_left_behind_hurts_nobody(pod: World, tmp_path: Path) -> None:
    go = tmp_path / "go"
    code = (
        "if os.fork() == 0:\n"
        f"    while not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
        "    tell(f'READY=1\\nMAINPID={os.getpid()}'); signal.pause()\n"
        "tell('READY=1'); signal.pause()"
    )
    kept = {"command": NOTIFIES, "ready": "notify"}
    pod.start({"kept": kept, "gone": {"command": python(code), "ready": "notify"}})
    pod.until_ready()
    pod.write_plan({"kept": kept})
    pod.ask("apply", plan=json.loads(pod.plan.read_text()))
    pod.until(lambda: [view.name for view in pod.snapshot().services] == ["kept"], "it is gone")
    go.touch()
    pod.until(lambda: "it belongs to no service" in pod.output(), "refused")
    assert pod.snapshot().ready


# Time.


def test_a_wall_clock_that_jumps_moves_no_timer(pod: World, tmp_path: Path) -> None:
    """Timers of the real entrypoint ignore a wall clock that jumps a day ahead and back at every look.

    The test does not touch the machine's own clock, which everybody shares. A backoff of an hour stays one, a short
    one ends.
    """
    entry = tmp_path / "jumping.py"
    entry.write_text(
        "import sys, time\nfrom init.pid1.start import end, main\n"
        "real, jump = time.time, [86400.0]\n"
        "def jumping():\n    jump[0] = -jump[0]\n    return real() + jump[0]\n"
        "time.time = jumping\nend(main(sys.argv[1:], time.monotonic()))\n"
    )
    pod.start(
        {
            "slow": {"command": ["/bin/false"], "restart": {"delay": "1h", "max-delay": "1h", "jitter": 0}},
            "fast": {"command": shell("echo no; exit 1"), "restart": {"delay": "50ms", "max-delay": "50ms"}},
        },
        entry=["-I", str(entry)],
        MINIVM_LOG_FORMAT="json",
    )
    pod.until_state("slow", "backoff")
    pod.until(lambda: pod.service("fast").starts > 5, "short backoffs end")
    stamps = {json.loads(line)["time"][:10] for line in pod.output().splitlines()}
    assert len(stamps) == 2, "the clock did jump"
    left = pod.service("slow").next_start_in
    assert left is not None and 3000 < left <= 3600


# Logs.


def test_nothing_is_lost_when_the_reader_is_slow(pod: World) -> None:
    """The services wait, PID 1 does not: it answers while its output is stuck; then every line is there once."""
    read, write = os.pipe()
    lines = 120_000  # about twice what pipes and PID 1 hold between them
    pod.start(
        {
            "talk": {
                "kind": "oneshot",
                "command": python(f"for n in range({lines}): print('line', n, 'x' * 40)"),
            },
            "other": {"command": NOTIFIES, "ready": "notify"},
        },
        stdout=write,
    )
    os.close(write)
    pod.until_state("other", "ready")
    pod.until(lambda: pod.service("talk").state == "starting" and stuck(pod), "the writer is held up")
    assert pod.get("/livez")[0] == 200
    with os.fdopen(read, "rb") as stream:
        seen = 0
        for line in stream:
            if line.startswith(b"talk | "):
                assert line == f"talk | line {seen} {'x' * 40}\n".encode()
                seen += 1
                if seen == lines:
                    break
        assert seen == lines
        pod.until_state("talk", "done")


def stuck(pod: World) -> bool:
    pid = pod.service("talk").pid
    inside = Path(f"/proc/{pod.pid}/root/proc/{pid}/stat")
    before = inside.read_text().split()[13:15]
    time.sleep(0.05)
    return inside.read_text().split()[13:15] == before and inside.read_text().split()[2] == "S"


def test_long_and_binary_lines_come_whole(pod: World) -> None:
    code = (
        "w = sys.stdout.buffer\n"
        "w.write(b'a' * 200_000 + b'\\n'); w.write(bytes(range(256)).replace(b'\\n', b'') + b'\\n')\n"
        "w.write(b'b' * 1_000_000 + b'\\n'); w.write(b'\\n'); w.write(b'no newline at the end'); w.flush()"
    )
    pod.start({"t": {"kind": "oneshot", "command": python(code)}})
    pod.until_ready()
    assert pod.stop() == 0
    lines = pod.out.read_bytes().split(b"\n")[:-1]
    assert all(line.startswith(b"t | ") for line in lines)
    bodies = [line[4:] for line in lines]
    assert bodies[0] == b"a" * 200_000
    assert bodies[1] == bytes(range(256)).replace(b"\n", b"")
    parts = bodies[2:-2]
    assert all(part.endswith(b" [continues]") for part in parts[:-1]) and len(parts) > 1
    assert b"".join(part.removesuffix(b" [continues]") for part in parts) == b"b" * 1_000_000
    assert bodies[-2:] == [b"", b"no newline at the end"]


def test_json_logs_carry_time_service_and_stream(pod: World) -> None:
    code = 'echo to out; echo "to \\"err\\"" >&2; printf "\\377\\000raw\\n"'
    pod.start({"t": {"kind": "oneshot", "command": shell(code)}}, MINIVM_LOG_FORMAT="json")
    pod.until_ready()
    pod.stop()
    found = [json.loads(line) for line in pod.output().splitlines()]
    assert {(item["stream"], item["line"]) for item in found if item["service"] == "t"} == {
        ("stdout", "to out"), ("stderr", 'to "err"'), ("stdout", "\\xff\x00raw"),
    }  # fmt: skip
    assert all(item["time"].endswith("Z") for item in found)


def test_raw_and_silent_services(pod: World) -> None:
    pod.start(
        {
            "raw": {"kind": "oneshot", "command": shell("echo '{\"own\": 1}'"), "log": "raw"},
            "off": {"kind": "oneshot", "command": shell("echo quiet"), "log": "off"},
        }
    )
    pod.until_ready()
    assert pod.output() == '{"own": 1}\n'
    assert pod.ask("logs", service="off")["lines"] == ["quiet"]


def test_logs_can_be_followed(pod: World, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    pod.start({"t": {"command": shell(f"echo first; while :; do cat {pipe}; done")}})
    pod.until(lambda: "first" in pod.output(), "it speaks")
    with pod.client() as client:
        replies = client.stream("logs", service="t", lines=5, follow=True)
        assert next(replies)["lines"] == ["first"]
        pipe.write_text("second\nthird\n")
        seen: list[str] = []
        while len(seen) < 2:
            seen += next(replies)["lines"]
        assert seen == ["second", "third"]
    pipe.write_text("after the follower left\n")
    pod.until(lambda: "after the follower left" in pod.output(), "and PID 1 goes on")


def test_syslog_lines_arrive_under_their_service(pod: World, tmp_path: Path) -> None:
    code = (
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        f"s.connect({str(tmp_path / 'log')!r})\n"
        "s.send(b'<86>Jan  1 00:00:00 sshd[7]: Accepted publickey for ann\\0')\n"
    )
    pod.start({"sshd": {"kind": "oneshot", "command": python(code + "time.sleep(0.5)")}})
    pod.until(lambda: "sshd | sshd[7]: Accepted publickey for ann\n" in pod.output(), "the line")


def test_a_full_disk_hangs_nobody_and_is_told(pod: World, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", small], check=True)
    try:
        with (small / "log").open("ab") as stream:
            talk = "for n in range(150000): print('line', n, 'x' * 60)\ntell('READY=1'); signal.pause()"
            pod.start({"talk": {"command": python(talk), "ready": "notify"}}, stdout=stream)
        pod.until_state("talk", "ready")
        pod.until(lambda: any("No space left" in text for text in pod.snapshot().degraded), "the reason is told")
        assert pod.snapshot().ready
        with (small / "log").open("r+b") as stream:
            stream.truncate(0)
        pod.until(lambda: "bytes were lost" in (small / "log").read_text(errors="replace"), "it recovers and owns up")
        pod.until(lambda: pod.snapshot().degraded == (), "nothing is left of it")
        pod.close()
    finally:
        subprocess.run(["umount", "-l", small], check=True)


def test_an_output_that_nobody_reads_any_more_is_no_reason_to_stop(pod: World) -> None:
    read, write = os.pipe()
    pod.start(
        {
            "talk": {"command": shell("while :; do echo x; sleep 0.01; done")},
            "a": {"command": NOTIFIES, "ready": "notify"},
        },
        stdout=write,
    )
    os.close(write)
    pod.until_ready()
    os.close(read)
    pod.until(lambda: "Broken pipe" in str(pod.snapshot().degraded), "it is told")
    assert pod.snapshot().ready
    assert pod.ask("restart", service="talk")["ready"]


# The outside.


def test_metrics_are_open_metrics(pod: World) -> None:
    pod.start({"a": {"command": NOTIFIES, "ready": "notify"}, "p": {"kind": "oneshot", "command": ["/bin/false"]}})
    pod.until_state("p", "backoff")
    pod.until_state("a", "ready")
    pod.ask("condition", name='odd "name"\\', text="x")
    parsed = text_string_to_metric_families(pod.get("/metrics")[1])  # type: ignore[no-untyped-call]
    families = {family.name: family for family in parsed}
    ready = {sample.labels["service"]: sample.value for sample in families["minivm_service_ready"].samples}
    assert ready == {"a": 1.0, "p": 0.0}
    failures = {sample.labels["service"]: sample.value for sample in families["minivm_service_failures"].samples}
    assert failures["p"] >= 2
    assert families["minivm_condition"].samples[0].labels["condition"] == 'odd "name"\\'


def test_healths_and_gitsyncs_numbers_are_on_the_one_metrics_port(pod: World) -> None:
    """The test writes the files as the services do; an unreadable or foreign file costs only its own numbers."""
    pod.start({"a": {"command": NOTIFIES, "ready": "notify"}})
    pod.until_ready()
    folder = pod.run / "metrics.d"
    folder.mkdir()
    (folder / "health.prom").write_text("# TYPE minivm_health_problems gauge\nminivm_health_problems 2\n")
    told = '# TYPE minivm_gitsync_last_error_info gauge\nminivm_gitsync_last_error_info{error="password hunter2"} 1\n'
    (folder / "gitsync.prom").write_text(
        f"# TYPE minivm_gitsync_refused_total counter\nminivm_gitsync_refused_total 3\n{told}"
    )

    def families() -> dict[str, float]:
        text = pod.get("/metrics")[1]
        assert "hunter2" not in text
        parsed = text_string_to_metric_families(text)  # type: ignore[no-untyped-call]
        return {sample.name: sample.value for family in parsed for sample in family.samples}

    found = families()
    assert (found["minivm_health_problems"], found["minivm_gitsync_refused_total"]) == (2, 3)
    assert found["minivm_gitsync_last_error_info"] == 1 and found["minivm_ready"] == 1
    (folder / "health.prom").unlink()
    os.mkfifo(folder / "health.prom")
    found = families()
    assert "minivm_health_problems" not in found and found["minivm_gitsync_refused_total"] == 3


def test_status_over_http_is_the_snapshot(pod: World) -> None:
    pod.start({"a": {"command": NOTIFIES, "ready": "notify"}})
    pod.until_ready()
    status, text = pod.get("/status")
    assert status == 200 and json.loads(text)["services"][0]["state"] == "ready"
    assert pod.get("/nothing")[0] == 404


def test_the_fleet_reads_the_conditions_on_the_pods_page(pod: World) -> None:
    """The page and its reader share no code. A file that is gone, a link or a pipe costs its own condition only."""
    pod.start(
        {"a": {"command": NOTIFIES, "ready": "notify"}, "p": {"command": ["/bin/sleep", "60"], "required": False}}
    )
    pod.until_ready()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    deep, gpus = pod.run / "health/deep/said.json", pod.run / "gpus"
    deep.parent.mkdir(parents=True)
    deep.write_text(json.dumps({"boot_id": boot, "state": "ok", "ran": 2, "said": "dcgm_diag"}))
    gpus.write_text("GPU-1\nGPU-2\n")
    active = pod.run / "health/active/said.json"
    active.parent.mkdir(parents=True)
    active.write_text(json.dumps({"cpu": [1000, True]}))

    def read() -> list[tuple[str, str, str]]:
        status, text = pod.get("/conditions")
        assert status == 200
        name = json.loads(pod.get("/status")[1])["pod"]
        return [(each.type, each.reason, each.message) for each in parse_page(text.encode(), name)]

    ready = ("minivm.io/Ready", "Ready", "")
    assert read() == [
        ready,
        ("minivm.io/Gpus", "Known", "GPU-1 GPU-2"),
        ("minivm.io/DeepCheck", "Passed", f"{boot} 2 dcgm_diag"),
        ("minivm.io/ActiveChecks", "Passed", "cpu passed 1000"),
    ]
    deep.write_text("[" * 60_000)
    active.unlink()
    active.symlink_to("/dev/zero")
    gpus.unlink()
    os.mkfifo(gpus)
    assert read() == [ready]
    pod.ask("condition", name="slurm.conf", text="refused: line 3")
    assert read() == [("minivm.io/Ready", "Degraded", "slurm.conf: refused: line 3")]
    pod.ask("stop", service="a", wait=False)
    pod.until(lambda: read()[0][1] == "Running", "the pod is not ready")


TALKS = "echo 'cannot log in: db; gave up after password hunter2'; exit 7"  # in phrases of init's own, too


def test_what_a_service_says_reaches_root_and_not_http(pod: World) -> None:
    """Anybody who reaches the pod may ask over HTTP, which gives the cause in init's own words."""
    pod.start(
        {
            "ends": {"command": shell(TALKS), "restart": {"limit": 1, "window": "60s"}},
            "tries": {"command": shell(TALKS), "restart": {"delay": "1h", "max-delay": "1h"}},
            "asks": {
                "command": ["/bin/sleep", "1000"],
                "ready": {"exec": shell("echo hunter2; exit 1"), "interval": "50ms"},
            },
            "says": {"command": python("tell('STATUS=hunter2'); signal.pause()"), "ready": "notify"},
            "later": {"kind": "periodic", "every": "1h", "command": shell(TALKS)},
            "aside": {"command": shell(TALKS), "required": False, "restart": {"when": "never"}},
        },
        {"command": python("tell('STATUS=hunter2'); signal.pause()")},
    )
    pod.until_state("ends", "failed")
    pod.until_state("tries", "backoff")
    pod.until(lambda: len([reason for reason in pod.ask("why")["reasons"] if "hunter2" in reason]) == 4, "root is told")
    pod.until(lambda: len([text for text in pod.snapshot().degraded if "hunter2" in text]) == 2, "of these too")
    pod.ask("drain", wait=False)
    pod.until(lambda: pod.snapshot().drain == "draining: hunter2", "the drain speaks, too")
    for path in ("/readyz", "/startupz", "/status", "/conditions", "/metrics"):
        assert "hunter2" not in pod.get(path)[1], path
    status, reasons = pod.get("/readyz")
    assert status == 503
    for cause in (
        "ends: exited 7; gave up after 2 failures within 60 s\n",
        "tries: exited 7; failed twice, next start in ",
        "asks: /bin/sh exited 1 for ",
        "says: started ",
    ):
        assert cause in reasons
    degraded = json.loads(pod.get("/status")[1])["degraded"]
    assert "later: last run exited 7" in degraded and "aside: exited 7" in degraded
    with pod.client() as client:  # what a pod's condition is made of
        assert "hunter2" not in str(next(client.stream("watch")))


def test_strange_http_callers_hurt_nobody(pod: World) -> None:
    import socket

    pod.start({"a": {"command": NOTIFIES, "ready": "notify"}})
    pod.until_ready()
    for words in (b"\x16\x03\x01\x02\x00garbage\n\n", b"POST /readyz HTTP/1.1\r\n\r\n", b"G" * 20000, b"", b"GET /"):
        with socket.create_connection(("127.0.0.1", pod.port)) as caller:
            try:
                caller.sendall(words)
                caller.shutdown(socket.SHUT_WR)
                while caller.recv(4096):
                    pass
            except OSError:
                pass  # it was hung up on: its own fault
    held = [socket.create_connection(("127.0.0.1", pod.port)) for _ in range(10)]
    assert pod.get("/livez") == (200, "ok\n")
    for caller in held:
        caller.close()


def test_strange_control_callers_hurt_nobody(pod: World) -> None:
    import socket

    pod.start({"a": {"command": NOTIFIES, "ready": "notify"}})
    pod.until_ready()
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(pod.run / "control.sock"))
        caller.sendall(b'not json\n[1]\n{}\n{"op": 5}\n{"op": "logs", "lines": "many"}\n{"op": "why"}\n')
        lines = caller.makefile()
        replies = [json.loads(lines.readline()) for _ in range(6)]
    assert [reply["ok"] for reply in replies] == [False, False, False, False, True, True]
    assert pod.service("a").ready


def test_watching_hears_each_change(pod: World) -> None:
    pod.start({"a": {"command": NOTIFIES, "ready": "notify"}})
    pod.until_ready()
    with pod.client() as client:
        replies = client.stream("watch")
        assert next(replies)["ready"] is True
        pod.ask("stop", service="a", wait=False)
        while (reply := next(replies))["ready"]:
            pass
        assert reply["reasons"]


def test_nothing_happens_when_nothing_happens(pod: World) -> None:
    """PID 1 has no timer and no poll: over an idle second the kernel does not schedule it once."""
    pod.start(
        {
            "a": {"command": NOTIFIES, "ready": "notify"},
            "b": {"command": ["/bin/sleep", "1000"]},
            "c": {"kind": "oneshot", "command": ["/bin/true"]},
        }
    )
    pod.until_ready()
    seen = -1

    def quiet() -> bool:
        nonlocal seen
        before, seen = seen, pod.wakeups()
        if before != seen:
            time.sleep(1)
        return before == seen

    pod.until(quiet, "a whole second without one wake-up")


# Wrong from the beginning, and wrong inside.


@pytest.mark.parametrize(
    ("plan", "env", "words"),
    [
        ("{", {}, "not JSON"),
        ('{"version": 9, "services": {}}', {}, "version 9"),
        ('{"version": 1, "services": {"a": {"comand": ["/x"]}}}', {}, "did you mean command?"),
        ('{"version": 1, "services": {"a": {"command": ["/x"], "needs": ["b"]}}}', {}, "no service 'b'"),
        ('{"version": 1, "services": {"a": {"command": ["/x", "${NOT_THERE}"]}}}', {}, "${NOT_THERE} is not set"),
        ('{"version": 1, "services": {}}', {"MINIVM_GRACE_SECONDS": "soon"}, "'soon' is not a number"),
        ('{"version": 1, "services": {}}', {"MINIVM_LOG_FORMAT": "xml"}, "'xml' is not one of text, json"),
        ('{"version": 1, "services": {}}', {"MINIVM_HTTP": "nowhere"}, "'nowhere' is not host:port"),
    ],
)
def test_a_wrong_configuration_is_one_message_and_78(pod: World, plan: str, env: dict[str, str], words: str) -> None:
    pod.plan.write_text(plan)
    pod.start(**env)  # type: ignore[arg-type]
    assert pod.ended() == 78
    assert words in pod.output() and words in pod.last_words.read_text()
    assert "Traceback" not in pod.output()


def test_a_port_that_is_taken_ends_the_pod_at_once(pod: World) -> None:
    """PID 1 opens the port while the first services start, and stops them again, in order."""
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", pod.port))
        taken.listen()
        pod.start({"a": {"command": NOTIFIES, "ready": "notify"}})
        assert pod.ended() == 78
    assert "Address already in use" in pod.last_words.read_text()


def test_a_bug_of_its_own_stops_everything_in_order(pod: World, tmp_path: Path) -> None:
    """The real entrypoint, with one function broken: traceback, orderly stop, documented code."""
    entry = tmp_path / "broken.py"
    entry.write_text(
        "import sys, time\nimport init.view.reasons\nfrom init.pid1.start import end, main\n"
        "def broken(*_): raise RuntimeError('a bug for the test')\n"
        "init.view.reasons.snapshot = broken\nend(main(sys.argv[1:], time.monotonic()))\n"
    )
    names = ["a", "b", "c"]
    services = {
        name: {
            "command": python(
                f"signal.signal(signal.SIGTERM, lambda *_: (print('down {name}'), os._exit(0)))\n"
                "tell('READY=1')\nsignal.pause()"
            ),
            "ready": "notify",
            "needs": names[:place][-1:],
        }
        for place, name in enumerate(names)
    }
    pod.start(services, entry=["-I", str(entry)])
    pod.until(lambda: pod.get("/readyz")[0] == 200, "the pod is ready")
    with pytest.raises(Exception, match=r"hung up|EOF|reset|closed|speak"):
        pod.ask("status")
    assert pod.ended() == 70
    text = pod.output()
    assert "RuntimeError: a bug for the test" in text and "a bug for the test" in pod.last_words.read_text()
    downs = [line for line in text.splitlines() if "down" in line]
    assert downs == ["c | down c", "b | down b", "a | down a"]


def test_left_processes_are_swept_up_at_the_end(pod: World) -> None:
    """Those of no service: TERM, a moment, KILL; a deaf one costs only that moment."""
    code = (
        "if os.fork() == 0:\n    os.setsid(); signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    print('deaf'); \n    while True: signal.pause()\n"
        "if os.fork() == 0:\n    os.setsid(); signal.signal(signal.SIGTERM, lambda *_: (print('heard'), os._exit(0)))\n"
        "    print('ears'); signal.pause()\n"
        "tell('READY=1'); signal.pause()"
    )
    pod.start({"a": {"command": python(code), "ready": "notify"}})
    pod.until_ready()
    pod.until(lambda: "deaf" in pod.output() and "ears" in pod.output(), "both are there")
    assert pod.stop() == 0
    assert "a | heard" in pod.output()


def test_a_kill_of_pid_1_itself_needs_no_grace(pod: World) -> None:
    pod.start({"a": {"command": NOTIFIES, "ready": "notify"}})
    pod.until_ready()
    os.kill(pod.pid, signal.SIGINT)
    assert pod.ended() == 0, "INT is asked for like TERM"


def test_no_descriptor_leaks(pod: World) -> None:
    """After many restarts, probes, requests and followers, PID 1 holds what it held after the first of each."""
    pod.start(
        {
            "e": {"command": ["/bin/sleep", "1000"], "ready": {"exec": ["/bin/true"]}},
            "t": {"command": ["/bin/sleep", "1000"], "ready": {"tcp": f"127.0.0.1:{pod.port}"}},
            "f": {"command": ["/bin/sleep", "1000"], "ready": {"file": "/etc/passwd"}},
            "n": {"command": NOTIFIES, "ready": "notify"},
        }
    )
    pod.until_ready()

    def everything() -> None:
        for name in "etfn":
            pod.ask("restart", service=name, wait=False)
        for name in "etfn":
            assert pod.ask("start", service=name)["ready"], "each stays for a second, all at once"
        pod.get("/metrics")
        with pod.client() as client:
            next(client.stream("logs", service="n", follow=True))
        with pod.client() as client:
            next(client.stream("watch"))

    everything()
    pod.until_ready()
    before = pod.descriptors()
    for _ in range(10):
        everything()
    pod.until_ready()
    pod.until(lambda: pod.descriptors() <= before, "every descriptor is closed again")
