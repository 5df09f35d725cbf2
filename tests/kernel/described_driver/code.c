// Code: modules, and launches of what is in them.

#include "described.h"

#include <elf.h>

struct CUmod_st {
    char *image;
};

static const Elf64_Sym *find_symbol(CUmodule module, const char *name) {
    const Elf64_Ehdr *header = (void *)module->image;
    const Elf64_Shdr *sections = (void *)(module->image + header->e_shoff);
    for (int i = 0; i < header->e_shnum; i++) {
        if (sections[i].sh_type != SHT_SYMTAB) continue;
        const char *names = module->image + sections[sections[i].sh_link].sh_offset;
        const Elf64_Sym *symbols = (void *)(module->image + sections[i].sh_offset);
        for (size_t k = 0; k < sections[i].sh_size / sizeof *symbols; k++)
            if (!strcmp(names + symbols[k].st_name, name)) return &symbols[k];
    }
    return NULL;
}

CUresult cuModuleLoadData(CUmodule *made, const void *image) {
    const Elf64_Ehdr *header = image;
    if (memcmp(header->e_ident, ELFMAG, SELFMAG) || header->e_machine != EM_CUDA) return CUDA_ERROR_INVALID_IMAGE;
    size_t sections = header->e_shoff + (size_t)header->e_shnum * header->e_shentsize;
    size_t segments = header->e_phoff + (size_t)header->e_phnum * header->e_phentsize;
    size_t size = sections > segments ? sections : segments;
    *made = malloc(sizeof **made);
    (*made)->image = memcpy(malloc(size), image, size);
    count(&described_modules);
    return CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule module) {
    free(module->image);
    free(module);
    return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction *found, CUmodule module, const char *name) {
    if (!find_symbol(module, name)) return CUDA_ERROR_NOT_FOUND;
    *found = malloc(sizeof **found);
    (*found)->module = module;
    count(&described_functions);
    return CUDA_SUCCESS;
}
CUresult cuModuleGetGlobal(CUdeviceptr *start, size_t *size, CUmodule module, const char *name) {
    const Elf64_Sym *symbol = find_symbol(module, name);
    if (!symbol) return CUDA_ERROR_NOT_FOUND;
    if (size) *size = symbol->st_size;
    return start ? cuMemAlloc(start, symbol->st_size) : CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = 64; break;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION: *value = 10 * COMPUTE_CAPABILITY; break;
    default: *value = 0;
    }
    return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuLaunchKernel(
    CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
    unsigned block_z, unsigned shared_bytes, CUstream stream, void **arguments, void **extra
) {
    return enqueue(stream, (struct op){.kind = LAUNCH});
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) {
    return enqueue(config->hStream, (struct op){.kind = LAUNCH});
}
