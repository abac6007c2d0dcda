/* visible.c: the program sees the instance's GPUs only (and its native ones, see instance.h), numbered from 0.
 *
 * CUDA: the driver itself does the numbering. For the time of the real cuInit, CUDA_VISIBLE_DEVICES is the list of their
 * UUIDs, narrowed by what the program has set; then the program's value is back, for itself and its children. */
#define _GNU_SOURCE /* strchrnul */
#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "atomics.h"
#include "hook.h"
#include "instance.h"
#include "lock.h"

#define VISIBLE "CUDA_VISIBLE_DEVICES"
#define DEVICES 64 /* ordinals that are remembered; CUDA allows no more GPUs in a node */

CU_NEED(CUresult, cuDeviceGetUuid, (CUuuid *uuid, CUdevice device));
CU_NEED(CUresult, cuDeviceGetUuid_v2, (CUuuid *uuid, CUdevice device));

/* ---- which device is which GPU ---- */

static int8_t gpu_of_device[DEVICES]; /* gpu + 2; 1 = none of ours, 0 = not asked yet */

int hook_gpu_of_device(CUdevice device)
{
    CUuuid uuid;
    CUresult result = CUDA_ERROR_NOT_FOUND;
    if (device < 0 || device >= DEVICES)
        return -1;
    int8_t known = load_relaxed(&gpu_of_device[device]);
    if (known)
        return known - 2;
    /* the first variant: for a MIG device it gives the whole card's */
    if (have(cuDeviceGetUuid))
        result = REAL(cuDeviceGetUuid)(&uuid, device);
    else if (have(cuDeviceGetUuid_v2))
        result = REAL(cuDeviceGetUuid_v2)(&uuid, device);
    if (result != CUDA_SUCCESS)
        return -1; /* before cuInit: ask again later */
    int gpu = hook_gpu_of_uuid((const uint8_t *)uuid.bytes);
    store_relaxed(&gpu_of_device[device], (int8_t)(gpu < 0 ? 1 : gpu + 2));
    return gpu;
}

/* ---- the program's own list ---- */

/* The only GPU whose UUID begins with these characters, or -1. */
static int place_of_prefix(const char *text, size_t length)
{
    int found = -1;
    for (int place = 0; place < seen_gpus(); place++) {
        char uuid[UUID_TEXT];
        uuid_format(seen_uuid(place), uuid);
        if (length > 4 && length < UUID_TEXT && strncasecmp(uuid, text, length) == 0) {
            if (found >= 0)
                return -1;
            found = place;
        }
    }
    return found;
}

static int place_of_token(const char *text, size_t length)
{
    int index = 0;
    if (length == 0)
        return -1;
    if (!isdigit((unsigned char)*text))
        return place_of_prefix(text, length);
    for (size_t i = 0; i < length; i++) {
        if (!isdigit((unsigned char)text[i]) || index >= CGPU_MAX_GPUS)
            return -1;
        index = index * 10 + (text[i] - '0');
    }
    return index < seen_gpus() ? index : -1;
}

int visible_translate(const char *own, char *out)
{
    int order[CGPU_MAX_GPUS], count = 0;
    uint32_t named = 0;
    *out = 0;
    if (!own) {
        for (count = 0; count < seen_gpus(); count++)
            order[count] = count;
    } else {
        for (const char *at = own;; at++) {
            const char *end = strchrnul(at, ','), *last = end;
            while (at < last && isspace((unsigned char)*at))
                at++;
            while (last > at && isspace((unsigned char)last[-1]))
                last--;
            int place = place_of_token(at, (size_t)(last - at));
            if (place < 0)
                break;
            if (named & 1u << place) /* not documented: what drivers are seen to do */
                return 0;
            named |= 1u << place;
            order[count++] = place;
            at = end;
            if (!*at)
                break;
        }
    }
    for (int i = 0; i < count; i++) {
        if (i)
            *out++ = ',';
        uuid_format(seen_uuid(order[i]), out);
        out += strlen(out);
    }
    return count;
}

/* ---- cuInit ---- */

static struct hook_lock initialising;
static bool initialised;
static CGPU_TLS bool inside;

CU_WRAP(CUresult, cuInit, (unsigned int flags))
{
    if (!hook_join(false) || load_acquire(&initialised) || inside)
        return REAL(cuInit)(flags);
    char list[UUID_TEXT * CGPU_MAX_GPUS];
    hook_lock_take(&initialising);
    const char *set = getenv(VISIBLE);
    char *own = set ? strdup(set) : NULL;
    if (set && !own) {
        hook_lock_drop(&initialising);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    visible_translate(own, list);
    setenv(VISIBLE, list, 1);
    inside = true;
    CUresult result = REAL(cuInit)(flags);
    inside = false;
    if (own)
        setenv(VISIBLE, own, 1);
    else
        unsetenv(VISIBLE);
    free(own);
    if (result == CUDA_SUCCESS)
        store_release(&initialised, true);
    hook_lock_drop(&initialising);
    return result;
}

void visible_after_fork(void)
{
    initialising = (struct hook_lock){0};
    initialised = false;
    memset(gpu_of_device, 0, sizeof gpu_of_device);
}
