"""Properties of the image of every role."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from testinfra.host import Host  # type: ignore[import-untyped]  # ships no types

from tests.container.conftest import ROLES, image_of
from tests.container.layers import Found, size, walk
from tests.support.image_programs import SETUID

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

ROOT = Path(__file__).resolve().parents[3]
VERSIONS = yaml.safe_load((ROOT / "images/versions.yaml").read_text())
MB = 1000 * 1000
BUDGETS = {"controller": 420 * MB, "login": 700 * MB, "worker": 900 * MB}

# path -> owner, group, mode; "-" where the role lacks it by design.
EVERYWHERE = {
    "/etc/munge": ("munge", "munge", 0o700),
    "/var/lib/munge": ("munge", "munge", 0o711),
    "/var/log/munge": ("munge", "munge", 0o700),
    "/etc/slurm": ("root", "root", 0o755),
    "/var/lib/slurm": ("slurm", "slurm", 0o755),
    "/var/log/slurm": ("slurm", "slurm", 0o755),
    "/etc/minivm/plan.json": ("root", "root", 0o644),
    "/usr/bin/minivm": ("root", "root", 0o755),
    "/usr/bin/gitsync": ("root", "root", 0o755),
    "/usr/share/minivm/scripts": ("root", "root", 0o755),
    "/etc/profile.d/minivm.sh": ("root", "root", 0o644),
    "/tmp": ("root", "root", 0o1777),
    "/etc/nsswitch.conf": ("root", "root", 0o644),
}
BY_ROLE = {
    "controller": {
        "/var/lib/mysql": ("mysql", "mysql", 0o750),
        "/var/spool/slurmctld": ("slurm", "slurm", 0o700),
    },
    "login": {"/etc/pam.d/sshd": ("root", "root", 0o644), "/etc/motd.d": ("root", "root", 0o755)},
    "worker": {
        "/var/spool/slurmd": ("root", "root", 0o755),
        "/etc/pam.d/slurm-adopt": ("root", "root", 0o644),
        "/usr/libexec/minivm/prolog": ("root", "root", 0o755),
        "/usr/libexec/minivm/task_prolog": ("root", "root", 0o755),
        "/usr/libexec/minivm/task_epilog": ("root", "root", 0o755),
        "/usr/bin/minivm-allreduce": ("root", "root", 0o755),
    },
}
DAEMONS = {
    "controller": ("slurmctld", "slurmdbd", "slurmrestd", "mariadbd", "munged", "sssd"),
    "login": ("sackd", "sshd", "munged", "sssd"),
    "worker": ("slurmd", "sackd", "sshd", "munged", "sssd"),
}


def packages(host: Host) -> dict[str, str]:
    listed = host.check_output("dpkg-query -W -f '${binary:Package} ${Version}\\n'")
    pairs = (line.split() for line in listed.splitlines())
    return {name.split(":")[0]: version for name, version in pairs}


def test_users_have_the_numbers_of_versions_yaml(host: Host) -> None:
    """A file on shared storage belongs to the same user in every pod."""
    for name, user in VERSIONS["users"].items():
        if name == "fleet":  # in its own image alone
            continue
        line = host.check_output(f"getent passwd {name}")
        assert line.split(":")[2:4] == [str(user["uid"]), str(user.get("gid", user["uid"]))], line
        assert host.check_output(f"getent group {name}").split(":")[2] == str(user.get("gid", user["uid"]))


def test_no_two_roles_disagree_about_a_user_or_group(idle: Callable[[str], Host]) -> None:
    """Users that a package makes count, too: a name that two roles share has one number."""
    for database in ("passwd", "group"):
        numbers: dict[str, set[str]] = {}
        for role in ROLES:
            for line in idle(role).check_output(f"cat /etc/{database}").splitlines():
                name, _, number, *_ = line.split(":")
                numbers.setdefault(name, set()).add(number)
        differing = {name: found for name, found in numbers.items() if len(found) > 1}
        assert not differing, database


def test_no_user_has_a_password(host: Host) -> None:
    fields = [line.split(":") for line in host.check_output("cat /etc/shadow").splitlines()]
    assert [name for name, password, *_ in fields if password not in ("*", "!", "!*", "!!")] == []


def test_owners_and_modes(host: Host, role: str) -> None:
    expected = {**EVERYWHERE, **BY_ROLE[role]}
    listed = host.check_output(f"stat --format '%n %U %G %a' {' '.join(expected)}")
    found = {path: (user, group, int(mode, 8)) for path, user, group, mode in map(str.split, listed.splitlines())}
    assert found == expected


def test_only_known_files_run_with_other_rights(host: Host) -> None:
    found = set(host.check_output("find / -xdev -type f -perm /6000 -user root -perm -4000").split())
    assert found <= SETUID


def test_nothing_but_temporary_directories_is_writable_for_all(host: Host) -> None:
    elsewhere = "! -type l ! -path '/proc/*' ! -path '/dev/*' ! -path '/tmp/*'"
    found = host.check_output(f"find / -xdev -perm -0002 {elsewhere} -print").split()
    # screen's sockets, a directory a user in it.
    assert [path for path in found if path not in ("/tmp", "/var/tmp", "/run/lock", "/run/screen")] == []
    if host.run("test -e /run/screen").rc == 0:
        assert host.file("/run/screen").mode == 0o1777


def test_the_role_has_its_daemons_and_no_other_roles(host: Host, role: str) -> None:
    for daemon in DAEMONS[role]:
        assert host.file(f"/usr/sbin/{daemon}").exists, daemon
    for other in ("slurmctld", "slurmdbd", "slurmrestd", "slurmd", "sackd", "mariadbd", "sshd"):
        if other not in DAEMONS[role]:
            assert not host.file(f"/usr/sbin/{other}").exists, other


def test_all_roles_have_one_slurm_and_one_munge(idle: Callable[[str], Host]) -> None:
    """Slurm's daemons of different releases talk, those of different builds of one release may not."""
    for name in ("slurm-client", "slurm-wlm-basic-plugins", "munge", "sssd-common", "python3"):
        assert len({packages(idle(role))[name] for role in ROLES}) == 1, name
    configuration = "printf 'ClusterName=t\\nSlurmctldHost=localhost\\n' > /tmp/slurm.conf"
    versions = {
        idle(role).check_output(f"{configuration}; SLURM_CONF=/tmp/slurm.conf sinfo --version") for role in ROLES
    }
    assert len(versions) == 1 and re.fullmatch(r"slurm(-wlm)? \d+\.\d+\.\d+", versions.pop())


def test_every_program_and_plugin_finds_its_libraries(host: Host) -> None:
    """No remaining file needs those removed to save space (ROCm's compiler, sanitizers)."""
    program = Path(__file__).with_name("needed.py").read_text().replace("'", "'\\''")
    checked, missing = json.loads(host.check_output(f"python3 -I -c '{program}'"))
    assert checked > 500
    assert missing == []


def test_python_has_what_init_and_gitsync_need(host: Host) -> None:
    host.check_output("/opt/minivm/bin/python3 -I -c 'import init, gitsync, yaml, click, git, supervisor.options'")
    assert host.run("/opt/minivm/bin/python3 -m pip --version").rc != 0
    plan = json.loads(host.file("/etc/minivm/plan.json").content_string)
    assert plan["role"] in ROLES
    assert host.run("minivm --help").rc == 0 and host.run("gitsync --help").rc == 0


def test_name_service_asks_people_s_file_and_sssd_after_files(host: Host) -> None:
    lines = host.file("/etc/nsswitch.conf").content_string.splitlines()
    databases = dict(re.split(r":\s+", line) for line in lines if ":" in line and not line.startswith("#"))
    assert databases["passwd"] == databases["group"] == databases["shadow"] == "files extrausers sss"
    account = host.file("/etc/pam.d/common-account").content_string
    assert account.index("file=/var/lib/extrausers/passwd") < account.index("pam_sss.so")
    assert "pam_sss.so" in host.file("/etc/pam.d/common-auth").content_string


def test_the_locale_is_utf8_without_a_locale_package(host: Host) -> None:
    assert "LANG=C.UTF-8" in host.check_output("cat /proc/1/environ").split("\0")
    assert host.check_output("python3 -c 'import sys; print(sys.getfilesystemencoding())'") == "utf-8"
    assert "locales" not in packages(host)


def test_no_stray_packages(host: Host, role: str) -> None:
    """Compilers and headers only where people's work runs; documentation, debug symbols, ROCm and systemd nowhere."""
    installed = packages(host)
    stray = {name for name in installed if re.search(r"-(dbgsym|dbg|doc)$", name)}
    stray |= installed.keys() & {"systemd", "udev", "dbus", "mariadb-server", "locales", "sudo", "cron", "rsyslog"}
    if role == "controller":
        stray |= {
            name for name in installed if name.endswith("-dev") or re.match(r"(gcc|g\+\+|gfortran)\b(?!.*base)", name)
        }
        assert not host.exists("gcc") and not host.exists("cc")
    assert stray == set()
    assert host.run("ls /usr/lib/x86_64-linux-gnu/libLLVM* /usr/lib/x86_64-linux-gnu/libamd*").rc != 0


def test_size_stays_in_its_budget(role: str, record_property: Callable[[str, object], None]) -> None:
    bytes_ = size(image_of(role))
    record_property(f"size_{role}", bytes_)
    print(f"{role}: {bytes_ / MB:.0f} MB of {BUDGETS[role] / MB:.0f}")
    assert bytes_ <= BUDGETS[role]


# -- layers ------------------------------------------------------------------------------------------------------------

FORBIDDEN = re.compile(
    r"/etc/munge/munge\.key|/etc/ssh/ssh_host_.*|/var/lib/dbus/machine-id|/etc/ssl/private/.+|.*/\.bash_history"
    r"|/var/lib/apt/lists/.+|/var/cache/apt/.+|/var/log/.*\.log|/var/cache/ldconfig/aux-cache|/var/lib/mysql/.+"
    r"|/etc/(passwd|group|shadow|gshadow)-|/root/\.(cache|ssh)/.*|/tmp/.+|/var/tmp/.+|/usr/sbin/policy-rc\.d"
    r"|/etc/sssd/sssd\.conf|/etc/nvme/host(id|nqn)|/etc/slurm/.*\.(key|conf)"
    r"|.*/\.git/.*|.*/id_(rsa|ed25519|ecdsa)|.*/layer\.tar"
)
SECRET = re.compile(
    rb"-----BEGIN (?:OPENSSH |RSA |EC |DSA |ENCRYPTED )?PRIVATE KEY-----\s+[A-Za-z0-9+/]{40}"
    rb"|\bAKIA[0-9A-Z]{16}\b|\bghp_[A-Za-z0-9]{36}\b|\bglpat-[A-Za-z0-9_-]{20}\b"
)


# Self-tests of the library run with keys that are in its source.
PUBLIC_KEYS = re.compile(r"/usr/lib/x86_64-linux-gnu/libgnutls\.so\..*")
MARKS = (b"PRIVATE KEY-----", b"AKIA", b"ghp_", b"glpat-")


@pytest.fixture(scope="module")
def scanned() -> tuple[list[str], list[str], Counter[str]]:
    """Scan all layers of all roles once: forbidden paths, files that hold a secret, and files by layer."""
    forbidden, secret = [], []
    seen: Counter[str] = Counter()
    for found in walk(*(image_of(role) for role in ROLES)):
        seen[found.layer] += 1
        if bad_path(found):
            forbidden.append(f"{found.layer}: {found.path}")
        if found.member.isreg() and not PUBLIC_KEYS.fullmatch(found.path) and holds_secret(found.content()):
            secret.append(f"{found.layer}: {found.path}")
    return forbidden, secret, seen


def holds_secret(content: bytes) -> bool:
    """Search plainly first, which is ten times as fast and rules out nearly every file."""
    return any(mark in content for mark in MARKS) and SECRET.search(content) is not None


def bad_path(found: Found) -> bool:
    """Something with content: an empty lock file or machine-id tells nothing, a whiteout even less."""
    path = found.path
    return found.member.size > 0 and (path == "/etc/machine-id" or FORBIDDEN.fullmatch(path) is not None)


def test_no_layer_holds_a_key_a_log_or_a_leftover(scanned: tuple[list[str], list[str], Counter[str]]) -> None:
    """No layer may hold one, even under a layer that deletes it: a user of the image has its layers."""
    forbidden, _, seen = scanned
    assert len(seen) >= len(ROLES) + 2 and sum(seen.values()) > 10_000
    assert forbidden == []


def test_no_file_of_any_layer_holds_a_private_key_or_token(
    scanned: tuple[list[str], list[str], Counter[str]],
) -> None:
    assert scanned[1] == []
