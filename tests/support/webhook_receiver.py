"""A receiver of the fleet's webhooks."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from fleet.decide.actions import CallHook
from fleet.policy import Webhook
from fleet.world.machine import MachineObject, MachineStatus

SICK = 'gpu_lost[reboot]@9f2c001 fell off\r\nX-Evil: yes "quoted" \N{SNOWMAN}'
OK = b"HTTP/1.1 204 No Content\r\n\r\n"
Answers = Callable[[socket.socket], object]


def says(answer: bytes) -> Answers:
    return lambda way: way.sendall(answer)


TAKES = says(OK)


@dataclass
class Receiver:
    """Reads a whole request, then does with the connection what it is told to."""

    answers: Answers = TAKES
    context: ssl.SSLContext | None = None
    asked: list[tuple[str, dict[str, str], dict[str, str]]] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while not self.ended.is_set():
            try:
                way, _ = self.socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(way,), daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        with plain:
            try:
                way = self.context.wrap_socket(plain, server_side=True) if self.context else plain
                with way:
                    file = way.makefile("rb")
                    if not (first := file.readline().decode().strip()):
                        return
                    headers = dict(line.decode().strip().split(": ", 1) for line in iter(file.readline, b"\r\n"))
                    self.asked.append((first, headers, json.loads(file.read(int(headers["Content-Length"])))))
                    self.answers(way)
            except OSError:
                pass  # it has heard enough


def call(url: str, token: str = "", ca: str = "", number: int = 1) -> CallHook:
    machine = MachineObject("gpu-17-7c6cc41e", "uid-17", "9", status=MachineStatus(verdict=SICK))
    hook = Webhook(url, token, ca)
    return CallHook(
        f"gpu-17-{number}", "gpu-17", machine, "reboot", SICK, hook, "h100", f"uid-17/{number}", MachineStatus()
    )
