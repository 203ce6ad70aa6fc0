"""Secrets from their read-only mounts, installed with the owner and mode that each daemon requires."""

from __future__ import annotations

from init.errors import InitError
from init.pod.pod import MOUNTS, Pod, PrepareError, user, writable, write

SECRETS = f"{MOUNTS}/secrets"
# munged refuses shorter keys; longer ones are valid.
MUNGE_KEY_BYTES = range(32, 1025)
# What a pod tells sssd unless the site does, by section and name.
# pam_initgroups_scheme: by default sssd looks up the groups of a user who has no session yet, and reads the state of
# every process of the pod to know that, three times a session.
# fd_limit, client_idle_timeout: every user may connect to these services. By default 8,192 idle connections keep every
# login waiting, each for 60 s. sssd lowers fd_limit to what the pod may have.
SSSD_SETTINGS = {
    (b"nss", b"client_idle_timeout"): b"10",
    (b"nss", b"fd_limit"): b"65536",
    (b"pam", b"client_idle_timeout"): b"10",
    (b"pam", b"fd_limit"): b"65536",
    (b"pam", b"pam_initgroups_scheme"): b"always",
    (b"ssh", b"client_idle_timeout"): b"10",
    (b"ssh", b"fd_limit"): b"65536",
}
SNIPPETS = "/etc/sssd/conf.d"
SSSD_FILE = f"{SNIPPETS}/00-minivm.conf"


def munge(pod: Pod) -> str:
    mount = f"{SECRETS}/munge/munge.key"
    target = "/etc/munge/munge.key"
    data = _read(pod, mount)
    before = _read(pod, target)
    if data is None:
        if before is None:
            raise PrepareError("install the munge key", f"{mount} is missing", hint="mount the cluster's munge key")
        data = before  # mounted in place
    if len(data) not in MUNGE_KEY_BYTES:
        raise PrepareError(
            "install the munge key", f"{mount} has {len(data)} bytes, a key has {MUNGE_KEY_BYTES[0]} to 1024"
        )
    write(pod.path(target), data, mode=0o400, owner=user("munge"))
    return "munge key installed" if before in (None, data) else f"another munge key installed; {_prove_again()}"


def _prove_again() -> str:
    """Prove the new key, since only the previous one was proven."""
    from init.pod.client import control_socket  # imported late: a boot installs its first key
    from init.pod.helper import prove_again

    try:
        prove_again(control_socket())
    except (InitError, EOFError) as error:
        return f"the cluster was not asked to accept it: {error}"
    return "the cluster is asked to accept it"


def jwt(pod: Pod) -> str:
    data = _read(pod, f"{SECRETS}/slurm/jwt_hs256.key")
    if data is None:
        return "no JWT key"
    write(pod.path("/etc/slurm/jwt_hs256.key"), data, mode=0o400, owner=user("slurm"))
    return "JWT key installed"


def sssd(pod: Pod) -> str:
    """Install sssd.conf; sssd exits 3 on a file that other users can read."""
    mount = f"{SECRETS}/sssd/sssd.conf"
    data = _read(pod, mount)
    if data is None:
        raise PrepareError("install sssd.conf", f"{mount} is missing", hint="it was there when the pod started")
    write(pod.path("/etc/sssd/sssd.conf"), data, mode=0o600, owner=(0, 0))
    return f"sssd.conf installed{_add_settings(pod, data)}"


def _add_settings(pod: Pod, site: bytes) -> str:
    """Write SSSD_SETTINGS, without those that one of the site's files sets.

    Of two files sssd takes the last in the sort order of the pod's language, so this file's name decides nothing.
    """
    own_file = pod.path(SSSD_FILE)
    if not writable(own_file.parent):
        return f"; {own_file.parent} is read-only, and sssd has its own limits of connections"
    site_files = (path for path in own_file.parent.glob("[!.]*.conf") if path != own_file and path.is_file())
    texts = (site, *(_read(pod, f"{SNIPPETS}/{path.name}") or b"" for path in site_files))
    site_settings = set().union(*(settings(text) or () for text in texts))
    lines: list[bytes] = []
    for section in sorted({section for section, _ in SSSD_SETTINGS}):
        left = [
            (name, value)
            for (of, name), value in SSSD_SETTINGS.items()
            if of == section and (of, name) not in site_settings
        ]
        lines += [b"[%s]\n" % section] * bool(left) + [b"%s = %s\n" % pair for pair in left]
    write(own_file, b"".join(lines), mode=0o600, owner=(0, 0))
    return ""


def settings(text: bytes) -> set[tuple[bytes, bytes]] | None:
    """Return the (section, name) pairs of a file as sssd reads it; None for a file that sssd rejects as a whole."""
    pairs, section = set(), b""
    for line in (line.rstrip() for line in text.split(b"\n")):
        if not line or line[:1] in b"#;":
            continue
        if line[:1] == b"[":
            section = line[1:-1].strip().lower()
            if line[-1:] != b"]" or not section:
                return None
        else:
            name, equals, _ = line.partition(b"=")
            if not equals or not name.strip():
                return None
            pairs.add((section, name.strip().lower()))
    try:
        text.decode()
    except UnicodeDecodeError:
        return None
    return pairs


def _read(pod: Pod, mount: str) -> bytes | None:
    try:
        return pod.path(mount).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise PrepareError(f"read {mount}", error.strerror or str(error)) from error
