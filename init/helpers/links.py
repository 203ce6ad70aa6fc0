"""Links between GPUs and between machines: NVSwitches and their fabric manager, IMEX, RDMA devices.

Read where every container sees it. Only the driver knows, per GPU, if the fabric manager has done its work.
"""

from __future__ import annotations

import os
import re
import select
import subprocess
import time

from init.fields import number
from init.lean import Choice, record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

    from init.pod.pod import Pod

NVIDIA_SMI = "/usr/bin/nvidia-smi"
PATIENCE = 15.0
LARGEST = 4 << 20
NVIDIA, BRIDGE = "0x10de", "0x0680"  # the vendor, and the class of a bridge of no other kind
CHANNELS = "nvidia-caps-imex-channels"
NONE = ("", "n/a", "00000000-0000-0000-0000-000000000000")
FABRIC = re.compile(r"^ {4}Fabric\n((?: {8}.*\n)+)", re.MULTILINE)


class LinkState(Choice):
    FITS = "fits"
    DIFFERS = "differs"
    NOT_HERE = "not here"


@record(frozen=True, slots=True)
class LinkFinding:
    """One result of examining the machine: its subject, whether it fits, and a sentence."""

    what: str
    state: LinkState
    text: str


@record(frozen=True, slots=True)
class Links:
    """The links of this machine and pod."""

    switches: int = 0  # NVSwitches that are devices of the machine
    gpus: tuple[str, ...] = ()  # state of each GPU in its NVLink fabric, if it has one: "Completed", "In Progress"
    domain: str = ""  # the NVLink domain of several machines to which they belong
    can_share: bool = False  # the driver supports IMEX channels
    channels: int = 0  # those of the pod
    adapters: int = 0  # RDMA devices of the machine
    handed: int = 0  # those that the pod may use
    wanted: bool = False  # the site declared that the node has some


def read(pod: Pod, gpus: int) -> Links:
    states, domain = fabric(query_gpus(pod)) if gpus else ((), "")
    return Links(
        switches=sum(is_switch(path) for path in children(pod, "/sys/bus/pci/devices")),
        gpus=states,
        domain=domain,
        can_share=CHANNELS in (pod.text("/proc/devices") or "").split(),
        channels=len(list(pod.path(f"/dev/{CHANNELS}").glob("channel[0-9]*"))),
        adapters=len(children(pod, "/sys/class/infiniband")),
        handed=len(list(pod.path("/dev/infiniband").glob("uverbs[0-9]*"))),
        wanted=(number(pod.setting("MINIVM_EXPECT_IB")) or 0) > 0,
    )


def children(pod: Pod, directory: str) -> list[Path]:
    try:
        return list(pod.path(directory).iterdir())
    except OSError:
        return []


def is_switch(device: Path) -> bool:
    try:
        return (device / "vendor").read_text().strip() == NVIDIA and (device / "class").read_text().startswith(BRIDGE)
    except (OSError, UnicodeDecodeError):
        return False


def query_gpus(pod: Pod, question: str = "-q") -> str:
    """Return nvidia-smi's output, or ""; the health checks handle a driver that hangs."""
    program, data, until = str(pod.path(NVIDIA_SMI)), b"", time.monotonic() + PATIENCE
    try:
        child = subprocess.Popen([program, question], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                 stderr=subprocess.DEVNULL)  # fmt: skip
    except OSError:
        return ""
    with child:
        out = child.stdout.fileno() if child.stdout else -1
        piece = b" "
        while piece and len(data) < LARGEST and select.select([out], [], [], max(until - time.monotonic(), 0))[0]:
            piece = os.read(out, 1 << 16)
            data += piece
        if piece:
            child.kill()
    return data.decode(errors="replace") if child.returncode == 0 else ""


def fabric(text: str) -> tuple[tuple[str, ...], str]:
    """Return each GPU's state in its fabric, and their domain.

    Text from the first process on is ignored: a job's name may look like a line of this.
    """
    states, domain = [], ""
    for section in FABRIC.findall(text.partition("Process ID")[0]):
        lines = {name.strip().lower(): value.strip() for name, _, value in
                 (line.partition(":") for line in section.splitlines())}  # fmt: skip
        if lines.get("state", "").lower() in NONE:
            continue
        states.append(lines["state"])
        uuid = lines.get("clusteruuid", "")
        domain = domain if uuid.lower() in NONE else uuid[:64]
    return tuple(states), domain


def compare(links: Links, driver: str) -> list[LinkFinding]:
    findings = (manager(links, driver), imex(links), rdma(links))
    return [finding for finding in findings if finding is not None]


def manager(links: Links, driver: str) -> LinkFinding | None:
    """Check the fabric manager's result; it runs on the machine, where no pod sees it."""
    what = "manager"
    switches = f"{links.switches} NVSwitch{'es' if links.switches > 1 else ''}"
    done = links.gpus.count("Completed")
    if links.gpus and done == len(links.gpus):
        return LinkFinding(what, LinkState.FITS, f"the fabric manager has registered {done} of {len(links.gpus)} GPUs")
    if links.gpus:
        text = f"the fabric manager has registered {done} of {len(links.gpus)} GPUs: it does not run on the machine"
        return LinkFinding(
            what, LinkState.DIFFERS, f"{text}, or is not of the driver's version ({driver or 'unknown'})"
        )
    if links.switches:
        return LinkFinding(
            what, LinkState.NOT_HERE, f"{switches}; what the fabric manager has done is seen in a pod with a GPU"
        )
    return None


def imex(links: Links) -> LinkFinding | None:
    """Check IMEX for an NVLink domain over several machines: a channel maps the memory of another machine's GPUs."""
    if not links.domain:
        return None
    where = f"the GPUs are of the NVLink domain {links.domain}"
    if links.channels:
        return LinkFinding("imex", LinkState.FITS, f"{where}, and the pod has {links.channels} IMEX channels")
    if links.can_share:
        text = f"{where}, and the pod has no IMEX channel: without one, or Slurm's, jobs over nodes use the network"
        return LinkFinding("imex", LinkState.NOT_HERE, text)
    text = f"{where}, and the driver knows no IMEX channels: upgrade it, or start nvidia-imex on the machine"
    return LinkFinding("imex", LinkState.DIFFERS, text)


def rdma(links: Links) -> LinkFinding | None:
    if not links.adapters and not links.wanted:
        return None
    present = f"{links.adapters} RDMA adapter{'' if links.adapters == 1 else 's'}"
    if links.handed:
        return LinkFinding("rdma", LinkState.FITS, f"{present} on the machine, {links.handed} in the pod")
    text = f"{present} on the machine, and none in the pod: /dev/infiniband/uverbs* is not handed in"
    if links.wanted:
        return LinkFinding("rdma", LinkState.DIFFERS, f"{text}, though MINIVM_EXPECT_IB says that the node has some")
    return LinkFinding("rdma", LinkState.NOT_HERE, text)
