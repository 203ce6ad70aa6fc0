"""A leaving login pod must recognise sessions correctly: a user may choose the name of a process."""

from __future__ import annotations

import base64
import contextlib
import os
import re
import select
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from init.drain import deadline as drain
from init.drain import login
from init.drain import login as drain_login
from init.pod.api_server import ApiError
from tests.process.init_world import PYTHON
from tests.waiting import until

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")


@contextlib.contextmanager
def process(title: str, uid: int) -> Iterator[int]:
    """Start a process of that user under that name, and yield its pid."""
    code = "import signal, sys; print('there', flush=True); signal.pause()"
    started = subprocess.Popen(
        [title, "-I", "-S", "-c", code], executable=PYTHON, user=uid, group=uid, extra_groups=[], stdout=subprocess.PIPE
    )
    try:
        assert started.stdout is not None and started.stdout.readline() == b"there\n"
        yield started.pid
    finally:
        started.kill()
        started.communicate()


@needs_root
def test_srun_and_salloc_end_with_the_pod_and_nothing_else_does(tmp_path: Path) -> None:
    """A client that ignores its terminal's end also ends; root's processes never do, whatever their names are."""
    for name in ("srun", "salloc", "other"):
        (tmp_path / name).write_text("#!/bin/sh\ntrap '' HUP\necho there\nsleep 600 & wait\n")
        (tmp_path / name).chmod(0o755)
    for above in [tmp_path, *tmp_path.parents][:-2]:
        above.chmod(above.stat().st_mode | 0o011)
    started = {}
    try:
        for name, uid in (("srun", NOBODY), ("salloc", NOBODY), ("other", NOBODY), ("srun", 0)):
            process = subprocess.Popen(
                [tmp_path / name], user=uid, group=uid, extra_groups=[], stdout=subprocess.PIPE, start_new_session=True
            )
            started[name, uid] = process
            assert process.stdout is not None and process.stdout.readline() == b"there\n"
        drain_login.end_clients(drain.Deadline(4.0))
        clients = {("srun", NOBODY), ("salloc", NOBODY)}
        until(lambda: all(started[key].poll() is not None for key in clients), "the killed clients have ended")
        assert {key for key, process in started.items() if process.poll() is not None} == clients
    finally:
        for process in started.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.communicate()


def test_a_full_disk_takes_nobodys_time(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The word to new logins cannot be written; the sessions that are there have their grace all the same."""
    monkeypatch.setattr(drain_login, "NOLOGIN", Path("/dev/full"))
    monkeypatch.setattr(drain_login, "find_sessions", dict)
    drain_login.drain("nowhere", drain.Deadline(4.0))
    assert "cannot refuse new logins: No space left on device" in capsys.readouterr().out


@needs_root
@pytest.mark.parametrize("uid", [NOBODY, 0])
@pytest.mark.parametrize(
    "title", ["sshd: eve@pts/../../tmp/file", "sshd-session: eve@pts/0", "sshd-session: eve@notty"]
)
def test_a_process_that_calls_itself_sshd_is_no_session(title: str, uid: int) -> None:
    with process(title, uid) as pid:
        assert pid not in login.find_sessions()


@pytest.mark.parametrize("name", ["pts/../../tmp/file", "pts/", "pts/1/../2", "../tmp/file", "notty", "pts/٣", "tty1"])
def test_a_terminal_is_a_number_under_pts(name: str) -> None:
    assert login.terminals({1: name}) == []
    assert login.terminals({1: f"pts/3,{name}"}) == [Path("/dev/pts/3")]


def test_a_word_goes_to_a_terminal_and_to_nothing_else(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    file, fifo, link, directory = (tmp_path / name for name in ("file", "fifo", "link", "directory"))
    file.write_text("whole")
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    link.symlink_to(os.ttyname(theirs))
    directory.mkdir()
    try:
        paths = [file, fifo, link, directory, tmp_path / "absent", Path("/dev/null"), Path(os.ttyname(theirs))]
        assert login.message_terminals(paths, "this pod stops in 7 s") == [Path(os.ttyname(theirs))]
        assert b"this pod stops in 7 s" in os.read(ours, 1000)
        assert file.read_text() == "whole"
        with contextlib.suppress(BlockingIOError):
            assert os.read(reader, 1000) == b""
    finally:
        for descriptor in (ours, theirs, reader):
            os.close(descriptor)


def test_a_stopped_terminal_holds_nobody_up() -> None:
    ours, theirs = os.openpty()
    try:
        os.set_blocking(theirs, False)
        # The kernel moves what was written towards the reader later, and has room again: fill until there is none left.
        while select.select([], [theirs], [], 0.3)[1]:
            with contextlib.suppress(BlockingIOError):
                os.write(theirs, b"x" * 1000)
        assert login.message_terminals([Path(os.ttyname(theirs))], "stops") == []
    finally:
        os.close(ours)
        os.close(theirs)


@needs_root
def test_tmux_keeps_a_pod_with_its_windows_and_a_process_in_the_background_does_not(tmp_path: Path) -> None:
    if not shutil.which("tmux"):
        pytest.skip("no tmux")
    server = ["tmux", "-S", f"/tmp/minivm-test-keeper-{os.getpid()}"]
    environment = {"PATH": os.environ["PATH"], "HOME": "/", "SHELL": "/bin/sh"}
    subprocess.run([*server, "-f", "/dev/null", "new-session", "-d", "sleep 600"], user=NOBODY, group=NOBODY,
                   extra_groups=[], env=environment, cwd="/", check=True)  # fmt: skip
    try:
        done = subprocess.run([*server, "list-panes", "-F", "#{pane_tty}"], capture_output=True, text=True, check=True)
        found = login.find_keepers()
        assert {f"/dev/pts/{number}" for number in found[NOBODY]} >= set(done.stdout.split())
    finally:
        subprocess.run([*server, "kill-server"], check=True)
    with process("tmux: server", 65533):
        assert 65533 not in login.find_keepers(), "argv[0] is no proof"


class Looks:
    """Sessions and keepers that end at a given look."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, last: int, keepers: bool) -> None:
        self.count = 0
        self.said: list[str] = []
        self.last = last
        monkeypatch.setattr(login, "NOLOGIN", tmp_path / "nologin")
        monkeypatch.setattr(login, "RETURNING", tmp_path / "returning")
        monkeypatch.setattr(login, "ACCOUNT", tmp_path / "account")
        monkeypatch.setattr(login, "SETTLE", 0.2)
        monkeypatch.setattr(login, "STAY_LOOK_EVERY", 0.05)
        monkeypatch.setattr(login, "find_sessions", self.sessions)
        monkeypatch.setattr(login, "find_keepers", lambda: {NOBODY: {9}} if keepers and self.stays() else {})
        monkeypatch.setattr(login, "message_terminals", self.tell)

    def stays(self) -> bool:
        return self.count <= self.last

    def sessions(self) -> dict[int, str]:
        self.count += 1
        return {os.getpid(): "pts/7"} if self.stays() else {}

    def tell(self, paths: list[Path], text: str) -> list[Path]:
        self.said += [f"{path}: {text}" for path in paths]
        return list(paths)


def test_a_stay_ends_with_the_last_person_and_tells_each_terminal_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = Looks(monkeypatch, tmp_path, last=20, keepers=True)
    login.Stay(drain.Deadline(50.0), 1.0, "login-old", "").run()
    assert [line.partition(":")[0] for line in looks.said] == ["/dev/pts/7", "/dev/pts/9"]
    assert "You may stay until" in looks.said[0] and "is being replaced" in looks.said[0]
    out = capsys.readouterr().out
    assert "people stay until" in out and out.endswith("all sessions have ended\n")
    assert (tmp_path / "nologin").exists()
    assert (tmp_path / "returning").read_text() == "", "nobody's tmux is left"


def test_a_stay_without_anybody_takes_no_new_people_and_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    looks = Looks(monkeypatch, tmp_path, last=0, keepers=False)
    deadline = drain.Deadline(50.0)
    login.Stay(deadline, 1.0, "login-old", "").run()
    assert (tmp_path / "nologin").exists() and looks.said == [] and deadline.left > 30


def test_a_person_who_never_leaves_is_told_again_and_ends_at_the_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(scale: float) -> int:
        looks = Looks(monkeypatch, tmp_path, last=10**9, keepers=True)
        monkeypatch.setattr(login, "NOTICES", (10.0 * scale, 0.8 * scale, 0.4 * scale))
        login.Stay(drain.Deadline(1.5 * scale), 0.3 * scale, "login-old", "").run()
        assert "1 session is left" in capsys.readouterr().out
        return len([line for line in looks.said if line.startswith("/dev/pts/9")])

    # On a busy machine one look may come after two of the times.
    assert 3 in map(told, (1.0, 5.0, 25.0))


def test_a_shorter_grace_period_of_the_pod_is_told_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`kubectl delete --grace-period`, an eviction, an uninstall."""
    looks = Looks(monkeypatch, tmp_path, last=10**9, keepers=False)
    answers: list[dict[str, object]] = [
        {"metadata": {"deletionTimestamp": "t", "deletionGracePeriodSeconds": 43200}, "status": {}},
        {"metadata": {"deletionTimestamp": "t", "deletionGracePeriodSeconds": 12},
         "status": {"conditions": [{"type": "DisruptionTarget", "status": "True"}]}},
        {"metadata": {"deletionTimestamp": "t", "deletionGracePeriodSeconds": 43200}},
    ]  # fmt: skip
    answering(monkeypatch, tmp_path, answers)
    deadline = drain.Deadline(43000.0)
    login.Stay(deadline, 5.0, "login-old", "").run()
    assert deadline.left < 2
    assert re.search(r"\b1[12] h\b", looks.said[0])
    assert "leaves its machine" in looks.said[-1] and "h " not in looks.said[-1].split("(for")[1].split(")")[0]


def deleted(reason: str) -> dict[str, object]:
    condition = {"type": "DisruptionTarget", "status": "True", "reason": reason}
    return {"metadata": {"deletionTimestamp": "t", "deletionGracePeriodSeconds": 43200},
            "status": {"conditions": [condition]}}  # fmt: skip


@pytest.mark.parametrize(
    ("item", "is_short"),
    [
        ({"metadata": {}}, True),  # a failed liveness probe, an eviction by the kubelet, `minivm drain` by hand
        (deleted("TerminationByKubelet"), True),
        (deleted("EvictionByEvictionAPI"), False),
    ],
)
def test_an_end_that_nobody_asked_kubernetes_for_is_short(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, item: dict[str, object], is_short: bool
) -> None:
    """A machine that shuts down gives a pod the kubelet's time, and the pod's object says nothing of it."""
    Looks(monkeypatch, tmp_path, last=10**9, keepers=False)
    answering(monkeypatch, tmp_path, [item])
    monkeypatch.setenv("MINIVM_SHORT_GRACE_SECONDS", "60")
    deadline = drain.Deadline(43000.0)
    leaving = login.Stay(deadline, 5.0, "login-old", "")
    leaving._update_end()
    assert (deadline.left < 60) is is_short


def test_a_silent_api_server_takes_no_time_of_the_interactive_jobs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A request may last ten seconds, and so it is not begun where less is left for the people."""
    Looks(monkeypatch, tmp_path, last=10**9, keepers=False)
    items = [deleted("EvictionByEvictionAPI")] * 2
    answering(monkeypatch, tmp_path, items)
    login.Stay(drain.Deadline(14.9), 5.0, "login-old", "")._update_end()
    assert len(items) == 2
    login.Stay(drain.Deadline(30.0), 5.0, "login-old", "")._update_end()
    assert len(items) == 1


def test_an_error_is_logged_once_and_hides_nobody_in_the_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The account has lost its right, as after an upgrade to `keepSeconds: 0`."""
    Looks(monkeypatch, tmp_path, last=20, keepers=False)
    answering(monkeypatch, tmp_path, [])
    said: list[str] = []
    monkeypatch.setattr(login, "_last", {"report": "", "log": ""})
    monkeypatch.setattr(login, "report", said.append)
    login.Stay(drain.Deadline(50.0), 1.0, "login-old", "").run()
    assert capsys.readouterr().out.count("403") == 1
    assert [line.partition(" until")[0] for line in said] == ["1 person stays", "all sessions have ended"]


@pytest.mark.parametrize("kind", ["configmaps", "secrets"])
def test_a_leaving_pod_reads_the_cluster_s_people(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str) -> None:
    """The kubelet renews no file of a pod that leaves: a person who lost access would keep his sessions there."""
    latest = tmp_path / "latest.yaml"
    monkeypatch.setattr(login, "LATEST_PEOPLE", str(latest))
    monkeypatch.setattr(login, "ACCOUNT", tmp_path / "account")

    def item(text: str) -> dict[str, object]:
        return {"data": {"people.yaml": base64.b64encode(text.encode()).decode() if kind == "secrets" else text}}

    items: list[dict[str, object]] = [item("users: [a]"), item("users: []"), {"data": {}}, {"data": None}, {"data": []}]
    answering(monkeypatch, tmp_path, items)
    monkeypatch.setattr(login, "ASK_EVERY", 0.0)
    reader = login.PeopleReader(f"{kind}/slurm-people")
    for text, is_read in (("users: [a]", True), *(("users: []", turn == 0) for turn in range(4))):
        reader.read(60)
        assert latest.read_text() == text, "without the key the people before stay"
        assert (reader.problem == "") is is_read, "and the status says so"
        assert latest.stat().st_mode & 0o777 == 0o600
    login.forget()
    assert not latest.exists()


def test_people_are_read_only_where_the_chart_names_them_and_with_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(login, "LATEST_PEOPLE", str(tmp_path / "latest.yaml"))
    monkeypatch.setattr(login, "ACCOUNT", tmp_path / "account")
    monkeypatch.setattr(login, "_last", {"report": "", "log": ""})
    answering(monkeypatch, tmp_path, [])
    login.PeopleReader("").read(60)
    login.PeopleReader("secrets/slurm-people").read(5)
    assert capsys.readouterr().out == ""
    login.PeopleReader("secrets/slurm-people").read(60)
    assert "403" in capsys.readouterr().out and not (tmp_path / "latest.yaml").exists()


def answering(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, items: list[dict[str, object]]) -> None:
    """Let an API server tell these of the pod, the last one for ever; without one it refuses."""
    (tmp_path / "account").mkdir()
    (tmp_path / "account" / "token").write_text("t")

    class Server:
        def __init__(self, *_: object) -> None: ...

        def ask(self, *_: object) -> dict[str, object]:
            if not items:
                raise ApiError("see when this pod must end", "403 no", status=403)
            return items.pop(0) if len(items) > 1 else items[0]

    monkeypatch.setattr(login, "ApiServer", Server)
    monkeypatch.setattr(login, "ASK_EVERY", 0.1)
    monkeypatch.setattr(login, "budget", lambda env, _: float(env["MINIVM_GRACE_SECONDS"]) / 10)
    monkeypatch.setenv("MINIVM_GRACE_SECONDS", "43200")


def test_user_ids_without_a_name_hide_nobody_and_a_dead_directory_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(login, "ASK_EVERY", 0.05)
    records = login.Records("login-old", "")
    nameless = range(50000, 51000)
    assert until(lambda: records.people([*nameless, NOBODY]), "the name is found")[0].uid == NOBODY
    records = login.Records("login-old", "")
    with monkeypatch.context() as patch:
        patch.setattr(login, "ran", lambda *_, **__: (_ for _ in ()).throw(subprocess.TimeoutExpired("getent", 5)))
        assert records.people([NOBODY]) == []
    assert until(lambda: records.people([NOBODY]), "it is asked again")


@needs_root
def test_the_record_in_a_home_is_written_with_its_owners_rights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A home that leads elsewhere by a link, a FIFO in the way: no file of root's, and no wait."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        top = Path(name)
        top.chmod(0o755)
        for uid, kind in ((20001, "plain"), (20002, "link"), (20003, "fifo")):
            home = top / kind
            home.mkdir(mode=0o700)
            if kind == "link":
                (top / "roots").mkdir(mode=0o755)
                (home / ".minivm").symlink_to(top / "roots")
            if kind == "fifo":
                (home / ".minivm/login-pods").mkdir(parents=True)
                os.mkfifo(home / ".minivm/login-pods/.login-old")
            for path in (home, *home.rglob("*")):
                os.chown(path, uid, uid, follow_symlinks=False)
        records = login.Records("login-old", "10.1.2.3")
        records._learn("".join(f"u{uid}:x:{uid}:{uid}::{top}/{kind}:/bin/sh\n"
                               for uid, kind in ((20001, "plain"), (20002, "link"), (20003, "fifo"))))  # fmt: skip
        records.follow((20001, 20002, 20003), "1790000000")
        record = top / "plain/.minivm/login-pods/login-old"
        until(record.exists, "the record is there")
        assert record.read_text() == "1790000000 10.1.2.3\n"
        assert (record.stat().st_uid, record.stat().st_mode & 0o777) == (20001, 0o600)
        records.end()
        until(lambda: not record.exists(), "the record is gone")
        assert list((top / "roots").iterdir()) == []
        assert all(writer.wait(60) is not None for writer in records.writers)
