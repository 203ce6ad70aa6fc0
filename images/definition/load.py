"""Read the image definition under images/ from disk, check it as a whole, and answer questions about a build's layers.

`load` returns the `Definition`: versions.yaml, slurm.yaml, and every file of layers/ and roles/, parsed by `parse.py`.
`choose_build` turns a variant and the requested Slurm into a `BuildChoice`; `active_chain` and `capabilities` say which
layers that build stacks for a role, and what its image provides. This is the package's only importer of yaml.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import yaml

from ground.errors import nearest
from images import ImagesError
from images.definition import parse
from images.definition.spec import (
    PACKAGED,
    BuildChoice,
    Definition,
    Layer,
    Role,
    SlurmSource,
    Variant,
    definition_file,
)


def load(root: Path, site: Path | None = None) -> Definition:
    """Load images/ under a repository root, and a site's own layers and roles, parsed and checked as a whole."""
    if site and not any((site / folder).is_dir() for folder in ("layers", "roles")):
        raise ImagesError("read a site's layers", "found neither layers/ nor roles/ in it", file=site, field="layers",
                          hint="name a directory that holds layers/NAME.yaml and roles/NAME.yaml")  # fmt: skip
    images = root / "images"
    versions = parse.parse_versions(read_yaml(images / "versions.yaml", "images/versions.yaml"), "images/versions.yaml")
    # A definition that names no release of Slurm needs no facts of any.
    slurm_file = images / "slurm.yaml"
    slurm = (
        parse.parse_releases(read_yaml(slurm_file, "images/slurm.yaml"), "images/slurm.yaml")
        if slurm_file.exists()
        else {}
    )
    selectors = parse.list_selectors(versions.variants, slurm)
    layers = {
        name: replace(parse.parse_layer(name, data, definition_file("layers", name, home), selectors), site=home)
        for name, (data, home) in _read_all(images, site, "layers").items()
    }
    files = _read_all(images, site, "roles")
    shown = {name: definition_file("roles", name, home) for name, (_, home) in files.items()}
    extended = parse.extend_roles({name: data for name, (data, _) in files.items()}, shown)
    roles = {
        name: replace(parse.parse_role(name, data, shown[name], selectors), site=files[name][1])
        for name, data in extended.items()
    }
    definition = Definition(layers, roles, versions, slurm)
    check(definition)
    return definition


def _read_all(images: Path, site: Path | None, kind: str) -> dict[str, tuple[object, Path | None]]:
    """Read every file of layers/ or roles/: name -> its data, and the site's directory if it is the site's."""
    read: dict[str, tuple[object, Path | None]] = {}
    for home in (None, site) if site else (None,):
        for path in sorted(((home or images) / kind).glob("*.yaml")):
            file = definition_file(kind, path.stem, home)
            if path.stem in read:
                raise ImagesError("read a site's layers", f"images/{kind}/{path.name} has this name already",
                                  file=file, hint="rename the site's file")  # fmt: skip
            read[path.stem] = (read_yaml(path, file), home)
    return read


# Strict YAML.

# libyaml is ten times quicker, and a no-op build is mostly this.
Loader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class UniqueLoader(Loader):  # type: ignore[misc, valid-type]  # the C loader is only known at run time
    """YAML loader that refuses a repeated key, where YAML would let the later one win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        keys: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=deep)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(None, None, "a key is one word", key_node.start_mark)
            if key in keys:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is given twice", key_node.start_mark)
            keys.add(key)
        mapping: dict[object, object] = super().construct_mapping(node, deep=deep)
        return mapping


def read_yaml(path: Path, shown: str, what: str = "read the definition") -> object:
    try:
        text = path.read_text()
    except OSError as error:
        raise ImagesError(what, error.strerror or str(error), file=shown) from error
    except UnicodeDecodeError as error:
        raise ImagesError(what, "not UTF-8 text", file=shown) from error
    try:
        data: object = yaml.load(text, Loader=UniqueLoader)
        return data
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}" if mark else None
        reason = getattr(error, "problem", None) or str(error)
        raise ImagesError(what, f"not YAML: {reason}", file=shown, field=line) from error


# The choice of a build.


def choose_build(definition: Definition, variant_name: str, slurm: str = "", tarball_version: str = "") -> BuildChoice:
    """Choose a variant's Slurm: `package`, `source`, a packaged release, or "" for the variant's default.

    `tarball_version` is the version of a site's own tarball, which a build from source uses in place of the pin.
    """
    variant = definition.versions.variants[variant_name]
    if slurm == SlurmSource.SOURCE.value or (not slurm and variant.slurm is SlurmSource.SOURCE):
        pin = definition.versions.pins.get("slurm")
        version = tarball_version or (pin.version if pin else "")
        return BuildChoice(variant.name, SlurmSource.SOURCE, variant.cuda, nearest_release(definition, version))
    if slurm in ("", SlurmSource.PACKAGE.value):
        default = variant.releases[0] if variant.releases else ""
        return BuildChoice(variant.name, SlurmSource.PACKAGE, variant.cuda, default)
    if slurm not in variant.releases:
        raise ImagesError("use the setting", f"variant {variant_name!r} has no packages of Slurm {slurm}",
                          field="slurm",
                          hint=f"{', '.join(variant.releases) or 'none'}; or source, with a tarball")  # fmt: skip
    return BuildChoice(variant.name, SlurmSource.PACKAGE, variant.cuda, slurm)


def nearest_release(definition: Definition, version: str) -> str:
    """Return the release whose facts apply to a tarball: its own, or the newest known one before it."""
    release = ".".join(version.split(".")[:2])
    older = [name for name in definition.slurm if name <= release]
    if definition.slurm and not older:
        raise ImagesError("use the tarball", f"Slurm {version or 'of no version'} is older than all that is known",
                          file="images/slurm.yaml", hint=f"from {min(definition.slurm)} on")  # fmt: skip
    return max(older, default="")


# Layers and capabilities.


def chain(layers: Mapping[str, Layer], name: str) -> tuple[Layer, ...]:
    """Return all layers from the first to `name`, for any variant."""
    visited: list[str] = []
    current: str | None = name
    child = ""
    while current is not None:
        file = f"images/layers/{child}.yaml" if child else None
        if current in visited:
            circle = [*visited[visited.index(current) :], current]
            raise ImagesError("order the layers", f"a cycle: {' -> '.join(circle)}", file=file, field="from")
        if current not in layers:
            raise ImagesError("find the layer", f"no layer {current!r}", file=file, field="from",
                              hint=nearest(current, layers))  # fmt: skip
        visited.append(current)
        child, current = current, layers[current].parent
    return tuple(layers[name] for name in reversed(visited))


def needs(layers: Mapping[str, Layer], name: str, path: tuple[str, ...] = ()) -> frozenset[str]:
    """Return every layer that `name` needs, below it or for artifacts, itself included."""
    if name in path:
        raise ImagesError("order the layers", f"a cycle: {' -> '.join((*path, name))}")
    needed = {name}
    for layer in chain(layers, name):
        needed.add(layer.name)
        for artifact in layer.artifacts.everything():
            if artifact.layer in layers and artifact.layer not in needed:
                needed |= needs(layers, artifact.layer, (*path, name))
    return frozenset(needed)


def active_chain(definition: Definition, name: str, choice: BuildChoice) -> tuple[Layer, ...]:
    """Return the layers that this build stacks: those whose `only` holds."""
    return tuple(layer for layer in chain(definition.layers, name) if layer.only is None or layer.only.of(choice))


def capabilities(definition: Definition, role: Role, choice: BuildChoice) -> tuple[frozenset[str], Mapping[str, str]]:
    """Return what a role's image provides, and what the variant declares absent of its needs, with the reason."""
    variant = definition.versions.variants[choice.variant]
    stacked = active_chain(definition, role.layer, choice)
    provided = frozenset(name for layer in stacked for name in layer.provides.of(choice))
    declared = {**variant.absent}
    if choice.slurm is SlurmSource.PACKAGE and choice.release:
        declared |= definition.slurm[choice.release].absent
    absent: dict[str, str] = {}
    for name in role.needs:
        if name in provided:
            continue
        if name not in declared:
            raise missing_capability_error(definition, role, name, variant, choice)
        absent[name] = declared[name]
    return provided, absent


def missing_capability_error(
    definition: Definition, role: Role, name: str, variant: Variant, choice: BuildChoice
) -> ImagesError:
    file = role.file
    everywhere = map_providers(definition.layers.values())
    if name not in everywhere and not any(name in v.absent for v in definition.versions.variants.values()):
        hint = nearest(name, everywhere)
        return ImagesError("use the role", f"no variant has the capability {name!r}", file=file, field="needs",
                           hint=hint)  # fmt: skip
    return ImagesError(
        "use the role",
        f"variant {variant.name!r} neither provides {name!r} in the layers of {role.layer!r} nor declares it absent",
        file=file,
        field="needs",
        hint=f"provided by: {', '.join(everywhere.get(name, ['no layer']))}; or say why in versions.yaml,"
        f" variants.{variant.name}.absent",
    )


def map_providers(layers: Iterable[Layer]) -> dict[str, list[str]]:
    providers: dict[str, list[str]] = {}
    for layer in layers:
        for name in layer.provides.everything():
            providers.setdefault(name, []).append(layer.name)
    return providers


# Checks across the whole definition: missing layers, cycles, capabilities that no variant has.


def check(definition: Definition) -> None:
    """Check every reference of the definition in every variant; raise the first error."""
    layers = definition.layers
    for layer in layers.values():
        chain(layers, layer.name)
        check_layer(definition, layer)
    for variant in definition.versions.variants.values():
        for source in variant.sources:
            if source.key:
                require_pin(definition, source.key, f"variants.{variant.name}.sources")
        for release in variant.releases:
            require_release(definition, release, f"variants.{variant.name}.releases")
        require_cuda(definition, variant.cuda, f"variants.{variant.name}.cuda")
    for role in definition.roles.values():
        file = role.file
        refuse_unknown("use the role", "layer", role.layer, layers, file)
        users = {name for layer in chain(layers, role.layer) for name in layer.users.everything()}
        if role.user and role.user not in users:
            raise ImagesError("use the role", f"no user {role.user!r} in its layers", file=file, field="user",
                              hint=nearest(role.user, users))  # fmt: skip
        for variant in definition.versions.variants.values():
            for release in variant.releases or ("",):
                capabilities(definition, role, BuildChoice(variant.name, variant.slurm, variant.cuda, release))


def refuse_unknown(what: str, kind: str, name: str, names: Iterable[str], file: str, field: str | None = None) -> None:
    """Refuse a name that is not among the known ones, and suggest the nearest."""
    names = set(names)
    if name not in names:
        raise ImagesError(what, f"no {kind} {name!r}", file=file, field=field, hint=nearest(name, names))


def check_layer(definition: Definition, layer: Layer) -> None:
    file, versions, what = layer.file, definition.versions, "use the layer"
    for artifact in layer.artifacts.everything():
        refuse_unknown(what, "layer", artifact.layer, definition.layers, file, "artifacts")
        if layer.name in needs(definition.layers, artifact.layer):
            problem = f"{layer.name} takes an artifact of {artifact.layer}, which is built on it: a cycle"
            raise ImagesError("order the layers", problem, file=file, field="artifacts")
    for name in layer.downloads.everything():
        require_pin(definition, name, f"{file}: downloads")
    for name in layer.users.everything():
        refuse_unknown(what, "user", name, versions.users, file, "users")
    groups = {group for cuda in versions.cuda.values() for group in cuda.wheels}
    for name in (*layer.wheels.everything(), *layer.wheels_devel.everything()):
        refuse_unknown(what, "CUDA has wheels", name, groups, file, "wheels")
    for name in layer.python.everything():
        refuse_unknown(what, "libraries", name, versions.python.wheels, file, "python")
    repositories = {source.name for variant in versions.variants.values() for source in variant.sources}
    for name in layer.sources.everything():
        refuse_unknown(what, "repository", name, repositories, file, "sources")


def require_cuda(definition: Definition, name: str, field: str) -> None:
    refuse_unknown("use the CUDA", "CUDA", name, {PACKAGED, *definition.versions.cuda}, "images/versions.yaml", field)


def require_pin(definition: Definition, name: str, field: str) -> None:
    refuse_unknown("use the pin", "pin", name, definition.versions.pins, "images/versions.yaml", field)


def require_release(definition: Definition, name: str, field: str) -> None:
    if name not in definition.slurm:
        raise ImagesError("use the release of Slurm", f"no facts of {name!r}", file="images/slurm.yaml", field=field,
                          hint=f"known: {', '.join(definition.slurm)}")  # fmt: skip
