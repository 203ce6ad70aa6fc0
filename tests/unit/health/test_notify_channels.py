"""Messages sent to a real SMTP server, with TLS and a password, and to a real HTTP server."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from health.notify import channels, messages
from health.notify.channels import (
    ChannelDownError,
    MessageDeferredError,
    MessageRefusedError,
    MessageUnansweredError,
    send_mail,
    send_webhook,
)
from health.notify.messages import JobMessage
from health.notify.settings import MailSettings, WebhookFormat, WebhookSettings
from tests.support.mail_relay import PASSWORD, USER, Inbox, certificate, context, receiver, relay, scripted_relay

ALICE = ("alice@example.org",)
MESSAGE = JobMessage("Job 12 (Lærning) on c: Failed", "It ended.\n.\nline", {"user": "alice", "job": "12"})


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return certificate(tmp_path_factory.mktemp("keys"), "IP:127.0.0.1")


def settings(inbox: Inbox, mode: str = "smtp", *, host: str = "127.0.0.1", password: str = "") -> MailSettings:
    user = USER if password else ""
    return MailSettings(mode, host, inbox.port, "slurm@example.org", "example.org", user, password)


def send(part: MailSettings, ca: str = "", to: tuple[str, ...] = ALICE) -> str:
    return send_mail(part, ca, to, messages.email(MESSAGE, part, to, "1-2", 1_800_000_000.0))


def test_a_plain_relay_takes_the_mail_as_it_was_written() -> None:
    with relay() as inbox:
        assert send(settings(inbox)) == "250 queued as 42"
    ((to, mail),) = inbox.mails
    assert to == list(ALICE)
    assert mail["Subject"] == MESSAGE.subject
    assert mail["Auto-Submitted"] == "auto-generated"
    assert mail["Message-ID"] == "<1-2@example.org>"
    assert inbox.text("Job 12") == "It ended.\n.\nline\n"


@pytest.mark.parametrize("smtps", [False, True])
def test_tls_is_verified_and_the_password_is_sent_over_it_alone(keys: tuple[Path, Path], smtps: bool) -> None:
    mode, password = ("smtps", "") if smtps else ("starttls", PASSWORD)
    with relay(tls=context(*keys), smtps=smtps) as inbox:
        with pytest.raises(ChannelDownError, match="its certificate is refused: self-signed certificate"):
            send(settings(inbox, mode, password=password))
        with pytest.raises(ChannelDownError, match="its certificate is refused: Hostname mismatch"):
            send(settings(inbox, mode, host="localhost", password=password), keys[1].read_text())
        assert send(settings(inbox, mode, password=password), keys[1].read_text()) == "250 queued as 42"
    assert len(inbox.mails) == 1


def test_a_wrong_password_is_told_and_not_shown(keys: tuple[Path, Path]) -> None:
    with relay(tls=context(*keys)) as inbox:
        with pytest.raises(ChannelDownError, match="the relay refuses the user or the password: 535") as error:
            send(settings(inbox, "starttls", password="wrong-and-secret"), keys[1].read_text())
        assert "wrong-and-secret" not in str(error.value)
        assert error.value.kind == "SMTP 535"
        assert "wrong-and-secret" not in repr(settings(inbox, password="wrong-and-secret"))
        with pytest.raises(ChannelDownError, match=r"the relay refuses the sender slurm@example\.org: 530"):
            send(settings(inbox))
    with relay() as inbox, pytest.raises(ChannelDownError, match="the relay lacks what the settings want: STARTTLS"):
        send(settings(inbox, "starttls", password=PASSWORD))
    assert not inbox.mails


def test_a_recipient_that_is_refused_stops_no_other_mail() -> None:
    with relay() as inbox:
        inbox.answers = {"gone@x.org": "550 no such user", "grey@x.org": "450 later"}
        with pytest.raises(MessageRefusedError, match="550 no such user"):
            send(settings(inbox), to=("gone@x.org",))
        with pytest.raises(MessageDeferredError, match="450 later"):
            send(settings(inbox), to=("grey@x.org",))
        send(settings(inbox), to=("gone@x.org", *ALICE))
    assert [to for to, _ in inbox.mails] == [list(ALICE)]


def test_a_relay_that_is_away_or_silent_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        inbox = Inbox()
        inbox.port = silent.getsockname()[1]
        monkeypatch.setattr(channels, "DEADLINE", 0.3)
        with pytest.raises(ChannelDownError, match=r"no answer: not done within 0\.3 s"):
            send(settings(inbox))
    with pytest.raises(ChannelDownError, match="Connection refused") as error:
        send(settings(inbox))
    assert error.value.kind == "Connection refused"
    with scripted_relay({b"MAIL": "555 <script> T0K3N"}) as inbox, pytest.raises(ChannelDownError) as error:
        send(settings(inbox))
    assert error.value.kind == "SMTP 555"


@pytest.mark.parametrize("word", [b"EHLO", b"MAIL", b"DATA", b"."])
def test_a_reply_of_many_lines_is_bounded(word: bytes) -> None:
    short, endless = "250-fine\r\n" * (channels.MOST_REPLY // 15), "250-fine\r\n" * (2 * channels.MOST_REPLY // 10)
    last = "354 go on" if word == b"DATA" else "250 ok"
    with scripted_relay({b"RCPT": f"{short}250 ok", word: (short + last).replace("250", last[:3])}) as inbox:
        send(settings(inbox))
    expected = MessageUnansweredError if word == b"." else ChannelDownError
    with scripted_relay({word: endless + last}) as inbox, pytest.raises(expected, match="longer than 64 KiB"):
        send(settings(inbox))


@pytest.mark.parametrize("answer", ["500 no", "", "drop"])
def test_a_mail_that_was_taken_is_sent_whatever_quit_is_answered(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "LEAVE_WAIT", 0.2)
    with scripted_relay({b"QUIT": answer}) as inbox:
        assert send(settings(inbox)) == "250 ok"


@pytest.mark.parametrize("answer", ["", "drop"])
def test_a_mail_without_an_answer_may_have_been_taken(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "LAST_WAIT", 0.3)
    with scripted_relay({b".": answer}) as inbox, pytest.raises(MessageUnansweredError):
        send(settings(inbox))


def test_the_answer_to_a_whole_mail_may_be_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "WAIT", 0.5)
    monkeypatch.setattr(channels, "DEADLINE", 0.6)
    with scripted_relay({}, late=1.0) as inbox:
        assert send(settings(inbox)) == "250 ok"
    assert inbox.whole[inbox.whole.index(b"It ended.") :] == [b"It ended.", b"..", b"line", b".", b"quit"]


def test_a_webhook_gets_json_over_verified_tls(keys: tuple[Path, Path]) -> None:
    with receiver(tls=context(*keys)) as (place, kind):
        hook = WebhookSettings(WebhookFormat.JSON, f"https://{place}/services/T0K3N?key=s3cr3t")
        with pytest.raises(ChannelDownError, match="its certificate is refused"):
            send_webhook(hook, "", {"a": 1})
        said = send_webhook(hook, keys[1].read_text(), {"a": '"\n<'})
    assert kind.got == [("/services/T0K3N?key=s3cr3t", {"a": '"\n<'}, "")]
    assert said.startswith("HTTP 200 OK") and "T0K3N" not in said and "s3cr3t" not in said
    assert "T0K3N" not in repr(hook)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (302, ChannelDownError), (400, MessageRefusedError), (403, ChannelDownError), (404, ChannelDownError),
        (429, ChannelDownError), (500, ChannelDownError),
    ],
)  # fmt: skip
def test_what_a_webhook_answers_decides(status: int, error: type[Exception]) -> None:
    with receiver(status, None, {"Location": "http://169.254.169.254/", "Retry-After": "77"}) as (place, kind):
        with pytest.raises(error) as raised:
            send_webhook(WebhookSettings(WebhookFormat.JSON, f"http://me:pass-word@{place}/T0K3N"), "", {})
        assert [authorization[:6] for _, _, authorization in kind.got] == ["Basic "], "a redirect is not followed"
    assert "pass-word" not in str(raised.value)
    assert str(status) in str(raised.value) and "T0K3N" not in str(raised.value)
    if isinstance(raised.value, ChannelDownError):
        assert raised.value.after == 77.0 and raised.value.kind == f"HTTP {status}"


def test_a_webhooks_answer_shows_no_part_of_its_url() -> None:
    with receiver(404) as (place, _):
        hook = WebhookSettings(WebhookFormat.JSON, f"http://{place}/services/T0K3N/{'B' * 190}/s3cr3t?key=v4lue")
        with pytest.raises(ChannelDownError) as raised:
            send_webhook(hook, "", {"a": 1})
    for part in ("T0K3N", "BBBB", "s3cr3t", "v4lue"):
        assert part not in str(raised.value)
