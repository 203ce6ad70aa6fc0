"""Whom a remedy calls: an address that stands in the policy, and nowhere else."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import SplitResult, urlsplit

from init.fields import Reader

PORTS = {"https": 443, "http": 80}
# Of a key of a Secret, as it is mounted: whoever writes the policy must not have another file sent, Slurm's key first.
_FILE = re.compile(r"(?!\.\.)[A-Za-z0-9._-]{1,253}")
_URL = re.compile(r"[!-~]{1,2048}")  # printable, no blank: as it goes over the wire


@dataclass(frozen=True, slots=True)
class Webhook:
    url: str
    # Of the mounted Secret: a token, and the authority that signs the receiver's certificate; "": none, the system's.
    token: str = ""
    ca: str = ""

    @property
    def parts(self) -> SplitResult:
        return urlsplit(self.url)

    @property
    def host(self) -> str:
        return self.parts.hostname or ""

    @property
    def port(self) -> int:
        return self.parts.port or PORTS[self.parts.scheme]

    @property
    def where(self) -> str:
        """For people: a path and a query may hold what is secret."""
        return f"{self.host}:{self.port}"


def webhook(reader: Reader) -> Webhook:
    reader.only("url", "tokenFile", "caFile", "insecure")
    url, insecure = reader.text("url"), reader.flag("insecure", False)
    try:
        parts = urlsplit(url) if _URL.fullmatch(url) else SplitResult("", "", "", "", "")
        port = parts.port  # read for what it refuses
    except ValueError:
        parts, port = SplitResult("", "", "", "", ""), None
    if parts.scheme not in PORTS or not parts.hostname or port == 0:
        reader.fail("url", "wanted https://HOST[:PORT]/PATH of printable ASCII, 2,048 letters at most")
    if parts.username is not None or parts.fragment or "\\" in url:
        reader.fail("url", "a name, a password, a fragment or a backslash stands in it", "a token goes into tokenFile")
    if parts.scheme == "http" and not insecure and not loopback(parts.hostname):
        reader.fail("url", "http tells everybody on the way, also the token", "https, or insecure: true")
    return Webhook(url, _file(reader, "tokenFile"), _file(reader, "caFile"))


def loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _file(reader: Reader, key: str) -> str:
    name = reader.text(key)
    if name and not _FILE.fullmatch(name):
        reader.fail(key, f"{name[:80]!r} is no key of the Secret with the webhook's files", "a name, and no path")
    return name
