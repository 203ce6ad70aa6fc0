"""Parser of Debian's package files: stanzas of fields. Pure."""

from __future__ import annotations

from collections.abc import Iterator


def stanzas(text: str) -> Iterator[dict[str, str]]:
    """Yield the fields of each stanza, names in lower case; continuation lines are dropped."""
    for stanza in text.split("\n\n"):
        lines = [line for line in stanza.splitlines() if ":" in line and not line.startswith(("#", " ", "\t"))]
        yield {key.strip().lower(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def installed(status: str) -> dict[str, str]:
    """Read `name:arch` -> version from dpkg's status file, without packages that left only configuration."""
    return {
        f"{fields['package']}:{fields.get('architecture', '')}": fields["version"]
        for fields in stanzas(status)
        if fields.get("status", "").endswith(" installed")
    }
