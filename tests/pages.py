"""The fenced blocks of a page, as a reader would use them. Pure.

A fence without a language, or with `sh`, is typed on the machine, in the repository; `yaml` is values of the chart.
A comment in the line above it says otherwise:

<!-- shown -->                        output, or a piece of a file: nobody types it
<!-- file NAME -->                    what this file is to hold
<!-- as alice -->                     typed after `make ssh`
<!-- in slurm-controller-0 -->        typed in that pod, as root
<!-- may fail: COMMAND -->            that line may end with an error
<!-- needs kubernetes: why -->        not run here, and counted; or `needs hardware: why`, `needs a name: why`
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

FENCE = re.compile(
    r"^(?: *<!-- (?P<mark>.*?) -->\n)?(?P<pad> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=pad)```$",
    re.MULTILINE | re.DOTALL,
)
NEEDS = ("kubernetes", "hardware", "a name")
# What a fence without a mark is, by its language. Any other language needs a mark.
UNMARKED = {"": "runs", "sh": "runs", "yaml": "values"}


@dataclass(frozen=True, slots=True)
class Block:
    page: str
    line: int
    text: str
    language: str = ""
    shown: bool = False
    file: str = ""
    user: str = ""
    pod: str = ""
    may_fail: str = ""
    needs: str = ""

    @property
    def kind(self) -> str:
        if self.needs:
            return f"needs {self.needs}"
        if self.shown or self.file:
            return "shown" if self.shown else "file"
        return UNMARKED.get(self.language, self.language)

    @property
    def runs(self) -> bool:
        return self.kind == "runs"

    @property
    def script(self) -> str:
        """For a shell that ends with the first command that fails."""
        lines = [f"{line} || :" if line == self.may_fail else line for line in self.text.splitlines()]
        return "set -e\n" + "\n".join(lines) + "\n"


def blocks(path: Path) -> list[Block]:
    text = path.read_text()
    if len(re.findall(r"^ *```", text, re.MULTILINE)) % 2:
        raise ValueError(f"{path}: a fence is not closed")
    return [block(path.name, text.count("\n", 0, found.start("text")) + 1, found) for found in FENCE.finditer(text)]


def block(page: str, line: int, found: re.Match[str]) -> Block:
    mark, text, language = found["mark"] or "", dedent(found["text"]), found["language"]
    what, _, rest = mark.partition(": ")
    word, _, name = mark.partition(" ")
    if not mark:
        return Block(page, line, text, language)
    if mark == "shown":
        return Block(page, line, text, language, shown=True)
    if what == "may fail" and rest in text.splitlines():
        return Block(page, line, text, language, may_fail=rest)
    if what.startswith("needs ") and what.removeprefix("needs ") in NEEDS and rest:
        return Block(page, line, text, language, needs=what.removeprefix("needs "))
    if word == "file" and name:
        return Block(page, line, text, language, file=name)
    if word == "as" and name:
        return Block(page, line, text, language, user=name)
    if word == "in" and name:
        return Block(page, line, text, language, pod=name)
    raise ValueError(f"{page}:{line}: <!-- {mark} --> is no mark of a fence")
