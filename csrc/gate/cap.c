/* cap.c: how much of any window the high class had while others wanted the device. */
#include "core_parts.h"

static uint32_t nth(const struct core_cap *cap, uint32_t n)
{
    return (cap->first + n) % CORE_HISTORY;
}

void cap_add(struct core_cap *cap, uint64_t from, uint64_t to, uint64_t window)
{
    while (cap->count && cap->end[cap->first] + window <= to) {
        cap->first = nth(cap, 1);
        cap->count--;
    }
    if (cap->count && cap->end[nth(cap, cap->count - 1)] == from) {
        cap->end[nth(cap, cap->count - 1)] = to;
        return;
    }
    if (cap->count == CORE_HISTORY) {
        /* Join the two oldest, moved towards the present: they leave the window later than they should, never earlier. */
        uint32_t a = nth(cap, 0), b = nth(cap, 1);
        cap->start[b] -= cap->end[a] - cap->start[a];
        cap->first = b;
        cap->count--;
    }
    uint32_t n = nth(cap, cap->count++);
    cap->start[n] = from;
    cap->end[n] = to;
}

uint64_t cap_used(const struct core_cap *cap, uint64_t at, uint64_t window)
{
    uint64_t begin = at > window ? at - window : 0, used = 0;
    for (uint32_t k = 0; k < cap->count; k++) {
        uint32_t n = nth(cap, k);
        uint64_t start = cap->start[n] > begin ? cap->start[n] : begin;
        if (cap->end[n] > start)
            used += cap->end[n] - start;
    }
    return used;
}

uint64_t cap_until(const struct core_cap *cap, uint64_t now, uint64_t limit, uint64_t window)
{
    uint64_t run = 0;
    /* Each round fills what is free; meanwhile older time has left the window, which the next round fills. Stopping early
     * errs towards a shorter run. */
    for (int round = 0; round < 32 && run < window; round++) {
        uint64_t used = cap_used(cap, now + run, window) + run;
        if (used + 1000 >= limit)
            break;
        run += limit - used;
    }
    return now + (run < window ? run : window);
}

uint64_t cap_when(const struct core_cap *cap, uint64_t now, uint64_t allowed, uint64_t window)
{
    uint64_t used = cap_used(cap, now, window), begin = now > window ? now - window : 0;
    if (used <= allowed)
        return now;
    uint64_t excess = used - allowed;
    for (uint32_t k = 0; k < cap->count; k++) {
        uint32_t n = nth(cap, k);
        uint64_t start = cap->start[n] > begin ? cap->start[n] : begin;
        uint64_t held = cap->end[n] > start ? cap->end[n] - start : 0;
        if (held >= excess)
            return start + excess + window;
        excess -= held;
    }
    return now + window;
}
