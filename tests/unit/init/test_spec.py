"""Service files: accepted forms, and the error for each mistake."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from init.dropins.merge import load_mapping
from init.errors import ConfigError
from init.fields import expand
from init.plan import service
from init.plan.compile import compare, compile_plan, overlay, plan_from_json, plan_to_json, select, unset_variables
from init.plan.service import Kind, Probe, ResourceLimit, Service, ValueSource, Variable, WhenCondition
from init.plan.spec import parse_drain, parse_service


def parse(**mapping: Any) -> Service:
    return parse_service("slurmd", {"command": ["/usr/sbin/slurmd"]} | mapping, "slurmd.yaml")


def test_a_whole_service() -> None:
    found = parse(
        ready={"tcp": "${CTL:-c}:6817", "interval": "50ms", "within": "1m"},
        environment={"A": "x", "N": 5, "S": {"secret": "/run/s"}, "F": {"file": "/run/f"}},
        limits={"nofile": "10:20", "memlock": "unlimited", "core": 0},
        umask="0077",
        capabilities=["CAP_CHOWN", "KILL"],
        stop={"signal": "SIGINT", "grace": "2m"},
        when=[{"value": "${X:-a}", "in": ["a", "b"]}, {"path": "/x", "exists": False}],
        user=64030,
    )
    assert (found.ready.probe, found.ready.interval, found.ready.within) == (Probe.TCP, 0.05, 60)
    assert found.environment == (
        Variable("A", ValueSource.VALUE, "x"), Variable("N", ValueSource.VALUE, "5"),
        Variable("S", ValueSource.SECRET, "/run/s"), Variable("F", ValueSource.FILE, "/run/f"),
    )  # fmt: skip
    assert found.limits == (
        ResourceLimit("nofile", 10, 20),
        ResourceLimit("memlock", -1, -1),
        ResourceLimit("core", 0, 0),
    )
    assert (found.umask, found.capabilities, found.user) == (0o077, ("CHOWN", "KILL"), "64030")
    assert (found.stop.signal, found.stop.grace) == ("INT", 120)
    assert found.when == (WhenCondition("${X:-a}", ("a", "b")), WhenCondition(path="/x", wanted=False))


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"comand": ["/x"]}, "slurmd.yaml: comand: cannot read service slurmd: unknown key (did you mean command?)"),
    ({"command": "/usr/sbin/slurmd -D"}, "wanted a list of arguments, not one string (write [/usr/sbin/slurmd, -D])"),
    ({"command": ["slurmd"]}, "'slurmd' is not an absolute path"),
    ({"command": ["/x", "$HOME"]}, "a lone $ in '$HOME'"),
    ({"command": ["/x", True]}, "quote it"),
    ({"command": []}, "an empty command"),
    ({"command": None}, "command: cannot read service slurmd: missing"),
    ({"kind": "longrunning"}, "did you mean longrun?"),
    ({"kind": "gate"}, "a gate has no process"),
    ({"kind": "gate", "command": None}, "a gate consists of its probe"),
    ({"kind": "oneshot", "ready": "notify"}, "a oneshot is ready once it exited 0"),
    ({"kind": "periodic"}, "a periodic service needs it"),
    ({"every": 5}, "only a periodic one has it"),
    ({"kind": "oneshot", "restart": {"when": "always"}}, "a oneshot that has succeeded is done"),
    ({"ready": "notfy"}, "did you mean notify?"),
    ({"ready": {"tcp": "h:1", "file": "/x"}}, "wanted exactly one probe"),
    ({"ready": {"tcp": "host"}}, "'host' has no port"),
    ({"ready": {"http": "h/x"}}, "'h/x' has no port"),
    ({"ready": {"http": "h:1"}}, "'h:1' is not host:port/path"),
    ({"ready": {"http": "${H:-h:1}"}}, "is not host:port/path"),
    ({"ready": {"http": "http://h:1/x"}}, "'http://h:1/x' is not host:port/path"),
    ({"ready": {"file": "x"}}, "'x' is not an absolute path"),
    ({"ready": {"tcp": "h:1", "intervall": 3}}, "did you mean interval?"),
    ({"ready": {"tcp": "h:1", "interval": 0}}, "wanted more than 0"),
    ({"watchdog": 5}, "only a service with ready: notify"),
    ({"needs": ["slurmd"]}, "cannot wait for itself"),
    ({"needs": ["a", "a"]}, "a name appears twice"),
    ({"needs": ["Bad Name"]}, "'Bad Name' is not a service's name"),
    ({"needs": "munged"}, "wanted a list, not str 'munged'"),
    ({"restart": {"jitter": 2}}, "wanted between 0 and 1, not 2"),
    ({"restart": {"exhausted": "endpod"}}, "did you mean end-pod?"),
    ({"restart": {"fatal-codes": [300]}}, "300 is not an exit code"),
    ({"restart": {"limit": -1}}, "wanted at least 0"),
    ({"restart": "always"}, "wanted a mapping, not str 'always'"),
    ({"ready": {"tcp": "h:1", "within": 3, "late": "wait for it"}}, "late"),
    ({"ready": {"tcp": "h:1", "late": "wait"}}, "`within`, which is missing"),
    ({"stop": {"signal": "TREM"}}, "did you mean TERM?"),
    ({"stop": {"grace": "10 minutes"}}, "wanted a duration"),
    ({"reload": {"signal": "HUP", "command": ["/x"]}}, "either a signal or a command"),
    ({"umask": 22}, "wanted octal digits in quotes"),
    ({"umask": "0999"}, "wanted octal digits in quotes"),
    ({"limits": {"nofile": "many"}}, "wanted a number, unlimited, or soft:hard"),
    ({"limits": {"nofiles": 5}}, "did you mean nofile?"),
    ({"capabilities": ["CAP_CHWON"]}, "did you mean CHOWN?"),
    ({"oom-score": 2000}, "wanted -1000 to 1000"),
    ({"environment": {"A": {"secrets": "/x"}}}, "did you mean secret?"),
    ({"environment": {"A": True}}, "quote it"),
    ({"environment": {"A=B": "x"}}, "not a variable's name"),
    ({"when": [{"value": "${X:-}"}]}, "exactly one of in, not-in, set"),
    ({"when": [{"valu": "/x"}]}, "did you mean value?"),
    ({"when": {"value": "x"}}, "wanted a list of conditions"),
    ({"name": "other"}, "says 'other', but the file is named slurmd"),
    ({"required": "yes"}, "wanted true or false"),
    ({"prepare": ["/bin/x"]}, "a list of commands, each a list of arguments"),
    ({"log": "json"}, "is not one of tagged, raw, off"),
]


@pytest.mark.parametrize(("mapping", "words"), MISTAKES, ids=[words[:40] for _, words in MISTAKES])
def test_each_mistake_is_told_where_and_how_to_mend_it(mapping: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(**mapping)
    assert words in str(error.value) and str(error.value).startswith("slurmd.yaml: ")


@pytest.mark.parametrize("name", ["a", "slurm-config", "x1.y_2"])
def test_names(name: str) -> None:
    assert parse_service(name, {"command": ["/x"]}, "f").name == name


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{after}: &{after} [{', '.join(['*' + before] * 10)}]\n" for before, after in pairwise("abcdef")
)


@pytest.mark.parametrize(
    "key", ["umask", "kind", "every", "user", "required", "command", "ready", "limits", "environment"]
)
def test_a_few_lines_of_yaml_do_not_fill_the_memory_by_being_wrong(key: str, tmp_path: Path) -> None:
    """A wrong value that YAML aliases expand stays short in the error.

    This value has a million words; three more lines would make an error that quotes it gigabytes long.
    """
    file = tmp_path / "bomb.yaml"
    file.write_text(f"{BOMB}{key}: *f\n")
    value = load_mapping(file)[key]
    with pytest.raises(ConfigError) as error:
        parse_service("bomb", {"command": ["/bin/x"], key: value}, str(file))
    assert len(str(error.value)) < 2000


def test_reserved_names() -> None:
    with pytest.raises(ConfigError, match="a reserved name of PID 1"):
        compile_plan("r", [make("drain")])


@pytest.mark.parametrize("name", ["", "A", "-a", "a-", "a--b", "1a", "a b", "ä", "a/b"])
def test_no_names(name: str) -> None:
    with pytest.raises(ConfigError, match="not a service's name"):
        parse_service(name, {"command": ["/x"]}, "f")


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("plain", "plain"), ("${A}", "1"), ("x${A}y${B:-2}", "x1y2"), ("${E:-d}", "d"), ("${E}", ""), ("$$A", "$A"),
        ("${B:-}", ""), ("${B:-http://x:1/y}", "http://x:1/y"),
    ],
)  # fmt: skip
def test_variables(text: str, filled: str) -> None:
    assert expand(text, {"A": "1", "E": ""}) == filled


def test_a_variable_that_is_not_there_is_named() -> None:
    with pytest.raises(KeyError, match="B"):
        expand("${B}", {})


def make(name: str, **mapping: Any) -> Service:
    return parse_service(name, {"command": ["/bin/x"]} | mapping, f"{name}.yaml")


def test_everything_wrong_between_services_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        compile_plan("r", [make("munged"), make("a", needs=["munge"]), make("b", needs=["nowhere"]), make("munged")])
    text = str(error.value)
    assert "no service 'munge' (did you mean munged?)" in text and "no service 'nowhere'" in text
    assert "'munged' is also defined in munged.yaml" in text


def test_a_cycle_is_shown_as_a_path() -> None:
    with pytest.raises(ConfigError, match="a cycle in the start order: a -> c -> b -> a"):
        compile_plan("r", [make("a", needs=["c"]), make("b", needs=["a"]), make("c", after=["b"])])
    with pytest.raises(ConfigError, match="a cycle in the stop order"):
        compile_plan("r", [make("a", stop={"after": ["b"]}), make("b", needs=["c"]), make("c", after=[], needs=["a"],
                     stop={"after": ["a"]})])  # fmt: skip


def test_start_and_stop_order() -> None:
    plan = compile_plan(
        "r", [make("c", needs=["b"]), make("b", after=["a"]), make("a"), make("d", stop={"after": ["a"]})]
    )
    assert service.waves(service.start_edges(plan.services)) == [("a", "d"), ("b",), ("c",)]
    assert service.waves(service.stop_edges(plan.services)) == [("c",), ("b",), ("a",), ("d",)]


def test_needing_what_this_pod_does_not_have_is_needing_nothing() -> None:
    accounting = [{"value": "${MINIVM_ACCOUNTING:-embedded}", "in": ["embedded"]}]
    plan = compile_plan(
        "r",
        [make("mariadb", when=accounting), make("slurmdbd", needs=["mariadb"]), make("x", when=[{"path": "/y"}])],
    )
    assert [s.name for s in select(plan, {}, lambda path: False).services] == ["mariadb", "slurmdbd"]
    left = select(plan, {"MINIVM_ACCOUNTING": "external"}, lambda path: path == "/y")
    assert [(s.name, s.needs) for s in left.services] == [("x", ()), ("slurmdbd", ())]


def test_variables_that_the_pod_lacks_are_found_before_anything_starts() -> None:
    plan = compile_plan(
        "r",
        [
            make("a", command=["/x", "${MISSING}"]), make("b", command=["/x", "${OWN}"], environment={"OWN": "1"}),
            make("c", command=["/x", "${LATER}"], **{"environment-files": ["/run/env"]}),
            make("d", command=["/${SET}"]),
        ],
    )  # fmt: skip
    (error,) = unset_variables(plan, {"SET": "1"})
    assert "cannot start a: ${MISSING} is not set" in str(error)


def test_a_drop_in_replaces_its_namesake_whole() -> None:
    plan = compile_plan("r", [make("a", user="slurm"), make("b", needs=["a"])])
    found = overlay(plan, [make("a", command=["/other"])])
    assert found.service("a") == make("a", command=["/other"]) and found.service("b") == plan.service("b")


def test_what_a_new_plan_changes() -> None:
    old = compile_plan("r", [make("same"), make("gone"), make("other")])
    moved = parse_service("same", {"command": ["/bin/x"]}, "elsewhere.yaml")
    change = compare(old, compile_plan("r", [moved, make("new"), make("other", user="x")]))
    assert (change.added, change.removed, change.changed) == (("new",), ("gone",), ("other",))


def test_defaults_stay_out_of_the_json() -> None:
    text = plan_to_json(compile_plan("r", [make("a")]))
    assert '"about"' not in text and '"restart"' not in text and '"ready"' not in text
    assert plan_from_json(text, "f").services[0].kind is Kind.LONGRUN


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 1, "services": {"a": 5}}', '{"services": {}}'])
def test_what_is_no_plan(text: str) -> None:
    with pytest.raises(ConfigError):
        plan_from_json(text, "plan.json")


def test_every_wrong_service_of_a_plan_is_told() -> None:
    text = '{"version": 1, "services": {"a": {"comand": []}, "b": {"command": ["x"]}}}'
    with pytest.raises(ConfigError) as error:
        plan_from_json(text, "plan.json")
    assert "comand" in str(error.value) and "absolute" in str(error.value)


def test_a_drain_needs_a_command() -> None:
    with pytest.raises(ConfigError, match="missing"):
        parse_drain({"budget": 5}, "role.yaml")
    assert parse_drain({"command": ["/d"], "budget": "2m"}, "role.yaml").budget == 120
