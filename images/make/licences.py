"""What is known of a package's licence, in SPDX's terms. Pure."""

from __future__ import annotations

from dataclasses import dataclass

NOASSERTION = "NOASSERTION"


@dataclass(frozen=True, slots=True)
class Licence:
    """The expression, and the names that stood in the file: what could not be said in SPDX's terms stays visible."""

    expression: str = NOASSERTION
    names: tuple[str, ...] = ()
