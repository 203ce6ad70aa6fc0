"""From the definition and its lock to images: each with its Dockerfile, its files and the hash that is its tag.

Pure but for reading the files that go in. The hash covers everything that decides an image's content; `inputs` keeps
each part by name, so that what changed can be told.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from images import architectures
from images.archive import apt
from images.archive.bootstrap import CLEAN
from images.archive.fetch import fetch, file_name
from images.archive.lock import LockContext, layers_in_order
from images.archive.locked import RELOCK, Slice, find
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
)
from images.errors import ImagesError, nearest
from images.make import content, plan, toolkit
from images.make.content import Entry
from images.make.plan import LAYER, Composed, PlannedImage, Rendered, digest


# A layer's inputs from outside, by checksum: pinned files, and the keys of the repositories that it enables.
def pins(place: LockContext) -> Mapping[str, Pin]:
    """Return the pins, each at the site's address if it gives one."""
    pins_found, settings = dict(place.definition.versions.pins), place.settings
    if settings.slurm_tarball:
        if not (settings.slurm_sha256 and settings.slurm_version):
            raise ImagesError("use the tarball", "slurm_sha256 and slurm_version must say what it is",
                              field="slurm_tarball")  # fmt: skip
        tarball = settings.slurm_version, settings.slurm_tarball, settings.slurm_sha256
        pins_found["slurm"] = Pin("slurm", *tarball, setting="slurm_tarball")
    for name, address in settings.source_map.items():
        sources = [pin.name for pin in pins_found.values() if pin.commit]
        if name not in sources:
            raise ImagesError("use the setting", f"no source {name!r}", field="sources", hint=nearest(name, sources))
        pins_found[name] = replace(pins_found[name], url=address, setting="sources")
    return pins_found


def switched(layer: Layer, place: LockContext) -> list[AptSource]:
    vendor = apt.vendor_sources(place.variant)
    return [vendor[name] for name in layer.sources.of(place.choice) if name in vendor]


def fetched(image: PlannedImage, place: LockContext) -> list[Entry]:
    """Fetch and verify a layer's pinned files and keys; a skipped build fetches nothing."""
    if image.is_role:
        return []
    layer, artifacts = place.definition.layers[image.name], []
    available = pins(place)
    for name in layer.downloads.of(place.choice):
        pin = available[name]
        path = fetch(apt.in_archive(pin, place.definition, place.settings), place.downloads, place.settings)
        artifacts.append(content.file(f"usr/src/minivm/{file_name(pin)}", path))
    for source in switched(layer, place):
        if not source.uri:
            text = apt.image_suite(source, place.variant)
            artifacts.append(content.file(f"etc/apt/sources.list.d/{source.name}.sources", text.encode()))
            continue
        key = apt.keyring(source, place.definition, place.settings, place.downloads)
        artifacts.append(content.file(apt.image_keyring(source, place.definition), key))
    return artifacts


# Part of every hash: raised when the engine itself starts to make other bytes of the same definition.
FORMAT = 1
ReadYaml = Callable[[Path, str], object]


def slurm_version(place: LockContext, slices: Mapping[str, Slice]) -> str:
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
    """Builds the images of one choice; holds what the layers share while it does."""

    def __init__(
        self, place: LockContext, slices: Mapping[str, Slice], read: ReadYaml, rendered: Rendered | None = None
    ) -> None:
        self.place, self.slices = place, slices
        self.images: dict[str, PlannedImage] = {}
        self.templates = place.repository / "images/templates"
        self.rendered = rendered or Rendered(self.templates)
        self.versions = place.definition.versions
        self.pins = pins(place)
        self.own = f"{place.repository}/"
        # The roles have the same code and services: looked at once.
        self.tree, self.input, self.read = cache(content.tree), cache(self.named), cache(read)
        self.slurm = slurm_version(place, slices)
        self.settings = tuple(sorted(architectures.SETTINGS[place.choice.arch].items()))
        self.names = {"multiarch": architectures.KNOWN[place.choice.arch].multiarch}

    def compose(self, roles: Iterable[str]) -> Composed:
        targets = list(roles)
        chosen = [self.known_role(name) for name in targets if not name.startswith(LAYER)]
        named = [name.removeprefix(LAYER) for name in targets if name.startswith(LAYER)]
        for layer, below in layers_in_order(self.place, [*named, *(role.layer for role in chosen)]):
            self.layer(layer, below)
        for role in chosen:
            self.role(role)
        return Composed(self.images, self.slurm)

    def known_role(self, name: str) -> Role:
        roles = self.place.definition.roles
        if name not in roles:
            raise ImagesError("find the role", f"no role {name!r}", hint=nearest(name, roles))
        return roles[name]

    def slice(self, layer: str) -> Slice:
        if layer not in self.slices:
            file = self.place.directory.relative_to(self.place.repository) / f"{layer}.json"
            raise ImagesError("read the lock", "this layer was never resolved", file=file, hint=RELOCK)
        return self.slices[layer]

    def layer(self, layer: Layer, below: tuple[str, ...]) -> None:
        choice, shown = self.place.choice, f"images/layers/{layer.name}.yaml"
        slice_ = self.slice(layer.name)
        base = self.place.base if not below else ""
        parent = f"layer:{below[-1]}" if below else ""
        entries = content.tree(self.place.repository / "images/rootfs" / layer.name)
        for entry in layer.files.of(choice):
            entries += content.resolve(entry, self.place.repository, self.versions.users, shown)
        list_path = f"usr/share/minivm/packages/{layer.name}"
        bootstrapped = layer.bootstrap is not None and not base
        if slice_.packages and not bootstrapped:
            entries.append(content.file(list_path, slice_.list_text().encode()))
        if layer.bootstrap and base and layer.bootstrap.dpkg_options:
            text = "".join(f"{option}\n" for option in layer.bootstrap.dpkg_options)
            entries.append(content.file("etc/dpkg/dpkg.cfg.d/minivm", text.encode()))
        extra = self.sources(layer, entries)
        wheels = toolkit.wanted_wheels(self.place, layer, [self.place.definition.layers[name] for name in below])
        python = toolkit.wanted_libraries(self.place, layer)
        extra |= toolkit.inputs(wheels)
        extra |= toolkit.library_inputs(python)
        for name in layer.downloads.of(choice):
            extra[f"download {name}"] = digest(self.pins[name].sha256 + self.pins[name].version)
        commands = ["ldconfig"] if wheels.libraries else []
        commands += toolkit.compile_commands(python, self.place.variant.python)
        for name in layer.component.of(choice):
            commands += plan.component(name, self.templates, self.values(), shown)
        commands += self.filled(layer.run, shown)
        step = plan.DockerfileContent(
            describe=f"{layer.name}: {layer.describe}",
            base=self.images[parent].reference if parent else base or "scratch",
            epoch=self.versions.epoch,
            files=bool(entries or layer.artifacts.of(choice) or layer.downloads.of(choice) or wheels.wheels or python),
            settings=self.settings,
            users=tuple(self.versions.users[name] for name in layer.users.of(choice)),
            packages=f"/{list_path}" if slice_.packages else "",
            commands=tuple(plan.strict(command) for command in commands),
            remove=self.filled(layer.remove, shown),
            verify=tuple(plan.verified(command) for command in self.filled(layer.verify, shown)),
            env=tuple(sorted(layer.env.items())),
        )
        artifacts = tuple((artifact, f"layer:{artifact.layer}") for artifact in layer.artifacts.of(choice))
        if bootstrapped:
            extra["lock"] = digest(slice_.list_text())
            extra["bootstrap"] = digest(f"{CLEAN}{self.versions.epoch}{self.place.variant.suite}")
            extra["dpkg options"] = digest(json.dumps(layer.bootstrap.dpkg_options if layer.bootstrap else ()))
        provides = tuple(name for n in (*below, layer.name)
                         for name in self.place.definition.layers[n].provides.of(choice))  # fmt: skip
        image = PlannedImage(
            key=f"layer:{layer.name}",
            name=layer.name,
            repo=f"{self.place.settings.prefix}/layer-{layer.name}",
            tag=choice.flavour,
            describe=layer.describe,
            parent=parent,
            base=base,
            step=step,
            entries=tuple(entries),
            artifacts=artifacts,
            slices=tuple(self.slice(name) for name in (*below, layer.name)),
            provides=provides,
            wheels=tuple(sorted({*(self.images[parent].wheels if parent else ()), *wheels.wheels, *python})),
            toolkit=wheels,
            libraries=python,
            dpkg_options=layer.bootstrap.dpkg_options if bootstrapped and layer.bootstrap else (),
        )
        self.add(image, extra)

    def sources(self, layer: Layer, entries: list[Entry]) -> dict[str, str]:
        """Add the sources files of the repositories that this layer enables; return their inputs for the hash.

        The build fetches keys, and the address of the base's own archive, only when it builds the layer.
        """
        definition, extra = self.place.definition, dict[str, str]()
        for source in switched(layer, self.place):
            if source.uri:
                text = apt.image_sources(source, definition)
                entries.append(content.file(f"etc/apt/sources.list.d/{source.name}.sources", text.encode()))
                extra[f"key of {source.name}"] = digest(self.pins[source.key].sha256)
            else:
                extra[f"suite of {source.name}"] = digest(repr(source))
            if source.pin is not None:
                text = apt.preferences(source)
                entries.append(content.file(f"etc/apt/preferences.d/{source.name}.pref", text.encode()))
        return extra

    def filled(self, texts: Selected[str], shown: str) -> tuple[str, ...]:
        return tuple(plan.filled(text, self.names, shown) for text in texts.of(self.place.choice))

    def values(self) -> dict[str, object]:
        """Return the names that a component's template may use."""
        facts = self.place.definition.slurm.get(self.place.choice.release)
        pinned = {
            name: {"version": p.version, "url": p.url, "sha256": p.sha256, "file": f"/usr/src/minivm/{file_name(p)}"}
            for name, p in self.pins.items()
        }
        return {
            **self.names,
            "pins": pinned,
            "values": self.versions.values,
            "variant": self.place.choice.variant,
            "slurm": self.place.choice.slurm.value,
            "configure": " ".join(facts.configure) if facts else "",
            "python": self.place.variant.python,
            "epoch": self.versions.epoch,
            "jobs": "$(nproc)",
        }

    def role(self, role: Role) -> None:
        place, shown = self.place, f"images/roles/{role.name}.yaml"
        layers = [layer.name for layer in active_chain(place.definition, role.layer, place.choice)]
        provided, absent = capabilities(place.definition, role, place.choice)
        entries = content.tree(place.repository / "images/rootfs" / f"role-{role.name}")
        for entry in role.files.of(place.choice):
            entries += content.resolve(entry, place.repository, self.versions.users, shown)
        verify, commands = list(self.filled(role.verify, shown)), list[str]()
        if role.program:
            entries += content.program(role.program, place.variant.python, place.repository, self.tree)
        elif role.code:
            compiled = content.plan_json(role, place.definition, place.choice, place.repository, self.read)
            slurm = content.slurm_json(place.definition, place.choice, self.slurm)
            entries += content.entries(compiled, slurm, place.variant.python, place.repository, self.tree)
        if role.code:
            expected = expects(self.versions, place.choice, tuple(sorted(provided)))
            entries.append(content.file(EXPECTS_PATH, expected))
            commands += content.commands()
            verify = [*content.verify(place.repository, role.program), *verify]
        parent = f"layer:{layers[-1]}"
        step = plan.DockerfileContent(
            describe=f"{role.name}: {role.describe}",
            base=self.images[parent].reference,
            epoch=self.versions.epoch,
            files=True,  # the SBOM, at least
            settings=self.settings,
            commands=tuple(commands),
            verify=tuple(plan.verified(command) for command in verify),
            env=tuple(sorted(role.env.items())),
            ports=role.ports,
            stop_signal=role.stop_signal,
            entrypoint=content.entrypoint(place.variant.python, role.program) if role.code else (),
            user=str(self.versions.users[role.user].uid) if role.user else "",
        )
        sbom = (place.repository / "images/make/sbom.py").read_bytes()
        image = PlannedImage(
            key=f"role:{role.name}",
            name=role.name,
            repo=f"{place.settings.prefix}/{role.name}",
            tag=f"{self.slurm}-{place.choice.flavour}",
            describe=role.describe,
            parent=parent,
            step=step,
            entries=tuple(entries),
            slices=tuple(self.slice(name) for name in layers),
            provides=tuple(sorted(provided)),
            wheels=self.images[parent].wheels,
            absent=absent,
        )
        # Capabilities are on labels alone, and a label must not outlive what it says.
        labels = json.dumps([sorted(provided), dict(absent), self.versions.source], sort_keys=True)
        self.add(image, {"images/make/sbom.py": digest(sbom), "capabilities": digest(labels)})

    def add(self, image: PlannedImage, extra: Mapping[str, str]) -> None:
        """Name the inputs, hash them, complete the image's files and tag by them, and keep it."""
        parent, base = image.parent, image.base
        below = self.images[parent].directories if parent else {}
        completed = tuple(content.complete(image.entries, below))
        directories = {**below, **{e.path: e for e in completed if e.kind is EntryKind.DIRECTORY}}
        inputs = {"engine format": str(FORMAT), **extra}
        inputs["base" if not parent else f"parent {parent}"] = self.images[parent].hash if parent else base
        for artifact, other in image.artifacts:
            inputs[f"artifact {other}{artifact.source} to {artifact.to}"] = self.images[other].hash
        inputs |= map(self.input, completed)
        if parent or base:
            inputs["instructions"] = self.rendered.instructions(image.step)
        total = digest(json.dumps(inputs, sort_keys=True))
        self.images[image.key] = replace(image, tag=f"{image.tag}-{total[:12]}", hash=total, entries=completed,
                                         inputs=inputs, directories=directories)  # fmt: skip

    def named(self, entry: Entry) -> tuple[str, str]:
        return self.label(entry), entry.digest()

    def label(self, entry: Entry) -> str:
        """Name an input by its file in the repository, or else by its place in the image."""
        if isinstance(entry.data, Path) and (name := str(entry.data)).startswith(self.own):
            return f"{name.removeprefix(self.own)} as /{entry.path}"
        if entry.path.startswith("usr/share/minivm/packages/"):
            return "lock"
        return f"/{entry.path}"


# Expectations of an image about its machine, as data in the image for `minivm drift`. Pure.
EXPECTS_PATH = "usr/share/minivm/expects.json"


def expects(versions: Versions, choice: BuildChoice, provides: tuple[str, ...]) -> bytes:
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
