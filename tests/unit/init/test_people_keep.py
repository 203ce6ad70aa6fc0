"""A pod takes over `people.yaml`: who is known, with which keys and uid, and what stays when the file is wrong."""

from __future__ import annotations

import os
import pwd
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from init.people import keep
from init.people.spec import PeopleGroup, PeopleList, Person, Taken, settle
from init.pod.pod import Pod
from tests.support.people_files import ED, OTHER, ada, people

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="files get root as their owner")
NOW = 1_800_000_000.0
BOB = {"name": "bob", "uid": 5002, "group": "lab", "keys": [OTHER]}


class Here:
    """A pod below a directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.pod = Pod({}, root)

    def mount(self, data: bytes | None) -> None:
        file = self.root / "mnt/minivm/people/people.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        if data is None:
            file.unlink(missing_ok=True)
        else:
            file.write_bytes(data)

    def run(self, now: float = NOW) -> list[str]:
        return keep.keep(self.pod, now)[0]

    def extra(self, name: str) -> list[str]:
        return (self.root / "var/lib/extrausers" / name).read_text().splitlines()

    def keys(self) -> dict[str, str]:
        return {path.name: path.read_text() for path in (self.root / "run/minivm/people/keys").iterdir()}


@pytest.fixture
def here(tmp_path: Path) -> Here:
    return Here(tmp_path)


def test_people_are_known_by_name_group_and_key(here: Here) -> None:
    groups = [{"name": "lab", "gid": 5000}, {"name": "gpu", "gid": 5100}]
    here.mount(people(ada(groups=["gpu"], gecos="Ada", shell="/bin/zsh"), BOB, groups=groups))
    assert here.run() == []
    assert here.extra("passwd") == ["ada:x:5001:5000:Ada:/home/ada:/bin/zsh", "bob:x:5002:5000::/home/bob:/bin/bash"]
    assert here.extra("group") == ["lab:x:5000:", "gpu:x:5100:ada"]
    assert [line.split(":")[:2] for line in here.extra("shadow")] == [["ada", "*"], ["bob", "*"]]
    assert here.keys() == {"ada": f"{ED}\n", "bob": f"{OTHER}\n"}
    modes = {name: (here.root / "var/lib/extrausers" / name).stat() for name in ("passwd", "group", "shadow")}
    assert [stat.S_IMODE(status.st_mode) for status in modes.values()] == [0o644, 0o644, 0o640]
    assert (modes["shadow"].st_uid, modes["shadow"].st_gid) == (0, 42)


def test_only_a_pod_without_people_waits_for_a_better_file(here: Here) -> None:
    """Old pods keep their people: a roll-out with a wrong file must stop at its first pod."""
    here.mount(b"users: [")
    assert keep.keep(here.pod, NOW)[1] is False
    here.mount(people())
    assert keep.keep(here.pod, NOW) == ([], True), "nobody is wanted"
    here.mount(people(ada()))
    assert keep.keep(here.pod, NOW) == ([], True)
    here.mount(b"users: [")
    problems, is_usable = keep.keep(here.pod, NOW)
    assert problems and is_usable


def test_a_newer_copy_counts_before_the_mounted_file(here: Here) -> None:
    """A login pod that leaves has no newer mounted file; the copy goes when its drain is taken back."""
    here.mount(people(ada(), BOB))
    assert here.run() == [] and set(here.keys()) == {"ada", "bob"}
    latest = here.root / "run/minivm/people/latest.yaml"
    latest.write_bytes(people(BOB))
    assert here.run() == [] and set(here.keys()) == {"bob"}
    latest.write_bytes(b"users: [")
    assert here.run() and set(here.keys()) == {"bob"}
    latest.unlink()
    assert here.run() == [] and set(here.keys()) == {"ada", "bob"}


def test_no_pod_waits_for_an_absent_file_or_beside_a_directory(here: Here) -> None:
    here.mount(None)
    problems, is_usable = keep.keep(here.pod, NOW)
    assert problems and is_usable, "a ConfigMap may come later"
    here.mount(b"users: [")
    assert keep.keep(here.pod, NOW)[1] is False
    directory = here.root / "mnt/minivm/secrets/sssd/sssd.conf"
    directory.parent.mkdir(parents=True)
    directory.touch()
    assert keep.keep(here.pod, NOW)[1] is True, "the directory's people log in"


def test_a_key_and_a_person_expire_without_a_change_of_the_file(here: Here) -> None:
    soon = "2027-01-15T08:00:10Z"  # ten seconds after NOW
    here.mount(people(ada(keys=[{"key": ED, "expires": soon}, OTHER]), BOB | {"until": soon}))
    assert here.run() == [] and here.keys() == {"ada": f"{ED}\n{OTHER}\n", "bob": f"{OTHER}\n"}
    assert here.run(NOW + 10) == []
    assert here.keys() == {"ada": f"{OTHER}\n"} and [line[:3] for line in here.extra("passwd")] == ["ada"]
    here.mount(b"no file of people")
    here.run(NOW - 5)
    here.run(NOW + 11)
    assert here.keys() == {"ada": f"{OTHER}\n"}, "times count also while the file is wrong"


def test_many_mistakes_are_one_short_problem_of_the_pod(here: Here) -> None:
    here.mount(people(ada(uid=0), BOB | {"group": "none"}, "carol"))
    (problem,) = here.run()
    assert "users[0] (ada).uid: " in problem and "`minivm people check` tells 2 more; no person of it" in problem
    assert len(problem) < 400


@pytest.mark.parametrize("wrong", [b"", b"\xff", b"users: [", people(ada(uid=0)), people(ada(), ada()), None])
def test_a_wrong_or_missing_file_keeps_the_people_before_and_says_so(here: Here, wrong: bytes | None) -> None:
    here.mount(people(ada(), BOB))
    here.run()
    before = here.extra("passwd"), here.keys()
    here.mount(wrong)
    for _ in range(2):
        (problem,) = here.run()
        assert "people.yaml" in problem and problem.endswith("people before stay")
        assert (here.extra("passwd"), here.keys()) == before
    here.mount(people(BOB))
    assert here.run() == [] and list(here.keys()) == ["bob"]


def test_a_pod_whose_file_is_late_has_nobody_and_takes_it_once_it_comes(here: Here) -> None:
    (problem,) = here.run()
    assert "mount a ConfigMap or Secret with the key people.yaml" in problem and here.extra("passwd") == []
    here.mount(people(ada()))
    assert here.run() == [] and list(here.keys()) == ["ada"]


def test_a_new_pod_with_the_old_state_knows_everybody_before_its_file_comes(here: Here) -> None:
    here.mount(people(ada()))
    here.run()
    for name in ("passwd", "group", "shadow"):
        (here.root / "var/lib/extrausers" / name).unlink()
    (here.root / "run/minivm/people/keys/ada").unlink()
    here.mount(None)
    here.run()
    assert here.keys() == {"ada": f"{ED}\n"} and len(here.extra("passwd")) == 1


def test_a_damaged_state_is_as_none(here: Here) -> None:
    here.mount(people(ada()))
    for text in ("", "{", "[]", '{"ids": {"ada": "x"}}', '{"ids": {}, "people": {"users": [1], "groups": []}}'):
        file = here.root / "var/lib/minivm/people/state.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        (problem,) = here.run()
        assert "state.json was damaged" in problem and list(here.keys()) == ["ada"]
        assert file.with_name("state.json.damaged").read_text() == text
        file.with_name("state.json.damaged").unlink()
        assert here.run() == []


def test_a_changed_uid_is_refused_and_new_keys_count(here: Here) -> None:
    here.mount(people(ada()))
    here.run()
    here.mount(people(ada(uid=5009, keys=[OTHER]), BOB))
    for _ in range(2):
        (problem,) = here.run()
        assert "users (ada).uid: 5009, and ada has had 5001 here: write 5001" in problem
        assert here.extra("passwd")[0].startswith("ada:x:5001:") and here.keys()["ada"] == f"{OTHER}\n"
        assert len(here.extra("passwd")) == 2, "the others are taken over"


def test_a_removed_persons_uid_is_not_given_to_another_name(here: Here) -> None:
    here.mount(people(ada(), BOB))
    here.run()
    here.mount(people(BOB))
    assert here.run() == [] and list(here.keys()) == ["bob"]
    here.mount(people(BOB, ada(name="eve")))
    (problem,) = here.run()
    assert "users (eve).uid: 5001 is that of ada here" in problem and list(here.keys()) == ["bob"]
    here.mount(people(BOB, ada()))
    assert here.run() == [] and sorted(here.keys()) == ["ada", "bob"], "the same person may come back"


def lab(*users: Person) -> PeopleList:
    return PeopleList((PeopleGroup("lab", 5000),), users)


def test_two_people_who_swap_their_uids_keep_them() -> None:
    before = lab(Person("ada", 5001, "lab"), Person("bob", 5002, "lab"))
    wanted = lab(Person("ada", 5002, "lab"), Person("bob", 5001, "lab"))
    settled = settle(wanted, {"ada": 5001, "bob": 5002}, before)
    assert settled.people == before and len(settled.refused) == 2


def test_nobody_takes_a_name_or_number_of_the_image() -> None:
    taken = Taken(frozenset({"ubuntu", "docker"}), frozenset({5001}), frozenset({5100}))
    wanted = PeopleList(
        (PeopleGroup("lab", 5000), PeopleGroup("docker", 5001), PeopleGroup("gpu", 5100)),
        (Person("ubuntu", 5005, "lab"), Person("ada", 5001, "lab"), Person("bob", 5002, "lab", ("docker",)),
         Person("eve", 5003, "gpu")),
    )  # fmt: skip
    settled = settle(wanted, {}, taken=taken)
    assert settled.people == lab(Person("bob", 5002, "lab"))
    assert [problem.partition(":")[0] for problem in settled.refused] == [
        "groups (docker)", "groups (gpu)", "users (ubuntu).name", "users (ada).name", "users (eve).group",
    ]  # fmt: skip


def test_a_mistake_in_a_group_takes_nothing_from_its_people(here: Here) -> None:
    (here.root / "etc").mkdir()
    (here.root / "etc/group").write_text("docker:x:1000:\n")
    here.mount(people(ada(), BOB))
    assert here.run() == []
    wrong = [{"name": "lab", "gid": 1000}, {"name": "gpu", "gid": 5100}]
    here.mount(people(ada(keys=[OTHER]), BOB, groups=wrong))
    problems = here.run()
    assert any(problem.startswith("groups (lab)") for problem in problems)
    assert [line.split(":")[:4] for line in here.extra("passwd")] == [
        ["ada", "x", "5001", "5000"], ["bob", "x", "5002", "5000"],
    ]  # fmt: skip
    assert here.keys()["ada"] == f"{OTHER}\n" and here.extra("group")[-1].startswith("lab:x:5000:")


def test_a_name_that_the_image_has_now_is_nobodys_of_the_file(here: Here) -> None:
    here.mount(people(ada(), BOB))
    here.run()
    settled = settle(keep.load(here.pod).people, {"ada": 5001, "bob": 5002}, taken=Taken(frozenset({"ada"})))
    assert [person.name for person in settled.people.users] == ["bob"] and len(settled.refused) == 1


def test_a_full_disk_keeps_no_removed_person_and_no_withdrawn_key(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    here.mount(people(ada(keys=[ED, OTHER]), BOB))
    here.run()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(keep, "write_json", full)
    here.mount(people(ada(keys=[OTHER]), ada(name="eve", uid=5009)))
    (problem,) = here.run()
    assert "cannot store the people" in problem and "no person is added" in problem
    assert here.keys() == {"ada": f"{OTHER}\n"} and len(here.extra("passwd")) == 1


def test_a_person_who_moved_to_the_directory_is_not_asked_for_again(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory may be away later: nobody's sessions end for that."""
    (here.root / "etc/minivm").mkdir(parents=True)
    (here.root / "etc/minivm/plan.json").write_text('{"role": "login"}')
    here.mount(people(ada(), BOB))
    here.run()
    seen: list[dict[int, str]] = []

    def end(gone: dict[int, str], is_known: Callable[[int], bool], suspects: list[int]) -> list[str]:
        seen.append(dict(gone))
        return [name for uid, name in gone.items() if not is_known(uid)]

    monkeypatch.setattr(keep, "end_processes", end)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: uid)
    here.mount(people(BOB))
    here.run()
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    here.run()
    assert seen == [{5001: "ada"}, {}] and keep.load(here.pod).moved == {5001}
    here.mount(people(ada(), BOB))
    here.run()
    assert keep.load(here.pod).moved == set()


def test_without_an_answer_of_sssd_nobodys_sessions_end(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    (here.root / "etc/sssd").mkdir(parents=True)
    (here.root / "etc/sssd/sssd.conf").touch()
    assert not keep.directory_answers(here.pod)
    (here.root / "var/lib/sss/pipes").mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as listener:
        monkeypatch.chdir(here.root)
        listener.bind("var/lib/sss/pipes/nss")
        listener.listen()
        assert keep.directory_answers(Pod({}, Path()))


def test_nothing_is_written_where_nothing_changed(here: Here) -> None:
    here.mount(people(ada()))
    here.run()
    files = [path for path in here.root.rglob("*") if path.is_file()]
    before = {path: path.stat().st_ino for path in files}
    here.run()
    assert {path: path.stat().st_ino for path in files} == before


def test_the_chart_s_json_is_a_file_of_people(here: Here) -> None:
    import json

    here.mount(json.dumps(yaml.safe_load(people(ada(gecos="<Ä&>")))).encode())
    assert here.run() == [] and ":<Ä&>:" in here.extra("passwd")[0]


def test_few_problems_are_told_in_one_line() -> None:
    text = keep.format_problems([f"users[{number}]: \x1b[2J\n{'x' * 5000}" for number in range(50)])
    assert (
        "\n" not in text and text.isprintable() and len(text) < 2500 and text.endswith("47 more: `minivm people show`")
    )
