"""The types of a build: planned images, their Dockerfiles, their results, and the state of the last build.

`compose.py` makes a `PlannedImage` of each layer and role, with a `DockerfileContent`, which `render_dockerfile` fills
into images/templates. `BuildState` keeps the inputs of each image's last build, so that `list_changed` can name what
differs, and `Rendered` the digests of rendered Dockerfiles, so that a build with nothing to do renders none.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shlex
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ground.errors import nearest
from ground.files import locked, write_whole
from images import ImagesError
from images.archive.locked import Slice
from images.archive.wheels import Wheel
from images.definition.spec import Artifact, User
from images.make.content import Entry
from images.make.toolkit import ToolkitWheels

if TYPE_CHECKING:
    import jinja2


# Render Dockerfiles and components from templates. Reads images/templates; the only importer of jinja2.

# A name in a layer's commands and paths, which know no other part of jinja; templates have all of it.
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
    def has_steps(self) -> bool:
        return bool(self.users or self.packages or self.commands or self.remove or self.verify)


@cache
def load_templates(templates: Path) -> jinja2.Environment:
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render_dockerfile(step: DockerfileContent, templates: Path) -> str:
    return load_templates(templates).get_template("Dockerfile.j2").render(step=step)


def list_makers(templates: Path) -> list[Path]:
    """List the files that decide a rendered text: the templates, this module, and jinja's version."""
    spec = importlib.util.find_spec("jinja2")
    assert spec is not None and spec.origin is not None
    return [*sorted(templates.glob("*.j2")), Path(__file__), Path(spec.origin)]


def fill_names(text: str, names: Mapping[str, str], asked_by: str) -> str:
    """Replace names such as `/usr/lib/{{ multiarch }}` with this build's values."""

    def value_of(match: re.Match[str]) -> str:
        if match[1] not in names:
            raise ImagesError("render the layer", f"no name {match[1]!r} in {text!r}", file=asked_by,
                              hint=nearest(match[1], names))  # fmt: skip
        return names[match[1]]

    return NAMED.sub(value_of, text)


def make_strict(command: str) -> str:
    """Wrap a compound command so that each failure counts: under `set -e`, `a && b` continues when `a` fails."""
    return f"{{ {command.rstrip(';')}; }} || exit 1" if COMPOUND.search(command) else command


def wrap_check(command: str) -> tuple[str, str]:
    return f"{{ {command.rstrip(';')}; }} || exit 1", shlex.quote(command)


def render_component(name: str, templates: Path, values: Mapping[str, object], asked_by: str) -> tuple[str, ...]:
    """Render a component's template to commands, one a line; a backslash at the end joins the next."""
    import jinja2

    shown = f"images/templates/{name}.sh.j2"
    try:
        text = load_templates(templates).get_template(f"{name}.sh.j2").render(values)
    except jinja2.TemplateNotFound as error:
        raise ImagesError("find the component", f"{shown} does not exist", file=asked_by, field="component") from error
    except jinja2.TemplateError as error:
        line = getattr(error, "lineno", None)
        raise ImagesError("render the component", error.message or str(error), file=shown,
                          field=f"line {line}" if line else None) from error  # fmt: skip
    joined = text.replace("\\\n", " ")
    lines = (line.strip() for line in joined.splitlines())
    return tuple(re.sub(r"\s{2,}", " ", line) for line in lines if line and not line.startswith("#"))


LAYER = "layer:"
NATIVE = f"{LAYER}native"  # no role is built on it; `images.make.build` uses its programs


@dataclass(frozen=True, slots=True)
class PlannedImage:
    """One planned image: its name, its content, and the images that it needs."""

    key: str  # layer:NAME or role:NAME
    name: str
    repo: str
    tag: str  # its beginning, until `inputs` are known
    describe: str
    parent: str  # the key of the image below; empty: the base
    step: DockerfileContent
    entries: tuple[Entry, ...]
    slices: tuple[Slice, ...]  # of every layer up to here
    provides: tuple[str, ...]
    base: str = ""  # what FROM names where there is no parent; empty: bootstrapped
    artifacts: tuple[tuple[Artifact, str], ...] = ()
    absent: Mapping[str, str] = field(default_factory=dict)
    dpkg_options: tuple[str, ...] = ()
    wheels: tuple[Wheel, ...] = ()  # of every layer up to here
    toolkit: ToolkitWheels = field(default_factory=ToolkitWheels)  # those of CUDA that this one adds
    libraries: tuple[Wheel, ...] = ()  # and those of Python
    hash: str = ""  # of `inputs`
    inputs: Mapping[str, str] = field(default_factory=dict)
    directories: Mapping[str, Entry] = field(default_factory=dict)  # all that this image or one below declared

    @property
    def needs(self) -> tuple[str, ...]:
        """The keys of the images that must exist before this one."""
        return (*([self.parent] if self.parent else []), *(other for _, other in self.artifacts))

    @property
    def reference(self) -> str:
        return f"{self.repo}:{self.tag}"

    @property
    def is_role(self) -> bool:
        return self.key.startswith("role:")

    @property
    def is_bootstrapped(self) -> bool:
        return not self.parent and not self.base


@dataclass(frozen=True, slots=True)
class Composed:
    """Every image of one choice, parents first."""

    images: Mapping[str, PlannedImage]
    slurm: str

    def role(self, name: str) -> PlannedImage:
        return self.images[f"role:{name}"]

    def list_needed(self, roles: Iterable[str], present: Container[str] = ()) -> list[PlannedImage]:
        """List the images under these targets in build order, with the builders of their artifacts.

        A builder is left out if all images that use its artifacts are among the references that are `present`.
        """
        keys: set[str] = set()

        def visit(key: str) -> None:
            if key in keys:
                return
            keys.add(key)
            image = self.images[key]
            for other in image.needs:
                if image.reference not in present or other == image.parent:
                    visit(other)

        for target in roles:
            visit(key_of(target))
        return [image for key, image in self.images.items() if key in keys]


def key_of(target: str) -> str:
    """Return the key of a command line's target: a role, or layer:NAME."""
    return target if target.startswith(LAYER) else f"role:{target}"


def digest(data: str | bytes) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def short(name: str) -> str:
    """Shorten an input's name to its path in the repository."""
    return name.partition(" as /")[0]


def list_changed(before: Mapping[str, str] | None, after: Mapping[str, str]) -> list[str]:
    """List by name the inputs that differ from those of the last build."""
    if before is None:
        return ["never built here"]
    lines = []
    for name in sorted(before.keys() | after.keys()):
        if name not in after:
            lines.append(f"{short(name)} (removed)")
        elif name not in before:
            lines.append(f"{short(name)} (new)")
        elif before[name] != after[name]:
            lines.append(short(name))
    return lines


# The plan for each image of a build, and its result. Pure.


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan for one image."""

    image: PlannedImage
    present: bool
    why: tuple[str, ...]


@dataclass(slots=True)
class BuildResult:
    """The result for one image."""

    image: PlannedImage
    why: tuple[str, ...]
    seconds: float = 0.0
    built: bool = False


# Remember the last build on this machine: its inputs by name, so that `plan` shows changes, and rendered texts.

# Rendered texts to keep: more than one definition has, because people switch between branches.
KEPT = 256
DIGEST = re.compile(r"[0-9a-f]{64}")


@contextmanager
def lock_for_adding(path: Path) -> Iterator[None]:
    """Lock a file's directory, so that concurrent builds of this tree add to the file without losing entries."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a file system without locks: the last one's word is all there is
            locked(fd, within=5.0)
        yield
    finally:
        os.close(fd)


class BuildState:
    """build/state/VARIANT.json: the inputs of each image. Losing it loses only explanations."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.built = self.read()

    def read(self) -> dict[str, Mapping[str, str]]:
        try:
            return {key: value["inputs"] for key, value in json.loads(self.path.read_text()).items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {}

    def inputs(self, key: str) -> Mapping[str, str] | None:
        return self.built.get(key)

    def record(self, key: str, inputs: Mapping[str, str]) -> None:
        with lock_for_adding(self.path):
            self.built = {**self.read(), key: inputs}
            data = {name: {"inputs": inputs} for name, inputs in sorted(self.built.items())}
            write_whole(self.path, json.dumps(data, indent=1), 0o600)


class Rendered:
    """Digests of rendered Dockerfiles, by everything that decides their text, so that no-op builds skip rendering.

    Stored in build/state/VARIANT.rendered.json. Losing it costs only time.
    """

    def __init__(self, templates: Path, path: Path | None = None) -> None:
        self.templates, self.path = templates, path
        self.stamps = self.read_stamps()
        self.makers = self.hash_makers()
        self.known = self.read_digests()
        self.used: dict[str, str] = {}

    def read_digests(self) -> dict[str, str]:
        try:
            data = json.loads(self.path.read_text()) if self.path else {}
            return {k: v for k, v in data.items() if isinstance(v, str) and DIGEST.fullmatch(v)}
        except (OSError, ValueError, AttributeError, RecursionError):
            return {}

    def read_stamps(self) -> list[tuple[int, int]]:
        """Return inodes and change times: unlike modification times, an edit that is undone still changes them."""
        return [(status.st_ino, status.st_ctime_ns) for status in (path.stat() for path in list_makers(self.templates))]

    def hash_makers(self) -> str:
        return "".join(digest(maker.read_bytes()) for maker in list_makers(self.templates))

    def hash_instructions(self, step: DockerfileContent) -> str:
        """Return the digest of a Dockerfile, without its base: the base's tag is an input of its own."""
        key = digest(f"{self.makers}{step!r}")
        if key not in self.used:
            self.used[key] = self.known.get(key) or digest(
                render_dockerfile(step, self.templates).replace(step.base, "parent", 1)
            )
        return self.used[key]

    def keep(self) -> None:
        """Save the digests, those used last at the end, which stay longest."""
        # A template edited during this build may have been rendered in its old or its new form.
        if not self.path or self.used.keys() <= self.known.keys() or self.read_stamps() != self.stamps:
            return
        with suppress(OSError), lock_for_adding(self.path):  # a full disk, or another user's tree
            rest = {key: value for key, value in self.read_digests().items() if key not in self.used}
            write_whole(self.path, json.dumps(dict(list({**rest, **self.used}.items())[-KEPT:])), 0o600)
