/*
 * Settings that two of the image's own scripts give a task, without a shell: task_prolog.d/10-directories and 20-nccl.
 * The plan tells if a script is one of these, byte for byte, and has the settings that it would read
 * (health/runner/plan.py).
 *
 * A test runs both and compares their output. Unusual cases are left to the script: each function here prints
 * everything, or nothing and returns 0.
 */
#include <dirent.h>

#ifndef WORK
#define WORK "/var/tmp/minivm/jobs"
#endif
#ifndef LOGS
#define LOGS "/var/log/minivm/jobs"
#endif
#ifndef SYSFS
#define SYSFS "/sys"
#endif

#define ADAPTERS SYSFS "/class/infiniband"
#define PLACE "@job@" /* in a value: the job's own directory */
#define MOST_SETTINGS 256
#define MOST_PORTS 64
#define MOST_PARTS 128 /* of a heterogeneous job, as Slurm has it */

extern char **environ;

struct setting {
    const char *of, *name, *value;
};
static struct setting settings[MOST_SETTINGS];
static size_t settings_held;

/* The last of several counts, as in a shell. */
static const char *given(const char *prefix, const char *name) {
    const char *found = NULL;
    size_t first = strlen(prefix), second = strlen(name);
    for (char **entry = environ; *entry; entry++) {
        const char *at = *entry + first;
        if (!strncmp(*entry, prefix, first) && !strncmp(at, name, second) && at[second] == '=') found = at + second + 1;
    }
    return found;
}

static int has(const char *text) { return text && *text; }

static void say(const char *name, const char *value, const char *place) {
    const char *at;
    printf("export %s=", name);
    for (; (at = strstr(value, PLACE)); value = at + strlen(PLACE)) printf("%.*s%s", (int)(at - value), value, place);
    puts(value);
}

static int is_number(const char *job) { return has(job) && strlen(job) <= 20 && !job[strspn(job, "0123456789")]; }

/* A heterogeneous job's steps carry the first part's number on every node; the prolog made the directory of the part that
 * the node is in. */
static const char *part_of(const char *job) {
    char place[sizeof WORK + 24], name[64];
    sprintf(place, "%s/%s", WORK, job);
    if (!faccessat(AT_FDCWD, place, W_OK, AT_EACCESS)) return job;
    for (int part = 0; part < MOST_PARTS; part++) {
        sprintf(name, "SLURM_JOB_ID_HET_GROUP_%d", part);
        const char *other = given("", name);
        if (!is_number(other)) break;
        sprintf(place, "%s/%s", WORK, other);
        if (!faccessat(AT_FDCWD, place, W_OK, AT_EACCESS)) return other;
    }
    return job;
}

static int say_directories(void) {
    const char *job = given("", "SLURM_JOB_ID");
    char work[sizeof WORK + 24], logs[sizeof LOGS + 24];
    if (has(given("", "MINIVM_JOB_WORK")) || has(given("", "MINIVM_JOB_LOGS"))) return 0;
    if (!is_number(job)) return 0;
    job = part_of(job);
    sprintf(work, "%s/%s", WORK, job);
    sprintf(logs, "%s/%s", LOGS, job);
    int writable = !faccessat(AT_FDCWD, work, W_OK, AT_EACCESS);
    for (size_t at = 0; at < settings_held; at++) {
        const struct setting *one = &settings[at];
        if (strcmp(one->of, "caches") || (!writable && strstr(one->value, PLACE))) continue;
        const char *chosen = given("", one->name);
        if (!chosen) chosen = given(PREFIX, one->name);
        /* A directory of another job was not chosen by the user: this job was submitted from within that one. */
        if (has(chosen) && strncmp(chosen, WORK "/", strlen(WORK "/"))) continue;
        say(one->name, one->value, work);
    }
    if (!faccessat(AT_FDCWD, logs, W_OK, AT_EACCESS)) printf("export MINIVM_JOB_LOG=%s\n", logs);
    return 1;
}

/* A port as "mlx5_0/ports/1". */
static char *ports[MOST_PORTS];

static int in_order(const void *one, const void *other) {
    return strcmp(*(char *const *)one, *(char *const *)other);
}

/* Return their number; -1 if the script must look. */
static int find_ports(void) {
    int count = 0;
    DIR *all = opendir(ADAPTERS), *of_one;
    for (struct dirent *adapter; all && (adapter = readdir(all));) {
        char path[sizeof ADAPTERS + sizeof adapter->d_name + 8];
        if (*adapter->d_name == '.') continue;
        if (strchr(adapter->d_name, '\n')) count = -1;
        sprintf(path, "%s/%s/ports", ADAPTERS, adapter->d_name);
        of_one = opendir(path);
        for (struct dirent *port; count >= 0 && of_one && (port = readdir(of_one));) {
            if (*port->d_name == '.') continue;
            if (count == MOST_PORTS || asprintf(&ports[count++], "%s/ports/%s", adapter->d_name, port->d_name) < 0) count = -1;
        }
        if (of_one) closedir(of_one);
        if (count < 0) break;
    }
    if (all) closedir(all);
    if (count > 0) qsort(ports, (size_t)count, sizeof *ports, in_order);
    return count;
}

/* Read its first line without surrounding blanks: 1; 0 if the script would skip the port; -1 if it must look. */
static int line_of(const char *port, const char *name, char text[256]) {
    char path[sizeof ADAPTERS + 600], *from = text, *end;
    struct stat status;
    if (snprintf(path, sizeof path, "%s/%s/%s", ADAPTERS, port, name) >= (int)sizeof path) return -1;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return errno == ENOENT || errno == EACCES ? 0 : -1;
    ssize_t size = fstat(fd, &status) || !S_ISREG(status.st_mode) ? -1 : read(fd, text, 255);
    close(fd);
    if (size < 0 || size == 255 || memchr(text, 0, (size_t)size)) return -1;
    text[size] = 0;
    int whole = (end = strchr(text, '\n')) != NULL;
    if (!whole) end = text + size;
    while (end > text && (end[-1] == ' ' || end[-1] == '\t')) end--;
    *end = 0;
    from += strspn(text, " \t");
    memmove(text, from, strlen(from) + 1);
    return whole || *text;
}

static int has_adapters(void) {
    int found = 0;
    DIR *all = opendir(ADAPTERS);
    for (struct dirent *one; all && !found && (one = readdir(all));) found = *one->d_name != '.';
    if (all) closedir(all);
    return found;
}

/* Reads of adapters may hang with them: if there are any, this runs in a fork. */
static int say_nccl(void) {
    static char adapters[MOST_PORTS * 256 + 2] = "=";
    const char *fabric = "ethernet", *chosen;
    if (has(given("", "MINIVM_SYSFS"))) return 0;
    int count = find_ports();
    if (count < 0) return 0;
    for (int at = 0; at < count; at++) {
        char state[256], layer[256];
        int one = line_of(ports[at], "state", state), other = line_of(ports[at], "link_layer", layer);
        if (one < 0 || other < 0) return 0;
        if (!one || !other || !strstr(state, "ACTIVE")) continue;
        if (adapters[1]) strcat(adapters, ",");
        strncat(adapters, ports[at], (size_t)(strchrnul(ports[at], '/') - ports[at]));
        if (!strcmp(layer, "InfiniBand")) {
            fabric = "infiniband";
        } else if (!strcmp(fabric, "ethernet")) {
            fabric = "roce";
        }
    }
    for (size_t at = 0; at < settings_held; at++) {
        const struct setting *one = &settings[at];
        if (!strcmp(one->of, fabric) && !has(given("", one->name))) printf("export %s=%s\n", one->name, one->value);
    }
    /* "=": exactly these names, not also those that start with them. */
    chosen = given("", "NCCL_IB_HCA");
    if (adapters[1] && !has(chosen)) printf("export NCCL_IB_HCA=%s\n", adapters);
    return 1;
}
