"""Make an image's configuration here instead of in the builder: no dates, no host, the same id on every machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

INHERITED = ("Env", "ExposedPorts", "WorkingDir", "User", "Volumes", "StopSignal", "Shell", "Entrypoint", "Cmd")


@dataclass(frozen=True, slots=True)
class Config:
    """The bytes of a configuration, whose digest is the image's id, and its layers."""

    data: bytes
    diff_ids: tuple[str, ...]

    @property
    def id(self) -> str:
        return f"sha256:{hashlib.sha256(self.data).hexdigest()}"


@dataclass(frozen=True, slots=True)
class Additions:
    """Additions of one image to the configuration of the one below."""

    env: Mapping[str, str]
    ports: Sequence[int] = ()
    entrypoint: Sequence[str] = ()
    stop_signal: str = ""
    user: str = ""
    labels: Mapping[str, str] | None = None
    created_by: str = ""


def config(
    parent: Mapping[str, Any] | None, parent_layers: int, diff_ids: Sequence[str], add: Additions, *, arch: str,
    epoch: int,
) -> Config:  # fmt: skip
    """Build a configuration. `parent` is that of the image below; its labels describe that image, so drop them."""
    inherited = {key: value for key, value in (parent or {}).items() if key in INHERITED and value}
    env = dict(item.split("=", 1) for item in inherited.pop("Env", []))
    env.setdefault("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
    env.update(add.env)
    inherited["Env"] = [f"{name}={value}" for name, value in env.items()]
    if add.ports:
        inherited["ExposedPorts"] = {**inherited.get("ExposedPorts", {}), **{f"{port}/tcp": {} for port in add.ports}}
    if add.entrypoint:
        inherited["Entrypoint"] = list(add.entrypoint)
        inherited.pop("Cmd", None)
    elif not inherited.get("Entrypoint") and not inherited.get("Cmd"):
        inherited["Cmd"] = ["/bin/bash"]
    if add.stop_signal:
        inherited["StopSignal"] = add.stop_signal
    if add.user:
        inherited["User"] = add.user
    inherited["Labels"] = dict(sorted((add.labels or {}).items()))
    created = datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    history = [
        {"created": created, "created_by": add.created_by if index >= parent_layers else "the image below"}
        for index in range(len(diff_ids))
    ]
    whole = {
        "architecture": arch,
        "os": "linux",
        "created": created,
        "config": inherited,
        "rootfs": {"type": "layers", "diff_ids": list(diff_ids)},
        "history": history,
    }
    return Config(json.dumps(whole, sort_keys=True, separators=(",", ":")).encode(), tuple(diff_ids))
