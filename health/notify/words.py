"""Texts of messages: the first lines of `minivm job`, and no markup, mention or header that a user wrote. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import format_datetime
from typing import Any

from health.jobs import render
from health.jobs.model import Page, safe
from health.notify.limits import Digest
from health.notify.notices import JobNotice
from health.notify.settings import MailSettings, WebhookFormat

MOST_ADVICE = 3
QUIET_AT = "@\N{ZERO WIDTH SPACE}"  # no reader takes it for a mention


@dataclass(frozen=True, slots=True)
class JobMessage:
    subject: str
    text: str
    fields: Mapping[str, str]  # for programs


def of_job(notice: JobNotice, page: Page | None, cluster: str) -> JobMessage:
    """Say what happened to a job, with the cause if Slurm showed the job."""
    name = f" ({notice.name})" if notice.name else ""
    subject = f"{'Array' if notice.is_array else 'Job'} {notice.job}{name} on {cluster}: {notice.event}"
    state = page.job.state if page is not None and notice.has_ended else notice.state
    facts = [f"state {state}"] if state else []
    facts += [f"ran for {notice.run_time}"] if notice.run_time else []
    lines = [f"{subject}{', ' if facts else ''}{', '.join(facts)}"]
    fields = {
        "cluster": cluster, "job": notice.job, "name": notice.name, "user": notice.user, "event": notice.event,
        "state": state,
    }  # fmt: skip
    if page is not None:
        lines += ["", safe(page.answer.headline, 600), f"Cause: {render.cause(page)}"]
        advice = [safe(text, 300) for text in page.answer.advice[:MOST_ADVICE]]
        lines += ["", "What to do:", *(f"- {text}" for text in advice)] if advice else []
        fields |= {"headline": safe(page.answer.headline, 600), "cause": str(page.answer.cause)}
    elif notice.has_ended and notice.exit_codes:
        lines += ["", f"{'Exit codes of its tasks' if notice.is_array else 'Exit code'}: {notice.exit_codes}."]
    elif notice.event == "Requeued":
        lines += ["", "It waits in the queue again."]
    lines += ["", f"More: minivm job {notice.job}"]
    return JobMessage(subject, "\n".join(lines), fields)


def of_digest(digest: Digest, cluster: str) -> JobMessage:
    events = ", ".join(f"{count} {event}" for event, count in sorted(digest.counts.items()))
    subject = f"And {digest.number} more messages about your jobs on {cluster}"
    text = (
        f"{subject}: {events}.\n\nThey were more than the cluster sends one by one in an hour. Your jobs: minivm job, "
        "and of those that ended: sacct"
    )
    fields = {"cluster": cluster, "user": digest.user, "event": "Digest", "count": str(digest.number), "counts": events}
    return JobMessage(subject, text, fields)


def of_test(user: str, cluster: str) -> JobMessage:
    text = "An operator sent this to test the cluster's notifications. There is nothing to do."
    return JobMessage(
        f"Test of notifications on {cluster}", text, {"cluster": cluster, "user": safe(user, 64), "event": "Test"}
    )


def email(message: JobMessage, settings: MailSettings, to: tuple[str, ...], id_: str, at: float) -> bytes:
    from datetime import UTC, datetime

    mail = EmailMessage(policy=SMTP)
    mail["From"] = settings.sender
    mail["To"] = ", ".join(to)
    # EmailMessage decodes encoded words (RFC 2047), in which a job's name could hide line ends.
    mail["Subject"] = safe(message.subject, 200).replace("=?", "= ?")
    mail["Date"] = format_datetime(datetime.fromtimestamp(at, UTC))
    # The same when a message is sent twice, so that a reader shows one.
    mail["Message-ID"] = f"<{id_}@{settings.sender.rpartition('@')[2]}>"
    mail["Auto-Submitted"] = "auto-generated"
    mail.set_content(message.text + "\n")
    return mail.as_bytes()


def payload(message: JobMessage, kind: WebhookFormat) -> dict[str, Any]:
    """Return the body of a webhook; people's texts notify nobody and format nothing."""
    who = message.fields.get("user", "")
    text = f"{who}: {message.text}" if who else message.text
    if kind is WebhookFormat.SLACK:
        quiet = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("@", QUIET_AT)
        return {"text": quiet, "mrkdwn": False, "link_names": False}
    if kind is WebhookFormat.TEAMS:
        runs = {"type": "RichTextBlock", "inlines": [{"type": "TextRun", "text": text.replace("@", QUIET_AT)}]}
        card = {"type": "AdaptiveCard", "version": "1.4", "body": [runs]}
        part = {"contentType": "application/vnd.microsoft.card.adaptive", "content": card}
        return {"type": "message", "attachments": [part]}
    return {**message.fields, "text": message.text}
