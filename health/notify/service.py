"""The service: takes the MailProg's records, makes messages of them within limits, and sends each until it is taken."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ground.metrics import family
from health.jobs import requeue
from health.jobs.ask import Asker, find_pages
from health.jobs.model import Page, duration, safe
from health.notify import messages
from health.notify.channels import (
    DEADLINE,
    ChannelDownError,
    MessageDeferredError,
    MessageRefusedError,
    MessageUnansweredError,
    send_mail,
    send_webhook,
)
from health.notify.messages import JobMessage, MessageLimits
from health.notify.notices import USERS, JobNotice, NotifySpool, parse, recipients
from health.notify.settings import OWN, NotifySettings, read_submitted_webhook
from init.errors import InitError
from init.slurm.client import SlurmError

METRICS = Path("/run/minivm/metrics.d/notify.prom")
DOWN = "\n".join(family("minivm_notify_up", "0 if the channel takes no messages.", [({"channel": "all"}, "0")])) + "\n"
SETTLE = 5.0  # seconds in which accounting learns of a job's end
MOST_RECORDS = 1000  # in one turn
PATIENCE = 20.0  # seconds for one kind of work, for the other kinds wait
FIRST_BACKOFF, MOST_BACKOFF = 15.0, 900.0
KEEP = 3 * 86400.0
MOST_DOWNS = 3
WITHIN_OWN = 8.0  # seconds for a user's webhook: all other messages wait
MOST_TRIES = 4  # of a message that a relay took without an answer, or that the service cannot send
Explain = Callable[[str, str], Page | None]
Send = Callable[[NotifySettings, str, dict[str, Any]], str]


@dataclass
class ChannelState:
    problem: str = ""
    backoff: float = 0.0
    retry_at: float = 0.0
    deferred: dict[str, float] = field(default_factory=dict)
    tries: dict[str, int] = field(default_factory=dict)
    downs: dict[str, int] = field(default_factory=dict)  # how often the channel was down for a message
    paused: dict[str, float] = field(default_factory=dict)  # users whose own webhook failed, until then
    sent: int = 0
    refused: int = 0
    dropped: int = 0


class Notifier:
    """One turn takes records, sends what may go, and says how long to wait for the next."""

    def __init__(
        self,
        spool: NotifySpool,
        explain: Explain,
        send: Send,
        log: Callable[[str], None] = print,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spool, self.explain, self.send, self.log, self.clock = spool, explain, send, log, clock
        self._can_ask = True
        self.states: dict[str, ChannelState] = {}
        self.lost = 0
        self.limits = MessageLimits(0, 0)
        self.limits.restore(spool.limits())

    def turn(self, settings: NotifySettings, now: float) -> float | None:
        """Return the seconds until there is something to do without a new record; None: never."""
        self.limits.per_user, self.limits.total = settings.per_user, settings.total
        waits: list[float | None] = []
        failed: OSError | None = None
        for work in (self._take, self._digests):
            try:
                waits.append(work(settings, now))
            except OSError as error:  # a full disk: what waits there can go, which makes room
                failed = error
        for channel in settings.channels():
            waits.append(60.0 if channel in settings.problems else self._send_all(settings, channel, now))
        if lost := self.spool.take_lost():
            self.lost += lost
            self.log(f"{lost} messages found no room in {self.spool.new} and are lost")
        if failed is not None:
            raise failed
        return min((wait for wait in waits if wait is not None), default=None)

    def _take(self, settings: NotifySettings, now: float) -> float | None:
        """Turn records into messages, or into counts where a user has had enough."""
        until = self.clock() + PATIENCE
        young: dict[str, int] = {}
        done: list[str] = []
        failed: OSError | None = None
        self._can_ask = True
        names = self.spool.records(now)
        for name in names[:MOST_RECORDS]:
            if self.clock() > until:
                break
            try:
                if self._take_one(settings, name, now, young):
                    done.append(name)
            except OSError as error:
                failed = error
                break
            except Exception as error:  # a defect, which must not stop all other messages
                self.log(f"record {safe(name, 60)} makes no message: {safe(repr(error), 300)}; removed")
                done.append(name)
        if done:
            try:
                self.spool.save_limits(self.limits.as_json())
            finally:
                self.spool.remove_records(done)
        if failed is not None:
            raise failed
        if len(names) > len(done) + sum(young.values()):
            return 0.0
        return SETTLE if young else None

    def _take_one(self, settings: NotifySettings, name: str, now: float, young: dict[str, int]) -> bool:
        """Take a record; False if it has to wait."""
        notice = parse(name, self.spool.read(name))
        if notice is None:
            self.log(f"record {safe(name, 60)} is no message of Slurm; removed")
        elif not self.limits.has_room(notice.user, now, young.get(notice.user, 0)):
            self.limits.hold(notice.user, safe(notice.to, 300), notice.event, now)
        elif notice.has_ended and 0 <= now - notice.at < SETTLE:
            young[notice.user] = young.get(notice.user, 0) + 1
            return False
        else:
            again = requeue.recall_reason(notice.job, notice.at) if notice.event == "Requeued" else ""
            message = messages.describe_job(notice, self._page(notice), settings.cluster, again)
            number = self._put(settings, notice.id, notice.to, notice.user, message, now)
            self.limits.take(notice.user, now, number)
        return True

    def _page(self, notice: JobNotice) -> Page | None:
        """Explain a job that ended, if Slurm still shows it so: it may run again by now.

        Of a job that waits, an operator's page may say more of other jobs than its user sees.
        """
        if not notice.has_ended or notice.is_array or not self._can_ask:
            return None
        try:
            page = self.explain(notice.job, notice.user)
        except InitError as error:
            self.log(f"job {notice.job}: the message has no cause: {safe(str(error), 300)}")
            self._can_ask = not isinstance(error, SlurmError)  # slurmctld is away; else this job alone is unknown
            return None
        except Exception as error:  # a defect, which costs the cause and no message
            self.log(f"job {notice.job}: the message has no cause: {safe(repr(error), 300)}")
            return None
        return page if page is not None and page.job.user == notice.user and page.job.has_ended else None

    def _digests(self, settings: NotifySettings, now: float) -> float | None:
        digests = self.limits.due(now)
        for number, digest in enumerate(digests):
            message = messages.describe_digest(digest, settings.cluster)
            try:
                self._put(settings, f"{int(now * 1e9):020d}-{number}", digest.to, digest.user, message, now)
            except OSError:
                self.limits.put_back(digests[number:], now)
                raise
        if digests:
            self.spool.save_limits(self.limits.as_json())
        return self.limits.next_due(now)

    def _put(self, settings: NotifySettings, name: str, to: str, user: str, message: JobMessage, now: float) -> int:
        """Queue a message for each channel; return how many messages it counts as."""
        data = {**asdict(message), "at": now, "to": []}
        for channel in settings.channels():
            state = self._state(channel)
            if channel == OWN and read_submitted_webhook(user, settings.of_users, self.spool.users) is None:
                continue
            if channel == "mail" and settings.mail is not None:
                data["to"] = recipients(to, settings.mail.domain, settings.mail.domains)
                if not data["to"]:
                    state.refused += 1
                    self.log(f"a message of {user} is not sent: --mail-user={safe(to, 80)!r} is no allowed address")
                    continue
            if not self.spool.has_room(channel):
                state.dropped += 1
                continue
            self.spool.put(channel, name, data)
        return max(1, len(data["to"]))

    def _send_all(self, settings: NotifySettings, channel: str, now: float) -> float | None:
        state = self._state(channel)
        names = self.spool.queue(channel)
        if not names:
            return None
        if now < state.retry_at:
            return state.retry_at - now
        waiting = set(names)
        state.deferred = {name: at for name, at in state.deferred.items() if name in waiting}
        state.tries = {name: tries for name, tries in state.tries.items() if name in waiting}
        state.downs = {name: downs for name, downs in state.downs.items() if name in waiting}
        ready = [name for name in names if state.deferred.get(name, 0.0) <= now]
        ready.sort(key=lambda name: state.downs.get(name, 0))
        until = self.clock() + PATIENCE
        for number, name in enumerate(ready):
            if number and self.clock() > until:
                return 0.0
            if not self._send_one(settings, channel, state, name, now):
                return max(1.0, state.retry_at - now)
        return min((max(1.0, at - now) for at in state.deferred.values()), default=None)

    def _send_one(self, settings: NotifySettings, channel: str, state: ChannelState, name: str, now: float) -> bool:
        """Send a message; False if the channel is down."""
        data = dict(self.spool.get(channel, name))
        place = settings.place(channel)
        user = str((data.get("fields") or {}).get("user")) if channel == OWN else ""
        if state.paused.get(user, 0.0) > now:
            state.deferred[name] = state.paused[user]
            return True
        try:
            if now - _number(data.get("at")) > KEEP:
                raise MessageRefusedError(f"it waited {duration(KEEP)}")
            self.send(settings, channel, {**data, "id": name.removesuffix(".json")})
            state.sent += 1
        except MessageRefusedError as error:
            state.refused += 1
            self.log(f"{channel}: {place} refuses a message, which is dropped: {error}")
        except MessageUnansweredError as error:
            return self._try_again(channel, state, name, now, f"{place} may have taken a message: {error}")
        except MessageDeferredError as error:
            state.deferred[name] = now + MOST_BACKOFF / 3
            self.log(f"{channel}: {place} wants a message later: {error}")
            return True
        except ChannelDownError as error:
            if channel == OWN:  # one user's fault must not hold the messages of other users
                state.paused = {each: until for each, until in state.paused.items() if until > now}
                state.paused[user] = now + MOST_BACKOFF
                return self._try_again(channel, state, name, now, f"the webhook of {user}: {error}")
            state.backoff = min(MOST_BACKOFF, max(FIRST_BACKOFF, 2 * state.backoff))
            state.retry_at = now + max(state.backoff, error.after)
            if state.problem != error.kind:
                self.log(f"{channel}: {place}: {error}; tried again")
            state.problem = error.kind
            # It may be the message: the next try takes another one, and this one waits after some.
            state.downs[name] = state.downs.get(name, 0) + 1
            if state.downs[name] >= MOST_DOWNS:
                state.deferred[name] = now + MOST_BACKOFF
            return False
        except Exception as error:  # a defect, which must not stop all other messages
            return self._try_again(channel, state, name, now, f"a message cannot be sent: {safe(repr(error), 300)}")
        if state.problem:
            self.log(f"{channel}: {place} takes messages again")
        state.problem, state.backoff, state.retry_at = "", 0.0, 0.0
        self.spool.remove(channel, name)
        return True

    def _try_again(self, channel: str, state: ChannelState, name: str, now: float, reason: str) -> bool:
        """Defer one message, each time for longer, and drop it after some tries."""
        state.tries[name] = tries = state.tries.get(name, 0) + 1
        if tries < MOST_TRIES:
            state.deferred[name] = now + MOST_BACKOFF * tries
            self.log(f"{channel}: {reason}; tried again")
            return True
        state.refused += 1
        self.log(f"{channel}: {reason}; dropped after {tries} tries")
        self.spool.remove(channel, name)
        return True

    def _state(self, channel: str) -> ChannelState:
        return self.states.setdefault(channel, ChannelState())

    def problem(self, settings: NotifySettings) -> str:
        """Return what is wrong, for the pod's degraded reasons; "" if nothing is."""
        parts = []
        for channel in settings.channels():
            state, waiting = self._state(channel), len(self.spool.queue(channel))
            if problem := safe(settings.problems.get(channel, state.problem), 300):
                parts.append(f"{settings.place(channel)}: {problem} ({'many' if waiting > 99 else waiting} wait)")
        return f"{', '.join(parts)}; `minivm notify test USER` shows the answer" if parts else ""

    def metrics(self, settings: NotifySettings) -> str:
        states = {channel: self._state(channel) for channel in settings.channels()}

        def samples(value: Callable[[str, ChannelState], float]) -> list[tuple[dict[str, str], str]]:
            return [({"channel": name}, f"{value(name, state):g}") for name, state in states.items()]

        up = samples(lambda name, state: not state.problem and name not in settings.problems)
        waiting = samples(lambda name, _: len(self.spool.queue(name)))
        sent, refused = samples(lambda _, state: state.sent), samples(lambda _, state: state.refused)
        held = sum(sum(held.counts.values()) for held in self.limits.held.values())
        dropped = self.lost + self.limits.lost + sum(state.dropped for state in states.values())
        lines = [
            *family("minivm_notify_up", "0 if the channel takes no messages.", up),
            *family("minivm_notify_waiting", "Messages that wait.", waiting),
            *family("minivm_notify_sent_total", "Messages sent.", sent, "counter"),
            *family("minivm_notify_refused_total", "Messages refused for what they are.", refused, "counter"),
            *family("minivm_notify_lost_total", "Messages without room.", [({}, str(dropped))], "counter"),
            *family("minivm_notify_held", "Messages over the limits, told as one later.", [({}, str(held))]),
        ]
        return "\n".join(lines) + "\n"


def deliver(settings: NotifySettings, channel: str, data: dict[str, Any], users: Path = USERS) -> str:
    """Send a queued message by one channel; return the server's answer."""
    if channel in settings.problems:
        raise ChannelDownError(settings.problems[channel], "wrong settings")
    to: tuple[str, ...] = ()
    within, webhook = DEADLINE, settings.webhook
    try:
        message = JobMessage(data["subject"], data["text"], dict(data["fields"]))
        if channel == "mail" and settings.mail is not None:
            to = tuple(data["to"])
            mail = messages.email(message, settings.mail, to, str(data["id"]), float(data["at"]))
        if channel == OWN:
            within, webhook = WITHIN_OWN, read_submitted_webhook(message.fields["user"], settings.of_users, users)
        if channel != "mail" and webhook is not None:
            body = messages.payload(message, webhook.format)
    except Exception as error:  # a user's text may cause any error: only this message fails
        raise MessageRefusedError(f"it cannot be written: {safe(repr(error), 200)}") from None
    if channel == "mail" and settings.mail is not None:
        return send_mail(settings.mail, settings.ca, to, mail)
    if webhook is None:
        raise MessageRefusedError("there is no such channel any more")
    return send_webhook(webhook, settings.ca, body, within)


def _number(value: object) -> float:
    return value if isinstance(value, int | float) else 0.0


def explainer(run: Callable[..., str]) -> Callable[[str, str], Page | None]:
    """Return what explains a job of a user, as an operator sees it; the caller compares the user."""

    def explain(job: str, user: str) -> Page | None:
        pages = find_pages(Asker(run=run, user=user, is_root=True, now=time.time()), job)
        return pages[0] if len(pages) == 1 else None

    return explain
