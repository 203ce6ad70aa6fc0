"""Stand-in for slurmctld: like it, acknowledge a submission before the job's record is saved, and forget it if killed.

`python -I slurmctld_stand_in.py` runs as a service below a real PID 1. It listens on the unix socket `$SOCKET`, takes a
line, and answers with the job's number, or `refused`. Its files have slurmctld's names and are written in its order.
`init.slurm.lost_jobs` keeps what it lost, and `init.state.bring_back` submits that again.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from ground.files import read_plain
from ground.sockets import notify
from init.errors import InitError
from init.pod.pod import Pod
from init.pod.release import Release
from init.prepare.saved_state import find_accepted_job, finish_saves
from init.slurm import lost_jobs
from init.slurm.place import (
    JOBS,
    NEW,
    OLD,
    WHOLE_HEAD,
    find_term_directory,
    list_submitted_jobs,
    make_head,
    read_next_job,
)
from init.state import bring_back

RELEASE = Release("24.11.5", 42, 40, ((42, "24.11"),))
OWNER = "65534:65534"  # a user that each system has, and not root
SAVE_S = 1.0  # at most one save in this time
TICK_S = 0.05
LISTEN = 64


class Slurmctld:
    def __init__(self, base: Path, term: int, pod: str, out: int) -> None:
        self.base, self.term, self.pod, self.out = base, term, pod, out
        self.state = find_term_directory(base, term)
        self.lock = threading.Lock()
        self.jobs: dict[int, tuple[str, int]] = {}  # number -> the submission's text, the lost job that it replaces
        self.following = 1
        self.saved_jobs = 0

    def start(self) -> None:
        """Do what `saved-state` and slurmctld do at a start."""
        finish_saves(self.state)
        text = read_plain(self.state / JOBS, 64 << 20) or b""
        following = read_next_job(text[:WHOLE_HEAD], RELEASE) or 1
        for line in lost_jobs.keep(self.state, following, Pod({}, self.base).path(lost_jobs.LOST)):
            print(line, flush=True)
        records = json.loads(text[WHOLE_HEAD:] or b"{}")
        self.jobs = {int(number): (token, again) for number, (token, again) in records.items()}
        self.saved_jobs = len(self.jobs)
        self.following = max(following, find_accepted_job(self.state) + 1)
        self.save()  # as `saved-state` writes the raised number, before slurmctld removes what it does not know
        for number, place in list(list_submitted_jobs(self.state)):
            if number not in self.jobs:
                shutil.rmtree(self.state / place)

    def submit(self, text: str, again: int = 0, first: int = 0) -> int:
        with self.lock:
            number = self.following
            self.following += 1
            place = self.state / f"hash.{number % 10}/job.{number}"
            place.parent.mkdir(mode=0o700, exist_ok=True)
            place.mkdir(mode=0o700)
            pairs = [f"MINIVM_JOB_OWNER={OWNER}", f"MINIVM_JOB_AGAIN={again or ''}{f' {first}' if first else ''}"]
            data = b"".join(pair.encode() + b"\0" for pair in pairs)
            try:
                (place / "environment").write_bytes(len(pairs).to_bytes(4, sys.byteorder) + data)
                (place / "script").write_bytes(text.encode() + b"\0")
            except OSError:  # of a full volume
                shutil.rmtree(place, ignore_errors=True)
                raise
            self.jobs[number] = (text, again)
            return number

    def save(self) -> None:
        """Save the records as slurmctld does: write NAME.new, sync, then two renames."""
        with self.lock:
            head = make_head(RELEASE, self.following, time.time())
            data, count = head + json.dumps(self.jobs).encode(), len(self.jobs)
        file = self.state / JOBS
        new = self.state / f"{JOBS}{NEW}"
        with new.open("wb") as stream:
            stream.write(data)
            os.fsync(stream.fileno())
        with suppress(FileNotFoundError):
            file.rename(self.state / f"{JOBS}{OLD}")
        new.rename(file)
        self.saved_jobs = count
        os.write(self.out, f"{self.term} {time.clock_gettime(time.CLOCK_BOOTTIME):.4f} {self.pod}\n".encode())

    def listen(self, path: Path) -> None:
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(partial))
        listener.listen(LISTEN)
        partial.rename(path)
        threading.Thread(target=self.accept, args=(listener,), daemon=True).start()

    def accept(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self.answer, args=(connection,), daemon=True).start()

    def answer(self, connection: socket.socket) -> None:
        with connection, suppress(ConnectionError):
            text = connection.recv(100).decode().strip()
            if not text:
                return
            try:
                reply = str(self.submit(text))
            except OSError as error:
                print(f"{text} is refused: {error}", flush=True)
                reply = "refused"
            connection.sendall(f"{reply}\n".encode())

    def bring_back(self) -> None:
        while True:
            try:
                return Bringer(self).run()
            except (InitError, OSError) as error:
                print(error, flush=True)
                time.sleep(SAVE_S)


class Bringer(bring_back.Bringer):
    def __init__(self, slurmctld: Slurmctld) -> None:
        super().__init__(Pod({}, slurmctld.base))
        self.slurmctld = slurmctld

    def _list_back(self) -> dict[tuple[int, int], int]:
        owner = int(OWNER.partition(":")[0])
        return {(again, owner): number for number, (_, again) in self.slurmctld.jobs.copy().items() if again}

    def _submit(
        self, lost: lost_jobs.LostJob, pairs: object, submission: lost_jobs.OwnedSubmission, owner: object
    ) -> tuple[int, str]:
        text = (lost.place / lost_jobs.SCRIPT).read_bytes().removesuffix(b"\0").decode()
        return self.slurmctld.submit(text, lost.job, submission.first or submission.again), ""


def main() -> None:
    Path("/proc/self/comm").write_text("slurmctld")
    lost_jobs.tells_owners = lambda pod: True
    term = json.loads(Path(os.environ["HELD"]).read_text())["term"]
    out = os.open(os.environ["OUT"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    slurmctld = Slurmctld(Path(os.environ["BASE"]), term, os.environ["MINIVM_POD_NAME"], out)
    ending = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    slurmctld.start()
    slurmctld.listen(Path(os.environ["SOCKET"]))
    notify("READY=1")
    threading.Thread(target=slurmctld.bring_back, daemon=True).start()
    last = 0.0
    while True:
        ended = ending.wait(TICK_S)
        if ended or (time.monotonic() - last > SAVE_S and len(slurmctld.jobs) > slurmctld.saved_jobs):
            try:
                slurmctld.save()
            except OSError as error:
                print(f"the jobs are not saved: {error}", flush=True)
            last = time.monotonic()
        if ended:
            os._exit(0)


if __name__ == "__main__":
    main()
