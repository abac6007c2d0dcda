/* stubs.c: a weak answer for every export of the table. What is implemented is strong, elsewhere, and wins. Apart from
 * the headers that declare anything: a stub takes whatever it is called with. */
#define X(name) \
    __attribute__((weak, visibility("default"))) int name(void); \
    __attribute__((weak, visibility("default"))) int name(void) { return 801; /* CUDA_ERROR_NOT_SUPPORTED */ }
#include "cuda_exports.inc"
#undef X
