"""What containerd calls runc for the RuntimeClass `cgroup-writable`: runc, with the container's own cgroups writable.

`writable.py RUNC WORD...`. Newer ones have an option for it (`cgroup_writable`); the archive's mounts them read-only
whatever it is told, so the bundle is changed between the two.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def writable(text: str) -> str:
    spec = json.loads(text)
    for mount in spec["mounts"]:
        if mount["type"] == "cgroup":
            mount["options"] = ["rw" if option == "ro" else option for option in mount["options"]]
    # A runtime with all rights gives a kubelet's score for good: a job's processes have the same as their slurmstepd.
    # One without, as the lab's, leaves them free to lower theirs, and slurmstepd would be the first to go.
    spec["process"].pop("oomScoreAdj", None)
    return json.dumps(spec)


def main(runc: str, *words: str) -> None:
    if "create" in words:
        config = Path(words[words.index("--bundle") + 1]) / "config.json"
        config.write_text(writable(config.read_text()))
    os.execv(runc, (runc, *words))


if __name__ == "__main__":
    main(*sys.argv[1:])
