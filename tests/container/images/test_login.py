"""Programs and settings of a login machine for its users."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from shlex import quote

import pytest
from testinfra.host import Host  # type: ignore[import-untyped]  # ships no types

from init.prepare.secrets import settings
from tests.container.conftest import docker, image_of
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]


@pytest.fixture
def login(idle: Callable[[str], Host]) -> Host:
    return idle("login")


SNIPPETS = {
    "whole.conf": "[pam]\nname = 1\n", "blanks.conf": "[ pam ]\n  name=1",
    "notes.conf": "# [\n; ]\n\n[pam]\r\nname = 1\r\n",
    "outside.conf": "name = 1\n", "word.conf": "[pam]\nword\n", "nameless.conf": "[pam]\n = 1\n",
    "open.conf": "[pam\nname = 1\n", "more.conf": "[pam] x\n", "unnamed.conf": "[]\nname = 1\n",
    "indented.conf": " [pam]\nname = 1\n", "latin.conf": "[pam]\nname = \xff\n", ".hidden.conf": "[pam]\nname = 1\n",
    "old.conf.bak": "[pam]\nname = 1\n", "upper.CONF": "[pam]\nname = 1\n",
}  # fmt: skip


def test_what_counts_of_a_site_s_words_to_sssd_is_what_sssd_reads(login: Host) -> None:
    """Its own setting gives way to the site's, and to nothing that sssd passes over."""
    login.check_output("mkdir -p /tmp/sssd/conf.d && install -m 600 /dev/null /tmp/sssd/sssd.conf")
    login.check_output("printf '[sssd]\\nservices = pam\\n[domain/x]\\nid_provider = ldap\\n' > /tmp/sssd/sssd.conf")
    for name, text in SNIPPETS.items():
        shown = "".join(f"\\{byte:03o}" for byte in text.encode("latin-1"))
        login.check_output(f"umask 077; printf '{shown}' > /tmp/sssd/conf.d/{name}")
    said = login.run("sssctl config-check --config=/tmp/sssd/sssd.conf --snippet=/tmp/sssd/conf.d").stdout
    used = {line.rpartition("/")[2] for line in said.partition("Used configuration snippet files")[2].splitlines()[1:]}
    ours = {name for name, text in SNIPPETS.items() if settings(text.encode("latin-1")) is not None}
    assert used - {""} == {name for name in ours if fnmatchcase(name, "[!.]*.conf")}


def effective(host: Host) -> dict[str, list[str]]:
    """sshd's settings as it understands them, with a throw-away host key."""
    host.check_output(
        "mkdir -p /run/sshd /tmp/keys && rm -f /tmp/keys/* && ssh-keygen -q -t ed25519 -N '' -f /tmp/keys/key"
    )
    settings: dict[str, list[str]] = {}
    for line in host.check_output("/usr/sbin/sshd -T -h /tmp/keys/key").splitlines():
        name, _, value = line.partition(" ")
        settings.setdefault(name, []).append(value)
    return settings


@pytest.mark.parametrize("page", ["sbatch", "slurm.conf", "bash", "git-rebase", "printf.1", "ssh"])
def test_man_pages_can_be_read(login: Host, page: str) -> None:
    text = login.check_output(f"MANPAGER=cat MANWIDTH=80 man {page}")
    assert "NAME" in text and "DESCRIPTION" in text and len(text) > 1000


@pytest.mark.parametrize(
    "program",
    ["screen --version", "cmake --version", "ctest --version", "gdb --version", "git lfs version", "zsh --version",
     "xauth version"],
)  # fmt: skip
def test_what_only_a_login_machine_has_runs(login: Host, program: str) -> None:
    login.check_output(program)


def test_completion_knows_slurms_commands(login: Host) -> None:
    script = ". /usr/share/bash-completion/bash_completion; _comp_load sbatch; complete -p sbatch"
    assert "sbatch" in login.check_output(f"bash -c {quote(script)}")


@pytest.mark.parametrize("program", ["minivm", "gitsync"])
def test_completion_knows_our_own_commands(login: Host, program: str) -> None:
    script = (
        f". /usr/share/bash-completion/bash_completion; _comp_load {program};"
        f" COMP_WORDS=({program} ''); COMP_CWORD=1; _{program}_completion {program};"
        " printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    assert "status" in login.check_output(f"bash -c {quote(script)}").split()


def test_sshd_takes_keys_only_and_asks_the_directory(login: Host) -> None:
    settings = effective(login)
    for name in ("passwordauthentication", "kbdinteractiveauthentication", "permitrootlogin", "permitemptypasswords"):
        assert settings[name] == ["no"], name
    # The directory's keys first, then those of the home, which sshd itself must not touch: it may hang.
    assert settings["authorizedkeyscommand"] == ["/usr/libexec/minivm/authorized-keys %u %h %t %k"]
    assert settings["authorizedkeysfile"] == ["none"]
    assert b"sss_ssh_authorizedkeys" in login.file("/usr/libexec/minivm/authorized-keys").content
    assert settings["usepam"] == ["yes"] and settings["x11forwarding"] == ["no"]


def test_a_whole_class_may_log_in_at_once_from_one_address(login: Host) -> None:
    settings = effective(login)
    assert int(settings["maxstartups"][0].split(":")[0]) >= 200
    assert settings.get("persourcepenalties") == ["no"] and int(settings["persourcemaxstartups"][0]) >= 200


def test_sshd_offers_no_algorithm_that_is_being_left_behind(login: Host) -> None:
    settings = effective(login)
    offered = ",".join(
        settings[name][0] for name in ("kexalgorithms", "macs", "hostkeyalgorithms", "pubkeyacceptedalgorithms")
    ).split(",")
    assert len(offered) > 8 and "curve25519-sha256" in offered and "ssh-ed25519" in offered
    weak = ("nistp", "sha1", "umac-64", "md5", "group1-", "group14", "ssh-rsa", "ssh-dss")
    assert [name for name in offered if any(part in name for part in weak) and not name.startswith("rsa-sha2")] == []
    assert all("-etm@" in mac for mac in settings["macs"][0].split(","))


KEYS = "for t in ed25519 rsa; do ssh-keygen -q -t $t -N '' -f /etc/ssh/ssh_host_${t}_key; done"


@pytest.fixture
def listening() -> Iterator[str]:
    """Yield the address of an sshd as the image configures it, with host keys of its own."""
    command = f"{KEYS}; mkdir -p /run/sshd; exec /usr/sbin/sshd -D -e"
    container = docker("run", "--detach", "--entrypoint", "/bin/sh", image_of("login"), "-c", command)
    try:
        yield docker("inspect", "--format", "{{.NetworkSettings.IPAddress}}", container)
    finally:
        docker("rm", "--force", container)


def reachable(address: str) -> bool:
    try:
        with socket.create_connection((address, 22), timeout=5) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


def test_ssh_audit_finds_nothing_to_fail(listening: str) -> None:
    """An independent look. What it may warn of: clients older than the post-quantum exchanges may still come in."""
    until(lambda: reachable(listening), "sshd answers")
    command = [sys.executable, "-m", "ssh_audit", "-j", listening]
    report = json.loads(subprocess.run(command, capture_output=True, check=False).stdout)
    notes = [(item["algorithm"], item["notes"]) for kind in ("kex", "key", "enc", "mac") for item in report[kind]]
    assert len(notes) > 10
    assert [name for name, found in notes if found.get("fail")] == []
    warned = [(name, text) for name, found in notes for text in found.get("warn", [])]
    assert [name for name, text in warned if "post-quantum" not in text] == []


def test_a_home_directory_is_made_at_login_and_the_message_of_the_day_read(login: Host) -> None:
    assert "pam_mkhomedir.so" in login.file("/etc/pam.d/common-session").content_string
    sshd = login.file("/etc/pam.d/sshd").content_string
    assert "pam_motd.so noupdate" in sshd and "update-motd.d" not in sshd


def test_every_pam_module_that_is_named_is_there(idle: Callable[[str], Host]) -> None:
    """A missing `required` module turns everyone away."""
    for role in ("login", "worker"):
        host = idle(role)
        named = host.check_output(
            "grep -hoE 'pam_[a-z_0-9]+\\.so' /etc/pam.d/sshd /etc/pam.d/common-* /etc/pam.d/slurm-adopt 2>/dev/null"
            " | sort -u; true"
        ).split()
        assert "pam_unix.so" in named and "pam_sss.so" in named
        modules = [f"/usr/lib/x86_64-linux-gnu/security/{module}" for module in named]
        assert host.check_output(f"ls -1 {' '.join(modules)}").split() == modules, role


# Says what a command of Slurm's is told by its surroundings.
TOLD = """#!/bin/sh
echo "${SQUEUE_FORMAT-own} ${SLURM_TIME_FORMAT-own}"
exit 3
"""
TYPED = """PATH=/tmp/told:$PATH
squeue --me; echo "status $?"
sacct
squeue | cat; squeue > /tmp/told/file; cat /tmp/told/file; bash -c squeue
SLURM_TIME_FORMAT=mine squeue
env | grep -c FORMAT || true
"""


def test_an_interactive_shell_shows_whole_job_names(login: Host) -> None:
    """A terminal of an interactive shell shows them. A pipe, a file, a script and a job get Slurm's usual output."""
    login.check_output(
        "mkdir -p /tmp/told && cd /tmp/told && umask 022"
        f" && printf %s {quote(TYPED)} > typed && printf %s {quote(TOLD)} | tee squeue > sacct && chmod +x *"
    )
    shown = login.check_output("script -qec \"bash -lic '. /tmp/told/typed'\" /dev/null").splitlines()
    wide, status, sacct, *programs, mine, exported = [line.strip() for line in shown]
    assert wide == sacct and "%.24j" in wide and wide.endswith(" relative")
    assert status == "status 3"
    assert programs == ["own own"] * 3, "scripts parse squeue: only people get this format"
    assert mine.endswith(" mine") and exported == "0"
