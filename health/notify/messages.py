"""Messages to users: their texts, and how many a user gets in an hour. Pure.

A text is the first lines of `minivm job`, without markup, mentions or headers that a user wrote. Messages over the
limit are counted, and one digest tells the count. An hour begins with a user's first message; an hour of counts begins
with the first message over the limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import format_datetime
from typing import Any

from ground.errors import counted
from health.jobs.explain import render_cause
from health.jobs.model import Page, safe
from health.notify.notices import JobNotice
from health.notify.settings import MailSettings, WebhookFormat

HOUR = 3600.0
MOST_KEPT = 2000  # users and recipients with a count; beyond that messages are lost, which is counted
MOST_RECIPIENTS = 20  # of a user
MOST_EVENTS = 8


@dataclass
class MessageWindow:
    since: float
    used: int = 0


@dataclass
class HeldMessages:
    since: float
    counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Digest:
    """Messages of a user to one recipient that were not sent one by one."""

    user: str
    to: str
    counts: Mapping[str, int]

    @property
    def number(self) -> int:
        return sum(self.counts.values())


@dataclass
class MessageLimits:
    per_user: int
    total: int
    windows: dict[str, MessageWindow] = field(default_factory=dict)  # "" is all users together
    held: dict[tuple[str, str], HeldMessages] = field(default_factory=dict)
    lost: int = 0

    def has_room(self, user: str, now: float, more: int = 0) -> bool:
        """Tell if one message may go beside `more` that wait."""
        own, everyone = self._window(user, now), self._window("", now)
        return own.used + more < self.per_user and everyone.used + more < self.total

    def take(self, user: str, now: float, number: int = 1) -> None:
        """Count a message, once for each of its recipients."""
        self._window(user, now).used += number
        self._window("", now).used += number

    def hold(self, user: str, to: str, event: str, now: float) -> None:
        """Count a message for the digest. A user with many recipients gets the rest of the counts."""
        if (user, to) not in self.held and sum(owner == user for owner, _ in self.held) >= MOST_RECIPIENTS:
            to = user
        digest = self.held.get((user, to))
        if digest is None:
            if len(self.held) >= MOST_KEPT:
                self.lost += 1
                return
            digest = self.held[user, to] = HeldMessages(now)
        if event not in digest.counts and len(digest.counts) >= MOST_EVENTS:
            event = "other"
        digest.counts[event] = digest.counts.get(event, 0) + 1

    def due(self, now: float) -> list[Digest]:
        """Take out the digests whose hour is over. They count as messages."""
        for user in [user for user, window in self.windows.items() if not 0 <= now - window.since < HOUR]:
            del self.windows[user]
        ready = []
        for (user, to), digest in list(self.held.items()):
            if not 0 <= now - digest.since < HOUR and self.has_room(user, now):
                self.take(user, now)
                ready.append(Digest(user, to, digest.counts))
                del self.held[user, to]
        return ready

    def put_back(self, digests: list[Digest], now: float) -> None:
        """Take back digests that could not be kept; they are due at once."""
        for digest in digests:
            self.held[digest.user, digest.to] = HeldMessages(now - HOUR, dict(digest.counts))

    def next_due(self, now: float) -> float | None:
        """Return the seconds until a digest may go; None without any."""
        if not self.held:
            return None
        first = min(digest.since for digest in self.held.values()) + HOUR
        return first - now if first > now else HOUR / 60  # it waits for room

    def _window(self, user: str, now: float) -> MessageWindow:
        window = self.windows.get(user)
        if window is None or not 0 <= now - window.since < HOUR:
            window = self.windows[user] = MessageWindow(now)
        return window

    def as_json(self) -> dict[str, Any]:
        return {
            "windows": {user: [window.since, window.used] for user, window in self.windows.items()},
            "held": [[user, to, digest.since, digest.counts] for (user, to), digest in self.held.items()],
            "lost": self.lost,
        }

    def restore(self, data: Mapping[str, Any]) -> None:
        """Take over what an earlier life counted; damaged data counts as none."""
        try:
            windows = {str(user): MessageWindow(float(at), int(used)) for user, (at, used) in data["windows"].items()}
            digests = {
                (str(user), str(to)): HeldMessages(float(since), {str(event): int(counts[event]) for event in counts})
                for user, to, since, counts in data["held"]
            }
            self.windows, self.held, self.lost = windows, digests, int(data["lost"])
        except (KeyError, TypeError, ValueError, AttributeError):
            return


MOST_ADVICE = 3
QUIET_AT = "@\N{ZERO WIDTH SPACE}"  # no reader takes it for a mention


@dataclass(frozen=True, slots=True)
class JobMessage:
    subject: str
    text: str
    fields: Mapping[str, str]  # for programs


def describe_job(notice: JobNotice, page: Page | None, cluster: str, again: str = "") -> JobMessage:
    """Say what happened to a job, with the cause if Slurm showed the job. `again`: why it was requeued."""
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
        lines += ["", safe(page.answer.headline, 600), f"Cause: {render_cause(page)}"]
        advice = [safe(text, 300) for text in page.answer.advice[:MOST_ADVICE]]
        lines += ["", "What to do:", *(f"- {text}" for text in advice)] if advice else []
        fields |= {"headline": safe(page.answer.headline, 600), "cause": str(page.answer.cause)}
    elif notice.has_ended and notice.exit_codes:
        lines += ["", f"{'Exit codes of its tasks' if notice.is_array else 'Exit code'}: {notice.exit_codes}."]
    elif notice.event == "Requeued":
        lines += ["", "It waits in the queue again.", *([f"{safe(again, 400)}."] if again else [])]
    lines += ["", f"More: minivm job {notice.job}"]
    return JobMessage(subject, "\n".join(lines), fields)


def describe_digest(digest: Digest, cluster: str) -> JobMessage:
    events = ", ".join(f"{count} {event}" for event, count in sorted(digest.counts.items()))
    subject = f"And {counted(digest.number, 'more message')} about your jobs on {cluster}"
    text = (
        f"{subject}: {events}.\n\nThey were more than the cluster sends one by one in an hour. Your jobs: minivm job, "
        "and of those that ended: sacct"
    )
    fields = {"cluster": cluster, "user": digest.user, "event": "Digest", "count": str(digest.number), "counts": events}
    return JobMessage(subject, text, fields)


def describe_test(user: str, cluster: str) -> JobMessage:
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
    """Return the body of a webhook; mentions and formatting in users' texts have no effect."""
    user = message.fields.get("user", "")
    text = f"{user}: {message.text}" if user else message.text
    if kind is WebhookFormat.SLACK:
        quiet = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("@", QUIET_AT)
        return {"text": quiet, "mrkdwn": False, "link_names": False}
    if kind is WebhookFormat.TEAMS:
        runs = {"type": "RichTextBlock", "inlines": [{"type": "TextRun", "text": text.replace("@", QUIET_AT)}]}
        card = {"type": "AdaptiveCard", "version": "1.4", "body": [runs]}
        part = {"contentType": "application/vnd.microsoft.card.adaptive", "content": card}
        return {"type": "message", "attachments": [part]}
    return {**message.fields, "text": message.text}
