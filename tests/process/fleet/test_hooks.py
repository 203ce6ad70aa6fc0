"""Webhook calls against real servers on loopback.

The receiver answers at once, late, without an end, by a redirect, with a foreign certificate, or not at all; the
tests also check the payload that it gets.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fleet import FleetError
from fleet.act import webhooks
from fleet.act.webhooks import WebhookCaller
from fleet.decide.actions import CallHook
from tests.kube_api import _certificate
from tests.support.watch_server import until
from tests.support.webhook_receiver import OK, SICK, TAKES, Answers, Receiver, call, says

TOKEN = "t0p-s3cret.word"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.ended.set()
    made.socket.close()


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    return tmp_path


async def answered(made: WebhookCaller, act: CallHook) -> None:
    await until(lambda: made.ready(act))
    made.check_taken(act)


def calls(files: Path, *acts: CallHook) -> str:
    """Make the calls one after the other as one fleet and return the results; "" means accepted."""

    async def whole() -> str:
        made, told = WebhookCaller(files, "hpc/slurm", lambda: None, lambda: True), []
        for act in acts:
            try:
                await answered(made, act)
            except FleetError as error:
                told.append(str(error))
        await made.end()
        return "; ".join(told)

    return asyncio.run(whole())


def test_he_is_told_what_it_is_about_and_the_key_that_stays(receiver: Receiver, files: Path) -> None:
    act = call(f"http://127.0.0.1:{receiver.port}/repair?site=a", "token")
    assert calls(files, act, act) == ""
    assert len(receiver.asked) == 1, "as long as that he has answered is not noted he is not asked again"
    first, headers, said = receiver.asked[0]
    assert first == "POST /repair?site=a HTTP/1.1"
    assert headers["Authorization"] == f"Bearer {TOKEN}"
    assert headers["Idempotency-Key"] == '"uid-17/1"'
    assert headers["Host"] == f"127.0.0.1:{receiver.port}"
    assert "X-Evil" not in headers, "texts of others stand in the JSON alone"
    assert said == {
        "key": "uid-17/1", "fleet": "hpc/slurm", "machine": "gpu-17-7c6cc41e", "node": "gpu-17", "pool": "h100",
        "goal": "reboot", "reason": SICK, "evidence": SICK,
    }  # fmt: skip


def test_cut_after_it_was_sent_it_is_sent_again_with_the_same_key(receiver: Receiver, files: Path) -> None:
    receiver.answers = lambda way: way.close()
    act = call(f"http://127.0.0.1:{receiver.port}/")
    assert "the connection ended before an answer" in calls(files, act)
    receiver.answers = TAKES
    assert calls(files, act) == "", "by the next fleet"
    assert [said["key"] for _, _, said in receiver.asked] == ["uid-17/1"] * 2


@pytest.mark.parametrize("status", [500, 503, 408, 425, 429])
def test_who_cannot_just_now_is_asked_again_when_it_is_tried_again(
    receiver: Receiver, files: Path, status: int
) -> None:
    receiver.answers = says(b"HTTP/1.1 %d %s\r\n\r\n" % (status, TOKEN.encode()))
    act = call(f"http://127.0.0.1:{receiver.port}/", "token")
    said = calls(files, act, act)
    assert (said.count(f"HTTP {status}"), len(receiver.asked)) == (2, 2)
    assert TOKEN not in said, "what came from there may repeat what was sent"


def test_who_refuses_is_told_of_and_not_asked_the_same_each_second(
    receiver: Receiver, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver.answers = says(b"HTTP/1.0 401\r\n\r\n")
    act, other = call(f"http://127.0.0.1:{receiver.port}/"), call(f"http://127.0.0.1:{receiver.port}/", number=2)

    async def whole() -> None:
        made = WebhookCaller(files, "hpc/slurm", lambda: None, lambda: True)
        with pytest.raises(FleetError, match="it refuses: HTTP 401"):
            await answered(made, act)
        assert not made.ready(act)
        with pytest.raises(FleetError, match="it refuses"):
            await answered(made, other)
        assert (len(receiver.asked), made.ready(act)) == (2, False)
        monkeypatch.setattr(webhooks, "REFUSED_S", 0.0)
        receiver.answers = TAKES
        await answered(made, act)
        await made.end()

    asyncio.run(whole())
    assert len(receiver.asked) == 3


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308, 304])
def test_no_redirect_is_followed(receiver: Receiver, files: Path, status: int) -> None:
    other = Receiver()
    where = b"http://127.0.0.1:%d/" % other.port
    receiver.answers = says(b"HTTP/1.1 %d Go\r\nLocation: %s\r\nContent-Length: 0\r\n\r\n" % (status, where))
    assert "redirects are not followed" in calls(files, call(f"http://127.0.0.1:{receiver.port}/", "token"))
    assert (len(receiver.asked), other.asked) == (1, [])
    other.ended.set()
    other.socket.close()


def endless(before: bytes, piece: bytes) -> Answers:
    def answer(way: socket.socket) -> None:
        way.sendall(before)
        while True:
            way.sendall(piece)

    return answer


def slowly(answer: bytes) -> Answers:
    def drop(way: socket.socket) -> None:
        for letter in answer * 10_000:
            way.sendall(bytes([letter]))
            time.sleep(0.01)

    return drop


def test_of_an_answer_without_an_end_its_status_is_read(receiver: Receiver, files: Path) -> None:
    receiver.answers = endless(b"HTTP/1.1 200 OK\r\nX: y\r\n\r\n", b"x" * (1 << 20))
    assert calls(files, call(f"http://127.0.0.1:{receiver.port}/")) == ""


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        (endless(b"", b"x" * 4096), "a line of its answer is longer than 8 KiB"),
        (endless(b"HTTP/1.1 200 ", b"x" * 4096), "a line of its answer is longer than 8 KiB"),
        (endless(b"HTTP/1.1 102 Wait\r\n", b"X: y\r\n"), "no answer within 0.5 s"),
        (endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), "no answer within 0.5 s"),
        (slowly(b"HTTP/1.1 "), "no answer within 0.5 s"),
        (lambda way: threading.Event().wait(60), "no answer within 0.5 s"),
        (says(b"SSH-2.0-OpenSSH\r\n"), "the answer is no HTTP/1.1"),
        (says(b"HTTP/2 200\r\n"), "the answer is no HTTP/1.1"),
        (says(b"HTTP/1.1 2000 OK\r\n"), "the answer is no HTTP/1.1"),
        (says(b"\r\n"), "the answer is no HTTP/1.1"),
    ],
)
def test_whatever_he_says_he_keeps_nobody_and_fills_nothing(
    receiver: Receiver, files: Path, monkeypatch: pytest.MonkeyPatch, answers: Answers, why: str
) -> None:
    if "within" in why:  # what comes at once comes late on a busy machine
        monkeypatch.setattr(webhooks, "WITHIN_S", 0.5)
    receiver.answers = answers
    assert why in calls(files, call(f"http://127.0.0.1:{receiver.port}/"))


def test_nobody_waits_for_him(receiver: Receiver, files: Path) -> None:
    """Neither who asks whether he has answered, nor who ends."""
    held = threading.Event()
    receiver.answers = lambda way: held.wait(60)
    heard: list[bool] = []
    act = call(f"http://127.0.0.1:{receiver.port}/")

    async def whole() -> None:
        made = WebhookCaller(files, "hpc/slurm", lambda: heard.append(True), lambda: True)
        assert not made.ready(act)
        await until(lambda: bool(receiver.asked))
        assert not made.ready(act)
        assert len(receiver.asked) == 1, "he is asked once"
        held.set()
        await until(lambda: bool(heard))
        held.clear()
        other = call(f"http://127.0.0.1:{receiver.port}/", number=2)
        made.ready(other)
        await until(lambda: len(receiver.asked) == 2)
        await made.end()

    asyncio.run(whole())
    held.set()


def test_what_is_wanted_no_more_while_it_waits_for_its_turn_is_not_sent(receiver: Receiver, files: Path) -> None:
    go = threading.Event()

    def when_told(way: socket.socket) -> None:
        go.wait(60)
        TAKES(way)

    receiver.answers = when_told
    acts = [call(f"http://127.0.0.1:{receiver.port}/", number=number) for number in range(webhooks.AT_ONCE + 2)]
    *sent, withdrawn, last = acts

    async def whole() -> None:
        made = WebhookCaller(files, "hpc/slurm", lambda: None, lambda: True)
        assert not any(made.ready(act) for act in acts[:-1])
        await until(lambda: len(receiver.asked) == webhooks.AT_ONCE)
        made.keep([])  # what is sent is sent, and its answer is not lost
        go.set()
        for act in [*sent, last]:
            await answered(made, act)
        assert not made.ready(withdrawn), "it is asked anew when it is wanted again"
        await made.end()

    asyncio.run(whole())
    assert {said["key"] for _, _, said in receiver.asked} == {act.key for act in [*sent, last]}


def test_who_does_not_lead_any_more_sends_nothing(receiver: Receiver, files: Path) -> None:
    act, leads = call(f"http://127.0.0.1:{receiver.port}/"), [False]

    async def whole() -> None:
        made = WebhookCaller(files, "hpc/slurm", lambda: None, lambda: leads[0])
        with pytest.raises(FleetError, match="another fleet leads"):
            await answered(made, act)
        assert not receiver.asked
        leads[0] = True
        await answered(made, act)
        await made.end()

    asyncio.run(whole())


def test_an_interim_answer_is_none(receiver: Receiver, files: Path) -> None:
    receiver.answers = says(b"HTTP/1.1 100 Continue\r\nA: b\r\n\r\nHTTP/1.1 503 Later\r\n\r\n")
    assert "HTTP 503" in calls(files, call(f"http://127.0.0.1:{receiver.port}/"))


@dataclass
class Authority:
    folder: Path

    def __post_init__(self) -> None:
        self.certificate, *key = _certificate(self.folder, "site-ca", "-subj", "/CN=site")
        signed = ("-CA", self.certificate, *key)
        for name, host in (("here", "DNS:localhost,IP:127.0.0.1"), ("other", "DNS:other.example")):
            _certificate(self.folder, name, "-subj", f"/CN={name}", "-addext", f"subjectAltName={host}", *signed)

    def context(self, name: str) -> ssl.SSLContext:
        found = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        found.load_cert_chain(self.folder / f"{name}.crt", self.folder / f"{name}.key")
        return found


@pytest.fixture
def authority(files: Path) -> Authority:
    if not shutil.which("openssl"):
        pytest.skip("needs openssl")
    return Authority(files)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_over_tls_by_an_authority_of_the_sites_own(
    receiver: Receiver, files: Path, authority: Authority, host: str
) -> None:
    receiver.context = authority.context("here")
    assert calls(files, call(f"https://{host}:{receiver.port}/", "token", "site-ca.crt")) == ""
    assert receiver.asked[0][1]["Authorization"] == f"Bearer {TOKEN}"


def test_an_authority_is_found_in_a_long_file_of_them_with_names_between(
    receiver: Receiver, files: Path, authority: Authority
) -> None:
    receiver.context = authority.context("here")
    (files / "all.crt").write_text(
        "# F\u0151tan\u00fas\u00edtv\u00e1ny\n" * 10_000 + (files / "site-ca.crt").read_text()
    )
    assert calls(files, call(f"https://localhost:{receiver.port}/", "token", "all.crt")) == ""


@pytest.mark.parametrize(
    ("certificate", "ca", "why"),
    [
        ("here", "", "its certificate: "),
        ("other", "site-ca.crt", "its certificate: .*mismatch"),
        ("here", "other.crt", "its certificate: "),
        ("here", "token", "no PEM certificate"),
        ("here", "absent.crt", "No such file"),
    ],
)
def test_who_is_not_proven_to_be_the_one_is_told_nothing(
    receiver: Receiver, files: Path, authority: Authority, certificate: str, ca: str, why: str
) -> None:
    receiver.context = authority.context(certificate)
    said = calls(files, call(f"https://localhost:{receiver.port}/", "token", ca))
    assert re.search(why, said)
    assert receiver.asked == []


def test_who_does_not_speak_tls_is_told_nothing(receiver: Receiver, files: Path, authority: Authority) -> None:
    # In the clear: what he reads is no request, and what he answers no handshake.
    other = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        way, _ = other.accept()
        with way:
            way.recv(1)
            way.sendall(OK * 10)

    threading.Thread(target=answer, daemon=True).start()
    port = other.getsockname()[1]
    assert "cannot call localhost" in calls(files, call(f"https://localhost:{port}/", "token", "site-ca.crt"))
    other.close()


@pytest.mark.parametrize(
    ("content", "why"),
    [(b"", "printable ASCII"), (b"a\r\nHost: b", "printable ASCII"), (b"a b", "printable"), (b"\xff", "wanted ASCII")],
)
def test_a_token_that_is_none_is_told_without_its_words(
    receiver: Receiver, files: Path, content: bytes, why: str
) -> None:
    (files / "token").write_bytes(content)
    said = calls(files, call(f"http://127.0.0.1:{receiver.port}/", "token"))
    assert why in said
    assert str(files / "token") in said
    assert receiver.asked == []


def test_who_is_not_there_is_told_of(files: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    assert f"cannot call 127.0.0.1:{port}: " in calls(files, call(f"http://127.0.0.1:{port}/secret-path"))
    said = calls(files, call("https://no-such-name.invalid/secret-path?secret=query"))
    assert said.startswith("cannot call no-such-name.invalid:443: ")
    assert "secret" not in said


def test_the_files_of_a_secret_are_read_anew(receiver: Receiver, files: Path) -> None:
    url = f"http://127.0.0.1:{receiver.port}/"
    assert calls(files, call(url, "token")) == ""
    (files / "token").write_text("another")
    assert calls(files, call(url, "token")) == ""
    assert [headers["Authorization"] for _, headers, _ in receiver.asked] == [f"Bearer {TOKEN}", "Bearer another"]
