"""The `minivm accounting` command: move the accounting records to another database and back."""

from __future__ import annotations

import os
import select
import sys
from errno import ETIMEDOUT

import click

from init.cli import Group
from init.pod.pod import Pod
from init.state import move
from init.state.move import MoveError, NothingHere

NOTHING = 3  # 2 is wrong usage
STALL_S = 120.0  # for the reader of the records to take the next ones
PIECE = select.PIPE_BUF  # a pipe that is ready takes so much without blocking


class ProgressWriter:
    """Write to a descriptor; OSError once its reader has taken nothing for `within` seconds.

    The lock of the move is held, and slurmdbd stays stopped, while records are written.
    """

    def __init__(self, fd: int, within: float = STALL_S) -> None:
        self.fd, self.within = fd, within
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    def write(self, data: bytes) -> int:
        rest = memoryview(data)
        while rest:
            if not self._poll.poll(self.within * 1000):
                raise OSError(ETIMEDOUT, f"the reader of the records took nothing for {self.within:g} s")
            rest = rest[os.write(self.fd, rest[:PIECE]) :]
        return len(data)

    def flush(self) -> None:
        """Do nothing: every write is whole."""


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Move the records of accounting between the controller's pod, the accounting pod and an external database."""
    if os.geteuid():
        raise MoveError("look at the accounting database", f"found user {os.geteuid()}, expected root")


def _report(text: str) -> None:
    click.echo(text, err=True)


@main.command("move-out")
def move_out() -> None:
    """Stop slurmdbd for good, and write all records to stdout. Exit 3 where they have never arrived.

    slurmctld goes on, and keeps what it has to account. slurmdbd starts with this database only after `move-in` brought
    the records back, or `reopen`. It can be repeated, and then writes the same records.
    """
    if sys.stdout.isatty():
        raise MoveError("move the records out", "stdout is a terminal", hint="minivm accounting move-out > FILE")
    os.umask(0o077)
    try:
        move.move_out(Pod(os.environ), ProgressWriter(sys.stdout.fileno()), _report)
    except NothingHere as error:
        click.echo(f"minivm: {error}", err=True)
        sys.exit(NOTHING)
    except OSError as error:
        problem = f"writing them ended early: {error.strerror or error}"
        hint = "run this again, or give the move up: minivm accounting reopen"
        raise MoveError("move the records out", problem, hint=hint) from error


@main.command("move-in")
def move_in() -> None:
    """Load the records of `move-out` from stdin, compare them with what was written, and start slurmdbd.

    It refuses a database that has records of its own, and a file that is cut, old, or of another cluster. What was cut
    is done by a repetition.
    """
    if sys.stdin.isatty():
        raise MoveError("load the records", "stdin is a terminal", hint="minivm accounting move-in < FILE")
    move.move_in(Pod(os.environ), sys.stdin.buffer, _report)


@main.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
def reopen(yes: bool) -> None:
    """Give a move up: slurmdbd uses the database again that `move-out` had closed.

    Only where the records were loaded nowhere: what was accounted elsewhere since then would stay there.
    """
    if not yes and not (sys.stdin.isatty() and click.confirm("Were the records loaded nowhere else?")):
        raise MoveError("reopen the database", "not confirmed", hint="--yes reopens without asking")
    click.echo(move.reopen(Pod(os.environ)))


if __name__ == "__main__":
    main(prog_name="minivm accounting")
