"""Registry logins: their sources, the order of these, and that no output contains them."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from images import ImagesError
from images.ship.registry import PASSWORD, USER, Login, find_login

HOST = "registry.site:5000"
HELPER = """#!/bin/sh
read -r server
[ "$1" = get ] || exit 2
case "$server" in
registry.site:5000) printf '{"ServerURL":"%s","Username":"helped","Secret":"from the helper"}' "$server" ;;
broken.site) echo 'the secret is 12345' ;;
*) echo "credentials not found" >&2; exit 1 ;;
esac
"""


def entry(user: str, password: str) -> dict[str, str]:
    return {"auth": base64.b64encode(f"{user}:{password}".encode()).decode()}


def environment(tmp_path: Path, config: dict[str, Any] | str | None) -> dict[str, str]:
    if config is not None:
        text = config if isinstance(config, str) else json.dumps(config)
        (tmp_path / "config.json").write_text(text)
    (tmp_path / "bin").mkdir()
    helper = tmp_path / "bin" / "docker-credential-test"
    helper.write_text(HELPER)
    helper.chmod(0o755)
    return {"DOCKER_CONFIG": str(tmp_path), "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}


STORED = {"auths": {HOST: entry("stored", "a:b c")}}


def test_nothing_anywhere_is_no_login(tmp_path: Path) -> None:
    assert find_login(HOST, environment(tmp_path, None)) is None
    assert find_login("other.site", {"DOCKER_CONFIG": str(tmp_path)}) is None


def test_what_docker_login_stored_is_used_and_a_password_may_hold_colons(tmp_path: Path) -> None:
    assert find_login(HOST, environment(tmp_path, STORED)) == Login("stored", "a:b c")


def test_the_environment_goes_before_the_file_and_the_arguments_before_both(tmp_path: Path) -> None:
    env = environment(tmp_path, STORED) | {USER: "env", PASSWORD: "secret"}
    assert find_login(HOST, env) == Login("env", "secret")
    assert find_login(HOST, env, user="arg", password="typed") == Login("arg", "typed")


@pytest.mark.parametrize(
    ("config", "host", "expected"),
    [
        ({"credsStore": "test"}, HOST, Login("helped", "from the helper")),
        ({"credHelpers": {HOST: "test"}} | STORED, HOST, Login("helped", "from the helper")),
        ({"credHelpers": {"other.site": "test"}} | STORED, HOST, Login("stored", "a:b c")),
        ({"credsStore": "test", "auths": {"x.site": entry("u", "p")}}, "x.site", Login("u", "p")),
        ({"auths": {"https://index.docker.io/v1/": entry("hub", "p")}}, "docker.io", Login("hub", "p")),
        ({"auths": {"https://x.site": entry("u", "p")}}, "x.site", Login("u", "p")),
    ],
)
def test_docker_configuration(tmp_path: Path, config: dict[str, Any], host: str, expected: Login) -> None:
    assert find_login(host, environment(tmp_path, config)) == expected


@pytest.mark.parametrize(
    ("env", "arguments", "config", "message"),
    [
        ({USER: "u"}, {}, None, f"{PASSWORD} is not set"),
        ({PASSWORD: "p"}, {}, None, f"{USER} is not set"),
        ({}, {"user": "u"}, None, "no password"),
        ({}, {"password": "p"}, None, "no user name"),
        ({}, {}, "{not json", "cannot read docker's configuration"),
        ({}, {}, {"auths": {HOST: {"auth": "???"}}}, "not base64"),
        ({}, {}, {"auths": {HOST: {"auth": 5}}}, "not base64"),
        ({}, {}, "[]", "expected a mapping"),
        ({}, {}, {"auths": "none"}, "config.json, auths"),
        ({}, {}, {"auths": {HOST: "x"}}, f"config.json, {HOST}"),
        ({}, {}, {"credHelpers": ["test"]}, "config.json, credHelpers"),
        ({}, {}, "[" * 100_000, "cannot read docker's configuration"),
        ({}, {}, {"credsStore": "absent"}, "docker-credential-absent"),
    ],
)
def test_half_a_login_is_an_error(
    tmp_path: Path, env: dict[str, str], arguments: dict[str, str], config: dict[str, Any] | str | None, message: str
) -> None:
    with pytest.raises(ImagesError, match=r"cannot log in to registry\.site:5000") as caught:
        find_login(HOST, environment(tmp_path, config) | env, **arguments)
    assert message in str(caught.value)


def test_a_helper_that_answers_nonsense_is_not_quoted(tmp_path: Path) -> None:
    with pytest.raises(ImagesError) as caught:
        find_login("broken.site", environment(tmp_path, {"credsStore": "test"}))
    assert "12345" not in str(caught.value)


def test_a_login_does_not_print_its_password() -> None:
    assert "hunter2" not in f"{Login('u', 'hunter2')} {Login('u', 'hunter2')!r}"
