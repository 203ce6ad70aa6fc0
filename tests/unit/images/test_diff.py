"""Diffs of images: the contents of a saved archive layer by layer, and the differences between two images."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from images import ImagesError
from images.engine.store import Chunks
from images.ship.diff import Contents, PathKind, as_data, compare, format_report, format_size, read

STATUS = "var/lib/dpkg/status"


@dataclass(frozen=True, slots=True)
class Node:
    """Member of a layer that a test writes."""

    path: str
    data: bytes = b""
    mode: int = 0o644
    uid: int = 0
    kind: bytes = tarfile.REGTYPE
    target: str = ""
    mtime: int = 0


def tar_of(nodes: Sequence[Node]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for node in nodes:
            info = tarfile.TarInfo(node.path)
            info.type, info.mode, info.uid, info.mtime = node.kind, node.mode, node.uid, node.mtime
            info.linkname = node.target
            info.size = len(node.data)
            archive.addfile(info, io.BytesIO(node.data))
    return buffer.getvalue()


def configuration(layers: Sequence[bytes]) -> bytes:
    return json.dumps(
        {
            "rootfs": {
                "type": "layers",
                "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers],
            },
            "history": [
                *({"created_by": f"/bin/sh -c step {number}"} for number in range(len(layers))),
                {"created_by": "CMD x", "empty_layer": True},
            ],
        }
    ).encode()


def classic(layers: Sequence[bytes]) -> bytes:
    """Return an archive as engines up to version 24 save it; a repeated layer is a link to the first."""
    config = configuration(layers)
    config_path = f"{hashlib.sha256(config).hexdigest()}.json"
    nodes = [Node(config_path, config)]
    paths: list[str] = []
    for number, layer in enumerate(layers):
        first = layers.index(layer)
        paths.append(f"{number}/layer.tar")
        nodes.append(Node(f"{number}/VERSION", b"1.0"))
        if first == number:
            nodes.append(Node(paths[-1], layer))
        else:
            nodes.append(Node(paths[-1], kind=tarfile.SYMTYPE, target=f"../{first}/layer.tar"))
    nodes.append(Node("manifest.json", json.dumps([{"Config": config_path, "Layers": paths}]).encode()))
    return tar_of(nodes)


def oci(layers: Sequence[bytes]) -> bytes:
    """Return an archive as newer engines save it, with compressed blobs."""
    config = configuration(layers)
    blobs = [config, *(gzip.compress(layer, mtime=0) for layer in layers)]
    paths = [f"blobs/sha256/{hashlib.sha256(blob).hexdigest()}" for blob in blobs]
    manifest = [{"Config": paths[0], "Layers": paths[1:]}]
    nodes = [Node(path, blob) for path, blob in zip(paths, blobs, strict=True)]
    return tar_of([*nodes, Node("index.json", b"{}"), Node("manifest.json", json.dumps(manifest).encode())])


def image(*layers: Sequence[Node], form: Callable[[Sequence[bytes]], bytes] = classic, name: str = "a") -> Contents:
    return read(io.BytesIO(form([tar_of(nodes) for nodes in layers])), name)


def status(**packages: str) -> Node:
    text = "".join(
        f"Package: {name}\nStatus: install ok installed\nArchitecture: amd64\n"
        f"Version: {version}\nDescription: x\n y: z\n\n"
        for name, version in packages.items()
    )
    return Node(STATUS, text.encode())


BASE = [
    Node("etc", mode=0o755, kind=tarfile.DIRTYPE),
    Node("etc/passwd", b"root:x:0:0\n"),
    Node("etc/motd", b"hello\n"),
]


@pytest.mark.parametrize("form", [classic, oci])
def test_both_forms_of_the_stream_give_the_same_contents(form: Callable[[Sequence[bytes]], bytes]) -> None:
    contents = image(BASE, [Node("etc/motd", b"bye\n", 0o600, 7), status(munge="0.5")], BASE, form=form)
    assert contents.entries["etc/motd"].content == hashlib.sha256(b"hello\n").hexdigest()
    assert contents.entries["etc"].kind is PathKind.DIRECTORY
    assert contents.packages == {"munge:amd64": "0.5"}
    assert [layer.created_by for layer in contents.layers] == [f"/bin/sh -c step {number}" for number in range(3)]
    assert contents.layers[0].size == 17
    assert contents.layers[0].digest == contents.layers[2].digest


def test_the_stream_may_come_in_pieces_of_any_length() -> None:
    data = classic([tar_of(BASE)])
    pieces = (data[start : start + 777] for start in range(0, len(data), 777))
    assert read(Chunks(pieces), "a") == read(io.BytesIO(data), "a")


def test_a_whiteout_hides_what_is_below_it_and_not_its_own_layer() -> None:
    contents = image(
        [*BASE, Node("opt/x/old", b"1"), Node("opt/x/sub/old", b"1"), Node("opt/xy", b"1")],
        [Node("etc/.wh.motd"), Node("opt/x/.wh..wh..opq"), Node("opt/x/new", b"2")],
    )
    assert sorted(contents.entries) == ["etc", "etc/passwd", "opt/x/new", "opt/xy"]
    assert contents.layers[1].files == 1


def test_a_file_in_the_place_of_a_directory_hides_the_directory() -> None:
    contents = image([Node("d", kind=tarfile.DIRTYPE), Node("d/f", b"1")], [Node("d", b"now a file")])
    assert sorted(contents.entries) == ["d"]


def test_a_removed_package_whose_configuration_stayed_is_not_installed() -> None:
    text = "Package: a\nStatus: deinstall ok config-files\nArchitecture: all\nVersion: 1\n\n"
    assert image([Node(STATUS, text.encode())]).packages == {}


@pytest.mark.parametrize("cut", [0, 100, 2000, 9000])
def test_a_stream_that_breaks_off_is_an_error_with_the_images_name(cut: int) -> None:
    data = classic([tar_of([Node("f", b"x" * 20_000)])])
    with pytest.raises(ImagesError, match="cannot read image minivm/worker"):
        read(io.BytesIO(data[:cut]), "minivm/worker")


def test_identical_images_differ_in_nothing() -> None:
    difference = compare(image(BASE), image(BASE, name="b"))
    assert difference.same
    assert (difference.packages, difference.files, difference.only_a, difference.only_b) == ((), (), (), ())
    assert list(format_report(difference))[-1] == "the same image"


def test_packages_files_and_layers_that_differ() -> None:
    a = image(BASE, [status(munge="0.5.15", vim="9"), Node("usr/bin/vim", b"v" * 3000, 0o755)])
    b = image(
        BASE,
        [status(munge="0.5.16", git="2"), Node("usr/bin/git", b"g" * 5000, 0o755), Node("etc/motd", b"hello\n", 0o600)],
        name="b",
    )
    difference = compare(a, b)
    assert [(item.name, item.before, item.after) for item in difference.packages] == [
        ("git:amd64", "", "2"),
        ("munge:amd64", "0.5.15", "0.5.16"),
        ("vim:amd64", "9", ""),
    ]
    assert {item.path: item.what for item in difference.files} == {
        "etc/motd": ("mode",),
        "usr/bin/git": ("added",),
        "usr/bin/vim": ("removed",),
        STATUS: ("content",),
    }
    assert [layer.size for layer in difference.shared] == [17]
    assert len(difference.only_a) == len(difference.only_b) == 1
    text = "\n".join(format_report(difference))
    assert "~ munge:amd64  0.5.15 -> 0.5.16" in text
    assert "+ /usr/bin/git  +5.0 kB" in text
    assert "- /usr/bin/vim  -3.0 kB" in text
    assert "~ /etc/motd  +0 B  (mode)" in text
    assert "only in b: 5.2 kB" in text


def test_a_file_that_only_got_a_new_time_does_not_differ() -> None:
    later = [Node(node.path, node.data, node.mode, kind=node.kind, mtime=99) for node in BASE]
    difference = compare(image(BASE), image(later, name="b"))
    assert difference.files == ()
    assert not difference.same  # the digests of the layers still differ, and the diff reports this
    assert len(difference.only_b) == 1


def test_a_link_that_points_elsewhere_differs() -> None:
    sides = [image([Node("bin/sh", kind=tarfile.SYMTYPE, target=target)], name=target) for target in ("dash", "bash")]
    assert [item.what for item in compare(*sides).files] == [("content",)]


def test_the_list_of_files_is_cut_and_says_so() -> None:
    many = [Node(f"f{number:03}", b"x" * number) for number in range(50)]
    text = list(format_report(compare(image(BASE), image(BASE, many, name="b")), limit=3))
    assert [line.split()[1] for line in text if line.startswith("  + /")] == ["/f049", "/f048", "/f047"]
    assert "  and 47 more; --json lists all" in text


def test_the_data_for_machines_is_json_and_complete() -> None:
    many = [Node(f"f{number:03}", b"x" * number) for number in range(50)]
    data = json.loads(json.dumps(as_data(compare(image(BASE), image(BASE, many, name="b")))))
    assert len(data["files"]) == 50
    assert data["files"][3]["after"]["size"] == 3
    assert data["b"]["size"] - data["a"]["size"] == sum(range(50))


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (420_000_000, "420.0 MB"), (5_900_000_000, "5.9 GB")],
)
def test_sizes_are_printed_in_decimal_units(size: int, text: str) -> None:
    assert format_size(size) == text
