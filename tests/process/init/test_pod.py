"""The pod's drop-ins, capabilities and cgroups, and how PID 1 uses them. The real kernel, each time."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.init_world import NOTIFIES, World, python, shell, world
from tests.waiting import until

pytestmark = pytest.mark.root


# Drop-ins over the image's plan. Their place is fixed, so PID 1 gets a mount namespace with the test's directory there.

MOUNTED = "/mnt/minivm/config"


def with_drop_ins(pod: World, services: dict[str, dict[str, Any]], files: dict[str, str]) -> World:
    config = pod.directory / "config"
    for name, text in files.items():
        path = config / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    script = pod.directory / "in-a-pod.sh"
    script.write_text(
        f"mount -t tmpfs none /mnt && mkdir -p {MOUNTED} && mount --bind {config} {MOUNTED}"
        f' && exec {sys.executable} -I -m init "$@"\n'
    )
    pod.write_plan(services)
    return pod.start(entry=["-c", f"import os, sys; os.execv('/bin/sh', ['sh', {str(script)!r}, *sys.argv[1:]])"])


BASE: dict[str, dict[str, Any]] = {
    "kept": {"command": NOTIFIES, "ready": "notify"},
    "replaced": {"command": shell("echo of the image; exec sleep 1000")},
    "dropped": {"command": shell("echo of the image, too; exec sleep 1000")},
}


def test_drop_ins_are_laid_over_the_images_plan_at_boot(pod: World) -> None:
    with_drop_ins(
        pod,
        BASE,
        {
            "services.d/replaced.yaml": "command: [/bin/sh, -c, 'echo of the operator; exec sleep 1000']\n",
            "services.d/added.yaml": "command: [/bin/sh, -c, 'echo added; exec sleep 1000']\nneeds: [kept]\n",
            "services.d/dropped.yaml": "disabled: true\n",
            "supervisor.d/old.conf": "[program:old]\ncommand=/bin/sh -c 'echo from supervisor; exec sleep 1000'\n",
        },
    )
    snapshot = pod.until_ready()
    assert {view.name for view in snapshot.services} == {"kept", "replaced", "added", "old"}
    for line in ("replaced | of the operator", "added | added", "old | from supervisor"):
        pod.until(lambda line=line: line in pod.output(), line)  # type: ignore[misc]  # bound now, called now
    assert "of the image" not in pod.output()
    assert pod.stop() == 0


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("services.d/added.yaml", "comand: [/bin/true]\n", "did you mean command?"),
        ("services.d/added.yaml", "command: [/bin/true]\nneeds: [kep]\n", "did you mean kept?"),
        ("services.d/added.yaml", "command: [\n", "added.yaml"),
        ("services.d/added.yaml", "command: [/bin/echo, 2026-02-30]\n", "added.yaml"),
        ("services.d/added.yaml", "command: [/bin/true]\nno-new-privileges: !!bool maybe\n", "added.yaml"),
        ("supervisor.d/old.conf", "[program:old]\n", "old.conf"),
    ],
)
def test_a_pod_boots_without_a_wrong_drop_in_and_says_so(pod: World, name: str, text: str, words: str) -> None:
    """A typo took every pod of the role away, one restart after the other."""
    with_drop_ins(pod, BASE, {name: text, "services.d/good.yaml": "command: [/bin/sleep, '1000']\n"})
    snapshot = pod.until_ready()
    assert {view.name for view in snapshot.services} == {*BASE, "good"}
    (told,) = snapshot.degraded
    assert told.startswith("drop-ins: refused: ") and words in told
    assert words in pod.output()


@pytest.mark.parametrize(
    "text",
    [
        "comand: [/bin/sh, -c, 'exec sleep 1000']\n",
        "command: [/bin/sh, -c, 'exec sleep 1000']\nneeds: [no-such]\n",
        "command: [/bin/sh, -c, 'exec sleep $NOT ${NOT_SET}']\n",
        "disabled: ture\n",
    ],
)
def test_what_a_wrong_drop_in_was_to_change_does_not_run_as_the_image_has_it(pod: World, text: str) -> None:
    """The drop-in may serve safety: an sshd that lets fewer people in, a service that must not run."""
    later = BASE | {"later": {"command": ["/bin/sleep", "1000"], "needs": ["replaced"]}}
    with_drop_ins(pod, later, {"services.d/replaced.yaml": text})
    pod.until_state("kept", "ready")
    pod.until_state("replaced", "failed")
    assert "echo of the image\n" not in pod.output() and "replaced | of the image" not in pod.output()
    status, reasons = pod.get("/readyz")
    assert status == 503 and "later waits for replaced: " in reasons and "replaced.yaml" in reasons


def test_a_wrong_drop_in_of_any_length_holds_up_no_boot(pod: World) -> None:
    """The errors of the drop-in fill a pipe that nobody reads before PID 1 has read the plan."""
    with_drop_ins(pod, BASE, {"services.d/added.yaml": f"command: [/bin/true]\nrequired: {'x' * 300_000}\n"})
    snapshot = pod.until_ready()
    assert "added.yaml" in snapshot.degraded[0]


@pytest.mark.parametrize("value", ["'hunter$2'", "[hunter2]"])
@pytest.mark.parametrize("name", ["added", "replaced"])
def test_what_is_wrong_with_a_password_is_told_without_it(pod: World, name: str, value: str) -> None:
    text = f"command: [/bin/true]\nenvironment: {{PASSWORD: {value}}}\n"
    with_drop_ins(pod, BASE, {f"services.d/{name}.yaml": text})
    pod.until_state("kept", "ready")
    pod.until(lambda: "environment.PASSWORD" in pod.get("/status")[1], "it is told")
    assert all("hunter" not in pod.get(path)[1] for path in ("/status", "/readyz"))


@pytest.mark.parametrize("value", ["*hunter2", "!hunter2", "!hunter!2", "!!int hunter2", "!!bool hunter2"])
def test_a_password_that_yaml_cannot_read_is_not_told_either(pod: World, value: str) -> None:
    with_drop_ins(pod, BASE, {"services.d/a.yaml": f"command: [/x]\nenvironment: {{PASSWORD: {value}}}\n"})
    (told,) = pod.until_ready().degraded
    assert "a.yaml" in told and "hunter" not in told


@pytest.mark.parametrize("value", ["hunter 2", 'PASSWORD="hunter%(x)s"', 'PASSWORD="hunter%"'])
def test_what_is_wrong_with_a_programs_password_is_told_without_it(pod: World, value: str) -> None:
    with_drop_ins(pod, BASE, {"supervisor.d/p.conf": f"[program:p]\ncommand=/bin/true\nenvironment={value}\n"})
    (told,) = pod.until_ready().degraded
    assert "p.conf" in told and "environment" in told and "hunter" not in told


def test_a_drop_in_that_needs_another_one_comes_with_it(pod: World) -> None:
    files = {
        "services.d/a.yaml": "command: [/bin/sleep, '1000']\nneeds: [z]\n",
        "services.d/b.yaml": "comand: [/bin/sleep, '1000']\n",
        "services.d/c.yaml": "command: [/bin/sleep, '1000']\nneeds: [b]\n",
        "services.d/z.yaml": "command: [/bin/sleep, '1000']\n",
    }
    with_drop_ins(pod, BASE, files)
    snapshot = pod.until_ready()
    assert {view.name for view in snapshot.services} == {*BASE, "a", "z"}
    assert "b.yaml" in snapshot.degraded[0] and "c.yaml" in snapshot.degraded[0]


# Capabilities that the pod lacks.


def without(capability: str) -> list[str]:
    """PID 1's interpreter and its arguments, in a pod that lacks one capability for good."""
    lose = ["setpriv", f"--bounding-set=-{capability}", f"--inh-caps=-{capability}", sys.executable, "-I", "-m", "init"]
    return ["-c", f"import os, sys; os.execvp('setpriv', [*{lose!r}, *sys.argv[1:]])"]


STATUS = "print(*[line for line in open('/proc/self/status').read().splitlines() if line.startswith('Cap')])\n"


def capability_sets(pod: World, name: str) -> dict[str, int]:
    pod.until(lambda: f"{name} | CapInh" in pod.output(), f"{name} told its capabilities")
    line = next(line for line in pod.output().splitlines() if line.startswith(f"{name} | CapInh"))
    words = line.removeprefix(f"{name} | ").replace(":\t", " ").split()
    return {key: int(value, 16) for key, value in zip(words[::2], words[1::2], strict=True)}


def test_a_capability_that_the_pod_lacks_is_told_and_the_others_are_kept(pod: World) -> None:
    """Without NET_RAW in the pod, a service that asks for it and KILL gets KILL, and says what it did not get."""
    service = {"command": python(f"{STATUS}time.sleep(1000)"), "capabilities": ["NET_RAW", "KILL"], "user": "nobody"}
    pod.write_plan({"a": service})
    pod.start(entry=without("net_raw"))
    pod.until(lambda: "a | minivm: the pod does not have the capabilities NET_RAW" in pod.output(), "it is told")
    sets = capability_sets(pod, "a")
    kill = 1 << 5
    assert {name: sets[name] for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb")} == dict.fromkeys(
        ("CapPrm", "CapEff", "CapBnd", "CapAmb"), kill
    )


def test_without_setpcap_the_log_says_that_root_keeps_its_capabilities(pod: World) -> None:
    """The bounding set cannot be emptied then, and an exec by root takes back what was dropped: the truth is told."""
    service = {"command": python(f"{STATUS}time.sleep(1000)"), "capabilities": ["KILL"]}
    pod.write_plan({"a": service})
    pod.start(entry=without("setpcap"))
    pod.until(lambda: "a | minivm: capabilities are kept: the pod lacks SETPCAP" in pod.output(), "it is told")
    assert capability_sets(pod, "a")["CapEff"] != 1 << 5


def test_a_service_with_no_capabilities_has_none(pod: World) -> None:
    pod.start({"a": {"command": python(f"{STATUS}time.sleep(1000)"), "capabilities": [], "user": "nobody"}})
    assert not any(capability_sets(pod, "a").values())
    assert "minivm:" not in pod.output()


# What is shown of a life.


def test_a_preparation_that_succeeds_does_not_hide_how_the_service_died(pod: World) -> None:
    pod.start({"a": {"command": NOTIFIES, "ready": "notify", "prepare": [["/bin/true"]]}})
    pod.until_ready()
    pod.ask("signal", service="a", signal="KILL")
    pod.until(lambda: pod.service("a").starts == 2 and pod.service("a").ready, "it is back")
    assert pod.service("a").last_exit == "killed by KILL"
    ends = [
        item["detail"] for item in pod.ask("trace")["events"] if (item["service"], item["event"]) == ("a", "exited")
    ]
    assert ends == ["exited 0", "killed by KILL", "exited 0"], "the trace has them all"


# cgroup v2 as a pod sees it: a namespace whose root is a directory of the machine's one v2 hierarchy.


class Hierarchy:
    """The machine's v2 hierarchy, wherever it is mounted otherwise, with a directory for one pod."""

    def __init__(self, mount: Path) -> None:
        self.mount = mount
        self.pod = mount / f"minivm-test-{os.getpid()}"
        mount.mkdir()
        subprocess.run(["mount", "-t", "cgroup2", "none", str(mount)], check=True)
        self.pod.mkdir()
        control = mount / "cgroup.subtree_control"
        self.controllers = sorted(control.read_text().split())
        self.ours = [] if self.controllers else (mount / "cgroup.controllers").read_text().split()[:1]
        for name in self.ours:  # this machine hands none on: one is enough to see that the pod does
            control.write_text(f"+{name}")
            self.controllers.append(name)

    def entry(self, directory: Path) -> list[str]:
        """PID 1 in the pod's own directory, which is the root of all that it sees."""
        script = directory / "in-a-pod.sh"
        within = 'mount -t cgroup2 none /sys/fs/cgroup && exec "$@"'
        script.write_text(
            f"mount -t tmpfs none /run && mkdir -p /run/minivm/env && echo 0 > {self.pod}/cgroup.procs"
            f" && exec unshare --cgroup sh -c '{within}' sh {sys.executable} -I -m init \"$@\"\n"
        )
        return ["-c", f"import os, sys; os.execv('/bin/sh', ['sh', {str(script)!r}, *sys.argv[1:]])"]

    def close(self) -> None:
        below = sorted((path for path in self.pod.rglob("*") if path.is_dir()), reverse=True)
        for directory in [*below, self.pod]:
            until(lambda directory=directory: not (directory / "cgroup.procs").read_text(), "nobody is left in it")  # type: ignore[misc]  # bound now, called now
            directory.rmdir()
        for name in self.ours:
            with contextlib.suppress(OSError):  # somebody else uses it by now
                (self.mount / "cgroup.subtree_control").write_text(f"-{name}")
        subprocess.run(["umount", str(self.mount)], check=True)


@pytest.fixture
def hierarchy(tmp_path: Path) -> Iterator[Hierarchy]:
    made = Hierarchy(tmp_path / "cgroup")
    try:
        if not made.controllers:
            pytest.skip("cgroup v1 uses all controllers of this machine: v2 has none to hand on")
        yield made
    finally:
        made.close()


def test_a_pods_own_cgroup_is_handed_on(hierarchy: Hierarchy, tmp_path: Path) -> None:
    """PID 1 moves processes from the pod's root cgroup to a leaf: a cgroup with processes cannot delegate controllers.

    Then a service can make a place for its jobs, with every controller that the machine gives the pod.
    """
    job = "/sys/fs/cgroup/job"
    look = f"grep ^0: /proc/1/cgroup; mkdir {job} && echo 0 > {job}/cgroup.procs && grep ^0: /proc/self/cgroup"
    look += f" && echo job: $(cat {job}/cgroup.controllers); cat /run/minivm/env/cgroup; exec sleep 1000"
    with world(tmp_path) as pod:
        pod.write_plan(
            {
                "cgroups": {"command": ["builtin:prepare", "cgroups"], "kind": "oneshot"},
                "jobs": {"command": shell(look), "needs": ["cgroups"]},
            }
        )
        pod.start(entry=hierarchy.entry(tmp_path))
        pod.until(lambda: "jobs | MINIVM_CGROUP=v2" in pod.output(), "the service looked")
        said = [line.removeprefix("jobs | ") for line in pod.output().splitlines() if line.startswith("jobs | ")]
        assert said[:2] == ["0::/minivm", "0::/job"]
        given = said[2].removeprefix("job:").split()
        assert given and sorted(given) == hierarchy.controllers
        assert f"cgroups | cgroups: cgroup v2, delegated: {' '.join(given)}" in pod.output()
        assert not (hierarchy.pod / "cgroup.procs").read_text(), "nobody is left where controllers are handed on"
        assert pod.stop() == 0


# What Slurm 24.11 does when slurmd starts in a pod: whoever is beside it goes one directory down.
MOVES_ALL = """
cd /sys/fs/cgroup$(sed -n s/^0:://p /proc/self/cgroup) && mkdir -p system || exit 1
for pid in $(cat cgroup.procs); do echo $pid > system/cgroup.procs; done 2> /dev/null
for name in $(cat cgroup.controllers); do echo +$name > cgroup.subtree_control; done
echo started: $(sed -n s/^0:://p /proc/1/cgroup) of $(find /sys/fs/cgroup/minivm -type d | wc -l); exec sleep 1000
"""


def test_what_slurmd_moves_down_at_each_start_comes_back_up(hierarchy: Hierarchy, tmp_path: Path) -> None:
    """Or the pod's own processes sink until a path is too long for Slurm, and slurmd starts no more."""
    with world(tmp_path) as pod:
        gathered = {"prepare": [["builtin:prepare", "gather-cgroups"]]}
        pod.write_plan(
            {
                "cgroups": {"command": ["builtin:prepare", "cgroups"], "kind": "oneshot"},
                "beside": {"command": ["/bin/sleep", "1000"], "needs": ["cgroups"]},
                "slurmd": {"command": shell(MOVES_ALL), "needs": ["beside"], **gathered},
            }
        )
        pod.start(entry=hierarchy.entry(tmp_path))
        for starts in range(1, 4):
            pod.until(lambda n=starts: pod.output().count("slurmd | started: ") == n, "it has moved all")  # type: ignore[misc]  # bound now, called now
            pod.ask("signal", service="slurmd", signal="KILL")
        said = [line.partition(" | started: ")[2] for line in pod.output().splitlines() if " | started: " in line]
        assert said == ["/minivm/system of 2"] * 3, "one step down, the third time too"
        assert pod.service("beside").starts == 1
        assert pod.stop() == 0
