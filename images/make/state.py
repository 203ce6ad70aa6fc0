"""What was built last on this machine: the inputs by name, so that `plan` can say which of them changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ground.files import write_whole


class State:
    """build/state/VARIANT.json. Losing it costs nothing but the reasons: presence is asked of the engine."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.built: dict[str, Mapping[str, str]] = {}
        try:
            self.built = {key: value["inputs"] for key, value in json.loads(path.read_text()).items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            self.built = {}

    def inputs(self, key: str) -> Mapping[str, str] | None:
        return self.built.get(key)

    def record(self, key: str, inputs: Mapping[str, str]) -> None:
        self.built[key] = inputs
        data = {name: {"inputs": inputs} for name, inputs in sorted(self.built.items())}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, json.dumps(data, indent=1), 0o600)
