"""prctl and the capability sets through ctypes; loaded in the child that needs them, never at boot."""

from __future__ import annotations

import ctypes
import errno

from init.plan.service import CAPABILITIES

PR_CAPBSET_DROP, PR_SET_KEEPCAPS, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 24, 8, 38, 47
PR_SET_CHILD_SUBREAPER = 36


def prctl(option: int, *values: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    result: int = libc.prctl(option, *(ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]))
    return result


def become_subreaper() -> None:
    """Get orphans even when not PID 1 (in a test, on a laptop)."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


class Capabilities:
    """Restrict capabilities: the bounding set first (it needs SETPCAP), the rest after the change of user."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._wanted = sum(1 << CAPABILITIES.index(name) for name in names)
        self._bounded = True

    def bound(self) -> None:
        prctl(PR_SET_KEEPCAPS, 1)
        for number in range(len(CAPABILITIES)):
            if not self._wanted >> number & 1:
                self._bounded &= prctl(PR_CAPBSET_DROP, number) == 0 or ctypes.get_errno() == errno.EINVAL

    def keep(self, *, ambient: bool) -> str:
        """Keep the wanted capabilities; return a warning about what the pod lacks."""
        libc = ctypes.CDLL(None, use_errno=True)
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)
        data = (ctypes.c_uint32 * 6)()
        if libc.capget(header, data) != 0:
            raise OSError(ctypes.get_errno(), "capget")
        permitted = (data[1] | data[4] << 32) & self._wanted
        low, high = permitted & 0xFFFFFFFF, permitted >> 32
        data = (ctypes.c_uint32 * 6)(low, low, low, high, high, high)
        if libc.capset(header, data) != 0:
            raise OSError(ctypes.get_errno(), "capset")
        for number in range(len(CAPABILITIES)):
            if ambient and permitted >> number & 1:
                prctl(PR_CAP_AMBIENT, 2, number)
        missing = self._wanted & ~permitted
        if missing:
            names = [name for number, name in enumerate(CAPABILITIES) if missing >> number & 1]
            return f"the pod does not have the capabilities {' '.join(names)}"
        if not self._bounded and not ambient:
            return "capabilities are kept: the pod lacks SETPCAP, and an exec by root takes back what was dropped"
        return ""
