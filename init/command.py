"""Entry point of the `minivm` command: programs of other packages start at once, `init.cli` has all other commands.

click costs as much as all else that `minivm job` does before it asks Slurm, so it is imported only where it parses.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

# Command: its module, arguments before the user's, and its line of `minivm --help`.
PASSED_ON: dict[str, tuple[str, tuple[str, ...], str]] = {
    "config": ("init.config_cli", (), "The cluster's slurm.conf: status, diff, check, accept (see config --help)."),
    "state": (
        "init.state_cli",
        (),
        "Copies of the controller's state: save, list, verify, rehearse, restore (see --help).",
    ),
    "people": ("init.people_cli", (), "Users of a file: check, show, diff, forget (see people --help)."),
    "accounts": (
        "init.accounts_cli",
        (),
        "Accounts, users, QOS and limits by a file: plan, apply, drift (see --help).",
    ),
    "accounting": ("init.accounting_cli", (), "The accounting database: move-out, move-in, reopen (see --help)."),
    "drift": ("init.helpers.drift", (), "Check that the machine fits this image. Exit 0 when it does."),
    "gitsync": (
        "gitsync.cli",
        (),
        "The scripts' repository: once, status, why, now, rollback, pin (see gitsync --help).",
    ),
    "health": ("health.cli", ("health",), "The health checks and their verdicts (see health --help)."),
    "job": ("health.jobs", (), "Why a job waits, how it runs, why it ended; without a JOB, your jobs."),
    "jupyter": ("init.jupyter_cli", (), "Run Jupyter in a job, and print how to reach it."),
    "preflight": ("health.active.preflight", (), "In a job: test its nodes; requeue it without bad ones."),
    "active": ("health.active.show", (), "On the controller: the active checks' results and slowest machines."),
    "notify": ("health.notify", (), "Messages about jobs: check your settings; status, test USER (see --help)."),
    "replay": ("health.cli", ("replay",), "Run the checks again on a kept evidence capsule (see replay --help)."),
}


def main() -> None:
    name, *arguments = sys.argv[1:] or [""]
    try:
        if name in PASSED_ON:
            pass_on(name, arguments)
        else:
            import_module("init.cli").main()
    except BrokenPipeError:
        sys.exit(130)
    finally:
        flush_output()


def flush_output() -> None:
    """Write the rest of the output, if it is still read: `minivm status | head` is no error.

    Python itself would complain about the closed pipe at its exit, which no handler sees.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def pass_on(name: str, arguments: Sequence[str]) -> None:
    """Run another package's command line in this process: neither package imports the other."""
    import runpy

    module, before, _ = PASSED_ON[name]
    sys.argv[1:] = [*before, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
