"""What was built last on this machine: the inputs by name, so that `plan` can say which of them changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ground.files import write_whole


@dataclass(frozen=True, slots=True)
class Built:
    reference: str
    inputs: Mapping[str, str]


class State:
    """build/state/VARIANT.json. Losing it costs nothing but the reasons: presence is asked of the engine."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.built: dict[str, Built] = {}
        try:
            data = json.loads(path.read_text())
            self.built = {key: Built(value["reference"], value["inputs"]) for key, value in data.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            self.built = {}

    def inputs(self, key: str) -> Mapping[str, str] | None:
        found = self.built.get(key)
        return found.inputs if found else None

    def record(self, key: str, reference: str, inputs: Mapping[str, str]) -> None:
        self.built[key] = Built(reference, inputs)
        data = {name: {"reference": b.reference, "inputs": b.inputs} for name, b in sorted(self.built.items())}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, json.dumps(data, indent=1), 0o600)
