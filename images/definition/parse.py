"""Parse YAML data strictly into the dataclasses of `spec.py`. Pure."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from images import architectures
from images.definition import spec
from images.definition.spec import Cuda, Libraries, Selected
from images.errors import ImagesError, nearest


# Strict reader of a mapping from YAML: refuses unknown keys and wrong types. Pure.
class DefinitionFields:
    """A mapping read strictly: each key once, by type; a leftover key is an error."""

    def __init__(self, data: object, file: str, known: Iterable[str], where: str = "") -> None:
        self.file, self.where = file, where
        if data is None:
            data = {}
        if not isinstance(data, dict):
            raise self.error("", f"expected a mapping, found {kind(data)}")
        self.data: dict[str, object] = data
        known = set(known)
        for key in data:
            if key not in known:
                raise self.error(str(key), f"unknown key {key!r}", nearest(str(key), known))

    def error(self, key: str, why: str, hint: str | None = None) -> ImagesError:
        field = ".".join(part for part in (self.where, key) if part)
        return ImagesError("read the definition", why, file=self.file, field=field or None, hint=hint)

    def __contains__(self, key: str) -> bool:
        return key in self.data

    def text(self, key: str, default: str | None = None) -> str:
        value = self.data.get(key, default)
        if value is None:
            raise self.error(key, f"{key!r} is missing")
        return self.worded(key, value)

    def worded(self, field: str, value: object) -> str:
        if not isinstance(value, str):
            raise self.error(field, f"expected text, found {kind(value)}", quoting(value))
        return value

    def optional(self, key: str) -> str | None:
        return self.text(key) if self.data.get(key) is not None else None

    def number(self, key: str) -> int:
        value = self.data.get(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(key, f"expected a number, found {kind(value)}")
        return value

    def mode(self, key: str) -> int | None:
        text = self.optional(key)
        if text is None:
            return None
        if not re.fullmatch(r"[0-7]{4}", text):
            raise self.error(key, f"expected four octal digits, found {text!r}", 'for instance "0644"')
        return int(text, 8)

    def flag(self, key: str, default: bool) -> bool:
        value = self.data.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"expected true or false, found {kind(value)}")
        return value

    def items(self, key: str) -> list[object]:
        value = self.data.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.error(key, f"expected a list, found {kind(value)}")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        return tuple(self.worded(f"{key}[{index}]", value) for index, value in enumerate(self.items(key)))

    def mapping(self, key: str) -> dict[str, object]:
        value = self.data.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.error(key, f"expected a mapping, found {kind(value)}")
        return value

    def text_map(self, key: str) -> dict[str, str]:
        return {str(name): self.worded(f"{key}.{name}", value) for name, value in self.mapping(key).items()}

    def selected(self, key: str, parse_item: Callable[[str, object], T], selectors: frozenset[str]) -> Selected[T]:
        """Read a list, or a map of selectors to lists."""
        value = self.data.get(key)
        if value is None:
            return Selected()
        groups = value if isinstance(value, dict) else {"all": value}
        parts = []
        for when, listed in groups.items():
            names = frozenset(str(when).split("+"))
            for name in names - selectors:
                raise self.error(f"{key}.{when}", f"unknown selector {name!r}", nearest(name, selectors))
            field = f"{key}.{when}" if isinstance(value, dict) else key
            if not isinstance(listed, list):
                raise self.error(field, f"expected a list, found {kind(listed)}")
            parts.append((names, tuple(parse_item(f"{field}[{index}]", item) for index, item in enumerate(listed))))
        return Selected(tuple(parts))

    def selected_text(self, key: str, selectors: frozenset[str], *, line: bool = False) -> Selected[str]:
        def parse_text(field: str, item: object) -> str:
            text = self.worded(field, item)
            if line and "\n" in text.strip():
                raise self.error(field, "a command is one line", "use a template in images/templates/ (component)")
            return text.strip() if line else text

        return self.selected(key, parse_text, selectors)


def kind(value: object) -> str:
    names = {dict: "a mapping", list: "a list", str: "text", bool: "true/false", int: "a number", type(None): "nothing"}
    return names.get(type(value), type(value).__name__)


def quoting(value: object) -> str | None:
    """Suggest quotes: YAML reads 24.11 as a number, no as false, 2020-01-01 as a date."""
    return None if value is None or isinstance(value, dict | list) else "put it in quotes"


# Parse what versions.yaml says about a vendor's CUDA, and about the machine that an image expects. Pure.
# A requirement for pip: a name, and a version or the beginning of one.
REQUIREMENT = re.compile(r"(?P<name>[a-z0-9]+(-[a-z0-9]+)*)(==[0-9]+(\.[0-9]+)*(\.\*)?)?")


def parse_cuda(name: object, parent: DefinitionFields, value: object) -> Cuda:
    fields = DefinitionFields(value, parent.file, {"driver", "wheels"}, f"cuda.{name}")
    # It becomes a path of the image: /usr/local/cuda-NAME.
    if not isinstance(name, str) or not re.fullmatch(r"[0-9]+\.[0-9]+", name):
        raise fields.error("", f"{name!r} is not a toolkit's version", 'in quotes, for instance "13.0"')
    groups = requirements(fields, "wheels", f"cuda.{name}.wheels")
    driver = fields.text("driver")
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)*", driver):
        raise fields.error("driver", f"{driver!r} is not a driver's version", 'for instance "580.65.06"')
    return Cuda(name, driver, groups)


def parse_arches(fields: DefinitionFields) -> tuple[str, ...]:
    """Read the architectures of a variant's repositories and pins; all by default."""
    named = fields.texts("arches")
    for name in named:
        if name not in architectures.KNOWN:
            raise fields.error("arches", f"no images are made for {name!r}", nearest(name, architectures.KNOWN))
    return named or tuple(architectures.KNOWN)


def parse_libraries(fields: DefinitionFields) -> Libraries:
    return Libraries(requirements(fields, "python", "python"))


def requirements(fields: DefinitionFields, key: str, where: str) -> dict[str, tuple[str, ...]]:
    """Read pip's requirements by group; a name may appear once, or two groups could lock two versions."""
    listed = fields.mapping(key)
    groups = {group: DefinitionFields(listed, fields.file, listed, where).texts(group) for group in listed}
    requested: set[str] = set()
    for requirement in (item for group in groups.values() for item in group):
        match = REQUIREMENT.fullmatch(requirement)
        if match is None:
            raise fields.error(key, f"{requirement!r} is not NAME, NAME==VERSION or NAME==VERSION.*")
        if match["name"] in requested:
            raise fields.error(key, f"{match['name']!r} is given twice")
        requested.add(match["name"])
    return groups


def parse_expects(fields: DefinitionFields) -> dict[str, str]:
    """Read what the image expects of its machine: the oldest kernel, and the fabric's user space release."""
    inner = DefinitionFields(fields.mapping("expects"), fields.file, {"kernel", "ofed"}, f"{fields.where}.expects")
    expected = inner.data and fields.text_map("expects")
    for key, value in (expected or {}).items():
        if not re.fullmatch(r"[0-9]+(\.[0-9]+)*", value):
            raise inner.error(key, f"{value!r} is not a version", 'for instance "6.1"')
    return expected or {}


T = TypeVar("T")
# A tar entry for one of these would replace the link with a directory and break the whole image.
LINKED = ("/bin/", "/sbin/", "/lib/", "/lib64/", "/var/run/", "/var/lock/")


LAYER_KEYS = {
    "describe", "from", "bootstrap", "only", "provides", "users", "sources", "packages", "wheels", "wheels_devel",
    "python", "downloads", "artifacts", "files", "component", "run", "verify", "remove", "env",
}  # fmt: skip
ROLE_KEYS = {
    "describe", "layer", "services", "required", "needs", "ports", "capabilities", "drain", "files", "verify", "env",
    "stop_signal", "default", "code", "program", "user",
}  # fmt: skip
VERSIONS_KEYS = {"epoch", "source", "users", "pins", "values", "cuda", "python", "variants"}
CUDA_SELECTORS = ("cuda-package", "cuda-wheels")


def file_entry(file: str) -> Callable[[str, object], spec.FileEntry]:
    def parse_entry(field: str, item: object) -> spec.FileEntry:
        entry = DefinitionFields(item, file, {"from", "to", "dir", "link", "mode", "owner"}, field)
        owner, mode = entry.text("owner", "root"), entry.mode("mode")
        if "dir" in entry:
            return spec.FileEntry(spec.EntryKind.DIRECTORY, absolute(entry, "dir"), mode=mode, owner=owner)
        if "link" in entry:
            return spec.FileEntry(spec.EntryKind.LINK, absolute(entry, "link"), entry.text("to"), owner=owner)
        return spec.FileEntry(spec.EntryKind.FILE, absolute(entry, "to"), entry.text("from"), mode, owner)

    return parse_entry


def absolute(entry: DefinitionFields, key: str) -> str:
    path = entry.text(key)
    if not path.startswith("/") or ".." in path.split("/"):
        raise entry.error(key, f"{path!r} is not an absolute path")
    if f"{path}/".startswith(LINKED):
        raise entry.error(key, f"{path!r} goes through a symbolic link of the base", "write /usr/bin, /usr/lib, /run")
    return path


def artifact(file: str) -> Callable[[str, object], spec.Artifact]:
    def parse_artifact(field: str, item: object) -> spec.Artifact:
        entry = DefinitionFields(item, file, {"layer", "from", "to"}, field)
        return spec.Artifact(entry.text("layer"), entry.text("from"), absolute(entry, "to"))

    return parse_artifact


def layer(name: str, data: object, file: str, selectors: frozenset[str]) -> spec.Layer:
    fields = DefinitionFields(data, file, LAYER_KEYS)
    bootstrap = None
    if "bootstrap" in fields:
        options = DefinitionFields(fields.data["bootstrap"], file, {"dpkg_options"}, "bootstrap")
        bootstrap = spec.Bootstrap(options.texts("dpkg_options"))
        for key in ("files", "run", "component", "artifacts", "downloads", "sources", "users", "verify", "remove",
                    "wheels", "wheels_devel", "python"):  # fmt: skip
            if key in fields:
                raise fields.error(key, "a bootstrapped layer holds packages alone", "put it into the next layer")
    parent = fields.optional("from")
    if (bootstrap is None) == (parent is None):
        raise fields.error("from", "a layer has either `from` or `bootstrap`")

    def texts(key: str) -> spec.Selected[str]:
        return fields.selected_text(key, selectors)

    return spec.Layer(
        name=name,
        describe=fields.text("describe"),
        parent=parent,
        bootstrap=bootstrap,
        only=texts("only") if isinstance(fields.data.get("only"), dict) else only(fields, selectors),
        provides=texts("provides"),
        users=texts("users"),
        sources=texts("sources"),
        packages=texts("packages"),
        wheels=texts("wheels"),
        wheels_devel=texts("wheels_devel"),
        python=texts("python"),
        downloads=texts("downloads"),
        artifacts=fields.selected("artifacts", artifact(file), selectors),
        files=fields.selected("files", file_entry(file), selectors),
        component=texts("component"),
        run=fields.selected_text("run", selectors, line=True),
        verify=fields.selected_text("verify", selectors, line=True),
        remove=texts("remove"),
        env=fields.text_map("env"),
    )


def role(name: str, data: object, file: str, selectors: frozenset[str]) -> spec.Role:
    fields = DefinitionFields(data, file, ROLE_KEYS)
    ports = fields.items("ports")
    for index, port in enumerate(ports):
        if not isinstance(port, int) or not 0 < port < 65536:
            raise fields.error(f"ports[{index}]", f"{port!r} is not a port number")
    return spec.Role(
        name=name,
        describe=fields.text("describe"),
        layer=fields.text("layer"),
        services=fields.selected_text("services", selectors),
        required=fields.texts("required"),
        needs=fields.texts("needs"),
        ports=tuple(port for port in ports if isinstance(port, int)),
        capabilities=fields.texts("capabilities"),
        drain=fields.mapping("drain") or None,
        files=fields.selected("files", file_entry(file), selectors),
        verify=fields.selected_text("verify", selectors, line=True),
        env=fields.text_map("env"),
        stop_signal=fields.text("stop_signal", "SIGTERM"),
        default=fields.flag("default", True),
        code=fields.flag("code", True),
        program=program(fields),
        user=fields.text("user", ""),
    )


def program(fields: DefinitionFields) -> str:
    """Read `program`; a pod with an only program has no PID 1, so no services, drain or capabilities."""
    path = fields.text("program", "")
    for key in ("services", "required", "drain", "capabilities"):
        if path and key in fields:
            raise fields.error(key, f"{path} is the only program of its pod")
    return path


def versions(data: object, file: str) -> spec.Versions:
    fields = DefinitionFields(data, file, VERSIONS_KEYS)
    users = {name: user(name, fields, value) for name, value in fields.mapping("users").items()}
    holders: dict[int, str] = {}
    for name, account in users.items():
        if (other := holders.setdefault(account.uid, name)) != name:
            raise fields.error(
                f"users.{name}.uid", f"{account.uid} is {other}'s already: to the kernel both would be one"
            )
    return spec.Versions(
        epoch=epoch(fields),
        source=fields.text("source", ""),
        variants={
            name: variant(name, DefinitionFields(value, file, VARIANT_KEYS, f"variants.{name}"))
            for name, value in fields.mapping("variants").items()
        },
        users=users,
        pins={name: pin(name, fields, value) for name, value in fields.mapping("pins").items()},
        values=fields.text_map("values"),
        cuda={name: parse_cuda(name, fields, value) for name, value in fields.mapping("cuda").items()},
        python=parse_libraries(fields),
    )


def epoch(fields: DefinitionFields) -> int:
    text = fields.text("epoch")
    try:
        return int(datetime.datetime.fromisoformat(f"{text}T00:00:00+00:00").timestamp())
    except ValueError:
        raise fields.error("epoch", f"{text!r} is not a date", 'for instance "2026-01-01"') from None


VARIANT_KEYS = {
    "describe", "python", "slurm", "releases", "cuda", "suite", "components", "base", "sources", "absent", "expects",
    "arches",
}  # fmt: skip


def variant(name: str, fields: DefinitionFields) -> spec.Variant:
    slurm = fields.text("slurm", "package")
    if slurm not in {source.value for source in spec.SlurmSource}:
        raise fields.error("slurm", f"unknown source {slurm!r}", nearest(slurm, (s.value for s in spec.SlurmSource)))
    base = fields.text("base", "")
    if base and not re.search(rf"@sha256:([0-9a-f]{{64}}|{spec.UNFILLED})$", base):
        raise fields.error("base", f"{base!r} is not pinned by digest", "write NAME@sha256:...")
    if not base and "suite" not in fields:
        raise fields.error("suite", "a variant has a `base` image or a `suite` to bootstrap")
    return spec.Variant(
        name=name,
        describe=fields.text("describe"),
        python=fields.text("python"),
        slurm=spec.SlurmSource(slurm),
        cuda=fields.text("cuda", spec.PACKAGED),
        suite=fields.text("suite", ""),
        components=fields.texts("components") or ("main",),
        base=base,
        releases=fields.texts("releases"),
        sources=tuple(
            apt_source(DefinitionFields(item, fields.file, SOURCE_KEYS, f"{fields.where}.sources[{index}]"))
            for index, item in enumerate(fields.items("sources"))
        ),
        absent=fields.text_map("absent"),
        expects=parse_expects(fields),
        arches=parse_arches(fields),
    )


SOURCE_KEYS = {"name", "uri", "suites", "components", "key", "pin", "packages", "dated"}


def apt_source(fields: DefinitionFields) -> spec.AptSource:
    for key, other in (("uri", "key"), ("key", "uri")):
        if key in fields and other not in fields:
            raise fields.error(other, f"{other!r} is missing", "with neither it is a suite of the base's own archive")
    packages = fields.texts("packages")
    if packages and "pin" not in fields:
        raise fields.error("pin", "'pin' is missing", "the priority of `packages`, above the 500 of every other one")
    if "uri" not in fields and not packages:
        raise fields.error("packages", "another suite of the base's archive names its packages",
                           "it would otherwise replace everything that it has newer")  # fmt: skip
    return spec.AptSource(
        name=fields.text("name"),
        uri=fields.text("uri", ""),
        suites=fields.texts("suites"),
        components=fields.texts("components"),
        key=fields.text("key", ""),
        pin=fields.number("pin") if "pin" in fields else None,
        packages=packages,
        dated=fields.flag("dated", True),
    )


def user(name: str, parent: DefinitionFields, value: object) -> spec.User:
    fields = DefinitionFields(value, parent.file, {"uid", "gid", "home", "shell"}, f"users.{name}")
    uid = fields.number("uid")
    gid = fields.number("gid") if "gid" in fields else uid
    home, shell = fields.text("home", "/nonexistent"), fields.text("shell", "/usr/sbin/nologin")
    return spec.User(name, uid, gid, home, shell)


def pin(name: str, parent: DefinitionFields, value: object) -> spec.Pin:
    fields = DefinitionFields(value, parent.file, {"version", "url", "sha256", "commit"}, f"pins.{name}")
    digest = fields.text("sha256")
    if digest != spec.UNFILLED and not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise fields.error("sha256", f"{digest!r} is not a SHA-256 checksum")
    commit = fields.text("commit", "")
    if commit and not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise fields.error("commit", f"{commit!r} is not a commit", "40 hexadecimal digits")
    return spec.Pin(name, fields.text("version"), fields.text("url"), digest, commit=commit)


# fmt: off
RELEASE_KEYS = {
    "protocol", "reads", "needs-state", "mpi", "gpu", "configure", "user-env", "topology", "metrics", "ready",
    "fast-scripts", "absent",
}
# fmt: on
def releases(data: object, file: str) -> dict[str, spec.SlurmRelease]:
    """Parse the facts of every release of Slurm that the project knows."""
    whole, known = DefinitionFields(data, file, {"default", "releases"}), dict[str, spec.SlurmRelease]()
    for name, value in whole.mapping("releases").items():
        fields = DefinitionFields(value, file, RELEASE_KEYS, f"releases.{name}")
        if not isinstance(name, str) or not re.fullmatch(r"[0-9]{2}\.[0-9]{2}", name):
            raise fields.error("", f"{name!r} is no release", 'for instance "26.05", in quotes')
        if not fields.texts("mpi"):
            raise fields.error("mpi", "'mpi' is missing", "mpi: [none] where it has no plug-in for any")
        known[name] = spec.SlurmRelease(
            name=name,
            protocol=fields.number("protocol"),
            reads=fields.number("reads"),
            needs_state=fields.texts("needs-state"),
            mpi=fields.texts("mpi"),
            gpu=fields.text("gpu"),
            configure=fields.texts("configure"),
            user_env=fields.text("user-env"),
            topology=fields.text("topology"),
            metrics=fields.text("metrics", ""),
            ready=fields.mapping("ready"),
            fast_scripts=fields.flag("fast-scripts", default=False),
            absent=fields.text_map("absent"),
        )
    if (default := whole.text("default")) not in known:
        raise whole.error("default", f"no facts of {default!r}", f"known: {', '.join(known)}")
    return known


def selectors(names: Mapping[str, spec.Variant], slurm: Mapping[str, spec.SlurmRelease]) -> frozenset[str]:
    """Return every selector that a list may name, given the variants and the releases of Slurm."""
    sources = (f"slurm-{source.value}" for source in spec.SlurmSource)
    releases = (f"slurm-{release}" for release in slurm)
    return frozenset({"all", *names, *architectures.KNOWN, *sources, *releases, *CUDA_SELECTORS})


def only(fields: DefinitionFields, known: frozenset[str]) -> spec.Selected[str] | None:
    """Read `only: [nvidia]`: selectors of which one must hold; elsewhere the layer is left out."""
    if "only" not in fields:
        return None
    parts = []
    for name in fields.texts("only"):
        names = frozenset(name.split("+"))
        for unknown in names - known:
            raise fields.error("only", f"unknown selector {unknown!r}", nearest(unknown, known))
        parts.append((names, (name,)))
    return spec.Selected(tuple(parts))
