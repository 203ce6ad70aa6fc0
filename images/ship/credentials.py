"""Credentials for a registry: from standard input, the environment, or docker's configuration. Never from argv.

The sources, in this order:
  1. --user NAME with the password on standard input (--password-stdin);
  2. MINIVM_REGISTRY_USER and MINIVM_REGISTRY_PASSWORD;
  3. $DOCKER_CONFIG/config.json or ~/.docker/config.json: a credential helper, or what `docker login` stored.
No credentials is a valid result: some registries allow anonymous access.
"""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from images.errors import ImagesError

USER, PASSWORD = "MINIVM_REGISTRY_USER", "MINIVM_REGISTRY_PASSWORD"
# Docker Hub's entry in config.json is older than the registry it names today.
DOCKER_HUB, DOCKER_HUB_KEY = "docker.io", "https://index.docker.io/v1/"
HELPER_TIMEOUT = 60


@dataclass(frozen=True, slots=True)
class Login:
    user: str
    password: str = field(repr=False)  # a dataclass prints itself in logs and tracebacks: not this

    def for_engine(self) -> dict[str, str]:
        return {"username": self.user, "password": self.password}

    def basic(self) -> str:
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


def find(host: str, env: Mapping[str, str], *, user: str = "", password: str = "") -> Login | None:
    """Find the login for a registry's `host[:port]`; `password` is what standard input gave."""
    if user or password:
        if not (user and password):
            missing = "password" if user else "user name"
            raise ImagesError(f"log in to {host}", f"no {missing}", hint="give --user and --password-stdin together")
        return Login(user, password)
    if env.get(USER) or env.get(PASSWORD):
        absent = [name for name in (USER, PASSWORD) if not env.get(name)]
        if absent:
            raise ImagesError(f"log in to {host}", f"{absent[0]} is not set", hint=f"set {USER} and {PASSWORD}")
        return Login(env[USER], env[PASSWORD])
    path = Path(env.get("DOCKER_CONFIG") or Path(env.get("HOME", "/root")) / ".docker") / "config.json"
    return from_docker(path, host, env)


def from_docker(path: Path, host: str, env: Mapping[str, str]) -> Login | None:
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ImagesError(f"log in to {host}", f"cannot read docker's configuration: {error}", file=path) from error
    key = DOCKER_HUB_KEY if host == DOCKER_HUB else host
    helper = mapping(config, "credHelpers", path, host).get(key) or config.get("credsStore", "")
    if helper and (login := ask_helper(str(helper), key, env)):
        return login
    auths = mapping(config, "auths", path, host)
    name = key if auths.get(key) else f"https://{key}"
    return stored(mapping(auths, name, path, host), path, host)


def mapping(data: object, name: str, path: Path, host: str) -> Mapping[str, Any]:
    entry = data.get(name) or {} if isinstance(data, dict) else None
    if not isinstance(entry, dict):
        raise ImagesError(f"log in to {host}", "docker's configuration is not what `docker login` writes: expected a"
                          " mapping", file=path, field=name, hint=f"run `docker login {host}`")  # fmt: skip
    return entry


def stored(entry: Mapping[str, Any], path: Path, host: str) -> Login | None:
    if not entry.get("auth"):
        return None
    try:
        user, separator, password = base64.b64decode(str(entry["auth"]), validate=True).decode().partition(":")
    except ValueError as error:
        raise ImagesError(
            f"log in to {host}",
            "its entry is not base64 of user:password",
            file=path,
            hint=f"run `docker login {host}`",
        ) from error
    return Login(user, password) if separator else None


def ask_helper(helper: str, key: str, env: Mapping[str, str]) -> Login | None:
    """Call docker-credential-HELPER: the registry on standard input, JSON on standard output."""
    command = [f"docker-credential-{helper}", "get"]
    try:
        done = subprocess.run(
            command, input=key, capture_output=True, text=True, env=dict(env), timeout=HELPER_TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ImagesError(f"log in to {key}", f"credential helper {command[0]}: {error}") from error
    if done.returncode != 0:
        return None  # by the protocol: "credentials not found"; what config.json holds itself is the next choice
    try:
        answer = json.loads(done.stdout)
        return Login(str(answer["Username"]), str(answer["Secret"]))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        # The answer itself may be a secret: it is not repeated.
        raise ImagesError(f"log in to {key}", f"credential helper {command[0]} gave no user and secret") from error
