"""Prometheus text format, in the subset that OpenMetrics shares. Pure."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def labels(**pairs: str) -> str:
    return "{" + ",".join(f'{name}="{escape(value)}"' for name, value in pairs.items()) + "}" if pairs else ""


def family(name: str, about: str, samples: Iterable[tuple[Mapping[str, str], str]], kind: str = "gauge") -> list[str]:
    lines = [f"{name}{labels(**pairs)} {value}" for pairs, value in samples]
    return [f"# HELP {name} {about}", f"# TYPE {name} {kind}", *lines]
