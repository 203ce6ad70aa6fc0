"""The services as data: they compile for every role, and keep the settings that each daemon turned out to need."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from init.dropins import merge as dropins
from init.errors import ConfigError, ManyErrors
from init.plan.compile import Plan, plan_from_json, plan_to_json, select
from init.plan.service import Late, Probe, RestartWhen, start_edges
from tests.support.plans import ROOT, plan_of

ROLES = ("accounting", "controller", "worker", "login")


def waits_for(plan: Plan, name: str) -> set[str]:
    """Return all services that a service waits for before it starts, directly or indirectly."""
    edges = start_edges(plan.services)
    found: set[str] = set()
    todo = [name]
    while todo:
        for other in edges[todo.pop()]:
            if other not in found:
                found.add(other)
                todo.append(other)
    return found


@pytest.mark.parametrize("role", ROLES)
def test_a_role_compiles_and_survives_its_json(role: str) -> None:
    plan = plan_of(role)
    assert plan_from_json(plan_to_json(plan), "plan.json") == plan


def test_every_service_file_is_named_by_a_role() -> None:
    used: set[str] = set()
    for path in (ROOT / "images" / "roles").glob("*.yaml"):
        # NAME=FILE: that role's own definition.
        used |= {entry.rpartition("=")[2] for entry in yaml.safe_load(path.read_text()).get("services") or []}
    assert set(dropins.load_directory()) == used


@pytest.mark.parametrize(
    ("role", "service", "first"),
    [
        ("controller", "slurmctld", {"munged", "slurm-config", "slurmdbd", "sssd"}),
        ("controller", "slurmdbd", {"mariadb", "munged", "slurm-config"}),
        ("worker", "slurmd", {"munged", "controller", "fresh-node", "node", "sssd"}),
        ("worker", "cluster-proof", {"slurmd", "munged"}),
        ("worker", "fresh-node", {"munged", "controller", "node"}),
        ("login", "sackd", {"munged", "controller", "cluster-proof"}),
        ("login", "sshd", {"hostkeys", "sssd"}),
    ],
)
def test_who_must_be_there_first(role: str, service: str, first: set[str]) -> None:
    assert first <= waits_for(plan_of(role), service)


def test_slurmctld_starts_without_a_database_when_that_has_failed_once() -> None:
    slurmctld = plan_of("controller").service("slurmctld")
    slurmdbd = plan_of("controller").service("slurmdbd")
    assert slurmctld is not None and slurmdbd is not None
    assert "slurmdbd" in slurmctld.after and "slurmdbd" not in slurmctld.needs
    assert slurmdbd.ready.within > 0 and not slurmdbd.required


def test_a_slurmdbd_that_converts_its_tables_for_hours_is_not_stopped() -> None:
    for role in ("controller", "accounting"):
        slurmdbd = plan_of(role).service("slurmdbd")
        assert slurmdbd is not None and slurmdbd.ready.late is Late.WAIT


def test_slurmctld_is_never_reloaded_by_a_raw_hup() -> None:
    slurmctld = plan_of("controller").service("slurmctld")
    assert slurmctld is not None
    assert slurmctld.reload.signal == "" and slurmctld.reload.command[-1] == "reconfigure"


@pytest.mark.parametrize("name", ["slurmctld", "slurmd", "slurmd-static", "sackd"])
def test_slurm_daemons_tell_when_they_are_ready_and_when_they_replace_themselves(name: str) -> None:
    service = dropins.load_directory()[name]
    assert "--systemd" in service.command and service.ready.probe is Probe.NOTIFY
    assert service.command[0].startswith("/usr/sbin/"), "one started by a bare name dies on a reconfigure"


@pytest.mark.parametrize("name", ["munged", "mariadb", "slurmctld", "slurmdbd", "sackd", "slurmrestd"])
def test_daemons_that_need_no_rights_have_none(name: str) -> None:
    service = dropins.load_directory()[name]
    assert service.user not in ("", "root") and service.capabilities == ()


def test_a_restart_of_slurmd_never_runs_the_fresh_pod_sequence() -> None:
    """A restart of slurmd skips the fresh-pod sequence.

    Its `state=down` would kill surviving jobs, so it is a oneshot of the pod and not a preparation of slurmd.
    """
    for name in ("slurmd", "slurmd-static"):
        assert dropins.load_directory()[name].prepare == (("builtin:prepare", "gather-cgroups", "fast-scripts"),)
    assert dropins.load_directory()["fresh-node"].restart.when is RestartWhen.FAILURE


@pytest.mark.parametrize(
    ("env", "present", "absent"),
    [
        ({}, {"mariadb", "slurmdbd"}, {"slurmrestd", "gitsync"}),
        ({"MINIVM_ACCOUNTING": "external"}, {"slurmdbd"}, {"mariadb"}),
        ({"MINIVM_ACCOUNTING": "pod"}, {"slurmctld", "accounting"}, {"mariadb", "slurmdbd"}),
        ({"MINIVM_ACCOUNTING": "none"}, {"slurmctld"}, {"mariadb", "slurmdbd"}),
        ({"MINIVM_SLURMRESTD": "0.0.0.0:6820", "MINIVM_GITSYNC_REPO": "x"}, {"slurmrestd", "gitsync"}, set[str]()),
    ],
)
def test_settings_choose_the_controllers_services(env: dict[str, str], present: set[str], absent: set[str]) -> None:
    names = {service.name for service in select(plan_of("controller"), env, lambda path: False).services}
    assert present <= names and not absent & names


def test_accounting_only_degrades_the_controller_and_is_all_of_its_own_pod() -> None:
    for name in ("mariadb", "slurmdbd"):
        own, embedded = plan_of("accounting").service(name), plan_of("controller").service(name)
        assert own and own.required and embedded and not embedded.required
    slow = plan_of("accounting").service("accounting")
    assert slow and not slow.required, "a slow answer takes the pod's address from nobody"


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    ("mode", "chosen", "gone"),
    [("", "munged", "slurm-key"), ("munge", "munged", "slurm-key"), ("slurm", "slurm-key", "munged")],
)
def test_a_pod_has_munged_or_the_key_of_slurms_own_authentication(role: str, mode: str, chosen: str, gone: str) -> None:
    plan = select(plan_of(role), {"MINIVM_AUTH": mode}, lambda path: True)
    names = {service.name for service in plan.services}
    assert chosen in names and gone not in names
    for service in plan.services:
        if service.name in ("slurmctld", "slurmdbd", "slurmd", "sackd", "cluster-proof", "fresh-node"):
            assert chosen in service.needs, service.name


@pytest.mark.parametrize(("mode", "name"), [("", "slurmd"), ("dynamic", "slurmd"), ("static", "slurmd-static")])
def test_a_worker_has_one_slurmd_and_its_dependants_wait_for_it(mode: str, name: str) -> None:
    plan = select(plan_of("worker"), {"MINIVM_NODE_MODE": mode}, lambda path: True)
    assert [item.name for item in plan.services if item.name.startswith("slurmd")] == [name]
    adopt = plan.service("pam-adopt")
    assert adopt is not None and adopt.needs == (name,)


def write(directory: Path, name: str, text: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / name
    path.write_text(text)
    return path


def test_a_drop_in_replaces_adds_and_takes_away(tmp_path: Path) -> None:
    write(tmp_path / "services.d", "munged.yaml", "command: [/usr/sbin/munged, --foreground, --num-threads=8]\n")
    write(tmp_path / "services.d", "extra.yaml", "command: [/bin/sleep, inf]\nneeds: [munged]\n")
    write(tmp_path / "services.d", "supervisor.yaml", "disabled: true\n")
    write(tmp_path / "services.d", ".half.yaml.swp", "nonsense: [")
    merged = dropins.merge(plan_of("login"), [tmp_path])
    names = [service.name for service in merged.services]
    assert "extra" in names and "supervisor" not in names and names.index("munged") < names.index("extra")
    munged = merged.service("munged")
    assert munged is not None and munged.command[-1] == "--num-threads=8" and munged.user == ""


def test_the_later_root_wins(tmp_path: Path) -> None:
    for name in ("first", "second"):
        write(tmp_path / name / "services.d", "extra.yaml", f"command: [/bin/echo, {name}]\n")
    services, _ = dropins.load_dropins([tmp_path / "first", tmp_path / "second"])
    assert [service.command[-1] for service in services] == ["second"]


@pytest.mark.parametrize(
    ("text", "field", "hint"),
    [
        ("command: [/bin/x]\nneds: [munged]\n", "neds", "did you mean needs?"),
        ("command: [/bin/x]\nrestart: {limt: 3}\n", "restart.limt", "did you mean limit?"),
        ("command: /bin/x --now\n", "command", "write [/bin/x, --now]"),
        ("command: [/bin/x]\ncommand: [/bin/y]\n", "line 2", ""),
        ("command: [/bin/x\n", "line 2", ""),
        ("- a list\n", "", ""),
    ],
)
def test_a_wrong_drop_in_names_file_key_and_what_would_be_right(
    tmp_path: Path, text: str, field: str, hint: str
) -> None:
    path = write(tmp_path / "services.d", "extra.yaml", text)
    with pytest.raises(ConfigError) as caught:
        dropins.load_dropins([tmp_path])
    assert caught.value.file == str(path)
    assert field in (caught.value.field or "")
    assert hint in caught.value.hint


def test_all_wrong_drop_ins_are_told_at_once(tmp_path: Path) -> None:
    write(tmp_path / "services.d", "one.yaml", "comand: [/bin/x]\n")
    write(tmp_path / "services.d", "two.yaml", "command: [x]\n")
    with pytest.raises(ManyErrors) as caught:
        dropins.load_dropins([tmp_path])
    assert len(caught.value.errors) == 2


def test_taking_away_what_others_need_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "services.d", "munged.yaml", "disabled: true\n")
    with pytest.raises(ConfigError, match="munged"):
        dropins.merge(plan_of("login"), [tmp_path])


def test_the_child_of_pid_1_prints_the_merged_plan_or_the_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    baked = tmp_path / "plan.json"
    baked.write_text(plan_to_json(plan_of("login")))
    extra = write(tmp_path / "services.d", "extra.yaml", "command: [/bin/sleep, inf]\n")
    assert dropins.main(["merge", str(baked), str(tmp_path)]) == 0
    assert "extra" in json.loads(capsys.readouterr().out)["services"]
    extra.write_text("comand: [/bin/sleep]\n")
    assert dropins.main(["merge", str(baked), str(tmp_path)]) == dropins.EX_CONFIG
    assert "did you mean command?" in capsys.readouterr().err


def test_a_boot_takes_what_is_right_and_holds_back_what_a_wrong_file_was_to_change(tmp_path: Path) -> None:
    write(tmp_path / "services.d", "a.yaml", "command: [/bin/x]\nneeds: [z]\n")
    write(tmp_path / "services.d", "b.yaml", "command: [/bin/x]\nneeds: [nowhere]\n")
    write(tmp_path / "services.d", "c.yaml", "command: [/bin/x, '${NOT_SET}']\n")
    write(tmp_path / "services.d", "z.yaml", "command: [/bin/x]\n")
    write(tmp_path / "services.d", "sssd.yaml", "disabled: ture\n")
    write(tmp_path / "services.d", "sshd.yaml", "command: [/usr/sbin/sshd, '${NOT_SET}']\n")
    write(tmp_path / "supervisor.d", "p.conf", "[program:p]\ncommand=/bin/sleep 1\nautorestrat=true\n")
    before = plan_of("login")
    plan, wrong = dropins.merge_for_boot(before, [tmp_path], {})
    assert {service.name for service in plan.services} == {*(s.name for s in before.services), "a", "z"}
    for name in ("sssd", "sshd"):
        held, was = plan.service(name), before.service(name)
        assert held is not None and was is not None and held.required is was.required
        assert held.command[0] == "builtin:refused" and f"{name}.yaml" in held.command[1]
    told = "\n".join(str(error) for error in wrong)
    assert len(wrong) == 5 and all(word in told for word in ("b.yaml", "c.yaml", "sssd.yaml", "sshd.yaml", "p.conf"))
    again = plan_from_json(plan_to_json(plan), "test")
    assert [service.name for service in again.services] == [service.name for service in plan.services]


def test_a_wrong_file_does_not_hold_back_the_right_one_that_takes_its_place(tmp_path: Path) -> None:
    """An overridden invalid file does not block the valid one.

    The file in the later directory wins, and errors of a file that it overrides do not matter.
    """
    image, site = tmp_path / "etc", tmp_path / "mnt"
    write(image / "services.d", "sssd.yaml", "comand: [/bin/wrong]\n")
    write(site / "services.d", "sssd.yaml", "command: [/bin/right]\n")
    write(image / "services.d", "sshd.yaml", "command: [/bin/right]\n")
    write(site / "services.d", "sshd.yaml", "comand: [/bin/wrong]\n")
    plan, wrong = dropins.merge_for_boot(plan_of("login"), [image, site], {})
    sssd, sshd = plan.service("sssd"), plan.service("sshd")
    assert sssd is not None and sssd.command == ("/bin/right",)
    assert sshd is not None and sshd.command[0] == "builtin:refused"
    assert len(wrong) == 1 and str(site / "services.d" / "sshd.yaml") in str(wrong[0])


def test_taking_away_what_others_need_holds_it_back_at_boot(tmp_path: Path) -> None:
    write(tmp_path / "services.d", "munged.yaml", "disabled: true\n")
    plan, wrong = dropins.merge_for_boot(plan_of("login"), [tmp_path], {})
    held = plan.service("munged")
    assert len(wrong) == 1 and held is not None and held.command[0] == "builtin:refused"


PROGRAMS = """\
[supervisord]
nodaemon=true

[program:web]
command=/bin/sleep 1000 ; forever
numprocs=2
process_name=%(program_name)s_%(process_num)02d
priority=10
user=nobody
stopsignal=INT
stopwaitsecs=3
environment=A="x$y",HOME="%(ENV_HOME)s"

[program:Late]
command=sleep "a b"
autorestart=true
startretries=5
directory=/tmp
stdout_logfile=/var/log/late.log
"""


def test_supervisor_programs_run_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/root")
    write(tmp_path / "supervisor.d", "site.conf", PROGRAMS)
    services = {service.name: service for service in dropins.load_dropins([tmp_path])[0]}
    assert list(services) == ["web_00", "web_01", "late"]
    web, late = services["web_00"], services["late"]
    assert web.command == ("/bin/sleep", "1000") and web.restart.when is RestartWhen.FAILURE
    assert (web.stop.signal, web.stop.grace) == ("INT", 3.0) and web.user == "65534"
    assert {item.name: item.value for item in web.environment} == {"A": "x$$y", "HOME": "/root"}
    assert late.command[1:] == ("a b",) and late.command[0].startswith("/")
    assert late.restart.when is RestartWhen.ALWAYS and late.restart.limit == 5 and late.cwd == "/tmp"
    assert {"web_00", "web_01"} <= set(late.after), "a lower priority number starts first"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[program:x]\ncommand=/bin/x\nautorestrat=true\n", "did you mean autorestart?"),
        ("[program:x]\ncommand=/bin/x\nautorestart=perhaps\n", "autorestart"),
        ("[program:x]\nuser=nobody\n", "command"),
        ("[program:x]\ncommand=/no/such/thing-at-all 'open\n", "command"),
        ("[program:x]\ncommand=nowhere-on-path\n", "PATH"),
        ("[eventlistener:x]\ncommand=/bin/x\nevents=EVENT\n", "not supported"),
        ("[program:x\ncommand=/bin/x\n", "no section headers"),
    ],
)
def test_a_wrong_program_file_is_told(tmp_path: Path, text: str, words: str) -> None:
    write(tmp_path / "supervisor.d", "site.conf", text)
    with pytest.raises(ConfigError) as caught:
        dropins.load_dropins([tmp_path])
    assert words in str(caught.value) and str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"\xff\xfe", "not UTF-8 text"),
        (b"- command", "wanted a mapping"),
        (b"", "wanted a mapping"),
        (b"command: [", "not YAML"),
        (b"? [a, b]\n: c\n", "a key is one word"),
        (b"kind: oneshot\nkind: longrun\n", "'kind' appears twice"),
        (b"command: " + b"[" * 5000, "nested too deeply"),
    ],
)
def test_a_file_that_is_no_service_is_told_by_name(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=told) as caught:
        dropins.load_service(path)
    assert str(caught.value).startswith(str(path))


def test_slurmrestd_waits_a_second_for_a_name_and_no_five() -> None:
    """slurmrestd's resolver options give a timeout of 1 s and not 5 s, because slurmrestd serves no request meanwhile.

    Only the C library itself shows how it parses the options.
    """
    (service,) = (one for one in plan_of("controller").services if one.name == "slurmrestd")
    code = (
        "import ctypes; libc = ctypes.CDLL(None); libc.__res_init(); state = libc.__res_state;"
        "state.restype = ctypes.POINTER(ctypes.c_int * 2); print(*state().contents)"
    )
    plain = subprocess.run([sys.executable, "-c", code], env={}, capture_output=True, text=True, check=True)
    set_ = subprocess.run(
        [sys.executable, "-c", code],
        env={one.name: one.value for one in service.environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert set_.stdout.split() == ["1", "3"] != plain.stdout.split()
