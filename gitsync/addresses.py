"""Which addresses a node may be given: to fetch from, to ask, to listen on. Pure."""

from __future__ import annotations

from urllib.parse import urlsplit

from gitsync.errors import GitsyncError


def check_url(url: str, *, token: bool) -> None:
    """No credentials in the address (it is in `ps`, logs, the repository's config), no transport that runs programs."""
    field = "MINIVM_GITSYNC_REPO"
    if url.startswith("-") or "::" in url.split("/")[0] or any(ord(letter) < 33 for letter in url):
        raise GitsyncError("read the settings", "no address of a repository", field=field)
    if "://" not in url:
        return  # a path, or ssh's host:path
    parts = urlsplit(url)
    if parts.scheme not in {"https", "http", "ssh", "git", "file"}:
        raise GitsyncError("read the settings", f"{parts.scheme}:// is not fetched from", field=field)
    if parts.password is not None or (parts.username is not None and parts.scheme in {"http", "https"}):
        raise GitsyncError(
            "read the settings",
            "the address holds a credential",
            field=field,
            hint="put it in the file MINIVM_GITSYNC_TOKEN_FILE names",
        )
    if token and parts.scheme == "http" and parts.hostname not in {"localhost", "127.0.0.1", "::1"}:
        raise GitsyncError("read the settings", "a token over http:// can be read on the way", field=field)


def check_ring(url: str) -> None:
    if urlsplit(url).scheme not in {"http", "https"} or not urlsplit(url).hostname:
        why = f"{url!r} is no http:// address"
        raise GitsyncError("read the settings", why, field="MINIVM_GITSYNC_RING_URL")


def split_address(address: str, field: str) -> tuple[str, int]:
    """Where to listen: `host:port`; a port alone means every address."""
    host, _, port = address.rpartition(":")
    if not port.isdigit() or not 0 <= int(port) < 65536:
        raise GitsyncError("read the settings", f"{address!r} is no host:port", field=field)
    return host.strip("[]") or "0.0.0.0", int(port)
