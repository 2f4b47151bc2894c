/* Loops over rows in memory that are met once, so that nothing is packed: a step of decoding. */
#ifndef RELPOS_ROWS_H
#define RELPOS_ROWS_H

#include "scalars.h"

#define TOGETHER 4 /* vectors of a row that are met at a time, and rows beyond whole groups */

/* Rows x_j and y_j, and what meets each of them: `one`. */
typedef struct {
    const real *one, *x, *y;
    int64_t x_row, y_row;
} Rows;

/* Which products of channels are summed. */
enum { ONE_Y = 1, X_Y = 2, ONE_X_Y = 4 };

/* Sums of the lanes of VL vectors, one a lane: step s adds lanes whose numbers differ in s. */
INLINE vec sums_of_rows(vec *rows)
{
#pragma GCC unroll 4
    for (int s = 1, step = 0; s < VL; s *= 2, step++) {
        lanes low = *(const lanes *)first_of_pair[step], high = *(const lanes *)second_of_pair[step];
#pragma GCC unroll 16
        for (int r = 0; r < VL; r += 2 * s)
            rows[r] = shuffle(rows[r], rows[r + s], low) + shuffle(rows[r], rows[r + s], high);
    }
    return rows[0];
}

/* Channels from d on, `vectors` of them, of `count` rows from `first` on; beyond `last` that one again,
 * where it is not -1. */
INLINE void sum_channels(vec *sums, int count, Rows rows, int kinds, int64_t first, int64_t last,
                         int64_t d, int vectors)
{
    vec one[TOGETHER];
    const real *x = kinds & (X_Y | ONE_X_Y) ? rows.x + first * rows.x_row + d : NULL;
    const real *y = rows.y + first * rows.y_row + d;
    if (kinds & (ONE_Y | ONE_X_Y))
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            one[v] = *(const vec *)(rows.one + d + v * VL);
#pragma GCC unroll 16
    for (int i = 0; i < count; i++) {
        vec sum = sums[i];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            vec of_y = *(const vec *)(y + v * VL);
            if (kinds & ONE_Y)
                sum += one[v] * of_y;
            if (kinds & X_Y)
                sum += *(const vec *)(x + v * VL) * of_y;
            if (kinds & ONE_X_Y)
                sum += one[v] * *(const vec *)(x + v * VL) * of_y;
        }
        sums[i] = sum;
        int64_t step = last < 0 || first + i < last;
        if (kinds & (X_Y | ONE_X_Y))
            x += step * rows.x_row;
        y += step * rows.y_row;
    }
}

INLINE real rest_of_channels(const Rows *rows, int kinds, int64_t j, int64_t whole, int64_t dim)
{
    real sum = 0;
    for (int64_t d = whole; d < dim; d++) { /* those beyond whole vectors */
        real of_y = rows->y[j * rows->y_row + d];
        real of_x = kinds & (X_Y | ONE_X_Y) ? rows->x[j * rows->x_row + d] : 0;
        if (kinds & ONE_Y)
            sum += rows->one[d] * of_y;
        if (kinds & X_Y)
            sum += of_x * of_y;
        if (kinds & ONE_X_Y)
            sum += rows->one[d] * of_x * of_y;
    }
    return sum;
}

/* dots of channels `from` .. `to`, `vectors` at a time. */
INLINE void dots_of_channels(real *restrict out, Rows rows, Rows others, int kinds, int other,
                             int64_t count, int64_t from, int64_t to, int vectors, int add)
{
    int64_t j = 0;
    for (; j + VL <= count; j += VL) {
        vec sums[VECTOR_BYTES / sizeof(real)];
#pragma GCC unroll 16
        for (int i = 0; i < VL; i++)
            sums[i] = (vec){0};
        int64_t d = from;
        do { /* there is a first: sums need not be there before */
            sum_channels(sums, VL, rows, kinds, j, -1, d, vectors);
            if (other)
                sum_channels(sums, VL, others, other, j, -1, d, vectors);
            d += vectors * VL;
        } while (d < to);
        vec found = sums_of_rows(sums), *to = (vec *)(out + j);
        if (add)
            found += *to;
        *to = found;
    }
    for (; j < count; j += TOGETHER) {
        vec sums[TOGETHER] = {{0}};
        for (int64_t d = from; d < to; d += vectors * VL) {
            sum_channels(sums, TOGETHER, rows, kinds, j, count - 1, d, vectors);
            if (other)
                sum_channels(sums, TOGETHER, others, other, j, count - 1, d, vectors);
        }
        for (int i = 0; i < TOGETHER && j + i < count; i++)
            out[j + i] = (add ? out[j + i] : 0) + sum_of_lanes(sums[i]);
    }
}

/* out_j = or += what `kinds` says of row j, and what `other` says of row j of the second rows. */
INLINE void dots(real *restrict out, const Rows *both, int kinds, int other, int64_t count, int64_t dim,
                 int add)
{
    int64_t many = dim / (TOGETHER * VL) * TOGETHER * VL, whole = dim / VL * VL;
    Rows rows = both[0], others = other ? both[1] : rows;
    if (many)
        dots_of_channels(out, rows, others, kinds, other, count, 0, many, TOGETHER, add);
    else if (!add)
        fill(out, count, 0);
    if (many < whole)
        dots_of_channels(out, rows, others, kinds, other, count, many, whole, 1, 1);
    if (whole < dim)
        for (int64_t j = 0; j < count; j++) {
            out[j] += rest_of_channels(&rows, kinds, j, whole, dim);
            if (other)
                out[j] += rest_of_channels(&others, other, j, whole, dim);
        }
}

#define DOTS_OF(name, kinds, other)                                                                \
    static __attribute__((noinline)) void name(real *restrict out, const Rows *rows,               \
                                               int64_t count, int64_t dim, int add)                \
    {                                                                                              \
        dots(out, rows, kinds, other, count, dim, add);                                            \
    }
DOTS_OF(dots_of_two, X_Y, 0)            /* x_j.y_j */
DOTS_OF(dots_weighed, ONE_X_Y, 0)       /* sum_c one_c x_j,c y_j,c */
DOTS_OF(dots_of_sum, ONE_Y | X_Y, 0)    /* (one + x_j).y_j */
DOTS_OF(dots_of_ones, ONE_Y, ONE_Y)     /* one.y_j + one'.y'_j */
DOTS_OF(dots_of_all, ONE_Y | X_Y, ONE_Y) /* (one + x_j).y_j + one'.y'_j */

/* out_j = or += one.y_j.  Few rows at a time: these are all keys, which come from memory, and the processor
 * fetches rows ahead that follow one another closely.  (Keys and values out of every cache: a step without
 * positions takes 0.77 ms so, and 1.12 with VL rows at a time; in the last cache 0.23 and 0.21.) */
static __attribute__((noinline)) void dots_of_one(real *restrict out, const Rows *rows,
                                                  int64_t count, int64_t dim, int add)
{
    int64_t whole = dim / VL * VL, row = rows->y_row;
    const real *one = rows->one, *y = rows->y;
    for (int64_t j = 0; j < count; j += TOGETHER) {
        int64_t members = least(TOGETHER, count - j), at[TOGETHER];
        vec sums[TOGETHER] = {{0}};
        for (int i = 0; i < TOGETHER; i++)
            at[i] = j + least(i, members - 1);
        for (int64_t d = 0; d < whole; d += VL)
#pragma GCC unroll 4
            for (int i = 0; i < TOGETHER; i++)
                sums[i] += *(const vec *)(one + d) * *(const vec *)(y + at[i] * row + d);
        real found[TOGETHER];
#pragma GCC unroll 4
        for (int i = 0; i < TOGETHER; i++)
            found[i] = sum_of_lanes(sums[i]);
        for (int i = 0; i < members; i++) {
            for (int64_t d = whole; d < dim; d++)
                found[i] += one[d] * y[at[i] * row + d];
            out[j + i] = add ? out[j + i] + found[i] : found[i];
        }
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
