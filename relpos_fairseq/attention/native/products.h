/* Matrix products of packed operands, and packing.
 *
 * A product (m, k) (k, n) is formed in blocks of MR rows and NR columns, which stay in registers.  The right operand is
 * read in panels of NR columns.  Rows are padded to MR, and columns to NR: every buffer has room for both.
 */
#ifndef RELPOS_PRODUCTS_H
#define RELPOS_PRODUCTS_H

#include <string.h>

#include "call.h"

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#define MR 12
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#define MR 6
#elif defined(__aarch64__)
#define VECTOR_BYTES 16
#define MR 12
#else
#define VECTOR_BYTES 16
#define MR 6
#endif

#define VL ((int64_t)(VECTOR_BYTES / sizeof(real)))
#define NR (2 * VL)
#define UNIT 96 /* a multiple of MR, of NR and of 8 */

#define INLINE static inline __attribute__((always_inline))
#define NOINLINE __attribute__((noinline)) /* for long loops, whose registers gcc would share with a caller's */

/* A loop whose rounds gcc unrolls: it would mix them, and lack registers, but for vectors that are IN_REGISTERS.  Where a
 * product and its sum are two instructions it lacks one even so; ARM is as it was measured. */
#ifdef __FMA__
#define UNROLLED _Pragma("GCC unroll 4")
#define IN_REGISTERS(x, y) __asm__ volatile("" : "+v"(x), "+v"(y))
#else
#define UNROLLED _Pragma("GCC unroll 1")
#define IN_REGISTERS(x, y)
#endif

typedef real vec __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(real)), may_alias));
#ifdef RELPOS_DOUBLE
typedef int64_t lane_number;
#else
typedef int32_t lane_number;
#endif
typedef lane_number lanes __attribute__((vector_size(VECTOR_BYTES), may_alias));

/* Lane numbers for shuffles that exchange runs of 1, 2, 4 and 8 lanes.  They are read from memory, since gcc would form
 * them lane by lane. */
#define EACH(f, s)                                                                \
    {f(0, s), f(1, s), f(2, s),  f(3, s),  f(4, s),  f(5, s),  f(6, s),  f(7, s), \
     f(8, s), f(9, s), f(10, s), f(11, s), f(12, s), f(13, s), f(14, s), f(15, s)}
#define LANES(name, f) \
    static const lane_number name[4][16] __attribute__((aligned(64))) = {EACH(f, 1), EACH(f, 2), EACH(f, 4), EACH(f, 8)}
#define ACROSS(lane, s) ((lane) ^ (s))
#define FIRST(lane, s) ((lane) & (s) ? VL + (lane) - (s) : (lane))
#define SECOND(lane, s) ((lane) & (s) ? VL + (lane) : (lane) + (s))
LANES(across, ACROSS);
LANES(first_of_pair, FIRST);
LANES(second_of_pair, SECOND);

/* Lanes of x and y: lane i of the result is lane from[i] of the 2 VL lanes of x and y. */
INLINE vec shuffle(vec x, vec y, lanes from)
{
#ifdef __clang__
    vec out;
    for (int lane = 0; lane < VL; lane++)
        out[lane] = from[lane] < VL ? x[from[lane]] : y[from[lane] - VL];
    return out;
#else
    return __builtin_shuffle(x, y, from);
#endif
}

INLINE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t clamp(int64_t x, int64_t low, int64_t high) { return max_of(low, min_of(x, high)); }
INLINE int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

/* c (MR, vectors VL) = (or, with `add`, +=) a (MR, k) b (k, vectors VL).  The old c is added last: a sum of short sums
 * errs less than one long sum. */
INLINE void matmul_block(int64_t k, const real *a, int64_t a_row, int64_t a_col, const real *b, int64_t b_row, real *c,
                         int64_t c_row, int vectors, int add)
{
    vec sums[MR][2];
#pragma GCC unroll 12
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++)
            sums[i][v] = (vec){0};
    for (int64_t p = 0; p < k; p++) {
        vec right[2];
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++)
            right[v] = *(const vec *)(b + p * b_row + v * VL);
#pragma GCC unroll 12
        for (int i = 0; i < MR; i++) {
            real left = a[i * a_row + p * a_col];
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++)
                sums[i][v] += left * right[v];
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) {
            vec *to = (vec *)(c + i * c_row + v * VL);
            if (add)
                sums[i][v] += *to;
            *to = sums[i][v];
        }
}

#define BLOCK_OF(name, vectors, add)                                                                                   \
    static NOINLINE void name(int64_t k, const real *restrict a, int64_t a_row, int64_t a_col, const real *restrict b, \
                              int64_t b_row, real *restrict c, int64_t c_row)                                          \
    {                                                                                                                  \
        matmul_block(k, a, a_row, a_col, b, b_row, c, c_row, vectors, add);                                            \
    }
BLOCK_OF(block_set, 2, 0)
BLOCK_OF(block_add, 2, 1)
BLOCK_OF(half_set, 1, 0)
BLOCK_OF(half_add, 1, 1)

/* The left operand of a product: element (i, p) is data[i row + p col]. */
typedef struct {
    const real *data;
    int64_t row, col;
} LeftOperand;

/* The right operand: panels of NR columns, `panel` apart, whose rows are `row` apart. */
typedef struct {
    const real *data;
    int64_t panel, row;
} RightOperand;

/* c (m, n) = (or, with `add`, +=) a (m, k) b (k, n). */
static void matmul(int64_t m, int64_t n, int64_t k, LeftOperand a, RightOperand b, real *c, int64_t c_row, int add)
{
    int by_panel = n > k; /* the larger operand is read once */
    int64_t panels = (n + NR - 1) / NR, blocks = (m + MR - 1) / MR;
    int64_t outer = by_panel ? panels : blocks, inner = by_panel ? blocks : panels;
    for (int64_t x = 0; x < outer; x++)
        for (int64_t y = 0; y < inner; y++) {
            int64_t i = (by_panel ? y : x) * MR, p = by_panel ? x : y;
            int half = n - p * NR <= VL;
            (half ? (add ? half_add : half_set) : (add ? block_add : block_set))(
                k, a.data + i * a.row, a.row, a.col, b.data + p * b.panel, b.row, c + i * c_row + p * NR, c_row);
        }
}

/* A left operand in memory as it is, or transposed; its rows in memory are `row` apart. */
INLINE LeftOperand left_rows(const real *data, int64_t row) { return (LeftOperand){data, row, 1}; }
INLINE LeftOperand left_transposed(const real *data, int64_t row) { return (LeftOperand){data, 1, row}; }
/* A right operand (rows, channels) in memory as it is. */
INLINE RightOperand right_rows(const real *data, int64_t row) { return (RightOperand){data, NR, row}; }
/* The transpose of rows, packed by `pack_columns`, as a right operand; from row `first` on. */
INLINE RightOperand right_transposed(const real *packed, int64_t length, int64_t first)
{
    return (RightOperand){packed + first, NR, length};
}
/* The transpose of rows, packed by `pack_panels`, as a right operand; from row `first` on, a multiple of NR. */
INLINE RightOperand right_panels(const real *packed, int64_t channels, int64_t first)
{
    return (RightOperand){packed + first * channels, channels * NR, NR};
}

/* Where head h of a table lies, or NULL: the call has no such table. */
INLINE const real *table_of_head(const Table *x, int64_t h) { return x->data ? x->data + h * x->head_stride : NULL; }

#define ROWS_AHEAD 16 /* rows to prefetch: those of one head lie too far apart for the processor to guess */

INLINE void prefetch(const real *row, int64_t channels)
{
    for (int64_t c = 0; c < channels; c += 64 / (int64_t)sizeof(real))
        __builtin_prefetch(row + c);
}

/* to (padded, to_row) = factor (x + offset), where x is (rows, channels); padding is 0.  `offset` (channels,) may be
 * NULL. */
static void pack_rows(real *to, int64_t to_row, const real *x, int64_t x_row, int64_t rows, int64_t padded,
                      int64_t channels, real factor, const real *offset)
{
    for (int64_t i = 0; i < rows; i++) {
        real *out = to + i * to_row;
        const real *in = x + i * x_row;
        prefetch(in + ROWS_AHEAD * x_row, channels);
        if (offset)
            for (int64_t c = 0; c < channels; c++)
                out[c] = factor * (in[c] + offset[c]);
        else
            for (int64_t c = 0; c < channels; c++)
                out[c] = factor * in[c];
        memset(out + channels, 0, (to_row - channels) * sizeof(real));
    }
    memset(to + rows * to_row, 0, (padded - rows) * to_row * sizeof(real));
}

/* Transpose VL rows of VL numbers.  The step for s exchanges lanes of row r with lanes of row r ^ s, where bit s of the
 * lane differs from bit s of the row. */
INLINE void transpose(vec *rows)
{
#pragma GCC unroll 4
    for (int s = 1, step = 0; s < VL; s *= 2, step++) {
        lanes low = *(const lanes *)first_of_pair[step], high = *(const lanes *)second_of_pair[step];
#pragma GCC unroll 16
        for (int r = 0; r < VL; r++)
            if (!(r & s)) {
                vec a = rows[r], b = rows[r + s];
                rows[r] = shuffle(a, b, low);
                rows[r + s] = shuffle(a, b, high);
            }
    }
}

/* Pack the transpose of x (rows, channels), times factor: channel c of row r goes to to[r / NR panel + r % NR + c row].
 * Rows are padded with 0 to VL. */
static void pack_transposed(real *to, int64_t panel, int64_t row, const real *x, int64_t x_row, int64_t rows,
                            int64_t channels, real factor)
{
    for (int64_t first = 0; first < rows; first += VL) {
        real *out = to + first / NR * panel + first % NR;
        const real *in = x + first * x_row;
        int64_t here = min_of(VL, rows - first), c = 0;
        for (; here == VL && c + VL <= channels; c += VL) {
            vec tile[VECTOR_BYTES / sizeof(real)];
#pragma GCC unroll 16
            for (int r = 0; r < VL; r++) {
                __builtin_prefetch(in + (r + ROWS_AHEAD) * x_row + c);
                tile[r] = factor * *(const vec *)(in + r * x_row + c);
            }
            transpose(tile);
#pragma GCC unroll 16
            for (int r = 0; r < VL; r++)
                *(vec *)(out + (c + r) * row) = tile[r];
        }
        for (; c < channels; c++)
            for (int64_t r = 0; r < VL; r++)
                out[c * row + r] = r < here ? factor * in[r * x_row + c] : 0;
    }
}

/* to (ceil(rows / NR), channels, NR) = the rows x (rows, channels) as panels of their transpose, padded with 0. */
static void pack_panels(real *to, const real *x, int64_t x_row, int64_t rows, int64_t channels)
{
    pack_transposed(to, channels * NR, NR, x, x_row, rows, channels, 1);
    if (rows % NR && rows % NR <= VL) /* the other half of the last panel */
        for (int64_t c = 0; c < channels; c++)
            memset(to + rows / NR * NR * channels + c * NR + VL, 0, VECTOR_BYTES);
}

/* to (channels, length) = the transpose of x (rows, channels), times factor, padded with 0. */
static void pack_columns(real *to, int64_t length, const real *x, int64_t x_row, int64_t rows, int64_t channels,
                         real factor)
{
    pack_transposed(to, NR, length, x, x_row, rows, channels, factor);
    for (int64_t c = 0; c < channels; c++)
        memset(to + c * length + rows, 0, (length - rows) * sizeof(real));
}

#endif
