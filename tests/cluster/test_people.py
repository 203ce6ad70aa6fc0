"""People of a people.yaml: login by key, work on every node, expiry, removal, and what a wrong file changes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.local import LocalCluster
from cluster.names import free_port
from cluster.values import Options
from images.engine.docker import DockerEngine
from tests.cluster.conftest import IMAGES, NAME
from tests.cluster.researcher import Researcher, World
from tests.reader import ROOT
from tests.waiting import PATIENCE, until

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

LOGIN, WORKER, CONTROLLER = "slurm-login-0", "slurm-worker-0", "slurm-controller-0"


class Lab:
    """A cluster made by `build.py up --people`, and the key of each person."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.name = f"{NAME}-people"
        self.port = free_port(22700)
        self.world: World

    def key(self, person: str) -> str:
        file = self.directory / person
        if not file.exists():
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", person, "-f", file], check=True)
        return file.with_name(f"{person}.pub").read_text().strip()

    def person(self, name: str, uid: int, **more: Any) -> dict[str, Any]:
        return {"name": name, "uid": uid, "group": "lab", "keys": [self.key(name)]} | more

    def up(self, *people: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        file = self.directory / "people.yaml"
        groups = [{"name": "lab", "gid": 15000}, {"name": "optics", "gid": 15001}]
        file.write_text(yaml.safe_dump({"groups": groups, "users": [*people]}))
        command = [sys.executable, "build.py", "--set", f"prefix={IMAGES}", "up", "--name", self.name, "--workers", "1",
                   "--people", str(file), "--port", str(self.port), "--yes"]  # fmt: skip
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)

    def take(self, *people: dict[str, Any]) -> None:
        done = self.up(*people)
        assert done.returncode == 0, done.stdout + done.stderr

    def write(self, text: str) -> None:
        """Write the mounted file as another tool than `up` would, which checks it, and let the pods read it now."""
        for file in self.mounted():
            file.write_text(text)
        for pod in (LOGIN, WORKER, CONTROLLER):
            self.world.cluster.exec(pod, ["minivm", "restart", "people"])  # its result is what the tests look at

    def mounted(self) -> list[Path]:
        """Return the file that each pod mounts."""
        return [*self.world.cluster.state.rglob("people.yaml")]

    def ssh(self, person: str, *command: str, key: str = "") -> list[str]:
        line = Researcher(self.world, "alice").command(*command)
        line[line.index("alice@127.0.0.1")] = f"{person}@127.0.0.1"
        line[line.index("-i") + 1] = str(self.directory / (key or person))
        return line

    def try_(self, person: str, *command: str, key: str = "") -> subprocess.CompletedProcess[str]:
        line = self.ssh(person, *command, key=key)
        return subprocess.run(line, capture_output=True, text=True, timeout=PATIENCE, stdin=subprocess.DEVNULL)

    def say(self, person: str, *command: str, key: str = "") -> str:
        done = self.try_(person, *command, key=key)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def refused(self, person: str, key: str = "") -> bool:
        done = self.try_(person, "true", key=key)
        return done.returncode == 255 and "Permission denied (publickey)" in done.stderr


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    made = Lab(tmp_path_factory.mktemp("people"))
    client = DockerEngine().client
    # What an earlier run that was killed has left, whose directory may be another one.
    LocalCluster(client, Options(name=made.name), log=print).down()
    try:
        made.take(made.person("ada", 15001, groups=["optics"], gecos="Ada L."), made.person("bob", 15002))
        made.world = World(LocalCluster.load(client, made.name, log=print))
        yield made
    finally:
        subprocess.run([sys.executable, "build.py", "down", "--name", made.name], cwd=ROOT, check=False, timeout=120)


def test_a_person_of_the_file_logs_in_and_works_on_every_node(lab: Lab) -> None:
    """No directory has ada: her groups and her uid are the same in every pod, and accounting knows her name."""
    wanted = "uid=15001(ada) gid=15000(lab) groups=15000(lab),15001(optics)\n"
    assert lab.say("ada", "id") == wanted
    assert lab.say("ada", "srun -Q id") == wanted
    for pod in (LOGIN, WORKER, CONTROLLER):
        assert lab.world.run(pod, "id", "ada") == wanted
        assert lab.world.run(pod, "stat", "-c", "%a %U %G", "/var/lib/extrausers/shadow") == "640 root shadow\n"
    assert lab.say("ada", "pwd; echo $SHELL").split() == ["/home/ada", "/bin/bash"]
    job = lab.say("ada", "sbatch --parsable -o /dev/null --wrap 'srun id'").strip()
    until(lambda: "COMPLETED" in lab.say("ada", f"sacct -nXP -j {job} -o user,state"), "accounting has the job")
    assert lab.refused("ada", key="bob") and lab.refused("root", key="ada") and lab.refused("nobody", key="ada")
    assert Researcher(lab.world, "alice")("id -un") == "alice\n", "the directory's people come in beside"
    shown = lab.world.run(LOGIN, "minivm", "people", "show")
    assert "ada" in shown and "15001" in shown


def test_a_plain_up_keeps_the_people_and_another_uid_is_refused(lab: Lab) -> None:
    command = [sys.executable, "build.py", "--set", f"prefix={IMAGES}", "up", "--name", lab.name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing to change" in done.stdout and lab.say("ada", "id -u") == "15001\n"
    refused = lab.up(lab.person("ada", 15009), lab.person("bob", 15002))
    assert refused.returncode == 1 and "ada had the uid 15001, and has 15009" in refused.stderr
    wrong = lab.up(lab.person("ada", 15001, shell="zsh"))
    assert wrong.returncode == 1 and "users[0] (ada).shell" in wrong.stderr


def test_a_key_expires_without_a_change_of_the_file(lab: Lab) -> None:
    key = {"key": lab.key("short")}

    def enters_before_it_expires(seconds: int) -> bool:
        end = time.time() + seconds
        short = key | {"expires": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(end))}
        lab.take(lab.person("ada", 15001, keys=[lab.key("ada"), short], groups=["optics"]), lab.person("bob", 15002))

        def enters() -> bool:
            return lab.try_("ada", "true", key="short").returncode == 0

        return (
            until(lambda: "enters" if enters() else "late" if time.time() > end else "", "the key counts") == "enters"
        )

    # `up` may take longer than the shorter time on a busy machine.
    assert any(map(enters_before_it_expires, (40, 90, 240)))
    until(lambda: lab.refused("ada", key="short"), "the expired key does not", within=400)
    assert lab.say("ada", "id -un") == "ada\n"


def test_a_wrong_file_or_uid_changes_nothing_and_is_told(lab: Lab) -> None:
    good = lab.mounted()[0].read_text()
    for text, words in (
        (good.replace("15001", "0", 1), "wanted 1000 to 59999"),
        (good.replace('"uid": 15002', '"uid": 15077').replace('"uid":15002', '"uid":15077'), "bob has had 15002"),
    ):
        assert text != good
        lab.write(text)
        lab.world.wait_for_reason(LOGIN, words)
        lab.world.wait_for_reason(CONTROLLER, words)
        assert lab.say("bob", "id -u") == "15002\n"
        lab.world.wait_ready(LOGIN)
    lab.write(good)
    until(lambda: "people" not in lab.world.cluster.exec(LOGIN, ["minivm", "why"])[1], "the good file counts")


def test_a_removed_person_s_sessions_end_and_jobs_go_on(lab: Lab) -> None:
    job = lab.say("ada", "sbatch --parsable -o /dev/null --wrap 'sleep 600'").strip()
    until(lambda: "RUNNING" in lab.world.slurm("scontrol", "show", "job", job), "ada's job runs")
    open_ = subprocess.Popen(lab.ssh("ada", "trap '' TERM HUP; while :; do sleep 1; done"), stdin=subprocess.DEVNULL)
    try:
        until(lambda: lab.world.cluster.exec(LOGIN, ["pgrep", "-u", "15001"])[0] == 0, "ada's session is there")
        lab.take(lab.person("bob", 15002))
        until(lambda: open_.poll() is not None, "ada's session ended")
        until(lambda: lab.world.cluster.exec(LOGIN, ["pgrep", "-u", "15001"])[0] == 1, "nothing of hers runs there")
        assert lab.refused("ada")
        assert lab.say("bob", "id -un") == "bob\n"
        assert "RUNNING" in lab.world.slurm("scontrol", "show", "job", job)
        assert lab.world.cluster.exec(WORKER, ["pgrep", "-u", "15001"])[0] == 0, "her job runs on"
    finally:
        open_.kill()
        lab.world.slurm("scancel", job)
