"""Free space on the local file systems."""

from __future__ import annotations

from collections.abc import Iterable

from parsers import df
from parsers.df import Used

from health.api import Check, Class, Command, Context, Finding, Inputs, UserMade, When

CHECK = Check(
    name="disk_space",
    about="room on the local file systems",
    class_=Class.NODE,
    period_s=120,
    when=frozenset({When.PROLOG, When.BACKGROUND, When.EPILOG}),
    # -l: skip network file systems, which may hang.
    sources=(Command("df", ("df", "-P", "-l", "-k"), deadline_s=5.0, accept=(0, 1), evidence=True),),
    thresholds="disk",
    user_made=UserMade.PARTLY,
)


def parse(inputs: Inputs) -> list[Used]:
    return df.parse(inputs["df"], "1024-blocks")


def judge(measured: list[Used], context: Context) -> Iterable[Finding]:
    return df.judge(measured, context, "space", "{path} is {percent} % full")
