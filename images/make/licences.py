"""What a Debian copyright file declares, as an SPDX licence expression.

Only the machine-readable format (DEP-5) is read; of free text nothing is claimed. Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

NOASSERTION = "NOASSERTION"

# Debian's short names that are not SPDX identifiers -> the SPDX expression that means the same.
SPDX_OF: dict[str, str] = {
    "agpl-3": "AGPL-3.0-only",
    "agpl-3+": "AGPL-3.0-or-later",
    "apache-2": "Apache-2.0",
    "apache-2.0": "Apache-2.0",
    "artistic": "Artistic-1.0-Perl",
    "artistic-2": "Artistic-2.0",
    "artistic-2.0": "Artistic-2.0",
    "boost": "BSL-1.0",
    "boost-1.0": "BSL-1.0",
    "bsd-1-clause": "BSD-1-Clause",
    "bsd-2-clause": "BSD-2-Clause",
    "bsd-3-clause": "BSD-3-Clause",
    "bsd-4-clause": "BSD-4-Clause",
    "bsd-4-clause-uc": "BSD-4-Clause-UC",
    "bsd-2-clause-netbsd": "BSD-2-Clause",
    "bsl-1.0": "BSL-1.0",
    "cc0": "CC0-1.0",
    "cc0-1.0": "CC0-1.0",
    "cddl-1.0": "CDDL-1.0",
    "curl": "curl",
    "epl-1": "EPL-1.0",
    "expat": "MIT",
    "fsfap": "FSFAP",
    "fsful": "FSFUL",
    "fsfullr": "FSFULLR",
    "gfdl-1.3": "GFDL-1.3-only",
    "gfdl-1.3+": "GFDL-1.3-or-later",
    "isc": "ISC",
    "mit": "MIT",
    "mpl-1.1": "MPL-1.1",
    "mpl-2.0": "MPL-2.0",
    "openssl": "OpenSSL",
    "postgresql": "PostgreSQL",
    "psf-2": "PSF-2.0",
    "python": "PSF-2.0",
    "x11": "X11",
    "zlib": "Zlib",
    "0bsd": "0BSD",
}
# GNU licences follow one pattern: name, version, "+" for "or later".
GNU = re.compile(r"^(A?L?GPL)-(1|2|2\.0|2\.1|3|3\.0)(\+)?$", re.IGNORECASE)
# Versions that SPDX has, by name: "LGPL-1" does not exist, and must not be invented.
GNU_VERSIONS = {"GPL": {"1.0", "2.0", "3.0"}, "LGPL": {"2.0", "2.1", "3.0"}, "AGPL": {"1.0", "3.0"}}


@dataclass(frozen=True, slots=True)
class Licence:
    """The expression, and the names that stood in the file: what could not be said in SPDX's terms stays visible."""

    expression: str = NOASSERTION
    names: tuple[str, ...] = ()


def one_name(name: str) -> str | None:
    """The SPDX expression of one Debian short name; None where nothing is certain."""
    if gnu := GNU.match(name):
        family, version, later = gnu[1].upper(), gnu[2], gnu[3]
        version = version if "." in version else f"{version}.0"
        if version not in GNU_VERSIONS[family]:
            return None
        return f"{family}-{version}-{'or-later' if later else 'only'}"
    return SPDX_OF.get(name.lower())


def expression(text: str) -> str | None:
    """A Debian licence field ("GPL-2+ or Artistic, and Expat") as SPDX; None where a part is not known."""
    if " with " in f" {text} ".lower():
        return None  # an exception changes the meaning; without SPDX's own name for it nothing is claimed
    conjuncts: list[str] = []
    # DEP-5: a comma before "and" or "or" raises its precedence; only "A and B", "A or B" and "..., and ..." occur.
    for part in re.split(r"\s*,\s*and\s+", text, flags=re.IGNORECASE):
        if "," in part:
            return None
        alternatives = [one_conjunction(choice) for choice in re.split(r"\s+or\s+", part, flags=re.IGNORECASE)]
        if any(choice is None for choice in alternatives):
            return None
        known = [choice for choice in alternatives if choice is not None]
        conjuncts.append(f"({' OR '.join(known)})" if len(known) > 1 else known[0])
    return " AND ".join(conjuncts)


def one_conjunction(text: str) -> str | None:
    parts = [one_name(name.strip()) for name in re.split(r"\s+and\s+", text, flags=re.IGNORECASE)]
    return None if any(part is None for part in parts) else " AND ".join(part for part in parts if part)


def declared(copyright_text: str) -> Licence:
    """Every licence that a `Files:` paragraph names (but debian/*'s, which is the packaging's), joined with AND.

    One name that SPDX does not know makes the whole NOASSERTION: a partial statement would be a false one.
    """
    if not re.match(r"\s*Format(-Specification)?:", copyright_text):
        return Licence()
    names: set[str] = set()
    for paragraph in re.split(r"\n[ \t]*\n", copyright_text):
        fields = dict(re.findall(r"^([A-Za-z-]+):[ \t]*(.*)$", paragraph, flags=re.MULTILINE))
        if "Files" in fields and fields["Files"].strip() != "debian/*" and fields.get("License", "").strip():
            names.add(fields["License"].strip())
    found = [expression(name) for name in sorted(names)]
    if not found or any(item is None for item in found):
        return Licence(NOASSERTION, tuple(sorted(names)))
    terms = {term for item in found if item for term in item.split(" AND ")}
    return Licence(" AND ".join(sorted(terms)), tuple(sorted(names)))
