"""Blocks of log lines: cut at line ends, tagged, kept. Pure. Works on whole blocks, since lines are too many."""

from __future__ import annotations

LONGEST = 256 * 1024  # longer lines are passed on in parts
CONTINUES = b" [continues]\n"
KEPT = 256 * 1024


def cut(carry: bytes, chunk: bytes) -> tuple[bytes, bytes]:
    """Return the complete lines, and the rest for the next call."""
    end = chunk.rfind(b"\n") + 1
    if not end:
        carry += chunk
        if len(carry) <= LONGEST:
            return b"", carry
        parts = [carry[at : at + LONGEST] for at in range(0, len(carry), LONGEST)]
        return b"".join(part + CONTINUES for part in parts[:-1]), parts[-1]
    block = carry + chunk[:end] if carry else chunk[:end] if end < len(chunk) else chunk
    return block, chunk[end:]


def tag_text(block: bytes, name: bytes) -> bytes:
    """Tag lines as `name | line`. The container runtime adds the time."""
    prefix = name + b" | "
    return prefix + block[:-1].replace(b"\n", b"\n" + prefix) + b"\n"


def tag_json(block: bytes, name: str, stream: str, time: str) -> bytes:
    from json import dumps

    head = f'{{"time": "{time}", "service": "{name}", "stream": "{stream}", "line": '
    lines = block[:-1].decode(errors="backslashreplace").split("\n")
    return "".join(f"{head}{dumps(line)}}}\n" for line in lines).encode()


class Ring:
    """The newest lines of a service. Keeps references to whole blocks, which costs nothing."""

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._size = 0

    def add(self, block: bytes) -> None:
        block = block if len(block) <= KEPT else block[block.find(b"\n", len(block) - KEPT - 1) + 1 :] or block[-KEPT:]
        self._blocks.append(block)
        self._size += len(block)
        while self._size - len(self._blocks[0]) >= KEPT:
            self._size -= len(self._blocks.pop(0))

    def tail(self, lines: int) -> list[str]:
        kept = b"".join(self._blocks).decode(errors="backslashreplace").split("\n")[:-1]
        return kept[-lines:] if lines > 0 else []

    def last(self) -> str:
        """Return the last nonempty line, short enough to be a reason."""
        for block in reversed(self._blocks):
            text = block[-2048:].decode(errors="backslashreplace").rstrip()
            if text:
                return text[text.rfind("\n") + 1 :].strip()[-400:]
        return ""
