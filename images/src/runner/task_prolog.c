/*
 * Program for slurm.conf's TaskProlog: runs task_prolog.d of the published commit as the job's user, inside the job.
 *
 * It contacts no daemon. The runner (root) leaves a plan: the commit, its scripts, their deadlines, and the files that
 * the plan depends on. While each file is unchanged, the plan holds; otherwise a Python of this program's own does the
 * same. So users have no socket to attack, and gain nothing that they could not reach before. Nothing in the
 * environment is trusted. health/runner/plan.py writes the plan; health/script.py defines the same environment and
 * rules for scripts.
 *
 * Exit codes: 0, or 1 if the task must not start.
 */
#define _GNU_SOURCE
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifndef PLAN
#define PLAN "/run/minivm/task_prolog.plan"
#endif
#ifndef PYTHON
#define PYTHON "/opt/minivm/bin/python3"
#endif
#ifndef OWNER
#define OWNER 0
#endif

#define LARGEST (64 * 1024) /* of a plan; and of a script's output, whose end is kept */
#define MOST_VARIABLES 4096
#define GRACE_MS 1000
#define UNFIT 80
#define PREFIX "MINIVM_JOB_ENV_"

static char plan[LARGEST + 1];
static char *variables[2 * MOST_VARIABLES + 16];
static size_t held;
static pid_t running;
static const char *commit = "", *tree;
static int begun_any;
/* Output for slurmd, kept until it is complete: a switch to the slow way must not print twice. */
static char *said;
static size_t said_size;

#include "settings.h"

static int64_t now_ms(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (int64_t)at.tv_sec * 1000 + at.tv_nsec / 1000000;
}

/* Print everything at once. */
static int tell(void) {
    if (fflush(stdout)) return -1;
    for (size_t at = 0; at < said_size;) {
        ssize_t written = write(1, said + at, said_size - at);
        if (written < 0 && errno != EINTR) return -1;
        if (written > 0) at += (size_t)written;
    }
    return 0;
}

__attribute__((noreturn)) static void slow_way(const char *why) {
    /* By its full path, by which Python finds a virtual environment. */
    char *argv[] = {PYTHON, "-I", "-m", "health.runner.run", "task_prolog", (char *)why, NULL};
    execv(PYTHON, argv);
    fprintf(stderr, "minivm: cannot run the task prolog: %s: %s\n", PYTHON, strerror(errno));
    tell();
    exit(0);
}

static int begins(const char *text, const char *with) { return !strncmp(text, with, strlen(with)); }

/* Return why there is no plan to follow, or NULL. */
static const char *read_plan(void) {
    struct stat status;
    int fd = open(PLAN, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0) return "no plan";
    if (fstat(fd, &status) || !S_ISREG(status.st_mode) || status.st_uid != OWNER || status.st_mode & 022) return "whose plan?";
    ssize_t size = read(fd, plan, LARGEST);
    close(fd);
    if (size < 5 || size >= LARGEST || memcmp(plan + size - 5, "\nend\n", 5)) return "half a plan";
    plan[size] = 0;
    return memchr(plan, 0, (size_t)size) ? "no plan" : NULL;
}

/* Cut the next tab-separated word off a line. */
static char *word(char **rest) {
    char *found = strsep(rest, "\t");
    return found ? found : "";
}

/* Check "link PATH TARGET" or "same PATH STAMP". An absent file has the stamp "-". */
static int still(const char *how, char *rest) {
    char *path = word(&rest), *then = word(&rest), now[4096];
    if (!strcmp(how, "link")) {
        ssize_t size = readlink(path, now, sizeof now - 1);
        now[size < 0 ? 0 : size] = 0;
        return !strcmp(now, then);
    }
    struct stat status;
    if (stat(path, &status)) return errno == ENOENT && !strcmp(then, "-");
    snprintf(now, sizeof now, "%lld.%09ld.%lld.%llu", (long long)status.st_mtim.tv_sec, status.st_mtim.tv_nsec,
             (long long)status.st_size, (unsigned long long)status.st_ino);
    return !strcmp(now, then);
}

/* Set NAME=VALUE, replacing the variable of that name. */
static void set(char *entry) {
    size_t name = (size_t)(strchrnul(entry, '=') - entry) + 1;
    for (size_t at = 0; at < held; at++) {
        if (!strncmp(variables[at], entry, name)) {
            variables[at] = entry;
            return;
        }
    }
    variables[held++] = entry;
}

static void put(const char *name, const char *value) {
    char *entry;
    if (asprintf(&entry, "%s=%s", name, value) < 0) slow_way("no memory");
    set(entry);
}

static int passes(const char *entry) {
    static const char *const known[] = {
        "SLURM_", "SLURMD_", "MINIVM_", "NCCL_", "CUDA_VISIBLE_DEVICES=", "GPU_DEVICE_ORDINAL=",
        "ROCR_VISIBLE_DEVICES=", "ZE_AFFINITY_MASK=", "HOME=", "USER=", "LOGNAME=", "TMPDIR=",
    };
    for (size_t at = 0; at < sizeof known / sizeof *known; at++) {
        if (begins(entry, known[at])) return 1;
    }
    return 0;
}

static int is_identifier(const char *entry) {
    if (!isalpha((unsigned char)*entry) && *entry != '_') return 0;
    while (isalnum((unsigned char)*entry) || *entry == '_') entry++;
    return *entry == '=';
}

/* Build a script's environment: what Slurm set, and under other names the user's variables. */
static void environment(void) {
    size_t count = 0;
    if (held) return;
    for (char **entry = environ; *entry; entry++) {
        if (++count > MOST_VARIABLES) slow_way("a large environment");
        if (passes(*entry)) set(*entry);
    }
    for (char **entry = environ; *entry; entry++) {
        char *copy;
        if (!is_identifier(*entry)) continue;
        if (asprintf(&copy, PREFIX "%s", *entry) < 0) slow_way("no memory");
        set(copy);
    }
    if (!getenv("HOME")) put("HOME", "/");
    put("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/nvidia/bin");
    put("LC_ALL", "C.UTF-8");
    put("MINIVM_KIND", "task_prolog");
    put("MINIVM_SCRIPTS_COMMIT", commit);
    put("MINIVM_SCRIPTS_TREE", tree);
    put("MINIVM_UNFIT", "80");
    variables[held] = NULL;
}

struct stream {
    int fd, open;
    size_t size;
    char text[LARGEST + 1];
};
static struct stream out, err;

/* Read what is there; keep the end of a flood. */
static int take(struct stream *one) {
    static char chunk[LARGEST];
    ssize_t got = read(one->fd, chunk, sizeof chunk);
    if (got <= 0) return got < 0 && errno == EAGAIN ? -1 : 0;
    size_t kept = one->size + (size_t)got > LARGEST ? LARGEST - (size_t)got : one->size;
    memmove(one->text, one->text + one->size - kept, kept);
    memcpy(one->text + kept, chunk, (size_t)got);
    one->size = kept + (size_t)got;
    return 1;
}

static void ended(int number) {
    if (running > 0) kill(-running, SIGKILL);
    _exit(number == SIGTERM ? 0 : 1);
}

/* Our end does not block; the script's does, since a program that meets EAGAIN loses lines. */
static int make_pipe(struct stream *one) {
    int ends[2];
    one->fd = -1;
    one->open = 0;
    one->size = 0;
    if (pipe2(ends, O_CLOEXEC)) return -1;
    fcntl(ends[0], F_SETFL, O_NONBLOCK);
    one->fd = ends[0];
    one->open = 1;
    return ends[1];
}

/* In a fork: a look that hangs is given up like a script. What it does not handle is left to the script. */
static void look(const char *path, int output, int errors) {
    char *argv[] = {(char *)path, NULL};
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    for (int at = 0; at < 3; at++) signal((int[]){SIGTERM, SIGPIPE, SIGINT}[at], SIG_DFL);
    int nothing = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (setsid() < 0 || dup2(nothing, 0) < 0 || dup2(output, 1) < 0 || dup2(errors, 2) < 0) _exit(1);
    if (!(stdout = fdopen(1, "w"))) _exit(1);
    if (say_nccl()) _exit(fflush(stdout) ? 1 : 0);
    execve(path, argv, variables);
    _exit(126);
}

static pid_t start(const char *path, int looks) {
    posix_spawn_file_actions_t streams;
    posix_spawnattr_t how;
    sigset_t none, ours;
    pid_t pid = -1;
    int output = make_pipe(&out), errors = make_pipe(&err);
    char *argv[] = {(char *)path, NULL};
    sigemptyset(&none);
    sigemptyset(&ours);
    sigaddset(&ours, SIGTERM);
    sigaddset(&ours, SIGPIPE);
    sigaddset(&ours, SIGINT);
    posix_spawn_file_actions_init(&streams);
    posix_spawn_file_actions_addopen(&streams, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_adddup2(&streams, output, 1);
    posix_spawn_file_actions_adddup2(&streams, errors, 2);
    posix_spawnattr_init(&how);
    posix_spawnattr_setflags(&how, POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSIGMASK);
    posix_spawnattr_setsigmask(&how, &none);
    posix_spawnattr_setsigdefault(&how, &ours);
    if ((output < 0 || errors < 0) && !begun_any) slow_way("no descriptors");
    environment();
    if (output < 0 || errors < 0) {
        pid = -1; /* the slow way would repeat scripts that have run */
    } else if (looks) {
        pid = fork();
        if (!pid) look(path, output, errors);
    } else if (posix_spawn(&pid, path, &streams, &how, argv, variables)) pid = -1;
    close(output);
    close(errors);
    begun_any |= pid > 0;
    return pid;
}

/* TERM, a moment, KILL. A process stuck in the kernel is not waited for. */
static void end(pid_t pid, int process) {
    for (int turn = 0; turn < 2; turn++) {
        struct pollfd one = {process, POLLIN, 0};
        kill(-pid, turn ? SIGKILL : SIGTERM);
        if (poll(&one, 1, GRACE_MS) > 0) return;
    }
}

/* Return the script's exit code, or -1 if it did not start, did not end by itself, or not in time. */
static int run(const char *path, int64_t until, int looks) {
    int status = 0, over = 0;
    pid_t pid = start(path, looks);
    if (pid < 0) {
        close(out.fd);
        close(err.fd);
        return -1;
    }
    running = pid;
    int process = (int)syscall(SYS_pidfd_open, pid, 0);
    while (process >= 0 && !over) {
        int64_t left = until - now_ms();
        struct pollfd three[3] = {{process, POLLIN, 0}, {out.open ? out.fd : -1, POLLIN, 0}, {err.open ? err.fd : -1, POLLIN, 0}};
        int found = poll(three, 3, left < 0 ? 0 : (int)left);
        if (found == 0 || (found < 0 && errno != EINTR)) break;
        if (found < 0) continue;
        if (three[1].revents && !take(&out)) out.open = 0;
        if (three[2].revents && !take(&err)) err.open = 0;
        over = three[0].revents != 0;
        if (now_ms() >= until) break;
    }
    if (!over && process >= 0) end(pid, process);
    /* A process that outlives the script may hold the pipe: read what is there, and do not wait for its end. */
    for (int turn = 0; turn < 4 && out.open && take(&out) > 0; turn++) continue;
    for (int turn = 0; turn < 4 && err.open && take(&err) > 0; turn++) continue;
    int gone = waitpid(pid, &status, over ? 0 : WNOHANG) == pid;
    /* Also end what the script left running in its session. */
    kill(-pid, SIGKILL);
    running = 0;
    close(process);
    close(out.fd);
    close(err.fd);
    return over && gone && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* Pass on whole lines that slurmd understands; tell if one refuses the task. */
static int pass_on(void) {
    out.text[out.size] = 0;
    char *rest = out.text, *line;
    while ((line = strsep(&rest, "\n"))) {
        if (begins(line, "export ") || begins(line, "unset ") || begins(line, "print ")) puts(line);
        if (begins(line, "refuse ")) {
            printf("print minivm: %s\n", line + strlen("refuse "));
            return 1;
        }
    }
    return 0;
}

int main(void) {
    for (int fd = open("/dev/null", O_RDWR); fd >= 0; fd = dup(fd)) {
        if (fd > 2) {
            close(fd);
            break;
        }
    }
    /* Root's few tasks get records from Python; a user may not write them. */
    if (getuid() == 0 || geteuid() != getuid()) slow_way("root's own");
    const char *why = read_plan();
    if (why) slow_way(why);
    char *rest = plan, *line;
    int64_t begun = now_ms(), budget_ms = 0;
    if (strcmp(strsep(&rest, "\n"), "minivm task_prolog 2")) slow_way("another plan");
    while ((line = strsep(&rest, "\n")) && strcmp(line, "scripts")) {
        char *what = word(&line);
        if (!strcmp(what, "link") || !strcmp(what, "same")) {
            if (!still(what, line)) slow_way("the plan is of before");
        } else if (!strcmp(what, "commit")) {
            commit = word(&line);
        } else if (!strcmp(what, "tree")) {
            tree = word(&line);
        } else if (!strcmp(what, "budget")) {
            budget_ms = strtoll(word(&line), NULL, 10);
        } else if (!strcmp(what, "set") && settings_held < MOST_SETTINGS) {
            struct setting *one = &settings[settings_held++];
            one->of = word(&line);
            one->name = word(&line);
            one->value = word(&line);
        } else {
            slow_way("another plan");
        }
    }
    if (!tree || chdir("/")) slow_way("another plan");
    if (!(stdout = open_memstream(&said, &said_size))) slow_way("no memory");
    signal(SIGTERM, ended);
    signal(SIGINT, ended);
    int fails = 0;
    while ((line = strsep(&rest, "\n")) && strcmp(line, "end")) {
        char path[8192], *name = word(&line);
        int64_t deadline_ms = strtoll(word(&line), NULL, 10), now = now_ms();
        int stops = !strcmp(word(&line), "fail");
        /* The script's variable, from the task's own environment as it came. */
        const char *about = word(&line), *given = *about ? getenv(about) : "";
        if (*about && (!given || !*given)) continue;
        const char *known = word(&line);
        int directories = !strcmp(known, "directories"), nccl = !strcmp(known, "nccl");
        int64_t until = now + deadline_ms < begun + budget_ms ? now + deadline_ms : begun + budget_ms;
        if (snprintf(path, sizeof path, "%s/task_prolog.d/%s", tree, name) >= (int)sizeof path) continue;
        if (until - now > 100 && directories && say_directories()) continue;
        if (until - now > 100 && nccl && !has_adapters() && say_nccl()) continue;
        int code = until - now > 100 ? run(path, until, nccl) : -1;
        if (code == UNFIT) continue; /* a user's process cannot declare a node unfit: not recorded */
        if (code == 0 && pass_on()) {
            fails = 1;
            break;
        }
        if (code != 0 && stops) {
            err.text[err.size] = 0;
            fprintf(stderr, "task_prolog.d/%s: exit %d: %s\n", name, code, err.text);
            fails = 1;
        }
    }
    return tell() ? 1 : fails;
}
