/* The backward pass: tiles are formed again, and a head's gradients summed block after block. */
#ifndef RELPOS_BACKWARD_H
#define RELPOS_BACKWARD_H

#include "logits.h"

/* s: logits -> probabilities as values meet them; ds: their gradient -> that of logits.
 *
 * The mean of a row's gradients, weighed by its probabilities, is the product of its output and the
 * output's gradient; where the chunk has all its keys (`whole`) it is summed here, so that it errs as
 * they do: a key that has nearly all of a row's probability leaves a difference of the two. */
static void harden(Head *x, const Chunk *at, const Row *row, int whole)
{
    const Call *c = x->call;
    int64_t r = row->r, length = round_up(at->length, MR);
    real *restrict s = x->s + r * x->tile, *restrict ds = x->ds + r * x->tile;
    real *restrict one = x->one;
    real top = x->top[r], inverse = 1 / x->mass[r], delta = x->delta[r];
    if (x->av.table)
        of_query(&x->av, at, row, ds, 1);
    for (int64_t j = row->begin; j < row->end; j++)
        s[j] = exponential(s[j] - top) * inverse;
    const real *p = s;
    if (c->drop) {
        real factor = (real)(65536.0 / (65536 - c->drop));
        draw(x, at, row);
        for (int64_t j = row->begin; j < row->end; j++) {
            real kept = x->bits[j] >= c->drop ? factor : 0;
            one[j] = s[j];
            s[j] *= kept;
            ds[j] *= kept;
        }
        p = one;
    }
    if (whole)
        delta = dot(p + row->begin, ds + row->begin, row->end - row->begin);
    for (int64_t j = row->begin; j < row->end; j++)
        ds[j] = p[j] * (ds[j] - delta);
    zero(s, row->begin);
    zero(s + row->end, length - row->end);
    zero(ds, row->begin);
    zero(ds + row->end, length - row->end);
    if (x->av.table)
        to_query(&x->av, at, row, s);
}

/* From the gradient of multiplied content to that of content, gates and products. */
static void divide(Head *x, const Chunk *at, const Row *row)
{
    int64_t length = round_up(at->length, MR);
    int64_t place = row->place + at->low + x->call->start + x->call->tgt - 1;
    real *restrict content = x->content + row->r * x->tile;
    const real *restrict ds = x->ds + row->r * x->tile;
    real *restrict two = x->two, *restrict three = x->three, *restrict own = x->one;
    if (x->pq.table) {
        of_query(&x->pq, at, row, two, 0);
        of_key(&x->pk, at, row, three, 0);
    } else {
        fill(two + row->begin, row->end - row->begin, 1);
        fill(three + row->begin, row->end - row->begin, 1);
    }
#pragma GCC ivdep
    for (int64_t j = row->begin; j < row->end; j++) {
        own[j] = ds[j] * content[j];
        content[j] = ds[j] * two[j] * three[j];
    }
    if (x->dgate) {
        real *restrict dgate = x->dgate + place;
#pragma GCC ivdep
        for (int64_t j = row->begin; j < row->end; j++)
            dgate[j] += own[j] * two[j] * three[j];
    }
    if (x->gate) {
        const real *restrict gate = x->gate + place;
#pragma GCC ivdep
        for (int64_t j = row->begin; j < row->end; j++) {
            own[j] *= gate[j];
            content[j] *= gate[j];
        }
    }
    zero(content, row->begin);
    zero(content + row->end, length - row->end);
    if (!x->pq.table)
        return;
#pragma GCC ivdep
    for (int64_t j = row->begin; j < row->end; j++) {
        real of_query = own[j] * three[j];
        three[j] = own[j] * two[j];
        two[j] = of_query;
    }
    to_query(&x->pq, at, row, two);
    to_key(&x->pk, at, row, three);
}

/* The gradient of content: (rows, tile). */
static void content_back(Head *x, const Chunk *at)
{
    real *change = x->ds;
    if (x->multiplied) {
        change = x->content;
        for (int64_t r = 0; r < at->count; r++) {
            Row row = row_of(x, at, r);
            divide(x, at, &row);
        }
    }
    if (x->tri) {
        if (!x->multiplied)
            memcpy(x->content, x->ds, at->count * x->tile * sizeof(real));
        trilinear_back(x, at, x->content);
        return;
    }
    int64_t dim = x->dim;
    product(at->count, dim, at->length, rows_of(change, x->tile), matrix(x->k_rows + at->keys * dim, dim),
            x->dq, dim, 1);
    product(at->length, dim, at->count, columns_of(change, x->tile), matrix(x->q, dim),
            x->dk + at->keys * dim, dim, 1);
}

/* What logits give to the kinds in `kinds`. */
static void kinds_back(Head *x, const Chunk *at, int kinds)
{
    int vectors = (kinds & RESET_VECTORS) && (x->aq.table || x->ak.table);
    int scalars = (kinds & RESET_SCALARS) && x->dfixed;
    for (int64_t r = 0; (vectors || scalars) && r < at->count; r++) {
        Row row = row_of(x, at, r);
        const real *ds = x->ds + r * x->tile;
        if (vectors && x->aq.table)
            to_query(&x->aq, at, &row, ds);
        if (vectors && x->ak.table)
            to_key(&x->ak, at, &row, ds);
        if (scalars) {
            int64_t place = row.place + at->low + x->call->start + x->call->tgt - 1;
            for (int64_t j = row.begin; j < row.end; j++)
                x->dfixed[j + place] += ds[j];
        }
    }
    if ((kinds & RESET_FACTORS) && x->factors)
        for (int64_t r = 0; r < at->count; r++) {
            const real *restrict ds = x->ds + r * x->tile;
            real *restrict sum = x->dfactors + r * x->tile;
            int64_t length = round_up(at->length, MR);
            if (x->member)
                for (int64_t j = 0; j < length; j++)
                    sum[j] += ds[j];
            else
                memcpy(sum, ds, length * sizeof(real));
        }
}

/* From what a group's logits gave to products of factors. */
static void factors_back(Head *x, const Chunk *at)
{
    int64_t rank = x->rank;
    product(at->count, rank, at->length, rows_of(x->dfactors, x->tile),
            matrix(x->g_rows + at->keys * rank, rank), x->df, rank, 1);
    product(at->length, rank, at->count, columns_of(x->dfactors, x->tile), matrix(x->f, rank),
            x->dg + at->keys * rank, rank, 1);
}

/* Cells that a reset took give nothing to what it replaces. */
static void reset_back(Head *x, const Chunk *at)
{
    for (int64_t r = 0; r < at->count; r++) {
        Row row = row_of(x, at, r);
        real *ds = x->ds + r * x->tile;
        int64_t column = reset_column(x, at, &row);
        if (at->slot + r == x->first) {
            /* One number for a whole row, which softmax does not see: dtheta[0] stays 0. */
            zero(ds, at->length);
        } else if (column >= 0) {
            if (x->dtheta)
                x->dtheta[1] += ds[column];
            ds[column] = 0;
        }
    }
}

/* Gradients of what meets a table, and of the table, from those of their products. */
static void side_back(const Side *side, const real *changes, int64_t row, int64_t count,
                      int64_t columns, int64_t from, const real *x, real *dx, int64_t dim)
{
    if (dx)
        product(count, dim, columns, rows_of(changes, row), matrix(side->rows + from * dim, dim), dx, dim,
                1);
    product(columns, dim, count, columns_of(changes, row), matrix(x, dim), side->grad + from * dim, dim,
            1);
}

static void wide_back(Head *x, const Chunk *at)
{
    int64_t columns = at->keys + at->length - at->slot - at->low - at->from;
    Side *queries[2] = {&x->aq, &x->pq}, *keys[2] = {&x->ak, &x->pk};
    for (int s = 0; s < 2; s++) {
        if (queries[s]->table)
            side_back(queries[s], queries[s]->changes, at->query_row, at->count, columns, at->from,
                      x->vector_q, x->dvector_q, x->dim);
        for (int64_t j = 0; keys[s]->table && j < at->length; j += KEYS) {
            int64_t from = from_of_keys(at, j), here = least(KEYS, at->length - j);
            int64_t first = (at->keys + j) * x->dim;
            side_back(keys[s], keys[s]->changes + j * at->key_row, at->key_row, here,
                      at->keys + j + here - at->slot - at->low - from, from, x->vector_k + first,
                      x->dvector_k + first, x->dim);
        }
    }
    if (x->av.table)
        side_back(&x->av, x->av.changes, at->query_row, at->count, columns, at->from, x->dout, NULL,
                  x->value_dim);
}

static void end_block(Head *x, const Chunk *at)
{
    const Call *c = x->call;
    if (x->tri)
        trilinear_end_block(x, at);
    Side *queries[2] = {&x->aq, &x->pq};
    if (!c->wide) {
        for (int s = 0; s < 2; s++)
            if (queries[s]->table)
                side_back(queries[s], queries[s]->changes, at->query_row, at->count, c->width, 0,
                          x->vector_q, x->dvector_q, x->dim);
        if (x->av.table)
            side_back(&x->av, x->av.changes, at->query_row, at->count, c->width, 0, x->dout, NULL,
                      x->value_dim);
    }
    real scale = (real)c->scale;
    const Tensor *content = c->cq.data ? &c->dcq : &c->dq;
    int apart = content != &c->dq; /* vectors give to another tensor than content */
    for (int64_t r = 0; r < at->count; r++) {
        const real *of_content = x->dq + r * x->dim, *of_vectors = x->dvector_q + r * x->dim;
        if (x->du)
            for (int64_t i = 0; i < c->dim; i++)
                x->du[i] += scale * of_content[i];
        if (content->data) {
            real *to = rows_for(content, x, at->first + r);
            for (int64_t i = 0; i < c->dim; i++)
                to[i] = scale * of_content[i] + (apart ? 0 : of_vectors[i]);
        }
        if (apart && c->dq.data)
            memcpy(rows_for(&c->dq, x, at->first + r), of_vectors, c->dim * sizeof(real));
        if (c->df && x->df)
            memcpy(c->df + (factors_of(x) * c->tgt + at->first + r) * c->rank, x->df + r * x->rank,
                   c->rank * sizeof(real));
    }
}

static void begin_backward(Head *x, Chunk *at, int64_t first)
{
    const Call *c = x->call;
    begin_block(x, at, first);
    zero(x->dq, x->rows * x->dim);
    zero(x->dvector_q, x->rows * x->dim);
    if (x->df)
        zero(x->df, x->rows * x->rank);
    if (x->tri) {
        zero(x->dleft_q, x->rows * x->dim);
        zero(x->dright_q, x->rows * x->dim);
    }
    for (int64_t r = 0; r < at->count; r++) {
        x->delta[r] = dot(x->dout + r * x->value_dim, rows_at(&c->out, x, first + r), c->value_dim);
        x->top[r] = c->top[x->n * c->tgt + first + r];
        x->mass[r] = c->mass[x->n * c->tgt + first + r];
    }
}

static void backward_chunk(Head *x, Chunk *at, int64_t keys, int64_t length, int whole)
{
    const Call *c = x->call;
    int all = RESET_VECTORS | RESET_SCALARS | RESET_FACTORS, held = (int)c->reset;
    begin_chunk(x, at, keys, length);
    logits(x, at);
    product(at->count, length, c->value_dim, rows_of(x->dout, x->value_dim),
            panels_from(x->v_panels, c->value_dim, keys), x->ds, x->tile, 0);
    for (int64_t r = 0; r < at->count; r++) {
        Row row = row_of(x, at, r);
        harden(x, at, &row, whole);
    }
    product(length, x->value_dim, at->count, columns_of(x->s, x->tile), matrix(x->dout, x->value_dim),
            x->dv + keys * x->value_dim, x->value_dim, 1);
    content_back(x, at);
    kinds_back(x, at, all & ~held);
    if (held) {
        reset_back(x, at);
        kinds_back(x, at, held);
    }
    if (c->wide)
        wide_back(x, at);
}

/* A block of queries of each head of a group. */
static void backward_block(Head *group, int members, int64_t first)
{
    Chunk at;
    for (int m = 0; m < members; m++)
        begin_backward(group + m, &at, first);
    int64_t begin, end;
    keys_of(group, &at, &begin, &end);
    for (int64_t keys = begin, length; keys < end; keys += length) {
        length = length_of(keys, begin, end);
        for (int m = 0; m < members; m++)
            backward_chunk(group + m, &at, keys, length, length == end - begin);
        if (group->df)
            factors_back(group, &at);
    }
    for (int m = 0; m < members; m++)
        end_block(group + m, &at);
}

static void store_rows(const Tensor *to, const Head *x, int64_t rows, const real *from, int64_t from_row,
                       int64_t channels)
{
    for (int64_t i = 0; to->data && i < rows; i++)
        memcpy(rows_for(to, x, i), from + i * from_row, channels * sizeof(real));
}

/* (rows, channels), times a factor. */
static void store(real *to, int64_t rows, const real *from, int64_t from_row, int64_t channels,
                  real factor)
{
    for (int64_t i = 0; to && i < rows; i++)
        for (int64_t c = 0; c < channels; c++)
            to[i * channels + c] = factor * from[i * from_row + c];
}

static void end_keys(Head *x, Side *side)
{
    const Call *c = x->call;
    if (!side->table || c->wide)
        return;
    int64_t row = key_row(x);
    for (int64_t j = 0; j < c->src; j++) {
        side->changes[j * row] += side->to_left[j];
        side->changes[j * row + c->width - 1] += side->to_right[j];
    }
    side_back(side, side->changes, row, c->src, c->width, 0, x->vector_k, x->dvector_k, x->dim);
}

static void end_head(Head *x)
{
    const Call *c = x->call;
    int64_t n = x->n;
    end_keys(x, &x->ak);
    end_keys(x, &x->pk);
    if (x->tri) {
        for (int64_t channel = 0; channel < c->dim; channel++)
            for (int64_t j = 0; j < c->src; j++)
                x->dk[j * x->dim + channel] += x->dk_channels[channel * x->k_length + j];
        real *to = c->dtri ? c->dtri + n * c->width * c->dim : NULL;
        for (int64_t w = 0; to && w < c->width; w++)
            for (int64_t channel = 0; channel < c->dim; channel++)
                to[w * c->dim + channel] = x->dtri_channels[channel * x->tri_length + w] +
                                           (w == 0 ? x->dtri_ends[channel] : 0) +
                                           (w == c->width - 1 ? x->dtri_ends[x->dim + channel] : 0);
    }
    store_rows(c->ck.data ? &c->dck : &c->dk, x, c->src, x->dk, x->dim, c->dim);
    if (c->ck.data)
        store_rows(&c->dk, x, c->src, x->dvector_k, x->dim, c->dim);
    store_rows(&c->dv, x, c->src, x->dv, x->value_dim, c->value_dim);
#define STORE(to, name, channels)                                               \
    if (c->to)                                                                                     \
        store(c->to + n * c->width * (channels), c->width, x->name.grad, round_up(channels, VL),   \
              channels, x->name.factor);
    STORE(daq, aq, c->dim)
    STORE(dak, ak, c->dim)
    STORE(dpq, pq, c->dim)
    STORE(dpk, pk, c->dim)
    STORE(dav, av, c->value_dim)
#undef STORE
    if (c->dg && x->dg)
        store(c->dg + factors_of(x) * c->src * c->rank, c->src, x->dg, x->rank, c->rank, 1);
}

static void begin_sums(Head *x)
{
    const Call *c = x->call;
    int64_t n = x->n, span = c->tgt + c->src - 1, keys = padded(c->src);
    zero(x->dk, keys * x->dim);
    if (c->ck.data)
        zero(x->dvector_k, keys * x->dim);
    zero(x->dv, keys * x->value_dim);
    if (x->dg)
        zero(x->dg, keys * x->rank);
    if (x->tri) {
        zero(x->dk_channels, c->dim * x->k_length);
        zero(x->dtri_channels, c->dim * x->tri_length);
        zero(x->dtri_ends, 2 * x->dim);
    }
#define BEGIN(name, count)                                                                         \
    x->name = c->name ? c->name + n * (count) : NULL;                                              \
    if (x->name)                                                                                   \
        zero(x->name, count);
    BEGIN(dfixed, span) BEGIN(dgate, span) BEGIN(du, c->dim) BEGIN(dtheta, 2)
#undef BEGIN
}

static void backward_heads(Head *group, int members)
{
    for (int m = 0; m < members; m++)
        begin_sums(group + m);
    for (int64_t first = 0; first < group->call->tgt; first += group->rows)
        backward_block(group, members, first);
    for (int m = 0; m < members; m++)
        end_head(group + m);
}

#endif
