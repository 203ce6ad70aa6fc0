"""Expectations of an image about its machine, as data in the image for `minivm drift`. Pure."""

from __future__ import annotations

import json

from images.definition.spec import PACKAGED, BuildChoice, Versions

PATH = "usr/share/minivm/expects.json"


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
