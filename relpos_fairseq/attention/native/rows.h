/* Loops over rows in memory that are met once, so that nothing is packed: a step of decoding. */
#ifndef RELPOS_ROWS_H
#define RELPOS_ROWS_H

#include "scalars.h"

#define TOGETHER 4 /* rows that are met at a time, or vectors of one */
#define PANEL 32   /* columns of a table side by side, a multiple of NR (native/step_plan.py) */

/* Rows x_j and y_j, and what meets each of them: `one`. */
typedef struct {
    const real *one, *x, *y;
    int64_t x_row, y_row;
} Rows;

/* Which products of channels are summed. */
enum { ONE_Y = 1, X_Y = 2, ONE_X_Y = 4 };

/* What `kinds` says of those channels of a row that are beyond whole vectors. */
INLINE real rest_of_channels(const real *one, const real *x, const real *y, int kinds, int64_t whole,
                             int64_t dim)
{
    real sum = 0;
    for (int64_t d = whole; d < dim; d++) {
        if (kinds & ONE_Y)
            sum += one[d] * y[d];
        if (kinds & X_Y)
            sum += x[d] * y[d];
        if (kinds & ONE_X_Y)
            sum += one[d] * x[d] * y[d];
    }
    return sum;
}

/* out_j = or += what `kinds` says of row j.  Few rows at a time: these are keys, which come from memory, and
 * the processor fetches rows ahead that follow one another closely.  (Keys and values out of every cache: a
 * step without positions takes 0.77 ms so, and 1.12 with VL rows at a time; in the last cache 0.23 and 0.21.) */
INLINE void dots(real *restrict out, const Rows *rows, int kinds, int64_t count, int64_t dim, int add)
{
    int64_t whole = dim / VL * VL;
    const real *one = rows->one;
    for (int64_t j = 0; j < count; j += TOGETHER) {
        const real *x[TOGETHER], *y[TOGETHER];
        vec sums[TOGETHER] = {{0}};
        for (int i = 0; i < TOGETHER; i++) {
            int64_t at = least(j + i, count - 1); /* beyond the last that one again */
            x[i] = kinds & (X_Y | ONE_X_Y) ? rows->x + at * rows->x_row : NULL;
            y[i] = rows->y + at * rows->y_row;
        }
        for (int64_t d = 0; d < whole; d += VL)
#pragma GCC unroll 4
            for (int i = 0; i < TOGETHER; i++) {
                vec of_y = *(const vec *)(y[i] + d);
                if (kinds & ONE_Y)
                    sums[i] += *(const vec *)(one + d) * of_y;
                if (kinds & X_Y)
                    sums[i] += *(const vec *)(x[i] + d) * of_y;
                if (kinds & ONE_X_Y)
                    sums[i] += *(const vec *)(one + d) * *(const vec *)(x[i] + d) * of_y;
            }
        real found[TOGETHER];
#pragma GCC unroll 4
        for (int i = 0; i < TOGETHER; i++)
            found[i] = sum_of_lanes(sums[i]) + rest_of_channels(one, x[i], y[i], kinds, whole, dim);
        for (int i = 0; i < least(TOGETHER, count - j); i++)
            out[j + i] = add ? out[j + i] + found[i] : found[i];
    }
}

#define DOTS_OF(name, kinds)                                                                       \
    static __attribute__((noinline)) void name(real *restrict out, const Rows *rows,               \
                                               int64_t count, int64_t dim, int add)                \
    {                                                                                              \
        dots(out, rows, kinds, count, dim, add);                                                   \
    }
DOTS_OF(dots_of_one, ONE_Y)       /* one.y_j */
DOTS_OF(dots_of_two, X_Y)         /* x_j.y_j */
DOTS_OF(dots_of_sum, ONE_Y | X_Y) /* (one + x_j).y_j */
DOTS_OF(dots_weighed, ONE_X_Y)    /* sum_c one_c x_j,c y_j,c */

/* Has x in a register, where gcc would read it from memory once for every product (znver3: 52 us for 35). */
#if defined(__x86_64__)
#define IN_A_REGISTER(x) __asm__("" : "+v"(x))
#elif defined(__aarch64__)
#define IN_A_REGISTER(x) __asm__("" : "+w"(x))
#else
#define IN_A_REGISTER(x) ((void)(x))
#endif

/* out (count, NR) = x (count, dim) panel (dim, NR of PANEL). */
INLINE void rows_by_panel(real *out, int64_t out_row, const real *x, int64_t x_row, int count,
                          const real *panel, int64_t dim)
{
    vec sums[TOGETHER][2] = {{{0}}};
    for (int64_t d = 0; d < dim; d++) {
        vec first = *(const vec *)(panel + d * PANEL), second = *(const vec *)(panel + d * PANEL + VL);
        IN_A_REGISTER(first);
        IN_A_REGISTER(second);
#pragma GCC unroll 4
        for (int i = 0; i < count; i++) {
            sums[i][0] += x[i * x_row + d] * first;
            sums[i][1] += x[i * x_row + d] * second;
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < count; i++) {
        *(vec *)(out + i * out_row) = sums[i][0];
        *(vec *)(out + i * out_row + VL) = sums[i][1];
    }
}

/* out (rows, to - from) = x (rows, dim) table (dim, columns) for columns from .. to, where `from` is a multiple
 * of NR.  The table stands in panels of PANEL columns; a row of out has room for whole NR. */
static void rows_by_panels(real *out, int64_t out_row, const real *x, int64_t x_row, int64_t rows,
                           const real *table, int64_t from, int64_t to, int64_t dim)
{
    for (int64_t j = from; j < to; j += NR) {
        const real *panel = table + j / PANEL * PANEL * dim + j % PANEL;
        int64_t i = 0;
        for (; i + TOGETHER <= rows; i += TOGETHER)
            rows_by_panel(out + i * out_row + j - from, out_row, x + i * x_row, x_row, TOGETHER, panel, dim);
        for (; i < rows; i++)
            rows_by_panel(out + i * out_row + j - from, out_row, x + i * x_row, x_row, 1, panel, dim);
    }
}

/* out += sum_j weights_j rows_j. */
static void add_weighed(real *out, const real *weights, const real *rows, int64_t row,
                        int64_t count, int64_t dim)
{
    int64_t d = 0;
    for (; d + TOGETHER * VL <= dim; d += TOGETHER * VL) {
        vec sums[TOGETHER] = {{0}};
        for (int64_t j = 0; j < count; j++)
#pragma GCC unroll 4
            for (int i = 0; i < TOGETHER; i++)
                sums[i] += weights[j] * *(const vec *)(rows + j * row + d + i * VL);
        for (int i = 0; i < TOGETHER; i++)
            *(vec *)(out + d + i * VL) += sums[i];
    }
    for (; d + VL <= dim; d += VL) {
        vec sums = {0};
        for (int64_t j = 0; j < count; j++)
            sums += weights[j] * *(const vec *)(rows + j * row + d);
        *(vec *)(out + d) += sums;
    }
    for (; d < dim; d++)
        for (int64_t j = 0; j < count; j++)
            out[d] += weights[j] * rows[j * row + d];
}

INLINE void add_rows(real *restrict x, const real *restrict y, int64_t count)
{
    for (int64_t j = 0; j < count; j++)
        x[j] += y[j];
}

INLINE void multiply_rows(real *restrict x, const real *restrict y, int64_t count)
{
    for (int64_t j = 0; j < count; j++)
        x[j] *= y[j];
}

#endif
