/* Puts a login into its user's cgroup, created for the first one: sshd's process of this session, whose descendants
 * inherit the cgroup. Errors are reported and refuse nobody. minivm writes the directories, files and values to
 * TABLE at boot; without it there are no shares. */
#include <pwd.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef TABLE
#define TABLE "/run/minivm/user-limits"
#endif
#define SPARE 8 /* of a user's processes: with fewer left the user could not end any */
#define MOST 64 /* lines of the table */

struct limit {
    char directory[512], file[128], value[64];
};

/* Path of a file in a share, or of the share itself. */
static const char *path_of(const char *directory, const char *share, const char *file) {
    static char *path;
    free(path);
    if (asprintf(&path, "%s/%s%s%s", directory, share, *file ? "/" : "", file) < 0)
        path = NULL;
    return path ? path : "";
}

static void write_to(const char *directory, const char *share, const char *file, const char *value) {
    const char *path = path_of(directory, share, file);
    FILE *target = fopen(path, "we");
    bool written = target && fprintf(target, "%s\n", value) > 0;
    /* The kernel refuses it when the buffer is flushed. */
    if (!target || fclose(target) || !written)
        fprintf(stderr, "cannot write %s to %s: %m\n", value, path);
}

/* Return the processes and threads in a share; -1: it does not exist yet. */
static long running(const char *directory, const char *share) {
    long count = -1;
    FILE *file = fopen(path_of(directory, share, "pids.current"), "re");
    if (file) {
        if (fscanf(file, "%ld", &count) != 1)
            count = -1;
        fclose(file);
    }
    return count;
}

static void take_share(uid_t person, pid_t session) {
    static struct limit limits[MOST];
    char own[32], process[32];
    int count = 0;
    FILE *table = person == 0 ? NULL : fopen(TABLE, "re");
    if (!table)
        return;
    while (count < MOST && fscanf(table, "%511s %127s %63s", limits[count].directory, limits[count].file,
                                  limits[count].value) == 3)
        count++;
    fclose(table);
    snprintf(own, sizeof own, "%u", person);
    snprintf(process, sizeof process, "%ld", (long)session);
    const char *share = own;
    for (const struct limit *limit = limits; limit < limits + count; limit++) {
        long now = strcmp(limit->file, "pids.max") == 0 ? running(limit->directory, own) : -1;
        if (now < 0 || now < atol(limit->value) - SPARE)
            continue;
        printf("You have %ld processes and threads here, of %s at most. This session can start a few more, to end\n"
               "some of them. All at once, this session too:  kill -9 -1\n", now, limit->value);
        share = "rescue";
    }
    for (const struct limit *limit = limits; limit < limits + count; limit++) {
        mkdir(path_of(limit->directory, share, ""), 0755);
        if (share == own)
            write_to(limit->directory, share, limit->file, limit->value);
        write_to(limit->directory, share, "cgroup.procs", process);
    }
}
