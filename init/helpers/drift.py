"""Compare the machine with what this image was made for: driver, kernel, fabric, links to other machines, runtime.

python3 -I -m init.helpers.drift [--json]

The image's expectations are data in it (docs/reference/image-files.md). Nothing here needs a GPU: from a machine
without a driver nothing is expected. On a difference the exit code is 1 and the last line names it: the reason for
which the pod is degraded, or not ready, as the site configures (MINIVM_DRIFT).
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ground.files import write_whole
from ground.metrics import family
from init.errors import ConfigError, InitError
from init.helpers import links
from init.helpers.links import LinkFinding, Links, LinkState
from init.lean import record
from init.pod.pod import Pod

EXPECTS = "/usr/share/minivm/expects.json"
METRICS = "/run/minivm/metrics.d/drift.prom"
LARGEST = 64 * 1024
POLICIES = ("tell", "refuse", "ignore")
# Paths where runtimes mount the driver's library: beside the image's own, or below a mount of the runtime's.
DRIVERS_OWN = ("usr/lib/*-linux-gnu/libcuda.so.1", "usr/lib64/libcuda.so.1", "usr/local/nvidia/lib64/libcuda.so.1")
VERSION = re.compile(r"[0-9]+(?:\.[0-9]+)+")


@record(frozen=True, slots=True)
class Expected:
    """The image's expectations; an empty text expects nothing."""

    cuda: str = ""
    driver: str = ""
    others: tuple[tuple[str, str], ...] = ()  # CUDA -> its oldest driver, for images that could be used instead
    kernel: str = ""
    ofed: str = ""


@record(frozen=True, slots=True)
class Machine:
    """Facts about the machine; an empty text is absent or unknown."""

    driver: str = ""
    gpus: int = 0
    drivers_own: bool = False  # the driver's library for programs is present
    kernel: str = ""
    ofed: str = ""
    links: Links = Links()


def numbers(version: str) -> tuple[int, ...]:
    """Parse the numbers of 580.65.06 or 6.12.0-amd64 for comparison; the distribution adds the rest."""
    match = re.match(r"[0-9]{1,9}(?:\.[0-9]{1,9})*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def older(version: str, least: str) -> bool:
    return bool(numbers(version)) and numbers(version) < numbers(least)


def compare(image: Expected, machine: Machine) -> list[LinkFinding]:
    findings = [driver(image, machine), runtime(image, machine), kernel(image, machine), fabric(image, machine)]
    # Links between machines matter only to an image that uses them.
    joined = links.compare(machine.links, machine.driver) if image.cuda else []
    return [*(finding for finding in findings if finding is not None), *joined]


def driver(image: Expected, machine: Machine) -> LinkFinding | None:
    if not image.driver:
        return None
    requirement = f"CUDA {image.cuda} needs {image.driver}"
    if not machine.driver:
        return LinkFinding("driver", LinkState.NOT_HERE, f"no NVIDIA driver; {requirement}")
    if not older(machine.driver, image.driver):
        return LinkFinding("driver", LinkState.FITS, f"{machine.driver}; {requirement}")
    fitting = [name for name, least in image.others if not older(machine.driver, least)]
    instead = f"take an image of CUDA {max(fitting, key=numbers)}, or " if fitting else ""
    text = (
        f"driver {machine.driver} is older than CUDA {image.cuda} needs ({image.driver}): {instead}upgrade the driver"
    )
    return LinkFinding("driver", LinkState.DIFFERS, text)


def runtime(image: Expected, machine: Machine) -> LinkFinding | None:
    """Check that NVIDIA's runtime hook ran: with GPUs and without the driver's library no program finds a GPU."""
    if not image.cuda or not machine.gpus:
        return None
    gpus = f"{machine.gpus} GPU{'s' if machine.gpus > 1 else ''}"
    if machine.drivers_own:
        return LinkFinding("runtime", LinkState.FITS, f"{gpus}, and the driver's libcuda.so.1")
    text = f"{gpus} and no libcuda.so.1: the container runtime does not hand in the driver; install NVIDIA's for it"
    return LinkFinding("runtime", LinkState.DIFFERS, text)


def kernel(image: Expected, machine: Machine) -> LinkFinding | None:
    if not image.kernel or not machine.kernel:
        return None
    if older(machine.kernel, image.kernel):
        text = f"kernel {machine.kernel} is older than this image needs ({image.kernel}): upgrade the machine's kernel"
        return LinkFinding("kernel", LinkState.DIFFERS, text)
    return LinkFinding("kernel", LinkState.FITS, f"{machine.kernel}; this image needs {image.kernel}")


def fabric(image: Expected, machine: Machine) -> LinkFinding | None:
    """Check that the image's vendor user space fits the kernel modules, released together; Debian's fits any."""
    if not image.ofed:
        return None
    if not machine.ofed:
        return LinkFinding(
            "fabric", LinkState.NOT_HERE, f"no OFED of its vendor in the kernel; the image has {image.ofed}"
        )
    if numbers(machine.ofed)[:2] == numbers(image.ofed)[:2]:
        return LinkFinding("fabric", LinkState.FITS, f"OFED {machine.ofed} here, {image.ofed} in the image")
    text = f"the host's OFED is {machine.ofed} and the image's user space {image.ofed}: bring both to one release"
    return LinkFinding("fabric", LinkState.DIFFERS, text)


def read_expected(pod: Pod) -> Expected:
    """Read the image's expectations; an older image has none, and nothing is expected of a machine then."""
    try:
        with pod.path(EXPECTS).open("rb") as file:
            data = json.loads(file.read(LARGEST))
        cuda = data.get("cuda") or {}
        others = tuple(sorted((str(name), str(least)) for name, least in (cuda.get("others") or {}).items()))
        texts = [str(value or "") for value in (cuda.get("name"), cuda.get("driver"), data.get("kernel"),
                                                data.get("ofed"))]  # fmt: skip
        return Expected(texts[0], texts[1], others, texts[2], texts[3])
    except FileNotFoundError:
        return Expected()
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError("read what the image expects", f"damaged: {error}", file=EXPECTS) from error


def machine(pod: Pod) -> Machine:
    """Read the machine's facts, visible in every container, with or without GPUs."""
    return Machine(
        driver=version(pod, "/sys/module/nvidia/version") or version(pod, "/proc/driver/nvidia/version"),
        gpus=pod.gpus,
        drivers_own=any(True for pattern in DRIVERS_OWN for _ in pod.root.glob(pattern)),
        kernel=version(pod, "/proc/sys/kernel/osrelease"),
        ofed=version(pod, "/sys/module/mlx5_core/version"),
        links=links.read(pod, pod.gpus),
    )


def version(pod: Pod, path: str) -> str:
    """Return the first version in a file's first line.

    For example `NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  ...`.
    """
    match = VERSION.search((pod.text(path) or "").partition("\n")[0][:1024])
    return match[0] if match else ""


def metrics(findings: Sequence[LinkFinding]) -> str:
    about = "1 if the machine differs from what the image was made for."
    rows = [({"check": item.what}, str(int(item.state is LinkState.DIFFERS))) for item in findings]
    return "\n".join(family("minivm_drift_differs", about, rows)) + "\n"


def policy(env: Mapping[str, str]) -> str:
    return Pod(env).choice("MINIVM_DRIFT", POLICIES[0], POLICIES)


def main(arguments: Sequence[str], pod: Pod | None = None) -> int:
    pod = pod or Pod(os.environ)
    try:
        policy(pod.env)
        findings = compare(read_expected(pod), machine(pod))
    except InitError as error:
        print(error)
        return 78
    differing = [item for item in findings if item.state is LinkState.DIFFERS]
    if "--json" in arguments:
        print(json.dumps([{"what": f.what, "state": f.state.value, "text": f.text} for f in findings], indent=2))
        return 1 if differing else 0
    for item in findings:
        if item.state is not LinkState.DIFFERS:
            print(f"{item.what:7}  {item.state.value:8}  {item.text}")
    if "--tell" in arguments:
        tell(pod.path(METRICS), findings)
    if differing:
        print("; ".join(item.text for item in differing))
        return 1
    print("the machine is what this image was made for" if findings else "this image expects nothing of its machine")
    return 0


def tell(path: Path, findings: Sequence[LinkFinding]) -> None:
    """Write the metrics; a failure does not change the result."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, metrics(findings))
    except OSError as error:
        print(f"cannot write {path}: {error.strerror}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
