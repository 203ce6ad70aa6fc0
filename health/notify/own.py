"""A user's own settings, ~/.config/minivm/notify.toml: when to be told, the mail address, and a webhook.

Only the user's own processes read the file: `minivm notify check`, and the filter of sbatch, srun and salloc, which
makes `events` and `mail` the defaults of --mail-type and --mail-user. The webhook travels with the submission to
slurmctld, which authenticates its user and keeps it for the service `notify`. The service checks it again, and calls
only URLs that begin with an entry of the operator's list.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from health.jobs.model import safe
from health.notify.notices import NAME, USERS, recipients
from health.notify.settings import WebhookFormat, WebhookSettings
from init.errors import ConfigError, nearest
from init.fields import Reader

FILE = ".config/minivm/notify.toml"
FILTERS = (Path("/etc/slurm/cli_filter.lua"), Path("/run/slurm/conf/cli_filter.lua"))
WHAT = "your settings of notifications"
LARGEST = 16 * 1024
LONGEST_URL = 1024
EVENTS = (
    "BEGIN", "END", "FAIL", "REQUEUE", "ALL", "INVALID_DEPEND", "STAGE_OUT", "TIME_LIMIT", "TIME_LIMIT_90",
    "TIME_LIMIT_80", "TIME_LIMIT_50", "ARRAY_TASKS",
)  # fmt: skip
# No user or password, no escapes or dots by which a path leaves its prefix, no fragment.
URL = re.compile(r"https?://[a-z0-9.-]+(?::\d{1,5})?(/[A-Za-z0-9._~/@:+=-]*)(?:\?[A-Za-z0-9._~/@:+=&%-]*)?", re.ASCII)
LISTS = re.compile(r'\b(domains|webhooks) = \{((?:"[^"\n]*"(?:, )?)*)\}')


@dataclass(frozen=True, slots=True)
class Allowed:
    """The operator's lists, as the cluster's filter of sbatch has them."""

    domains: tuple[str, ...] = ()  # of mail addresses; () without a relay
    webhooks: tuple[str, ...] = ()  # what a URL begins with


@dataclass(frozen=True, slots=True)
class OwnSettings:
    events: tuple[str, ...] = ()
    mail: str = ""
    webhook: WebhookSettings | None = field(default=None, repr=False)

    def as_line(self) -> str:
        """Return the webhook for slurmctld; "" without one."""
        return json.dumps({"format": self.webhook.format, "url": self.webhook.url}) if self.webhook else ""


def allowed(files: tuple[Path, ...] = FILTERS) -> Allowed | None:
    """Return the operator's lists; None where the cluster sends no notifications."""
    for path in files:
        try:
            head = path.read_text(errors="replace")[:LARGEST]
        except OSError:
            continue
        lists = {name: tuple(re.findall(r'"([^"]*)"', items)) for name, items in LISTS.findall(head.partition("\n")[0])}
        if "webhooks" in lists:
            return Allowed(lists.get("domains", ()), lists["webhooks"])
    return None


def load(path: Path, lists: Allowed) -> OwnSettings | None:
    """Read the calling user's file; None without one. Its file system may hang, which costs its own user alone."""
    data = _read(path)
    if data is None:
        return None
    try:
        values = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"read {WHAT}", f"it is no TOML: {safe(str(error), 200)}", file=str(path)) from None
    root = Reader(values, WHAT, str(path))
    root.only("events", "mail", "webhook")
    events = root.texts("events")
    for event in events:
        if event not in EVENTS:
            root.fail(
                "events", f"{safe(event, 60)!r} is none", nearest(event, list(EVENTS)) or f"use {', '.join(EVENTS)}"
            )
    mail = root.text("mail")
    if root.has("mail") and not lists.domains:
        root.fail("mail", "this cluster sends no mail", "remove the line")
    if root.has("mail") and not recipients(mail, lists.domains[-1], lists.domains):
        root.fail("mail", f"{safe(mail, 80)!r} is no address at {', '.join(lists.domains)}")
    return OwnSettings(events, mail, webhook_of(root.sub("webhook"), lists.webhooks) if root.has("webhook") else None)


def _read(path: Path) -> bytes | None:
    try:
        # A FIFO must not block, and a terminal or a device is not read.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"read {WHAT}", error.strerror or "it cannot be opened", file=str(path)) from None
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise ConfigError(f"read {WHAT}", "it is no plain file", file=str(path))
        data = os.read(file, LARGEST + 1)
    except OSError as error:
        raise ConfigError(f"read {WHAT}", error.strerror or "it cannot be read", file=str(path)) from None
    finally:
        os.close(file)
    if len(data) > LARGEST:
        raise ConfigError(f"read {WHAT}", f"it is larger than {LARGEST >> 10} KiB", file=str(path))
    return data


def webhook_of(part: Reader, prefixes: tuple[str, ...]) -> WebhookSettings:
    """Check a webhook. Its URL is a secret, so no error shows it."""
    part.only("format", "url")
    kind, url = part.choice("format", WebhookFormat, WebhookFormat.JSON), part.text("url")
    if not prefixes:
        part.fail("url", "this cluster allows no webhooks of users", "ask an operator: notifications.webhook.ofUsers")
    match = URL.fullmatch(url) if len(url) <= LONGEST_URL else None
    if match is None or ".." in match[1] or "//" in match[1]:
        part.fail("url", "it is no plain URL", f"it begins with {' or '.join(prefixes)}")
    if not url.startswith(prefixes):
        part.fail("url", "this cluster calls no such address", f"it begins with {' or '.join(prefixes)}")
    return WebhookSettings(kind, url)


def kept(user: str, prefixes: tuple[str, ...], directory: Path = USERS) -> WebhookSettings | None:
    """Return the webhook that came with the user's last submission; None without a good one."""
    if not prefixes or not NAME.fullmatch(user):
        return None
    try:
        data = _read(directory / user)
        values = json.loads(data or b"")
        return webhook_of(Reader(values, WHAT, user), prefixes) if isinstance(values, Mapping) else None
    except (ConfigError, ValueError, RecursionError):
        return None
