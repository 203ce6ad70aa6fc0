"""Users' own settings of notifications: hostile files, URLs outside the operator's list, and webhooks that fail."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from health.jobs.model import Page
from health.notify.channels import ChannelDownError, MessageRefusedError
from health.notify.notices import NotifySpool
from health.notify.service import MOST_BACKOFF, MOST_TRIES, Notifier, deliver
from health.notify.settings import (
    LARGEST,
    Allowed,
    NotifySettings,
    WebhookFormat,
    WebhookSettings,
    load_own,
    read_submitted_webhook,
)
from init.errors import ConfigError
from tests.pages import blocks
from tests.reader import ROOT
from tests.support.mail_relay import receiver

NOW = 1_800_000_000.0
SLACK = "https://hooks.slack.com/services/"
LISTS = Allowed(("x.org", "example.org"), (SLACK,))
WHOLE = f"""
events = ["FAIL", "TIME_LIMIT"]
mail = "alice@x.org"
webhook = {{format = "slack", url = "{SLACK}T0/B0/s3cr3t"}}
"""


def settings_of(text: str | bytes, directory: Path, lists: Allowed = LISTS) -> Any:
    path = directory / "notify.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_own(path, lists)


def test_a_file_has_events_an_address_and_a_webhook(tmp_path: Path) -> None:
    assert load_own(tmp_path / "none.toml", LISTS) is None
    own = settings_of(WHOLE, tmp_path)
    assert (own.events, own.mail) == (("FAIL", "TIME_LIMIT"), "alice@x.org")
    assert own.webhook == WebhookSettings(WebhookFormat.SLACK, f"{SLACK}T0/B0/s3cr3t")
    assert "s3cr3t" not in repr(own)
    (tmp_path / "alice").write_text(own.as_line())
    assert read_submitted_webhook("alice", LISTS.webhooks, tmp_path) == own.webhook


def test_the_page_s_example_is_right(tmp_path: Path) -> None:
    (text,) = [block.text for block in blocks(ROOT / "docs/how-to/get-told.md") if block.kind == "file"]
    own = settings_of(text, tmp_path)
    assert own.events and own.mail == "alice@example.org" and own.webhook is not None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("evnets = []", "did you mean events?"),
        ("[webhook]\nuri = 1", "did you mean url?"),
        ('events = ["FAILED"]', "'FAILED' is none"),
        ("events = 3", "wanted a list"),
        ('mail = "a@elsewhere.net"', "no address at x.org, example.org"),
        ('mail = "-oQ/etc/passwd"', "no address at"),
        ("mail = {}", "wanted text"),
        ("webhook = 3", "wanted a mapping"),
        ('[webhook]\nformat = "irc"', "is not one of slack, teams, json"),
        ("\x00", "it is no TOML"),
        (b"\xff\xfe", "it is no TOML"),
        ("a = " + "[" * 10000, "it is no TOML"),
        ("#" * (LARGEST + 1), "it is larger than 16 KiB"),
        ('x\x1b]0;t\x07 = "', "it is no TOML"),
    ],
)
def test_a_wrong_file_is_told_to_its_user(tmp_path: Path, text: str | bytes, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings_of(text, tmp_path)
    assert reason in str(caught.value) and "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/meta-data", "http://localhost:6817/", "file:///etc/passwd",
        "https://hooks.slack.com.evil.org/services/x", "https://hooks.slack.com/other/x",
        "https://hooks.slack.com/services/../admin", "https://hooks.slack.com/services/%2e%2e/admin",
        "https://hooks.slack.com/services//x", "https://hooks.slack.com@10.0.0.1/services/x",
        "https://HOOKS.slack.com/services/x", "https://hooks.slack.com/services/x\nHost: y",
        "https://hooks.slack.com/services/x#y", "https://hooks.slack.com/services/x y", "https://hooks.slack.com/services/é",
        "https://hooks.slack.com/services/" + "x" * 1024, "",
    ],
)  # fmt: skip
def test_a_url_outside_the_operator_s_list_is_refused_by_the_check_and_by_the_service(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(SLACK)) as caught:
        settings_of(f"webhook.url = {json.dumps(url)}", tmp_path)
    if url:
        assert url not in str(caught.value)
    (tmp_path / "alice").write_text(json.dumps({"format": "json", "url": url}))
    assert read_submitted_webhook("alice", (SLACK,), tmp_path) is None


def test_without_a_list_no_webhook_and_without_a_relay_no_mail(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ask an operator: notifications\.webhook\.ofUsers"):
        settings_of(WHOLE, tmp_path, Allowed(("x.org",), ()))
    with pytest.raises(ConfigError, match="this cluster sends no mail"):
        settings_of(WHOLE, tmp_path, Allowed((), (SLACK,)))


def test_a_fifo_a_device_and_a_directory_are_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "notify.toml"
    for kind in ("FIFO", "directory", "device"):
        if kind == "FIFO":
            os.mkfifo(path)
        elif kind == "directory":
            path.mkdir()
        else:
            path.symlink_to("/dev/zero")
        with pytest.raises(ConfigError, match="it is no plain file"):
            load_own(path, LISTS)
        path.rmdir() if path.is_dir() else path.unlink()


def test_root_reads_no_file_of_a_home(tmp_path: Path) -> None:
    """With `sudo -E sbatch` HOME is a user's."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    (tmp_path / ".config/minivm").mkdir(parents=True)
    os.mkfifo(tmp_path / ".config/minivm/notify.toml")
    command = [sys.executable, "-m", "health.notify", "check"]
    done = subprocess.run(
        command, env=os.environ | {"HOME": str(tmp_path)}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1 and "root has none" in done.stderr


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"url": 3}', '{"url": "http://10.0.0.1/"}', "[" * 9999])
def test_what_slurmctld_kept_is_checked_again(tmp_path: Path, text: str) -> None:
    (tmp_path / "alice").write_text(text)
    assert read_submitted_webhook("alice", (SLACK,), tmp_path) is None


def test_a_user_s_name_leads_to_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "users").mkdir()
    good = json.dumps({"format": "json", "url": f"{SLACK}x"})
    for path in (tmp_path / "secret", tmp_path / "users/:alice", tmp_path / "users/alice"):
        path.write_text(good)
    users = ("../secret", ":alice", str(tmp_path / "secret"), "", ".", "alice\0", "alice")
    assert [user for user in users if read_submitted_webhook(user, (SLACK,), tmp_path / "users")] == ["alice"]


# The service.


def no_page(_: str, __: str) -> Page | None:
    return None


def spool_of(directory: Path, **urls: str) -> NotifySpool:
    (directory / "new").mkdir()
    (directory / "users").mkdir()
    for user, url in urls.items():
        (directory / "users" / user).write_text(json.dumps({"format": "json", "url": url}))
    return NotifySpool(directory)


def record(spool: NotifySpool, number: int, user: str) -> None:
    fields = {"TO": user, "SLURM_JOB_ID": str(number), "SLURM_JOB_USER": user, "SLURM_JOB_MAIL_TYPE": "Began"}
    text = b"".join(f"{key}={value}\0".encode() for key, value in fields.items())
    (spool.new / f"{int(NOW * 1e9) + number:020d}-1").write_bytes(text)


def test_each_user_s_webhook_hears_of_own_jobs_alone(tmp_path: Path) -> None:
    with receiver() as (place, hook):
        spool = spool_of(
            tmp_path, alice=f"http://{place}/u/alice", bob=f"http://{place}/u/bob", eve=f"http://{place}/x"
        )
        settings = NotifySettings("c", None, None, of_users=(f"http://{place}/u/",))
        log: list[str] = []

        def send(_: NotifySettings, channel: str, data: dict[str, Any]) -> str:
            return deliver(settings, channel, data, spool.users)

        for number, user in enumerate(("alice", "bob", "eve", "carol")):
            record(spool, number, user)
        Notifier(spool, no_page, send, log.append).turn(settings, NOW)
    assert {path: body["user"] for path, body, _ in hook.got} == {"/u/alice": "alice", "/u/bob": "bob"}
    assert not spool.queue("own") and not log


def test_a_redirect_of_an_allowed_host_is_not_followed(tmp_path: Path) -> None:
    with receiver() as (inside, secret), receiver(302, headers={"Location": f"http://{inside}/"}) as (place, _):
        spool = spool_of(tmp_path, alice=f"http://{place}/u/x")
        settings = NotifySettings("c", None, None, of_users=(f"http://{place}/u/",))
        data = {"id": "1", "at": NOW, "subject": "s", "text": "t", "fields": {"user": "alice"}, "to": []}
        with pytest.raises(ChannelDownError, match="302"):
            deliver(settings, "own", data, spool.users)
    assert not secret.got


def test_a_webhook_that_fails_is_its_user_s_matter_alone(tmp_path: Path) -> None:
    """Its messages wait, each is dropped after some tries, and the pod reports no problem."""
    spool = spool_of(tmp_path, alice=f"{SLACK}alice", bob=f"{SLACK}bob")
    settings = NotifySettings("c", None, None, of_users=(SLACK,))
    tried: list[str] = []

    def send(_: NotifySettings, __: str, data: dict[str, Any]) -> str:
        tried.append(data["fields"]["user"])
        if data["fields"]["user"] == "alice":
            raise ChannelDownError("the webhook answers HTTP 500", "HTTP 500")
        return "ok"

    for number, user in enumerate(("alice", "alice", "alice", "bob", "bob")):
        record(spool, number, user)
    service = Notifier(spool, no_page, send, lambda _: None)
    service.turn(settings, NOW)
    assert tried == ["alice", "bob", "bob"] and service.problem(settings) == ""
    assert 'minivm_notify_up{channel="own"} 1' in service.metrics(settings)
    for turn in range(1, 40):
        service.turn(settings, NOW + turn * MOST_BACKOFF)
    assert not spool.queue("own") and tried.count("alice") <= 3 * MOST_TRIES


def test_a_webhook_that_its_user_removed_gets_no_message_that_waited(tmp_path: Path) -> None:
    spool = spool_of(tmp_path)
    data = {"id": "1", "at": NOW, "subject": "s", "text": "t", "fields": {"user": "alice"}, "to": []}
    with pytest.raises(MessageRefusedError, match="no such channel"):
        deliver(NotifySettings("c", None, None, of_users=(SLACK,)), "own", data, spool.users)
