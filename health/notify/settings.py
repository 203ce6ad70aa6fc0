"""Settings of notifications: the site's (notify.json of the chart and the mounted Secret), and each user's own.

A user's file, ~/.config/minivm/notify.toml, has the events, a mail address and a webhook. Only the user's own processes
read it: `minivm notify check`, and the filter of sbatch, srun and salloc, which makes `events` and `mail` the defaults
of --mail-type and --mail-user. The webhook travels with the submission to slurmctld, which authenticates its user and
keeps it for the service `notify`. The service checks it again, and calls only URLs that begin with an entry of the
operator's list.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

from health.jobs.model import safe
from health.notify.notices import ADDRESS, NAME, USERS, recipients
from init.errors import ConfigError, nearest
from init.fields import Reader

FILE = Path("/mnt/minivm/config/slurm/notify.json")
SECRET = Path("/mnt/minivm/secrets/notify")
MOST = 1 << 20
RELAY = re.compile(r"(smtp|starttls|smtps)://(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+)(?::(\d{1,5}))?", re.ASCII)
OWN = "own"  # the channel of users' webhooks
PORTS = {"smtp": 25, "starttls": 587, "smtps": 465}


class WebhookFormat(StrEnum):
    SLACK = "slack"
    TEAMS = "teams"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class MailSettings:
    mode: str  # smtp, starttls, smtps
    host: str
    port: int
    sender: str
    domain: str  # of a recipient without one
    user: str = ""
    password: str = field(default="", repr=False)
    domains: tuple[str, ...] = ()  # of recipients, besides `domain`; "*" is any


@dataclass(frozen=True, slots=True)
class WebhookSettings:
    """A receiver of messages. Its path is often the secret: it is never shown."""

    format: WebhookFormat
    url: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class NotifySettings:
    cluster: str
    mail: MailSettings | None
    webhook: WebhookSettings | None
    ca: str = ""
    of_users: tuple[str, ...] = ()  # what the URLs of users' webhooks begin with
    per_user: int = 20  # messages an hour
    total: int = 500
    problems: Mapping[str, str] = field(default_factory=dict)  # of a channel whose settings are wrong: messages wait

    def channels(self) -> tuple[str, ...]:
        parts = {"mail": self.mail, "webhook": self.webhook}
        names = tuple(name for name, part in parts.items() if part is not None or name in self.problems)
        return (*names, OWN) if self.of_users else names

    def place(self, channel: str) -> str:
        """Name a channel's server for people, without credentials."""
        if channel == "mail" and self.mail is not None:
            return f"relay {self.mail.host}:{self.mail.port}"
        if channel == OWN:
            return "the user's webhook"
        if self.webhook is not None:
            return f"webhook {urlsplit(self.webhook.url).hostname}"
        return channel


def load(file: Path = FILE, secret: Path = SECRET) -> NotifySettings:
    try:
        data = json.loads(file.read_bytes()[:MOST])
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("read the settings of notifications", str(error), file=str(file)) from None
    if not isinstance(data, dict):
        raise ConfigError("read the settings of notifications", "wanted a JSON object", file=str(file))
    root = Reader(data, "the settings of notifications", str(file))
    root.only("cluster", "mail", "webhook", "ofUsers", "ca", "perUser", "total", "secret")
    if (name := root.text("secret")) and not any(_secret(secret, key) for key in ("user", "password", "url")):
        reason = f"the Secret {name} is missing or has none of the keys user, password and url"
        raise ConfigError("read the settings of notifications", reason, hint="create it in the cluster's namespace")
    mail = _mail(root.sub("mail"), secret) if root.has("mail") else None
    webhook, problems = None, {}
    try:
        webhook = _webhook(root.sub("webhook"), secret) if root.has("webhook") else None
    except ConfigError as error:
        if mail is None:
            raise
        problems["webhook"] = str(error)
    return NotifySettings(
        root.text("cluster"),
        mail,
        webhook,
        root.text("ca"),
        root.texts("ofUsers"),
        root.number("perUser", 20, least=1),
        root.number("total", 500, least=1),
        problems,
    )


def _mail(part: Reader, secret: Path) -> MailSettings:
    part.only("relay", "from", "domain", "domains")
    match = RELAY.fullmatch(part.text("relay"))
    if not match:
        part.fail("relay", f"found {part.text('relay')!r}", "smtp://HOST, starttls://HOST or smtps://HOST, with :PORT")
    sender = part.text("from")
    if not ADDRESS.fullmatch(sender):
        part.fail("from", f"found {sender!r}", "an address such as slurm@example.org")
    mode, host, port = match[1], match[2].strip("[]"), int(match[3] or PORTS[match[1]])
    user, password = _secret(secret, "user"), _secret(secret, "password")
    if user and mode == "smtp":
        part.fail("relay", "a password over smtp:// would be readable on the network", "starttls:// or smtps://")
    domain = part.text("domain") or sender.rpartition("@")[2]
    return MailSettings(mode, host, port, sender, domain, user, password, part.texts("domains"))


def _webhook(part: Reader, secret: Path) -> WebhookSettings:
    part.only("format")
    url = _secret(secret, "url")
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("https", "http") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_url = False
    if not is_url or not url.isascii() or not url.isprintable() or " " in url:
        part.fail("format", f"the Secret's key `url` in {secret} is no http(s) URL", "set it to the webhook's URL")
    return WebhookSettings(part.choice("format", WebhookFormat, WebhookFormat.JSON), url)


def _secret(directory: Path, name: str) -> str:
    try:
        return (directory / name).read_text()[:4096].strip()
    except (OSError, UnicodeDecodeError):
        return ""


# Users' own settings.

OWN_FILE = ".config/minivm/notify.toml"
FILTERS = (Path("/etc/slurm/cli_filter.lua"), Path("/run/slurm/conf/cli_filter.lua"))
OWN_SUBJECT = "your settings of notifications"
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


def read_allowed_for_users(files: tuple[Path, ...] = FILTERS) -> Allowed | None:
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


def load_own(path: Path, lists: Allowed) -> OwnSettings | None:
    """Read the calling user's file; None without one. Its file system may hang, which costs its own user alone."""
    data = _read(path)
    if data is None:
        return None
    try:
        values = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"read {OWN_SUBJECT}", f"it is no TOML: {safe(str(error), 200)}", file=str(path)) from None
    root = Reader(values, OWN_SUBJECT, str(path))
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
    return OwnSettings(
        events, mail, parse_webhook(root.sub("webhook"), lists.webhooks) if root.has("webhook") else None
    )


def _read(path: Path) -> bytes | None:
    try:
        # A FIFO must not block, and a terminal or a device is not read.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"read {OWN_SUBJECT}", error.strerror or "it cannot be opened", file=str(path)) from None
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise ConfigError(f"read {OWN_SUBJECT}", "it is no plain file", file=str(path))
        data = os.read(file, LARGEST + 1)
    except OSError as error:
        raise ConfigError(f"read {OWN_SUBJECT}", error.strerror or "it cannot be read", file=str(path)) from None
    finally:
        os.close(file)
    if len(data) > LARGEST:
        raise ConfigError(f"read {OWN_SUBJECT}", f"it is larger than {LARGEST >> 10} KiB", file=str(path))
    return data


def parse_webhook(part: Reader, prefixes: tuple[str, ...]) -> WebhookSettings:
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


def read_submitted_webhook(user: str, prefixes: tuple[str, ...], directory: Path = USERS) -> WebhookSettings | None:
    """Return the webhook that came with the user's last submission; None without a good one."""
    if not prefixes or not NAME.fullmatch(user):
        return None
    try:
        data = _read(directory / user)
        values = json.loads(data or b"")
        return parse_webhook(Reader(values, OWN_SUBJECT, user), prefixes) if isinstance(values, Mapping) else None
    except (ConfigError, ValueError, RecursionError):
        return None
