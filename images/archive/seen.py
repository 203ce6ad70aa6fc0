"""Compare the locked wheels with the index for `lock --check`: missing or newer ones. Writes and fetches nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from images.archive import wheels
from images.archive.lock import Place
from images.archive.wheels import Wheel
from images.errors import ImagesError
from images.settings import Settings


@dataclass(frozen=True, slots=True)
class Seen:
    """Differences between the index and a lock."""

    wrong: tuple[str, ...] = ()  # what is locked is not there any more, or is another file: a build ends on it
    newer: tuple[str, ...] = ()  # what a new lock would move


def look(place: Place, layers: Iterable[str]) -> Seen:
    wrong, newer = [], []
    for of in wheels.taken(place, layers):
        if (locked := wheels.read(place, of)) is None:
            continue
        for arch in wheels.MACHINES:
            mine = [wheel for wheel in locked.wheels if wheel.arch == arch]
            now = {wheel.wanted: wheel for wheel in still_there([wheel.wanted for wheel in mine], arch, place.settings)}
            wrong += [f"{of.about}: {why}" for wheel in mine if (why := differs(wheel, now.get(wheel.wanted)))]
        try:
            newest = wheels.resolve(of, place.settings)
        except ImagesError as error:
            newer.append(f"{of.about}: a new lock cannot be made: {error.why}")
            continue
        # Another file of the same version is told above.
        was = {(wheel.name, wheel.version, wheel.arch): wheel for wheel in locked.wheels}
        same = [was.get((wheel.name, wheel.version, wheel.arch), wheel) for wheel in newest.wheels]
        newer += wheels.changes(locked, replace(newest, wheels=tuple(same)))
    return Seen(tuple(wrong), tuple(newer))


def differs(locked: Wheel, now: Wheel | None) -> str:
    what = f"{locked.name} {locked.version} ({locked.arch})"
    if now is None:
        return f"{what} is gone"
    if now.sha256 != locked.sha256:
        return f"{what}: its hash changed: {locked.file} is locked as {locked.sha256}, the index has {now.sha256}"
    return ""


def still_there(wanted: Sequence[str], arch: str, settings: Settings) -> list[Wheel]:
    """Return those of these versions that the index has; pip names only the first missing one at a time."""
    while True:
        found, absent, why = wheels.ask(wanted, arch, settings)
        if not why:
            return found
        if not set(absent) & set(wanted):
            raise wheels.unresolved(why, arch)
        wanted = [item for item in wanted if item not in absent]
