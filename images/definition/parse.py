"""Parse the YAML of the image definition into the dataclasses of `spec.py`. Pure.

`load.py` reads the files and calls `parse_versions` (versions.yaml), `parse_releases` (slurm.yaml), then `parse_layer`
and `parse_role` for each file of layers/ and roles/, and last checks the definition as a whole. Here each file is
checked for itself: `DefinitionFields` refuses unknown keys and wrong types with file, field and hint.

Many lists of a layer or a role may be a mapping of selectors to lists, `{all: [...], nvidia+arm64: [...]}`: a build
takes the lists whose selectors all hold for it (`spec.Selected`).
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from ground.errors import nearest
from images import ImagesError, architectures
from images.definition import spec
from images.definition.spec import Cuda, Libraries, Selected

T = TypeVar("T")

VERSIONS_KEYS = {"epoch", "source", "users", "pins", "values", "cuda", "python", "variants"}
VARIANT_KEYS = {
    "describe", "python", "slurm", "releases", "cuda", "suite", "components", "base", "sources", "absent", "expects",
    "arches",
}  # fmt: skip
SOURCE_KEYS = {"name", "uri", "suites", "components", "key", "pin", "packages", "dated"}
RELEASE_KEYS = {
    "protocol", "reads", "needs-state", "mpi", "gpu", "configure", "user-env", "topology", "metrics", "ready",
    "fast-scripts", "absent",
}  # fmt: skip
LAYER_KEYS = {
    "describe", "from", "bootstrap", "only", "provides", "users", "sources", "packages", "wheels", "wheels_devel",
    "python", "downloads", "artifacts", "files", "component", "run", "verify", "remove", "env",
}  # fmt: skip
NOT_IN_BOOTSTRAP = (
    "files", "run", "component", "artifacts", "downloads", "sources", "users", "verify", "remove", "wheels",
    "wheels_devel", "python",
)  # fmt: skip
ROLE_KEYS = {
    "describe", "extends", "layer", "services", "required", "needs", "ports", "capabilities", "drain", "files",
    "verify", "env", "stop_signal", "default", "code", "program", "user",
}  # fmt: skip
# Of a role that extends another: these lists add to the other role's.
ROLE_LISTS = ("services", "required", "needs", "ports", "capabilities", "files", "verify")
CUDA_SELECTORS = ("cuda-package", "cuda-wheels")
# Symbolic links of the base: a file below one would replace the link with a directory and break the whole image.
LINKS_OF_THE_BASE = ("/bin/", "/sbin/", "/lib/", "/lib64/", "/var/run/", "/var/lock/")
# A requirement for pip: a name, and a version or the beginning of one.
REQUIREMENT = re.compile(r"(?P<name>[a-z0-9]+(-[a-z0-9]+)*)(==[0-9]+(\.[0-9]+)*(\.\*)?)?")


# The strict reader.


class DefinitionFields:
    """Strict reader of a mapping from YAML: refuses unknown keys and values of another type, and names the field.

    `file` and `where` are the file and the field of the mapping, for errors.
    """

    def __init__(self, data: object, file: str, known: Iterable[str], where: str = "") -> None:
        self.file, self.where = file, where
        if data is None:
            data = {}
        if not isinstance(data, dict):
            raise self.error("", f"expected a mapping, found {type_name(data)}")
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
        return self.check_text(key, value)

    def check_text(self, field: str, value: object) -> str:
        if not isinstance(value, str):
            raise self.error(field, f"expected text, found {type_name(value)}", quotes_hint(value))
        return value

    def optional(self, key: str) -> str | None:
        return self.text(key) if self.data.get(key) is not None else None

    def number(self, key: str) -> int:
        value = self.data.get(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(key, f"expected a number, found {type_name(value)}")
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
            raise self.error(key, f"expected true or false, found {type_name(value)}")
        return value

    def items(self, key: str) -> list[object]:
        value = self.data.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.error(key, f"expected a list, found {type_name(value)}")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        return tuple(self.check_text(f"{key}[{index}]", value) for index, value in enumerate(self.items(key)))

    def mapping(self, key: str) -> dict[str, object]:
        value = self.data.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.error(key, f"expected a mapping, found {type_name(value)}")
        return value

    def text_map(self, key: str) -> dict[str, str]:
        return {str(name): self.check_text(f"{key}.{name}", value) for name, value in self.mapping(key).items()}

    def read_selected(self, key: str, parse_item: Callable[[str, object], T], selectors: frozenset[str]) -> Selected[T]:
        """Read a list, or a map of selectors to lists."""
        value = self.data.get(key)
        if value is None:
            return Selected()
        groups = value if isinstance(value, dict) else {"all": value}
        parts = []
        for when, listed in groups.items():
            names = self.parse_selector(f"{key}.{when}", str(when), selectors)
            field = f"{key}.{when}" if isinstance(value, dict) else key
            if not isinstance(listed, list):
                raise self.error(field, f"expected a list, found {type_name(listed)}")
            parts.append((names, tuple(parse_item(f"{field}[{index}]", item) for index, item in enumerate(listed))))
        return Selected(tuple(parts))

    def parse_selector(self, field: str, text: str, known: frozenset[str]) -> frozenset[str]:
        """Parse `nvidia+arm64`: the list counts in a build for which all these names hold."""
        names = frozenset(text.split("+"))
        for name in names - known:
            raise self.error(field, f"unknown selector {name!r}", nearest(name, known))
        return names

    def read_selected_text(self, key: str, selectors: frozenset[str], *, line: bool = False) -> Selected[str]:
        def parse_text(field: str, item: object) -> str:
            text = self.check_text(field, item)
            if line and "\n" in text.strip():
                raise self.error(field, "a command is one line", "use a template in images/templates/ (component)")
            return text.strip() if line else text

        return self.read_selected(key, parse_text, selectors)


def type_name(value: object) -> str:
    names = {dict: "a mapping", list: "a list", str: "text", bool: "true/false", int: "a number", type(None): "nothing"}
    return names.get(type(value), type(value).__name__)


def quotes_hint(value: object) -> str | None:
    """Suggest quotes: YAML reads 24.11 as a number, no as false, 2020-01-01 as a date."""
    return None if value is None or isinstance(value, dict | list) else "put it in quotes"


# versions.yaml


def parse_versions(data: object, file: str) -> spec.Versions:
    fields = DefinitionFields(data, file, VERSIONS_KEYS)
    users = {name: parse_user(name, fields, value) for name, value in fields.mapping("users").items()}
    name_by_uid: dict[int, str] = {}
    for name, user in users.items():
        if (first := name_by_uid.setdefault(user.uid, name)) != name:
            raise fields.error(f"users.{name}.uid", f"{user.uid} is {first}'s already: to the kernel both would be one")
    return spec.Versions(
        epoch=parse_epoch(fields),
        source=fields.text("source", ""),
        variants={
            name: parse_variant(name, DefinitionFields(value, file, VARIANT_KEYS, f"variants.{name}"))
            for name, value in fields.mapping("variants").items()
        },
        users=users,
        pins={name: parse_pin(name, fields, value) for name, value in fields.mapping("pins").items()},
        values=fields.text_map("values"),
        cuda={name: parse_cuda(name, fields, value) for name, value in fields.mapping("cuda").items()},
        python=Libraries(parse_requirements(fields, "python", "python")),
    )


def parse_epoch(fields: DefinitionFields) -> int:
    text = fields.text("epoch")
    try:
        return int(datetime.datetime.fromisoformat(f"{text}T00:00:00+00:00").timestamp())
    except ValueError:
        raise fields.error("epoch", f"{text!r} is not a date", 'for instance "2026-01-01"') from None


def parse_variant(name: str, fields: DefinitionFields) -> spec.Variant:
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
            parse_apt_source(DefinitionFields(item, fields.file, SOURCE_KEYS, f"{fields.where}.sources[{index}]"))
            for index, item in enumerate(fields.items("sources"))
        ),
        absent=fields.text_map("absent"),
        expects=parse_expects(fields),
        arches=parse_arches(fields),
    )


def parse_arches(fields: DefinitionFields) -> tuple[str, ...]:
    """Read the architectures of a variant's repositories and pins; all by default."""
    named = fields.texts("arches")
    for name in named:
        if name not in architectures.KNOWN:
            raise fields.error("arches", f"no images are made for {name!r}", nearest(name, architectures.KNOWN))
    return named or tuple(architectures.KNOWN)


def parse_expects(fields: DefinitionFields) -> dict[str, str]:
    """Read what the image expects of its machine: the oldest kernel, and the fabric's user space release."""
    inner = DefinitionFields(fields.mapping("expects"), fields.file, {"kernel", "ofed"}, f"{fields.where}.expects")
    expected = fields.text_map("expects")
    for key, value in expected.items():
        if not re.fullmatch(r"[0-9]+(\.[0-9]+)*", value):
            raise inner.error(key, f"{value!r} is not a version", 'for instance "6.1"')
    return expected


def parse_apt_source(fields: DefinitionFields) -> spec.AptSource:
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


def parse_user(name: str, parent: DefinitionFields, value: object) -> spec.User:
    fields = DefinitionFields(value, parent.file, {"uid", "gid", "home", "shell"}, f"users.{name}")
    uid = fields.number("uid")
    gid = fields.number("gid") if "gid" in fields else uid
    home, shell = fields.text("home", "/nonexistent"), fields.text("shell", "/usr/sbin/nologin")
    return spec.User(name, uid, gid, home, shell)


def parse_pin(name: str, parent: DefinitionFields, value: object) -> spec.Pin:
    fields = DefinitionFields(value, parent.file, {"version", "url", "sha256", "commit"}, f"pins.{name}")
    digest = fields.text("sha256")
    if digest != spec.UNFILLED and not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise fields.error("sha256", f"{digest!r} is not a SHA-256 checksum")
    commit = fields.text("commit", "")
    if commit and not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise fields.error("commit", f"{commit!r} is not a commit", "40 hexadecimal digits")
    return spec.Pin(name, fields.text("version"), fields.text("url"), digest, commit=commit)


def parse_cuda(name: object, parent: DefinitionFields, value: object) -> Cuda:
    fields = DefinitionFields(value, parent.file, {"driver", "wheels"}, f"cuda.{name}")
    # The name becomes a path of the image: /usr/local/cuda-NAME.
    if not isinstance(name, str) or not re.fullmatch(r"[0-9]+\.[0-9]+", name):
        raise fields.error("", f"{name!r} is not a toolkit's version", 'in quotes, for instance "13.0"')
    groups = parse_requirements(fields, "wheels", f"cuda.{name}.wheels")
    driver = fields.text("driver")
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)*", driver):
        raise fields.error("driver", f"{driver!r} is not a driver's version", 'for instance "580.65.06"')
    return Cuda(name, driver, groups)


def parse_requirements(fields: DefinitionFields, key: str, where: str) -> dict[str, tuple[str, ...]]:
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


# slurm.yaml


def parse_releases(data: object, file: str) -> dict[str, spec.SlurmRelease]:
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


def list_selectors(variants: Mapping[str, spec.Variant], slurm: Mapping[str, spec.SlurmRelease]) -> frozenset[str]:
    """Return every selector that a list may name, given the variants and the releases of Slurm."""
    sources = (f"slurm-{source.value}" for source in spec.SlurmSource)
    releases = (f"slurm-{release}" for release in slurm)
    return frozenset({"all", *variants, *architectures.KNOWN, *sources, *releases, *CUDA_SELECTORS})


# layers/NAME.yaml


def parse_layer(name: str, data: object, file: str, selectors: frozenset[str]) -> spec.Layer:
    fields = DefinitionFields(data, file, LAYER_KEYS)
    bootstrap = parse_bootstrap(fields)
    parent = fields.optional("from")
    if (bootstrap is None) == (parent is None):
        raise fields.error("from", "a layer has either `from` or `bootstrap`")

    def texts(key: str) -> spec.Selected[str]:
        return fields.read_selected_text(key, selectors)

    return spec.Layer(
        name=name,
        describe=fields.text("describe"),
        parent=parent,
        bootstrap=bootstrap,
        only=parse_only(fields, selectors),
        provides=texts("provides"),
        users=texts("users"),
        sources=texts("sources"),
        packages=texts("packages"),
        wheels=texts("wheels"),
        wheels_devel=texts("wheels_devel"),
        python=texts("python"),
        downloads=texts("downloads"),
        artifacts=fields.read_selected("artifacts", artifact_parser(file), selectors),
        files=fields.read_selected("files", file_entry_parser(file), selectors),
        component=texts("component"),
        run=fields.read_selected_text("run", selectors, line=True),
        verify=fields.read_selected_text("verify", selectors, line=True),
        remove=texts("remove"),
        env=fields.text_map("env"),
    )


def parse_bootstrap(fields: DefinitionFields) -> spec.Bootstrap | None:
    """Read `bootstrap`: the layer is a root made by mmdebstrap, which installs packages and does nothing else."""
    if "bootstrap" not in fields:
        return None
    for key in NOT_IN_BOOTSTRAP:
        if key in fields:
            raise fields.error(key, "a bootstrapped layer holds packages alone", "put it into the next layer")
    options = DefinitionFields(fields.data["bootstrap"], fields.file, {"dpkg_options"}, "bootstrap")
    return spec.Bootstrap(options.texts("dpkg_options"))


def parse_only(fields: DefinitionFields, selectors: frozenset[str]) -> spec.Selected[str] | None:
    """Read `only: [nvidia]`: the selectors of which one must hold, or else the build leaves the layer out."""
    if "only" not in fields:
        return None
    if isinstance(fields.data["only"], dict):
        return fields.read_selected_text("only", selectors)
    return spec.Selected(
        tuple((fields.parse_selector("only", text, selectors), (text,)) for text in fields.texts("only"))
    )


def artifact_parser(file: str) -> Callable[[str, object], spec.Artifact]:
    def parse_artifact(field: str, item: object) -> spec.Artifact:
        entry = DefinitionFields(item, file, {"layer", "from", "to"}, field)
        return spec.Artifact(entry.text("layer"), entry.text("from"), absolute_path(entry, "to"))

    return parse_artifact


def file_entry_parser(file: str) -> Callable[[str, object], spec.FileEntry]:
    def parse_entry(field: str, item: object) -> spec.FileEntry:
        entry = DefinitionFields(item, file, {"from", "to", "dir", "link", "mode", "owner"}, field)
        owner, mode = entry.text("owner", "root"), entry.mode("mode")
        if "dir" in entry:
            return spec.FileEntry(spec.EntryKind.DIRECTORY, absolute_path(entry, "dir"), mode=mode, owner=owner)
        if "link" in entry:
            return spec.FileEntry(spec.EntryKind.LINK, absolute_path(entry, "link"), entry.text("to"), owner=owner)
        return spec.FileEntry(spec.EntryKind.FILE, absolute_path(entry, "to"), entry.text("from"), mode, owner)

    return parse_entry


def absolute_path(entry: DefinitionFields, key: str) -> str:
    path = entry.text(key)
    if not path.startswith("/") or ".." in path.split("/"):
        raise entry.error(key, f"{path!r} is not an absolute path")
    if f"{path}/".startswith(LINKS_OF_THE_BASE):
        raise entry.error(key, f"{path!r} goes through a symbolic link of the base", "write /usr/bin, /usr/lib, /run")
    return path


# roles/NAME.yaml


def extend_roles(texts: Mapping[str, object], files: Mapping[str, str]) -> dict[str, object]:
    """Replace each role that has `extends: ROLE` by that role's keys under its own; `default` is not inherited."""
    extended: dict[str, object] = {}

    def extend(name: str, above: tuple[str, ...]) -> object:
        data = texts[name]
        if name in extended or not isinstance(data, dict) or "extends" not in data:
            return extended.setdefault(name, data)
        fields = DefinitionFields(data, files[name], ROLE_KEYS)
        base = fields.text("extends")
        if base not in texts:
            raise fields.error("extends", f"no role {base!r}", nearest(base, texts))
        if base in (*above, name):
            raise fields.error("extends", f"{name} would extend itself, by {' and '.join((*above, name))}")
        inherited = extend(base, (*above, name))
        if isinstance(inherited, dict):
            extended[name] = _extend_role({key: value for key, value in inherited.items() if key != "default"}, data)
        return extended.setdefault(name, data)

    return {name: extend(name, ()) for name in texts}


def _extend_role(base: Mapping[str, object], own: Mapping[str, object]) -> dict[str, object]:
    data = {**base, **own}
    for key in ROLE_LISTS:
        if key in base and key in own:
            data[key] = _join(base[key], own[key])
    if isinstance(base.get("env"), dict) and isinstance(own.get("env"), dict):
        data["env"] = {**base["env"], **own["env"]}  # type: ignore[dict-item]  # both are mappings
    return data


def _join(base: object, own: object) -> object:
    """Join two lists, or maps of selectors to lists; a value of another type is left for the reader to refuse."""
    if isinstance(base, list) and isinstance(own, list):
        return [*base, *own]
    if not isinstance(base, list | dict) or not isinstance(own, list | dict):
        return own
    lists = [data if isinstance(data, dict) else {"all": data} for data in (base, own)]
    return {key: _join(lists[0].get(key, []), lists[1].get(key, [])) for key in {**lists[0], **lists[1]}}


def parse_role(name: str, data: object, file: str, selectors: frozenset[str]) -> spec.Role:
    fields = DefinitionFields(data, file, ROLE_KEYS)
    ports = fields.items("ports")
    for index, port in enumerate(ports):
        if not isinstance(port, int) or not 0 < port < 65536:
            raise fields.error(f"ports[{index}]", f"{port!r} is not a port number")
    return spec.Role(
        name=name,
        describe=fields.text("describe"),
        layer=fields.text("layer"),
        services=fields.read_selected_text("services", selectors),
        required=fields.texts("required"),
        needs=fields.texts("needs"),
        ports=tuple(port for port in ports if isinstance(port, int)),
        capabilities=fields.texts("capabilities"),
        drain=fields.mapping("drain") or None,
        files=fields.read_selected("files", file_entry_parser(file), selectors),
        verify=fields.read_selected_text("verify", selectors, line=True),
        env=fields.text_map("env"),
        stop_signal=fields.text("stop_signal", "SIGTERM"),
        default=fields.flag("default", True),
        code=fields.flag("code", True),
        program=parse_program(fields),
        user=fields.text("user", ""),
    )


def parse_program(fields: DefinitionFields) -> str:
    """Read `program`, the only program of a pod: without PID 1 it has no services, drain or capabilities."""
    path = fields.text("program", "")
    for key in ("services", "required", "drain", "capabilities"):
        if path and key in fields:
            raise fields.error(key, f"{path} is the only program of its pod")
    return path
