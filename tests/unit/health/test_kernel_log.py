"""Kernel log lines that a user can cause are never evidence: a process may have any name, and the kernel logs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from health.api import Capture, Result
from health.checks.builtin import kernel_line
from health.checks.cases import Case, judge_case, read_case
from health.checks.load import load_checks
from health.verdict import Class, Verdict

ROOT = Path(__file__).resolve().parents[3]
TREE = ROOT / "scripts"
CHECKS = load_checks(TREE, ["xid", "kernel_log"]).checks
XID = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."
MCE = "mce: [Hardware Error]: CPU 4: Machine Check: 5 Bank 5: be00000000800400"
# Line formats of the kernel: the level, the process name, the text after it, and the file name if there is one.
OF_A_PROCESS = (
    (6, "{name}[12136]: segfault at 0 ip 00007fa87f785ad8 sp 00007fff error 4 in {file}[167ad8,7fa8+156]"),
    (6, "{name}[12136] bad frame in rt_sigreturn frame:00007ffc ip:7f00 sp:7ffc orax:ffff in {file}[7f00+1000]"),
    (4, "{name} invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0"),
    (4, "{name}: page allocation failure: order:5, mode:0x40cc0(GFP_KERNEL|__GFP_COMP), nodemask=(null)"),
    (6, "{name}: attempt to access beyond end of device"),
    (4, "{name} (12136): Uses a feature that is gone"),
    (6, "traps: {file}[12136] trap invalid opcode ip:401000 sp:7ffc error:0 in {file}[401000+1000]"),
    (3, "Memory cgroup out of memory: Killed process 12136 ({name}) total-vm:1kB, anon-rss:1kB, UID:20001"),
)  # fmt: skip


def evidence() -> list[str]:
    """Return every line that makes a recording's verdict a problem."""
    lines = []
    for path in sorted((ROOT / "tests/recordings/kernel-log").glob("*/kernel_log.txt")):
        if any(result is Result.PROBLEM for result, _ in read_case(path.parent).expect.values()):
            lines += [line.partition("] ")[2] for line in path.read_text().splitlines()[5:-1]]
    return sorted({MCE, *lines})


def judged(check: str, *rows: str) -> Verdict:
    text = "\n".join(["# kernel log, now=2000.000000", *rows, f"# end: {len(rows)} lines"])
    got = judge_case(CHECKS[check], TREE, Case(Path("log"), {"kernel_log": Capture(text)}))
    assert not got.broken, got.broken
    return got.verdict


def rows(text: str, level: int | None, times: int = 1) -> list[str]:
    shown = "" if level is None else f"<{level}> "
    return [f"[ 19{number:02}.000001] {shown}{text}" for number in range(times)]


@pytest.mark.parametrize("line", evidence())
def test_no_name_of_a_process_or_file_is_evidence(line: str) -> None:
    """No process or file name is evidence, whatever part of a true line it copies, at any level, and however often."""
    for level, form in OF_A_PROCESS:
        for length in range(1, 16):
            forged = form.format(name=line[:length], file=line)
            for shown in (level, None):
                for check in CHECKS:
                    verdict = judged(check, *rows(forged, shown, 20))
                    assert verdict.result is Result.OK, f"{check}: {verdict.reason}"


def test_a_file_on_lustre_says_nothing_of_its_servers_by_its_name() -> None:
    true = (
        "LustreError: 11-0: scratch-OST0001-osc-ffff8a01: operation ost_write to node 10.0.0.1@o2ib failed: rc = -110",
        "LustreError: 4711:0:(file.c:4711:ll_inode_revalidate_fini()) scratch: revalidate FID error: rc = -108",
        "LustreError: 167-0: scratch-MDT0000-mdc-ffff8a01: This client was evicted by scratch-MDT0000; in progress x",
    )
    for line in true:
        assert judged("kernel_log", *rows(line, 3, 20)).class_ is Class.NODE, line
    for name in ("rc = -108", "rc = -110)", "was evicted by x", "This client was evicted by x"):
        forged = f"LustreError: 4711:0:(namei.c:900:ll_create()) scratch: cannot create '{name}': rc = -28"
        assert judged("kernel_log", *rows(forged, 3, 20)).result is Result.OK, name


@pytest.mark.parametrize("line", evidence())
def test_what_is_not_the_kernel_s_own_is_no_evidence(line: str) -> None:
    """Lines of other writers are no evidence.

    Programs of root and of containers write to /dev/kmsg, and the kernel marks them with another facility.
    """
    for check in CHECKS:
        assert judged(check, *rows(line, 8 + 3, 20)).result is Result.OK


def test_the_true_lines_are_evidence_at_their_own_level() -> None:
    assert judged("xid", *rows(XID, 3)).class_ is Class.REBOOT
    assert judged("kernel_log", *rows(MCE, 0)).class_ is Class.MANUAL
    assert judged("xid", *rows(XID, 6)).result is Result.OK, "the driver writes it as an error"


@pytest.mark.parametrize("strange", ["NVRM: Xid (PCI:[12136]: segfault at 0 ip 0", "NVRM: Xid on device 3b: 79"])
def test_a_strange_line_hides_no_true_one(strange: str) -> None:
    for lines in ([*rows(strange, 4), *rows(XID, 3)], [*rows(XID, 3), *rows(strange, 4)]):
        verdict = judged("xid", *lines)
        assert (verdict.result, verdict.class_) == (Result.PROBLEM, Class.REBOOT), verdict.reason


def test_a_new_form_of_the_driver_s_is_noticed_for_a_while_and_a_process_s_name_is_not() -> None:
    new = "NVRM: Xid on device 0000-3b: number seventy-nine"
    text = "\n".join(["# kernel log, now=2000.000000", *rows(new, 3), "# end: 1 lines"])
    got = judge_case(CHECKS["xid"], TREE, Case(Path("log"), {"kernel_log": Capture(text)}))
    assert got.verdict.result is Result.UNKNOWN
    for now, result in (("2300.000000", Result.UNKNOWN), ("2600.000000", Result.OK)):
        case = Case(Path("log"), {"kernel_log": Capture(text.replace("2000.000000", now))}, previous={"xid": got.state})
        assert judge_case(CHECKS["xid"], TREE, case).verdict.result is result
    assert judged("xid", *rows("NVRM: Xid (PCI:[12136]: segfault at 0 ip 0", 4)).result is Result.OK


@pytest.mark.parametrize(
    "text",
    [
        r"\x0aNVRM: (PCI ID: 10de:26b5) installed in this system has\x0aNVRM: fallen off the bus",
        r" (PCI ID: 10de:1e07) installed in this\x0aNVRM: system has fallen off the bus",
        " installed in this system has fallen off the bus",
    ],
)
def test_a_lost_gpu_in_one_record_is_read(text: str) -> None:
    """A lost GPU is found in a record in which /dev/kmsg writes a line break as four characters."""
    record = f"NVRM: The NVIDIA GPU 0000:3b:00.0{text} and is not responding to commands."
    verdict = judged("xid", *rows(record, 3))
    assert (verdict.class_, verdict.subject) == (Class.REBOOT, "0000:3b:00.0")


def test_a_name_in_an_xid_s_text_does_not_say_what_the_driver_wants() -> None:
    name = "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"
    verdict = judged("xid", *rows(f"NVRM: Xid (PCI:0000:3b:00): 13, pid=4711, name={name}, Graphics Exception", 3))
    assert verdict.class_ is Class.USER
    told = f"NVRM: Xid (PCI:0000:3b:00): 154, pid='<unknown>', name=<unknown>, {name}"
    assert judged("xid", *rows(told, 3)).class_ is Class.REBOOT


def test_an_xid_of_a_part_of_a_gpu_is_read() -> None:
    verdict = judged("xid", *rows("NVRM: Xid (PCI:0000:3b:00 GPU-I:05): 95, pid=1, name=a, Uncontained", 3))
    assert (verdict.class_, verdict.subject) == (Class.REBOOT, "0000:3b:00")


@pytest.mark.parametrize(
    ("record", "line"),
    [
        (b"6,2647,1747166900,-;NVRM: Xid (PCI:[1]: segfault\n", "[ 1747.166900] <6> NVRM: Xid (PCI:[1]: segfault"),
        (b"6,2651,1747172301,c;NVRM\\x0a6,1,1,-;X[1]: it\n", r"[ 1747.172301] <6> NVRM\x0a6,1,1,-;X[1]: it"),
        (b"11,5,1000000,-,caller=T1;said by a daemon\n SUBSYSTEM=pci\n", "[    1.000000] <11> said by a daemon"),
        (b"3,5,1000000,-;\xe2\x80\xa8\x0b\x85x\n", None),
        (b"", None), (b"x,y,z,-;a", None), (b"3;a", None), (b"3,4,5,-", None),
    ],
)  # fmt: skip
def test_a_record_becomes_one_line_whatever_it_holds(record: bytes, line: str | None) -> None:
    got = kernel_line(record.decode(errors="replace"))
    if line is not None or got is None:
        assert got == line
    else:
        assert got.isprintable() and len(got.splitlines()) == 1
