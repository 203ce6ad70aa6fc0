"""apt's two ways of writing where packages come from, and dpkg's of what is installed, read. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from images.archive.apt import Origin


def one_line(text: str) -> list[Origin]:
    """`deb [options] URI suite components`, a repository a line."""
    found = []
    for line in text.splitlines():
        words = line.split("#")[0].split()
        if len(words) < 3 or words[0] != "deb":
            continue
        key = ""
        if words[1].startswith("["):
            end = next(index for index, word in enumerate(words) if word.endswith("]"))
            for option in " ".join(words[1 : end + 1]).strip("[]").split():
                key = option.removeprefix("signed-by=") if option.startswith("signed-by=") else key
            words = [words[0], *words[end + 1 :]]
        found.append(Origin("base", words[1], (words[2],), tuple(words[3:]), Path(key)))
    return found


def deb822(text: str) -> list[Origin]:
    """Stanzas of `Types:`, `URIs:`, `Suites:`, `Components:`, `Signed-By:`."""
    found = []
    for fields in stanzas(text):
        if "deb" not in fields.get("types", "").split() or fields.get("enabled", "yes") == "no":
            continue
        for uri in fields["uris"].split():
            suites, components = fields["suites"].split(), fields.get("components", "").split()
            found.append(Origin("base", uri, tuple(suites), tuple(components), Path(fields.get("signed-by", ""))))
    return found


def installed(status: str) -> dict[str, str]:
    """`name:arch` -> version of dpkg's status file; removed packages whose configuration stayed do not count."""
    return {
        f"{fields['package']}:{fields.get('architecture', '')}": fields["version"]
        for fields in stanzas(status)
        if fields.get("status", "").endswith(" installed")
    }


def stanzas(text: str) -> Iterator[dict[str, str]]:
    """The fields of each, by small names; a field's further lines are left out."""
    for stanza in text.split("\n\n"):
        lines = [line for line in stanza.splitlines() if ":" in line and not line.startswith(("#", " ", "\t"))]
        yield {key.strip().lower(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
