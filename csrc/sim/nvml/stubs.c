/* stubs.c: a weak answer for every export of the table; the real ones, in nvml.c and usage.c, are strong and win. */
#define X(name) \
    __attribute__((weak, visibility("default"))) int name(void); \
    __attribute__((weak, visibility("default"))) int name(void) { return 3; /* NVML_ERROR_NOT_SUPPORTED */ }
#include "nvml_exports.inc"
#undef X
