"""Mounted keys that differ from the keys in use."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from ground.certificates import list_expiries
from init.helpers.keys import (
    JWT,
    KEYS,
    METRICS,
    PASSWORD,
    READ,
    SECRETS,
    SINCE,
    find_unread,
    find_unused,
    load,
    read_since,
    render_metrics,
    renew_host_keys,
    renew_jwt,
    renew_password,
    tell_unread,
)
from init.pod.pod import Pod
from init.slurm import accounting
from init.view.metrics import open_metrics


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


NOW = 1.8e9


def test_the_age_of_a_key_counts_from_when_the_controller_first_saw_it(tmp_path: Path) -> None:
    pod = Pod({}, tmp_path)
    put(tmp_path, JWT.installed, "hidden-1")
    assert read_since(pod, NOW) == {}, "no volume"
    (tmp_path / SINCE.lstrip("/")).parent.mkdir(parents=True)
    assert read_since(pod, 1.0) == {}, "the clock is not set"
    assert read_since(pod, NOW) == {"JWT key": NOW}
    put(tmp_path, "/etc/munge/munge.key", "hidden-2")
    put(tmp_path, "/etc/sssd/sssd.conf", "no key")
    assert read_since(pod, NOW + 9) == {"JWT key": NOW, "munge key": NOW + 9}
    (tmp_path / JWT.installed.lstrip("/")).unlink()
    assert read_since(pod, NOW + 20) == {"munge key": NOW + 9}, "unknown, not new"
    put(tmp_path, JWT.installed, "hidden-1")
    assert read_since(pod, NOW + 30) == {"JWT key": NOW, "munge key": NOW + 9}, "the same key again"
    put(tmp_path, JWT.installed, "hidden-3")
    assert read_since(pod, NOW + 40) == {"JWT key": NOW + 40, "munge key": NOW + 9}
    kept = (tmp_path / SINCE.lstrip("/")).read_text()
    assert "hidden" not in kept and len(kept) < 120, "too little of a digest to guess a key by"
    assert read_since(pod, NOW - 100) == dict.fromkeys(("JWT key", "munge key"), NOW - 100), "a clock was ahead"


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '{"JWT key": 4}', '{"JWT key": ["", "x"]}', '{"JWT key": ["a", 1e999]}']
)
def test_a_damaged_memory_of_keys_is_begun_anew(tmp_path: Path, text: str) -> None:
    pod = Pod({}, tmp_path)
    put(tmp_path, JWT.installed, "hidden")
    put(tmp_path, SINCE, text)
    assert read_since(pod, NOW) == read_since(pod, NOW + 1) == {"JWT key": NOW}


def test_a_memory_that_cannot_be_written_tells_no_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    pod = Pod({}, tmp_path)
    put(tmp_path, JWT.installed, "hidden")
    (tmp_path / SINCE.lstrip("/")).parent.mkdir(parents=True)
    monkeypatch.setattr("init.helpers.keys.write_whole", fail)
    assert read_since(pod, NOW) == {}


def test_the_end_of_each_certificate_beside_sssd_conf_is_told(tmp_path: Path) -> None:
    folder = f"{SECRETS}/sssd"
    first, second = certificate(tmp_path, 30), certificate(tmp_path, 3)
    put(tmp_path, f"{folder}/sssd.conf", "[sssd]")
    put(tmp_path, f"{folder}/..data", first)
    put(tmp_path, f"{folder}/ca.crt", f"# my authority\n{first}{second}")
    put(tmp_path, f"{folder}/one.pem", first)
    put(tmp_path, f"{folder}/a.key", "-----BEGIN PRIVATE KEY-----\nhidden\n-----END PRIVATE KEY-----\n")
    put(tmp_path, f"{folder}/broken.crt", first.replace("M", "N", 9))
    put(tmp_path, f"{folder}/half.crt", first + first[: len(first) // 2])
    put(tmp_path, f"{folder}/many.crt", first * 99)
    (tmp_path / folder.lstrip("/") / "gone.crt").symlink_to("nowhere")
    os.mkfifo(tmp_path / folder.lstrip("/") / "pipe")
    found = list_expiries(tmp_path / folder.lstrip("/"))
    assert found.keys() == {"ca.crt", "one.pem", "half.crt"}
    assert found["one.pem"] - found["ca.crt"] == pytest.approx(27 * 86400, abs=60)
    assert found["one.pem"] - time.time() == pytest.approx(30 * 86400, abs=60)
    text = render_metrics({"munge key": NOW}, found)
    assert 'minivm_keys_known_timestamp_seconds{key="munge key"} 1800000000\n' in text
    assert 'minivm_keys_certificate_end_timestamp_seconds{file="sssd/ca.crt"} ' in text
    assert METRICS.endswith("/keys.prom") and open_metrics(text, "minivm_keys_")


def certificate(directory: Path, days: int) -> str:
    key = directory / "certificate.key"
    argv = ["openssl", "req", "-x509", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    argv += ["-subj", "/CN=x", "-days", str(days), "-keyout", str(key)]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout
