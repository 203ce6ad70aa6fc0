/* CUDA's runtime and NCCL on the CPU, as far as images/src/allreduce.c uses them: for testing what it makes of their
 * answers where there is no GPU. GPUS: how many; STANDIN: `wrong` falsifies a sum, `hang` never answers. */
#include <stdlib.h>
#include <string.h>
#include <stdio.h>
#include <unistd.h>

static int gpus(void) { return getenv("GPUS") ? atoi(getenv("GPUS")) : 0; }
static int standin(const char *what) { return getenv("STANDIN") && strcmp(getenv("STANDIN"), what) == 0; }

int cudaGetDeviceCount(int *count) { return (*count = gpus()) ? 0 : getenv("ERROR") ? atoi(getenv("ERROR")) : 100; }
int cudaSetDevice(int device) { return device < gpus() ? 0 : 101; }
int cudaRuntimeGetVersion(int *version) { *version = 12040; return 0; }
int cudaDriverGetVersion(int *version) { *version = 12080; return 0; }
int cudaDeviceGetPCIBusId(char *text, int length, int device) { snprintf(text, length, "0000:%02x:00.0", device); return 0; }
int cudaMalloc(void **memory, size_t bytes) { return (*memory = malloc(bytes)) ? 0 : 2; }
int cudaFree(void *memory) { free(memory); return 0; }
int cudaMemset(void *memory, int value, size_t bytes) { memset(memory, value, bytes); return 0; }
int cudaMemcpy(void *to, const void *from, size_t bytes, int kind) { (void)kind; memcpy(to, from, bytes); return 0; }
int cudaStreamCreate(void **stream) { *stream = NULL; return 0; }
int cudaStreamSynchronize(void *stream) { (void)stream; if (standin("hang")) pause(); return 0; }
const char *cudaGetErrorString(int error) { return error == 101 ? "invalid device ordinal" : "an error"; }

static const float *sends[64];
static float *receives[64];
static size_t pending, elements;

int ncclGetVersion(int *version) { *version = 22203; return 0; }
int ncclCommInitAll(void **comms, int count, const int *devices)
{
    for (int i = 0; i < count; i++)
        comms[i] = (void *)(size_t)(devices[i] + 1);
    return 0;
}
int ncclCommDestroy(void *comm) { (void)comm; return 0; }
int ncclGroupStart(void) { pending = 0; return 0; }
int ncclAllReduce(const void *send, void *receive, size_t count, int type, int op, void *comm, void *stream)
{
    (void)comm, (void)stream;
    if (type != 7 || op != 0)
        return 4;
    sends[pending] = send, receives[pending++] = receive, elements = count;
    return 0;
}
int ncclGroupEnd(void)
{
    for (size_t k = 0; k < elements; k++) {
        float sum = 0;
        for (size_t i = 0; i < pending; i++)
            sum += sends[i][k];
        for (size_t i = 0; i < pending; i++)
            receives[i][k] = sum;
    }
    if (standin("wrong"))
        receives[pending - 1][elements - 1] += 1;
    return 0;
}
const char *ncclGetErrorString(int error) { return error ? "an error" : "no error"; }
const char *ncclGetLastError(void *comm) { (void)comm; return ""; }
