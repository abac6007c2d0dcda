/* What caller and callee of the foreign driver agree on. */
#define ARGUMENTS                                                                                                    \
    long a0, long a1, long a2, long a3, long a4, long a5, double d0, double d1, double d2, double d3, double d4,     \
        double d5, double d6, double d7, long s0, long s1, long s2, double s3
#define I(i, j) ((long)(i) * 0x100000001L + (j))
#define D(i, j) ((double)(i) + (j) / 16.0)
#define VALUES(i)                                                                                                       \
    I(i, 0), I(i, 1), I(i, 2), I(i, 3), I(i, 4), I(i, 5), D(i, 0), D(i, 1), D(i, 2), D(i, 3), D(i, 4), D(i, 5), D(i, 6), \
        D(i, 7), I(i, 6), I(i, 7), I(i, 8), D(i, 9)
#define CHECK(i)                                                                                                     \
    (a0 == I(i, 0) && a1 == I(i, 1) && a2 == I(i, 2) && a3 == I(i, 3) && a4 == I(i, 4) && a5 == I(i, 5) &&           \
     d0 == D(i, 0) && d1 == D(i, 1) && d2 == D(i, 2) && d3 == D(i, 3) && d4 == D(i, 4) && d5 == D(i, 5) &&           \
     d6 == D(i, 6) && d7 == D(i, 7) && s0 == I(i, 6) && s1 == I(i, 7) && s2 == I(i, 8) && s3 == D(i, 9))
/* Arguments of wrapped functions: pointers (mask -1) into readable zeroes at a fixed place, numbers small but for those of
 * 64 bits (mask -2) */
#define ZEROES 0x70000000L
#define WRAPPED(i, x, mask) \
    ((mask) == -1L ? ZEROES + (x) * 0x1000 + (i) % 64 * 16 : ((i) + (x)) % 100 * 2 + 2 + ((mask) == -2L ? 1L << 40 : 0))
