"""Explain why an image could not be built: the step, its last lines, the log, and what to do."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from images.engine.builder import StepFailed
from images.errors import ImagesError
from images.make.plan import Image
from images.make.progress import STEP

TAIL, LONG = 15, 300
NOISE = re.compile(r"^( ---> |Removing intermediate|Step \d|Sending build|\s*$)")
STATUS = re.compile(r"(?:returned a non-zero code|exit code): (\d+)")


@contextmanager
def failures(image: Image, log: Path) -> Iterator[None]:
    """Turn a failure into an error with the image, the step, the last lines and the log's path."""
    try:
        yield
    except StepFailed as error:
        lines = [text for text in log.read_text().splitlines() if text.strip()]
        step = next((found["step"] for text in reversed(lines) if (found := STEP.match(text))), "start")
        # The builders echo the whole RUN line, which the log keeps and nobody wants to see here.
        shown = [f"  {text}" for text in lines if len(text) < LONG and not NOISE.match(text)]
        status = STATUS.search(str(error))
        why = f"status {status[1]}" if status else str(error)[:LONG]
        raise ImagesError(f"build {image.key}", f"step `{step}` failed: {why}\n" + "\n".join(shown[-TAIL:]),
                          hint=f"{advice(shown)}the whole log: {log}") from error  # fmt: skip
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise ImagesError(f"build {image.key}", f"no space left on device for {error.filename or log.parent}",
                          hint="free some, or let build/ be a link to a larger disk") from error  # fmt: skip
    except ImagesError as error:
        if "no space left" in error.why.lower():
            raise ImagesError(error.what, error.why, hint="the engine's disk is full: `docker system df`") from error
        raise


def advice(lines: Sequence[str]) -> str:
    text = "\n".join(lines[-60:]).lower()
    if "no space left on device" in text:
        return "the engine's disk is full, see `docker system df`; "
    if "exec format error" in text:
        return "the engine's machine cannot run programs of this architecture (docs/how-to/build-for-arm64.md); "
    if "checksum mismatch" in text:
        return "the archive has other files than the lock: `build.py lock` resolves anew; "
    if "temporary failure resolving" in text or "could not connect" in text or "unable to connect" in text:
        return "the mirror is not reachable from the build's network: settings mirrors, http_proxy, network; "
    return ""
