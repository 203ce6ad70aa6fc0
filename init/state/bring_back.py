"""Submit lost jobs again, held, as their owners, with the options and the environment of the first submission.

    python3 -I -m init.state.bring_back

A job that was lost may have run: it is held, and its owner releases or cancels it. A ledger is written before each
step, and a submission whose answer a kill had cut is looked for in Slurm before it is repeated.

sbatch runs as the owner, on the controller. Nothing of the job's environment may reach that process, where LD_PRELOAD
would run the user's code: the environment goes by a file.
"""

from __future__ import annotations

import os
import pwd
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ground.commands import ran
from ground.files import read_plain, write_whole
from init.errors import InitError
from init.fields import number
from init.pod.client import log
from init.pod.pod import Pod
from init.slurm import client, lost_jobs
from init.slurm.lost_jobs import ENVIRONMENT, LARGEST_FILE, LOST, SCRIPT, LostJob, OwnedSubmission

WORK = "/run/minivm/lost-jobs"
WITHIN_S = 40.0
TRIED_S = 2 * 3600.0  # a refusal is final then: the directory of users or an account may have been away
NO_ANSWER = "sbatch had no answer"
MEMORY = 1 << 30
COLUMNS = "jobarrayid:|,userid:|,admin_comment:|"
LIST = (client.SQUEUE, "--noheader", "--all", "--states=all", "--Format", COLUMNS)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Options without a value. cli_filter gives them as "set" or as their own name.
FLAGS = _names("""
    contiguous hold ignore-pbs no-kill no-requeue overcommit oversubscribe reboot requeue resv-ports spread-job stepmgr
    use-min-nodes
""")
WITH_VALUE = _names("""
    account acctg-freq array batch bb begin cluster-constraint comment constraint container container-id core-spec
    cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution error exclude extra
    extra-node-info gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint input
    kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nice
    nodelist nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket oom-kill-step open-mode
    output partition power prefer priority profile qos reservation segment signal sockets-per-node switches thread-spec
    threads-per-core time time-min tmp tres-bind tres-per-task wait-all-nodes
    wckey
""")
# The script, the environment or the name has the effect of these already; or they were for the terminal.
DONE = _names("""
    argv chdir export export-file get-user-env job-name nodefile parsable propagate quiet test-only verbose wait wrap
""")
_NUMBERS = re.compile(r"(?<=:)[0-9]+")
_ROW = re.compile(r"([0-9]+)[^|]*\|([0-9]+)\|minivm: job ([0-9]+) again, .*", re.ASCII)


def _bound_memory() -> None:
    """Keep an #SBATCH line that names an endless file from taking the controller's memory."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))


class UnclearError(InitError):
    """A submission whose outcome is unknown: it is tried again."""


def arguments(options: Mapping[str, object], new_numbers: Mapping[int, int]) -> tuple[list[str], list[str]]:
    """Return sbatch's options, and those that are not understood. Pure.

    A dependency on another lost job gets that job's new number.
    """
    options_known: list[str] = []
    unknown: list[str] = []
    for name, value in sorted(options.items()):
        if name in DONE:
            continue
        if name == "exclusive":
            options_known.append("--exclusive" if value == "exclusive" else f"--exclusive={value}")
        elif name in FLAGS and isinstance(value, str):
            options_known.append(f"--{name}")
        elif name in WITH_VALUE and isinstance(value, str) and "\0" not in value:
            options_known.append(f"--{name}={_renumber(value, new_numbers) if name == 'dependency' else value}")
        else:
            unknown.append(name)
    return options_known, unknown


def _renumber(dependency: str, new_numbers: Mapping[int, int]) -> str:
    return _NUMBERS.sub(lambda match: str(new_numbers.get(int(match[0]), match[0])), dependency)


def words_of(options: Mapping[str, object]) -> tuple[str, list[str]]:
    """Return the script's name, which is empty for one from a pipe or of --wrap, and the script's own arguments."""
    argv = options.get("argv")
    words = [word for word in argv if isinstance(word, str) and "\0" not in word] if isinstance(argv, list) else []
    return (words[0], words[1:]) if words and "wrap" not in options else ("", [])


def environment_for(pairs: Sequence[bytes], lost: int, first: int = 0, *, complete: bool) -> bytes:
    """Return the job's environment as sbatch reads it, with what job_submit.lua puts in its place again."""
    own = (b"MINIVM_BROUGHT_BACK=", b"MINIVM_WAS_", b"MINIVM_JOB_")
    passed = [pair for pair in pairs if not pair.startswith(own)]
    renamed = [b"MINIVM_WAS_" + pair for pair in passed if pair.startswith((b"SLURM_", b"HOSTNAME="))]
    mark = f"MINIVM_BROUGHT_BACK={lost}{f' {first}' if first else ''}{'' if complete else ' unknown'}".encode()
    return b"".join(pair + b"\0" for pair in (*passed, *renamed, mark))


def already_back(text: str) -> dict[tuple[int, int], int]:
    """Return (lost job, user id) -> its new number from squeue's lines."""
    matches = (_ROW.fullmatch(line.strip()) for line in text.splitlines())
    return {(int(match[3]), int(match[2])): int(match[1]) for match in matches if match}


def _was_silent(lost: LostJob) -> bool:
    return lost.why.startswith(NO_ANSWER)


class Bringer:
    def __init__(self, pod: Pod) -> None:
        self.pod = pod
        self.directory = pod.path(LOST)
        self.controller = client.address(pod.env)
        self.entries = lost_jobs.entries(self.directory)
        self.new_numbers = {lost.job: lost.back_as for lost in self.entries if lost.back_as}
        self.silent = {lost.owner for lost in self.entries if lost.state == "submitting" and _was_silent(lost)}

    def run(self) -> None:
        for lost in self.entries:
            if lost.state == "back":
                lost.drop_files()
        waiting = [lost for lost in self.entries if lost.state in ("kept", "submitting")]
        if not waiting:
            return
        if not lost_jobs.tells_owners(self.pod):
            log(f"{len(waiting)} lost jobs are not brought back: {lost_jobs.NOT_TOLD}; "
                f"their scripts are in {self.directory}")  # fmt: skip
            return
        back = self._list_back()
        for lost in waiting:
            submission = self._read(lost)[1]
            if submission is not None and 0 < submission.again < lost.job:
                # This one is a second submission, which was lost, too: it comes back instead of the first.
                back.setdefault((submission.again, submission.uid), lost.job)
        # The jobs of a user of whom one hangs come last: each may take that long.
        missing, last = [], []
        for lost in waiting:
            if lost.owner in self.silent:
                last.append(lost)
            elif not self._bring_back(lost, back):
                missing.append(lost.job)
        missing += [lost.job for lost in last if not self._bring_back(lost, back)]
        if missing:
            raise UnclearError("bring lost jobs back", f"{len(missing)} are not back yet, first {min(missing)}")

    def _list_back(self) -> dict[tuple[int, int], int]:
        return already_back(client.run(LIST, self.controller, within=WITHIN_S))

    def _read(self, lost: LostJob) -> tuple[list[bytes], OwnedSubmission | None]:
        pairs = lost_jobs.variables(read_plain(lost.place / ENVIRONMENT, LARGEST_FILE) or b"")
        return pairs, lost_jobs.parse_submission(pairs)

    def _bring_back(self, lost: LostJob, back: Mapping[tuple[int, int], int]) -> bool:
        """Submit one job; return False to retry it later, so that the other jobs do not wait for it."""
        pairs, submission = self._read(lost)
        if submission is None:
            return self._end(lost, 0, "its owner is not known")
        if number_ := back.get((lost.job, submission.uid)):
            return self._end(lost, number_)
        try:
            owner = pwd.getpwuid(submission.uid)
        except KeyError:
            return self._retry_refused(lost, f"there is no user {submission.uid} (any more)")
        if not submission.uid:
            return self._end(lost, 0, "it is a job of root")
        if submission.gid not in os.getgrouplist(owner.pw_name, owner.pw_gid):
            return self._retry_refused(lost, f"{owner.pw_name} is not (any more) in group {submission.gid}")
        return self._start(lost, pairs, submission, owner)

    def _start(
        self, lost: LostJob, pairs: Sequence[bytes], submission: OwnedSubmission, owner: pwd.struct_passwd
    ) -> bool:
        started = lost.put("submitting", why=lost.why)
        if started.state == "back":
            return self._end(lost, started.back_as)
        try:
            number_, problem = self._submit(started, pairs, submission, owner)
        except subprocess.TimeoutExpired:
            return self._unclear(lost, submission, f"{NO_ANSWER} within {WITHIN_S:g} s")
        except UnclearError as error:
            return self._unclear(lost, submission, f"{NO_ANSWER}: {error.why}")
        except OSError as error:
            number_, problem = 0, error.strerror or str(error)
        return self._end(lost, number_) if number_ else self._retry_refused(lost, problem)

    def _unclear(self, lost: LostJob, submission: OwnedSubmission, why: str) -> bool:
        """Give a job up after two tries without answer, where slurmctld itself answers: the user may be the cause."""
        self.silent.add(lost.owner)
        if number_ := self._list_back().get((lost.job, submission.uid)):
            return self._end(lost, number_)
        if _was_silent(lost):
            return self._end(lost, 0, f"{why}, twice")
        lost.put("submitting", why=why)
        return False

    def _retry_refused(self, lost: LostJob, why: str) -> bool:
        """Try again for some hours after the job was kept."""
        saved_at = (lost.place / SCRIPT).stat().st_mtime if (lost.place / SCRIPT).is_file() else 0.0
        if not 0 <= time.time() - saved_at < TRIED_S:
            return self._end(lost, 0, why)
        if not lost.why:
            log(f"lost job {lost.job} is not back yet: {why}; it is tried for {TRIED_S / 3600:g} h")
        lost.put("submitting", why=why)
        return False

    def _end(self, lost: LostJob, number_: int, why: str = "") -> bool:
        if number_:
            self.new_numbers[lost.job] = number_
            lost.put("back", number_).drop_files()
            log(f"job {lost.job} is back as job {number_}, held")
        else:
            ended = lost.put("refused", why=why)
            if ended.state == "back":
                return self._end(lost, ended.back_as)
            log(f"lost job {lost.job} is not brought back: {why}; its script is in {lost.place}")
        return True

    def _submit(
        self, lost: LostJob, pairs: Sequence[bytes], submission: OwnedSubmission, owner: pwd.struct_passwd
    ) -> tuple[int, str]:
        options = lost_jobs.parse_options(submission.options)
        accepted, unknown = arguments(options or {}, self.new_numbers)
        name, words = words_of(options or {})
        work = self.pod.path(WORK) / str(lost.job)
        work.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(mode=0o711)
        ids = (submission.uid, submission.gid)
        try:
            script = work / (re.sub(r"[^\w.+-]", "_", Path(name).name)[:100] or SCRIPT)
            data = read_plain(lost.place / SCRIPT, LARGEST_FILE) or b""
            write_whole(script, data.removesuffix(b"\0"), 0o400, ids)
            complete = options is not None and not unknown
            environment = environment_for(pairs, lost.job, submission.first or submission.again, complete=complete)
            write_whole(work / "environment", environment, 0o400, ids)
            argv = [client.SBATCH, "--parsable", "--hold", f"--export-file={work / 'environment'}", *accepted,
                    "--export=ALL",  # without it Slurm 26.05 leaves the file's variables out
                    f"--chdir={submission.directory or '/'}"]  # fmt: skip
            argv += [f"--job-name={submission.name}"] if submission.name else []
            argv += [str(script), *words]
            return self._outcome(argv, submission, owner)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _outcome(self, argv: Sequence[str], submission: OwnedSubmission, owner: pwd.struct_passwd) -> tuple[int, str]:
        groups = os.getgrouplist(owner.pw_name, submission.gid)
        env = {**client.environment(self.controller), "HOME": "/", "USER": owner.pw_name, "LOGNAME": owner.pw_name}
        try:
            done = ran(argv, within=WITHIN_S, env=env, cwd="/", user=submission.uid, group=submission.gid,
                       extra_groups=groups, preexec_fn=_bound_memory)  # fmt: skip
        except OSError as error:
            return 0, error.strerror or str(error)
        new = number(done.stdout.strip().partition(";")[0])
        if done.returncode == 0 and new:
            return new, ""
        message = client.judge(done.stderr or done.stdout, self.controller)
        if any(words in done.stderr for words in client.NOT_REACHED):
            raise UnclearError("bring lost jobs back", message)
        return 0, f"Slurm refuses it: {message}"


def main() -> int:
    """Bring the lost jobs back; exit 1 where another try may succeed."""
    pod = Pod(os.environ)
    try:
        Bringer(pod).run()
    except (InitError, OSError) as error:
        log(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
