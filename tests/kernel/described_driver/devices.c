// Devices and contexts.

#include "described.h"

#define MAX_DEVICES 16
#define BUS_BITS 6144

struct CUctx_st {
    CUdevice device;
};

static struct CUctx_st contexts[MAX_DEVICES];
static __thread CUcontext current;
static __thread CUcontext pushed[16];
static __thread int num_pushed;

int num_devices(void) {
    const char *given = getenv("DESCRIBED_DEVICES");
    return given ? atoi(given) : 1;
}

CUcontext context_of(CUdevice device) { return &contexts[device]; }
CUdevice current_device(void) { return current ? current->device : 0; }

static void start(void) {
    pthread_t thread;
    for (int device = 0; device < MAX_DEVICES; device++) contexts[device].device = device;
    pthread_create(&thread, NULL, run_devices, NULL);
    pthread_detach(thread);
}

CUresult cuInit(unsigned flags) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, start);
    return CUDA_SUCCESS;
}
CUresult cuDriverGetVersion(int *version) {
    *version = DRIVER_VERSION;
    return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = error == CUDA_SUCCESS ? "no error" : "refused by a driver that only describes devices";
    return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char **text) { return cuGetErrorString(error, text); }

CUresult cuDeviceGetCount(int *number) {
    *number = num_devices();
    return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = ordinal;
    return ordinal < num_devices() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
CUresult cuDeviceGetName(char *name, int size, CUdevice device) {
    snprintf(name, size, "%s", NAME);
    return CUDA_SUCCESS;
}
CUresult cuDeviceTotalMem(size_t *size, CUdevice device) {
    *size = MEMORY_BYTES;
    return CUDA_SUCCESS;
}
CUresult cuMemGetInfo(size_t *available, size_t *total) {
    *available = *total = MEMORY_BYTES;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetPCIBusId(char *id, int size, CUdevice device) {
    snprintf(id, size, "FFFF:%02X:00.0", device + 1);
    return CUDA_SUCCESS;
}
CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
    *can = device != peer;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = COMPUTE_CAPABILITY; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = NUM_SMS; break;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: *value = CLOCK_KHZ; break;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: *value = BYTES_PER_SECOND / 2 * 8 / BUS_BITS / 1000; break;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: *value = BUS_BITS; break;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: *value = L2_BYTES; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = SHARED_BYTES; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = SHARED_BYTES - 1024; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: *value = 49152; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: *value = 2048; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: *value = 1024; break;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: *value = 64; break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: *value = 2147483647; break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: *value = 65535; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: *value = 65536; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_ECC_ENABLED: *value = 1; break;
    default: *value = 0;
    }
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *is_active) {
    *flags = CU_CTX_SCHED_AUTO;
    *is_active = 1;
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    *context = &contexts[device];
    return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = current;
    return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext context) {
    current = context;
    return CUDA_SUCCESS;
}
CUresult cuCtxPushCurrent(CUcontext context) {
    if (num_pushed == sizeof pushed / sizeof *pushed) return CUDA_ERROR_OUT_OF_MEMORY;
    pushed[num_pushed++] = current;
    current = context;
    return CUDA_SUCCESS;
}
CUresult cuCtxPopCurrent(CUcontext *context) {
    if (!num_pushed) return CUDA_ERROR_INVALID_CONTEXT;
    if (context) *context = current;
    current = pushed[--num_pushed];
    return CUDA_SUCCESS;
}
CUresult cuCtxGetDevice(CUdevice *device) {
    if (!current) return CUDA_ERROR_INVALID_CONTEXT;
    *device = current->device;
    return CUDA_SUCCESS;
}
CUresult cuCtxGetStreamPriorityRange(int *lowest, int *highest) {
    *lowest = 0;
    *highest = -5;
    return CUDA_SUCCESS;
}
CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) { return CUDA_SUCCESS; }
CUresult cuCtxSynchronize(void) {
    count(&described_waits);
    pthread_mutex_lock(&mutex);
    for (CUstream stream = streams; stream;) {
        if (stream->first && stream->context == current) {
            pthread_cond_wait(&changed, &mutex);
            stream = streams;
        } else {
            stream = stream->next;
        }
    }
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}
