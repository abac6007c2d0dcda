/* memory.h: what the wrappers of allocating and freeing calls share. */
#ifndef CGPU_MEMORY_H
#define CGPU_MEMORY_H
#include <stdbool.h>
#include <stdint.h>
#include "hook.h"
#include "ledger.h"
#include "pool.h"

/* Where an allocation lands: the GPU, and the context it dies with. gpu -1: no instance, or no current context. */
struct place {
    int gpu;
    const void *context;
};
struct place place_here(void);               /* of the calling thread's current context */
struct place place_of_stream(CUstream stream); /* of the stream's; of the current one for the null streams */
/* Where work for the stream runs, and in which context: the green one itself, where it is one of that. -1: as above. */
int gpu_of_stream(CUstream stream, CUcontext *context);

/* What the device takes for one block. A GPU's memory is handed out in pages of 2 MiB; smaller blocks share pages in steps of
 * 512 bytes. (Driver-internal: as observed and as frameworks assume it, nowhere promised. The page that small blocks share is
 * counted by what is used of it: counting it whole needs the driver's own placement, and refused what fits.) Too large to
 * round: as large as can be, and so refused. */
#define SMALL_GRANULE LEDGER_UNIT
#define LARGE_GRANULE (2ull << 20)
static inline uint64_t round_up(uint64_t bytes, uint64_t granule)
{
    return bytes > UINT64_MAX - granule ? UINT64_MAX : (bytes + granule - 1) / granule * granule;
}
static inline uint64_t device_bytes(uint64_t bytes)
{
    return round_up(bytes, bytes < LARGE_GRANULE ? SMALL_GRANULE : LARGE_GRANULE);
}

/* The context of `place`, as the ledger's owner. */
static inline struct ledger_entry entry_at(struct place at, uint64_t bytes)
{
    return (struct ledger_entry){.gpu = at.gpu, .bytes = bytes, .owner = at.context};
}

/* Charges; where that does not fit, after what this process keeps unused has been given back. */
static inline bool memory_charge(int gpu, uint64_t bytes)
{
    return __builtin_expect(ledger_try(gpu, bytes), 1) || memory_charge_again(gpu, bytes);
}

/* One allocation, charged before the driver is asked:
 *     struct charge charge = charge_at(place, device_bytes(bytes));
 *     if (charge.refused)
 *         return CUDA_ERROR_OUT_OF_MEMORY;
 *     CUresult result = REAL(...)(...);
 *     charge_end(&charge, result, LEDGER_POINTER, result == CUDA_SUCCESS ? *ptr : 0);
 */
struct charge {
    struct place at;
    uint64_t bytes;
    bool refused;
};

static inline struct charge charge_at(struct place at, uint64_t bytes)
{
    return (struct charge){at, bytes, at.gpu >= 0 && !memory_charge(at.gpu, bytes)};
}

static inline void charge_end(const struct charge *charge, CUresult result, enum ledger_kind kind, uint64_t key)
{
    if (charge->at.gpu < 0)
        return;
    struct ledger_entry entry = entry_at(charge->at, charge->bytes);
    if (result == CUDA_SUCCESS)
        ledger_put(kind, key, &entry);
    else
        ledger_refund(charge->at.gpu, charge->bytes);
}

/* The driver takes another number of bytes than the charge was made for. true: charged for what it takes. */
static inline bool charge_correct(struct charge *charge, uint64_t bytes)
{
    if (charge->at.gpu < 0)
        return true;
    if (bytes > charge->bytes && !memory_charge(charge->at.gpu, bytes - charge->bytes))
        return false;
    if (bytes < charge->bytes)
        ledger_refund(charge->at.gpu, charge->bytes - bytes);
    charge->bytes = bytes;
    return true;
}
#endif
