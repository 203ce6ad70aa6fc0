"""The fenced commands of a page, as a reader would type them. Pure.

A fence runs on the machine, in the repository. A comment in the line above it says otherwise:

<!-- shown -->                        output, or a piece of a file: nobody types it
<!-- as alice -->                     typed after `make ssh`
<!-- may fail: COMMAND -->            that line may end with an error
<!-- needs kubernetes: why -->        not run here, and counted; or `needs hardware: why`, `needs a name: why`
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^(?:<!-- (?P<mark>.*?) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
NEEDS = ("kubernetes", "hardware", "a name")


@dataclass(frozen=True, slots=True)
class Block:
    page: str
    line: int
    text: str
    shown: bool = False
    user: str = ""
    may_fail: str = ""
    needs: str = ""

    @property
    def runs(self) -> bool:
        return not (self.shown or self.needs)

    @property
    def script(self) -> str:
        """For a shell that ends with the first command that fails."""
        lines = [f"{line} || :" if line == self.may_fail else line for line in self.text.splitlines()]
        return "set -e\n" + "\n".join(lines) + "\n"


def blocks(path: Path) -> list[Block]:
    text = path.read_text()
    if len(re.findall(r"^```", text, re.MULTILINE)) % 2:
        raise ValueError(f"{path}: a fence is not closed")
    return [block(path.name, text.count("\n", 0, found.start("text")) + 1, found) for found in FENCE.finditer(text)]


def block(page: str, line: int, found: re.Match[str]) -> Block:
    mark, text = found["mark"] or "", found["text"]
    what, _, rest = mark.partition(": ")
    if not mark:
        return Block(page, line, text)
    if mark == "shown":
        return Block(page, line, text, shown=True)
    if what == "may fail" and rest in text.splitlines():
        return Block(page, line, text, may_fail=rest)
    if mark.startswith("as "):
        return Block(page, line, text, user=mark.removeprefix("as "))
    if what.startswith("needs ") and what.removeprefix("needs ") in NEEDS and rest:
        return Block(page, line, text, needs=what.removeprefix("needs "))
    raise ValueError(f"{page}:{line}: <!-- {mark} --> is no mark of a fence")
