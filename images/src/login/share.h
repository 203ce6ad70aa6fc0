/* Puts a login into its person's cgroup, made here if it is the first: sshd's process for this session, and all that comes
 * of it inherits the cgroup. What cannot be done is told, and keeps nobody out.
 * Which directories, files and values: written at boot by minivm, in TABLE; where there is none nobody has a share. */
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
#define SPARE 8 /* of a person's processes: with fewer left nobody can end those that are there */
#define MOST 64 /* lines of the table */

struct limit {
    char directory[512], file[128], value[64];
};

/* Of a file in a share, or of the share itself. */
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
    /* The kernel refuses when the buffer reaches it. */
    if (!target || fclose(target) || !written)
        fprintf(stderr, "cannot write %s to %s: %m\n", value, path);
}

/* Processes and threads in a share; -1: it is not there yet. */
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
