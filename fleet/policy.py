"""Configuration of the fleet: the site's policy, from a file, and the settings, from variables `MINIVM_FLEET_*`.

The policy says which signs of a machine count, what the limits are and which remedies there are. The reconciler reads
it in each pass (`read_policy`): `parse_policy` reads the mapping, and `read_X` each nested one, by the strict
`init.fields.Reader`. The settings name the namespace, slurmrestd, the mounted files, and what is switched on;
`read_settings` reads them once.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from fleet import FleetError
from init.errors import ConfigError, nearest
from init.fields import Reader

# The policy.

# The most tiers; real fabrics have three or four.
MOST_TIERS = 6
# Slurm counts blocks and their groups in sixteen bits.
MOST_DOMAINS = 10000
PROOFS = ("deep", "verdict")
REMEDIES = ("reboot", "replace", "down")
MACHINES_KEYS = ("mode", "atOnce", "share", "window", "attempts", "flaps", "verify", "proof", "remedies")
POLICY_KEYS = (
    "taints", "going", "conditions", "cordonReasons", "notReady", "share", "changes", "rate", "away", "leaveWithin",
    "gone", "lost", "cordon", "slinky", "nodeCondition", "jobNames", "fencing", "provider", "dead", "machines",
    "topology", "lend",
)  # fmt: skip
# Taints that autoscalers and clouds set on a machine that is about to go.
GOING_TAINTS = (
    "ToBeDeletedByClusterAutoscaler",
    "karpenter.sh/disrupted",
    "aws-node-termination-handler/spot-itn",
    "cloud.google.com/impending-node-termination",
)
CORDON_REASONS = ("minivm.io/cordon-reason", "nodeset.slinky.slurm.net/node-cordon-reason")
# Fencing and remedies: the fleet does nothing, reports what it would do, or does it.
MODES = ("off", "propose", "act")
# The type of the conditions that show Slurm's state.
STATE_CONDITION = "minivm.io/SlurmState"

# The settings.

VARIABLES = "MINIVM_FLEET_"
WEBHOOK_FILES = "/mnt/minivm/secrets/webhook"
# fmt: off
KNOWN_VARIABLES = (
    "RELEASE", "SLURM", "KEY", "POLICY", "LEASE", "HTTP", "PAGE", "MACHINES", "POOLS", "CONDITIONS", "GUESTS",
    "WEBHOOK",
)
# fmt: on

# Webhooks.

PORTS = {"https": 443, "http": 80}
# A key of the mounted Secret: the author of the policy must not make the fleet send another file, such as Slurm's key.
_FILE = re.compile(r"(?!\.\.)[A-Za-z0-9._-]{1,253}")
_URL = re.compile(r"[!-~]{1,2048}")  # printable, without blanks


@dataclass(frozen=True, slots=True)
class Webhook:
    url: str
    # Keys of the mounted Secret; "": no token, and the system's authorities.
    token: str = ""
    ca: str = ""

    @property
    def parts(self) -> SplitResult:
        return urlsplit(self.url)

    @property
    def host(self) -> str:
        return self.parts.hostname or ""

    @property
    def port(self) -> int:
        return self.parts.port or PORTS[self.parts.scheme]

    @property
    def where(self) -> str:
        """The address for people; path and query may hold secrets."""
        return f"{self.host}:{self.port}"


def read_webhook(reader: Reader) -> Webhook:
    reader.only("url", "tokenFile", "caFile", "insecure")
    url, insecure = reader.text("url"), reader.flag("insecure", False)
    try:
        parts = urlsplit(url) if _URL.fullmatch(url) else SplitResult("", "", "", "", "")
        port = parts.port  # raises for an invalid port
    except ValueError:
        parts, port = SplitResult("", "", "", "", ""), None
    if parts.scheme not in PORTS or not parts.hostname or port == 0:
        reader.fail("url", "wanted https://HOST[:PORT]/PATH of printable ASCII, 2,048 letters at most")
    if parts.username is not None or parts.fragment or "\\" in url:
        reader.fail("url", "it has a user name, a password, a fragment or a backslash", "put a token into tokenFile")
    if parts.scheme == "http" and not insecure and not is_loopback(parts.hostname):
        reader.fail("url", "http sends everything in the clear, also the token", "use https, or set insecure: true")
    return Webhook(url, _read_file_key(reader, "tokenFile"), _read_file_key(reader, "caFile"))


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read_file_key(reader: Reader, key: str) -> str:
    name = reader.text(key)
    if name and not _FILE.fullmatch(name):
        reader.fail(key, f"{name[:80]!r} is no key of the Secret with the webhook's files", "write a key, not a path")
    return name


@dataclass(frozen=True, slots=True)
class Treatment:
    """Remedy that reaches a goal: by annotations of the Node, a Job, or a webhook."""

    annotate: Mapping[str, str] = field(default_factory=dict)
    job: Mapping[str, object] | None = None  # the Job's spec
    on_node: bool = False  # run the Job's pod on that machine
    webhook: Webhook | None = None


@dataclass(frozen=True, slots=True)
class Machines:
    # `act`: perform remedies; `propose`: only report them; `off`: verdicts lead to no goal.
    mode: str = "propose"
    # The most machines in treatment: this number or this share, whichever is more.
    at_once: int = 1
    share: float = 0.0
    # How long an entry in its history counts against a machine.
    window_s: float = 7 * 86400.0
    # After this many reboots, another verdict leads to a replacement.
    attempts: int = 2
    # A machine with this many verdicts in the window takes no jobs; 0: no limit.
    flaps: int = 4
    # How long a machine has to be well after a reboot.
    verify_s: float = 1800.0
    # What proves it well: `deep`: a passed deep check since the boot; `verdict`: no verdict against it.
    proof: str = "deep"
    remedies: Mapping[str, Treatment] = field(default_factory=dict)

    def most_in_treatment(self, machines: int) -> int:
        """Return how many of the site's machines may be in treatment at a time."""
        return max(self.at_once, int(machines * self.share))


@dataclass(frozen=True, slots=True)
class Lend:
    """Which pods may borrow machines: those of these PriorityClasses, in these namespaces."""

    namespaces: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    # By the label of its pods: the share of its machines that a pool lends at most. Other pools lend none.
    pools: Mapping[str, float] = field(default_factory=dict)
    # How long jobs keep a machine that is wanted.
    notice_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of nodes, such as NVLink domains: the values of a label for which Slurm's file has a block."""

    label: str = ""  # "": no blocks
    domains: frozenset[str] = frozenset()
    # The number of nodes of a block, then of groups of blocks.
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Topology:
    # The labels that name the switches above a Node, from the root.
    tiers: tuple[str, ...] = ()
    blocks: Blocks = Blocks()

    @property
    def is_set(self) -> bool:
        """Return whether the fleet sets places in Slurm at all."""
        return bool(self.tiers or self.blocks.label)


@dataclass(frozen=True, slots=True)
class Policy:
    # Keys of taints: for maintenance, and for a machine that is about to go.
    taints: tuple[str, ...] = ("minivm.io/maintenance",)
    going: tuple[str, ...] = GOING_TAINTS
    # Types of Node conditions that drain while they are "True".
    conditions: tuple[str, ...] = ()
    # Annotations that may say why a Node is cordoned; the first one that is set counts.
    cordon_reasons: tuple[str, ...] = CORDON_REASONS
    # Seconds after which a Node that is not ready is drained.
    not_ready_s: float = 60.0
    # Signs of machines (conditions, not ready) may drain this share of the workers, and at least one.
    share: float = 0.2
    # The most careful changes in one pass, and the most requested drains in one second.
    changes: int = 30
    # The most changes in one second that end no job: conditions and undrains.
    rate: int = 100
    # The most pods of a pool that may be away, for any reason.
    away: int = 1
    # How long jobs of a leaving pod have until they are requeued; 0: until they end.
    leave_within_s: float = 0.0
    # Seconds after which a node without a pod is drained.
    gone_s: float = 30.0
    # Seconds after which a ready pod that Slurm does not know is replaced.
    lost_s: float = 60.0
    # Whether to cordon a Node whose worker a person or a verdict has drained in Slurm.
    cordon: bool = False
    # Show the conditions and obey the annotations of Slinky's operator.
    slinky: bool = False
    # The type of the condition on Nodes; "": none. Clusters that share Nodes need different types.
    node_condition: str = STATE_CONDITION
    # Whether the page shows names, owners and comments of jobs, which Slurm's PrivateData may hide from its readers.
    job_names: bool = False
    # `act`: give up dead machines; `propose`: only report them; `off`: ignore them.
    fencing: str = "propose"
    # Keys of taints by which the provider reports a machine off; if set, one of them is required as proof.
    provider: tuple[str, ...] = ()
    # How long a Node must not be ready before its machine counts as dead.
    dead_s: float = 300.0
    machines: Machines = Machines()
    topology: Topology = Topology()
    lend: Lend = Lend()

    def most_unwell(self, total: int) -> int:
        """Return how many of `total` workers or machines may be unwell. More of them probably have another cause."""
        return max(1, int(total * self.share))


def read_policy(path: Path) -> Policy:
    """Read the policy, in each pass since a ConfigMap changes; without a file return the defaults."""
    try:
        return parse_policy_text(path.read_text(), str(path))
    except FileNotFoundError:
        return Policy()
    except (OSError, UnicodeDecodeError) as error:
        raise FleetError("read the fleet's policy", str(error), file=str(path)) from error


def parse_policy_text(content: str, file: str = "") -> Policy:
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError("read the fleet's policy", f"it is not JSON: {error}", file=file) from None
    if not isinstance(data, dict):
        raise ConfigError("read the fleet's policy", "wanted a mapping", file=file)
    return parse_policy(data, file)


def parse_policy(data: Mapping[str, object], file: str = "") -> Policy:
    reader, default = Reader(data, "the fleet's policy", file), Policy()
    reader.only(*POLICY_KEYS)
    fencing = reader.text("fencing", default.fencing)
    if fencing not in MODES:
        reader.fail("fencing", f"{fencing!r} is not one of {', '.join(MODES)}")

    def names(key: str, fallback: tuple[str, ...]) -> tuple[str, ...]:
        return reader.texts(key) if key in data else fallback

    return Policy(
        taints=names("taints", default.taints),
        going=names("going", default.going),
        conditions=names("conditions", default.conditions),
        cordon_reasons=names("cordonReasons", default.cordon_reasons),
        not_ready_s=reader.seconds("notReady", default.not_ready_s),
        share=reader.real("share", default.share, most=1.0),
        changes=reader.number("changes", default.changes, least=1),
        rate=reader.number("rate", default.rate, least=1),
        away=reader.number("away", default.away),
        leave_within_s=reader.seconds("leaveWithin", default.leave_within_s),
        gone_s=reader.seconds("gone", default.gone_s),
        lost_s=reader.seconds("lost", default.lost_s),
        cordon=reader.flag("cordon", default.cordon),
        slinky=reader.flag("slinky", default.slinky),
        node_condition=reader.text("nodeCondition", default.node_condition),
        job_names=reader.flag("jobNames", default.job_names),
        fencing=fencing,
        provider=names("provider", default.provider),
        dead_s=reader.seconds("dead", default.dead_s),
        machines=read_machines(reader.sub("machines")),
        topology=read_topology(reader.sub("topology")),
        lend=read_lend(reader.sub("lend")),
    )


def read_machines(reader: Reader) -> Machines:
    default = Machines()
    reader.only(*MACHINES_KEYS)
    mode = reader.text("mode", default.mode)
    if mode not in MODES:
        reader.fail("mode", f"{mode!r} is not one of {', '.join(MODES)}")
    proof = reader.text("proof", default.proof)
    if proof not in PROOFS:
        reader.fail("proof", f"{proof!r} is not one of {', '.join(PROOFS)}")
    named = reader.sub("remedies")
    named.only(*REMEDIES)
    return Machines(
        mode=mode,
        at_once=reader.number("atOnce", default.at_once),
        share=reader.real("share", default.share, most=1.0),
        window_s=reader.seconds("window", default.window_s),
        attempts=reader.number("attempts", default.attempts, least=1),
        flaps=reader.number("flaps", default.flaps),
        verify_s=reader.seconds("verify", default.verify_s),
        proof=proof,
        remedies={goal: read_treatment(named.sub(goal)) for goal in REMEDIES if named.has(goal)},
    )


def read_treatment(reader: Reader) -> Treatment:
    reader.only("annotate", "job", "onNode", "webhook")
    if sum(reader.has(key) for key in ("annotate", "job", "webhook")) != 1:
        reader.fail("", "wanted one of annotate, job and webhook")
    if reader.has("webhook"):
        if reader.has("onNode"):
            reader.fail("onNode", "a webhook does not run on a machine")
        return Treatment(webhook=read_webhook(reader.sub("webhook")))
    names = reader.sub("annotate")
    job = reader.sub("job").data if reader.has("job") else None
    annotate = {key: names.text(key) for key in names.data}
    for key in annotate:
        if key.startswith("minivm.io/"):
            names.fail(key, "names with this prefix belong to the fleet")
    return Treatment(annotate, job, reader.flag("onNode", False))


def read_lend(reader: Reader) -> Lend:
    reader.only("namespaces", "classes", "pools", "notice")
    shares = reader.sub("pools")
    return Lend(
        reader.texts("namespaces"),
        reader.texts("classes"),
        {name: shares.real(name, 0.0, most=1.0) for name in shares.data},
        reader.seconds("notice", Lend().notice_s),
    )


def read_topology(reader: Reader) -> Topology:
    reader.only("tiers", "blocks")
    tiers = reader.texts("tiers")
    if len(tiers) > MOST_TIERS or len(set(tiers)) < len(tiers):
        reader.fail("tiers", f"wanted at most {MOST_TIERS} labels, each once")
    return Topology(tiers, read_blocks(reader.sub("blocks")))


def read_blocks(reader: Reader) -> Blocks:
    """Read the blocks. slurmctld ends on a file with other sizes."""
    reader.only("label", "domains", "sizes")
    domains = reader.texts("domains")
    parsed = Blocks(reader.text("label"), frozenset(domains), reader.numbers("sizes", least=1))
    if len(domains) > MOST_DOMAINS or len({"", "unknown", *domains}) < len(domains) + 2:
        reader.fail("domains", f"wanted at most {MOST_DOMAINS} values of the label, each once, and not 'unknown'")
    if parsed.label and not parsed.sizes:
        reader.fail("sizes", "wanted how many nodes a block has", "as [18], and how many some of them have together")
    if any(size not in {parsed.sizes[0] << power for power in range(16)} for size in parsed.sizes):
        reader.fail("sizes", "wanted the first one's double, its fourfold and so on", f"as {parsed.sizes[0] * 2}")
    return parsed


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
    webhook: Path = Path(WEBHOOK_FILES)


def read_settings(env: Mapping[str, str]) -> FleetSettings:
    for name in env:
        if name.startswith(VARIABLES) and name.removeprefix(VARIABLES) not in KNOWN_VARIABLES:
            hint = nearest(name, [VARIABLES + known for known in KNOWN_VARIABLES])
            raise ConfigError("read the fleet's settings", "no such setting", field=name, hint=hint)

    def needed(name: str) -> str:
        if not env.get(name):
            raise ConfigError("read the fleet's settings", "it is not set", field=name)
        return env[name]

    def flag(name: str) -> bool:
        value = env.get(f"{VARIABLES}{name}") or "no"
        if value not in ("yes", "no"):
            raise ConfigError(
                "read the fleet's settings", f"wanted yes or no, not {value!r}", field=f"{VARIABLES}{name}"
            )
        return value == "yes"

    lease = env.get(f"{VARIABLES}LEASE") or ""
    return FleetSettings(
        namespace=needed("MINIVM_POD_NAMESPACE"),
        release=needed(f"{VARIABLES}RELEASE"),
        slurm=needed(f"{VARIABLES}SLURM"),
        key=Path(env.get(f"{VARIABLES}KEY") or "/mnt/minivm/secrets/slurm/jwt_hs256.key"),
        policy=Path(env.get(f"{VARIABLES}POLICY") or "/mnt/minivm/config/fleet/policy.json"),
        lease=lease,
        me=f"{needed('MINIVM_POD_NAME')}-{secrets.token_hex(4)}" if lease else "",
        http=_read_address(env, "HTTP"),
        page=_read_address(env, "PAGE"),
        machines=flag("MACHINES"),
        pools=flag("POOLS"),
        conditions=flag("CONDITIONS"),
        guests=tuple(name for name in (env.get(f"{VARIABLES}GUESTS") or "").split(",") if name),
        webhook=Path(env.get(f"{VARIABLES}WEBHOOK") or WEBHOOK_FILES),
    )


def _read_address(env: Mapping[str, str], name: str) -> tuple[str, int] | None:
    value = env.get(f"{VARIABLES}{name}") or ""
    if not value:
        return None
    host, _, port = value.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError("read the fleet's settings", f"{value!r} is no host:port", field=f"{VARIABLES}{name}")
    return host.strip("[]") or "0.0.0.0", int(port)
