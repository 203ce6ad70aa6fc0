"""Parsers of apt's two formats of sources. Pure."""

from __future__ import annotations

from pathlib import Path

from images.archive.apt import Origin
from images.stanzas import stanzas


def one_line(text: str) -> list[Origin]:
    """Parse `deb [options] URI suite components`, one repository a line."""
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
    """Parse stanzas of `Types:`, `URIs:`, `Suites:`, `Components:`, `Signed-By:`."""
    found = []
    for fields in stanzas(text):
        if "deb" not in fields.get("types", "").split() or fields.get("enabled", "yes") == "no":
            continue
        for uri in fields["uris"].split():
            suites, components = fields["suites"].split(), fields.get("components", "").split()
            found.append(Origin("base", uri, tuple(suites), tuple(components), Path(fields.get("signed-by", ""))))
    return found
