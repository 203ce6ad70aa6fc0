"""Compose the images of a build from the definition and its lock: each with its Dockerfile, its files and its tag.

`Composer.compose` adds one image for each layer that the targets need, parents first, and then one for each role. The
tag ends with a hash of everything that decides an image's content, its parent's hash included. `PlannedImage.inputs`
keeps the digest of each part by its name, so that `build.py plan` can say what changed since the last build.

Composing reads the files that go into the images, and neither fetches nor builds: `fetch_files` fetches the pinned
files of an image that is built.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from ground.errors import nearest
from images import ImagesError, architectures
from images.archive import apt
from images.archive.bootstrap import CLEAN
from images.archive.fetch import fetch, file_name
from images.archive.lock import LockContext, layers_in_order
from images.archive.locked import RELOCK, Slice, find
from images.archive.wheels import Wheel
from images.definition.load import active_chain, capabilities
from images.definition.spec import (
    PACKAGED,
    AptSource,
    BuildChoice,
    EntryKind,
    Layer,
    Pin,
    Role,
    Selected,
    SlurmSource,
    Versions,
    own_directory,
)
from images.make import content, plan, toolkit
from images.make.content import Entry
from images.make.plan import LAYER, Composed, PlannedImage, Rendered, digest
from images.make.toolkit import ToolkitWheels

# A layer's files from outside, by checksum: pinned files, and the keys of the repositories that it enables.


def map_pins(place: LockContext) -> Mapping[str, Pin]:
    """Return the pins, each at the site's address if it gives one."""
    pins_by_name, settings = dict(place.definition.versions.pins), place.settings
    if settings.slurm_tarball:
        if not (settings.slurm_sha256 and settings.slurm_version):
            raise ImagesError("use the tarball", "slurm_sha256 and slurm_version must say what it is",
                              field="slurm_tarball")  # fmt: skip
        tarball = settings.slurm_version, settings.slurm_tarball, settings.slurm_sha256
        pins_by_name["slurm"] = Pin("slurm", *tarball, setting="slurm_tarball")
    for name, address in settings.source_map.items():
        sources = [pin.name for pin in pins_by_name.values() if pin.commit]
        if name not in sources:
            raise ImagesError("use the setting", f"no source {name!r}", field="sources", hint=nearest(name, sources))
        pins_by_name[name] = replace(pins_by_name[name], url=address, setting="sources")
    return pins_by_name


def list_enabled_sources(layer: Layer, place: LockContext) -> list[AptSource]:
    """Return the package repositories that a layer enables for itself and all above it."""
    vendor = apt.vendor_sources(place.variant)
    return [vendor[name] for name in layer.sources.of(place.choice) if name in vendor]


def fetch_files(image: PlannedImage, place: LockContext) -> list[Entry]:
    """Fetch and verify a layer's pinned files and keys; return them as files of the image."""
    if image.is_role:
        return []
    layer, entries = place.definition.layers[image.name], []
    available = map_pins(place)
    for name in layer.downloads.of(place.choice):
        pin = available[name]
        path = fetch(apt.resolve_archive_pin(pin, place.definition, place.settings), place.downloads, place.settings)
        entries.append(content.file(f"usr/src/minivm/{file_name(pin)}", path))
    for source in list_enabled_sources(layer, place):
        if not source.uri:
            text = apt.image_suite(source, place.variant)
            entries.append(content.file(f"etc/apt/sources.list.d/{source.name}.sources", text.encode()))
            continue
        key = apt.fetch_keyring(source, place.definition, place.settings, place.downloads)
        entries.append(content.file(apt.name_image_keyring(source, place.definition), key))
    return entries


# The images.

# Part of every hash. Raise it when a change of this code makes other bytes from the same definition.
FORMAT = 1
PACKAGE_LISTS = "usr/share/minivm/packages"
ReadYaml = Callable[[Path, str], object]


def find_slurm_version(place: LockContext, slices: Mapping[str, Slice]) -> str:
    """Return the version for a role's tag: the tarball's, or the lock's."""
    if place.choice.slurm is SlurmSource.SOURCE:
        if place.settings.slurm_version:
            return place.settings.slurm_version
        pin = place.definition.versions.pins.get("slurm")
        return pin.version if pin else "none"
    for slice_ in slices.values():
        package = find(slice_.packages, "slurm-client") or find(slice_.packages, "slurm-wlm-basic-plugins")
        if package:
            return package.version.partition(":")[2].partition("-")[0] or package.version.partition("-")[0]
    return "none"


class Composer:
    """Composes the images of one build, and holds what they share."""

    def __init__(
        self, place: LockContext, slices: Mapping[str, Slice], read: ReadYaml, rendered: Rendered | None = None
    ) -> None:
        self.place, self.slices = place, slices
        self.images: dict[str, PlannedImage] = {}
        self.templates = place.repository / "images/templates"
        self.rendered = rendered or Rendered(self.templates)
        self.versions = place.definition.versions
        self.pins = map_pins(place)
        # All roles have the same code and services, so read and hash each file once.
        self._tree, self._hash_entry, self._read = cache(content.list_tree), cache(self._name_and_digest), cache(read)
        self.slurm = find_slurm_version(place, slices)
        # Environment of the build steps, and the names that a layer's commands and paths may use.
        self._settings = tuple(sorted(architectures.SETTINGS[place.choice.arch].items()))
        self._names = {"multiarch": architectures.KNOWN[place.choice.arch].multiarch}

    def compose(self, targets: Iterable[str]) -> Composed:
        """Compose the images of these targets (roles, or layer:NAME) and of every layer that they need."""
        targets = list(targets)
        roles = [self._find_role(name) for name in targets if not name.startswith(LAYER)]
        layers = [name.removeprefix(LAYER) for name in targets if name.startswith(LAYER)]
        for layer, below in layers_in_order(self.place, [*layers, *(role.layer for role in roles)]):
            self._add_layer(layer, below)
        for role in roles:
            self._add_role(role)
        return Composed(self.images, self.slurm)

    def _find_role(self, name: str) -> Role:
        roles = self.place.definition.roles
        if name not in roles:
            raise ImagesError("find the role", f"no role {name!r}", hint=nearest(name, roles))
        return roles[name]

    def _find_slice(self, layer: str) -> Slice:
        """Return the locked packages of a layer."""
        if layer not in self.slices:
            file = self.place.shown(self.place.directory / f"{layer}.json")
            raise ImagesError("read the lock", "this layer was never resolved", file=file, hint=RELOCK)
        return self.slices[layer]

    def _add_layer(self, layer: Layer, below: tuple[str, ...]) -> None:
        """Add the image of a layer; `below` are the names of the layers under it, from the first on."""
        place, choice = self.place, self.place.choice
        base = "" if below else place.base
        parent = f"{LAYER}{below[-1]}" if below else ""
        is_bootstrapped = layer.bootstrap is not None and not base
        entries = self._list_layer_entries(layer, is_bootstrapped=is_bootstrapped, has_base=bool(base))
        inputs = self._enable_sources(layer, entries)
        cuda_wheels = toolkit.select_wheels(place, layer, [place.definition.layers[name] for name in below])
        libraries = toolkit.select_libraries(place, layer)
        inputs |= self._hash_fetched_files(layer, cuda_wheels, libraries)
        if is_bootstrapped:
            inputs |= self._hash_bootstrap(layer)
        below_reference = self.images[parent].reference if parent else base or "scratch"
        stacked = (*below, layer.name)
        image = PlannedImage(
            key=f"{LAYER}{layer.name}",
            name=layer.name,
            repo=f"{place.settings.prefix}/layer-{layer.name}",
            tag=choice.flavour,
            describe=layer.describe,
            parent=parent,
            base=base,
            step=self._describe_layer_step(layer, below_reference, entries, cuda_wheels, libraries),
            entries=tuple(entries),
            artifacts=tuple((artifact, f"{LAYER}{artifact.layer}") for artifact in layer.artifacts.of(choice)),
            slices=tuple(self._find_slice(name) for name in stacked),
            provides=tuple(item for name in stacked for item in place.definition.layers[name].provides.of(choice)),
            wheels=tuple(sorted({*(self.images[parent].wheels if parent else ()), *cuda_wheels.wheels, *libraries})),
            toolkit=cuda_wheels,
            libraries=libraries,
            dpkg_options=layer.bootstrap.dpkg_options if layer.bootstrap and is_bootstrapped else (),
        )
        self._add(image, inputs)

    def _hash_fetched_files(
        self, layer: Layer, cuda_wheels: ToolkitWheels, libraries: tuple[Wheel, ...]
    ) -> dict[str, str]:
        """Return the inputs that the build fetches by checksum: wheels and pinned files."""
        inputs = {**toolkit.inputs(cuda_wheels), **toolkit.library_inputs(libraries)}
        for name in layer.downloads.of(self.place.choice):
            inputs[f"download {name}"] = digest(self.pins[name].sha256 + self.pins[name].version)
        return inputs

    def _hash_bootstrap(self, layer: Layer) -> dict[str, str]:
        """Return the inputs of a root. mmdebstrap makes this image, so its Dockerfile is no input (see `_add`)."""
        dpkg_options = layer.bootstrap.dpkg_options if layer.bootstrap else ()
        return {
            "lock": digest(self._find_slice(layer.name).list_text()),
            "bootstrap": digest(f"{CLEAN}{self.versions.epoch}{self.place.variant.suite}"),
            "dpkg options": digest(json.dumps(dpkg_options)),
        }

    def _describe_layer_step(
        self, layer: Layer, base: str, entries: list[Entry], cuda_wheels: ToolkitWheels, libraries: tuple[Wheel, ...]
    ) -> plan.DockerfileContent:
        """Return the content of the layer's Dockerfile; `base` is the reference of the image below."""
        choice, shown = self.place.choice, layer.file
        commands = ["ldconfig"] if cuda_wheels.libraries else []
        commands += toolkit.compile_commands(libraries, self.place.variant.python)
        for name in layer.component.of(choice):
            commands += plan.render_component(name, self.templates, self._template_values(), shown)
        commands += self._fill(layer.run, shown)
        return plan.DockerfileContent(
            describe=f"{layer.name}: {layer.describe}",
            base=base,
            epoch=self.versions.epoch,
            files=bool(
                entries or layer.artifacts.of(choice) or layer.downloads.of(choice) or cuda_wheels.wheels or libraries
            ),
            settings=self._settings,
            users=tuple(self.versions.users[name] for name in layer.users.of(choice)),
            packages=f"/{name_package_list(layer)}" if self._find_slice(layer.name).packages else "",
            commands=tuple(plan.make_strict(command) for command in commands),
            remove=self._fill(layer.remove, shown),
            verify=tuple(plan.wrap_check(command) for command in self._fill(layer.verify, shown)),
            env=tuple(sorted(layer.env.items())),
        )

    def _list_layer_entries(self, layer: Layer, *, is_bootstrapped: bool, has_base: bool) -> list[Entry]:
        """List the layer's own files, its list of packages, and dpkg's options on a base that is not bootstrapped."""
        place, slice_ = self.place, self._find_slice(layer.name)
        entries = content.list_tree(own_directory(place.repository, layer.site) / "rootfs" / layer.name)
        entries += self._list_own_files(layer)
        if slice_.packages and not is_bootstrapped:
            entries.append(content.file(name_package_list(layer), slice_.list_text().encode()))
        if layer.bootstrap and has_base and layer.bootstrap.dpkg_options:
            text = "".join(f"{option}\n" for option in layer.bootstrap.dpkg_options)
            entries.append(content.file("etc/dpkg/dpkg.cfg.d/minivm", text.encode()))
        return entries

    def _list_own_files(self, owner: Layer | Role) -> list[Entry]:
        """List what the `files` of a layer or role add; a site's role inherits some of the repository's."""
        homes = [home for home in (owner.site, self.place.repository) if home]
        users = self.versions.users
        return [
            item
            for entry in owner.files.of(self.place.choice)
            for item in content.resolve(entry, homes, users, owner.file)
        ]

    def _enable_sources(self, layer: Layer, entries: list[Entry]) -> dict[str, str]:
        """Add the sources files of the repositories that this layer enables; return their inputs for the hash.

        The build fetches keys, and the address of the base's own archive, only when it builds the layer.
        """
        definition, inputs = self.place.definition, dict[str, str]()
        for source in list_enabled_sources(layer, self.place):
            if source.uri:
                text = apt.image_sources(source, definition)
                entries.append(content.file(f"etc/apt/sources.list.d/{source.name}.sources", text.encode()))
                inputs[f"key of {source.name}"] = digest(self.pins[source.key].sha256)
            else:
                inputs[f"suite of {source.name}"] = digest(repr(source))
            if source.pin is not None:
                text = apt.make_preferences(source)
                entries.append(content.file(f"etc/apt/preferences.d/{source.name}.pref", text.encode()))
        return inputs

    def _fill(self, texts: Selected[str], shown: str) -> tuple[str, ...]:
        """Return the texts of this build, with names such as `{{ multiarch }}` replaced."""
        return tuple(plan.fill_names(text, self._names, shown) for text in texts.of(self.place.choice))

    def _template_values(self) -> dict[str, object]:
        """Return the names that a component's template may use."""
        facts = self.place.definition.slurm.get(self.place.choice.release)
        pinned = {
            name: {"version": p.version, "url": p.url, "sha256": p.sha256, "file": f"/usr/src/minivm/{file_name(p)}"}
            for name, p in self.pins.items()
        }
        return {
            **self._names,
            "pins": pinned,
            "values": self.versions.values,
            "variant": self.place.choice.variant,
            "slurm": self.place.choice.slurm.value,
            "configure": " ".join(facts.configure) if facts else "",
            "python": self.place.variant.python,
            "epoch": self.versions.epoch,
            "jobs": "$(nproc)",
        }

    def _add_role(self, role: Role) -> None:
        """Add the image of a role: the last layer, with minivm's code, the role's services and its own files."""
        place = self.place
        layers = [layer.name for layer in active_chain(place.definition, role.layer, place.choice)]
        provided, absent = capabilities(place.definition, role, place.choice)
        parent = f"{LAYER}{layers[-1]}"
        entries = self._list_role_entries(role, tuple(sorted(provided)))
        sbom = (place.repository / "images/make/sbom.py").read_bytes()
        image = PlannedImage(
            key=f"role:{role.name}",
            name=role.name,
            repo=f"{place.settings.prefix}/{role.name}",
            tag=f"{self.slurm}-{place.choice.flavour}",
            describe=role.describe,
            parent=parent,
            step=self._describe_role_step(role, self.images[parent].reference),
            entries=tuple(entries),
            slices=tuple(self._find_slice(name) for name in layers),
            provides=tuple(sorted(provided)),
            wheels=self.images[parent].wheels,
            absent=absent,
        )
        # Capabilities and source are only on labels, so they are inputs: a label must not be out of date.
        labels = json.dumps([sorted(provided), dict(absent), self.versions.source], sort_keys=True)
        self._add(image, {"images/make/sbom.py": digest(sbom), "capabilities": digest(labels)})

    def _list_role_entries(self, role: Role, provided: tuple[str, ...]) -> list[Entry]:
        """List the role's own files, its code with what configures it, and its expectations of the machine."""
        place = self.place
        entries = self._list_own_files(role)
        if role.program:
            entries += content.list_program_entries(role.program, place.variant.python, place.repository, self._tree)
        elif role.code:
            compiled = content.compile_role(role, place.definition, place.choice, place.repository, self._read)
            slurm = content.serialise_slurm(place.definition, place.choice, self.slurm)
            entries += content.list_entries(compiled, slurm, place.variant.python, place.repository, self._tree)
        if role.code:
            entries.append(content.file(EXPECTS_PATH, serialise_expectations(self.versions, place.choice, provided)))
        return entries

    def _describe_role_step(self, role: Role, base: str) -> plan.DockerfileContent:
        """Return the content of the role's Dockerfile; `base` is the reference of its last layer."""
        place = self.place
        checks = [*content.list_checks(place.repository, role.program)] if role.code else []
        checks += self._fill(role.verify, role.file)
        return plan.DockerfileContent(
            describe=f"{role.name}: {role.describe}",
            base=base,
            epoch=self.versions.epoch,
            files=True,  # the SBOM, at least
            settings=self._settings,
            commands=content.list_commands() if role.code else (),
            verify=tuple(plan.wrap_check(command) for command in checks),
            env=tuple(sorted(role.env.items())),
            ports=role.ports,
            stop_signal=role.stop_signal,
            entrypoint=content.make_entrypoint(place.variant.python, role.program) if role.code else (),
            user=str(self.versions.users[role.user].uid) if role.user else "",
        )

    def _add(self, image: PlannedImage, own_inputs: Mapping[str, str]) -> None:
        """Complete the image's files, collect and hash its inputs, and add the image under the tag of that hash.

        `own_inputs`: inputs beside the files, the parent, the artifacts and the Dockerfile, which every image has.
        """
        parent, base = image.parent, image.base
        directories_below = self.images[parent].directories if parent else {}
        entries = tuple(content.complete(image.entries, directories_below))
        directories = {entry.path: entry for entry in entries if entry.kind is EntryKind.DIRECTORY}
        inputs = {"engine format": str(FORMAT), **own_inputs}
        inputs["base" if not parent else f"parent {parent}"] = self.images[parent].hash if parent else base
        for artifact, source_key in image.artifacts:
            inputs[f"artifact {source_key}{artifact.source} to {artifact.to}"] = self.images[source_key].hash
        inputs |= map(self._hash_entry, entries)
        if not image.is_bootstrapped:
            inputs["instructions"] = self.rendered.hash_instructions(image.step)
        total = digest(json.dumps(inputs, sort_keys=True))
        self.images[image.key] = replace(
            image,
            tag=f"{image.tag}-{total[:12]}",
            hash=total,
            entries=entries,
            inputs=inputs,
            directories={**directories_below, **directories},
        )

    def _name_and_digest(self, entry: Entry) -> tuple[str, str]:
        return self._input_name(entry), entry.digest()

    def _input_name(self, entry: Entry) -> str:
        """Name an input by its file in the repository, or else by its path in the image."""
        repository = f"{self.place.repository}/"
        if isinstance(entry.data, Path) and (name := str(entry.data)).startswith(repository):
            return f"{name.removeprefix(repository)} as /{entry.path}"
        if entry.path.startswith(f"{PACKAGE_LISTS}/"):
            return "lock"
        return f"/{entry.path}"


def name_package_list(layer: Layer) -> str:
    """Return the path of a layer's list of packages in the image."""
    return f"{PACKAGE_LISTS}/{layer.name}"


# Expectations of an image about its machine, as data in the image for `minivm drift`. Pure.

EXPECTS_PATH = "usr/share/minivm/expects.json"


def serialise_expectations(versions: Versions, choice: BuildChoice, provides: tuple[str, ...]) -> bytes:
    """Serialise the expectations. The oldest driver is known only for a CUDA that came as wheels."""
    variant = versions.variants[choice.variant]
    data: dict[str, object] = {"format": 1}
    if "kernel" in variant.expects:
        data["kernel"] = variant.expects["kernel"]
    if "rdma" in provides and "ofed" in variant.expects:
        data["ofed"] = variant.expects["ofed"]
    if "cuda" in provides and choice.cuda != PACKAGED:
        others = {name: cuda.driver for name, cuda in versions.cuda.items() if name != choice.cuda}
        data["cuda"] = {"name": choice.cuda, "driver": versions.cuda[choice.cuda].driver, "others": others}
    return (json.dumps(data, indent=2, sort_keys=True) + "\n").encode()
