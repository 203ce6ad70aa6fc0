"""Secrets from their read-only mounts, installed with the owner and mode that each daemon requires."""

from __future__ import annotations

from typing import NoReturn

from init.errors import InitError
from init.pod.auth import KEYS
from init.pod.pod import MOUNTS, Pod, PrepareError, user, writable, write

SECRETS = f"{MOUNTS}/secrets"
# munged refuses shorter keys; longer ones are valid.
MUNGE_KEY_BYTES = range(32, 1025)
SLURM_KEY, SLURM_JWKS = "slurm.key", "slurm.jwks"
SLURM_KEY_BYTES = range(32, 4097)
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
SSSD_CONF = "/etc/sssd/sssd.conf"
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
    from init.pod.client import (
        control_socket,  # imported late: a boot installs its first key
        prove_again,
    )

    try:
        prove_again(control_socket())
    except (InitError, EOFError) as error:
        return f"the cluster was not asked to accept it: {error}"
    return "the cluster is asked to accept it"


def slurm_key(pod: Pod) -> str:
    """Install slurm.key, and slurm.jwks where it is mounted: Slurm then reads that alone (auth/slurm)."""
    mounted = {name: _first(pod, name) for name in (SLURM_KEY, SLURM_JWKS)}
    if not any(mounted.values()) and "MINIVM_UNDER" in pod.env and pod.has(KEYS["SLURM_SACK_KEY"]):
        pod.publish("auth", KEYS)
        return f"{KEYS['SLURM_SACK_KEY']} is mounted in place"
    if not any(mounted.values()):
        problem = f"{SECRETS}/slurm-key has neither {SLURM_KEY} nor {SLURM_JWKS}"
        raise PrepareError("install Slurm's key", problem, hint="mount the cluster's slurm.key")
    key, jwks = mounted[SLURM_KEY], mounted[SLURM_JWKS]
    if jwks:
        check_jwks(jwks)
    elif key and len(key) not in SLURM_KEY_BYTES:
        raise PrepareError("install Slurm's key", f"{SLURM_KEY} has {len(key)} bytes, a key has 32 to 4096")
    changed = False
    for name, data in mounted.items():
        target = pod.path(f"/etc/slurm/{name}")
        before = _read(pod, f"/etc/slurm/{name}")
        if data:
            write(target, data, mode=0o400, owner=user("slurm"))
        elif before is not None:
            target.unlink()
        changed = changed or (before or b"") != (data or b"")
    # Without a word they look beside their slurm.conf, which is not here once slurmctld has sent them another one.
    pod.publish("auth", KEYS)
    names = " and ".join(name for name, data in mounted.items() if data)
    return f"{names} installed" + ("; `scontrol reconfigure` makes the daemons read it" if changed else "")


def check_jwks(data: bytes) -> None:
    """Refuse a slurm.jwks that Slurm's daemons end on."""
    import json

    def refuse(why: str) -> NoReturn:
        raise PrepareError("install Slurm's keys", f"{SLURM_JWKS}: {why}", hint="docs/how-to/change-authentication.md")

    try:
        keys = json.loads(data)["keys"]
    except (ValueError, TypeError, KeyError, RecursionError):
        refuse('not JSON, or it has no list "keys"')
    if not isinstance(keys, list) or not keys or not all(isinstance(key, dict) for key in keys):
        refuse('"keys" is not a list of keys')
    names = [key.get("kid") for key in keys]
    if not all(isinstance(name, str) and name for name in names) or len({*names}) < len(names):
        refuse('each key needs a "kid" of its own')
    for key in keys:
        if str(key.get("kty")).lower() != "oct" or str(key.get("alg")).upper() != "HS256":
            refuse(f'key {key["kid"]} needs "kty": "oct" and "alg": "HS256"')
        if len(_decode(key.get("k"))) not in SLURM_KEY_BYTES:
            refuse(f'"k" of key {key["kid"]} is not 32 to 4096 bytes in base64')
        if not isinstance(key.get("exp", 0), int):
            refuse(f'"exp" of key {key["kid"]} is no number of seconds')
    if sum(str(key.get("use")).lower() == "default" for key in keys) > 1:
        refuse("more than one key is the default")


def _decode(text: object) -> bytes:
    import base64

    try:
        plain = str(text).replace("-", "+").replace("_", "/").rstrip("=")
        return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except ValueError:
        return b""


def _first(pod: Pod, name: str) -> bytes | None:
    """Read one of the two mounts: a Secret that the cluster made is mounted in parts."""
    for mount in ("slurm-key", "slurm-jwks"):
        data = _read(pod, f"{SECRETS}/{mount}/{name}")
        if data is not None:
            return data
    return None


def jwt(pod: Pod) -> str:
    data = _read(pod, f"{SECRETS}/slurm/jwt_hs256.key")
    if data is None:
        return "no JWT key"
    write(pod.path("/etc/slurm/jwt_hs256.key"), data, mode=0o400, owner=user("slurm"))
    return "JWT key installed"


def sssd(pod: Pod) -> str:
    """Install sssd.conf; sssd exits 3 on a file that other users can read."""
    mount = pod.setting("MINIVM_SSSD_CONF", f"{SECRETS}/sssd/sssd.conf")
    data = _read(pod, mount)
    if data is None:
        raise PrepareError("install sssd.conf", f"{mount} is missing", hint="it was there when the pod started")
    if mount != SSSD_CONF:
        write(pod.path(SSSD_CONF), data, mode=0o600, owner=(0, 0))
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
