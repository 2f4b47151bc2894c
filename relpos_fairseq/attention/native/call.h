/* What one attention call is made of; `call.py` mirrors it field by field.
 *
 * Head n of N = batch * heads reads rows of its own.  Distances are j - i between slots; a table of
 * scalars has one number for each of the `span` = tgt + src - 1 distances, lowest first.  A table of
 * vectors has `width` rows, for the distances low .. low + width - 1: its ends stand for all beyond
 * (a band between two tails), or, where `wide`, it has a row for each distance.
 *
 *     content = cq.ck (or sum_c cq_c ck_c tri_d,c) * scale
 *     logits  = content * gate_d * (q.pq_d)(k.pk_d) + u.k scale + scale (q.aq_d + k.ak_d)
 *               + static_d + f_i . g_j
 *     out     = sum_j probs_ij (v_j + av_d)
 *
 * with cq = q, ck = k where they are not given.  A reset replaces what the kinds in `reset` add.
 */
#ifndef RELPOS_CALL_H
#define RELPOS_CALL_H

#include <stdint.h>

#ifdef RELPOS_DOUBLE
typedef double real;
#else
typedef float real;
#endif

/* (B, H, length, channels): strides in elements, 0 where broadcast; channels are contiguous. */
typedef struct {
    real *data; /* NULL: absent */
    int64_t b, h, t;
} Tensor;

/* (H|1, rows[, channels]), contiguous rows; h is the stride of heads, 0 where they share. */
typedef struct {
    real *data;
    int64_t h;
} Table;

enum { RESET_VECTORS = 1, RESET_SCALARS = 2, RESET_FACTORS = 4 };

typedef struct {
    int64_t batch, heads, tgt, src;
    int64_t dim, value_dim, rank; /* channels of q, k; of v; of f, g */
    int64_t start;                /* slot of the first query */
    int64_t first_head, all_heads; /* of a call that is evaluated in parts: its first, its number */
    int64_t low, width, wide;     /* of tables of vectors */
    int64_t causal;               /* 1: no key in a query's future */
    int64_t window;               /* slots that a query sees, its own the last; 0: all */
    int64_t reset, first_per_row; /* kinds that a reset replaces (8: none); is `first` (batch,)? */
    int64_t drop;                 /* of 65536 probabilities, how many are dropped */
    int64_t seed, threads;
    double scale;

    Tensor q, k, v, cq, ck, f, g, out;
    Table u;                  /* (H|1, dim) */
    Table aq, ak, pq, pk;     /* (H|1, width, dim) */
    Table av;                 /* (H|1, width, value_dim) */
    Table tri;                /* (H|1, width, dim) */
    Table fixed, gate;        /* (H|1, span) static scalars; gates */
    Table theta;              /* (H|1, 2) logits of the reset's row and column */
    const int64_t *first;     /* (batch|1,) slot of the reset's first token, or NULL */
    const uint8_t *padding;   /* (batch, src) 1 at excluded keys, or NULL */
    const int64_t *documents; /* (batch, src), or NULL */
    real *top, *mass;         /* (N, tgt) largest logit, and sum of exp(logit - top) */

    /* Gradients, all written whole; NULL where not wanted or where there is no such operand. */
    Tensor dout;                      /* given */
    Tensor dq, dk, dv, dcq, dck;      /* as their operands */
    real *df, *dg;                    /* (groups * heads, tgt, rank), (groups * heads, src, rank) */
    real *du;                         /* (N, dim) */
    real *daq, *dak, *dpq, *dpk;      /* (N, width, dim) */
    real *dav;                        /* (N, width, value_dim) */
    real *dtri;                       /* (N, width, dim) */
    real *dfixed, *dgate;             /* (N, span) */
    real *dtheta;                     /* (N, 2) */
} Call;

/* 0, or 1 where there is no memory for a thread's buffers. */
int relpos_forward(const Call *call);
int relpos_backward(const Call *call);
int64_t relpos_call_size(void);
/* Rows of the batch that share f and g are taken in groups; others are a group each. */
int64_t relpos_groups(const Call *call);

#endif
