"""Runs by a container's own Python: Slurm's own loader reports which plug-ins it takes, and what the others lack.

No library has a daemon's own symbols: only that daemon takes a plug-in that needs them.
"""

import ctypes
import json
import os
from pathlib import Path

(SLURM,) = Path("/usr/lib").glob("*/slurm*/libslurmfull.so")


def main() -> None:
    slurm = ctypes.CDLL(str(SLURM), mode=os.RTLD_GLOBAL | os.RTLD_LAZY)
    for library in Path("/usr/lib").glob("*/libnvidia-ml.so.1"):
        ctypes.CDLL(str(library), mode=os.RTLD_GLOBAL | os.RTLD_LAZY)
    told = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p)
    slurm.plugrack_create.restype = ctypes.c_void_p
    slurm.plugrack_create.argtypes = [ctypes.c_char_p]
    slurm.plugrack_read_dir.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    slurm.plugrack_foreach.argtypes = [ctypes.c_void_p, told, ctypes.c_void_p]
    taken: dict[str, str] = {}

    def one(kind: bytes, path: bytes, *_: object) -> None:
        taken[Path(path.decode()).name] = kind.decode()

    rack = slurm.plugrack_create(None)
    slurm.plugrack_read_dir(rack, str(SLURM.parent).encode())
    slurm.plugrack_foreach(rack, told(one), None)
    left = {}
    for path in sorted(SLURM.parent.glob("*.so")):
        if path.name in taken or path.name.startswith("libslurm"):
            continue
        try:
            ctypes.CDLL(str(path), mode=os.RTLD_LAZY)
            left[path.name] = "it loads, and Slurm does not take it"
        except OSError as error:
            left[path.name] = str(error).rpartition(": ")[2] if "undefined symbol" in str(error) else f"broken: {error}"
    print(json.dumps([taken, left]))


main()
