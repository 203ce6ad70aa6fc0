"""Command line of `minivm notify`, and the service `notify`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from ground.errors import counted
from ground.files import write_if_possible
from ground.sockets import notify
from health.jobs.model import safe
from health.notify import messages
from health.notify.channels import ChannelDownError, MessageDeferredError, MessageRefusedError
from health.notify.notices import NotifySpool, recipients
from health.notify.service import DOWN, METRICS, Notifier, deliver, explainer
from health.notify.settings import (
    FILE,
    OWN,
    OWN_FILE,
    OWN_SUBJECT,
    NotifySettings,
    OwnSettings,
    load,
    load_own,
    read_allowed_for_users,
    read_submitted_webhook,
)
from health.tell import tell
from init.errors import InitError
from init.pod.dirwatch import Watcher
from init.slurm import client

ABOUT = "Messages about jobs, by mail and webhooks. `check` is for all users, the rest for root on the controller."
ASK = 5.0  # seconds for one of Slurm's clients
MOST_ANSWER = 4 << 20  # bytes about jobs, so much that a user makes; a message about a larger array has no cause
CONDITION = "notify"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="minivm notify", description=ABOUT)
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("status", help="show each channel and how many messages wait (the default)")
    test = commands.add_parser("test", help="send one message, and print what the server answers")
    test.add_argument("user", metavar="USER", help="a user, or an address")
    check = commands.add_parser("check", help=f"check your own settings, ~/{OWN_FILE}")
    check.add_argument("--for-submission", action="store_true", help="print them for the filter of sbatch")
    commands.add_parser("serve", help="run the service (PID 1 does)")
    options = parser.parse_args(arguments)
    try:
        if options.command == "check":
            return check_own(options.for_submission)
        if options.command == "serve":
            serve()
        if not FILE.exists():
            reason = "notifications are off, or this is not the controller"
            raise InitError("send messages", reason, hint="the chart's notifications.mail and .webhook switch them on")
        if os.geteuid() != 0:
            raise InitError("read the relay's password", "you are not root", hint="run it as root on the controller")
        settings = load()
        return send_test(settings, options.user) if options.command == "test" else show(settings)
    except InitError as error:
        print(f"minivm: {safe(str(error), 1000)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def check_own(for_submission: bool) -> int:
    """Check the settings of the user who calls. Root reads no file in a home, where a link may lead anywhere."""
    if os.geteuid() == 0:
        raise InitError(f"read {OWN_SUBJECT}", "root has none", hint="run it as the user: runuser -u USER")
    lists = read_allowed_for_users()
    if lists is None:
        raise InitError(f"read {OWN_SUBJECT}", "this cluster sends no notifications")
    settings = load_own(Path.home() / OWN_FILE, lists)
    if for_submission:
        settings = settings or OwnSettings()
        print(f"{','.join(settings.events)}\n{settings.mail}\n{settings.as_line()}")
        return 0
    if settings is None:
        print(f"You have no ~/{OWN_FILE}: jobs tell what --mail-type and --mail-user say.")
        return 0
    events = ", ".join(settings.events) or "what --mail-type says"
    print(f"events: {events}\nmail: {settings.mail or 'your name at the cluster, or --mail-user'}")
    print(f"webhook: {urlsplit(settings.webhook.url).hostname if settings.webhook else 'none'}")
    print("Your next job brings them to the cluster.")
    return 0


def send_test(settings: NotifySettings, user: str) -> int:
    code = 0
    message = messages.describe_test(user, settings.cluster)
    for channel in settings.channels():
        to = recipients(user, settings.mail.domain, settings.mail.domains) if settings.mail else ()
        if channel == "mail" and not to:
            print(f"mail: {safe(user, 80)!r} is no user and no address of a domain in notifications.mail.domains")
            code = 1
            continue
        if channel == OWN and read_submitted_webhook(user, settings.of_users) is None:
            continue
        data = {"subject": message.subject, "text": message.text, "fields": message.fields, "to": to}
        now = time.time()
        try:
            answer = deliver(settings, channel, {**data, "id": f"test-{time.time_ns()}", "at": now})
            whom = f" for {', '.join(to)}" if channel == "mail" else ""
            print(f"{channel}: {settings.place(channel)} has taken it{whom}: {answer}")
        except (MessageRefusedError, MessageDeferredError, ChannelDownError) as error:
            print(f"{channel}: {settings.place(channel)} has not taken it: {error}")
            code = 1
    return code


def show(settings: NotifySettings) -> int:
    spool = NotifySpool()
    for channel in settings.channels():
        waiting = counted(len(spool.queue(channel)), "message waits", "messages wait")
        print(f"{channel}: {settings.place(channel)}, {waiting}")
    print(f"new: {len(spool.records(time.time()))}; `minivm why` says what is wrong")
    return 0


def serve() -> None:
    controller = client.address(os.environ)
    spool = NotifySpool()
    notifier = Notifier(
        spool,
        explainer(lambda argv: ask(argv, controller)),
        deliver,
        lambda text: print(text, flush=True),
    )
    watcher = Watcher()
    watcher.watch(spool.new)
    watcher.watch(FILE.parent)  # Kubernetes renames a directory there
    notify("READY=1")
    before: str | None = None  # an earlier life of the service may have said something
    while True:
        wait, problem = step(notifier)
        if problem != before and tell(problem, CONDITION):
            before = problem
        watcher.wait(60.0 if problem != before else wait)


def ask(argv: Sequence[str], controller: str) -> str:
    """Run one of Slurm's clients; only operators make answers about nodes longer."""
    most = 0 if argv[0] == client.SCONTROL else MOST_ANSWER
    return client.run(argv, controller, within=ASK, most=most)


def step(notifier: Notifier) -> tuple[float | None, str]:
    try:
        settings = load()
    except InitError as error:
        write_if_possible(METRICS, DOWN)
        return 60.0, safe(str(error), 300)  # a Secret that comes later is not watched
    try:
        wait = notifier.turn(settings, time.time())
        problem = notifier.problem(settings)
    except OSError as error:
        write_if_possible(METRICS, notifier.metrics(settings))
        return 60.0, f"{error.filename or 'the spool'}: {error.strerror}"
    write_if_possible(METRICS, notifier.metrics(settings))
    return wait, problem


if __name__ == "__main__":
    raise SystemExit(main())
