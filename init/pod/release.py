"""The image's Slurm release, and whether it may take over the state of another one. Pure but for one file.

slurmctld refuses a newer state only after it has read half of it, and slurmdbd does not refuse at all: it drops what it
does not know from its tables.
"""

from __future__ import annotations

from collections.abc import Mapping

from init.lean import record

FILE = "/usr/share/minivm/slurm.json"
# State files of slurmctld that hold the number of the Slurm that wrote them: after WORD (HEADED), or first (BARE).
HEADED = ("job_state", "node_state", "part_state", "resv_state")
BARE = ("last_config_lite",)
HEADER = 64  # bytes that contain it
WORD = b"PROTOCOL_VERSION\0"


@record(frozen=True, slots=True)
class Release:
    """A release of images/slurm.yaml, as the build wrote it into the image."""

    name: str
    protocol: int
    reads: int  # the oldest release whose state it reads, by number
    names: tuple[tuple[int, str], ...]  # of every known release, by number
    needs_state: tuple[str, ...] = ()  # files without which its slurmctld starts only once
    fast_scripts: bool = False  # whether slurm.fastScripts was tested with it

    def name_of(self, number: int) -> str:
        """Return the name of the release with this number."""
        names = dict(self.names)
        if number in names:
            return names[number]
        return f"newer than {max(names.values())}" if number > max(names) else f"older than {min(names.values())}"


def parse_release(text: str) -> Release | None:
    """Parse the file; None if nothing is known of the image's Slurm, which then decides itself."""
    from init.lean import read_json

    data = read_json(text)
    if not isinstance(data, dict) or "protocol" not in data:
        return None
    names = tuple(sorted((int(number), name) for number, name in data["names"].items()))
    needs = tuple(data.get("needs-state", ()))  # an older image has none
    fast = data.get("fast-scripts") is True
    return Release(data["release"], data["protocol"], data["reads"], names, needs, fast)


def find_writer(headers: Mapping[str, bytes]) -> int | None:
    """Return the number of the newest Slurm that wrote one of these files; None if none shows it."""
    numbers = [number for name, data in headers.items() if (number := _number(name, data)) is not None]
    return max(numbers, default=None)


def _number(name: str, data: bytes) -> int | None:
    at = 0
    if name in HEADED:
        at = 4 + len(WORD)
        if data[4:at] != WORD or int.from_bytes(data[:4], "big") != len(WORD):
            return None
    # Two bytes: the release's number, and one that has always been 0.
    return data[at] if len(data) >= at + 2 and data[at + 1] == 0 and data[at] else None


def refusal(release: Release, left: int | None, what: str) -> tuple[str, str]:
    """Return why this Slurm does not take over the state of release `left`, and what to do; "" if it does."""
    if left is None or release.reads <= left <= release.protocol:
        return "", ""
    if left > release.protocol:
        return (
            f"{what} is of Slurm {release.name_of(left)}, this image has {release.name}, and there is no way back",
            "run an image of that release again, or put back what was saved before the upgrade; nothing was touched",
        )
    between = [name for number, name in release.names if release.reads <= number < release.protocol]
    return (
        f"{what} is of Slurm {release.name_of(left)}, and {release.name} takes over none that is so old",
        f"run one of {', '.join(between)} in between first; nothing was touched",
    )
