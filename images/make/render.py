"""Render Dockerfiles and components from templates. Reads images/templates; the only importer of jinja2.

jinja2 is imported when something is rendered: its import is an eighth of a no-op build, for which `state.py` remembers
the results.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from images.definition.spec import User
from images.errors import ImagesError, nearest

if TYPE_CHECKING:
    import jinja2

# In a layer's commands and paths; a template has all of jinja.
NAMED = re.compile(r"\{\{\s*(\w+)\s*\}\}")
COMPOUND = re.compile(r"&&|\|\||;|(?<!&)&(?!&)")


@dataclass(frozen=True, slots=True)
class DockerfileContent:
    """The content of one image's Dockerfile."""

    describe: str
    base: str
    epoch: int
    files: bool
    settings: tuple[tuple[str, str], ...] = ()  # of what runs its programs, while it is built
    users: tuple[User, ...] = ()
    packages: str = ""  # path in the image of the list of locked packages
    commands: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    verify: tuple[tuple[str, str], ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    ports: tuple[int, ...] = ()
    stop_signal: str = ""
    user: str = ""
    entrypoint: tuple[str, ...] = ()

    @property
    def works(self) -> bool:
        return bool(self.users or self.packages or self.commands or self.remove or self.verify)


@cache
def environment(templates: Path) -> jinja2.Environment:
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def dockerfile(step: DockerfileContent, templates: Path) -> str:
    return environment(templates).get_template("Dockerfile.j2").render(step=step)


def makers(templates: Path) -> list[Path]:
    """List the files that decide a rendered text: the templates, this module, and jinja's version."""
    spec = importlib.util.find_spec("jinja2")
    assert spec is not None and spec.origin is not None
    return [*sorted(templates.glob("*.j2")), Path(__file__), Path(spec.origin)]


def filled(text: str, names: Mapping[str, str], asked_by: str) -> str:
    """Replace names such as `/usr/lib/{{ multiarch }}` with this build's values."""

    def one(found: re.Match[str]) -> str:
        if found[1] not in names:
            raise ImagesError("render the layer", f"no name {found[1]!r} in {text!r}", file=asked_by,
                              hint=nearest(found[1], names))  # fmt: skip
        return names[found[1]]

    return NAMED.sub(one, text)


def strict(command: str) -> str:
    """Wrap a compound command so that each failure counts: under `set -e`, `a && b` continues when `a` fails."""
    return f"{{ {command.rstrip(';')}; }} || exit 1" if COMPOUND.search(command) else command


def verified(command: str) -> tuple[str, str]:
    return f"{{ {command.rstrip(';')}; }} || exit 1", shlex.quote(command)


def component(name: str, templates: Path, values: Mapping[str, object], asked_by: str) -> tuple[str, ...]:
    """Render a component's template to commands, one a line; a backslash at the end joins the next."""
    import jinja2

    shown = f"images/templates/{name}.sh.j2"
    try:
        text = environment(templates).get_template(f"{name}.sh.j2").render(values)
    except jinja2.TemplateNotFound as error:
        raise ImagesError("find the component", f"{shown} does not exist", file=asked_by, field="component") from error
    except jinja2.TemplateError as error:
        line = getattr(error, "lineno", None)
        raise ImagesError("render the component", error.message or str(error), file=shown,
                          field=f"line {line}" if line else None) from error  # fmt: skip
    joined = text.replace("\\\n", " ")
    lines = (line.strip() for line in joined.splitlines())
    return tuple(re.sub(r"\s{2,}", " ", line) for line in lines if line and not line.startswith("#"))
