"""People of a real LDAP server become a people.yaml, by the controller's own sssd and ldapsearch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.container.init_pods import Pod, World, slurm_conf, world
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIDKL4jGziPGpJbOdeVCCWCKjIIard+lJiReA40Ga0C+1 alice"
BASE = "dc=minivm,dc=demo"
GROUPS = {"researchers": (20000, ""), "Optics Lab": (20100, "memberUid: alice\n")}


def person(name: str, uid: int, home: str, more: str = "") -> str:
    classes = "".join(f"objectClass: {kind}\n" for kind in ("inetOrgPerson", "posixAccount", "ldapPublicKey"))
    return (
        f"\ndn: uid={name},{BASE}\n{classes}uid: {name}\ncn: {name}\nsn: {name}\nuidNumber: {uid}\ngidNumber: 20000\n"
        f"homeDirectory: {home}\nloginShell: /bin/sh\n{more}"
    )


LDIF = (
    f"dn: {BASE}\nobjectClass: dcObject\nobjectClass: organization\no: lab\ndc: minivm\n"
    + "".join(
        f"\ndn: cn={name},{BASE}\nobjectClass: posixGroup\ncn: {name}\ngidNumber: {gid}\n{more}"
        for name, (gid, more) in GROUPS.items()
    )
    + person("alice", 20001, "/home/alice", f"sshPublicKey: {KEY}\n")
    + person("bob", 20002, "/home/bob", "userPassword: se cret\n")
    + person("dora", 20010, "/export/dora", "sshPublicKey: ecdsa-sha2-nistp256 AAAA dora\n")
    + person("low", 500, "/home/low")
)
SSSD = f"""\
[sssd]
services = nss, pam, ssh
domains = site
[domain/site]
id_provider = ldap
auth_provider = none
access_provider = simple
simple_deny_users = dora
ldap_uri = ldap://directory
ldap_search_base = {BASE}
ldap_default_bind_dn = uid=bob,{BASE}
ldap_default_authtok = se cret
ldap_id_use_start_tls = false
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(tmp_path_factory.mktemp("people"), "people") as made:
        yield made


@pytest.fixture(scope="module")
def directory(site: World, tmp_path_factory: pytest.TempPathFactory) -> Pod:
    mounts = tmp_path_factory.mktemp("directory")
    (mounts / "config" / "ldap").mkdir(parents=True)
    (mounts / "config" / "ldap" / "people.ldif").write_text(LDIF)
    pod = site.pod("demo", "directory", mounts=mounts)
    until(lambda: pod.service("slapd")["state"] == "ready", "slapd is ready", seen=pod.account)
    return pod


@pytest.fixture(scope="module")
def controller(site: World, directory: Pod) -> Pod:
    sssd = site.mounts / "secrets" / "sssd"
    sssd.mkdir()
    (sssd / "sssd.conf").write_text(SSSD)
    site.configure({"slurm.conf": slurm_conf(accounting=False)})
    return site.pod("controller", "slurm-controller", env={"MINIVM_ACCOUNTING": "none"}).wait_ready()


def test_the_directory_s_people_become_a_file(controller: Pod, tmp_path: Path) -> None:
    text = controller.run("minivm", "people", "export")
    assert "cret" not in text, "a password"
    for note in (
        'group "Optics Lab" (20100) is called optics-lab',
        "dora: the directory keeps this person out",
        "dora: key 1: ecdsa",
        'dora: home: "/export/dora" there',
        '"low" is left out: uid',
    ):
        assert sum(line.startswith(f"# - {note}") for line in text.splitlines()) == 1, text
    file = tmp_path / "people.yaml"
    file.write_text(text)
    check = [str(Path(sys.executable).with_name("minivm")), "people", "check", str(file)]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "2 people with access of 3, 2 groups" in done.stdout, done.stdout + done.stderr
    alice = next(user for user in yaml.safe_load(text)["users"] if user["name"] == "alice")
    rest = {"shell": "/bin/sh", "gecos": "alice", "keys": [KEY]}
    assert alice == {"name": "alice", "uid": 20001, "group": "researchers", "groups": ["optics-lab"]} | rest
    named = yaml.safe_load(controller.run("minivm", "people", "export", "--group", "Optics Lab"))
    assert [user["name"] for user in named["users"]] == ["alice"]
    code, said = controller.code("minivm", "people", "export", "alice", "nosuch")
    assert code == 1 and 'sssd does not know "nosuch"' in said


def test_a_directory_that_is_away_gives_no_file(controller: Pod, directory: Pod) -> None:
    directory.run("minivm", "stop", "slapd")
    try:
        code, said = controller.code("minivm", "people", "export")
        assert code == 1 and "ldap://directory, base dc=minivm,dc=demo: " in said and "users:" not in said
    finally:
        directory.run("minivm", "start", "slapd")
