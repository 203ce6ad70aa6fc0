"""Messages about jobs: what users write into them, limits, digests, and a service that is cut at any step."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ground.files import write_json
from health.jobs.explain import explain
from health.jobs.model import Job, Page, World
from health.jobs.requeue import recall_reason
from health.notify import __main__ as notify_main
from health.notify import messages
from health.notify.channels import (
    ChannelDownError,
    MessageDeferredError,
    MessageRefusedError,
    MessageUnansweredError,
)
from health.notify.messages import HOUR, MessageLimits
from health.notify.notices import MOST_QUEUED, JobNotice, NotifySpool, parse, recipients
from health.notify.service import KEEP, Notifier, deliver, explainer
from health.notify.settings import MailSettings, NotifySettings, WebhookFormat, WebhookSettings, load
from init.errors import ConfigError, InitError
from init.slurm import client
from init.slurm.client import SlurmError
from init.view import metrics as init_metrics

ROOT = Path(__file__).resolve().parents[3]
MAILPROG = ROOT / "images/src/notify/mail"
NOW = 1_800_000_000.0
MAIL = MailSettings("smtp", "relay", 25, "slurm@example.org", "example.org")
SETTINGS = NotifySettings("c", MAIL, None, per_user=3, total=10)
NOTICE = JobNotice("1-2", "alice", "alice", "12", "train", "Failed", "FAILED", "00:01:00", "3")


def spool_of(directory: Path) -> NotifySpool:
    (directory / "new").mkdir()
    return NotifySpool(directory)


def record(spool: NotifySpool, number: int, *, at: float = NOW - 60, **fields: str) -> str:
    """Write a record as the MailProg does."""
    name = f"{int(at * 1e9) + number:020d}-1"
    values = {
        "TO": "alice", "SLURM_JOB_ID": str(number), "SLURM_JOB_USER": "alice", "SLURM_JOB_NAME": "train",
        "SLURM_JOB_MAIL_TYPE": "Failed", "SLURM_JOB_STATE": "FAILED",
    } | fields  # fmt: skip
    (spool.new / name).write_bytes(b"".join(f"{key}={value}\0".encode() for key, value in values.items()))
    return name


def page_of(job: str, user: str = "alice", state: str = "FAILED", **more: Any) -> Page:
    found = Job(int(job), job, "train", user, states=frozenset({state}), started=NOW - 60, ended=NOW, **more)
    return explain(found, World(), NOW)


class Sender:
    """Takes messages, or raises what it was told to."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.fails: Callable[[dict[str, Any]], Exception | None] = lambda _: None

    def __call__(self, _: NotifySettings, channel: str, data: dict[str, Any]) -> str:
        if error := self.fails(data):
            raise error
        self.sent.append({**data, "channel": channel})
        return "250 ok"

    def subjects(self) -> list[str]:
        return [data["subject"] for data in self.sent]


def notifier(spool: NotifySpool, sender: Sender, page: Callable[[str, str], Page | None] = page_of) -> Notifier:
    return Notifier(spool, page, sender, log=lambda _: None)


def mailprog(directory: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    env = {"MINIVM_NOTIFY": str(directory), "PATH": "/usr/bin:/bin", **env}
    return subprocess.run([str(MAILPROG), *arguments], env=env, capture_output=True, text=True, check=False)


def test_the_mailprog_keeps_what_the_service_reads(tmp_path: Path) -> None:
    spool = spool_of(tmp_path)
    hostile = "a\nBcc: eve@x.org\r\n\x1b[31m" + "x" * 5000
    subject = "Slurm Job_id=12 Name=x Failed"
    done = mailprog(
        tmp_path, "-s", subject, "alice", SLURM_JOB_ID="12", SLURM_JOB_USER="alice", SLURM_JOB_NAME=hostile,
        SLURM_JOB_MAIL_TYPE="Failed", SLURM_JOB_STATE="FAILED", SLURM_JOB_EXIT_CODE_MAX="3", SECRET="no",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    (name,) = spool.records(NOW)
    assert (spool.new / name).stat().st_mode & 0o777 == 0o644
    data = spool.read(name)
    assert b"SECRET" not in data and len(data) < 4096
    notice = parse(name, data)
    assert notice is not None and (notice.to, notice.job, notice.event, notice.exit_codes) == (
        "alice",
        "12",
        "Failed",
        "3",
    )
    assert notice.name.startswith("a Bcc: eve@x.org") and len(notice.name) == 80 and notice.name.isprintable()


def test_a_full_spool_is_counted_and_told_to_slurmctld(tmp_path: Path) -> None:
    spool = spool_of(tmp_path)
    for number in range(2000):
        (spool.new / str(number)).touch()
    done = mailprog(tmp_path, "-s", "x", "alice", SLURM_JOB_ID="1")
    assert done.returncode == 1 and "2000 messages wait there" in done.stderr and "it is lost" in done.stderr
    assert len(list(spool.new.iterdir())) == 2001
    mailprog(tmp_path, "-s", "x", "alice", SLURM_JOB_ID="1")
    assert spool.take_lost() == 2
    assert spool.take_lost() == 0
    assert mailprog(tmp_path / "absent", "-s", "x", "alice").returncode == 1


@pytest.mark.parametrize(
    ("to", "found"),
    [
        ("alice", ("alice@example.org",)),
        ("a.b+c@x.org", ("a.b+c@x.org",)),
        ("alice,bob@x.org,alice", ("alice@example.org", "bob@x.org")),
        ("", ()),
        ("-oQ/etc/passwd", ()),
        ("-alice@x.org", ()),
        ("alice bob", ()),
        ("alice@x.org\nBcc: eve@x.org", ()),
        ("alice@x.org\r\nDATA", ()),
        ("<alice@x.org>", ()),
        ('"a b"@x.org', ()),
        ("älice", ()),
        ("alice@exämple.org", ()),
        ("alice\N{RIGHT-TO-LEFT OVERRIDE}@x.org", ()),
        ("alice@x.org@y.org", ()),
        ("alice@x..org", ()),
        ("alice@", ()),
        ("|/bin/sh", ()),
        ("a" * 10_000, ()),
        ("a@" + "x" * 10_000, ()),
        (",".join(["a", "b", "c", "d", "e", "f"]), ()),
        ("alice,-x", ()),
        ("alice@EXAMPLE.org", ("alice@EXAMPLE.org",)),
        ("alice@y.org", ()),
        ("alice@sub.example.org", ()),
        ("victim%y.org@example.org", ()),
        ("y.org!victim@example.org", ()),
        ("a=?utf-8?q?x?=@example.org", ()),
    ],
)
def test_a_recipient_is_an_address_or_none(to: str, found: tuple[str, ...]) -> None:
    assert recipients(to, "example.org", ("x.org",)) == found
    assert recipients("eve@anywhere.net", "example.org", ("*",)) == ("eve@anywhere.net",)


def test_a_requeue_without_the_broken_machine_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "jobs.json"
    kept = {"job": "2", "restarts": 0, "nodes": "w0", "reason": "w0: XID 79", "number": 1, "at": NOW - 60}
    write_json(file, {"2": {**kept, "step": "recorded"}})
    monkeypatch.setattr("health.jobs.requeue.recall_reason", partial(recall_reason, file=file))
    spool, sender = spool_of(tmp_path), Sender()
    for number in (1, 2):
        record(spool, number, SLURM_JOB_MAIL_TYPE="Requeued")
    notifier(spool, sender).turn(SETTINGS, NOW)
    assert ["runs it again without w0: w0: XID 79." in data["text"] for data in sender.sent] == [False, True]


def test_one_task_of_an_array_is_explained_without_all_the_others() -> None:
    asked: list[str] = []

    def run(argv: Sequence[str]) -> str:
        asked.append(argv[-1])
        task = {"job_id": 9, "array_job_id": 8, "array_task_id": 2, "user_name": "alice", "job_state": ["FAILED"]}
        return json.dumps({"jobs": [task] if argv[0].endswith("squeue") else [], "nodes": []})

    page = explainer(run)("8_2", "alice")
    assert page is not None and page.job.shown == "8_2"
    assert [words for words in asked if words.startswith("--jobs")] == ["--jobs=8_2", "--jobs=8_2"]


def test_a_message_quotes_no_file_of_the_service_that_a_job_names_as_its_output(tmp_path: Path) -> None:
    """The service is root on the controller, and the user names the file: its own log, for example."""
    log = tmp_path / "gitsync.log"
    log.write_text("fatal: https://bot:token@git.site: Connection refused\n")
    job = {
        "job_id": 9, "user_name": "alice", "job_state": ["FAILED"], "start_time": 1, "batch_flag": True,
        "standard_output": str(log), "standard_error": str(log),
    }  # fmt: skip

    def run(argv: Sequence[str]) -> str:
        return json.dumps({"jobs": [job] if argv[0].endswith("squeue") else [], "nodes": []})

    page = explainer(run)("9", "alice")
    assert page is not None and page.job.output == str(log)
    assert "token" not in repr(page.answer)


def test_an_answer_about_jobs_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    program = ["/usr/bin/head", "-c", str(notify_main.MOST_ANSWER + 1), "/dev/zero"]
    with pytest.raises(SlurmError, match="longer than 4 MiB"):
        notify_main.ask(program, "slurm-controller:6817")
    assert len(notify_main.ask([*program[:2], "9", "/dev/zero"], "slurm-controller:6817")) == 9
    monkeypatch.setattr(client, "SCONTROL", program[0])
    assert len(notify_main.ask(program, "x")) > notify_main.MOST_ANSWER, "of nodes"


def test_an_array_is_told_as_one_or_by_its_tasks() -> None:
    fields = "TO=alice\0SLURM_JOB_ID=9\0SLURM_ARRAY_JOB_ID=8\0SLURM_ARRAY_TASK_ID=2\0SLURM_JOB_USER=alice\0"
    fields += (
        "SLURM_JOB_EXIT_CODE_MIN=0\0SLURM_JOB_EXIT_CODE_MAX=3\0SLURM_JOB_MAIL_TYPE=Ended\0SLURM_JOB_STATE=FAILED\0"
    )
    task = parse("1-1", fields.encode())
    assert task is not None and (task.job, task.is_array, task.exit_codes, task.state) == ("8_2", False, "3", "FAILED")
    array = parse("1-1", f"{fields}SUBJECT=Slurm Array Summary Job_id=8_* (8) Name=x Ended\0".encode())
    assert array is not None and (array.job, array.is_array, array.state) == ("8", True, "")
    assert "Exit codes of its tasks: 0 to 3." in messages.describe_job(array, None, "c").text
    assert parse("1-1", b"TO=alice\0SLURM_JOB_ID=1;x\0SLURM_JOB_USER=alice\0") is None
    assert parse("x", os.urandom(20_000)) is None


def test_a_message_says_the_first_lines_of_the_page_and_has_no_header_of_a_user() -> None:
    message = messages.describe_job(
        replace(NOTICE, name="x Bcc: eve@x.org"), page_of("12", exit_code=3, nodes="w0"), "c"
    )
    assert message.text.splitlines()[0] == "Job 12 (x Bcc: eve@x.org) on c: Failed, state FAILED, ran for 00:01:00"
    assert (
        "exit code 3" in message.text and "Cause: your code" in message.text and "More: minivm job 12" in message.text
    )
    raw = messages.email(message, MAIL, ("alice@example.org",), "1", NOW).decode()
    assert [line.partition(":")[0] for line in raw.split("\r\n\r\n")[0].splitlines() if line[:1] != " "] == [
        "From", "To", "Subject", "Date", "Message-ID", "Auto-Submitted", "Content-Type", "Content-Transfer-Encoding",
        "MIME-Version",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "=?unicode_escape?q?=5Cud800?=",
        "=?utf-8?q?=0D=0AReply-To:_x@e.vil=0D=0A=0D=0AText?=",
        "==??utf-8?b?DQpSZXBseS1UbzogeEBlLnZpbA0KDQpUZXh0?=",
        "=?utf-8?q?x?= =?utf-8?q?=0A?=",
    ],
)
def test_a_name_that_is_an_encoded_word_is_decoded_by_nobody(name: str) -> None:
    message = messages.describe_job(replace(NOTICE, name=name), None, "c")
    head, _, body = messages.email(message, MAIL, ("alice@example.org",), "1", NOW).decode().partition("\r\n\r\n")
    assert "\nreply-to" not in head.lower()
    names = [line.partition(":")[0] for line in head.splitlines() if line[:1] != " "]
    assert len(names) == len(set(names)) == 9
    if "base64" not in head:
        assert body.replace("\r\n", "\n").startswith("Job 12 (")


def test_a_webhook_mentions_nobody_and_formats_nothing() -> None:
    message = messages.describe_job(replace(NOTICE, name='<!everyone> <@U1> @channel *b* "'), None, "c")
    slack = messages.payload(message, WebhookFormat.SLACK)
    assert "<" not in slack["text"] and "&lt;!everyone&gt;" in slack["text"] and "@channel" not in slack["text"]
    assert slack["mrkdwn"] is False and slack["link_names"] is False
    teams = json.dumps(messages.payload(message, WebhookFormat.TEAMS))
    assert (
        "RichTextBlock" in teams and "TextBlock" not in teams.replace("RichTextBlock", "") and "@channel" not in teams
    )
    plain = messages.payload(message, WebhookFormat.JSON)
    assert plain["job"] == "12" and plain["user"] == "alice" and plain["event"] == "Failed"


def test_over_its_limit_a_user_gets_one_message_with_a_count(tmp_path: Path) -> None:
    spool, sender = spool_of(tmp_path), Sender()
    service = notifier(spool, sender)
    for number in range(1, 101):
        record(spool, number)
    record(spool, 200, SLURM_JOB_USER="bob", TO="bob")
    wait = service.turn(SETTINGS, NOW)
    assert len(sender.sent) == 4 and sender.sent[-1]["to"] == ["bob@example.org"]
    assert wait is not None and 0 < wait <= HOUR
    assert not spool.records(NOW)
    again = Sender()  # another life of the service
    service = notifier(spool, again)
    service.turn(SETTINGS, NOW + HOUR - 1)
    assert not again.sent
    service.turn(SETTINGS, NOW + HOUR + 1)
    assert again.subjects() == ["And 97 more messages about your jobs on c"]
    assert "97 Failed" in again.sent[0]["text"] and again.sent[0]["to"] == ["alice@example.org"]
    service.turn(SETTINGS, NOW + 3 * HOUR)
    assert len(again.sent) == 1


def test_many_users_together_stay_below_the_total(tmp_path: Path) -> None:
    spool, sender = spool_of(tmp_path), Sender()
    for number in range(1, 31):
        record(spool, number, SLURM_JOB_USER=f"u{number}", TO=f"u{number}")
    service = notifier(spool, sender, lambda job, user: page_of(job, user))
    service.turn(SETTINGS, NOW)
    assert len(sender.sent) == 10
    service.turn(SETTINGS, NOW + HOUR + 1)
    assert len(sender.sent) == 20
    service.turn(SETTINGS, NOW + 2 * HOUR + 2)
    assert len(sender.sent) == 30 and len({data["to"][0] for data in sender.sent}) == 30


def test_a_job_that_just_ended_waits_for_accounting_but_a_flood_does_not(tmp_path: Path) -> None:
    spool, sender = spool_of(tmp_path), Sender()
    for number in range(1, 11):
        record(spool, number, at=NOW - 1)
    service = notifier(spool, sender)
    assert service.turn(SETTINGS, NOW) == 5.0
    assert not sender.sent and len(spool.records(NOW)) == 3, "what is over the limit is counted at once"
    service.turn(SETTINGS, NOW + 6)
    assert len(sender.sent) == 3


def test_another_users_page_is_never_in_a_message(tmp_path: Path) -> None:
    spool, sender = spool_of(tmp_path), Sender()
    record(spool, 1)
    notifier(spool, sender, lambda job, _: page_of(job, "bob")).turn(SETTINGS, NOW)
    assert "Cause:" not in sender.sent[0]["text"]
    record(spool, 2)
    notifier(spool, sender, lambda job, user: page_of(job, user, "RUNNING")).turn(SETTINGS, NOW)
    assert "Cause:" not in sender.sent[1]["text"], "it was requeued, and runs again"


def test_a_slurmctld_that_does_not_answer_delays_no_message(tmp_path: Path) -> None:
    spool, sender = spool_of(tmp_path), Sender()
    asked: list[str] = []

    def explain_none(job: str, _: str) -> Page | None:
        asked.append(job)
        raise SlurmError("ask slurmctld", "no answer")

    record(spool, 1, SLURM_JOB_EXIT_CODE_MAX="3")
    record(spool, 2)
    notifier(spool, sender, explain_none).turn(SETTINGS, NOW)
    assert len(sender.sent) == 2 and asked == ["1"]
    assert "Exit code: 3." in sender.sent[0]["text"]


def test_a_job_that_slurm_forgot_takes_no_cause_from_another(tmp_path: Path) -> None:
    spool, sender = spool_of(tmp_path), Sender()

    def explain_some(job: str, user: str) -> Page | None:
        if job == "1":
            raise InitError("explain job 1", "Slurm knows no such job")
        return page_of(job, user)

    record(spool, 1)
    record(spool, 2)
    notifier(spool, sender, explain_some).turn(SETTINGS, NOW)
    assert ["Cause:" in data["text"] for data in sender.sent] == [False, True]


def test_a_full_disk_stops_no_message_that_waits_and_counts_none_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool, sender = spool_of(tmp_path), Sender()
    service = notifier(spool, sender)
    sender.fails = lambda _: ChannelDownError("away")
    record(spool, 1)
    service.turn(SETTINGS, NOW)
    sender.fails = lambda _: None
    put = spool.put

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(spool, "put", full)
    record(spool, 2)
    for second in (30, 60, 90, 120):
        with pytest.raises(OSError, match="No space left"):
            service.turn(SETTINGS, NOW + second)
    assert [subject[:6] for subject in sender.subjects()] == ["Job 1 "]
    monkeypatch.setattr(spool, "put", put)
    service.turn(SETTINGS, NOW + 150)
    assert [subject[:6] for subject in sender.subjects()] == ["Job 1 ", "Job 2 "]
    service.limits.hold("bob", "bob", "Failed", NOW)
    monkeypatch.setattr(spool, "put", full)
    with pytest.raises(OSError, match="No space left"):
        service.turn(SETTINGS, NOW + HOUR)
    monkeypatch.setattr(spool, "put", put)
    service.turn(SETTINGS, NOW + 3 * HOUR)
    assert sender.subjects()[2:] == ["And 1 more message about your jobs on c"]


def test_a_message_that_the_server_never_takes_stops_no_other(tmp_path: Path) -> None:
    spool, sender = spool_of(tmp_path), Sender()
    sender.fails = lambda data: ChannelDownError("HTTP 500") if data["subject"][:6] == "Job 1 " else None
    service = notifier(spool, sender)
    record(spool, 1)
    now = NOW
    for number in range(2, 20):
        record(spool, number, SLURM_JOB_USER=f"u{number}", TO="u")
        wait = service.turn(replace(SETTINGS, total=100), now)
        assert wait is not None and wait <= 900
        now += wait
    assert len(sender.sent) >= 17 and len(spool.queue("mail")) <= 2
    sender.fails = lambda _: None
    service.turn(replace(SETTINGS, total=100), now + 900)
    assert not spool.queue("mail"), "it is not lost"


def test_a_relay_that_is_away_is_tried_less_and_less_often_and_loses_nothing(tmp_path: Path) -> None:
    spool, sender = spool_of(tmp_path), Sender()
    sender.fails = lambda _: ChannelDownError("535 wrong password p-word", "SMTP 535")
    lines: list[str] = []
    service = Notifier(spool, page_of, sender, log=lines.append)
    record(spool, 1)
    record(spool, 2)
    assert service.turn(SETTINGS, NOW) == 15.0
    assert service.problem(SETTINGS) == "relay relay:25: SMTP 535 (2 wait); `minivm notify test USER` shows the answer"
    assert 'minivm_notify_up{channel="mail"} 0' in service.metrics(SETTINGS)
    assert service.turn(SETTINGS, NOW + 5) == 10.0
    assert service.turn(SETTINGS, NOW + 15) == 30.0
    assert len(lines) == 1, "a problem is logged once"
    shown = init_metrics.open_metrics(service.metrics(SETTINGS), "minivm_notify_")
    assert 'minivm_notify_waiting{channel="mail"} 2' in shown, "the page /metrics has them"
    sender.fails = lambda _: None
    service.turn(SETTINGS, NOW + 45)
    assert len(sender.sent) == 2 and service.problem(SETTINGS) == "" and "again" in lines[-1]
    assert 'minivm_notify_up{channel="mail"} 1' in service.metrics(SETTINGS)
    assert service.turn(SETTINGS, NOW + 46) is None
    sender.fails = lambda _: ChannelDownError("429", after=3000.0)
    record(spool, 3)
    assert service.turn(SETTINGS, NOW + 50) == 3000.0


def test_one_message_that_is_refused_or_deferred_stops_no_other(tmp_path: Path) -> None:
    spool, sender = spool_of(tmp_path), Sender()
    errors = {"Job 1 ": MessageRefusedError("550"), "Job 2 ": MessageDeferredError("450")}
    sender.fails = lambda data: errors.get(data["subject"][:6])
    service = notifier(spool, sender)
    for number in (1, 2, 3):
        record(spool, number)
    wait = service.turn(SETTINGS, NOW)
    assert [subject[:6] for subject in sender.subjects()] == ["Job 3 "] and wait and wait > 60
    del errors["Job 2 "]
    service.turn(SETTINGS, NOW + wait + 1)
    assert [subject[:6] for subject in sender.subjects()] == ["Job 3 ", "Job 2 "]
    assert 'minivm_notify_refused_total{channel="mail"} 1' in service.metrics(SETTINGS)


def test_a_message_that_no_mail_can_be_made_of_stops_no_other(tmp_path: Path) -> None:
    spool, sender = spool_of(tmp_path), Sender()
    (tmp_path / "mail").mkdir()
    whole = {"subject": "x", "text": "x", "at": NOW, "to": ["a@example.org"]}
    wrong: list[dict[str, Any]] = [
        {"text": "\udc80"}, {"to": ["a\r\nb@x"]}, {"to": 7}, {"fields": 7}, {"at": "x"}, {"at": 1e300},
    ]  # fmt: skip
    for number, part in enumerate(wrong):
        (tmp_path / "mail" / f"0-{number}.json").write_text(json.dumps(whole | part))

    def send(settings: NotifySettings, channel: str, data: dict[str, Any]) -> str:
        with pytest.raises(MessageRefusedError):  # the relay is not called: nothing listens there
            deliver(settings, channel, data)
        raise MessageRefusedError("as it was")

    service = Notifier(spool, page_of, send, log=lambda _: None)
    service.turn(SETTINGS, NOW)
    assert not spool.queue("mail")
    record(spool, 1)
    (tmp_path / "mail" / "0-0.json").write_text(json.dumps(whole))
    sender.fails = lambda data: RuntimeError("a defect") if data["subject"] == "x" else None
    service = notifier(spool, sender)
    service.turn(SETTINGS, NOW)
    assert len(sender.sent) == 1 and spool.queue("mail") == ["0-0.json"]


def test_a_record_or_a_page_with_a_defect_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool, sender = spool_of(tmp_path), Sender()
    asked: list[str] = []

    def explain_wrongly(job: str, _: str) -> Page | None:
        asked.append(job)
        raise RuntimeError("a defect")

    record(spool, 1)
    record(spool, 2)
    record(spool, 3)
    of_job = messages.describe_job

    def of_some(notice: JobNotice, page: Page | None, cluster: str, again: str) -> messages.JobMessage:
        if notice.job == "2":
            raise RuntimeError("a defect")
        return of_job(notice, page, cluster, again)

    monkeypatch.setattr(messages, "describe_job", of_some)
    notifier(spool, sender, explain_wrongly).turn(SETTINGS, NOW)
    assert [data["fields"]["job"] for data in sender.sent] == ["1", "3"] and asked == ["1", "2", "3"]
    assert not spool.records(NOW)


def test_an_unanswered_message_is_given_up_after_some_tries(tmp_path: Path) -> None:
    spool, sender = spool_of(tmp_path), Sender()
    sender.fails = lambda data: MessageUnansweredError("no answer") if data["subject"][:6] == "Job 1 " else None
    tries: list[float] = []
    service = notifier(spool, sender)
    record(spool, 1)
    record(spool, 2)
    now = NOW
    while (wait := service.turn(SETTINGS, now)) is not None:
        tries.append(now)
        now += wait
    assert sender.subjects()[0][:6] == "Job 2 " and len(sender.sent) == 1
    assert len(tries) == 4 and now - NOW > HOUR, "the relay may be ill for an hour"
    assert not spool.queue("mail") and 'minivm_notify_refused_total{channel="mail"} 1' in service.metrics(SETTINGS)


def test_a_recipient_that_is_no_address_is_refused_and_the_webhook_hears_of_the_job(tmp_path: Path) -> None:
    both = replace(SETTINGS, webhook=WebhookSettings(WebhookFormat.JSON, "https://hook.example.org/T0K3N"))
    spool, sender = spool_of(tmp_path), Sender()
    lines: list[str] = []
    record(spool, 1, TO="-oQ/etc/passwd")
    service = Notifier(spool, page_of, sender, log=lines.append)
    service.turn(both, NOW)
    assert [data["channel"] for data in sender.sent] == ["webhook"]
    assert lines == ["a message of alice is not sent: --mail-user='-oQ/etc/passwd' is no allowed address"]
    sender.fails = lambda _: ChannelDownError("500")
    record(spool, 2)
    service.turn(both, NOW)
    assert "hook.example.org" in service.problem(both) and "T0K3N" not in service.problem(both)


def test_a_cut_sends_twice_rather_than_never(tmp_path: Path) -> None:
    spool, sender = spool_of(tmp_path), Sender()
    name = record(spool, 1)
    service = notifier(spool, sender)
    kept, spool.remove_records = spool.remove_records, lambda names: None  # type: ignore[method-assign]  # killed there
    service.turn(SETTINGS, NOW)
    spool.remove_records = kept  # type: ignore[method-assign]
    notifier(spool, sender).turn(SETTINGS, NOW)
    assert [data["id"] for data in sender.sent] == [name, name], "one Message-ID: a reader shows one"
    (spool.directory / "messages.json").write_text("{damaged")
    record(spool, 2)
    (spool.directory / "mail").mkdir(exist_ok=True)
    (spool.directory / "mail" / "0-0.json").write_text("[]")
    notifier(spool, sender).turn(SETTINGS, NOW)
    assert len(sender.sent) == 3


def test_files_that_are_no_records_are_removed_or_left(tmp_path: Path) -> None:
    spool, sender = spool_of(tmp_path), Sender()
    (spool.new / f"{int(NOW * 1e9):020d}-7").symlink_to("/etc/passwd")
    (spool.new / f".{int((NOW - 7200) * 1e9):020d}-7").touch()
    fresh = spool.new / f".{int((NOW - 1) * 1e9):020d}-8"
    fresh.touch()
    notifier(spool, sender).turn(SETTINGS, NOW)
    assert list(spool.new.iterdir()) == [fresh] and not sender.sent


def test_queues_are_bounded_and_old_messages_end(tmp_path: Path) -> None:
    spool, sender = spool_of(tmp_path), Sender()
    sender.fails = lambda _: ChannelDownError("down")
    (tmp_path / "mail").mkdir()
    for number in range(MOST_QUEUED):
        (tmp_path / "mail" / f"{number}.json").write_text(json.dumps({"subject": "x", "at": NOW, "to": ["a@b"]}))
    record(spool, 1)
    service = notifier(spool, sender)
    service.turn(SETTINGS, NOW)
    assert len(spool.queue("mail")) == MOST_QUEUED
    assert "minivm_notify_lost_total 1" in service.metrics(SETTINGS)
    service.turn(SETTINGS, NOW + KEEP + 10)
    assert not spool.queue("mail") and not sender.sent


def test_a_message_counts_once_for_each_recipient(tmp_path: Path) -> None:
    spool, sender = spool_of(tmp_path), Sender()
    service = notifier(spool, sender)
    for number in (1, 2, 3):
        record(spool, number, TO="a,b,c,d")
    service.turn(SETTINGS, NOW)
    assert len(sender.sent) == 1


def test_a_user_with_many_recipients_leaves_room_to_others() -> None:
    limits = MessageLimits(1, 1)
    for number in range(3000):
        limits.hold("eve", f"r{number}@x", "Failed", NOW)
    limits.hold("bob", "bob", "Failed", NOW)
    assert ("bob", "bob") in limits.held and not limits.lost
    assert len(limits.held) <= 22 and sum(held.counts["Failed"] for held in limits.held.values()) == 3001
    assert limits.held["eve", "eve"].counts["Failed"] == 2980


def test_a_users_flood_of_records_leaves_room_to_others(tmp_path: Path) -> None:
    spool = spool_of(tmp_path)
    for number in range(200):
        (spool.new / f"{number:020d}-7-eve").touch()
        (spool.new / f"{number:020d}-7-b-eve").touch()
    eve = mailprog(tmp_path, "-s", "x", "eve", SLURM_JOB_ID="1", SLURM_JOB_USER="eve")
    assert eve.returncode == 1 and "200 messages of eve wait there" in eve.stderr
    assert mailprog(tmp_path, "-s", "x", "a", SLURM_JOB_ID="1", SLURM_JOB_USER="../a\n/b").returncode == 0
    assert mailprog(tmp_path, "-s", "x", "a", SLURM_JOB_ID="1", SLURM_JOB_USER="").returncode == 0
    assert [name.partition("-")[2].partition("-")[2] for name in spool.records(NOW)[-2:]] == [".._a__b", ""]


def test_limits_are_bounded() -> None:
    limits = MessageLimits(1, 1)
    limits.take("u", NOW)
    for number in range(3000):
        limits.hold(f"u{number}", "x", "Failed", NOW)
    for number in range(100):
        limits.hold("u1", "x", f"event{number}", NOW)
    assert len(limits.held) == 2000 and limits.lost == 1000
    assert sum(limits.held["u1", "x"].counts.values()) == 101 and len(limits.held["u1", "x"].counts) <= 9
    copy = MessageLimits(1, 1)
    copy.restore(json.loads(json.dumps(limits.as_json())))
    assert copy == limits
    copy.restore({"windows": {"a": "b"}})
    assert copy == limits


def settings_of(tmp_path: Path, data: object, **secret: str) -> NotifySettings:
    (tmp_path / "notify.json").write_text(json.dumps(data))
    for name, text in secret.items():
        (tmp_path / name).write_text(f"{text}\n")
    return load(tmp_path / "notify.json", tmp_path)


def test_settings_come_from_the_chart_and_the_secret(tmp_path: Path) -> None:
    data = {"cluster": "c", "mail": {"relay": "starttls://[fd00::1]", "from": "slurm@x.org", "domain": ""}}
    data["webhook"] = {"format": "slack"}
    found = settings_of(tmp_path, data, user="u", password="p-word", url="https://hooks.x.org/T0K3N")
    assert found.mail == MailSettings("starttls", "fd00::1", 587, "slurm@x.org", "x.org", "u", "p-word")
    assert found.webhook is not None and found.webhook.url == "https://hooks.x.org/T0K3N"
    assert found.mail.domains == ()
    assert "p-word" not in repr(found) and "T0K3N" not in repr(found)


def test_a_webhook_without_a_url_stops_no_mail(tmp_path: Path) -> None:
    data = {"cluster": "c", "mail": {"relay": "smtp://relay", "from": "slurm@example.org"}}
    wrong = settings_of(tmp_path, data | {"webhook": {"format": "slack"}})
    (tmp_path / "spool").mkdir()
    spool, sender = spool_of(tmp_path / "spool"), Sender()
    service = notifier(spool, sender)
    assert service.turn(wrong, NOW) == 60.0, "the Secret may come"
    assert service.problem(wrong).startswith("webhook: ") and "is no http(s) URL" in service.problem(wrong)
    assert 'minivm_notify_up{channel="webhook"} 0' in service.metrics(wrong)
    record(spool, 1)
    service.turn(wrong, NOW)
    assert [data["channel"] for data in sender.sent] == ["mail"]
    with pytest.raises(ChannelDownError, match="is no http"):
        deliver(wrong, "webhook", {"subject": "x", "text": "x", "fields": {}, "to": [], "id": "1", "at": NOW})
    right = settings_of(tmp_path, data | {"webhook": {"format": "slack"}}, url="https://hooks.x.org/T0K3N")
    service.turn(right, NOW + 60)
    assert [data["channel"] for data in sender.sent] == ["mail", "webhook"] and service.problem(right) == ""


@pytest.mark.parametrize(
    ("data", "secret", "reason"),
    [
        ([], {}, "wanted a JSON object"),
        ({"mial": {}}, {}, "did you mean mail?"),
        ({"mail": {"relay": "relay:25", "from": "a@b"}}, {}, "starttls://HOST"),
        ({"mail": {"relay": "smtp://relay", "from": "nobody"}}, {}, "slurm@example.org"),
        ({"mail": {"relay": "smtp://relay", "from": "a@b"}}, {"user": "u"}, "readable on the network"),
        ({"webhook": {"format": "slack"}}, {}, "is no http(s) URL"),
        ({"webhook": {"format": "slack"}}, {"url": "file:///etc/passwd"}, "is no http(s) URL"),
        ({"webhook": {"format": "slack"}}, {"url": "https://x/a b"}, "is no http(s) URL"),
        ({"mail": {"relay": "smtp://relay", "from": "a@b"}, "secret": "mine"}, {}, "the Secret mine"),
        ({"webhook": {"format": "irc"}}, {"url": "https://x/"}, "slack"),
    ],
)
def test_settings_that_are_wrong_are_told(tmp_path: Path, data: object, secret: dict[str, str], reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        settings_of(tmp_path, data, **secret)
    assert reason in str(error.value)
