"""Two images of the engine, compared by their own streams."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator, Mapping

import pytest

from images.engine.docker import DockerEngine
from images.engine.store import Chunks
from images.ship.diff import Contents, compare, format_report, read
from tests.container import definition

pytestmark = [pytest.mark.docker]

STATUS = "Package: munge\nStatus: install ok installed\nArchitecture: amd64\nVersion: {}\n\n"


@pytest.fixture
def engine() -> Iterator[DockerEngine]:
    engine = DockerEngine("classic")
    yield engine
    engine.client.close()


def contents(engine: DockerEngine, name: str, files: Mapping[str, str]) -> Contents:
    """Make, read and remove an image of one layer with these files."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for path, text in files.items():
            info = tarfile.TarInfo(path)
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    data.seek(0)
    reference = f"{definition.PREFIX}-diff:{name}"
    engine.tag(engine.import_root(data), reference)
    try:
        return read(Chunks(engine.save(reference)), name)
    finally:
        engine.remove(reference)


def test_what_differs_between_two_images_of_the_engine(engine: DockerEngine) -> None:
    before = contents(engine, "a", {"var/lib/dpkg/status": STATUS.format("0.5.15"), "etc/motd": "hello\n", "old": "x"})
    after = contents(engine, "b", {"var/lib/dpkg/status": STATUS.format("0.5.16"), "etc/motd": "hello\n", "new": "xyz"})
    difference = compare(before, after)
    assert [(item.name, item.before, item.after) for item in difference.packages] == [
        ("munge:amd64", "0.5.15", "0.5.16")
    ]
    assert [(item.path, item.growth) for item in difference.files] == [
        ("new", 3),
        ("old", -1),
        ("var/lib/dpkg/status", 0),
    ]
    assert before.size == len(STATUS.format("0.5.15")) + 7
    assert not difference.same


def test_the_same_layers_under_another_image_differ_in_nothing_but_the_id(engine: DockerEngine) -> None:
    """Imported twice: the configuration holds another time, the layer is the same."""
    first, second = (contents(engine, name, {"etc/motd": "hello\n"}) for name in ("a", "b"))
    difference = compare(first, second)
    assert (difference.files, difference.only_a, difference.only_b) == ((), (), ())
    assert [layer.digest for layer in difference.shared] == [layer.digest for layer in first.layers]
    assert any("1 shared" in line for line in format_report(difference))
