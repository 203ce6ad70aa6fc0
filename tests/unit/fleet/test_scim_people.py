"""SCIM without a server: filters, the people of a Secret, and PATCH in the forms of two providers."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from fleet.scim import resources
from fleet.scim.filters import EXTENSION, ScimError, parse_filter, parse_path
from fleet.scim.roster import Requested, Roster, Rules, dump, linux_name, load
from init.people.read import parse
from init.people.spec import has_access
from tests.support.people_files import ED, OTHER, ada, people

RULES, NOW = Rules("people", 100_000), 1_800_000_000
CAROL: dict[str, Any] = {
    "id": "u5", "userName": "Carol@Lab.org", "externalId": "aBc", "active": True, EXTENSION: {"uid": 5},
    "emails": [{"type": "work", "value": "c@x"}, {"type": "home", "value": "h@x"}], "meta": {"created": "2026-01-01"},
}  # fmt: skip


def roster(file: bytes = b"", **more: Any) -> Roster:
    return load({"people.yaml": file, "scim.json": json.dumps(more).encode()}, RULES, NOW)


def written(people: Roster) -> Roster:
    """Return what the next reader finds."""
    return load(dump(people), RULES, NOW)


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ('userName eq "carol@lab.ORG"', True),
        ('username EQ "carol@lab.org" and active eq true', True),
        ('externalId eq "abc"', False),
        ('externalId eq "aBc"', True),
        ('userName sw "car" and not (externalId pr)', False),
        ('userName co "@" and (active eq False or id eq "u5")', True),
        ('userName ew ".com" or userName ew ".org"', True),
        ('urn:ietf:params:scim:schemas:core:2.0:User:userName eq "carol@lab.org"', True),
        (f"{EXTENSION}:uid eq 5", True),
        ('emails[type eq "work" and value co "c@"]', True),
        ('emails[type eq "home" and value co "c@"]', False),
        ('emails.value eq "h@x"', True),
        ('meta.created gt "2025"', True),
        ("nickName pr", False),
        ("nickName eq null", True),
        ('nickName ne "x"', True),
        ('active co "t"', False),
    ],
)
def test_a_filter_matches(text: str, matches: bool) -> None:
    assert parse_filter(text)(CAROL) is matches


@pytest.mark.parametrize(
    "text",
    ["", "userName", "userName eq", "userName eq carol", 'userName like "x"', 'userName eq "x" and', '(id eq "x"',
     'id eq "x")', 'id eq "x', "[", "not id pr", 'id eq "x" id', "id eq {}", "(" * 500 + "id pr" + ")" * 500,
     " and ".join(["id pr"] * 100), "a" * 5000],
)  # fmt: skip
def test_a_filter_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ScimError) as error:
        parse_filter(text)
    assert (error.value.status, error.value.scim_type) == (400, "invalidFilter")


def test_paths_of_patch_are_read() -> None:
    assert parse_path("Active").parts == ("active",)
    assert parse_path("name.givenName").parts == ("name", "givenname")
    assert parse_path(f"{EXTENSION}:sshKeys").parts == (EXTENSION.lower(), "sshkeys")
    path = parse_path('emails[type eq "work"].value')
    assert (path.parts, path.sub) == (("emails",), "value")
    assert path.element and path.element({"type": "work"})
    for wrong in ("a[", "a]b", "a" * 9999, ""):
        with pytest.raises(ScimError):
            parse_path(wrong)


def test_a_person_gets_a_uid_that_no_other_ever_had() -> None:
    people_ = roster(people(ada(uid=100_001)))
    carol, dave = (people_.put_user("", Requested(name), NOW) for name in ("carol", "dave@lab.org"))
    assert (carol, dave) == ("u100000", "u100002")
    people_.delete(dave, NOW)
    people_ = written(people_)
    assert people_.put_user("", Requested("eve"), NOW) == "u100003"
    assert [person.name for person in parse(dump(people_)["people.yaml"]).users] == ["ada", "carol", "eve"]
    assert people_.users["u100003"].group == "people"


def test_a_removed_person_who_returns_has_the_same_uid_and_another_one_is_refused() -> None:
    people_ = roster()
    people_.put_user("", Requested("carol", external="c1", keys=(ED,)), NOW)
    people_.delete("u100000", NOW)
    people_ = written(people_)
    assert not people_.users
    with pytest.raises(ScimError, match="carol was removed and keeps the uid 100000") as error:
        people_.put_user("", Requested("carol", external="c2"), NOW)
    assert error.value.scim_type == "uniqueness"
    assert people_.put_user("", Requested("carol", external="c1"), NOW) == "u100000"
    assert not people_.users["u100000"].keys, "keys do not return by themselves"


def test_an_inactive_person_stays_in_the_file_without_access() -> None:
    people_ = roster()
    key = people_.put_user("", Requested("carol", keys=(ED,)), NOW)
    people_.put_user(key, Requested("carol", active=False), NOW)
    assert not has_access(parse(dump(people_)["people.yaml"]).users[0], NOW)
    people_.put_user(key, Requested("carol"), NOW + 9)
    assert not has_access(people_.users[key], NOW + 9), "a request that does not say lets nobody in"
    people_.put_user(key, Requested("carol", active=True), NOW + 9)
    assert has_access(people_.users[key], NOW + 9) and people_.users[key].keys


def test_what_a_person_wrote_into_the_file_stays() -> None:
    entry = ada(shell="/bin/zsh", until="2030-01-01", keys=[{"key": ED, "expires": "2029-01-01"}])
    people_ = roster(people(entry))
    key = people_.put_user(
        "", Requested("Ada@lab.org", external="a1", active=True, gecos="Ada L", keys=(ED, OTHER)), NOW
    )
    assert key == "u5001", "who is in the file is taken over by name, with the uid"
    found = parse(dump(people_)["people.yaml"]).users[0]
    assert (found.shell, found.group, found.gecos) == ("/bin/zsh", "lab", "Ada L")
    assert found.until == parse(people(entry)).users[0].until
    assert [bool(item.expires) for item in found.keys] == [True, False]
    with pytest.raises(ScimError, match="there is a user ada already: u5001"):
        people_.put_user("", Requested("ada"), NOW)


def test_who_is_removed_from_the_file_by_hand_is_gone_and_keeps_the_uid() -> None:
    people_ = roster(people(ada()))
    people_.put_user("", Requested("ada", external="a1"), NOW)
    people_ = load({**dump(people_), "people.yaml": people()}, RULES, NOW)
    assert not people_.users and people_.records["u5001"].deleted
    with pytest.raises(ScimError, match="5001 is or was that of ada"):
        people_.put_user("", Requested("bob", uid=5001), NOW)
    assert written(people_).records["u5001"].deleted


def test_a_uid_may_be_given_once_and_never_changes() -> None:
    people_ = roster()
    key = people_.put_user("", Requested("carol", uid=2_000_000), NOW)
    assert key == "u2000000"
    assert people_.put_user("", Requested("dave"), NOW) == "u100000"
    for wanted, scim_type in ((Requested("carol", uid=2_000_001), "mutability"), (Requested("karol"), "mutability")):
        with pytest.raises(ScimError) as error:
            people_.put_user(key, wanted, NOW)
        assert error.value.scim_type == scim_type
    for uid in (0, 33, 999, 60_000, 64_500, 65_534, 2**31, -1, 10**300):
        refused = roster()
        with pytest.raises(ScimError):
            refused.put_user("", Requested("eve", uid=uid), NOW)
            dump(refused)


@pytest.mark.parametrize(
    "name",
    ["root", "Slurm@lab.org", "", "@lab.org", "1st", "a" * 33, "a b", "../etc", "a:b", "a\nb", "-rf", "$(id)",
     "ca\u0301rol", "\u0441\u0430rol", "\u212aarol", "carol\u202e", "c\u0000", "\uff43arol", "\ud800", "carol+x"],
)  # fmt: skip
def test_a_name_that_linux_does_not_hold_is_refused(name: str) -> None:
    with pytest.raises(ScimError) as error:
        roster().put_user("", Requested(name), NOW)
    assert (error.value.status, error.value.scim_type) == (400, "invalidValue")
    json.dumps(error.value.detail).encode()


def test_two_people_of_one_linux_name_are_refused() -> None:
    people_ = roster()
    people_.put_user("", Requested("carol@a.org"), NOW)
    with pytest.raises(ScimError, match="there is a user carol already"):
        people_.put_user("", Requested("CAROL@b.org"), NOW)
    assert linux_name("Carol.Smith", "x") == "carol.smith"


def test_groups_have_members_and_give_their_gid_to_no_other() -> None:
    people_ = roster(people(ada(groups=["gpu"]), groups=[{"name": "lab", "gid": 5000}, {"name": "gpu", "gid": 5001}]))
    carol = people_.put_user("", Requested("carol"), NOW)
    lab = people_.put_group("", Requested("Lab", members=("u5001", carol)), NOW)
    assert lab == "g5000"
    assert people_.members()["lab"] == ["u5001", carol]
    people_.put_group(lab, Requested("Physics", members=(carol,)), NOW)
    assert people_.users["u5001"].group == "people", "who leaves the first group has the one of every person"
    assert (people_.users[carol].groups, people_.groups[lab].gid) == (("physics",), 5000)
    people_.delete(lab, NOW)
    assert people_.users[carol].groups == () and people_.users["u5001"].groups == ("gpu",)
    people_ = written(people_)
    new = people_.put_group("", Requested("chemistry"), NOW)
    assert new == "g100001", "100000 is that of people"
    for wrong in (Requested("people"), Requested("gpu users"), Requested("sudo"), Requested("chemistry")):
        with pytest.raises(ScimError):
            people_.put_group("", wrong, NOW)
    with pytest.raises(ScimError, match="there is no user 'g5001'"):
        people_.put_group(new, Requested("chemistry", members=("g5001",)), NOW)


def test_the_files_are_checked_as_each_pod_does() -> None:
    people_ = roster()
    many = tuple(people_.put_group("", Requested(f"g{number}"), NOW) for number in range(70))
    carol = people_.put_user("", Requested("carol"), NOW)
    for key in many:
        people_.put_group(key, Requested(people_.groups[key].name, members=(carol,)), NOW)
    with pytest.raises(ScimError, match=r"people.yaml would be refused: .*70 entries, more than 64"):
        dump(people_)
    with pytest.raises(ScimError, match="gecos"):
        people_ = roster()
        people_.put_user("", Requested("carol", gecos="a:b"), NOW)
        dump(people_)
    with pytest.raises(ScimError, match="options before the key"):
        roster().put_user("", Requested("carol", keys=(f'command="x" {ED}',)), NOW)


def test_the_file_is_the_same_as_yaml_and_as_json() -> None:
    people_ = roster(people(ada(keys=[{"key": f"{ED} ada", "expires": "2029-01-01"}])))
    people_.put_user("", Requested("carol", gecos="Çarol 'x' \"y\" \U0001f600 # -", keys=(OTHER,), active=False), NOW)
    text = dump(people_)["people.yaml"]
    assert yaml.safe_load(text) == json.loads(text)
    assert parse(text) == people_.people()


@pytest.mark.parametrize(
    "data",
    [{"people.yaml": b"users: 5"}, {"scim.json": b"["}, {"scim.json": b"[]"}, {"scim.json": b'{"records": {"u1": 5}}'},
     {"scim.json": b'{"records": {"u5001": {"name": "bob", "given": "bob"}}}', "people.yaml": people(ada())}],
)  # fmt: skip
def test_a_damaged_secret_is_not_written_over(data: dict[str, bytes]) -> None:
    with pytest.raises(ScimError) as error:
        load(data, RULES, NOW)
    assert error.value.status == 503


def shown(people_: Roster, kind: str, key: str) -> dict[str, Any]:
    return resources.describer(people_, kind, NOW)(key)


def patched(people_: Roster, kind: str, key: str, *operations: dict[str, Any]) -> dict[str, Any]:
    changed = resources.patch(shown(people_, kind, key), {"Operations": [*operations]}, kind)
    wanted = resources.read_request(changed, kind, creates=False)
    (people_.put_user if kind == "Users" else people_.put_group)(key, wanted, NOW)
    return shown(people_, kind, key)


OKTA_OFF = {"op": "replace", "value": {"active": False}}
ENTRA_OFF = {"op": "Replace", "path": "active", "value": "False"}


@pytest.mark.parametrize("operation", [OKTA_OFF, ENTRA_OFF])
def test_both_providers_take_access_away(operation: dict[str, Any]) -> None:
    people_ = roster()
    key = people_.put_user("", Requested("carol"), NOW)
    assert patched(people_, "Users", key, operation)["active"] is False


def test_attributes_of_a_default_mapping_that_are_not_held_are_ignored() -> None:
    people_ = roster()
    key = people_.put_user("", Requested("carol"), NOW)
    found = patched(
        people_, "Users", key,
        {"op": "Add", "path": 'emails[type eq "work"].value', "value": "c@lab.org"},
        {"op": "Add", "path": "name.givenName", "value": "C"},
        {"op": "Replace", "path": "displayName", "value": "Carol C"},
        {"op": "Add", "path": "externalId", "value": "x-1"},
        {"op": "add", "value": {"urn:ietf:params:scim:schemas:extension:enterprise:2.0:User:department": "P",
                                "name.familyName": "C", "title": "Dr", "USERNAME": "Carol@lab.org"}},
    )  # fmt: skip
    assert (found["displayName"], found["externalId"], found["userName"]) == ("Carol C", "x-1", "Carol@lab.org")
    assert set(found) == {"schemas", "id", "userName", "externalId", "displayName", "active", EXTENSION}
    assert "externalId" not in patched(people_, "Users", key, {"op": "remove", "path": "externalId"})


@pytest.mark.parametrize(
    "remove",
    [
        {"op": "remove", "path": 'members[value eq "u100001"]'},
        {"op": "Remove", "path": "members", "value": [{"$ref": None, "value": "u100001"}]},
        {"op": "replace", "path": "members", "value": [{"value": "u100000", "display": "carol"}]},
        {"op": "replace", "value": {"id": "g100001", "displayName": "lab", "members": [{"value": "u100000"}]}},
    ],
)
def test_members_come_and_go(remove: dict[str, Any]) -> None:
    people_ = roster()
    carol, dave, eve = (people_.put_user("", Requested(name), NOW) for name in ("carol", "dave", "eve"))
    lab = people_.put_group("", Requested("lab", members=(carol,)), NOW)
    add = {"op": "Add", "path": "members", "value": [{"value": dave}]}
    found = patched(people_, "Groups", lab, add, add)
    assert [item["value"] for item in found["members"]] == [carol, dave]
    found = patched(people_, "Groups", lab, remove)
    assert [item["value"] for item in found["members"]] == [carol]
    assert "members" not in patched(people_, "Groups", lab, {"op": "remove", "path": "members"})
    assert eve in people_.users


def test_ssh_keys_come_by_the_extension_alone() -> None:
    people_ = roster()
    body = {"userName": "carol", EXTENSION: {"sshKeys": [ED]}, "sshKeys": [OTHER]}
    key = people_.put_user("", resources.read_request(body, "Users", creates=True), NOW)
    assert shown(people_, "Users", key)[EXTENSION] == {"uid": 100000, "sshKeys": [ED]}
    found = patched(people_, "Users", key, {"op": "add", "path": f"{EXTENSION}:sshKeys", "value": f"{ED}\n{OTHER} x"})
    assert found[EXTENSION]["sshKeys"] == [ED, f"{OTHER} x"]
    people_.put_user(key, resources.read_request({"userName": "carol"}, "Users", creates=False), NOW)
    assert len(people_.users[key].keys) == 2, "a PUT that does not name them leaves them"
    found = patched(people_, "Users", key, {"op": "remove", "path": f"{EXTENSION}:sshKeys"})
    assert "sshKeys" not in found[EXTENSION]


@pytest.mark.parametrize(
    "operation",
    [
        5, {}, {"op": "test", "path": "active"}, {"op": "remove"}, {"op": "add", "path": "active"},
        {"op": "add", "value": 5}, {"op": "replace", "path": 5, "value": 5},
        {"op": "replace", "path": "id", "value": "u1"}, {"op": "replace", "path": "groups", "value": []},
        {"op": "replace", "path": "active", "value": "perhaps"},
        {"op": "replace", "path": "userName", "value": None}, {"op": "remove", "path": "userName"},
        {"op": "replace", "path": "userName", "value": ["a"]}, {"op": "replace", "path": "active[x", "value": True},
        {"op": "replace", "path": 'active[value eq "x"]', "value": True}, {"op": "add", "path": EXTENSION, "value": 5},
        {"op": "replace", "path": f"{EXTENSION}:sshKeys", "value": [5]},
        {"op": "replace", "path": f"{EXTENSION}:uid", "value": 7000},
        {"op": "replace", "path": f"{EXTENSION}:uid", "value": True},
    ],
)  # fmt: skip
def test_an_operation_without_sense_is_refused(operation: Any) -> None:
    people_ = roster()
    key = people_.put_user("", Requested("carol"), NOW)
    with pytest.raises(ScimError) as error:
        patched(people_, "Users", key, operation)
    assert error.value.status == 400 and error.value.scim_type
