"""Compare a signed statement with the requested reference: its role, and its tag if that is a hash.

Anyone with push access may move a name to another image that is rightly signed: an older one, or another role's. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from images.errors import ImagesError
from images.ship import index

# A tag as builds give it, RELEASE-VARIANT[-ARCH]-HASH: it says what it must hold. Any other is the site's to move.
BUILT = re.compile(r"[0-9][0-9A-Za-z._]*-[a-z]+(?:-(?:amd64|arm64))?-[0-9a-f]{12}")


def check(reference: str, role: str, tag: str, said: Mapping[str, Mapping[str, Any]]) -> None:
    """Check each architecture's statement, by its name in the index; a single image has an empty name."""
    what = f"verify {reference}"
    for statement in said.values():
        found = statement["predicate"]["buildDefinition"]["externalParameters"]["role"]
        if found != role:
            raise ImagesError(what, f"it was built as {found}, and {role} was asked for",
                              hint=f"is {role} a name that you gave it? then say --role {found}")  # fmt: skip
    if not BUILT.fullmatch(tag):
        return
    made = {arch: built_as(what, statement) for arch, statement in said.items()}
    wanted = made[""][0] if "" in made else index.tag(made)
    if tag != wanted:
        raise ImagesError(what, f"this tag belongs to another build: what it leads to was built as {wanted}",
                          hint="the tag was moved: ask who may push there; take an image by its digest")  # fmt: skip


def built_as(what: str, statement: Mapping[str, Any]) -> tuple[str, str]:
    """Return the tag and the whole hash that a statement names."""
    inside = statement["predicate"]["buildDefinition"].get("internalParameters")
    if not isinstance(inside, dict) or not all(isinstance(inside.get(name), str) for name in ("tag", "inputs")):
        raise ImagesError(what, "its statement does not say under which tag it was built")
    return inside["tag"], inside["inputs"]
