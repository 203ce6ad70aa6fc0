"""The service gitsync: sleep, and fork a cycle when one is due or requested.

A cycle (`run.py`) brings the newest commit to the node. It is due after the period, later after failures, and at once
when `gitsync now` or the webhook sends a datagram to the loop's socket, or a caller sends SIGHUP or SIGUSR1. At the
start, before any cycle, a child gives readers the last good tree or generation zero (`begin`).

One thread, one wait point. Forked children do all work, so this process stays small, and a cycle that crashes, leaks
or hangs is only an exit status here. After each cycle the loop reports to the service manager: STATUS, and READY once
there is a tree.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from types import FrameType

from gitsync.cycle.run import begin, run_cycle
from gitsync.errors import GitsyncError
from gitsync.rings import first_delay, next_delay
from gitsync.settings import GitsyncSettings, from_environment
from gitsync.state import load_state, summarise
from gitsync.tree import publish
from ground.sockets import notify

# Added to the sum of a cycle's own deadlines: only a hang that none of them covers lasts this long.
CYCLE_SLACK = 300.0
# Seconds that a running cycle gets to finish when the service stops.
STOP_GRACE = 3.0
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class Loop:
    """State of the loop: the running cycle, the webhook listener, and how many cycles failed in a row."""

    def __init__(self, settings: GitsyncSettings) -> None:
        self.settings = settings
        self.stopping = False
        self.ready = False  # READY was sent
        self.published = False  # a commit, and not generation zero
        self.failures = 0
        self.requested = False  # a further cycle, at once
        self.compared = False  # a cycle of this process compared the published tree with its commit
        # The running cycle.
        self.child: int | None = None
        self.child_fd = -1
        self.child_deadline = 0.0
        self.webhook: int | None = None  # process of the webhook listener

    def run(self) -> int:
        signal_read = self._catch_signals()
        wake = self._listen()
        self._start_webhook()
        self._begin()
        self._report()
        due = time.monotonic() + first_delay(self.settings.pod, self.settings.period, published=self.published)
        while not self.stopping:
            if self.child is None and self.requested:
                self.requested, due = False, time.monotonic()
            if self.child is None and time.monotonic() >= due:
                self._start_cycle()
            poller = select.poll()
            poller.register(signal_read, select.POLLIN)
            poller.register(wake, select.POLLIN)
            if self.child is not None:
                poller.register(self.child_fd, select.POLLIN)
            until = self.child_deadline if self.child is not None else due
            for fd, _ in poller.poll(max(0.0, until - time.monotonic()) * 1000):
                if fd == signal_read:
                    with contextlib.suppress(BlockingIOError):
                        os.read(signal_read, 4096)
                elif fd == wake.fileno():
                    self._drain_pokes(wake)
                elif fd == self.child_fd:
                    self._reap()
                    due = time.monotonic() + self._delay()
            if self.child is not None and time.monotonic() >= self.child_deadline:
                print("gitsync: a cycle exceeded its deadline; killing it", file=sys.stderr, flush=True)
                os.killpg(self.child, signal.SIGKILL)
                self.child_deadline = time.monotonic() + 10.0
        self._stop_children()
        with contextlib.suppress(OSError):
            self.settings.layout.wake.unlink()
        return 0

    def _catch_signals(self) -> int:
        """Handle the signals that end the loop or request a cycle; return a pipe that is readable after each."""
        signal_read, signal_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(signal_write)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        # A poke by signal, for a caller that has a pid and no socket.
        for number in (signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, self._request_cycle)
        return signal_read

    def _delay(self) -> float:
        """Return the seconds until the next cycle."""
        settings = self.settings
        return next_delay(settings.pod, settings.period, self.failures, settings.backoff_max, published=self.published)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stopping = True

    def _request_cycle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True

    def _listen(self) -> socket.socket:
        """Bind the socket of `gitsync now`: mode 0600, one datagram a poke."""
        path = self.settings.layout.wake
        publish.prepare(self.settings.layout)
        path.unlink(missing_ok=True)
        wake = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        old = os.umask(0o177)
        try:
            wake.bind(str(path))
        finally:
            os.umask(old)
        return wake

    def _drain_pokes(self, wake: socket.socket) -> None:
        """Read all pending pokes; together they cause one more cycle."""
        with contextlib.suppress(BlockingIOError):
            while True:
                wake.recv(64)
                self.requested = True

    def _begin(self) -> None:
        """Give readers a tree before anything slow starts: the last good one, or generation zero."""
        pid = self._fork(lambda: begin(self.settings))
        _, status = os.waitpid(pid, 0)
        if status != 0:
            code = os.waitstatus_to_exitcode(status)
            print(f"gitsync: no tree yet: the start-up step ended with {code}", file=sys.stderr, flush=True)

    def _report(self) -> None:
        """Send STATUS to the service manager, and READY once there is a tree."""
        state = load_state(self.settings.layout.state)
        self.failures = max(state.failures, self.failures)
        text = f"STATUS={summarise(state, self.settings)}"
        live = publish.read_current(self.settings.layout) is not None
        if live and not self.ready:
            self.ready = True
            text = f"READY=1\n{text}"
        notify(text)
        self.published = state.published is not None and state.published.oid != ""

    def _fork(self, work: Callable[[], object]) -> int:
        """Run `work` in a child with a process group of its own, which ends with this process; return its pid."""
        parent = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
                signal.signal(number, signal.SIG_DFL)
            os.setpgid(0, 0)
            work()
            status = 0
        except (GitsyncError, OSError) as error:
            print(f"gitsync: {error}", file=sys.stderr, flush=True)
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
            os._exit(status)

    def _start_cycle(self) -> None:
        compare, self.compared = not self.compared, True
        pid = self._fork(lambda: run_cycle(self.settings, compare=compare))
        self.child, self.child_fd = pid, os.pidfd_open(pid)
        self.child_deadline = time.monotonic() + self.settings.timeout + 3 * self.settings.check_timeout + CYCLE_SLACK

    def _reap(self) -> None:
        """Take the ended cycle's exit status, report, and see that the webhook listener runs."""
        assert self.child is not None
        _, status = os.waitpid(self.child, 0)
        os.close(self.child_fd)
        self.child, self.child_fd = None, -1
        if status != 0:
            # Killed or crashed: the cycle could not record its failure, so count it here.
            self.failures += 1
            print(f"gitsync: a cycle ended with {os.waitstatus_to_exitcode(status)}", file=sys.stderr, flush=True)
        else:
            self.failures = 0
        self._report()
        self._start_webhook()

    def _start_webhook(self) -> None:
        """Start the webhook listener if it does not run: a separate process, which alone reads network input."""
        if self.settings.webhook is None:
            return
        if self.webhook is not None and os.waitpid(self.webhook, os.WNOHANG) == (0, 0):
            return

        def serve() -> None:
            from gitsync.cycle import webhook

            webhook.serve(self.settings)

        self.webhook = self._fork(serve)

    def _stop_children(self) -> None:
        if self.webhook is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.webhook, signal.SIGKILL)
            os.waitpid(self.webhook, 0)
        if self.child is None:
            return
        poller = select.poll()
        poller.register(self.child_fd, select.POLLIN)
        # Killing a cycle is safe at any step; letting it finish saves a retry.
        if not poller.poll(STOP_GRACE * 1000):
            os.killpg(self.child, signal.SIGKILL)
        os.waitpid(self.child, 0)
        os.close(self.child_fd)


def main() -> int:
    try:
        return Loop(from_environment(os.environ)).run()
    except GitsyncError as error:
        print(f"gitsync: {error}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
