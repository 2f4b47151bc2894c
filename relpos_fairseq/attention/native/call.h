/* One attention call; `call.py` mirrors it field by field.
 *
 * Fields have the names of `PositionTerms`, with one exception: `static` is a word of C, and is
 * `static_` here.  A gradient is its operand's name after a `d`.
 *
 * Heads are numbered n = 0 .. N - 1, N = batch * heads.  The distance of query i and key j is
 * d = j - i, counted between slots.  A table of scalars has one number for each of the
 * `span` = tgt + src - 1 distances, lowest first.  A table of vectors has `width` rows, for the
 * distances low .. low + width - 1; where it is not `wide` its first and last row also stand for all
 * distances beyond them (a band between two tails), where it is it has a row for each distance.
 *
 *     content = scale * content_q.content_k          (or scale * sum_c q_c k_c trilinear_d,c)
 *     logits  = content * gate_d * (q.product_query_d) (k.product_key_d) + scale * content_offset.k
 *               + scale * (q.query_vectors_d + k.key_vectors_d)
 *               + static_d + query_factors_i.key_factors_j
 *     out_i   = sum_j probs_ij (v_j + value_vectors_d)
 *
 * where content_q is q and content_k is k unless given.  In the row and the column of the token `first`,
 * `reset` replaces what the kinds in `reset_kinds` add.
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

/* (H|1, rows[, channels]), contiguous rows; h is the stride of heads, 0 where they share a table. */
typedef struct {
    real *data;
    int64_t h;
} Table;

/* Kinds of what is added to the logits: query_vectors and key_vectors; static; factors. */
enum { RESET_VECTORS = 1, RESET_SCALARS = 2, RESET_FACTORS = 4 };

typedef struct {
    int64_t batch, heads, tgt, src;
    int64_t dim, value_dim, rank;  /* channels of q and k; of v; of factors */
    int64_t start;                 /* slot of the first query */
    int64_t first_head, all_heads; /* of a call evaluated in parts: its first head; how many there are */
    int64_t low, width, wide;      /* of tables of vectors */
    int64_t causal;                /* 1: no key in a query's future */
    int64_t window;                /* slots that a query sees, its own the last; 0: all */
    int64_t reset_kinds;           /* the kinds that a reset replaces; 8: none; 0: there is no reset */
    int64_t first_per_row;         /* `first` has a slot for each row of the batch */
    int64_t drop;                  /* of 65536 probabilities, how many are dropped */
    int64_t seed, threads;
    double scale;

    Tensor q, k, v, content_q, content_k;
    Tensor query_factors, key_factors; /* (B|1, H|1, tgt|src, rank) */
    Tensor out;
    Table content_offset;              /* (H|1, dim) */
    Table query_vectors, key_vectors;  /* (H|1, width, dim) */
    Table product_query, product_key;  /* (H|1, width, dim) */
    Table value_vectors;               /* (H|1, width, value_dim) */
    Table trilinear;                   /* (H|1, width, dim) */
    Table static_, gate;               /* (H|1, span) */
    Table reset;                       /* (H|1, 2) logits of the first token's row and of its column */
    const int64_t *first;              /* (batch|1,) slot of the reset's first token, or NULL */
    const uint8_t *padding;            /* (batch, src) 1 at excluded keys, or NULL */
    const int64_t *documents;          /* (batch, src), or NULL */
    real *top, *mass;                  /* (N, tgt) largest logit, and sum of exp(logit - top) */

    /* Gradients, all written whole; NULL where not wanted or where there is no such operand.  Two tables
     * that are one have one, at the same address: the sum. */
    Tensor dout;                                  /* given */
    Tensor dq, dk, dv, dcontent_q, dcontent_k;    /* as their operands */
    real *dquery_factors, *dkey_factors;          /* (groups * heads, tgt | src, rank) */
    real *dcontent_offset;                        /* (N, dim) */
    real *dquery_vectors, *dkey_vectors;          /* (N, width, dim) */
    real *dproduct_query, *dproduct_key;          /* (N, width, dim) */
    real *dvalue_vectors;                         /* (N, width, value_dim) */
    real *dtrilinear;                             /* (N, width, dim) */
    real *dstatic, *dgate;                        /* (N, span) */
    real *dreset;                                 /* (N, 2) */
} Call;

/* Return 0, or 1 where there is no memory for a thread's buffers. */
int relpos_forward(const Call *call);
int relpos_backward(const Call *call);
int64_t relpos_call_size(void);
/* Return how many groups the rows of the batch form: up to GROUP rows that share factors are one group,
 * other rows are a group each. */
int64_t relpos_groups(const Call *call);

#endif
