"""Service `lease`: contend for the right to act as the controller, hold it, or stand by. For one of two controllers.

Four threads share the work, since the volume may hang:

- `Keeper` reads and writes the lease on the volume: it renews this pod's term, or claims the next one.
- `TermBuilder` copies the state for a new term.
- `PodReporter` tells the other controllers of this pod's readiness (`init.state.hand_over`).
- `LeaseKeeper`, the main thread, looks at the clock. It makes this pod active once its term has begun, and ends that
  before the term does.

PID 1 starts slurmctld while this service is ready, and kills slurmctld when the service is not: after `STANDBY=1`,
after its end, and when the watchdog hears of no renewal. This service kills slurmctld itself first. So one of the two
may be stopped. If both are stopped, the kernel kills slurmctld (`KernelKill`). Where all processes are frozen, it does
so as soon as they wake, beside slurmctld, which finds the directory of its former term closed (`init.state.lease`).

A hand-over (`init.state.hand_over`) names its heir in a file of root. The holder writes the heir into its term, and
releases the term to that pod once PID 1 has stopped slurmctld and then this service.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from errno import EADDRNOTAVAIL, EEXIST
from os import strerror
from pathlib import Path

from ground.files import write_json, write_whole
from ground.sockets import notify
from init.errors import InitError
from init.lean import record, replace
from init.pod.client import log
from init.pod.pod import Pod
from init.slurm.place import HELD, base, read_release
from init.state import hand_over, lease
from init.state.hand_over import Standby
from init.state.lease import Contest, Term, Terms

# An address that moves to the active pod, on a network whose pods share one link, as on one machine.
#
# The holder adds the address to its interface and announces it by ARP. A former holder that is stopped still has it:
# the announcement is repeated, so that the pods of the link send to the active one. Needs NET_ADMIN and NET_RAW.


# linux/netlink.h, linux/rtnetlink.h, linux/if_addr.h
NEW_ADDRESS, DELETE_ADDRESS, ERROR = 20, 21, 2
REQUEST, ACKNOWLEDGE, CREATE, EXCLUSIVE = 1, 4, 0x400, 0x200
LOCAL, ADDRESS, HOST_BITS = 2, 1, 32
ARP, ETHERNET, IPV4, ASK = 0x0806, 1, 0x0800, 1
EVERYBODY = b"\xff" * 6
INTERFACE = "eth0"


class MovingAddress:
    """The address of the active controller, on one interface of this pod."""

    def __init__(self, address: str, interface: str = INTERFACE) -> None:
        self.address, self.interface = socket.inet_aton(address), interface

    def take(self) -> None:
        """Add the address, and announce it."""
        self._change(NEW_ADDRESS, CREATE | EXCLUSIVE, harmless=EEXIST)
        self.announce()

    def leave(self) -> None:
        """Remove the address; do nothing without it."""
        self._change(DELETE_ADDRESS, 0, harmless=EADDRNOTAVAIL)

    def announce(self) -> None:
        """Tell the link where the address is; a lost announcement is made good by the next one."""
        with suppress(OSError), socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ARP)) as link:
            link.bind((self.interface, ARP))
            own = bytes.fromhex(Path(f"/sys/class/net/{self.interface}/address").read_text().strip().replace(":", ""))
            link.send(announcement(own, self.address))

    def _change(self, kind: int, flags: int, harmless: int) -> None:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:
            kernel.send(address_request(kind, flags, socket.if_nametoindex(self.interface), self.address))
            answer = kernel.recv(4096)
        code = -struct.unpack_from("=i", answer, 16)[0] if struct.unpack_from("=H", answer, 4)[0] == ERROR else 0
        if code not in (0, harmless):
            raise OSError(code, f"{self.interface}: {strerror(code)}")


def address_request(kind: int, flags: int, interface: int, address: bytes) -> bytes:
    body = struct.pack("=BBBBI", socket.AF_INET, HOST_BITS, 0, 0, interface)
    body += b"".join(struct.pack("=HH4s", 8, name, address) for name in (LOCAL, ADDRESS))
    return struct.pack("=IHHII", 16 + len(body), kind, REQUEST | ACKNOWLEDGE | flags, 1, 0) + body


def announcement(own: bytes, address: bytes) -> bytes:
    """Return a gratuitous ARP request: every pod of the link corrects the entry that it has of this address."""
    head = EVERYBODY + own + struct.pack("!H", ARP) + struct.pack("!HHBBH", ETHERNET, IPV4, 6, 4, ASK)
    return head + own + address + bytes(6) + address


# Pauses: between two looks of a contender at the lease, of the heir at the lease, of a new holder at its slurmctld's
# readiness, and of the main thread at the clock.
LOOK_S, HEIR_LOOK_S, BEGUN_S, TICK_S = 0.5, 0.05, 0.1, 0.1
GONE_S = 2.0  # for slurmctld to be gone after KILL
DAEMONS = ("slurmctld", "slurmscriptd")
# `holder`: the holder takes the address of the controller's name itself. `endpointslice`: `init.state.address` does.
MOVES = "MINIVM_LEASE_ADDRESS"
PROC = Path("/proc")
# time.h, signal.h. The kernel kills this long after the term's end: this service comes first where it runs.
BOOT_CLOCK, TIMER_ABSTIME, SIGEV_SIGNAL = time.CLOCK_BOOTTIME, 1, 0
LATE_S = 0.5
LIBC = ctypes.CDLL(None, use_errno=True)


@record(frozen=True, slots=True)
class Takeover:
    """The way in which this pod got its term, and the time that it took."""

    term: int
    former: str
    planned: bool  # the former holder released its term
    since: float  # its last sign of life, or its announcement

    def describe(self, at: float) -> str:
        how = "handed over by" if self.planned else "took over from"
        return (
            f"{how} {self.former} in {at - self.since:.1f} s, {time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime())}"
        )


class Keeper(threading.Thread):
    """The thread that reads and writes the volume. The other thread reads `contest`, which is replaced as a whole."""

    def __init__(self, store: Terms, holder: str, life: str) -> None:
        super().__init__(daemon=True)
        self.store, self.holder, self.life = store, holder, life
        self.first = holder.endswith("-0")
        self.contest = Contest()
        self.error = ""
        self.leaving = threading.Event()
        self.heir = ""  # requested by root
        self.serving = 0  # the term in which slurmctld is ready
        self.takeover: Takeover | None = None  # of the term that this pod has
        self._nudged = threading.Event()
        self._announced = (0, lease.NEVER)  # the term that names this pod as its heir, and since when
        self._beat = 0

    def holds(self, term: int) -> bool:
        contest = self.contest
        return contest.mine == term and contest.holds(lease.now())

    def nudge(self) -> None:
        """End the pause between two turns."""
        self._nudged.set()

    def run(self) -> None:
        while not self.leaving.is_set():
            self._nudged.clear()
            try:
                pause = self.turn()
                self.error = ""
            except OSError as error:
                pause, text = LOOK_S, f"{self.store.directory}: {error.strerror or error}"
                if text != self.error:
                    log(text)
                self.error = text
            if not self.leaving.is_set():
                self._nudged.wait(pause)
        with suppress(OSError):
            if self.contest.holds(lease.now()):
                self._renew(released=True)

    def turn(self) -> float:
        """Renew the term of this pod, or look if it may have the next one; return the pause until the next turn."""
        begun = lease.now()
        if self.contest.lapsed(begun):
            self.contest = replace(self.contest, mine=0, looked=lease.NEVER)
        if self.contest.mine:
            self._renew(released=False)
            newest = self.store.last()
            self.contest = lease.update_after_renewal(self.contest, begun, lease.now(), newest=newest)
            return lease.RENEW_S
        seen = self.store.newest()
        self.contest = lease.update_after_look(self.contest, seen, begun, lease.now())
        is_heir = seen is not None and seen.heir == self.holder
        if seen is not None and is_heir and self._announced[0] != seen.number:
            self._announced = seen.number, self.contest.since
        begun = lease.now()
        next_number = lease.choose_term(self.contest, self.life, begun, first=self.first, holder=self.holder)
        claimed = self.store.claim(next_number, self.holder, self.life) if next_number else None
        if claimed is None:
            return HEIR_LOOK_S if is_heir else LOOK_S
        former = self.store.term(seen.number) if seen else None
        self._beat = 0
        self.takeover = self._takeover(seen, claimed.number)
        self.contest = lease.update_after_claim(self.contest, claimed, former, begun, lease.now())
        return lease.RENEW_S

    def _renew(self, *, released: bool) -> None:
        self._beat += 1
        mine = self.contest.mine
        serves = self.serving == mine and not released
        self.store.renew(mine, self.holder, self.life, self._beat, released=released, serves=serves, heir=self.heir)

    def _takeover(self, seen: Term | None, mine: int) -> Takeover | None:
        if seen is None or seen.alone:
            return None
        since = self._announced[1] if self._announced[0] == seen.number else self.contest.since
        return Takeover(mine, seen.holder or "an unknown pod", seen.released, since)

    def describe(self) -> str:
        """Return what this standby waits for."""
        contest = self.contest
        if self.error:
            return f"cannot use the lease: {self.error}"
        if contest.holds(lease.now()):
            return f"term {contest.mine} begins when its state is copied"
        if contest.mine:
            return f"term {contest.mine} begins when the former holder has given up"
        if contest.seen is None:
            return "the first term is pod 0's"
        return f"{contest.seen.holder or 'another pod'} has term {contest.seen.number}"


class TermBuilder(threading.Thread):
    """The thread that makes the state directory of a new term. A process of its own would take longer to start."""

    def __init__(self, parent: Path, term: int, is_held: Callable[[], bool]) -> None:
        super().__init__(daemon=True)
        self.parent, self.term, self.is_held = parent, term, is_held
        self.is_done = False
        self.error = ""

    def run(self) -> None:
        while self.is_held() and not self.is_done:
            try:
                log(lease.build(self.parent, self.term, self.is_held))
                self.is_done = True
            except (InitError, OSError) as error:
                if str(error) != self.error:
                    log(str(error))
                self.error = str(error)
                time.sleep(LOOK_S)


class KernelKill:
    """Have the kernel kill slurmctld at the end of its term, where PID 1 and this service are stopped.

    SIGKILL also ends a process that is stopped. A timer of the kernel sends it to this service, unless this service
    looks at its clock in time. Its end closes a pipe, whose other end a child keeps, and for that the kernel sends it
    to slurmctld.
    """

    def __init__(self) -> None:
        """Call it before the first thread starts: it forks."""
        self.target = 0
        self._timer = ctypes.c_void_p()
        event = ctypes.create_string_buffer(struct.pack("=QiI", 0, signal.SIGKILL, SIGEV_SIGNAL), 64)
        _check(LIBC.timer_create(BOOT_CLOCK, event, ctypes.byref(self._timer)))
        self.reading, self.writing = os.pipe()
        if not os.fork():
            os.close(self.writing)
            os.read(self.reading, 1)
            os._exit(0)
        fcntl.fcntl(self.reading, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(self.reading, fcntl.F_SETFL, os.O_ASYNC)

    def arm(self, until: float) -> None:
        """Set the end of the term; 0: this pod has none."""
        seconds = until + LATE_S if until else 0.0
        times = struct.pack("=qqqq", 0, 0, int(seconds), int(seconds % 1 * 1e9))
        _check(LIBC.timer_settime(self._timer, TIMER_ABSTIME, times, None))

    def aim(self) -> None:
        """Follow slurmctld, which `scontrol reconfigure` replaces by another process."""
        with suppress(OSError):
            if self.target and _daemon(self.target) == DAEMONS[0]:
                return
            self.target = next((pid for pid in _daemons() if _daemon(pid) == DAEMONS[0]), 0)
            fcntl.fcntl(self.reading, fcntl.F_SETOWN, self.target)


def _check(failed: int) -> None:
    if failed:
        code = ctypes.get_errno()
        raise OSError(code, f"a timer of the boot clock: {strerror(code)}")


class LeaseKeeper:
    """The thread that looks at the clock: it makes this pod active, and ends that in time."""

    def __init__(
        self, keeper: Keeper, held: Path, address: MovingAddress | None, request: Path = Path(hand_over.REQUEST),
        kernel: KernelKill | None = None,
    ) -> None:  # fmt: skip
        self.keeper, self.held, self.address, self.request = keeper, held, address, request
        self.kernel = kernel
        self.active = 0  # the term
        self.begun: tuple[int, str] = (0, "")  # a term, and the way it began, once its slurmctld is ready
        self.turned = threading.Event()  # a term has begun
        self.builder: TermBuilder | None = None
        self._until = lease.NEVER
        self._last_notice = ""

    def tick(self) -> bool:
        """Look at the clock once; False if this pod cannot act, or contends no more: another pod must."""
        contest = self.keeper.contest
        holds = contest.holds(lease.now())
        heir = hand_over.read_requested_heir(self.request, contest.mine, lease.now()) if holds else ""
        if heir != self.keeper.heir:
            self.keeper.heir = heir
            self.keeper.nudge()
        if self.active and not (holds and contest.mine == self.active):
            self.lose()
        if holds and not self.active:
            if self.is_built(contest.mine) and not self.begin(contest):
                return False
        elif holds and contest.until != self._until:
            self.arm(contest.until)
            notify("WATCHDOG=1")
            if self.address:
                self.address.announce()
        self._until = contest.until
        if self.active and self.kernel:
            self.kernel.aim()
        if self.active and self.begun[0] == self.active and self.begun[1]:
            self.tell(f"STATUS=active, term {self.active}: {self.begun[1]}")
        if not self.active:
            text = self.keeper.describe()
            copying = self.builder is not None and self.builder.term == contest.mine and self.builder.error
            # A volume that does not answer is a fault; to wait for another pod is none.
            if self.keeper.error or copying:
                self.tell(f"STATUS={copying or text}")
            else:
                self.tell(f"STANDBY=1\nSTATUS={text}")
        return self.keeper.is_alive()

    def is_built(self, term: int) -> bool:
        """Tell if the term's state directory exists; otherwise begin to make it."""
        if self.builder is None or self.builder.term != term:
            keeper = self.keeper
            self.builder = TermBuilder(
                keeper.store.directory.parent,
                term,
                lambda: keeper.contest.mine == term and keeper.contest.holds(lease.now()),
            )
            self.builder.start()
        return self.builder.is_done

    def begin(self, contest: Contest) -> bool:
        """Make this pod the active one; False if it cannot be."""
        try:
            write_json(self.held, {"term": contest.mine})
            if self.address:
                self.address.take()
        except OSError as error:
            log(f"term {contest.mine} cannot begin: {error.strerror or error}")
            return False
        self.active = contest.mine
        self.arm(contest.until)
        self.turned.set()
        log(f"active, term {self.active}")
        self.tell(f"READY=1\nSTATUS=active, term {self.active}")
        return True

    def lose(self) -> None:
        """Kill slurmctld before another pod may act, then tell PID 1."""
        kill_daemons(within=0)
        self.arm(0.0)
        killed = kill_daemons()
        log(f"term {self.active} is lost: {'slurmctld is killed' if killed else 'slurmctld does not die'}")
        self.active = 0
        self.tell(f"STANDBY=1\nSTATUS={self.keeper.describe()}")
        self.leave_address()
        with suppress(OSError):
            self.held.unlink()

    def end(self) -> None:
        """Release the lease: PID 1 has stopped slurmctld, or restarts this service alone."""
        notify("STOPPING=1")
        killed = kill_daemons()
        self.leave_address()
        if killed:
            self.keeper.leaving.set()
            self.keeper.nudge()
            self.keeper.join(lease.WITHIN_S)

    def arm(self, until: float) -> None:
        if self.kernel:
            self.kernel.arm(until)

    def leave_address(self) -> None:
        if self.address:
            try:
                self.address.leave()
            except OSError as error:
                log(f"the address stays: {error}")

    def tell(self, text: str) -> None:
        """Notify PID 1 of a change."""
        if text != self._last_notice:
            notify(text)
        self._last_notice = text


class PodReporter(threading.Thread):
    """The thread that asks PID 1 of this pod: a standby reports, a new holder learns when it serves."""

    def __init__(self, service: LeaseKeeper, page: str, protocol: int) -> None:
        super().__init__(daemon=True)
        self.service, self.page, self.protocol = service, page, protocol
        self.store, self.pod = service.keeper.store, service.keeper.holder
        self._beat = 0

    def run(self) -> None:
        while True:
            try:
                pause = self.turn()
            except OSError:  # of the volume; the keeper's thread reports it
                pause = hand_over.REPORT_S
            self.service.turned.wait(pause)
            self.service.turned.clear()

    def turn(self) -> float:
        active, takeover = self.service.active, self.service.keeper.takeover
        if not active:
            self._beat += 1
            ready, reason = hand_over.parse_page(hand_over.read_page(self.page))
            hand_over.publish(self.store.directory, Standby(self.pod, ready=ready, why=reason, protocol=self.protocol),
                            self._beat)  # fmt: skip
            return hand_over.REPORT_S
        if self.service.begun[0] == active:
            return hand_over.REPORT_S
        if hand_over.serves(hand_over.read_page(self.page)):
            how = takeover.describe(lease.now()) if takeover is not None and takeover.term == active else ""
            self.service.begun = active, how
            self.service.keeper.serving = active
            self.service.keeper.nudge()
        return BEGUN_S


def kill_daemons(within: float = GONE_S) -> bool:
    """Kill every slurmctld of this pod, also one that a reload has just started; tell if they are gone."""
    end = time.monotonic() + within
    while running := _daemons():
        for pid in running:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def _daemons() -> list[int]:
    return [int(entry.name) for entry in PROC.iterdir() if entry.name.isdecimal() and _daemon(int(entry.name))]


def _daemon(pid: int) -> str:
    """Return the name of a daemon of Slurm's controller that has not ended; "" of any other process."""
    with suppress(OSError):
        name, state = (PROC / str(pid) / "stat").read_text().partition("(")[2].rsplit(")", 1)
        return name if name in DAEMONS and state.split()[0] not in "ZX" else ""
    return ""


def name_own_life(run: Path) -> str:
    """Return the name of this container's life, made once, so that a restarted service keeps its term."""
    file = run / "lease-life"
    with suppress(OSError):
        if life := file.read_text():
            return life
    life = os.urandom(16).hex()
    write_whole(file, life, 0o600)
    return life


def find_moving_address(pod: Pod) -> MovingAddress | None:
    if pod.choice(MOVES, "", ["", "endpointslice", "holder"]) != "holder":
        return None
    return MovingAddress(socket.gethostbyname(pod.controller[0]))


def serve(service: LeaseKeeper, reporter: PodReporter) -> int:
    """Contend until the service must stop (0), or until another pod must act (1)."""
    ending = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    service.keeper.start()
    reporter.start()
    while not ending.wait(TICK_S):
        if not service.tick():
            service.end()
            return 1
    service.end()
    return 0


def main(words: list[str]) -> int:
    """Take the directory of the state and of this pod's own files as arguments; the defaults are the pod's."""
    pod = Pod(os.environ)
    parent = Path(words[0]) if words else base(pod)
    lease_file = Path(words[1]) / "lease.json" if words else pod.path(HELD)
    try:
        life = name_own_life(lease_file.parent)
        address = find_moving_address(pod)
        request = lease_file.parent / Path(hand_over.REQUEST).name if words else pod.path(hand_over.REQUEST)
        keeper = Keeper(Terms(parent), pod.name, life)
        service = LeaseKeeper(keeper, lease_file, address, request, KernelKill())
        release = read_release(pod)
        reporter = PodReporter(service, pod.setting("MINIVM_HTTP"), release.protocol if release else 0)
        # A former process of this service may have been killed before it could kill slurmctld.
        if not kill_daemons():
            log("a slurmctld of this pod does not die")
            return 1
        service.leave_address()
        lease_file.unlink(missing_ok=True)
    except (InitError, OSError) as error:
        log(f"cannot contend for the lease: {error}")
        return 1
    return serve(service, reporter)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
