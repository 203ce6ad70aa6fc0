"""This machine's kernel writes what a user has called his program and his file: no check takes that for evidence."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from health.api import Capture, Result
from health.checks.builtin import kernel_log
from health.checks.cases import Case, judge_case
from health.checks.load import load_checks
from health.verdict import Verdict
from tests.waiting import until

TREE = Path(__file__).resolve().parents[3] / "scripts"
XID = load_checks(TREE, ["xid"]).checks["xid"]
FORGED = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus"
TRACED = Path("/proc/sys/debug/exception-trace")
needs_kmsg = pytest.mark.skipif(
    os.geteuid() != 0
    or not os.access("/dev/kmsg", os.R_OK)
    or not TRACED.exists()
    or TRACED.read_text().strip() != "1",
    reason="needs root, /dev/kmsg, and a kernel that tells of segmentation faults",
)


# In an interpreter of its own, as nobody: dies within the mapped file, under the name.
CRASH = """
import ctypes, os, sys
descriptor = os.open(sys.argv[2], os.O_RDONLY)
os.setgid(65534)
os.setuid(65534)
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.prctl(15, ctypes.c_char_p(bytes.fromhex(sys.argv[1])), 0, 0, 0)
ctypes.CFUNCTYPE(None)(libc.mmap(None, 4096, 5, 2, descriptor, ctypes.c_long(0)))()
"""
# xor eax, eax; mov byte [rax], 0. On another processor it dies of something else, which is as good.
FAULT = bytes.fromhex("31c0c60000")


def judged(capture: Capture) -> Verdict:
    got = judge_case(XID, TREE, Case(Path("node"), {"kernel_log": capture}, now=0.0))
    assert not got.broken, got.broken
    return got.verdict


def logged(text: str) -> Callable[[], bool]:
    return lambda: text in kernel_log().text


@needs_kmsg
def test_a_process_and_a_file_with_the_words_of_an_xid_are_no_xid(tmp_path: Path) -> None:
    path = tmp_path / FORGED
    path.write_bytes(FAULT.ljust(4096, b"\0"))
    for name in (b"NVRM: Xid (PCI:", b"\x01cNVRM: Xid (P", b"NVRM\n3,1,1,-;X"):
        died = subprocess.run(
            [sys.executable, "-I", "-c", CRASH, name.hex(), str(path)], capture_output=True, check=False
        )
        assert died.returncode < 0, died.stderr.decode()
    until(logged(f"in {FORGED}["), "the kernel tells of it, with the names of process and file")
    capture = kernel_log()
    assert judged(capture).result is Result.OK, judged(capture).reason
    true = "[{:12.6f}] <3> NVRM: Xid (PCI:0000:5e:00): 48, pid=1, name=a, An uncorrectable double bit error"
    rows = capture.text.splitlines()
    rows[-1:] = [true.format(float(rows[0].partition("now=")[2]) - 1), f"# end: {len(rows) - 1} lines"]
    verdict = judged(Capture("\n".join(rows)))
    assert (verdict.result, verdict.subject) == (Result.PROBLEM, "0000:5e:00"), verdict.reason


@needs_kmsg
def test_what_a_program_writes_into_the_kernel_s_log_is_no_xid() -> None:
    """Root alone may, in any container that has the device; and it cannot write as the kernel."""
    for priority in (0, 3, 11):
        try:
            Path("/dev/kmsg").write_text(f"<{priority}>{FORGED} ({os.getpid()})")
        except OSError:
            pytest.skip("this machine's /dev/kmsg takes nothing")
    until(logged(f"bus ({os.getpid()})"), "the kernel keeps it")
    assert judged(kernel_log()).result is Result.OK, judged(kernel_log()).reason
