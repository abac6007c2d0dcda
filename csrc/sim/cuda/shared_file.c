/* shared_file.c: memory that several processes map. The label is one page behind the memory, so that whoever gets the
 * descriptor knows what it is, also when its maker is dead. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/memfd.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "cuda/vmm.h"

#define LABEL_MAGIC 0x6c6562616c6d6973ull
#define LABEL_ROOM  4096u
#ifndef F_ADD_SEALS /* newer than the oldest C library that this is built for */
#define F_ADD_SEALS   1033
#define F_SEAL_SHRINK 2
#define F_SEAL_GROW   4
#endif

/* The C library's own is bound to a version that old images lack. */
static bool stat_of(int file, struct stat *status)
{
    return syscall(SYS_fstat, file, status) == 0;
}

int shared_file_new(uint64_t size, const struct label *label)
{
    struct label whole = *label;
    int file = (int)syscall(SYS_memfd_create, "cuda-shared", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (file < 0)
        return -1;
    whole.magic = LABEL_MAGIC;
    whole.size = size;
    if (ftruncate(file, (off_t)(size + LABEL_ROOM)) < 0 || fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) < 0 ||
        pwrite(file, &whole, sizeof whole, (off_t)size) != sizeof whole) {
        close(file);
        return -1;
    }
    return file;
}

bool shared_file_label(int file, enum label_kind kind, struct label *label)
{
    struct stat status;
    if (!stat_of(file, &status) || !S_ISREG(status.st_mode) || status.st_size <= (off_t)LABEL_ROOM)
        return false;
    off_t size = status.st_size - (off_t)LABEL_ROOM;
    return pread(file, label, sizeof *label, size) == sizeof *label && label->magic == LABEL_MAGIC &&
        label->kind == kind && label->size == (uint64_t)size;
}

uint64_t shared_file_inode(int file)
{
    struct stat status;
    return stat_of(file, &status) ? (uint64_t)status.st_ino : 0;
}

struct gpu *gpu_of_uuid(const uint8_t uuid[16])
{
    for (int i = 0; i < gpu_count; i++)
        if (memcmp(gpus[i]->conf.uuid, uuid, 16) == 0)
            return gpus[i];
    return NULL;
}

CUresult file_map(struct CUctx_st *ctx, struct gpu *gpu, int file, uint64_t offset, uint64_t size, struct block **out)
{
    uint64_t first = offset & ~4095ull, bytes = ((offset + size + 4095) & ~4095ull) - first;
    uint8_t *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, (off_t)first);
    if (at == MAP_FAILED)
        return CUDA_ERROR_MAP_FAILED;
    madvise(at, bytes, MADV_DONTDUMP);
    struct block *block = block_insert((uintptr_t)at + (offset - first), size, BLOCK_FILE, ctx, gpu);
    if (!block) {
        munmap(at, bytes);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    block->refs = 1;
    *out = block;
    return CUDA_SUCCESS;
}

void file_unmap(struct block *block)
{
    uint64_t first = block->base & ~4095ull, end = (block->base + block->size + 4095) & ~4095ull;
    munmap((void *)(uintptr_t)first, end - first);
}

static bool copy_part(int to, off_t to_at, int from, off_t from_at, uint64_t bytes)
{
    char buffer[64u << 10];
    while (bytes) {
        size_t part = bytes < sizeof buffer ? (size_t)bytes : sizeof buffer;
        ssize_t got = pread(from, buffer, part, from_at);
        if (got <= 0 || pwrite(to, buffer, (size_t)got, to_at) != got)
            return false;
        from_at += got;
        to_at += got;
        bytes -= (uint64_t)got;
    }
    return true;
}

bool shared_file_copy(int to, uint64_t to_at, int from, uint64_t from_at, uint64_t bytes)
{
    off_t at = (off_t)from_at, end = (off_t)(from_at + bytes);
    while (at < end) {
        off_t data = lseek(from, at, SEEK_DATA);
        if (data < 0)
            return errno == ENXIO; /* nothing but holes from here on */
        if (data >= end)
            return true;
        off_t hole = lseek(from, data, SEEK_HOLE);
        hole = hole < 0 || hole > end ? end : hole;
        if (!copy_part(to, (off_t)to_at + (data - (off_t)from_at), from, data, (uint64_t)(hole - data)))
            return false;
        at = hole;
    }
    return true;
}

void copies_stop(void)
{
    for (int i = 0; i < gpu_count; i++)
        pthread_mutex_lock(&gpus[i]->queue.retire);
}

void copies_go_on(void)
{
    for (int i = gpu_count; i-- > 0;)
        pthread_mutex_unlock(&gpus[i]->queue.retire);
}
