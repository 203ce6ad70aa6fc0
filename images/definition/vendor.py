"""Parse what versions.yaml says about a vendor's CUDA, and about the machine that an image expects. Pure."""

from __future__ import annotations

import re

from images import architectures
from images.definition.fields import Fields
from images.definition.spec import Cuda, Libraries
from images.errors import nearest

# What pip is asked for: a name, and a version or the beginning of one.
REQUIREMENT = re.compile(r"(?P<name>[a-z0-9]+(-[a-z0-9]+)*)(==[0-9]+(\.[0-9]+)*(\.\*)?)?")


def cuda(name: object, parent: Fields, value: object) -> Cuda:
    fields = Fields(value, parent.file, {"driver", "wheels"}, f"cuda.{name}")
    # It becomes a path of the image: /usr/local/cuda-NAME.
    if not isinstance(name, str) or not re.fullmatch(r"[0-9]+\.[0-9]+", name):
        raise fields.error("", f"{name!r} is not a toolkit's version", 'in quotes, for instance "13.0"')
    groups = requirements(fields, "wheels", f"cuda.{name}.wheels")
    driver = fields.text("driver")
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)*", driver):
        raise fields.error("driver", f"{driver!r} is not a driver's version", 'for instance "580.65.06"')
    return Cuda(name, driver, groups)


def arches(fields: Fields) -> tuple[str, ...]:
    """Read the architectures of a variant's repositories and pins; all by default."""
    named = fields.texts("arches")
    for name in named:
        if name not in architectures.KNOWN:
            raise fields.error("arches", f"no images are made for {name!r}", nearest(name, architectures.KNOWN))
    return named or tuple(architectures.KNOWN)


def libraries(fields: Fields) -> Libraries:
    return Libraries(requirements(fields, "python", "python"))


def requirements(fields: Fields, key: str, where: str) -> dict[str, tuple[str, ...]]:
    """Read pip's requirements by group; a name may appear once, or two groups could lock two versions."""
    listed = fields.mapping(key)
    groups = {group: Fields(listed, fields.file, listed, where).texts(group) for group in listed}
    asked: set[str] = set()
    for requirement in (item for group in groups.values() for item in group):
        found = REQUIREMENT.fullmatch(requirement)
        if found is None:
            raise fields.error(key, f"{requirement!r} is not NAME, NAME==VERSION or NAME==VERSION.*")
        if found["name"] in asked:
            raise fields.error(key, f"{found['name']!r} stands twice")
        asked.add(found["name"])
    return groups


def expects(fields: Fields) -> dict[str, str]:
    """Read what the image expects of its machine: the oldest kernel, and the fabric's user space release."""
    inner = Fields(fields.mapping("expects"), fields.file, {"kernel", "ofed"}, f"{fields.where}.expects")
    found = inner.data and fields.text_map("expects")
    for key, value in (found or {}).items():
        if not re.fullmatch(r"[0-9]+(\.[0-9]+)*", value):
            raise inner.error(key, f"{value!r} is not a version", 'for instance "6.1"')
    return found or {}
