"""Login pools by real sshds, with the files that the chart gives them: members of a pool's groups come in."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.container.init_pods import Pod, World, world
from tests.support.rendered_chart import render
from tests.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

POOLS: dict[str, Any] = {"lab": {"allowedGroups": ["lab", "Domain Users"]}, "ops": {"allowedGroups": ["ops"]}}
NAMES = ("open", *POOLS)
# Each with the pools that take this person.
PEOPLE: dict[str, tuple[dict[str, Any], set[str]]] = {
    "ada": ({"group": "lab"}, {"open", "lab"}),
    "ben": ({"group": "guests", "groups": ["lab"]}, {"open", "lab"}),
    "eve": ({"group": "guests"}, {"open"}),
    "oda": ({"group": "ops", "groups": ["lab"]}, {"open", "lab", "ops"}),
    "lap": ({"group": "labs"}, {"open"}),
}
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null",
       "-o", "LogLevel=ERROR")  # fmt: skip


def drop_ins() -> dict[str, tuple[str, str]]:
    """Return the text and the place of each pool's file, as the chart has them."""
    made = {
        (item["kind"], item["metadata"]["name"]): item
        for item in render({"login": {"pools": POOLS}}, release="s", namespace="n")
    }
    found = {}
    for pool in POOLS:
        container = made["StatefulSet", f"s-login-{pool}"]["spec"]["template"]["spec"]["containers"][0]
        (mount,) = (item for item in container["volumeMounts"] if item["name"] == "allowed-groups")
        found[pool] = (made["ConfigMap", f"s-allowed-groups-{pool}"]["data"][mount["subPath"]], mount["mountPath"])
    return found


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("key") / "id_ed25519"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", made], check=True)
    return made


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, key: Path) -> Iterator[World]:
    groups = {name for person, _ in PEOPLE.values() for name in (person["group"], *person.get("groups", ()))}
    people: dict[str, Any] = {
        "groups": [{"name": name, "gid": 20000 + number} for number, name in enumerate(sorted(groups))],
        "users": [
            {"name": name, "uid": 21000 + number, "keys": [key.with_suffix(".pub").read_text().strip()], **person}
            for number, (name, (person, _)) in enumerate(PEOPLE.items())
        ],
    }
    directory = tmp_path_factory.mktemp("pools")
    with world(directory, "pools") as made:
        (made.mounts / "people").mkdir()
        (made.mounts / "people" / "people.yaml").write_text(yaml.safe_dump(people))
        yield made


@pytest.fixture(scope="module")
def pools(site: World, key: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pod]:
    files, made = drop_ins(), {}
    for pool in NAMES:
        volumes = {key: "/tmp/key"}
        if pool in files:
            text, place = files[pool]
            file = tmp_path_factory.mktemp(pool) / "sshd.conf"
            file.write_text(text)
            volumes[file] = place
        made[pool] = site.pod("login", f"login-{pool}", volumes=volumes, env={"MINIVM_LOGIN_POOL": pool})
    for pod in made.values():
        wait_for_sshd(pod)
    return made


def wait_for_sshd(pod: Pod) -> None:
    """Wait for sshd, which starts when the people are known: a login pod without a controller is never ready."""
    until(lambda: pod.service("sshd")["state"] == "ready", f"sshd of {pod.name}", seen=pod.account)


def come_in(at: Pod, person: str, pool: str, *options: str) -> tuple[int, str]:
    return at.code(*SSH, "-i", "/tmp/key", *options, f"{person}@login-{pool}", "id", "-un")


@pytest.mark.parametrize("person", PEOPLE)
def test_each_pool_takes_the_members_of_its_groups_and_nobody_else(pools: dict[str, Pod], person: str) -> None:
    came = {pool: come_in(pools["open"], person, pool) for pool in NAMES}
    assert {pool for pool, (code, _) in came.items() if code == 0} == PEOPLE[person][1], came
    assert all(text.strip() == person for code, text in came.values() if code == 0)
    refused = [text for code, text in came.values() if code]
    assert all("Permission denied (publickey)" in text for text in refused), refused


def test_a_hop_or_a_forwarded_port_leads_to_the_same_refusal(pools: dict[str, Pod]) -> None:
    """Ada is in the pool `lab`, her key lies there for her, and she forwards ports: `ops` asks for her groups."""
    inside = (*SSH, "-i", "/tmp/key", "ada@login-lab")
    assert pools["open"].code(*inside, "mkdir -p -m 700 .ssh; cat > .ssh/id_ed25519 < /dev/null; id -un")[0] == 0
    pools["lab"].run("install", "-o", "ada", "-m", "600", "/tmp/key", "/home/ada/.ssh/id_ed25519")
    hop = " ".join((*SSH, "-i", ".ssh/id_ed25519"))
    assert pools["open"].code(*inside, f"{hop} ada@login-open id -un")[1].strip() == "ada", "the key is good"
    code, text = pools["open"].code(*inside, f"{hop} ada@login-ops id -un")
    assert code and "Permission denied (publickey)" in text, text
    proxy = f"ProxyCommand={' '.join(inside[:-1])} -W %h:%p ada@login-lab"
    assert come_in(pools["open"], "ada", "open", "-o", proxy) == (0, "ada\n"), "the way is open"
    code, text = come_in(pools["open"], "ada", "ops", "-o", proxy)
    assert code and "Permission denied (publickey)" in text, text


def test_no_person_becomes_another_on_a_login_pod(pools: dict[str, Pod]) -> None:
    inside = (*SSH, "-i", "/tmp/key", "ada@login-lab")
    for command in (
        "su oda -c id </dev/null",
        "su - -c id </dev/null",
        "setpriv --regid=0 id",
        "newgrp ops -c id </dev/null",
    ):
        code, text = pools["open"].code(*inside, command)
        assert code and "uid=" not in text, (command, text)
    assert pools["open"].code(*inside, "cat /etc/ssh/ssh_host_ed25519_key /mnt/minivm/secrets/munge/munge.key")[0]


def test_a_file_that_sshd_cannot_read_lets_nobody_in_and_the_pod_says_so(site: World, tmp_path: Path) -> None:
    _, place = drop_ins()["lab"]
    file = tmp_path / "sshd.conf"
    file.write_text("AllowGroups\n")
    pod = site.pod("login", "login-broken", volumes={file: place})
    until(lambda: "AllowGroups" in pod.logs(), "sshd names the line", seen=pod.account)
    assert pod.service("sshd")["state"] != "ready" and "sshd" in pod.wait_reason("sshd")


def test_groups_that_the_image_adds_let_nobody_in_and_the_pod_says_so(site: World, tmp_path: Path) -> None:
    text, place = drop_ins()["lab"]
    file, own = tmp_path / "sshd.conf", tmp_path / "own.conf"
    file.write_text(text)
    own.write_text("AllowGroups guests\n")
    pod = site.pod("login", "login-adds", volumes={file: place, own: "/etc/ssh/sshd_config.d/90-own.conf"})
    assert "Domain Users, guests, lab" in pod.wait_reason("sshd lets in")
    assert pod.service("sshd")["state"] != "ready"
