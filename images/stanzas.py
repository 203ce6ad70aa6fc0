"""The form of Debian's files about packages: stanzas of fields. Pure."""

from __future__ import annotations

from collections.abc import Iterator


def stanzas(text: str) -> Iterator[dict[str, str]]:
    """The fields of each, by small names; a field's further lines are left out."""
    for stanza in text.split("\n\n"):
        lines = [line for line in stanza.splitlines() if ":" in line and not line.startswith(("#", " ", "\t"))]
        yield {key.strip().lower(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def installed(status: str) -> dict[str, str]:
    """`name:arch` -> version of dpkg's status file; removed packages whose configuration stayed do not count."""
    return {
        f"{fields['package']}:{fields.get('architecture', '')}": fields["version"]
        for fields in stanzas(status)
        if fields.get("status", "").endswith(" installed")
    }
