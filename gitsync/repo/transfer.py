"""Fetch from the git server: the only step that uses the network, always in a short-lived child.

No remote is configured and no credential is an argument. Settings name an ssh key and a token by path; ssh and git's
credential helper read them at each use, so a rotated secret works at the next fetch.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from gitsync.errors import GitsyncError, TooLarge
from gitsync.layout import UNFINISHED, is_commit
from gitsync.repo import child
from gitsync.repo.child import HeldLock
from gitsync.settings import GitsyncSettings, Ref, RefKind

# The ref of the last fetch. Every other ref under refs/minivm/ keeps a tree's objects.
FETCHED = "refs/minivm/fetched"
KEPT = "refs/minivm/kept/"
# git's shell runs this text, which holds no setting. The file's first line is the token; `read` and `printf` are
# built-ins, so the token appears in no process's arguments.
TOKEN_HELPER = (
    '!f() { test "$1" = get || exit 0; IFS= read -r t <"$MINIVM_TOKEN_FILE" || test -n "$t" || exit 1; '
    'printf "username=%s\\npassword=%s\\n" "$MINIVM_TOKEN_USER" "$t"; }; f'
)
OPTIONS = (
    "protocol.version=2", "gc.auto=0", "maintenance.auto=false", "core.hooksPath=/dev/null", "core.fsync=all",
    "core.logAllRefUpdates=false", "fetch.fsckObjects=true", "fetch.unpackLimit=100", "submodule.recurse=false",
    "http.followRedirects=false", "http.lowSpeedLimit=100", "http.lowSpeedTime=20", "credential.helper=",
    "core.askPass=", "safe.bareRepository=all",
)  # fmt: skip

# Lines that git prints after every failure of ssh; they explain nothing.
BOILERPLATE = (
    "fatal: Could not read from remote repository", "Please make sure you have the correct access rights",
    "and the repository exists",
)  # fmt: skip


def git(repository: Path, *arguments: str, options: tuple[str, ...] = ()) -> list[str]:
    argv = ["git", f"--git-dir={repository}"]
    for option in (*OPTIONS, *options):
        argv += ["-c", option]
    return [*argv, *arguments]


def local(repository: Path, *arguments: str, lock: HeldLock | None = None, within: float = 30) -> child.Done:
    """Run git on the local repository; pass the lock to a command that writes."""
    return child.run(git(repository, *arguments), timeout=within, keep_open=(lock.fd,) if lock else ())


def ensure_repository(repository: Path) -> None:
    """Make the bare repository if it is missing, beside its place and renamed, so that it is complete or absent."""
    if (repository / "HEAD").is_file():
        return
    if repository.exists():
        shutil.rmtree(repository)
    temporary = repository.with_name(f"{UNFINISHED}{repository.name}-{os.getpid()}")
    done = child.run(["git", "init", "--quiet", "--bare", "--template=", temporary], timeout=30)
    if done.status != 0:
        raise GitsyncError("make the repository", done.err or f"git ended with {done.status}", file=repository)
    temporary.rename(repository)


@contextmanager
def credentials(settings: GitsyncSettings) -> Iterator[tuple[dict[str, str], tuple[str, ...]]]:
    """Provide the environment and options with which git's transports authenticate."""
    url = settings.repo or ""
    if url.startswith(("http://", "https://")) and settings.token_file.exists():
        env = {"MINIVM_TOKEN_FILE": str(settings.token_file), "MINIVM_TOKEN_USER": settings.token_user}
        yield env, (f"credential.helper={TOKEN_HELPER}",)
    elif "://" in url and not url.startswith("ssh://"):
        yield {}, ()
    else:
        with private_key(settings.ssh_key) as key:
            yield {"GIT_SSH_COMMAND": ssh_command(settings, key), "GIT_SSH_VARIANT": "ssh"}, ()


def ssh_command(settings: GitsyncSettings, key: str | None) -> str:
    """Build an ssh command that never prompts, trusts only the given known_hosts, and gives up on a dead connection."""
    words = ["ssh", "-F", os.devnull, "-T"]
    for option in (
        "BatchMode=yes", "StrictHostKeyChecking=yes", f"UserKnownHostsFile={settings.known_hosts}",
        "GlobalKnownHostsFile=/dev/null", "UpdateHostKeys=no", "IdentitiesOnly=yes", "IdentityAgent=none",
        "ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=3", "ForwardAgent=no",
    ):  # fmt: skip
        words += ["-o", option]
    if key is not None:
        words += ["-i", key]
    return shlex.join(words)


@contextmanager
def private_key(path: Path) -> Iterator[str | None]:
    """Provide a path of the key that ssh accepts.

    ssh refuses a key that a group may read, and Kubernetes mounts secrets so under fsGroup: such a key is copied to
    memory that only root can read, never to a disk.
    """
    if not path.exists():
        yield None
        return
    if not path.stat().st_mode & 0o077:
        yield str(path)
        return
    fd = os.memfd_create("gitsync-key", os.MFD_CLOEXEC)
    try:
        os.fchmod(fd, 0o600)
        os.write(fd, path.read_bytes())
        yield f"/proc/{os.getpid()}/fd/{fd}"
    finally:
        os.close(fd)


def address(url: str) -> str:
    """Turn a path into a file:// address: with a bare path git copies whole packs and ignores the depth."""
    return f"file://{url}" if url.startswith("/") else url


def _run(settings: GitsyncSettings, lock: HeldLock, *arguments: str) -> child.Done:
    with credentials(settings) as (extra, options):
        return child.run(
            git(settings.layout.repository, *arguments, options=options),
            timeout=settings.timeout,
            env=extra,
            keep_open=(lock.fd,),
            largest_file=settings.max_transfer_bytes,
        )


def fetch(settings: GitsyncSettings, ref: Ref, lock: HeldLock) -> None:
    """Fetch the ref's newest commit, without its history, to `FETCHED`. Atomic: git moves the ref last."""
    assert settings.repo is not None
    repository = settings.layout.repository
    if ref.kind is RefKind.COMMIT and local(repository, "cat-file", "-e", f"{ref.name}^{{tree}}").status == 0:
        set_ref(repository, FETCHED, ref.name, lock)
        return
    done = _run(
        settings, lock, "fetch", "--quiet", "--force", "--no-tags", "--no-write-fetch-head", "--no-recurse-submodules",
        "--depth=1", "--", address(settings.repo), f"+{ref.remote}:{FETCHED}",
    )  # fmt: skip
    if done.status == 0:
        return
    if f"signal {int(signal.SIGXFSZ)}" in done.err or done.status == -signal.SIGXFSZ or "File too large" in done.err:
        raise TooLarge("fetch", f"the transfer is larger than {settings.max_transfer_bytes} bytes")
    raise GitsyncError(f"fetch {ref}", _reason(done), hint=_hint(done.err))


def read_remote_oid(settings: GitsyncSettings, ref: Ref, lock: HeldLock) -> str:
    """Ask the server what the ref points to, without a transfer."""
    if ref.kind is RefKind.COMMIT:
        return ref.name
    done = _run(settings, lock, "ls-remote", "--refs", "--", address(settings.repo or ""), ref.remote)
    if done.status != 0:
        raise GitsyncError(f"ask for {ref}", _reason(done), hint=_hint(done.err))
    return done.out.decode(errors="replace").split("\t")[0]


def _reason(done: child.Done) -> str:
    """Return git's last three lines that explain the failure."""
    lines = [line.strip() for line in done.err.splitlines() if line.strip()]
    useful = [line for line in lines if not line.startswith(("@", *BOILERPLATE))]
    return "; ".join((useful or lines)[-3:]) or f"git ended with {done.status}"


def _hint(err: str) -> str | None:
    for sign, hint in (
        ("Host key verification failed", "add the server's key to MINIVM_GITSYNC_KNOWN_HOSTS"),
        ("Permission denied (publickey", "the server rejects the key in MINIVM_GITSYNC_SSH_KEY"),
        ("could not read Username", "the server wants a token: set MINIVM_GITSYNC_TOKEN_FILE"),
        ("Authentication failed", "the server rejects the token in MINIVM_GITSYNC_TOKEN_FILE"),
        ("couldn't find remote ref", "correct MINIVM_GITSYNC_REF"),
    ):
        if sign in err:
            return hint
    return None


def read_fetched_oid(repository: Path) -> str:
    """Return what the last fetch brought, read from the ref's file without a git process; empty if unknown."""
    try:
        text = (repository / FETCHED).read_text().strip()
    except OSError:
        return ""
    return text if is_commit(text) else ""


def set_ref(repository: Path, name: str, oid: str, lock: HeldLock) -> None:
    """Set a ref under refs/minivm/; an empty oid removes it."""
    done = local(repository, "update-ref", *([name, oid] if oid else ["-d", name]), lock=lock)
    if done.status != 0:
        raise GitsyncError(f"move {name}", _reason(done), file=repository)


def drop_kept(repository: Path, commits: Collection[str], lock: HeldLock) -> None:
    """Drop the refs that keep the objects of any other commits."""
    listed = local(repository, "for-each-ref", "--format=%(refname)", KEPT)
    for name in listed.out.decode(errors="replace").split():
        if name.removeprefix(KEPT) not in commits:
            set_ref(repository, name, "", lock)


def tidy(settings: GitsyncSettings, lock: HeldLock) -> bool:
    """Pack loose objects and drop what no kept tree needs, once there are many; return whether git gc ran."""
    repository = settings.layout.repository
    counted = local(repository, "count-objects", "-v")
    numbers = dict(line.split(": ", 1) for line in counted.out.decode().splitlines() if ": " in line)
    if int(numbers.get("count", 0)) < 2000 and int(numbers.get("packs", 0)) < 20:
        return False
    done = local(repository, "gc", "--quiet", "--prune=now", lock=lock, within=max(settings.timeout, 120))
    if done.status != 0:
        raise GitsyncError("tidy the repository", _reason(done), file=repository)
    return True
