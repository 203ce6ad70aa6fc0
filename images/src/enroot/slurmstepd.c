/*
 * Program that slurmd starts as slurmstepd: executes slurmstepd, and starts task prologs in its place.
 *
 * slurmstepd starts scripts by executing itself again, even if the task is already in its container, which lacks its
 * libraries and, in another distribution's image, its loader. This program is static.
 *
 * It has no rights of its own, and does nothing that its caller could not: two exec.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#ifndef STEPD
#define STEPD "/usr/libexec/minivm/stepd/slurmstepd"
#endif
#define MODE "slurm_script_launcher"

int main(int argc, char **argv) {
    char *own[] = {NULL, NULL};
    const char *program = STEPD;
    char **line = argv;
    if (argc >= 3 && !strcmp(argv[1], MODE)) {
        program = argv[2];
        own[0] = argv[2];
        line = argc > 3 ? argv + 3 : own;
        /* Its scripts have a group and descriptors of their own, and one identity. */
        close_range(3, ~0U, 0);
        setpgid(0, 0);
        if (setresgid(getegid(), getegid(), (gid_t)-1) || setresuid(geteuid(), geteuid(), (uid_t)-1)) {
            fprintf(stderr, "minivm: %s: %s\n", program, strerror(errno));
            return 127;
        }
    }
    execv(program, line);
    fprintf(stderr, "minivm: cannot start %s: %s\n", program, strerror(errno));
    return 127;
}
