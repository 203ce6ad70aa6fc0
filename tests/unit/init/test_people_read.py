"""`people.yaml` is read strictly: each hostile or mistaken input is refused with its field."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
import yaml

from init.errors import ConfigError, ManyErrors
from init.people import read, spec
from init.people.spec import PeopleGroup, Person, PersonKey
from tests.pages import blocks
from tests.reader import ROOT
from tests.support.people_files import ED, OTHER, RSA, TOKEN, ada, body, people


def refusal(data: bytes) -> str:
    with pytest.raises(ConfigError) as caught:
        read.parse(data)
    text = str(caught.value)
    assert text.startswith("people.yaml: "), "each error names the file"
    assert len(text) < 700 and text.isprintable()
    return text


def test_a_whole_file() -> None:
    text = f"""
groups:
  - {{name: lab, gid: 5000}}
  - {{name: gpu-team, gid: 70000}}
users:
  - name: ada
    uid: 5001
    group: lab
    groups: [gpu-team]
    shell: /usr/bin/zsh
    gecos: Ada Lovelace
    until: 2027-01-31
    keys:
      - {ED} ada@laptop
      - key: {RSA}
        expires: 2027-01-31T18:00:00Z
      - {{key: {TOKEN}, expires: "2027-01-31"}}
  - {{name: b.ob, uid: 1000, group: lab}}
"""
    found = read.parse(text.encode())
    assert found.groups == (PeopleGroup("lab", 5000), PeopleGroup("gpu-team", 70000))
    day = 1801440000  # 2027-02-01: the day that is named is included
    ada, bob = found.users
    assert bob == Person("b.ob", 1000, "lab")
    assert (ada.shell, ada.gecos, ada.groups, ada.until) == ("/usr/bin/zsh", "Ada Lovelace", ("gpu-team",), day)
    assert ada.keys == (PersonKey(ED, "ada@laptop"), PersonKey(RSA, "", day - 6 * 3600), PersonKey(TOKEN, "", day))
    assert spec.from_state(spec.to_state(found)) == found
    assert read.parse(yaml.safe_dump(spec.to_mapping(found)).encode()) == found, "the chart's values are the same file"


def test_the_page_s_example_is_a_file() -> None:
    (example,) = [block.text for block in blocks(ROOT / "docs/how-to/add-a-user.md") if block.shown]
    (carol,) = read.parse(example.encode()).users
    assert carol.name == "carol" and len(carol.keys) == 2 and carol.until


MISTAKES = {
    "empty": (b"", "wanted a mapping"),
    "no users": (b"groups: []\n", "users: cannot read the people: wanted a list"),
    "no file of people": (b"- a\n", "wanted a mapping"),
    "not UTF-8": (b"\xff", "not UTF-8"),
    "a zero byte": (b"users: [\0]", "not YAML"),
    "two documents": (b"groups: []\nusers: []\n---\nusers: []\n", "not YAML"),
    "an object of Python": (b"users: !!python/object/apply:os.system [true]\ngroups: []", "not YAML"),
    "a key twice": (b"users: []\nusers: []\ngroups: []", "'users' appears twice"),
    "merged": (b"groups: []\nusers: [{<<: {name: x}}]", "a key is one word"),
    "a list as a key": (b"? [a]\n: b\n", "a key is one word"),
    "laughs": (b"a: &a [x, x]\nb: &b [*a, *a]\nusers: [*b, *b]\n", "anchor or alias"),
    "brackets": (b"[" * 2_000_000, "nested too deeply"),
    "dashes": (b"- " * 2_000_000, "nested too deeply"),
    "questions": (b"? " * 300_000, "nested too deeply"),
    "an impossible date": (b"groups: []\nusers: [{until: 2027-13-41}]", "impossible date"),
    "a long number": (b"groups: []\nusers: [{uid: " + b"9" * 5000 + b"}]", "does not fit the type"),
    "unknown at the top": (people(ada(), sudo=[]), "sudo: cannot read the people: unknown key"),
    "unknown of a user": (people(ada(shel="/bin/sh")), "users[0] (ada).shel: cannot read the people: unknown key"),
    "a long unknown key": (people(ada(**{"k" * 100_000: 1})), "unknown key"),
    "a number as a key": (b"groups: []\nusers: []\n7: x", "unknown key int 7"),
    "users as a mapping": (b"groups: []\nusers: {ada: 5001}", "users: cannot read the people: wanted a list"),
    "a user as a text": (b"groups: []\nusers: [ada]", "users[0]: cannot read the people: wanted a mapping"),
    "the same name": (people(ada(), ada(uid=5002)), "users[1].name"),
    "the same uid": (people(ada(), ada(name="bob")), "5001 is also that of users[0]"),
    "the same group": (people(groups=[{"name": "a", "gid": 5000}, {"name": "a", "gid": 5001}]), "groups[1].name"),
    "the same gid": (people(groups=[{"name": "a", "gid": 5000}, {"name": "b", "gid": 5000}]), "groups[1].gid"),
    "no group": (people(ada(group=None)), "users[0] (ada).group: cannot read the people: wanted a group's name"),
    "an unknown group": (people(ada(groups=["docker"])), "no group 'docker' in this file (add it to `groups`"),
    "a group twice": (people(ada(groups=["lab"])), "groups: cannot read the people: a group appears twice"),
    "a group of the system": (people(groups=[{"name": "sudo", "gid": 5000}]), "sudo is a name of the system"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_with_its_field(mistake: str) -> None:
    data, wanted = MISTAKES[mistake]
    assert wanted in refusal(data)


BAD_NAMES = ["", "Ada", "ada lovelace", "../root", "a/b", ".ada", "-ada", "1ada", "ada:", "ada\n", "ädä", "a" * 33,
             "ada-", "$(id)", "ada,bob", True, None, 7, ["ada"],
             "root", "slurm", "nobody", "munge", "sshd"]  # fmt: skip


def test_every_wrong_entry_is_told_at_once() -> None:
    data = people(
        ada(uid=0), ada(name="bob", group="nolab"), "carol", ada(name="dora", uid=5004), ada(name="dora", uid=5004),
        ada(name="erin", uid=5005, group="wrong"),
        groups=[{"name": "lab", "gid": 5000}, {"name": "wrong", "gid": 7}],
    )  # fmt: skip
    with pytest.raises(ManyErrors) as caught:
        read.parse(data)
    assert [error.field for error in caught.value.errors] == [
        "groups[1] (wrong).gid", "users[0] (ada).uid", "users[1] (bob).group", "users[2]", "users[4].name",
        "users[4].uid",
    ]  # fmt: skip
    assert len(str(caught.value).splitlines()) == 6, "and people of a wrong group are right"


def test_the_mistakes_that_are_told_are_bounded() -> None:
    with pytest.raises(ManyErrors) as caught:
        read.parse(people(*({"name": "x"} for _ in range(read.MOST_ERRORS + 5))))
    assert len(caught.value.errors) == read.MOST_ERRORS + 1
    assert str(caught.value).endswith("5 more entries are wrong")


@pytest.mark.parametrize("name", BAD_NAMES, ids=repr)
def test_a_name_that_a_system_could_misread_is_refused(name: Any) -> None:
    assert "].name: " in refusal(people(ada(name=name))).replace(" (root)", "").replace(" (slurm)", "").replace(
        " (nobody)", ""
    ).replace(" (munge)", "").replace(" (sshd)", "")
    assert "groups[0" in refusal(people(groups=[{"name": name, "gid": 5000}]))


@pytest.mark.parametrize(
    "number",
    [0, 1, 999, 60000, 64030, 64500, 64999, 65534, 65535, 2**31 - 1, 2**32 - 1, -1, "5001", 5001.0, True, None],
)
def test_a_number_of_the_system_is_refused(number: Any) -> None:
    assert "users[0] (ada).uid: " in refusal(people(ada(uid=number)))
    assert "groups[0] (lab).gid: " in refusal(people(groups=[{"name": "lab", "gid": number}]))


BAD_KEYS = {
    "options": f'command="sh" {ED}',
    "options without a space": f"no-pty {ED}",
    "a certificate authority": f"cert-authority {ED}",
    "two lines": f"{ED}\n{OTHER}",
    "a line's end": f"{ED}\r",
    "a zero byte": f"{ED}\0",
    "a private key": "-----BEGIN OPENSSH PRIVATE KEY-----",
    "nothing": "",
    "a type alone": "ssh-ed25519",
    "a cut one": ED[:-8],
    "another type's body": RSA.replace("ssh-rsa ", "ssh-ed25519 "),
    "not base64": "ssh-ed25519 AAAA*",
    "letters that look like base64": "ssh-ed25519 \uff21\uff21\uff21\uff21",
    "a short one": body("ssh-ed25519", bytes(31)),
    "more than a key": body("ssh-ed25519", bytes(32), b"more"),
    "an endless part": "ssh-ed25519 " + base64.b64encode(b"\xff\xff\xff\xff").decode(),
    "a weak one": body("ssh-rsa", b"\1\0\1", b"\xff" * 128),
    "a huge one": body("ssh-rsa", b"\1\0\1", b"\xff" * 2500),
    "a huge text": "ssh-ed25519 " + "A" * 1_000_000,
    "a long comment": f"{ED} {'x' * 201}",
    "dsa": body("ssh-dss", b"1", b"2", b"3", b"4"),
    "ecdsa": body("ecdsa-sha2-nistp256", b"nistp256", bytes(65)),
    "a point of order 4": body("ssh-ed25519", bytes(32)),
    "a point of order 8": body(
        "ssh-ed25519", bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05")
    ),
    "a certificate": body("ssh-ed25519-cert-v01@openssh.com", bytes(32)),
    "a number": 7,
    "a list": [ED],
}


@pytest.mark.parametrize("what", BAD_KEYS)
def test_a_key_that_is_not_one_line_of_an_accepted_type_is_refused(what: str) -> None:
    assert "users[0] (ada).keys[1]: " in refusal(people(ada(keys=[OTHER, BAD_KEYS[what]])))


def test_a_key_appears_once_and_its_comment_does_not_count() -> None:
    assert "a key appears twice" in refusal(people(ada(keys=[f"{ED} one", f"{ED} two"])))


@pytest.mark.parametrize(
    "value", ["tomorrow", "2027-02-30", "2027-01-31T18:00:00", 7, True, ["2027-01-31"], "x" * 10_000]
)
def test_a_time_is_a_date_or_a_time_with_its_zone(value: Any) -> None:
    assert "users[0] (ada).until: " in refusal(people(ada(until=value)))
    assert "users[0] (ada).keys[0].expires: " in refusal(people(ada(keys=[{"key": ED, "expires": value}])))


@pytest.mark.parametrize("shell", ["bash", "/bin/../../x", "/bin/sh -c", "/bin/sh\n", "", "/" + "a" * 300, 7])
def test_a_shell_is_a_plain_path(shell: Any) -> None:
    assert "users[0] (ada).shell: " in refusal(people(ada(shell=shell)))


@pytest.mark.parametrize("gecos", ["a:b", "a\nb", "x" * 201, 7, "\x1b[2J"])
def test_a_persons_description_cannot_break_a_line(gecos: Any) -> None:
    assert "users[0] (ada).gecos: " in refusal(people(ada(gecos=gecos)))


def test_every_amount_is_bounded(tmp_path: Path) -> None:
    keys = [body("ssh-ed25519", bytes([number]) * 32) for number in range(read.KEYS + 1)]
    assert "keys: " in refusal(people(ada(keys=keys)))
    groups = [{"name": f"g{number}", "gid": 6000 + number} for number in range(read.GROUPS_OF_USER + 2)]
    names = [group["name"] for group in groups]
    assert "groups: " in refusal(people(ada(group="g0", groups=names[1:]), groups=groups))
    many = b"users:\n" + b"- a\n" * (read.USERS + 1) + b"groups: []\n"
    assert "more than 20,000" in refusal(many)
    huge = tmp_path / "people.yaml"
    with huge.open("wb") as file:
        file.truncate(read.LARGEST + 1)
    with pytest.raises(ConfigError, match="more than 8 MiB"):
        read.read_file(huge)


def test_what_is_no_file_is_told_and_keeps_nobody_waiting(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "none", tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(ConfigError, match="people"):
            read.read_file(path)
