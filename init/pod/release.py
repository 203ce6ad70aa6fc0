"""Which Slurm this image has, and whether it may take over what another one left. Pure but for one file of the image.

slurmctld refuses a state that is newer than itself only when it is half way in, and slurmdbd does not refuse at all: it
drops what it does not know of its tables.
"""

from __future__ import annotations

from collections.abc import Mapping

from init.records import record

FILE = "/usr/share/minivm/slurm.json"
# The files of slurmctld's state that begin with the number of the Slurm that wrote them: behind this word, or at once.
HEADED = ("job_state", "node_state", "part_state", "resv_state")
BARE = ("last_config_lite",)
HEADER = 64  # bytes that hold it
WORD = b"PROTOCOL_VERSION\0"


@record(frozen=True, slots=True)
class Release:
    """Of images/slurm.yaml, as the build wrote it into the image."""

    name: str
    protocol: int
    reads: int
    names: tuple[tuple[int, str], ...]  # of every release that is known, by its number
    needs_state: tuple[str, ...] = ()  # files without which its slurmctld starts only once
    fast_scripts: bool = False  # whether slurm.fastScripts was tested with it

    def called(self, number: int) -> str:
        """The release of that number."""
        known = dict(self.names)
        if number in known:
            return known[number]
        return f"newer than {max(known.values())}" if number > max(known) else f"older than {min(known.values())}"


def of_json(text: str) -> Release | None:
    """None where the image's Slurm is one that nothing is known of: it judges for itself."""
    from init.lean import read_json

    found = read_json(text)
    if not isinstance(found, dict) or "protocol" not in found:
        return None
    names = tuple(sorted((int(number), name) for number, name in found["names"].items()))
    needs = tuple(found.get("needs-state", ()))  # an image of before has none
    fast = found.get("fast-scripts") is True
    return Release(found["release"], found["protocol"], found["reads"], names, needs, fast)


def written_by(headers: Mapping[str, bytes]) -> int | None:
    """The newest Slurm that wrote one of these files, by its number; None where none says so."""
    found = [number for name, data in headers.items() if (number := _number(name, data)) is not None]
    return max(found, default=None)


def _number(name: str, data: bytes) -> int | None:
    at = 0
    if name in HEADED:
        at = 4 + len(WORD)
        if data[4:at] != WORD or int.from_bytes(data[:4], "big") != len(WORD):
            return None
    # Two bytes: the release's number, and one that has always been 0.
    return data[at] if len(data) >= at + 2 and data[at + 1] == 0 and data[at] else None


def refusal(release: Release, left: int | None, what: str) -> tuple[str, str]:
    """Why this Slurm does not take over what the one of that number left, and what to do; empty where it does."""
    if left is None or release.reads <= left <= release.protocol:
        return "", ""
    if left > release.protocol:
        return (
            f"{what} is of Slurm {release.called(left)}, this image has {release.name}, and there is no way back",
            "run an image of that release again, or put back what was saved before the upgrade; nothing was touched",
        )
    between = [name for number, name in release.names if release.reads <= number < release.protocol]
    return (
        f"{what} is of Slurm {release.called(left)}, and {release.name} takes over none that is so old",
        f"run one of {', '.join(between)} in between first; nothing was touched",
    )
