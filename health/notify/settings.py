"""Settings of notifications: notify.json of the chart, and the mounted Secret."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

from health.notify.notices import ADDRESS
from init.errors import ConfigError
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
