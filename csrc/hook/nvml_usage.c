/* nvml_usage.c: how busy the device is, as the instance's own share: device time charged to it, from what the control
 * page remembers of the last heartbeats.
 *
 * That history is the daemon's, so that every process of the instance is told the same, and one that asks once and
 * ends (nvidia-smi) need not wait for a second look. Where no daemon counts, the answer is that it is not supported:
 * the card's figure would be the neighbours'. How busy its memory is cannot be told apart by instance: it gets the
 * part of the card's figure that goes with its share of the busy time. Counters that nobody can divide (GPM) are not
 * supported. */
#include <time.h>

#include "client.h"
#include "nvml.h"

#define WINDOW 10 /* beats: 1 s, as the driver has it at most */
#define TRIES 3

struct history {
    int count; /* newest last */
    struct cgpu_beat beat[WINDOW + 1];
};

static bool ours(nvmlDevice_t device, int *gpu)
{
    *gpu = hook_join(true) ? nvml_gpu(device) : -1;
    return *gpu >= 0;
}

/* false: nobody counts. */
static bool read_history(int gpu, struct history *history)
{
    const volatile struct cgpu_ctl *ctl = gpu < gate_count() ? gate_of(gpu)->ctl : NULL;
    for (int i = 0; ctl && i < TRIES; i++) {
        uint64_t beats = load_acquire(&ctl->beats);
        history->count = beats < WINDOW + 1 ? (int)beats : WINDOW + 1;
        for (int k = 0; k < history->count; k++) {
            const volatile struct cgpu_beat *beat = &ctl->beat[(beats - (uint64_t)(history->count - k)) % CGPU_BEATS];
            history->beat[k].at_ns = load_relaxed(&beat->at_ns);
            history->beat[k].busy_ns = load_relaxed(&beat->busy_ns);
        }
        __atomic_thread_fence(__ATOMIC_ACQUIRE); /* pairs with the daemon's release of `beats` */
        if (load_relaxed(&ctl->beats) - beats < CGPU_BEATS - WINDOW - 1)
            return now_ns() - load_acquire(&ctl->heartbeat_ns) < CGPU_ORPHAN_NS;
    }
    return false;
}

/* Of the time between two beats. A correction may take back what was charged: then none of it. */
static unsigned int percent(const struct cgpu_beat *from, const struct cgpu_beat *to)
{
    if (to->at_ns <= from->at_ns || to->busy_ns <= from->busy_ns)
        return 0;
    uint64_t time = to->at_ns - from->at_ns, share = ((to->busy_ns - from->busy_ns) * 100 + time / 2) / time;
    return share < 100 ? (unsigned int)share : 100;
}

static unsigned int share_of(const struct history *history)
{
    return history->count > 1 ? percent(&history->beat[0], &history->beat[history->count - 1]) : 0;
}

static unsigned int memory_part(unsigned int share, unsigned int card, unsigned int card_memory)
{
    return card > share ? (card_memory * share + card / 2) / card : share ? card_memory : 0;
}

NVML_WRAP(nvmlReturn_t, nvmlDeviceGetUtilizationRates, (nvmlDevice_t device, nvmlUtilization_t *utilization))
{
    int gpu;
    struct history history;
    nvmlReturn_t result = REAL(nvmlDeviceGetUtilizationRates)(device, utilization);
    if (result != NVML_SUCCESS || !ours(device, &gpu))
        return result;
    nvmlUtilization_t card = *utilization;
    *utilization = (nvmlUtilization_t){0, 0};
    if (!read_history(gpu, &history))
        return NVML_ERROR_NOT_SUPPORTED;
    utilization->gpu = share_of(&history);
    utilization->memory = memory_part(utilization->gpu, card.gpu, card.memory);
    return NVML_SUCCESS;
}

NVML_WRAP(nvmlReturn_t, nvmlDeviceGetDynamicPstatesInfo, (nvmlDevice_t device, nvmlGpuDynamicPstatesInfo_t *info))
{
    int gpu;
    struct history history;
    nvmlReturn_t result = REAL(nvmlDeviceGetDynamicPstatesInfo)(device, info);
    if (result != NVML_SUCCESS || !ours(device, &gpu))
        return result;
    bool counted = read_history(gpu, &history);
    unsigned int card = info->utilization[0].percentage, share = counted ? share_of(&history) : 0;
    info->utilization[0].percentage = share;
    info->utilization[1].percentage = memory_part(share, card, info->utilization[1].percentage);
    for (int i = 0; i < 2; i++)
        info->utilization[i].present &= counted ? ~0u : ~1u; /* the rest of the word is not ours */
    return NVML_SUCCESS;
}

/* ---- samples: one a beat ---- */

static unsigned long long since_epoch_us(uint64_t monotonic_ns)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    uint64_t real = (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec, age = now_ns() - monotonic_ns;
    return (real - age) / 1000;
}

NVML_WRAP(nvmlReturn_t, nvmlDeviceGetSamples,
          (nvmlDevice_t device, int type, unsigned long long since, int *value_type, unsigned int *count,
           nvmlSample_t *samples))
{
    int gpu;
    struct history history;
    nvmlUtilization_t card = {0, 0};
    bool memory = type == NVML_MEMORY_UTILIZATION_SAMPLES;
    if ((type != NVML_GPU_UTILIZATION_SAMPLES && !memory) || !value_type || !count || !ours(device, &gpu))
        return REAL(nvmlDeviceGetSamples)(device, type, since, value_type, count, samples);
    if (!read_history(gpu, &history) || !have(nvmlDeviceGetUtilizationRates))
        return NVML_ERROR_NOT_SUPPORTED;
    nvmlReturn_t result = REAL(nvmlDeviceGetUtilizationRates)(device, &card);
    if (result != NVML_SUCCESS)
        return result;
    unsigned int room = samples ? *count : 0, found = 0, whole = share_of(&history);
    for (int i = 1; i < history.count; i++) {
        unsigned int share = percent(&history.beat[i - 1], &history.beat[i]);
        unsigned long long at = since_epoch_us(history.beat[i].at_ns);
        if (at <= since)
            continue;
        if (found < room) {
            samples[found].timeStamp = at;
            samples[found].value.ull = 0;
            samples[found].value.ui =
                memory ? memory_part(share, card.gpu > whole ? card.gpu : whole, card.memory) : share;
        }
        found++;
    }
    *value_type = NVML_VALUE_TYPE_UNSIGNED_INT;
    *count = samples && found > room ? room : found; /* the oldest: the program asks on from the last it has */
    return found ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}

/* ---- hardware counters of the whole card ---- */

NVML_WRAP(nvmlReturn_t, nvmlGpmQueryDeviceSupport, (nvmlDevice_t device, nvmlGpmSupport_t *support))
{
    int gpu;
    nvmlReturn_t result = REAL(nvmlGpmQueryDeviceSupport)(device, support);
    if (result == NVML_SUCCESS && ours(device, &gpu))
        support->isSupportedDevice = 0;
    return result;
}

NVML_WRAP(nvmlReturn_t, nvmlGpmSampleGet, (nvmlDevice_t device, nvmlGpmSample_t sample))
{
    int gpu;
    return ours(device, &gpu) ? NVML_ERROR_NOT_SUPPORTED : REAL(nvmlGpmSampleGet)(device, sample);
}

NVML_WRAP(nvmlReturn_t, nvmlGpmMigSampleGet, (nvmlDevice_t device, unsigned int instance, nvmlGpmSample_t sample))
{
    int gpu;
    return ours(device, &gpu) ? NVML_ERROR_NOT_SUPPORTED : REAL(nvmlGpmMigSampleGet)(device, instance, sample);
}
