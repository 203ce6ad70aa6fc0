/* Checks that a user's home answers. A hung file server keeps every process that touches it in the kernel for ever,
 * so a child touches it first, and nothing waits for that child. Any answer will do, even that no home exists yet. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef PATIENCE
#define PATIENCE 10 /* seconds */
#endif
#ifndef ASKED
#define ASKED "/run/minivm/homes"
#endif
#define PATH_LONGEST 4096

/* Return the process's start, in ticks since boot, which with the pid identifies it. 0: there is none, or it has
 * ended. */
static unsigned long long born(long pid) {
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%ld/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t size = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0)
        close(fd);
    if (size <= 0)
        return 0;
    text[size] = 0;
    /* The name is in brackets and may contain anything; the time is the twentieth word after it. */
    char *word = strrchr(text, ')');
    if (!word || word[1] != ' ' || word[2] == 'Z' || word[2] == 'X')
        return 0;
    for (int i = 0; word && i < 20; i++)
        word = strchr(word + 1, ' ');
    return word ? strtoull(word, NULL, 10) : 0;
}

/* Path of the marker for a check without an answer yet. False: the name is too long to check. */
static bool place_of(const char *user, char *path, size_t size) {
    int length = snprintf(path, size, "%s/%s", ASKED, user);
    if (length < 0 || (size_t)length >= size)
        return false;
    for (char *sign = path + strlen(ASKED) + 1; *sign; sign++)
        if (*sign == '/')
            *sign = '_';
    return true;
}

/* Some file systems cannot be interrupted: while one check is stuck in the kernel no other is made, or each login
 * would leave one more behind. */
static bool still_stuck(const char *path) {
    long pid = 0;
    unsigned long long since = 0;
    FILE *file = fopen(path, "re");
    if (!file)
        return false;
    bool read = fscanf(file, "%ld %llu", &pid, &since) == 2;
    fclose(file);
    return read && since && born(pid) == since;
}

static void remember(const char *path, long pid) {
    char temporary[PATH_LONGEST + 32];
    mkdir(ASKED, 0755);
    snprintf(temporary, sizeof temporary, "%s.%ld", path, (long)getpid());
    FILE *file = fopen(temporary, "we");
    if (!file)
        return;
    bool written = fprintf(file, "%ld %llu\n", pid, born(pid)) > 0;
    if (fclose(file) == 0 && written)
        rename(temporary, path);
    else
        unlink(temporary);
}

static bool home_answers(const char *user, const char *home) {
    char path[PATH_LONGEST];
    int answer[2];
    if (!place_of(user, path, sizeof path))
        return true;
    if (still_stuck(path))
        return false;
    /* A check that cannot be made refuses nobody: the session itself fails, or does not. */
    if (pipe2(answer, O_CLOEXEC))
        return true;
    pid_t question = fork();
    if (question < 0)
        return true;
    if (question == 0) {
        struct statfs found;
        /* A descriptor of ours in a stuck process would keep PAM waiting for the end of our output. */
        dup2(answer[1], 0);
        closefrom(1); /* not close_range, which an older runtime's seccomp list refuses */
        statfs(home, &found); /* it asks the server, while stat may be answered from a cache */
        _exit(0);
    }
    close(answer[1]);
    struct pollfd end = {.fd = answer[0], .events = POLLIN};
    int ended;
    do
        ended = poll(&end, 1, PATIENCE * 1000);
    while (ended < 0 && errno == EINTR);
    close(answer[0]);
    if (ended == 0) {
        kill(question, SIGKILL);
        remember(path, question);
        return false;
    }
    waitpid(question, NULL, 0);
    return true;
}
