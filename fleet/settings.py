"""The settings of a fleet, read from MINIVM_FLEET_* only."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from init.errors import ConfigError, nearest

PREFIX = "MINIVM_FLEET_"
WEBHOOK = "/mnt/minivm/secrets/webhook"
# fmt: off
KNOWN = (
    "RELEASE", "SLURM", "KEY", "POLICY", "LEASE", "HTTP", "PAGE", "MACHINES", "POOLS", "CONDITIONS", "GUESTS",
    "WEBHOOK",
)
# fmt: on


@dataclass(frozen=True, slots=True)
class FleetSettings:
    namespace: str
    # The chart's release: the fleet works for its pods only.
    release: str
    # slurmrestd, host:port.
    slurm: str
    key: Path
    policy: Path
    # The Lease for leader election and this candidate's identity; "": no election.
    lease: str = ""
    me: str = ""
    # The address of probes and metrics; None: not served.
    http: tuple[str, int] | None = None
    # The address of the page; None: not served.
    page: tuple[str, int] | None = None
    # Whether Machines and WorkerPools are used; their kinds must exist in the API server.
    machines: bool = False
    pools: bool = False
    # Whether the fleet writes the pods' own conditions, which it reads from their pages.
    conditions: bool = False
    # The namespaces whose pods may borrow machines.
    guests: tuple[str, ...] = ()
    # The mounted Secret with tokens and authorities of webhooks.
    webhook: Path = Path(WEBHOOK)


def from_environment(env: Mapping[str, str]) -> FleetSettings:
    for name in env:
        if name.startswith(PREFIX) and name.removeprefix(PREFIX) not in KNOWN:
            hint = nearest(name, [PREFIX + known for known in KNOWN])
            raise ConfigError("read the fleet's settings", "no such setting", field=name, hint=hint)

    def needed(name: str) -> str:
        if not env.get(name):
            raise ConfigError("read the fleet's settings", "it is not set", field=name)
        return env[name]

    def flag(name: str) -> bool:
        value = env.get(f"{PREFIX}{name}") or "no"
        if value not in ("yes", "no"):
            raise ConfigError("read the fleet's settings", f"wanted yes or no, not {value!r}", field=f"{PREFIX}{name}")
        return value == "yes"

    lease = env.get(f"{PREFIX}LEASE") or ""
    return FleetSettings(
        namespace=needed("MINIVM_POD_NAMESPACE"),
        release=needed(f"{PREFIX}RELEASE"),
        slurm=needed(f"{PREFIX}SLURM"),
        key=Path(env.get(f"{PREFIX}KEY") or "/mnt/minivm/secrets/slurm/jwt_hs256.key"),
        policy=Path(env.get(f"{PREFIX}POLICY") or "/mnt/minivm/config/fleet/policy.json"),
        lease=lease,
        me=f"{needed('MINIVM_POD_NAME')}-{secrets.token_hex(4)}" if lease else "",
        http=_address(env, "HTTP"),
        page=_address(env, "PAGE"),
        machines=flag("MACHINES"),
        pools=flag("POOLS"),
        conditions=flag("CONDITIONS"),
        guests=tuple(name for name in (env.get(f"{PREFIX}GUESTS") or "").split(",") if name),
        webhook=Path(env.get(f"{PREFIX}WEBHOOK") or WEBHOOK),
    )


def _address(env: Mapping[str, str], name: str) -> tuple[str, int] | None:
    value = env.get(f"{PREFIX}{name}") or ""
    if not value:
        return None
    host, _, port = value.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError("read the fleet's settings", f"{value!r} is no host:port", field=f"{PREFIX}{name}")
    return host.strip("[]") or "0.0.0.0", int(port)
