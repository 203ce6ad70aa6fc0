"""Black boxes: differences of counters, bounds, owners, and what their text may do to a page."""

from __future__ import annotations

import base64
import itertools
import json
import os
import resource
import shutil
import socket
import stat
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from health import black_box, credentials
from health.jobs import ask, boxes, parse
from health.jobs.boxes import Box
from health.jobs.model import Answer, Job, JobCause, JobNode, World
from tests.support.kill_points import killed_before

JOB = {"SLURM_JOB_ID": "12", "SLURM_JOB_UID": "1001"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINIVM_LOG", str(tmp_path))
    return tmp_path / "boxes"


def ended(**more: object) -> Job:
    return Job(id=12, shown="12", states=frozenset({"FAILED"}), nodes="w0", **more)  # type: ignore[arg-type]


def written(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def test_counters_of_the_kernel_are_read_where_they_exist(tmp_path: Path) -> None:
    assert black_box.counters(str(tmp_path)) == {}
    written(tmp_path, "proc/vmstat", "nr_free_pages 5\noom_kill 3\n")
    head = "Inter-|   Receive\n face |bytes\n"
    row = "1 2 {} 4 0 0 0 0 5 6 7 8 0 0 0 0\n"
    written(tmp_path, "proc/net/dev", f"{head}    lo: {row.format(9)}  eth0:{row.format(3)}vethab: {row.format(9)}")
    written(tmp_path, "sys/class/net/eth0/carrier_down_count", "2\n")
    written(tmp_path, "sys/class/infiniband/mlx5_0/ports/1/counters/link_downed", "1\n")
    written(tmp_path, "sys/class/infiniband/mlx5_0/ports/1/counters/symbol_error", "no number\n")
    written(tmp_path, "sys/fs/ext4/sda1/errors_count", "0\n")
    written(tmp_path, "sys/fs/cgroup/system.slice/slurmstepd.scope/memory.events", "oom 4\noom_kill 4\n")
    assert black_box.counters(str(tmp_path)) == {
        "oom_kills": 3, "oom_kills_of_jobs": 4, "net/eth0/rx_errors": 3, "net/eth0/rx_dropped": 4,
        "net/eth0/tx_errors": 7, "net/eth0/tx_dropped": 8, "net/eth0/link_losses": 2,
        "ib/mlx5_0/1/link_downed": 1, "disk/sda1/errors": 0,
    }  # fmt: skip


def test_what_moved_is_the_difference_and_a_reset_counter_is_new() -> None:
    assert black_box.grown({"a": 5, "b": 5, "c": 5, "d": "x"}, {"a": 5, "b": 7, "c": 2, "d": 1, "e": 9}) == {
        "b": 2,
        "c": 2,
    }


def test_a_box_is_root_s_alone_and_is_closed_once(folder: Path) -> None:
    mask = os.umask(0)
    try:
        black_box.begin(JOB, 100)
    finally:
        os.umask(mask)
    (box,) = folder.iterdir()
    assert box.name == "12.1001.run" and stat.S_IMODE(box.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    black_box.end(JOB, 200)
    black_box.end(JOB, 300)
    kinds = [(entry["kind"], entry["at"]) for entry in black_box.parse_lines(black_box.find(12, 1001))]
    assert kinds == [("begin", 100), ("end", 200)] and [path.name for path in folder.iterdir()] == ["12.1001.jsonl"]
    (folder / "12.1001.jsonl").rename(folder / "12.1001.run")  # cut before it was closed
    black_box.end(JOB, 300)
    assert [entry["at"] for entry in black_box.parse_lines(black_box.find(12, 1001))] == [100, 200]
    black_box.begin(JOB, 400)  # requeued
    assert [entry["kind"] for entry in black_box.parse_lines(black_box.find(12, 1001))] == ["begin", "end", "begin"]


def test_a_box_is_found_for_its_own_user_only(folder: Path) -> None:
    black_box.begin(JOB, 100)
    assert black_box.find(12, 1001) and black_box.find(12, None)
    assert black_box.find(12, 1002) == b"" == black_box.find(1, 1001)


@pytest.mark.parametrize("job", ["", "../12", "12/..", "1" * 11, "²", "1.2"])
def test_a_job_without_a_plain_number_gets_no_box(folder: Path, job: str) -> None:
    black_box.begin({**JOB, "SLURM_JOB_ID": job}, 100)
    black_box.end({**JOB, "SLURM_JOB_ID": job}, 100)
    assert not folder.exists()


def test_a_link_in_the_box_s_place_is_not_followed(folder: Path, tmp_path: Path) -> None:
    folder.mkdir()
    (tmp_path / "other").write_text("")
    (folder / "12.1001.run").symlink_to(tmp_path / "other")
    black_box.begin(JOB, 100)
    black_box.see(["text"], 101)
    assert (tmp_path / "other").read_text() == ""


def test_changes_of_health_reach_boxes_that_are_open_or_closed_a_moment_ago(folder: Path) -> None:
    black_box.begin(JOB, 100)
    black_box.begin({**JOB, "SLURM_JOB_ID": "13"}, 100)
    black_box.end({**JOB, "SLURM_JOB_ID": "13"}, 110)
    os.utime(folder / "13.1001.jsonl", (110, 110))
    black_box.see(["xid: XID 79"], 111)
    os.utime(folder / "13.1001.jsonl", (111, 111))
    black_box.see(["xid is good again"], 1000)
    texts = {job: [entry.get("text") for entry in black_box.parse_lines(black_box.find(job, None))] for job in (12, 13)}
    assert texts == {12: [None, "xid: XID 79", "xid is good again"], 13: [None, None, "xid: XID 79"]}


def test_only_problems_that_come_and_go_are_changes() -> None:
    assert black_box.changes(None, {"a": "1"}) == []
    assert black_box.changes({"a": "1", "b": "2"}, {"a": "9", "c": "3"}) == ["c: 3", "no longer: b"]


def test_a_box_is_bounded_and_keeps_room_for_its_end(folder: Path) -> None:
    black_box.begin(JOB, 100)
    for _ in range(400):
        black_box.see(["x" * 1000], 101)
    assert (folder / "12.1001.run").stat().st_size <= black_box.LARGEST - black_box.LARGEST_LINE
    black_box.end(JOB, 200)
    path = folder / "12.1001.jsonl"
    assert path.stat().st_size <= black_box.LARGEST
    assert black_box.parse_lines(path.read_bytes())[-1]["kind"] == "end"
    black_box.begin(JOB, 300)
    assert [entry["at"] for entry in black_box.parse_lines(black_box.find(12, 1001))] == [300], "a full box begins anew"


def test_a_line_that_a_full_volume_cut_spoils_no_later_one(folder: Path) -> None:
    black_box.begin(JOB, 100)
    size = (folder / "12.1001.run").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, hard))  # the kernel writes ten bytes, then none
    try:
        black_box.see(["the disk is full"], 101)
        black_box.see(["the disk is full"], 102)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    black_box.end(JOB, 200)
    kinds = [(entry["kind"], entry["at"]) for entry in black_box.parse_lines(black_box.find(12, 1001))]
    assert kinds == [("begin", 100), ("end", 200)]


def test_old_boxes_go_and_all_together_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(black_box, "MOST_FILES", 3)
    for job in range(1, 7):
        env = {**JOB, "SLURM_JOB_ID": str(job)}
        black_box.begin(env, 0)
        if job != 2:
            black_box.end(env, 0)
        name = f"{job}.1001{'.run' if job == 2 else '.jsonl'}"
        os.utime(folder / name, (job * 86400, job * 86400))
    black_box.prune(5.5, 7 * 86400)
    assert sorted(path.name for path in folder.iterdir()) == ["2.1001.run", *(f"{job}.1001.jsonl" for job in (4, 5, 6))]
    black_box.prune(2.5, 7 * 86400)
    assert sorted(path.name for path in folder.iterdir()) == ["2.1001.run", "5.1001.jsonl", "6.1001.jsonl"]
    black_box.prune(2.5, 63 * 86400)
    assert not list(folder.iterdir())


def test_a_directory_of_a_volume_is_closed_to_users(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    black_box.prune(1, 0)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def box(*entries: dict[str, object]) -> Box:
    return Box("w0", tuple(entries))


def test_the_page_says_what_moved_in_the_last_run() -> None:
    first: list[dict[str, object]] = [{"kind": "begin"}, {"kind": "end", "grown": {"oom_kills": 9}}]
    grown = {"oom_kills": 2, "net/eth0/link_losses": 1, "unknown": 4, "ib/mlx5_0/1/link_downed": 3}
    last: list[dict[str, object]] = [{"kind": "begin"}, {"kind": "seen", "at": 5, "text": "xid: XID 79"}]
    facts, unknown = boxes.explain([box(*first, *last, {"kind": "end", "grown": grown, "full": ["/tmp"]})], ended())
    texts = [fact.text.removeprefix("on w0 while it ran: ") for fact in facts]
    assert texts[:4] == [
        "the kernel ended 2 processes on its machine for lack of memory",
        "network interface eth0 lost its link 1 times",
        "fabric port mlx5_0/1 lost its link 3 times",
        "/tmp was full at its end",
    ]
    assert texts[4].startswith("xid: XID 79 (") and not unknown


def test_the_page_names_what_is_missing() -> None:
    _, unknown = boxes.explain([box({"kind": "begin"}), Box("w1", obstacle="no"), Box("w2", obstacle="no")], ended())
    assert unknown == [
        "what w0 counted while it ran: its epilog has not written that",
        "what w1, w2 recorded while it ran: no",
    ]
    _, unknown = boxes.explain([box()], ended())
    assert unknown == ["what w0 recorded while it ran: it has no black box of the job"]


def test_a_kill_at_any_step_costs_the_page_no_more_than_a_named_gap(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prolog, broker and epilog die at each step; the epilog that runs again completes what the prolog began."""
    counted = {"net/eth0/link_losses": 1}
    monkeypatch.setattr(black_box, "counters", counted.copy)
    monkeypatch.setattr(black_box, "stamp", lambda now: {"at": now, "boot": now})

    def run() -> None:
        black_box.begin(JOB, 100)
        black_box.see(["xid: XID 79"], 110)
        counted["net/eth0/link_losses"] = 3
        black_box.end({**JOB, "SLURM_JOB_EXIT_CODE": "1"}, 120)

    def page() -> tuple[str, str]:
        found = boxes.explain([Box("w0", tuple(black_box.parse_lines(black_box.find(12, 1001))))], ended())
        return "\n".join(fact.text for fact in found[0]), "\n".join(found[1])

    gaps = []
    for number in itertools.count():
        shutil.rmtree(folder, ignore_errors=True)
        counted["net/eth0/link_losses"] = 1
        is_killed = killed_before(number, run)
        facts, unknown = page()
        assert ("lost its link 2 times" in facts) != bool(unknown), (number, facts, unknown)
        if not unknown:
            assert "XID 79" in facts, number
        gaps.append(unknown)
        counted["net/eth0/link_losses"] = 3
        black_box.end({**JOB, "SLURM_JOB_EXIT_CODE": "1"}, 130)
        facts, unknown = page()
        assert ("lost its link 2 times" in facts) != ("no black box" in unknown), (number, facts, unknown)
        if not is_killed:
            break
    assert len(set(gaps)) == 3, "no box, a box without its end, and a whole one"


def test_a_damaged_or_hostile_box_reaches_no_terminal() -> None:
    text = b'{"kind":"begin"}\n[1]\n{"kind":"seen","at":"x","text":"\\u001b[31mred"}\n{"kind":"end","grown":{"oom'
    facts, _ = boxes.explain([Box("w\x1b0", tuple(black_box.parse_lines(text)))], ended())
    assert facts and all(letter.isprintable() for fact in facts for letter in fact.text + fact.source)
    odd: list[dict[str, object]] = [
        {"kind": "begin"},
        {"kind": "end", "grown": [1], "full": {"a": 1}},
        {"kind": "seen", "at": float("inf")},
    ]
    assert len(boxes.explain([box(*odd)], ended())[0]) == 1
    assert black_box.parse_lines(b"[" * 60000) == []


@pytest.mark.parametrize("number", ["Infinity", "1e999", "NaN", "9" * 400])
def test_a_number_of_a_hostile_node_breaks_no_page(number: str) -> None:
    """Root of a worker signs its box."""
    text = f"""{{"kind":"now","sampled":{number},"gpus":[[0,0,1,1,1.5]]}}
        {{"kind":"begin"}}
        {{"kind":"step","step":0,"tasks":2,"failed":[[{number},1,0,5]]}}
        {{"kind":"end","grown":{{"oom_kills":{number}}}}}"""
    hostile = (Box("w0", tuple(black_box.parse_lines(text.encode()))),)
    head = Answer("It runs.", JobCause.NONE)
    running = replace(ended(), states=frozenset({"RUNNING"}))
    assert ask.add_node_reports(head, hostile, running, World(), 1e9) == head
    assert boxes.add_failures(head, hostile, ended()) == head
    assert boxes.explain(hostile, ended())[0] == []


def test_a_deeply_nested_box_is_left_out_of_a_capsule() -> None:
    assert black_box.parse_lines(b'{"kind":"begin","x":' + b"[" * 900 + b"]" * 900 + b"}") == []


def test_root_reads_the_node_s_own_box_where_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    black_box.begin(JOB, 100)
    monkeypatch.setenv("MINIVM_POD_NAME", "w0")
    (read,) = boxes.fetch(ended(), [JobNode("w0")])
    assert [entry["kind"] for entry in read.entries] == (["now", "begin"] if os.geteuid() == 0 else [])


def test_a_place_that_signs_nothing_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "MUNGE_SOCKET", str(tmp_path / "none"))
    monkeypatch.setattr(credentials, "SACK_SOCKETS", (str(tmp_path / "none"),))
    (read,) = boxes.fetch(ended(), [JobNode("w0", "10.0.0.1")])
    assert "neither munged nor sackd has a socket" in read.obstacle


@pytest.mark.parametrize("by", ["munge", "slurm"])
def test_a_node_without_an_address_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    monkeypatch.setattr(credentials, "MUNGE_SOCKET", str(tmp_path if by == "munge" else tmp_path / "none"))
    monkeypatch.setattr(credentials, "SACK_SOCKETS", (str(tmp_path),))
    assert credentials.way() == by
    assert boxes.fetch(ended(), [JobNode("w0")]) == (Box("w0", obstacle="Slurm has no address of it now"),)
    assert parse.parse_nodes(json.dumps({"nodes": [{"name": "w0", "address": "10.0.0.1"}]}))[0].address == "10.0.0.1"


class Sack:
    """Answers of a sack.socket to each request, in order."""

    def __init__(self, path: Path, *answers: bytes) -> None:
        self.path, self.answers = path, answers
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen()
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self) -> None:
        for answer in self.answers:
            connection, _ = self.listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)


def grants(**more: object) -> bytes:
    body = {"context": "sack", "uid": 20001, "payload": base64.b64encode(b"text").decode(), **more}
    return b"e30." + base64.urlsafe_b64encode(json.dumps(body).encode()).rstrip(b"=") + b".c2ln"


GOOD, BAD = b"\0\0\0\0", b"\xff\xff\xff\xff"


def test_a_credential_counts_only_as_slurm_verified_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "SACK_SOCKETS", (str(tmp_path / "none"), str(tmp_path / "sack")))
    with Sack(tmp_path / "sack", GOOD, BAD, b"", GOOD, GOOD, GOOD, GOOD).listener:
        assert credentials.unseal(grants(), "slurm") == (20001, b"text")
        refused = [grants(), grants(), grants(context="auth"), grants(uid="x"), b"e30.bm8", b"none"]
        for token in refused:
            with pytest.raises(OSError, match="the credential is not good"):
                credentials.unseal(token, "slurm")


@pytest.mark.parametrize("was_requeued", [True, False])
def test_the_box_of_the_run_before_is_not_this_run_s(was_requeued: bool) -> None:
    """Its prolog was killed. Without a requeue an early start is the clock's, or of nodes that powered up."""
    lost = {"kind": "end", "at": 200.0, "boot": 200.0, "grown": {"net/eth0/link_losses": 2}}
    before = box({"kind": "now", "at": 1e4, "boot": 1e4}, {"kind": "begin", "at": 100.0, "boot": 100.0}, lost)
    kept = boxes.keep_last_run(before, ended(started=1000.0, ended=2000.0), was_requeued=was_requeued)
    facts, unknown = boxes.explain([kept], ended())
    assert bool(facts) != was_requeued
    assert unknown == ([f"what w0 recorded while it ran: {boxes.OF_EARLIER_RUN}"] if was_requeued else [])


def test_what_a_node_noted_after_the_job_is_not_its_own() -> None:
    """Its epilog was killed, and the broker went on with the open box; the epilog that runs again comes late."""
    job = ended(started=100.0, ended=200.0)
    seen = [{"kind": "seen", "at": at, "text": f"xid: XID {at:.0f}"} for at in (150.0, 5000.0)]
    end = {"kind": "end", "at": 8000.0, "boot": 8000.0, "grown": {"net/eth0/link_losses": 2}}
    kept = boxes.keep_last_run(
        replace(box({"kind": "begin", "at": 100.0, "boot": 100.0}, *seen, end), clock=(0.0, 0.0)),
        job,
        was_requeued=False,
    )
    facts, unknown = boxes.explain([kept], job)
    first, second = (fact.text for fact in facts)
    assert first == (
        "on w0 from its start to its epilog, 2 h 10 min after its end: network interface eth0 lost its link 2 times"
    )
    assert "XID 150" in second and not unknown
    blank = Answer("It failed.", JobCause.UNKNOWN)
    assert boxes.add_links(blank, [kept]) == blank, "the link may have been lost later"
