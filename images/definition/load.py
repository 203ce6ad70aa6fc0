"""Read images/ from disk. The only importer of yaml in this package."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path

import yaml

from images.definition import parse
from images.definition.check import check
from images.definition.spec import Definition
from images.errors import ImagesError

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


def load(root: Path) -> Definition:
    """Load images/ under a repository root, parsed and checked as a whole."""
    images = root / "images"

    def shown(path: Path) -> str:
        return str(path.relative_to(root))

    versions_file = images / "versions.yaml"
    versions = parse.versions(read_yaml(versions_file, shown(versions_file)), shown(versions_file))
    # A definition that names no release of Slurm needs no facts of any.
    slurm_file = images / "slurm.yaml"
    slurm = parse.releases(read_yaml(slurm_file, shown(slurm_file)), shown(slurm_file)) if slurm_file.exists() else {}
    selectors = parse.selectors(versions.variants, slurm)
    layers = {
        path.stem: parse.layer(path.stem, read_yaml(path, shown(path)), shown(path), selectors)
        for path in sorted((images / "layers").glob("*.yaml"))
    }
    roles = {
        path.stem: parse.role(path.stem, read_yaml(path, shown(path)), shown(path), selectors)
        for path in sorted((images / "roles").glob("*.yaml"))
    }
    definition = Definition(layers, roles, versions, slurm)
    check(definition)
    return definition
