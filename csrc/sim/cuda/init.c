/* init.c: cuInit, which GPUs this process sees, and fork. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "cuda/sim.h"

struct gpu *gpus[SIM_GPUS];
int gpu_count;
int driver_state;
__thread struct thread_state sim_thread;

static struct gpu all_gpus[SIM_GPUS];
static pthread_mutex_t init_lock = PTHREAD_MUTEX_INITIALIZER;
static bool fork_watched;

API cuInit(unsigned int flags);
API cuDriverGetVersion(int *version);

/* ---- fork: the child of an initialised process is not initialised and cannot be, as with the real driver ---- */

static void before_fork(void)
{
    pthread_mutex_lock(&init_lock);
}

static void in_parent(void)
{
    pthread_mutex_unlock(&init_lock);
}

static void in_child(void)
{
    pthread_mutex_init(&init_lock, NULL);
    if (driver_state != DRIVER_READY)
        return;
    driver_state = DRIVER_FORKED; /* from here on no lock of the parent's threads is ever touched */
    sim_thread.depth = 0;
    for (int i = 0; i < SIM_GPUS; i++)
        sim_forget(&all_gpus[i].map);
}

/* ---- CUDA_VISIBLE_DEVICES: indices or UUIDs (or their beginnings); the first that names no GPU ends the list ---- */

static int by_uuid(const char *text, size_t length, int count)
{
    int found = -1;
    for (int i = 0; i < count; i++) {
        if (strncmp(all_gpus[i].conf.uuid_text, text, length) != 0)
            continue;
        if (found >= 0)
            return -1; /* ambiguous */
        found = i;
    }
    return found;
}

static int by_index(const char *text, size_t length, int count)
{
    int value = 0;
    if (length == 0 || length > 4)
        return -1;
    for (size_t i = 0; i < length; i++) {
        if (text[i] < '0' || text[i] > '9')
            return -1;
        value = value * 10 + (text[i] - '0');
    }
    return value < count ? value : -1;
}

static void select_gpus(int count)
{
    const char *at = getenv("CUDA_VISIBLE_DEVICES");
    gpu_count = 0;
    if (!at) {
        for (int i = 0; i < count; i++)
            gpus[gpu_count++] = &all_gpus[i];
        return;
    }
    for (;;) {
        while (*at == ' ')
            at++;
        size_t length = strcspn(at, ", ");
        int index = strncmp(at, "GPU-", 4) == 0 ? by_uuid(at, length, count) : by_index(at, length, count);
        if (index < 0)
            return;
        for (int i = 0; i < gpu_count; i++) {
            if (gpus[i] == &all_gpus[index]) {
                gpu_count = 0; /* named twice: the real driver then shows none */
                return;
            }
        }
        gpus[gpu_count++] = &all_gpus[index];
        at += length;
        at += strspn(at, " ");
        if (*at++ != ',')
            return;
    }
}

/* cuInit can only say "no device": the reason, for who wants it. */
static CUresult no_device(const char *what, int error)
{
    if (getenv("CGPU_SIM_DEBUG"))
        fprintf(stderr, "simulated GPU: %s/%s: %s\n", sim_dir(), what, strerror(-error));
    return CUDA_ERROR_NO_DEVICE;
}

static CUresult initialise(void)
{
    struct sim_gpu conf[SIM_GPUS];
    int count = sim_conf(conf);
    if (count <= 0)
        return no_device("sim.conf", count);
    for (int i = 0; i < count; i++) {
        all_gpus[i].conf = conf[i];
        all_gpus[i].host_index = i;
        all_gpus[i].map = (struct sim_map){.state = NULL, .alive = -1, .slot = -1};
    }
    select_gpus(count);
    for (int i = 0; i < gpu_count; i++) {
        struct gpu *gpu = gpus[i];
        gpu->ordinal = i;
        gpu->queue.gpu = gpu;
        pthread_mutex_init(&gpu->queue.append, NULL);
        pthread_mutex_init(&gpu->queue.retire, NULL);
        int error = sim_open(&gpu->conf, &gpu->map);
        if (error)
            return no_device(gpu->conf.uuid_text, error);
    }
    return gpu_count ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

API cuInit(unsigned int flags)
{
    CUresult result = CUDA_SUCCESS;
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (driver_state == DRIVER_FORKED)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (load_acquire(&driver_state) == DRIVER_READY)
        return CUDA_SUCCESS;
    pthread_mutex_lock(&init_lock);
    if (driver_state == DRIVER_NEW) {
        if (!fork_watched) {
            pthread_atfork(before_fork, in_parent, in_child);
            fork_watched = true;
        }
        result = initialise();
        if (result == CUDA_SUCCESS)
            store_release(&driver_state, DRIVER_READY);
    }
    pthread_mutex_unlock(&init_lock);
    return result;
}

API cuDriverGetVersion(int *version)
{
    if (!version)
        return CUDA_ERROR_INVALID_VALUE;
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}

struct gpu *gpu_of(CUdevice device)
{
    return device >= 0 && device < gpu_count ? gpus[device] : NULL;
}

CUresult gpu_join(struct gpu *gpu)
{
    return gpu->map.slot >= 0 || sim_join(&gpu->map) == 0 ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
