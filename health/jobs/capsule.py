"""Write what is known of a job into one archive, for a support ticket: the page and the nodes' black boxes.

Neither the script's text, nor its arguments, nor its environment, nor its output is in it, and what looks like a
secret in names and reasons is masked.
"""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ground.version import VERSION
from health.jobs import render
from health.jobs.boxes import Box
from health.jobs.model import Page
from init.errors import InitError

MASK = "********"
SECRETS = (
    re.compile(
        r"(?i)((?:secret|passwo?r?d|passwd|token|credential|private|api[_-]?key|access[_-]?key|authorization)[\w-]*\"?"
        r"(?:\s*[=:]\s*|\s+)(?:bearer\s+|basic\s+)?)[^\s,;\"']+"
    ),
    re.compile(r"(://[^/\s:@]*:)[^/\s@]+(?=@)"),
    re.compile(r"()\b(?:hf_|gh[opsur]_|github_pat_|glpat-|sk-|xox[abprs]-|AKIA|eyJ)[\w.-]{12,}"),
)
UNSAFE = re.compile(r"[^A-Za-z0-9._+-]")


def file_name(page: Page) -> str:
    return f"minivm-job-{UNSAFE.sub('-', page.job.shown)[:60]}.tar.gz"


def write(path: Path, page: Page, boxes: Iterable[Box], now: float) -> None:
    """Write a new archive for its owner alone; a file that exists is left as it is."""
    folder = file_name(page).removesuffix(".tar.gz")
    about = {
        "minivm": VERSION,
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now)),
        "script": Path(page.job.command.partition(" ")[0]).name[:100],
    }
    members = {"page.json": _json({**about, **render.as_json(page)}) + "\n"}
    for box in boxes:
        if box.entries:
            name = f"boxes/{UNSAFE.sub('-', box.node)[:80]}.jsonl"
            members[name] = "".join(f"{_json(entry, None)}\n" for entry in box.entries)
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as packed:
        for name, text in members.items():
            data = text.encode()
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size, member.mtime, member.mode = len(data), int(now), 0o600
            packed.addfile(member, io.BytesIO(data))
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        raise InitError(f"write {path}", "it exists; name another file, or remove it") from None
    except OSError as error:
        raise InitError(f"write {path}", f"{error.strerror}; name a file in a directory of yours") from error
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(archive.getvalue())
    except OSError as error:
        with suppress(OSError):
            path.unlink()
        raise InitError(f"write {path}", f"{error.strerror}; name a file elsewhere") from error


def masked(value: object) -> object:
    """Mask what looks like a secret in all texts of a JSON value."""
    if isinstance(value, str):
        for secret in SECRETS:
            value = secret.sub(rf"\g<1>{MASK}", value)
        return value
    if isinstance(value, dict):
        return {str(masked(str(key))): masked(item) for key, item in value.items()}
    return [masked(item) for item in value] if isinstance(value, list) else value


def _json(value: object, indent: int | None = 1) -> str:
    return json.dumps(masked(value), indent=indent)
