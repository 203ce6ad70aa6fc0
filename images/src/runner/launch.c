/*
 * Start Slurm's scripts faster: preloaded into slurmd where `slurm.fastScripts` is set (init/prepare/node.py).
 *
 * slurmd executes itself again to start a prolog or an epilog, which costs more than most scripts. After each script it
 * sends TERM to the script's process group and sleeps for 10 ms, also where the group is empty; and where a script closes
 * its output a moment before it exits, slurmd looks for its exit 10 ms later. This library starts the script directly, skips
 * the sleep after an empty group, and ends the pause when the process exits. Every other call is the C library's own:
 * a shortcut is taken only by the thread, the function and the arguments that Slurm's run_command.c uses.
 *
 * Neither a script nor a task inherits the preload: see without_preload() and load().
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifndef OWN
#define OWN "/usr/libexec/minivm/launch.so"
#endif
#define PRELOAD "LD_PRELOAD="
#define MODE "slurm_script_launcher" /* slurmd MODE PATH ARGV...: how slurmd executes itself again */
#define TERM_PAUSE 10000             /* microseconds that Slurm sleeps between TERM and KILL of a script's group */
#define SAME_FUNCTION 1024           /* bytes between two calls of one short function */

/*
 * What this thread's last call found, and the address that the call returned to; empty after the next call of any function
 * below. So a shortcut belongs to the call right after, from the same function.
 */
#define OF_A_THREAD static __thread __attribute__((tls_model("initial-exec")))
OF_A_THREAD uintptr_t empty_group_at;
OF_A_THREAD uintptr_t alive_at;
OF_A_THREAD pid_t alive;
static int (*c_librarys_fexecve)(int, char *const[], char *const[]);
static const char *preload; /* LD_PRELOAD as this process was started with, where it names this library */

#define CALLER ((uintptr_t)__builtin_return_address(0))
static int near(uintptr_t call, uintptr_t caller) {
    return call && (call < caller ? caller - call : call - caller) < SAME_FUNCTION;
}
static void forget(void) {
    empty_group_at = alive_at = 0;
    alive = 0;
}

/* Tell if a list for LD_PRELOAD names this library: the loader splits it at colons and spaces. */
static int names_us(const char *list) {
    for (size_t length; *list; list += length + (list[length] != 0)) {
        length = strcspn(list, ": ");
        if (length == strlen(OWN) && !strncmp(list, OWN, length)) return 1;
    }
    return 0;
}

/* slurmd hands the preload to slurmstepd, and to itself when it restarts; no other program gets it. */
__attribute__((constructor)) static void load(void) {
    const char *given = getenv("LD_PRELOAD");
    c_librarys_fexecve = (int (*)(int, char *const[], char *const[]))dlsym(RTLD_NEXT, "fexecve");
    if (!given || !names_us(given)) return;
    preload = strdup(given);
    if (strcmp(program_invocation_short_name, "slurmd")) unsetenv("LD_PRELOAD");
}

/* Take slurmd's own preload out of a script's environment; one that the script's caller chose stays. */
static void without_preload(char *const env[]) {
    char **kept = (char **)env;
    for (char *const *entry = env; *entry; entry++) {
        const char *list = *entry + strlen(PRELOAD);
        int is_ours = !strncmp(*entry, PRELOAD, strlen(PRELOAD)) && (names_us(list) || (preload && !strcmp(list, preload)));
        if (!is_ours) *kept++ = *entry;
    }
    *kept = NULL;
}

/* In the child of a process with many threads: nothing here takes a lock. */
static void start_script(char *const argv[], char *const env[]) {
    setpgid(0, 0);
    /* The system calls: those of the C library ask its other threads, of which a child has none. */
    if (!syscall(SYS_setresgid, getegid(), getegid(), -1) && !syscall(SYS_setresuid, geteuid(), geteuid(), -1)) {
        execve(argv[2], argv + 3, env);
    }
    const char *words[] = {"minivm: cannot start ", argv[2], ": ", strerrordesc_np(errno), "\n"};
    for (size_t at = 0; at < sizeof words / sizeof *words; at++) {
        if (write(2, words[at], strlen(words[at])) < 0) break;
    }
    _exit(127);
}

int fexecve(int fd, char *const argv[], char *const env[]) {
    forget();
    if (argv[0] && argv[1] && argv[2] && argv[3] && !strcmp(argv[1], MODE)) {
        without_preload(env);
        /* A kernel that cannot close all descriptors at once leaves it to Slurm's own way. */
        if (!close_range(3, ~0U, 0)) start_script(argv, env);
    }
    return c_librarys_fexecve(fd, argv, env);
}

int killpg(pid_t group, int signal) {
    forget();
    if (group < 0) {
        errno = EINVAL;
        return -1;
    }
    int failed = kill(-group, signal);
    int why = errno;
    /* A process that has not made its group yet is not gone: it needs the sleep, or the KILL misses it too. */
    if (failed && why == ESRCH && signal == SIGTERM && kill(group, 0) && errno == ESRCH) empty_group_at = CALLER;
    errno = why;
    return failed;
}

static struct timespec span(long long microseconds) {
    return (struct timespec){.tv_sec = microseconds / 1000000, .tv_nsec = microseconds % 1000000 * 1000};
}

int usleep(useconds_t microseconds) {
    int skip = microseconds == TERM_PAUSE && near(empty_group_at, CALLER);
    forget();
    if (skip) return 0;
    struct timespec time = span(microseconds);
    return nanosleep(&time, NULL);
}

pid_t waitpid(pid_t pid, int *status, int options) {
    forget();
    pid_t found = wait4(pid, status, options, NULL);
    if (!found && pid > 0 && options == WNOHANG) {
        alive = pid;
        alive_at = CALLER;
    }
    return found;
}

int poll(struct pollfd *files, nfds_t count, int milliseconds) {
    struct timespec time = span(milliseconds * 1000LL);
    pid_t pid = near(alive_at, CALLER) ? alive : 0;
    forget();
    int end = pid && !files && !count && milliseconds > 0 ? (int)syscall(SYS_pidfd_open, pid, 0) : -1;
    if (end < 0) return ppoll(files, count, milliseconds < 0 ? NULL : &time, NULL);
    struct pollfd ended = {.fd = end, .events = POLLIN};
    int found = ppoll(&ended, 1, &time, NULL);
    int why = errno;
    close(end);
    /* A traced process is dead before its parent may know: a caller that looks again would loop without a pause. */
    siginfo_t told = {0};
    if (found > 0 && !waitid(P_PID, (id_t)pid, &told, WEXITED | WNOHANG | WNOWAIT) && !told.si_pid) {
        return ppoll(NULL, 0, &time, NULL);
    }
    errno = why;
    return found < 0 ? -1 : 0;
}
