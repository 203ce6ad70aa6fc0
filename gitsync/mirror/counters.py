"""What the mirror has done so far, for /metrics."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """What /metrics tells."""

    connections: int = 0
    open: int = 0
    open_peak: int = 0
    requests: int = 0
    gits: int = 0
    kept: int = 0
    bytes: int = 0
    errors: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, name: str, by: int = 1) -> None:
        with self.lock:
            setattr(self, name, getattr(self, name) + by)
            self.open_peak = max(self.open_peak, self.open)

    def text(self) -> str:
        names = ("connections", "open", "open_peak", "requests", "gits", "kept", "bytes", "errors")
        with self.lock:
            return "".join(f"minivm_gitsync_mirror_{name} {getattr(self, name)}\n" for name in names)
