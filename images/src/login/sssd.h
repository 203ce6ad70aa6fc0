/* A user's keys in the directory, requested at sssd's socket as sss_ssh_authorizedkeys does: that program takes 8 ms
 * to start, twice a login. It takes over whenever anything is not exactly as expected. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifndef SSSD
#define SSSD "/var/lib/sss/pipes/ssh"
#endif
#ifndef PROGRAM
#define PROGRAM "/usr/bin/sss_ssh_authorizedkeys"
#endif
#ifndef DIRECTORY_PATIENCE
/* Seconds in all: LoginGraceTime ends a login that waits longer. Without its directory sssd has answered after 6;
 * many logins wait their turn. */
#define DIRECTORY_PATIENCE 100
#endif
#define LARGEST (1u << 20) /* of an answer */
#define VERSION 0x01
#define KEYS_OF 0xe1

enum outcome { TOLD, ODD, SILENT };

struct text {
    char *data; /* ends with a NUL that is not counted */
    size_t size;
};

/* Return the milliseconds left since the first call. */
static long left(void) {
    static struct timespec begun;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (!begun.tv_sec)
        begun = now;
    return DIRECTORY_PATIENCE * 1000L - (now.tv_sec - begun.tv_sec) * 1000L - (now.tv_nsec - begun.tv_nsec) / 1000000L;
}

static bool append(struct text *text, const void *data, size_t size) {
    if (size > LARGEST - text->size)
        return false;
    char *grown = realloc(text->data, text->size + size + 1);
    if (!grown)
        return false;
    memcpy(grown + text->size, data, size);
    text->data = grown;
    text->size += size;
    grown[text->size] = 0;
    return true;
}

/* Set the time limit of the next call on this socket; false: none is left. */
static bool timed(int fd, int option) {
    long milliseconds = left();
    struct timeval limit = {.tv_sec = milliseconds / 1000, .tv_usec = milliseconds % 1000 * 1000};
    return milliseconds > 0 && setsockopt(fd, SOL_SOCKET, option, &limit, sizeof limit) == 0;
}

static enum outcome ended(ssize_t result) {
    return left() <= 0 || (result < 0 && (errno == EAGAIN || errno == EINPROGRESS)) ? SILENT : ODD;
}

static enum outcome give(int fd, const void *data, size_t size) {
    for (const char *next = data; size;) {
        ssize_t sent = timed(fd, SO_SNDTIMEO) ? send(fd, next, size, MSG_NOSIGNAL) : -1;
        if (sent <= 0)
            return ended(sent);
        next += sent;
        size -= (size_t)sent;
    }
    return TOLD;
}

static enum outcome take(int fd, void *data, size_t size) {
    for (char *next = data; size;) {
        ssize_t got = timed(fd, SO_RCVTIMEO) ? recv(fd, next, size, 0) : -1;
        if (got <= 0)
            return ended(got);
        next += got;
        size -= (size_t)got;
    }
    return TOLD;
}

/* Send a request and read its answer. Both start with four numbers: the total length, the command, a status (the
 * error), nothing. */
static enum outcome ask(int fd, uint32_t command, const struct text *question, struct text *answer) {
    uint32_t head[4] = {(uint32_t)(sizeof head + question->size), command, 0, 0};
    enum outcome done = give(fd, head, sizeof head);
    if (done == TOLD)
        done = give(fd, question->data, question->size);
    if (done == TOLD)
        done = take(fd, head, sizeof head);
    if (done != TOLD)
        return done;
    if (head[1] != command || head[2] || head[0] < sizeof head || head[0] - sizeof head > LARGEST)
        return ODD;
    answer->size = head[0] - sizeof head;
    answer->data = calloc(1, answer->size + 1);
    return answer->data ? take(fd, answer->data, answer->size) : ODD;
}

struct reader {
    const char *next;
    size_t rest;
};

static bool number(struct reader *reader, uint32_t *value) {
    if (reader->rest < sizeof *value)
        return false;
    memcpy(value, reader->next, sizeof *value);
    reader->next += sizeof *value;
    reader->rest -= sizeof *value;
    return true;
}

/* Read a length, and that many bytes. */
static bool piece(struct reader *reader, const char **data, uint32_t *size) {
    if (!number(reader, size) || *size > reader->rest)
        return false;
    *data = reader->next;
    reader->next += *size;
    reader->rest -= *size;
    return true;
}

/* Print the keys of an answer as lines: a count, nothing, then for each a flag, the user's name and the key. sssd's
 * own program prints a key that is not one line of text (sssd may store bytes). */
static bool lines_of(const struct text *answer, struct text *keys) {
    struct reader reader = {answer->data, answer->size};
    uint32_t count, nothing, size;
    const char *data;
    if (!number(&reader, &count) || !number(&reader, &nothing))
        return false;
    while (count--) {
        if (!number(&reader, &nothing) || nothing || !piece(&reader, &data, &size) || !piece(&reader, &data, &size))
            return false;
        while (size && (data[size - 1] == '\n' || data[size - 1] == 0))
            size--;
        if (!size || memchr(data, 0, size) || memchr(data, '\n', size))
            return false;
        if (!append(keys, data, size) || !append(keys, "\n", 1))
            return false;
    }
    return reader.rest == 0;
}

static enum outcome asked_at(int fd, const char *user, struct text *keys) {
    struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = SSSD};
    struct text question = {0}, answer = {0};
    uint32_t version = 0, in_a_domain = 2, length = (uint32_t)strlen(user) + 1, any_domain = 0;
    /* Blocking, with a limit: many logins wait here for their turn. */
    if (!timed(fd, SO_SNDTIMEO) || connect(fd, (struct sockaddr *)&address, sizeof address))
        return ended(-1);
    if (!append(&question, &version, sizeof version))
        return ODD;
    enum outcome done = ask(fd, VERSION, &question, &answer);
    if (done != TOLD)
        return done;
    if (answer.size != sizeof version || memcmp(answer.data, &version, sizeof version))
        return ODD;
    question = (struct text){0};
    if (!append(&question, &in_a_domain, sizeof in_a_domain) || !append(&question, &length, sizeof length) ||
        !append(&question, user, length) || !append(&question, &any_domain, sizeof any_domain))
        return ODD;
    done = ask(fd, KEYS_OF, &question, &answer);
    return done != TOLD ? done : lines_of(&answer, keys) ? TOLD : ODD;
}

/* Run sssd's own program in the time that is left. */
static enum outcome by_program(const char *user, struct text *keys) {
    int output[2];
    char block[4096];
    if (pipe2(output, O_CLOEXEC))
        return ODD;
    pid_t program = fork();
    if (program == 0) {
        dup2(output[1], 1);
        execl(PROGRAM, PROGRAM, user, (char *)NULL);
        _exit(127);
    }
    close(output[1]);
    enum outcome done = program < 0 ? ODD : TOLD;
    while (done == TOLD) {
        struct pollfd next = {.fd = output[0], .events = POLLIN};
        long patience = left();
        int ready = patience > 0 ? poll(&next, 1, (int)patience) : 0;
        if (ready < 0 && errno == EINTR)
            continue;
        if (ready <= 0) {
            kill(program, SIGKILL);
            done = SILENT;
            break;
        }
        ssize_t got = read(output[0], block, sizeof block);
        if (got <= 0)
            break;
        if (!append(keys, block, (size_t)got))
            done = ODD;
    }
    close(output[0]);
    if (program > 0)
        waitpid(program, NULL, 0);
    return done;
}
