"""Settings of one node, read from MINIVM_GITSYNC_* only. Pure.

An unknown name is an error that suggests the nearest known one: a typo in `MINIVM_GITSYNC_ALLOWED_SIGNERS` must not
mean "verify nothing".
"""

from __future__ import annotations

import difflib
import enum
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from urllib.parse import urlsplit

from gitsync.errors import GitsyncError
from gitsync.layout import DEFAULT_ROOT, GENERATION_ZERO, Layout, is_commit

# At most so many digits that `int` is quick.
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


PREFIX = "MINIVM_GITSYNC_"
SECRETS = "/mnt/minivm/secrets/gitsync"
# Variables with the prefix that are no settings: a cycle sets CYCLE on its children.
NOT_SETTINGS = frozenset({"CYCLE"})
TREE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
REF_NAME = re.compile(r"(?!-)[A-Za-z0-9._/+@-]+")


class RefKind(enum.Enum):
    BRANCH = "branch"
    TAG = "tag"
    COMMIT = "commit"


@dataclass(frozen=True, slots=True)
class Ref:
    """A branch, tag or commit to follow."""

    kind: RefKind
    name: str

    def __str__(self) -> str:
        return f"{self.kind.value} {self.name}"

    @property
    def remote(self) -> str:
        """Full name of the ref on the server."""
        match self.kind:
            case RefKind.BRANCH:
                return f"refs/heads/{self.name}"
            case RefKind.TAG:
                return f"refs/tags/{self.name}"
            case RefKind.COMMIT:
                return self.name


def parse_ref(text: str) -> Ref:
    """Parse `main`, `branch:main`, `refs/heads/main`, `tag:v1`, `refs/tags/v1`, `commit:<hash>` or a whole hash."""
    for prefix, kind in (
        ("branch:", RefKind.BRANCH),
        ("refs/heads/", RefKind.BRANCH),
        ("tag:", RefKind.TAG),
        ("refs/tags/", RefKind.TAG),
        ("commit:", RefKind.COMMIT),
    ):
        if text.startswith(prefix):
            ref = Ref(kind, text.removeprefix(prefix))
            break
    else:
        ref = Ref(RefKind.COMMIT if is_commit(text) else RefKind.BRANCH, text)
    if ref.kind is RefKind.COMMIT and not is_commit(ref.name):
        raise ValueError("a commit needs its whole hash, 40 or 64 hex digits")
    if not REF_NAME.fullmatch(ref.name) or ".." in ref.name or ref.name.endswith((".lock", "/")) or "@{" in ref.name:
        raise ValueError(f"{ref.name!r} is not a name of a branch or tag")
    return ref


class Backward(enum.Enum):
    """Policy for a commit older than the published one: a force push, or a server that serves old commits."""

    REFUSE = "refuse"
    ALLOW = "allow"


@dataclass(frozen=True, slots=True)
class GitsyncSettings:
    """One field for each MINIVM_GITSYNC_<NAME>; docs/gitsync.md is the reference."""

    repo: str | None = None
    ref: Ref = Ref(RefKind.BRANCH, "main")
    name: str = "minivm-scripts"
    subdir: str = ""
    root: Path = Path(DEFAULT_ROOT)
    zero: Path = Path(GENERATION_ZERO)
    pod: str = "localhost"
    period: float = 60.0
    timeout: float = 60.0
    backoff_max: float = 900.0
    keep: int = 3
    keep_seconds: float = 3600.0
    ssh_key: Path = Path(SECRETS) / "ssh"
    known_hosts: Path = Path(SECRETS) / "known_hosts"
    token_file: Path = Path(SECRETS) / "token"
    token_user: str = "x-access-token"
    allowed_signers: Path = Path(SECRETS) / "allowed_signers"
    revoked_signers: Path | None = None
    verify: bool = True
    backward: Backward = Backward.REFUSE
    not_before: float | None = None
    paths: tuple[str, ...] = ("*",)
    max_bytes: int = 64 << 20
    max_file_bytes: int = 8 << 20
    max_files: int = 20_000
    max_transfer_bytes: int = 256 << 20
    check_command: tuple[str, ...] = ()
    check_timeout: float = 120.0
    canary_percent: float = 0.0
    ring_delay: float = 600.0
    ring_url: str | None = None
    ring_secret: Path | None = None
    webhook: str | None = None
    webhook_secret: Path | None = None
    mirror: str = "0.0.0.0:8651"
    metrics: Path = Path("/run/minivm/metrics.d/gitsync.prom")
    control: Path = Path("/run/minivm/control.sock")

    @property
    def layout(self) -> Layout:
        return Layout(self.root, self.zero)

    def policy(self) -> str:
        """Fingerprint the settings that decide whether a commit is good; a quarantine ends when it changes."""
        parts: list[object] = [
            self.subdir, self.verify, self.backward.value, self.paths, self.max_bytes, self.max_file_bytes,
            self.max_files, self.check_command, self.name, self.not_before,
        ]  # fmt: skip
        for path in (self.allowed_signers, self.revoked_signers):
            try:
                parts.append(None if path is None else path.read_text(errors="replace"))
            except OSError:
                parts.append(None)
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def from_environment(environ: Mapping[str, str]) -> GitsyncSettings:
    """Read settings from an environment. MINIVM_POD_NAME (or the host's name) places the node in rings and jitter."""
    values: dict[str, object] = {}
    fields_by_name = {field.name: field for field in fields(GitsyncSettings)}
    for variable, text in sorted(environ.items()):
        if not variable.startswith(PREFIX) or variable.removeprefix(PREFIX) in NOT_SETTINGS:
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name not in fields_by_name:
            close = difflib.get_close_matches(variable, [PREFIX + each.upper() for each in fields_by_name], n=1)
            hint = (
                f"did you mean {close[0]}?" if close else f"see docs/gitsync.md for the {len(fields_by_name)} settings"
            )
            raise GitsyncError("read the settings", "unknown setting", field=variable, hint=hint)
        # Kubernetes passes an unset optional variable as an empty one.
        if text == "":
            continue
        try:
            values[name] = PARSERS[str(fields_by_name[name].type)](text)
        except ValueError as error:
            raise GitsyncError("read the settings", str(error), field=variable) from None
    if "pod" not in values:
        values["pod"] = environ.get("MINIVM_POD_NAME") or environ.get("HOSTNAME") or "localhost"
    settings = GitsyncSettings(**values)  # type: ignore[arg-type]  # each value came from the parser of its field's type
    check(settings)
    return settings


def check(settings: GitsyncSettings) -> None:
    """Refuse values out of range, and fields that contradict each other."""
    if settings.repo is not None:
        check_url(settings.repo, token=settings.token_file.exists())
    if settings.ring_url is not None:
        check_ring(settings.ring_url)
    for address, name in ((settings.mirror, "MIRROR"), (settings.webhook, "WEBHOOK")):
        if address is not None:
            split_address(address, PREFIX + name)
    subdir = settings.subdir
    for name, is_wrong, reason in (
        ("PERIOD", settings.period <= 0, "wanted more than 0 seconds"),
        ("TIMEOUT", settings.timeout <= 0, "wanted more than 0 seconds"),
        ("CHECK_TIMEOUT", settings.check_timeout <= 0, "wanted more than 0 seconds"),
        ("SUBDIR", subdir.startswith("/") or ".." in subdir.split("/"),
         f"{subdir!r} is not a directory inside the repository"),
        ("NAME", not TREE_NAME.fullmatch(settings.name), "wanted up to 64 letters, digits, '.', '_' or '-'"),
        ("NOT_BEFORE", settings.not_before is not None and settings.backward is Backward.ALLOW,
         "it sets an oldest commit, and BACKWARD=allow permits any; remove one of them"),
        ("CANARY_PERCENT", not 0 <= settings.canary_percent <= 100, "wanted a percentage from 0 to 100"),
        ("WEBHOOK_SECRET", settings.webhook and not settings.webhook_secret,
         "a webhook without a secret lets anyone start cycles on this node; name a secret file"),
    ):  # fmt: skip
        if is_wrong:
            raise GitsyncError("read the settings", reason, field=PREFIX + name)


def _flag(text: str) -> bool:
    if text.lower() in {"1", "true", "yes", "on", "require"}:
        return True
    if text.lower() in {"0", "false", "no", "off", "none"}:
        return False
    raise ValueError(f"{text!r} is neither yes nor no")


def _path(text: str) -> Path:
    if not text.startswith("/"):
        raise ValueError(f"{text!r} is not an absolute path")
    return Path(text)


def _seconds(text: str) -> float:
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    number, unit = (text[:-1], units[text[-1]]) if text[-1] in units else (text, 1.0)
    try:
        value = float(number) * unit
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ValueError(f"{text!r} is not a duration (seconds, or 90s, 5m, 1h)")
    return value


def parse_date(text: str) -> float:
    """Parse `2026-01-31`, with or without a time, as seconds since the epoch; UTC unless it names a zone."""
    import datetime  # imported late: few nodes set a date

    try:
        date = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text[:40]!r} is not a date such as 2026-01-31 or 2026-01-31T12:00:00Z") from None
    return (date if date.tzinfo else date.replace(tzinfo=datetime.UTC)).timestamp()


def _count(text: str) -> int:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    number, unit = (text[:-1], units[text[-1]]) if text[-1] in units else (text, 1)
    if not number.isascii() or not number.isdigit():
        raise ValueError(f"{text!r} is not a count (a whole number, or 64M)")
    return int(number) * unit


def _words(text: str) -> tuple[str, ...]:
    """Split words at spaces or commas; a JSON list allows words that hold a space."""
    if not text.startswith("["):
        return tuple(text.replace(",", " ").split())
    try:
        words = json.loads(text)
    except ValueError as error:
        raise ValueError(f"it begins with [ but is not JSON: {error}") from None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError("not a JSON list of strings")
    return tuple(words)


def _backward(text: str) -> Backward:
    try:
        return Backward(text)
    except ValueError:
        raise ValueError(f"{text!r} is neither refuse nor allow") from None


PARSERS: Mapping[str, Callable[[str], object]] = {
    "str": str,
    "str | None": str,
    "Path": _path,
    "Path | None": _path,
    "float": _seconds,
    "float | None": parse_date,
    "int": _count,
    "bool": _flag,
    "Ref": parse_ref,
    "Backward": _backward,
    "tuple[str, ...]": _words,
}
