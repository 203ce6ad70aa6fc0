"""Kubernetes objects from files that kubectl wrote: bounded, without aliases, and each field by its path."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster import ClusterError
from ground.errors import one_line
from images.definition.load import Loader, UniqueLoader

WHAT = "plan the migration"
# A cluster of a hundred node sets takes 1 MiB.
LARGEST = 16 << 20
DEEPEST = 64
MOST_FILES = 1000
# Names that Kubernetes takes. They become file names and arguments of the commands that the report prints.
NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
STANDARD_INPUT = "-"

Fields = tuple[str, ...]  # keys and list positions from the object to a field


@dataclass(frozen=True, slots=True, eq=False)
class Object:
    """An object of the old cluster, and the file that holds it."""

    file: str
    kind: str
    namespace: str
    name: str
    data: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.kind.partition('.')[0]} {self.namespace}/{self.name}"


def show_path(path: Fields) -> str:
    """Return the path as kubectl's jsonpath has it: `spec.tolerations[0].key`."""
    text = ""
    for part in path:
        if part.isdigit() or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", part):
            text += f"[{one_line(part)}]"
        else:
            text += f".{part}" if text else part
    return text


def walk_leaves(value: Any, path: Fields = ()) -> Iterator[tuple[Fields, Any]]:
    """Yield each scalar and each empty container below `value`, with its path."""
    if isinstance(value, Mapping) and value:
        for key, below in value.items():
            yield from walk_leaves(below, (*path, str(key)))
    elif isinstance(value, list) and value:
        for index, below in enumerate(value):
            yield from walk_leaves(below, (*path, str(index)))
    else:
        yield path, value


def read(sources: Iterable[str]) -> list[Object]:
    """Read every object of the files, directories and `-` (standard input); one object may not come twice."""
    objects: list[Object] = []
    owners: dict[tuple[str, str, str], str] = {}
    for file, text in read_texts(sources):
        for item in parse_documents(file, text):
            key = (item.kind, item.namespace, item.name)
            if key in owners:
                problem = f"found {item} twice, also in {owners[key]}; expected each object once"
                raise ClusterError(WHAT, problem, file=file, field="metadata.name", hint="leave one of the two out")
            owners[key] = file
            objects.append(item)
    if not objects:
        raise ClusterError(WHAT, "the files hold no objects", hint="kubectl get KINDS -o yaml > FILE writes them")
    return objects


def read_texts(sources: Iterable[str]) -> Iterator[tuple[str, str]]:
    files: list[Path | None] = []
    for source in sources:
        path = Path(source)
        if source == STANDARD_INPUT:
            files.append(None)
        elif path.is_dir():
            files += sorted(file for file in path.iterdir() if file.suffix in (".yaml", ".yml", ".json"))
        else:
            files.append(path)
    if len(files) > MOST_FILES:
        raise ClusterError(WHAT, f"found {len(files)} files, expected at most {MOST_FILES}", hint="name fewer files")
    for file in files:
        name = str(file) if file else "standard input"
        try:
            if file is not None and not file.is_file():
                why = "it is no plain file" if file.exists() else "there is no such file"
                raise ClusterError(WHAT, why, file=name)
            with file.open("rb") if file else open(0, "rb", closefd=False) as stream:
                content = stream.read(LARGEST + 1)
            if len(content) > LARGEST:
                problem = f"the file has more than {LARGEST >> 20} MiB"
                raise ClusterError(WHAT, problem, file=name, hint="give only the objects of the operator")
            yield name, content.decode()
        except OSError as error:
            raise ClusterError(WHAT, error.strerror or str(error), file=name) from error
        except UnicodeDecodeError as error:
            raise ClusterError(WHAT, "the file is not UTF-8 text", file=name) from error


def parse_documents(file: str, text: str) -> Iterator[Object]:
    """Yield the objects of one file: documents, and the items of lists."""
    check_depth(file, text)
    try:
        loaded = [item for item in yaml.load_all(text, Loader=UniqueLoader) if item is not None]
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise yaml_error(file, error) from error
    for number, item in enumerate(loaded):
        place = f"document {number + 1}"
        mapping = expect_mapping(file, place, item)
        if mapping.get("kind") == "List" or "items" in mapping:
            items = mapping.get("items") or []
            if not isinstance(items, list):
                raise field_error(file, f"{place}: items", items, "a list", "write it again with kubectl get -o yaml")
            for index, below in enumerate(items):
                at = f"{place}: items[{index}]"
                yield parse(file, at, expect_mapping(file, at, below))
        else:
            yield parse(file, place, mapping)


def check_depth(file: str, text: str) -> None:
    """Refuse aliases, which expand without limit, and deep nesting, before anything is built of the text."""
    depth = 0
    try:
        for event in yaml.parse(text, Loader=Loader):
            if isinstance(event, yaml.AliasEvent):
                problem = f"found the alias *{event.anchor}, expected text without aliases"
                raise ClusterError(
                    WHAT, problem, file=file, field=describe_line(event), hint="kubectl get -o yaml writes none"
                )
            if isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
                depth += 1
            elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
                depth -= 1
            if depth > DEEPEST:
                problem = f"found more than {DEEPEST} levels of nesting; no Kubernetes object has them"
                raise ClusterError(WHAT, problem, file=file, field=describe_line(event))
    except yaml.YAMLError as error:
        raise yaml_error(file, error) from error


def describe_line(event: yaml.Event) -> str:
    return f"line {event.start_mark.line + 1}" if event.start_mark else "the text"


def yaml_error(file: str, error: Exception) -> ClusterError:
    mark = getattr(error, "problem_mark", None)
    reason = getattr(error, "problem", None) or type(error).__name__
    place = f"line {mark.line + 1}" if mark else None
    return ClusterError(WHAT, f"not YAML: {reason}", file=file, field=place, hint="kubectl get KINDS -o yaml > FILE")


def field_error(file: str, field: str, found: Any, expected: str, hint: str) -> ClusterError:
    """Return the error about a field, with what was found and what was expected; no text of the field is shown."""
    text = {"dict": "a mapping", "list": "a list", "NoneType": "nothing"}.get(type(found).__name__, "")
    problem = f"found {text or type(found).__name__}, expected {expected}"
    return ClusterError(WHAT, problem, file=file, field=field, hint=hint)


def expect_mapping(file: str, place: str, item: Any) -> Mapping[str, Any]:
    if not isinstance(item, Mapping):
        raise field_error(file, place, item, "an object with apiVersion and kind", "kubectl get KINDS -o yaml > FILE")
    return item


def parse(file: str, place: str, data: Mapping[str, Any]) -> Object:
    """Return the object; names are checked, and the rest is read field by field later."""
    kind, api = data.get("kind"), data.get("apiVersion")
    if not isinstance(kind, str) or not isinstance(api, str):
        hint = "values of a Helm chart are no objects: `helm get manifest RELEASE > FILE` writes what they make"
        raise ClusterError(WHAT, "found no apiVersion and kind, expected an object", file=file, field=place, hint=hint)
    metadata = data.get("metadata")
    if not isinstance(metadata, Mapping):
        raise field_error(file, f"{place}: metadata", metadata, "a mapping with a name", "write it again with kubectl")
    name, namespace = metadata.get("name"), metadata.get("namespace", "default")
    for field, text in (("name", name), ("namespace", namespace)):
        if not isinstance(text, str) or not NAME.fullmatch(text):
            problem = f"found {one_line(repr(text))[:60]}, expected a name that Kubernetes takes"
            raise ClusterError(WHAT, problem, file=file, field=f"{place}: metadata.{field}", hint="correct the name")
    check_keys(file, f"{kind} {name}", data)
    return Object(file, f"{kind}.{api.partition('/')[0]}" if "/" in api else kind, str(namespace), str(name), data)


def check_keys(file: str, place: str, value: Any) -> None:
    """Refuse keys that are no text (`yes:`, `1:`), which two fields could share."""
    if isinstance(value, Mapping):
        for key, below in value.items():
            if not isinstance(key, str):
                raise field_error(
                    file, f"{place}: {one_line(repr(key))[:60]}", key, "a key that is text", "quote the key"
                )
            check_keys(file, place, below)
    elif isinstance(value, list):
        for below in value:
            check_keys(file, place, below)
