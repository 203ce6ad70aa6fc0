"""Mounted keys that differ from the keys in use."""

from __future__ import annotations

from pathlib import Path

import pytest

from init.helpers.keys import (
    KEYS,
    PASSWORD,
    READ,
    SECRETS,
    find_unread,
    find_unused,
    load,
    renew_host_keys,
    renew_jwt,
    renew_password,
    tell_unread,
)
from init.pod.pod import Pod
from init.slurm import accounting


def put(root: Path, path: str, text: str) -> None:
    place = root / path.lstrip("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)


def test_each_key_that_changed_is_told_with_its_way_and_never_shown(tmp_path: Path) -> None:
    pod = Pod({}, tmp_path)
    assert list(find_unused(pod)) == []
    for key in KEYS:
        put(tmp_path, f"{SECRETS}/{key.mounted[-1]}", "hidden-new")
        if not key.beside:
            assert list(find_unused(pod)) == [], "not installed yet: its service says what it waits for"
        put(tmp_path, key.installed, "hidden-new")
        assert list(find_unused(pod)) == []
        put(tmp_path, key.installed, "hidden-old")
        (told,) = find_unused(pod)
        assert told.startswith(f"the mounted {key.name} is not the one in use, since 20") and told.endswith(key.way)
        assert "hidden" not in told
        put(tmp_path, key.installed, "hidden-new")


def test_a_second_key_that_comes_beside_the_first_is_told(tmp_path: Path) -> None:
    pod = Pod({}, tmp_path)
    for path in (f"{SECRETS}/slurm-key/slurm.key", "/etc/slurm/slurm.key"):
        put(tmp_path, path, "one")
    put(tmp_path, f"{SECRETS}/slurm-jwks/slurm.jwks", "several")
    (told,) = find_unused(pod)
    assert told.startswith("the mounted slurm.jwks is not the one in use")


def put_slurm(root: Path, text: str) -> None:
    for path in (f"{SECRETS}/slurm-key/slurm.key", "/etc/slurm/slurm.key"):
        put(root, path, text)


def test_a_daemon_that_has_not_read_an_installed_key_is_told_until_it_is_started_anew(tmp_path: Path) -> None:
    pod, read = Pod({}, tmp_path), dict[str, list[str]]()
    put_slurm(tmp_path, "one")
    lives = {"slurmd": "12 100", "sshd": "13 100"}
    assert find_unread(pod, lives, read) == {}
    put_slurm(tmp_path, "two")
    assert list(find_unused(pod)) == [], "it is installed"
    unread = find_unread(pod, lives, read)
    assert unread == {"slurmd": ["slurm.key"]} == find_unread(pod, lives, read), "not only once"
    assert list(tell_unread(unread)) == ["slurmd has not read the new slurm.key: `minivm restart slurmd` takes it"]
    assert find_unread(pod, {}, read) == {}, "it does not run for a moment"
    assert find_unread(pod, lives, read) == unread, "and is the same afterwards"
    # A key that comes beside it.
    put(tmp_path, "/etc/slurm/slurm.jwks", "several")
    assert find_unread(pod, lives, read) == {"slurmd": ["slurm.key", "slurm.jwks"]}
    assert find_unread(pod, lives | {"slurmd": "12 101"}, read) == {}, "the same number, another process"


def test_a_certificate_beside_sssd_conf_is_read_at_sssds_start(tmp_path: Path) -> None:
    pod, read = Pod({}, tmp_path), dict[str, list[str]]()
    put(tmp_path, f"{SECRETS}/sssd/sssd.conf", "here")
    put(tmp_path, f"{SECRETS}/sssd/ca.crt", "old")
    put(tmp_path, f"{SECRETS}/sssd/..data", "the kubelet's own")
    lives = {"sssd": "9 9"}
    assert find_unread(pod, lives, read) == {}
    put(tmp_path, f"{SECRETS}/sssd/..data", "changed")
    put(tmp_path, f"{SECRETS}/sssd/sssd.conf", "changed")
    assert find_unread(pod, lives, read) == {}, "sssd.conf is another line: it is not installed yet"
    put(tmp_path, f"{SECRETS}/sssd/ca.crt", "new")
    assert find_unread(pod, lives, read) == {"sssd": ["ca.crt"]}
    assert find_unread(pod, {"sssd": "10 10"}, read) == {}


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"slurmd": 4}', '{"slurmd": []}'])
def test_what_a_kill_left_of_the_memory_is_no_obstacle(tmp_path: Path, text: str) -> None:
    put(tmp_path, READ, text)
    read = load(tmp_path / READ.lstrip("/"))
    assert (
        find_unread(Pod({}, tmp_path), {"slurmd": "1 1"}, read)
        == {}
        == find_unread(Pod({}, tmp_path), {"slurmd": "1 1"}, read)
    )


def test_a_database_password_is_taken_only_when_the_database_accepts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client of the database sees the password in its environment alone."""
    client, asked, pod = tmp_path / "client", tmp_path / "asked", Pod({}, tmp_path)
    client.write_text(f'#!/bin/sh\necho "$MYSQL_PWD $*" >> {asked}\n[ "$MYSQL_PWD" = right ] && echo 1\n')
    client.chmod(0o755)
    monkeypatch.setattr(accounting, "CLIENT", str(client))
    nowhere = tmp_path / "no.sock"
    put(tmp_path, accounting.CONFIGURATION, "StorageHost=db\nStorageUser=slurm\nStoragePass=old\n")
    assert renew_password(pod, nowhere) == "", "none is mounted"
    put(tmp_path, PASSWORD, "old\n")
    assert renew_password(pod, nowhere) == "" and not asked.exists()
    put(tmp_path, PASSWORD, "wrong\n")
    told = renew_password(pod, nowhere)
    assert told.startswith("the mounted database password is not the one in use, since 20")
    assert told.endswith("slurmdbd takes it once the database accepts it") and "wrong" not in told
    put(tmp_path, PASSWORD, "right\n")
    assert "tried again" in renew_password(pod, nowhere), "it was accepted, and init was asked for the restart"
    assert [line.split()[0] for line in asked.read_text().splitlines()] == ["wrong", "right"]
    assert not any(
        word in line.partition(" ")[2] for line in asked.read_text().splitlines() for word in ("wrong", "right")
    )
    put(tmp_path, accounting.CONFIGURATION, "StorageHost=localhost\nStorageUser=slurm\n")
    assert renew_password(pod, nowhere) == "", "the embedded database has none"


def test_a_jwt_key_that_is_too_short_is_refused(tmp_path: Path) -> None:
    pod = Pod({}, tmp_path)
    put(tmp_path, f"{SECRETS}/slurm/jwt_hs256.key", "short")
    assert renew_jwt(pod, tmp_path / "no.sock") == "", "none was installed: the step at the start says why"
    put(tmp_path, "/etc/slurm/jwt_hs256.key", "x" * 32)
    assert "has 5 bytes, fewer than 32, and slurmctld keeps" in renew_jwt(pod, tmp_path / "no.sock")


def test_a_renewal_of_host_keys_that_was_cut_is_finished(tmp_path: Path) -> None:
    """The keys are installed, and sshd was not asked to read them."""
    pod, read, nowhere = Pod({}, tmp_path), dict[str, list[str]](), tmp_path / "no.sock"
    name = "ssh_host_ed25519_key"
    for path in (f"{SECRETS}/ssh/{name}", f"/etc/ssh/{name}"):
        put(tmp_path, path, "old")
    lives = {"sshd": "7 7"}
    assert find_unread(pod, lives, read) == {}
    assert renew_host_keys(pod, nowhere, [], read) == "", "nothing to do"
    for path in (f"{SECRETS}/ssh/{name}", f"/etc/ssh/{name}"):
        put(tmp_path, path, "new")
    unread = find_unread(pod, lives, read)
    assert unread == {"sshd": [name]}
    assert "tried again" in renew_host_keys(pod, nowhere, unread["sshd"], read)
    assert find_unread(pod, lives, read) == unread, "until sshd has taken them"
