"""Detect that this node's clock was set, report by how much, and prove the cluster's key again. Runs in every role.

A resumed machine, or an NTP daemon that steps, moves the clock: slurmctld then refuses this node's credentials, or
this node those of all other nodes, and slurmd falls silent. The new proof explains a failure at once
(`init.slurm.client`); a corrected clock is noticed too, and the proof passes. Nothing polls: the kernel
cancels a timer on the wall clock whenever the clock is set.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import time
from pathlib import Path

from ground.sockets import notify
from init.errors import InitError
from init.lean import record
from init.pod.auth import LIVES, mode
from init.pod.client import SOCKET, condition, log, prove_again

CONDITION = "clock"
LEAST = 1.0  # seconds; smaller corrections do not matter
DOUBT = 0.2  # of a credential's life: above it the proof runs again, and the pod is not ready meanwhile
REMEMBERED = 600.0  # how long the pod's status shows it: twice the life of a munge credential
# linux/timerfd.h
ABSOLUTE, CANCEL_ON_SET = 1, 2
FAR = 2**33


@record(frozen=True, slots=True)
class Clock:
    """Shift of the wall clock since the start, and at the last proof of the key."""

    offset: float  # between the wall clock and the boot clock, which is never set
    moved: float = 0.0
    proven: float = 0.0

    def after(self, offset: float) -> Clock:
        return Clock(offset, self.moved + offset - self.offset, self.proven)

    @property
    def doubtful(self) -> bool:
        return abs(self.moved - self.proven) >= DOUBT * LIVES[mode()]


def jump_text(by: float, at: float) -> str:
    """Describe a jump; "" if it is too small to matter."""
    if abs(by) < LEAST:
        return ""
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))
    return f"set {abs(by):,.0f} s {'ahead' if by > 0 else 'back'}, to {when}"


class WallClock:
    """A kernel timer that reports when the wall clock is set."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor = libc.timerfd_create(time.CLOCK_REALTIME, os.O_CLOEXEC)
        spec = struct.pack("qqqq", 0, 0, FAR, 0)  # no interval; a moment in the far future
        if self.descriptor < 0 or libc.timerfd_settime(self.descriptor, ABSOLUTE | CANCEL_ON_SET, spec, None) < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"timerfd: {os.strerror(number)}")

    def wait(self) -> None:
        """Wait until the clock is set."""
        try:
            os.read(self.descriptor, 8)
        except OSError as error:
            if error.errno != errno.ECANCELED:
                raise

    @staticmethod
    def offset() -> float:
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


class ClockWatch:
    def __init__(self, control: Path) -> None:
        self.control = control
        self.wall = WallClock()
        self.clock = Clock(self.wall.offset())

    def look(self) -> None:
        before, self.clock = self.clock, self.clock.after(self.wall.offset())
        text = jump_text(self.clock.moved - before.moved, time.time())
        if not text:
            return
        log(f"the clock was {text}")
        back = abs(self.clock.moved) < LEAST
        try:
            condition(self.control, CONDITION, "" if back else text, expires=REMEMBERED)
            if self.clock.doubtful:
                prove_again(self.control)
                self.clock = Clock(self.clock.offset, self.clock.moved, proven=self.clock.moved)
        except InitError as error:
            log(str(error))


def main(control: Path = SOCKET) -> int:
    watch = ClockWatch(control)
    notify("READY=1")
    while True:
        watch.wall.wait()
        watch.look()


if __name__ == "__main__":
    raise SystemExit(main())
