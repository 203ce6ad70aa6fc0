"""The library of `slurm.fastScripts` (images/src/runner/launch.c), in a small program that calls what slurmd calls.

tests/cluster/test_jobs.py shows in a real cluster which processes load it.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.process.runner_world import SOURCES

GCC = ["gcc", "-std=c17", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC"]
HOUR = 3600 * 1000
# slurm's launcher, its end of a script, and the pauses of somebody else, by the first word.
PROGRAM = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern char **environ;

static long since(struct timespec *begun) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (now.tv_sec - begun->tv_sec) * 1000 + (now.tv_nsec - begun->tv_nsec) / 1000000;
}
static int is(char *word, const char *what) { return !strcmp(word, what); }
static pid_t child(int milliseconds) {
    signal(SIGTERM, SIG_IGN);
    pid_t pid = fork();
    if (!pid) {
        setpgid(0, 0);
        usleep(milliseconds * 1000);
        _exit(7);
    }
    setpgid(pid, pid);
    return pid;
}

/* Further from main than a short function is long. */
#define FAR __attribute__((noinline, noclone))
#define PADDING __asm__ volatile(".rept 2048\n nop\n .endr")
FAR static void elsewhere(void) {
    PADDING;
    usleep(10000);
    PADDING;
}
FAR static void poll_elsewhere(pid_t pid) {
    PADDING;
    kill(pid, SIGKILL);
    poll(NULL, 0, 50);
    PADDING;
}

int main(int argc, char **argv) {
    if (argc < 2) return 2;
    struct timespec begun;
    int status = 0;
    clock_gettime(CLOCK_MONOTONIC, &begun);
    if (is(argv[1], "launch") || is(argv[1], "exec")) {
        open("/dev/null", O_RDONLY);
        fexecve(open(argv[2], O_PATH | O_CLOEXEC), argv + 3, environ);
        printf("not started: %s\n", strerror(errno));
        return 3;
    }
    if (is(argv[1], "nobody")) {
        pid_t pid = child(0);
        waitpid(pid, &status, 0);
        if (!killpg(pid, SIGTERM) || errno != ESRCH) return 4;
        for (int turn = 0; turn < 100000; turn++) { /* at 10 ms each a quarter of an hour */
            killpg(pid, SIGTERM);
            usleep(10000);
        }
        clock_gettime(CLOCK_MONOTONIC, &begun);
        usleep(10000);
        printf("%d %d\n", WEXITSTATUS(status), since(&begun) >= 10);
    }
    if (is(argv[1], "unrelated")) { /* each sleep comes after a TERM to an empty group, and is not Slurm's */
        pid_t pid = child(0);
        waitpid(pid, &status, 0);
        if (!killpg(pid, SIGTERM) || errno != ESRCH) return 4;
        usleep(50000);
        printf("%d", since(&begun) >= 50);
        clock_gettime(CLOCK_MONOTONIC, &begun);
        killpg(pid, SIGTERM);
        poll(NULL, 0, 0);
        usleep(10000);
        printf(" %d", since(&begun) >= 10);
        clock_gettime(CLOCK_MONOTONIC, &begun);
        killpg(pid, SIGTERM);
        elsewhere();
        printf(" %d\n", since(&begun) >= 10);
    }
    if (is(argv[1], "unrelated-poll")) { /* each pause comes after a look at a child that lives, and is not for it */
        pid_t pid = child(3600000);
        if (waitpid(pid, &status, WNOHANG)) return 5;
        poll_elsewhere(pid);
        printf("%d", since(&begun) >= 50);
        kill(pid, SIGKILL);
        if (waitpid(pid, &status, 0) != pid) return 6;
        pid = child(3600000);
        clock_gettime(CLOCK_MONOTONIC, &begun);
        if (waitpid(pid, &status, WNOHANG)) return 5;
        usleep(0);
        kill(pid, SIGKILL);
        poll(NULL, 0, 50);
        printf(" %d\n", since(&begun) >= 50);
    }
    if (is(argv[1], "somebody")) {
        pid_t pid = child(3600000);
        if (killpg(pid, SIGTERM)) return 4;
        usleep(50000);
        printf("%d", since(&begun) >= 50);
        if (waitpid(pid, &status, WNOHANG)) return 5;
        if (killpg(pid, SIGKILL) || waitpid(pid, &status, 0) != pid) return 6;
        printf(" %d\n", WTERMSIG(status));
    }
    if (is(argv[1], "early")) { /* nobody is in its group: it has none of its own yet */
        pid_t pid = fork();
        if (!pid) {
            pause();
            _exit(7);
        }
        if (!killpg(pid, SIGTERM) || errno != ESRCH) return 4;
        usleep(50000);
        printf("%d\n", since(&begun) >= 50);
        kill(pid, SIGKILL);
    }
    if (is(argv[1], "end")) {
        pid_t pid = child(100);
        while (!waitpid(pid, &status, WNOHANG)) poll(NULL, 0, atoi(argv[2]));
        printf("%d\n", WEXITSTATUS(status));
    }
    if (is(argv[1], "alive")) {
        pid_t pid = child(3600000);
        if (waitpid(pid, &status, WNOHANG)) return 5;
        int said = poll(NULL, 0, 50);
        printf("%d %d\n", said, since(&begun) >= 50);
        kill(pid, SIGKILL);
    }
    if (is(argv[1], "traced")) { /* dead, and its parent is not told before its tracer is */
        int ends[2];
        char state = 0;
        pid_t pid = child(3600000);
        if (pipe(ends)) return 5;
        pid_t tracer = fork();
        if (!tracer) {
            if (!ptrace(PTRACE_SEIZE, pid, NULL, NULL) && write(ends[1], "x", 1) == 1) pause();
            _exit(7);
        }
        close(ends[1]);
        if (read(ends[0], &status, 1) != 1) return 6;
        kill(pid, SIGKILL);
        char path[64];
        snprintf(path, sizeof path, "/proc/%d/stat", pid);
        while (state != 'Z') {
            FILE *file = fopen(path, "r");
            if (!file) return 7;
            if (fscanf(file, "%*d %*s %c", &state) != 1) state = 0;
            fclose(file);
        }
        if (waitpid(pid, &status, WNOHANG)) return 8;
        clock_gettime(CLOCK_MONOTONIC, &begun);
        int said = poll(NULL, 0, 50);
        printf("%d %d", said, since(&begun) >= 50);
        kill(tracer, SIGKILL);
        if (waitpid(pid, &status, 0) != pid) return 9;
        printf(" %d\n", WTERMSIG(status));
    }
    if (is(argv[1], "others")) {
        int ends[2];
        struct pollfd read_end = {0};
        if (pipe(ends) || write(ends[1], "x", 1) != 1) return 5;
        read_end.fd = ends[0];
        read_end.events = POLLIN;
        printf("%d", poll(&read_end, 1, -1));
        printf(" %d", read_end.revents == POLLIN);
        if (read(ends[0], &status, 1) != 1) return 6;
        printf(" %d", poll(&read_end, 1, 0));
        printf(" %d", poll(NULL, 0, 50));
        printf(" %d", since(&begun) >= 50);
        printf(" %d", killpg(-5, 0));
        printf(" %d\n", errno == EINVAL);
    }
    fflush(stdout);
    return 0;
}
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`slurmd` and `slurmstepd`, one program, and the library."""
    root = tmp_path_factory.mktemp("launch")
    (root / "program.c").write_text(PROGRAM)
    library = root / "launch.so"
    shared = ["-shared", f'-DOWN="{library}"', "-o", str(library), str(SOURCES / "launch.c")]
    subprocess.run([*GCC, *shared], check=True)
    subprocess.run([*GCC, "-o", str(root / "slurmd"), str(root / "program.c")], check=True)
    (root / "site.c").write_text("int site_preload;\n")
    subprocess.run([*GCC, "-shared", "-o", str(root / "site.so"), str(root / "site.c")], check=True)
    os.link(root / "slurmd", root / "slurmstepd")
    return root


def told(made: Path, *words: str, name: str = "slurmd", **environment: str) -> subprocess.CompletedProcess[str]:
    loaded = {"LD_PRELOAD": str(made / "launch.so"), "PATH": os.environ["PATH"], **environment}
    return subprocess.run([str(made / name), *words], env=loaded, capture_output=True, text=True, timeout=60)


def script(made: Path, text: str) -> str:
    path = made / "script"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def launched(made: Path, path: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Launch through the library; the program that slurmd would exec fails, so success proves that it did not start."""
    return told(made, "launch", "/bin/false", "slurmd", "slurm_script_launcher", path, "named", "word", **environment)


def test_a_script_is_started_at_once(made: Path) -> None:
    """With its words and its environment, a group of its own, and no descriptor but the three."""
    path = script(made, 'echo "$0 $1 $ASKED $(ps -o pgid= -p $$ | tr -d " ") $$"; ls /proc/self/fd | wc -l')
    first, second = launched(made, path, ASKED="yes").stdout.splitlines()
    _, word, asked, group, pid = first.split()
    assert (word, asked, group) == ("word", "yes", pid)
    assert second == "4", "ls has one of its own"


@pytest.mark.parametrize("site", ["", "{site}:", " {site} "], ids=["alone", "before", "spaces"])
def test_a_script_inherits_no_preload_of_slurmd(made: Path, site: str) -> None:
    """Neither the library nor what the site preloads into slurmd beside it."""
    path = script(made, "tr '\\0' '\\n' </proc/$$/environ; grep 'launch.so\\|site.so' /proc/$$/maps")
    given = f"{site.format(site=made / 'site.so')}{made}/launch.so"
    done = launched(made, path, ASKED="yes", LD_PRELOAD=given)
    assert "ASKED=yes" in done.stdout
    assert "LD_PRELOAD" not in done.stdout and ".so" not in done.stdout
    assert done.stderr == ""


def test_a_preload_without_the_library_is_left_alone(made: Path) -> None:
    """The library takes back what it came with, and nothing that a script's caller chose."""
    line = ("exec", "/usr/bin/env", "env")
    assert f"LD_PRELOAD={made}/site.so" in told(made, *line, LD_PRELOAD=f"{made}/site.so").stdout


def test_only_slurmd_hands_the_library_on(made: Path) -> None:
    """To slurmstepd; what slurmstepd starts, a user's task or a container's program, has no preload of slurmd's."""
    env = ("exec", "/bin/cat", "cat", "/proc/self/environ")
    for given in (f"{made}/launch.so", f"{made}/site.so:{made}/launch.so"):
        assert "LD_PRELOAD" in told(made, *env, LD_PRELOAD=given).stdout
        assert "LD_PRELOAD" not in told(made, *env, name="slurmstepd", LD_PRELOAD=given).stdout


def test_a_script_that_is_not_there_is_told(made: Path) -> None:
    done = launched(made, str(made / "absent"))
    assert done.returncode == 127
    assert done.stderr == f"minivm: cannot start {made}/absent: No such file or directory\n"


def test_any_other_program_is_started_as_ever(made: Path) -> None:
    assert told(made, "exec", "/bin/echo", "echo", "slurm_script_launcher", "x").stdout == "slurm_script_launcher x\n"
    assert told(made, "exec", str(made / "absent"), "x").returncode == 3


def test_a_group_in_which_nobody_is_left_is_not_waited_for(made: Path) -> None:
    """Slurm's 10 ms are skipped, a hundred thousand times; the same sleep without a TERM before it is not."""
    assert told(made, "nobody").stdout == "7 1\n"


def test_a_sleep_that_is_not_slurm_s_is_slept(made: Path) -> None:
    """A sleep of another length, after another call, or in another function is not shortened."""
    assert told(made, "unrelated").stdout == "1 1 1\n"


def test_a_pause_that_is_not_slurm_s_is_waited_out(made: Path) -> None:
    """The child's end does not shorten a pause in another function or after another call."""
    assert told(made, "unrelated-poll").stdout == "1 1\n"


def test_a_group_in_which_somebody_is_left_is_waited_for(made: Path) -> None:
    assert told(made, "somebody").stdout == "1 9\n"


def test_one_that_has_not_made_its_group_yet_is_given_the_time_to(made: Path) -> None:
    """The KILL that follows would not find it either, and slurmd waits for its end without a limit."""
    assert told(made, "early").stdout == "1\n"


def test_the_end_of_a_process_ends_the_wait_for_it(made: Path) -> None:
    assert told(made, "end", str(HOUR)).stdout == "7\n"


def test_one_that_lives_is_waited_for_no_longer_than_asked(made: Path) -> None:
    assert told(made, "alive").stdout == "0 1\n"


def test_one_that_is_dead_to_its_tracer_alone_is_waited_for_too(made: Path) -> None:
    """Its parent is told that it lives: a look without a pause after the other would use up its time limit at once."""
    assert told(made, "traced").stdout == "0 1 9\n"


def test_all_others_wait_as_ever(made: Path) -> None:
    assert told(made, "others").stdout == "1 1 0 0 1 -1 1\n"
