"""slurmrestd as it may answer: another version of it, nothing new, nonsense, nothing at all; and what it is told."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fleet import FleetError
from fleet.act import slurm_client as adapter
from fleet.act.slurm_client import SlurmClient, token
from fleet.decide.actions import Drain, Forget, Remove, SeenVersions, Undrain
from fleet.world.slurm import Precondition
from tests.support.slurm_rest import NODE, SECRET, Answer, Rest, nodes
from tests.waiting import PATIENCE, until

SEEN = Precondition(drained=False, down=False, reason="", comment="")
AT = SeenVersions("w1", "n1", "7", "8")


def test_it_speaks_the_newest_version_that_both_know_and_follows_an_upgrade(rest: Rest) -> None:
    known = {"v0.0.41"}
    rest.answers = lambda method, path: nodes(NODE) if path.split("/")[2] in known else (404, b"{}")
    assert list(rest.client.look(jobs=False).nodes) == ["w1"]
    asked = len(rest.asked)
    rest.client.look(jobs=False)
    assert len(rest.asked) == asked + 1, "found once"
    known.clear()
    known.add("v0.0.44")
    assert list(rest.client.look(jobs=False).nodes) == ["w1"]


def test_it_asks_for_what_is_new_and_nothing_new_is_the_same_world(rest: Rest) -> None:
    first = rest.client.look(jobs=False)
    rest.answers = lambda method, path: (304, b"")
    assert rest.client.look(jobs=False) is first
    assert rest.asked[-1][1].endswith("/nodes/?update_time=uts7"), "a bare number is refused by slurmrestd 24.11"


def test_nodes_that_changed_alone_are_an_error_to_slurmrestd_and_are_asked_for_whole(rest: Rest) -> None:
    """slurmrestd 24.11 answers "Unable to query partitions", because the partitions have not changed."""
    rest.client.look(jobs=False)
    failed = json.dumps({"errors": [{"error_number": -1, "error": "Unspecified error"}]}).encode()
    now = {**NODE, "state": ["IDLE", "DRAIN"]}
    rest.answers = lambda method, path: (500, failed) if "update_time" in path else nodes(now)
    assert rest.client.look(jobs=False).nodes["w1"].drained
    rest.answers = lambda method, path: (500, failed)
    with pytest.raises(FleetError):
        rest.client.look(jobs=False)


@pytest.mark.parametrize(
    "answer",
    [
        (200, b""),
        (200, b"[]"),
        (200, b"[" * 100_000),
        (200, b'{"nodes": {}}'),
        (500, json.dumps({"errors": [{"error": "Protocol authentication error"}]}).encode()),
        (511, b"{}"),
        (200, json.dumps({"nodes": [], "errors": [{"description": "x"}]}).encode()),
        (200, json.dumps({"nodes": [], "errors": ["x"]}).encode()),
    ],
)
def test_an_answer_that_is_none_is_an_error_and_not_a_slurm_without_nodes(rest: Rest, answer: Answer) -> None:
    rest.answers = lambda method, path: answer
    with pytest.raises(FleetError):
        rest.client.look(jobs=False)


@pytest.mark.parametrize("said", [b"\xff", b"\xed\xa0\x80", b"\xc3", b"\xf0\x9f\x98"])
def test_bytes_that_are_no_text_in_one_job_or_reason_hide_nothing_else(rest: Rest, said: bytes) -> None:
    """slurmrestd 24.11 returns a job comment unchanged, whatever bytes the user submitted."""
    reason = b"fan " + said
    one = json.dumps({**NODE, "state": ["IDLE", "DRAIN"], "reason": "REASON"}).encode().replace(b"REASON", reason)
    job = (
        b'{"job_id": 7, "job_state": ["RUNNING"], "nodes": "w1", "comment": "a' + said + b'", "name": "' + said + b'"}'
    )
    found = {"nodes": b'{"nodes": [' + one + b"]}", "jobs": b'{"jobs": [' + job + b"]}"}
    rest.answers = lambda method, path: (200, found["jobs" if "/jobs/" in path else "nodes"])
    seen = rest.client.look(jobs=True)
    assert seen.holding("w1") == ("7",)
    assert seen.nodes["w1"].reason.startswith("fan ")
    assert seen.nodes["w1"].reason.isprintable(), "and whoever shows it can"
    assert rest.client.is_unchanged("w1", seen.nodes["w1"].precondition), "it is read in the same way again"


def test_a_server_that_is_away_or_silent_or_endless_is_an_error(rest: Rest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "MOST_BYTES", 100)
    rest.answers = lambda method, path: (200, b" " * 101)
    with pytest.raises(FleetError, match="an answer of more than"):
        rest.client.look(jobs=False)
    monkeypatch.setattr(adapter, "WITHIN_S", 0.2)
    hold = threading.Event()
    rest.answers = lambda method, path: (200, b" " * hold.wait(30))
    with pytest.raises(FleetError, match="timed out"):
        rest.client.look(jobs=False)
    hold.set()
    rest.server.shutdown()
    rest.server.server_close()
    with pytest.raises(FleetError, match="refused"):
        rest.client.look(jobs=False)


def test_an_address_that_says_nothing_is_not_waited_for_as_long_as_an_answer(
    rest: Rest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address of a controller pod that is gone neither accepts nor refuses a connection."""
    monkeypatch.setattr(adapter, "WITHIN_S", 3 * PATIENCE)
    monkeypatch.setattr(adapter, "GONE_MS", 300)
    with contextlib.ExitStack() as stack:
        silent = stack.enter_context(socket.socket())
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        # Its queue is full then, and who comes now is not even told so.
        first = stack.enter_context(socket.create_connection(silent.getsockname()))
        client = SlurmClient(f"127.0.0.1:{silent.getsockname()[1]}", rest.client.key)
        said: list[str] = []

        def ask() -> None:
            try:
                client.look(jobs=False)
            except FleetError as error:
                said.append(str(error))

        threading.Thread(target=ask, daemon=True).start()
        until(lambda: said, "it is told")
        assert "timed out" in said[0] and first.getpeername() == silent.getsockname()
    # What takes long to answer has its time still.
    nobody = threading.Event()
    rest.answers = lambda method, path: nodes(NODE) if not nobody.wait(1) else (500, b"")
    assert rest.client.look(jobs=False).nodes


@pytest.mark.parametrize(
    ("act", "body"),
    [
        (Drain("w1", "r", "c", SEEN), {"state": ["DRAIN"], "reason": "r", "comment": "c"}),
        (Drain("w1", "r", None, SEEN), {"state": ["DRAIN"], "reason": "r"}),
        (Drain("w1", "r", None, SEEN, down=True), {"state": ["DOWN"], "reason": "r"}),
        (Undrain("w1", None, SEEN, AT, down=True), {"state": ["RESUME"], "reason": "minivm: fleet: lifted"}),
        (Undrain("w1", "", SEEN, AT), {"state": ["UNDRAIN"], "reason": "minivm: fleet: lifted", "comment": ""}),
        (Undrain("w1", None, SEEN, AT), {"state": ["UNDRAIN"], "reason": "minivm: fleet: lifted"}),
        (Forget("w1", SEEN), {"comment": ""}),
    ],
)
def test_a_change_is_one_call(rest: Rest, act: Drain | Undrain | Forget, body: dict[str, object]) -> None:
    assert rest.client.change(act)
    posted = [(path.rpartition("/")[2], said) for method, path, said in rest.asked if method == "POST"]
    assert posted == [("w1", body)]


JOBS = [
    {"job_id": 5, "job_state": ["RUNNING"], "nodes": "w[1-2]"},
    {"job_id": 6, "job_state": ["RUNNING"], "nodes": "w2"},
    {"job_id": 7, "job_state": ["PENDING"], "nodes": ""},
    {"job_id": 8, "job_state": ["RUNNING"], "nodes": "w1", "admin_comment": "ticket 7"},
    {"job_id": 10, "job_state": ["RUNNING"], "nodes": "w1", "array_job_id": {"set": True, "number": 9},
     "admin_comment": "minivm: before"},
    # The last task of an array that has another, which runs elsewhere; the only one that is left of another array.
    {"job_id": 9, "job_state": ["RUNNING"], "nodes": "w1", "array_job_id": {"set": True, "number": 9}},
    {"job_id": 11, "job_state": ["RUNNING"], "nodes": "w1", "array_job_id": {"set": True, "number": 11}},
    {"job_id": "x", "job_state": ["RUNNING"], "nodes": "w1"},
]  # fmt: skip


@pytest.mark.parametrize("refuses", [False, True])
def test_jobs_of_a_node_that_is_given_up_get_the_reason_before_slurm_ends_them(rest: Rest, *, refuses: bool) -> None:
    def answers(method: str, path: str) -> Answer:
        if path.endswith("/jobs/"):
            return 200, json.dumps({"jobs": JOBS}).encode()
        if method == "POST" and "/job/" in path and refuses:
            return 500, json.dumps({"errors": [{"error": "Invalid job id specified"}]}).encode()
        return nodes(NODE)

    rest.answers = answers
    assert rest.client.change(Drain("w1", "minivm: fleet: dead: node n1 is given up", None, SEEN, down=True))
    why = "the fleet sets node w1 down (node n1 is given up)"
    said = f"minivm: {why}: the job is requeued, or ended where it cannot be requeued"
    told = [(job, {"admin_comment": said}) for job in ("5", "10", "11")]
    posted = [(path.rpartition("/")[2], body) for method, path, body in rest.asked if method == "POST"]
    assert posted[-1][0] == "w1" and posted[-1][1]["state"] == ["DOWN"]
    assert posted[:-1] == (told[:1] if refuses else told)


def test_reasons_for_jobs_do_not_hold_up_the_next_dead_machine(rest: Rest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of jobs that takes all of the time is asked for once in a while, not for each node of a dead rack."""
    monkeypatch.setattr(adapter, "EXPLAINS_S", 0.05)

    def answers(method: str, path: str) -> Answer:
        if path.endswith("/jobs/"):
            threading.Event().wait(0.1)
            return 200, json.dumps({"jobs": JOBS}).encode()
        return nodes(NODE)

    rest.answers = answers
    for _ in range(3):
        assert rest.client.change(Drain("w1", "minivm: fleet: dead: node n1 is given up", None, SEEN, down=True))
    assert sum(path.endswith("/jobs/") for _, path, _ in rest.asked) == 1
    downs = [body for method, path, body in rest.asked if method == "POST" and path.endswith("/node/w1")]
    assert len(downs) == 3


def test_a_node_that_is_deleted_is_gone_though_nothing_says_so(rest: Rest, monkeypatch: pytest.MonkeyPatch) -> None:
    """slurmrestd 24.11: its nodes are unchanged then, and what it says of one that it does not know is "No error"."""
    rest.client.look(jobs=False)
    left: list[object] = [NODE]

    def answers(method: str, path: str) -> Answer:
        if "update_time" in path:
            return 304, b""
        if "/node/" in path:
            return 500, json.dumps({"errors": [{"error": "No error"}]}).encode()
        return nodes(*left)

    rest.answers = answers
    with pytest.raises(FleetError, match="No error"):
        rest.client.is_unchanged("w1", SEEN)
    left.clear()
    assert list(rest.client.look(jobs=False).nodes) == ["w1"]
    assert not rest.client.change(Drain("w1", "r", "c", SEEN))
    assert rest.client.is_unchanged("w1", None)
    left.append(NODE)
    monkeypatch.setattr(adapter, "WHOLE_S", 0.0)
    assert list(rest.client.look(jobs=False).nodes) == ["w1"]


def test_a_record_is_removed_only_as_it_was_seen(rest: Rest) -> None:
    assert rest.client.change(Remove("w1", SEEN))
    assert rest.asked[-1][:2] == ("DELETE", rest.asked[-2][1])
    rest.client.look(jobs=False)
    assert "update_time" not in rest.asked[-1][1]
    rest.answers = lambda method, path: nodes({**NODE, "state": ["DOWN"]})
    assert not rest.client.change(Remove("w1", SEEN))
    assert rest.asked[-1][0] == "GET"


def test_who_names_a_node_is_asked_of_jobs_and_reservations_and_known_whole_or_not_at_all(rest: Rest) -> None:
    jobs: list[object] = [{"job_id": 1, "job_state": ["PENDING"], "required_nodes": "w[2-3]", "nodes": ""}]
    reserved: list[object] = [{"name": "look", "node_list": "w7"}]

    def answers(method: str, path: str) -> Answer:
        if "reservations" in path:
            return 200, json.dumps({"reservations": reserved}).encode()
        return (200, json.dumps({"jobs": jobs}).encode()) if "jobs" in path else nodes(NODE)

    rest.answers = answers
    assert rest.client.look(jobs=True).claims is None
    assert rest.client.look(jobs=True, claims=True).claims == frozenset({"w2", "w3", "w7"})
    jobs.append({"job_id": 2, "job_state": ["CANCELLED"], "required_nodes": "w8"})
    assert rest.client.look(jobs=True, claims=True).claims == frozenset({"w2", "w3", "w7"}), "of one that is over none"
    jobs.append({"job_id": 3, "job_state": ["COMPLETED", "COMPLETING"], "nodes": "w9"})
    assert rest.client.look(jobs=True, claims=True).claims == frozenset({"w2", "w3", "w7", "w9"})
    reserved.append({"name": "all", "node_list": "w[0-9999999]"})
    found = rest.client.look(jobs=True, claims=True)
    assert found.claims is None and "more nodes than can be told apart" in found.doubts["reservation all"]
    assert not rest.client.look(jobs=True).doubts, "nobody has asked for it"


@pytest.mark.parametrize(
    "now",
    [
        {**NODE, "state": ["IDLE", "DRAIN"], "reason": "look at fan 3"},
        {**NODE, "state": ["DOWN"]},
        {**NODE, "comment": "Ann's"},
        {**NODE, "reason": "x"},
        {**NODE, "name": "w2"},
        {**NODE, "state": 7},
    ],
)
def test_a_node_that_is_not_as_it_was_seen_is_not_changed(rest: Rest, now: dict[str, object]) -> None:
    rest.answers = lambda method, path: nodes(now)
    assert not rest.client.change(Drain("w1", "r", "c", SEEN))
    assert [method for method, _, _ in rest.asked] == ["GET"]


def test_a_name_cannot_become_another_path(rest: Rest) -> None:
    rest.client.change(Drain("../../jobs?x", "r", "c", SEEN))
    assert rest.asked[0][1].endswith("/node/..%2F..%2Fjobs%3Fx")


def test_a_token_is_slurms_users_and_soon_over(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(SECRET)
    head, claims, signature = token(tmp_path / "key", 1000.0).split(".")
    wanted = hmac.digest(SECRET, f"{head}.{claims}".encode(), hashlib.sha256)
    assert base64.urlsafe_b64decode(f"{signature}=") == wanted
    assert json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4))) == {
        "iat": 1000,
        "exp": 1300,
        "sun": "slurm",
    }


def test_without_a_key_nobody_is_asked(rest: Rest) -> None:
    rest.client.key.write_bytes(b"short")
    with pytest.raises(FleetError, match="it holds 5 bytes"):
        rest.client.look(jobs=False)
    rest.client.key.unlink()
    with pytest.raises(FleetError, match="No such file"):
        rest.client.look(jobs=False)
    assert not rest.asked


class Kept:
    """Server that keeps connections, as slurmrestd does; with `ends` it closes one silently after each answer."""

    def __init__(self, key: Path) -> None:
        self.asked: list[str] = []
        self.connections = 0
        self.ends = False
        self.answer = nodes(NODE)
        kept = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                kept.connections += 1
                super().setup()

            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                kept.asked.append(self.command)
                status, text = kept.answer
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)
                self.close_connection = kept.ends

            do_POST = do_GET

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        key.write_bytes(SECRET)
        self.client = SlurmClient(f"127.0.0.1:{self.server.server_port}", key)


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    made = Kept(tmp_path / "key")
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_who_asks_again_does_not_connect_again(kept: Kept) -> None:
    """slurmrestd looks for the name of each address that connects, and answers nobody until it knows."""
    for _ in range(3):
        kept.client.look(jobs=False)
    assert kept.client.change(Drain("w1", "r", "c", SEEN))
    assert kept.connections == 1
    asking = threading.Thread(target=lambda: kept.client.look(jobs=False))
    asking.start()
    asking.join(30)
    assert kept.connections == 2, "two threads never share one"


def test_a_connection_that_was_ended_is_made_again_and_nothing_is_changed_twice(kept: Kept) -> None:
    kept.ends = True
    for _ in range(3):
        assert kept.client.look(jobs=False).nodes
    assert kept.asked == ["GET"] * 3
    with pytest.raises(FleetError):
        kept.client.change(Drain("w1", "r", "c", SEEN))
    assert kept.asked == ["GET"] * 4, "what was sent may have been heard"
    kept.ends = False
    assert kept.client.change(Drain("w1", "r", "c", SEEN))


def test_an_answer_of_many_nodes_is_read_one_by_one_and_counts_whole_or_not_at_all(kept: Kept) -> None:
    """While one call of the json library reads them all nobody has his turn, and all of them lie there twice."""
    many = [
        {**NODE, "name": f"w{number}", "more": {f"key{key}": number for key in range(30)}} for number in range(2000)
    ]
    size = len(nodes(*many)[1])
    kept.answer = nodes(*many)
    tracemalloc.start()
    try:
        assert len(kept.client.look(jobs=False).nodes) == 2000
        assert tracemalloc.get_traced_memory()[1] < 4 * size
    finally:
        tracemalloc.stop()
    before = kept.client.look(jobs=False)
    text = nodes(*many)[1]
    for broken in (text[:-9], text + b"x", text.replace(b'"last_update"', b'"nodes"')):
        kept.answer = (200, broken)
        with pytest.raises(FleetError):
            kept.client.look(jobs=False)
    kept.answer = (304, b"")
    assert kept.client.look(jobs=False) is before


def test_of_two_that_look_at_once_the_older_answer_is_not_kept_as_the_newer_one(rest: Rest) -> None:
    """Several undrains of nodes that Slurm no longer knows read at the same time.

    The next request would ask for changes since the newer answer, and changes from before it would stay unknown until
    the next full read.
    """
    answered, over = threading.Event(), threading.Event()
    whole = 0

    def answers(method: str, path: str) -> Answer:
        nonlocal whole
        if "update_time" in path:
            return 304, b""
        whole += 1
        if whole == 1:
            answered.set()
            over.wait(1)  # the other one, if it may, is asked and answered meanwhile
            return nodes(NODE)
        return nodes({**NODE, "state": ["IDLE", "DRAIN"]}, last_update={"set": True, "number": 9})

    rest.answers = answers
    first = threading.Thread(target=lambda: rest.client.look(jobs=False))
    first.start()
    assert answered.wait(30)
    assert rest.client.is_unchanged("w2", None)
    over.set()
    first.join(30)
    assert rest.client.look(jobs=False).nodes["w1"].drained
