/* Linear layers on packed weights, and a layer of a decoder, for the rows of one step.
 *
 *     linear   out = x W^T + bias (+ residual), or the positive part of it
 *     layer    x = norm(x + attention(x W_qkv^T) W_out^T)                      or with what attention found elsewhere
 *              x = norm(x + cross(x W_query^T) W_cross_out^T)                  where there is a source
 *              x = norm(x + relu(x W_inner^T) W_outer^T)
 *
 * with biases; or each norm before its branch.  Rows depend on no others: each thread takes some through all of it.
 *
 * A weight may be in integers of 8 bits with a scale an output.  Then x is quantized row by row, to as many levels as
 * the instructions multiply without a loss, and products are summed in 32 bits.
 */
#ifndef RELPOS_LAYER_H
#define RELPOS_LAYER_H

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "step.h"

/* ------------------------------------------------------------------------------------ Arguments (native/layer.py) */

/* A linear layer: its weight in panels of NR of its rows, padded with 0. */
typedef struct {
    const real *weight;      /* (ceil(outputs / NR), inputs, NR); NULL: `integers` is the weight */
    const int8_t *integers;  /* (ceil(outputs / NR), ceil(inputs / 4), NR, 4) */
    const real *scales;      /* (ceil(outputs / NR) NR,) of the integers */
    const real *sums;        /* (ceil(outputs / NR) NR,) of each output's integers */
    const real *bias;        /* (ceil(outputs / NR) NR,) */
    int64_t inputs, outputs;
} Linear;

typedef struct {
    const real *weight, *bias; /* (channels,) */
    double eps;
} Norm;

typedef struct {
    Linear linear;
    int64_t rows, row_stride, threads;
    const real *x; /* (rows, inputs), rows `row_stride` apart */
    real *out;     /* (rows, outputs), contiguous */
} LinearCall;

typedef struct {
    int64_t rows, normalize_before, threads;
    Linear queries_keys_values, attention_out, query, cross_out, inner, outer;
    Norm attention_norm, cross_norm, final_norm;
    const real *turn; /* (pairs, 2) cos and sin of the angles by which pairs of channels of queries and keys are turned */
    int64_t pairs, halves; /* 0: none; 1: channels (c, c + pairs) are a pair, 0: (2c, 2c + 1) */
    const StepCall *attention;       /* of all rows, but for q, the last key and value, and out; or NULL */
    const StepCall *cross;           /* of all rows, but for q and out; or NULL */
    const real *residual, *attended; /* (rows, E), contiguous: the layer's input, and without `attention` its heads */
    real *out;                       /* (rows, E), contiguous */
} LayerCall;

/* ------------------------------------------------------------------------------------------------- Linear layers */

#define CACHED_ROWS 144   /* rows that go through a layer together, and with as many inputs of each as stay in a second- */
#define CACHED_INPUTS 512 /* level cache of half a megabyte meet all panels of a weight before others */
#define TILES (CACHED_ROWS * CACHED_INPUTS + VL) /* numbers that pack_tiles writes, at most */
#define LINE 64           /* bytes that a cache reads at once */
#define ROW_VECTORS ((int)((MR + VL - 1) / VL)) /* that hold MR numbers */

/* What a block reads into the second-level cache beside its work: `step` bytes, from `at` on, at every 4th input. */
typedef struct {
    const char *at;
    int64_t step;
} Ahead;

/* What becomes of a product: its sum with others, or the positive part; the kinds add up. */
enum { SUM = 0, POSITIVE = 1, WITH_RESIDUAL = 2 };

/* sums (rows, NR) += the products of an input of rows with a panel's row. */
INLINE void add_input(vec (*sums)[2], int rows, const real *x, const real *panel)
{
    vec right[2] = {*(const vec *)panel, *(const vec *)(panel + VL)};
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++) {
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++)
            sums[i][v] += x[i] * right[v];
        IN_REGISTERS(sums[i][0], sums[i][1]);
    }
}

/* out (rows, NR) = one panel's columns of a linear layer, for some rows of a tile (k, MR). */
INLINE void linear_block(int64_t k, int rows, const real *x, const real *panel, const real *bias,
                         const real *residual, real *out, int64_t out_row, int kind, Ahead ahead)
{
    vec sums[MR][2];
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++)
            sums[i][v] = *(const vec *)(bias + v * VL);
    for (int64_t fours = k / 4; fours; fours--, x += 4 * MR, panel += 4 * NR) {
        for (const char *end = ahead.at + ahead.step; ahead.at < end; ahead.at += LINE)
            __builtin_prefetch(ahead.at, 0, 2);
        UNROLLED
        for (int p = 0; p < 4; p++)
            add_input(sums, rows, x + p * MR, panel + p * NR);
    }
    for (int64_t p = 0; p < k % 4; p++, x += MR, panel += NR)
        add_input(sums, rows, x, panel);
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++) {
            if (kind & WITH_RESIDUAL)
                sums[i][v] += *(const vec *)(residual + i * out_row + v * VL);
            if (kind & POSITIVE)
                sums[i][v] = where(sums[i][v] < (vec){0}, (vec){0}, sums[i][v]); /* NaN stays */
            *(vec *)(out + i * out_row + v * VL) = sums[i][v];
        }
}

typedef void LinearBlock(int64_t k, const real *x, const real *panel, const real *bias, const real *residual, real *out,
                         int64_t out_row, Ahead ahead);

#define LINEAR_BLOCK(name, rows, kind)                                                                                \
    static NOINLINE void name(int64_t k, const real *restrict x, const real *restrict panel, const real *bias,        \
                              const real *residual, real *out, int64_t out_row, Ahead ahead)                          \
    {                                                                                                                 \
        linear_block(k, rows, x, panel, bias, residual, out, out_row, kind, ahead);                                   \
    }
#define LINEAR_BLOCKS(rows_name, rows)                      \
    LINEAR_BLOCK(rows_name##_sum, rows, SUM)                \
    LINEAR_BLOCK(rows_name##_positive, rows, POSITIVE)      \
    LINEAR_BLOCK(rows_name##_residual, rows, WITH_RESIDUAL) \
    LINEAR_BLOCK(rows_name##_both, rows, POSITIVE | WITH_RESIDUAL) \
    static LinearBlock *const rows_name[] = {rows_name##_sum, rows_name##_positive, rows_name##_residual, \
                                             rows_name##_both};
LINEAR_BLOCKS(whole_block, MR)
LINEAR_BLOCKS(larger_part, MR * 2 / 3)
LINEAR_BLOCKS(smaller_part, MR / 3)
LINEAR_BLOCKS(one_row, 1)

/* The blocks for as many of the next `rows` rows as one takes, and how many these are. */
INLINE LinearBlock *const *blocks_for(int64_t rows, int64_t *count)
{
    int part = rows >= MR ? 3 : rows >= MR * 2 / 3 ? 2 : rows >= MR / 3 ? 1 : 0;
    *count = part ? part * MR / 3 : 1;
    return part == 3 ? whole_block : part == 2 ? larger_part : part == 1 ? smaller_part : one_row;
}

/* tiles (ceil(rows / MR), k, MR) = x (rows, k), of which a block reads MR rows: apart, they may all lie in one set of
 * the first-level cache, which has fewer lines.  Vectors are longer than MR rows: up to VL numbers after the last tile
 * change. */
static void pack_tiles(real *restrict tiles, const real *restrict x, int64_t x_row, int64_t rows, int64_t k)
{
    for (; rows > 0; rows -= MR, x += MR * x_row, tiles += MR * k) {
        int64_t p = 0;
        for (; rows >= MR && p + VL <= k; p += VL) {
            vec columns[ROW_VECTORS][VECTOR_BYTES / sizeof(real)];
#pragma GCC unroll 3
            for (int v = 0; v < ROW_VECTORS; v++) {
#pragma GCC unroll 16
                for (int i = 0; i < VL; i++)
                    columns[v][i] = v * VL + i < MR ? *(const vec *)(x + (v * VL + i) * x_row + p) : (vec){0};
                transpose(columns[v]);
            }
#pragma GCC unroll 16
            for (int c = 0; c < VL; c++)
#pragma GCC unroll 3
                for (int v = 0; v < ROW_VECTORS; v++)
                    *(vec *)(tiles + (p + c) * MR + v * VL) = columns[v][c];
        }
        for (; p < k; p++)
            for (int64_t i = 0; i < min_of(MR, rows); i++)
                tiles[p * MR + i] = x[i * x_row + p];
    }
}

/* `columns` <= NR of a linear layer, for rows in tiles (k, MR); `next` is the panel that will be read next. */
static void linear_panel(int64_t k, const real *tiles, int64_t rows, const real *panel, const real *bias,
                         const real *residual, real *out, int64_t out_row, int64_t columns, int kind, const char *next)
{
    int64_t blocks = (rows + MR - 1) / MR, count;
    Ahead ahead = {next, round_up((4 * NR * sizeof(real) + blocks - 1) / blocks, LINE)};
    for (int64_t i = 0; i < rows; i += count) {
        LinearBlock *const *block = blocks_for(rows - i, &count);
        const real *beside = kind & WITH_RESIDUAL ? residual + i * out_row : NULL;
        const real *x = tiles + i / MR * MR * k + i % MR;
        real *to = out + i * out_row;
        if (columns == NR) {
            block[kind](k, x, panel, bias, beside, to, out_row, ahead);
            ahead.at += ahead.step * (k / 4);
            continue;
        }
        real tile[MR * 2 * VECTOR_BYTES / sizeof(real)], given[MR * 2 * VECTOR_BYTES / sizeof(real)] = {0};
        for (int64_t r = 0; beside && r < count; r++)
            memcpy(given + r * NR, beside + r * out_row, columns * sizeof(real));
        block[kind](k, x, panel, bias, given, tile, NR, ahead);
        for (int64_t r = 0; r < count; r++)
            memcpy(to + r * out_row, tile + r * NR, columns * sizeof(real));
    }
}

/* ------------------------------------------------------------------------------------------- Weights in integers */

#ifndef RELPOS_DOUBLE
#if defined(__AVX512VNNI__)
#define LEVELS 255 /* of x, from its least number (or 0) to its largest (or 0) */
#define INTEGER_ROWS 12
#define DOT4(sums, x, weights) _mm512_dpbusd_epi32(sums, x, weights)
#define EACH_FOUR(x) _mm512_set1_epi32(x)
typedef __m512i bytes;
#elif defined(__AVX512BW__)
#define LEVELS 127 /* pairs of products are summed in 16 bits */
#define INTEGER_ROWS 8
#define DOT4(sums, x, weights) \
    _mm512_add_epi32(sums, _mm512_madd_epi16(_mm512_maddubs_epi16(x, weights), _mm512_set1_epi16(1)))
#define EACH_FOUR(x) _mm512_set1_epi32(x)
typedef __m512i bytes;
#elif defined(__AVX2__) && !defined(__AVX512F__)
#define LEVELS 127
#define INTEGER_ROWS 4
#define DOT4(sums, x, weights) \
    _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(x, weights), _mm256_set1_epi16(1)))
#define EACH_FOUR(x) _mm256_set1_epi32(x)
typedef __m256i bytes;
#endif
#endif

#ifdef LEVELS
#define MOST_INPUTS 16384 /* whose sums fit 32 bits */
#define QUANTIZED_ROWS 24 /* a multiple of INTEGER_ROWS */

typedef bytes unaligned __attribute__((aligned(4), may_alias));
typedef int32_t whole __attribute__((vector_size(VECTOR_BYTES)));

/* to (k,) = x / scale + zero, in LEVELS + 1 levels; k is a multiple of 4.  Return the scale, NaN where x has NaN. */
static real quantize(const real *x, uint8_t *to, int64_t inputs, int64_t k, real *zero)
{
    vec low = {0}, high = {0}, odd = {0};
    int64_t c = 0;
    for (; c < inputs; c += VL) {
        vec here = c + VL <= inputs ? *(const vec *)(x + c) : rest_of(x + c, inputs - c, 0);
        low = larger(-here, low);
        high = larger(here, high);
        odd += here - here; /* NaN of NaN and of inf */
    }
    real least = largest_lane(low), scale = (least + largest_lane(high)) / (LEVELS - 1); /* both ends are rounded */
    real inverse = scale > (real)1e-36 ? 1 / scale : 0; /* else it is infinite */
    *zero = (real)(int)(least * inverse + (real)0.5);
    for (c = 0; c < inputs; c++)
        to[c] = (uint8_t)(x[c] * inverse + (*zero + (real)0.5));
    memset(to + inputs, 0, k - inputs);
    return scale + sum_of_lanes(odd);
}

/* out (rows, NR) = one panel's columns, of rows in integers with their scales and zeros. */
INLINE void integer_block(int64_t quads, int rows, const uint8_t *x, int64_t x_row, const int8_t *panel,
                          const real *row_scales, const real *zeros, const Linear *linear, int64_t column,
                          const real *residual, real *out, int64_t out_row, int kind)
{
    whole sums[INTEGER_ROWS][2];
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++)
            sums[i][v] = (whole){0};
    for (int64_t p = 0; p < quads; p++) {
        const unaligned *right = (const unaligned *)(panel + p * NR * 4);
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++) {
            int32_t four;
            memcpy(&four, x + i * x_row + 4 * p, 4);
            bytes left = EACH_FOUR(four);
#pragma GCC unroll 2
            for (int v = 0; v < 2; v++)
                sums[i][v] = (whole)DOT4((bytes)sums[i][v], left, right[v]);
        }
    }
#pragma GCC unroll 12 /* sums that are counted by a variable would be kept in memory */
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++) {
            int64_t at = column + v * VL;
            vec found = __builtin_convertvector(sums[i][v], vec) - zeros[i] * *(const vec *)(linear->sums + at);
            found = found * (row_scales[i] * *(const vec *)(linear->scales + at)) + *(const vec *)(linear->bias + at);
            if (kind & WITH_RESIDUAL)
                found += *(const vec *)(residual + i * out_row + v * VL);
            if (kind & POSITIVE)
                found = where(found < (vec){0}, (vec){0}, found);
            *(vec *)(out + i * out_row + v * VL) = found;
        }
}

/* The columns of a panel for up to INTEGER_ROWS rows: all at once, else as many fours as there are. */
static NOINLINE void integer_panel(int64_t quads, int rows, const uint8_t *x, int64_t x_row, const int8_t *panel,
                                   const real *row_scales, const real *zeros, const Linear *linear, int64_t column,
                                   const real *residual, real *out, int64_t out_row, int kind)
{
#define BLOCK(count) \
    integer_block(quads, count, x + i * x_row, x_row, panel, row_scales + i, zeros + i, linear, column, \
                  residual ? residual + i * out_row : NULL, out + i * out_row, out_row, kind)
    int i = 0;
    if (rows == INTEGER_ROWS) {
        BLOCK(INTEGER_ROWS);
        return;
    }
    for (; i + 4 <= rows; i += 4)
        BLOCK(4);
    for (; i < rows; i++)
        BLOCK(1);
#undef BLOCK
}

/* As linear_rows, of a layer in integers. */
static void integer_rows(const Linear *linear, int64_t first, int64_t last, const real *x, int64_t x_row, int64_t rows,
                         const real *residual, real *out, int64_t out_row, int kind, uint8_t *quantized)
{
    int64_t k = round_up(linear->inputs, 4);
    real scales[QUANTIZED_ROWS], zeros[QUANTIZED_ROWS];
    for (int64_t i = 0; i < rows; i += QUANTIZED_ROWS) {
        int64_t here = min_of(QUANTIZED_ROWS, rows - i);
        for (int64_t r = 0; r < here; r++)
            scales[r] = quantize(x + (i + r) * x_row, quantized + r * k, linear->inputs, k, zeros + r);
        for (int64_t p = first; p < last; p++)
            for (int64_t r = 0; r < here; r += INTEGER_ROWS) {
                int64_t offset = (i + r) * out_row + (p - first) * NR, columns = min_of(NR, linear->outputs - p * NR);
                int count = (int)min_of(INTEGER_ROWS, here - r);
                const int8_t *panel = linear->integers + p * k * NR;
                if (columns == NR) {
                    integer_panel(k / 4, count, quantized + r * k, k, panel, scales + r, zeros + r, linear, p * NR,
                                  residual ? residual + offset : NULL, out + offset, out_row, kind);
                    continue;
                }
                real tile[INTEGER_ROWS * 2 * VECTOR_BYTES / sizeof(real)], given[sizeof tile / sizeof(real)] = {0};
                for (int64_t j = 0; residual && j < count; j++)
                    memcpy(given + j * NR, residual + offset + j * out_row, columns * sizeof(real));
                integer_panel(k / 4, count, quantized + r * k, k, panel, scales + r, zeros + r, linear, p * NR,
                              residual ? given : NULL, tile, NR, kind);
                for (int64_t j = 0; j < count; j++)
                    memcpy(out + offset + j * out_row, tile + j * NR, columns * sizeof(real));
            }
    }
}
#endif

/* Numbers in which linear_rows packs rows: more than a thread's stack may hold. */
#ifdef LEVELS
#define PACKED max_of(TILES, QUANTIZED_ROWS * MOST_INPUTS / (int64_t)sizeof(real))
#else
#define PACKED TILES
#endif

/* out (rows, columns of these panels) = what `kind` says of x (rows, inputs), for the panels first .. last.  Rows and
 * inputs are taken as many at a time as stay in a cache: what came of the inputs before is a residual.  `packed` has
 * room for PACKED numbers. */
static void linear_rows(const Linear *linear, int64_t first, int64_t last, const real *x, int64_t x_row, int64_t rows,
                        const real *residual, real *out, int64_t out_row, int kind, real *packed)
{
    static const real none[2 * VECTOR_BYTES / sizeof(real)];
#ifdef LEVELS
    if (linear->integers) {
        integer_rows(linear, first, last, x, x_row, rows, residual, out, out_row, kind, (uint8_t *)packed);
        return;
    }
#endif
    for (int64_t i = 0; i < rows; i += CACHED_ROWS)
        for (int64_t from = 0; from < linear->inputs; from += CACHED_INPUTS) {
            int64_t to = min_of(from + CACHED_INPUTS, linear->inputs), here = min_of(CACHED_ROWS, rows - i);
            int kind_here = (to < linear->inputs ? 0 : kind & POSITIVE) | (from ? WITH_RESIDUAL : kind & WITH_RESIDUAL);
            pack_tiles(packed, x + i * x_row + from, x_row, here, to - from);
            for (int64_t p = first; p < last; p++) {
                real *of_panel = out + i * out_row + (p - first) * NR;
                const real *beside = from ? of_panel : residual ? residual + i * out_row + (p - first) * NR : NULL;
                linear_panel(to - from, packed, here, linear->weight + p * linear->inputs * NR + from * NR,
                             from ? none : linear->bias + p * NR, beside, of_panel, out_row,
                             min_of(NR, linear->outputs - p * NR), kind_here,
                             (const char *)(linear->weight + (p + 1) * linear->inputs * NR + from * NR));
            }
        }
}

/* In how many parts of at most CACHED_ROWS rows threads take rows: each as many parts as the others. */
INLINE int64_t parts_of_rows(int64_t rows, int64_t threads)
{
    return round_up(max_of((rows + CACHED_ROWS - 1) / CACHED_ROWS, 1), threads);
}

/* The first row of a part; parts are of whole blocks. */
INLINE int64_t first_of_part(int64_t rows, int64_t part, int64_t parts)
{
    return min_of((rows + MR - 1) / MR * part / parts * MR, rows);
}

INLINE int64_t panels_of(const Linear *linear) { return (linear->outputs + NR - 1) / NR; }

/* --------------------------------------------------------------------------------------------------- The layer */

/* out (channels,) = norm(x (channels,)). */
static void normalize(const Norm *norm, const real *x, real *out, int64_t channels)
{
    real mean = total(x, channels) / channels;
    for (int64_t c = 0; c < channels; c++)
        out[c] = x[c] - mean;
    real scale = 1 / (real)sqrt(dot(out, out, channels) / channels + norm->eps);
    for (int64_t c = 0; c < channels; c++)
        out[c] = out[c] * scale * norm->weight[c] + norm->bias[c];
}

static void normalize_rows(const Norm *norm, const real *x, real *out, int64_t rows, int64_t channels)
{
    for (int64_t i = 0; i < rows; i++)
        normalize(norm, x + i * channels, out + i * channels, channels);
}

/* A thread's buffers, in one piece of memory. */
typedef struct {
    real *packed;      /* (PACKED,) */
    real *x, *y, *z;   /* (CACHED_ROWS, E) */
    real *hidden;      /* (CACHED_ROWS, inner), or queries, keys and values */
    real *of_step;     /* what a step of attention needs */
} LayerBuffers;

/* What a step of attention of some rows needs: its buffers, and products of its queries. */
INLINE int64_t rows_of_step_size(const StepCall *step)
{
    if (!step)
        return 0;
    StepCall part = *step;
    part.batch = min_of(CACHED_ROWS, step->batch);
    return step_buffers_size(step) + query_products_size(&part);
}

INLINE int64_t hidden_size(const LayerCall *call)
{
    return CACHED_ROWS * max_of(call->inner.outputs, call->attention ? call->queries_keys_values.outputs : 0);
}

INLINE int64_t layer_buffers_size(const LayerCall *call)
{
    return PACKED + CACHED_ROWS * 3 * call->attention_out.outputs + hidden_size(call) +
           max_of(rows_of_step_size(call->attention), rows_of_step_size(call->cross));
}

INLINE LayerBuffers layer_buffers_in(const LayerCall *call, real *memory)
{
    int64_t size = CACHED_ROWS * call->attention_out.outputs;
    real *x = memory + PACKED, *hidden = x + 3 * size;
    return (LayerBuffers){memory, x, x + size, x + 2 * size, hidden, hidden + hidden_size(call)};
}

/* to (rows, outputs) = what `kind` says of x (rows, inputs), contiguous. */
static void project(const Linear *linear, const real *x, int64_t rows, const real *residual, real *to, int kind,
                    const LayerBuffers *buffers)
{
    linear_rows(linear, 0, panels_of(linear), x, linear->inputs, rows, residual, to, linear->outputs, kind,
                buffers->packed);
}

/* One branch: to = x + given W^T, and where norms come after, the norm of that. */
static void end_branch(const LayerCall *call, const LayerBuffers *buffers, const Linear *linear, const Norm *norm,
                       const real *given, const real *x, real *to, int64_t rows)
{
    project(linear, given, rows, x, to, WITH_RESIDUAL, buffers);
    if (!call->normalize_before)
        normalize_rows(norm, to, to, rows, linear->outputs);
}

/* What a branch reads: x, or where norms come before, its norm. */
static const real *begin_branch(const LayerCall *call, const Norm *norm, const real *x, real *space, int64_t rows)
{
    if (!call->normalize_before)
        return x;
    normalize_rows(norm, x, space, rows, call->attention_out.outputs);
    return space;
}

/* out (rows, E) = attention's heads for queries (rows, E), `query_row` apart, of the rows from `first` on. */
static void heads_of_rows(const StepCall *all, real *memory, const real *queries, int64_t query_row, real *out,
                          int64_t first, int64_t rows)
{
    StepCall call = *all;
    call.batch = rows;
    call.q = (Tensor){(real *)queries, query_row, call.tables->dim, 0};
    call.content_q = call.q;
    call.out = out;
    call.key_rows += first * call.key_rows_stride;
    if (call.masked)
        call.masked += first * call.masked_stride;
    StepBuffers buffers = step_buffers_in(&call, memory);
    QueryProducts products = query_products_in(&call, memory + step_buffers_size(&call));
    for (int64_t h = 0; h < call.heads; h++) {
        multiply_queries(&call, &products, h);
        if (has_shared_bias(&call) && h < shared_bias_heads(&call))
            form_shared_bias(&call, h, shared_bias_of(&call, &buffers, h));
    }
    for (int64_t b = 0; b < rows; b++)
        for (int64_t h = 0; h < call.heads; h++)
            step_head(&call, &products, b, h, &buffers);
}

/* x (heads of `dim` channels) = x with pairs of channels turned. */
static void turn_heads(const LayerCall *call, real *x, int64_t heads, int64_t dim)
{
    int64_t step = call->halves ? 1 : 2, apart = call->halves ? call->pairs : 1;
    for (int64_t h = 0; h < heads; h++, x += dim)
        for (int64_t c = 0; c < call->pairs; c++) {
            real *pair = x + c * step, cosine = call->turn[2 * c], sine = call->turn[2 * c + 1], first = pair[0];
            pair[0] = first * cosine - pair[apart] * sine;
            pair[apart] = first * sine + pair[apart] * cosine;
        }
}

/* The last of the keys, or values, of the rows from `first` on, which are `given_row` apart. */
static void keep_last(const StepCall *call, const Tensor *kept, const real *given, int64_t given_row, int64_t first,
                      int64_t rows)
{
    int64_t dim = call->tables->dim;
    for (int64_t b = 0; b < rows; b++)
        for (int64_t h = 0; h < call->heads; h++)
            memcpy(tensor_at(kept, first + b, h) + (call->src_len - 1) * kept->row_stride,
                   given + b * given_row + h * dim, dim * sizeof(real));
}

/* What self-attention's heads found for x (rows, E), of the rows from `first` on: `space`, or what was given. */
static const real *attended_rows(const LayerCall *call, const LayerBuffers *buffers, const real *x, real *space,
                                 int64_t first, int64_t rows)
{
    const StepCall *step = call->attention;
    const Linear *linear = &call->queries_keys_values;
    if (!step)
        return call->attended + first * call->attention_out.inputs;
    int64_t width = step->heads * step->tables->dim, row = linear->outputs;
    real *queries = buffers->hidden;
    const real *given = begin_branch(call, &call->attention_norm, x, space, rows);
    project(linear, given, rows, NULL, queries, SUM, buffers);
    for (int64_t i = 0; i < rows && call->pairs; i++)
        turn_heads(call, queries + i * row, 2 * step->heads, step->tables->dim); /* keys follow queries */
    keep_last(step, &step->k, queries + width, row, first, rows);
    keep_last(step, &step->v, queries + 2 * width, row, first, rows);
    heads_of_rows(step, buffers->of_step, queries, row, space, first, rows);
    return space;
}

/* The layer, of CACHED_ROWS rows at most.  `space` has room for layer_buffers_size() numbers. */
static void layer_rows(const void *all, int64_t first, int64_t rows, real *space)
{
    const LayerCall *call = all;
    const LayerBuffers own = layer_buffers_in(call, space), *buffers = &own;
    int64_t channels = call->attention_out.outputs;
    const real *residual = call->residual + first * channels;
    real *x = buffers->x, *y = buffers->y, *z = buffers->z;
    const real *attended = attended_rows(call, buffers, residual, y, first, rows);
    end_branch(call, buffers, &call->attention_out, &call->attention_norm, attended, residual, x, rows);
    if (call->cross) {
        const real *given = begin_branch(call, &call->cross_norm, x, y, rows);
        project(&call->query, given, rows, NULL, z, SUM, buffers);
        heads_of_rows(call->cross, buffers->of_step, z, call->query.outputs, y, first, rows);
        end_branch(call, buffers, &call->cross_out, &call->cross_norm, y, x, z, rows);
        real *old = x;
        x = z, z = old;
    }
    const real *given = begin_branch(call, &call->final_norm, x, y, rows);
    project(&call->inner, given, rows, NULL, buffers->hidden, POSITIVE, buffers);
    end_branch(call, buffers, &call->outer, &call->final_norm, buffers->hidden, x, call->out + first * channels, rows);
}

#endif
