/*
 * What slurmd and slurmstepd load before the C library: how they start a script, and what they wait for after it.
 *
 * slurmd starts itself anew to start a prolog or an epilog, which costs more than most of them. After each script it
 * sleeps for 10 ms so that what the script has left may end, also where it has left nothing; and where a script's output
 * ends a moment before the script it looks for its end 10 ms later. Here a script is started at once, a group in which
 * nobody is left is not waited for, and the end of a process ends the wait for it. For all other callers the functions
 * are the C library's own.
 *
 * It acts on nothing but what its own process asks for, and is in no program that Slurm starts: neither a script nor a
 * user's task inherits it. (Taken from the environment of the service slurmd, minivm is without it.)
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifndef OWN
#define OWN "/usr/libexec/minivm/launch.so"
#endif
#define HERE "LD_PRELOAD=" OWN
#define MODE "slurm_script_launcher" /* slurmd MODE PATH ARGV...: what it would tell itself */

/* Of this thread's last call: the group had nobody left in it; the child had not ended yet. */
#define OF_A_THREAD static __thread __attribute__((tls_model("initial-exec")))
OF_A_THREAD int nobody_left;
OF_A_THREAD pid_t awaited;
static int (*c_librarys_fexecve)(int, char *const[], char *const[]);

/* slurmd hands it on to slurmstepd, and to itself when it is told to begin anew; from there on it goes nowhere. */
__attribute__((constructor)) static void load(void) {
    const char *given = getenv("LD_PRELOAD");
    c_librarys_fexecve = (int (*)(int, char *const[], char *const[]))dlsym(RTLD_NEXT, "fexecve");
    if (given && !strcmp(given, OWN) && strcmp(program_invocation_short_name, "slurmd")) unsetenv("LD_PRELOAD");
}

/* In the child of a process with many threads: nothing here takes a lock. */
static void start_script(char *const argv[], char *const env[]) {
    char **kept = (char **)env;
    for (char *const *entry = env; *entry; entry++) {
        if (strcmp(*entry, HERE)) *kept++ = *entry;
    }
    *kept = NULL;
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
    int is_script = argv[0] && argv[1] && argv[2] && argv[3] && !strcmp(argv[1], MODE);
    /* A kernel that cannot close them all at once has Slurm do it in its way. */
    if (is_script && !close_range(3, ~0U, 0)) start_script(argv, env);
    return c_librarys_fexecve(fd, argv, env);
}

int killpg(pid_t group, int signal) {
    if (group < 0) {
        errno = EINVAL;
        return -1;
    }
    int failed = kill(-group, signal);
    int why = errno;
    /* One that runs and has not made its group yet is not gone: the sleep is its time to, or the KILL misses it too. */
    nobody_left = failed && why == ESRCH && signal == SIGTERM && kill(group, 0) && errno == ESRCH;
    errno = why;
    return failed;
}

static struct timespec span(long long microseconds) {
    return (struct timespec){.tv_sec = microseconds / 1000000, .tv_nsec = microseconds % 1000000 * 1000};
}

int usleep(useconds_t microseconds) {
    if (nobody_left) {
        nobody_left = 0;
        return 0;
    }
    struct timespec time = span(microseconds);
    return nanosleep(&time, NULL);
}

pid_t waitpid(pid_t pid, int *status, int options) {
    pid_t found = wait4(pid, status, options, NULL);
    awaited = !found && pid > 0 ? pid : 0;
    return found;
}

int poll(struct pollfd *files, nfds_t count, int milliseconds) {
    struct timespec time = span(milliseconds * 1000LL);
    pid_t pid = awaited;
    awaited = 0;
    int end = pid && !count && milliseconds > 0 ? (int)syscall(SYS_pidfd_open, pid, 0) : -1;
    if (end < 0) return ppoll(files, count, milliseconds < 0 ? NULL : &time, NULL);
    struct pollfd ended = {.fd = end, .events = POLLIN};
    int found = ppoll(&ended, 1, &time, NULL);
    int why = errno;
    close(end);
    /* One that is traced has ended before its parent may know: whoever looks would look again without a pause. */
    siginfo_t told = {0};
    if (found > 0 && !waitid(P_PID, (id_t)pid, &told, WEXITED | WNOHANG | WNOWAIT) && !told.si_pid) {
        return ppoll(NULL, 0, &time, NULL);
    }
    errno = why;
    return found < 0 ? -1 : 0;
}
