"""Sockets on which the pod's processes write to PID 1, and the child that closes attached descriptors."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from init.engine.states import Notified
    from init.pid1.core import Core
    from init.pid1.log.syslog import Syslog
    from init.pid1.notify import Notify
    from init.pid1.spawn.closer import Closer
    from init.pid1.spawn.owners import Owners


class Sockets:
    """Each socket is opened, and its module loaded, on first use."""

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
                path, core.poller, self._owners, core.engine.known, self._notified, core.log, self._closes
            )
        return self.notify

    def open_syslog(self) -> None:
        from init.pid1.log.syslog import Syslog

        core = self._core
        self.syslog = Syslog(core.settings.syslog, core.poller, self._owners, core.logs, self._closes)

    def _closes(self) -> Closer:
        """Create the closer for the first message with a descriptor."""
        from init.pid1.spawn.closer import Closer

        if self._closer is None:
            self._closer = Closer(self._core.poller, self._core.log)
            if self.notify is not None:
                self._closer.when_late = self.notify.readable
        return self._closer
