"""PID 1's children: start them as the engine decided, signal them one by one, follow them and reap them.

The flow, from the loop's calls:

1. `Children.start` spawns a service's process and remembers its owner. `run_helper` and `run_own` start processes of no
   service: probes and reloads.
2. `reap`, after SIGCHLD, first reads $NOTIFY_SOCKET, since a dying process may have sent its last notification. Each
   death becomes the event `Exited` for the engine, or the callback of a helper.
3. `follow` watches a main process by a pidfd if another process is its parent, after `MAINPID=`.

Every event goes to the engine through `Core.handle`. `Sockets` opens the sockets on which processes write to PID 1.
"""

from __future__ import annotations

import os

from init.engine.ending import DRAIN
from init.engine.states import MAIN, STOPPER, Exited, Spawned, SpawnFailed
from init.errors import ORDINARY, CannotStart, describe_error
from init.lean import replace, signal
from init.pid1.core import AGAIN
from init.pid1.spawn import procs
from init.pid1.spawn.owners import Owners
from init.pid1.spawn.procs import Streams
from init.pid1.wait import IN, shut
from init.plan.service import Probe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from init.engine.states import Notified
    from init.pid1.core import Core
    from init.pid1.notify import Notify
    from init.pid1.spawn.closer import Closer
    from init.pid1.syslog import Syslog
    from init.plan.service import Service


class Sockets:
    """Sockets on which the pod's processes write to PID 1, and the child that closes attached descriptors.

    Each socket is opened, and its module loaded, on first use.
    """

    def __init__(self, core: Core, owners: Owners, notified: Callable[[str, Notified], None]) -> None:
        self._core, self._owners, self._notified = core, owners, notified
        self.notify: Notify | None = None
        self.syslog: Syslog | None = None
        self._closer: Closer | None = None

    def open_notify(self) -> Notify:
        """Open $NOTIFY_SOCKET, for the first service that notifies or soon after the first other start."""
        from init.pid1.notify import Notify

        if self.notify is None:
            core = self._core
            path = f"{core.settings.run}/notify.sock"
            self.notify = Notify(
                path, core.poller, self._owners, core.engine.find, self._notified, core.log, self._open_closer
            )
        return self.notify

    def open_syslog(self) -> None:
        """Open /dev/log."""
        from init.pid1.syslog import Syslog

        core = self._core
        self.syslog = Syslog(core.settings.syslog, core.poller, self._owners, core.logs, self._open_closer)

    def _open_closer(self) -> Closer:
        """Create the closer for the first message with a descriptor."""
        from init.pid1.spawn.closer import Closer

        if self._closer is None:
            self._closer = Closer(self._core.poller, self._core.log)
            if self.notify is not None:
                self._closer.when_late = self.notify.readable
        return self._closer


MOST_WAIT_S = 1.0  # a death may wait so long for earlier notifications: on a busy node a fork takes time
MOST_DEAF_WAIT_S = 3.0  # while PID 1 cannot read notifications: a successor's MAINPID must not come too late


class Children:
    """All child processes, and the meaning of their ends; every event goes to the engine."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.owners = Owners(core.poller.now)
        self._sockets: Sockets | None = None
        self.reaped = 0
        self.childless = False
        self._postponed_at = 0.0  # since when reaping waits for notifications; 0: it does not
        self._deaf = False  # notifications cannot be read now
        self._null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        # Children that are no service's process (probes, reloads), and the callback for their end.
        self._helpers: dict[int, Callable[[str], None]] = {}
        self._pidfds: dict[int, int] = {}  # main processes that are not PID 1's children
        self._sessions: dict[str, int] = {}  # each service's first process, the leader of its session

    # Starting.

    def start(self, name: str, step: int) -> None:
        """Start the main process of a service, one of its prepare commands, or its stop command."""
        core = self._core
        if not core.engine.still_wanted(name, step):
            core.handle(name, SpawnFailed("no longer wanted"))
            return
        spec = core.engine.spec(name)
        try:
            pid = self._spawn(spec, step)
        except ORDINARY as error:
            self._handle_failed_start(spec, step, error)
            return
        self.owners.add(pid, name)
        if step == MAIN:
            self._sessions[name] = pid
        core.handle(name, Spawned(pid, step))

    def _retry_start(self, name: str, step: int) -> None:
        state = self._core.engine.states.get(name)
        if state is not None and state.spawning:  # still the same start
            self.start(name, step)

    def _spawn(self, spec: Service, step: int) -> int:
        command = spec.command if step == MAIN else spec.stop.command if step == STOPPER else spec.prepare[step]
        stdout, stderr = self._core.logs.streams(spec.name, spec.log.value)
        env = self._environment(spec, step)
        return procs.spawn(spec, command, env, Streams(self._null, stdout, stderr), root=step not in (MAIN, STOPPER))

    def _environment(self, spec: Service, step: int) -> dict[str, str]:
        """Return the pod's environment, plus PID 1's addresses for the service."""
        core = self._core
        env = dict(core.settings.env)
        if step == STOPPER:
            env["MAINPID"] = str(core.engine.states[spec.name].pid)
        # A drain reports its progress, and is otherwise a oneshot.
        if step == MAIN and (spec.ready.probe is Probe.NOTIFY or spec.name == DRAIN):
            env["NOTIFY_SOCKET"] = self.sockets.open_notify().address(spec.user)
            if spec.watchdog:
                env["WATCHDOG_USEC"] = str(int(spec.watchdog * 1e6))
        return env

    def _handle_failed_start(self, spec: Service, step: int, error: BaseException) -> None:
        failed = SpawnFailed(f"cannot start {spec.name}: {describe_error(error)}")
        if isinstance(error, CannotStart):
            failed = SpawnFailed(error.why, error.quoted)
        elif spec.name == DRAIN and self._core.engine.ending.may_wait(self._core.poller.now()):
            # A drain runs once, so retry: a job that filled the pod with processes must not cost the other jobs their
            # drain.
            self._core.report_trouble(failed.why)
            self._core.poller.after(AGAIN, lambda: self._retry_start(spec.name, step))
            return
        elif spec.name in self._core.engine.specs:
            # A resource that the machine refused is no failure of the service and uses up none of its restarts.
            failed = replace(failed, scarce=True)
        self._core.log(f"{spec.name}: {failed.why}" + (f": {failed.quoted}" if failed.quoted else ""))
        if step == STOPPER:  # then stop it by signal
            self.kill(self._core.engine.states[spec.name].pid, spec.stop.signal)
        else:
            self._core.handle(spec.name, failed)

    def run_helper(self, name: str, command: tuple[str, ...], output: int | None, ended: Callable[[str], None]) -> int:
        """Run a short command for a service (a probe, a reload); `ended` gets "exited 0" or another end."""
        core = self._core
        spec = core.engine.spec(name)
        stdout, stderr = core.logs.streams(name, spec.log.value)
        streams = Streams(self._null, stdout if output is None else output, stderr if output is None else output)
        env = dict(core.settings.env) | {"MAINPID": str(core.engine.states[name].pid)}
        pid = procs.spawn(spec, command, env, streams, root=True)
        self._helpers[pid] = ended
        return pid

    def run_own(self, function: Callable[[], None], output: int) -> int:
        """Run a function that may block, in a child of its own."""
        pid = procs.fork_own(function, Streams(self._null, output, 2), "probe")
        self._helpers[pid] = lambda _: None
        return pid

    # Signalling.

    def kill(self, pid: int, name: str) -> None:
        """Signal one process, never a group. A pid that PID 1 has not reaped yet cannot belong to another process."""
        number = getattr(signal, f"SIG{name}")
        if pid <= 0:
            return  # the kernel would signal a group
        try:
            if pid in self._pidfds:
                signal.pidfd_send_signal(self._pidfds[pid], number)
            else:
                os.kill(pid, number)
        except ProcessLookupError:
            return
        except OSError as error:
            owner = self.owners.pids.get(pid) or "a helper"
            self._core.report_trouble(f"cannot send {name} to {owner} (pid {pid}): {describe_error(error)}")
            if pid in self.owners.pids or pid in self._helpers:  # otherwise its end would be awaited in vain
                self._core.poller.after(AGAIN, lambda: self._retry_kill(pid, name))

    def _retry_kill(self, pid: int, name: str) -> None:
        if pid in self.owners.pids or pid in self._helpers:  # not reaped yet, so still this process
            self.kill(pid, name)

    def kill_helper(self, pid: int) -> None:
        if pid in self._helpers:  # not reaped yet, so still this process
            self.kill(pid, "KILL")

    # Reaping.

    def reap(self) -> bool:
        """Reap everything that ended. Earlier notifications come first; False: some are not read yet."""
        if not self._read_notifications() and self._may_postpone():
            return False
        self._postponed_at = 0.0
        ended: list[tuple[int, int]] = []
        waitpid, own_pids, helpers, count = os.waitpid, self.owners.pids, self._helpers, 0
        self.childless = False
        try:
            while True:
                pid, status = waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                count += 1
                if pid in own_pids or pid in helpers:
                    ended.append((pid, status))
        except ChildProcessError:
            self.childless = True
        except OSError as error:
            self._core.report_trouble(f"reap: {describe_error(error)}")
            self._core.poller.after(AGAIN, self.reap)
        self.reaped += count
        for pid, status in ended:
            self._handle_end(pid, status)
        return True

    def _read_notifications(self) -> bool:
        notify = self._sockets.notify if self._sockets is not None else None
        if notify is None:
            return True
        try:
            complete = notify.read_all(self.reap)
            self._deaf = notify.keeps
            return complete
        except ORDINARY as error:
            self._deaf = True
            self._core.report_trouble(f"notifications: {describe_error(error)}")
            self._core.poller.after(MOST_WAIT_S, self.reap)
            return False

    def _may_postpone(self) -> bool:
        """Return whether reaping may wait: briefly, so that no process delays it by descriptors in its messages."""
        now = self._core.poller.now()
        self._postponed_at = self._postponed_at or now
        return now - self._postponed_at < (MOST_DEAF_WAIT_S if self._deaf else MOST_WAIT_S)

    def _handle_end(self, pid: int, status: int) -> None:
        killer = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        code = 0 if killer else os.WEXITSTATUS(status)
        helper_ended = self._helpers.pop(pid, None)
        core = self._core
        if helper_ended is not None:
            try:
                helper_ended(Exited(pid, code, killer).text())
            except ORDINARY as error:  # the owner gets it through a scope of its own
                core.report_trouble(f"the end of a helper: {describe_error(error)}")
            return
        name = self._forget(pid)
        state = core.engine.states.get(name)
        is_main = state is not None and state.pid == pid
        session = self._sessions.get(name, 0)
        heirs = self._heirs(name, session) if is_main and code == 0 and not killer and session else ()
        core.handle(name, Exited(pid, code, killer, self._last_line(name), heirs))

    def _last_line(self, name: str) -> str:
        """Return the service's last line; a death counts even if the line cannot be read."""
        try:
            return self._core.logs.finish(name)
        except ORDINARY as error:
            self._core.report_trouble(f"the last lines of {name}: {describe_error(error)}")
            return ""

    def _heirs(self, name: str, session: int) -> tuple[int, ...]:
        """Return the remaining processes of the service's session, one of which may become its main process."""
        try:
            return self.owners.heirs(session)
        except OSError as error:
            self._core.report_trouble(f"the processes of {name}: {describe_error(error)}")
            return (session,)  # assume that there are some, and wait for them

    # Notifications.

    @property
    def sockets(self) -> Sockets:
        """The sockets, created for the first service that notifies, or soon after the first start of another one."""
        if self._sockets is None:
            self._sockets = Sockets(self._core, self.owners, self._handle_notification)
        return self._sockets

    def _handle_notification(self, name: str, notification: Notified) -> None:
        state = self._core.engine.states.get(name)
        if state is None:  # a new plan removed the service, and a process of it survived
            return
        if notification.main_pid and notification.main_pid != state.pid:
            self.follow(name, notification.main_pid)
        self._core.handle(name, notification)

    # Following.

    def follow(self, name: str, pid: int) -> None:
        """Follow a main process that is not PID 1's child: notice its end even if another process may reap it."""
        self.owners.follow(pid, name)
        self._watch(pid)

    def _watch(self, pid: int) -> None:
        if pid not in self.owners.pids:
            return  # reaped meanwhile
        poller, fd = self._core.poller, -1
        try:
            fd = os.pidfd_open(pid)
            poller.add(fd, IN, lambda _: self._foreign_end(pid))
        except ProcessLookupError:  # its parent has taken its status
            poller.after(0.0, lambda: self._foreign_end(pid))
        except OSError as error:
            if fd >= 0:
                shut(fd)
            self._core.report_trouble(f"cannot follow pid {pid} of {self.owners.pids[pid]}: {describe_error(error)}")
            poller.after(AGAIN, lambda: self._watch(pid))
        else:
            self._pidfds[pid] = fd

    def _foreign_end(self, pid: int) -> None:
        if not self.reap():
            if pid not in self._pidfds:  # no other event will report it
                self._core.poller.after(MOST_WAIT_S, lambda: self._foreign_end(pid))
            return
        if pid in self.owners.pids:  # PID 1 does not reap it: its parent is or was alive
            name = self._forget(pid)
            self._core.handle(name, Exited(pid, -1, 0, self._last_line(name)))

    def _forget(self, pid: int) -> str:
        """Forget an ended process of a service; return the service's name."""
        name = self.owners.pids[pid]
        self.owners.remove(pid)
        fd = self._pidfds.pop(pid, None)
        if fd is not None:
            self._core.poller.remove(fd)
            shut(fd)
        return name
