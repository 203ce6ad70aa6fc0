"""supervisorctl's XML-RPC over a unix socket, answered from PID 1's control socket. A small service of its own.

`supervisorctl status/start/stop/restart/tail/signal/shutdown/update` act on the same services as `minivm`.
"""

from __future__ import annotations

import os
import socketserver
import sys
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from xmlrpc.client import Fault, dumps, loads

from init.errors import InitError
from init.fields import number as in_digits
from init.pod.client import SOCKET, Client
from init.view.status import ServiceView

# Convert a service to supervisor's XML-RPC: states, faults, the reply of getProcessInfo. Pure.
# supervisor.xmlrpc.Faults and supervisor.states.ProcessStates, as the protocol numbers them.
UNKNOWN_METHOD, BAD_ARGUMENTS, BAD_NAME, BAD_SIGNAL, FAILED = 1, 3, 10, 11, 30
ABNORMAL_TERMINATION, ALREADY_STARTED, NOT_RUNNING, SUCCESS = 40, 60, 70, 80
STATES = {
    "waiting": (10, "STARTING"),
    "preparing": (10, "STARTING"),
    "starting": (10, "STARTING"),
    "ready": (20, "RUNNING"),
    "reloading": (20, "RUNNING"),
    "failing": (20, "RUNNING"),
    "handover": (20, "RUNNING"),
    "backoff": (30, "BACKOFF"),
    "stopping": (40, "STOPPING"),
    "stopped": (0, "STOPPED"),
    "done": (100, "EXITED"),
    "failed": (200, "FATAL"),
}


def process_info(view: ServiceView, now: float) -> dict[str, Any]:
    """Return one service as getProcessInfo does."""
    number, name = STATES.get(view.state, (1000, "UNKNOWN"))
    return {
        "name": view.name,
        "group": view.name,
        "start": int(now - view.uptime) if view.pid else 0,
        "stop": 0 if view.pid else int(now - view.since),
        "now": int(now),
        "state": number,
        "statename": name,
        "spawnerr": "; ".join(view.reasons) if view.state == "failed" else "",
        "exitstatus": 0,
        "logfile": "",
        "stdout_logfile": "",
        "stderr_logfile": "",
        "pid": view.pid,
        "description": describe(view),
    }


def describe(view: ServiceView) -> str:
    if view.pid:
        seconds = int(view.uptime)
        clock = f"{seconds // 3600 % 24}:{seconds // 60 % 60:02}:{seconds % 60:02}"
        days = seconds // 86400
        uptime = f"{days} days, {clock}" if days > 1 else f"1 day, {clock}" if days else clock
        return f"pid {view.pid}, uptime {uptime}"
    return "; ".join(view.reasons) or view.last_exit or view.state


LISTEN = Path("/run/minivm/supervisor.sock")
API_VERSION = "3.0"

STARTED = ("starting", "ready", "reloading", "handover", "waiting", "preparing")
LINES = 500


class Interface:
    """The methods of `supervisor.`, by name; each call is one short connection to PID 1."""

    def __init__(self, control: Path = SOCKET) -> None:
        self.control = control
        self.methods: dict[str, Callable[..., Any]] = {
            "supervisor.getVersion": lambda: API_VERSION,
            "supervisor.getAPIVersion": lambda: API_VERSION,
            "supervisor.getSupervisorVersion": lambda: "4.2.5-minivm",
            "supervisor.getIdentification": lambda: "minivm",
            "supervisor.getState": lambda: {"statecode": 1, "statename": "RUNNING"},
            "supervisor.getPID": lambda: 1,
            "supervisor.getAllProcessInfo": self.all_info,
            "supervisor.getProcessInfo": lambda name: self._info(self._view(name)),
            "supervisor.startProcess": self.start,
            "supervisor.stopProcess": self.stop,
            "supervisor.signalProcess": self.signal,
            "supervisor.startProcessGroup": lambda name, wait=True: [self._result(self.start, name, wait)],
            "supervisor.stopProcessGroup": lambda name, wait=True: [self._result(self.stop, name, wait)],
            "supervisor.signalProcessGroup": lambda name, number: [self._result(self.signal, name, number)],
            "supervisor.startAllProcesses": self.start_all,
            "supervisor.stopAllProcesses": self.stop_all,
            "supervisor.signalAllProcesses": self.signal_all,
            "supervisor.readProcessStdoutLog": self.read,
            "supervisor.readProcessStderrLog": self.read,
            "supervisor.tailProcessStdoutLog": self.tail,
            "supervisor.tailProcessStderrLog": self.tail,
            "supervisor.reloadConfig": self.reload_config,
            "supervisor.shutdown": self.shutdown,
            "system.listMethods": lambda: sorted(self.methods),
            "system.multicall": self.multicall,
        }

    def call(self, name: str, arguments: Sequence[Any]) -> Any:
        method = self.methods.get(name)
        if method is None:
            raise Fault(UNKNOWN_METHOD, "UNKNOWN_METHOD")
        try:
            return method(*arguments)
        except TypeError as error:
            raise Fault(BAD_ARGUMENTS, f"INCORRECT_PARAMETERS: {error}") from error
        except InitError as error:
            raise Fault(FAILED, f"FAILED: {error}") from error

    def all_info(self) -> list[dict[str, Any]]:
        with Client(self.control) as client:
            return [self._info(view) for view in client.snapshot().services if view.kind != "gate"]

    def start(self, name: str, wait: bool = True) -> bool:
        view = self._view(name)
        if view.state in STARTED:
            raise Fault(ALREADY_STARTED, f"ALREADY_STARTED: {view.name}")
        reply = self._act("start", view.name, wait)
        if wait and reply.get("state") in ("failed", "backoff"):
            raise Fault(ABNORMAL_TERMINATION, f"ABNORMAL_TERMINATION: {'; '.join(reply.get('reasons', []))}")
        return True

    def stop(self, name: str, wait: bool = True) -> bool:
        view = self._view(name)
        if view.state in ("stopped", "done", "failed"):
            raise Fault(NOT_RUNNING, f"NOT_RUNNING: {view.name}")
        self._act("stop", view.name, wait)
        return True

    def signal(self, name: str, number: str | int) -> bool:
        import signal

        view = self._view(name)
        try:
            text = str(number).upper().removeprefix("SIG")
            chosen = signal.Signals[f"SIG{text}"] if (known := in_digits(text)) is None else signal.Signals(known)
        except (KeyError, ValueError):
            raise Fault(BAD_SIGNAL, f"BAD_SIGNAL: {number}") from None
        if not view.pid:
            raise Fault(NOT_RUNNING, f"NOT_RUNNING: {view.name}")
        with Client(self.control) as client:
            client.request("signal", service=view.name, signal=chosen.name.removeprefix("SIG"))
        return True

    def start_all(self, wait: bool = True) -> list[dict[str, Any]]:
        names = [view.name for view in self._views() if view.state not in (*STARTED, "done")]
        return [self._result(self.start, name, wait) for name in names]

    def stop_all(self, wait: bool = True) -> list[dict[str, Any]]:
        """Stop all in reverse order, except this bridge, which could not report the result."""
        names = [view.name for view in reversed(self._views()) if view.pid and view.name != "supervisor"]
        return [self._result(self.stop, name, wait) for name in names]

    def signal_all(self, number: str | int) -> list[dict[str, Any]]:
        return [self._result(self.signal, view.name, number) for view in self._views() if view.pid]

    def read(self, name: str, offset: int, length: int) -> str:
        """Read the log; both channels are one stream here.

        A negative offset counts from the end, as supervisorctl's tail does.
        """
        data = self._log(name)
        if offset < 0:
            return data[offset:].decode(errors="replace")
        return data[offset : offset + length if length else None].decode(errors="replace")

    def tail(self, name: str, offset: int, length: int) -> list[Any]:
        data = self._log(name)
        return [data[-length:].decode(errors="replace"), len(data), False]

    def reload_config(self) -> list[Any]:
        """Apply the drop-ins; supervisorctl's `update` then finds nothing left to do."""
        from init.helpers.configwatch import apply_dropins

        change = apply_dropins(self.control)
        return [[change["added"], change["changed"], change["removed"]]]

    def shutdown(self) -> bool:
        with Client(self.control) as client:
            client.request("shutdown")
        return True

    def multicall(self, calls: Sequence[dict[str, Any]]) -> list[Any]:
        results: list[Any] = []
        for item in calls:
            try:
                results.append(self.call(item["methodName"], item.get("params", [])))
            except Fault as fault:
                results.append({"faultCode": fault.faultCode, "faultString": fault.faultString})
        return results

    def follow(self, name: str, write: Callable[[bytes], object]) -> None:
        view = self._view(name)
        with Client(self.control) as client:
            for reply in client.stream("logs", service=view.name, lines=20, follow=True):
                write("".join(f"{line}\n" for line in reply["lines"]).encode())

    def _views(self) -> tuple[ServiceView, ...]:
        with Client(self.control) as client:
            return client.snapshot().services

    def _view(self, name: str) -> ServiceView:
        service = name.partition(":")[0]
        for view in self._views():
            if view.name == service:
                return view
        raise Fault(BAD_NAME, f"BAD_NAME: {name}")

    def _info(self, view: ServiceView) -> dict[str, Any]:
        return process_info(view, time.time())

    def _act(self, op: str, name: str, wait: bool) -> dict[str, Any]:
        with Client(self.control, within=None if wait else 10.0) as client:
            return client.request(op, service=name, wait=bool(wait))

    def _result(self, method: Callable[..., Any], name: str, argument: Any) -> dict[str, Any]:
        """Return the result of one process within a call for several."""
        status, text = SUCCESS, "OK"
        try:
            method(name, argument)
        except Fault as fault:
            if fault.faultCode == BAD_NAME:
                raise
            status, text = fault.faultCode, fault.faultString
        return {"name": name, "group": name, "status": status, "description": text}

    def _log(self, name: str) -> bytes:
        view = self._view(name)
        with Client(self.control) as client:
            lines = client.request("logs", service=view.name, lines=LINES)["lines"]
        return "".join(f"{line}\n" for line in lines).encode()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    interface = Interface()

    def do_POST(self) -> None:
        body = self.rfile.read(in_digits(self.headers.get("Content-Length", "")) or 0)
        try:
            arguments, name = loads(body)
            result = self.interface.call(str(name), arguments)
            text = dumps((result,), methodresponse=True, allow_none=True)
        except Fault as fault:
            text = dumps(fault, methodresponse=True)
        data = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/xml")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        """Serve `/logtail/NAME/stdout`: what `supervisorctl tail -f` reads until it is interrupted."""
        parts = self.path.strip("/").split("/")
        if len(parts) < 2 or parts[0] != "logtail":
            self.send_error(404)
            return
        self.close_connection = True
        try:
            self.interface._view(parts[1])
        except Fault:
            self.send_error(410)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            self.interface.follow(parts[1], self._write_now)
        except OSError:
            return  # the reader has left

    def _write_now(self, data: bytes) -> None:
        self.wfile.write(data)
        self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: calls are no events."""

    def address_string(self) -> str:
        return "local"


class RpcServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    # A unix socket has no peer address, and http.server reads the first item of one.
    request_queue_size = 16

    def get_request(self) -> tuple[Any, Any]:
        request, _ = super().get_request()
        return request, ("local", 0)


def main(listen: Path = LISTEN, control: Path = SOCKET) -> int:
    listen.unlink(missing_ok=True)
    Handler.interface = Interface(control)
    before = os.umask(0o177)  # the socket is created with mode 0600, for root alone
    try:
        server = RpcServer(str(listen), Handler)
    finally:
        os.umask(before)
    server.serve_forever(poll_interval=None)  # type: ignore[arg-type]  # select() takes it: no wake-ups when idle
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*(Path(argument) for argument in sys.argv[1:])))
