/* A preload that kills slurmctld before its Nth change of its state directory: N is in /tmp/killed-at.
 * It does so once, and leaves /tmp/was-killed. A kill between any two of these calls leaves what a kill at any moment can leave. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char state[] = "/var/spool/slurmctld/", order[] = "/tmp/killed-at", mark[] = "/tmp/was-killed";
static int left = -1;
static FILE *written;

__attribute__((constructor)) static void begin(void)
{
	char text[16] = "";
	int fd = open(order, O_RDONLY);
	if (fd < 0 || !access(mark, F_OK)) {
		if (fd >= 0)
			close(fd);
		return;
	}
	if (read(fd, text, sizeof(text) - 1) > 0 && sscanf(text, "%d", &left) != 1)
		left = -1;
	close(fd);
}

static void step(const char *path)
{
	if (left < 0 || strncmp(path, state, sizeof(state) - 1) || __atomic_sub_fetch(&left, 1, __ATOMIC_SEQ_CST) >= 0)
		return;
	close(creat(mark, 0600));
	kill(getpid(), SIGKILL);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int rename(const char *from, const char *to) { step(from); return NEXT(rename)(from, to); }
int unlink(const char *path) { step(path); return NEXT(unlink)(path); }
int link(const char *from, const char *to) { step(from); return NEXT(link)(from, to); }
int mkdir(const char *path, mode_t mode) { step(path); return NEXT(mkdir)(path, mode); }
int fsync(int fd) { step(state); return NEXT(fsync)(fd); }

static int opened(const char *name, const char *path, int flags, mode_t mode)
{
	if (flags & O_CREAT)
		step(path);
	return ((int (*)(const char *, int, ...))dlsym(RTLD_NEXT, name))(path, flags, mode);
}

#define OPEN(name) \
int name(const char *path, int flags, ...) \
{ \
	va_list list; \
	va_start(list, flags); \
	mode_t mode = flags & O_CREAT ? va_arg(list, mode_t) : 0; \
	va_end(list); \
	return opened(#name, path, flags, mode); \
}
OPEN(open)
OPEN(open64)

static FILE *fopened(const char *name, const char *path, const char *mode)
{
	if (*mode == 'w')
		step(path);
	FILE *file = ((FILE *(*)(const char *, const char *))dlsym(RTLD_NEXT, name))(path, mode);
	if (*mode == 'w' && !strncmp(path, state, sizeof(state) - 1))
		written = file;
	return file;
}
FILE *fopen(const char *path, const char *mode) { return fopened("fopen", path, mode); }
FILE *fopen64(const char *path, const char *mode) { return fopened("fopen64", path, mode); }

int fclose(FILE *file)
{
	if (file == written) {
		written = NULL;
		step(state); /* what was put into it is written now */
	}
	return NEXT(fclose)(file);
}
