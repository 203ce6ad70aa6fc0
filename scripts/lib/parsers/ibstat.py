"""Parser of `ibstat`: one block per channel adapter, with one per port."""

from __future__ import annotations

import re
from dataclasses import dataclass

from health.api import Command, Unreadable

IBSTAT = Command("ibstat", ("ibstat",), deadline_s=10.0, evidence=True)

LAYERS = {"InfiniBand", "Ethernet", "IB", "Unspecified"}
_CA = re.compile(r"^CA '([\w.-]+)'$")
_PORT = re.compile(r"^\s*Port (\d+):$")
_VALUE = re.compile(r"^\s*([A-Za-z][\w ]*): (.*)$")


@dataclass(frozen=True, slots=True)
class Port:
    adapter: str
    kind: str
    firmware: str
    number: int
    state: str
    physical: str
    rate: int
    layer: str

    @property
    def label(self) -> str:
        return f"{self.adapter}/{self.number}"


def parse(text: str) -> tuple[Port, ...]:
    adapters: dict[str, tuple[dict[str, str], dict[int, dict[str, str]]]] = {}
    values: dict[str, str] | None = None
    ports: dict[int, dict[str, str]] = {}
    for line in text.splitlines():
        if not line.strip():
            continue
        adapter, port, value = _CA.match(line.strip()), _PORT.match(line), _VALUE.match(line)
        if adapter:
            values, ports = {}, {}
            adapters[adapter.group(1)] = (values, ports)
        elif port and adapters:
            values = ports.setdefault(int(port.group(1)), {})
        elif value and values is not None and value.group(1).strip() not in values:
            values[value.group(1).strip()] = value.group(2).strip()
        else:
            raise Unreadable(f"ibstat: {line.strip()[:80]!r}")
    if not adapters:
        raise Unreadable("ibstat: no adapter")
    parsed_ports = []
    for name, (facts, numbered) in adapters.items():
        if _need(facts, "Number of ports", name) != str(len(numbered)):
            raise Unreadable(f"ibstat: {name}: {facts.get('Number of ports')} ports announced, {len(numbered)} there")
        if not re.fullmatch(r"[\w.-]+", _need(facts, "CA type", name)):
            raise Unreadable(f"ibstat: {name}: type {facts['CA type']!r}")
        for number, data in numbered.items():
            label = f"{name}/{number}"
            if _need(data, "Link layer", label) not in LAYERS:
                raise Unreadable(f"ibstat: {label}: link layer {data['Link layer']!r}")
            rate = _need(data, "Rate", label).split()[0]
            if not rate.isdigit():
                raise Unreadable(f"ibstat: {label}: rate {rate!r}")
            parsed_ports.append(
                Port(
                    name,
                    _need(facts, "CA type", name),
                    _need(facts, "Firmware version", name),
                    number,
                    _need(data, "State", label),
                    _need(data, "Physical state", label),
                    int(rate),
                    _need(data, "Link layer", label),
                )
            )
    return tuple(parsed_ports)


def _need(data: dict[str, str], key: str, label: str) -> str:
    if not data.get(key):
        raise Unreadable(f"ibstat: {label} has no {key}")
    return data[key]
