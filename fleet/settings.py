"""The settings of one fleet, from MINIVM_FLEET_* and nowhere else."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from init.errors import ConfigError, nearest

PREFIX = "MINIVM_FLEET_"
WEBHOOK = "/mnt/minivm/secrets/webhook"
KNOWN = ("RELEASE", "SLURM", "KEY", "POLICY", "LEASE", "HTTP", "PAGE", "MACHINES", "POOLS", "GUESTS", "WEBHOOK", "CUT")


@dataclass(frozen=True, slots=True)
class Settings:
    namespace: str
    # The chart's release: of its worker pods and of nothing else is anything said.
    release: str
    # slurmrestd, host:port.
    slurm: str
    key: Path
    policy: Path
    # The Lease that one of several holds, and who we are to it; "": alone.
    lease: str = ""
    me: str = ""
    # Where probes and metrics are answered; None: nowhere.
    http: tuple[str, int] | None = None
    # Where people see the fleet; None: nowhere.
    page: tuple[str, int] | None = None
    # Whether machines are kept as objects; the kind must be known to the API server.
    machines: bool = False
    # The same of pools of workers, whose pods are then the fleet's to make.
    pools: bool = False
    # Namespaces of others whose pods are read: pools may lend them machines.
    guests: tuple[str, ...] = ()
    # The Secret with what webhooks of remedies need: tokens, authorities.
    webhook: Path = Path(WEBHOOK)
    # For tests alone: SIGKILL to oneself before that change, counted from 1. 0: never.
    cut: int = 0


def from_environment(env: Mapping[str, str]) -> Settings:
    for name in env:
        if name.startswith(PREFIX) and name.removeprefix(PREFIX) not in KNOWN:
            hint = nearest(name, [PREFIX + known for known in KNOWN])
            raise ConfigError("read the fleet's settings", "no such setting", field=name, hint=hint)

    def needed(name: str) -> str:
        if not env.get(name):
            raise ConfigError("read the fleet's settings", "it is not set", field=name)
        return env[name]

    lease = env.get(f"{PREFIX}LEASE") or ""
    cut = env.get(f"{PREFIX}CUT") or "0"
    if not cut.isdecimal():
        raise ConfigError("read the fleet's settings", f"wanted a number, not {cut!r}", field=f"{PREFIX}CUT")

    def asked(name: str) -> bool:
        said = env.get(f"{PREFIX}{name}") or "no"
        if said not in ("yes", "no"):
            raise ConfigError("read the fleet's settings", f"wanted yes or no, not {said!r}", field=f"{PREFIX}{name}")
        return said == "yes"

    return Settings(
        namespace=needed("MINIVM_POD_NAMESPACE"),
        release=needed(f"{PREFIX}RELEASE"),
        slurm=needed(f"{PREFIX}SLURM"),
        key=Path(env.get(f"{PREFIX}KEY") or "/mnt/minivm/secrets/slurm/jwt_hs256.key"),
        policy=Path(env.get(f"{PREFIX}POLICY") or "/mnt/minivm/config/fleet/policy.json"),
        lease=lease,
        me=f"{needed('MINIVM_POD_NAME')}-{secrets.token_hex(4)}" if lease else "",
        http=_address(env, "HTTP"),
        page=_address(env, "PAGE"),
        machines=asked("MACHINES"),
        pools=asked("POOLS"),
        guests=tuple(name for name in (env.get(f"{PREFIX}GUESTS") or "").split(",") if name),
        webhook=Path(env.get(f"{PREFIX}WEBHOOK") or WEBHOOK),
        cut=int(cut),
    )


def _address(env: Mapping[str, str], name: str) -> tuple[str, int] | None:
    said = env.get(f"{PREFIX}{name}") or ""
    if not said:
        return None
    host, _, port = said.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError("read the fleet's settings", f"{said!r} is no host:port", field=f"{PREFIX}{name}")
    return host.strip("[]") or "0.0.0.0", int(port)
