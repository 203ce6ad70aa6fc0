"""The lab's volumes: a directory that every node sees, made for each claim of the class, taken away with its claim.

`python -m tests.kubernetes.volumes KEYS`. The controller manager's own makes directories that only root may enter.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

from tests.kubernetes.api import ERRORS, Api, Object

CLASS = "lab"
PROVISIONER = "minivm.io/lab"
ROOT = Path("/tmp/hostpath_pv")
VOLUMES = "/api/v1/persistentvolumes"


def volume(claim: Object) -> Object:
    meta, spec = claim["metadata"], claim["spec"]
    name = f"pvc-{meta['uid']}"
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "accessModes": spec["accessModes"],
            "capacity": spec["resources"]["requests"],
            "storageClassName": CLASS,
            "persistentVolumeReclaimPolicy": "Delete",
            "hostPath": {"path": str(ROOT / name), "type": "Directory"},
            "claimRef": {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "namespace": meta["namespace"],
                "name": meta["name"],
                "uid": meta["uid"],
            },
        },
    }


def waiting(claim: Object) -> bool:
    spec = claim["spec"]
    return spec.get("storageClassName") == CLASS and not spec.get("volumeName")


def turn(api: Api) -> None:
    there = {item["metadata"]["name"]: item for item in api.items(VOLUMES)}
    for claim in api.items("/api/v1/persistentvolumeclaims"):
        wanted = volume(claim)
        name = wanted["metadata"]["name"]
        if waiting(claim) and name not in there:
            (ROOT / name).mkdir(mode=0o755, exist_ok=True)
            api.call(VOLUMES, method="POST", body=wanted)
    for name, item in there.items():
        # Kubernetes says Failed of a volume whose class has a provisioner that it does not know.
        gone = item.get("status", {}).get("phase") in ("Released", "Failed")
        if gone and item["spec"].get("storageClassName") == CLASS:
            shutil.rmtree(ROOT / name, ignore_errors=True)
            api.call(f"{VOLUMES}/{name}", method="DELETE")


def main(keys: str) -> None:
    api = Api(keys)
    while True:
        try:
            turn(api)
        except ERRORS as error:
            print(error, flush=True)
        time.sleep(0.5)


if __name__ == "__main__":
    main(sys.argv[1])
