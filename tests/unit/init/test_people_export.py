"""People of a directory become a file that `people check` takes, and each difference is told in a comment."""

from __future__ import annotations

import pytest

from init.errors import ConfigError
from init.people import directory, read
from init.people.directory import Account
from tests.support.people_files import ED, OTHER

HOMES = "/home"
ADA = Account("ada", 5001, 5000, "Ada L.", "/home/ada", "/bin/zsh", (5010,))
NAMES = {5000: "lab", 5010: "Optics Lab"}
LDAP = {"id_provider": "ldap", "ldap_uri": "ldap://a, ldap://b", "ldap_search_base": "dc=x"}


def composed(*accounts: Account, names: dict[int, str] = NAMES, keys: tuple[str, ...] = (ED,)) -> directory.Export:
    return directory.compose(accounts, names, {account.name: keys for account in accounts}, homes=HOMES)


def test_a_person_keeps_numbers_groups_shell_and_keys() -> None:
    made = composed(ADA, keys=(f"{ED} ada@laptop", ED, OTHER))
    file = directory.render(made, "ldap://a", "2026-01-01T00:00:00Z")
    (ada,) = read.parse(file.encode()).users
    assert (ada.uid, ada.group, ada.groups, ada.shell, ada.gecos) == (
        5001,
        "lab",
        ("optics-lab",),
        "/bin/zsh",
        "Ada L.",
    )
    assert [(key.line, key.comment) for key in ada.keys] == [(ED, "ada@laptop"), (OTHER, "")]
    assert made.notes == ('group "Optics Lab" (5010) is called optics-lab',)


@pytest.mark.parametrize(
    ("account", "note"),
    [
        (Account("root", 0, 5000), '"root" is left out: name: root is a name of the system'),
        (Account("low", 500, 5000), '"low" is left out: uid: wanted 1000'),
        (Account("Eve", 5002, 5000), '"Eve" is left out: name: wanted a name'),
        (Account("x\n- name: y", 5002, 5000), r'"x\n- name: y" is left out: name: wanted a name'),
        (Account("eve", 5001, 5000), '"eve" is left out: uid: 5001 is also that of ada'),
        (Account("eve", 5002, 100), '"eve" is left out: group: no group'),
        (Account("eve", 5002, 5000, shell="zsh"), "eve: shell: wanted a path"),
        (Account("eve", 5002, 5000, gecos="a\x1b[2Jb"), "eve: gecos: wanted one line"),
        (Account("eve", 5002, 5000, home="/export/eve\x1b"), r'eve: home: "/export/eve\u001b" there, /home/eve here'),
        (Account("eve", 5002, 5003), "group 5003, which has no name, is called gid5003"),
        (Account("eve", 5002, 5000, gids=(999,)), 'group "" (999) is left out'),
        (Account("eve", 5002, 5000, gids=tuple(range(6000, 6065))), "eve: groups: 65, the first 64 are taken"),
    ],
)
def test_what_does_not_fit_is_told(account: Account, note: str) -> None:
    made = composed(ADA, account)
    file = directory.render(made, "ldap://a", "2026-01-01T00:00:00Z")
    assert any(line.startswith(note) for line in made.notes), made.notes
    assert "ada" in {person.name for person in read.parse(file.encode()).users}, "a bad entry takes nobody else away"
    assert all(line.isprintable() for line in file.splitlines())


def test_two_groups_never_share_a_name() -> None:
    names = {5000: "lab", 5010: "Lab", 5011: "LAB", 5012: "gid5010"}
    made = composed(Account("ada", 5001, 5010, gids=(5000, 5011, 5012)), names=names)
    assert sorted((group.gid, group.name) for group in made.people.groups)[0] == (5000, "lab")
    assert len({group.name for group in made.people.groups}) == 4


def test_bad_and_many_keys_are_told() -> None:
    made = composed(ADA, keys=(f'command="sh" {ED}', "ssh-dss AAAA", "-----BEGIN OPENSSH PRIVATE KEY-----"))
    assert made.people.users[0].keys == ()
    text = "; ".join(made.notes)
    assert "key 1: options before the key" in text and "key 2: ssh-dss" in text and "key 3: a private key" in text


def test_a_person_whom_the_directory_keeps_out_has_no_access() -> None:
    made = directory.compose([ADA], NAMES, {}, homes=HOMES, refused={"ada"}, ended="2026-01-01T00:00:00Z")
    assert made.people.users[0].until and directory.summary(made, 2e9).startswith("0 people with access of 1")


def test_searches_are_those_of_sssd() -> None:
    bases = "ou=a,dc=x?onelevel?(host=c)?ou=b,dc=x"
    tls = {"ldap_tls_cacert": "/ca", "ldap_id_use_start_tls": "True"}
    first, second = directory.searches("x", LDAP | tls | {"ldap_user_search_base": bases})
    assert (first.uris, first.base, first.scope) == ("ldap://a ldap://b", "ou=a,dc=x", "one")
    assert first.filter == "(&(objectClass=posixAccount)(uid=*)(host=c))" and first.start_tls
    assert (second.base, second.scope, second.environment) == ("ou=b,dc=x", "sub", {"LDAPTLS_CACERT": "/ca"})
    (active,) = directory.searches("x", LDAP | {"ldap_schema": "AD"})
    assert active.filter == "(&(objectClass=user)(sAMAccountName=*))"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"id_provider": "ad"}, "id_provider"),
        ({"ldap_uri": "_srv_"}, "ldap_uri"),
        ({"ldap_search_base": ""}, "ldap_search_base"),
        ({"ldap_sasl_mech": "GSSAPI"}, "ldap_sasl_mech"),
        ({"ldap_default_authtok_type": "obfuscated_password"}, "ldap_default_authtok_type"),
    ],
)
def test_a_directory_that_cannot_be_listed_is_refused_by_its_field(changes: dict[str, str], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"\[domain/x\] {field}: .*give the names"):
        directory.searches("x", LDAP | changes)


def test_ldif_values() -> None:
    text = "dn: uid=ada,dc=x\nuid: ada\nUID:: ZGVhbg==\nuid:: %%\nuidNumber: 4\n# uid: no\n"
    assert list(directory.ldif_values(text, "uid")) == ["ada", "dean"]


@pytest.mark.parametrize("name", ["-s", "", "1000", "a\nb", "a" * 65, "../x"])
def test_getent_is_asked_for_names_alone(name: str) -> None:
    assert not directory.ASKABLE.fullmatch(name)
