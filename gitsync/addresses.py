"""Validate the addresses in a node's settings: the repository, the ring, and where to listen. Pure."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from gitsync.errors import GitsyncError

# So few that `int` takes them at once.
DIGITS = re.compile(r"[0-9]{1,12}")


def check_url(url: str, *, token: bool) -> None:
    """Refuse a repository address that holds a credential or selects a transport that runs programs.

    The address appears in `ps`, in logs and in the repository's configuration.
    """
    field = "MINIVM_GITSYNC_REPO"
    if url.startswith("-") or "::" in url.split("/", maxsplit=1)[0] or any(ord(letter) < 33 for letter in url):
        raise GitsyncError("read the settings", f"{url!r} is not a repository address", field=field)
    if "://" not in url:
        return  # a path, or ssh's host:path
    parts = urlsplit(url)
    if parts.scheme not in {"https", "http", "ssh", "git", "file"}:
        raise GitsyncError("read the settings", f"{parts.scheme}:// is not a supported transport", field=field)
    if parts.password is not None or (parts.username is not None and parts.scheme in {"http", "https"}):
        raise GitsyncError(
            "read the settings",
            "the address holds a credential",
            field=field,
            hint="put it in the file MINIVM_GITSYNC_TOKEN_FILE names",
        )
    if token and parts.scheme == "http" and parts.hostname not in {"localhost", "127.0.0.1", "::1"}:
        raise GitsyncError(
            "read the settings", "a token over http:// is readable on the network", field=field, hint="use https://"
        )


def check_ring(url: str) -> None:
    """Refuse a ring address that is not an http or https URL."""
    if urlsplit(url).scheme not in {"http", "https"} or not urlsplit(url).hostname:
        reason = f"{url!r} is not an http:// address"
        raise GitsyncError("read the settings", reason, field="MINIVM_GITSYNC_RING_URL")


def content_length(text: str, most: int) -> int | None:
    """Parse the header Content-Length; None where it is no number of at most `most`.

    `str.isdigit` takes signs such as a superscript two, which `int` refuses.
    """
    length = int(text) if DIGITS.fullmatch(text) else most + 1
    return length if length <= most else None


def split_address(address: str, field: str) -> tuple[str, int]:
    """Parse `host:port` to listen on; a port alone means every address."""
    host, _, port = address.rpartition(":")
    if not DIGITS.fullmatch(port) or not 0 <= int(port) < 65536:
        raise GitsyncError("read the settings", f"{address!r} is not host:port", field=field)
    return host.strip("[]") or "0.0.0.0", int(port)
