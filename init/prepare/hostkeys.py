"""SSH host keys: mounted ones are kept, or the pod creates its own once. The image has none for replicas to share."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ground.commands import ran
from init.pod.pod import MOUNTS, Pod, PrepareError, writable, write
from init.prepare.directories import ensure

# ed25519 and rsa serve every current client; an rsa key takes a second to create, so it is only ever mounted.
MADE = ("ed25519", "ecdsa")
CONFIG = "/run/minivm/sshd_config"
LANG = re.compile(r"[A-Za-z0-9._@-]+")
# The second of ssh's two global files: the first one is the site's.
KNOWN = "/etc/ssh/ssh_known_hosts2"


def run(pod: Pod) -> str:
    mounted = sorted(pod.path(f"{MOUNTS}/secrets/ssh").glob("ssh_host_*_key"))
    directory = pod.path("/etc/ssh")
    if not writable(directory):
        directory = pod.path("/run/minivm/ssh")
        ensure(directory, 0o755, 0, 0)
    keys = [_install(path, directory) for path in mounted]
    if not keys:
        keys = sorted(directory.glob("ssh_host_*_key")) or [_make(directory, kind) for kind in MADE]
        for key in keys:
            key.chmod(0o600)  # sshd ignores a key that other users can read
    # With the host's network, the machine's own sshd has port 22.
    port = pod.setting("MINIVM_SSH_PORT")
    lines = [f"Port {port}\n"] if port else []
    lines += [f"HostKey {key}\n" for key in keys] + ["Include /etc/ssh/sshd_config\n"]
    # A command without a login shell reads no profile. Last, so that a site's own SetEnv comes first and wins.
    language = pod.setting("LANG", "C.UTF-8")
    if LANG.fullmatch(language):
        lines.append(f"SetEnv LANG={language}\n")
    write(pod.path(CONFIG), "".join(lines).encode(), mode=0o600, owner=(0, 0))
    return f"{len(keys)} {'mounted' if mounted else 'own'} host keys in {directory}{_know(pod)}"


def _know(pod: Pod) -> str:
    """Let every ssh here know the cluster's own pods.

    A link, so that changes of the mounted file apply at once: another pool, another key, or a file mounted later.
    """
    known, link = pod.path(f"{MOUNTS}/config/ssh"), pod.path(KNOWN)
    if not known.is_dir():
        return ""
    if not writable(link.parent):
        return "; /etc/ssh is read-only, and ssh does not know the cluster's pods"
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(f"{MOUNTS}/config/ssh/known_hosts")
    temporary.rename(link)
    return "; known to ssh: the cluster's pods"


def _install(mounted: Path, directory: Path) -> Path:
    target = directory / mounted.name
    write(target, mounted.read_bytes(), mode=0o600, owner=(0, 0))
    public = mounted.with_name(f"{mounted.name}.pub")
    if public.exists():
        write(directory / public.name, public.read_bytes(), mode=0o644, owner=(0, 0))
    return target


def _make(directory: Path, kind: str) -> Path:
    target = directory / f"ssh_host_{kind}_key"
    done = ran(["/usr/bin/ssh-keygen", "-q", "-t", kind, "-N", "", "-C", "", "-f", str(target)])
    if done.returncode:
        raise PrepareError(f"use {target}", (done.stderr or done.stdout).strip())
    return target
