"""Runs inside a container, by its own Python: which shared libraries are needed by some ELF file and are nowhere.

A hundred times as quick as ldd over everything, which starts a process for each file.
"""

import json
import struct
from pathlib import Path


def needed(data: bytes) -> list[str]:
    """DT_NEEDED of a 64-bit little-endian ELF file."""
    offset, size, count = struct.unpack_from("<Q", data, 32)[0], *struct.unpack_from("<HH", data, 54)
    headers = [struct.unpack_from("<IIQQQQQQ", data, offset + i * size) for i in range(count)]
    loads: list[tuple[int, int, int]] = [
        (virtual, file, length) for kind, _, file, virtual, _, length, _, _ in headers if kind == 1
    ]

    def at(address: int) -> int:
        for virtual, file, length in loads:
            if virtual <= address < virtual + length:
                return file + address - virtual
        raise ValueError(address)

    for kind, _, file, _, _, length, _, _ in headers:
        if kind == 2:
            entries = [struct.unpack_from("<QQ", data, place) for place in range(file, file + length, 16)]
            strings = next((at(value) for tag, value in entries if tag == 5), 0)
            starts = [strings + value for tag, value in entries if tag == 1]
            return [data[start : data.index(b"\0", start)].decode() for start in starts]
    return []


def main() -> None:
    wanted: dict[str, str] = {}
    there: set[str] = set()
    checked = 0
    for top in ("/usr/bin", "/usr/sbin", "/usr/libexec", "/usr/lib", "/opt"):
        for path in Path(top).rglob("*"):
            if not path.is_file():
                continue
            there.add(path.name)
            if path.is_symlink() or path.suffix in (".o", ".a"):
                continue
            with path.open("rb") as file:
                head = file.read(64)
                if len(head) < 64 or head[:6] != b"\x7fELF\x02\x01" or head[16] not in (2, 3):
                    continue
                checked += 1
                for library in needed(head + file.read()):
                    wanted.setdefault(library, str(path))
    missing = sorted(f"{library} for {path}" for library, path in wanted.items() if library not in there)
    print(json.dumps([checked, missing]))


main()
