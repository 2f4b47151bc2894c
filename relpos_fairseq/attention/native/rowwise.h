/* Loops over one row of logits: exponentials, sums, the largest, and the random bits of dropout. */
#ifndef RELPOS_ROWWISE_H
#define RELPOS_ROWWISE_H

#include <math.h>

#include "products.h"

#ifdef RELPOS_DOUBLE
typedef uint64_t float_bits;
#define LEAST_EXPONENT -700.0
#define MAGIC 6755399441055744.0 /* 1.5 * 2^52: adding it rounds to a whole number */
#define MANTISSA 52
#define BIAS 1023
#define LN2_HIGH 6.93145751953125e-1
#define LN2_LOW 1.42860682030941723212e-6
#else
typedef uint32_t float_bits;
#define LEAST_EXPONENT -87.0f
#define MAGIC 12582912.0f
#define MANTISSA 23
#define BIAS 127
#define LN2_HIGH 0.693359375f
#define LN2_LOW -2.12194440e-4f
#endif

typedef float_bits powers __attribute__((vector_size(VECTOR_BYTES), may_alias));

/* Lanes of x where the bits of `is` are set, lanes of y elsewhere. */
INLINE vec where(lanes is, vec x, vec y) { return (vec)(((lanes)x & is) | ((lanes)y & ~is)); }

/* x = exp(x - top) for two vectors, where x <= top, to about one unit in the last place; 0 below LEAST_EXPONENT.
 *
 * Two vectors are evaluated side by side, since each step waits for the step before.  The steps are written for
 * vectors, since gcc turns a loop over the eight lanes of AVX2 into single numbers and branches.
 */
INLINE void exponential(vec *x, real top)
{
    vec y[2], r[2], square[2], p[2], q[2], shifted[2];
#define BOTH _Pragma("GCC unroll 2") for (int i = 0; i < 2; i++)
    BOTH y[i] = x[i] - top;
    BOTH shifted[i] = y[i] * (real)1.44269504088896341 + (real)MAGIC;
    BOTH p[i] = shifted[i] - (real)MAGIC; /* a whole number */
    BOTH r[i] = y[i] - p[i] * (real)LN2_HIGH;
    BOTH r[i] -= p[i] * (real)LN2_LOW;
    BOTH square[i] = r[i] * r[i];
#ifdef RELPOS_DOUBLE
    BOTH p[i] = r[i] * (1.0 / 6227020800) + 1.0 / 479001600; /* 1 / 13!, 1 / 12! ... */
    BOTH p[i] = p[i] * r[i] + 1.0 / 39916800;
    BOTH p[i] = p[i] * r[i] + 1.0 / 3628800;
    BOTH p[i] = p[i] * r[i] + 1.0 / 362880;
    BOTH p[i] = p[i] * r[i] + 1.0 / 40320;
    BOTH p[i] = p[i] * r[i] + 1.0 / 5040;
    BOTH p[i] = p[i] * r[i] + 1.0 / 720;
    BOTH p[i] = p[i] * r[i] + 1.0 / 120;
    BOTH p[i] = p[i] * r[i] + 1.0 / 24;
    BOTH p[i] = p[i] * r[i] + 1.0 / 6;
    BOTH p[i] = p[i] * r[i] + 0.5;
#else
    BOTH p[i] = r[i] * 1.9875691500e-4f + 1.3981999507e-3f;
    BOTH q[i] = r[i] * 8.3334519073e-3f + 4.1665795894e-2f;
    BOTH p[i] = p[i] * square[i] + q[i];
    BOTH q[i] = r[i] * 1.6666665459e-1f + 5.0000001201e-1f;
    BOTH p[i] = p[i] * square[i] + q[i];
#endif
    BOTH q[i] = r[i] + (real)1;
    BOTH p[i] = p[i] * square[i] + q[i];
    BOTH
    {
        powers two = ((powers)shifted[i] << MANTISSA) + ((float_bits)BIAS << MANTISSA);
        lanes none = y[i] < (real)LEAST_EXPONENT - (vec){0}; /* not where y is NaN */
        x[i] = (vec)((lanes)(p[i] * (vec)two) & ~none);
    }
#undef BOTH
}

/* exp(x) of one number x <= 0. */
INLINE real exponential_of(real x)
{
    vec both[2] = {x - (vec){0}, x - (vec){0}};
    exponential(both, 0);
    return both[0][0];
}

/* A vector of the last `count` < VL numbers of a row, and `other` in its remaining lanes. */
INLINE vec rest_of(const real *x, int64_t count, real other)
{
    vec rest = other - (vec){0};
    for (int64_t j = 0; j < count; j++)
        rest[j] = x[j];
    return rest;
}

INLINE vec larger(vec x, vec y) { return where(x > y, x, y); }

/* Fold the lanes of a vector by halves: lane i with lane i ^ 1, then i ^ 2, i ^ 4 ... */
#define FOLD(name, join)                                                   \
    INLINE real name(vec x)                                                \
    {                                                                      \
        _Pragma("GCC unroll 4") for (int step = 0; 1 << step < VL; step++) \
        {                                                                  \
            vec y = shuffle(x, x, *(const lanes *)across[step]);           \
            x = join;                                                      \
        }                                                                  \
        return x[0];                                                       \
    }
FOLD(sum_of_lanes, x + y)
FOLD(largest_lane, larger(x, y))

/* The largest of `top` and the numbers of a row. */
INLINE real largest(const real *x, int64_t count, real top)
{
    vec max_of = top - (vec){0}, other = max_of;
    int64_t j = 0;
    for (; j + 2 * VL <= count; j += 2 * VL) {
        max_of = larger(*(const vec *)(x + j), max_of);
        other = larger(*(const vec *)(x + j + VL), other);
    }
    for (; j + VL <= count; j += VL)
        max_of = larger(*(const vec *)(x + j), max_of);
    return largest_lane(larger(rest_of(x + j, count - j, top), larger(max_of, other)));
}

INLINE real total(const real *x, int64_t count)
{
    vec sum = {0};
    int64_t j = 0;
    for (; j + VL <= count; j += VL)
        sum += *(const vec *)(x + j);
    return sum_of_lanes(sum + rest_of(x + j, count - j, 0));
}

INLINE real dot(const real *x, const real *y, int64_t count)
{
    vec sum = {0};
    int64_t j = 0;
    for (; j + VL <= count; j += VL)
        sum += *(const vec *)(x + j) * *(const vec *)(y + j);
    sum += rest_of(x + j, count - j, 0) * rest_of(y + j, count - j, 0);
    return sum_of_lanes(sum);
}

INLINE void fill(real *x, int64_t count, real value)
{
    for (int64_t j = 0; j < count; j++)
        x[j] = value;
}

/* x[j] = exp(x[j] - top) for begin <= j < end, and 0 for all other j < length.  Return the sum of x.  The row has room
 * for two vectors behind `length`. */
INLINE real exponentials(real *x, int64_t begin, int64_t end, int64_t length, real top)
{
    vec sum = {0};
    int64_t from = begin / NR * NR, to = round_up(end, NR);
    if (begin == end) {
        memset(x, 0, length * sizeof(real));
        return 0;
    }
    memset(x, 0, from * sizeof(real));
    fill(x + from, begin - from, -(real)INFINITY);
    fill(x + end, to - end, -(real)INFINITY);
    for (int64_t j = from; j < to; j += NR) {
        vec *pair = (vec *)(x + j);
        exponential(pair, top);
        sum += pair[0];
        sum += pair[1];
    }
    if (to < length)
        memset(x + to, 0, (length - to) * sizeof(real));
    return sum_of_lanes(sum);
}

#define KEY_GROUPS 80 /* of eight keys each: a chunk has fewer than 640 keys */

/* out[j] = 16 random bits for each of `count` keys from key `first` on, a multiple of 8.  The generator is
 * Philox-4x32-7, with the counter (key / 8, query, head, 0).  Key t of eight takes half t % 2 of word t / 4 + 2 (t / 2
 * % 2). */
static void random_bits(uint16_t *out, int64_t seed, int64_t head, int64_t query, int64_t first, int64_t count)
{
    uint32_t c0[KEY_GROUPS], c1[KEY_GROUPS], c2[KEY_GROUPS], c3[KEY_GROUPS];
    int64_t groups = (count + 7) / 8;
    uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)((uint64_t)seed >> 32);
    for (int64_t g = 0; g < groups; g++) {
        c0[g] = (uint32_t)(first / 8 + g);
        c1[g] = (uint32_t)query;
        c2[g] = (uint32_t)head;
        c3[g] = 0;
    }
    for (int round = 0; round < 7; round++) {
        for (int64_t g = 0; g < groups; g++) {
            uint64_t a = (uint64_t)0xD2511F53u * c0[g], b = (uint64_t)0xCD9E8D57u * c2[g];
            uint32_t n0 = (uint32_t)(b >> 32) ^ c1[g] ^ key0;
            uint32_t n2 = (uint32_t)(a >> 32) ^ c3[g] ^ key1;
            c1[g] = (uint32_t)b;
            c3[g] = (uint32_t)a;
            c0[g] = n0;
            c2[g] = n2;
        }
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    for (int64_t g = 0; g < groups; g++) {
        const uint32_t words[4] = {c0[g], c1[g], c2[g], c3[g]};
        for (int t = 0; t < 8; t++)
            out[g * 8 + t] = (uint16_t)(words[t / 4 + 2 * (t / 2 % 2)] >> (16 * (t % 2)));
    }
}

#endif
