"""What a site decides: which signs on a Node count, and how much may happen at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from fleet.errors import FleetError
from init.errors import ConfigError
from init.fields import Reader

PORTS = {"https": 443, "http": 80}
# Of a key of a Secret, as it is mounted: whoever writes the policy must not have another file sent, Slurm's key first.
_FILE = re.compile(r"(?!\.\.)[A-Za-z0-9._-]{1,253}")
_URL = re.compile(r"[!-~]{1,2048}")  # printable, no blank: as it goes over the wire


@dataclass(frozen=True, slots=True)
class Webhook:
    url: str
    # Of the mounted Secret: a token, and the authority that signs the receiver's certificate; "": none, the system's.
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
        """For people: a path and a query may hold what is secret."""
        return f"{self.host}:{self.port}"


def webhook(reader: Reader) -> Webhook:
    reader.only("url", "tokenFile", "caFile", "insecure")
    url, insecure = reader.text("url"), reader.flag("insecure", False)
    try:
        parts = urlsplit(url) if _URL.fullmatch(url) else SplitResult("", "", "", "", "")
        port = parts.port  # read for what it refuses
    except ValueError:
        parts, port = SplitResult("", "", "", "", ""), None
    if parts.scheme not in PORTS or not parts.hostname or port == 0:
        reader.fail("url", "wanted https://HOST[:PORT]/PATH of printable ASCII, 2,048 letters at most")
    if parts.username is not None or parts.fragment or "\\" in url:
        reader.fail("url", "a name, a password, a fragment or a backslash stands in it", "a token goes into tokenFile")
    if parts.scheme == "http" and not insecure and not loopback(parts.hostname):
        reader.fail("url", "http tells everybody on the way, also the token", "https, or insecure: true")
    return Webhook(url, _file(reader, "tokenFile"), _file(reader, "caFile"))


def loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _file(reader: Reader, key: str) -> str:
    name = reader.text(key)
    if name and not _FILE.fullmatch(name):
        reader.fail(key, f"{name[:80]!r} is no key of the Secret with the webhook's files", "a name, and no path")
    return name


# Whatever the cluster's autoscaler, its cloud or its operators set where a machine is about to go.
GOING = (
    "ToBeDeletedByClusterAutoscaler",
    "karpenter.sh/disrupted",
    "aws-node-termination-handler/spot-itn",
    "cloud.google.com/impending-node-termination",
)
REASONS = ("minivm.io/cordon-reason", "nodeset.slinky.slurm.net/node-cordon-reason")


FENCING = ("off", "propose", "act")
# The type of the conditions in which Slurm's word is shown.
STATE = "minivm.io/SlurmState"


@dataclass(frozen=True, slots=True)
class Treatment:
    """What is done to a machine for a goal: annotations of its Node, a Job, or a call of a webhook."""

    annotate: Mapping[str, str] = field(default_factory=dict)
    job: Mapping[str, object] | None = None  # the Job's spec
    on_node: bool = False  # the Job's pod runs on that machine
    webhook: Webhook | None = None


@dataclass(frozen=True, slots=True)
class Machines:
    # `act`: what is named is done; `propose`: it is said; `off`: what checks find leads to no goal.
    mode: str = "propose"
    # So many at a time, or this share of them, whichever is more.
    at_once: int = 1
    share: float = 0.0
    # What happened to one counts against it for so long.
    window_s: float = 7 * 86400.0
    # A machine that was rebooted so often, and has such a verdict again, is to be replaced.
    attempts: int = 2
    # One with so many verdicts that come and go is kept from jobs; 0: it is not.
    flaps: int = 4
    # A machine that is told to reboot has so long to be well again.
    verify_s: float = 1800.0
    # What shows that it is: `deep`, the deep checks of its worker have passed since; `verdict`: no verdict stands.
    proof: str = "deep"
    remedies: Mapping[str, Treatment] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Lend:
    """To whom pools lend machines: pods of these PriorityClasses, in these namespaces."""

    namespaces: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    # This share of a pool's machines at most, by the label of its pods; of others none.
    pools: Mapping[str, float] = field(default_factory=dict)
    # For so long jobs keep a machine.
    notice_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Blocks:
    """Domains that a label of Nodes names, as of NVLink: those that Slurm's file has a block for."""

    label: str = ""  # none: Slurm is told of no blocks
    domains: frozenset[str] = frozenset()
    # Of nodes: of a block, then of blocks together.
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Topology:
    # Labels of Nodes that name the switches above them, from the root on.
    tiers: tuple[str, ...] = ()
    blocks: Blocks = Blocks()

    @property
    def told(self) -> bool:
        """Whether Slurm is told of places at all."""
        return bool(self.tiers or self.blocks.label)


@dataclass(frozen=True, slots=True)
class Policy:
    # Keys of taints for maintenance, and of those of a machine that is about to go.
    taints: tuple[str, ...] = ("minivm.io/maintenance",)
    going: tuple[str, ...] = GOING
    # Types of Node conditions that count while they are "True".
    conditions: tuple[str, ...] = ()
    # Annotations of a Node that may say why it is cordoned; the first that is there.
    reasons: tuple[str, ...] = REASONS
    # A Node that has not been ready for so long takes no new jobs.
    not_ready_s: float = 60.0
    # What machines say by themselves (conditions, not ready) may hold this share of the workers, and at least one.
    share: float = 0.2
    # So many changes in Slurm a pass, and so many drains a second that people ask for; the others wait for the next.
    changes: int = 30
    # What is shown and what is lifted ends nobody's job: so many a second.
    rate: int = 100
    # So many pods of a pool may be away at a time, those that went by themselves among them.
    away: int = 1
    # The jobs of a pod that is to go have so long until they are requeued; 0: as long as they take.
    leave_within_s: float = 0.0
    # A node of Slurm whose pod is gone for so long gets no new jobs.
    gone_s: float = 30.0
    # A pod that is ready and that Slurm does not know for so long is replaced.
    lost_s: float = 60.0
    # A Node whose pod is drained in Slurm by a person or a verdict is cordoned too.
    cordon: bool = False
    # The type of the Nodes' condition; "": none. Two clusters that share Nodes need two.
    shows: str = STATE
    # `act`: a dead machine is given up; `propose`: what it would need is said; `off`: not even that.
    fencing: str = "propose"
    # Keys of taints by which the provider says that a machine is off; if there are any, no other proof is enough.
    provider: tuple[str, ...] = ()
    # How old the proof must be: a Node not ready for so long.
    dead_s: float = 300.0
    machines: Machines = Machines()
    topology: Topology = Topology()
    lend: Lend = Lend()


def read_policy(path: Path) -> Policy:
    """Without a file: the defaults. It is read at each look: a ConfigMap changes under us."""
    try:
        return policy_from_json(path.read_text(), str(path))
    except FileNotFoundError:
        return Policy()
    except (OSError, UnicodeDecodeError) as error:
        raise FleetError("read the fleet's policy", str(error), file=str(path)) from error


def policy_from_json(content: str, file: str = "") -> Policy:
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError("read the fleet's policy", f"it is not JSON: {error}", file=file) from None
    if not isinstance(data, dict):
        raise ConfigError("read the fleet's policy", "wanted a mapping", file=file)
    return policy(data, file)


def policy(data: Mapping[str, object], file: str = "") -> Policy:
    reader, usual = Reader(data, "the fleet's policy", file), Policy()
    reader.only(*KEYS)
    fencing = reader.text("fencing", usual.fencing)
    if fencing not in FENCING:
        reader.fail("fencing", f"{fencing!r} is not one of {', '.join(FENCING)}")

    def names(key: str, default: tuple[str, ...]) -> tuple[str, ...]:
        return reader.texts(key) if key in data else default

    return Policy(
        taints=names("taints", usual.taints),
        going=names("going", usual.going),
        conditions=names("conditions", usual.conditions),
        reasons=names("cordonReasons", usual.reasons),
        not_ready_s=reader.seconds("notReady", usual.not_ready_s),
        share=reader.real("share", usual.share, most=1.0),
        changes=reader.number("changes", usual.changes, least=1),
        rate=reader.number("rate", usual.rate, least=1),
        away=reader.number("away", usual.away),
        leave_within_s=reader.seconds("leaveWithin", usual.leave_within_s),
        gone_s=reader.seconds("gone", usual.gone_s),
        lost_s=reader.seconds("lost", usual.lost_s),
        cordon=reader.flag("cordon", usual.cordon),
        shows=reader.text("nodeCondition", usual.shows),
        fencing=fencing,
        provider=names("provider", usual.provider),
        dead_s=reader.seconds("dead", usual.dead_s),
        machines=machines(reader.sub("machines")),
        topology=topology(reader.sub("topology")),
        lend=lend(reader.sub("lend")),
    )


def machines(reader: Reader) -> Machines:
    usual = Machines()
    reader.only(*OF_MACHINES)
    mode = reader.text("mode", usual.mode)
    if mode not in FENCING:
        reader.fail("mode", f"{mode!r} is not one of {', '.join(FENCING)}")
    proof = reader.text("proof", usual.proof)
    if proof not in PROOFS:
        reader.fail("proof", f"{proof!r} is not one of {', '.join(PROOFS)}")
    named = reader.sub("remedies")
    named.only(*REMEDIES)
    return Machines(
        mode=mode,
        at_once=reader.number("atOnce", usual.at_once),
        share=reader.real("share", usual.share, most=1.0),
        window_s=reader.seconds("window", usual.window_s),
        attempts=reader.number("attempts", usual.attempts, least=1),
        flaps=reader.number("flaps", usual.flaps),
        verify_s=reader.seconds("verify", usual.verify_s),
        proof=proof,
        remedies={goal: treatment(named.sub(goal)) for goal in REMEDIES if named.has(goal)},
    )


def treatment(reader: Reader) -> Treatment:
    reader.only("annotate", "job", "onNode", "webhook")
    if sum(reader.has(key) for key in ("annotate", "job", "webhook")) != 1:
        reader.fail("", "wanted one of annotate, job and webhook")
    if reader.has("webhook"):
        if reader.has("onNode"):
            reader.fail("onNode", "a webhook runs on no machine of ours")
        return Treatment(webhook=webhook(reader.sub("webhook")))
    names = reader.sub("annotate")
    job = reader.sub("job").data if reader.has("job") else None
    annotate = {key: names.text(key) for key in names.data}
    for key in annotate:
        if key.startswith("minivm.io/"):
            names.fail(key, "names of this kind are the fleet's own")
    return Treatment(annotate, job, reader.flag("onNode", False))


def lend(reader: Reader) -> Lend:
    reader.only("namespaces", "classes", "pools", "notice")
    shares = reader.sub("pools")
    return Lend(
        reader.texts("namespaces"),
        reader.texts("classes"),
        {name: shares.real(name, 0.0, most=1.0) for name in shares.data},
        reader.seconds("notice", Lend().notice_s),
    )


def topology(reader: Reader) -> Topology:
    reader.only("tiers", "blocks")
    tiers = reader.texts("tiers")
    if len(tiers) > TIERS or len(set(tiers)) < len(tiers):
        reader.fail("tiers", f"wanted at most {TIERS} labels, each once")
    return Topology(tiers, blocks(reader.sub("blocks")))


def blocks(reader: Reader) -> Blocks:
    """slurmctld ends on a file with other sizes."""
    reader.only("label", "domains", "sizes")
    domains = reader.texts("domains")
    found = Blocks(reader.text("label"), frozenset(domains), reader.numbers("sizes", least=1))
    if len(domains) > DOMAINS or len({"", "unknown", *domains}) < len(domains) + 2:
        reader.fail("domains", f"wanted at most {DOMAINS} values of the label, each once, and not 'unknown'")
    if found.label and not found.sizes:
        reader.fail("sizes", "wanted how many nodes a block has", "as [18], and how many some of them have together")
    if any(size not in {found.sizes[0] << power for power in range(16)} for size in found.sizes):
        reader.fail("sizes", "wanted the first one's double, its fourfold and so on", f"as {found.sizes[0] * 2}")
    return found


# Of switches; real fabrics have three or four.
TIERS = 6
# Slurm counts blocks, alone and together, in sixteen bits.
DOMAINS = 10000
PROOFS = ("deep", "verdict")
REMEDIES = ("reboot", "replace", "down")
OF_MACHINES = ("mode", "atOnce", "share", "window", "attempts", "flaps", "verify", "proof", "remedies")
KEYS = (
    "taints", "going", "conditions", "cordonReasons", "notReady", "share", "changes", "rate", "away", "leaveWithin",
    "gone", "lost", "cordon", "nodeCondition", "fencing", "provider", "dead", "machines", "topology", "lend",
)  # fmt: skip
