/*
 * Program for slurm.conf's Prolog, Epilog and HealthCheckProgram: passes the run to the resident runner and waits for
 * the answer. If the runner is absent, does not answer in time, or ends in the middle, this program does the same run
 * with a Python of its own: slower, otherwise equal.
 *
 * A run starts only on our "go": a runner that did not answer in time has run nothing. Nothing in the environment
 * is trusted; all of it is passed on. health/runner/worker.py is the other end.
 *
 * Compiled once for each KIND. Exit codes: the run's own, 0 or 1.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#ifndef KIND
#error "compile with -DKIND='\"prolog\"'"
#endif
#ifndef FOLDER
#define FOLDER "/run/minivm/runner"
#endif
#ifndef PYTHON
#define PYTHON "/opt/minivm/bin/python3"
#endif

#define MOST (4u << 20)   /* bytes of environment: the kernel itself takes 2 MiB, with arguments */
#define PATIENCE_MS 3000  /* until a child of the runner takes the run, also on a busy node */
#define IMPATIENCE_MS 200 /* the same, if the last run was missed */
#define BEYOND_MS 8000    /* the run's own deadlines end it before this: then give it up without stopping the job */

extern char **environ;

static int64_t now_ms(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (int64_t)at.tv_sec * 1000 + at.tv_nsec / 1000000;
}

/* Tell if the socket is ready in time. */
static int ready(int fd, short what, int64_t until) {
    for (;;) {
        int64_t left = until - now_ms();
        struct pollfd one = {fd, what, 0};
        int found = poll(&one, 1, left < 0 ? 0 : (int)left);
        if (found > 0) return 1;
        if (found == 0 || errno != EINTR) return 0;
    }
}

static int send_all(int fd, const char *data, size_t size, int64_t until) {
    while (size) {
        ssize_t sent = send(fd, data, size, MSG_NOSIGNAL);
        if (sent > 0) {
            data += sent;
            size -= (size_t)sent;
        } else if (errno == EINTR) {
            continue;
        } else if (errno != EAGAIN || !ready(fd, POLLOUT, until)) {
            return 0;
        }
    }
    return 1;
}

/* Send the request in one message if it fits: each message wakes the runner. */
static char waiting[1 << 16];
static size_t waits;

static int flush(int fd, int64_t until) {
    size_t size = waits;
    waits = 0;
    return send_all(fd, waiting, size, until);
}

static int put(int fd, const char *data, size_t size, int64_t until) {
    if (size > sizeof waiting - waits && !flush(fd, until)) return 0;
    if (size > sizeof waiting) return send_all(fd, data, size, until);
    memcpy(waiting + waits, data, size);
    waits += size;
    return 1;
}

/* Return the bytes read before the end, or -1 if the time is over. */
static int receive(int fd, unsigned char *data, int size, int64_t until) {
    int got = 0;
    while (got < size) {
        ssize_t taken = recv(fd, data + got, (size_t)(size - got), 0);
        if (taken > 0) {
            got += (int)taken;
        } else if (taken == 0) {
            return got;
        } else if (errno == EAGAIN) {
            if (!ready(fd, POLLIN, until)) return -1;
        } else if (errno != EINTR) {
            return got;
        }
    }
    return got;
}

/* Print the run's output. Our own descriptors are passed to nobody: slurmd waits for their end. */
static void pass_on(int fd, int size, int64_t until) {
    static unsigned char text[1 << 16];
    int got = receive(fd, text, size, until);
    for (int at = 0; at < got;) {
        ssize_t written = write(2, text + at, (size_t)(got - at));
        if (written <= 0 && errno != EINTR) return;
        if (written > 0) at += (int)written;
    }
}

/* Return the exit code; or -1, with the reason why the runner sent none. */
static int ask(const char **why) {
    struct sockaddr_un place = {.sun_family = AF_UNIX, .sun_path = FOLDER "/socket"};
    int64_t until = now_ms() + (access(FOLDER "/missed", F_OK) ? PATIENCE_MS : IMPATIENCE_MS);
    size_t size = 0;
    for (char **entry = environ; *entry; entry++) {
        size += strlen(*entry) + 1;
        if (size > MOST) return *why = "the environment is too large for it", -1;
    }
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return *why = strerror(errno), -1;
    if (connect(fd, (struct sockaddr *)&place, sizeof place)) {
        /* EAGAIN: the runner has accepted nothing for so long that its queue is full. */
        return *why = errno == EAGAIN ? "its queue is full" : "it is not running", -1;
    }
    char head[64];
    int length = snprintf(head, sizeof head, "minivm 1 %s %zu\n", KIND, size);
    int sent = put(fd, head, (size_t)length, until);
    for (char **entry = environ; *entry && sent; entry++) sent = put(fd, *entry, strlen(*entry) + 1, until);
    if (!sent || !flush(fd, until)) return *why = "it did not read the request in time", -1;
    unsigned char taken[5], ended[3];
    int got = receive(fd, taken, sizeof taken, until);
    if (got != sizeof taken || taken[0] != 'A') return *why = got < 0 ? "it did not answer in time" : "it rejected the request", -1;
    uint32_t budget_ms = taken[1] | (uint32_t)taken[2] << 8 | (uint32_t)taken[3] << 16 | (uint32_t)taken[4] << 24;
    /* A runner that has died is noticed by the next receive. */
    send_all(fd, "G", 1, now_ms() + PATIENCE_MS);
    until = now_ms() + budget_ms + BEYOND_MS;
    got = receive(fd, ended, sizeof ended, until);
    if (got < 0) {
        fprintf(stderr, "minivm: the %s did not end in its time: the job goes on without it\n", KIND);
        return 0;
    }
    if (got < (int)sizeof ended || ended[0] > 1) return *why = "it ended in the middle of a run", -1;
    pass_on(fd, ended[1] | ended[2] << 8, until);
    return ended[0];
}

int main(void) {
    const char *why = "";
    /* Make sure that the first three descriptors exist, so that no socket of ours gets their numbers. */
    for (int fd = open("/dev/null", O_RDWR); fd >= 0; fd = dup(fd)) {
        if (fd > 2) {
            close(fd);
            break;
        }
    }
    int code = ask(&why);
    if (code >= 0) return code;
    /* By its full path, by which Python finds a virtual environment. */
    char *argv[] = {PYTHON, "-I", "-m", "health.runner.run", KIND, (char *)why, NULL};
    execv(PYTHON, argv);
    /* Without an interpreter nothing in this image works; a job must not fail for that. */
    fprintf(stderr, "minivm: cannot run the %s: %s: %s\n", KIND, PYTHON, strerror(errno));
    return 0;
}
