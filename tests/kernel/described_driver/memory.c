// Memory, and copies between devices and host.

#include "described.h"

#include <sys/mman.h>
#include <unistd.h>

#define PAGE 4096ul
#define LARGE_PAGE (2ul << 20)

struct physical {  // what `cuMemCreate` makes, to be mapped somewhere
    int file;
    CUdevice device;
    int num_holders;
};

struct memory {
    char *start;
    size_t size;
    bool is_host;
    CUdevice device;
    struct physical *mapped;
    struct memory *next;
};

static struct memory *memories;

static void keep(struct memory it) {
    struct memory *kept = malloc(sizeof *kept);
    pthread_mutex_lock(&mutex);
    it.next = memories;
    *kept = it;
    memories = kept;
    pthread_mutex_unlock(&mutex);
}

static bool find(const void *address, struct memory *found) {
    const char *at = address;
    pthread_mutex_lock(&mutex);
    struct memory *each = memories;
    while (each && !(at >= each->start && at < each->start + each->size)) each = each->next;
    if (each) *found = *each;
    pthread_mutex_unlock(&mutex);
    return each != NULL;
}

static bool forget(void *start, struct memory *forgotten) {
    pthread_mutex_lock(&mutex);
    struct memory **each = &memories;
    while (*each && (*each)->start != start) each = &(*each)->next;
    struct memory *it = *each;
    if (it) {
        *forgotten = *it;
        *each = it->next;
    }
    pthread_mutex_unlock(&mutex);
    free(it);
    return it != NULL;
}

static CUresult take(void **start, size_t size, bool is_host) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    size = (size + PAGE) & -PAGE;
    *start = mmap(NULL, size, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (*start == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    CUdevice device = current_device();
    keep((struct memory){.start = *start, .size = size, .is_host = is_host, .device = device});
    return CUDA_SUCCESS;
}

static CUresult give_back(void *start) {
    struct memory it;
    if (!start) return CUDA_SUCCESS;
    if (!forget(start, &it)) return CUDA_ERROR_INVALID_VALUE;
    munmap(it.start, it.size);
    return CUDA_SUCCESS;
}

CUresult cuMemAlloc(CUdeviceptr *start, size_t size) { return take((void **)start, size, false); }
CUresult cuMemFree(CUdeviceptr start) { return give_back((void *)start); }
CUresult cuMemHostAlloc(void **start, size_t size, unsigned flags) { return take(start, size, true); }
CUresult cuMemFreeHost(void *start) { return give_back(start); }
CUresult cuMemHostRegister(void *start, size_t size, unsigned flags) {
    keep((struct memory){.start = start, .size = size, .is_host = true});
    return CUDA_SUCCESS;
}
CUresult cuMemHostUnregister(void *start) {
    struct memory it;
    return forget(start, &it) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemGetAddressRange(CUdeviceptr *start, size_t *size, CUdeviceptr address) {
    struct memory it;
    if (!find((void *)address, &it)) return CUDA_ERROR_NOT_FOUND;
    if (start) *start = (CUdeviceptr)it.start;
    if (size) *size = it.size;
    return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
    struct memory it;
    bool is_known = find((void *)address, &it);
    if (attribute == CU_POINTER_ATTRIBUTE_IS_MANAGED) {
        *(unsigned *)value = 0;
        return CUDA_SUCCESS;
    }
    if (!is_known) return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)value = it.is_host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)value = address; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)value = it.device; break;
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)value = context_of(it.device); break;
    default: return CUDA_ERROR_NOT_SUPPORTED;
    }
    return CUDA_SUCCESS;
}
CUresult cuPointerGetAttributes(unsigned number, CUpointer_attribute *attributes, void **values, CUdeviceptr address) {
    for (unsigned i = 0; i < number; i++) {
        CUresult result = cuPointerGetAttribute(values[i], attributes[i], address);
        if (result != CUDA_SUCCESS) return result;
    }
    return CUDA_SUCCESS;
}

static void drop(struct physical *it) {
    pthread_mutex_lock(&mutex);
    bool is_last = --it->num_holders == 0;
    pthread_mutex_unlock(&mutex);
    if (!is_last) return;
    close(it->file);
    free(it);
}

static void hold(struct physical *it) {
    pthread_mutex_lock(&mutex);
    it->num_holders++;
    pthread_mutex_unlock(&mutex);
}

CUresult cuMemGetAllocationGranularity(
    size_t *size, const CUmemAllocationProp *properties, CUmemAllocationGranularity_flags option
) {
    *size = LARGE_PAGE;
    return CUDA_SUCCESS;
}
CUresult cuMemCreate(
    CUmemGenericAllocationHandle *made, size_t size, const CUmemAllocationProp *properties, unsigned long long flags
) {
    struct physical *it = malloc(sizeof *it);
    *it = (struct physical){memfd_create("described device", 0), properties->location.id, 1};
    if (it->file < 0 || ftruncate(it->file, size)) return CUDA_ERROR_OUT_OF_MEMORY;
    *made = (CUmemGenericAllocationHandle)it;
    return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    drop((struct physical *)handle);
    return CUDA_SUCCESS;
}
CUresult cuMemAddressReserve(
    CUdeviceptr *start, size_t size, size_t alignment, CUdeviceptr wish, unsigned long long flags
) {
    size_t step = alignment > LARGE_PAGE ? alignment : LARGE_PAGE;
    char *taken = mmap(NULL, size + step, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (taken == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    size_t before = (step - (size_t)taken % step) % step;
    if (before) munmap(taken, before);
    munmap(taken + before + size, step - before);
    *start = (CUdeviceptr)(taken + before);
    return CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr start, size_t size) {
    munmap((void *)start, size);
    return CUDA_SUCCESS;
}
CUresult cuMemMap(
    CUdeviceptr start, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags
) {
    struct physical *it = (struct physical *)handle;
    void *at = mmap((void *)start, size, PROT_NONE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, it->file, offset);
    if (at == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    hold(it);
    keep((struct memory){.start = at, .size = size, .device = it->device, .mapped = it});
    return CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr start, size_t size) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    struct memory it;
    for (char *at = (char *)start; at < (char *)start + size; at += it.size) {
        if (!forget(at, &it)) return CUDA_ERROR_INVALID_VALUE;
        mmap(it.start, it.size, PROT_NONE, flags, -1, 0);
        drop(it.mapped);
    }
    return CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr start, size_t size, const CUmemAccessDesc *access, size_t num_devices) {
    return mprotect((void *)start, size, PROT_READ | PROT_WRITE) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    struct memory it;
    if (!find(address, &it) || !it.mapped) return CUDA_ERROR_INVALID_VALUE;
    hold(it.mapped);
    *handle = (CUmemGenericAllocationHandle)it.mapped;
    return CUDA_SUCCESS;
}

static CUresult copy_now(void *target, const void *source, size_t size, long *what) {
    count(what);
    count(&described_waits);
    memcpy(target, source, size);
    return CUDA_SUCCESS;
}

CUresult cuMemcpyHtoD(CUdeviceptr target, const void *source, size_t size) {
    return copy_now((void *)target, source, size, &described_copies_in);
}
CUresult cuMemcpyDtoH(void *target, CUdeviceptr source, size_t size) {
    return copy_now(target, (void *)source, size, &described_copies_out);
}
CUresult cuMemcpyDtoD(CUdeviceptr target, CUdeviceptr source, size_t size) {
    return copy_now((void *)target, (void *)source, size, &described_copies_within);
}
CUresult cuMemcpyHtoDAsync(CUdeviceptr target, const void *source, size_t size, CUstream stream) {
    struct memory it;
    struct op op = {COPY, .target = (char *)target, .source = source, .size = size};
    if (!find(source, &it)) op.source = op.staged = memcpy(malloc(size), source, size);
    count(&described_copies_in);
    return enqueue(stream, op);
}
CUresult cuMemcpyDtoHAsync(void *target, CUdeviceptr source, size_t size, CUstream stream) {
    struct memory it;
    count(&described_copies_out);
    CUresult result = enqueue(stream, (struct op){COPY, .target = target, .source = (char *)source, .size = size});
    return find(target, &it) ? result : cuStreamSynchronize(stream);  // as a driver does where memory is not its own
}
CUresult cuMemcpyDtoDAsync(CUdeviceptr target, CUdeviceptr source, size_t size, CUstream stream) {
    count(&described_copies_within);
    return enqueue(stream, (struct op){COPY, .target = (char *)target, .source = (char *)source, .size = size});
}
CUresult cuMemcpyPeerAsync(
    CUdeviceptr target, CUcontext there, CUdeviceptr source, CUcontext here, size_t size, CUstream stream
) {
    return cuMemcpyDtoDAsync(target, source, size, stream);
}

struct op fill(CUdeviceptr target, unsigned value, size_t size, size_t width) {
    return (struct op){FILL, .target = (char *)target, .value = value, .size = size, .width = width};
}

static CUresult fill_now(struct op op) {
    count(&described_waits);
    execute(&op);
    return CUDA_SUCCESS;
}

CUresult cuMemsetD8(CUdeviceptr target, unsigned char value, size_t size) {
    return fill_now(fill(target, value, size, 1));
}
CUresult cuMemsetD32(CUdeviceptr target, unsigned value, size_t size) { return fill_now(fill(target, value, size, 4)); }
CUresult cuMemsetD8Async(CUdeviceptr target, unsigned char value, size_t size, CUstream stream) {
    return enqueue(stream, fill(target, value, size, 1));
}
CUresult cuMemsetD32Async(CUdeviceptr target, unsigned value, size_t size, CUstream stream) {
    return enqueue(stream, fill(target, value, size, 4));
}
