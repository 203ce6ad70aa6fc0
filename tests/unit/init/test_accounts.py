"""Accounts as code: the file's reader, the difference, and the calls, against a model of slurmdbd."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from init import accounts_cli
from init.accounts import calls, file, model, plan
from init.accounts.model import Database, ObjectKey, OwnerMark, StoredObject, account, qos, read_mark, user, write_mark
from init.accounts.slurmdbd import AccountsError, read, rows
from init.errors import ConfigError
from tests.unit.init.accounting_model import CLUSTER, Dbd

LAB: dict[str, Any] = {
    "qos": [
        {"name": "high", "priority": 100, "preempt": ["low"], "flags": ["DenyOnLimit"], "limits": {"MaxWall": "12h"}},
        {"name": "low"},
    ],
    "accounts": [
        {"name": "science"},
        {
            "name": "physics",
            "parent": "science",
            "fairshare": 5,
            "limits": {"GrpTRES": {"cpu": 64, "mem": "500G"}, "MaxJobs": 10},
            "qos": ["high", "low"],
            "defaultQos": "low",
            "coordinators": ["alice"],
        },
        {"name": "chem"},
    ],
    "users": [
        {"name": "alice", "defaultAccount": "physics", "accounts": ["physics", "chem"], "adminLevel": "Operator"},
        {"name": "bob", "defaultAccount": "physics"},
        {"name": "carol", "defaultAccount": "chem", "accounts": [{"name": "chem", "fairshare": "parent"}]},
    ],
}


def wanted(data: dict[str, Any]) -> file.AccountsFile:
    return file.parse(data, "accounts.yaml")


def planned(
    data: dict[str, Any], dbd: Dbd, *, busy: frozenset[ObjectKey] = frozenset(), adopt: bool = False
) -> plan.AccountsPlan:
    return plan.make(wanted(data), dbd.read(), busy, adopt=adopt)


def steps(made: plan.AccountsPlan, dbd: Dbd) -> list[calls.SacctmgrCall]:
    return calls.order_calls(made, dbd.read(), CLUSTER)


def applied(data: dict[str, Any], dbd: Dbd | None = None, **options: Any) -> Dbd:
    dbd = dbd or Dbd()
    for call in steps(planned(data, dbd, **options), dbd):
        dbd.perform(call.argv)
    return dbd


def without(data: dict[str, Any], part: str, name: str) -> dict[str, Any]:
    return {**data, part: [item for item in data[part] if item["name"] != name]}


def with_(data: dict[str, Any], part: str, name: str, **keys: Any) -> dict[str, Any]:
    return {**data, part: [item | keys if item["name"] == name else item for item in data[part]]}


def assert_follows(data: dict[str, Any], dbd: Dbd) -> None:
    made = planned(data, dbd)
    assert made == plan.AccountsPlan((), (), (), {}, ()), plan.describe_plan(made)


def test_an_empty_database_gets_everything_and_the_second_run_changes_nothing() -> None:
    dbd = applied(LAB)
    assert_follows(LAB, dbd)
    assert dbd.objects[account("physics")]["grptres"] == "cpu=64,mem=512000"
    assert dbd.defaults["alice"] == "physics" and dbd.levels["alice"] == "operator"
    assert dbd.objects[user("root", "root")] == {"fairshare": "1"}, "nothing else is touched"


def test_users_who_get_the_same_share_a_call() -> None:
    many = {
        "accounts": [{"name": "big"}],
        "users": [{"name": f"u{number}", "defaultAccount": "big"} for number in range(1000)],
    }
    dbd = Dbd()
    made = steps(planned(many, dbd), dbd)
    assert len([call for call in made if call.argv[:2] == ("add", "user")]) == 5
    assert len(made) == 7, "and the account, and its list of members"
    assert "users u0, u1, u2, u3, u4 and 995 more in big" in plan.describe_plan(planned(many, dbd))[1]


CHANGED = with_(
    with_(without(LAB, "users", "bob"), "accounts", "physics", parent="root", limits={"GrpTRES": "cpu=32"}, qos=None),
    "users", "alice", defaultAccount="chem", accounts=["chem"], adminLevel="None",
)  # fmt: skip
CHANGED = with_(CHANGED, "accounts", "physics", defaultQos=None, coordinators=["carol"])
CHANGED = without(without(CHANGED, "qos", "low"), "accounts", "science")
CHANGED = with_(CHANGED, "qos", "high", preempt=None, flags=None)


def test_a_changed_file_is_followed_and_what_left_it_is_removed() -> None:
    dbd = applied(CHANGED, applied(LAB))
    assert_follows(CHANGED, dbd)
    assert user("bob", "physics") not in dbd.objects and account("science") not in dbd.objects
    assert dbd.levels["alice"] == ""


@pytest.mark.parametrize("before", [None, LAB, CHANGED], ids=["nothing", "lab", "changed"])
@pytest.mark.parametrize("after", [LAB, CHANGED], ids=["lab", "changed"])
def test_killed_after_each_call_a_second_run_ends_the_same(
    before: dict[str, Any] | None, after: dict[str, Any]
) -> None:
    def start() -> Dbd:
        return Dbd() if before is None else applied(before)

    goal = applied(after, start())
    for cut in range(len(steps(planned(after, start()), start()))):
        dbd = start()
        for call in steps(planned(after, dbd), dbd)[:cut]:
            dbd.perform(call.argv)
        again = planned(after, dbd)
        assert not again.by_hand and not again.unowned and not again.problems, (cut, plan.describe_plan(again))
        applied(after, dbd)
        assert_follows(after, dbd)
        assert (dbd.objects, dbd.levels, dbd.defaults) == (goal.objects, goal.levels, goal.defaults), cut


def test_an_account_that_moves_below_one_with_the_same_coordinator_loses_its_own_first() -> None:
    x = {"name": "x", "defaultAccount": "c"}
    before = {"accounts": [{"name": name, "coordinators": ["x"]} for name in "ab"] + [{"name": "c"}], "users": [x]}
    after = {"accounts": [{"name": "a"}, {"name": "b", "parent": "a"}, {"name": "c"}], "users": [x]}
    for cut in range(len(steps(planned(after, applied(before)), applied(before)))):
        dbd = applied(before)
        for call in steps(planned(after, dbd), dbd)[:cut]:
            dbd.perform(call.argv)
        applied(after, dbd)
        assert_follows(after, dbd)


NAMES = st.sampled_from(["a", "b", "c", "d"])
LIMITS = st.fixed_dictionaries(
    {},
    optional={
        "GrpTRES": st.dictionaries(st.sampled_from(["cpu", "mem", "gres/gpu"]), st.integers(0, 9), min_size=1),
        "MaxJobs": st.integers(0, 9),
        "MaxWall": st.sampled_from(["1h", "1-00:00:00"]),
    },
)


@st.composite
def files(draw: Any) -> dict[str, Any]:
    levels = sorted(draw(st.sets(NAMES)))
    accounts = draw(st.permutations(sorted(draw(st.sets(NAMES)))))
    people = sorted(draw(st.sets(st.sampled_from(["x", "y", "z"])))) if accounts else []

    def association() -> dict[str, Any]:
        chosen = sorted(draw(st.sets(st.sampled_from(levels)))) if levels else []
        default = {"defaultQos": chosen[0]} if chosen and draw(st.booleans()) else {}
        return {"fairshare": draw(st.sampled_from([1, 2, "parent"])), "limits": draw(LIMITS), "qos": chosen} | default

    def member(name: str) -> dict[str, Any]:
        of = sorted(draw(st.sets(st.sampled_from(accounts), min_size=1)))
        level = draw(st.sampled_from(["None", "Operator"]))
        listed = [{"name": account_, **association()} for account_ in of]
        return {"name": name, "defaultAccount": draw(st.sampled_from(of)), "accounts": listed, "adminLevel": level}

    return {
        "qos": [
            {
                "name": name,
                "priority": draw(st.integers(0, 3)),
                "preempt": [other for other in levels if other < name and bool(draw(st.booleans()))],
            }
            for name in levels
        ],
        "accounts": [
            {
                "name": name,
                "parent": draw(st.sampled_from(["root", *accounts[:place]])),
                "coordinators": [one for one in people if draw(st.booleans())],
            }
            | association()
            for place, name in enumerate(accounts)
        ],
        "users": [member(name) for name in people],
    }


@settings(max_examples=150, deadline=None)
@given(files(), files(), st.integers(0, 100))
def test_from_any_file_to_any_file_also_where_a_run_was_cut(
    before: dict[str, Any], after: dict[str, Any], cut: int
) -> None:
    dbd = applied(before)
    assert_follows(before, dbd)
    for call in steps(planned(after, dbd), dbd)[:cut]:
        dbd.perform(call.argv)
    again = planned(after, dbd)
    assert not again.by_hand and not again.unowned and not again.problems, plan.describe_plan(again)
    applied(after, dbd)
    assert_follows(after, dbd)
    applied({}, dbd)
    assert set(dbd.objects) == set(Dbd().objects), "what was made by a file goes with it"


def test_a_change_by_hand_is_told_and_a_new_value_of_the_file_is_no_such_change() -> None:
    dbd = applied(LAB)
    dbd.objects[account("physics")]["grptres"] = "cpu=128,mem=512000"
    dbd.objects[user("bob", "physics")]["maxjobs"] = "3"
    made = planned(LAB, dbd)
    assert list(plan.describe_by_hand(made.by_hand)) == [
        "changed by hand: account physics: GrpTRES cpu=64,mem=512000 → cpu=128,mem=512000",
        "changed by hand: user bob in physics: MaxJobs none → 3",
    ]
    told = with_(LAB, "accounts", "physics", limits={"GrpTRES": {"cpu": 128, "mem": "500G"}, "MaxJobs": 10})
    assert [found.field for found in planned(told, dbd).by_hand] == ["maxjobs"], "the file agrees with the other"
    assert planned(with_(LAB, "accounts", "physics", fairshare=7), applied(LAB)).by_hand == ()
    applied(LAB, dbd)
    assert_follows(LAB, dbd)


def test_a_user_removed_by_hand_is_told() -> None:
    dbd = applied(LAB)
    dbd.perform(("delete", "user", "name=bob", "account=physics", "cluster=minivm"))
    assert list(plan.describe_by_hand(planned(LAB, dbd).by_hand)) == ["removed by hand: user bob in physics"]


def test_objects_made_by_hand_are_left_alone_unless_adopted() -> None:
    dbd = Dbd()
    dbd.perform(("add", "account", "name=physics", "cluster=minivm", "parent=root"))
    dbd.perform(("add", "user", "name=bob", "account=physics", "cluster=minivm"))
    dbd.perform(("add", "user", "name=zoe", "account=physics", "cluster=minivm"))
    made = planned(LAB, dbd)
    assert set(made.unowned) == {account("physics"), user("bob", "physics")}
    applied(LAB, dbd, adopt=True)
    assert_follows(LAB, dbd)
    left = planned({}, dbd)
    assert user("zoe", "physics") not in {change.key for change in left.changes}
    assert left.kept[account("physics")] == "has users or accounts that stay"


def test_a_user_with_jobs_is_kept_and_so_is_the_account() -> None:
    dbd = applied(LAB)
    busy = frozenset({user("bob", "physics"), qos("low")})
    made = planned({}, dbd, busy=busy)
    kept = {str(key): why for key, why in made.kept.items()}
    assert kept["user bob in physics"] == kept["qos low"] == "has pending or running jobs"
    assert kept["account physics"] == kept["account science"] == "has users or accounts that stay"
    assert "keep user bob in physics: it has pending or running jobs" in plan.describe_plan(made)
    for call in steps(made, dbd):
        dbd.perform(call.argv)
    assert user("bob", "physics") in dbd.objects and user("carol", "chem") not in dbd.objects
    applied({}, dbd)
    assert set(dbd.objects) == set(Dbd().objects)


def test_an_association_of_a_single_partition_is_left_alone() -> None:
    dbd = applied(LAB)
    database = replace(dbd.read(), partitioned=frozenset({user("bob", "physics"), user("eve", "chem")}))
    made = plan.make(wanted(LAB), database, frozenset())
    assert made.problems == (
        "user bob in physics has associations of single partitions, made by hand; remove those first",
    )
    kept = plan.make(wanted({}), database, frozenset()).kept
    assert {str(key) for key in kept} == {
        "user bob in physics", "account physics", "account science", "account chem", "qos low", "qos high",
    }  # fmt: skip


def test_what_the_file_names_must_exist() -> None:
    data = {
        "accounts": [{"name": "a", "parent": "nosuch", "qos": ["fast"], "coordinators": ["nobody"]}],
        "users": [{"name": "u", "defaultAccount": "other"}],
    }
    text = "\n".join(planned(data, Dbd()).problems)
    for part in (
        "accounts[0].parent: account nosuch",
        "accounts[0].qos: qos fast",
        "users[0].accounts[0]: account other",
        "accounts[0].coordinators: user nobody",
    ):
        assert f"accounts.yaml: {part} is neither in the file nor in slurmdbd" in text
    limited = {"accounts": [{"name": "a", "limits": {"GrpTRES": {"gres/tpu": 1}}}]}
    assert "AccountingStorageTRES" in planned(limited, Dbd()).problems[0]


@pytest.mark.parametrize(
    ("data", "field", "reason"),
    [
        ({"account": []}, "account", "unknown key"),
        ({"accounts": {}}, "accounts", "wanted a list"),
        ({"accounts": ["a"]}, "accounts[0]", "wanted a mapping"),
        ({"accounts": [{}]}, "accounts[0].name", "missing"),
        ({"accounts": [{"name": "root"}]}, "accounts[0].name", "Slurm makes"),
        ({"accounts": [{"name": "a"}, {"name": "a"}]}, "accounts[1].name", "appears twice"),
        ({"accounts": [{"name": "a", "parent": "b"}, {"name": "b", "parent": "a"}]}, "accounts", "below itself"),
        ({"accounts": [{"name": "a", "limits": {"MaxJob": 1}}]}, "accounts[0].limits.MaxJob", "did you mean MaxJobs"),
        ({"accounts": [{"name": "a", "limits": {"MaxJobs": "x"}}]}, "accounts[0].limits.MaxJobs", "whole number"),
        ({"accounts": [{"name": "a", "limits": {"MaxJobs": 2**40}}]}, "accounts[0].limits.MaxJobs", "too large"),
        ({"accounts": [{"name": "a", "limits": {"MaxWall": 86400}}]}, "accounts[0].limits.MaxWall", "quoted time"),
        ({"accounts": [{"name": "a", "limits": {"GrpTRES": {"cpu": -1}}}]}, "accounts[0].limits.GrpTRES", "cpu: 64"),
        ({"accounts": [{"name": "a", "limits": {"GrpTRES": "cpu=1;rm"}}]}, "accounts[0].limits.GrpTRES", "cpu: 64"),
        ({"accounts": [{"name": "a", "description": "a|b"}]}, "accounts[0].description", "cannot be used"),
        ({"accounts": [{"name": "a", "description": 'a"b'}]}, "accounts[0].description", "cannot be used"),
        ({"accounts": [{"name": "a", "fairshare": -1}]}, "accounts[0].fairshare", "at least 0"),
        ({"users": [{"name": "a"}]}, "users[0].defaultAccount", "missing"),
        ({"users": [{"name": "a", "defaultAccount": "x", "accounts": ["y"]}]}, "users[0].defaultAccount", "not in acc"),
        ({"users": [{"name": "a", "defaultAccount": "x", "accounts": []}]}, "users[0].accounts", "wanted a list"),
        ({"users": [{"name": "a", "defaultAccount": "x", "adminLevel": "god"}]}, "users[0].adminLevel", "Operator"),
        ({"users": [{"name": f"u{n}", "defaultAccount": "x"} for n in range(10_001)]}, "users", "at most 10000"),
        ({"qos": [{"name": "q", "flags": ["DenyOnLimits"]}]}, "qos[0].flags", "did you mean DenyOnLimit"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_by_field(data: dict[str, Any], field: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        wanted(data)
    assert f"accounts.yaml: {field}: cannot read the accounts" in str(caught.value) and reason in str(caught.value)


@pytest.mark.parametrize(
    "name", ["a b", "a,b", "a=b", "$(x)", "-x", ".x", "ü", "A", "a\n", "a;b", "a|b", "x" * 65, "'a'"]
)
def test_a_hostile_name_is_refused_everywhere(name: str) -> None:
    for data in (
        {"accounts": [{"name": name}]},
        {"accounts": [{"name": "a", "parent": name}]},
        {"accounts": [{"name": "a", "qos": [name]}]},
        {"accounts": [{"name": "a", "coordinators": [name]}]},
        {"users": [{"name": name, "defaultAccount": "a"}]},
        {"users": [{"name": "a", "defaultAccount": name}]},
        {"users": [{"name": "a", "defaultAccount": "a", "accounts": [name, "a"]}]},
        {"qos": [{"name": name}]},
        {"qos": [{"name": "a", "preempt": [name]}]},
    ):
        with pytest.raises(ConfigError, match="is not a safe name"):
            wanted(data)


def test_a_file_that_is_too_large_or_no_yaml_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "accounts.yaml"
    with pytest.raises(ConfigError, match="cannot read the accounts: No such file"):
        file.load(path)
    path.write_text("accounts: [")
    with pytest.raises(ConfigError, match="cannot read the accounts: not YAML"):
        file.load(path)
    path.write_text("#" * (file.MOST_BYTES + 1))
    with pytest.raises(ConfigError, match="expected at most"):
        file.load(path)


@pytest.mark.parametrize(
    ("text", "made"),
    [("12h", "720"), ("1-00:00:00", "1440"), ("60", "60"), ("01:30:00", "90"), ("1-12", "2160"), ("00:00:30", None)],
)
def test_times_become_minutes(text: str, made: str | None) -> None:
    assert model.minutes(text) == made


def test_memory_becomes_megabytes() -> None:
    assert model.tres("mem=1T,cpu=4") == "cpu=4,mem=1048576"
    assert model.tres("cpu=4K") is None and model.tres("cpu=1,cpu=2") is None


def test_a_mark_of_another_cluster_or_text_is_none() -> None:
    text = write_mark("minivm", {"grptres": "cpu=1,mem=2", "fairshare": "1"}, frozenset({"a", "b"}))
    mark = read_mark("minivm", text)
    assert mark is not None and mark.fields == {"grptres": "cpu=1,mem=2", "fairshare": "1"}
    assert mark.roster == {"a", "b"}
    assert read_mark("other", text) is None and read_mark("minivm", "the lab's minivm") is None


SACCTMGR = {
    "account": "physics|alice,bob|sci|the lab | of physics\nroot||root|default root account",
    "user": "alice|Operator|physics\nroot|Administrator|root",
    "qos": "normal|0||||1.000000"
    + "|" * 20
    + "Normal QOS default\nhigh|5|low,a|NoReserve,DenyOnLimit|1-00:01:00|2.000000"
    + "|" * 20,
    "tres": "cpu|\ngres|gpu",
}


def test_a_line_break_in_a_comment_makes_no_row() -> None:
    """An account's coordinator may write any comment, also one that looks like a row of another account's user."""

    def ask(*arguments: str) -> str:
        return "1\n" if arguments[-1] == "format=id" else "physics|alice|x\nchem|bob|minivm c1\n"

    with pytest.raises(AccountsError, match="has a line break"):
        list(rows(("assoc",), ("account", "user", "comment"), key="id", ask=ask))
    assert list(rows(("tres",), ("type", "name"), ask=lambda *_: "gres|gpu\x0b\n")) == [["gres", "gpu\x0b"]]


def test_a_forged_mark_costs_nobody_an_admin_level() -> None:
    """A coordinator may add an administrator to the account, with a comment that looks like minivm's mark."""
    mark = OwnerMark({"fairshare": "1"})
    stored = {
        account("physics"): StoredObject({"parent": "root"}, OwnerMark({"parent": "root"}, frozenset({"carol"}))),
        user("alice", "ops"): StoredObject({"default": "yes", "adminlevel": "administrator"}, None),
        user("alice", "physics"): StoredObject({"fairshare": "1", "adminlevel": "administrator"}, mark),
    }
    wanted = file.AccountsFile("f", {account("physics"): {"parent": "root"}}, {}, {})
    database = Database(stored, {"alice": "administrator"}, frozenset({"physics", "ops", "root"}), frozenset())
    (removal,) = [change for change in plan.make(wanted, database, frozenset()).changes if change.op is plan.Op.REMOVE]
    assert removal.key == user("alice", "physics") and removal.after == {"adminlevel": "administrator"}
    assert not [call for call in calls.order_calls(plan.make(wanted, database, frozenset()), database, "minivm")
                if "adminlevel=none" in " ".join(call.argv)]  # fmt: skip


def test_a_mark_that_a_coordinator_cleared_is_reported_and_overwritten() -> None:
    stored = {
        account("physics"): StoredObject({"parent": "root"}, OwnerMark({"parent": "root"}, frozenset({"carol"}))),
        user("carol", "physics"): StoredObject({"default": "yes"}, None),
    }
    objects = {account("physics"): {"parent": "root"}, user("carol", "physics"): {"default": "yes"}}
    wanted = file.AccountsFile("f", objects, {}, {})
    made = plan.make(wanted, Database(stored, {"carol": ""}, frozenset({"physics", "root"}), frozenset()), frozenset())
    assert made.unowned == () and [(item.key, item.field) for item in made.by_hand] == [
        (user("carol", "physics"), "mark")
    ]
    assert user("carol", "physics") in {change.key for change in made.changes}


def test_sacctmgrs_tables_are_read() -> None:
    limits = "cpu=64,mem=100G" + "|" * 13 + "1-00:00:00|high,normal|high"
    association = f"physics||||root|5|{limits}|minivm minivm;fairshare=5".replace("||||", "|||", 1)
    member = "physics|alice|||parent" + "|" * 17 + "minivm minivm;fairshare=parent"
    odd = "physics|alice|gpu||1" + "|" * 17

    def ask(*arguments: str) -> str:
        return "\n".join((association, member, odd)) if arguments[2] == "assoc" else SACCTMGR[arguments[2]]

    database = read("minivm", ask=ask)
    found = database.objects[account("physics")]
    assert found.fields == {
        "parent": "root", "fairshare": "5", "grptres": "cpu=64,mem=102400", "maxwall": "1440", "qos": "high,normal",
        "defaultqos": "high", "organization": "sci", "description": "the lab | of physics", "coordinator alice": "yes",
        "coordinator bob": "yes",
    }  # fmt: skip
    assert found.mark is not None and found.mark.fields == {"fairshare": "5"}
    assert database.objects[user("alice", "physics")].fields == {
        "fairshare": "parent", "default": "yes", "adminlevel": "operator",
    }  # fmt: skip
    assert database.partitioned == {user("alice", "physics")}
    assert database.tres == {"cpu", "gres/gpu"}


def test_every_wrong_entry_is_told_at_once() -> None:
    data: dict[str, Any] = {
        "qos": [{"name": "urgent", "limits": {"MaxWal": "12h"}}, {"name": "fine"}],
        "accounts": [{"name": "physics", "fairshare": -1}, "chem"],
        "users": [{"name": "carol", "defaultAccount": "Physics"}, {"nam": "x"}],
    }
    with pytest.raises(ConfigError) as caught:
        wanted(data)
    lines = str(caught.value).splitlines()
    fields = ("qos[0].limits.MaxWal", "accounts[0].fairshare", "accounts[1]", "users[0].defaultAccount", "users[1].nam")
    assert [line.split(": ")[:2] for line in lines] == [["accounts.yaml", name] for name in fields]
    with pytest.raises(ConfigError, match=r"50 more entries are wrong$"):
        wanted({"users": [{"name": "?"} for _ in range(100)]})


def test_a_second_apply_is_refused_while_one_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "accounts.yaml"
    file.touch()
    monkeypatch.setattr(accounts_cli, "LOCK", tmp_path / "run/lock")
    with accounts_cli._only_one(file):
        result = CliRunner().invoke(accounts_cli.main, ["apply", str(file), "--yes"], standalone_mode=False)
    assert result.exit_code == 1 and "another `minivm accounts apply` is running" in result.output
    with accounts_cli._only_one(file):
        pass
