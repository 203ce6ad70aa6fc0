/* The keys that let this person in: asked by sshd (AuthorizedKeysCommand) for each key that is offered. Those of
 * people.yaml come first, for its people instead of the directory's. The directory's come before the home's, and the home is left alone where they suffice: sshd itself reads it first, and when the file server hangs
 * nobody comes in for the whole of its grace time, or is told why.
 * Usage: authorized-keys USER HOME TYPE KEY
 * sshd throws away what is said on stderr: what an operator should know goes to syslog. */
#define _GNU_SOURCE
#include "home.h"
#include "sssd.h"
#include <grp.h>
#include <libgen.h>
#include <limits.h>
#include <pwd.h>
#include <syslog.h>

#ifndef PEOPLE
#define PEOPLE "/run/minivm/people/keys" /* as init/people/keep.py writes it */
#endif

/* Read the keys of a person of people.yaml; false for a name that it does not have. Of a name that the directory has
 * too, the directory's keys belong to another person: they do not count. */
static bool of_the_file(const char *user, struct text *keys) {
    char path[PATH_MAX], block[4096];
    ssize_t got;
    int length = snprintf(path, sizeof path, PEOPLE "/%s", user);
    if (!*user || *user == '.' || strchr(user, '/') || length < 0 || (size_t)length >= sizeof path)
        return false;
    int fd = open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0)
        return false;
    while ((got = read(fd, block, sizeof block)) > 0 && append(keys, block, (size_t)got))
        ;
    close(fd);
    return true;
}

static struct text of_the_directory(const char *user) {
    struct text keys = {0};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    enum outcome done = fd < 0 ? ODD : asked_at(fd, user, &keys);
    if (fd >= 0)
        close(fd);
    if (done == ODD) {
        syslog(LOG_NOTICE, "%s is asked for the keys of %s: sssd's socket gave no answer that is known here", PROGRAM, user);
        keys = (struct text){0};
        done = by_program(user, &keys);
    }
    if (done == SILENT) {
        keys = (struct text){0};
        syslog(LOG_ERR, "sssd has not told the keys of %s within %d s: those in the home alone count", user,
               DIRECTORY_PATIENCE);
    }
    return keys;
}

/* As the person: root may not read every home, and must not read for others what they could not read themselves. */
static bool become(const char *user) {
    const struct passwd *person = getpwnam(user);
    if (!person)
        return false;
    gid_t group = person->pw_gid;
    uid_t number = person->pw_uid;
    return initgroups(user, group) == 0 && setresgid(group, group, group) == 0 && setresuid(number, number, number) == 0;
}

static bool others_may_write(const struct stat *found) {
    return (found->st_uid != 0 && found->st_uid != geteuid()) || (found->st_mode & 022);
}

/* As strict as sshd (StrictModes): neither the file nor a directory above it, up to the home, may belong to another
 * user or be writable for others. */
static bool ours(int fd, const char *file, const char *home) {
    char part[PATH_MAX];
    struct stat found;
    if (fstat(fd, &found) || others_may_write(&found))
        return false;
    snprintf(part, sizeof part, "%s", file);
    while (strcmp(part, home) && strcmp(part, "/")) {
        char *above = dirname(part);
        memmove(part, above, strlen(above) + 1);
        if (stat(part, &found) || others_may_write(&found))
            return false;
    }
    return true;
}

static void show(int fd) {
    char block[4096];
    ssize_t got;
    while ((got = read(fd, block, sizeof block)) > 0)
        if (fwrite(block, 1, (size_t)got, stdout) != (size_t)got)
            return;
    putchar('\n'); /* a last line without an end must not join the next file's first */
}

static void of_the_home(const char *given) {
    static const char *const names[] = {"authorized_keys", "authorized_keys2"};
    char home[PATH_MAX], path[PATH_MAX + 64], file[PATH_MAX];
    struct stat found;
    if (!realpath(given, home))
        return;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        snprintf(path, sizeof path, "%s/.ssh/%s", home, names[i]);
        if (!realpath(path, file))
            continue;
        /* Without waiting for the other end, should it be a pipe. */
        int fd = open(file, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_NOFOLLOW | O_CLOEXEC);
        if (fd >= 0 && fstat(fd, &found) == 0 && S_ISREG(found.st_mode)) {
            if (ours(fd, file, home))
                show(fd);
            else
                syslog(LOG_WARNING, "%s is left aside: others may write it, or a directory above it", file);
        }
        if (fd >= 0)
            close(fd);
    }
}

int main(int count, char **given) {
    char offered[LARGEST / 8];
    if (count != 5) {
        fputs("usage: authorized-keys USER HOME TYPE KEY\n", stderr);
        return 2;
    }
    const char *user = given[1], *home = given[2];
    openlog("authorized-keys", LOG_PERROR, LOG_AUTH);
    int length = snprintf(offered, sizeof offered, "%s %s", given[3], given[4]);
    struct text keys = {0};
    if (!of_the_file(user, &keys))
        keys = of_the_directory(user);
    if (keys.size)
        fwrite(keys.data, 1, keys.size, stdout);
    /* sshd reads the home itself: this only avoids it. */
    if (keys.size && length > 0 && (size_t)length < sizeof offered && strstr(keys.data, offered))
        return fflush(stdout) != 0;
    if (!home_answers(user, home))
        syslog(LOG_WARNING, "%s of %s does not answer: the keys in it do not count", home, user);
    else if (become(user))
        of_the_home(home);
    else
        syslog(LOG_ERR, "cannot become %s to read the keys in %s: %m", user, home);
    return fflush(stdout) != 0;
}
