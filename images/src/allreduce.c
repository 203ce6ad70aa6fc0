/*
 * All-reduce bandwidth over the GPUs of this machine, in one process, as JSON.
 *
 * CUDA's runtime and NCCL are opened at run time by their sonames. So this compiles with gcc alone, runs with any of
 * their versions that keeps the C interface below, starts on a machine without GPUs, and can say which part is missing.
 *
 * Exit codes: 0 measured, 1 CUDA or NCCL failed, 2 wrong usage, 3 no GPU or no driver, 4 a library is missing,
 * 5 the sums were wrong, 6 no answer within --timeout.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <getopt.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define VERSION "1.0"
#define MAX_GPUS 64
#define PROBE 4096 /* floats compared at each end of the buffer: a wrong ring shows at its seams */

enum { MEASURED = 0, FAILED = 1, USAGE = 2, NO_GPU = 3, NO_LIBRARY = 4, WRONG = 5, TIMED_OUT = 6 };

/* The parts of the two C interfaces that are used; both are stable within a soname. */
enum { CUDA_INSUFFICIENT_DRIVER = 35, CUDA_NO_DEVICE = 100, CUDA_NOT_READY_SYSTEM = 802, CUDA_DRIVER_MISMATCH = 803 };
enum { HOST_TO_DEVICE = 1, DEVICE_TO_HOST = 2 };
enum { NCCL_FLOAT32 = 7, NCCL_SUM = 0 };
typedef void *stream_t;
typedef void *comm_t;

static struct {
    int (*GetDeviceCount)(int *);
    int (*SetDevice)(int);
    int (*RuntimeGetVersion)(int *);
    int (*DriverGetVersion)(int *);
    int (*DeviceGetPCIBusId)(char *, int, int);
    int (*Malloc)(void **, size_t);
    int (*Free)(void *);
    int (*Memset)(void *, int, size_t);
    int (*Memcpy)(void *, const void *, size_t, int);
    int (*StreamCreate)(stream_t *);
    int (*StreamSynchronize)(stream_t);
    const char *(*GetErrorString)(int);
} cuda;

static struct {
    int (*GetVersion)(int *);
    int (*CommInitAll)(comm_t *, int, const int *);
    int (*CommDestroy)(comm_t);
    int (*GroupStart)(void);
    int (*GroupEnd)(void);
    int (*AllReduce)(const void *, void *, size_t, int, int, comm_t, stream_t);
    const char *(*GetErrorString)(int);
    const char *(*GetLastError)(comm_t);
} nccl;

static struct {
    size_t min_bytes, max_bytes;
    int gpus, iterations, warmup, timeout, libraries;
} option = {.min_bytes = 8u << 20, .max_bytes = (size_t)1 << 30, .iterations = 20, .warmup = 5, .timeout = 300};

static __attribute__((noreturn, format(printf, 2, 3))) void stop(int code, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fflush(stdout);
    fputs("minivm-allreduce: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    _exit(code); /* not exit(): a library whose GPU hangs would hang in its destructors, too */
}

static void cuda_ok(int status, const char *what)
{
    if (status != 0)
        stop(FAILED, "cannot %s: %s (CUDA error %d)", what, cuda.GetErrorString(status), status);
}

static void nccl_ok(int status, const char *what)
{
    if (status != 0)
        stop(FAILED, "cannot %s: %s: %s (NCCL error %d)", what, nccl.GetErrorString(status), nccl.GetLastError(NULL), status);
}

static void *open_library(const char *what, const char *const *names)
{
    char first[256] = "";
    for (; *names; names++) {
        void *handle = dlopen(*names, RTLD_NOW | RTLD_GLOBAL);
        if (handle)
            return handle;
        if (!first[0])
            snprintf(first, sizeof first, "%s", dlerror());
    }
    stop(NO_LIBRARY, "cannot open %s: %s", what, first);
}

static void *symbol(void *library, const char *name)
{
    void *found = dlsym(library, name);
    if (!found)
        stop(NO_LIBRARY, "cannot use the library: it has no %s", name);
    return found;
}

static void open_libraries(void)
{
    static const char *const cudart[] = {"libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0", "libcudart.so", NULL};
    static const char *const libnccl[] = {"libnccl.so.2", NULL};
    void *library = open_library("CUDA's runtime", cudart);
/* A data pointer to a function pointer is what dlsym is for; ISO C wants it said through memory. */
#define TAKE(table, prefix, name) *(void **)&table.name = symbol(library, #prefix #name)
    TAKE(cuda, cuda, GetDeviceCount);
    TAKE(cuda, cuda, SetDevice);
    TAKE(cuda, cuda, RuntimeGetVersion);
    TAKE(cuda, cuda, DriverGetVersion);
    TAKE(cuda, cuda, DeviceGetPCIBusId);
    TAKE(cuda, cuda, Malloc);
    TAKE(cuda, cuda, Free);
    TAKE(cuda, cuda, Memset);
    TAKE(cuda, cuda, Memcpy);
    TAKE(cuda, cuda, StreamCreate);
    TAKE(cuda, cuda, StreamSynchronize);
    TAKE(cuda, cuda, GetErrorString);
    library = open_library("NCCL", libnccl);
    TAKE(nccl, nccl, GetVersion);
    TAKE(nccl, nccl, CommInitAll);
    TAKE(nccl, nccl, CommDestroy);
    TAKE(nccl, nccl, GroupStart);
    TAKE(nccl, nccl, GroupEnd);
    TAKE(nccl, nccl, AllReduce);
    TAKE(nccl, nccl, GetErrorString);
    TAKE(nccl, nccl, GetLastError);
}

static int count_gpus(void)
{
    int count = 0, status = cuda.GetDeviceCount(&count);
    switch (status) {
    case 0:
        break;
    case CUDA_INSUFFICIENT_DRIVER:
        stop(NO_GPU, "no GPU: there is no NVIDIA driver here, or it is older than this CUDA runtime");
    case CUDA_NO_DEVICE:
        stop(NO_GPU, "no GPU: the driver answers and sees none");
    case CUDA_NOT_READY_SYSTEM:
        stop(FAILED, "the GPUs are not ready: on an NVSwitch machine the host's fabric manager has to run first");
    case CUDA_DRIVER_MISMATCH:
        stop(FAILED, "the driver in the kernel and libcuda in this pod are of different releases");
    default:
        stop(NO_GPU, "no GPU: %s (CUDA error %d)", cuda.GetErrorString(status), status);
    }
    if (count < 1)
        stop(NO_GPU, "no GPU: the driver answers and sees none");
    if (option.gpus > count)
        stop(NO_GPU, "%d GPUs are asked for and %d are here", option.gpus, count);
    count = option.gpus ? option.gpus : count;
    return count > MAX_GPUS ? MAX_GPUS : count;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static struct gpu {
    void *send, *receive;
    stream_t stream;
    comm_t comm;
} gpus[MAX_GPUS];

static void all_reduce(int count, size_t elements, int times)
{
    for (int round = 0; round < times; round++) {
        nccl_ok(nccl.GroupStart(), "start a group");
        for (int i = 0; i < count; i++)
            nccl_ok(nccl.AllReduce(gpus[i].send, gpus[i].receive, elements, NCCL_FLOAT32, NCCL_SUM, gpus[i].comm,
                                   gpus[i].stream), "all-reduce");
        nccl_ok(nccl.GroupEnd(), "all-reduce");
    }
    for (int i = 0; i < count; i++) {
        cuda_ok(cuda.SetDevice(i), "select a GPU");
        cuda_ok(cuda.StreamSynchronize(gpus[i].stream), "finish the all-reduce");
    }
}

/* Small whole numbers, so that their sum is exact in any order. */
static float value(int rank, size_t index) { return (float)(rank + 1 + (int)(index % 7)); }

static void fill(int count, size_t elements)
{
    static float part[PROBE];
    size_t probe = elements < PROBE ? elements : PROBE;
    for (int i = 0; i < count; i++) {
        cuda_ok(cuda.SetDevice(i), "select a GPU");
        cuda_ok(cuda.Memset(gpus[i].receive, 0, elements * sizeof(float)), "clear a buffer");
        for (int end = 0; end < 2; end++) {
            size_t start = end ? elements - probe : 0;
            for (size_t k = 0; k < probe; k++)
                part[k] = value(i, start + k);
            cuda_ok(cuda.Memcpy((float *)gpus[i].send + start, part, probe * sizeof(float), HOST_TO_DEVICE), "fill a buffer");
        }
    }
}

static size_t wrong_values(int count, size_t elements)
{
    static float part[PROBE];
    size_t probe = elements < PROBE ? elements : PROBE, wrong = 0;
    for (int i = 0; i < count; i++) {
        cuda_ok(cuda.SetDevice(i), "select a GPU");
        for (int end = 0; end < 2; end++) {
            size_t start = end ? elements - probe : 0;
            cuda_ok(cuda.Memcpy(part, (float *)gpus[i].receive + start, probe * sizeof(float), DEVICE_TO_HOST), "read a buffer");
            for (size_t k = 0; k < probe; k++) {
                float sum = 0;
                for (int rank = 0; rank < count; rank++)
                    sum += value(rank, start + k);
                wrong += part[k] != sum;
            }
        }
    }
    return wrong;
}

static void prepare(int count)
{
    int devices[MAX_GPUS] = {0};
    comm_t comms[MAX_GPUS];
    for (int i = 0; i < count; i++) {
        devices[i] = i;
        cuda_ok(cuda.SetDevice(i), "select a GPU");
        cuda_ok(cuda.Malloc(&gpus[i].send, option.max_bytes), "get memory on a GPU");
        cuda_ok(cuda.Malloc(&gpus[i].receive, option.max_bytes), "get memory on a GPU");
        cuda_ok(cuda.Memset(gpus[i].send, 0, option.max_bytes), "clear a buffer");
        cuda_ok(cuda.StreamCreate(&gpus[i].stream), "make a stream");
    }
    nccl_ok(nccl.CommInitAll(comms, count, devices), "connect the GPUs");
    for (int i = 0; i < count; i++)
        gpus[i].comm = comms[i];
}

static size_t measure(int count)
{
    size_t all_wrong = 0;
    const char *separator = "";
    for (size_t bytes = option.min_bytes; bytes <= option.max_bytes; bytes *= 2) {
        size_t elements = bytes / sizeof(float);
        fill(count, elements);
        all_reduce(count, elements, 1);
        size_t wrong = wrong_values(count, elements);
        all_wrong += wrong;
        all_reduce(count, elements, option.warmup);
        double start = now();
        all_reduce(count, elements, option.iterations);
        double seconds = (now() - start) / option.iterations;
        double algbw = (double)bytes / seconds / 1e9, busbw = algbw * 2.0 * (count - 1) / count;
        printf("%s\n    {\"bytes\": %zu, \"seconds\": %.9f, \"algbw_gb_s\": %.3f, \"busbw_gb_s\": %.3f, \"wrong\": %zu}",
               separator, bytes, seconds, algbw, busbw, wrong);
        separator = ",";
    }
    return all_wrong;
}

static void on_alarm(int signal)
{
    (void)signal;
    static const char text[] = "minivm-allreduce: no answer within --timeout: a GPU or a link hangs\n";
    ssize_t ignored = write(STDERR_FILENO, text, sizeof text - 1);
    (void)ignored;
    _exit(TIMED_OUT);
}

static size_t bytes_of(const char *text, const char *name)
{
    char *end;
    errno = 0;
    unsigned long long number = strtoull(text, &end, 10);
    int shift = 0;
    switch (*end) {
    case 'G': case 'g': shift += 10; /* fall through */
    case 'M': case 'm': shift += 10; /* fall through */
    case 'K': case 'k': shift += 10; end++;
    }
    if (errno || end == text || *end || text[0] == '-' || number == 0 || number > SIZE_MAX >> shift)
        stop(USAGE, "--%s: %s is not a size like 8M", name, text);
    return (size_t)number << shift;
}

static int number_of(const char *text, const char *name, int least)
{
    char *end;
    errno = 0;
    long number = strtol(text, &end, 10);
    if (errno || end == text || *end || number < least || number > 1000000)
        stop(USAGE, "--%s: %s is not a whole number of at least %d", name, text, least);
    return (int)number;
}

static void usage(void)
{
    puts("usage: minivm-allreduce [--gpus N] [--min-bytes 8M] [--max-bytes 1G] [--iterations 20] [--warmup 5]\n"
         "                        [--timeout SECONDS] [--libraries] [--version]\n"
         "All-reduce bandwidth over this machine's GPUs, as JSON. Sizes double from --min-bytes to --max-bytes.\n"
         "busbw is algbw * 2(n-1)/n: what each link carries, to compare with its rated speed. 0 with one GPU.\n"
         "--libraries: print the versions of CUDA's runtime and NCCL, and stop. Needs no GPU.\n"
         "Exit: 0 measured, 1 failed, 2 usage, 3 no GPU or driver, 4 library missing, 5 sums wrong, 6 timed out.");
}

static void parse(int argc, char **argv)
{
    enum { GPUS = 1, MIN_BYTES, MAX_BYTES, ITERATIONS, WARMUP, TIMEOUT, LIBRARIES, SHOW_VERSION, HELP };
    static const struct option known[] = {
        {"gpus", required_argument, NULL, GPUS}, {"min-bytes", required_argument, NULL, MIN_BYTES},
        {"max-bytes", required_argument, NULL, MAX_BYTES}, {"iterations", required_argument, NULL, ITERATIONS},
        {"warmup", required_argument, NULL, WARMUP}, {"timeout", required_argument, NULL, TIMEOUT},
        {"libraries", no_argument, NULL, LIBRARIES}, {"version", no_argument, NULL, SHOW_VERSION},
        {"help", no_argument, NULL, HELP}, {NULL, 0, NULL, 0},
    };
    for (int found, index; (found = getopt_long(argc, argv, "h", known, &index)) != -1;) {
        switch (found) {
        case GPUS: option.gpus = number_of(optarg, "gpus", 1); break;
        case MIN_BYTES: option.min_bytes = bytes_of(optarg, "min-bytes"); break;
        case MAX_BYTES: option.max_bytes = bytes_of(optarg, "max-bytes"); break;
        case ITERATIONS: option.iterations = number_of(optarg, "iterations", 1); break;
        case WARMUP: option.warmup = number_of(optarg, "warmup", 0); break;
        case TIMEOUT: option.timeout = number_of(optarg, "timeout", 1); break;
        case LIBRARIES: option.libraries = 1; break;
        case SHOW_VERSION: puts("minivm-allreduce " VERSION); exit(MEASURED);
        case HELP: case 'h': usage(); exit(MEASURED);
        default: exit(USAGE);
        }
    }
    if (optind < argc)
        stop(USAGE, "unexpected argument %s", argv[optind]);
    if (option.min_bytes < sizeof(float) || option.min_bytes > option.max_bytes)
        stop(USAGE, "--min-bytes must be at least 4 and at most --max-bytes");
}

int main(int argc, char **argv)
{
    parse(argc, argv);
    signal(SIGALRM, on_alarm);
    alarm((unsigned)option.timeout);
    open_libraries();
    int runtime = 0, driver = 0, version = 0;
    cuda_ok(cuda.RuntimeGetVersion(&runtime), "ask CUDA's runtime for its version");
    nccl_ok(nccl.GetVersion(&version), "ask NCCL for its version");
    if (option.libraries) {
        printf("{\"cuda_runtime\": %d, \"nccl\": %d}\n", runtime, version);
        return MEASURED;
    }
    int count = count_gpus();
    cuda_ok(cuda.DriverGetVersion(&driver), "ask the driver for its version");
    printf("{\n  \"program\": \"minivm-allreduce " VERSION "\", \"cuda_runtime\": %d, \"cuda_driver\": %d, \"nccl\": %d,\n"
           "  \"type\": \"float32\", \"iterations\": %d, \"gpus\": [", runtime, driver, version, option.iterations);
    for (int i = 0; i < count; i++) {
        char bus[32] = "";
        cuda_ok(cuda.DeviceGetPCIBusId(bus, sizeof bus, i), "ask a GPU for its address");
        printf("%s\"%s\"", i ? ", " : "", bus);
    }
    printf("],\n  \"results\": [");
    prepare(count);
    size_t wrong = measure(count);
    printf("\n  ]\n}\n");
    for (int i = 0; i < count; i++)
        nccl_ok(nccl.CommDestroy(gpus[i].comm), "disconnect the GPUs");
    if (fflush(stdout) != 0)
        stop(FAILED, "cannot write the result: %s", strerror(errno));
    if (wrong)
        stop(WRONG, "%zu values were wrong: the sums of this machine cannot be trusted", wrong);
    _exit(MEASURED);
}
