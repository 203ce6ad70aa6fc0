"""SSH in a pod: host keys, mounted or created once since the image has none, and the rules of access to a worker."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from ground.commands import ran
from init.pod.pod import MOUNTS, Pod, PrepareError, writable, write
from init.prepare.boot import ensure
from init.slurm.conf import setting

# ed25519 and rsa serve every current client; an rsa key takes a second to create, so it is only ever mounted.
MADE = ("ed25519", "ecdsa")
CONFIG = "/run/minivm/sshd_config"
# The groups of a login pool, as the chart mounts them.
ALLOWED = "/etc/ssh/sshd_config.d/10-allowed-groups.conf"
LANG = re.compile(r"[A-Za-z0-9._@-]+")
# The second of ssh's two global files: the first one is the site's.
KNOWN = "/etc/ssh/ssh_known_hosts2"
_KEYWORDS = re.compile(r"^[ \t]*(allowgroups|include)(?:[ \t]*=[ \t]*|[ \t]+)(.*)$", re.IGNORECASE | re.MULTILINE)
_VALUES = re.compile(r'"([^"]*)"|([^\s"#]+)')


def hostkeys(pod: Pod) -> str:
    mounted = sorted(pod.path(f"{MOUNTS}/secrets/ssh").glob("ssh_host_*_key"))
    directory = pod.path("/etc/ssh")
    if not writable(directory):
        directory = pod.path("/run/minivm/ssh")
        ensure(directory, 0o755, 0, 0)
    keys = [_install(path, directory) for path in mounted]
    if not keys:
        keys = sorted(directory.glob("ssh_host_*_key")) or [_make(directory, kind) for kind in MADE]
        for key in keys:
            if key.stat().st_mode & 0o077:  # one that is mounted in place cannot be changed
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
    if (allowed := pod.text(ALLOWED)) is not None:
        done = ran(["/usr/sbin/sshd", "-T", "-f", CONFIG])
        if done.returncode == 0:  # else sshd does not start either, and names the line
            check_allowed_groups(allowed, done.stdout, allow_groups(pod, pod.path("/etc/ssh/sshd_config")))
    return f"{len(keys)} {'mounted' if mounted else 'own'} host keys in {directory}{_know(pod)}"


def check_allowed_groups(mounted: str, effective: str, named: Iterable[str] = ()) -> None:
    """Compare the mounted AllowGroups with `sshd -T`, since sshd adds up the AllowGroups of all its files.

    `named`: the groups of every AllowGroups line. `sshd -T` leaves out Match blocks, whose AllowGroups replace the
    others for whom they match.
    """
    wanted = set(mounted.split('"')[1::2])
    takes = {line.partition(" ")[2] for line in effective.splitlines() if line.startswith("allowgroups ")}
    if takes != wanted or (takes := takes | set(named)) != wanted:
        raise PrepareError(
            f"let only {', '.join(sorted(wanted))} log in",
            f"with the image's own files sshd lets in {', '.join(sorted(takes)) or 'everybody'}",
            hint="leave AllowGroups out of the image's sshd_config and sshd_config.d, and keep its Include of them",
        )


def allow_groups(pod: Pod, file: Path, depth: int = 16) -> set[str]:
    """Return the groups of all AllowGroups lines, in Match blocks too, of a file of sshd and those that it includes."""
    groups: set[str] = set()
    for name, rest in _KEYWORDS.findall(file.read_text(errors="replace") if file.is_file() else ""):
        values = [quoted or plain for quoted, plain in _VALUES.findall(rest)]
        if name.lower() == "allowgroups":
            groups.update(values)
        elif depth:
            included = (path for value in values for path in pod.root.glob(str(Path("/etc/ssh", value)).lstrip("/")))
            groups.update(*(allow_groups(pod, path, depth - 1) for path in included))
    return groups


def _know(pod: Pod) -> str:
    """Let every ssh here know the cluster's own pods.

    A link, so that changes of the mounted file apply at once: another pool, another key, or a file mounted later.
    """
    mounted, link = pod.path(f"{MOUNTS}/config/ssh"), pod.path(KNOWN)
    if not mounted.is_dir():
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


# Access rules for ssh to a worker: users with a job there, adopted into it if cgroups contain jobs.
#
# pam_slurm_adopt finds a job by its cgroup; without cgroups it finds none and denies every user. pam_slurm asks
# slurmctld, but looks for the node in slurm.conf, which has no dynamic nodes, and denies every user too. So then the
# image's own query of slurmctld takes their place.


FETCHED = "/run/slurm/conf/slurm.conf"
FILE = "/etc/pam.d/slurm-adopt"
HAS_JOB = "/usr/libexec/minivm/has-job"
# Errors must deny: by default the module returns "ignore", and no other module allows or denies.
ADOPT = "pam_slurm_adopt.so action_no_jobs=deny action_generic_failure=deny"
HEAD = "# Written at boot by minivm from ProctrackType and PrologFlags of slurm.conf.\n"


def adopt(pod: Pod) -> str:
    text = pod.text(FETCHED)
    if text is None:
        raise PrepareError("choose the PAM module of ssh", f"{FETCHED} is missing: slurmd has not fetched it")
    have = {path.name for path in pod.path("/usr/lib").glob("*/security/pam_slurm*.so")}
    asks = f"{HAS_JOB} {pod.name}" if pod.has(HAS_JOB) else ""
    line, reason = choose(setting(text, "ProctrackType"), setting(text, "PrologFlags"), have, asks)
    write(pod.path(FILE), f"{HEAD}{line}\n".encode(), mode=0o644, owner=(0, 0))
    return reason


def choose(proctrack: str, prolog_flags: str, have: set[str], asks: str = "") -> tuple[str, str]:
    contained = "cgroup" in proctrack.lower() and "contain" in prolog_flags.lower()
    if contained and "pam_slurm_adopt.so" in have:
        return f"account required {ADOPT}", "ssh needs a job here and is adopted into it"
    reason = "jobs are not contained in cgroups" if not contained else "the image has no pam_slurm_adopt"
    if asks:
        return (
            f"account required pam_exec.so quiet stdout {asks}",
            f"ssh needs a job here, not adopted into it: {reason}",
        )
    if "pam_slurm.so" in have:
        return "account required pam_slurm.so", f"ssh needs a job here, and is not adopted into it: {reason}"
    return "account required pam_permit.so", f"ssh is open to every user: {reason}"
