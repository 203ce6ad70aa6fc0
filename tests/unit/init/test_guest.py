"""Arguments of Slinky's pods become this init's settings; what only a shell could do is refused."""

from __future__ import annotations

import shlex
import subprocess

import pytest

from init.errors import ConfigError
from init.pid1 import guest

# As the operator's worker has them: one argument with quotes inside, and a variable for a shell.
WORKER = [
    "-Z",
    "--conf-server",
    "slurm-controller:6817",
    "--conf",
    "'Features=blue,gpu Topology='\"$SLINKY_TOPOLOGY\"''",
]


def adopted(role: str, *arguments: str, **env: str) -> dict[str, str]:
    settings = {"MINIVM_UNDER": "slinky", **env}
    guest.adopt(role, arguments, settings)
    return settings


def test_a_workers_arguments_become_settings() -> None:
    settings = adopted("slinky-worker", *WORKER, SLINKY_TOPOLOGY="default:s1")
    assert settings["MINIVM_CONTROLLER"] == "slurm-controller:6817"
    assert settings["MINIVM_NODE_FEATURES"] == "blue,gpu"
    assert settings["MINIVM_NODE_CONF"] == "Topology=default:s1"
    assert settings["MINIVM_ARGUMENTS"] == "'--conf-server' 'slurm-controller:6817'"


def test_a_node_without_a_topology_registers_without_that_word() -> None:
    """An empty `Topology=` would keep slurmd from registering."""
    assert adopted("slinky-worker", *WORKER, SLINKY_TOPOLOGY="")["MINIVM_NODE_CONF"] == ""
    assert adopted("slinky-worker", *WORKER)["MINIVM_NODE_CONF"] == ""


def test_variables_add_arguments_and_several_controllers_are_all_told() -> None:
    settings = adopted("slinky-login", SACKD_OPTIONS="--conf-server one:6817,two:6817 -vv")
    assert settings["MINIVM_CONTROLLER"] == "one:6817"
    assert settings["MINIVM_ARGUMENTS"] == "'--conf-server' 'one:6817,two:6817' '-vv'"
    assert "MINIVM_CONTROLLER" not in adopted("slinky-login", SLURMD_OPTIONS="--conf-server another:1")


def test_the_operators_name_of_the_node_wins() -> None:
    for arguments in (["-N", "blue-0"], ["-Nblue-0"]):
        settings = adopted("slinky-worker", *arguments)
        assert (settings["MINIVM_POD_NAME"], settings["MINIVM_ARGUMENTS"]) == ("blue-0", "")


def test_flags_of_how_the_daemon_starts_are_left_out_of_a_group_too() -> None:
    assert adopted("slinky-worker", "-Dvv -s -Z --systemd\n")["MINIVM_ARGUMENTS"] == "'-vv'"


def test_another_operator_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="MINIVM_UNDER is 'soperator', and slinky alone is known"):
        adopted("slinky-worker", MINIVM_UNDER="soperator")


@pytest.mark.parametrize("word", ["plain", "two words", "it's", 'a "b"', r"back\slash", "$HOME ${X}", "#not;a|comment"])
def test_env_hands_each_argument_to_the_daemon_as_it_was(word: str) -> None:
    settings = adopted("slinky-worker", "--extra", shlex.quote(word))
    shown = subprocess.run(
        ["/usr/bin/env", "-S", "/usr/bin/printf %s\\n " + settings["MINIVM_ARGUMENTS"]],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert shown.splitlines() == ["--extra", word]


@pytest.mark.parametrize(
    "line",
    [
        "a 'b c' d", "'a'\"b\"c", "'' a", '"a \\" b"', r"a\ b", r"\'a\'", '"$SLINKY_TOPOLOGY"x', "${SLINKY_TOPOLOGY}",
        "a\t b", "'$SLINKY_TOPOLOGY'", r'"\n"',
    ],
)  # fmt: skip
def test_words_are_those_of_a_shell(line: str) -> None:
    env = {"SLINKY_TOPOLOGY": "t1", "PATH": "/usr/bin:/bin"}
    shell = subprocess.run(
        ["/bin/sh", "-c", f"printf '%s\\n' {line}"], env=env, capture_output=True, text=True, check=True
    )
    assert guest.split(line, env) == shell.stdout.split("\n")[:-1]


@pytest.mark.parametrize(
    ("argument", "why"),
    [
        ("--conf $(id)", "variables"),
        ("--conf `id`", "runs nothing"),
        ('"`id`"', "runs nothing"),
        ("-v; id", "for a shell"),
        ("$SLURM_JWT", "variables"),
        ("${SLINKY_TOPOLOGY", "variables"),
        ("'open", "not closed"),
        ("end\\", "for a shell"),
        ("--conf-server", "has no value"),
        ("--conf Features", "not Key=value"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused_with_the_reason(argument: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        adopted("slinky-worker", argument)
