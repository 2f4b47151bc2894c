/* One step of decoding: of each head of each batch row a single query, which stands on the last key.
 *
 *     logits_j = (query.content_k_j + sum_c trilinear_j,c content_q_c content_k_j,c) gate_j multiplier_j
 *                * (q.product_query_j) (k_j.product_key_j)
 *                + key_offset.k_j + q.near_query_j + k_j.near_key_j
 *                + static_j + added_j + query_factors.key_factors_j
 *     query    = content_q * query_scale + query_offset
 *     out      = sum_j probs_j (v_j + near_value_j) + clipped_value
 *
 * Near tables have rows for the last keys only, those nearer than the clip distance; all keys before them read one row,
 * the clipped one.  What that row adds to every key is in the query, in key_offset and in clipped_value already, and
 * near rows hold the difference.  Only product_query and product_key keep the clipped row, as their first.
 *
 * First, the queries of each head are multiplied with its tables, in all batch rows together: they share the tables,
 * which are then read once.  Then each head of each batch row is evaluated, as keys and values lie in memory.  Nothing
 * is packed, since every key is read once.
 */
#ifndef RELPOS_STEP_H
#define RELPOS_STEP_H

#include "rowwise.h"

/* ------------------------------------------------------------------------------------- Arguments (native/step.py) */

/* What follows from the tables alone, formed once for many steps. */
typedef struct {
    int64_t dim, content_dim, value_dim;
    int64_t near_query_rows, near_key_rows, near_trilinear_rows, near_value_rows, product_rows;
    int64_t length;                  /* keys of gate and static_, whose last numbers are those of the last keys */
    Table query_scale;               /* (H|1, content_dim) multiplies content_q */
    Table query_offset;              /* (H|1, content_dim) is added to the content's query */
    Table key_offset;                /* (H|1, dim) is multiplied with k */
    Table clipped_value;             /* (H|1, value_dim) is added to the output */
    Table near_query, product_query; /* (H|1, ceil(rows / PANEL), dim, PANEL): transposed, in panels of PANEL columns */
    Table near_key, near_trilinear, near_value, product_key; /* (H|1, rows, channels) */
    Table gate, static_;                                     /* (H|1, length) */
} StepTables;

typedef struct {
    const StepTables *tables;
    int64_t batch, heads, src_len, rank, threads;
    Tensor q, k, v, content_q, content_k; /* q and k are what tables are multiplied with */
    Tensor clipped_key_products; /* (B, H, 1, src_len) k_j times the clipped row of product_key; near keys unread */
    Tensor multiplier, added;    /* (B, H, 1, src_len) */
    Tensor query_factors, key_factors; /* (B, H, 1 | src_len, rank) */
    real *out;                         /* (B, H, 1, value_dim), contiguous */
    const uint8_t *masked;             /* (B|1, src_len) 1 at keys that the query does not see, or NULL */
    int64_t masked_stride;             /* elements from one batch row of `masked` to the next */
    const int64_t *key_rows;           /* (batch, src_len) the batch row of k, v, content_k and clipped_key_products
                                        * in which each key lies that a query reads, or NULL: the query's own */
    int64_t key_rows_stride, key_rows_step; /* elements from one batch row and from one key to the next */
} StepCall;

/* --------------------------------------------------------------------------------- Loops over rows in memory */

#define ROWS_AT_ONCE 4 /* rows that a loop takes together, or vectors of one row */
#define PANEL 32       /* columns of a transposed table that stand side by side; a multiple of NR */

/* Rows of a matrix, row j of which lies in batch row places[j * step], or in the one of `data` without places. */
typedef struct {
    const real *data;
    int64_t row, batch_stride, step;
    const int64_t *places;
} Keys;

INLINE const real *key_at(const Keys *keys, int64_t j)
{
    return keys->data + j * keys->row + (keys->places ? keys->places[j * keys->step] * keys->batch_stride : 0);
}

/* The keys from the one with the number `first` on. */
INLINE Keys keys_from(Keys keys, int64_t first)
{
    keys.data += first * keys.row;
    if (keys.places)
        keys.places += first * keys.step;
    return keys;
}

/* Rows x_j of a matrix and keys y_j, and one vector for all j. */
typedef struct {
    const real *one, *x;
    int64_t x_row;
    Keys y;
} Rows;

/* Which products a sum over channels has: one.y_j, x_j.y_j, sum_c one_c x_j,c y_j,c. */
enum { ONE_Y = 1, X_Y = 2, ONE_X_Y = 4 };

/* The sum of the products of `kinds` over the channels from `first` on, which do not fill a vector. */
INLINE real last_channels(const real *one, const real *x, const real *y, int kinds, int64_t first, int64_t dim)
{
    real sum = 0;
    for (int64_t d = first; d < dim; d++) {
        if (kinds & ONE_Y)
            sum += one[d] * y[d];
        if (kinds & X_Y)
            sum += x[d] * y[d];
        if (kinds & ONE_X_Y)
            sum += one[d] * x[d] * y[d];
    }
    return sum;
}

/* out[j] = (or, with `add`, +=) the sum of the products of `kinds` for row j.  Few rows at a time: these are keys,
 * which come from memory, and the processor fetches rows ahead that follow one another closely.  (With keys and values
 * out of every cache, a step without positions takes 0.77 ms, and 1.12 with VL rows at a time; in the last cache 0.23,
 * 0.21.) */
INLINE void dots(real *restrict out, const Rows *rows, int kinds, int64_t count, int64_t dim, int add)
{
    int64_t whole = dim / VL * VL; /* channels that fill vectors */
    const real *one = rows->one;
    for (int64_t j = 0; j < count; j += ROWS_AT_ONCE) {
        const real *x[ROWS_AT_ONCE], *y[ROWS_AT_ONCE];
        vec sums[ROWS_AT_ONCE] = {{0}};
        for (int i = 0; i < ROWS_AT_ONCE; i++) {
            int64_t row = min_of(j + i, count - 1); /* behind the last row, that row again */
            x[i] = kinds & (X_Y | ONE_X_Y) ? rows->x + row * rows->x_row : NULL;
            y[i] = key_at(&rows->y, row);
        }
        for (int64_t d = 0; d < whole; d += VL)
#pragma GCC unroll 4
            for (int i = 0; i < ROWS_AT_ONCE; i++) {
                vec of_y = *(const vec *)(y[i] + d);
                if (kinds & ONE_Y)
                    sums[i] += *(const vec *)(one + d) * of_y;
                if (kinds & X_Y)
                    sums[i] += *(const vec *)(x[i] + d) * of_y;
                if (kinds & ONE_X_Y)
                    sums[i] += *(const vec *)(one + d) * *(const vec *)(x[i] + d) * of_y;
            }
        real found[ROWS_AT_ONCE];
#pragma GCC unroll 4
        for (int i = 0; i < ROWS_AT_ONCE; i++)
            found[i] = sum_of_lanes(sums[i]) + last_channels(one, x[i], y[i], kinds, whole, dim);
        for (int i = 0; i < min_of(ROWS_AT_ONCE, count - j); i++)
            out[j + i] = add ? out[j + i] + found[i] : found[i];
    }
}

#define DOTS_OF(name, kinds)                                                                             \
    static NOINLINE void name(real *restrict out, const Rows *rows, int64_t count, int64_t dim, int add) \
    {                                                                                                    \
        dots(out, rows, kinds, count, dim, add);                                                         \
    }
DOTS_OF(dots_of_one, ONE_Y)       /* one.y_j */
DOTS_OF(dots_of_two, X_Y)         /* x_j.y_j */
DOTS_OF(dots_of_sum, ONE_Y | X_Y) /* (one + x_j).y_j */
DOTS_OF(dots_weighted, ONE_X_Y)   /* sum_c one_c x_j,c y_j,c */

/* Keep x in a register, where gcc would read it from memory once for every product (znver3: 52 us for 35). */
#if defined(__x86_64__)
#define IN_A_REGISTER(x) __asm__("" : "+v"(x))
#elif defined(__aarch64__)
#define IN_A_REGISTER(x) __asm__("" : "+w"(x))
#else
#define IN_A_REGISTER(x) ((void)(x))
#endif

/* out (count, NR) = x (count, dim) times NR of the PANEL columns of `panel` (dim, PANEL). */
INLINE void rows_by_panel(real *out, int64_t out_row, const real *x, int64_t x_row, int count, const real *panel,
                          int64_t dim)
{
    vec sums[ROWS_AT_ONCE][2] = {{{0}}};
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

/* out (rows, to - from) = x (rows, dim) table (dim, columns), for the columns from .. to.  `from` is a multiple of NR;
 * the table stands in panels of PANEL columns; a row of out has room for whole NR. */
static void rows_by_panels(real *out, int64_t out_row, const real *x, int64_t x_row, int64_t rows, const real *table,
                           int64_t from, int64_t to, int64_t dim)
{
    for (int64_t j = from; j < to; j += NR) {
        const real *panel = table + j / PANEL * PANEL * dim + j % PANEL;
        int64_t i = 0;
        for (; i + ROWS_AT_ONCE <= rows; i += ROWS_AT_ONCE)
            rows_by_panel(out + i * out_row + j - from, out_row, x + i * x_row, x_row, ROWS_AT_ONCE, panel, dim);
        for (; i < rows; i++)
            rows_by_panel(out + i * out_row + j - from, out_row, x + i * x_row, x_row, 1, panel, dim);
    }
}

/* out (dim,) += sum_j weights_j keys_j. */
static void add_weighted(real *out, const real *weights, Keys keys, int64_t count, int64_t dim)
{
    int64_t d = 0;
    for (; d + ROWS_AT_ONCE * VL <= dim; d += ROWS_AT_ONCE * VL) {
        vec sums[ROWS_AT_ONCE] = {{0}};
        for (int64_t j = 0; j < count; j++)
#pragma GCC unroll 4
            for (int i = 0; i < ROWS_AT_ONCE; i++)
                sums[i] += weights[j] * *(const vec *)(key_at(&keys, j) + d + i * VL);
        for (int i = 0; i < ROWS_AT_ONCE; i++)
            *(vec *)(out + d + i * VL) += sums[i];
    }
    for (; d + VL <= dim; d += VL) {
        vec sums = {0};
        for (int64_t j = 0; j < count; j++)
            sums += weights[j] * *(const vec *)(key_at(&keys, j) + d);
        *(vec *)(out + d) += sums;
    }
    for (; d < dim; d++)
        for (int64_t j = 0; j < count; j++)
            out[d] += weights[j] * key_at(&keys, j)[d];
}

/* x[j] += y[j], and x[j] *= y[j]. */
INLINE void add_vector(real *restrict x, const real *restrict y, int64_t count)
{
    for (int64_t j = 0; j < count; j++)
        x[j] += y[j];
}

INLINE void multiply_vector(real *restrict x, const real *restrict y, int64_t count)
{
    for (int64_t j = 0; j < count; j++)
        x[j] *= y[j];
}

/* ------------------------------------------------------------------------------------------------- Buffers */

/* Dot products of all queries with their head's tables of queries, in one piece of memory. */
typedef struct {
    real *near, *product; /* (H, B, near_stride) with near_query, (H, B, product_stride) with product_query */
    int64_t near_stride, product_stride;
} QueryProducts;

/* A thread's buffers, in one piece of memory. */
typedef struct {
    real *logits;       /* (src_len,) */
    real *query;        /* (content_dim,) */
    real *key_products; /* (product_rows,) dot products of near keys with product_key */
    real *shared_bias;  /* (shared_bias_heads, logits_stride) what is added to a head's logits in all batch rows */
} StepBuffers;

/* How many keys read a near table of `rows` rows, which may be absent. */
INLINE int64_t near_keys(const StepCall *call, const Table *table, int64_t rows)
{
    return table->data ? min_of(rows, call->src_len) : 0;
}

/* The first row of near_query that is multiplied: rows before it belong to more keys than there are.  It is a multiple
 * of NR, so that a few rows may be multiplied that no key reads. */
INLINE int64_t first_row_used(const StepCall *call)
{
    return max_of(call->tables->near_query_rows - call->src_len, 0) / NR * NR;
}

INLINE int64_t near_stride(const StepCall *call)
{
    return round_up(call->tables->near_query_rows - first_row_used(call), NR);
}

INLINE int64_t product_stride(const StepCall *call) { return round_up(call->tables->product_rows, NR); }

INLINE int64_t query_products_size(const StepCall *call)
{
    return call->batch * call->heads * (near_stride(call) + product_stride(call));
}

INLINE QueryProducts query_products_in(const StepCall *call, real *memory)
{
    return (QueryProducts){memory, memory + call->batch * call->heads * near_stride(call), near_stride(call),
                           product_stride(call)};
}

/* Whether all rows of the batch have the same factors. */
INLINE int shares_factors(const StepCall *call)
{
    return call->query_factors.data && !call->query_factors.batch_stride && !call->key_factors.batch_stride;
}

/* Whether something is added to the logits of a head in all rows of the batch. */
INLINE int has_shared_bias(const StepCall *call) { return call->tables->static_.data || shares_factors(call); }

/* For how many heads the shared bias is formed: for one where all heads have the same. */
INLINE int64_t shared_bias_heads(const StepCall *call)
{
    int64_t factors = shares_factors(call) && (call->query_factors.head_stride || call->key_factors.head_stride);
    return call->tables->static_.head_stride || factors ? call->heads : 1;
}

INLINE int64_t logits_stride(const StepCall *call) { return round_up(call->src_len, NR) + NR; }

INLINE int64_t step_buffers_size(const StepCall *call)
{
    const StepTables *t = call->tables;
    return logits_stride(call) * (1 + (has_shared_bias(call) ? shared_bias_heads(call) : 0)) + t->content_dim +
           t->product_rows;
}

INLINE StepBuffers step_buffers_in(const StepCall *call, real *memory)
{
    real *query = memory + logits_stride(call), *key_products = query + call->tables->content_dim;
    return (StepBuffers){memory, query, key_products, key_products + call->tables->product_rows};
}

INLINE real *shared_bias_of(const StepCall *call, const StepBuffers *buffers, int64_t h)
{
    return buffers->shared_bias + h % shared_bias_heads(call) * logits_stride(call);
}

/* Where head h of batch row b of a tensor lies, and head h of a table. */
INLINE real *tensor_at(const Tensor *x, int64_t b, int64_t h)
{
    return x->data + b * x->batch_stride + h * x->head_stride;
}

/* The keys, or values, that head h of batch row b reads in a tensor. */
INLINE Keys keys_of(const StepCall *call, const Tensor *x, int64_t b, int64_t h)
{
    const int64_t *places = call->key_rows ? call->key_rows + b * call->key_rows_stride : NULL;
    return (Keys){tensor_at(x, places ? 0 : b, h), x->row_stride, x->batch_stride, call->key_rows_step, places};
}

/* The row of a near table (rows, dim) for key `key`: the last row is that of the last key. */
INLINE const real *near_rows_from(const Table *x, int64_t h, int64_t rows, int64_t dim, int64_t src_len, int64_t key)
{
    return table_of_head(x, h) + (rows - (src_len - key)) * dim;
}

/* --------------------------------------------------------------------------------------------------- The step */

/* s (src_len,) += key_factors (src_len, rank) query_factors (rank,). */
static void add_factors(const StepCall *call, int64_t b, int64_t h, real *s)
{
    dots_of_one(s,
                &(Rows){.one = tensor_at(&call->query_factors, b, h),
                        .y = {tensor_at(&call->key_factors, b, h), call->key_factors.row_stride}},
                call->src_len, call->rank, 1);
}

/* shared_bias (src_len,) = what is added to the logits of a head in all rows of the batch. */
static void form_shared_bias(const StepCall *call, int64_t h, real *shared_bias)
{
    const StepTables *t = call->tables;
    if (t->static_.data)
        memcpy(shared_bias, near_rows_from(&t->static_, h, t->length, 1, call->src_len, 0),
               call->src_len * sizeof(real));
    else
        fill(shared_bias, call->src_len, 0);
    if (shares_factors(call))
        add_factors(call, 0, h, shared_bias);
}

/* products (B, rows) = q (B, dim) table^T (dim, rows): a head's queries in all batch rows, times its tables
 * of queries. */
static void multiply_queries(const StepCall *call, const QueryProducts *products, int64_t h)
{
    const StepTables *t = call->tables;
    int64_t first = h * call->batch;
    const real *q = tensor_at(&call->q, 0, h);
    if (t->near_query.data)
        rows_by_panels(products->near + first * products->near_stride, products->near_stride, q, call->q.batch_stride,
                       call->batch, table_of_head(&t->near_query, h), first_row_used(call), t->near_query_rows, t->dim);
    if (t->product_query.data)
        rows_by_panels(products->product + first * products->product_stride, products->product_stride, q,
                       call->q.batch_stride, call->batch, table_of_head(&t->product_query, h), 0, t->product_rows,
                       t->dim);
}

/* logits_j *= (q.product_query_j) (k_j.product_key_j). */
static void multiply_by_products(const StepCall *call, const QueryProducts *products, int64_t b, int64_t h,
                                 const StepBuffers *buffers)
{
    const StepTables *t = call->tables;
    int64_t rows = t->product_rows, near = min_of(rows - 1, call->src_len), far = call->src_len - near, dim = t->dim;
    Keys clipped_key_products = keys_of(call, &call->clipped_key_products, b, h);
    clipped_key_products.row = 1;
    const real *restrict query_products = products->product + (h * call->batch + b) * products->product_stride;
    real *restrict s = buffers->logits, *restrict key_products = buffers->key_products;
    real clipped_query_product = query_products[0];
    /* key_products_j = product_key_j.k_j, for the near keys */
    dots_of_two(key_products,
                &(Rows){.x = near_rows_from(&t->product_key, h, rows, dim, call->src_len, far),
                        .x_row = dim,
                        .y = keys_from(keys_of(call, &call->k, b, h), far)},
                near, dim, 0);
    for (int64_t j = 0; j < far; j++)
        s[j] *= clipped_query_product * *key_at(&clipped_key_products, j);
    for (int64_t j = 0; j < near; j++)
        s[far + j] *= query_products[rows - near + j] * key_products[j];
}

/* logits (src_len,) = the content, with all that multiplies it. */
static void step_content(const StepCall *call, const QueryProducts *products, int64_t b, int64_t h,
                         const StepBuffers *buffers)
{
    const StepTables *t = call->tables;
    Keys k = keys_of(call, &call->content_k, b, h); /* (src_len, content_dim) */
    int64_t dim = t->content_dim, src_len = call->src_len;
    dots_of_one(buffers->logits, &(Rows){.one = buffers->query, .y = k}, src_len, dim, 0);
    if (t->near_trilinear.data) {
        int64_t near = min_of(t->near_trilinear_rows, src_len), far = src_len - near;
        dots_weighted(buffers->logits + far,
                      &(Rows){.one = tensor_at(&call->content_q, b, h),
                              .y = keys_from(k, far),
                              .x = near_rows_from(&t->near_trilinear, h, t->near_trilinear_rows, dim, src_len, far),
                              .x_row = dim},
                      near, dim, 1);
    }
    if (t->gate.data)
        multiply_vector(buffers->logits, near_rows_from(&t->gate, h, t->length, 1, src_len, 0), src_len);
    if (call->multiplier.data)
        multiply_vector(buffers->logits, tensor_at(&call->multiplier, b, h), src_len);
    if (t->product_query.data)
        multiply_by_products(call, products, b, h, buffers);
}

/* logits (src_len,) of one head, -inf at masked keys. */
static void step_logits(const StepCall *call, const QueryProducts *products, int64_t b, int64_t h,
                        const StepBuffers *buffers)
{
    const StepTables *t = call->tables;
    int64_t src_len = call->src_len, dim = t->dim, query_near = near_keys(call, &t->near_query, t->near_query_rows);
    int64_t near = near_keys(call, &t->near_key, t->near_key_rows), far = src_len - near;
    int is_content_apart = t->near_trilinear.data || t->gate.data || call->multiplier.data || t->product_query.data ||
                           call->content_k.data != call->k.data;
    Rows all = {.one = buffers->query, .y = keys_of(call, &call->k, b, h)}, last = all;
    last.y = keys_from(all.y, far);
    if (near)
        last.x = near_rows_from(&t->near_key, h, t->near_key_rows, dim, src_len, far), last.x_row = dim;
    if (is_content_apart) { /* content, then + near_key_j.k_j */
        step_content(call, products, b, h, buffers);
        dots_of_two(buffers->logits + far, &last, near, dim, 1);
    } else { /* query.k_j of far keys, and (query + near_key_j).k_j of near keys: each key is read once */
        dots_of_one(buffers->logits, &all, far, dim, 0);
        dots_of_sum(buffers->logits + far, &last, near, dim, 0);
    }
    if (query_near)
        add_vector(buffers->logits + src_len - query_near,
                   products->near + (h * call->batch + b) * products->near_stride + t->near_query_rows - query_near -
                       first_row_used(call),
                   query_near);
    if (t->key_offset.data)
        dots_of_one(buffers->logits,
                    &(Rows){.one = table_of_head(&t->key_offset, h), .y = all.y}, src_len, dim, 1);
    if (has_shared_bias(call))
        add_vector(buffers->logits, shared_bias_of(call, buffers, h), src_len);
    if (call->added.data)
        add_vector(buffers->logits, tensor_at(&call->added, b, h), src_len);
    if (call->query_factors.data && !shares_factors(call))
        add_factors(call, b, h, buffers->logits);
    if (call->masked)
        for (int64_t j = 0; j < src_len; j++)
            buffers->logits[j] = call->masked[b * call->masked_stride + j] ? -(real)INFINITY : buffers->logits[j];
}

/* out (value_dim,) of one head of one batch row. */
static void step_head(const StepCall *call, const QueryProducts *products, int64_t b, int64_t h,
                      const StepBuffers *buffers)
{
    const StepTables *t = call->tables;
    const real *q = tensor_at(&call->content_q, b, h), *scale = table_of_head(&t->query_scale, h); /* (content_dim,) */
    for (int64_t d = 0; d < t->content_dim; d++)
        buffers->query[d] = q[d] * scale[d];
    if (t->query_offset.data)
        add_vector(buffers->query, table_of_head(&t->query_offset, h), t->content_dim);
    step_logits(call, products, b, h, buffers);
    int64_t src_len = call->src_len, dim = t->value_dim, near = min_of(t->near_value_rows, src_len);
    real *out = call->out + (b * call->heads + h) * dim, row_max = largest(buffers->logits, src_len, -(real)INFINITY);
    fill(out, dim, 0);
    if (row_max == -(real)INFINITY) /* the query sees no key */
        return;
    real row_sum = exponentials(buffers->logits, 0, src_len, src_len, row_max);
    add_weighted(out, buffers->logits, keys_of(call, &call->v, b, h), src_len, dim);
    if (t->near_value.data)
        add_weighted(out, buffers->logits + src_len - near,
                     (Keys){near_rows_from(&t->near_value, h, t->near_value_rows, dim, src_len, src_len - near), dim},
                     near, dim);
    for (int64_t d = 0; d < dim; d++)
        out[d] /= row_sum;
    if (t->clipped_value.data)
        add_vector(out, table_of_head(&t->clipped_value, h), dim);
}

#endif
