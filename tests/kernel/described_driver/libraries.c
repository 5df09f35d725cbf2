// What else JAX looks for: the runtime, of which XLA's own kernels make use, the management library, and collectives,
// which exchange nothing.

#include "described.h"

#include <cuda_runtime_api.h>

void **__cudaRegisterFatBinary(void *image) {
    static void *handle;
    return &handle;
}
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
void __cudaRegisterFunction(
    void **handle, const char *host, char *device, const char *name, int limit, uint3 *thread, uint3 *block,
    dim3 *block_dim, dim3 *grid_dim, int *warp_size
) {}
void __cudaRegisterVar(
    void **handle, char *host, char *device, const char *name, int is_extern, size_t size, int is_constant,
    int is_global
) {}
cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = DRIVER_VERSION;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int *number) {
    *number = num_devices();
    return cudaSuccess;
}
cudaError_t cudaPeekAtLastError(void) { return cudaSuccess; }

int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) { return 3; }  // not supported
const char *nvmlErrorString(int error) { return "refused by a library that only describes devices"; }
int nvmlSystemGetDriverVersion(char *version, unsigned size) {
    snprintf(version, size, "575.0");
    return 0;
}

struct unique_id {
    char bytes[128];
};
struct communicator {  // a rank's; those of one name exchange
    char name[128];
    int num_splits;
    struct communicator *next;
};

static struct communicator *communicators;

static struct communicator *join(const char *name) {
    struct communicator *made = calloc(1, sizeof *made);
    snprintf(made->name, sizeof made->name, "%s", name);
    pthread_mutex_lock(&mutex);
    made->next = communicators;
    communicators = made;
    pthread_mutex_unlock(&mutex);
    return made;
}

int ncclGetVersion(int *version) {
    *version = 22807;
    return 0;
}
int ncclGetUniqueId(struct unique_id *id) {
    static long number;
    snprintf(id->bytes, sizeof id->bytes, "%ld", __atomic_add_fetch(&number, 1, __ATOMIC_RELAXED));
    return 0;
}
const char *ncclGetErrorString(int error) { return "refused by a library that only describes devices"; }
int ncclCommInitRankConfig(
    struct communicator **made, int num_ranks, struct unique_id id, int rank, const void *config
) {
    *made = join(id.bytes);
    return 0;
}
int ncclCommSplit(struct communicator *whole, int color, int key, struct communicator **made, const void *config) {
    char name[128];
    int length = snprintf(name, sizeof name, "%s/%d.%d", whole->name, whole->num_splits++, color);
    if (length >= (int)sizeof name) return 3;
    *made = color < 0 ? NULL : join(name);
    return 0;
}
int ncclCommCount(const struct communicator *communicator, int *number) {
    *number = 0;
    pthread_mutex_lock(&mutex);
    for (struct communicator *each = communicators; each; each = each->next)
        *number += !strcmp(each->name, communicator->name);
    pthread_mutex_unlock(&mutex);
    return 0;
}
int ncclCommGetAsyncError(struct communicator *communicator, int *error) {
    *error = 0;
    return 0;
}
int ncclGroupStart(void) { return 0; }
int ncclGroupEnd(void) { return 0; }
int ncclAllReduce(
    const void *from, void *to, size_t size, int type, int operation, struct communicator *communicator, CUstream stream
) {
    return enqueue(stream, (struct op){.kind = LAUNCH, .is_collective = true});
}
int ncclReduceScatter(
    const void *from, void *to, size_t size, int type, int operation, struct communicator *communicator, CUstream stream
) {
    return enqueue(stream, (struct op){.kind = LAUNCH, .is_collective = true});
}
int ncclAllGather(
    const void *from, void *to, size_t size, int type, struct communicator *communicator, CUstream stream
) {
    return enqueue(stream, (struct op){.kind = LAUNCH, .is_collective = true});
}
int ncclAlltoAll(
    const void *from, void *to, size_t size, int type, struct communicator *communicator, CUstream stream
) {
    return enqueue(stream, (struct op){.kind = LAUNCH, .is_collective = true});
}
int ncclSend(const void *from, size_t size, int type, int peer, struct communicator *communicator, CUstream stream) {
    return enqueue(stream, (struct op){.kind = LAUNCH, .is_collective = true});
}
int ncclRecv(void *to, size_t size, int type, int peer, struct communicator *communicator, CUstream stream) {
    return enqueue(stream, (struct op){.kind = LAUNCH, .is_collective = true});
}
